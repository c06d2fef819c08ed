"""A provider before it is opened: whether it can run here, how it is opened and tested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from mcast.contract.backend import Backend
from mcast.contract.testbed import Testbed
from mcast.errors.finding import Finding
from mcast.errors.tree import UnavailableReason


class Status(NamedTuple):
    """Whether a backend can run here; else the reason and the one-line fix."""

    available: bool
    detail: str
    reason: UnavailableReason | None = None
    fix: str = ""


class Provider(NamedTuple):
    """A provider as the registry and the entry-point group `mcast.backends` know it.

    status   asks, without side effects, whether it can run here
    open     opens it; keyword options are its own; raises BackendUnavailable
    testbed  opens it with what the conformance suite needs (mcast.contract.testbed)
    checks   looks at this host, changing nothing, and says of each thing the provider needs how it is;
             takes the seconds that it may listen for what only the network can tell, 0 for none
    """

    name: str
    summary: str
    status: Callable[[], Status]
    open: Callable[..., Backend]
    testbed: Callable[[], AbstractContextManager[Testbed]]
    checks: Callable[[float], Sequence[Finding]] = lambda listen: ()
