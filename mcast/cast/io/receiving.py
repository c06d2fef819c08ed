"""Receiving session: takes part in the sessions of all senders of a group, and assembles their objects.

Theory of operation. `ReceivingSession` owns a `_SenderSession` for each sender, which owns the protocol's
`ObjectReceiver` (`core`) and a `_Delivery`: the blocks and the sink of the object in transfer. For a carousel
of several objects a `_SenderSession` has one more of its kind for each other object (`others`).

- A step sends what the cores have to send, waits for messages or the earliest timer, parses the messages into
  runs of segments and other packets, passes them to the core, and stores segments that the core calls new.
- Segments: `_on_batch` has the placer put segments of open blocks into place (`placing`), and opens those
  blocks that it meets and the core wants.
- Blocks: when the core has enough segments of a block, `check` has a thread restore and verify it, one task
  of an object at a time, because the digest continues that of the block before. `write` writes verified
  blocks in order while the sink is ready; then `core.checked` confirms them to the sender, so that a slow
  sink slows the sender down. Blocks of an earlier run are compared a few at a time (`_verify_stored`).
  While a thread works and nothing arrives, the step waits for the thread.
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
from functools import partial
from itertools import chain, islice
from math import inf
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, NamedTuple

from mcast.api import Batch, Series
from mcast.arguments import Buffer
from mcast.arguments.copies import reduce_with_copies
from mcast.arguments.seconds import check_seconds
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
from mcast.cast.io.placing import (
    DataRun,
    coalesced,
    encode_bitmap,
    gid_of,
    placer_for,
    run_of,
)
from mcast.cast.io.sinks import (
    BufferSink,
    GrowingMemorySink,
    NewMemorySink,
    Offered,
    ReceiveTarget,
    StagedBufferSink,
    Target,
    require_whole,
    sink_at,
    sink_of,
)
from mcast.cast.io.sources import Metadata
from mcast.cast.io.workers import Task, Workers
from mcast.cast.protocol import fec
from mcast.cast.protocol.auth import NEEDS_KEY, WRONG_KEY, authenticator_for
from mcast.cast.protocol.blocks import BlockBuffer, Digest
from mcast.cast.protocol.incoming import ReadyBlock
from mcast.cast.protocol.layout import ObjectLayout
from mcast.cast.protocol.packets import (
    MAX_K,
    MAX_TEXT,
    MAX_WINDOW,
    NO_VERSION,
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

if TYPE_CHECKING:
    from mcast.cast._plane import Placer  # it may not be built

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
_MAX_VERIFIED_PER_STEP = 8
"""Maximum number of stored blocks that are verified in one step."""
_MAX_TASK = 8
"""Maximum number of blocks that are verified in one task of a thread."""
_MIN_TASK = 1 << 16
"""Minimum size of a task, in bytes: to hand over a smaller one takes longer than to carry it out."""
_NO_THREADS = Workers(0)
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


class _Job(NamedTuple):
    """A block to verify, and its segments; `buffer` is None if there are none."""

    ready: ReadyBlock
    buffer: BlockBuffer | None


def _verified(jobs: Sequence[_Job], digest: Digest | None) -> list[memoryview | None]:
    """Return the bytes of blocks; None for one that differs from its digest, or that cannot be restored.

    digest  of the bytes before the first block, to be continued, and the first block that differs is the last
            one of the result; None if each block has a digest of its own
    """
    found: list[memoryview | None] = []
    for (info, segments), buffer in ((job.ready[2:], job.buffer) for job in jobs):
        data = None
        if buffer is not None and digest is None:
            data = buffer.assemble_verified(info, segments)
        elif buffer is not None and digest is not None:
            data = buffer.assemble(info, segments)
            if data is not None and not digest.update_if(data, info.digest):
                data = None
        found.append(data)
        if data is None and digest is not None:
            break
    return found


class _Delivery:
    """One object in transfer: its blocks, its digest so far, and its sink.

    A block is in `_blocks` while it is open, in `_ready` while it is verified, in `_assembled` until it is
    written.
    """

    def __init__(self, about: Describe, offered: Offered, placer: Placer | None, workers: Workers) -> None:
        self.offered = offered
        self.target: Target = None
        """Destination that other objects may share: the caller's buffer, stream or sink; None for a path."""
        self.sink: Sink | None = None
        self.path: Path | None = None
        self.size = 0
        self.digest = Digest()
        self._layout = ObjectLayout.of(about)
        self._block_size = self._layout.offset_of(1)
        self._key = about.session, about.object
        self._placer, self._workers = placer, workers
        self._blocks: dict[int, BlockBuffer] = {}
        self._ready: dict[int, _Job] = {}
        self._task: tuple[Task[list[memoryview | None]], Sequence[_Job]] | None = None
        """Blocks that a thread verifies; the digest is the thread's meanwhile."""
        self._next_check = 0
        """Next block to verify; in a carousel, whose blocks are verified in any order, it has no meaning."""
        self._next = 0
        self._assembled: dict[int, memoryview] = {}
        """Verified blocks to be written, or the rest of one."""
        self._is_partly_written = False
        self._in_place = False
        """True if blocks are assembled in the sink's own memory, so that `write` has nothing to copy."""
        self.stored_block: ReadyBlock | None = None
        """Next block that an earlier run may have stored, to be verified."""
        self.abandoned = False
        """True if this receiver has failed the object: a later run must not resume from its bytes."""
        self.carousel = about.carousel > 0
        self._on_disk = set[int]()
        """Blocks that were written out of order, to be read back for the object's digest."""

    def open(self, block: int, wanted: int, need: int) -> None:
        """Have the placer store these segments of a block, and stop when so many have arrived."""
        assert self._placer is not None
        buffer, layout = self._buffer_of(block), self._layout
        memory = buffer.memory, buffer.parity
        self._placer.open(*self._key, block, encode_bitmap(wanted), need, *memory, layout.segment, layout.k)

    def put(self, run: DataRun, new: int) -> None:
        """Store the segments of a run whose bit is set in `new`."""
        self._close(run.block)  # the placer would store them once more
        block = self._buffer_of(run.block)
        first, count, memory, begin, step, size = run[3:]
        if new == (1 << count) - 1 << first:
            block.put_run(first, count, memory, begin, step, size)
            return
        for segment in range(first, first + count):
            if new >> segment & 1:
                block.put_run(segment, 1, memory, begin, step, size)
            begin += step

    def forget(self, blocks: Iterable[int]) -> None:
        """Drop the segments of blocks that the core has dropped: the carousel sends them again."""
        for block in blocks:
            self._take(block)

    def stop(self) -> None:
        """Store no more segments, because the object has ended here."""
        self.forget([*self._blocks])

    def close_sealed(self, seal: Seal) -> None:
        """Have blocks of a stream opened anew: their number of segments is known from now on."""
        if self._layout.size is None:
            for block in range(seal.block, seal.block - len(seal.blocks), -1):
                self._close(block)

    def _take(self, block: int) -> BlockBuffer | None:
        """Remove and return the buffer of an open block."""
        self._close(block)
        return self._blocks.pop(block, None)

    def _close(self, block: int) -> None:
        if self._placer is not None:
            self._placer.close(*self._key, block)

    def _buffer_of(self, block: int) -> BlockBuffer:
        """Return the buffer of an open block: the sink's own memory if it has any, otherwise new memory."""
        if (found := self._blocks.get(block)) is not None:
            return found
        layout, size, memory = self._layout, self._block_size, None
        length = None if layout.size is None else min(size, layout.size - block * size)
        if self.sink is not None and length is not None:
            memory = self.sink.buffer_at(block * size, length)
            self._in_place = memory is not None
        if memory is None:
            memory = memoryview(bytearray(size if length is None else length))
        found = self._blocks[block] = BlockBuffer(memory, layout.segment, layout.k)
        return found

    def add(self, ready: ReadyBlock) -> None:
        """Queue a block for `check`."""
        self._ready[ready.block] = _Job(ready, self._take(ready.block))

    def check(self, wait: bool = False) -> Iterator[tuple[int, bool]]:
        """Have the queued blocks verified; yield the number of each that is not for `write`.

        Yields True with a block that is written completely, in the order of arrival, and False with one that
        differs from its digest. A block of a carousel has a digest of its own. Other digests cover the object
        up to the block's end: these blocks are verified in order.

        wait  wait for the thread that verifies blocks
        """
        while True:
            if self._task is None:
                if not (jobs := self._next_jobs()):
                    return
                is_small = sum(job.ready.info.size for job in jobs) < _MIN_TASK
                workers = _NO_THREADS if is_small else self._workers
                self._task = workers.submit(partial(_verified, jobs, self._running_digest)), jobs
            task, jobs = self._task
            if not (wait or task.done):
                return
            self._task, wait = None, False
            for job, data in zip(jobs, task.result(), strict=False):
                block = job.ready.block
                del self._ready[block]
                if data is None:
                    yield block, False
                elif self.random_access and not self._in_place:
                    assert self.sink is not None
                    self.sink.write_at(self._layout.offset_of(block), data)
                    self._on_disk.add(block)
                    yield block, True
                else:
                    self._assembled[block] = data
                    self._next_check += 1
                    if self.random_access:
                        yield block, True

    @property
    def _running_digest(self) -> Digest | None:
        return None if self.carousel else self.digest

    def _next_jobs(self) -> Sequence[_Job]:
        """Return the blocks that can be verified next."""
        if self.carousel:
            return [*islice(self._ready.values(), _MAX_TASK)]
        jobs: list[_Job] = []
        while len(jobs) < _MAX_TASK and (job := self._ready.get(self._next_check + len(jobs))) is not None:
            jobs.append(job)
        return jobs

    @property
    def busy(self) -> bool:
        """True while a thread verifies blocks."""
        return self._task is not None

    @property
    def random_access(self) -> bool:
        """True if blocks are written to their offset as they arrive, in any order."""
        return self.carousel and self.sink is not None and self.sink.random_access

    @property
    def stored_blocks(self) -> int:
        """Number of blocks that an earlier run may have stored."""
        stored = 0 if self.sink is None else self.sink.stored_size
        size, block = self._layout.size, self._layout.offset_of(1)
        if size is None or stored < size:
            return stored // block
        return (self._layout.blocks or 0) if stored == size else 0  # the last block may be shorter

    def verify_stored(self, info: BlockInfo) -> bool:
        """Verify the next stored block; if it differs, drop the received blocks after it and return False."""
        sink = self.sink
        data = b"" if sink is None else sink.read_back(info.size)
        if self.carousel:
            verified = bytes(Digest(data)) == info.digest
        else:
            verified = self.digest.update_if(data, info.digest)
        if sink is None or not (verified or sink.mismatch):
            if not self.carousel:
                self._clear()
            return False
        sink.mark_verified(len(data))
        if self.carousel or not verified:
            self.digest.update(data)
        self.size += len(data)
        self._next += 1
        self._next_check += 1
        return True

    @property
    def pending(self) -> bool:
        """True if a block is being verified, written, or read back."""
        return self.busy or self._next in self._assembled or self._next in self._on_disk

    def write(self) -> Iterator[tuple[int, bool]]:
        """Write verified blocks in order while the sink is ready.

        Yields the number of each block that is written completely, and True. Blocks that were written out of
        order are read back, and not yielded again.
        """
        sink = self.sink
        for _ in range(_MAX_VERIFIED_PER_STEP):
            if sink is None or self._next not in self._on_disk:
                break
            stored = sink.read_back(self._layout.length(self._next) or 0)
            sink.mark_verified(len(stored))
            self.digest.update(stored)
            self.size += len(stored)
            self._on_disk.remove(self._next)
            self._next += 1
        while sink is not None and self._next in self._assembled:
            data = self._assembled[self._next]
            if self.carousel and not self._is_partly_written:
                self.digest.update(data)
            while data and sink.ready():
                part = data[: sink.max_write]
                if not self._in_place:
                    sink.write(part)
                self.size += len(part)
                data = data[len(part) :]
            self._assembled[self._next] = data
            self._is_partly_written = bool(data)
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
            data = sink.take()
        elif isinstance(sink, BufferSink):
            data = sink.view[: self.size]
        return Received(self.offered, self.size, bytes(self.digest), data, self.path, refused)

    def _clear(self) -> None:
        """Drop all blocks that are not written."""
        self.stop()
        self._ready.clear()
        self._assembled.clear()

    def close(self) -> None:
        with suppress(Exception):  # the object has ended
            keeps = self.sink is not None and not self.sink.streams and not self.abandoned
            while keeps and (self.busy or self._next_jobs()):
                for _ in chain(self.check(wait=True), self.write()):
                    pass  # a later run resumes from these blocks, too
        task, self._task = self._task, None
        if task is not None:
            with suppress(Exception):
                task[0].result()
        self._clear()
        if self.sink is not None:
            if not self.abandoned:
                self.sink.keep_part()
            self.sink.close()


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
        self.delivery: _Delivery | None = None
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
        if isinstance(packet, Seal) and self.delivery is not None:
            self.delivery.close_sealed(packet)
        if isinstance(packet, Seal | Flush):
            return (self.others.get(packet.object, self),)
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
        model: type[Metadata] | None,
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
        delivery = session.delivery = _Delivery(about, session.offered(about), self._placer, self._workers)
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
            sink = sink_of(target, delivery.offered.size, self._max_size)
            if self._latest:
                require_whole(sink)
                if type(sink) is BufferSink:
                    sink = StagedBufferSink(sink, delivery.offered.size)
            delivery.sink = sink
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
        if self._latest:  # each object has memory of its own until it is complete
            return
        if any(each.delivery is not None and each.delivery.target is target for each in self._all_objects()):
            raise OSError("another object is being received into the same buffer")

    def _assemble_ready(self, session: _SenderSession, delivery: _Delivery, now: float) -> None:
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

    def _verify_stored(self, session: _SenderSession, delivery: _Delivery, now: float) -> None:
        """Verify some stored blocks of an earlier run."""
        try:
            for _ in range(_MAX_VERIFIED_PER_STEP):
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

    def _store(self, session: _SenderSession, delivery: _Delivery, now: float, wait: bool = False) -> None:
        """Verify and write blocks as far as threads and sink are; with `wait`, wait for a thread first."""
        # A block is confirmed when it is written, so that a slow reader of a pipe slows the sender down.
        try:
            for block, verified in chain(delivery.check(wait), delivery.write()):
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
                elif sink.commit():
                    core.stored(now)
            except OSError as error:
                self._fail(session, error_text(error), now)
        self._finish_objects(session)
        if not core.ack_pending:  # the sender knows: the program may take its time with the object
            self._complete += session.complete
            session.complete.clear()

    def _finish_objects(self, session: _SenderSession) -> None:
        """Turn the core's results into complete and missed objects."""
        for ended in session.core.ended:
            if ended.complete and session.delivery is not None:
                session.complete.append(session.delivery.received(dict(self.rejected)))
            part_file = session.drop()
            if not ended.complete and not self._choice.is_other(session.core.session):
                self._choice.on_missed(session.core)
                missed = Missed(session.offered(ended.about), ended.reason, session.core.late, part_file)
                (self._missed or self._warn)(missed)
        session.core.ended.clear()
