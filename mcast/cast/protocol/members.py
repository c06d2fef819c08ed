"""What a sender knows of its receivers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum
from heapq import heappop, heappush
from math import inf

from mcast.cast.protocol.packets import COMPLETE, MAX_MEMBERS, PENDING, Join, micros
from mcast.cast.protocol.rate import SMALL_GROUP

MAX_MEMBERS_PER_ADDRESS = 64
"""The most receivers at one address."""


BEHIND = -1
"""State of an object at a receiver that the sender has left behind, which no HAVE says."""


class MemberStatus(Enum):
    """What has become of a receiver, as seen by its sender."""

    ACTIVE = "takes part"
    SILENT = "was silent"
    STALLED = "stood still"
    OVER_BUDGET = "asked for too much"
    LEFT = "left"


class MinMultiset:
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
        "base",
        "behind_since",
        "charged",
        "complete_at",
        "held_up",
        "in_object",
        "index",
        "joined",
        "last_heard",
        "last_progress",
        "loss",
        "loss_at",
        "loss_base",
        "max_message",
        "nacks",
        "name",
        "nonce",
        "number",
        "probed_at",
        "probes",
        "queue",
        "reason",
        "requested",
        "stamp",
        "state",
        "status",
        "stored",
        "uses_parity",
        "waiting_since",
        "window",
    )

    def __init__(self, join: Join, index: int, address: str, now: float) -> None:
        self.number: int = join.member
        self.index: int = index
        self.nonce: int = join.nonce
        self.name: str = join.name
        self.address: str = address
        self.window: int = join.window
        self.queue: int = join.queue
        self.max_message: int = join.max_message
        self.uses_parity: bool = bool(join.uses_parity)
        self.status: MemberStatus = MemberStatus.ACTIVE
        self.last_heard: float = now
        self.begin(0, now)

    def begin(self, sent: int, now: float) -> None:
        """An object begins, of which `sent` blocks have been sent already."""
        self.base: int = 0
        self.stored: int | None = None
        """How many blocks its disk seems to have, by its own word; None if it has said nothing of that."""
        self.state: int = PENDING
        self.reason: str = ""
        self.in_object: bool = True
        """Whether this receiver takes part in the object."""
        self.loss_base: int = sent
        """The losses of blocks before this one have been judged."""
        self.stamp: int = micros(now)
        """That of the last request; before, the time in µs: what was sent before is not lost here."""
        self.nacks: int = 0
        self.requested: int = 0
        self.charged: int = 0
        """How often it asked, for how many pieces, and how many were sent on its account."""
        self.last_progress: float = now
        self.joined: float = now
        """When the object began for this receiver."""
        self.loss: float = 0.0
        self.loss_at: float = -inf
        """What part it had lost when it last reported that it had lost too much, and when that was."""
        self.behind_since: float = inf
        """Since when it holds up receivers that are ahead of it; inf if it does not."""
        self.probes: int = 0
        self.probed_at: float = -inf
        """How often it was asked how far it is, since it is behind, and when last."""
        self.held_up: float = 0.0
        """Seconds for which others have held it up."""
        self.waiting_since: float = inf
        """Since when an answer is waited for; inf if none is."""
        self.complete_at: float = inf

    @property
    def active(self) -> bool:
        """Whether the sender still reckons with this receiver."""
        return self.status is MemberStatus.ACTIVE

    @property
    def pending(self) -> bool:
        """Whether the object is still on its way to this receiver."""
        return self.in_object and self.status is MemberStatus.ACTIVE and self.state == PENDING


class MemberTable:
    """All receivers of a session.

    There may be thousands, and each of their messages comes through here. So what is asked after each of
    them, such as the least of something, is kept up to date instead of being searched for.
    """

    def __init__(self) -> None:
        self._all: dict[int, Member] = {}
        self._by_address: dict[str, list[Member]] = {}
        self._departed = OrderedDict[int, Member]()
        """By number, those that are no receivers any more, and have no part in an object: their places are
        free. The longest gone is first."""
        self.active: int = 0
        """Number of those that the sender still reckons with."""
        self.pending: int = 0
        """To how many the object is still on its way."""
        self.complete: int = 0
        """How many have it."""
        self._forget_object()

    def _forget_object(self) -> None:
        """Make what is known of those that owe an answer empty."""
        self.pending = 0
        self._bases, self._windows, self._queues, self._stored = (
            MinMultiset(),
            MinMultiset(),
            MinMultiset(),
            MinMultiset(),
        )

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._all.values())

    def get(self, number: int) -> Member | None:
        """The receiver of that number."""
        return self._all.get(number)

    def join(self, join: Join, address: str, sent: int, part: bool, now: float) -> Member | None:
        """Admit a receiver when `sent` blocks of the object have been sent, in which it takes part or not.

        None if there is no place.
        """
        index = self._free_index(address)
        if index is None:
            return None
        member = self._all[join.member] = Member(join, index, address, now)
        member.begin(sent, now)
        member.in_object = part
        self.active += 1
        if part:
            self._add_pending(member)
        self._by_address.setdefault(address, []).append(member)
        return member

    def _free_index(self, address: str) -> int | None:
        """The index of one more at that address; None if there is no place.

        Where there would be none, one that is gone, and has no part in the object, loses its own.
        """
        here = self._by_address.get(address, [])
        if len(here) >= MAX_MEMBERS_PER_ADDRESS:
            gone = next((one for one in here if not (one.active or one.in_object)), None)
        elif len(self) < MAX_MEMBERS:
            return len(self)
        else:
            gone = next(iter(self._departed.values()), None)
        if gone is None:
            return None
        del self._all[gone.number], self._departed[gone.number]
        self._by_address[gone.address].remove(gone)
        if not self._by_address[gone.address]:
            del self._by_address[gone.address]
        return gone.index

    def begin(self, now: float, asks: bool) -> None:
        """An object begins for all that live, if it asks anything of them."""
        self.complete = 0
        self._forget_object()
        for member in self:
            member.begin(0, now)
            member.in_object = asks and member.active
            if member.in_object:
                self._add_pending(member)

    def end(self) -> None:
        """The object has ended for all."""
        for member in self:
            if member.in_object and not member.active:
                self._departed[member.number] = member
            member.in_object = False
        self._forget_object()

    def advance(self, member: Member, base: int, now: float) -> None:
        """A receiver that owes an answer says that it has all blocks before `base`."""
        if base > member.base:
            self._bases.remove(member.base)
            self._bases.add(base)
            member.base, member.last_progress = base, now

    def join_late(self, member: Member, low: int, now: float) -> None:
        """A receiver that came late takes part after all, from the first block that is still there."""
        member.in_object, member.base, member.last_progress, member.joined = True, low, now, now
        self._add_pending(member)

    def set_stored(self, member: Member, held: int) -> None:
        """A receiver that owes an answer says how many blocks its disk seems to have."""
        self._stored.remove(member.stored or 0)
        self._stored.add(held)
        member.stored = held

    def stored(self) -> int:
        """How many blocks each receiver that takes part has, by its own word."""
        return self._stored.least or 0

    def finish(self, member: Member, state: int, reason: str, now: float) -> None:
        """A receiver says for good what has become of the object there, or the sender says BEHIND."""
        if member.pending and state != PENDING:
            self._drop_pending(member)
            member.state, member.reason = state, reason
            if state == COMPLETE:
                self.complete += 1
                member.complete_at = now

    def give_up(self, member: Member, status: MemberStatus) -> None:
        """Reckon with a receiver no more."""
        if member.pending:
            self._drop_pending(member)
        if member.active:
            self.active -= 1
            if not member.in_object:
                self._departed[member.number] = member
        member.status = status

    def low(self) -> int | None:
        """The first block that a receiver may still lack; None if there is no such receiver."""
        return self._bases.least

    def window(self) -> int | None:
        """How many blocks each of them can hold; None if there is no such receiver."""
        return self._windows.least

    def queue(self) -> int:
        """How many messages the shortest receive queue of few receivers holds; 0 if that is not known, or
        there are more of them."""
        return 0 if self.pending > SMALL_GROUP else self._queues.least or 0

    def _add_pending(self, member: Member) -> None:
        self.pending += 1
        self._bases.add(member.base)
        self._windows.add(member.window)
        self._stored.add(member.stored or 0)
        if member.queue:
            self._queues.add(member.queue)

    def _drop_pending(self, member: Member) -> None:
        self.pending -= 1
        self._bases.remove(member.base)
        self._windows.remove(member.window)
        self._stored.remove(member.stored or 0)
        if member.queue:
            self._queues.remove(member.queue)

    def bits(self, chosen: Callable[[Member], bool]) -> int:
        """A bit for each receiver that is chosen, by its index."""
        marks = bytearray(len(self) // 8 + 1)
        for member in self:
            if chosen(member):
                marks[member.index >> 3] |= 1 << (member.index & 7)
        return int.from_bytes(marks, "little")
