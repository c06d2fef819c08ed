"""The parts of the protocol of objects, one by one."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest
from pyeclib.ec_iface import ECBackendInstanceNotAvailable

from mcast.api import list_rows
from mcast.cast.protocol import fec
from mcast.cast.protocol.backoff import ACK_SPREAD, NackTimer, backoff, spread
from mcast.cast.protocol.blocks import BlockBuffer, Digest, Framer, SourceBlock, keep_freed_memory
from mcast.cast.protocol.carousel import PartialBlocks
from mcast.cast.protocol.fec import parity_segments, restore
from mcast.cast.protocol.incoming import MAX_MISMATCHES
from mcast.cast.protocol.members import MAX_MEMBERS_PER_ADDRESS
from mcast.cast.protocol.packets import (
    COMPLETE,
    DATA_HEADER_SIZE,
    LEFT,
    MAX_PARITY,
    MAX_TEXT,
    PENDING,
    UNKNOWN_BLOCKS,
    Ack,
    BlockInfo,
    Bye,
    Data,
    Describe,
    Flush,
    Join,
    Nack,
    Offer,
    RepairRequest,
    Seal,
    decode,
    decode_from,
    encode,
    number_at,
)
from mcast.cast.protocol.rate import MAX_BURST, SMALL_GROUP, TOLERABLE_LOSS, Rate, Window
from mcast.cast.protocol.receiver import ObjectReceiver, ReceiverConfig
from mcast.cast.protocol.repairs import Repairs, SegmentRange
from mcast.cast.protocol.sender import ObjectSender, Timers
from mcast.cast.protocol.strategy import Strategy, TransferState, all_receivers, best_effort, deadline, quorum
from mcast.endpoint.receiving import LowWater

from .network import LIARS_NUMBER, address, described, joined, number


def test_any_k_segments_decode_the_block() -> None:
    random = Random(5)
    for segments in (1, 2, 17, 128):
        data = [random.randbytes(32) for _ in range(segments)]
        parity = parity_segments(b"".join(data), 32)
        assert len(parity) == MAX_PARITY
        for _ in range(5):
            lost = random.sample(range(segments), random.randint(0, min(segments, MAX_PARITY)))
            rows = random.sample(range(MAX_PARITY), len(lost))
            there = b"".join(bytes(32) if esi in lost else segment for esi, segment in enumerate(data))
            found = restore(there, 32, lost, {row: parity[row] for row in rows})
            assert found == [data[esi] for esi in lost]
        with pytest.raises(ValueError, match="cannot decode"):
            restore(there, 32, [0], {})
    with pytest.raises(ValueError, match=r"^cannot decode a block of 128 source segments from 127 segments$"):
        restore(there, 32, [0, 1], {0: parity[0]})


def test_parity_does_not_depend_on_the_request() -> None:
    """Parity segments computed a few at a time are those computed together."""
    data = Random(1).randbytes(40 * 32)
    parity = parity_segments(data, 32)
    block = SourceBlock(data, 32, 40)
    for first, count in ((0, 2), (2, 1), (3, 4), (7, 25), (1, 1)):
        assert joined_stretches(block, 40 + first, count) == b"".join(parity[first : first + count])
    assert joined_stretches(SourceBlock(data, 32, 40), 39, 3) == data[-32:] + parity[0] + parity[1]


def joined_stretches(block: SourceBlock, first: int, count: int) -> bytes:
    """The segments of these ids."""
    return b"".join(
        memory[begin : begin + number * size]
        for _, number, memory, begin, size in block.stretches(first, count)
    )


def test_answers_are_spread_where_others_answer() -> None:
    random = Random(1)
    assert [spread(random, 1) for _ in range(9)] == [0.0] * 9
    assert len({spread(random, 2) for _ in range(9)}) == 9
    assert all(spread(random, 5) <= 4 * ACK_SPREAD for _ in range(99))


def test_framed_packets_are_headers_and_segments() -> None:
    """Of complete blocks and parts, across batches, with a short segment and with parity."""
    about = Describe(number(0), 0, 3 * 40 * 976 + 100, 976, 40, MAX_PARITY, 0, 0, "", b"")
    data = Random(2).randbytes(3 * 40 * 976 + 100)
    blocks = [SourceBlock(data[at : at + 40 * 976], 976, 40) for at in range(0, len(data), 40 * 976)]
    runs = [
        SegmentRange(0, 0, 40),
        SegmentRange(3, 0, 1),
        SegmentRange(1, 5, 30),
        SegmentRange(1, 40, 3),
        SegmentRange(1, 42, 2),
        *[SegmentRange(2, 0, 40)] * 6,
        SegmentRange(0, 39, 1),
    ]
    made = [
        bytes(row)
        for rows in Framer(DATA_HEADER_SIZE + 976).packets(about, [(blocks[run.block], run) for run in runs])
        for row in list_rows(rows)
    ]
    assert made == [
        encode(Data(about.session, about.object, run.block, esi, blocks[run.block].segment(esi)))
        for run in runs
        for esi in range(run.first, run.first + run.segments)
    ]


def test_keep_freed_memory_acts_once() -> None:
    keep_freed_memory()
    tracemalloc.start()
    try:
        keep_freed_memory()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_block_that_differs_is_no_block() -> None:
    block = SourceBlock(Random(1).randbytes(100), 32, 4)
    segments = {esi: block.segment(esi) for esi in (0, 2, 3, 4)}
    assert joined(block.info, segments, 32, 4) == Random(1).randbytes(100)
    segments[4] = bytes(32)
    assert joined(block.info, segments, 32, 4) is None
    assert joined(block.info, {0: bytes(33)}, 32, 4) is None, "too few"


def test_a_long_segment_does_not_touch_others() -> None:
    data = Random(1).randbytes(100)
    block = SourceBlock(data, 32, 4)
    honest = {esi: block.segment(esi) for esi in range(4)}
    for esi in range(3, -1, -1):  # each long segment arrives after its neighbour
        long = {**{other: honest[other] for other in honest if other != esi}, esi: data * 2}
        memory = bytearray(100)
        found = BlockBuffer(memoryview(memory), 32, 4)
        for at, one in long.items():
            found.put(at, one)
        found.put(esi, honest[esi])
        whole = found.assemble(block.info, 0b1111)
        assert whole is not None
        assert bytes(whole) == data == memory


@pytest.mark.parametrize(("first", "count"), [(0, 4), (1, 3), (2, 5), (4, 2), (3, 1)])
@pytest.mark.parametrize("gap", [0, 7])
@pytest.mark.parametrize("size", [100, 60, 1])
def test_put_run_equals_put_of_each(first: int, count: int, gap: int, size: int) -> None:
    """Also for segments beyond the end of the block, and for parity."""
    random = Random(3)
    row = [random.randbytes(32) for _ in range(count)]
    memory = memoryview(b"head" + random.randbytes(gap).join(row))
    together, alone = bytearray(size), bytearray(size)
    of_all, of_each = BlockBuffer(memoryview(together), 32, 4), BlockBuffer(memoryview(alone), 32, 4)
    of_all.put_run(first, count, memory, 4, 32 + gap, 32)
    for esi, one in enumerate(row, first):
        of_each.put(esi, one)
    assert together == alone
    assert of_all.parity == of_each.parity


@pytest.mark.parametrize("members", [1, 10, 1000])
def test_few_receivers_back_off_shortly(members: int) -> None:
    """In a group of any size, few send a NACK before the others can receive the first one."""
    random = Random(3)
    for _ in range(20):
        waits = sorted(backoff(random, 4.0, members) for _ in range(members))
        assert 0 <= waits[0] <= waits[-1] <= 4.0
        assert sum(wait < waits[0] + 1.0 for wait in waits) <= 40


def test_an_equal_request_suppresses() -> None:
    timer = NackTimer(Random(1))
    timer.start(0.0, 0.001, 10)
    timer.on_nack(RepairRequest(1, 2, 0b11), 0.0, 0.001, 10)
    mine = [
        RepairRequest(1, 1, 0b100),
        RepairRequest(1, 2, 0b1100),
        RepairRequest(1, 3, 0b11),
        RepairRequest(1, 3, 0b111),
        RepairRequest(2, 1, 1),
    ]
    assert timer.requests(mine, 0.001, 0.001, 10, 9) == (mine[3], mine[4])
    assert timer.requests(mine, 1.0, 0.001, 10, 2) == (mine[0], mine[1]), "old NACKs of others are forgotten"


def test_forged_nacks_suppress_a_few_times_only() -> None:
    receiver, now, asked = described(4), 1.0, list[tuple[RepairRequest, ...]]()
    all_sent = Flush(number(0), 0, 4, 4, 0, 1, 1, 1000, 1, bytes(32), 0, 0)
    receiver.on_packet(all_sent, now)
    requests = tuple(RepairRequest(block, 1, 1) for block in range(4))
    while not asked:
        now += 0.001
        receiver.on_packet(Nack(number(0), 0, LIARS_NUMBER, 0, 0, 0, requests), now)
        receiver.on_packet(all_sent, now)
        asked += [one.requests for one in map(decode, receiver.messages(now)) if isinstance(one, Nack)]
        assert now < 2.0
    assert asked == [requests]
    assert now > 1.01  # usually the NACKs of others are genuine, and suppress


def test_a_library_without_isa_l_computes_no_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(segments: int, parity: int) -> None:
        raise ECBackendInstanceNotAvailable("Backend instance not found")

    assert fec.available.__wrapped__()
    monkeypatch.setattr(fec, "_code", fails)
    assert not fec.available.__wrapped__()


def test_one_parity_segment_repairs_different_losses() -> None:
    repairs = Repairs(8, 4)
    assert [repairs.request(RepairRequest(0, 1, 1 << esi), 0, 1.0) for esi in range(5)] == [1, 0, 0, 0, 0]
    assert repairs.take() == ([SegmentRange(0, 8, 1)], [])


def test_repairs_under_way_are_not_sent_again() -> None:
    repairs = Repairs(8, 4)
    repairs.request(RepairRequest(0, 1, 1), 0, 1.0)
    repairs.take()
    repairs.mark_sent(100)
    assert repairs.request(RepairRequest(0, 1, 2), 99, 1.0) == 0
    assert repairs.request(RepairRequest(0, 1, 2), 100, 1.0) == 1
    assert repairs.take() == ([SegmentRange(0, 9, 1)], [])


def test_source_segments_repeat_if_parity_is_used_up() -> None:
    repairs = Repairs(8, 1)
    repairs.request(RepairRequest(0, 3, 0b1011), 0, 1.0)
    assert repairs.take() == ([SegmentRange(0, 0, 2), SegmentRange(0, 3, 1)], [])
    repairs.request(RepairRequest(0, 0, 0b100), 100, 1.0)
    repairs.request(RepairRequest(5, 0, 0), 100, 1.0)
    assert repairs.take() == ([SegmentRange(0, 2, 1)], [5])


def test_repairs_not_sent_yet_are_not_repeated() -> None:
    repairs = Repairs(8, 4)
    repairs.request(RepairRequest(0, 1, 1), 0, 1.0)
    repairs.take()
    assert repairs.request(RepairRequest(0, 1, 2), 150, 1.0) == 0, "the rate holds it back"
    repairs.mark_sent(200)
    assert repairs.request(RepairRequest(0, 1, 2), 150, 1.0) == 0, "under way"
    assert repairs.request(RepairRequest(0, 1, 2), 200, 1.0) == 1


def test_a_segment_is_charged_once() -> None:
    repairs = Repairs(8, 2)
    assert repairs.request(RepairRequest(0, 3, 0b111), 0, 1.0) == 3, "more than there is parity for"
    assert repairs.request(RepairRequest(0, 2, 0b11000), 0, 1.0) == 2
    assert repairs.take() == ([SegmentRange(0, 8, 2), SegmentRange(0, 0, 3)], []), "both receivers are served"


def test_repairs_that_are_lost_are_losses() -> None:
    repairs = Repairs(8, 2)
    asked = [RepairRequest(0, 1, 1), RepairRequest(1, 3, 0b111), RepairRequest(2, 2, 0b11)]
    for request in asked:
        repairs.request(request, 0, 1.0)
    repairs.take()
    assert repairs.sent(0, 500) == 0, "not sent yet"
    repairs.mark_sent(100)
    assert (repairs.sent(0, 99), repairs.sent(0, 100), repairs.sent(100, 500)) == (0, 6, 0)
    assert [repairs.lost(request, 0, 100) for request in asked] == [1, 3, 2]
    assert [repairs.lost(request, 0, 99) for request in asked] == [0, 0, 0], "under way"
    assert [repairs.lost(request, 100, 500) for request in asked] == [0, 0, 0], "judged before"
    assert repairs.lost(RepairRequest(2, 1, 0b1000), 0, 100) == 1
    assert repairs.lost(RepairRequest(3, 1, 1), 0, 100) == 0, "nobody repaired that block"


def test_the_pace_follows_what_arrives_and_recovers() -> None:
    rate, now = Rate(), 0.0
    assert rate.pace == float("inf")
    for loss, slower in ((TOLERABLE_LOSS / 2, False), (0.5, True)):
        for _ in range(5):
            now += 0.001
            rate.spent(100)
            rate.lost(loss)
            rate.adapt(now, 0.001)
        assert (rate.pace < 60_000) is slower
    for _ in range(200):
        now += 0.005
        rate.spent(max(1, rate.allowed(now)))
        rate.adapt(now, 0.001)
    assert rate.pace > 60_000


def test_a_pause_tells_nothing_of_the_pace() -> None:
    rate = Rate()
    rate.adapt(0.0, 0.001)
    rate.spent(1000)
    rate.adapt(1.0, 0.001)
    rate.adapt(2.0, 0.001)
    rate.lost(0.5)
    rate.adapt(3.0, 0.001)
    assert 400 < rate.pace < 500, "the loss is of what was sent before the pause"
    for second in range(4, 1000):
        rate.adapt(second, 0.001)
    assert 400 < rate.pace < 500, "an idle sender learns nothing of the receivers"
    for second in range(1000, 1100):
        rate.spent(10)
        rate.adapt(second, 0.001)
    assert 400 < rate.pace < 500, "nor one that sends little"


def test_a_paced_sender_sends_bursts() -> None:
    """Else each message would cost all ends a step."""
    rate, now, steps, sent = Rate(limit=1000.0), 0.0, 0, 0
    rate.allowed(now)
    while (now := rate.next(now)) < 10.0:
        steps += 1
        sent += (allowed := rate.allowed(now))
        rate.spent(allowed)
    assert 9900 <= sent <= 10_000
    assert steps <= 1001


def test_an_unanswered_flush_is_repeated() -> None:
    """The window waits for the receiver for some pauses, and then ignores it."""
    window = Window()
    window.set_queue(100)
    window.spent(75)
    window.flushed(5, {1, 2})
    window.answered(1, 5)
    assert window.to_flush(0.0, 0.25) == set()
    asked = [{*window.to_flush(step / 4, 0.25)} for step in range(1, 13)]
    assert asked == [{2}] * 11 + [set()]
    assert window.credit == 75


def test_a_flush_does_not_change_the_pace() -> None:
    rate, now = Rate(), 0.0
    for messages in [500] * 20 + [1, 2, 1]:  # losses are reported when little is left to send
        rate.adapt(now, 0.001)
        rate.spent(messages)
        now += 0.005
    rate.adapt(now, 0.001)
    rate.lost(0.2)
    rate.adapt(now + 0.005, 0.001)
    assert 40_000 < rate.pace < 80_000


def test_a_limit_is_kept() -> None:
    rate, sent = Rate(limit=1000.0), 0
    for step in range(1000):
        allowed = rate.allowed(step / 1000)
        rate.spent(allowed)
        sent += allowed
        rate.adapt(step / 1000, 0.001)
    assert 900 <= sent <= 1010


def test_next_is_when_a_message_is_allowed() -> None:
    rate = Rate(limit=10.0)
    assert (rate.allowed(0.0), rate.next(0.0)) == (0, 0.1)
    assert (rate.allowed(0.1), rate.next(0.1)) == (1, 0.1)
    rate.spent(1)
    assert rate.allowed(0.15) == 0
    assert rate.next(0.15) == pytest.approx(0.2)
    free = Rate()
    assert free.next(7.0) == 7.0


def test_a_slowed_sender_stays_within_its_limit() -> None:
    rate = Rate(limit=10.0)
    rate.adapt(0.0, 0.01)
    rate.lost(0.5)
    rate.adapt(1.0, 0.01)
    assert rate.pace <= 10.0


@pytest.mark.parametrize(
    ("strategy", "state", "done"),
    [
        (all_receivers(), TransferState(5, 1, 1e9, 100), False),
        (all_receivers(), TransferState(5, 0, 0.0, 0), True),
        (quorum(2), TransferState(1, 4, 1e9, 9), False),
        (quorum(2), TransferState(2, 3, 0.0, 0), True),
        (deadline(5), TransferState(0, 3, 4.9, 9), False),
        (deadline(5), TransferState(0, 3, 5.0, 0), True),
        (best_effort(), TransferState(1, 3, 1.0, 1), False),
        (best_effort(), TransferState(1, 3, 1.0, 2), True),
    ],
)
def test_a_strategy_says_when_to_go_on(strategy: Strategy, state: TransferState, done: bool) -> None:
    assert strategy.is_done(state) is done


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
JOIN = Join(number(0), ME, 8, 1024, 1, 0, 0, 0, "r")


def sending(now: float, receivers: int = 1, strategy: Strategy | None = None) -> ObjectSender:
    """Return a sender with receivers that have joined, and an object of one byte, which it may send."""
    sender = ObjectSender(number(0), "sender", 1024, now, Timers(peer_timeout=5.0, stall=20.0))
    for end in range(1, 1 + receivers):
        sender.on_packet(JOIN._replace(member=number(end)), address(end), now)
    sender.begin(now, strategy or all_receivers(), size=1, k=1)
    sender.offer(BlockInfo(1, 1, bytes(32)))
    sender.end(bytes(32))
    return sender


@pytest.mark.parametrize("sends_nack", [False, True])
def test_a_receiver_without_progress_is_given_up(sends_nack: bool) -> None:
    """It answers each time that it has nothing, or requests the same again."""
    now, answers = 1.0, 0
    sender = sending(now)
    while not sender.results:
        assert now < 100.0
        packets = [decode(one) for one in sender.messages(now) if isinstance(one, bytes)]
        for flush in [one for one in packets if isinstance(one, Flush)]:
            nack = Nack(number(0), 0, ME, 0, flush.stamp, 0, (RepairRequest(0, 1, 1),))
            ack = Ack(number(0), 0, ME, 0, flush.stamp, 0, PENDING, "")
            sender.on_packet(nack if sends_nack else ack, address(1), now)
            answers += 1
        now = max(now + 0.05, sender.due)
    assert [(one.complete, one.reason) for one in sender.results[0].receivers] == [
        (False, "made no progress")
    ]
    assert answers > 10


@pytest.mark.parametrize(
    "refused", [RepairRequest(1, 1, 1), RepairRequest(0, 1, 0b10)], ids=["block", "segment"]
)
def test_requests_for_unsent_segments_are_rejected(refused: RepairRequest) -> None:
    sender = sending(1.0)
    sender.messages(1.0)
    sender.on_packet(Nack(number(0), 0, ME, 0, 1, 0, (refused,)), address(1), 1.0)
    assert sender.rejected == {"a request for segments that were not sent": 1}


def test_receivers_of_one_address_are_bounded() -> None:
    """One more gets a BYE with the reason; receivers of other addresses join."""
    sender = ObjectSender(number(0), "sender", 1024, 0.0)
    many = [(number_at("a", end), "a") for end in range(MAX_MEMBERS_PER_ADDRESS + 1)]
    for end, where in [*many, (number_at("b", 0), "b")]:
        sender.on_packet(Join(number(0), end, 8, 1024, 1, 0, 0, 0, "r"), where, 0.0)
    packets = [decode(one) for one in sender.messages(0.0) if isinstance(one, bytes)]
    byes = [(one.member, one.reason) for one in packets if isinstance(one, Bye)]
    assert byes == [(many[-1][0], "session full: at most 8192 receivers, 64 per address")]
    assert [member.address for member in sender.members] == ["a"] * MAX_MEMBERS_PER_ADDRESS + ["b"]
    assert sender.members.bits(lambda one: one.address == "b") == 1 << MAX_MEMBERS_PER_ADDRESS
    for _ in range(2):
        sender.on_packet(Ack(number(0), 0, many[-1][0], 0, 0, 0, PENDING, ""), "a", 0.0)
    assert sender.rejected == {"not a receiver of this session": 2}


def test_a_departed_receiver_makes_room() -> None:
    sender = ObjectSender(number(0), "sender", 1024, 0.0)
    numbers = [number_at("a", end) for end in range(MAX_MEMBERS_PER_ADDRESS + 2)]
    *many, other, last = numbers

    def enters(end: int) -> None:
        sender.on_packet(JOIN._replace(member=end), "a", 0.0)

    for end in many:
        enters(end)
    sender.begin(0.0, all_receivers(), 1)
    for end in many[3:9]:
        sender.on_packet(Ack(number(0), 0, end, 0, 0, 0, LEFT, ""), "a", 0.0)
    enters(other)
    assert other not in [member.number for member in sender.members]  # else others could replace it at once
    sender.abandon(0.0)
    assert len(sender.results[0].receivers) == MAX_MEMBERS_PER_ADDRESS
    enters(other)
    enters(last)
    here = [(member.number, member.index) for member in sender.members]
    assert here[-2:] == [(other, 3), (last, 4)]
    assert sorted(index for _, index in here) == [*range(MAX_MEMBERS_PER_ADDRESS)]
    sender.begin(0.0, all_receivers(), 1)
    assert (
        sum(member.in_object for member in sender.members)
        == sender.members.pending
        == MAX_MEMBERS_PER_ADDRESS - 4
    )


def test_a_receiver_with_a_long_name_takes_part() -> None:
    me = ReceiverConfig(
        ME, "a-name-of-a-host-that-has-as-many-letters-as-a-name-may-have-64 mlx5_0", 8, 1024, True
    )
    receiver = ObjectReceiver(number(0), me, Random(1), 0.0)
    receiver.on_packet(Offer(number(0), 0, 0, 1, 1000, 0, "sender"), 0.0)
    (entry,) = receiver.messages(receiver.due)
    sender = ObjectSender(number(0), "sender", 1024, 0.0)
    sender.on_packet(decode_from(entry, address(1)), address(1), 0.0)
    assert [member.name for member in sender.members] == [me.name[: MAX_TEXT - 3] + "..."]


def test_byes_of_a_step_are_bounded() -> None:
    """A flood of JOINs beyond the maximum gets at most MAX_BURST BYEs in a step."""
    sender = ObjectSender(number(0), "sender", 1024, 0.0)
    for end in range(MAX_MEMBERS_PER_ADDRESS + MAX_BURST + 9):
        sender.on_packet(JOIN._replace(member=number_at("a", end)), "a", 0.0)
    for byes in (MAX_BURST, 0):
        packets = [decode(one) for one in sender.messages(0.0) if isinstance(one, bytes)]
        assert sum(isinstance(one, Bye) for one in packets) == byes


@pytest.mark.parametrize(("window", "part"), [(8, False), (9, True)])
def test_a_late_receiver_with_a_large_window(window: int, part: bool) -> None:
    """It takes part from the first block on, which the sender still has: the other one has not answered."""
    sender = ObjectSender(number(0), "sender", 1024, 1.0)
    sender.on_packet(JOIN._replace(window=64), address(1), 1.0)
    sender.begin(1.0, all_receivers(), k=1)
    for _ in range(8):
        sender.offer(BlockInfo(1, 1, bytes(32)))
    sender.messages(1.0)
    assert sender.outgoing is not None
    assert sender.outgoing.sent == 8
    sender.on_packet(JOIN._replace(member=number(2), window=window), address(2), 1.0)
    assert [member.in_object for member in sender.members] == [True, part]


def test_hold_time_is_not_in_the_round_trip() -> None:
    """The hold time of a stamp at a receiver is subtracted from the measurement."""
    now, trips = 1.0, list[int]()
    sender = sending(now)
    while not sender.results:
        packets = [decode(one) for one in sender.messages(now) if isinstance(one, bytes)]
        for flush in [one for one in packets if isinstance(one, Flush)]:
            trips.append(flush.round_trip)
            state = COMPLETE if len(trips) == 3 else PENDING
            ack = Ack(number(0), 0, ME, 0, flush.stamp, 80_000, state, "")
            sender.on_packet(ack, address(1), now + 0.09)
        now = max(now + 0.1, sender.due)
    assert trips == [1000, 10_000, 10_000]


@pytest.mark.parametrize(("strategy", "enough"), [(all_receivers(), 3), (quorum(2), 2)])
def test_only_the_last_ack_checks_for_the_end(strategy: Strategy, enough: int) -> None:
    """Earlier ones do not make the sender due."""
    sender, now = sending(1.0, 3, strategy), 1.0
    while sender.due <= now:
        sender.messages(now)
    for end in range(1, 1 + enough):
        assert sender.due > now
        ack = Ack(number(0), 0, number(end), 0, 1_000_000, 0, COMPLETE, "")
        sender.on_packet(ack, address(end), now)
    assert sender.due <= now
    sender.messages(now)
    assert [one.complete for one in sender.results[0].receivers].count(True) == enough


def test_describe_is_repeated_in_a_long_object() -> None:
    """A late receiver gets the description while the segments are sent."""
    now, blocks = 1.0, 30
    sender = ObjectSender(number(0), "sender", 1024, now, Timers(peer_timeout=5.0, stall=20.0))
    sender.on_packet(JOIN._replace(window=4096), address(1), now)
    about = sender.begin(now, all_receivers(), k=1)
    packets: list[bytes | SegmentRange] = []
    while sender.outgoing is not None and sender.outgoing.sent < blocks:
        while sender.blocks_wanted and sender.outgoing.offered < blocks:
            sender.offer(BlockInfo(1, 1, bytes(32)))
        packets += sender.messages(now)
        now += 0.001
    again = [at for at, one in enumerate(packets) if one == encode(about)]
    assert {sum(isinstance(one, SegmentRange) for one in packets[:at]) for at in again} >= {8, 16, 24}


def test_a_receiver_without_admit_is_not_silent() -> None:
    """It cannot answer, but it repeats its JOIN, and takes part at last."""
    now = 1.0
    sender = sending(now)
    while now < 15.0:
        sender.messages(now)
        sender.on_packet(JOIN, address(1), now)
        now += 0.1
    assert sender.results == []
    sender.on_packet(Ack(number(0), 0, ME, 1, 0, 0, COMPLETE, ""), address(1), now)
    sender.messages(now)
    assert sender.results[0].strategy_met


@pytest.mark.parametrize(
    ("segments", "reason"),
    [
        (0, "no segment arrived, only shorter messages, for 60 s"),  # as if the MTU of a link were smaller
        (1, "the sender sent no missing segment for 60 s"),
    ],
)
def test_a_sender_without_segments_is_given_up(segments: int, reason: str) -> None:
    """It is heard for `stall` seconds."""
    one = described(2)
    if segments:
        assert one.incoming is not None
        one.incoming.add_segments(0, 1, 1)
    for now in range(0, 70, 5):  # beyond `ReceiverConfig.stall`
        one.on_packet(Flush(number(0), 0, 2, UNKNOWN_BLOCKS, 0, 0, 1, 1000, 1, bytes(32), 0, 0), now)
        one.messages(now)
    assert [(ended.complete, ended.reason) for ended in one.ended] == [(False, reason)]


def test_a_rejected_prefix_does_not_wake_forever() -> None:
    """A stored block differs, and the sender does not send it any more: the object ends at once.

    The timer of a NACK stayed in the past until the next SEAL.
    """
    one = described(4)
    one.resume(2, 0.0)
    info = BlockInfo(1, 1, bytes(Digest(b"x")))
    one.on_packet(Flush(number(0), 0, 4, UNKNOWN_BLOCKS, 2, 0, 1, 1000, 0, bytes(32), 0, 0), 0.0)
    one.on_packet(Seal(number(0), 0, 0, 2, 0, 1, 1000, (info,)), 0.0)
    assert [ready.block for ready in one.take_ready()] == [0]
    assert one.due < 1.0
    assert one._nack_timer.due is not None
    one.checked(0, False, 0.0)
    while (now := one.due) < 1.0:
        one.messages(now)
        assert one.due > now
    assert [ended.reason for ended in one.ended] == [
        "left behind: this receiver joined too late for the object"
    ]


def test_an_impossible_seal_is_rejected() -> None:
    """It is counted, and the other blocks in the packet are used."""
    one = described(3)
    good = BlockInfo(1, 1, bytes(Digest(b"x")))
    seal = Seal(number(0), 0, 2, 0, 0, 1, 1000, (good, BlockInfo(1, 2, bytes(32)), good))
    for _ in range(2):
        one.on_packet(seal, 0.0)
    for block in range(3):
        assert one.on_data(0, block, 1, 1, 0.0) == 1
    assert one.rejected == {"a block that the object cannot have": 2}
    assert [ready.block for ready in one.take_ready()] == [0, 2]


def test_a_block_that_stays_wrong_fails_the_object() -> None:
    one, seal = described(1), Seal(number(0), 0, 0, 0, 0, 1, 1000, (BlockInfo(1, 1, bytes(32)),))
    one.on_packet(seal, 0.0)
    for _ in range(MAX_MISMATCHES):
        assert one.ended == []
        assert one.on_data(0, 0, 1, 1, 0.0) == 1
        assert [ready.block for ready in one.take_ready()] == [0]
        one.checked(0, False, 0.0)
    assert [(ended.complete, ended.reason) for ended in one.ended] == [
        (False, f"a block differed from its digest {MAX_MISMATCHES} times")
    ]
    assert one.rejected == {"a block that differs from its digest": MAX_MISMATCHES}


def test_the_first_missing_block_always_has_room() -> None:
    """None of the other blocks can be dropped, because the driver verifies them."""
    dropped: list[int] = []

    class Some:
        base = 0

        def __init__(self, number: int, verifying: bool) -> None:
            self.number, self._verifying = number, verifying

        def is_verifying(self, block: int) -> bool:
            return self._verifying

        def drop(self, block: int) -> None:
            dropped.append(block)

    blocks, one = PartialBlocks(1), Some(0, True)
    assert [blocks.add(one, block) for block in (3, 5, 0)] == [True, False, True]
    assert dropped == []
    blocks, one = PartialBlocks(1), Some(0, False)
    assert [blocks.add(one, block) for block in (3, 5)] == [True, True]
    assert dropped == [3]


def test_one_object_is_sent_at_a_time() -> None:
    with pytest.raises(
        ValueError, match=r"^the previous object is still being sent: wait for its result, or abandon it$"
    ):
        sending(1.0).begin(1.0, all_receivers(), size=1)


def test_a_receiver_that_leaves_is_not_waited_for() -> None:
    me, you, now = number_at("a", 1), number_at("b", 1), 1.0
    sender = ObjectSender(me, "sender", 1024, now)
    sender.on_packet(Join(me, you, 8, 1024, 1, 0, 0, 0, "r"), "b", now)
    sender.begin(now, all_receivers(), size=0)
    sender.end(bytes(Digest()))
    sender.messages(now)
    assert sender.results == []
    sender.on_packet(Ack(me, 0, you, 0, 0, 0, LEFT, ""), "b", now)
    packets = [decode(one) for one in sender.messages(now) if isinstance(one, bytes)]
    assert [(one.complete, one.reason) for one in sender.results[0].receivers] == [(False, "left")]
    assert [one.member for one in packets if isinstance(one, Bye)] == [you], "the receiver may stop"


def test_a_complete_receiver_leaves_in_one_ack() -> None:
    """All of its earlier packets may be lost."""
    session, now = number(0), 1.0
    one = described(0)
    one.on_packet(Flush(session, 0, 0, 0, 0, 0, 1, 1000, 1, bytes(Digest()), 0, 0), now)
    (parting,) = one.leave_packets("enough", now)
    sender = ObjectSender(session, "sender", 1024, now)
    sender.on_packet(Join(session, number(1), 8, 1024, 1, 0, 0, 0, "r"), "b", now)
    sender.begin(now, all_receivers(), size=0)
    sender.end(bytes(Digest()))
    sender.messages(now)
    sender.on_packet(decode(parting), "b", now)
    sender.messages(now)
    (result,) = sender.results
    assert result.strategy_met
    assert decode(parting).reason == "enough"  # type: ignore[union-attr]
    assert [(report.complete, report.reason) for report in result.receivers] == [(True, "")]
    assert sender.members.get(number(1)) is not None
    assert not [member for member in sender.members if member.active], "it takes no part in the next one"


def test_a_later_object_is_requested_from_block_0() -> None:
    """The first object may have begun before the receiver joined; a later one has not."""
    session, one = number(0), described(0)
    one.on_packet(Flush(session, 0, 0, 0, 0, 0, 1, 1000, 1, bytes(Digest()), 0, 0), 0.0)
    one.on_packet(Describe(session, 1, 2, 1, 1, 0, 0, 0, "next", b""), 0.0)
    one.on_packet(Seal(session, 1, 1, 0, 0, 1, 1000, (BlockInfo(1, 1, bytes(32)),) * 2), 0.0)
    packets = [decode(message) for message in one.messages(1.0)]
    nacks = [packet for packet in packets if isinstance(packet, Nack)]
    assert [[request.block for request in nack.requests] for nack in nacks] == [[0, 1]]


def test_a_storable_object_waits_for_the_disk() -> None:
    """For any time, and although the sender goes on to the next object."""
    session, digest = number(0), bytes(Digest(b"x"))
    one = described(1, stores=True)
    assert one.on_data(0, 0, 1, 1, 0.0) == 1
    one.on_packet(Seal(session, 0, 0, 0, 0, 1, 1000, (BlockInfo(1, 1, digest),)), 0.0)
    one.on_packet(Flush(session, 0, 1, 1, 0, 0, 1, 1000, 1, digest, 0, 0), 0.0)
    assert len(one.take_ready()) == 1
    one.checked(0, True, 0.0)
    for now in range(0, 200, 5):  # beyond `ReceiverConfig.stall`
        one.on_packet(Offer(session, now // 100, 0, 1, 1000, 0, "sender"), now)
        one.messages(now)
    next_ = Describe(session, 1, 0, 1, 1, 0, 0, 0, "next", b"")
    one.on_packet(next_, 200.0)
    assert one.ready_to_store
    one.stored(200.0)
    assert [ended.complete for ended in one.ended] == [True]
    one.on_packet(next_, 200.0)
    assert one.about == next_


def test_a_promise_is_kept_or_not() -> None:
    assert all_receivers().is_met(TransferState(3, 0, 1.0, 0), 0)
    assert not all_receivers().is_met(TransferState(3, 0, 1.0, 0), 1)
    assert not quorum(3).is_met(TransferState(2, 0, 1.0, 0), 1)
    with pytest.raises(ValueError, match="at least 1"):
        quorum(0)
    with pytest.raises(ValueError, match="at least 0"):
        deadline(float("nan"))


@pytest.mark.parametrize("depth", [256, 512, 1024, 4096])
def test_a_full_window_leaves_the_queue_a_reserve(depth: int) -> None:
    """A sender usually fills the window, and ACKs of other receivers are in the queue: no warning is due."""
    window = Window()
    window.set_queue(depth)
    assert not LowWater(depth).has_fallen(depth - int(window.credit) - 2 * SMALL_GROUP)
