"""The parts of the protocol of objects, one by one."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest

from mcast.api import list_rows
from mcast.cast.nack.arriving import TRIES
from mcast.cast.nack.asking import Asking
from mcast.cast.nack.backoff import SPREAD, backoff, spread
from mcast.cast.nack.circle import Places
from mcast.cast.nack.header import TEXT, number_at
from mcast.cast.nack.members import MOST_OF_ADDRESS
from mcast.cast.nack.messages import (
    AROUND,
    LEFT,
    MOST_SPARE,
    OPEN,
    UNDECIDED,
    WHOLE,
    Bye,
    Describe,
    Enter,
    Flush,
    Have,
    Lack,
    Offer,
    Piece,
    Seal,
    Sealed,
    Want,
    packed,
    told,
    unpacked,
)
from mcast.cast.nack.parity import parity_of, restored
from mcast.cast.nack.payload import BlockBytes, BlockPlace, Digest, Frames, keep_freed_memory
from mcast.cast.nack.rate import BURST, FEW, TOLERATED, Rate, Window
from mcast.cast.nack.receiver import ObjectReceiver, Self
from mcast.cast.nack.repairs import Repairs, Run
from mcast.cast.nack.sender import Manners, ObjectSender
from mcast.cast.nack.strategy import Standing, Strategy, all_receivers, best_effort, deadline, quorum
from mcast.endpoint.receiving import LowWater

from .network import LIARS_NUMBER, address, described, joined, number


def test_any_pieces_that_are_enough_give_the_block() -> None:
    random = Random(5)
    for pieces in (1, 2, 17, 128):
        data = [random.randbytes(32) for _ in range(pieces)]
        parity = parity_of(b"".join(data), 32)
        assert len(parity) == MOST_SPARE
        for _ in range(5):
            lost = random.sample(range(pieces), random.randint(0, min(pieces, MOST_SPARE)))
            rows = random.sample(range(MOST_SPARE), len(lost))
            there = b"".join(bytes(32) if place in lost else piece for place, piece in enumerate(data))
            found = restored(there, 32, lost, {row: parity[row] for row in rows})
            assert found == [data[place] for place in lost]
        with pytest.raises(ValueError, match="are needed"):
            restored(there, 32, [0], {})
    with pytest.raises(ValueError, match=r"^127 pieces are there, 128 are needed$"):
        restored(there, 32, [0, 1], {0: parity[0]})


def test_parity_that_is_asked_for_bit_by_bit_is_that_of_the_block() -> None:
    data = Random(1).randbytes(40 * 32)
    parity = parity_of(data, 32)
    block = BlockBytes(data, 32, 40)
    asked = [block.pieces(40 + first, count) for first, count in ((0, 2), (2, 1), (3, 4), (7, 25), (1, 1))]
    assert asked == [parity[:2], parity[2:3], parity[3:7], parity[7:], parity[1:2]]
    assert BlockBytes(data, 32, 40).pieces(39, 3) == [data[-32:], *parity[:2]]


def test_answers_are_spread_where_others_answer() -> None:
    random = Random(1)
    assert [spread(random, 1) for _ in range(9)] == [0.0] * 9
    assert len({spread(random, 2) for _ in range(9)}) == 9
    assert all(spread(random, 5) <= 4 * SPREAD for _ in range(99))


def test_messages_of_runs_are_their_heads_and_pieces() -> None:
    """Of whole blocks and parts, across what is made together, with a short piece and with parity."""
    about = Describe(number(0), 0, 3 * 40 * 976 + 100, 976, 40, MOST_SPARE, 0, 0, "", b"")
    data = Random(2).randbytes(3 * 40 * 976 + 100)
    blocks = [BlockBytes(data[at : at + 40 * 976], 976, 40) for at in range(0, len(data), 40 * 976)]
    runs = [
        Run(0, 0, 40),
        Run(3, 0, 1),
        Run(1, 5, 30),
        Run(1, 40, 3),
        Run(1, 42, 2),
        *[Run(2, 0, 40)] * 6,
        Run(0, 39, 1),
    ]
    made = [
        bytes(row)
        for rows in Frames(AROUND + 976).of(about, [(blocks[run.block], run) for run in runs])
        for row in list_rows(rows)
    ]
    assert made == [
        packed(Piece(about.session, about.object, run.block, place, blocks[run.block].piece(place)))
        for run in runs
        for place in range(run.first, run.first + run.pieces)
    ]


def test_memory_is_taken_once_to_have_freed_memory_kept() -> None:
    keep_freed_memory()
    tracemalloc.start()
    try:
        keep_freed_memory()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_block_that_differs_is_no_block() -> None:
    block = BlockBytes(Random(1).randbytes(100), 32, 4)
    pieces = {place: block.piece(place) for place in (0, 2, 3, 4)}
    assert joined(block.sealed, pieces, 32, 4) == Random(1).randbytes(100)
    pieces[4] = bytes(32)
    assert joined(block.sealed, pieces, 32, 4) is None
    assert joined(block.sealed, {0: bytes(33)}, 32, 4) is None, "too few"


def test_a_piece_that_is_too_long_touches_no_other() -> None:
    data = Random(1).randbytes(100)
    block = BlockBytes(data, 32, 4)
    honest = {place: block.piece(place) for place in range(4)}
    for place in range(3, -1, -1):  # each liar comes after its neighbour
        long = {**{other: honest[other] for other in honest if other != place}, place: data * 2}
        memory = bytearray(100)
        found = BlockPlace(memoryview(memory), 32, 4)
        for at, one in long.items():
            found.put(at, one)
        found.put(place, honest[place])
        whole = found.whole(block.sealed, 0b1111)
        assert whole is not None
        assert bytes(whole) == data == memory


@pytest.mark.parametrize(("first", "count"), [(0, 4), (1, 3), (2, 5), (4, 2), (3, 1)])
@pytest.mark.parametrize("apart", [0, 7])
@pytest.mark.parametrize("size", [100, 60, 1])
def test_pieces_in_a_row_go_to_their_places(first: int, count: int, apart: int, size: int) -> None:
    """As one by one; those beyond the end of the block, and those of parity, too."""
    random = Random(3)
    row = [random.randbytes(32) for _ in range(count)]
    memory = memoryview(b"head" + random.randbytes(apart).join(row))
    together, alone = bytearray(size), bytearray(size)
    of_all, of_each = BlockPlace(memoryview(together), 32, 4), BlockPlace(memoryview(alone), 32, 4)
    of_all.put_all(first, count, memory, 4, 32 + apart, 32)
    for place, one in enumerate(row, first):
        of_each.put(place, one)
    assert together == alone
    assert of_all._parity == of_each._parity


@pytest.mark.parametrize("members", [1, 10, 1000])
def test_few_speak_at_first_however_many_there_are(members: int) -> None:
    random = Random(3)
    for _ in range(20):
        waits = sorted(backoff(random, 4.0, members) for _ in range(members))
        assert 0 <= waits[0] <= waits[-1] <= 4.0
        assert sum(wait < waits[0] + 1.0 for wait in waits) <= 40


def test_who_hears_its_own_request_is_silent() -> None:
    asking = Asking(Random(1))
    asking.wake(0.0, 0.001, 10)
    asking.heard(Want(1, 2, 0b11), 0.0, 0.001, 10)
    mine = [Want(1, 1, 0b100), Want(1, 2, 0b1100), Want(1, 3, 0b11), Want(1, 3, 0b111), Want(2, 1, 1)]
    assert asking.ask(mine, 0.001, 0.001, 10, 9) == (mine[3], mine[4])
    assert asking.ask(mine, 1.0, 0.001, 10, 2) == (mine[0], mine[1]), "what was heard long ago is forgotten"


def test_no_stranger_silences_a_receiver_for_long() -> None:
    receiver, now, asked = described(4), 1.0, list[tuple[Want, ...]]()
    all_sent = Flush(number(0), 0, 4, 4, 0, 1, 1, 1000, 1, bytes(32), 0, 0)
    receiver.hears(all_sent, now)
    wants = tuple(Want(block, 1, 1) for block in range(4))
    while not asked:
        now += 0.001
        receiver.hears(Lack(number(0), 0, LIARS_NUMBER, 0, 0, 0, wants), now)
        receiver.hears(all_sent, now)
        asked += [one.wants for one in map(unpacked, receiver.messages(now)) if isinstance(one, Lack)]
        assert now < 2.0
    assert asked == [wants]
    assert now > 1.01  # most of the time the other one is a receiver that the sender hears


def test_one_parity_piece_repairs_different_losses() -> None:
    repairs = Repairs(8, 4)
    assert [repairs.asked(Want(0, 1, 1 << place), 0, 1.0) for place in range(5)] == [1, 0, 0, 0, 0]
    assert repairs.take() == ([Run(0, 8, 1)], [])


def test_what_is_on_its_way_is_not_sent_again() -> None:
    repairs = Repairs(8, 4)
    repairs.asked(Want(0, 1, 1), 0, 1.0)
    repairs.take()
    repairs.gone(100)
    assert repairs.asked(Want(0, 1, 2), 99, 1.0) == 0
    assert repairs.asked(Want(0, 1, 2), 100, 1.0) == 1
    assert repairs.take() == ([Run(0, 9, 1)], [])


def test_where_parity_is_used_up_pieces_are_repeated() -> None:
    repairs = Repairs(8, 1)
    repairs.asked(Want(0, 3, 0b1011), 0, 1.0)
    assert repairs.take() == ([Run(0, 0, 2), Run(0, 3, 1)], [])
    repairs.asked(Want(0, 0, 0b100), 100, 1.0)
    repairs.asked(Want(5, 0, 0), 100, 1.0)
    assert repairs.take() == ([Run(0, 2, 1)], [5])


def test_what_has_not_gone_yet_is_not_asked_for_again() -> None:
    repairs = Repairs(8, 4)
    repairs.asked(Want(0, 1, 1), 0, 1.0)
    repairs.take()
    assert repairs.asked(Want(0, 1, 2), 150, 1.0) == 0, "the pace holds it back"
    repairs.gone(200)
    assert repairs.asked(Want(0, 1, 2), 150, 1.0) == 0, "on its way"
    assert repairs.asked(Want(0, 1, 2), 200, 1.0) == 1


def test_nobody_is_charged_twice_for_one_piece() -> None:
    repairs = Repairs(8, 2)
    assert repairs.asked(Want(0, 3, 0b111), 0, 1.0) == 3, "more than there is parity for"
    assert repairs.asked(Want(0, 2, 0b11000), 0, 1.0) == 2
    assert repairs.take() == ([Run(0, 8, 2), Run(0, 0, 3)], []), "both who asked are served"


def test_repairs_that_are_lost_are_losses() -> None:
    repairs = Repairs(8, 2)
    asked = [Want(0, 1, 1), Want(1, 3, 0b111), Want(2, 2, 0b11)]
    for want in asked:
        repairs.asked(want, 0, 1.0)
    repairs.take()
    assert repairs.sent(0, 500) == 0, "not gone yet"
    repairs.gone(100)
    assert (repairs.sent(0, 99), repairs.sent(0, 100), repairs.sent(100, 500)) == (0, 6, 0)
    assert [repairs.lost(want, 0, 100) for want in asked] == [1, 3, 2]
    assert [repairs.lost(want, 0, 99) for want in asked] == [0, 0, 0], "on their way"
    assert [repairs.lost(want, 100, 500) for want in asked] == [0, 0, 0], "judged before"
    assert repairs.lost(Want(2, 1, 0b1000), 0, 100) == 1
    assert repairs.lost(Want(3, 1, 1), 0, 100) == 0, "nobody repaired that block"


def test_the_pace_follows_what_arrives_and_recovers() -> None:
    rate, now = Rate(), 0.0
    assert rate.pace == float("inf")
    for loss, slower in ((TOLERATED / 2, False), (0.5, True)):
        for _ in range(5):
            now += 0.001
            rate.spent(100)
            rate.lost(loss)
            rate.judge(now, 0.001)
        assert (rate.pace < 60_000) is slower
    for _ in range(200):
        now += 0.005
        rate.spent(max(1, rate.allowed(now)))
        rate.judge(now, 0.001)
    assert rate.pace > 60_000


def test_a_pause_tells_nothing_of_the_pace() -> None:
    rate = Rate()
    rate.judge(0.0, 0.001)
    rate.spent(1000)
    rate.judge(1.0, 0.001)
    rate.judge(2.0, 0.001)
    rate.lost(0.5)
    rate.judge(3.0, 0.001)
    assert 400 < rate.pace < 500, "the loss is of what was sent before the pause"
    for second in range(4, 1000):
        rate.judge(second, 0.001)
    assert 400 < rate.pace < 500, "who is silent does not learn that the receivers have become faster"
    for second in range(1000, 1100):
        rate.spent(10)
        rate.judge(second, 0.001)
    assert 400 < rate.pace < 500, "nor who has little to say"


def test_a_paced_sender_sends_several_messages_in_a_turn() -> None:
    """Else each message costs all ends a turn."""
    rate, now, turns, sent = Rate(limit=1000.0), 0.0, 0, 0
    rate.allowed(now)
    while (now := rate.next(now)) < 10.0:
        turns += 1
        sent += (allowed := rate.allowed(now))
        rate.spent(allowed)
    assert 9900 <= sent <= 10_000
    assert turns <= 1001


def test_who_is_slow_to_answer_is_asked_again_and_waited_for_some_round_trips() -> None:
    window = Window()
    window.fit(100)
    window.spent(75)
    window.asked(5, {1, 2})
    window.answered(1, 5)
    assert window.waits(0.0, 0.25) == set()
    asked = [{*window.waits(turn / 4, 0.25)} for turn in range(1, 13)]
    assert asked == [{2}] * 11 + [set()]
    assert window.room == 75


def test_a_question_says_nothing_of_the_pace() -> None:
    rate, now = Rate(), 0.0
    for messages in [500] * 20 + [1, 2, 1]:  # losses are heard of when little is left to send
        rate.judge(now, 0.001)
        rate.spent(messages)
        now += 0.005
    rate.judge(now, 0.001)
    rate.lost(0.2)
    rate.judge(now + 0.005, 0.001)
    assert 40_000 < rate.pace < 80_000


def test_a_limit_is_kept() -> None:
    rate, sent = Rate(limit=1000.0), 0
    for turn in range(1000):
        allowed = rate.allowed(turn / 1000)
        rate.spent(allowed)
        sent += allowed
        rate.judge(turn / 1000, 0.001)
    assert 900 <= sent <= 1010


def test_the_next_message_may_go_as_soon_as_the_pace_allows_it() -> None:
    rate = Rate(limit=10.0)
    assert (rate.allowed(0.0), rate.next(0.0)) == (0, 0.1)
    assert (rate.allowed(0.1), rate.next(0.1)) == (1, 0.1)
    rate.spent(1)
    assert rate.allowed(0.15) == 0
    assert rate.next(0.15) == pytest.approx(0.2)
    free = Rate()
    assert free.next(7.0) == 7.0


def test_a_sender_that_yields_to_losses_keeps_within_its_limit() -> None:
    rate = Rate(limit=10.0)
    rate.judge(0.0, 0.01)
    rate.lost(0.5)
    rate.judge(1.0, 0.01)
    assert rate.pace <= 10.0


@pytest.mark.parametrize(
    ("strategy", "standing", "done"),
    [
        (all_receivers(), Standing(5, 1, 1e9, 100), False),
        (all_receivers(), Standing(5, 0, 0.0, 0), True),
        (quorum(2), Standing(1, 4, 1e9, 9), False),
        (quorum(2), Standing(2, 3, 0.0, 0), True),
        (deadline(5), Standing(0, 3, 4.9, 9), False),
        (deadline(5), Standing(0, 3, 5.0, 0), True),
        (best_effort(), Standing(1, 3, 1.0, 1), False),
        (best_effort(), Standing(1, 3, 1.0, 2), True),
    ],
)
def test_a_strategy_says_when_to_go_on(strategy: Strategy, standing: Standing, done: bool) -> None:
    assert strategy.done(standing) is done


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("all", all_receivers()),
        ("quorum:2", quorum(2)),
        ("deadline:1.5", deadline(1.5)),
        ("deadline:500ms", deadline(0.5)),
        ("best-effort", best_effort()),
    ],
)
def test_a_strategy_in_words(text: str, strategy: Strategy) -> None:
    assert Strategy.of(text) == strategy


ME = number(1)
ENTER = Enter(number(0), ME, 8, 1024, 1, 0, 0, 0, "r")


def sending(now: float, receivers: int = 1, strategy: Strategy | None = None) -> ObjectSender:
    """A sender whose receivers have asked to take part; all of its object, a byte, may be sent."""
    sender = ObjectSender(number(0), "sender", 1024, now, Manners(peer_timeout=5.0, stall=20.0))
    for end in range(1, 1 + receivers):
        sender.hears(ENTER._replace(member=number(end)), address(end), now)
    sender.begin(now, strategy or all_receivers(), size=1, width=1)
    sender.offer(Sealed(1, 1, bytes(32)))
    sender.end(bytes(32))
    return sender


@pytest.mark.parametrize("asks", [False, True])
def test_a_receiver_that_answers_and_never_gets_on_is_given_up(asks: bool) -> None:
    """Each time it says that it has nothing, or asks for the same again."""
    now, answers = 1.0, 0
    sender = sending(now)
    while not sender.settled:
        assert now < 100.0
        said = [unpacked(one) for one in sender.messages(now) if isinstance(one, bytes)]
        for flush in [one for one in said if isinstance(one, Flush)]:
            lack = Lack(number(0), 0, ME, 0, flush.stamp, 0, (Want(0, 1, 1),))
            have = Have(number(0), 0, ME, 0, flush.stamp, 0, UNDECIDED, "")
            sender.hears(lack if asks else have, address(1), now)
            answers += 1
        now = max(now + 0.05, sender.due)
    assert [(one.whole, one.why) for one in sender.settled[0].receivers] == [(False, "stood still")]
    assert answers > 10


@pytest.mark.parametrize("want", [Want(1, 1, 1), Want(0, 1, 0b10)], ids=["block", "piece"])
def test_what_was_not_sent_cannot_be_asked_for(want: Want) -> None:
    sender = sending(1.0)
    sender.messages(1.0)
    sender.hears(Lack(number(0), 0, ME, 0, 1, 0, (want,)), address(1), 1.0)
    assert sender.rejected == {"a request for what was not sent": 1}


def test_one_address_does_not_take_the_places_of_others_and_is_told_so() -> None:
    sender = ObjectSender(number(0), "sender", 1024, 0.0)
    many = [(number_at("a", end), "a") for end in range(MOST_OF_ADDRESS + 1)]
    for end, where in [*many, (number_at("b", 0), "b")]:
        sender.hears(Enter(number(0), end, 8, 1024, 1, 0, 0, 0, "r"), where, 0.0)
    said = [unpacked(one) for one in sender.messages(0.0) if isinstance(one, bytes)]
    byes = [(one.member, one.words) for one in said if isinstance(one, Bye)]
    assert byes == [(many[-1][0], "there is no place for more")]
    assert [member.address for member in sender.members] == ["a"] * MOST_OF_ADDRESS + ["b"]
    assert sender.members.bits(lambda one: one.address == "b") == 1 << MOST_OF_ADDRESS
    for _ in range(2):
        sender.hears(Have(number(0), 0, many[-1][0], 0, 0, 0, UNDECIDED, ""), "a", 0.0)
    assert sender.rejected == {"not a receiver of this session": 2}


def test_who_is_gone_loses_its_place_to_one_that_comes() -> None:
    sender = ObjectSender(number(0), "sender", 1024, 0.0)
    numbers = [number_at("a", end) for end in range(MOST_OF_ADDRESS + 2)]
    *many, other, last = numbers

    def enters(end: int) -> None:
        sender.hears(ENTER._replace(member=end), "a", 0.0)

    for end in many:
        enters(end)
    sender.begin(0.0, all_receivers(), 1)
    for end in many[3:9]:
        sender.hears(Have(number(0), 0, end, 0, 0, 0, LEFT, ""), "a", 0.0)
    enters(other)
    assert other not in [member.number for member in sender.members]  # or strangers would take turns
    sender.abandon(0.0)
    assert len(sender.settled[0].receivers) == MOST_OF_ADDRESS
    enters(other)
    enters(last)
    here = [(member.number, member.index) for member in sender.members]
    assert here[-2:] == [(other, 3), (last, 4)]
    assert sorted(index for _, index in here) == [*range(MOST_OF_ADDRESS)]
    sender.begin(0.0, all_receivers(), 1)
    assert sum(member.part for member in sender.members) == sender.members.owing == MOST_OF_ADDRESS - 4


def test_a_receiver_with_a_long_name_takes_part() -> None:
    me = Self(ME, "a-name-of-a-host-that-has-as-many-letters-as-a-name-may-have-64 mlx5_0", 8, 1024, True)
    receiver = ObjectReceiver(number(0), me, Random(1), 0.0)
    receiver.hears(Offer(number(0), 0, 0, 1, 1000, 0, "sender"), 0.0)
    (entry,) = receiver.messages(receiver.due)
    sender = ObjectSender(number(0), "sender", 1024, 0.0)
    sender.hears(told(entry, address(1)), address(1), 0.0)
    assert [member.name for member in sender.members] == [me.name[:TEXT]]


def test_as_many_are_turned_away_in_one_turn_as_a_burst_has() -> None:
    sender = ObjectSender(number(0), "sender", 1024, 0.0)
    for end in range(MOST_OF_ADDRESS + BURST + 9):
        sender.hears(ENTER._replace(member=number_at("a", end)), "a", 0.0)
    for byes in (BURST, 0):
        said = [unpacked(one) for one in sender.messages(0.0) if isinstance(one, bytes)]
        assert sum(isinstance(one, Bye) for one in said) == byes


@pytest.mark.parametrize(("room", "part"), [(8, False), (9, True)])
def test_who_comes_late_takes_part_if_it_can_hold_all_that_was_sent(room: int, part: bool) -> None:
    """Since the beginning: the sender still has all of it, because the other one has answered nothing yet."""
    sender = ObjectSender(number(0), "sender", 1024, 1.0)
    sender.hears(ENTER._replace(room=64), address(1), 1.0)
    sender.begin(1.0, all_receivers(), width=1)
    for _ in range(8):
        sender.offer(Sealed(1, 1, bytes(32)))
    sender.messages(1.0)
    assert sender.outgoing is not None
    assert sender.outgoing.sent == 8
    sender.hears(ENTER._replace(member=number(2), room=room), address(2), 1.0)
    assert [member.part for member in sender.members] == [True, part]


def test_the_time_for_which_a_receiver_holds_a_stamp_is_no_part_of_the_round_trip() -> None:
    now, trips = 1.0, list[int]()
    sender = sending(now)
    while not sender.settled:
        said = [unpacked(one) for one in sender.messages(now) if isinstance(one, bytes)]
        for flush in [one for one in said if isinstance(one, Flush)]:
            trips.append(flush.round_trip)
            state = WHOLE if len(trips) == 3 else UNDECIDED
            have = Have(number(0), 0, ME, 0, flush.stamp, 80_000, state, "")
            sender.hears(have, address(1), now + 0.09)
        now = max(now + 0.1, sender.due)
    assert trips == [1000, 10_000, 10_000]


@pytest.mark.parametrize(("strategy", "enough"), [(all_receivers(), 3), (quorum(2), 2)])
def test_a_sender_turns_to_the_answer_that_ends_an_object_and_to_none_before(
    strategy: Strategy, enough: int
) -> None:
    sender, now = sending(1.0, 3, strategy), 1.0
    while sender.due <= now:
        sender.messages(now)
    for end in range(1, 1 + enough):
        assert sender.due > now
        have = Have(number(0), 0, number(end), 0, 1_000_000, 0, WHOLE, "")
        sender.hears(have, address(end), now)
    assert sender.due <= now
    sender.messages(now)
    assert [one.whole for one in sender.settled[0].receivers].count(True) == enough


def test_who_comes_late_to_a_long_object_is_told_of_it_while_it_goes_out() -> None:
    now, blocks = 1.0, 30
    sender = ObjectSender(number(0), "sender", 1024, now, Manners(peer_timeout=5.0, stall=20.0))
    sender.hears(ENTER._replace(room=4096), address(1), now)
    about = sender.begin(now, all_receivers(), width=1)
    said: list[bytes | Run] = []
    while sender.outgoing is not None and sender.outgoing.sent < blocks:
        while sender.room and sender.outgoing.offered < blocks:
            sender.offer(Sealed(1, 1, bytes(32)))
        said += sender.messages(now)
        now += 0.001
    seals = [at for at, one in enumerate(said) if isinstance(one, bytes) and isinstance(unpacked(one), Seal)]
    again = [at for at, one in enumerate(said) if one == packed(about) and at > seals[0]]
    assert {sum(seal < at for seal in seals) for at in again} >= {8, 16, 24}


def test_a_receiver_that_hears_no_admission_is_not_silent() -> None:
    """So it cannot answer, but it goes on asking to take part, which it does at last."""
    now = 1.0
    sender = sending(now)
    while now < 15.0:
        sender.messages(now)
        sender.hears(ENTER, address(1), now)
        now += 0.1
    assert sender.settled == []
    sender.hears(Have(number(0), 0, ME, 1, 0, 0, WHOLE, ""), address(1), now)
    sender.messages(now)
    assert sender.settled[0].strategy_met


def test_a_sender_that_speaks_and_sends_nothing_is_not_waited_for() -> None:
    one = described(2)
    for now in range(0, 70, 5):  # beyond `Self.stall`
        one.hears(Flush(number(0), 0, 2, OPEN, 0, 0, 1, 1000, 1, bytes(32), 0, 0), now)
        one.messages(now)
    assert [(ended.whole, ended.words) for ended in one.ended] == [
        (False, "the sender sent nothing that is missing for 60 s")
    ]


def test_a_seal_that_no_block_can_have_is_counted_and_those_beside_it_hold() -> None:
    one = described(3)
    good = Sealed(1, 1, bytes(Digest(b"x")))
    seal = Seal(number(0), 0, 2, 0, 0, 1, 1000, (good, Sealed(1, 2, bytes(32)), good))
    for _ in range(2):
        one.hears(seal, 0.0)
    for block in range(3):
        assert one.takes(0, block, 0, 1, 0.0) == 1
    assert one.rejected == {"a block that the object cannot have": 2}
    assert [ready.block for ready in one.ready()] == [0, 2]


def test_a_block_that_is_wrong_again_and_again_ends_the_object() -> None:
    one, seal = described(1), Seal(number(0), 0, 0, 0, 0, 1, 1000, (Sealed(1, 1, bytes(32)),))
    one.hears(seal, 0.0)
    for _ in range(TRIES):
        assert one.ended == []
        assert one.takes(0, 0, 0, 1, 0.0) == 1
        assert [ready.block for ready in one.ready()] == [0]
        one.checked(0, False, 0.0)
    assert [(ended.whole, ended.words) for ended in one.ended] == [
        (False, "a block differs from its digest, again and again")
    ]
    assert one.rejected == {"a block that differs from its digest": TRIES}


def test_a_block_that_all_wait_for_has_a_place_though_none_is_free() -> None:
    """Of the blocks that have one, none can give it up: the disk works on them."""
    dropped: list[int] = []

    class Some:
        base = 0

        def __init__(self, number: int, kept: bool) -> None:
            self.number, self._kept = number, kept

        def keeps(self, block: int) -> bool:
            return self._kept

        def drop(self, block: int) -> None:
            dropped.append(block)

    places, one = Places(1), Some(0, True)
    assert [places.opens(one, block) for block in (3, 5, 0)] == [True, False, True]
    assert dropped == []
    places, one = Places(1), Some(0, False)
    assert [places.opens(one, block) for block in (3, 5)] == [True, True]
    assert dropped == [3]


def test_one_object_at_a_time_is_on_its_way() -> None:
    with pytest.raises(ValueError, match=r"^the object before is still on its way$"):
        sending(1.0).begin(1.0, all_receivers(), size=1)


def test_a_receiver_that_leaves_is_not_waited_for() -> None:
    me, you, now = number_at("a", 1), number_at("b", 1), 1.0
    sender = ObjectSender(me, "sender", 1024, now)
    sender.hears(Enter(me, you, 8, 1024, 1, 0, 0, 0, "r"), "b", now)
    sender.begin(now, all_receivers(), size=0)
    sender.end(bytes(Digest()))
    sender.messages(now)
    assert sender.settled == []
    sender.hears(Have(me, 0, you, 0, 0, 0, LEFT, ""), "b", now)
    said = [unpacked(one) for one in sender.messages(now) if isinstance(one, bytes)]
    assert [(one.whole, one.why) for one in sender.settled[0].receivers] == [(False, "left")]
    assert [one.member for one in said if isinstance(one, Bye)] == [you], (
        "the receiver is told that it may go"
    )


def test_a_receiver_that_has_the_object_and_leaves_says_both_at_once() -> None:
    """All that it has said before may be lost."""
    session, now = number(0), 1.0
    one = described(0)
    one.hears(Flush(session, 0, 0, 0, 0, 0, 1, 1000, 1, bytes(Digest()), 0, 0), now)
    (parting,) = one.parting("enough", now)
    sender = ObjectSender(session, "sender", 1024, now)
    sender.hears(Enter(session, number(1), 8, 1024, 1, 0, 0, 0, "r"), "b", now)
    sender.begin(now, all_receivers(), size=0)
    sender.end(bytes(Digest()))
    sender.messages(now)
    sender.hears(unpacked(parting), "b", now)
    sender.messages(now)
    (settled,) = sender.settled
    assert settled.strategy_met
    assert unpacked(parting).words == "enough"  # type: ignore[union-attr]
    assert [(account.whole, account.why) for account in settled.receivers] == [(True, "")]
    assert sender.members.get(number(1)) is not None
    assert not [member for member in sender.members if member.lives], "it takes no part in the next one"


def test_what_is_lost_of_a_later_object_is_asked_for_from_its_beginning() -> None:
    """The first one may have begun before this end has heard of it."""
    session, one = number(0), described(0)
    one.hears(Flush(session, 0, 0, 0, 0, 0, 1, 1000, 1, bytes(Digest()), 0, 0), 0.0)
    one.hears(Describe(session, 1, 2, 1, 1, 0, 0, 0, "next", b""), 0.0)
    one.hears(Seal(session, 1, 1, 0, 0, 1, 1000, (Sealed(1, 1, bytes(32)),) * 2), 0.0)
    said = [unpacked(message) for message in one.messages(1.0)]
    lacks = [spoken for spoken in said if isinstance(spoken, Lack)]
    assert [[want.block for want in lack.wants] for lack in lacks] == [[0, 1]]


def test_an_object_that_has_all_come_is_kept_while_the_disk_is_at_work() -> None:
    """However long that takes, and whatever the sender turns to meanwhile."""
    session, digest = number(0), bytes(Digest(b"x"))
    one = described(1, stores=True)
    assert one.takes(0, 0, 0, 1, 0.0) == 1
    one.hears(Seal(session, 0, 0, 0, 0, 1, 1000, (Sealed(1, 1, digest),)), 0.0)
    one.hears(Flush(session, 0, 1, 1, 0, 0, 1, 1000, 1, digest, 0, 0), 0.0)
    assert len(one.ready()) == 1
    one.checked(0, True, 0.0)
    for now in range(0, 200, 5):  # beyond `Self.stall`
        one.hears(Offer(session, now // 100, 0, 1, 1000, 0, "sender"), now)
        one.messages(now)
    next_ = Describe(session, 1, 0, 1, 1, 0, 0, 0, "next", b"")
    one.hears(next_, 200.0)
    assert one.storable
    one.stored(200.0)
    assert [ended.whole for ended in one.ended] == [True]
    one.hears(next_, 200.0)
    assert one.about == next_


def test_a_promise_is_kept_or_not() -> None:
    assert all_receivers().is_met(Standing(3, 0, 1.0, 0), 0)
    assert not all_receivers().is_met(Standing(3, 0, 1.0, 0), 1)
    assert not quorum(3).is_met(Standing(2, 0, 1.0, 0), 1)
    with pytest.raises(ValueError, match="at least 1"):
        quorum(0)
    with pytest.raises(ValueError, match="at least 0"):
        deadline(float("nan"))


@pytest.mark.parametrize("depth", [256, 512, 1024, 4096])
def test_a_full_window_leaves_no_queue_low(depth: int) -> None:
    """A sender fills the window as a rule, and the answers of the others come on top: nobody is warned."""
    window = Window()
    window.fit(depth)
    assert not LowWater(depth).has_fallen(depth - int(window.room) - 2 * FEW)
