"""The sequence header: what it counts, against a plain model, and what it makes of hostile bytes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mcast import Endpoint, Gid, Membership, Sender, open_endpoint
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults import Drop, Duplicate, Messages, Reorder
from mcast.endpoint.sequence import (
    HEADER_SIZE,
    MAX_JUMP,
    MAX_STREAMS,
    RESTART_AFTER,
    WINDOW,
    Refusal,
    SequenceHeader,
    Sources,
    Stream,
    pack,
    parse,
)

HERE, THERE = Gid("::ffff:10.0.0.1"), Gid("::ffff:10.0.0.2")
NUMBERS = st.integers(0, (1 << 64) - 1)
GROUP = "239.1.2.3"


# --- the header ----------------------------------------------------------------------------------


@given(stream=NUMBERS, number=NUMBERS, payload=st.binary(max_size=64))
def test_what_is_packed_is_parsed(stream: int, number: int, payload: bytes) -> None:
    assert parse(memoryview(pack(stream, number) + payload)) == SequenceHeader(stream, number)


@given(payload=st.binary(max_size=128))
def test_random_bytes_are_refused_with_a_reason(payload: bytes) -> None:
    # The four bytes of magic make a hit by chance as good as impossible.
    expected = Refusal.SHORT if len(payload) < HEADER_SIZE else Refusal.MAGIC
    assert parse(memoryview(payload)) is expected
    sources = Sources()
    assert sources.take(HERE, 1, memoryview(payload)) is expected
    assert len(sources) == 0


@given(place=st.integers(0, 7), value=st.integers(1, 255))
def test_a_flipped_byte_before_the_numbers_is_refused(place: int, value: int) -> None:
    header = bytearray(pack(1, 2))
    header[place] ^= value
    assert parse(memoryview(header)) is (Refusal.MAGIC if place < 4 else Refusal.VERSION)


# --- the counts ----------------------------------------------------------------------------------


class Model:
    """Model that counts from a set of all numbers seen."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.counts: Counter[str] = Counter()

    def take(self, number: int) -> Refusal | tuple[range, ...]:
        missing = range(0)
        if not self.seen:
            self.first = self.highest = number
        elif number > self.highest:
            missing = range(self.highest + 1, number)
            self.highest = number
        elif number in self.seen:
            self.counts["duplicates"] += 1
            return Refusal.DUPLICATE
        else:
            self.counts["late"] += 1
        self.seen.add(number)
        return (missing,) if missing else ()

    @property
    def gaps(self) -> int:
        inside = sum(number >= self.first for number in self.seen)
        return self.highest - self.first + 1 - inside


STEPS = st.one_of(st.integers(-5, 5), st.integers(1 - WINDOW, WINDOW))


@given(first=st.sampled_from([0, 5, 1 << 40]), steps=st.lists(STEPS, max_size=60))
def test_a_stream_counts_as_the_model_does(first: int, steps: list[int]) -> None:
    model, stream, number = Model(), Stream(first), first
    assert model.take(first) == ()
    for step in steps:
        number = max(0, number + step, model.highest - WINDOW + 1)
        assert stream.take(number) == model.take(number)
    assert stream.received == len(model.seen)
    assert stream.gaps == model.gaps
    assert (stream.late, stream.duplicates) == (model.counts["late"], model.counts["duplicates"])


@pytest.mark.parametrize("jump", [WINDOW + 1, MAX_JUMP - 2])
def test_large_gap_is_counted_when_confirmed(jump: int) -> None:
    """A loss of one large gap is counted once the stream goes on."""
    stream = Stream(0)
    assert [stream.take(jump), stream.gaps] == [(), 0]
    assert stream.take(jump) is Refusal.DUPLICATE
    gaps = range(1, jump), range(jump + 1, jump + 2)
    assert [stream.take(jump + 2), stream.gaps] == [gaps, jump]
    assert [stream.take(jump + 1), stream.gaps, stream.late] == [(), jump - 1, 1]
    assert [stream.take(jump + number) for number in range(3)] == [Refusal.DUPLICATE] * 3


@pytest.mark.parametrize("jump", [WINDOW + 2, MAX_JUMP])
def test_reordering_behind_a_gap_is_counted_once(jump: int) -> None:
    """Two that changed places behind a large gap are counted once."""
    stream = Stream(0)
    assert [stream.take(jump), stream.take(jump - 1)] == [(), (range(1, jump - 1),)]
    assert [stream.gaps, stream.late, stream.received] == [jump - 2, 1, 3]
    assert [stream.take(jump), stream.take(jump - 1)] == [Refusal.DUPLICATE] * 2
    assert [stream.take(jump + 1), stream.gaps] == [(), jump - 2]


@given(
    lies=st.lists(st.tuples(st.integers(0, 99), NUMBERS), max_size=4),
    first=st.sampled_from([0, 1 << 40, (1 << 64) - 200]),
)
def test_a_forged_number_costs_no_honest_message(lies: list[tuple[int, int]], first: int) -> None:
    """Even from one who forges GID and queue pair, if no two of the lies follow each other."""
    at = {place: number for place, number in lies if abs(number - first) > 2 * WINDOW}
    numbers = sorted(at.values())
    assume(all(later - earlier > WINDOW for earlier, later in pairwise(numbers)))
    stream = Stream(first)
    for place in range(100):
        if place in at:
            stream.take(at[place])
        assert stream.take(first + 1 + place) == ()
    assert stream.gaps == 0


@pytest.mark.parametrize("lie", [MAX_JUMP, 10 * MAX_JUMP, 5 * WINDOW])
def test_a_stream_that_was_led_astray_comes_back(lie: int) -> None:
    stream = Stream(10 * WINDOW)
    for number in range(2 * RESTART_AFTER):
        stream.take(10 * WINDOW + lie + number)
    taken = [stream.take(10 * WINDOW + 1 + number) for number in range(100)]
    assert taken == [Refusal.OLD] * (RESTART_AFTER - 1) + [()] * (101 - RESTART_AFTER)


def test_streams_sources_and_qps_are_distinct() -> None:
    """Streams sources and queue pairs are told apart."""
    sources = Sources()
    streams = [(HERE, 1, 7), (HERE, 1, 8), (HERE, 2, 9), (THERE, 1, 7)]
    for source, qp_num, stream in streams:
        assert sources.take(source, qp_num, memoryview(pack(stream, 100))) == (stream, 100, ())
        shown = stream, 102, (range(101, 102),)
        assert sources.take(source, qp_num, memoryview(pack(stream, 102))) == shown
    found = sources.snapshot()
    assert [(one.source, one.qp_num, one.stream) for one in found] == streams
    assert all((one.received, one.gaps) == (2, 1) for one in found)
    assert sources.total("gaps") == 4


def test_another_queue_pair_cannot_touch_a_stream() -> None:
    sources = Sources()
    for number in range(100):
        sources.take(HERE, 2, memoryview(pack(7, number + MAX_JUMP)))
        assert sources.take(HERE, 1, memoryview(pack(7, number))) == (7, number, ())
    assert [(one.qp_num, one.received, one.gaps) for one in sources.snapshot()] == [(2, 100, 0), (1, 100, 0)]


def test_late_message_of_the_next_qp_closes_a_gap() -> None:
    """A late message of the next queue pair closes its gap."""
    sources = Sources()
    for qp_num, number in ((1, 9), (2, 13), (2, 10), (2, 12), (2, 11)):
        gaps = (range(10, 13),) if number == 13 else ()
        assert sources.take(HERE, qp_num, memoryview(pack(7, number))) == (7, number, gaps)
    assert (sources.total("gaps"), sources.total("late")) == (0, 3)


def test_invented_streams_evict_their_senders_only() -> None:
    """Made up streams push out those of their sender alone."""
    sources = Sources()
    sources.take(HERE, 1, memoryview(pack(7, 0)))
    for stream in range(10 * MAX_STREAMS):
        sources.take(HERE, 2, memoryview(pack(stream + 100, 0)))
        sources.take(HERE, 2, memoryview(pack(stream + 100, 2)))
    assert len(sources) == 1 + MAX_STREAMS
    assert sources.take(HERE, 1, memoryview(pack(7, 0))) is Refusal.DUPLICATE
    assert sources.forgotten["streams"] == 9 * MAX_STREAMS
    assert sources.total("gaps") == 10 * MAX_STREAMS


def test_senders_are_bounded() -> None:
    """Senders are bounded and the stalest is forgotten but counted."""
    sources = Sources(limit=3)

    def hear(qp_num: int, number: int) -> None:
        sources.take(HERE, qp_num, memoryview(pack(qp_num, number)))

    for qp_num in (1, 2, 3):
        hear(qp_num, 0)
        hear(qp_num, 2)
    hear(1, 3)  # now 2 has been silent for longest
    hear(4, 0)
    assert [one.stream for one in sources.snapshot()] == [3, 1, 4]
    assert sources.total("gaps") == 3
    assert sources.forgotten["streams"] == 1


@given(st.lists(st.binary(min_size=HEADER_SIZE, max_size=HEADER_SIZE), max_size=200))
def test_hostile_headers_cannot_grow_the_table(tails: list[bytes]) -> None:
    sources = Sources(limit=8)
    for qp_num, tail in enumerate(tails):
        sources.take(HERE, qp_num % 20, memoryview(pack(0, 0)[:8] + tail[:16]))
    assert len(sources) <= 8 * MAX_STREAMS
    assert len(sources._last) <= len(sources)


# --- over a fabric -------------------------------------------------------------------------------


def connect(fabric: Fabric) -> tuple[Endpoint, Endpoint, Sender, Membership]:
    backend = open_fabric(fabric)
    sender = open_endpoint(backend, "10.0.0.1", sequence=True)
    receiver = open_endpoint(backend, "10.0.0.2", sequence=True)
    return sender, receiver, sender.sender(GROUP), receiver.join(GROUP)


def everything(receiver: Endpoint) -> list[bytes]:
    return [bytes(message.payload) for batch in receiver.batches(timeout=0.01) for message in batch]


@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
@pytest.mark.parametrize(
    ("verdict", "order", "counts"),
    [
        (Drop(), "01 34", (1, 0, 0)),
        (Duplicate(2), "01234", (0, 0, 2)),
        (Reorder(after=2), "01342", (0, 1, 0)),
    ],
)
def test_what_a_fabric_does_is_counted(
    make: Callable[[], Fabric], verdict: Drop | Duplicate | Reorder, order: str, counts: tuple[int, int, int]
) -> None:
    fabric = make()
    sender, receiver, out, group = connect(fabric)
    with fabric.rules.when(Messages(nth=3), verdict):
        out.send_batch([b"%d" % number for number in range(5)])
    assert everything(receiver) == [digit.encode() for digit in order if digit != " "]
    for stats in (group.stats(), receiver.stats()):
        assert (stats.gaps, stats.late, stats.duplicates) == counts
    assert group.stats().forgotten_sources == 0
    (source,) = group.stats().sources
    assert (source.qp_num, source.received) == (sender.qp_num, 5 - counts[0])
    assert dict(group.stats().dropped) == ({"duplicate": 2} if counts[2] else {})
    group.leave()
    stats = receiver.stats()
    assert (stats.gaps, stats.late, stats.duplicates) == counts


def test_messages_without_a_header_are_refused_and_counted() -> None:
    fabric = Fabric.roce()
    _, receiver, out, group = connect(fabric)
    with open_endpoint(receiver.backend, "10.0.0.3") as plain:
        bare = plain.sender(GROUP)
        bare.send(b"short")
        bare.send(bytes(100))
        bare.send(pack(1, 1)[:4] + b"\x09" + pack(1, 1)[5:])
        out.send(b"proper")
    assert everything(receiver) == [b"proper"]
    assert dict(group.stats().dropped) == {
        "sequence header: too short": 1,
        "sequence header: not one": 1,
        "sequence header: unknown version or flags": 1,
    }
    assert receiver.stats().received_bytes == len(b"proper")


def test_random_bytes_never_reach_the_user_nor_raise() -> None:
    fabric = Fabric.roce()
    _, receiver, _, group = connect(fabric)
    with open_endpoint(receiver.backend, "10.0.0.3") as hostile:
        bare = hostile.sender(GROUP)
        bare.send_batch([os.urandom(size) for size in range(300)])
    assert everything(receiver) == []
    assert sum(group.stats().dropped.values()) == 300


def test_leases_hold_for_payloads_behind_a_header() -> None:
    fabric = Fabric.roce()
    _, receiver, out, _ = connect(fabric)
    out.send_batch([b"one", b"two"])
    batch = receiver.recv_batch(timeout=1)
    assert list(batch.lengths) == [3, 3]
    view = batch[1].payload
    assert bytes(view) == b"two"
    assert receiver.stats().receive_free == 510
    batch.release()
    assert receiver.stats().receive_free == 512
    with pytest.raises(ValueError):
        bytes(view)
    with pytest.raises(ValueError):
        batch[0]


def test_numbers_continue_over_a_rejoin() -> None:
    """Numbers go on over a rejoin and a new membership is a new stream."""
    fabric = Fabric.roce()
    sender, receiver, out, group = connect(fabric)
    out.send(b"1")
    fabric.bond_failover(fabric.ports[0])
    with fabric.rules.when(Messages(nth=1), Drop()):
        out.send_batch([b"lost", b"2"], timeout=10)
    assert out.stats().rejoins == 1
    out.leave()
    sender.sender(GROUP).send(b"3")
    assert everything(receiver) == [b"1", b"2", b"3"]
    stats = group.stats()
    assert (stats.gaps, stats.duplicates) == (1, 0)
    assert [(one.received, one.gaps) for one in stats.sources] == [(1, 0), (1, 1), (1, 0)]
    assert [one.qp_num == sender.qp_num for one in stats.sources] == [False, True, True]
