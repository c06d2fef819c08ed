"""Carousels: receivers join at any time, lose segments, and send nothing."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import Random

import pytest

from mcast.cast.protocol.carousel import MAX_FRUITLESS_CYCLES, MAX_FRUITLESS_OFFERS, Carousel
from mcast.cast.protocol.incoming import IncomingObject
from mcast.cast.protocol.layout import ObjectLayout
from mcast.cast.protocol.outgoing import OutgoingObject, Terms
from mcast.cast.protocol.packets import (
    MAX_CAROUSEL,
    NO_DIGEST,
    UNKNOWN_SIZE,
    BlockInfo,
    Describe,
    Flush,
    Join,
    Offer,
    Rejected,
    Seal,
    decode,
    encode,
    segment_size,
)
from mcast.cast.protocol.receiver import ObjectReceiver, ReceiverConfig
from mcast.cast.protocol.sender import ObjectSender
from mcast.cast.protocol.strategy import Strategy, TransferState, all_receivers, carousel

from .network import CALM, MAX_SECONDS, MESSAGE_SIZE, Case, Conditions, Network, number
from .test_transfers import anything, earlier, recorded

DATA = Random(3).randbytes(200_000)
SEGMENT = segment_size(MESSAGE_SIZE)
BLOCK = 4 * SEGMENT
KEY = bytes(range(32))
PACE = 2000.0
"""Messages a second: a cycle of DATA takes some 0.15 s, as long as receivers need to find the session."""


def make_carousel(window: int, count: int = 1) -> Carousel:
    return Carousel(Describe(number(0), 0, 1, 976, 1, 0, count, 0, "", b""), window, 0.0)


def cycles_taken(network: Network) -> dict[int, int]:
    """Return the number of cycles that each receiver took for the object."""
    return {end: network.completed_in[end] - network.joined_in[end] for end in network.receivers}


def test_a_carousel_starts_at_the_limit() -> None:
    """Losses of an earlier object do not slow it down: no receiver would report their end."""
    sender = ObjectSender(number(0), "sender", MESSAGE_SIZE, 0.0, limit=5000.0)
    sender.rate.pace = 100.0
    sender.begin(0.0, all_receivers(), 1)
    assert sender.rate.pace == 100.0
    sender.abandon(0.0)
    sender.begin(0.0, carousel(), 1)
    assert sender.rate.pace == 5000.0


@pytest.mark.parametrize("parity", [True, False])
def test_mute_and_late_receivers_in_a_few_cycles(parity: bool) -> None:
    """All receivers complete, although they cannot send or join late."""
    case = Case((DATA,), 4, window=64, strategy=carousel(cycles=9), pace=PACE, use_parity=parity)
    for seed in range(4):
        network = Network(case, Conditions(loss=0.01, late={3: 1.05, 4: 1.2}, mute=(2, 4)), seed)
        network.run()
        assert [receiver.got for receiver in network.receivers.values()] == [{0: DATA}] * 4
        assert max(cycles_taken(network).values()) <= 5, cycles_taken(network)
        packets = [decode(message) for receiver in network.receivers.values() for message in receiver.sent]
        assert {type(one) for one in packets} <= {Join}, "no NACK and no ACK"
        (result,) = network.sender.results
        segments = -(-len(DATA) // SEGMENT)
        assert (result.strategy_met, result.cycles, result.segments, result.receivers) == (
            True,
            9,
            segments,
            (),
        )
        assert result.repairs >= 8 * segments


def test_a_late_receiver_completes_in_the_next_cycle() -> None:
    """Without losses it receives the rest in this cycle, and the beginning in the next one."""
    case = Case((DATA,), 2, window=64, strategy=carousel(cycles=4), pace=PACE)
    network = Network(case, Conditions(late={2: 0.2}))
    network.run()
    assert cycles_taken(network)[2] <= 2
    assert network.receivers[2].got == {0: DATA}


def test_incomplete_blocks_are_bounded() -> None:
    """A receiver has at most `window` of them."""
    layout = ObjectLayout(976 * 4 * 1000, 976, 4, 0)
    some = IncomingObject(0, layout, 3, False, make_carousel(3))
    some.allow_any_order()
    random = Random(1)
    dropped = []
    for step in range(2000):
        some.add_segments(random.randrange(1000), 1 << random.randrange(3), 1)
        dropped += some.dropped
        some.dropped = []
        assert len(some._open) <= 3, step
    assert dropped
    assert some.add_segments(1000, 1, 1) == 0, "the object has no such block"
    narrow = IncomingObject(0, layout, 3, False, make_carousel(3))
    assert [narrow.add_segments(block, 1, 1) for block in (0, 2, 3, 999)] == [1, 1, 0, 0], "in order"


def test_reach_is_less_for_small_blocks() -> None:
    """Else a liar's blocks would cost hundreds of MB: the state of each is stored until earlier ones end."""
    narrow, wide = (
        IncomingObject(0, ObjectLayout(1 << 40, 960, k, 0), 8, False, make_carousel(8)) for k in (1, 128)
    )
    for some in (narrow, wide):
        some.allow_any_order()
    assert wide.add_segments(1_000_000, 1, 1) == 1
    assert [narrow.add_segments(block, 1, 1) for block in (8000, 8192, 1_000_000)] == [1, 0, 0]


@pytest.mark.parametrize("in_order", [(), (1, 2)], ids=["any order", "in order"])
def test_little_memory_costs_cycles_alone(in_order: tuple[int, ...]) -> None:
    data = DATA[:60_000]
    case = Case(
        (data,), 2, window=4, strategy=carousel(cycles=60), pace=PACE, use_parity=False, in_order=in_order
    )
    network = Network(case, Conditions(loss=0.05, late={2: 1.03}))
    network.run()
    assert [receiver.got for receiver in network.receivers.values()] == [{0: data}] * 2


@pytest.mark.parametrize("pace", [1.0, 8.0, 29.0])
def test_offers_leave_room_for_segments(pace: float) -> None:
    """At the slowest pace, too, most messages are segments."""
    case = Case((DATA[:3000],), 1, strategy=carousel(cycles=2), pace=pace)
    network = Network(case, Conditions(late={1: 1.5}))
    network.run()
    assert network.receivers[1].got == {0: DATA[:3000]}
    assert [one.cycles for one in network.sender.results] == [2]


class EndLost(Network):
    """Network that loses the first FLUSH with the digest of the object, and the first SEAL."""

    lost: frozenset[type] = frozenset()

    def _send(self, source: int, message: bytes) -> None:
        packet = decode(message)
        last = isinstance(packet, Seal) or (isinstance(packet, Flush) and packet.digest != NO_DIGEST)
        if last and type(packet) not in self.lost:
            self.lost |= {type(packet)}
        else:
            super()._send(source, message)


def test_one_cycle_with_its_end_lost() -> None:
    """One cycle is enough although the last messages of the session are lost."""
    network = EndLost(Case((DATA[:2000],), 2, strategy=carousel(cycles=1), pace=PACE), CALM)
    network.run()
    assert network.lost == {Seal, Flush}
    assert [receiver.got for receiver in network.receivers.values()] == [{0: DATA[:2000]}] * 2


def test_blocks_after_a_wrong_prefix_stay_verified() -> None:
    """Blocks that arrived while a stored block turned out to be wrong are not received again."""
    some = IncomingObject(0, ObjectLayout(5, 1, 1, 0), 8, False, make_carousel(8))
    some.allow_any_order()
    some.resume(3)
    info = BlockInfo(1, 1, bytes(32))

    def deliver(block: int) -> None:
        assert some.add_segments(block, 1, 1) == 1
        some.add_infos(block, [info])
        some.accept(block)

    deliver(3)
    deliver(4)
    some.reject(0)
    assert some.base == 0
    assert some.add_segments(3, 1, 1) == 0
    for block in range(3):
        deliver(block)
    assert some.base == 5


OBJECTS = tuple(DATA[at * 1000 : at * 1000 + at * 700 % 5000] for at in range(20))
"""Objects of a few segments, some of them empty."""


@pytest.mark.parametrize("parity", [True, False])
def test_several_objects_for_mute_and_late_receivers(parity: bool) -> None:
    """Each object of a carousel completes once at each receiver."""
    for seed in range(2):
        strategy = carousel(cycles=9)
        case = Case(
            OBJECTS,
            4,
            window=64,
            strategy=strategy,
            pace=PACE,
            use_parity=parity,
            partial_objects=32,
            in_order=(2,),
        )
        network = Network(case, Conditions(loss=0.02, late={3: 1.05, 4: 1.1}, mute=(2, 4)), seed)
        network.run()
        assert [receiver.got for receiver in network.receivers.values()] == [dict(enumerate(OBJECTS))] * 4
        packets = [decode(message) for receiver in network.receivers.values() for message in receiver.sent]
        assert {type(one) for one in packets} <= {Join}
        results = network.sender.results
        assert [(one.strategy_met, one.cycles) for one in results] == [(True, 9)] * len(OBJECTS)
        assert [one.segments for one in results] == [-(-len(one) // SEGMENT) for one in OBJECTS]


def test_several_objects_without_loss_in_one_cycle() -> None:
    case = Case(OBJECTS, 2, window=64, strategy=carousel(cycles=1), pace=PACE, partial_objects=32)
    network = Network(case)
    network.run()
    assert [receiver.got for receiver in network.receivers.values()] == [dict(enumerate(OBJECTS))] * 2


@pytest.mark.parametrize("partial_objects", [1, 2, 4])
@pytest.mark.parametrize("in_order", [(), (1,)], ids=["any order", "in order"])
def test_a_bound_of_incomplete_objects_costs_cycles(partial_objects: int, in_order: tuple[int, ...]) -> None:
    """A receiver with few incomplete objects at a time completes all of them later."""
    some, strategy = OBJECTS[:6], carousel(cycles=60)
    case = Case(
        some,
        1,
        window=4,
        strategy=strategy,
        pace=PACE,
        use_parity=False,
        partial_objects=partial_objects,
        in_order=in_order,
    )
    network = Network(case, Conditions(loss=0.3))
    network.run()
    assert network.receivers[1].got == dict(enumerate(some))


def test_an_object_after_a_carousel() -> None:
    network = Network(Case(OBJECTS[:3], 2, strategy=carousel(cycles=2), pace=PACE, partial_objects=32), CALM)

    def run_until(until: Callable[[], bool]) -> None:
        while not until():
            network._step(inf)
            assert network.now < MAX_SECONDS

    cores = [receiver.core for receiver in network.receivers.values()]
    network._begin(*OBJECTS[:3])
    run_until(lambda: network.sender.outgoing is None)
    run_until(lambda: all(core.index is not None for core in cores))
    network.case = network.case._replace(strategy=all_receivers(), partial_objects=0)
    network._begin(b"answered")
    run_until(lambda: network.sender.outgoing is None)
    assert [receiver.got[3] for receiver in network.receivers.values()] == [b"answered"] * 2


@pytest.mark.parametrize("objects", [(b"",), (b"x", DATA[:5000], b"")])
def test_a_carousel_of_small_objects(objects: tuple[bytes, ...]) -> None:
    case = Case(objects, 2, strategy=carousel(cycles=3), pace=PACE)
    network = Network(case, Conditions(mute=(2,)))
    network.run()
    assert [receiver.got for receiver in network.receivers.values()] == [dict(enumerate(objects))] * 2
    assert [one.cycles for one in network.sender.results] == [3] * len(objects)


def test_a_stored_prefix_is_verified() -> None:
    """Blocks that an earlier run stored do not count before they are verified."""
    half, other = DATA[:100_000], DATA[:50_000] + bytes(50_000)
    case = Case(
        (DATA,), 3, window=64, strategy=carousel(cycles=6), pace=PACE, disks={1: half, 2: other, 3: DATA}
    )
    network = Network(case, Conditions(loss=0.01))
    network.run()
    assert [receiver.got for receiver in network.receivers.values()] == [{0: DATA}] * 3
    compared = [receiver.compared for receiver in network.receivers.values()]
    assert compared == [100_000 // BLOCK, 50_000 // BLOCK, len(DATA) // BLOCK]
    packets = [decode(message) for receiver in network.receivers.values() for message in receiver.sent]
    assert {type(one) for one in packets} <= {Join}, "stored blocks are not reported"


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "closed"])
def test_no_wrong_byte_with_liars_and_losses(key: bytes | None) -> None:
    for seed in range(12):
        random = Random(seed)
        data = random.randbytes(random.choice((0, 983, 30_000)))
        infos = (data, random.randbytes(5000), data[:1000])[: random.randint(1, 3)]
        case = Case(
            infos,
            3,
            partial_objects=random.randint(1, 3),
            window=random.choice((1, 4, 64)),
            strategy=carousel(cycles=random.randint(1, 8), seconds=random.choice((0.1, 5.0))),
            pace=PACE,
            use_parity=random.random() < 0.7,
            key=key,
            disks={1: earlier(random, data)},
            in_order=(2,),
        )
        conditions = Conditions(
            loss=random.choice((0.0, 0.05)),
            doubles=0.1,
            disorder=random.choice((0.0, 0.1)),
            garbled=random.choice((0.0, 0.01)),
            late={3: 1.0 + random.random() / 10},
            mute=(random.randint(1, 3),),
            deaths={1: 1.05} if random.random() < 0.2 else {},
        )
        network = Network(case, conditions, seed, recorded if key else anything)
        network.run()
        for receiver in network.receivers.values():
            assert receiver.got.items() <= dict(enumerate(infos)).items()


@pytest.mark.parametrize(
    ("k", "max_parity", "each", "cycles"), [(4, 4, 1, 4), (128, 32, 8, 4), (40, 7, 3, 2)]
)
def test_each_cycle_sends_other_parity(k: int, max_parity: int, each: int, cycles: int) -> None:
    about = Describe(1, 0, k, 1, k, max_parity, 1, 0, "", b"")
    outgoing = OutgoingObject(about, Terms(carousel(), 0.0))
    found = []
    for _ in range(cycles + 1):
        outgoing.offer(BlockInfo(k, k, bytes(32)))
        outgoing.digest = bytes(32)
        esis: list[int] = []
        while (run := outgoing.next_run(5, 0.0)) is not None:
            esis += range(run.first, run.first + run.segments)
        assert outgoing.end_cycle()
        assert esis[:k] == [*range(k)]
        found.append(esis[k:])
    parity = [position for esis in found[:cycles] for position in esis]
    assert parity == [*range(k, k + each * cycles)]
    assert found[cycles] == found[0]


def test_a_carousel_receiver_sends_nothing() -> None:
    """It waits for longer than `stall`, and fails when the sender is silent."""
    config = ReceiverConfig(
        number(1), "r1", 8, MESSAGE_SIZE, True, peer_timeout=10.0, stall=60.0, stores=True
    )
    core = ObjectReceiver(number(0), config, Random(1), 0.0)
    offer = Offer(number(0), 0, 0, 1, 1000, 0, "sender")
    core.on_packet(Describe(number(0), 0, 100, 1, 1, 0, 1, 0, "", b""), 0.0)
    for now in range(1, 500):
        core.on_packet(offer, float(now))
        assert core.messages(now + 0.9) == []
    assert not core.ended
    assert not core.finished
    assert core.messages(509.5) == []
    assert [one.reason for one in core.ended] == ["the sender was silent for 10 s"]


def receiver_of_carousel(size: int, any_order: bool = True, count: int = 1) -> ObjectReceiver:
    """Return a receiver of an object whose segments and blocks have one byte each."""
    config = ReceiverConfig(
        number(1), "r1", 8, MESSAGE_SIZE, False, peer_timeout=10.0, stall=60.0, stores=True
    )
    core = ObjectReceiver(number(0), config, Random(1), 0.0)
    core.on_packet(Describe(number(0), 0, size, 1, 1, 0, count, 0, "", b""), 0.0)
    if any_order:
        core.allow_any_order()
    return core


def deliver(core: ObjectReceiver, block: int, now: float, object_: int = 0) -> None:
    """Deliver the segment of a block, and its SEAL if the segment is new."""
    if core.on_data(object_, block, 1, 1, now):
        core.on_packet(Seal(number(0), object_, block, 0, 0, 1, 1000, (BlockInfo(1, 1, bytes(32)),)), now)


def verify_ready(core: ObjectReceiver, now: float) -> None:
    for ready in core.take_ready():
        core.checked(ready.block, True, now)


def test_an_object_never_described_is_given_up() -> None:
    """After MAX_FRUITLESS_CYCLES cycles, and not before."""
    core, now, steps = receiver_of_carousel(1, count=3), 0.0, 0
    while not core.carousel_finished:
        now += 2.0
        for step in range(2):  # the third is never described
            core.on_packet(Describe(number(0), step, 1, 1, 1, 0, 3, step, "", b""), now)
            deliver(core.others.get(step, core), 0, now, step)
            steps += 1
        for one in core.object_receivers():
            assert one.about is not None
            core.on_packet(Flush(number(0), one.about.object, 1, 1, 0, 9, 1, 9, 0, b"x" * 32, 0, 0), now)
            verify_ready(one, now)
            one.stored(now)
            one.messages(now)
        assert now < 1000
    assert now > 60, "a minute at least"
    assert steps >= MAX_FRUITLESS_CYCLES * 3
    assert [[ended.complete for ended in one.ended] for one in core.object_receivers()] == [[True]] * 2


def test_objects_share_the_bound_of_blocks() -> None:
    """The bound of incomplete blocks is for all objects of a carousel together."""
    layout, outgoing = ObjectLayout(976 * 4 * 1000, 976, 4, 0), make_carousel(4, count=3)
    several = [IncomingObject(number, layout, 4, False, outgoing) for number in range(3)]
    for some in several[:2]:
        some.allow_any_order()
    random = Random(1)
    for _ in range(3000):
        random.choice(several).add_segments(random.randrange(1000), 1 << random.randrange(4), 1)
        assert sum(len(one._open) for one in several) <= 5, "the first missing block always has room"
    assert several[2].add_segments(0, 0b1111, 4) or 0 in several[2]._open


def test_an_object_of_another_carousel_is_rejected() -> None:
    core = receiver_of_carousel(1, count=3)
    for count, position, object_ in ((2, 1, 1), (3, 0, 1), (0, 0, 2), (1, 0, 1)):
        core.on_packet(Describe(number(0), object_, 1, 1, 1, 0, count, position, "", b""), 1.0)
    assert not core.others
    assert core.rejected.total() == 3  # an object outside of a carousel is ignored before the ADMIT


@pytest.mark.parametrize("missing", [[3], [0, 3, 4]])
def test_missing_blocks_are_named_when_given_up(missing: list[int]) -> None:
    """The reason says how many blocks are missing, and where the first one begins."""
    core, steps = receiver_of_carousel(5), 0
    while not core.ended and steps < 1000:
        steps += 1
        for block in {*range(5)} - {*missing}:
            deliver(core, block, steps / 2)
        verify_ready(core, steps / 2)
        assert core.messages(steps / 2) == []
    assert steps >= max(120, MAX_FRUITLESS_CYCLES * 5 / (5 - len(missing))), "stall, and cycles"
    assert [(one.complete, one.reason) for one in core.ended] == [
        (
            False,
            f"the carousel did not send what is missing in {MAX_FRUITLESS_CYCLES} cycles: "
            f"{len(missing)} of 5 blocks, "
            f"the first at byte {missing[0]}",
        )
    ]


def test_a_carousel_without_segments_is_given_up() -> None:
    core = receiver_of_carousel(5)
    deliver(core, 1, 0.0)
    verify_ready(core, 0.0)
    for step in range(1, MAX_FRUITLESS_OFFERS + 1):
        assert not core.ended
        core.on_packet(Offer(number(0), 0, 0, 1, 1000, 0, "sender"), step / 10)
        core.messages(step / 10)
    assert [one.reason for one in core.ended] == [
        f"the carousel's sender sent {MAX_FRUITLESS_OFFERS} invitations and no segment between them: "
        "4 of 5 blocks, "
        "the first at byte 0"
    ]


def test_a_missing_digest_is_named_when_given_up() -> None:
    """All blocks are verified, but no FLUSH with the digest of the object arrives."""
    core = receiver_of_carousel(1)
    for step in range(100):
        deliver(core, 0, float(step))
        verify_ready(core, float(step))
        core.messages(float(step))
    assert [one.reason.rpartition(": ")[2] for one in core.ended] == ["the digest of the object"]


@pytest.mark.parametrize("loss", [0.5, 0.97])
def test_a_lossy_carousel_is_not_given_up(loss: float) -> None:
    """At any loss rate, a carousel that sends all segments completes before it is given up."""
    for seed in range(10):
        core, random, now = receiver_of_carousel(4), Random(seed), 0.0
        while core.incoming is not None and core.incoming.base < 4:
            now += 5.0
            core.on_packet(Offer(number(0), 0, 0, 1, 1000, 0, "sender"), now)
            for block in range(4):
                if random.random() >= loss:
                    deliver(core, block, now)
            verify_ready(core, now)
            core.messages(now)
            assert not core.ended, now


def test_a_slow_pipe_is_no_fault_of_the_carousel() -> None:
    core = receiver_of_carousel(3, any_order=False)
    for step in range(300):
        for block in range(3):
            deliver(core, block, float(step))
        assert core.messages(float(step)) == []
    verify_ready(core, 300.0)
    assert not core.ended
    assert core.incoming is not None
    assert core.incoming.base == 3


def test_a_carousel_needs_a_known_size() -> None:
    network = Network(Case((DATA,), strategy=carousel(), stream=True))
    with pytest.raises(ValueError, match="its size must be known"):
        network._begin(DATA)
    for size, outgoing, position in (
        (UNKNOWN_SIZE, 1, 0),
        (9, MAX_CAROUSEL + 1, 0),
        (9, 0, 1),
        (9, 2, 2),
        (9, 9, 2),
    ):
        with pytest.raises(Rejected):
            decode(encode(Describe(1, 1, size, 976, 1, 0, outgoing, position, "", b"")))
    decode(encode(Describe(1, 1, 9, 976, 1, 0, 2, 1, "", b"")))


@pytest.mark.parametrize(
    ("strategy", "state", "done"),
    [
        (carousel(), TransferState(0, 0, 1e9, 9, 1000), False),
        (carousel(cycles=3), TransferState(0, 0, 1e9, 0, 2), False),
        (carousel(cycles=3), TransferState(0, 0, 0.0, 0, 3), True),
        (carousel(seconds=3), TransferState(0, 0, 2.9, 0, 99), False),
        (carousel(seconds=3), TransferState(0, 0, 3.0, 0, 0), True),
    ],
)
def test_a_carousel_ends_at_its_bound_alone(strategy: Strategy, state: TransferState, done: bool) -> None:
    assert strategy.is_done(state) is done
    assert strategy.is_met(state, 0) is (state.cycles > 0)


def test_a_carousel_in_words() -> None:
    assert Strategy.of("carousel") == carousel()
    assert Strategy.of("carousel:3") == carousel(cycles=3)
    assert Strategy.of("carousel:10min") == carousel(seconds=600)
    for text, says in {
        "carousel:0": "^a carousel of 0 cycles: at least 1$",
        "carousel:-1": "is not a strategy",
        "carousel:0s": "^a carousel for 0 s: more than 0$",
        "carousel:x": "is not a strategy",
        "carousel:nan": "is not a strategy",
    }.items():
        with pytest.raises(ValueError, match=says):
            Strategy.of(text)
    with pytest.raises(ValueError, match="a carousel for -1 s"):
        carousel(seconds=-1)
