"""Time limits, in slices: no call into C lasts longer than one, so Ctrl-C and close get their turn."""

from __future__ import annotations

import threading
from time import monotonic
from types import TracebackType

SLICE = 1.0
"""Seconds; bounds how long a signal goes unseen that another thread took, or that slips in just before a
sleep, and an ERR with no receive posted, which nothing tells of. Other signals, and close, end a sleep."""


class Deadline:
    """`timeout` seconds from now; None is never."""

    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else monotonic() + timeout

    def over(self, grace: float = 0) -> bool:
        """Whether it passed, `grace` seconds ago or more."""
        return self._end is not None and monotonic() >= self._end + grace

    def left(self) -> float | None:
        """Seconds, not below 0; None for never."""
        return None if self._end is None else max(0.0, self._end - monotonic())

    def slice_ns(self) -> int:
        """Nanoseconds until the deadline, at most a slice."""
        left = self.left()
        return int((SLICE if left is None else min(left, SLICE)) * 1e9)


class held:  # noqa: N801
    """`with held(lock, deadline) as mine`: hold the lock, or give False when the deadline came first."""

    __slots__ = ("_deadline", "_lock", "_mine")

    def __init__(self, lock: threading.RLock, deadline: Deadline) -> None:
        self._lock, self._deadline, self._mine = lock, deadline, False

    def __enter__(self) -> bool:
        left = self._deadline.left()
        self._mine = self._lock.acquire(timeout=-1 if left is None else left)
        return self._mine

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mine:
            self._lock.release()
