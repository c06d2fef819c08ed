"""Sending session: its steps, progress, and the report of each object.

Theory of operation. `SendingSession` owns the protocol's `ObjectSender` (`core`), the authenticator and, for
each object of the current `send`, a `SendBuffer`. A step asks the core for messages: bytes, or ranges of
segments that `SendBuffer` turns into messages when the driver is ready to send them. Received messages are
authenticated, decoded and passed to the core. `send_all` repeats steps until the core has a result for the
object, or `stop` was called, and gives the blocks back in any case.

- Waking: the core's timer, a received message, a pipe without bytes (every `_POLL_INTERVAL`), and `stop`,
  which a signal handler or another thread may call (noticed within `_STOP_INTERVAL`).
- Threads: `workers` compute digests of blocks that were read ahead, parity and tags. They touch blocks and
  authenticator only until a step has asked for their result; the owner of the session closes them.
- Memory: the window bounds the blocks that are kept. A receiver that announces more is held to the window.
- An error of a source leaves the object unfinished in the core; the next call ends it there.
- `publish` keeps the object. While the program waits for receivers, `_repeat` sends the object again, under
  another number, to those that lack it; the others know its version, and do not receive it twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from errno import ETIMEDOUT
from functools import partial
from itertools import accumulate
from math import inf
from operator import index
from random import SystemRandom
from typing import NamedTuple

from pydantic import BaseModel
from typing_extensions import Buffer

from mcast.api import HeaderBodyBatch, Phase, TimedOut
from mcast.arguments.copies import reduce_with_copies
from mcast.arguments.seconds import check_seconds
from mcast.cast.io.driver import MAX_RX_BATCH, SessionContext, SessionSteps, from_others, payloads_of
from mcast.cast.io.sources import (
    ByteSource,
    MemorySource,
    Sendable,
    SendBuffer,
    memory_of,
    source_of,
)
from mcast.cast.io.workers import Workers
from mcast.cast.protocol import fec
from mcast.cast.protocol.auth import NEEDS_KEY, WRONG_KEY, authenticator_for
from mcast.cast.protocol.blocks import Framer
from mcast.cast.protocol.members import Member
from mcast.cast.protocol.packets import (
    MAX_K,
    MAX_PARITY,
    MAX_VERSION,
    NO_VERSION,
    UNKNOWN_SIZE,
    VERSION,
    Join,
    Rejected,
    segment_size,
)
from mcast.cast.protocol.rate import MAX_BURST
from mcast.cast.protocol.repairs import SegmentRange
from mcast.cast.protocol.sender import ObjectInfo, ObjectResult, ObjectSender, ReceiverReport, Timers
from mcast.cast.protocol.strategy import Strategy, all_receivers, deadline
from mcast.endpoint.waiting import Step, call_user

_POLL_INTERVAL = 0.01
"""Interval to poll a source that had no bytes, in seconds."""
_REPEAT_INTERVAL = 1.0
"""Time until a version is sent again to a receiver that could not take it, in seconds."""
_STOP_INTERVAL = 0.1
"""Maximum time until `stop` is noticed, in seconds, however low the rate is."""


class Object(NamedTuple):
    """One of several objects to send; the fields are arguments of `mcast.cast.send`."""

    data: Sendable
    name: str = ""
    metadata: bytes | BaseModel = b""

    def __reduce__(self) -> tuple[object, ...]:
        return reduce_with_copies(self)


class ObjectReport(NamedTuple):
    """Report of one object.

    name, size    as announced to the receivers; the size in bytes, None for a stream that was cut short
    digest        BLAKE3 digest of the object's bytes, which each receiver has verified; None if a deadline or
                  `stop` ended the object before the digest was sent
    strategy_met  True if the strategy's condition was met
    seconds       time from the first message of the object until the sender had finished with it
    segments      number of segments of the object
    repairs       number of segments, source and parity, sent in addition: as repairs, or by a carousel
    parity        True if losses were repaired by parity; otherwise segments were sent again
    receivers     report of each receiver that took part; empty for a carousel, which receivers do not answer
    refused       number of messages that were rejected since the session began, by reason: not authentic,
                  replayed, or malformed
    skipped       number of segments that were not sent because all receivers had them from an earlier run
    cycles        number of complete cycles of a carousel
    offered       number of bytes read from the source: fewer than `size` if the object was cut short
    version       version of a published object; None for others
    """

    name: str
    size: int | None
    digest: bytes | None
    strategy_met: bool
    seconds: float
    segments: int
    repairs: int
    parity: bool
    receivers: tuple[ReceiverReport, ...]
    refused: dict[str, int]
    skipped: int = 0
    cycles: int = 0
    offered: int = 0
    version: int | None = None


class ReceiverVersion(NamedTuple):
    """Version that a receiver in the session is known to have.

    name, address  of the receiver
    number         of the receiver, as in `ReceiverReport`
    version        the newest version that it has; None if it has none
    """

    name: str
    address: str
    number: int
    version: int | None


class _Published(NamedTuple):
    """The newest version; the source stays open, to be read again. `digest` is None before all was sent."""

    object: Object
    version: int
    source: ByteSource
    digest: bytes | None = None


class Progress(NamedTuple):
    """Progress of a sender.

    name       name of the current object; None while the sender waits for receivers
    size       size in bytes, for a carousel that of all its objects; None if unknown before the end
    done       bytes that all receivers have that still receive the object; at its end all of them, if any
               receiver has it. For a carousel, bytes sent in this cycle
    receivers  number of receivers in the session
    """

    name: str | None
    size: int | None
    done: int
    receivers: int


class SendingSession:
    """Session of a sender, for any number of objects.

    memory        approximate number of bytes kept for repairs: the sender is at most this far ahead
    rate          maximum rate in bytes per second; inf: as fast as the receivers accept
    peer_timeout  time after which a receiver that does not answer is given up, in seconds
    key           key of a closed group; None: no authentication
    progress      called when the progress has changed
    threads       number of threads that compute digests, parity and tags; 0: the session's own does

    Raises ValueError for a rate, a timeout, a key or a number of threads that is not valid.
    """

    def __init__(
        self,
        context: SessionContext,
        memory: int,
        rate: float,
        peer_timeout: float,
        key: bytes | None,
        progress: Callable[[Progress], object] | None = None,
        threads: int = 0,
    ) -> None:
        if not rate > 0:
            raise ValueError(f"rate is {rate}: give bytes per second, more than 0, or inf for no limit")
        self._context = context
        self._authenticator = authenticator_for(key)
        max_message = context.max_message - self._authenticator.overhead
        block = segment_size(max_message) * MAX_K
        self._window = max(4, memory // block)
        timers = Timers(peer_timeout=check_seconds(peer_timeout, "peer_timeout"))
        limit = rate / context.max_message
        nonce = SystemRandom().getrandbits(64)
        self._max_burst = max(1, min(MAX_BURST, context.queue // 2)) if context.queue else MAX_BURST
        """Maximum segments in a step: their copies come back, and may not fill the receive queue."""
        self.core: ObjectSender = ObjectSender(
            context.number, context.name, max_message, context.now(), timers, limit, nonce
        )
        self._authenticator.begin(context.number, nonce)
        self._frames = Framer(max_message)
        self.workers: Workers = Workers(threads)
        self._buffer: SendBuffer | None = None
        self._offsets: tuple[int, ...] = ()
        """Carousel of several objects: bytes before each of them, and at the end their total."""
        self._progress = progress
        self._last_progress = Progress(None, None, 0, 0)
        self._stopped = False
        self._published: _Published | None = None
        self._repeat_at = 0.0
        self._tried = set[int]()
        """Receivers that took part when the version was sent last: those of them that lack it wait."""

    @property
    def versions(self) -> tuple[ReceiverVersion, ...]:
        """Version that each receiver in the session has."""
        return tuple(
            ReceiverVersion(it.name, it.address, it.number, None if it.version == NO_VERSION else it.version)
            for it in self.receivers
        )

    @property
    def receivers(self) -> list[Member]:
        """Receivers in the session now."""
        return [member for member in self.core.members if member.active]

    def wait_for_receivers(
        self, receivers: int | None, timeout: float | None, call: str = "session.wait_for_receivers"
    ) -> SessionSteps[int]:
        """Wait for this number of receivers, or admit all that join within `timeout` seconds.

        receivers  None: wait for the whole timeout
        timeout    None: wait without limit
        call       name of the call, for errors

        Returns the number of receivers in the session. Raises TimedOut if there are fewer than `receivers`.
        """
        if receivers is None and timeout is None:
            raise ValueError(f"{call}: give the number of receivers to wait for, or a timeout, or both")
        if timeout is not None:
            timeout = check_seconds(timeout)
        end = inf if timeout is None else self._context.now() + timeout
        core = self.core
        self._abandon()
        wanted = inf if receivers is None else receivers
        while (active := core.members.active) < wanted or core.admit_at < inf:
            if self._context.now() >= end and receivers is None:
                break
            if self._context.now() >= end and active < (receivers or 0):
                gone = sum(not member.active for member in core.members)
                left = f", and {gone} have left it" if gone else ""
                raise TimedOut(
                    ETIMEDOUT,
                    call,
                    Phase.RECV,
                    detail=f"{active} of {receivers} receivers are in the session after {timeout:g} s{left}: "
                    f"check that cast.receive runs on the others, in the same group.{self._key_hint()}",
                )
            if self._repeats:
                yield from self._repeat(end)
            else:
                # The last step sends the ADMIT, and does not wait.
                until = end if active < wanted else core.admit_at
                may_repeat = core.members.lacking and not self._stopped
                yield from self._step(min(until, self._repeat_at) if may_repeat else until)
        return core.members.active

    def _key_hint(self) -> str:
        """Return a hint for the user if keys or protocol versions seem to differ; else an empty string."""
        hints = [
            f" {count} messages were {reason}."
            for reason in (NEEDS_KEY, WRONG_KEY, VERSION)
            if (count := self.core.rejected[reason])
        ]
        return "".join(hints)

    def send(
        self, data: Sendable, strategy: Strategy, name: str, metadata: bytes | BaseModel
    ) -> SessionSteps[ObjectReport]:
        """Send one object until the strategy ends it; return its report."""
        (report,) = yield from self.send_all([Object(data, name, metadata)], strategy)
        return report

    def send_all(
        self, objects: Sequence[Object], strategy: Strategy
    ) -> SessionSteps[tuple[ObjectReport, ...]]:
        """Send one object, or several objects of a carousel in cycles; return the report of each."""
        if strategy.carousel and self.core.rate.limit == inf:
            raise ValueError("a carousel needs a rate: receivers do not answer, so nothing else limits it")
        with ExitStack() as stack:
            stack.callback(self._forget_stop)
            several = len(objects) > 1
            sources = [self._open_source(stack, one.data, strategy.carousel, several) for one in objects]
            return (yield from self._send_sources(sources, objects, strategy))

    def publish(
        self, data: Sendable, version: int, strategy: Strategy, name: str, metadata: bytes | BaseModel
    ) -> SessionSteps[ObjectReport]:
        """Send a version, and keep it for receivers that join later; return its report."""
        known = self._published
        try:
            version = index(version)
        except TypeError:
            raise TypeError(f"version is a {type(version).__name__}: give an int") from None
        if not 0 <= version <= MAX_VERSION:
            raise ValueError(f"version {version}: give a number from 0 to {MAX_VERSION:,}")
        if known is not None and version <= known.version:
            raise ValueError(
                f"version {version} is not newer than version {known.version}, which this session has "
                f"published: give at least {known.version + 1}"
            )
        if strategy.carousel:
            raise ValueError(
                "publish sends a version to receivers that answer: give all_receivers(), quorum(k), "
                "deadline(seconds) or best_effort()"
            )
        with ExitStack() as stack:
            stack.callback(self._forget_stop)
            source = _lasting_source(data)
            self._lend(source)
            self._published = _Published(Object(b"", name, metadata), version, source)
            try:
                return (yield from self._send_published(strategy))
            finally:
                if self.core.members.newest < version:  # it has not begun: the name is too long, for example
                    known, self._published = self._published, known
                if known is not None:
                    known.source.close()

    def _send_published(self, strategy: Strategy) -> SessionSteps[ObjectReport]:
        published = self._published
        assert published is not None
        one, version, source, digest = published
        source.rewind()
        (report,) = yield from self._send_sources([source], [one], strategy, version, digest)
        self._published = published._replace(digest=report.digest or digest)
        self._repeat_at = self._context.now() + _REPEAT_INTERVAL
        self._tried = {one.number for one in report.receivers}
        return report

    @property
    def _repeats(self) -> bool:
        """True if a receiver lacks the published version, and may get it now."""
        core = self.core
        return (
            bool(core.members.lacking)
            and self._published is not None
            and not (core.admit_at < inf or self._stopped)
            and (self._context.now() >= self._repeat_at or not core.members.lacking <= self._tried)
        )

    def _repeat(self, until: float) -> SessionSteps[None]:
        """Send the published version to the receivers that lack it, until that time at the latest."""
        left = until - self._context.now()
        yield from self._send_published(all_receivers() if left == inf else deadline(max(0.0, left)))

    def _send_sources(
        self,
        sources: Sequence[ByteSource],
        objects: Sequence[Object],
        strategy: Strategy,
        version: int = NO_VERSION,
        digest: bytes | None = None,
    ) -> SessionSteps[tuple[ObjectReport, ...]]:
        """Send objects from open sources; `digest` is that of a version which was sent before."""
        core, begun = self.core, self._context.now()
        self._abandon()
        with ExitStack() as stack:
            stack.callback(self._reset)
            several = len(objects) > 1
            infos = [
                ObjectInfo(source.size, one.name, _metadata_of(one.metadata), version)
                for source, one in zip(sources, objects, strict=True)
            ]
            parity = MAX_PARITY if fec.available() else 0
            abouts = core.begin_all(begun, strategy, infos, parity=parity)
            buffers = [SendBuffer(*both, self.workers, digest) for both in zip(sources, abouts, strict=True)]
            for buffer in buffers:
                stack.callback(buffer.close)
                if several:
                    buffer.suspend()
            self._offsets = (0, *accumulate(info.size or 0 for info in infos)) if several else ()
            while not (core.results or self._stopped):
                assert core.outgoing is not None
                buffer = buffers[core.outgoing.about.position]
                if self._buffer is not None and self._buffer is not buffer:
                    self._buffer.suspend()
                self._buffer = buffer
                ready = buffer.offer(core)
                yield from self._step(self._context.now() + (_STOP_INTERVAL if ready else _POLL_INTERVAL))
            core.abandon(self._context.now())  # if `stop` has ended the loop
            results, core.results = core.results, []
            seconds = self._context.now() - begun
        return tuple(self._report(*both, seconds) for both in zip(buffers, results, strict=True))

    def _abandon(self) -> None:
        """End an earlier object in the core, if an error has ended its call."""
        self.core.abandon(self._context.now())
        self.core.results.clear()

    def _open_source(self, stack: ExitStack, data: Sendable, carousel: bool, suspend: bool) -> ByteSource:
        """Open the source of an object, which the stack closes; suspend it until the object's first turn."""
        source = source_of(data)
        stack.callback(source.close)
        self._lend(source)
        if carousel and not source.rewind():
            raise ValueError(
                "a carousel reads the object in each cycle: give a buffer, a path, or a file that can seek "
                "and has a known size"
            )
        if suspend:
            source.suspend()
        return source

    def _lend(self, source: ByteSource) -> None:
        # With a key each message is copied to be signed: nothing is sent from the caller's memory.
        if isinstance(source, MemorySource) and not self._authenticator.overhead:
            source.lend = self._context.lend

    def _reset(self) -> None:
        """Forget the objects that have ended."""
        self._buffer, self._offsets = None, ()

    def _forget_stop(self) -> None:
        self._stopped = False

    def _report(self, buffer: SendBuffer, result: ObjectResult, seconds: float) -> ObjectReport:
        about = buffer.about
        stream_size = None if result.digest is None else buffer.size
        return ObjectReport(
            about.name,
            stream_size if about.size == UNKNOWN_SIZE else about.size,
            result.digest,
            result.strategy_met,
            seconds,
            result.segments,
            result.repairs,
            result.parity,
            result.receivers,
            dict(self.core.rejected),
            result.skipped,
            result.cycles,
            buffer.size,
            None if about.version == NO_VERSION else about.version,
        )

    def stop(self) -> None:
        """End the current object now, or the next one if there is none."""
        self._stopped = True

    def close(self, reason: str) -> SessionSteps[None]:
        """End the session, and send the receivers the reason. `free` is to be called after it."""
        self.core.close(self._context.now(), reason)
        while not self.core.finished:
            yield from self._step(inf)

    def free(self) -> None:
        """End the threads, and close the published file. Idempotent."""
        published, self._published = self._published, None
        try:
            if published is not None:
                published.source.close()
        finally:
            self.workers.close()

    def _step(self, until: float) -> SessionSteps[None]:
        core = self.core
        batches = self._batches(core.messages(self._context.now(), self._max_burst))
        # Do not wait after the end: no receiver may have anything to send any more.
        ended = core.finished or core.results
        received = yield Step(self._context.now() if ended else min(until, core.due), MAX_RX_BATCH, batches)
        now = self._context.now()
        for message, address in payloads_of(from_others(received)):
            try:
                packet = self._authenticator.decode(message, address)
            except Rejected as rejected:
                core.rejected[str(rejected)] += 1
                continue
            if isinstance(packet, Join) and packet.window > self._window:
                packet = packet._replace(window=self._window)  # the sender keeps the window in memory
            core.on_packet(packet, address, now)
        self._report_progress()

    def _batches(self, messages: list[bytes | SegmentRange]) -> Iterator[Sequence[Buffer] | memoryview]:
        """Yield the core's messages in batches, each built when the driver is ready to send it.

        First the messages before the first segment, then all segments, then the other messages.
        """
        before, runs, after = list[Buffer](), list[SegmentRange](), list[Buffer]()
        for one in messages:
            if isinstance(one, SegmentRange):
                runs.append(one)
            else:
                (after if runs else before).append(one)
        if before:
            yield self._authenticator.sign(before)
        if self._buffer is not None:
            yield from self._signed(self._buffer.packets(runs, self._frames))
        if after:
            yield self._authenticator.sign(after)

    def _signed(
        self, batches: Iterator[memoryview | HeaderBodyBatch]
    ) -> Iterator[Sequence[Buffer] | memoryview]:
        """Yield the batches as they are sent; a thread computes the tags of one while another is sent."""
        if not self._authenticator.overhead:
            yield from batches
            return
        signed: Sequence[Buffer] | memoryview | None = None
        for batch in batches:
            signing = self.workers.submit(partial(self._authenticator.sign, batch))
            try:
                if signed is not None:
                    yield signed
            finally:  # the tags are numbered, and the memory of the batch is used again
                signed = signing.result()
        if signed is not None:
            yield signed

    def _report_progress(self) -> None:
        if self._progress is None:
            return
        now = Progress(None, None, 0, self.core.members.active)
        if self._buffer is not None:
            about = self._buffer.about
            size, before = None if about.size == UNKNOWN_SIZE else about.size, 0
            if self._offsets:
                before, size = self._offsets[about.position], self._offsets[-1]
            now = now._replace(name=about.name, size=size, done=before + self._buffer.done)
            if self.core.outgoing is None:  # it has ended
                complete = any(one.complete for result in self.core.results for one in result.receivers)
                now = now._replace(done=self._buffer.size if complete else self._last_progress.done)
        if now != self._last_progress:
            self._last_progress = now
            call_user(self._progress, now)


def _lasting_source(data: Sendable) -> ByteSource:
    """Open a source that gives the same bytes again later, also if the caller changes a buffer meanwhile."""
    if not isinstance(data, bytes) and (memory := memory_of(data)) is not None:
        data = bytes(memory)
    source = source_of(data) if isinstance(data, bytes | os.PathLike) else None
    if source is None or not source.rewind():
        if source is not None:
            source.close()
        raise TypeError(
            f"publish sends a version again to receivers that join later, and {type(data).__name__} cannot "
            "be read again: give a buffer, a tensor or the path of a regular file"
        )
    return source


def _metadata_of(metadata: bytes | BaseModel) -> bytes:
    """Return metadata as bytes; a model is encoded as JSON."""
    return metadata.model_dump_json().encode() if isinstance(metadata, BaseModel) else metadata
