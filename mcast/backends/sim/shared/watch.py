"""What the loop of the server waits for: descriptors, and what is done when one of them is ready."""

from __future__ import annotations

import select
from collections.abc import Callable


class ServerWatch:
    """An epoll, and what to call for each of its descriptors.

    Not one of `selectors`, which makes several objects for each event: that takes as long as a message.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[], object]] = {}

    def add(self, fd: int, call: Callable[[], object], events: int = select.EPOLLIN) -> None:
        """Call it whenever the descriptor is ready. Raises OSError."""
        self._epoll.register(fd, events)
        self._calls[fd] = call

    def remove(self, fd: int) -> None:
        """The descriptor is about to be closed, or concerns nobody now."""
        del self._calls[fd]
        self._epoll.unregister(fd)

    def wait(self) -> list[Callable[[], object]]:
        """Sleep until descriptors are ready: what is to be called for them, in order."""
        calls = self._calls
        return [calls[fd] for fd, _ in self._epoll.poll() if fd in calls]

    def close(self) -> None:
        self._epoll.close()
        self._calls.clear()
