"""The receiver of one sender's objects, without I/O and clock: messages and times in, messages out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from math import inf
from random import Random
from typing import Any, NamedTuple

from mcast.cast.protocol.backoff import MIN_ROUND_TRIP, NackTimer, spread
from mcast.cast.protocol.carousel import Carousel
from mcast.cast.protocol.incoming import IncomingObject, ReadyBlock
from mcast.cast.protocol.layout import ObjectLayout
from mcast.cast.protocol.packets import (
    ALL_MEMBERS,
    COMPLETE,
    COMPLETE_LEFT,
    FAILED,
    LEFT,
    MAX_ROUND_TRIP,
    NACK_HEADER_SIZE,
    PENDING,
    REQUEST_SIZE,
    STORED,
    UNKNOWN_BLOCKS,
    Ack,
    Admit,
    Behind,
    Bye,
    Describe,
    Done,
    Flush,
    Join,
    Nack,
    Offer,
    Packet,
    Seal,
    encode,
    micros,
    printable,
)

MAX_PARTIAL_OBJECTS = 32
"""So many objects that go round together may be there in part: each has a file or memory of its own."""


class ReceiverConfig(NamedTuple):
    """What a receiver is: number, name, blocks that it can hold, longest message, whether it uses parity.

    silence  how many seconds the sender may be silent
    stall    how many seconds the sender may speak without sending what is missing: so long at least where an
             object goes round
    nonce    random, and of this session alone
    queue    how many messages its receive queue holds; 0: that is not said
    stores   True: an object is whole when `stored` says that it is in its place, and not before
    together  so many objects that go round together may be there in part
    """

    number: int
    name: str
    window: int
    max_message: int
    uses_parity: bool
    peer_timeout: float = 10.0
    stall: float = 60.0
    stores: bool = False
    nonce: int = 0
    partial_objects: int = MAX_PARTIAL_OBJECTS
    queue: int = 0


class ObjectEnd(NamedTuple):
    """How an object ended here: `about` it, whether it is `whole` and right, and in `words` why it is not."""

    about: Describe
    complete: bool
    reason: str


class _SenderClock:
    """What a receiver knows of its sender's time and group."""

    __slots__ = ("at", "heard", "members", "round_trip", "stamp")

    def __init__(self, now: float) -> None:
        self.stamp = 0
        self.at = self.heard = now
        self.round_trip, self.members = MIN_ROUND_TRIP, 1

    def update(self, packet: Offer | Seal | Flush, now: float) -> None:
        if packet.stamp >= self.stamp:
            self.stamp, self.at = packet.stamp, now
            self.members = max(1, packet.members)
            self.round_trip = min(max(packet.round_trip / 1e6, MIN_ROUND_TRIP), MAX_ROUND_TRIP)

    def hold_time(self, now: float) -> int:
        """For how many µs the last stamp has been here."""
        return min(micros(now - self.at), (1 << 32) - 1)


class ObjectReceiver:
    """One end: takes part in the session of one sender."""

    def __init__(self, session: int, config: ReceiverConfig, random: Random, now: float) -> None:
        self.session: int = session
        self.config: ReceiverConfig = config
        self.index: int | None = None
        """The place in the sender's bitmaps; None before the sender has admitted this end."""
        self.finished: bool = False
        """Whether the session has ended."""
        self.reason: str = ""
        """Why it has ended; empty if the sender has ended it for all."""
        self.silent: bool = False
        """Whether it has ended because the sender was silent: it goes on if the sender is heard again."""
        self.ended: list[ObjectEnd] = []
        """Objects that have ended; the driver takes them away."""
        self.rejected: Counter[str] = Counter[str]()
        self.others: dict[int, ObjectReceiver] = {}
        """Of objects that go round together, those that this end takes besides its own, by number."""
        self._random = random
        self._clock, self._last_progress = _SenderClock(now), now
        self._carousel: Carousel | None = None
        self._nack_timer = NackTimer(random)
        self._current: tuple[Describe, IncomingObject] | None = None
        self._last_number = -1
        self._is_first = True  # whether the next object is the first one since this end takes part
        self._is_late = False  # whether the first piece of an object may be one of its middle
        self._state = PENDING
        self._answer_timers = _AnswerTimers()

    @property
    def incoming(self) -> IncomingObject | None:
        """The object that is arriving, or has arrived last."""
        return self._current and self._current[1]

    @property
    def about(self) -> Describe | None:
        """What the sender says of that object."""
        return self._current and self._current[0]

    # --- what comes ------------------------------------------------------------------------------

    def add_pause(self, paused: float) -> None:
        """The driver listens again, after so many seconds, which are no silence of the sender's."""
        self._clock.heard += paused
        for one in self.all_receivers():
            one._last_progress += paused

    def all_receivers(self) -> Iterator[ObjectReceiver]:
        """This end, and those of the objects that go round with its own."""
        yield self
        yield from self.others.values()

    def on_packet(self, packet: Packet, now: float) -> None:
        """Take in a message, other than a piece, of this session."""
        if self.finished or packet.session != self.session:
            return
        if isinstance(packet, Nack):
            self._on_nack(packet, now)
        elif (step := _STEPS.get(type(packet))) is not None:
            self._clock.heard = now
            of = self.others.get(packet.object, self) if isinstance(packet, Seal | Flush) else self
            step(of, packet, now)

    def on_data(self, object_: int, block: int, first: int, count: int, now: float) -> int:
        """A bit for each new piece among first..first+count-1 of a block, which the driver keeps from now."""
        if object_ in self.others:
            return self.others[object_].on_data(object_, block, first, count, now)
        self._clock.heard = now
        incoming = self._takes_part(object_)
        if incoming is None:
            return 0
        if not incoming.begun and self._is_late:
            incoming.ask_from = block
        new = incoming.add_segments(block, first, count)
        if new and not self._is_carousel:  # what finds no place is dropped, and may come again for ever
            self._last_progress, self._nack_timer.suppressed = now, 0
        if self._nack_timer.due is None and incoming.lacking:
            self._start_nack_timer(now)
        return new

    def resume(self, blocks: int, now: float) -> None:
        """The driver's disk seems to have the first blocks of the object that was just described.

        Each comes out of `ready` without a piece, in order, when its digest is known.
        """
        incoming = self.incoming
        if incoming is not None and self._state == PENDING and blocks:
            incoming.resume(blocks)
            self._schedule_stored(now + spread(self._random, self._clock.members))

    def allow_any_order(self) -> None:
        """The driver can put each block of the object that was just described into its place as it comes."""
        if self.incoming is not None:
            self.incoming.allow_any_order()

    def take_dropped(self) -> list[int]:
        """Blocks of the current object of which nothing is kept any more: the driver drops their pieces."""
        if self._current is None or not self._current[1].dropped:
            return _NO_BLOCK
        found, self._current[1].dropped = self._current[1].dropped, []
        return found

    def take_ready(self) -> list[ReadyBlock]:
        """The blocks of the current object to decode and check, each once; `checked` takes the outcome."""
        if self._current is None or not self._current[1].ready:
            return _NO_READY
        found, self._current[1].ready = self._current[1].ready, []
        return found

    def checked(self, block: int, right: bool, now: float) -> None:
        """The driver has compared a block that was ready with its digest."""
        incoming = self.incoming
        if incoming is None or self._state != PENDING:
            return
        hold_time = incoming.prefix.active and block == incoming.prefix.base
        if not right and hold_time:
            incoming.reject(block)
            self._schedule_stored(now)
            return
        if not right:
            self.rejected["a block that differs from its digest"] += 1
            if not incoming.reject(block):
                self.fail("a block differs from its digest, again and again", now)
            return
        before = incoming.base
        incoming.accept(block)
        self._last_progress = now
        if self._carousel is not None:
            self._carousel.on_progress(now)
        half = max(1, self.config.window // 2)
        if incoming.complete:
            self._on_complete(now)
        elif before // half != incoming.base // half:
            self._schedule_ack(now)

    @property
    def storable(self) -> bool:
        """Whether all of the current object is there, and `stored` is waited for, or `fail`."""
        return self._is_incomplete and self._current is not None and self._current[1].complete

    @property
    def digest(self) -> bytes | None:
        """The digest of the current object, by its sender; None before that is said."""
        return self._current and self._current[1].digest

    def stored(self, now: float) -> None:
        """The driver has put the object into its place."""
        if self.storable:
            self._finish(COMPLETE, "", now)

    @property
    def late(self) -> bool:
        """Whether this end came too late for the object, which was the first that it heard of."""
        return (
            self._is_late
            and self._current is not None
            and self._current[1].unrecoverable
            and not self._current[1].base
        )

    def fail(self, reason: str, now: float) -> None:
        """Give up the current object: the sender is told why."""
        if self._current is not None and self._state == PENDING:
            self._finish(FAILED, reason, now)

    def leave(self, reason: str) -> None:
        """End the session here."""
        for one in self.all_receivers():
            if not one.finished:
                one._leave_behind(reason or "the sender has ended the session")
                one.finished = True
                one.reason = reason

    def suspend(self) -> None:
        """Keep what has ended, and nothing else, until the silent sender is heard again."""
        self.others.clear()
        self._nack_timer, self._answer_timers = (
            NackTimer(self._random),
            _AnswerTimers(self._answer_timers.reason),
        )
        if self._current is not None:
            self._current[1].forget()

    def rejoin(self, nonce: int, now: float) -> None:
        """The sender is heard again after `rest`: take part anew in what has not ended here."""
        self.config = self.config._replace(nonce=nonce)
        self.index, self.finished, self.reason, self.silent = None, False, "", False
        self._is_first, self._clock = True, _SenderClock(now)
        if self._carousel is not None:
            self._carousel.returns(now)

    # --- what is said ----------------------------------------------------------------------------

    def leave_packets(self, reason: str, now: float) -> list[bytes]:
        """What to say to leave the session, until the sender confirms it: `over` is True then."""
        if self.finished or self.index is None:
            return []
        state = COMPLETE_LEFT if self._state == COMPLETE else LEFT
        return [encode(self._ack_packet(now)._replace(state=state, reason=printable(reason)))]

    @property
    def done(self) -> bool:
        """Whether the object has ended here, and the driver has heard of it."""
        return self._state != PENDING and not self.ended

    @property
    def satisfied(self) -> bool:
        """Whether all of what goes round has ended here, or is given up."""
        return self._carousel is not None and self._carousel.finished

    @property
    def ack_pending(self) -> bool:
        """Whether the sender has not been told yet what has become of the object."""
        return not self.finished and self._answer_timers.ack < inf

    @property
    def due(self) -> float:
        """When to ask `messages` again, unless a message comes."""
        if self.finished:
            return inf
        asking = inf if self._nack_timer.due is None else self._nack_timer.due
        unseen = inf if self._carousel is None else self._carousel.due(self.config.stall)
        return min(
            asking,
            self._answer_timers.due,
            self._clock.heard + self.config.peer_timeout,
            self._stalls_at,
            unseen,
        )

    def messages(self, now: float) -> list[bytes]:
        """What to send now."""
        if self.finished or now < self.due:
            return []
        if now >= self._clock.heard + self.config.peer_timeout:
            self.leave(f"the sender was silent for {self.config.peer_timeout:g} s")
            self.silent = True
            return []
        if now >= self._stalls_at:
            self.fail(self._hopeless_reason or f"{self._stall_reason} for {self.config.stall:g} s", now)
        if self._carousel is not None and now >= self._carousel.due(self.config.stall):
            self._carousel.given_up = True
        said = [
            encode(packet)
            for packet in self._answer_timers.pop(
                now, self._join_packet, self._ack_packet, self._stored_packet
            )
        ]
        incoming = self.incoming
        if incoming is not None and self._nack_timer.due is not None and now >= self._nack_timer.due:
            most = (self.config.max_message - NACK_HEADER_SIZE) // REQUEST_SIZE
            trip, members = self._clock.round_trip, self._clock.members
            requests = (
                self._nack_timer.requests(incoming.requests(), now, trip, members, most)
                if self._is_incomplete
                else ()
            )
            if requests:
                stamp, hold_time = self._clock.stamp, self._clock.hold_time(now)
                base, me = incoming.base, self.config.number
                if incoming.prefix.active:  # a sender that has not heard so would not heed what follows
                    said.append(encode(self._stored_packet(now)))
                said.append(encode(Nack(self.session, incoming.number, me, base, stamp, hold_time, requests)))
            if self._is_incomplete and incoming.lacking:
                self._start_nack_timer(now)
        return said

    def _join_packet(self, now: float) -> Packet:
        config = self.config
        stamp, name = self._clock.stamp, printable(config.name)
        return Join(
            self.session,
            config.number,
            config.window,
            config.max_message,
            config.uses_parity,
            stamp,
            config.nonce,
            config.queue,
            name,
        )

    def _ack_packet(self, now: float) -> Ack:
        incoming = self.incoming
        number, base = (0, 0) if incoming is None else (incoming.number, incoming.base)
        stamp, hold_time = self._clock.stamp, self._clock.hold_time(now)
        reason = self._answer_timers.reason
        return Ack(self.session, number, self.config.number, base, stamp, hold_time, self._state, reason)

    def _stored_packet(self, now: float) -> Ack:
        hold_time = 0 if self.incoming is None else self.incoming.prefix.until
        return self._ack_packet(now)._replace(base=hold_time, state=STORED)

    # --- the steps -------------------------------------------------------------------------------

    @property
    def _is_incomplete(self) -> bool:
        """Whether the current object may still become whole here."""
        return self._current is not None and self._state == PENDING and not self._current[1].unrecoverable

    @property
    def _is_carousel(self) -> bool:
        """Whether nobody waits for a word about the current object: it goes round and round."""
        return self._current is not None and self._current[0].carousel > 0

    @property
    def _stalls_at(self) -> float:
        """When the sender has sent nothing that is missing for too long; inf if nothing is missing.

        What goes round may take any time to come again: rounds count, too.
        """
        waits = self._is_incomplete and not self.storable and (not self._is_carousel or self._hopeless_reason)
        return self._last_progress + self.config.stall if waits else inf

    @property
    def _stall_reason(self) -> str:
        taking = self.incoming is not None and self.incoming.is_writing
        return (
            "the program or disk here took nothing" if taking else "the sender sent nothing that is missing"
        )

    @property
    def _hopeless_reason(self) -> str:
        return "" if self.incoming is None else self.incoming.hopeless_reason

    def _takes_part(self, number: int) -> IncomingObject | None:
        """The object of that number, while it is arriving."""
        if self._current is None or self._state != PENDING:
            return None
        return self._current[1] if self._current[1].number == number else None

    def _start_nack_timer(self, now: float) -> None:
        self._nack_timer.start(now, self._clock.round_trip, self._clock.members)

    def _schedule_ack(self, now: float) -> None:
        if not self._is_carousel:
            self._answer_timers.ack = min(
                self._answer_timers.ack, now + spread(self._random, self._clock.members)
            )

    def _schedule_stored(self, at: float) -> None:
        if not self._is_carousel:
            self._answer_timers.stored = at

    def _on_complete(self, now: float) -> None:
        if not self.config.stores:
            self._finish(COMPLETE, "", now)

    def _finish(self, state: int, reason: str, now: float) -> None:
        self._end_object(state, reason)
        self._schedule_ack(now)
        if self._carousel is not None:
            self._carousel.on_progress(now)

    def _end_object(self, state: int, reason: str) -> None:
        """The object has ended here, once: what follows of it, also after a silence, changes nothing."""
        if self._current is not None and self._state == PENDING:
            self._state, self._answer_timers.reason = state, printable(reason)
            self._nack_timer.due, self._answer_timers.stored = None, inf
            self.ended.append(ObjectEnd(self._current[0], state == COMPLETE, reason))
            if self._carousel is not None:
                self._current[1].drop_all()
                self._carousel.on_end(self._current[1].number)

    def _leave_behind(self, reason: str) -> None:
        """The sender goes on without this end, which keeps what has all come."""
        if not self.storable:
            self._end_object(FAILED, reason)

    def _on_offer(self, offer: Offer, now: float) -> None:
        self._clock.update(offer, now)
        if self._current is not None and offer.object > self._current[1].number:
            self._leave_all_behind()
        self._last_number = max(self._last_number, offer.object - 1)
        if self._carousel is not None and self._carousel.reaches(offer.object):
            self._carousel.invited += 1
        elif self.index is None and self._answer_timers.join == inf:
            self._answer_timers.join = now + spread(self._random, 1000)

    def _leave_all_behind(self) -> None:
        for one in self.all_receivers():
            one._leave_behind("left behind: the sender has turned to the next object")

    def _on_admit(self, admit: Admit, now: float) -> None:
        if self.index is None:
            index, nonce = admit.indexes.get(self.config.number, (None, None))
            if index is not None and nonce == self.config.nonce:
                self.index, self._answer_timers.join = index, inf

    def _on_describe(self, about: Describe, now: float) -> None:
        if (self.index is None and not about.carousel) or about.object <= self._last_number:
            return
        if self._carousel is not None and self._carousel.reaches(about.object):
            if self._carousel.contains(about):
                self._begin_other(self._carousel, about, now)
            else:
                self.rejected["an object that does not go round with the others"] += 1
            return
        if self._current is not None and about.object <= self._current[1].number:
            return
        if any(one.storable for one in self.all_receivers()):  # the next object waits: it is described again
            return
        self._leave_all_behind()
        self._carousel = Carousel(about, self.config.window, now) if about.carousel else None
        if self._carousel is not None:
            self._carousel.described(about.object, now)
        self._begin(about, now)

    def _begin(self, about: Describe, now: float) -> None:
        self._is_late, self._is_first = self._is_first, False
        incoming = IncomingObject(
            about.object, ObjectLayout.of(about), self.config.window, self.config.uses_parity, self._carousel
        )
        self._current, self._state, self._last_progress = (about, incoming), PENDING, now
        self._answer_timers.reason = ""
        if about.carousel:
            self._answer_timers.join = self._answer_timers.ack = inf
        if incoming.complete:
            self._on_complete(now)

    def _begin_other(self, carousel: Carousel, about: Describe, now: float) -> None:
        """Take another object of those that go round, unless it has ended here.

        Where too many are there in part, the newest makes room: the others lose nothing, and end some time.
        """
        if not carousel.described(about.object, now) or about.object == self._number:
            return
        for number in [number for number, one in self.others.items() if one.done]:
            del self.others[number]
        if about.object in self.others:
            return
        if sum(one._is_incomplete for one in self.all_receivers()) >= self.config.partial_objects:
            partly = [
                number for number, one in self.others.items() if one._is_incomplete and not one.storable
            ]
            if len(partly) < 2:
                return
            incoming = self.others.pop(partly[-1]).incoming
            if incoming is not None:
                incoming.drop_all()
        one = self.others[about.object] = ObjectReceiver(self.session, self.config, self._random, now)
        one._clock, one._carousel = self._clock, carousel
        one._begin(about, now)

    @property
    def _number(self) -> int:
        """The number of the object; below all numbers before there is one."""
        return -1 if self._current is None else self._current[1].number

    def _on_seal(self, seal: Seal, now: float) -> None:
        self._clock.update(seal, now)
        incoming = self._takes_part(seal.object)
        if incoming is None:
            return
        if not incoming.begun and self._is_late:
            incoming.ask_from = seal.block
        incoming.update_sent(0, UNKNOWN_BLOCKS, seal.low)
        if not incoming.add_infos(seal.block, seal.blocks):
            self.rejected["a block that the object cannot have"] += 1
        self._after_update(incoming, now)

    def _on_flush(self, flush: Flush, now: float) -> None:
        self._clock.update(flush, now)
        incoming = self._takes_part(flush.object)
        if incoming is not None:
            if flush.idle:
                incoming.ask_from = 0
            incoming.update_sent(flush.blocks, flush.total, flush.low, flush.digest)
            if incoming.complete:
                self._on_complete(now)
            self._after_update(incoming, now)
        if self.index is not None and flush.ack_bits << flush.first >> self.index & 1:
            self._schedule_ack(now)

    def _after_update(self, incoming: IncomingObject, now: float) -> None:
        if self._is_incomplete:
            if self._nack_timer.due is None and incoming.lacking:
                self._start_nack_timer(now)
        elif self._state == PENDING:
            came = "came too late for the object" if self.late else "lacks what the sender has no more"
            self._finish(FAILED, f"left behind: this receiver {came}", now)

    def _on_nack(self, nack: Nack, now: float) -> None:
        incoming = self._takes_part(nack.object)
        if incoming is not None and nack.member != self.config.number and self._nack_timer.due is not None:
            for request in nack.requests:
                if incoming.lacks_block(request.block):
                    self._nack_timer.on_nack(request, now, self._clock.round_trip, self._clock.members)

    def _on_done(self, done: Done, now: float) -> None:
        for one in self.all_receivers():
            if one._current is not None and done.object >= one._number:
                reason = "left behind: the sender does not wait for this receiver"
                one._leave_behind("the carousel has ended" if one._is_carousel else reason)
                one._answer_timers.ack = inf
        self._last_number = max(self._last_number, done.object)

    def _on_behind(self, behind: Behind, now: float) -> None:
        named = self.index is not None and behind.slow << behind.first >> self.index & 1
        if named and behind.object == self._number:
            self._leave_behind("left behind: this receiver is too slow for what the sender promises")

    def _on_bye(self, bye: Bye, now: float) -> None:
        if bye.member == ALL_MEMBERS:
            self.leave(bye.reason and f"the sender has ended the session: {bye.reason}")
        elif bye.member == self.config.number:
            self.leave(bye.reason)


class _AnswerTimers:
    """What a receiver says without lacking anything, and when."""

    __slots__ = ("ack", "join", "reason", "stored")

    def __init__(self, reason: str = "") -> None:
        self.join = self.ack = self.stored = inf
        self.reason = reason

    @property
    def due(self) -> float:
        return min(self.join, self.ack, self.stored)

    def pop(self, now: float, *speak: Callable[[float], Packet]) -> list[Packet]:
        join, ack, hold = speak
        said = []
        if now >= self.join:
            self.join = inf
            said.append(join(now))
        if now >= self.ack:
            self.ack = inf
            said.append(ack(now))
        if now >= self.stored:
            self.stored = inf
            said.append(hold(now))
        return said


_NO_READY: list[ReadyBlock] = []
_NO_BLOCK: list[int] = []

_STEPS: dict[type[Packet], Callable[[ObjectReceiver, Any, float], None]] = {
    Offer: ObjectReceiver._on_offer,
    Admit: ObjectReceiver._on_admit,
    Describe: ObjectReceiver._on_describe,
    Seal: ObjectReceiver._on_seal,
    Flush: ObjectReceiver._on_flush,
    Done: ObjectReceiver._on_done,
    Bye: ObjectReceiver._on_bye,
    Behind: ObjectReceiver._on_behind,
}
