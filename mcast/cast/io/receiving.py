"""Receiving session: takes part in the sessions of all senders of a group, and assembles their objects.

Theory of operation. `ReceivingSession` owns a `_SenderSession` for each sender, which owns the protocol's
`ObjectReceiver` (`core`) and a `Delivery`: the blocks and the sink of the object in transfer. For a carousel
of several objects a `_SenderSession` has one more of its kind for each other object (`others`).

- A step sends what the cores have to send, waits for messages or the earliest timer, parses the messages into
  runs of segments and other packets, passes them to the core, and stores segments that the core calls new.
- Segments: `_on_batch` has the placer put segments of open blocks into place (`placing`), and opens those
  blocks that it meets and the core wants.
- Blocks: when the core has enough segments of a block, the object's `Delivery` verifies and writes it; then
  `core.checked` confirms it to the sender, so that a slow sink slows the sender down. While a thread verifies
  and nothing arrives, the step waits for the thread.
- Objects: when all blocks are written and the digest is right, `sink.commit` publishes the object, polled
  every `_POLL_INTERVAL` because a disk may be slow. `_finish_objects` turns the core's results into
  `Received` or `Missed`. An object is handed to the program after the sender knows about it, because the
  program may take its time then.
- While a complete object waits for the program, received messages are copied and processed later
  (`_deferred`): the next object may overwrite the same buffer or file.
- An error of a sink or of the caller's function ends that object at this receiver (`_fail`), and is reported
  to its sender. The session and other objects continue.
- Past sessions are remembered, so that an object that ended here is not received a second time.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from random import SystemRandom
from typing import NamedTuple

from pydantic import BaseModel
from typing_extensions import Buffer

from mcast.api import Batch, Series
from mcast.arguments.copies import reduce_with_copies
from mcast.arguments.seconds import check_seconds
from mcast.cast.io.delivery import MAX_READ_BACK, Delivery
from mcast.cast.io.driver import (
    MAX_RX_BATCH,
    SessionContext,
    SessionSteps,
    copied,
    error_text,
    from_others,
    payloads_of,
)
from mcast.cast.io.files import Sink, native
from mcast.cast.io.placing import DataRun, coalesced, gid_of, placer_for, run_of
from mcast.cast.io.sinks import (
    BufferSink,
    Offered,
    ReceiveTarget,
    StagedBufferSink,
    Target,
    require_whole,
    sink_at,
    sink_of,
)
from mcast.cast.io.workers import Workers
from mcast.cast.protocol import fec
from mcast.cast.protocol.auth import NEEDS_KEY, WRONG_KEY, authenticator_for
from mcast.cast.protocol.packets import (
    MAX_K,
    MAX_TEXT,
    MAX_WINDOW,
    NO_VERSION,
    UNKNOWN_SIZE,
    VERSION,
    Bye,
    Describe,
    Flush,
    Offer,
    Packet,
    Rejected,
    Seal,
    segment_size,
)
from mcast.cast.protocol.receiver import MAX_PARTIAL_OBJECTS, ObjectReceiver, ReceiverConfig
from mcast.endpoint.waiting import Step, call_user

logger: logging.Logger = logging.getLogger("mcast")

MAX_SESSIONS = 16
"""Maximum number of sessions that a receiver takes part in at a time."""
MAX_SESSIONS_PER_ADDRESS = 4
"""Maximum number of sessions at one address, so that one host cannot use up `MAX_SESSIONS`."""

MAX_PAST_SESSIONS = 1024
"""Maximum number of sessions that are remembered after they have ended here, or whose sender is silent.

Beyond it the oldest session of the address with the most sessions is forgotten. A session takes some KB, and
16 KB more for a carousel of 65,536 objects. For objects that are sent once, however many, the number of the
last one is enough.
"""
_REJOIN_INTERVAL = 1.0
"""Time to wait before this receiver joins a session again that has dismissed it, in seconds."""
_POLL_INTERVAL = 0.01
"""Interval to poll a disk or a sink that is not ready, in seconds."""
_LEAVE_REPEATS = 3
"""Maximum number of messages to a sender that this receiver leaves."""
_LEAVE_INTERVAL = 0.02
"""Time to wait for the sender's confirmation after each of them, in seconds."""


class Received(NamedTuple):
    """A complete, verified object.

    offered  announcement of its sender: name, metadata, sender
    size     size in bytes
    digest   BLAKE3 digest of the bytes, as `b3sum` prints it; equal to that in the sender's report
    data     the bytes in new memory, or the part of the caller's buffer that they fill; None for other
             targets
    path     path of the file; None for other targets
    refused  number of messages that were rejected since `receive` was called, by reason: not authentic,
             replayed, or malformed
    """

    offered: Offered
    size: int
    digest: bytes
    data: bytearray | memoryview | None
    path: Path | None
    refused: dict[str, int]

    def __reduce__(self) -> tuple[object, ...]:
        return reduce_with_copies(self)


class Missed(NamedTuple):
    """An object that this receiver did not get.

    offered    announcement of its sender
    reason     reason why the object is incomplete
    late       True if this receiver joined when the sender could no longer send the beginning
    part_file  hidden file with the received bytes, from which the next `receive` into the same path resumes;
               None if there is none
    """

    offered: Offered
    reason: str
    late: bool = False
    part_file: Path | None = None


def _received(delivery: Delivery, refused: Counter[str]) -> Received:
    digest, data = bytes(delivery.digest), delivery.data
    return Received(delivery.offered, delivery.size, digest, data, delivery.path, dict(refused))


class _SenderSession:
    """This receiver's part in the session of one sender, or in one more object of a carousel.

    core       state machine of the protocol
    address    source address of the sender
    name       name of the sender
    nonce      nonce of the sender's session
    delivery   the object in transfer
    described  description for which `delivery` was created
    complete   complete objects that the sender does not know about yet
    others     number -> the other objects of a carousel
    rejoin_at  earliest time to take part again after the sender has dismissed this receiver
    """

    def __init__(self, core: ObjectReceiver, name: str, address: str, nonce: int) -> None:
        self.core, self.address, self.name, self.nonce = core, address, name, nonce
        self.delivery: Delivery | None = None
        self.described: Describe | None = None
        self.complete: deque[Received] = deque()
        self.others: dict[int, _SenderSession] = {}
        self.rejoin_at = 0.0

    def on_packet(self, packet: DataRun | Packet, now: float) -> Iterable[_SenderSession]:
        """Process a message; return this or the others, as far as the message may have changed them."""
        if isinstance(packet, DataRun):
            segments = (1 << packet.segments) - 1 << packet.first
            new = self.core.on_data(packet.object, packet.block, segments, packet.segments, now)
            target = self._forget_dropped(packet.object)
            if new and target.delivery is not None:
                target.delivery.put(packet, new)
            return (target,)
        self.core.on_packet(packet, now)
        if isinstance(packet, Seal | Flush):
            target = self.others.get(packet.object, self)
            if isinstance(packet, Seal) and target.delivery is not None:
                target.delivery.close_sealed(packet)
            return (target,)
        if self.others.keys() != self.core.others.keys():
            self._update_others()
        return self.all_objects()

    def open(self, object_: int, block: int, now: float) -> bool:
        """Have the placer store segments of a block; return False if none of them is wanted."""
        wanted, need = self.core.wanted(object_, block, now)
        target = self._forget_dropped(object_)
        if not wanted or target.delivery is None:
            return False
        target.delivery.open(block, wanted, need)
        return True

    def _forget_dropped(self, object_: int) -> _SenderSession:
        """Drop what the carousel's core has dropped, before a block is stored. Return an object's part."""
        target = self.others.get(object_, self)
        if target.core.about is not None and target.core.about.carousel:
            for each in self.all_objects():
                if each.delivery is not None:
                    each.delivery.forget(each.core.take_dropped())
        return target

    def _update_others(self) -> None:
        """Add and drop objects as the core has done."""
        for number in [*self.others]:
            if number not in self.core.others:
                self.others.pop(number).drop()
        for number, core in self.core.others.items():
            if number not in self.others:
                self.others[number] = _SenderSession(core, self.name, self.address, self.nonce)

    def all_objects(self) -> list[_SenderSession]:
        """Return this and the others."""
        return [self, *self.others.values()]

    def drop(self) -> Path | None:
        """Drop the object in transfer; return the part file that is kept for a later run, if any."""
        delivery, self.delivery = self.delivery, None
        if delivery is None:
            return None
        delivery.close()
        return None if delivery.sink is None else delivery.sink.part_file

    @property
    def storing(self) -> bool:
        """True while the sink must be polled: it has blocks to write, or is publishing the object."""
        return self.core.ready_to_store or (self.delivery is not None and self.delivery.pending)

    def offered(self, about: Describe) -> Offered:
        size = None if about.size == UNKNOWN_SIZE else about.size
        version = None if about.version == NO_VERSION else about.version
        return Offered(about.name, size, about.metadata, self.name, self.address, about.object, version)


class _SenderChoice:
    """Choice of the one sender whose objects are received, for `one_session`; without it no choice is made.

    ended  True if the chosen sender has ended its session
    """

    def __init__(self, one_session: bool) -> None:
        self._one_session = one_session
        self._session: int | None = None
        self.ended = False

    @property
    def made(self) -> bool:
        """True if a sender is chosen."""
        return self._session is not None

    def is_other(self, session: int) -> bool:
        """Return True if another session is chosen."""
        return self._session not in (None, session)

    def on_begin(self, session: int) -> None:
        """Choose a session that begins an object. Raises OSError if another one is chosen."""
        if self.is_other(session):
            raise OSError("this receiver receives from another sender")
        if self._one_session:
            self._session = session

    def on_missed(self, core: ObjectReceiver) -> None:
        """Drop the choice if this receiver was too late for the first object: another sender may begin."""
        if core.late:
            self._session = None

    def on_end(self, session: int) -> None:
        """Note that a session has ended."""
        self.ended = self.ended or session == self._session


class ReceivingSession:
    """Session of a receiver with all senders in its group.

    The arguments are those of `mcast.cast.receive`.
    """

    def __init__(
        self,
        context: SessionContext,
        into: ReceiveTarget,
        missed: Callable[[Missed], object] | None,
        max_size: int,
        memory: int,
        peer_timeout: float,
        key: bytes | None,
        model: type[BaseModel] | None,
        one_session: bool = False,
        progress: Callable[[Offered, int], object] | None = None,
        name: str | None = None,
        threads: int = 0,
        latest: bool = False,
    ) -> None:
        if name is not None and not 0 < len(name.encode()) <= MAX_TEXT:
            raise ValueError(f"name={name!r}: a receiver's name has 1 to {MAX_TEXT} bytes")
        self.sessions: dict[int, _SenderSession] = {}
        """Number of a session -> this receiver's part in it."""
        if not (into is None or callable(into) or isinstance(into, os.PathLike | Sink)):
            sink = sink_at(into)  # raises TypeError now, not when the first object begins
            sink.close()
            if latest:
                require_whole(sink)
        elif latest and isinstance(into, Sink):
            require_whole(into)
        self._latest = latest
        self._context, self._into, self._max_size, self._model = context, into, max_size, model
        self._missed = missed
        self._authenticator = authenticator_for(key)
        self._placer = placer_for(self._authenticator)
        self._workers = Workers(threads)
        max_message = context.max_message - self._authenticator.overhead
        window = max(4, min(MAX_WINDOW, memory // (segment_size(max_message) * MAX_K)))
        # Objects with the same destination must not be mixed: one after another.
        partial_objects = MAX_PARTIAL_OBJECTS if into is None or callable(into) else 1
        self._config = ReceiverConfig(
            context.number,
            context.name if name is None else name,
            window,
            max_message,
            fec.available(),
            check_seconds(peer_timeout, "peer_timeout"),
            stores=True,
            partial_objects=partial_objects,
            queue=context.queue,
        )
        self._past: OrderedDict[tuple[int, int], _SenderSession | None] = OrderedDict()
        """Sessions that this receiver has left, by number and nonce, the oldest first.

        None for a session that has ended; otherwise its sender is silent, or has dismissed this receiver of
        the newest version, which rejoins when the sender is heard again.
        """
        self._past_address: dict[tuple[int, int], str] = {}
        """Past session -> address of its sender."""
        self._complete: deque[Received] = deque()
        self._choice = _SenderChoice(one_session)
        self._progress = progress
        self._deferred: list[tuple[Series, str]] = []
        self._paused_at = 0.0  # when the last `next` ended: since then nothing was received
        self.rejected: Counter[str] = Counter()

    # --- steps -----------------------------------------------------------------------------------

    def next(self, timeout: float | None) -> SessionSteps[Received | None]:
        """Return the next complete object; None if no object has been in transfer for `timeout` seconds.

        With `one_session`, also None when the sender has ended its session; `timeout` counts until it begins.
        """
        now = self._context.now
        if timeout is not None:
            timeout = check_seconds(timeout)
        since = now()
        for session in self.sessions.values():
            session.core.add_pause(since - self._paused_at)
        try:
            while True:
                if self._complete:
                    return self._complete.popleft()
                if self._choice.ended:
                    return None
                if self._choice.made or any(each.delivery is not None for each in self._all_objects()):
                    since = now()
                end = inf if timeout is None else since + timeout
                if now() >= end and timeout is not None:
                    return None
                yield from self._step(end)
        finally:
            self._paused_at = now()

    def leave(self, reason: str) -> SessionSteps[None]:
        """Leave all sessions: drop incomplete objects, and send the reason until the senders confirm."""
        now = self._context.now
        self.close()
        for _ in range(_LEAVE_REPEATS):
            messages = [
                message
                for session in self.sessions.values()
                for message in session.core.leave_packets(reason, now())
            ]
            if not messages:
                return
            end = now() + _LEAVE_INTERVAL
            while messages or (
                now() < end and any(not session.core.finished for session in self.sessions.values())
            ):
                received = yield Step(end, MAX_RX_BATCH, self._signed(messages))
                messages = []
                for message, address in payloads_of(from_others(received)):
                    with suppress(Rejected):
                        packet = self._authenticator.decode(message, address)
                        left = self.sessions.get(packet.session)
                        if left is not None and isinstance(packet, Bye):
                            left.core.on_packet(packet, now())

    def close(self) -> None:
        """Drop incomplete objects, and end the threads; keep part files from which a later run can resume."""
        try:
            for each in self._all_objects():
                each.drop()
        finally:
            self._workers.close()

    def _step(self, until: float) -> SessionSteps[None]:
        now = self._context.now()
        messages = [message for each in self._all_objects() for message in each.core.messages(now)]
        self._poll(now)
        done = bool(self._complete) or self._choice.ended
        if done and not messages:
            return
        objects = [*self._all_objects()]
        storing = any(each.storing for each in objects)
        deliveries = [each.delivery for each in objects if each.delivery is not None]
        if any(each.stored_block or each.busy for each in deliveries):
            until = now
        due = min([until, now + _POLL_INTERVAL if storing else inf, *(each.core.due for each in objects)])
        # The next object may have the same destination as a complete one that the program does not have yet.
        defer = bool(self._complete) or any(each.complete for each in objects)
        at_once = done or (self._deferred and not defer)
        received = yield Step(now if at_once else due, MAX_RX_BATCH, self._signed(messages))
        now = self._context.now()
        if not received and any(each.busy for each in deliveries):
            self._wait_for_thread(objects, now)
        if defer:
            self._deferred += [(copied(series), address) for series, address in from_others(received)]
            self._poll(now)
            return
        deferred, self._deferred = self._deferred, []
        self._on_messages(deferred, now)
        self._on_batch(received, now)
        self._poll(now)

    def _signed(self, messages: Sequence[Buffer]) -> list[Sequence[Buffer] | memoryview]:
        return [self._authenticator.sign(messages)] if messages else []

    def _all_objects(self) -> Iterator[_SenderSession]:
        """Yield all sessions, with the other objects of carousels."""
        return (each for session in self.sessions.values() for each in session.all_objects())

    def _warn(self, missed: Missed) -> None:
        name, address = missed.offered.name, missed.offered.address
        # An older version that is dropped for the newest one is nothing to worry about.
        level = logging.DEBUG if self._latest and missed.offered.version is not None else logging.WARNING
        logger.log(
            level,
            "%s: the object %r from %s was missed: %s",
            self._context.log_name,
            name,
            address,
            missed.reason,
        )

    def _reject(self, reason: str, address: str) -> None:
        self.rejected[reason] += 1
        if reason in (NEEDS_KEY, WRONG_KEY, VERSION) and self.rejected[reason] == 1:
            logger.warning("%s: rejected a message from %s, %s", self._context.log_name, address, reason)

    # --- received messages -----------------------------------------------------------------------

    def _on_batch(self, batch: Batch, now: float) -> None:
        """Process a received batch."""
        placer = self._placer
        if placer is None:
            self._on_messages(from_others(batch), now)
            return
        records, memory, at, end = batch.records, batch.memory, 0, len(batch)
        while at < end:
            at, placed, stop, run = placer.place(records, memory, at)
            for each in placed:
                self._on_placed(*each, now)
            if stop is None:
                continue
            if len(stop) == 2:
                self._on_messages(from_others([run_of(batch, memory, at, run, *stop)]), now)
                at += run
            elif not self.sessions[stop[0]].open(*stop[1:], now):
                self._on_placed(*stop, b"", run, now)
                at += run

    def _on_placed(
        self, number: int, object_: int, block: int, segments: bytes, messages: int, now: float
    ) -> None:
        """Process messages with segments of a block, of which the placer has stored those in the bitmap."""
        session = self.sessions.get(number)
        if session is not None:
            session.core.on_data(object_, block, int.from_bytes(segments, "little"), messages, now)
            target = session.others.get(object_, session)
            if target.delivery is not None:
                self._assemble_ready(target, target.delivery, now)

    def _on_messages(self, messages: Iterable[tuple[Series, str]], now: float) -> None:
        """Process messages with their source addresses in Python."""
        for packet, address in coalesced(self._authenticator, messages, self._reject):
            self._on_packet(packet, address, now)

    def _on_packet(self, packet: DataRun | Packet, address: str, now: float) -> None:
        session = self.sessions.get(packet.session)
        if session is None:
            if isinstance(packet, Offer) and not self._choice.is_other(packet.session):
                self._open(packet, address, now)
            return
        for each in session.on_packet(packet, now):
            if each.core.about is not None and each.described is not each.core.about:
                self._finish_objects(each)
                if not each.core.duplicate:
                    self._begin_object(each, each.core.about, now)
            if each.delivery is not None:
                self._assemble_ready(each, each.delivery, now)

    def _open(self, offer: Offer, address: str, now: float) -> None:
        """Take part in a new session, or again in one whose sender was silent."""
        key = offer.session, offer.nonce
        session = self._past.get(key)
        if key in self._past and (session is None or now < session.rejoin_at):  # it has ended here
            return
        at_address = sum(session.address == address for session in self.sessions.values())
        if len(self.sessions) >= MAX_SESSIONS or at_address >= MAX_SESSIONS_PER_ADDRESS:
            self.rejected["an invitation to one session too many"] += 1
            return
        nonce = SystemRandom().getrandbits(64)
        if session is None:
            config = self._config._replace(nonce=nonce)
            core = ObjectReceiver(offer.session, config, SystemRandom(), now)
            session = _SenderSession(core, offer.name, address, offer.nonce)
        else:
            del self._past[key], self._past_address[key]
            number = self._context.new_number() if session.core.dismissed else None
            session.core.rejoin(nonce, now, number)
        self._authenticator.begin(offer.session, offer.nonce)
        if self._placer is not None:
            self._placer.begin(offer.session, gid_of(address))
        self.sessions[offer.session] = session
        session.core.on_packet(offer, now)

    def _may_rejoin(self, core: ObjectReceiver) -> bool:
        """Return True if this receiver takes part again when the sender of an ended session is heard."""
        return core.silent or (self._latest and core.dismissed)

    def _remember(self, session: _SenderSession, now: float) -> None:
        """Remember a session that this receiver has left, so that no object of it is received twice."""
        number = session.core.session
        if self._placer is not None:
            self._placer.end(number)
        if self._may_rejoin(session.core):
            session.rejoin_at = now + _REJOIN_INTERVAL if session.core.dismissed else 0.0
            self._authenticator.suspend(number)
            session.core.suspend()
            session.others.clear()
        else:
            self._authenticator.end(number)
        self._past[number, session.nonce] = session if self._may_rejoin(session.core) else None
        self._past_address[number, session.nonce] = session.address
        if len(self._past) > MAX_PAST_SESSIONS:
            # Of the address with the most: a host that opens many sessions displaces its own only.
            ((address, _),) = Counter(self._past_address.values()).most_common(1)
            oldest = next(key for key in self._past if self._past_address[key] == address)
            del self._past[oldest], self._past_address[oldest]
            self._authenticator.forget(*oldest)

    def _begin_object(self, session: _SenderSession, about: Describe, now: float) -> None:
        session.described = about
        delivery = session.delivery = Delivery(about, session.offered(about), self._placer, self._workers)
        try:
            self._choice.on_begin(session.core.session)
            max_segment = segment_size(self._config.max_message)
            # A block's memory is allocated with its first segment, however short that is.
            if about.segment > max_segment:
                raise ValueError(
                    f"segments of {about.segment:,} bytes: this receiver's maximum is {max_segment:,}"
                )
            if self._latest and delivery.offered.version is None:
                raise ValueError("no version: this receiver takes published objects alone")
            if self._model is not None:
                delivery.offered.read(self._model)
            target = self._into(delivery.offered) if callable(self._into) else self._into
            if not (target is None or isinstance(target, os.PathLike)):
                self._require_free(target)
                delivery.target = target
            sink = delivery.sink = sink_of(target, delivery.offered.size, self._max_size)
            if self._latest:
                require_whole(sink)
                if type(sink) is BufferSink:
                    size = delivery.offered.size or 0  # a version has a known size
                    sink = delivery.sink = StagedBufferSink(sink, size)
            if isinstance(target, os.PathLike):
                delivery.path = Path(native(target))
            sink.open()
            session.core.resume(delivery.stored_blocks, now)
            if delivery.random_access:
                session.core.allow_any_order()
        except OSError as error:
            self._fail(session, error_text(error), now)
        except ValueError as error:
            self._fail(session, str(error), now)

    @staticmethod
    def _fail(session: _SenderSession, reason: str, now: float) -> None:
        """Give up the object in transfer, and keep none of its bytes."""
        if session.delivery is not None:
            session.delivery.abandoned = True
        session.core.fail(reason, now)

    def _require_free(self, target: Target) -> None:
        """Raise OSError if another object is being received into the same target."""
        if self._latest and not isinstance(target, Sink):  # a version has its own memory until it is complete
            return
        if any(each.delivery is not None and each.delivery.target is target for each in self._all_objects()):
            raise OSError("another object is being received into the same buffer")

    def _assemble_ready(self, session: _SenderSession, delivery: Delivery, now: float) -> None:
        """Verify and write the blocks of which the core has enough segments."""
        if session.core.ended:
            delivery.stop()
        found = session.core.take_ready()
        for ready in found:
            if not ready.segments:
                delivery.stored_block = ready
            else:
                delivery.add(ready)
        if found:
            self._store(session, delivery, now)

    def _wait_for_thread(self, objects: Iterable[_SenderSession], now: float) -> None:
        """Take the blocks that a thread verifies, when it has done so: there is nothing else to do."""
        for each in objects:
            if each.delivery is not None and each.delivery.busy:
                self._store(each, each.delivery, now, wait=True)
                return

    def _verify_stored(self, session: _SenderSession, delivery: Delivery, now: float) -> None:
        """Verify some stored blocks of an earlier run."""
        try:
            for _ in range(MAX_READ_BACK):
                stored, delivery.stored_block = delivery.stored_block, None
                if stored is None:
                    break
                session.core.checked(stored.block, delivery.verify_stored(stored.info), now)
                self._assemble_ready(session, delivery, now)
            self._store(session, delivery, now)  # received blocks may have waited for the last stored one
        except OSError as error:
            self._fail(session, error_text(error), now)
        if self._progress is not None:
            call_user(self._progress, delivery.offered, delivery.size)

    def _store(self, session: _SenderSession, delivery: Delivery, now: float, wait: bool = False) -> None:
        """Verify and write blocks as far as threads and sink are; with `wait`, wait for a thread first."""
        # A block is confirmed when it is written, so that a slow reader of a pipe slows the sender down.
        try:
            for block, verified in delivery.store(wait):
                session.core.checked(block, verified, now)
        except OSError as error:
            self._fail(session, error_text(error), now)
        if self._progress is not None:
            call_user(self._progress, delivery.offered, delivery.size)

    def _poll(self, now: float) -> None:
        """Continue writing and publishing, hand out or drop objects that have ended, and close sessions."""
        for number, session in [*self.sessions.items()]:
            for each in session.all_objects():
                self._poll_object(each, now)
            if session.core.carousel_finished:  # the sender of a carousel may never end its session
                self._choice.on_end(number)
            if session.core.finished and not any(each.core.ready_to_store for each in session.all_objects()):
                for each in session.all_objects():
                    each.drop()
                if not self._may_rejoin(session.core) or session.core.silent:
                    self._choice.on_end(number)
                del self.sessions[number]
                self._remember(session, now)

    def _poll_object(self, session: _SenderSession, now: float) -> None:
        core = session.core
        if session.delivery is not None and session.delivery.stored_block is not None:
            self._verify_stored(session, session.delivery, now)
        if session.delivery is not None and session.delivery.pending:
            self._store(session, session.delivery, now)
        delivery = session.delivery
        sink = None if delivery is None else delivery.sink
        if core.ready_to_store and delivery is not None and sink is not None and not delivery.pending:
            try:
                if bytes(delivery.digest) != core.digest:
                    self._fail(session, sink.mismatch or "the object differs from its digest", now)
                elif self._may_commit(session, delivery):
                    delivery.committing = True
                    if sink.commit():
                        core.stored(now)
            except OSError as error:
                self._fail(session, error_text(error), now)
        self._finish_objects(session)
        if not core.ack_pending:  # the sender knows: the program may take its time with the object
            self._complete += session.complete
            session.complete.clear()

    def _may_commit(self, session: _SenderSession, delivery: Delivery) -> bool:
        """Return False while the destination has another object that the program did not take yet."""
        waiting = [received.path for received in self._complete]
        for each in self._all_objects():
            waiting += [received.path for received in each.complete]
            if each is not session and each.delivery is not None and each.delivery.committing:
                waiting.append(each.delivery.path)
        if self._into is None or (callable(self._into) and not self._latest):  # no memory is shared
            return delivery.path is None or delivery.path not in waiting
        return not waiting

    def _finish_objects(self, session: _SenderSession) -> None:
        """Turn the core's results into complete and missed objects."""
        for ended in session.core.ended:
            if ended.complete and session.delivery is not None:
                session.complete.append(_received(session.delivery, self.rejected))
            part_file = session.drop()
            if not ended.complete and not self._choice.is_other(session.core.session):
                self._choice.on_missed(session.core)
                missed = Missed(session.offered(ended.about), ended.reason, session.core.late, part_file)
                (self._missed or self._warn)(missed)
        session.core.ended.clear()
