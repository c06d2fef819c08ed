"""The objects that go round together, as one receiver knows them: what has ended here, what is in part."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import inf
from typing import Protocol

from mcast.cast.protocol.packets import Describe

MAX_FRUITLESS_CYCLES = 32
"""What goes round is given up when so many times its pieces were heard without one block more. Whatever part
of the messages is lost: a piece that each round brings has come by then, but for one time in e**32."""
MAX_FRUITLESS_OFFERS = 600
"""What goes round is given up, too, when so many invitations were heard and no piece between them: at most
one message in four of its sender's invites."""


class Carousel:
    """`count` objects, of which the first has the number `first`."""

    def __init__(self, about: Describe, window: int, now: float) -> None:
        self.first: int = about.object - about.position
        self.count: int = about.carousel
        self.invited: int = 0
        """How many invitations were heard since the last piece."""
        self.given_up: bool = False
        """Whether what has not ended here is not waited for any more."""
        self.partial_blocks: PartialBlocks = PartialBlocks(window)
        """Where blocks of all objects are that are there in part."""
        self._ended, self._seen = _BitSet(self.count), _BitSet(self.count)
        self._current, self._unproductive = -1, 0
        self._last_progress = now

    def contains(self, about: Describe) -> bool:
        """Whether the object is one of these."""
        return about.carousel == self.count and about.object - about.position == self.first

    def reaches(self, number: int) -> bool:
        """Whether these objects have that number, or a later one."""
        return number < self.first + self.count

    # --- what has come of them -------------------------------------------------------------------

    def described(self, number: int, now: float) -> bool:
        """An object is described; whether it has not ended here."""
        self._unproductive += number != self._current
        self._current = number
        if self._seen.add(number - self.first):
            self.on_progress(now)
        return number - self.first not in self._ended

    def on_progress(self, now: float) -> None:
        """One block more is right, or one object more is known."""
        self._unproductive, self._last_progress = 0, now

    def on_end(self, number: int) -> None:
        """An object is whole here, or will never be."""
        self._ended.add(number - self.first)

    def returns(self, now: float) -> None:
        """The sender was silent, and is heard again: its rounds are counted from now."""
        self.invited = 0
        self.on_progress(now)

    @property
    def finished(self) -> bool:
        """Whether nothing more is to come."""
        return self.given_up or self._ended.count >= self.count

    @property
    def hopeless(self) -> bool:
        """Whether what has not come in so many rounds will not come."""
        return self._unproductive >= MAX_FRUITLESS_CYCLES * self.count or self.invited >= MAX_FRUITLESS_OFFERS

    def due(self, stall: float) -> float:
        """When to give up what was never described, after so many seconds without news."""
        unseen = self.hopeless and self._seen.count < self.count and not self.given_up
        return self._last_progress + stall if unseen else inf


class _BitSet:
    """Set of small numbers, in a bit for each: it is kept for many senders that are silent."""

    __slots__ = ("_bits", "count")

    def __init__(self, most: int) -> None:
        self._bits = bytearray((most + 7) // 8)
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
    """An object whose blocks take places."""

    number: int

    @property
    def base(self) -> int:
        """The first block that is missing."""

    def is_verifying(self, block: int) -> bool:
        """Whether the block is all there, and worked on."""

    def drop(self, block: int) -> None:
        """Keep nothing of the block."""


class PartialBlocks:
    """The blocks that are there in part, of all objects that go round together."""

    def __init__(self, window: int) -> None:
        self._limit = window
        self._blocks: dict[tuple[int, int], BlockHolder] = {}

    def add(self, owner: BlockHolder, block: int) -> bool:
        """Whether there is a place for a block; another one may lose its own.

        What was begun long ago comes again soonest, and the newest is still on its way: the one before goes.
        """
        if len(self._blocks) >= self._limit:
            loses = [*islice(self._movable(), 2)]
            if loses:
                self._blocks[loses[-1]].drop(loses[-1][1])
            elif block != owner.base:  # one that all others behind it wait for has a place always
                return False
        self._blocks[owner.number, block] = owner
        return True

    def _movable(self) -> Iterator[tuple[int, int]]:
        return (key for key, one in reversed(self._blocks.items()) if not one.is_verifying(key[1]))

    def discard(self, owner: BlockHolder, block: int) -> None:
        """A block is right, or is not kept."""
        self._blocks.pop((owner.number, block), None)
