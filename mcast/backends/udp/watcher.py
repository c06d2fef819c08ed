"""The thread of a backend: it hears what the kernel reports of interfaces, and passes unicast on to the queue
pairs of this and of other processes. It moves no message that a call of the program could move."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from weakref import WeakMethod

logger: logging.Logger = logging.getLogger("mcast")

NAME = "mcast-udp"
_LOOK = 60.0
"""Seconds after which the thread looks whether its backend still exists."""


class Watcher:
    """Calls `turn` with the descriptors that are readable, for as long as its object exists and it is not
    closed."""

    def __init__(self, turn: Callable[[list[int]], None]) -> None:
        self._epoll = select.epoll()
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._stop, select.EPOLLIN)
        thread = threading.Thread(
            target=_run, args=(self._epoll, self._stop, WeakMethod(turn)), name=NAME, daemon=True
        )
        self._thread = thread
        self._closed = False
        thread.start()

    def add(self, descriptor: int) -> None:
        """Look at that one, too."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def close(self) -> None:
        """Have the thread end, which then closes what is its own. Idempotent."""
        if not self._closed:
            self._closed = True
            os.eventfd_write(self._stop, 1)


def _run(epoll: select.epoll, stop: int, turn_of: WeakMethod[Callable[[list[int]], None]]) -> None:
    try:
        while True:
            found = [descriptor for descriptor, _ in epoll.poll(_LOOK)]
            turn = turn_of()
            if turn is None or stop in found:
                return
            turn(found)
            del turn
    except Exception:  # the backend was broken by an interrupted change, and its calls say so
        logger.debug("the thread of a udp backend has ended", exc_info=True)
    finally:
        epoll.close()
        os.close(stop)
