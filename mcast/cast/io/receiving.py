"""The receiving end: the sessions of all senders in a group, and its turns."""

from __future__ import annotations

import logging
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from math import inf
from pathlib import Path
from random import SystemRandom
from secrets import randbits
from typing import NamedTuple

from pydantic import BaseModel
from typing_extensions import Buffer

from mcast.api import Series
from mcast.arguments.copies import reduce_with_copies
from mcast.arguments.seconds import check_seconds
from mcast.cast.io.coalesce import DataRun, coalesced
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
from mcast.cast.io.sinks import (
    BufferSink,
    GrowingMemorySink,
    NewMemorySink,
    Offered,
    ReceiveTarget,
    Target,
    sink_at,
    sink_of,
)
from mcast.cast.protocol import fec
from mcast.cast.protocol.auth import NEEDS_KEY, WRONG_KEY, authenticator_for
from mcast.cast.protocol.blocks import BlockBuffer, Digest
from mcast.cast.protocol.incoming import ReadyBlock
from mcast.cast.protocol.layout import ObjectLayout
from mcast.cast.protocol.packets import (
    MAX_K,
    MAX_TEXT,
    MAX_WINDOW,
    UNKNOWN_SIZE,
    VERSION,
    BlockInfo,
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
"""In the sessions of so many senders a receiver takes part at once."""
MAX_SESSIONS_PER_ADDRESS = 4
"""So many of them may be at one address, so that one host cannot take all places."""

MAX_PAST_SESSIONS = 1024
"""Maximum number of sessions that are remembered after they have ended here, or whose sender is silent.

One more pushes out the oldest of the address that has the most.

One takes some KB, and 16 KB more if its sender cycles through 65,536 objects. Of ordinary objects, however
many the session has, the number of the last one is enough.
"""
_MAX_VERIFIED_PER_STEP = 8
"""So many blocks of an earlier run are compared in one turn."""
_POLL_INTERVAL = 0.01
"""Seconds until a disk that is at work is asked again."""
_LEAVE_REPEATS = 3
_LEAVE_INTERVAL = 0.02
"""How often a receiver says that it leaves, and how many seconds it waits for the sender to confirm."""


class Received(NamedTuple):
    """An object that is whole and right.

    offered  what its sender has said of it: name, metadata, sender
    size     in bytes
    digest   the BLAKE3 digest of the bytes, as `b3sum` prints it: the sender has said and reported the same
    data     the bytes: new memory, or the part of the caller's buffer that they fill; else None
    path     the file, where they went to one
    refused  messages that changed nothing, by reason, since `receive` was called: strangers', replayed ones
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

    offered  what its sender has said of it
    why      why it did not become whole
    late     whether its beginning was gone when this receiver came
    part_file  the hidden file with what has come, from which the next `receive` into the same path goes on;
             None if nothing is kept
    """

    offered: Offered
    reason: str
    late: bool = False
    part_file: Path | None = None


class _Delivery:
    """The object that is arriving from one sender."""

    def __init__(self, about: Describe, offered: Offered) -> None:
        self.offered = offered
        self.target: Target = None
        """What the caller has given for this object and perhaps for others, if that is no path."""
        self.sink: Sink | None = None
        self.path: Path | None = None
        self.size = 0
        self.digest = Digest()
        self._layout = ObjectLayout.of(about)
        self._blocks: dict[int, BlockBuffer] = {}
        self._next = 0
        self._assembled: dict[int, tuple[memoryview, bytes | None]] = {}
        """Blocks whose turn has not come, each with its digest; None once `digest` has the block."""
        self._in_place = False
        self.stored_block: ReadyBlock | None = None
        """A block that an earlier run may have left, to be compared."""
        self.abandoned = False
        """Whether this end has given the object up, and does not go on with what has come."""
        self.carousel = about.carousel > 0
        self._on_disk = set[int]()

    def put(self, run: DataRun, new: int) -> None:
        """Take in the pieces of a run whose bit is set."""
        block = self._blocks.get(run.block)
        if block is None:
            block = self._blocks[run.block] = self._buffer_for(run.block)
        first, count, memory, begin, step, size = run[3:]
        if new == (1 << count) - 1 << first:
            block.put_run(first, count, memory, begin, step, size)
            return
        for target in range(first, first + count):
            if new >> target & 1:
                block.put_run(target, 1, memory, begin, step, size)
            begin += step

    def forget(self, blocks: list[int]) -> None:
        """Drop the pieces of blocks that come again."""
        for block in blocks:
            self._blocks.pop(block, None)

    def _buffer_for(self, block: int) -> BlockBuffer:
        """Where a block goes: to its place in the object, or to memory of its own."""
        layout, max_size = self._layout, self._layout.offset_of(1)
        length = layout.length(block)
        memory = None
        if self.sink is not None and length is not None:
            memory = self.sink.buffer_at(layout.offset_of(block), length)
            self._in_place = memory is not None
        if memory is None:
            memory = memoryview(bytearray(max_size if length is None else length))
        return BlockBuffer(memory, layout.segment, layout.k)

    def assemble(self, ready: ReadyBlock) -> bool:
        """Whether a block of which enough pieces are there could be put together; it is kept then.

        A block of an object that goes round is what its seal says then, and others are compared in turn.
        """
        block = self._blocks.pop(ready.block, None)
        if block is None:
            return False
        data = (block.assemble_verified if self.carousel else block.assemble)(ready.info, ready.segments)
        if data is not None and self.random_access and not self._in_place:
            assert self.sink is not None
            self.sink.write_at(self._layout.offset_of(ready.block), data)
            self._on_disk.add(ready.block)
        elif data is not None:
            self._assembled[ready.block] = data, ready.info.digest
        return data is not None

    @property
    def random_access(self) -> bool:
        """Whether each block goes into its place as it comes."""
        return self.carousel and self.sink is not None and self.sink.random_access

    @property
    def blocks_left(self) -> int:
        """How many blocks an earlier run may have left; the last one of an object may be shorter."""
        left = 0 if self.sink is None else self.sink.stored_size
        size, block = self._layout.size, self._layout.offset_of(1)
        if size is None or left < size:
            return left // block
        return (self._layout.blocks or 0) if left == size else 0

    def verify_stored(self, info: BlockInfo) -> bool:
        """Whether the next block is there already. If not, what came of those after it is dropped."""
        sink = self.sink
        data = b"" if sink is None else sink.read_back(info.size)
        if self.carousel:
            right = bytes(Digest(data)) == info.digest
        else:
            right = self.digest.extend_if(data, info.digest)
        if sink is None or not (right or sink.mismatch):
            if not self.carousel:
                self._blocks.clear()
                self._assembled.clear()
            return False
        sink.skip(len(data))
        if self.carousel or not right:
            self.digest.update(data)
        self.size += len(data)
        self._next += 1
        return True

    @property
    def pending(self) -> bool:
        """Whether a block waits for a sink that is not ready, or is on the disk and not looked at yet."""
        return self._next in self._assembled or self._next in self._on_disk

    def write(self) -> Iterator[tuple[int, bool]]:
        """Write the blocks in order, while the sink is ready.

        The number of each that is written whole, and of one that differs from its digest, and which it is.
        """
        sink = self.sink
        for _ in range(_MAX_VERIFIED_PER_STEP):
            if sink is None or self._next not in self._on_disk:
                break
            found = sink.read_back(self._layout.length(self._next) or 0)
            sink.skip(len(found))
            self.digest.update(found)
            self.size += len(found)
            self._on_disk.remove(self._next)
            self._next += 1
        while sink is not None and self._next in self._assembled:
            data, digest = self._assembled[self._next]
            if digest is not None and self.carousel:
                self.digest.update(data)
            elif digest is not None and not self.digest.extend_if(data, digest):
                del self._assembled[self._next]
                yield self._next, False
                return
            while data and sink.ready():
                part = data[: sink.max_write]
                if not self._in_place:
                    sink.write(part)
                self.size += len(part)
                data = data[len(part) :]
            self._assembled[self._next] = data, None
            if data:
                return
            del self._assembled[self._next]
            self._next += 1
            yield self._next - 1, True

    def received(self, refused: dict[str, int]) -> Received:
        sink = self.sink
        data: bytearray | memoryview | None = None
        if isinstance(sink, GrowingMemorySink):
            data = sink.data
        elif isinstance(sink, NewMemorySink):
            data = sink.taken()
        elif isinstance(sink, BufferSink):
            data = sink.view[: self.size]
        return Received(self.offered, self.size, bytes(self.digest), data, self.path, refused)

    def close(self) -> None:
        self._blocks.clear()
        self._assembled.clear()
        if self.sink is not None:
            if not self.abandoned:
                self.sink.keep_part()
            self.sink.close()


class _SenderSession:
    """The session of one sender, or one more of the objects that go round together in it."""

    def __init__(self, core: ObjectReceiver, name: str, address: str, nonce: int) -> None:
        self.core, self.address, self.name, self.nonce = core, address, name, nonce
        self.delivery: _Delivery | None = None
        self.described: Describe | None = None
        self.complete: deque[Received] = deque()
        self.others: dict[int, _SenderSession] = {}
        """The others of the objects that go round together, by number."""

    def on_packet(self, packet: DataRun | Packet, now: float) -> Iterable[_SenderSession]:
        """Take in a message. What it may have changed: this, or what is beside."""
        if isinstance(packet, DataRun):
            of = self.others.get(packet.object, self)
            new = of.core.on_data(packet.object, packet.block, packet.first, packet.segments, now)
            if of.core.about is not None and of.core.about.carousel:
                for one in self.all_receivers():
                    if one.delivery is not None:
                        one.delivery.forget(
                            one.core.take_dropped()
                        )  # first: one of these may come again at once
            if new and of.delivery is not None:
                of.delivery.put(packet, new)
            return (of,)
        self.core.on_packet(packet, now)
        if isinstance(packet, Seal | Flush):
            return (self.others.get(packet.object, self),)
        if self.others.keys() != self.core.others.keys():
            self._follow()
        return self.all_receivers()

    def _follow(self) -> None:
        """Take what the core takes, and drop what it has dropped."""
        for number in [*self.others]:
            if number not in self.core.others:
                self.others.pop(number).drop()
        for number, core in self.core.others.items():
            if number not in self.others:
                self.others[number] = _SenderSession(core, self.name, self.address, self.nonce)

    def all_receivers(self) -> list[_SenderSession]:
        """This, and what is beside."""
        return [self, *self.others.values()]

    def drop(self) -> Path | None:
        """End what is arriving. The file that stays for another run, if one does."""
        arrival, self.delivery = self.delivery, None
        if arrival is None:
            return None
        arrival.close()
        return None if arrival.sink is None else arrival.sink.part_file

    @property
    def stores(self) -> bool:
        """Whether a disk or a reader is at work on the object."""
        return self.core.storable or (self.delivery is not None and self.delivery.pending)

    def offered(self, about: Describe) -> Offered:
        size = None if about.size == UNKNOWN_SIZE else about.size
        return Offered(about.name, size, about.metadata, self.name, self.address, about.object)


class _SenderChoice:
    """The one sender whose objects are taken, where one alone is to be heard."""

    def __init__(self, one_session: bool) -> None:
        self._one_session = one_session
        self._session: int | None = None
        self.ended = False
        """Whether that sender has ended its session."""

    @property
    def made(self) -> bool:
        """Whether it is known which sender that is."""
        return self._session is not None

    def other(self, session: int) -> bool:
        """Whether that is the session of another sender."""
        return self._session not in (None, session)

    def require(self, session: int) -> None:
        """A session begins an object. Raises OSError if that of another sender has before."""
        if self.other(session):
            raise OSError("this receiver takes what another sender sends")
        if self._one_session:
            self._session = session

    def missed(self, core: ObjectReceiver) -> None:
        """An object was missed. A receiver that came too late for the first one waits for another sender."""
        if core.late:
            self._session = None

    def over(self, session: int) -> None:
        """A session has ended."""
        self.ended = self.ended or session == self._session


class ReceivingSession:
    """All that a receiver hears of the senders in its group.

    into    where objects go
    missed  is called for each object that does not become whole here
    model   what the metadata of each object must be
    most    the largest object that is taken into new memory, in bytes
    memory  about how many bytes of each sender's object may be under way here
    alone   take the objects of one sender alone: the first that begins one
    progress  is called when more of an object has come, with how many bytes of it are right
    name    what the senders call this receiver; None: host and device
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
    ) -> None:
        if name is not None and not 0 < len(name.encode()) <= MAX_TEXT:
            raise ValueError(f"name={name!r}: a receiver's name has 1 to {MAX_TEXT} bytes")
        self.sessions: dict[int, _SenderSession] = {}
        """The sessions in which this receiver takes part, by number."""
        if not (into is None or callable(into) or isinstance(into, os.PathLike | Sink)):
            sink_at(into).close()  # what no object could be written to is refused now
        self._context, self._into, self._max_size, self._model = context, into, max_size, model
        self._missed = missed
        self._authenticator = authenticator_for(key)
        max_message = context.max_message - self._authenticator.overhead
        window = max(4, min(MAX_WINDOW, memory // (segment_size(max_message) * MAX_K)))
        able = fec.available()
        # What goes to one place comes one after another.
        together = MAX_PARTIAL_OBJECTS if into is None or callable(into) else 1
        self._config = ReceiverConfig(
            context.number,
            context.name if name is None else name,
            window,
            max_message,
            able,
            check_seconds(peer_timeout, "peer_timeout"),
            stores=True,
            partial_objects=together,
            queue=context.queue,
        )
        self._past: OrderedDict[tuple[int, int], _SenderSession | None] = OrderedDict()
        """Sessions in which this receiver takes no part any more, by number and nonce, the oldest first.

        None for one that has ended; else its sender is silent, and it goes on when that is heard again.
        """
        self._past_of: dict[tuple[int, int], str] = {}
        """The address of each of them."""
        self._complete: deque[Received] = deque()
        self._choice = _SenderChoice(one_session)
        self._progress = progress
        self._deferred: list[tuple[Series, str]] = []
        self._paused_at = 0.0  # when the driver last stopped to listen
        self.rejected: Counter[str] = Counter()

    # --- the turns -------------------------------------------------------------------------------

    def next(self, timeout: float | None) -> SessionSteps[Received | None]:
        """The next object that is whole; None when nothing has been under way for `timeout` seconds.

        With `one_session`, None when the sender has ended its session, and `timeout` until it begins.
        """
        now = self._context.now
        if timeout is not None:
            timeout = check_seconds(timeout)
        since = now()
        for one in self.sessions.values():
            one.core.add_pause(since - self._paused_at)
        try:
            while True:
                if self._complete:
                    return self._complete.popleft()
                if self._choice.ended:
                    return None
                if self._choice.made or any(one.delivery is not None for one in self._all()):
                    since = now()
                end = inf if timeout is None else since + timeout
                if now() >= end and timeout is not None:
                    return None
                yield from self._step(end)
        finally:
            self._paused_at = now()

    def leave(self, reason: str) -> SessionSteps[None]:
        """Leave all sessions; their senders are told. What is not whole is dropped, as by `close`."""
        now = self._context.now
        self.close()
        for _ in range(_LEAVE_REPEATS):
            said = [
                message for one in self.sessions.values() for message in one.core.leave_packets(reason, now())
            ]
            if not said:
                return
            end = now() + _LEAVE_INTERVAL
            while said or (now() < end and any(not one.core.finished for one in self.sessions.values())):
                heard = yield Step(end, MAX_RX_BATCH, self._signed(said))
                said = []
                for message, address in payloads_of(from_others(heard)):
                    with suppress(Rejected):
                        packet = self._authenticator.decode(message, address)
                        left = self.sessions.get(packet.session)
                        if left is not None and isinstance(packet, Bye):
                            left.core.on_packet(packet, now())

    def close(self) -> None:
        """Drop what is not whole; of a file stays what another run can go on from."""
        for one in self._all():
            one.drop()

    def _step(self, until: float) -> SessionSteps[None]:
        now = self._context.now()
        said = [message for one in self._all() for message in one.core.messages(now)]
        self._poll(now)
        done = bool(self._complete) or self._choice.ended
        if done and not said:
            return
        there = [*self._all()]
        storing = any(one.stores for one in there)
        if any(one.delivery is not None and one.delivery.stored_block for one in there):
            until = now
        due = min([until, now + _POLL_INTERVAL if storing else inf, *(one.core.due for one in there)])
        # What follows a whole object waits until the caller has that one: both may go to one place.
        waits = bool(self._complete) or any(one.complete for one in there)
        at_once = done or (self._deferred and not waits)
        heard = yield Step(now if at_once else due, MAX_RX_BATCH, self._signed(said))
        now = self._context.now()
        if waits:
            self._deferred += [(copied(series), address) for series, address in from_others(heard)]
            self._poll(now)
            return
        held, self._deferred = self._deferred, []
        for packet, address in coalesced(self._authenticator, chain(held, from_others(heard)), self._refuse):
            self._on_packet(packet, address, now)
        self._poll(now)

    def _signed(self, said: Sequence[Buffer]) -> list[Sequence[Buffer] | memoryview]:
        return [self._authenticator.sign(said)] if said else []

    def _all(self) -> Iterator[_SenderSession]:
        """What comes of all sessions."""
        return (part for one in self.sessions.values() for part in one.all_receivers())

    def _warn(self, missed: Missed) -> None:
        name, address = missed.offered.name, missed.offered.address
        logger.warning(
            "%s: the object %r of %s was missed: %s", self._context.log_name, name, address, missed.reason
        )

    def _refuse(self, reason: str, address: str) -> None:
        self.rejected[reason] += 1
        if reason in (NEEDS_KEY, WRONG_KEY, VERSION) and self.rejected[reason] == 1:
            logger.warning("%s: a message of %s was refused: %s", self._context.log_name, address, reason)

    # --- what comes ------------------------------------------------------------------------------

    def _on_packet(self, packet: DataRun | Packet, address: str, now: float) -> None:
        one = self.sessions.get(packet.session)
        if one is None:
            if isinstance(packet, Offer) and not self._choice.made:
                self._open(packet, address, now)
            return
        for part in one.on_packet(packet, now):
            if part.core.about is not None and part.described is not part.core.about:
                self._hand_out(part)
                self._begin_object(part, part.core.about, now)
            if part.delivery is not None:
                self._assemble_ready(part, part.delivery, now)

    def _open(self, offer: Offer, address: str, now: float) -> None:
        key = offer.session, offer.nonce
        past = self._past.get(key)
        if past is None and key in self._past:
            return
        here = sum(one.address == address for one in self.sessions.values())
        if len(self.sessions) >= MAX_SESSIONS or here >= MAX_SESSIONS_PER_ADDRESS:
            self.rejected["an invitation to one session too many"] += 1
            return
        nonce = randbits(64)
        if past is None:
            config = self._config._replace(nonce=nonce)
            core = ObjectReceiver(offer.session, config, SystemRandom(), now)
            past = _SenderSession(core, offer.name, address, offer.nonce)
        else:
            del self._past[key], self._past_of[key]
            past.core.rejoin(nonce, now)
        self._authenticator.begin(offer.session, offer.nonce)
        self.sessions[offer.session] = past
        past.core.on_packet(offer, now)

    def _remember(self, one: _SenderSession) -> None:
        """Keep of a session that is over here what its sender could say again."""
        session = one.core.session
        if one.core.silent:
            self._authenticator.suspend(session)
            one.core.suspend()
            one.others.clear()
        else:
            self._authenticator.end(session)
        self._past[session, one.nonce] = one if one.core.silent else None
        self._past_of[session, one.nonce] = one.address
        if len(self._past) > MAX_PAST_SESSIONS:
            # Of the host with the most: one that ends sessions without number pushes out its own.
            ((max_size, _),) = Counter(self._past_of.values()).most_common(1)
            oldest = next(key for key in self._past if self._past_of[key] == max_size)
            del self._past[oldest], self._past_of[oldest]
            self._authenticator.forget(*oldest)

    def _begin_object(self, one: _SenderSession, about: Describe, now: float) -> None:
        one.described = about
        arrival = one.delivery = _Delivery(about, one.offered(about))
        try:
            self._choice.require(one.core.session)
            max_size = segment_size(self._config.max_message)
            if (
                about.segment > max_size
            ):  # a block takes its memory with the first piece, however short that is
                raise ValueError(
                    f"pieces of {about.segment:,} bytes: this receiver hears at most {max_size:,}"
                )
            if self._model is not None:
                arrival.offered.read(self._model)
            target = self._into(arrival.offered) if callable(self._into) else self._into
            if not (target is None or isinstance(target, os.PathLike)):
                self._require_free(target)
                arrival.target = target
            sink = sink_of(target, arrival.offered.size, self._max_size)
            arrival.sink = sink
            if isinstance(target, os.PathLike):
                arrival.path = Path(native(target))
            sink.open()
            one.core.resume(arrival.blocks_left, now)
            if arrival.random_access:
                one.core.allow_any_order()
        except OSError as error:
            self._fail(one, error_text(error), now)
        except ValueError as error:
            self._fail(one, str(error), now)

    @staticmethod
    def _fail(one: _SenderSession, reason: str, now: float) -> None:
        """Give up the object, whatever has come of it."""
        if one.delivery is not None:
            one.delivery.abandoned = True
        one.core.fail(reason, now)

    def _require_free(self, target: Target) -> None:
        if any(other.delivery is not None and other.delivery.target is target for other in self._all()):
            raise OSError("another object is on its way into the same buffer")

    def _assemble_ready(self, one: _SenderSession, arrival: _Delivery, now: float) -> None:
        try:
            for ready in one.core.take_ready():
                if not ready.segments:
                    arrival.stored_block = ready
                elif not (data := arrival.assemble(ready)) or arrival.random_access:
                    one.core.checked(ready.block, data, now)
        except OSError as error:
            self._fail(one, error_text(error), now)
        if arrival.pending:
            self._write(one, arrival, now)

    def _verify_stored(self, one: _SenderSession, arrival: _Delivery, now: float) -> None:
        """Compare some blocks of an earlier run with their digests."""
        try:
            for _ in range(_MAX_VERIFIED_PER_STEP):
                held, arrival.stored_block = arrival.stored_block, None
                if held is None:
                    break
                one.core.checked(held.block, arrival.verify_stored(held.info), now)
                self._assemble_ready(one, arrival, now)
        except OSError as error:
            self._fail(one, error_text(error), now)
        if self._progress is not None:
            call_user(self._progress, arrival.offered, arrival.size)

    def _write(self, one: _SenderSession, arrival: _Delivery, now: float) -> None:
        # A block counts as there when it is written, so that a slow reader of a pipe slows the sender down.
        try:
            for block, right in arrival.write():
                one.core.checked(block, right, now)
        except OSError as error:
            self._fail(one, error_text(error), now)
        if self._progress is not None:
            call_user(self._progress, arrival.offered, arrival.size)

    def _poll(self, now: float) -> None:
        """Write on, put into place what has come whole, and hand out or drop what has ended."""
        for session, one in [*self.sessions.items()]:
            for part in one.all_receivers():
                self._poll_one(part, now)
            if one.core.satisfied:  # the sender of what goes round may never end the session
                self._choice.over(session)
            if one.core.finished and not any(part.core.storable for part in one.all_receivers()):
                for part in one.all_receivers():
                    part.drop()
                self._choice.over(session)
                del self.sessions[session]
                self._remember(one)

    def _poll_one(self, one: _SenderSession, now: float) -> None:
        core = one.core
        if one.delivery is not None and one.delivery.stored_block is not None:
            self._verify_stored(one, one.delivery, now)
        if one.delivery is not None and one.delivery.pending:
            self._write(one, one.delivery, now)
        sink = None if one.delivery is None else one.delivery.sink
        if core.storable and one.delivery is not None and sink is not None and not one.delivery.pending:
            try:
                if bytes(one.delivery.digest) != core.digest:
                    self._fail(one, sink.mismatch or "the object differs from its digest", now)
                elif sink.commit():
                    core.stored(now)
            except OSError as error:
                self._fail(one, error_text(error), now)
        self._hand_out(one)
        if not core.ack_pending:  # the sender knows: the caller may take its time
            self._complete += one.complete
            one.complete.clear()

    def _hand_out(self, one: _SenderSession) -> None:
        for ended in one.core.ended:
            if ended.complete and one.delivery is not None:
                one.complete.append(one.delivery.received(dict(self.rejected)))
            copied = one.drop()
            if not ended.complete and not self._choice.other(one.core.session):
                self._choice.missed(one.core)
                missed = Missed(one.offered(ended.about), ended.reason, one.core.late, copied)
                (self._missed or self._warn)(missed)
        one.core.ended.clear()
