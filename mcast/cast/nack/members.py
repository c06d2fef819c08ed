"""What a sender knows of its receivers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum
from heapq import heappop, heappush
from math import inf

from mcast.cast.nack.messages import MOST_MEMBERS, UNDECIDED, WHOLE, Enter, micros
from mcast.cast.nack.rate import FEW

MOST_OF_ADDRESS = 64
"""The most receivers at one address."""


BEHIND = -1
"""State of an object at a receiver that the sender has left behind, which no HAVE says."""


class Lot(Enum):
    """What has become of a receiver, as seen by its sender."""

    PART = "takes part"
    SILENT = "was silent"
    STILL = "stood still"
    GREEDY = "asked for too much"
    LEFT = "left"


class Lowest:
    """Multiset of integers whose least is known without a look at the others."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        """How often each value is there; 0 for one that is still in the heap."""
        self._heap: list[int] = []

    def add(self, value: int) -> None:
        """Add the value once."""
        if value not in self._counts:
            self._counts[value] = 0
            heappush(self._heap, value)
        self._counts[value] += 1

    def remove(self, value: int) -> None:
        """Remove the value once; it is there."""
        self._counts[value] -= 1

    @property
    def least(self) -> int | None:
        """The least value; None if there is none."""
        while self._heap and not self._counts[self._heap[0]]:
            del self._counts[heappop(self._heap)]
        return self._heap[0] if self._heap else None


class Member:
    """One receiver."""

    __slots__ = (
        "address",
        "asked",
        "asks",
        "base",
        "behind",
        "charged",
        "heard",
        "held",
        "held_up",
        "index",
        "joined",
        "judged",
        "largest",
        "loss",
        "lossy",
        "lot",
        "moved",
        "name",
        "nonce",
        "number",
        "parity",
        "part",
        "questioned",
        "questions",
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
        self.joined: float = now
        """When the object began for this receiver."""
        self.loss: float = 0.0
        self.lossy: float = -inf
        """What part it had lost when it last reported that it had lost too much, and when that was."""
        self.behind: float = inf
        """Since when it holds up receivers that are ahead of it; inf if it does not."""
        self.questions: int = 0
        self.questioned: float = -inf
        """How often it was asked how far it is, since it is behind, and when last."""
        self.held_up: float = 0.0
        """Seconds for which others have held it up."""
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
    """All receivers of a session.

    There may be thousands, and each of their messages comes through here. So what is asked after each of
    them, such as the least of something, is kept up to date instead of being searched for.
    """

    def __init__(self) -> None:
        self._all: dict[int, Member] = {}
        self._at: dict[str, list[Member]] = {}
        self._gone = OrderedDict[int, Member]()
        """By number, those that are no receivers any more, and have no part in an object: their places are
        free. The longest gone is first."""
        self.living: int = 0
        """Number of those that the sender still reckons with."""
        self.owing: int = 0
        """To how many the object is still on its way."""
        self.whole: int = 0
        """How many have it."""
        self._forget_object()

    def _forget_object(self) -> None:
        """Make what is known of those that owe an answer empty."""
        self.owing = 0
        self._bases, self._rooms, self._queues, self._held = Lowest(), Lowest(), Lowest(), Lowest()

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
        self.living += 1
        if part:
            self._owes(member)
        self._at.setdefault(address, []).append(member)
        return member

    def _place(self, address: str) -> int | None:
        """The index of one more at that address; None if there is no place.

        Where there would be none, one that is gone, and has no part in the object, loses its own.
        """
        here = self._at.get(address, [])
        if len(here) >= MOST_OF_ADDRESS:
            gone = next((one for one in here if not (one.lives or one.part)), None)
        elif len(self) < MOST_MEMBERS:
            return len(self)
        else:
            gone = next(iter(self._gone.values()), None)
        if gone is None:
            return None
        del self._all[gone.number], self._gone[gone.number]
        self._at[gone.address].remove(gone)
        if not self._at[gone.address]:
            del self._at[gone.address]
        return gone.index

    def begin(self, now: float, asks: bool) -> None:
        """An object begins for all that live, if it asks anything of them."""
        self.whole = 0
        self._forget_object()
        for member in self:
            member.begin(0, now)
            member.part = asks and member.lives
            if member.part:
                self._owes(member)

    def end(self) -> None:
        """The object has ended for all."""
        for member in self:
            if member.part and not member.lives:
                self._gone[member.number] = member
            member.part = False
        self._forget_object()

    def has(self, member: Member, base: int, now: float) -> None:
        """A receiver that owes an answer says that it has all blocks before `base`."""
        if base > member.base:
            self._bases.remove(member.base)
            self._bases.add(base)
            member.base, member.moved = base, now

    def joins(self, member: Member, low: int, now: float) -> None:
        """A receiver that came late takes part after all, from the first block that is still there."""
        member.part, member.base, member.moved, member.joined = True, low, now, now
        self._owes(member)

    def holds(self, member: Member, held: int) -> None:
        """A receiver that owes an answer says how many blocks its disk seems to have."""
        self._held.remove(member.held or 0)
        self._held.add(held)
        member.held = held

    def held(self) -> int:
        """How many blocks each receiver that takes part has, by its own word."""
        return self._held.least or 0

    def answer(self, member: Member, state: int, words: str, now: float) -> None:
        """A receiver says for good what has become of the object there, or the sender says BEHIND."""
        if member.owes and state != UNDECIDED:
            self._owes_no_more(member)
            member.state, member.words = state, words
            if state == WHOLE:
                self.whole += 1
                member.whole_at = now

    def give_up(self, member: Member, lot: Lot) -> None:
        """Reckon with a receiver no more."""
        if member.owes:
            self._owes_no_more(member)
        if member.lives:
            self.living -= 1
            if not member.part:
                self._gone[member.number] = member
        member.lot = lot

    def low(self) -> int | None:
        """The first block that a receiver may still lack; None if there is no such receiver."""
        return self._bases.least

    def room(self) -> int | None:
        """How many blocks each of them can hold; None if there is no such receiver."""
        return self._rooms.least

    def queue(self) -> int:
        """How many messages the shortest receive queue of few receivers holds; 0 if that is not known, or
        there are more of them."""
        return 0 if self.owing > FEW else self._queues.least or 0

    def _owes(self, member: Member) -> None:
        self.owing += 1
        self._bases.add(member.base)
        self._rooms.add(member.room)
        self._held.add(member.held or 0)
        if member.queue:
            self._queues.add(member.queue)

    def _owes_no_more(self, member: Member) -> None:
        self.owing -= 1
        self._bases.remove(member.base)
        self._rooms.remove(member.room)
        self._held.remove(member.held or 0)
        if member.queue:
            self._queues.remove(member.queue)

    def bits(self, chosen: Callable[[Member], bool]) -> int:
        """A bit for each receiver that is chosen, by its index."""
        marks = bytearray(len(self) // 8 + 1)
        for member in self:
            if chosen(member):
                marks[member.index >> 3] |= 1 << (member.index & 7)
        return int.from_bytes(marks, "little")
