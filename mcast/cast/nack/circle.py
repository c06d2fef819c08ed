"""The objects that go round together, as one receiver knows them: what has ended here, what is in part."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import inf
from typing import Protocol

from mcast.cast.nack.messages import Describe

ROUNDS = 32
"""What goes round is given up when so many times its pieces were heard without one block more. Whatever part
of the messages is lost: a piece that each round brings has come by then, but for one time in e**32."""
INVITED = 600
"""What goes round is given up, too, when so many invitations were heard and no piece between them: at most
one message in four of its sender's invites."""


class Circle:
    """`count` objects, of which the first has the number `first`."""

    def __init__(self, about: Describe, room: int, now: float) -> None:
        self.first: int = about.object - about.place
        self.count: int = about.around
        self.invited: int = 0
        """How many invitations were heard since the last piece."""
        self.given_up: bool = False
        """Whether what has not ended here is not waited for any more."""
        self.places: Places = Places(room)
        """Where blocks of all objects are that are there in part."""
        self._over, self._seen = _Marks(self.count), _Marks(self.count)
        self._turn, self._turns = -1, 0
        self._moved = now

    def has(self, about: Describe) -> bool:
        """Whether the object is one of these."""
        return about.around == self.count and about.object - about.place == self.first

    def reaches(self, number: int) -> bool:
        """Whether these objects have that number, or a later one."""
        return number < self.first + self.count

    # --- what has come of them -------------------------------------------------------------------

    def described(self, number: int, now: float) -> bool:
        """An object is described; whether it has not ended here."""
        self._turns += number != self._turn
        self._turn = number
        if self._seen.add(number - self.first):
            self.news(now)
        return number - self.first not in self._over

    def news(self, now: float) -> None:
        """One block more is right, or one object more is known."""
        self._turns, self._moved = 0, now

    def ends(self, number: int) -> None:
        """An object is whole here, or will never be."""
        self._over.add(number - self.first)

    def returns(self, now: float) -> None:
        """The sender was silent, and is heard again: its rounds are counted from now."""
        self.invited = 0
        self.news(now)

    @property
    def over(self) -> bool:
        """Whether nothing more is to come."""
        return self.given_up or self._over.count >= self.count

    @property
    def hopeless(self) -> bool:
        """Whether what has not come in so many rounds will not come."""
        return self._turns >= ROUNDS * self.count or self.invited >= INVITED

    def due(self, stall: float) -> float:
        """When to give up what was never described, after so many seconds without news."""
        unseen = self.hopeless and self._seen.count < self.count and not self.given_up
        return self._moved + stall if unseen else inf


class _Marks:
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


class Arrives(Protocol):
    """An object whose blocks take places."""

    number: int

    @property
    def base(self) -> int:
        """The first block that is missing."""

    def keeps(self, block: int) -> bool:
        """Whether the block is all there, and worked on."""

    def drop(self, block: int) -> None:
        """Keep nothing of the block."""


class Places:
    """The blocks that are there in part, of all objects that go round together."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._partly: dict[tuple[int, int], Arrives] = {}

    def opens(self, arriving: Arrives, block: int) -> bool:
        """Whether there is a place for a block; another one may lose its own.

        What was begun long ago comes again soonest, and the newest is still on its way: the one before goes.
        """
        if len(self._partly) >= self._room:
            loses = [*islice(self._movable(), 2)]
            if loses:
                self._partly[loses[-1]].drop(loses[-1][1])
            elif block != arriving.base:  # one that all others behind it wait for has a place always
                return False
        self._partly[arriving.number, block] = arriving
        return True

    def _movable(self) -> Iterator[tuple[int, int]]:
        return (key for key, one in reversed(self._partly.items()) if not one.keeps(key[1]))

    def closes(self, arriving: Arrives, block: int) -> None:
        """A block is right, or is not kept."""
        self._partly.pop((arriving.number, block), None)
