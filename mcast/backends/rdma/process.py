"""A backend belongs to the process that opened it."""

from __future__ import annotations

import errno as E
import os
from types import TracebackType

from mcast.api import Closeable, Phase, mcast_error
from mcast.interrupts import Alive, Lock, uninterrupted


class Process:
    """The process that opened a backend.

    A fork shares the device files, but not the queues, so a call from the child would destroy the parent's
    queue pairs.
    """

    def __init__(self) -> None:
        self.pid: int = os.getpid()
        self.is_here = True
        _opened.add(self)

    def require(self, call: str, phase: Phase) -> None:
        """Raise EBADF in a fork."""
        if not self.is_here:
            detail = (
                f"opened in process {self.pid}, used in its fork {os.getpid()}: open the backend in the "
                "process that uses it (multiprocessing: start method 'spawn')"
            )
            raise mcast_error(E.EBADF, call, phase, None, detail)


_opened: Alive[Process] = Alive()


def _note_fork() -> None:
    for process in _opened:
        process.is_here = False


os.register_at_fork(after_in_child=_note_fork)


class OwnedByProcess(Closeable):
    """Asks for the right process where the contract asks whether the object is open."""

    process: Process

    def _require_open(self, call: str, phase: Phase) -> None:
        if self._closed or not self.process.is_here:
            super()._require_open(call, phase)
            self.process.require(call, phase)


class Shared(OwnedByProcess):
    """Base of objects that several threads use: nothing that a call needs is freed while the call runs."""

    lock: Lock
    locked: uninterrupted
    """A context that holds the lock, and that no signal ends half-way."""

    def _in_use(self, call: str, phase: Phase) -> InUse:
        """Hold the lock that closing takes, and be sure that the object is still open."""
        return InUse(self, call, phase)


class InUse:
    """A context that holds the lock, and in which the object is open."""

    __slots__ = ("_call", "_phase", "_shared")

    def __init__(self, shared: Shared, call: str, phase: Phase) -> None:
        self._shared, self._call, self._phase = shared, call, phase

    def __enter__(self) -> None:
        self._shared.locked.__enter__()
        try:
            self._shared._require_open(self._call, self._phase)
        except BaseException as error:
            self._shared.locked.__exit__(type(error), error, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shared.locked.__exit__(kind, error, trace)
