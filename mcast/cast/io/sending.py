"""The sending end: its turns, and the report of an object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from errno import ETIMEDOUT
from itertools import accumulate
from math import inf
from secrets import randbits
from typing import NamedTuple

from pydantic import BaseModel
from typing_extensions import Buffer

from mcast.api import Phase, TimedOut
from mcast.arguments.copies import reduce_with_copies
from mcast.arguments.seconds import check_seconds
from mcast.cast.io.driver import MAX_RX_BATCH, SessionContext, SessionSteps, from_others, payloads_of
from mcast.cast.io.sinks import metadata_of
from mcast.cast.io.sources import ByteSource, MemorySource, Sendable, SendBuffer, source_of
from mcast.cast.protocol import fec
from mcast.cast.protocol.auth import NEEDS_KEY, WRONG_KEY, authenticator_for
from mcast.cast.protocol.blocks import Framer
from mcast.cast.protocol.members import Member
from mcast.cast.protocol.packets import MAX_K, MAX_PARITY, UNKNOWN_SIZE, VERSION, Join, Rejected, segment_size
from mcast.cast.protocol.repairs import SegmentRange
from mcast.cast.protocol.sender import ObjectInfo, ObjectResult, ObjectSender, ReceiverReport, Timers
from mcast.cast.protocol.strategy import Strategy
from mcast.endpoint.waiting import Step, call_user

_POLL_INTERVAL = 0.01
"""Seconds until a pipe that had no bytes is asked again."""
_STOP_INTERVAL = 0.1
"""Seconds within which `stop` is not_ignored, however slow the pace is."""


class Object(NamedTuple):
    """One of several objects: what is sent, and what goes with it, as `mcast.cast.send` has it."""

    data: Sendable
    name: str = ""
    metadata: bytes | BaseModel = b""

    def __reduce__(self) -> tuple[object, ...]:
        return reduce_with_copies(self)


class ObjectReport(NamedTuple):
    """What became of one object.

    name, size   as the receivers were told; the size in bytes, None for a stream that was cut short
    digest       the BLAKE3 digest of the object's bytes, with which each receiver compared what it has; None
                 if the object was cut short, by a deadline or `stop`, before the receivers were told
    strategy_met  whether the strategy's promise was kept
    seconds      from the first message of the object until the sender was done with it
    segments     how many the object has, each sent once in a message
    repairs      how many pieces, of data and of parity, were sent besides: to repair losses, or by a carousel
    parity       whether losses could be repaired by parity; otherwise pieces were repeated
    receivers    each that took part: whether and when it had the object, what it asked for, why it has not;
                 none for a carousel, which nobody answers
    refused      messages that changed nothing, by reason, since the session began: strangers', replayed ones
    skipped      how many of the pieces were not sent, because all receivers had them from an earlier run
    cycles       how often a carousel has sent the whole object
    offered      how many bytes were read and offered to the receivers: fewer than `size` if it was cut short
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


class Progress(NamedTuple):
    """How far a sender is.

    name       of the object on its way; None while receivers are waited for
    size       of the object, in bytes, or of all that go round together; None where only the end will tell
    done       how many bytes each receiver has; of a carousel, how many this round has sent
    receivers  how many take part
    """

    name: str | None
    size: int | None
    done: int
    receivers: int


class SendingSession:
    """One session of a sender, which takes any number of objects.

    memory  about how many bytes of an object are kept for repairs, and so how far the sender goes ahead
    rate    the most bytes a second, inf: as fast as the receivers can
    progress  is called when the sender has come further
    """

    def __init__(
        self,
        context: SessionContext,
        memory: int,
        rate: float,
        peer_timeout: float,
        key: bytes | None,
        progress: Callable[[Progress], object] | None = None,
    ) -> None:
        if not rate > 0:
            raise ValueError(f"rate is {rate}: bytes a second, more than 0")
        self._context = context
        self._authenticator = authenticator_for(key)
        max_message = context.max_message - self._authenticator.overhead
        block = segment_size(max_message) * MAX_K
        self._window = max(4, memory // block)
        timers = Timers(peer_timeout=check_seconds(peer_timeout, "peer_timeout"))
        limit = rate / context.max_message
        nonce = randbits(64)
        self.core: ObjectSender = ObjectSender(
            context.number, context.name, max_message, context.now(), timers, limit, nonce
        )
        self._authenticator.begin(context.number, nonce)
        self._frames = Framer(max_message)
        self._buffer: SendBuffer | None = None
        self._offsets: tuple[int, ...] = ()
        """Of objects that go round together, how many bytes come before each, and how many there are."""
        self._progress = progress
        self._last_progress = Progress(None, None, 0, 0)
        self._stopped = False

    @property
    def receivers(self) -> list[Member]:
        """Those that take part now."""
        return [member for member in self.core.members if member.active]

    def wait_for_receivers(
        self, receivers: int | None, timeout: float | None, call: str = "session.wait_for_receivers"
    ) -> SessionSteps[int]:
        """Wait until so many receivers take part, or let in those that come within `timeout` seconds.

        Returns how many there are. Raises TimedOut, in the name of the call, if they are too few.
        """
        if receivers is None and timeout is None:
            raise ValueError(f"{call}: say how many receivers to wait for, or a timeout, or both")
        if timeout is not None:
            timeout = check_seconds(timeout)
        end = inf if timeout is None else self._context.now() + timeout
        core = self.core
        while (here := core.members.active) < (
            inf if receivers is None else receivers
        ) or core.has_admissions:
            if self._context.now() >= end and receivers is None:
                break
            if self._context.now() >= end and here < (receivers or 0):
                raise TimedOut(
                    ETIMEDOUT,
                    call,
                    Phase.RECV,
                    detail=f"{here} of {receivers} receivers take part after {timeout:g} s: is cast.receive "
                    f"running on the others, in the same group?{self._key_hint()}",
                )
            yield from self._step(end)
        return core.members.active

    def _key_hint(self) -> str:
        """A hint, if it may be the keys or the versions that differ."""
        told = [
            f" {count} messages were {reason}."
            for reason in (NEEDS_KEY, WRONG_KEY, VERSION)
            if (count := self.core.rejected[reason])
        ]
        return "".join(told)

    def send(
        self, data: Sendable, strategy: Strategy, name: str, metadata: bytes | BaseModel
    ) -> SessionSteps[ObjectReport]:
        """Send one object to all that take part; done when the strategy says so."""
        (report,) = yield from self.send_all([Object(data, name, metadata)], strategy)
        return report

    def send_all(
        self, objects: Sequence[Object], strategy: Strategy
    ) -> SessionSteps[tuple[ObjectReport, ...]]:
        """As `send`; of a carousel several objects, which go round together."""
        if strategy.carousel and self.core.rate.limit == inf:
            raise ValueError("a carousel needs a rate: nobody answers, so nothing else slows it down")
        core, begun = self.core, self._context.now()
        core.abandon(begun)  # an object that an error has ended
        core.results.clear()
        with ExitStack() as stack:
            stack.callback(self._forget)
            several = len(objects) > 1
            sources = [self._open_source(stack, one.data, strategy.carousel, several) for one in objects]
            infos = [
                ObjectInfo(source.size, one.name, metadata_of(one.metadata))
                for source, one in zip(sources, objects, strict=True)
            ]
            parity = MAX_PARITY if fec.available() else 0
            abouts = core.begin_all(begun, strategy, infos, parity=parity)
            buffers = [SendBuffer(*both) for both in zip(sources, abouts, strict=True)]
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
            core.abandon(self._context.now())  # if it is not settled
            settled, core.results = core.results, []
            took = self._context.now() - begun
        return tuple(self._report(buffer, one, took) for buffer, one in zip(buffers, settled, strict=True))

    def _open_source(self, stack: ExitStack, data: Sendable, again: bool, rests: bool) -> ByteSource:
        """Where the bytes of an object come from; the stack closes that."""
        source = source_of(data)
        stack.callback(source.close)
        if (
            isinstance(source, MemorySource) and not self._authenticator.overhead
        ):  # else each message is made anew
            source.lend = self._context.lend
        if again and not source.rewind():
            raise ValueError(
                "a carousel sends the object again and again: give a buffer, a path, or a file that can seek "
                "and has a known size"
            )
        if rests:
            source.suspend()
        return source

    def _forget(self) -> None:
        """Nothing is on its way any more."""
        self._stopped, self._buffer, self._offsets = False, None, ()

    def _report(self, buffer: SendBuffer, settled: ObjectResult, took: float) -> ObjectReport:
        about = buffer.about
        of_stream = None if settled.digest is None else buffer.size
        return ObjectReport(
            about.name,
            of_stream if about.size == UNKNOWN_SIZE else about.size,
            settled.digest,
            settled.strategy_met,
            took,
            settled.segments,
            settled.repairs,
            settled.parity,
            settled.receivers,
            dict(self.core.rejected),
            settled.skipped,
            settled.cycles,
            buffer.size,
        )

    def stop(self) -> None:
        """End the object that is on its way as it stands, or the next one if there is none."""
        self._stopped = True

    def close(self, reason: str) -> SessionSteps[None]:
        """End the session: the receivers are told."""
        self.core.close(self._context.now(), reason)
        while not self.core.finished:
            yield from self._step(inf)

    def _step(self, until: float) -> SessionSteps[None]:
        core = self.core
        said = self._batches(core.messages(self._context.now()))
        # What comes after the end is not waited for: perhaps nobody says anything any more.
        ended = core.finished or core.results
        heard = yield Step(self._context.now() if ended else min(until, core.due), MAX_RX_BATCH, said)
        now = self._context.now()
        for message, address in payloads_of(from_others(heard)):
            try:
                packet = self._authenticator.decode(message, address)
            except Rejected as rejected:
                core.rejected[str(rejected)] += 1
                continue
            if isinstance(packet, Join) and packet.window > self._window:
                packet = packet._replace(window=self._window)  # the sender keeps what is under way in memory
            core.on_packet(packet, address, now)
        self._report_progress()

    def _batches(self, out: list[bytes | SegmentRange]) -> Iterator[Sequence[Buffer] | memoryview]:
        """What the core says, in batches that are made when their turn comes.

        That is what comes before the pieces, the pieces, and the rest.
        """
        runs = [one for one in out if isinstance(one, SegmentRange)]
        first = out.index(runs[0]) if runs else len(out)
        packets: list[Buffer] = [one for one in out[:first] if not isinstance(one, SegmentRange)]
        rest: list[Buffer] = [one for one in out[first:] if not isinstance(one, SegmentRange)]
        if packets:
            yield self._authenticator.sign(packets)
        if self._buffer is not None:
            yield from map(self._authenticator.sign, self._buffer.packets(runs, self._frames))
        if rest:
            yield self._authenticator.sign(rest)

    def _report_progress(self) -> None:
        if self._progress is None:
            return
        now = Progress(None, None, 0, self.core.members.active)
        if self.core.outgoing is not None and self._buffer is not None:
            about = self._buffer.about
            size, before = None if about.size == UNKNOWN_SIZE else about.size, 0
            if self._offsets:
                before, size = self._offsets[about.position], self._offsets[-1]
            now = now._replace(name=about.name, size=size, done=before + self._buffer.done)
        if now != self._last_progress:
            self._last_progress = now
            call_user(self._progress, now)
