"""When to report that the receive queue runs low."""

from __future__ import annotations

from mcast.endpoint.waiting import BATCH


class LowWater:
    """How few of `depth` receives may be free until the user is told, and how often to look."""

    def __init__(self, depth: int) -> None:
        self._warn_at = depth // 4
        self.backlog: int = min(BATCH, self._warn_at)
        """A batch of so many messages, or as many single ones, are a reason to look at the queue."""

    def has_fallen(self, free: int) -> bool:
        """Whether to report that only `free` receives were free at some time.

        The next report comes at half as many.
        """
        if free >= self._warn_at:
            return False
        self._warn_at = free // 2
        self.backlog = min(BATCH, self._warn_at)
        return True
