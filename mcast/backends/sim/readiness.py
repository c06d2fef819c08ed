"""A descriptor that is readable while something is there."""

from __future__ import annotations

import os
import select
from collections.abc import Callable

from mcast.backends.sim.clock import Clock

_READY = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
"""Always readable."""


class Readiness:
    """A descriptor for poll, select and asyncio; `look` says whether something is there.

    It is that of an epoll object, which is readable while it watches one that is. Such an object closes its
    descriptor when it is dropped, without Python code, in which an exception would be lost.
    """

    def __init__(self, clock: Clock, look: Callable[[], bool]) -> None:
        self._epoll = select.epoll()
        self.fd: int = self._epoll.fileno()
        self._look = look
        self._shown = False
        clock.want_descriptor()
        self.show()

    def show(self) -> None:
        """Look, and make the descriptor readable or not."""
        readable = self._look()
        if readable != self._shown:
            self._shown = readable
            self._mark(readable)

    def _mark(self, readable: bool) -> None:
        if self._epoll.closed:
            return
        if readable:
            self._epoll.register(_READY, select.EPOLLIN)
        else:
            self._epoll.unregister(_READY)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        self._epoll.close()
