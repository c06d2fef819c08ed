"""Measurements of an endpoint's messages: rates, gaps, sources."""

from __future__ import annotations

from mcast.api import CopiedBatch, Message
from mcast.endpoint.policy import MessagesMissing
from mcast.endpoint.sequence import MAX_SOURCES, pack
from mcast.endpoint.watching import MAX_GAPS, Meter
from mcast.wire.addresses import Gid, McastAddress

ONE, TWO = Gid("::ffff:239.1.1.1"), Gid("::ffff:239.1.1.2")
ALICE, BOB = Gid("::ffff:10.0.0.1"), Gid("::ffff:10.0.0.2")


def message(group: Gid, source: Gid, payload: bytes, qp_num: int = 17) -> Message:
    return Message(memoryview(payload), source, qp_num, group, None, False)


def numbered(group: Gid, source: Gid, numbers: list[int], stream: int = 1) -> list[Message]:
    return [message(group, source, pack(stream, number) + b"x") for number in numbers]


def meter() -> Meter:
    return Meter({ONE: McastAddress.of("239.1.1.1"), TWO: McastAddress.of("239.1.1.2")})


def test_rates_are_of_the_interval_and_totals_of_all() -> None:
    counted = meter()
    counted.take(CopiedBatch([message(ONE, ALICE, bytes(100))] * 3 + [message(ONE, BOB, bytes(10))]))
    one, two = counted.sample(2.0)
    assert (one.group, one.rates.messages, one.rates.bytes) == ("239.1.1.1", 4, 310)
    assert (one.rates.messages_per_second, one.rates.bytes_per_second) == (2.0, 155.0)
    alice, bob = one.sources
    assert (alice.source, alice.qp_num, alice.rates.messages_per_second) == ("10.0.0.1", 17, 1.5)
    assert (bob.source, bob.rates.messages) == ("10.0.0.2", 1)
    assert (two.rates.messages, two.sources) == (0, ())
    counted.take(CopiedBatch([message(ONE, BOB, b"")]))
    one, _ = counted.sample(0.5)
    assert (one.rates.messages, one.rates.messages_per_second, one.rates.bytes_per_second) == (5, 2.0, 0.0)
    assert one.sources[0].rates.messages_per_second == 0


def test_gaps_are_counted_where_messages_are_numbered() -> None:
    counted = meter()
    counted.take(CopiedBatch(numbered(ONE, ALICE, [0, 1, 5, 5, 3]) + numbered(ONE, BOB, [7, 8])))
    counted.take(CopiedBatch([message(TWO, BOB, b"plain")]))
    one, two = counted.sample(1.0)
    assert (one.sequence.gaps, one.sequence.late, one.sequence.duplicates) == (2, 1, 1)
    alice, bob = one.sources
    assert (alice.sequence.gaps, alice.sequence.late, alice.sequence.duplicates) == (2, 1, 1)
    assert (bob.sequence.gaps, bob.rates.messages, bob.rates.bytes) == (0, 2, 2)  # without headers
    assert two.sequence.gaps is None
    assert two.sources[0].sequence.gaps is None


def test_the_last_gaps_are_named_once() -> None:
    counted = meter()
    counted.take(CopiedBatch(numbered(ONE, ALICE, [0, 1, 5, 9])))
    group = McastAddress.of("239.1.1.1")
    assert counted.gaps() == (
        MessagesMissing(group, ALICE, 17, 1, 2, 4),
        MessagesMissing(group, ALICE, 17, 1, 6, 8),
    )
    assert counted.gaps() == ()
    counted.take(CopiedBatch(numbered(ONE, ALICE, [*range(10, 1000, 2)])))
    assert len(counted.gaps()) == MAX_GAPS


def test_flood_of_sources_evicts_silent_ones() -> None:
    """A flood of sources pushes out the ones that are silent."""
    counted = meter()
    strangers = [message(ONE, BOB, b"x", qp_num=number) for number in range(MAX_SOURCES)]
    for stranger in strangers:
        counted.take(CopiedBatch([message(ONE, ALICE, b"y"), stranger]))
    one, _ = counted.sample(1.0)
    assert (one.rates.messages, one.forgotten_sources) == (2 * MAX_SOURCES, 1)
    assert len(one.sources) == MAX_SOURCES
    (alice,) = [found for found in one.sources if found.source == "10.0.0.1"]
    assert alice.rates.messages == MAX_SOURCES


def test_two_queue_pairs_of_one_port_are_two_sources() -> None:
    counted = meter()
    counted.take(CopiedBatch([message(ONE, ALICE, b"a", 17), message(ONE, ALICE, b"a", 18)]))
    assert [source.qp_num for source in counted.sample(1.0)[0].sources] == [17, 18]


def test_a_group_that_was_not_asked_for_is_not_counted() -> None:
    counted = meter()
    counted.take(CopiedBatch([message(Gid("::ffff:239.9.9.9"), ALICE, b"a")]))
    assert [group.rates.messages for group in counted.sample(1.0)] == [0, 0]
