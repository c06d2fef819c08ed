"""A descriptor that is readable while something is there."""

from __future__ import annotations

import os


class Readiness:
    """An eventfd, for poll, select and asyncio."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._shown = False

    def show(self, readable: bool) -> None:
        """Make the descriptor readable, or not."""
        if readable != self._shown:
            self._shown = readable
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
