"""The thread of a backend: it hears what the kernel reports of interfaces, and passes unicast on to the queue
pairs of this and of other processes. It moves no message that a call of the program could move."""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakMethod

from mcast.backends.net.readiness import ALWAYS

logger: logging.Logger = logging.getLogger("mcast")

NAME = "mcast-udp"
_LOOK = 60.0
"""Seconds after which the thread looks whether its backend still exists."""


class Watcher:
    """Calls `turn` with the descriptors that are readable, from `start` on, for as long as its object exists
    and it is not closed."""

    def __init__(self, turn: Callable[[list[int]], None]) -> None:
        self._epoll = select.epoll()
        self._closing = threading.Lock()
        """Held while the descriptor is used by `close`, or closed: its number may then be another's."""
        self._thread = threading.Thread(
            target=_run, args=(self._epoll, self._closing, WeakMethod(turn)), name=NAME, daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, descriptor: int) -> None:
        """Look at that one, too."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def close(self) -> None:
        """Have the thread end, which then closes what is its own. Idempotent."""
        with self._closing, suppress(FileExistsError):
            if not self._epoll.closed:
                self._epoll.register(ALWAYS, select.EPOLLIN)


def _run(
    epoll: select.epoll, closing: threading.Lock, turn_of: WeakMethod[Callable[[list[int]], None]]
) -> None:
    try:
        while True:
            found = [descriptor for descriptor, _ in epoll.poll(_LOOK)]
            turn = turn_of()
            if turn is None or ALWAYS in found:
                return
            turn(found)
            del turn
    except Exception:  # the backend was broken by an interrupted change, and its calls say so
        logger.debug("the thread of a udp backend has ended", exc_info=True)
    finally:
        with closing:
            epoll.close()
