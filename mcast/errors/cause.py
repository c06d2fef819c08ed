"""One cause of an errno, and where an error happened."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from mcast.wire.kinds import LinkLayer

ENOTSUPP = 524
"""The kernel's internal 'not supported'; it has no name in libc or Python (K-FABRIC-1)."""


class Phase(Enum):
    """Where in the life of a group an error happened."""

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
    """One cause: why, a command or an expression that shows whether it is so, and what to do about it."""

    why: str
    check: str
    next_step: str


class Row(NamedTuple):
    """A cause, and what it is a cause of.

    phase       None: in every phase
    errno       what the stack answers
    source      where this is known from: clauses, facts (docs/facts), a guard, a page, the kernel's source
    calls       the only calls, or types of an event, that tell it; () for each of the phase
    link_layer  the only link layer it happens on; None for both
    status      name of the only SaStatus (of a join) or WcStatus (of an EIO) that it goes with; "" for any
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
