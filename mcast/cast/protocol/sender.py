"""Sender of objects to a group: a state machine without I/O, clock or randomness.

Session: from the beginning the sender repeats OFFER, and admits each JOIN. `close` ends it with a BYE to all.

Object: `begin` starts one, at most one at a time (or one carousel). The driver offers blocks while
`blocks_wanted` is positive, and calls `end` with the digest. The object ends when its strategy says so
(`_check_done`), or by `abandon`; its result goes into `results`. `_queue.checked` is False when something has
happened that may end it, so that thousands of answers cost one check.

Priority in a step (`messages`): leave receivers behind; BYE, ADMIT and repeated packets; OFFER; repairs; new
segments; and FLUSH if nothing else is left. Rate and window limit segments only. A carousel has neither
repairs nor window, and sends one cycle after another, of its objects in turn.

Receivers: `MemberTable` has their state. A receiver is given up if it does not answer for `peer_timeout`,
makes no progress for `stall` while others wait for it, or requests more repairs than its budget. It is then
answered with a BYE only. `Stragglers` chooses receivers that are left behind in one object alone.

The driver feeds packets to `on_packet`, and calls `messages` at `due`. That returns encoded packets, and
`SegmentRange`s, which the driver turns into DATA packets from its blocks. The driver owns the blocks' bytes.

Not handled here: the bytes, keys (`auth`), and admission control: each receiver that joins is admitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from mcast.cast.protocol.backoff import RoundTrip, backoff_round_trips
from mcast.cast.protocol.members import (
    BEHIND,
    MAX_MEMBERS_PER_ADDRESS,
    Member,
    MemberStatus,
    MemberTable,
)
from mcast.cast.protocol.outgoing import FlushTimer, OutgoingObject, Terms
from mcast.cast.protocol.packets import (
    ALL_MEMBERS,
    COMPLETE,
    COMPLETE_LEFT,
    LEFT,
    MAX_ADMITTED,
    MAX_CAROUSEL,
    MAX_K,
    MAX_MEMBERS,
    MAX_METADATA,
    MAX_PARITY,
    MAX_ROUND_TRIP,
    MAX_SEALS,
    MAX_WINDOW,
    MEMBER_PACKETS,
    MIN_MESSAGE_SIZE,
    NO_VERSION,
    STORED,
    UNKNOWN_SIZE,
    Ack,
    Admit,
    Behind,
    BlockInfo,
    Bye,
    Describe,
    Done,
    Join,
    Nack,
    Offer,
    Packet,
    encode,
    micros,
    printable,
    segment_size,
)
from mcast.cast.protocol.rate import MAX_BURST, SMALL_GROUP, TOLERABLE_LOSS, Rate, Window
from mcast.cast.protocol.repairs import SegmentRange
from mcast.cast.protocol.stragglers import Stragglers
from mcast.cast.protocol.strategy import Strategy, TransferState

_REPEATS = 3
"""Number of times that a packet without acknowledgement is sent."""

_CAROUSEL_REPEATS = 2
"""Number of times in a carousel of several objects, whose next cycle repeats the packet."""

_ADMIT_DELAY = 0.002
"""Seconds for which JOINs are collected into one ADMIT."""

_DESCRIBE_INTERVAL = 8
"""Blocks after which DESCRIBE is repeated, for receivers that have lost it."""

_SEALS_PER_BLOCK = 4
"""Number of SEALs that describe a block, one for each burst; only who loses all of them misses it."""

_OFFER_SHARE = 4
"""At most one message in _OFFER_SHARE goes with an OFFER, however slow the pace is."""

_SILENT_FLUSHES = 4
"""Unanswered FLUSHes in a small group, which is asked often, before the silence of a receiver counts."""

_MIN_BUDGET, _BUDGET_FACTOR = 4096, 8
"""Repair budget per receiver: a minimum number of segments, plus a multiple of what was sent."""

_SESSION_FULL = f"session full: at most {MAX_MEMBERS} receivers, {MAX_MEMBERS_PER_ADDRESS} per address"
"""Reason of a BYE, in at most MAX_TEXT bytes."""

_BITMAP_SIZE = (MIN_MESSAGE_SIZE - 64) * 8 // 2
"""Receivers for which one packet has bits."""


class Timers(NamedTuple):
    """Timeouts of a sender, in seconds.

    offer           between two OFFERs
    peer_timeout    maximum silence of a receiver that is asked for an ACK
    stall           maximum time without progress of a receiver for which others wait
    max_round_trip  maximum round trip; a longer measurement counts as this one
    """

    offer: float = 0.1
    peer_timeout: float = 10.0
    stall: float = 60.0
    max_round_trip: float = 0.25


class ObjectInfo(NamedTuple):
    """Properties of an object that DESCRIBE announces; `size` is None for a stream."""

    size: int | None = None
    name: str = ""
    metadata: bytes = b""
    version: int = NO_VERSION


class ReceiverReport(NamedTuple):
    """Outcome of one object at one receiver.

    name, address  of the receiver
    complete       True if it has the object
    seconds        from the beginning of the object to its ACK; inf if it does not have the object
    nacks          number of its NACKs
    requested      number of segments that it requested
    reason         for not having the object; empty if it has
    number         of the receiver, which is the same in all objects of a session
    version        the newest version that it has of what the session published; None if it has none
    """

    name: str
    address: str
    complete: bool
    seconds: float
    nacks: int
    requested: int
    reason: str
    number: int
    version: int | None = None


class ObjectResult(NamedTuple):
    """Outcome of one object.

    object        its number
    strategy_met  True if the strategy's promise was kept
    segments      number of source segments that were sent or skipped
    repairs       number of repair segments that were sent: parity, and source segments again
    parity        True if the sender had parity segments
    receivers     a report for each receiver that took part
    skipped       number of source segments that were not sent, because all receivers had them stored
    cycles        complete cycles of a carousel
    digest        of the object, as sent to the receivers; None if the object was abandoned before its end
    """

    object: int
    strategy_met: bool
    segments: int
    repairs: int
    parity: bool
    receivers: tuple[ReceiverReport, ...]
    skipped: int = 0
    cycles: int = 0
    digest: bytes | None = None


class ObjectSender:
    """State machine of a sender: invites receivers, and sends them one object after another."""

    def __init__(
        self,
        session: int,
        name: str,
        max_message: int,
        now: float,
        timers: Timers = Timers(),  # noqa: B008  (immutable)
        limit: float = inf,
        nonce: int = 0,
    ) -> None:
        self.session: int = session
        self.max_message: int = max_message
        self.nonce: int = nonce
        self.members: MemberTable = MemberTable()
        self.rate: Rate = Rate(limit)
        self.outgoing: OutgoingObject | None = None
        """Current object; of a carousel, the one in the current cycle. None between objects."""
        self._carousel: list[OutgoingObject] = []
        """Current objects: one, or all of a carousel."""
        self.results: list[ObjectResult] = []
        """Outcomes of objects, which the driver removes."""
        self.rejected: Counter[str] = Counter[str]()
        """Number of contents of packets that were not accepted, by reason."""
        self._timers = timers
        self._measured_round_trip = RoundTrip(min(timers.max_round_trip, MAX_ROUND_TRIP))
        self._flush_timer = FlushTimer()
        self._window = Window()
        self._stragglers: Stragglers | None = None
        """Watch over the current object; None for a carousel, which no receiver holds up."""
        self._queue = _SendQueue(now, printable(name))

    # --- input from the driver -------------------------------------------------------------------

    def begin(
        self,
        now: float,
        strategy: Strategy,
        size: int | None = None,
        name: str = "",
        metadata: bytes = b"",
        k: int = MAX_K,
        parity: int = MAX_PARITY,
    ) -> Describe:
        """Begin the next object, and return its description.

        size    in bytes; None for a stream
        k       maximum source segments of a block
        parity  maximum parity segments of a block; 0 to repair with source segments alone

        Raises ValueError if an object is being sent, if the metadata is too long, or if the size of a
        carousel's object is unknown.
        """
        (about,) = self.begin_all(now, strategy, [ObjectInfo(size, name, metadata)], k, parity)
        return about

    def begin_all(
        self,
        now: float,
        strategy: Strategy,
        infos: Sequence[ObjectInfo],
        k: int = MAX_K,
        parity: int = MAX_PARITY,
    ) -> list[Describe]:
        """Begin one object, or a carousel of several, and return the descriptions. Raises as `begin` does."""
        if self.outgoing is not None:
            raise ValueError("the previous object is still being sent: wait for its result, or abandon it")
        if not 0 < len(infos) <= (MAX_CAROUSEL if strategy.carousel else 1):
            raise ValueError(f"{len(infos):,} objects in a carousel: from 1 to {MAX_CAROUSEL:,}")
        for info in infos:
            if len(info.metadata) > MAX_METADATA:
                raise ValueError(f"{len(info.metadata)} bytes of metadata: at most {MAX_METADATA}")
            if strategy.carousel and info.size is None:
                raise ValueError(
                    "a carousel sends the object again and again: its size must be known when it begins"
                )
        self.members.begin(now, not strategy.carousel, infos[0].version)
        max_message = min(
            [self.max_message, *(member.max_message for member in self.members if member.active)]
        )
        abouts = [
            Describe(
                self.session,
                self._queue.objects + position,
                UNKNOWN_SIZE if info.size is None else info.size,
                segment_size(max_message),
                k,
                parity,
                len(infos) if strategy.carousel else 0,
                position,
                printable(info.name),
                info.metadata,
                info.version,
            )
            for position, info in enumerate(infos)
        ]
        self._queue.objects += len(abouts)
        if strategy.carousel:
            self.rate.pace = self.rate.limit  # no receiver of a carousel reports losses
        self._queue.checked = False
        self._carousel, self._flush_timer = (
            [OutgoingObject(about, Terms(strategy, now)) for about in abouts],
            FlushTimer(),
        )
        self.outgoing = self._carousel[0]
        self._stragglers = None if strategy.carousel else Stragglers(strategy, now)
        self._update_window()
        for _ in range(_REPEATS):  # a receiver without the description cannot use any segment
            self._queue.send_at(now, encode(abouts[0]))
        return abouts

    @property
    def admit_at(self) -> float:
        """When an ADMIT is due, or inf; its receivers ignore segments until it arrives."""
        return self._queue.admit_at

    @property
    def blocks_wanted(self) -> int:
        """Number of blocks of the object that the driver may offer now."""
        return 0 if self.outgoing is None else self.outgoing.blocks_wanted

    def offer(self, info: BlockInfo) -> None:
        """Add the next block, which stays readable until `released` of the object is beyond it."""
        assert self.outgoing is not None
        self.outgoing.offer(info)

    def end(self, digest: bytes) -> None:
        """Note that the object has no more blocks. `digest` is of all its bytes."""
        if self.outgoing is not None:
            self.outgoing.digest = digest

    def abandon(self, now: float) -> None:
        """End the object now; receivers that do not have it are left behind."""
        if self.outgoing is not None:
            self._finish(self.outgoing, now, "the sender has given the object up")

    def close(self, now: float, reason: str = "") -> None:
        """End the session with a BYE to all receivers."""
        self._queue.send_repeatedly(
            encode(Bye(self.session, ALL_MEMBERS, printable(reason))), now, self._round_trip
        )
        self.abandon(now)  # after the BYE, so that receivers report its reason and not that of the DONE
        self._queue.closed = True

    @property
    def finished(self) -> bool:
        """True if the session has ended, and its last packets were sent."""
        return self._queue.closed and self._queue.at == inf

    # --- input from packets ----------------------------------------------------------------------

    def on_packet(self, packet: Packet, address: str, now: float) -> None:
        """Process a packet of a receiver."""
        if self._queue.closed or packet.session != self.session:
            return
        if isinstance(packet, Join):
            self._on_join(packet, address, now)
        elif isinstance(packet, MEMBER_PACKETS):
            member = self.members.get(packet.member)
            if member is None:
                self.rejected["not a receiver of this session"] += 1
            elif not member.active:
                self._send_bye(member)
            elif isinstance(packet, Ack) and packet.state in (LEFT, COMPLETE_LEFT):
                self._on_leave(member, packet, now)
            else:
                member.last_heard = now
                member.answered()
                self._window.answered(member.number, packet.stamp)
                outgoing = self.outgoing
                if outgoing is None or packet.object != outgoing.about.object or outgoing.about.carousel:
                    return
                if isinstance(packet, Ack) and packet.state == STORED:
                    self._on_stored(outgoing, member, packet.base, now)
                elif member.pending:
                    self._on_ack(outgoing, member, packet, now)
                elif member.state == BEHIND:  # it has lost the BEHIND, or it would not send this
                    behind = Behind(self.session, outgoing.about.object, member.index, 1)
                    self._queue.send_bye(member.number, encode(behind))

    def _on_join(self, join: Join, address: str, now: float) -> None:
        member = self.members.get(join.member)
        if member is None:
            outgoing = self.outgoing
            sent = outgoing.sent if outgoing else 0
            waits = outgoing is not None and not outgoing.about.carousel
            participates = waits and outgoing is not None and not outgoing.low and sent < join.window
            member = self.members.join(join, address, sent, participates, now)
            if member is None:
                bye = encode(Bye(self.session, join.member, _SESSION_FULL))
                self._queue.send_bye(join.member, bye)
                return
            if outgoing is not None:
                self._update_window()
        if member.active:
            member.nonce = join.nonce
            member.answered()  # it has lost the ADMIT, and does not answer before it has one
            self.members.note_version(member, join.version)
            self._queue.admit(member, now)
        else:
            self._send_bye(member)

    def _on_leave(self, member: Member, ack: Ack, now: float) -> None:
        outgoing, done = self.outgoing, ack.state == COMPLETE_LEFT and member.pending
        if done and outgoing is not None and ack.object == outgoing.about.object:
            self._on_ack(outgoing, member, ack._replace(state=COMPLETE), now)
        member.reason = ack.reason
        self._give_up(member, MemberStatus.LEFT)

    def _on_stored(self, outgoing: OutgoingObject, member: Member, blocks: int, now: float) -> None:
        """Process an ACK of stored blocks, which the receiver has not verified yet."""
        if not member.in_object and outgoing.low <= blocks and outgoing.sent <= blocks + member.window:
            self.members.join_late(member, outgoing.low, now)
            self._update_window()
        if member.pending:
            # The number only falls, as blocks turn out to be wrong; a reordered older ACK has a higher one.
            # The segments of such blocks were skipped, so they are no losses.
            self.members.set_stored(member, blocks if member.stored is None else min(member.stored, blocks))
            member.loss_base = max(member.loss_base, outgoing.sent)
            outgoing.stored = self.members.stored()

    def _on_ack(self, outgoing: OutgoingObject, member: Member, packet: Nack | Ack, now: float) -> None:
        early = isinstance(packet, Ack) and packet.state == COMPLETE and not outgoing.all_sent
        early = early and outgoing.about.version == NO_VERSION  # a version may have arrived as another object
        if early or packet.base > outgoing.sent or packet.stamp > micros(now):
            self.rejected["an answer about blocks that were not sent"] += 1
            return
        if packet.stamp:
            self._measured_round_trip.measured(now - packet.stamp / 1e6 - packet.hold_time / 1e6)
        self.members.advance(member, packet.base, now)
        if isinstance(packet, Ack):
            self.members.finish(member, packet.state, packet.reason, now)
            if not member.pending:
                self._window.answered(member.number, inf)
            if self.members.low() != outgoing.low or self._is_done(outgoing, now):
                self._queue.checked = False
        else:
            self._on_nack(outgoing, member, packet, now)

    def _on_nack(self, outgoing: OutgoingObject, member: Member, nack: Nack, now: float) -> None:
        self._flush_timer.on_activity()
        is_first = not member.nacks
        member.nacks += 1
        at = now + (self._round_trip if self._flush_timer.at < inf else self._nack_window)
        lost = charged = 0
        k, repairs = outgoing.about.k, outgoing.repairs
        for request in nack.requests:
            released = request.missing and request.block < outgoing.low  # a SEAL can be sent for any block
            if released or request.block >= outgoing.sent or request.missing >> k:
                self.rejected["a request for segments that were not sent"] += 1
                continue
            needs = request.need or request.missing.bit_count()
            if is_first and request.block >= member.loss_base:  # segments sent before it joined are no losses
                is_first = request.missing.bit_count() == outgoing.segments_of(request.block)
                member.loss_base = request.block + 1
            fresh = request.block >= member.loss_base
            lost += needs if fresh else repairs.lost(request, member.stamp, nack.stamp)
            more = repairs.request(request, nack.stamp, at)
            member.requested += needs if more else 0
            charged += more
        span = (outgoing.sent - member.loss_base) * k + repairs.sent(member.stamp, nack.stamp)
        if lost >= _MIN_BUDGET // k and span:
            fraction = min(1.0, lost / span)
            self.rate.lost(fraction)
            if fraction > TOLERABLE_LOSS:
                member.loss, member.loss_at = fraction, now
        member.loss_base, member.stamp = outgoing.sent, max(member.stamp, nack.stamp)
        member.charged += charged
        if member.charged > _MIN_BUDGET + _BUDGET_FACTOR * (outgoing.segments + outgoing.skipped):
            self._give_up(member, MemberStatus.OVER_BUDGET)

    # --- output ----------------------------------------------------------------------------------

    @property
    def due(self) -> float:
        """When to call `messages` next; a packet or an offered block may change it."""
        outgoing = self.outgoing
        if outgoing is None:
            return self._queue.at if self._queue.closed else min(self._queue.at, self._queue.offer)
        found = self._queue.at if self._queue.checked else self._queue.now
        paced = min(outgoing.repairs.at, self._flush_timer.at)
        ready = min(self._window.due, self.rate.next(self._queue.now) if self._window.credit else inf)
        found = min(found, max(paced, ready), self._queue.offer)
        found = min(found, self._ends_at(outgoing))
        if self._stragglers is not None:
            found = min(found, self._stragglers.at)
        if self._queue.runs or outgoing.about.carousel or not outgoing.idle:
            found = min(found, ready)
        return found

    @staticmethod
    def _ends_at(outgoing: OutgoingObject) -> float:
        strategy, begun = outgoing.terms
        return inf if strategy.seconds is None else begun + strategy.seconds

    def messages(self, now: float, limit: int = MAX_BURST) -> list[bytes | SegmentRange]:
        """Return what to send now, in order: encoded packets, and runs of at most `limit` segments in all."""
        queue, outgoing = self._queue, self.outgoing
        queue.now = now
        if outgoing is not None and self._stragglers is not None:
            self._leave_behind(outgoing, self._stragglers, now)
        out: list[bytes | SegmentRange] = list(
            queue.pop(now, self.session, encode(outgoing.about) if outgoing else b"")
        )
        if outgoing is not None and (not queue.checked or now >= self._ends_at(outgoing)):
            self._check_done(outgoing, now)
            outgoing = self.outgoing
        if now >= queue.offer and not queue.closed:
            offers = [self._offer(now)]
            if outgoing is not None and outgoing.about.carousel:  # for receivers that arrive at any time
                offers += [encode(outgoing.about), encode(outgoing.flush(*self._pulse(now), 0, 0))]
            out += offers
            queue.offer = now + max(self._timers.offer, _OFFER_SHARE * len(offers) / self.rate.pace)
        if outgoing is not None and outgoing.about.carousel:
            if allowed := min(limit, self.rate.allowed(now)):
                self._send_cycle(outgoing, out, allowed, now)
            self.rate.adapt(now, self._round_trip)
        elif outgoing is not None:
            before, allowed = outgoing.segments, int(min(limit, self.rate.allowed(now), self._window.credit))
            self.rate.adapt(now, self._round_trip)
            if allowed:
                self._start_repairs(outgoing, now)
                allowed = self._send_repairs(outgoing, out, allowed, now)
                self._send_new(outgoing, out, allowed, now)
            if outgoing.idle and not queue.runs:
                # If the source only has nothing at the moment, wait: its next block serves as a FLUSH.
                waits = outgoing.all_sent or outgoing.full
                if outgoing.segments > before and not waits:
                    self._flush_timer.end()
                self._flush_timer.begin(now if waits else now + 3 * self._nack_window)
                if allowed > 0 and now >= self._flush_timer.at:
                    self._flush(outgoing, out, now)
            else:
                self._flush_timer.end()
        self._spent(out)
        if (
            outgoing is not None
            and not outgoing.about.carousel
            and (flushes := self._window_flushes(outgoing, now))
        ):
            self._spent(flushes)
            out += flushes
        return out

    def _spent(self, out: Sequence[bytes | SegmentRange]) -> None:
        messages = sum([one.segments if type(one) is SegmentRange else 1 for one in out])
        self.rate.spent(messages)
        self._window.spent(messages)

    def _window_flushes(self, outgoing: OutgoingObject, now: float) -> list[bytes]:
        """Return the FLUSHes that the window needs: to all receivers, or to those that did not answer."""
        numbers = set[int]()
        if self._window.flush_due:
            numbers = {member.number for member in self.members if member.pending}
            self._window.flushed(micros(now), numbers)
        numbers |= self._window.to_flush(now, self._nack_window)
        if not numbers:
            return []
        bits = self.members.bits(lambda it: it.number in numbers)
        return [encode(outgoing.flush(*self._pulse(now), first, bits)) for first, bits in _bitmaps(bits)]

    def _send_cycle(
        self, outgoing: OutgoingObject, out: list[bytes | SegmentRange], allowed: int, now: float
    ) -> None:
        """Append at most `allowed` segments of a carousel, up to the end of the object's cycle."""
        while allowed > 0 and (run := outgoing.next_run(allowed, now)) is not None:
            out.append(run)
            allowed -= run.segments
            if outgoing.between_blocks:
                out.append(encode(outgoing.seal(run.block, *self._pulse(now))))
        if outgoing.end_cycle():
            last = [encode(outgoing.flush(*self._pulse(now), 0, 0))]
            if outgoing.sent:
                last.append(encode(outgoing.seal(outgoing.sent - 1, *self._pulse(now))))
            several = len(self._carousel) > 1
            out += last * (_CAROUSEL_REPEATS if several else _REPEATS)  # this may be the last cycle
            self._queue.checked = False
            if several:
                self.outgoing = self._carousel[(outgoing.about.position + 1) % len(self._carousel)]
                out += [encode(self.outgoing.about)] * _CAROUSEL_REPEATS

    def _offer(self, now: float) -> bytes:
        number = self._queue.objects if self.outgoing is None else self._carousel[0].about.object
        return encode(Offer(self.session, number, *self._pulse(now), self.nonce, self._queue.name))

    @property
    def _round_trip(self) -> float:
        """Round trip of the group in seconds, cut so that slow receivers do not delay the others' repairs."""
        limit = inf if self._stragglers is None else self._stragglers.max_round_trip(self._queue.now)
        return min(self._measured_round_trip.seconds, limit)

    @property
    def _nack_window(self) -> float:
        """Seconds in which NACKs for the same loss arrive."""
        return backoff_round_trips(len(self.members)) * self._round_trip

    def _pulse(self, now: float) -> tuple[int, int, int]:
        """Return stamp, number of receivers and round trip, as packets have them."""
        return micros(now), len(self.members), micros(self._round_trip)

    def _start_repairs(self, outgoing: OutgoingObject, now: float) -> None:
        if now >= outgoing.repairs.at and not self._queue.runs:
            self._queue.runs, self._queue.seals = outgoing.repairs.take()
            self._queue.taken = now
            self._flush_timer.on_activity()

    def _send_repairs(
        self, outgoing: OutgoingObject, out: list[bytes | SegmentRange], allowed: int, now: float
    ) -> int:
        """Append at most `allowed` repair segments, and return how many more are allowed."""
        runs = self._queue.runs
        while runs and allowed > 0:
            run = runs.pop(0)
            if run.segments > allowed:
                runs.insert(0, SegmentRange(run.block, run.first + allowed, run.segments - allowed))
                run = run._replace(segments=allowed)
            out.append(run)
            allowed -= run.segments
            outgoing.repaired += run.segments
            if not runs:
                outgoing.repairs.mark_sent(micros(now))
                outgoing.sent_at += now - self._queue.taken  # time spent on repairs is no stall of a receiver
        return allowed

    def _send_new(
        self, outgoing: OutgoingObject, out: list[bytes | SegmentRange], allowed: int, now: float
    ) -> None:
        if not self._queue.runs and self._queue.seals:
            out += [encode(outgoing.seal(block, *self._pulse(now))) for block in self._queue.seals]
            self._queue.seals = []
        ended = 0
        while allowed > 0 and not self._queue.runs:
            if outgoing.skip_stored():
                while outgoing.skip_stored():
                    pass
                out.append(encode(outgoing.seal(outgoing.sent - 1, *self._pulse(now))))
                outgoing.sent_at = now
                self._queue.checked = False  # ask the driver for the next blocks at once, not after a FLUSH
            if (run := outgoing.next_run(allowed, now)) is None:
                break
            out.append(run)
            allowed -= run.segments
            if outgoing.between_blocks:
                ended += 1
                if outgoing.sent % _DESCRIBE_INTERVAL == 0:
                    out.append(encode(outgoing.about))
        if ended:
            infos = min(MAX_SEALS, ended * _SEALS_PER_BLOCK)
            out.append(encode(outgoing.seal(outgoing.sent - 1, *self._pulse(now), infos)))

    def _update_window(self) -> None:
        if self.outgoing is not None:
            self.outgoing.window = min(self.members.window() or MAX_WINDOW, MAX_WINDOW)
            self._window.set_queue(self.members.queue())
            self.outgoing.stored = self.members.stored()

    def _flush(self, outgoing: OutgoingObject, out: list[bytes | SegmentRange], now: float) -> None:
        """Append a FLUSH, and give up receivers that do not answer.

        A small group is asked for ACKs in each FLUSH, but has as much time to answer as a large one.
        """
        wait, timers = 3 * self._nack_window, self._timers
        wants_acks = self._flush_timer.next_flush(now, wait, max(0.5, wait))
        target = outgoing.sent if outgoing.all_sent or not outgoing.full else outgoing.low + 1
        ack_bits, is_small = 0, self.members.pending <= SMALL_GROUP
        if wants_acks and not (is_small and 0 < self._flush_timer.idle_flushes < _SILENT_FLUSHES):
            self._check_silent(outgoing, target, now, timers)
        if wants_acks:
            out.append(encode(outgoing.about))
        if wants_acks or is_small:
            ack_bits = self.members.bits(lambda it: it.pending and (outgoing.all_sent or it.base < target))
        if outgoing.sent:
            out.append(encode(outgoing.seal(outgoing.sent - 1, *self._pulse(now))))
        out += [encode(outgoing.flush(*self._pulse(now), first, bits)) for first, bits in _bitmaps(ack_bits)]
        self._queue.checked = False

    def _check_silent(self, outgoing: OutgoingObject, target: int, now: float, timers: Timers) -> None:
        waits = outgoing.all_sent or outgoing.full
        for member in [*self.members]:
            if not member.pending or (not outgoing.all_sent and member.base >= target):
                continue
            if member.waiting_since == inf:
                member.waiting_since = now
            if member.waited(now) > timers.peer_timeout:
                self._give_up(member, MemberStatus.SILENT)
            elif waits and now - max(member.last_progress, outgoing.sent_at) > timers.stall:
                self._give_up(member, MemberStatus.STALLED)

    def _give_up(self, member: Member, status: MemberStatus) -> None:
        self.members.give_up(member, status)
        self._window.answered(member.number, inf)
        self._send_bye(member)
        self._update_window()
        self._queue.checked = False

    def _leave_behind(self, outgoing: OutgoingObject, stragglers: Stragglers, now: float) -> None:
        """Go on without the receivers that hold up others for longer than the strategy allows."""
        members = self.members
        awaited, slowed = self._window.awaited, self.rate.slowed
        slow = stragglers.check(now, outgoing, members.complete, members, awaited, slowed)
        if stragglers.to_probe:
            for first, bits in _bitmaps(_bits(stragglers.to_probe)):
                self._queue.send_at(now, encode(outgoing.flush(*self._pulse(now), first, bits)))
        if not slow:
            return
        for member in slow:
            members.finish(member, BEHIND, stragglers.reason, now)
            self._window.answered(member.number, inf)
        for first, bits in _bitmaps(_bits(slow)):
            behind = encode(Behind(self.session, outgoing.about.object, first, bits))
            self._queue.send_repeatedly(behind, now, self._round_trip)
        # Pace and round trip were those of the slow receivers.
        self.rate.restart()
        self._measured_round_trip = RoundTrip(min(self._timers.max_round_trip, MAX_ROUND_TRIP))
        self._update_window()
        self._queue.checked = False

    def _send_bye(self, member: Member) -> None:
        reason = f"given up: this receiver {member.status.value}"
        self._queue.send_bye(member.number, encode(Bye(self.session, member.number, reason)))

    def _check_done(self, outgoing: OutgoingObject, now: float) -> None:
        """Finish the object if its strategy allows that, after an update of `low`."""
        self._queue.checked = True
        if not outgoing.about.carousel:
            low = self.members.low()
            outgoing.low = outgoing.sent if low is None else max(outgoing.low, low)
            outgoing.repairs.forget(outgoing.low)
        if self._is_done(outgoing, now):
            self._finish(outgoing, now, "the strategy did not wait for this receiver")

    def _is_done(self, outgoing: OutgoingObject, now: float) -> bool:
        idle = self._flush_timer.idle_flushes if outgoing.all_sent and self._flush_timer.at < inf else 0
        seconds = now - outgoing.terms.begun
        cycles = self._carousel[-1].cycles
        state = TransferState(self.members.complete, self.members.pending, seconds, idle, cycles)
        return outgoing.terms.strategy.is_done(state)

    def _finish(self, outgoing: OutgoingObject, now: float, behind: str) -> None:
        members = self.members
        strategy, begun = outgoing.terms
        lost = sum(member.in_object and not member.pending and member.state != COMPLETE for member in members)
        reports = tuple(_report(member, begun, behind) for member in members if member.in_object)
        for one in self._carousel:
            state = TransferState(members.complete, members.pending, now - begun, 0, one.cycles)
            self.results.append(
                ObjectResult(
                    one.about.object,
                    strategy.is_met(state, lost) and one.all_sent,
                    one.segments + one.skipped,
                    one.repaired,
                    one.about.parity > 0,
                    reports,
                    one.skipped,
                    one.cycles,
                    one.digest if one.all_sent else None,
                )
            )
        complete = members.bits(lambda it: it.in_object and it.state == COMPLETE)
        for first, bits in _bitmaps(complete):
            done = encode(Done(self.session, self._queue.objects - 1, first, bits))
            self._queue.send_repeatedly(done, now, self._round_trip)
        self.outgoing, self._carousel, self._queue.runs, self._queue.seals = None, [], [], []
        self._flush_timer.end()
        members.end(now)


class _SendQueue:
    """Packets that a sender has scheduled, and the repairs that it is sending."""

    def __init__(self, now: float, name: str) -> None:
        self.name = name
        self.objects = 0
        """Number of the next object."""
        self.now = self.offer = self.taken = now
        """Times of the last step, of the next OFFER, and of the beginning of the current repairs."""
        self.runs: list[SegmentRange] = []
        """Repairs still to be sent."""
        self.seals: list[int] = []
        """Blocks whose SEAL is requested."""
        self.checked = True
        """False if something has happened that may end the object."""
        self.closed = False
        self._scheduled: list[tuple[float, int, bytes]] = []
        self._admitted: dict[int, tuple[int, int]] = {}
        self._order = 0
        self.admit_at = inf
        """When the ADMIT of `_admitted` is due."""
        self._byes: dict[int, bytes] = {}

    @property
    def at(self) -> float:
        """When the next packet is due; inf if none is scheduled."""
        due = self.now if self._byes else self.admit_at
        return min(due, self._scheduled[0][0]) if self._scheduled else due

    def send_at(self, at: float, message: bytes) -> None:
        """Schedule a packet."""
        self._order += 1
        heappush(self._scheduled, (at, self._order, message))

    def send_repeatedly(self, message: bytes, now: float, trip: float) -> None:
        """Schedule a packet _REPEATS times, because it is not acknowledged."""
        for step in range(_REPEATS):
            self.send_at(now + step * trip, message)

    def send_bye(self, number: int, message: bytes) -> None:
        """Schedule a BYE or BEHIND for one receiver: once in a step, however much the receiver sends."""
        if len(self._byes) < MAX_BURST:
            self._byes[number] = message

    def admit(self, member: Member, now: float) -> None:
        """Schedule an ADMIT for the receivers of the next _ADMIT_DELAY seconds, with a DESCRIBE."""
        self._admitted[member.number] = member.index, member.nonce
        self.admit_at = min(self.admit_at, now + _ADMIT_DELAY)

    def pop(self, now: float, session: int, about: bytes) -> list[bytes]:
        """Remove and return the packets that are due. `about` is the DESCRIBE to go with an ADMIT."""
        out = list(self._byes.values())
        self._byes = {}
        if now >= self.admit_at:
            rows = list(self._admitted.items())
            starts = range(0, len(rows), MAX_ADMITTED)
            out += [encode(Admit(session, dict(rows[at : at + MAX_ADMITTED]))) for at in starts]
            out += [about] if about else []
            self._admitted, self.admit_at = {}, inf
        while self._scheduled and self._scheduled[0][0] <= now:
            out.append(heappop(self._scheduled)[2])
        return out


def _bitmaps(bits: int) -> list[tuple[int, int]]:
    """Split a bitmap into (first bit, bits) for each packet that it needs; at least one."""
    parts = [
        (first, bits >> first & (1 << _BITMAP_SIZE) - 1)
        for first in range(0, bits.bit_length(), _BITMAP_SIZE)
    ]
    return [bits for bits in parts if bits[1]] or [(0, 0)]


def _bits(members: Iterable[Member]) -> int:
    """Return a bitmap of these receivers, by index."""
    bits = 0
    for member in members:
        bits |= 1 << member.index
    return bits


def _report(member: Member, begun: float, behind: str) -> ReceiverReport:
    complete = member.state == COMPLETE
    reason = "" if complete else member.reason or (behind if member.active else member.status.value)
    seconds = member.complete_at - begun if complete else inf
    return ReceiverReport(
        member.name,
        member.address,
        complete,
        seconds,
        member.nacks,
        member.requested,
        reason,
        member.number,
        None if member.version == NO_VERSION else member.version,
    )
