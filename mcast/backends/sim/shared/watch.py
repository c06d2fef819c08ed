"""How the server and its clients wait for descriptors, and what the server does when one of them is ready."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

LOOK_NS = 200_000
"""A wait that looks before it sleeps looks so long at most."""
SHORT_NS = 2 * LOOK_NS
"""A wait that took less is a short one. The others of a round trip may have slept in it."""

Found = list[tuple[int, int]]
"""Descriptors and their events."""


class Waits:
    """Waits of one loop, each of which looks again and again before it sleeps if the one before was short.

    To sleep, and to be woken on a processor that has gone to sleep too, takes longer than the rest of a round
    trip. Another process that wants the processor gets it between two looks.
    """

    def __init__(self) -> None:
        self._was_short = False

    def until(self, look: Callable[[], Found], sleep: Callable[[], Found]) -> Found:
        """What `look` finds in a moment, or else what `sleep` returns."""
        begun = time.monotonic_ns()
        found: Found = []
        while self._was_short and not (found := look()) and time.monotonic_ns() < begun + LOOK_NS:
            os.sched_yield()
        found = found or sleep()
        self._was_short = time.monotonic_ns() < begun + SHORT_NS
        return found


class ServerWatch:
    """An epoll, and what to call for each of its descriptors.

    Not one of `selectors`, which makes several objects for each event: that takes as long as a message.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[], object]] = {}
        self._waits = Waits()

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
        calls, poll = self._calls, self._epoll.poll
        return [calls[fd] for fd, _ in self._waits.until(lambda: poll(0), poll) if fd in calls]

    def close(self) -> None:
        self._epoll.close()
        self._calls.clear()
