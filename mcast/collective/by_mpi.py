"""The same over MPI's own messages, where no multicast is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

_MOST = 1 << 30
"""The most bytes of one call: MPI before version 4 counts in C's int."""


def broadcast(comm: MPI.Comm, view: memoryview, root: int) -> None:
    """Send the root's bytes, and fill the others'."""
    for at in range(0, len(view), _MOST):
        comm.Bcast(view[at : at + _MOST], root)


def allgather(comm: MPI.Comm, parts: Sequence[memoryview], whole: memoryview) -> None:
    """Fill each part with the bytes of its rank; this rank's own is there. The parts make up the whole."""
    from mpi4py import MPI

    if len(whole) <= _MOST:
        comm.Allgatherv(MPI.IN_PLACE, [whole, [len(part) for part in parts], MPI.BYTE])
        return
    for rank, part in enumerate(parts):
        broadcast(comm, part, rank)
