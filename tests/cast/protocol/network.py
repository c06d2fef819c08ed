"""Seeded network for the state machines of `mcast.cast.protocol`, with real bytes, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from itertools import count, pairwise, takewhile
from math import inf
from random import Random
from typing import NamedTuple

from typing_extensions import Buffer

from mcast.cast.protocol.auth import Authenticator, authenticator_for
from mcast.cast.protocol.blocks import BlockBuffer, Digest, SourceBlock
from mcast.cast.protocol.incoming import ReadyBlock
from mcast.cast.protocol.packets import (
    MAGIC,
    Admit,
    BlockInfo,
    Data,
    Describe,
    Offer,
    Rejected,
    encode,
    number_at,
)
from mcast.cast.protocol.receiver import ObjectReceiver, ReceiverConfig
from mcast.cast.protocol.repairs import SegmentRange
from mcast.cast.protocol.sender import ObjectInfo, ObjectSender, Timers
from mcast.cast.protocol.strategy import Strategy, all_receivers

MESSAGE_SIZE = 1024
MAX_LOSS_BURST = 0.03
"""Maximum duration of a burst of losses, in seconds."""
MAX_SECONDS = 2000.0
"""Timeout of a run, in virtual seconds."""

Lie = Callable[[Random, bytes], list[bytes]]
"""Attacker: returns the messages that it sends after it has received one."""


def address(end: int) -> str:
    """Return the address of an end (0: the sender, n: receiver n)."""
    return f"10.0.{end // 250}.{end % 250 + 1}"


def number(end: int, run: int = 0) -> int:
    """Return the number of an end."""
    return number_at(address(end), end + 1 + 100 * run)


class Conditions(NamedTuple):
    """Faults: of messages, each with a probability; of receivers, by number, at a time in seconds."""

    loss: float = 0.0
    doubles: float = 0.0
    disorder: float = 0.0
    garbled: float = 0.0
    deaths: dict[int, float] = {}  # noqa: RUF012  (never changed)
    late: dict[int, float] = {}  # noqa: RUF012
    kills: dict[int, tuple[float, float]] = {}  # noqa: RUF012
    """Receiver -> time of its kill, and seconds until it is restarted with what it has stored."""
    bursts: float = 0.0
    """Probability that a message is the first of a burst, in which its target loses all for a while."""
    partitions: dict[int, tuple[float, float]] = {}  # noqa: RUF012
    """Receiver -> beginning and end of a time in which all messages from and to it are lost."""
    mute: tuple[int, ...] = ()
    """Receivers all of whose messages are lost."""
    naps: dict[int, tuple[int, float]] = {}  # noqa: RUF012
    """Receiver -> length of its queue in messages, and seconds between two times at which it empties it."""
    decay: bool = False
    """True if a killed receiver may lose or change stored bytes."""


CALM = Conditions()


class Case(NamedTuple):
    """Objects, their partition and strategy, and properties of the receivers."""

    objects: tuple[bytes, ...]
    receivers: int = 3
    k: int = 4
    max_parity: int = 4
    window: int = 8
    strategy: Strategy = all_receivers()
    stream: bool = False
    use_parity: bool = True
    key: bytes | None = None
    disks: dict[int, bytes] = {}  # noqa: RUF012
    """Receiver -> bytes that an earlier run has stored."""
    pace: float = inf
    """Maximum messages a second."""
    in_order: tuple[int, ...] = ()
    """Receivers that write blocks in order alone, as into a pipe."""
    stall: float = 20.0
    """Maximum seconds without progress of a receiver."""
    partial_objects: int = 0
    """Maximum incomplete objects of a receiver in a carousel of all objects; 0: one object at a time."""
    queue: int = 0
    """Length of their queue in messages that receivers announce."""


class SimulatedReceiver:
    """A receiver with its bytes; objects that it takes for complete are in `got`, by number."""

    def __init__(
        self, core: ObjectReceiver, authenticator: Authenticator, disk: bytes = b"", in_order: bool = False
    ) -> None:
        self.core, self.authenticator, self.disk = core, authenticator, disk
        self.compared = 0
        """Number of stored blocks that were verified."""
        self.sent: list[bytes] = []
        self._in_order = in_order
        self._described = dict[int, ObjectReceiver]()
        authenticator.begin(core.session, NONCE)
        self.got: dict[int, bytes] = {}
        self.wrong: list[str] = []
        self._segments: dict[tuple[int, int], dict[int, bytes]] = {}
        self._blocks: dict[int, dict[int, bytes]] = {}

    def on_packet(self, message: bytes, source: str, now: float) -> None:
        try:
            packet = self.authenticator.decode(message, source)
        except Rejected:
            return
        core = self.core
        if isinstance(packet, Data):
            if packet.session == core.session and core.on_data(
                packet.object, packet.block, 1 << packet.esi, 1, now
            ):
                segments = self._segments.setdefault((packet.object, packet.block), {})
                segments[packet.esi] = bytes(packet.payload)
        else:
            core.on_packet(packet, now)
        for one in [*core.object_receivers()]:
            self._drive(one, now)

    def _drive(self, core: ObjectReceiver, now: float) -> None:
        about = core.about
        if about is not None and self._described.get(about.object) is not core:
            self._described[about.object] = core
            self._blocks.pop(about.object, None)
            core.resume(len(self.disk) // (about.segment * about.k), now)
            if not self._in_order:
                core.allow_any_order()
        while found := core.take_ready():
            for ready in found:
                self._check(core, ready, now)
        if core.ready_to_store and about is not None:
            if bytes(Digest(self._joined(about.object))) == core.digest:
                core.stored(now)
            else:
                core.fail("the object differs from its digest", now)
        for ended in core.ended:
            if ended.complete:
                assert ended.about.object not in self.got
                self.got[ended.about.object] = self._joined(ended.about.object)
            else:
                self.wrong.append(ended.reason)
        core.ended.clear()

    def _check(self, core: ObjectReceiver, ready: ReadyBlock, now: float) -> None:
        about = core.about
        assert about is not None
        blocks = self._blocks.setdefault(ready.object, {})
        whole: bytes | None
        if not ready.segments:
            at = len(self._joined(ready.object))
            whole = self.disk[at : at + ready.info.size]
            if bytes(Digest(whole)) != ready.info.digest:
                whole = None
            if whole is None and not about.carousel:
                for later in [block for block in blocks if block >= ready.block]:
                    del blocks[later]
                for block in [block for number, block in self._segments if number == ready.object]:
                    del self._segments[ready.object, block]
            self.compared += whole is not None
        else:
            segments = self._segments.pop((ready.object, ready.block), {})
            assert sum(1 << esi for esi in segments) & ready.segments == ready.segments
            whole = joined(ready.info, segments, about.segment, about.k)
        if whole is not None:
            blocks[ready.block] = whole
        core.checked(ready.block, whole is not None, now)

    @property
    def due(self) -> float:
        return min(core.due for core in self.core.object_receivers())

    @property
    def left(self) -> bytes:
        """Bytes that are stored after a kill."""
        about = self.core.about
        return b"" if about is None else self._joined(about.object)

    def _joined(self, number: int) -> bytes:
        blocks = self._blocks.get(number, {})
        return b"".join(blocks[at] for at in takewhile(blocks.__contains__, count()))


def joined(info: BlockInfo, segments: Mapping[int, Buffer], segment: int, k: int) -> bytes | None:
    """Return the bytes of a block from these segments; None if they do not have its digest."""
    block = BlockBuffer(memoryview(bytearray(segment * k)), segment, k)
    for esi, one in segments.items():
        block.put(esi, one)
    whole = block.assemble_verified(info, sum(1 << esi for esi in segments))
    return None if whole is None else bytes(whole)


class Network:
    """One sender, receivers and attackers; `run` transfers all objects."""

    def __init__(
        self, case: Case, conditions: Conditions = CALM, seed: int = 0, lie: Lie | None = None
    ) -> None:
        self.case, self.conditions = case, conditions
        self.random = Random(seed)
        timers = Timers(peer_timeout=5.0, stall=case.stall)
        self._authenticator = authenticator_for(case.key)
        self._authenticator.begin(number(0), NONCE)
        max_message = MESSAGE_SIZE - self._authenticator.overhead
        self.sender = ObjectSender(number(0), "sender", max_message, 0.0, timers, case.pace, NONCE)
        self.receivers: dict[int, SimulatedReceiver] = {}
        self.joined_in: dict[int, int] = {}
        self.completed_in: dict[int, int] = {}
        """Receiver -> cycles of a carousel before it joined, and before it had the first object."""
        self.lie = lie
        self.now = 0.0
        self._events: list[tuple[float, int, int, int, bytes]] = []
        self._order = 0
        self._queues: dict[int, list[tuple[int, bytes]]] = {end: [] for end in conditions.naps}
        self._wakes = dict.fromkeys(conditions.naps, 0.0)
        self._burst_ends: dict[int, float] = {}
        self._blocks: list[list[SourceBlock]] = []
        self._digests: list[bytes] = []
        self._abouts: list[Describe] = []
        for end in range(1, case.receivers + 1):
            if end not in conditions.late:
                self._join(end, case.disks.get(end, b""))

    def _join(self, end: int, disk: bytes = b"", run: int = 0) -> None:
        authenticator = authenticator_for(self.case.key)
        config = ReceiverConfig(
            number(end, run),
            f"r{end}",
            self.case.window,
            MESSAGE_SIZE - authenticator.overhead,
            self.case.use_parity,
            peer_timeout=30.0,
            stall=100.0,
            stores=True,
            partial_objects=self.case.partial_objects or 1,
            queue=self.case.queue,
        )
        core = ObjectReceiver(number(0), config, Random(self.random.random()), self.now)
        self.receivers[end] = SimulatedReceiver(core, authenticator, disk, end in self.case.in_order)
        self.joined_in[end] = self._cycles

    @property
    def _cycles(self) -> int:
        return self.sender.outgoing.cycles if self.sender.outgoing else 0

    # --- the run ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Simulate until all live ends have finished. Fails if one of them hangs."""
        left = list(self.case.objects)
        late, deaths, kills = (
            dict(self.conditions.late),
            dict(self.conditions.deaths),
            dict(self.conditions.kills),
        )
        back: dict[int, tuple[float, bytes]] = {}
        sender = self.sender
        present = self.case.receivers - len(late)
        while not (sender.finished and all(receiver.core.finished for receiver in self.receivers.values())):
            for end, at in [*late.items()]:
                if self.now >= at:
                    del late[end]
                    self._join(end)
            for end, at in [*deaths.items()]:
                if self.now >= at:
                    self.receivers.pop(end, None)
                    del deaths[end]
            for end, (at, pause) in [*kills.items()]:
                if self.now >= at:
                    del kills[end]
                    if end in self.receivers:
                        back[end] = at + pause, self._damaged(self.receivers.pop(end).left)
            for end, (at, disk) in [*back.items()]:
                if self.now >= at:
                    del back[end]
                    self._join(end, disk, run=1)
            joined_now = sum(receiver.core.index is not None for receiver in self.receivers.values())
            ready = (joined_now and len(sender.members) >= present) or self.now > 1.0  # one may have died
            if ready and sender.outgoing is None and not sender._queue.closed:
                if left:
                    count = len(left) if self.case.partial_objects else 1
                    self._begin(*left[:count])
                    del left[:count]
                else:
                    sender.close(self.now)
            also = [at for at, _ in (*kills.values(), *back.values())]
            self._step(min([*late.values(), *deaths.values(), *also, inf]))
            assert self.now < MAX_SECONDS, self._hang()

    def _damaged(self, disk: bytes) -> bytes:
        """Return the stored bytes after a kill: sometimes with another byte, fewer, or more."""
        random = self.random
        kind = random.choice(("", "", "byte", "less", "more")) if self.conditions.decay else ""
        if kind == "byte" and disk:
            at = random.randrange(len(disk))
            return disk[:at] + bytes((disk[at] ^ 1,)) + disk[at + 1 :]
        return (
            disk[: random.randint(0, len(disk))] if kind == "less" else disk + bytes(3000 * (kind == "more"))
        )

    def _hang(self) -> str:
        ends = {end: receiver.core.finished for end, receiver in self.receivers.items()}
        return f"hangs: sender over {self.sender.finished}, receivers over {ends}"

    def _begin(self, *objects: bytes) -> None:
        case = self.case
        infos = [ObjectInfo(None if case.stream else len(data), "thing") for data in objects]
        parity = case.max_parity if case.use_parity else 0
        self._abouts = self.sender.begin_all(self.now, case.strategy, infos, case.k, parity)
        self._digests = [bytes(Digest(data)) for data in objects]
        self._blocks = [self._cut(data) for data in objects]

    def _cut(self, data: bytes) -> list[SourceBlock]:
        about = self._abouts[0]
        whole = about.segment * about.k
        cuts = [0]
        while cuts[-1] < len(data):
            step = self.random.randint(1, whole) if self.case.stream else whole
            cuts.append(min(len(data), cuts[-1] + step))
        return [SourceBlock(data[a:b], about.segment, about.k) for a, b in pairwise(cuts)]

    def _step(self, also: float) -> None:
        """Run a step of each end, then the next event."""
        sender = self.sender
        outgoing = sender.outgoing
        step = 0
        if outgoing is not None:
            step = outgoing.about.position
            blocks = self._blocks[step]
            while sender.blocks_wanted and outgoing.offered < len(blocks):
                sender.offer(blocks[outgoing.offered].info)
            if outgoing.offered == len(blocks):
                sender.end(self._digests[step])
        for one in sender.messages(self.now):
            if isinstance(one, SegmentRange):
                for esi in range(one.first, one.first + one.segments):
                    segment = self._blocks[step][one.block].segment(esi)
                    session, number_ = self._abouts[step].session, self._abouts[step].object
                    self._send(0, encode(Data(session, number_, one.block, esi, segment)))
            else:
                self._send(0, one)
        for end, receiver in self.receivers.items():
            if self._wakes.get(end, self.now) <= self.now:
                self._empty_queue(end)
                for core in [*receiver.core.object_receivers()]:
                    for message in core.messages(self.now):
                        self._send(end, message)
        dues = [self._wakes.get(end, receiver.due) for end, receiver in self.receivers.items()]
        dues += self.sender.due, also
        due = max(min(dues), self.now + 1e-5)
        if self._events and self._events[0][0] <= due:
            while self._events and self._events[0][0] <= max(due, self._events[0][0]):
                self._arrive()
                if not self._events or self._events[0][0] > self.now + 1e-5:
                    break
        elif due < inf:
            self.now = due
        else:
            self.now += 1.0

    def _empty_queue(self, end: int) -> None:
        """Let a napping receiver empty its queue."""
        if end in self._queues:
            heard, self._queues[end] = self._queues[end], []
            self._wakes[end] = self.now + self.conditions.naps[end][1]
            for source, message in heard:
                self._deliver(end, source, message)

    def _send(self, source: int, message: bytes) -> None:
        conditions, random = self.conditions, self.random
        if source > 0:
            self.receivers[source].sent.append(message)
        if source in conditions.mute:
            return
        if source >= 0:
            authenticator = self._authenticator if source == 0 else self.receivers[source].authenticator
            (message,) = map(bytes, authenticator.sign([message]))
        for target in [0, *self.receivers, *([-1] if self.lie and source >= 0 else [])]:
            if target == source or (target >= 0 and self._is_lost(source, target)):
                continue
            for _ in range(2 if random.random() < conditions.doubles else 1):
                late = random.random() * 0.01 if random.random() < conditions.disorder else 0.0
                heard = message
                segment = heard[len(MAGIC)] == KIND_OF_DATA
                if source == 0 and random.random() < conditions.garbled and segment:
                    at = len(heard) - 1 - random.randrange(4)
                    heard = heard[:at] + bytes((heard[at] ^ 0x55,)) + heard[at + 1 :]
                self._order += 1
                heappush(self._events, (self.now + 0.0002 + late, self._order, source, target, heard))

    def _is_lost(self, source: int, target: int) -> bool:
        """Return True if this message is lost to its target, and perhaps the following ones."""
        conditions, random = self.conditions, self.random
        for end in (source, target):
            begin, until = conditions.partitions.get(end, (inf, inf))
            if begin <= self.now < until:
                return True
        if conditions.bursts and random.random() < conditions.bursts:
            self._burst_ends[target] = self.now + random.random() * MAX_LOSS_BURST
        return self.now < self._burst_ends.get(target, 0.0) or random.random() < conditions.loss

    def _arrive(self) -> None:
        at, _, source, target, message = heappop(self._events)
        self.now = max(self.now, at)
        if target == -1:
            assert self.lie is not None
            for lie in self.lie(self.random, message):
                self._send(-1, lie)
        elif target == 0:
            try:
                packet = self._authenticator.decode(message, self._from(source))
            except Rejected:
                return
            self.sender.on_packet(packet, self._from(source), self.now)
        elif target in self.receivers and (queue := self._queues.get(target)) is not None:
            if len(queue) < self.conditions.naps[target][0]:
                queue.append((source, message))
        elif target in self.receivers:
            self._deliver(target, source, message)

    def _deliver(self, end: int, source: int, message: bytes) -> None:
        self.receivers[end].on_packet(message, self._from(source), self.now)
        if self.receivers[end].got:
            self.completed_in.setdefault(end, self._cycles)

    def _from(self, source: int) -> str:
        """Return the source address of a message; in a closed group the attacker uses any address."""
        if source >= 0:
            return address(source)
        return LIAR if self.case.key is None else address(self.random.randint(0, self.case.receivers))


def described(size: int, stores: bool = False) -> ObjectReceiver:
    """Return a receiver with an object that is described: segments and blocks of one byte."""
    session, me = number(0), number(1)
    made = ObjectReceiver(
        session, ReceiverConfig(me, "r1", 8, MESSAGE_SIZE, True, stores=stores), Random(1), 0.0
    )
    made.on_packet(Offer(session, 0, 0, 1, 1000, NONCE, "sender"), 0.0)
    made.on_packet(Admit(session, {me: (0, 0)}), 0.0)
    made.on_packet(Describe(session, 0, size, 1, 1, 0, 0, 0, "", b""), 0.0)
    return made


NONCE = 7
KIND_OF_DATA = encode(Data(1, 0, 0, 0, b"x"))[len(MAGIC)]
LIAR = "10.0.0.99"
LIARS_NUMBER = number_at(LIAR, 99)
