"""Members of a session: a sender's state of each receiver, and totals over all of them.

`ObjectSender` owns the `MemberTable` and calls its methods; only they change the fields of a `Member` that
the totals depend on (`base`, `stored`, `state`, `status`, `in_object`). A receiver is pending while it takes
part in the current object, is active, and has not reported an outcome. The totals are over pending receivers.

There may be MAX_MEMBERS receivers, and each of their packets updates the totals, so these are maintained
incrementally: the minimum of a value over all members is the top of a heap, never a search.

A receiver that left or was given up stays in the table, so that its packets are answered with a BYE. If a
new receiver needs its index, the one that departed first and takes no part in the current object makes room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum
from heapq import heappop, heappush
from math import inf

from mcast.cast.protocol.packets import COMPLETE, MAX_MEMBERS, NO_VERSION, PENDING, Join, micros
from mcast.cast.protocol.rate import SMALL_GROUP

MAX_MEMBERS_PER_ADDRESS = 64
"""Maximum receivers at one address, so that one host cannot fill the session."""


BEHIND = -1
"""State of an object at a receiver that the sender has left behind; no ACK has it."""


class MemberStatus(Enum):
    """Status of a receiver in the session; the value completes "this receiver ..." in reports."""

    ACTIVE = "takes part"
    SILENT = "was silent"
    STALLED = "made no progress"
    OVER_BUDGET = "requested too many repairs"
    LEFT = "left"


class MinMultiset:
    """Multiset of integers with a cheap minimum, by a heap with lazy deletion."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        """Value -> multiplicity; 0 for a removed value that is still in the heap."""
        self._heap: list[int] = []

    def add(self, value: int) -> None:
        """Add the value once."""
        if value not in self._counts:
            self._counts[value] = 0
            heappush(self._heap, value)
        self._counts[value] += 1

    def remove(self, value: int) -> None:
        """Remove the value once. The multiset must contain it."""
        self._counts[value] -= 1

    @property
    def least(self) -> int | None:
        """Minimum; None if the multiset is empty."""
        while self._heap and not self._counts[self._heap[0]]:
            del self._counts[heappop(self._heap)]
        return self._heap[0] if self._heap else None


class Member:
    """State of one receiver: its JOIN, its progress in the current object, and what its repairs cost."""

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
        "silent",
        "stamp",
        "state",
        "status",
        "stored",
        "uses_parity",
        "version",
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
        self.version: int = NO_VERSION
        """The newest version that it is known to have."""
        self.last_heard: float = now
        self.silent: float = 0.0
        """Seconds for which the sender waited for its answer in earlier objects, since its last packet."""
        self.begin(0, now)

    def begin(self, sent: int, now: float) -> None:
        """Reset the state of the object, because a new one begins, or the receiver joins.

        sent  blocks of the object that were sent already
        """
        self.base: int = 0
        self.stored: int | None = None
        """Blocks that an earlier run has stored, as it reports; None if it has not reported that."""
        self.state: int = PENDING
        self.reason: str = ""
        self.in_object: bool = True
        """True if this receiver takes part in the object."""
        self.loss_base: int = sent
        """Losses of blocks before this one are already in the loss rate."""
        self.stamp: int = micros(now)
        """Stamp of its last NACK; at first the current time: messages sent earlier are no losses of it."""
        self.nacks: int = 0
        self.requested: int = 0
        self.charged: int = 0
        """Number of its NACKs, of segments requested in them, and of segments that they added to repairs."""
        self.last_progress: float = now
        self.joined: float = now
        """When the object began for this receiver."""
        self.loss: float = 0.0
        self.loss_at: float = -inf
        """Last loss above TOLERABLE_LOSS that it reported, as a fraction, and when."""
        self.behind_since: float = inf
        """Time since which it holds up receivers that are ahead of it; inf if it does not."""
        self.probes: int = 0
        self.probed_at: float = -inf
        """Number of probes since it is behind, and time of the last one."""
        self.held_up: float = 0.0
        """Seconds for which others have held it up."""
        self.waiting_since: float = inf
        """Time since which the sender waits for an answer of it; inf if it does not wait."""
        self.complete_at: float = inf

    def answered(self) -> None:
        """Note a packet of it: the sender waits no more."""
        self.waiting_since, self.silent = inf, 0.0

    def waited(self, now: float) -> float:
        """Return for how many seconds the sender has waited for an answer of it.

        The waits of several objects add up: where each ends at its deadline, none is long enough alone.
        """
        return self.silent + max(0.0, now - self.waiting_since)

    @property
    def active(self) -> bool:
        """True until the receiver leaves or is given up."""
        return self.status is MemberStatus.ACTIVE

    @property
    def pending(self) -> bool:
        """True while the sender waits for the outcome of the object at this receiver."""
        return self.in_object and self.status is MemberStatus.ACTIVE and self.state == PENDING


class MemberTable:
    """All receivers of a session, with totals over the pending ones."""

    def __init__(self) -> None:
        self._all: dict[int, Member] = {}
        self._by_address: dict[str, list[Member]] = {}
        self._departed = OrderedDict[int, Member]()
        """By number, receivers that are not active and take no part in the object; first departed, first."""
        self.active: int = 0
        """Number of active receivers."""
        self.pending: int = 0
        """Number of pending receivers."""
        self.complete: int = 0
        """Number of receivers that have the object."""
        self.lacking: set[int] = set()
        """Numbers of the active receivers that are not known to have the newest version."""
        self.newest: int = NO_VERSION
        """Version that was published last."""
        self._version = NO_VERSION
        """Version of the current object."""
        self._forget_object()

    def _forget_object(self) -> None:
        """Clear the totals of the pending receivers."""
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
        """Return the receiver of that number; None if there is none."""
        return self._all.get(number)

    def join(self, join: Join, address: str, sent: int, part: bool, now: float) -> Member | None:
        """Admit a receiver; None if there is no free index.

        sent  blocks of the current object that were sent already
        part  True if the receiver takes part in the current object
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
        self.lacking.add(member.number)
        self.note_version(member, join.version)
        return member

    def note_version(self, member: Member, version: int) -> None:
        """Note that an active receiver has that version, unless a newer one of it is known."""
        if member.version < version <= self.newest:  # it cannot have one that was not published
            member.version = version
        if member.version == self.newest:
            self.lacking.discard(member.number)

    def _free_index(self, address: str) -> int | None:
        """Return an index for one more receiver at that address; None if there is no free one.

        If all are in use, the index of a departed receiver that takes no part in the object is reused.
        """
        same_address = self._by_address.get(address, [])
        if len(same_address) >= MAX_MEMBERS_PER_ADDRESS:
            departed = next((one for one in same_address if not (one.active or one.in_object)), None)
        elif len(self) < MAX_MEMBERS:
            return len(self)
        else:
            departed = next(iter(self._departed.values()), None)
        if departed is None:
            return None
        del self._all[departed.number], self._departed[departed.number]
        self._by_address[departed.address].remove(departed)
        if not self._by_address[departed.address]:
            del self._by_address[departed.address]
        return departed.index

    def begin(self, now: float, expects_answers: bool, version: int = NO_VERSION) -> None:
        """Begin an object, in which all active receivers take part, unless it is a carousel.

        version  of a published object, in which only the receivers that lack it take part
        """
        self.complete = 0
        self._version = version
        if version > self.newest:
            self.newest = version
            self.lacking = {member.number for member in self if member.active}
        self._forget_object()
        for member in self:
            member.begin(0, now)
            member.in_object = (
                expects_answers and member.active and not NO_VERSION < version <= member.version
            )
            if member.in_object:
                self._add_pending(member)

    def end(self, now: float) -> None:
        """End the object for all receivers."""
        for member in self:
            member.silent, member.waiting_since = member.waited(now), inf
            if member.in_object and not member.active:
                self._departed[member.number] = member
            member.in_object = False
        self._forget_object()

    def advance(self, member: Member, base: int, now: float) -> None:
        """Note that a pending receiver has all blocks before `base`."""
        if base > member.base:
            self._bases.remove(member.base)
            self._bases.add(base)
            member.base, member.last_progress = base, now

    def join_late(self, member: Member, low: int, now: float) -> None:
        """Let a receiver that joined late take part after all, from block `low` on."""
        member.in_object, member.base, member.last_progress, member.joined = True, low, now, now
        self._add_pending(member)

    def set_stored(self, member: Member, blocks: int) -> None:
        """Note the number of stored blocks that a pending receiver reports."""
        self._stored.remove(member.stored or 0)
        self._stored.add(blocks)
        member.stored = blocks

    def stored(self) -> int:
        """Return the number of blocks that all pending receivers report as stored."""
        return self._stored.least or 0

    def finish(self, member: Member, state: int, reason: str, now: float) -> None:
        """Note the outcome of the object at a receiver: COMPLETE, FAILED, or BEHIND by the sender."""
        if member.pending and state != PENDING:
            self._drop_pending(member)
            member.silent, member.waiting_since = member.waited(now), inf
            member.state, member.reason = state, reason
            if state == COMPLETE:
                self.note_version(member, self._version)
                self.complete += 1
                member.complete_at = now

    def give_up(self, member: Member, status: MemberStatus) -> None:
        """Remove a receiver from the active ones."""
        if member.pending:
            self._drop_pending(member)
        self.lacking.discard(member.number)
        if member.active:
            self.active -= 1
            if not member.in_object:
                self._departed[member.number] = member
        member.status = status

    def low(self) -> int | None:
        """Return the first block that a pending receiver may miss; None if there is no pending receiver."""
        return self._bases.least

    def window(self) -> int | None:
        """Return the minimum window of pending receivers, in blocks; None if there is none."""
        return self._windows.least

    def queue(self) -> int:
        """Return the length of the shortest receive queue, in messages.

        0 if it is unknown, or if there are more than SMALL_GROUP pending receivers.
        """
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
        """Return a bitmap, by index, of the receivers for which `chosen` is True."""
        bitmap = bytearray(len(self) // 8 + 1)
        for member in self:
            if chosen(member):
                bitmap[member.index >> 3] |= 1 << (member.index & 7)
        return int.from_bytes(bitmap, "little")
