"""What a sender knows of its receivers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum
from math import inf

from mcast.cast.nack.messages import MOST_MEMBERS, UNDECIDED, WHOLE, Enter, micros
from mcast.cast.nack.rate import FEW

MOST_OF_ADDRESS = 64
"""The most receivers at one address."""


class Lot(Enum):
    """What has become of a receiver, as seen by its sender."""

    PART = "takes part"
    SILENT = "was silent"
    STILL = "stood still"
    GREEDY = "asked for too much"
    LEFT = "left"


class Member:
    """One receiver."""

    __slots__ = (
        "address",
        "asked",
        "asks",
        "base",
        "charged",
        "heard",
        "held",
        "index",
        "judged",
        "largest",
        "lot",
        "moved",
        "name",
        "nonce",
        "number",
        "parity",
        "part",
        "queue",
        "room",
        "stamp",
        "state",
        "waited",
        "whole_at",
        "words",
    )

    def __init__(self, enter: Enter, index: int, address: str, now: float) -> None:
        self.number: int = enter.member
        self.index: int = index
        self.nonce: int = enter.nonce
        self.name: str = enter.name
        self.address: str = address
        self.room: int = enter.room
        self.queue: int = enter.queue
        self.largest: int = enter.largest
        self.parity: bool = bool(enter.parity)
        self.lot: Lot = Lot.PART
        self.heard: float = now
        self.begin(0, now)

    def begin(self, sent: int, now: float) -> None:
        """An object begins, of which `sent` blocks have been sent already."""
        self.base: int = 0
        self.held: int | None = None
        """How many blocks its disk seems to have, by its own word; None if it has said nothing of that."""
        self.state: int = UNDECIDED
        self.words: str = ""
        self.part: bool = True
        """Whether this receiver takes part in the object."""
        self.judged: int = sent
        """The losses of blocks before this one have been judged."""
        self.stamp: int = micros(now)
        """That of the last request; before, the time in µs: what was sent before is not lost here."""
        self.asks: int = 0
        self.asked: int = 0
        self.charged: int = 0
        """How often it asked, for how many pieces, and how many were sent on its account."""
        self.moved: float = now
        self.waited: float = inf
        """Since when an answer is waited for; inf if none is."""
        self.whole_at: float = inf

    @property
    def lives(self) -> bool:
        """Whether the sender still reckons with this receiver."""
        return self.lot is Lot.PART

    @property
    def owes(self) -> bool:
        """Whether the object is still on its way to this receiver."""
        return self.part and self.lot is Lot.PART and self.state == UNDECIDED


class Attendance:
    """All receivers of a session."""

    def __init__(self) -> None:
        self._all: dict[int, Member] = {}
        self._at: dict[str, list[Member]] = {}
        self.owing: int = 0
        """To how many the object is still on its way."""
        self._bases = Counter[int]()
        self.whole: int = 0
        """How many have it."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._all.values())

    def get(self, number: int) -> Member | None:
        """The receiver of that number."""
        return self._all.get(number)

    def enter(self, enter: Enter, address: str, sent: int, part: bool, now: float) -> Member | None:
        """Admit a receiver when `sent` blocks of the object have been sent, in which it takes part or not.

        None if there is no place.
        """
        index = self._place(address)
        if index is None:
            return None
        member = self._all[enter.member] = Member(enter, index, address, now)
        member.begin(sent, now)
        member.part = part
        if part:
            self.owing += 1
            self._bases[0] += 1
        self._at.setdefault(address, []).append(member)
        return member

    def _place(self, address: str) -> int | None:
        """The index of one more at that address; None if there is no place.

        Where there would be none, one that is gone, and has no part in the object, loses its own.
        """
        here = self._at.get(address, [])
        full = len(here) >= MOST_OF_ADDRESS
        if not full and len(self) < MOST_MEMBERS:
            return len(self)
        gone = next((one for one in (here if full else self) if not (one.lives or one.part)), None)
        if gone is None:
            return None
        del self._all[gone.number]
        self._at[gone.address].remove(gone)
        if not self._at[gone.address]:
            del self._at[gone.address]
        return gone.index

    def begin(self, now: float, asks: bool) -> None:
        """An object begins for all that live, if it asks anything of them."""
        for member in self:
            member.begin(0, now)
            member.part = asks and member.lives
        self.whole, self.owing = 0, sum(member.part for member in self)
        self._bases = Counter({0: self.owing})

    def end(self) -> None:
        """The object has ended for all."""
        for member in self:
            member.part = False
        self.owing = 0
        self._bases.clear()

    def has(self, member: Member, base: int, now: float) -> None:
        """A receiver that owes an answer says that it has all blocks before `base`."""
        if base > member.base:
            self._leaves(member)
            self._bases[base] += 1
            member.base, member.moved = base, now

    def joins(self, member: Member, low: int, now: float) -> None:
        """A receiver that came late takes part after all, from the first block that is still there."""
        member.part, member.base, member.moved = True, low, now
        self.owing += 1
        self._bases[low] += 1

    def held(self) -> int:
        """How many blocks each receiver that takes part has, by its own word."""
        return min((member.held or 0 for member in self if member.owes), default=0)

    def answer(self, member: Member, state: int, words: str, now: float) -> None:
        """A receiver says for good what has become of the object there."""
        if member.owes and state != UNDECIDED:
            self.owing -= 1
            self._leaves(member)
            member.state, member.words = state, words
            if state == WHOLE:
                self.whole += 1
                member.whole_at = now

    def give_up(self, member: Member, lot: Lot) -> None:
        """Reckon with a receiver no more."""
        if member.owes:
            self.owing -= 1
            self._leaves(member)
        member.lot = lot

    def low(self) -> int | None:
        """The first block that a receiver may still lack; None if there is no such receiver."""
        return min(self._bases, default=None) if self.owing else None

    def room(self) -> int | None:
        """How many blocks each of them can hold; None if there is no such receiver."""
        return min((member.room for member in self if member.owes), default=None)

    def queue(self) -> int:
        """How many messages the shortest receive queue of few receivers holds; 0 if that is not known, or
        there are more of them."""
        if self.owing > FEW:
            return 0
        return min((member.queue for member in self if member.owes and member.queue), default=0)

    def _leaves(self, member: Member) -> None:
        self._bases[member.base] -= 1
        if not self._bases[member.base]:
            del self._bases[member.base]

    def bits(self, chosen: Callable[[Member], bool]) -> int:
        """A bit for each receiver that is chosen, by its index."""
        marks = bytearray(len(self) // 8 + 1)
        for member in self:
            if chosen(member):
                marks[member.index >> 3] |= 1 << (member.index & 7)
        return int.from_bytes(marks, "little")
