"""The whole feed, on the simulated fabric that mcast's pytest plugin makes for each test.

The application opens the backend "sim" by name, as it would open "rdma"; the fixture `mcast_fabric` makes
that lead to the fabric of the test, which loses, doubles and reorders what the marks say. Anything that the
application has left open at the end of a test fails that test.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from mcast.backends.sim.faults import Drop, Messages
from mcast.testing.plugin import McastEndpoints, McastFabric
from pricefeed.__main__ import publish as publish_at_random
from pricefeed.__main__ import subscribe
from pricefeed.publisher import Publisher, open_publisher
from pricefeed.subscriber import Subscriber, open_subscriber
from pricefeed.wire import FEED, REPAIR, Heartbeat, encode

# Both kinds of fabric: Ethernet with IGMP, InfiniBand with a subnet manager.
pytestmark = [
    pytest.mark.mcast(fabric=["roce", "infiniband"]),
    pytest.mark.usefixtures("mcast_fabric"),
    pytest.mark.anyio,  # runs coroutines; pytest-asyncio would do as well
]

UPDATES = 20
QUICK = 0.02
NEVER = 3600.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def running(
    subscribers: int = 1, heartbeat: float = QUICK, retry_interval: float = QUICK
) -> AsyncIterator[tuple[Publisher, list[Subscriber]]]:
    """A publisher on port 0, subscribers on ports 1, 2, …"""
    async with AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(open_subscriber("sim", f"10.0.0.{2 + n}", retry_interval))
            for n in range(subscribers)
        ]
        yield await stack.enter_async_context(open_publisher("sim", "10.0.0.1", heartbeat)), opened


async def publish(publisher: Publisher, updates: int = UPDATES) -> None:
    for number in range(updates):
        await publisher.publish(f"S{number % 7}", number)


async def same_book(publisher: Publisher, *subscribers: Subscriber) -> None:
    """Every subscriber ends up with the publisher's book."""
    for subscriber in subscribers:
        book = await subscriber.until(lambda book: book.version == publisher.version)
        assert book.prices == publisher.prices


async def eventually(condition: Callable[[], object]) -> None:
    """Wait for a condition; the timeout of pytest ends it."""
    while not condition():
        await asyncio.sleep(QUICK)


async def test_every_subscriber_has_the_book() -> None:
    async with running(subscribers=3) as (publisher, subscribers):
        await publish(publisher)
        await same_book(publisher, *subscribers)
        assert [subscriber.asked for subscriber in subscribers] == [0, 0, 0]
        assert [subscriber.stats.gaps for subscriber in subscribers] == [0, 0, 0]
        assert publisher.answered == 0


@pytest.mark.mcast_faults("drop", group=FEED, target=1, nth=[4, 9])
async def test_lost_updates_are_noticed_and_repaired() -> None:
    async with running(heartbeat=NEVER) as (publisher, (subscriber,)):
        await publish(publisher)
        await same_book(publisher, subscriber)
        assert subscriber.asked >= 1
        assert publisher.answered >= 1
        assert subscriber.stats.gaps == 2


async def test_a_lost_last_update_is_noticed_by_the_heartbeat(mcast_fabric: McastFabric) -> None:
    async with running() as (publisher, (subscriber,)):
        await publish(publisher)
        with mcast_fabric.rules.when(Messages(group=FEED, nth=1), Drop()):
            await publisher.publish("LAST", 1)
        await same_book(publisher, subscriber)
        assert subscriber.book.prices["LAST"] == 1
        assert subscriber.asked >= 1


@pytest.mark.mcast_faults("duplicate", group=FEED, target=1, copies=2)
@pytest.mark.mcast_faults("reorder", group=FEED, target=2, nth=[3, 8], after=2)
@pytest.mark.mcast_faults("delay", group=FEED, target=3, nth=[2, 9], seconds=0.3)
async def test_copies_and_wrong_order_need_no_repair() -> None:
    async with running(subscribers=3, heartbeat=NEVER, retry_interval=4.0) as (publisher, subscribers):
        await publish(publisher)
        await same_book(publisher, *subscribers)
        doubled, _, delayed = (subscriber.stats for subscriber in subscribers)
        assert (doubled.duplicates, doubled.gaps) == (2 * UPDATES, 0)
        assert (delayed.late, delayed.gaps) == (2, 0)
        assert [subscriber.asked for subscriber in subscribers] == [0, 0, 0]


@pytest.mark.mcast_faults("drop", rate=0.3)
async def test_a_very_lossy_fabric_in_both_directions() -> None:
    async with running(subscribers=3) as (publisher, subscribers):
        await publish(publisher, 200)
        await same_book(publisher, *subscribers)


async def test_a_late_subscriber_gets_the_whole_book() -> None:
    async with running() as (publisher, _):
        await publish(publisher)
        async with open_subscriber("sim", "10.0.0.4", retry_interval=QUICK) as late:
            await same_book(publisher, late)
            assert late.asked == 1


@pytest.mark.mcast_faults("drop", group=FEED, nth=4)
async def test_one_answer_serves_all_that_lost_the_same() -> None:
    async with running(subscribers=3) as (publisher, subscribers):
        await publish(publisher)
        await same_book(publisher, *subscribers)
        assert 1 <= publisher.answered <= publisher.asked <= 3


async def test_what_strangers_send_is_refused_and_counted(mcast_endpoints: McastEndpoints) -> None:
    (stranger,) = mcast_endpoints.aio(sequence=True)
    (plain,) = mcast_endpoints.aio()  # its messages do not even have mcast's sequence header
    async with running() as (publisher, (subscriber,)):
        async with (
            stranger.sender(FEED) as feed,
            stranger.sender(REPAIR) as repair,
            plain.sender(FEED) as bare,
        ):
            await feed.send(b"nonsense")
            await repair.send(b"\xff" * 64)
            await repair.send(encode(Heartbeat(7)))
            await bare.send(b"nonsense")
        await publish(publisher)
        await same_book(publisher, subscriber)
        await eventually(lambda: subscriber.refused and publisher.refused)
        assert (subscriber.refused, publisher.refused, publisher.asked) == (1, 1, 0)
        assert sum(count or 0 for count in subscriber.stats.dropped.values()) == 1


@pytest.mark.mcast(fabric="infiniband")
async def test_fail_over_of_the_subnet_manager(mcast_fabric: McastFabric) -> None:
    async with running(subscribers=2) as (publisher, subscribers):
        await publish(publisher)
        await same_book(publisher, *subscribers)
        mcast_fabric.restart_sm(outage=0.1)
        await publish(publisher)
        await same_book(publisher, *subscribers)
        await eventually(lambda: all(subscriber.outages for subscriber in subscribers))
        assert all(0 < subscriber.outages[0] < 5 for subscriber in subscribers)


@pytest.mark.mcast(fabric="roce")
async def test_a_pulled_cable(mcast_fabric: McastFabric) -> None:
    async with running() as (publisher, (subscriber,)):
        mcast_fabric.set_link(mcast_fabric.ports[1], up=False)
        await publish(publisher)
        mcast_fabric.set_link(mcast_fabric.ports[1], up=True)
        await same_book(publisher, subscriber)
        assert subscriber.asked >= 1


async def test_cancelled_at_any_moment_it_leaves_nothing_open() -> None:
    for turns in range(40):
        task = asyncio.create_task(follow_for_ever())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    # What is left open now fails this test: the plugin looks.


async def follow_for_ever() -> None:
    async with open_subscriber("sim", "10.0.0.2"):
        await asyncio.sleep(NEVER)


@pytest.mark.mcast(fabric="roce")
async def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    await asyncio.gather(subscribe("sim", "10.0.0.2", 20), publish_at_random("sim", "10.0.0.1", 20))
    *_, last = capsys.readouterr().out.splitlines()
    assert last.split()[0] == "20"
    assert "ACME" in last
