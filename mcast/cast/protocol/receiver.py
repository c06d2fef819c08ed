"""Receiver of one sender's objects: a state machine without I/O, clock or randomness of its own.

Session: an `ObjectReceiver` sends JOIN after an OFFER until an ADMIT has its nonce (`index` is set). It is
`finished` after a BYE, after `leave`, or when the sender was silent for `peer_timeout` (`silent`). A driver
may `suspend` a silent one, which keeps what has ended here, and `rejoin` when the sender is heard again.

Object: `_state` is PENDING from the DESCRIBE on, and ends once, COMPLETE or FAILED. That outcome goes into
`ended` for the driver, and into an ACK for the sender. The next object waits while the driver stores this one
(`ready_to_store`). An object fails if the sender goes on without it (DONE, BEHIND, BYE, a later OFFER or
DESCRIBE), if missing blocks are not sent any more, if nothing new arrives for `stall` seconds, or by `fail`.

Carousel: this receiver takes the first object described, and one more `ObjectReceiver` in `others` takes each
further one. They share clock and `Carousel`, and send neither NACK nor ACK.

The driver feeds DATA to `on_data`, other packets to `on_packet`; it stores the segments that `on_data`
returns as new, verifies what `take_ready` returns and calls `checked`, drops what `take_dropped` returns, and
calls `stored` or `fail` when the object is written. Each of these calls may change `due`, at which the driver
calls `messages` and sends what it returns.

Not handled here: the bytes, addresses and keys (`auth`), and which sessions to take part in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from math import inf
from random import Random
from typing import Any, NamedTuple

from mcast.cast.protocol.backoff import MIN_ROUND_TRIP, NackTimer, spread
from mcast.cast.protocol.carousel import Carousel
from mcast.cast.protocol.incoming import MAX_MISMATCHES, IncomingObject, ReadyBlock
from mcast.cast.protocol.layout import ObjectLayout
from mcast.cast.protocol.packets import (
    ALL_MEMBERS,
    COMPLETE,
    COMPLETE_LEFT,
    FAILED,
    LEFT,
    MAX_ROUND_TRIP,
    NACK_HEADER_SIZE,
    NO_VERSION,
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

SENDER_SILENT = "the sender was silent"
NO_SEGMENT = "no segment arrived, only shorter messages,"
"""Beginnings of reasons: the second is what a link with a smaller MTU looks like."""
"""Beginning of the reason of an object whose sender was not heard for `peer_timeout` seconds."""

MAX_PARTIAL_OBJECTS = 32
"""Maximum objects of a carousel that are incomplete at a time; each has a file or memory of its own."""


class ReceiverConfig(NamedTuple):
    """Properties of a receiver.

    number           of this end, from `number_at`
    name             for the sender's report
    window           maximum blocks that it buffers beyond its first missing one
    max_message      maximum bytes of a message that it can receive
    uses_parity      True if it can decode parity segments
    peer_timeout     maximum seconds without any packet of the sender
    stall            maximum seconds without a new segment while the sender is heard; a carousel is given up
                     after this time at the earliest
    stores           True if an object is complete only after the driver has called `stored`
    nonce            random, of this session
    partial_objects  maximum objects of a carousel that are incomplete at a time
    queue            messages that its receive queue holds; 0 if unknown
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
    """Outcome of an object here; `reason` is empty if it is complete."""

    about: Describe
    complete: bool
    reason: str


class _SenderClock:
    """Last stamp of the sender and when it arrived, and the group's size and round trip by the sender."""

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
        """Return the time since the last stamp arrived, in µs."""
        return min(micros(now - self.at), (1 << 32) - 1)


class ObjectReceiver:
    """State machine of a receiver in the session of one sender."""

    def __init__(self, session: int, config: ReceiverConfig, random: Random, now: float) -> None:
        self.session: int = session
        self.config: ReceiverConfig = config
        self.index: int | None = None
        """Bit of this receiver in the sender's bitmaps; None before the sender has admitted it."""
        self.finished: bool = False
        """True if the session has ended here."""
        self.reason: str = ""
        """Reason for the end of the session."""
        self.silent: bool = False
        """True if the session has ended because the sender was silent; `rejoin` resumes it."""
        self.dismissed: bool = False
        """True if the sender has ended the session for this receiver alone; `rejoin` takes another number."""
        self.duplicate: bool = False
        """True if the current object is a version that has completed here before, and is not received."""
        self.ended: list[ObjectEnd] = []
        """Outcomes of objects, which the driver removes."""
        self.rejected: Counter[str] = Counter[str]()
        """Number of contents of packets that were not accepted, by reason."""
        self.others: dict[int, ObjectReceiver] = {}
        """Receivers of the other incomplete objects of a carousel, by number of the object."""
        self._random = random
        self._clock, self._last_progress = _SenderClock(now), now
        self._carousel: Carousel | None = None
        self._nack_timer = NackTimer(random)
        self._updated_at: float | None = None  # when a packet may have shown that segments are missing
        self._current: tuple[Describe, IncomingObject] | None = None
        self._last_number = -1
        self._version = NO_VERSION  # the newest one that has completed here
        self._is_first = True  # the next object is the first one since this end joined
        self._is_late = False  # the first segment received of the object may be from its middle
        self._state = PENDING
        self._answer_timers = _AnswerTimers()

    @property
    def incoming(self) -> IncomingObject | None:
        """State of the current object, or of the last one."""
        return self._current and self._current[1]

    @property
    def about(self) -> Describe | None:
        """Description of that object."""
        return self._current and self._current[0]

    # --- input from packets and from the driver --------------------------------------------------

    def add_pause(self, paused: float) -> None:
        """Do not count the last `paused` seconds, in which the driver did not receive, as silence."""
        self._clock.heard += paused
        for one in self.object_receivers():
            one._last_progress += paused

    def object_receivers(self) -> Iterator[ObjectReceiver]:
        """Yield this receiver, and those of the other objects of the carousel."""
        yield self
        yield from self.others.values()

    def on_packet(self, packet: Packet, now: float) -> None:
        """Process a packet other than DATA."""
        if self.finished or packet.session != self.session:
            return
        if isinstance(packet, Nack):
            self._on_nack(packet, now)
        elif (step := _STEPS.get(type(packet))) is not None:
            self._clock.heard = now
            receiver = self.others.get(packet.object, self) if isinstance(packet, Seal | Flush) else self
            step(receiver, packet, now)

    def wanted(self, object_: int, block: int, now: float) -> tuple[int, int]:
        """Open a block of which segments arrive; return a bitmap of those that the driver must store.

        It is 0 if none is needed, or if the block is not to be stored now. The second number returned is that
        of the segments that make the block ready to verify; 0 before its SEAL is there.
        """
        receiver = self.others.get(object_, self)
        incoming = receiver._on_segment(object_, block, now)
        if incoming is None:
            return 0, 0
        wanted = incoming.wanted(block)
        receiver._after_update(incoming, now)
        return wanted

    def on_data(self, object_: int, block: int, segments: int, messages: int, now: float) -> int:
        """Process segments of a block, and return a bitmap of the new ones, which the driver must store.

        segments  bitmap of segments that have arrived
        messages  number of messages with a segment of the block, also with one that had arrived before
        """
        receiver = self.others.get(object_, self)
        incoming = receiver._on_segment(object_, block, now)
        if incoming is None:
            return 0
        new = incoming.add_segments(block, segments, messages)
        if new and not receiver._is_carousel:  # there, segments may be dropped and arrive again without end
            receiver._last_progress, receiver._nack_timer.suppressed = now, 0
        receiver._after_update(incoming, now)
        return new

    def _on_segment(self, object_: int, block: int, now: float) -> IncomingObject | None:
        """Return the object of a segment if this receiver takes part in it."""
        self._clock.heard = now
        incoming = self._takes_part(object_)
        if incoming is not None and self._is_late and not incoming.begun:
            incoming.request_from = block
        return incoming

    def resume(self, blocks: int, now: float) -> None:
        """Note that an earlier run has stored the first blocks of the object that was just described.

        `take_ready` returns each of them in order, when its digest is known, for the driver to verify.
        """
        incoming = self.incoming
        if incoming is not None and self._state == PENDING and blocks:
            incoming.resume(blocks)
            self._schedule_stored(now + spread(self._random, self._clock.members))

    def allow_any_order(self) -> None:
        """Accept blocks far ahead of the object just described: the driver can write them in any order."""
        if self.incoming is not None:
            self.incoming.allow_any_order()

    def take_dropped(self) -> list[int]:
        """Remove and return the blocks of the current object whose segments the driver shall drop."""
        if self._current is None or not self._current[1].dropped:
            return _NO_BLOCK
        found, self._current[1].dropped = self._current[1].dropped, []
        return found

    def take_ready(self) -> list[ReadyBlock]:
        """Remove and return the blocks of the current object to verify; `checked` takes the outcome."""
        if self._current is None or not self._current[1].ready:
            return _NO_READY
        found, self._current[1].ready = self._current[1].ready, []
        return found

    def checked(self, block: int, valid: bool, now: float) -> None:
        """Process the driver's comparison of a ready block with its digest."""
        incoming = self.incoming
        if incoming is None or self._state != PENDING:
            return
        is_stored = incoming.prefix.active and block == incoming.prefix.base
        if not valid and is_stored:
            incoming.reject(block)
            self._schedule_stored(now)
            self._after_update(incoming, now)  # the sender may not send the block any more
            return
        if not valid:
            self.rejected["a block that differs from its digest"] += 1
            if not incoming.reject(block):
                self.fail(f"a block differed from its digest {MAX_MISMATCHES} times", now)
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
    def ready_to_store(self) -> bool:
        """True while the current object has arrived, and the driver has not called `stored` or `fail` yet."""
        return self._is_incomplete and self._current is not None and self._current[1].complete

    @property
    def digest(self) -> bytes | None:
        """Digest of the current object, from the sender; None until all was sent."""
        return self._current and self._current[1].digest

    def stored(self, now: float) -> None:
        """Complete the object, because the driver has written it."""
        if self.ready_to_store:
            self._finish(COMPLETE, "", now)

    @property
    def late(self) -> bool:
        """True if this receiver joined too late for the object, its first one, and has no block of it."""
        return (
            self._is_late
            and self._current is not None
            and self._current[1].unrecoverable
            and not self._current[1].base
        )

    def fail(self, reason: str, now: float) -> None:
        """Give up the current object; the reason goes to the sender."""
        if self._current is not None and self._state == PENDING:
            self._finish(FAILED, reason, now)

    def leave(self, reason: str) -> None:
        """End the session here."""
        for one in self.object_receivers():
            if not one.finished:
                one._leave_behind(reason or "the sender has ended the session")
                one.finished = True
                one.reason = reason

    def suspend(self) -> None:
        """Free all memory but the record of what has ended, until the silent sender is heard again."""
        self.others.clear()
        self._updated_at = None
        self._nack_timer, self._answer_timers = (
            NackTimer(self._random),
            _AnswerTimers(self._answer_timers.reason),
        )
        if self._current is not None:
            self._current[1].forget()

    def rejoin(self, nonce: int, now: float, number: int | None = None) -> None:
        """Resume after `suspend`, because the sender is heard again: receive what has not ended here.

        number  new number of this end, because the sender has dismissed the old one
        """
        self.config = self.config._replace(nonce=nonce, number=number or self.config.number)
        self.index, self.finished, self.reason, self.silent = None, False, "", False
        self.dismissed = False
        self._is_first, self._clock = True, _SenderClock(now)
        if self._carousel is not None:
            self._carousel.on_sender_resumed(now)

    # --- output ----------------------------------------------------------------------------------

    def leave_packets(self, reason: str, now: float) -> list[bytes]:
        """Return the packets to leave the session; repeat them until a BYE confirms it (`finished`)."""
        if self.finished or self.index is None:
            return []
        state = COMPLETE_LEFT if self._state == COMPLETE else LEFT
        return [encode(self._ack_packet(now)._replace(state=state, reason=printable(reason)))]

    @property
    def done(self) -> bool:
        """True if the object has ended here, and the driver has removed its outcome from `ended`."""
        return self._state != PENDING and not self.ended

    @property
    def carousel_finished(self) -> bool:
        """True if all objects of the carousel have ended here, or are given up."""
        return self._carousel is not None and self._carousel.finished

    @property
    def ack_pending(self) -> bool:
        """True while an ACK is scheduled."""
        return not self.finished and self._answer_timers.ack < inf

    @property
    def due(self) -> float:
        """When to call `messages` next; any other call may change it."""
        if self.finished:
            return inf
        if self._updated_at is not None:
            self._update_nack_timer()
        nack = inf if self._nack_timer.due is None else self._nack_timer.due
        unseen = inf if self._carousel is None else self._carousel.due(self.config.stall)
        return min(
            nack,
            self._answer_timers.due,
            self._clock.heard + self.config.peer_timeout,
            self._stalls_at,
            unseen,
        )

    def messages(self, now: float) -> list[bytes]:
        """Return the packets to send now."""
        if self.finished or now < self.due:
            return []
        if now >= self._clock.heard + self.config.peer_timeout:
            self.leave(f"{SENDER_SILENT} for {self.config.peer_timeout:g} s")
            self.silent = True
            return []
        if now >= self._stalls_at:
            self.fail(self._hopeless_reason or f"{self._stall_reason} for {self.config.stall:g} s", now)
        if self._carousel is not None and now >= self._carousel.due(self.config.stall):
            self._carousel.given_up = True
        out = [
            encode(packet)
            for packet in self._answer_timers.pop(
                now, self._join_packet, self._ack_packet, self._stored_packet
            )
        ]
        incoming = self.incoming
        if incoming is not None and self._nack_timer.due is not None and now >= self._nack_timer.due:
            count = (self.config.max_message - NACK_HEADER_SIZE) // REQUEST_SIZE
            trip, members = self._clock.round_trip, self._clock.members
            requests = (
                self._nack_timer.requests(incoming.requests(), now, trip, members, count)
                if self._is_incomplete
                else ()
            )
            if requests:
                stamp, hold_time = self._clock.stamp, self._clock.hold_time(now)
                base, me = incoming.base, self.config.number
                if incoming.prefix.active:  # repeat it: a late receiver takes part only after this ACK
                    out.append(encode(self._stored_packet(now)))
                out.append(encode(Nack(self.session, incoming.number, me, base, stamp, hold_time, requests)))
            if self._is_incomplete and incoming.has_requests:
                self._start_nack_timer(now)
        return out

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
            self._version,
        )

    def _ack_packet(self, now: float) -> Ack:
        incoming = self.incoming
        number, base = (0, 0) if incoming is None else (incoming.number, incoming.base)
        stamp, hold_time = self._clock.stamp, self._clock.hold_time(now)
        reason = self._answer_timers.reason
        return Ack(self.session, number, self.config.number, base, stamp, hold_time, self._state, reason)

    def _stored_packet(self, now: float) -> Ack:
        blocks = 0 if self.incoming is None else self.incoming.prefix.until
        return self._ack_packet(now)._replace(base=blocks, state=STORED)

    # --- transitions -----------------------------------------------------------------------------

    @property
    def _is_incomplete(self) -> bool:
        """True while the current object can still complete here."""
        return self._current is not None and self._state == PENDING and not self._current[1].unrecoverable

    @property
    def _is_carousel(self) -> bool:
        """True if the current object is of a carousel, so that its sender expects no answer."""
        return self._current is not None and self._current[0].carousel > 0

    @property
    def _stalls_at(self) -> float:
        """When to give up the object for lack of progress; inf if nothing is missing.

        A cycle of a carousel may take any time, so there it is inf until `hopeless_reason` is set.
        """
        waits = (
            self._is_incomplete
            and not self.ready_to_store
            and (not self._is_carousel or self._hopeless_reason)
        )
        return self._last_progress + self.config.stall if waits else inf

    @property
    def _stall_reason(self) -> str:
        if self.incoming is None or not self.incoming.has_segments:
            return NO_SEGMENT
        is_writing = self.incoming.is_writing
        return "the program or disk here took nothing" if is_writing else "the sender sent no missing segment"

    @property
    def _hopeless_reason(self) -> str:
        return "" if self.incoming is None else self.incoming.hopeless_reason

    def _takes_part(self, number: int) -> IncomingObject | None:
        """Return the object of that number if it is the current one and pending."""
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
        """End the object here, once: later packets about it, also after a silence, change nothing."""
        if self._current is not None and self._state == PENDING:
            self._state, self._answer_timers.reason = state, printable(reason)
            self._nack_timer.due, self._answer_timers.stored = None, inf
            self.ended.append(ObjectEnd(self._current[0], state == COMPLETE, reason))
            if state == COMPLETE:
                self._version = max(self._version, self._current[0].version)
            if self._carousel is not None:
                self._current[1].drop_all()
                self._carousel.on_end(self._current[1].number)

    def _leave_behind(self, reason: str) -> None:
        """Fail the object, because the sender goes on without this receiver, unless it has all arrived."""
        if not self.ready_to_store:
            self._end_object(FAILED, reason)

    def _on_offer(self, offer: Offer, now: float) -> None:
        self._clock.update(offer, now)
        if self._current is not None and offer.object > self._current[1].number:
            self._leave_all_behind()
        self._last_number = max(self._last_number, offer.object - 1)
        if self._carousel is not None and self._carousel.is_before_end(offer.object):
            self._carousel.invited += 1
        elif self.index is None and self._answer_timers.join == inf:
            self._answer_timers.join = now + spread(self._random, 1000)

    def _leave_all_behind(self) -> None:
        for one in self.object_receivers():
            one._leave_behind("left behind: the sender went on to the next object")

    def _on_admit(self, admit: Admit, now: float) -> None:
        if self.index is None:
            index, nonce = admit.indexes.get(self.config.number, (None, None))
            if index is not None and nonce == self.config.nonce:
                self.index, self._answer_timers.join = index, inf

    def _on_describe(self, about: Describe, now: float) -> None:
        if (self.index is None and not about.carousel) or about.object <= self._last_number:
            return
        if self._carousel is not None and self._carousel.is_before_end(about.object):
            if self._carousel.contains(about):
                self._begin_other(self._carousel, about, now)
            else:
                self.rejected["an object that is not of this carousel"] += 1
            return
        if self._current is not None and about.object <= self._current[1].number:
            return
        # Let it end first: DESCRIBE is repeated.
        if any(one.ready_to_store for one in self.object_receivers()):
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
        self.duplicate = NO_VERSION < about.version <= self._version
        if self.duplicate:  # the sender has lost the ACK, or this is for other receivers: answer if it asks
            self._state = COMPLETE
            return
        if about.carousel:
            self._answer_timers.join = self._answer_timers.ack = inf
        if incoming.complete:
            self._on_complete(now)

    def _begin_other(self, carousel: Carousel, about: Describe, now: float) -> None:
        """Receive one more object of the carousel, unless it has ended here.

        If too many objects are incomplete, the newest one is dropped, so that the older ones complete.
        """
        if not carousel.described(about.object, now) or about.object == self._number:
            return
        for number in [number for number, one in self.others.items() if one.done]:
            del self.others[number]
        if about.object in self.others:
            return
        if sum(one._is_incomplete for one in self.object_receivers()) >= self.config.partial_objects:
            partly = [
                number for number, one in self.others.items() if one._is_incomplete and not one.ready_to_store
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
        """Number of the current object; -1 before there is one."""
        return -1 if self._current is None else self._current[1].number

    def _on_seal(self, seal: Seal, now: float) -> None:
        self._clock.update(seal, now)
        incoming = self._takes_part(seal.object)
        if incoming is None:
            return
        if not incoming.begun and self._is_late:
            incoming.request_from = seal.block
        incoming.update_sent(0, UNKNOWN_BLOCKS, seal.low)
        if not incoming.add_infos(seal.block, seal.blocks):
            self.rejected["a block that the object cannot have"] += 1
        self._after_update(incoming, now)

    def _on_flush(self, flush: Flush, now: float) -> None:
        self._clock.update(flush, now)
        incoming = self._takes_part(flush.object)
        if incoming is not None:
            if flush.idle:
                incoming.request_from = 0
            incoming.update_sent(flush.blocks, flush.total, flush.low, flush.digest)
            if incoming.complete:
                self._on_complete(now)
            self._after_update(incoming, now)
        if self.index is not None and flush.ack_bits << flush.first >> self.index & 1:
            self._schedule_ack(now)

    def _after_update(self, incoming: IncomingObject, now: float) -> None:
        if self._is_incomplete:
            if self._updated_at is None:
                self._updated_at = now
        elif self._state == PENDING:
            why = "joined too late for the object" if self.late else "misses blocks that the sender dropped"
            self._finish(FAILED, f"left behind: this receiver {why}", now)

    def _update_nack_timer(self) -> None:
        """Start the timer if a segment is missing since the last update; once for all packets of a step."""
        now, self._updated_at = self._updated_at, None
        if now is not None and self._nack_timer.due is None and self._is_incomplete:
            assert self._current is not None
            if self._current[1].has_requests:
                self._start_nack_timer(now)

    def _on_nack(self, nack: Nack, now: float) -> None:
        self._update_nack_timer()
        incoming = self._takes_part(nack.object)
        if incoming is not None and nack.member != self.config.number and self._nack_timer.due is not None:
            for request in nack.requests:
                if incoming.misses_block(request.block):
                    self._nack_timer.on_nack(request, now, self._clock.round_trip, self._clock.members)

    def _on_done(self, done: Done, now: float) -> None:
        for one in self.object_receivers():
            if one._current is not None and done.object >= one._number:
                reason = "left behind: the sender does not wait for this receiver"
                one._leave_behind("the carousel has ended" if one._is_carousel else reason)
                one._answer_timers.ack = inf
        self._last_number = max(self._last_number, done.object)

    def _on_behind(self, behind: Behind, now: float) -> None:
        named = self.index is not None and behind.slow << behind.first >> self.index & 1
        if named and behind.object == self._number:
            self._leave_behind("left behind: this receiver is too slow for the sender's strategy")

    def _on_bye(self, bye: Bye, now: float) -> None:
        if bye.member == ALL_MEMBERS:
            self.leave(bye.reason and f"the sender has ended the session: {bye.reason}")
        elif bye.member == self.config.number:
            self.leave(bye.reason)
            self.dismissed = True


class _AnswerTimers:
    """Times at which to send JOIN, ACK, and ACK with state STORED; inf for none."""

    __slots__ = ("ack", "join", "reason", "stored")

    def __init__(self, reason: str = "") -> None:
        self.join = self.ack = self.stored = inf
        self.reason = reason

    @property
    def due(self) -> float:
        return min(self.join, self.ack, self.stored)

    def pop(
        self,
        now: float,
        join: Callable[[float], Packet],
        ack: Callable[[float], Packet],
        stored: Callable[[float], Packet],
    ) -> list[Packet]:
        """Make the packets that are due, and reset their timers."""
        packets = []
        if now >= self.join:
            self.join = inf
            packets.append(join(now))
        if now >= self.ack:
            self.ack = inf
            packets.append(ack(now))
        if now >= self.stored:
            self.stored = inf
            packets.append(stored(now))
        return packets


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
