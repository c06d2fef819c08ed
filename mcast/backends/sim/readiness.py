"""A descriptor that is readable while something is there."""

from __future__ import annotations

import os
from collections.abc import Callable

from mcast.backends.sim.clock import Clock


class Readiness:
    """An eventfd, for poll, select and asyncio; `look` says whether something is there."""

    def __init__(self, clock: Clock, look: Callable[[], bool]) -> None:
        self.fd: int = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._look = look
        self._shown = False
        clock.want_descriptor()
        self.show()

    def show(self) -> None:
        """Look, and make the descriptor readable or not."""
        readable = self._look()
        if self.fd >= 0 and readable != self._shown:
            self._shown = readable
            self._mark(readable)

    def _mark(self, readable: bool) -> None:
        if readable:
            os.eventfd_write(self.fd, 1)
        else:
            os.eventfd_read(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()
