"""One cause of an errno, and where an error happened."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from mcast.wire.kinds import LinkLayer

ENOTSUPP = 524
"""The kernel's internal 'not supported', which has no name in libc or Python (K-FABRIC-1)."""


class Phase(Enum):
    """Step in the life of a group in which an error happened."""

    OPEN = "open"
    BIND = "bind"
    RESOLVE = "resolve"
    CREATE_QP = "create_qp"
    JOIN = "join"
    LEAVE = "leave"
    DESTROY = "destroy"
    ATTACH = "attach"
    DETACH = "detach"
    MODIFY = "modify"
    EVENT = "event"
    SEND = "send"
    RECV = "recv"
    REGISTER = "register"
    CLOSE = "close"


class Cause(NamedTuple):
    """One possible cause of an error.

    why        cause, a sentence
    check      command or Python expression that shows whether it is this cause
    next_step  next step
    """

    why: str
    check: str
    next_step: str

    def shown(self, sure: str) -> str:
        """Return the lines that show it; `sure` is "found" or "likely"."""
        return f"  {sure}: {self.why} -> {self.next_step}\n    check: {self.check}"


class Row(NamedTuple):
    """A cause, and the errors that it can be the cause of.

    phase       the phase of the error; None: every phase
    errno       the errno of the error
    source      where this is known from: clauses, facts (docs/facts), a guard, a page, the kernel's source
    calls       the only calls, or types of an event, that fail with it; () for every call of the phase
    link_layer  the only link layer where it happens; None for both
    status      the name of the only SaStatus (of a join) or WcStatus (of an EIO) that it goes with; "" for
                any
    only        why no simulated fabric shows it; "" if one does
    """

    phase: Phase | None
    errno: int
    cause: Cause
    source: str
    calls: tuple[str, ...] = ()
    link_layer: LinkLayer | None = None
    status: str = ""
    only: str = ""
