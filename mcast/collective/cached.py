"""Single calls: the collective of a communicator is made by the first, and kept until the program ends."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING

from typing_extensions import Buffer

from mcast.collective.calls import Collective, communicator
from mcast.collective.torch_group import ProcessGroup, Tensor
from mcast.errors import install

if TYPE_CHECKING:
    from mpi4py import MPI


def broadcast(
    buffer: Buffer | Tensor,
    root: int = 0,
    comm: MPI.Comm | ProcessGroup | None = None,
    backend: str = "rdma",
) -> None:
    """Broadcast among the ranks of `comm`, see `Collective.broadcast`; None: all ranks of the MPI job.

    Raises ImportError without mpi4py.
    """
    _of(comm, backend).broadcast(buffer, root)


def allgather(
    buffer: Buffer | Tensor,
    into: Buffer | Tensor | None = None,
    comm: MPI.Comm | ProcessGroup | None = None,
    backend: str = "rdma",
) -> list[memoryview]:
    """Gather from the ranks of `comm`, see `Collective.allgather`; None: all ranks of the MPI job.

    Raises ImportError without mpi4py.
    """
    return _of(comm, backend).allgather(buffer, into)


def _of(comm: MPI.Comm | ProcessGroup | None, backend: str) -> Collective:
    """The collective of a communicator, which remembers it; made anew where it has ended."""
    if comm is None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise ImportError(f"there is no mpi4py: {install.line('mpi')}") from error
        comm = MPI.COMM_WORLD
    kept: dict[str, Collective] = communicator(comm).attributes()
    if backend not in kept or kept[backend].ended:
        kept[backend] = Collective(comm, backend)
        atexit.register(kept[backend].abandon)
    return kept[backend]
