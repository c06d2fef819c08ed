"""The numbers that messages carry, and the events that say which are missing, as a program sees them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mcast import Endpoint, Gid, Lost, McastAddress, Membership, MessagesMissing, Rejoined, Sender, aio
from mcast import open_endpoint as opened
from mcast.api import Backend
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults import Drop, Messages, Reorder
from mcast.endpoint.events import MAX_MISSING, MAX_MISSING_OF_SOURCE, EventQueue
from mcast.endpoint.policy import PortUp
from mcast.endpoint.resources import PortResources
from mcast.endpoint.sequence import RESTART_AFTER, pack
from mcast.endpoint.waiting import Waiting

from ..networks import Network

GROUP = McastAddress.of("239.1.2.3")
SENDER = Gid("::ffff:10.0.0.1")
BOUND = 60.0
STREAM = 7


@contextmanager
def forging(backend: Backend) -> Iterator[tuple[Endpoint, Membership, Sender]]:
    """A receiver with sequence=True, its membership, and a sender that writes what headers it likes."""
    with (
        opened(backend, "10.0.0.2", sequence=True, loopback="off") as receiver,
        opened(backend, "10.0.0.1", max_message=100) as liar,
        receiver.join(GROUP) as group,
        liar.sender(GROUP) as out,
    ):
        yield receiver, group, out


@contextmanager
def numbering(fabric: Fabric) -> Iterator[tuple[Endpoint, Sender, Endpoint, Membership]]:
    """A sender and a receiver with sequence=True, each with its part in the group."""
    with (
        open_fabric(fabric) as backend,
        opened(backend, "10.0.0.1", sequence=True) as sender,
        opened(backend, "10.0.0.2", sequence=True) as receiver,
        sender.sender(GROUP) as out,
        receiver.join(GROUP) as group,
    ):
        yield sender, out, receiver, group


def numbered(*numbers: int, stream: int = STREAM) -> list[bytes]:
    return [pack(stream, number) + b"%d" % number for number in numbers]


def missing(endpoint: Endpoint) -> list[tuple[int, int]]:
    """The gaps of all events that wait; no other event waits."""
    events = iter(lambda: endpoint.next_event(0.0), None)
    return [(event.first, event.last) for event in events if isinstance(event, MessagesMissing)]


def by_one(endpoint: Endpoint, group: Membership) -> list[int | None]:
    return [message.number for message in iter(lambda: group.recv(timeout=0.1), None)]


def by_batch(endpoint: Endpoint, group: Membership) -> list[int | None]:
    return [message.number for batch in endpoint.batches(timeout=0.1) for message in batch]


def by_columns(endpoint: Endpoint, group: Membership) -> list[int | None]:
    return [number for batch in endpoint.batches(timeout=0.1) for number in batch.numbers or ()]


WAYS = [by_one, by_batch, by_columns]


@pytest.mark.parametrize("received", WAYS)
@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_dropped_messages_are_named(
    make: Callable[[], Fabric], received: Callable[[Endpoint, Membership], list[int | None]]
) -> None:
    """The event has everything that a program needs to ask the sender again."""
    with numbering(fabric := make()) as (sender, out, receiver, group):
        with fabric.rules.when(Messages(nth=[3, 4, 7]), Drop()):
            out.send_batch([b"%d" % number for number in range(8)])
        assert received(receiver, group) == [0, 1, 4, 5, 7]
        (source,) = group.stats().sources
        events = [receiver.next_event(0) for _ in range(3)]
        sent_by = GROUP, source.source, sender.qp_num, source.stream
        assert events == [MessagesMissing(*sent_by, 2, 3), MessagesMissing(*sent_by, 6, 6), None]
        assert group.stats().gaps == 3


@pytest.mark.parametrize("received", WAYS)
def test_each_network_names_gaps(
    backend: Backend, received: Callable[[Endpoint, Membership], list[int | None]]
) -> None:
    with forging(backend) as (receiver, group, out):
        out.send_batch(numbered(5, 6, 9, 10, 20))
        assert received(receiver, group) == [5, 6, 9, 10, 20]
        assert missing(receiver) == [(7, 8), (11, 19)]


def test_aio_names_gaps(backend: Backend) -> None:
    async def main() -> None:
        async with (
            aio.open_endpoint(backend, "10.0.0.2", sequence=True) as receiver,
            aio.open_endpoint(backend, "10.0.0.1") as liar,
            receiver.join(GROUP) as group,
            liar.sender(GROUP) as out,
        ):
            await out.send_batch(numbered(0, 4))
            found = [await group.recv(timeout=BOUND) for _ in range(2)]
            assert [message.number for message in found if message is not None] == [0, 4]
            event = await receiver.next_event(timeout=BOUND)
            assert isinstance(event, MessagesMissing)
            assert (event.first, event.last, event.src_qp) == (1, 3, liar.qp_num)

    asyncio.run(asyncio.wait_for(main(), BOUND))


def test_aio_wakes_the_task_that_waits_for_events(backend: Backend) -> None:
    """One task receives, another one waits for events: each gets what is its own."""

    async def main() -> None:
        async with (
            aio.open_endpoint(backend, "10.0.0.2", sequence=True) as receiver,
            aio.open_endpoint(backend, "10.0.0.1") as liar,
            receiver.join(GROUP) as group,
            liar.sender(GROUP) as out,
        ):
            event = asyncio.create_task(receiver.next_event(timeout=None))
            received = asyncio.create_task(group.recv_batch(timeout=None))
            await asyncio.sleep(0)
            await out.send_batch(numbered(0, 2))
            assert isinstance(await event, MessagesMissing)
            with await received as batch:
                assert batch.numbers in ([0], [0, 2])

    asyncio.run(asyncio.wait_for(main(), BOUND))


def test_threads_get_events_and_messages(backend: Backend) -> None:
    """One thread waits for events while another receives, whichever of them the messages come to."""
    with forging(backend) as (receiver, group, out), ThreadPoolExecutor(2) as threads:
        event = threads.submit(receiver.next_event, BOUND)
        received = threads.submit(group.recv, BOUND)
        out.send_batch(numbered(0, 2))
        assert isinstance(event.result(BOUND), MessagesMissing)
        message = received.result(BOUND)
        assert message is not None
        assert message.number == 0


def test_waiting_next_event_sees_a_gap(backend: Backend) -> None:
    """A thread that waits for events alone is woken; the messages are kept for those that receive."""
    with forging(backend) as (receiver, group, out):
        out.send_batch(numbered(0, 2))
        event = receiver.next_event(timeout=BOUND)
        assert isinstance(event, MessagesMissing)
        assert by_one(receiver, group) == [0, 2]


def test_a_late_message_comes_with_its_number() -> None:
    """The event does not wait for messages that change places: those come after all, and are counted."""
    with numbering(fabric := Fabric.roce()) as (_, out, receiver, group):
        with fabric.rules.when(Messages(nth=2), Reorder(after=1)):
            out.send_batch([b"x"] * 4)
        assert by_one(receiver, group) == [0, 2, 1, 3]
        assert missing(receiver) == [(1, 1)]
        assert (group.stats().gaps, group.stats().late) == (0, 1)


def test_a_gap_over_a_rejoin_is_named() -> None:
    """The numbers go on when the sender comes back on another queue pair."""
    with numbering(fabric := Fabric.roce()) as (_, out, receiver, group):
        out.send(b"0")
        fabric.bond_failover(fabric.ports[0])
        with fabric.rules.when(Messages(nth=[1, 2]), Drop()):
            out.send_batch([b"1", b"2", b"3"], timeout=10)
        assert by_one(receiver, group) == [0, 3]
        assert missing(receiver) == [(1, 2)]


def test_plain_messages_have_no_number(backend: Backend) -> None:
    with (
        opened(backend, "10.0.0.2") as receiver,
        opened(backend, "10.0.0.1", sequence=False) as sender,
        receiver.join(GROUP) as group,
        sender.sender(GROUP) as out,
    ):
        out.send_batch(numbered(0, 9))
        one = group.recv(timeout=BOUND)
        assert one is not None
        assert (one.number, bytes(one.payload)) == (None, numbered(0)[0])
        with receiver.recv_batch(timeout=BOUND) as batch:
            assert (batch.numbers, batch[0].number) == (None, None)
        assert receiver.next_event(0) is None


def test_numbers_survive_a_failed_release() -> None:
    """A batch that cannot be released yet is as it was."""
    with open_fabric(Fabric.roce()) as backend, forging(backend) as (receiver, _, out):
        out.send_batch(numbered(3, 4))
        batch = receiver.recv_batch(timeout=BOUND)
        held = memoryview(batch[0].payload)
        with pytest.raises(BufferError):
            batch.release()
        assert batch.numbers == [3, 4]
        assert [bytes(message.payload) for message in batch] == [b"3", b"4"]
        held.release()
        batch.release()


# --- a sender that lies --------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [1 << 60, (1 << 64) - 100])
def test_an_absurd_jump_names_no_gap(jump: int) -> None:
    with open_fabric(Fabric.roce()) as backend, forging(backend) as (receiver, group, out):
        out.send_batch(numbered(0, *range(jump, jump + 2 * RESTART_AFTER)))
        assert len(by_one(receiver, group)) == RESTART_AFTER + 2
        assert missing(receiver) == []


def test_a_liar_fills_neither_events_nor_log(network: Network, caplog: pytest.LogCaptureFixture) -> None:
    """Gaps of one sender in thousands: few events of it wait, few lines are logged, and the events that say
    something of the membership are all there."""
    caplog.set_level(logging.WARNING, "mcast")
    rounds = 20
    with network.open() as backend, forging(backend) as (receiver, group, out):
        network.fail_over(1)
        while receiver.stats().rejoins < 1:
            group.recv(timeout=0.01)
        for start in range(0, rounds * 100, 100):
            out.send_batch(numbered(*range(2 * start, 2 * start + 200, 2)))
            assert len(by_batch(receiver, group)) == 100
        gaps = rounds * 100 - 1
        assert group.stats().gaps == gaps
        assert receiver.stats().events_dropped == gaps - MAX_MISSING_OF_SOURCE
        events = list(iter(lambda: receiver.next_event(0.0), None))
        assert [type(event) for event in events[:2]] == [Lost, Rejoined]
        assert {type(event) for event in events[2:]} == {MessagesMissing}
        assert len(events) == 2 + MAX_MISSING_OF_SOURCE
    said = [line for line in caplog.messages if "missing" in line]
    assert len(said) == gaps.bit_length()
    assert said[-1].endswith(f"({1 << gaps.bit_length() - 1} such gaps so far)")


def queue() -> EventQueue:
    return EventQueue(cast(PortResources, SimpleNamespace(name="here")), cast(Waiting, SimpleNamespace()))


def gap(source: int, first: int) -> MessagesMissing:
    return MessagesMissing(GROUP, Gid(source.to_bytes(16)), 1, STREAM, first, first)


def test_many_liars_fill_a_bounded_queue() -> None:
    events = queue()
    events.report(PortUp("a"))
    for source in range(4 * MAX_MISSING):
        events.report(gap(source, 0))
        events.report(gap(source, 2))
    assert len(events) == MAX_MISSING + 1
    assert events.dropped == 7 * MAX_MISSING
    assert isinstance(events.pop(), PortUp)
    assert events.pop() == gap(4 * MAX_MISSING - MAX_MISSING // 2, 0)


def test_events_come_in_order() -> None:
    events = queue()
    reported: list[Any] = [PortUp("a"), gap(1, 0), gap(2, 0), PortUp("b"), gap(1, 9)]
    for event in reported:
        events.report(event)
    assert [events.pop() for _ in reported] == reported


def test_a_source_gets_its_share_again() -> None:
    """Events that were fetched make room for others of the same source."""
    events = queue()
    for _ in range(3):
        for first in range(MAX_MISSING_OF_SOURCE + 1):
            events.report(gap(1, first))
        assert len(list(iter(lambda: events.pop() if events else None, None))) == MAX_MISSING_OF_SOURCE
    assert events.dropped == 3


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [(4, 7, "messages 4 to 7 of 10.0.0.1 are missing"), (4, 4, "message 4 of 10.0.0.1 is missing")],
)
def test_a_gap_reads_well(first: int, last: int, words: str) -> None:
    assert str(MessagesMissing(GROUP, SENDER, 1, STREAM, first, last)) == f"239.1.2.3: {words}"
