"""A descriptor that is readable while something is there."""

from __future__ import annotations

import os
import select
from collections.abc import Callable

from mcast.backends.sim.clock import Clock

_READY = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
"""Always readable."""


class Readiness:
    """A descriptor for poll, select and asyncio; `is_ready` says whether something is there.

    It is that of an epoll object, which is readable while it watches one that is. Such an object closes its
    descriptor when it is dropped, without Python code, in which an exception would be lost.
    """

    def __init__(self, clock: Clock, is_ready: Callable[[], bool]) -> None:
        self._epoll = select.epoll()
        self.fd: int = self._epoll.fileno()
        self._is_ready = is_ready
        self._readable = False
        clock.descriptor_requested()
        self.update()

    def update(self) -> None:
        """Look, and make the descriptor readable or not."""
        readable = self._is_ready()
        if readable != self._readable:
            self._readable = readable
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
