"""A descriptor that is readable while something is there, in this process or at a socket."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress

ALWAYS: int = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
"""A descriptor that is always readable."""


class Readiness:
    """A descriptor for poll, select and asyncio; `poll` says whether something is there in this process.

    It is that of an epoll object, which is readable while it watches a descriptor that is. Such an object
    closes its own when it is dropped, without Python code, in which an exception would be lost.
    """

    def __init__(self, poll: Callable[[], bool]) -> None:
        self._epoll = select.epoll()
        self.fd: int = self._epoll.fileno()
        self._poll = poll
        self.shown: bool = False

    def watch(self, descriptor: int) -> None:
        """Be readable while that one is, until it is closed."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def show(self) -> None:
        """Poll, and make the descriptor readable or not."""
        readable = self._poll()
        if readable != self.shown:
            self.shown = readable
            self._mark(readable)

    def _mark(self, readable: bool) -> None:
        if self._epoll.closed:
            return
        with suppress(FileExistsError, FileNotFoundError):  # where the last call was interrupted here
            if readable:
                self._epoll.register(ALWAYS, select.EPOLLIN)
            else:
                self._epoll.unregister(ALWAYS)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        self._epoll.close()
