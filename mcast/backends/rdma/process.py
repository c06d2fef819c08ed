"""A backend belongs to the process that opened it."""

from __future__ import annotations

import errno as E
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mcast.api import Phase, _Closeable, mcast_error


class Process:
    """The process that opened a backend.

    A fork shares its device files, not its queues: a call from there would take the parent's QPs apart.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_here(self) -> bool:
        return self.pid == os.getpid()

    def require(self, call: str, phase: Phase) -> None:
        """Raise EBADF in a fork."""
        if not self.is_here:
            detail = (
                f"opened in process {self.pid}, used in its fork {os.getpid()}: open the backend in the "
                "process that uses it (multiprocessing: start method 'spawn')"
            )
            raise mcast_error(E.EBADF, call, phase, None, detail)


class OwnedByProcess(_Closeable):
    """Asks for the right process where the contract asks whether the object is open."""

    process: Process

    def _require_open(self, call: str, phase: Phase) -> None:
        super()._require_open(call, phase)
        self.process.require(call, phase)


class Shared(OwnedByProcess):
    """Used by several threads: what a call needs is not freed while it runs."""

    lock: threading.RLock

    @contextmanager
    def _in_use(self, call: str, phase: Phase) -> Iterator[None]:
        """Hold the lock that closing takes, and be sure that the object is still open."""
        with self.lock:
            self._require_open(call, phase)
            yield
