"""The thread of a backend: an epoll loop that calls the backend when its kernel or RoCE socket is readable.

The backend then reads what the kernel reports of interfaces, and forwards unicast to the queue pairs of this
and of other processes. The thread moves no message that a call of the program could move.
"""

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
_POLL_INTERVAL = 60.0
"""Seconds after which the thread looks whether its backend still exists."""


class Watcher:
    """Thread that calls `on_readable` with the descriptors that are readable.

    From `start` on, while its object exists and is not closed.
    """

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

    def leave_to_parent(self) -> None:
        """Close this process's descriptor, in the child of a fork, where the thread does not run."""
        self._epoll.close()

    def close(self) -> None:
        """Have the thread end, which then closes what is its own. Idempotent."""
        with self._closing, suppress(FileExistsError):
            if not self._epoll.closed:
                self._epoll.register(ALWAYS, select.EPOLLIN)


def _run(
    epoll: select.epoll, closing: threading.Lock, callback_ref: WeakMethod[Callable[[list[int]], None]]
) -> None:
    try:
        while True:
            found = [descriptor for descriptor, _ in epoll.poll(_POLL_INTERVAL)]
            callback = callback_ref()
            if callback is None or ALWAYS in found:
                return
            callback(found)
            del callback
    except Exception:  # the backend was broken by an interrupted change, and its calls say so
        logger.debug("the thread of a udp backend has ended", exc_info=True)
    finally:
        with closing:
            epoll.close()
