"""What goes round and round: receivers come at any time, lose what they lose, and say nothing."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import Random

import pytest

from mcast.cast.nack.arriving import Arriving
from mcast.cast.nack.circle import INVITED, ROUNDS, Circle
from mcast.cast.nack.header import Rejected
from mcast.cast.nack.messages import (
    MOST_AROUND,
    NO_DIGEST,
    UNTOLD,
    Describe,
    Enter,
    Flush,
    Offer,
    Seal,
    Sealed,
    packed,
    piece_size,
    unpacked,
)
from mcast.cast.nack.outgoing import Outgoing, Terms
from mcast.cast.nack.receiver import ObjectReceiver, Self
from mcast.cast.nack.sender import ObjectSender
from mcast.cast.nack.shape import Shape
from mcast.cast.nack.strategy import Standing, Strategy, all_receivers, carousel

from .network import CALM, LARGEST, LONG, Case, Network, Weather, number
from .test_transfers import anything, earlier, recorded

DATA = Random(3).randbytes(200_000)
PIECE = piece_size(LARGEST)
BLOCK = 4 * PIECE
KEY = bytes(range(32))
PACE = 2000.0
"""Messages a second: a round of these bytes takes some 0.15 s, as long as it takes to find the session."""


def circle(room: int, count: int = 1) -> Circle:
    return Circle(Describe(number(0), 0, 1, 976, 1, 0, count, 0, "", b""), room, 0.0)


def took(network: Network) -> dict[int, int]:
    """In which round from its own first one on each receiver had the object."""
    return {end: network.got_it[end] - network.came[end] for end in network.takers}


def test_losses_before_do_not_slow_a_carousel_down() -> None:
    """Nobody would say that they have ended."""
    sender = ObjectSender(number(0), "sender", LARGEST, 0.0, limit=5000.0)
    sender.rate.pace = 100.0
    sender.begin(0.0, all_receivers(), 1)
    assert sender.rate.pace == 100.0
    sender.abandon(0.0)
    sender.begin(0.0, carousel(), 1)
    assert sender.rate.pace == 5000.0


@pytest.mark.parametrize("parity", [True, False])
def test_mute_and_late_receivers_have_all_in_a_few_rounds(parity: bool) -> None:
    case = Case((DATA,), 4, room=64, strategy=carousel(cycles=9), pace=PACE, parity=parity)
    for seed in range(4):
        network = Network(case, Weather(loss=0.01, late={3: 1.05, 4: 1.2}, mute=(2, 4)), seed)
        network.run()
        assert [taker.got for taker in network.takers.values()] == [{0: DATA}] * 4
        assert max(took(network).values()) <= 5, took(network)
        said = [unpacked(message) for taker in network.takers.values() for message in taker.said]
        assert {type(one) for one in said} <= {Enter}, "nothing is asked for, and nothing is answered"
        (settled,) = network.sender.settled
        pieces = -(-len(DATA) // PIECE)
        assert (settled.strategy_met, settled.cycles, settled.pieces, settled.receivers) == (
            True,
            9,
            pieces,
            (),
        )
        assert settled.repairs >= 8 * pieces


def test_without_losses_the_rest_comes_now_and_the_beginning_in_the_next_round() -> None:
    case = Case((DATA,), 2, room=64, strategy=carousel(cycles=4), pace=PACE)
    network = Network(case, Weather(late={2: 0.2}))
    network.run()
    assert took(network)[2] <= 2
    assert network.takers[2].got == {0: DATA}


def test_a_receiver_has_no_more_blocks_in_part_than_it_has_room_for() -> None:
    shape = Shape(976 * 4 * 1000, 976, 4, 0)
    some = Arriving(0, shape, 3, False, circle(3))
    some.scatter()
    random = Random(1)
    dropped = []
    for turn in range(2000):
        some.takes(random.randrange(1000), random.randrange(3), 1)
        dropped += some.dropped
        some.dropped = []
        assert len(some._open) <= 3, turn
    assert dropped
    assert some.takes(1000, 0, 1) == 0, "the object has no such block"
    narrow = Arriving(0, shape, 3, False, circle(3))
    assert [narrow.takes(block, 0, 1) for block in (0, 2, 3, 999)] == [1, 1, 0, 0], "as into a pipe"


def test_narrow_blocks_reach_no_further_than_what_they_bring_is_worth() -> None:
    """Else a liar's cost hundreds of MB: each that is taken is known of until those before it have come."""
    narrow, wide = (Arriving(0, Shape(1 << 40, 960, width, 0), 8, False, circle(8)) for width in (1, 128))
    for some in (narrow, wide):
        some.scatter()
    assert wide.takes(1_000_000, 0, 1) == 1
    assert [narrow.takes(block, 0, 1) for block in (8000, 8192, 1_000_000)] == [1, 0, 0]


@pytest.mark.parametrize("in_order", [(), (1, 2)], ids=["any order", "in order"])
def test_little_memory_costs_rounds_and_no_byte(in_order: tuple[int, ...]) -> None:
    data = DATA[:60_000]
    case = Case((data,), 2, room=4, strategy=carousel(cycles=60), pace=PACE, parity=False, in_order=in_order)
    network = Network(case, Weather(loss=0.05, late={2: 1.03}))
    network.run()
    assert [taker.got for taker in network.takers.values()] == [{0: data}] * 2


@pytest.mark.parametrize("pace", [1.0, 8.0, 29.0])
def test_invitations_leave_room_for_the_object_at_the_slowest_pace(pace: float) -> None:
    case = Case((DATA[:3000],), 1, strategy=carousel(cycles=2), pace=pace)
    network = Network(case, Weather(late={1: 1.5}))
    network.run()
    assert network.takers[1].got == {0: DATA[:3000]}
    assert [one.cycles for one in network.sender.settled] == [2]


class Unlucky(Network):
    """The first word of what the whole is is lost, and the first of what its last block is."""

    lost: frozenset[type] = frozenset()

    def _say(self, source: int, message: bytes) -> None:
        spoken = unpacked(message)
        last = isinstance(spoken, Seal) or (isinstance(spoken, Flush) and spoken.digest != NO_DIGEST)
        if last and type(spoken) not in self.lost:
            self.lost |= {type(spoken)}
        else:
            super()._say(source, message)


def test_one_round_is_enough_although_its_last_words_are_lost() -> None:
    network = Unlucky(Case((DATA[:2000],), 2, strategy=carousel(cycles=1), pace=PACE), CALM)
    network.run()
    assert network.lost == {Seal, Flush}
    assert [taker.got for taker in network.takers.values()] == [{0: DATA[:2000]}] * 2


def test_what_came_behind_a_disk_that_is_wrong_is_not_wanted_again() -> None:
    some = Arriving(0, Shape(5, 1, 1, 0), 8, False, circle(8))
    some.scatter()
    some.hold(3)
    sealed = Sealed(1, 1, bytes(32))

    def comes(block: int) -> None:
        assert some.takes(block, 0, 1) == 1
        some.seal(block, [sealed])
        some.right(block)

    comes(3)
    comes(4)
    some.wrong(0)
    assert some.base == 0
    assert some.takes(3, 0, 1) == 0
    for block in range(3):
        comes(block)
    assert some.base == 5


MANY = tuple(DATA[at * 1000 : at * 1000 + at * 700 % 5000] for at in range(20))
"""Objects of up to some pieces, some of them empty."""


@pytest.mark.parametrize("parity", [True, False])
def test_objects_that_go_round_together_come_to_mute_and_late_receivers_each_once(parity: bool) -> None:
    for seed in range(2):
        strategy = carousel(cycles=9)
        case = Case(MANY, 4, room=64, strategy=strategy, pace=PACE, parity=parity, together=32, in_order=(2,))
        network = Network(case, Weather(loss=0.02, late={3: 1.05, 4: 1.1}, mute=(2, 4)), seed)
        network.run()
        assert [taker.got for taker in network.takers.values()] == [dict(enumerate(MANY))] * 4
        said = [unpacked(message) for taker in network.takers.values() for message in taker.said]
        assert {type(one) for one in said} <= {Enter}
        settled = network.sender.settled
        assert [(one.strategy_met, one.cycles) for one in settled] == [(True, 9)] * len(MANY)
        assert [one.pieces for one in settled] == [-(-len(one) // PIECE) for one in MANY]


def test_without_losses_all_that_go_round_together_come_in_one_round() -> None:
    case = Case(MANY, 2, room=64, strategy=carousel(cycles=1), pace=PACE, together=32)
    network = Network(case)
    network.run()
    assert [taker.got for taker in network.takers.values()] == [dict(enumerate(MANY))] * 2


@pytest.mark.parametrize("together", [1, 2, 4])
@pytest.mark.parametrize("in_order", [(), (1,)], ids=["any order", "in order"])
def test_who_may_have_few_objects_in_part_gets_all_of_them_later(
    together: int, in_order: tuple[int, ...]
) -> None:
    some, strategy = MANY[:6], carousel(cycles=60)
    case = Case(
        some, 1, room=4, strategy=strategy, pace=PACE, parity=False, together=together, in_order=in_order
    )
    network = Network(case, Weather(loss=0.3))
    network.run()
    assert network.takers[1].got == dict(enumerate(some))


def test_an_ordinary_object_follows_those_that_went_round_together() -> None:
    network = Network(Case(MANY[:3], 2, strategy=carousel(cycles=2), pace=PACE, together=32), CALM)

    def plays(until: Callable[[], bool]) -> None:
        while not until():
            network._step(inf)
            assert network.now < LONG

    cores = [taker.core for taker in network.takers.values()]
    network._begin(*MANY[:3])
    plays(lambda: network.sender.outgoing is None)
    plays(lambda: all(core.index is not None for core in cores))
    network.case = network.case._replace(strategy=all_receivers(), together=0)
    network._begin(b"answered")
    plays(lambda: network.sender.outgoing is None)
    assert [taker.got[3] for taker in network.takers.values()] == [b"answered"] * 2


@pytest.mark.parametrize("objects", [(b"",), (b"x", DATA[:5000], b"")])
def test_small_objects_go_round_one_after_another(objects: tuple[bytes, ...]) -> None:
    case = Case(objects, 2, strategy=carousel(cycles=3), pace=PACE)
    network = Network(case, Weather(mute=(2,)))
    network.run()
    assert [taker.got for taker in network.takers.values()] == [dict(enumerate(objects))] * 2
    assert [one.cycles for one in network.sender.settled] == [3] * len(objects)


def test_what_an_earlier_run_has_left_is_compared_and_not_believed() -> None:
    half, other = DATA[:100_000], DATA[:50_000] + bytes(50_000)
    case = Case(
        (DATA,), 3, room=64, strategy=carousel(cycles=6), pace=PACE, disks={1: half, 2: other, 3: DATA}
    )
    network = Network(case, Weather(loss=0.01))
    network.run()
    assert [taker.got for taker in network.takers.values()] == [{0: DATA}] * 3
    compared = [taker.compared for taker in network.takers.values()]
    assert compared == [100_000 // BLOCK, 50_000 // BLOCK, len(DATA) // BLOCK]
    said = [unpacked(message) for taker in network.takers.values() for message in taker.said]
    assert {type(one) for one in said} <= {Enter}, "what the disk has is nobody's business"


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "closed"])
def test_no_wrong_byte_although_some_lie_and_some_is_lost(key: bytes | None) -> None:
    for seed in range(12):
        random = Random(seed)
        data = random.randbytes(random.choice((0, 983, 30_000)))
        things = (data, random.randbytes(5000), data[:1000])[: random.randint(1, 3)]
        case = Case(
            things,
            3,
            together=random.randint(1, 3),
            room=random.choice((1, 4, 64)),
            strategy=carousel(cycles=random.randint(1, 8), seconds=random.choice((0.1, 5.0))),
            pace=PACE,
            parity=random.random() < 0.7,
            key=key,
            disks={1: earlier(random, data)},
            in_order=(2,),
        )
        weather = Weather(
            loss=random.choice((0.0, 0.05)),
            doubles=0.1,
            disorder=random.choice((0.0, 0.1)),
            garbled=random.choice((0.0, 0.01)),
            late={3: 1.0 + random.random() / 10},
            mute=(random.randint(1, 3),),
            deaths={1: 1.05} if random.random() < 0.2 else {},
        )
        network = Network(case, weather, seed, recorded if key else anything)
        network.run()
        for taker in network.takers.values():
            assert taker.got.items() <= dict(enumerate(things)).items()


@pytest.mark.parametrize(("width", "spare", "each", "cycles"), [(4, 4, 1, 4), (128, 32, 8, 4), (40, 7, 3, 2)])
def test_each_round_brings_other_parity(width: int, spare: int, each: int, cycles: int) -> None:
    about = Describe(1, 0, width, 1, width, spare, 1, 0, "", b"")
    around = Outgoing(about, Terms(carousel(), 0.0))
    found = []
    for _ in range(cycles + 1):
        around.offer(Sealed(width, width, bytes(32)))
        around.digest = bytes(32)
        places: list[int] = []
        while (run := around.next(5, 0.0)) is not None:
            places += range(run.first, run.first + run.pieces)
        assert around.turned()
        assert places[:width] == [*range(width)]
        found.append(places[width:])
    parity = [place for places in found[:cycles] for place in places]
    assert parity == [*range(width, width + each * cycles)]
    assert found[cycles] == found[0]


def test_who_takes_what_goes_round_is_quiet_and_patient() -> None:
    who = Self(number(1), "r1", 8, LARGEST, True, peer_timeout=10.0, stall=60.0, stores=True)
    core = ObjectReceiver(number(0), who, Random(1), 0.0)
    offer = Offer(number(0), 0, 0, 1, 1000, 0, "sender")
    core.hears(Describe(number(0), 0, 100, 1, 1, 0, 1, 0, "", b""), 0.0)
    for now in range(1, 500):
        core.hears(offer, float(now))
        assert core.messages(now + 0.9) == []
    assert not core.ended
    assert not core.over
    assert core.messages(509.5) == []
    assert [one.words for one in core.ended] == ["the sender was silent for 10 s"]


def told_of_what_goes_round(size: int, scatters: bool = True, circle: int = 1) -> ObjectReceiver:
    """A receiver of an object whose pieces and blocks have one byte each."""
    who = Self(number(1), "r1", 8, LARGEST, False, peer_timeout=10.0, stall=60.0, stores=True)
    core = ObjectReceiver(number(0), who, Random(1), 0.0)
    core.hears(Describe(number(0), 0, size, 1, 1, 0, circle, 0, "", b""), 0.0)
    if scatters:
        core.scatters()
    return core


def comes(core: ObjectReceiver, block: int, now: float, object_: int = 0) -> None:
    """The piece of a block comes, and its seal."""
    if core.takes(object_, block, 0, 1, now):
        core.hears(Seal(number(0), object_, block, 0, 0, 1, 1000, (Sealed(1, 1, bytes(32)),)), now)


def is_right(core: ObjectReceiver, now: float) -> None:
    for ready in core.ready():
        core.checked(ready.block, True, now)


def test_what_is_never_described_is_waited_for_in_so_many_rounds() -> None:
    core, now, turns = told_of_what_goes_round(1, circle=3), 0.0, 0
    while not core.satisfied:
        now += 2.0
        for turn in range(2):  # the third is never described
            core.hears(Describe(number(0), turn, 1, 1, 1, 0, 3, turn, "", b""), now)
            comes(core.beside.get(turn, core), 0, now, turn)
            turns += 1
        for one in core.all_receivers():
            assert one.about is not None
            core.hears(Flush(number(0), one.about.object, 1, 1, 0, 9, 1, 9, 0, b"x" * 32, 0, 0), now)
            is_right(one, now)
            one.stored(now)
            one.messages(now)
        assert now < 1000
    assert now > 60, "a minute at least"
    assert turns >= ROUNDS * 3
    assert [[ended.whole for ended in one.ended] for one in core.all_receivers()] == [[True]] * 2


def test_what_comes_of_several_shares_the_room_for_blocks_in_part() -> None:
    shape, around = Shape(976 * 4 * 1000, 976, 4, 0), circle(4, count=3)
    several = [Arriving(number, shape, 4, False, around) for number in range(3)]
    for some in several[:2]:
        some.scatter()
    random = Random(1)
    for _ in range(3000):
        random.choice(several).takes(random.randrange(1000), random.randrange(4), 1)
        assert sum(len(one._open) for one in several) <= 5, "what others wait for has a place always"
    assert several[2].takes(0, 0, 4) or 0 in several[2]._open


def test_an_object_that_does_not_fit_the_others_is_refused() -> None:
    core = told_of_what_goes_round(1, circle=3)
    for count, place, object_ in ((2, 1, 1), (3, 0, 1), (0, 0, 2), (1, 0, 1)):
        core.hears(Describe(number(0), object_, 1, 1, 1, 0, count, place, "", b""), 1.0)
    assert not core.beside
    assert core.rejected.total() == 3  # an ordinary one is for those that were admitted


@pytest.mark.parametrize("missing", [[3], [0, 3, 4]])
def test_what_no_round_brings_is_given_up_by_name(missing: list[int]) -> None:
    core, turns = told_of_what_goes_round(5), 0
    while not core.ended and turns < 1000:
        turns += 1
        for block in {*range(5)} - {*missing}:
            comes(core, block, turns / 2)
        is_right(core, turns / 2)
        assert core.messages(turns / 2) == []
    assert turns >= max(120, ROUNDS * 5 / (5 - len(missing))), "a minute, and so many rounds"
    assert [(one.whole, one.words) for one in core.ended] == [
        (
            False,
            f"the carousel did not bring what is missing in {ROUNDS} rounds: {len(missing)} of 5 blocks, "
            f"the first at byte {missing[0]}",
        )
    ]


def test_a_carousel_that_only_invites_is_given_up() -> None:
    core = told_of_what_goes_round(5)
    comes(core, 1, 0.0)
    is_right(core, 0.0)
    for turn in range(1, INVITED + 1):
        assert not core.ended
        core.hears(Offer(number(0), 0, 0, 1, 1000, 0, "sender"), turn / 10)
        core.messages(turn / 10)
    assert [one.words for one in core.ended] == [
        f"the carousel's sender invited {INVITED} times, and no piece came between: 4 of 5 blocks, "
        "the first at byte 0"
    ]


def test_what_is_never_said_of_the_whole_is_missing_too() -> None:
    core = told_of_what_goes_round(1)
    for turn in range(100):
        comes(core, 0, float(turn))
        is_right(core, float(turn))
        core.messages(float(turn))
    assert [one.words.rpartition(": ")[2] for one in core.ended] == ["the digest of the whole"]


@pytest.mark.parametrize("loss", [0.5, 0.97])
def test_whatever_is_lost_a_carousel_that_brings_all_is_not_given_up(loss: float) -> None:
    for seed in range(10):
        core, random, now = told_of_what_goes_round(4), Random(seed), 0.0
        while core.arriving is not None and core.arriving.base < 4:
            now += 5.0
            core.hears(Offer(number(0), 0, 0, 1, 1000, 0, "sender"), now)
            for block in range(4):
                if random.random() >= loss:
                    comes(core, block, now)
            is_right(core, now)
            core.messages(now)
            assert not core.ended, now


def test_a_slow_pipe_is_no_fault_of_the_carousel() -> None:
    core = told_of_what_goes_round(3, scatters=False)
    for turn in range(300):
        for block in range(3):
            comes(core, block, float(turn))
        assert core.messages(float(turn)) == []
    is_right(core, 300.0)
    assert not core.ended
    assert core.arriving is not None
    assert core.arriving.base == 3


def test_only_an_object_of_known_size_goes_round() -> None:
    network = Network(Case((DATA,), strategy=carousel(), stream=True))
    with pytest.raises(ValueError, match="its size must be known"):
        network._begin(DATA)
    for size, around, place in ((UNTOLD, 1, 0), (9, MOST_AROUND + 1, 0), (9, 0, 1), (9, 2, 2), (9, 9, 2)):
        with pytest.raises(Rejected):
            unpacked(packed(Describe(1, 1, size, 976, 1, 0, around, place, "", b"")))
    unpacked(packed(Describe(1, 1, 9, 976, 1, 0, 2, 1, "", b"")))


@pytest.mark.parametrize(
    ("strategy", "standing", "done"),
    [
        (carousel(), Standing(0, 0, 1e9, 9, 1000), False),
        (carousel(cycles=3), Standing(0, 0, 1e9, 0, 2), False),
        (carousel(cycles=3), Standing(0, 0, 0.0, 0, 3), True),
        (carousel(seconds=3), Standing(0, 0, 2.9, 0, 99), False),
        (carousel(seconds=3), Standing(0, 0, 3.0, 0, 0), True),
    ],
)
def test_a_carousel_ends_at_its_bound_alone(strategy: Strategy, standing: Standing, done: bool) -> None:
    assert strategy.done(standing) is done
    assert strategy.is_met(standing, 0) is (standing.cycles > 0)


def test_a_carousel_in_words() -> None:
    assert Strategy.of("carousel") == carousel()
    assert Strategy.of("carousel:3") == carousel(cycles=3)
    assert Strategy.of("carousel:10min") == carousel(seconds=600)
    for text, says in {
        "carousel:0": "^a carousel of 0 rounds: at least 1$",
        "carousel:-1": "is no strategy",
        "carousel:0s": "^a carousel for 0 s: more than 0$",
        "carousel:x": "is no strategy",
        "carousel:nan": "is no strategy",
    }.items():
        with pytest.raises(ValueError, match=says):
            Strategy.of(text)
    with pytest.raises(ValueError, match="a carousel for -1 s"):
        carousel(seconds=-1)
