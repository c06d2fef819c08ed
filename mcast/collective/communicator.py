"""Protocol of what a collective needs of the library that starts and numbers the ranks: exchanges of bytes.

`mcast.collective.mpi` fulfils it with mpi4py, `mcast.collective.torch_group` with torch.distributed; nothing
else here knows which it is. All exchanges are collective: every rank makes the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import py_object, pythonapi
from time import monotonic, sleep
from typing import Any, Protocol, Self

MAX_PAUSE = 0.001
"""The longest pause between two looks at whether all ranks have come, in seconds."""


class Communicator(Protocol):
    """Ranks of a job, as their library numbers and synchronises them.

    Each exchange raises TimeoutError if not all ranks have come within `bound` seconds, and ConnectionError
    if the library notices earlier that a rank has left.
    """

    library: str
    """Name of what carries the bytes where multicast cannot, for messages."""
    rank: int
    size: int

    def copy(self, bound: float) -> Self:
        """Return the same ranks, such that exchanges here never meet those of the original."""

    def maximum(self, values: Sequence[int], bound: float) -> Sequence[int]:
        """Return the largest of the ranks' values, at each index; they fit into 64 bits."""

    def allgather(self, mine: bytes, bound: float) -> bytes:
        """Return the bytes of all ranks one after another; they have the same size on each, more than 0."""

    def broadcast(self, part: memoryview, root: int, bound: float) -> None:
        """Send the root's bytes, and fill the others'."""

    def attributes(self) -> dict[str, Any]:
        """Return a dictionary that the communicator of the caller keeps as long as it exists."""

    def free(self) -> None:
        """Free a copy, on which nothing is under way."""


def wait_for(done: Callable[[], object], bound: float, *memory: object, max_pause: float = MAX_PAUSE) -> None:
    """Wait until an exchange is complete, which uses that memory; at most `bound` seconds.

    Raises TimeoutError; the exchange is abandoned then, and when something else is raised meanwhile.
    """
    # Blocking calls of MPI would keep a core busy until the last rank comes.
    end, pause = monotonic() + bound, 0.0
    try:
        while not done():
            if monotonic() > end:
                raise TimeoutError(
                    f"not all ranks took part within {bound:.3g} s: one has died, hangs or is late"
                )
            sleep(pause)
            pause = min(max_pause, pause + max_pause / 64)
    except BaseException:
        # MPI sends from the memory, and writes there, as long as the process lives: also in MPI_Finalize,
        # after Python has freed all else. Other ranks take what is there for the word of this one, and
        # mpi4py keeps no reference to it (4.1.2).
        pythonapi.Py_IncRef(py_object((done, memory)))
        raise
