"""A backend belongs to the process that opened it."""

from __future__ import annotations

import errno as E
import os
from collections.abc import Callable
from typing import TypeVar

from mcast.api import Closeable, Closed, McastError, Phase, Refused, SignalSafeWeakSet, mcast_error

T = TypeVar("T")


class Process:
    """The process that opened a backend.

    A fork shares the device files, but not the queues, so a call from the child would destroy the parent's
    queue pairs.
    """

    def __init__(self) -> None:
        self.pid: int = os.getpid()
        self.is_here = True
        _opened.add(self)

    def refusal(self, call: str, phase: Phase) -> McastError:
        """EBADF, for a call in a fork."""
        detail = (
            f"opened in process {self.pid}, used in its fork {os.getpid()}: open the backend in the "
            "process that uses it (multiprocessing: start method 'spawn')"
        )
        return mcast_error(E.EBADF, call, phase, None, detail)


_opened: SignalSafeWeakSet[Process] = SignalSafeWeakSet()


def _note_fork() -> None:
    for process in _opened:
        process.is_here = False


os.register_at_fork(after_in_child=_note_fork)


class OwnedByProcess(Closeable):
    """Asks for the right process where the contract asks whether the object is open."""

    _strict = True
    process: Process

    def _require_open(self, call: str, phase: Phase) -> None:
        if self._closed or not self.process.is_here:
            super()._require_open(call, phase)
            raise self.process.refusal(call, phase)

    def _require_whole(self, call: str, phase: Phase) -> None:
        """Raise unless the object is open and whole; the caller holds its lock."""
        self._require_open(call, phase)
        if self._guard.amid:
            self._guard.refuse(call, phase)

    def _if_open(self, call: str, phase: Phase, hook: Callable[..., T], *args: object, **kwargs: object) -> T:
        if self._closed:
            raise Refused(Closed(type(self).__name__, call, phase))
        if not self.process.is_here:
            raise Refused(self.process.refusal(call, phase))
        return hook(*args, **kwargs)
