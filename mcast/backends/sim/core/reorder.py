"""Messages that are held back until later ones have passed them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from mcast.backends.model.qp import Burst


@dataclass(slots=True, eq=False)
class HeldMessage:
    """A message that is held back."""

    burst: Burst
    waits: bool = True


class ReorderQueue:
    """The messages held back for a QP; `waiting` says how many still are."""

    def __init__(self) -> None:
        self.waiting: int = 0
        self._passed = 0
        self._added = count()
        self._heap: list[tuple[int, int, HeldMessage]] = []  # by the number of messages that pass before it

    def add(self, after: int, burst: Burst) -> HeldMessage:
        """Hold a message back until `after` others have passed."""
        held = HeldMessage(burst)
        heappush(self._heap, (self._passed + after, next(self._added), held))
        self.waiting += 1
        return held

    def pass_one(self) -> Iterator[HeldMessage]:
        """Count a message that has passed; return those that have waited for it."""
        self._passed += 1
        while self._heap and self._heap[0][0] <= self._passed:
            yield heappop(self._heap)[2]
