"""How the server and its clients wait for descriptors, what the server does when one of them is ready, and
what a call says that gets none.
"""

from __future__ import annotations

import errno as E
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from mcast.api import McastError, Phase, mcast_error
from mcast.interrupts import readable_soon

LOOK = 200e-6
"""A wait that looks before it sleeps looks for so many seconds at most."""
SHORT = 2 * LOOK
"""A wait that took less is a short one. The others of a round trip may have slept in it."""
PAUSE, LONGEST_PAUSE = 0.001, 0.05
"""For so many seconds nobody looks once others have kept the processor for longer than SHORT. The pause is
twice as long each time that this happens again soon, up to the longest."""

T = TypeVar("T")


class Waits:
    """Waits of one loop, each of which looks again and again before it sleeps if the one before was short.

    To sleep, and to be woken on a processor that has gone to sleep too, takes longer than the rest of a round
    trip. Between two looks another process gets the processor. If one keeps it again and again, there is work
    enough, no processor sleeps, and looking would only take turns away.
    """

    def __init__(self) -> None:
        self._was_short = False
        self._pause = PAUSE
        self._looks_from = 0.0

    def until(self, sleep: Callable[[], T], *descriptors: int) -> T | None:
        """What `sleep` returns, which ends when one of the descriptors is readable; None if a look has found
        one.
        """
        begun = time.monotonic()
        found = False
        if self._was_short and begun >= self._looks_from:
            found = readable_soon(LOOK, *descriptors)
            if (looked := time.monotonic()) > begun + SHORT:
                is_again = begun < self._looks_from + LONGEST_PAUSE
                self._pause = min(2 * self._pause, LONGEST_PAUSE) if is_again else PAUSE
                self._looks_from = looked + self._pause
        slept = None if found else sleep()
        self._was_short = time.monotonic() < begun + SHORT
        return slept


class ServerWatch:
    """An epoll, and what to call for each of its descriptors.

    Not one of `selectors`, which makes several objects for each event: that takes as long as a message.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._fd = self._epoll.fileno()
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
        calls, epoll = self._calls, self._epoll
        ready = self._waits.until(epoll.poll, self._fd)
        if ready is None:
            ready = epoll.poll(0)
        return [calls[fd] for fd, _ in ready if fd in calls]

    def close(self) -> None:
        self._epoll.close()
        self._calls.clear()


@contextmanager
def needs_descriptors(whose: str, call: str, phase: Phase) -> Iterator[None]:
    """Raise the McastError of the call where the block gets no descriptor; `whose` says which process has
    as many as it may.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, McastError):
            raise
        detail = f"{whose} has no descriptor left: {error.strerror}"
        raise mcast_error(error.errno or E.EMFILE, call, phase, None, detail) from None
