"""Simulated transfer from one sender to many receivers in virtual time, and its costs.

Sender and receivers are the state machines of `mcast.cast.protocol`, driven by one heap of events: a step of
the sender, the arrival of a burst at all receivers, a timer of a receiver, and the arrival of a packet at the
sender. NACKs reach the other receivers, too. Each receiver loses packets independently. Slow receivers take
some messages a second from a queue, and lose those that arrive while it is full.

No bytes are copied to receivers: they note segments by number. To verify a block, the segments that a
receiver has are taken from the sender's block, decoded, and compared with the digest, once for each pattern
of losses.
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
    MAX_K,
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
"""Maximum bytes of a message."""

_LATENCY = 10e-6
"""Seconds from one end to another, in addition to the time on the sender's link."""

_MAX_SECONDS = 3600.0
"""Timeout of a transfer, in virtual seconds."""


class TransferSetup(NamedTuple):
    """Parameters of a simulated transfer.

    receivers  number of receivers
    loss       fraction of the messages that each end loses, independently
    size       of the object, in bytes
    strategy   of the sender
    seed       of all random numbers
    gbit       rate of the sender's link, in Gbit/s
    window     maximum blocks that a receiver buffers
    parity     True if parity may be used
    k          maximum source segments of a block
    slow       number of slow receivers, which are the first ones
    slow_rate  messages that a slow receiver takes in a second
    queue      length of a slow receiver's queue, in messages
    """

    receivers: int
    loss: float = 0.0
    size: int = 1 << 20
    strategy: Strategy = all_receivers()
    seed: int = 0
    gbit: float = 10.0
    window: int = 256
    parity: bool = True
    k: int = MAX_K
    slow: int = 0
    slow_rate: float = 400.0
    queue: int = 64


class TransferCosts(NamedTuple):
    """Costs of a simulated transfer, from the beginning of the object to its end.

    receivers                  number of receivers
    verified                   number of receivers that have the object, each block compared with its digest
    left_behind                number of receivers without the object in the sender's report
    segments                   source segments of the object
    transmissions_per_segment  messages of the sender, of any kind
    feedback_per_segment       messages of all receivers
    nacks                      number of requests for repairs
    acks                       number of acknowledgements
    joins                      messages of receivers before the object
    strategy_met               True if the strategy's promise was kept
    seconds                    virtual time
    sender_cpu_us_per_segment  processor time of the sender in microseconds, with digests, parity and a copy
                               of each segment
    parity                     True if losses were repaired by parity; else by source segments again
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


_Burst = list[tuple[int, SegmentRange | Packet]]
"""Output of a step of the sender, each item with its number of messages."""


class _Losses:
    """Random losses at one end: each message is lost with the same probability."""

    __slots__ = ("_log", "_next", "_random")

    def __init__(self, random: Random, loss: float) -> None:
        self._random = random
        self._log = log1p(-loss) if loss < 1 else -inf
        self._next = self._gap()

    def _gap(self) -> int:
        """Draw the number of messages that arrive before the next loss."""
        gap = log1p(-self._random.random()) / self._log if self._log else inf
        return int(min(gap, _NEVER))  # a loss near 0 gives an infinite gap, which int() refuses

    def of(self, count: int) -> list[int]:
        """Return the indexes of the lost messages among the next `count`."""
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
    """Number of messages by kind."""

    def __init__(self) -> None:
        self.messages = self.nacks = self.acks = self.joins = 0


class SourceObject:
    """Object of the sender; its blocks are made when the sender wants them."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.data: memoryview = memoryview(data)
        self._digest = bytes(Digest(data))
        self.blocks: list[SourceBlock] = []
        self._frames = Framer(MESSAGE_SIZE)
        self._sent = bytearray(MAX_BURST * MESSAGE_SIZE)
        """Stands for the send buffers of a provider, into which it copies messages."""

    def step(self, sender: ObjectSender, now: float) -> tuple[list[bytes | SegmentRange], float]:
        """Offer blocks, and make the sender's messages. Return its output, and when it is due next."""
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
    """Fabric, sender and receivers. `progress` is called with the number of bytes that were sent."""

    def __init__(self, setup: TransferSetup, progress: Callable[[int], object] = lambda _: None) -> None:
        self.setup = setup
        self._progress = progress
        random = Random(setup.seed)
        self.work: _Counts = _Counts()
        self._events: list[tuple[float, int, int, object]] = []
        self._order = 0
        self._source = SourceObject(random.randbytes(setup.size))
        self._verified: dict[tuple[int, int], bool] = {}
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
        self._emptied_at = [0.0] * setup.slow
        """When the queue of each slow receiver will be empty."""
        self._tape: list[tuple[float, tuple[bytes, str] | None]] = []
        self._free = self._sends_at = 0.0
        self._about: Describe
        self._begins = 0

    # --- the run ---------------------------------------------------------------------------------

    def run(self) -> TransferCosts:
        """Simulate until the object ends at the sender. Raises RuntimeError after _MAX_SECONDS."""
        setup, sender = self.setup, self.sender
        begun = self._gather()
        before = self.work
        self.work = _Counts()
        self.work.joins = before.nacks + before.acks + before.joins
        self._begins = len(self._tape)
        self._about = self._begin(sender, begun)
        for now in self._turns(begun):  # noqa: B007  (the last value is used below)
            if sender.results:
                break
        else:
            raise RuntimeError(f"the transfer has not ended in {_MAX_SECONDS:g} s of virtual time")
        result = sender.results[0]
        verified = sum(any(one.complete for one in end.ended) for end in self._ends)
        segments = max(1, result.segments)
        work = self.work
        return TransferCosts(
            setup.receivers,
            verified,
            sum(not report.complete for report in result.receivers),
            result.segments,
            round(work.messages / segments, 5),
            round((work.nacks + work.acks) / segments, 5),
            work.nacks,
            work.acks,
            work.joins,
            result.strategy_met,
            round(now - begun, 6),
            round(self._sender_cpu_seconds(begun) * 1e6 / segments, 3),
            result.parity,
        )

    def reasons(self) -> list[str]:
        """Simulate on, after `run`, until each receiver knows its outcome. Raises RuntimeError otherwise.

        Returns for each receiver its reason for not having the object; empty if it has.
        """
        for _ in self._turns(self._free):
            if all(end.ended for end in self._ends):
                return [end.ended[0].reason for end in self._ends]
        raise RuntimeError(f"not all receivers know their outcome after {_MAX_SECONDS:g} s of virtual time")

    def _begin(self, sender: ObjectSender, now: float) -> Describe:
        parity = MAX_PARITY if self._coding else 0
        return sender.begin(
            now, self.setup.strategy, self.setup.size, "simulated", k=self.setup.k, parity=parity
        )

    def _sender_cpu_seconds(self, begun: float) -> float:
        """Repeat the sender's recorded steps alone, and return its processor time for the object.

        Reading the clock at each step of the simulation would cost more than the step.
        """
        sender, source = (
            ObjectSender(self.sender.session, "sender", MESSAGE_SIZE, 0.0),
            SourceObject(self._source.data),
        )
        start = 0.0
        keep_freed_memory()
        for number, (now, heard) in enumerate(self._tape):
            if number == self._begins:
                self._begin(sender, begun)
                start = thread_time()
            if heard is None:
                source.step(sender, now)
            else:
                sender.on_packet(decode_from(*heard), heard[1], now)
        return thread_time() - start

    def _gather(self) -> float:
        """Simulate until all receivers are in, and return the time. Raises RuntimeError otherwise."""
        for now in self._turns(0.0):
            if all(end.index is not None for end in self._ends):
                return now
        raise RuntimeError("not all receivers could join")

    def _turns(self, now: float) -> Iterator[float]:
        """Process one event after another, and yield the time of each."""
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
                self._deliver_to_sender(number, message, now)
            elif kind == 4:
                assert isinstance(what, tuple)
                number, burst, lost = what
                self._deliver(number, burst, lost, now)
            else:
                assert isinstance(what, int)
                self._step_receiver(what, now)
            yield now

    def _push(self, at: float, kind: int, what: object) -> None:
        self._order += 1
        heappush(self._events, (at, self._order, kind, what))

    # --- the sender ------------------------------------------------------------------------------

    def _send(self, now: float) -> None:
        if now != self._sends_at:
            return  # this step was scheduled before another one replaced it
        sender = self.sender
        self._tape.append((now, None))
        out, due = self._source.step(sender, now)
        if (outgoing := sender.outgoing) is not None:
            self._progress(min(outgoing.segments * outgoing.about.segment, self.setup.size))
        size = 0
        burst: _Burst = []
        for one in out:
            if isinstance(one, SegmentRange):
                burst.append((one.segments, one))
                size += one.segments * MESSAGE_SIZE
            else:
                burst.append((1, decode_from(one, "sender")))
                size += len(one)
        self.work.messages += sum(count for count, _ in burst)
        sent_at = now + size * 8 / (self.setup.gbit * 1e9)
        if burst:
            self._push(sent_at + _LATENCY, 1, burst)
        self._sender_at(max(sent_at, due))
        self._free = sent_at

    def _sender_at(self, at: float) -> None:
        self._sends_at = at
        if at < inf:
            self._push(at, 0, None)

    # --- the receivers ---------------------------------------------------------------------------

    def _arrive(self, burst: _Burst, now: float) -> None:
        total = sum(count for count, _ in burst)
        for number in range(self.setup.receivers):
            lost = self._losses[number].of(total)
            (self._enqueue if number < self.setup.slow else self._deliver)(number, burst, lost, now)

    def _enqueue(self, number: int, burst: _Burst, lost: list[int], now: float) -> None:
        """Deliver a burst when a slow receiver has taken it, without what its queue has no room for."""
        rate, emptied_at = self.setup.slow_rate, max(now, self._emptied_at[number])
        arrived = sorted({*range(sum(count for count, _ in burst))}.difference(lost))
        room = max(0, int(self.setup.queue - (emptied_at - now) * rate))
        if taken := len(arrived[:room]):
            self._emptied_at[number] = emptied_at = emptied_at + taken / rate
            self._push(emptied_at, 4, (number, burst, sorted({*lost, *arrived[room:]})))

    def _deliver(self, number: int, burst: _Burst, lost: list[int], now: float) -> None:
        end, at = self._ends[number], 0
        for count, one in burst:
            lost_here = [index - at for index in lost if at <= index < at + count] if lost else _NONE
            at += count
            if isinstance(one, SegmentRange):
                self._receive(end, one, lost_here, now)
            elif not lost_here:
                end.on_packet(one, now)
        for ready in end.take_ready():
            end.checked(ready.block, self._is_valid(ready), now)
        self._wake(number, end, now)

    def _receive(self, end: ObjectReceiver, run: SegmentRange, lost: list[int], now: float) -> None:
        arrived = (1 << run.segments) - 1 & ~sum(1 << index for index in lost)
        if arrived:
            end.on_data(0, run.block, arrived << run.first, run.segments - len(lost), now)

    def _is_valid(self, ready: ReadyBlock) -> bool:
        """Return True if the segments decode to the block; the result is cached for each set of segments."""
        key = (ready.block, ready.segments)
        if key not in self._verified:
            block, layout = self._source.blocks[ready.block], self._about
            buffer = BlockBuffer(memoryview(bytearray(ready.info.size)), layout.segment, layout.k)
            for esi in range(ready.segments.bit_length()):
                if ready.segments >> esi & 1:
                    buffer.put(esi, block.segment(esi))
            self._verified[key] = buffer.assemble_verified(ready.info, ready.segments) is not None
        return self._verified[key]

    def _wake(self, number: int, end: ObjectReceiver, now: float) -> None:
        due = max(end.due, now)
        if due < self._due[number]:
            self._due[number] = due
            self._push(due, 3, number)

    def _step_receiver(self, number: int, now: float) -> None:
        if now != self._due[number]:
            return  # an earlier step replaced this one; two for one timer would each schedule the next ones
        end = self._ends[number]
        self._due[number] = inf
        for message in end.messages(now):
            self._push(now + _LATENCY, 2, (number, message))
        self._wake(number, end, now)

    def _deliver_to_sender(self, number: int, message: bytes, now: float) -> None:
        packet = decode_from(message, f"receiver {number}")
        if isinstance(packet, Nack):
            self.work.nacks += 1
            for other, end in enumerate(self._ends):
                if other != number and not self._losses[other].of(1):
                    end.on_packet(packet, now)
        else:  # other receivers ignore these
            self.work.acks += 1
        if self._losses[-1].of(1):
            return
        self._tape.append((now, (message, f"receiver {number}")))
        self.sender.on_packet(packet, f"receiver {number}", now)
        at = max(self.sender.due, self._free, now)
        if at < self._sends_at:
            self._sender_at(at)
