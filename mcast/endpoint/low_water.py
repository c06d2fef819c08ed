"""When to report that the receive queue runs low."""

from __future__ import annotations


class LowWater:
    """How few of `depth` receives may be free until the user is told, and how often to look.

    An eighth: a sender of objects keeps three quarters of a queue filled (`mcast.cast.nack.rate.Window`), to
    which some answers of the other members come. That is as it should be.
    """

    def __init__(self, depth: int) -> None:
        self._warn_at = depth // 8
        self._every = self._left = depth // 4

    def is_due(self, messages: int) -> bool:
        """Whether to look at the queue now that so many messages more were received.

        A queue that has run low had three quarters of its depth in messages, all of which are received later:
        to look once in a quarter is enough.
        """
        self._left -= messages
        if self._left > 0:
            return False
        self._left = self._every
        return self._warn_at > 0

    def has_fallen(self, free: int) -> bool:
        """Whether to report that only `free` receives were free at some time.

        The next report comes at half as many.
        """
        if free >= self._warn_at:
            return False
        self._warn_at = free // 2
        return True
