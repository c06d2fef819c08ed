"""The ranks of an mpi4py communicator.

Each call of MPI has a deadline of its own: a rank that stands still ends it, and a slow network does not.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from mcast.collective.communicator import wait_for

if TYPE_CHECKING:
    from mpi4py import MPI

_MAX_PAUSE = 0.0001
"""The longest pause between two looks at a broadcast, in seconds: MPI moves bytes in these calls alone."""


class MpiRanks:
    """Implementation of `Communicator`. Raises TypeError if `comm` is no communicator of mpi4py."""

    library: str = "MPI"

    def __init__(self, comm: MPI.Comm) -> None:
        if not hasattr(comm, "Get_rank"):
            raise TypeError(
                f"{comm!r} is neither an mpi4py communicator nor a torch.distributed group that this process "
                "is in: give MPI.COMM_WORLD, or torch.distributed.group.WORLD after init_process_group()"
            )
        self._comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()

    def copy(self, bound: float) -> MpiRanks:
        copy, request = self._comm.Idup()
        wait_for(request.Test, bound, copy)
        return MpiRanks(copy)

    def maximum(self, values: Sequence[int], bound: float) -> Sequence[int]:
        from mpi4py import MPI

        mine, most = array("q", values), array("q", bytes(8 * len(values)))
        request = self._comm.Iallreduce([mine, MPI.INT64_T], [most, MPI.INT64_T], MPI.MAX)
        wait_for(request.Test, bound, mine, most)
        return most

    def allgather(self, mine: bytes, bound: float) -> bytes:
        from mpi4py import MPI

        whole = bytearray(len(mine) * self.size)
        request = self._comm.Iallgather([mine, MPI.BYTE], [whole, MPI.BYTE])
        wait_for(request.Test, bound, mine, whole)
        return bytes(whole)

    def broadcast(self, part: memoryview, root: int, bound: float) -> None:
        wait_for(self._comm.Ibcast(part, root).Test, bound, part, max_pause=_MAX_PAUSE)

    def attributes(self) -> dict[str, Any]:
        found: Any = self._comm.Get_attr(_key())
        if found is None:
            found = dict[str, Any]()
            self._comm.Set_attr(_key(), found)
        kept: dict[str, Any] = found
        return kept

    def free(self) -> None:
        self._comm.Free()  # waits for nobody in MPICH and Open MPI


@cache
def _key() -> int:
    """Return the key of the attributes."""
    from mpi4py import MPI

    return MPI.Comm.Create_keyval()
