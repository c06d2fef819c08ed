"""Carousel of a receiver: which of its objects have ended here, which blocks are incomplete, when to give up.

A carousel is one or more objects with consecutive numbers, whose sender repeats all of their segments in
cycles and expects no answer. `ObjectReceiver` has one `IncomingObject` for each object that is incomplete
here; all of them share the `Carousel`, whose `PartialBlocks` bounds their memory: a block that is dropped
arrives again in the next cycle.

A receiver cannot ask for anything, so it counts. It gives an object up after MAX_FRUITLESS_CYCLES times its
segments without a new block, or after MAX_FRUITLESS_OFFERS invitations without any segment, and after `stall`
seconds at least. Objects that were never described are given up together, on the same terms.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import inf
from typing import Protocol

from mcast.cast.protocol.packets import Describe

MAX_FRUITLESS_CYCLES = 32
"""Maximum cycles without a new block, counted by the segments that arrive.

So at any loss rate, a segment that each cycle sends has arrived by then with a probability of 1 - e**-32.
"""
MAX_FRUITLESS_OFFERS = 600
"""Maximum OFFERs in a row without a segment. At most one message in four of a sender goes with an OFFER."""


class Carousel:
    """State that the objects of one carousel share at a receiver: `count` objects from number `first` on."""

    def __init__(self, about: Describe, window: int, now: float) -> None:
        self.first: int = about.object - about.position
        self.count: int = about.carousel
        self.invited: int = 0
        """Number of OFFERs since the last segment."""
        self.given_up: bool = False
        """True if the objects that were never described are given up."""
        self.partial_blocks: PartialBlocks = PartialBlocks(window)
        """Incomplete blocks of all objects."""
        self._ended, self._seen = _BitSet(self.count), _BitSet(self.count)
        self._current, self._unproductive = -1, 0
        self._last_progress = now

    def contains(self, about: Describe) -> bool:
        """Return True if the object is one of this carousel."""
        return about.carousel == self.count and about.object - about.position == self.first

    def is_before_end(self, number: int) -> bool:
        """Return True if that number is of this carousel or an earlier one."""
        return number < self.first + self.count

    # --- events ----------------------------------------------------------------------------------

    def described(self, number: int, now: float) -> bool:
        """Note a DESCRIBE of an object, and return True unless the object has ended here."""
        self._unproductive += number != self._current
        self._current = number
        if self._seen.add(number - self.first):
            self.on_progress(now)
        return number - self.first not in self._ended

    def on_progress(self, now: float) -> None:
        """Restart the count of cycles: a block was verified, or an object described for the first time."""
        self._unproductive, self._last_progress = 0, now

    def on_end(self, number: int) -> None:
        """Note that an object is complete here, or was given up."""
        self._ended.add(number - self.first)

    def on_sender_resumed(self, now: float) -> None:
        """Restart all counts, because a silent sender is heard again."""
        self.invited = 0
        self.on_progress(now)

    @property
    def finished(self) -> bool:
        """True if all objects have ended here, or the rest is given up."""
        return self.given_up or self._ended.count >= self.count

    @property
    def hopeless(self) -> bool:
        """True if too many cycles or invitations brought nothing new."""
        return self._unproductive >= MAX_FRUITLESS_CYCLES * self.count or self.invited >= MAX_FRUITLESS_OFFERS

    def due(self, stall: float) -> float:
        """Return when to give up objects that were never described; inf if that is not to be expected.

        stall  minimum seconds without progress
        """
        unseen = self.hopeless and self._seen.count < self.count and not self.given_up
        return self._last_progress + stall if unseen else inf


class _BitSet:
    """Set of integers below `limit`, one bit each: a driver stores one for each of many silent senders."""

    __slots__ = ("_bits", "count")

    def __init__(self, limit: int) -> None:
        self._bits = bytearray((limit + 7) // 8)
        self.count: int = 0

    def add(self, number: int) -> bool:
        """Add a number; return True if it was not in the set."""
        if number in self:
            return False
        self._bits[number >> 3] |= 1 << (number & 7)
        self.count += 1
        return True

    def __contains__(self, number: int) -> bool:
        return bool(self._bits[number >> 3] >> (number & 7) & 1)


class BlockHolder(Protocol):
    """Owner of incomplete blocks: `IncomingObject`."""

    number: int

    @property
    def base(self) -> int:
        """Number of the first block that is missing."""

    def is_verifying(self, block: int) -> bool:
        """Return True while the driver decodes and verifies the block."""

    def drop(self, block: int) -> None:
        """Drop all segments of the block."""


class PartialBlocks:
    """Incomplete blocks of all objects of a carousel, at most `window` of them, oldest first."""

    def __init__(self, window: int) -> None:
        self._limit = window
        self._blocks: dict[tuple[int, int], BlockHolder] = {}

    def add(self, owner: BlockHolder, block: int) -> bool:
        """Add a block, and return True; False if there is no room.

        If the limit is reached, the newest block but one is dropped. Older blocks are repeated soonest, and
        the newest one is still being sent.
        """
        if len(self._blocks) >= self._limit:
            newest = [*islice(self._droppable(), 2)]
            if newest:
                self._blocks[newest[-1]].drop(newest[-1][1])
            elif block != owner.base:  # exceed the limit for the first missing block: later ones wait for it
                return False
        self._blocks[owner.number, block] = owner
        return True

    def _droppable(self) -> Iterator[tuple[int, int]]:
        return (key for key, one in reversed(self._blocks.items()) if not one.is_verifying(key[1]))

    def discard(self, owner: BlockHolder, block: int) -> None:
        """Remove a block, because it is verified or dropped."""
        self._blocks.pop((owner.number, block), None)
