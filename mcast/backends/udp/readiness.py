"""A descriptor that is readable while something is there, in this process or at a socket."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress

ALWAYS: int = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
"""A descriptor that is always readable."""


class Readiness:
    """The descriptor of an epoll object, which is readable while it watches one that is.

    `look` says whether something is there in this process; sockets are watched besides.
    """

    def __init__(self, look: Callable[[], bool]) -> None:
        self._epoll = select.epoll()
        self.fd: int = self._epoll.fileno()
        self._look = look
        self.shown: bool = False

    def watch(self, descriptor: int) -> None:
        """Be readable while that one is, until it is closed."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def show(self) -> None:
        """Look, and make the descriptor readable or not."""
        readable = self._look()
        if readable != self.shown and not self._epoll.closed:
            self.shown = readable
            with suppress(FileExistsError, FileNotFoundError):  # where the last call was interrupted here
                if readable:
                    self._epoll.register(ALWAYS, select.EPOLLIN)
                else:
                    self._epoll.unregister(ALWAYS)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        self._epoll.close()
