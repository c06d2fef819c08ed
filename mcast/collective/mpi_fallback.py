"""Collectives over MPI's own messages, where multicast cannot be used.

Each call of MPI has a deadline of its own: a rank that stands still ends it, and a slow network does not.
"""

from __future__ import annotations

from mcast.collective.agreement import Ranks, wait_for

MAX_PART = 1 << 26
"""The most bytes of one call of MPI."""

_MAX_PAUSE = 0.0001
"""The longest pause between two looks at a request, in seconds: MPI moves bytes in these calls alone."""


def broadcast(ranks: Ranks, view: memoryview, root: int, bound: float) -> None:
    """Send the root's bytes, and fill the others'.

    Raises TimeoutError if one of the parts takes more than `bound` seconds.
    """
    for at in range(0, len(view), MAX_PART):
        wait_for(ranks.comm.Ibcast(view[at : at + MAX_PART], root), bound, view, max_pause=_MAX_PAUSE)
