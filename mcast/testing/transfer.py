"""One transfer from a sender to many receivers on a simulated fabric, in virtual time, and what it cost.

The ends are the protocol's own. The bytes of a piece are the sender's own, to which receivers refer; each
pattern of pieces that a receiver has of a block is decoded and compared with the block's digest once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from math import inf, log1p
from random import Random
from time import thread_time  # noqa: TID251  (measures itself; the protocol gets virtual time)
from typing import NamedTuple

from mcast.api import HeaderBodyBatch
from mcast.cast.protocol import fec
from mcast.cast.protocol.blocks import BlockBuffer, Digest, Framer, SourceBlock, keep_freed_memory
from mcast.cast.protocol.incoming import ReadyBlock
from mcast.cast.protocol.packets import (
    MAX_PARITY,
    MAX_WINDOW,
    Describe,
    Nack,
    Packet,
    decode_from,
    number_at,
)
from mcast.cast.protocol.rate import MAX_BURST
from mcast.cast.protocol.receiver import ObjectReceiver, ReceiverConfig
from mcast.cast.protocol.repairs import SegmentRange
from mcast.cast.protocol.sender import ObjectSender
from mcast.cast.protocol.strategy import Strategy, all_receivers

MESSAGE_SIZE = 4096
"""Bytes of a message."""

_LATENCY = 10e-6
"""Seconds from one end to another, besides the time that a message takes on the sender's link."""

_MAX_SECONDS = 3600.0
"""A transfer that takes longer, in virtual seconds, has failed."""


class TransferSetup(NamedTuple):
    """What is played.

    receivers  how many there are
    loss       the part of the messages that each end loses, independently
    size       of the object, in bytes
    strategy   what the sender does with slow receivers
    seed       of all that is random
    gbit       the rate of the sender's link, in Gbit/s
    room       how many blocks a receiver can hold
    parity     whether parity may be used
    """

    receivers: int
    loss: float = 0.0
    size: int = 1 << 20
    strategy: Strategy = all_receivers()
    seed: int = 0
    gbit: float = 10.0
    window: int = 256
    parity: bool = True


class TransferCosts(NamedTuple):
    """What a transfer cost.

    receivers, verified  how many there are, and how many have the object, each block compared with its digest
    left_behind    those that the sender does not reckon with any more
    pieces         of the object
    transmissions_per_segment  messages of the sender, of any kind, from the object's beginning to its end
    feedback_per_segment       messages of all receivers in that time
    requests, answers        of what kind these were: LACK and HAVE
    joins          messages of receivers before the object
    kept           whether the strategy's promise was kept
    seconds        of virtual time
    sender_cpu_us_per_segment  processor time of the sender: digests, parity, and a copy of each piece too
    parity         whether parity repaired losses; otherwise pieces were repeated
    """

    receivers: int
    verified: int
    left_behind: int
    segments: int
    transmissions_per_segment: float
    feedback_per_segment: float
    nacks: int
    acks: int
    joins: int
    strategy_met: bool
    seconds: float
    sender_cpu_us_per_segment: float
    parity: bool


class _Losses:
    """Which of the messages that come to one end are lost: each with the same probability."""

    __slots__ = ("_log", "_next", "_random")

    def __init__(self, random: Random, loss: float) -> None:
        self._random = random
        self._log = log1p(-loss) if loss < 1 else -inf
        self._next = self._gap()

    def _gap(self) -> int:
        """How many messages arrive before the next is lost."""
        gap = log1p(-self._random.random()) / self._log if self._log else inf
        return int(min(gap, _NEVER))  # a loss near 0 gives a gap that no integer is

    def of(self, count: int) -> list[int]:
        """Which of the next `count` messages are lost, by their place."""
        if self._next >= count:
            self._next -= count
            return _NONE
        found = []
        at = self._next
        while at < count:
            found.append(at)
            at += 1 + self._gap()
        self._next = at - count
        return found


_NEVER = float(1 << 62)
_NONE: list[int] = []


class _Counts:
    """Messages, by what they are."""

    def __init__(self) -> None:
        self.messages = self.nacks = self.acks = self.joins = 0


class SourceObject:
    """The object that is sent: its blocks are made when their turn comes."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.data: memoryview = memoryview(data)
        self._digest = bytes(Digest(data))
        self.blocks: list[SourceBlock] = []
        self._frames = Framer(MESSAGE_SIZE)
        self._sent = bytearray(MAX_BURST * MESSAGE_SIZE)
        """What a provider would copy the messages into."""

    def step(self, sender: ObjectSender, now: float) -> tuple[list[bytes | SegmentRange], float]:
        """A sender's turn: it offers blocks, and makes the messages. What it says, and when it has more."""
        outgoing = sender.outgoing
        if outgoing is not None:
            about = outgoing.about
            block_size = about.segment * about.k
            while sender.blocks_wanted and (at := len(self.blocks) * block_size) < len(self.data):
                self.blocks.append(SourceBlock(self.data[at : at + block_size], about.segment, about.k))
                sender.offer(self.blocks[-1].info)
            if len(self.blocks) * block_size >= len(self.data):
                sender.end(self._digest)
        out = sender.messages(now)
        for one in out:
            if isinstance(one, SegmentRange) and outgoing is not None:
                for batch in self._frames.packets(outgoing.about, [(self.blocks[one.block], one)]):
                    if isinstance(batch, HeaderBodyBatch):
                        batch.into(self._sent)
        return out, sender.due


class SimulatedTransfer:
    """The fabric and all ends. `progress` is called with how many bytes of the object were sent."""

    def __init__(self, setup: TransferSetup, progress: Callable[[int], object] = lambda _: None) -> None:
        self.setup = setup
        self._progress = progress
        random = Random(setup.seed)
        self.work: _Counts = _Counts()
        self._events: list[tuple[float, int, int, object]] = []
        self._order = 0
        self._load = SourceObject(random.randbytes(setup.size))
        self._right: dict[tuple[int, int], bool] = {}
        self._coding = setup.parity and fec.available()
        self.sender: ObjectSender = ObjectSender(number_at("sender", 1), "sender", MESSAGE_SIZE, 0.0)
        self._ends: list[ObjectReceiver] = []
        self._losses = [_Losses(random, setup.loss) for _ in range(setup.receivers + 1)]
        for number in range(setup.receivers):
            address = f"receiver {number}"
            window = min(setup.window, MAX_WINDOW)
            config = ReceiverConfig(number_at(address, 1), address, window, MESSAGE_SIZE, self._coding)
            self._ends.append(ObjectReceiver(self.sender.session, config, Random(random.random()), 0.0))
        self._due = [inf] * setup.receivers
        self._tape: list[tuple[float, tuple[bytes, str] | None]] = []
        self._free = self._sends_at = 0.0
        self._about: Describe
        self._begins = 0

    # --- the run ---------------------------------------------------------------------------------

    def run(self) -> TransferCosts:
        """Play it until the sender is done with the object. Raises RuntimeError if that takes an hour."""
        setup, sender = self.setup, self.sender
        begun = self._gather()
        before = self.work
        self.work = _Counts()
        self.work.joins = before.nacks + before.acks + before.joins
        self._begins = len(self._tape)
        self._about = self._begin(sender, begun)
        for now in self._turns(begun):  # noqa: B007  (the last one is asked for)
            if sender.results:
                break
        else:
            raise RuntimeError(f"the transfer has not ended in {_MAX_SECONDS:g} s of virtual time")
        settled = sender.results[0]
        verified = sum(any(one.complete for one in end.ended) for end in self._ends)
        segments = max(1, settled.segments)
        work = self.work
        return TransferCosts(
            setup.receivers,
            verified,
            sum(not report.complete for report in settled.receivers),
            settled.segments,
            round(work.messages / segments, 5),
            round((work.nacks + work.acks) / segments, 5),
            work.nacks,
            work.acks,
            work.joins,
            settled.strategy_met,
            round(now - begun, 6),
            round(self._again(begun) * 1e6 / segments, 3),
            settled.parity,
        )

    def _begin(self, sender: ObjectSender, now: float) -> Describe:
        parity = MAX_PARITY if self._coding else 0
        return sender.begin(now, self.setup.strategy, self.setup.size, "simulated", parity=parity)

    def _again(self, begun: float) -> float:
        """The processor time of the sender for its object: its part is played again, alone, from the tape.

        To look at the clock at each turn would cost more than the turn.
        """
        sender, load = (
            ObjectSender(self.sender.session, "sender", MESSAGE_SIZE, 0.0),
            SourceObject(self._load.data),
        )
        start = 0.0
        keep_freed_memory()
        for number, (now, heard) in enumerate(self._tape):
            if number == self._begins:
                self._begin(sender, begun)
                start = thread_time()
            if heard is None:
                load.step(sender, now)
            else:
                sender.on_packet(decode_from(*heard), heard[1], now)
        return thread_time() - start

    def _gather(self) -> float:
        """All receivers take part."""
        for now in self._turns(0.0):
            if all(end.index is not None for end in self._ends):
                return now
        raise RuntimeError("not all receivers could join")

    def _turns(self, now: float) -> Iterator[float]:
        """What happens, one event after another: the time of each."""
        self._sends_at = now
        self._push(now, 0, None)
        while self._events:
            now, _, kind, what = heappop(self._events)
            if now > _MAX_SECONDS:
                return
            if kind == 0:
                self._send(now)
            elif kind == 1:
                assert isinstance(what, list)
                self._arrive(what, now)
            elif kind == 2:
                assert isinstance(what, tuple)
                number, message = what
                self._said(number, message, now)
            else:
                assert isinstance(what, int)
                self._speaks(what, now)
            yield now

    def _push(self, at: float, kind: int, what: object) -> None:
        self._order += 1
        heappush(self._events, (at, self._order, kind, what))

    # --- the sender ------------------------------------------------------------------------------

    def _send(self, now: float) -> None:
        if now != self._sends_at:
            return  # another turn was put before this one
        sender = self.sender
        self._tape.append((now, None))
        out, due = self._load.step(sender, now)
        if (outgoing := sender.outgoing) is not None:
            self._progress(min(outgoing.segments * outgoing.about.segment, self.setup.size))
        size = 0
        burst: list[tuple[int, SegmentRange | Packet]] = []
        for one in out:
            if isinstance(one, SegmentRange):
                burst.append((one.segments, one))
                size += one.segments * MESSAGE_SIZE
            else:
                burst.append((1, decode_from(one, "sender")))
                size += len(one)
        self.work.messages += sum(count for count, _ in burst)
        gone = now + size * 8 / (self.setup.gbit * 1e9)
        if burst:
            self._push(gone + _LATENCY, 1, burst)
        self._sender_at(max(gone, due))
        self._free = gone

    def _sender_at(self, at: float) -> None:
        self._sends_at = at
        if at < inf:
            self._push(at, 0, None)

    # --- the receivers ---------------------------------------------------------------------------

    def _arrive(self, burst: list[tuple[int, SegmentRange | Packet]], now: float) -> None:
        total = sum(count for count, _ in burst)
        for number, end in enumerate(self._ends):
            lost = self._losses[number].of(total)
            at = 0
            for count, one in burst:
                gone = [place - at for place in lost if at <= place < at + count] if lost else _NONE
                at += count
                if isinstance(one, SegmentRange):
                    self._take(end, one, gone, now)
                elif not gone:
                    end.on_packet(one, now)
            for ready in end.take_ready():
                end.checked(ready.block, self._is_right(ready), now)
            self._wake(number, end, now)

    def _take(self, end: ObjectReceiver, run: SegmentRange, gone: list[int], now: float) -> None:
        start = 0
        for place in [*gone, run.segments]:
            if place > start:
                end.on_data(0, run.block, run.first + start, place - start, now)
            start = place + 1

    def _is_right(self, ready: ReadyBlock) -> bool:
        """Whether the pieces that are there give the block: decoded and compared once for each pattern."""
        about = (ready.block, ready.segments)
        if about not in self._right:
            block, layout = self._load.blocks[ready.block], self._about
            places = [place for place in range(ready.segments.bit_length()) if ready.segments >> place & 1]
            found = BlockBuffer(memoryview(bytearray(ready.info.size)), layout.segment, layout.k)
            for place in places:
                found.put(place, block.segment(place))
            self._right[about] = found.assemble_verified(ready.info, ready.segments) is not None
        return self._right[about]

    def _wake(self, number: int, end: ObjectReceiver, now: float) -> None:
        due = end.due
        if due < self._due[number]:
            self._due[number] = due
            self._push(max(due, now), 3, number)

    def _speaks(self, number: int, now: float) -> None:
        end = self._ends[number]
        self._due[number] = inf
        for message in end.messages(now):
            self._push(now + _LATENCY, 2, (number, message))
        self._wake(number, end, now)

    def _said(self, number: int, message: bytes, now: float) -> None:
        packet = decode_from(message, f"receiver {number}")
        if isinstance(packet, Nack):
            self.work.nacks += 1
            for other, end in enumerate(self._ends):
                if other != number and not self._losses[other].of(1):
                    end.on_packet(packet, now)
        else:  # which other receivers do not heed
            self.work.acks += 1
        if self._losses[-1].of(1):
            return
        self._tape.append((now, (message, f"receiver {number}")))
        self.sender.on_packet(packet, f"receiver {number}", now)
        at = max(self.sender.due, self._free, now)
        if at < self._sends_at:
            self._sender_at(at)
