"""Events of a port reach the contract and the endpoint, simulated and on the card."""

from __future__ import annotations

import asyncio
import select
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mcast import AddressChanged, Endpoint, Lost, PortDown, PortUp, Rejoined, RejoinPolicy, aio, open_endpoint
from mcast.api import Backend, PortEvent, QueuePair
from mcast.endpoint.blocking import POLL_INTERVAL_CALLS

from ..networks import KINDS, UDP, Network, network_of
from ..waiting import is_asleep, until

GROUP = "239.1.2.3"
BOUND = 30.0
"""Seconds; the longest that anything may take, never a delay."""
POLICY = RejoinPolicy(first=0.01, maximum=0.05)
MAX_KEPT = 64


@pytest.fixture(params=[*KINDS, UDP])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """A network of each kind, and of sockets; nothing may be left of its backends at the end."""
    made = network_of(request, clock="wall")
    yield made
    assert made.leftovers() == ()
    made.close()


# --- the contract ----------------------------------------------------------------------------------


def queue_pair(backend: Backend) -> QueuePair:
    """One on port 1."""
    cm_id = backend.event_channel().create_id()
    cm_id.bind_addr("10.0.0.2")
    return cm_id.create_qp()


@pytest.fixture
def qp(backend: Backend) -> QueuePair:
    return queue_pair(backend)


def ends(qp: QueuePair) -> bool:
    """Return True if a receive without a timeout ends without a message."""
    with ThreadPoolExecutor(1) as pool:
        asleep = pool.submit(qp.recv, 1, None, events=True)
        try:
            return not asleep.result(BOUND)
        except TimeoutError:
            qp.close()
            return False


def empty(qp: QueuePair, one: bool = False) -> None:
    """Receive until the descriptor tells of nothing."""
    while select.select([qp.fileno()], [], [], 0)[0]:
        assert not (qp.recv_one(0) if one else qp.recv(1, 0))


def test_a_queue_pair_is_told_of_its_port(network: Network, qp: QueuePair) -> None:
    assert qp.port_events() == ()
    network.set_link(0, up=False)
    assert qp.port_events() == ()  # that is another port
    network.set_link(1, up=False)
    network.set_link(1, up=True)
    network.touch_gids(1)
    found = [event for event in qp.port_events() if event is not PortEvent.CLIENT_REREGISTER]
    assert found == [PortEvent.ERR, PortEvent.ACTIVE, PortEvent.GID_CHANGE]
    assert qp.port_events() == ()


def test_what_was_before_a_queue_pair_is_not_told(network: Network, backend: Backend) -> None:
    cm_id = backend.event_channel().create_id()
    cm_id.bind_addr("10.0.0.2")
    for _ in range(2):
        with backend._guard.lock:  # a thread of the provider does not read the report first
            network.touch_gids(1)
            qp = cm_id.create_qp()
        assert qp.port_events() == ()
        qp.close()


def test_the_last_are_kept(network: Network, qp: QueuePair) -> None:
    network.set_link(1, up=False)
    for _ in range(MAX_KEPT):
        network.touch_gids(1)
    assert qp.port_events() == (PortEvent.GID_CHANGE,) * MAX_KEPT


def test_a_receive_ends_once_for_what_is_new(network: Network, backend: Backend) -> None:
    channel = backend.event_channel()
    cm_id = channel.create_id()
    cm_id.bind_addr("10.0.0.2")
    qp = cm_id.create_qp()
    cm_id.join_multicast(GROUP)
    event = channel.get_event(BOUND)
    assert event is not None
    assert event.ud is not None
    for _ in range(2):
        network.touch_gids(1)
        assert ends(qp)
        found: list[int] = []
        asleep = threading.Thread(
            target=lambda found=found: found.append(len(qp.recv(1, BOUND, events=True)))
        )
        asleep.start()
        until(lambda thread=asleep: is_asleep(thread))  # type: ignore[misc]
        qp.send(event.ud.destination, [b"the next to end it"])
        asleep.join(BOUND)
        assert found == [1]
    assert qp.port_events() == (PortEvent.GID_CHANGE,) * 2


def test_a_receive_that_sleeps_is_woken(network: Network, qp: QueuePair) -> None:
    with ThreadPoolExecutor(1) as pool:
        asleep = pool.submit(ends, qp)
        while not asleep.done():
            network.touch_gids(1)
        assert asleep.result()


@pytest.mark.parametrize("one", [True, False])
def test_descriptor_stays_readable_until_read(network: Network, qp: QueuePair, one: bool) -> None:
    """The descriptor tells of it until a receive is empty."""
    descriptor = qp.fileno()
    assert not qp.recv(1, 0)
    has = [qp.has_port_events]
    network.touch_gids(1)
    assert select.select([descriptor], [], [], BOUND)[0]
    empty(qp, one)
    has.append(qp.has_port_events)
    assert qp.port_events() == (PortEvent.GID_CHANGE,)
    assert [*has, qp.has_port_events] == [False, True, False]


def test_event_read_by_another_qp_wakes_the_descriptor(
    network: Network, backend: Backend, qp: QueuePair
) -> None:
    """The descriptor tells of what another queue pair has read.

    A device tells the first who asks; all others hear of it from that one.
    """
    other, descriptor = queue_pair(backend), qp.fileno()
    assert not qp.recv(1, 0)
    network.touch_gids(1)
    assert other.port_events() == (PortEvent.GID_CHANGE,)
    assert select.select([descriptor], [], [], BOUND)[0]
    assert qp.port_events() == (PortEvent.GID_CHANGE,)


# --- the endpoint ----------------------------------------------------------------------------------


class Pair:
    """A sender on port 0, and on port 1 the receiver to which something happens."""

    def __init__(self, network: Network, backend: Backend) -> None:
        self.network = network
        self.sender: Endpoint = open_endpoint(backend, "10.0.0.1", rejoin=POLICY)
        self.receiver: Endpoint = open_endpoint(backend, "10.0.0.2", rejoin=POLICY)
        self.out, self.group = self.sender.sender(GROUP), self.receiver.join(GROUP)
        self.port = f"{self.receiver.device.name}/{self.receiver.port.port_num}"

    def next(self, kind: type) -> object:
        """The next event, which must be of that kind."""
        event = self.receiver.next_event(BOUND)
        assert isinstance(event, kind), repr(event)
        return event

    def receives(self) -> bool:
        """Return True if a message gets through."""
        self.out.send(b"?")
        return self.group.recv(BOUND) is not None


@pytest.fixture
def pair(network: Network, backend: Backend) -> Pair:
    return Pair(network, backend)


def test_a_link_that_goes_down_and_up_is_told(pair: Pair) -> None:
    """On InfiniBand the memberships are lost with it, on RoCE they stay."""
    pair.network.set_link(1, up=False)
    assert pair.next(PortDown) == PortDown(pair.port)
    if pair.network.is_infiniband:
        pair.next(Lost)
    pair.network.set_link(1, up=True)
    seen = [pair.receiver.next_event(BOUND) for _ in range(1 + pair.network.is_infiniband)]
    assert PortUp(pair.port) in seen
    assert len([one for one in seen if isinstance(one, Rejoined)]) == pair.network.is_infiniband
    assert pair.receives()
    assert pair.receiver.next_event(0) is None


def test_an_address_that_is_nobodys_costs_nothing(pair: Pair) -> None:
    qp_num = pair.receiver.qp_num
    pair.network.touch_gids(1)
    assert pair.next(AddressChanged) == AddressChanged(pair.port, own=False)
    assert pair.group.joined
    assert pair.receives()
    assert pair.receiver.qp_num == qp_num
    assert pair.receiver.next_event(0) is None


@pytest.mark.parametrize("network", ["roce", "card-roce", "card-infiniband", UDP], indirect=True)
def test_address_that_returns_is_used_again(pair: Pair) -> None:
    """An address that goes and comes back is joined from again."""
    pair.network.set_address(1, present=False)
    assert pair.next(AddressChanged) == AddressChanged(pair.port, own=True)
    lost = pair.next(Lost)
    assert isinstance(lost, Lost)
    assert "no port has the address 10.0.0.2" in str(lost.error)
    pair.network.set_address(1, present=True)
    while isinstance(event := pair.receiver.next_event(BOUND), AddressChanged):
        assert not event.own  # the new queue pair may be there before its port tells
    assert isinstance(event, Rejoined)
    assert pair.receives()


@pytest.mark.parametrize("network", ["roce", "card-roce"], indirect=True)
def test_link_up_during_a_replacement_is_reported(pair: Pair) -> None:
    """A link that comes up while the queue pair is replaced is told."""
    pair.network.set_link(1, up=False)
    pair.next(PortDown)
    pair.network.fail_over(1)
    pair.next(Lost)
    pair.network.set_link(1, up=True)  # the queue pair that hears of it will not be asked any more
    assert {type(pair.receiver.next_event(BOUND)) for _ in range(2)} == {PortUp, Rejoined}
    assert pair.receiver.next_event(0) is None
    assert pair.receives()


def test_who_waits_for_an_event_is_woken(pair: Pair) -> None:
    with ThreadPoolExecutor(1) as pool:
        asleep = pool.submit(pair.receiver.next_event, BOUND)
        pair.network.set_link(1, up=False)
        event = asleep.result(BOUND)
        if isinstance(event, Lost):  # on InfiniBand, if the thread looked at the port just before
            event = pair.receiver.next_event(BOUND)
        assert event == PortDown(pair.port)


@pytest.mark.parametrize("waits", ["next_event", "recv"])
@pytest.mark.parametrize("asleep", [True, False])
def test_a_loop_is_told(network: Network, backend: Backend, waits: str, asleep: bool) -> None:
    """The task sleeps by then, or a receive was empty since, so that the descriptor tells no more."""

    async def main() -> None:
        async with aio.open_endpoint(backend, "10.0.0.2", rejoin=POLICY) as endpoint:
            await endpoint.join(GROUP)
            assert await endpoint.recv(0) is None
            if not asleep:
                network.touch_gids(1)
                empty(endpoint._core.resources.qp)
            task = asyncio.create_task(getattr(endpoint, waits)(timeout=None))
            if asleep:
                while not endpoint._waiters:
                    await asyncio.sleep(0)
                network.touch_gids(1)
            if waits == "recv":
                while not endpoint._core.events:
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
            event = await task if waits == "next_event" else await endpoint.next_event()
            assert isinstance(event, AddressChanged)

    asyncio.run(asyncio.wait_for(main(), BOUND))


def test_who_only_sends_is_told(pair: Pair) -> None:
    pair.network.touch_gids(0)
    for _ in range(POLL_INTERVAL_CALLS + 1):
        pair.out.send(b"x")
    assert isinstance(pair.sender._core.events.pop(), AddressChanged)


def test_a_loop_that_only_sends_is_told(network: Network, backend: Backend) -> None:
    async def main() -> None:
        async with aio.open_endpoint(backend, "10.0.0.2") as endpoint, endpoint.sender(GROUP) as group:
            network.touch_gids(1)
            while not endpoint._core.events:
                await group.send(b"x")

    asyncio.run(asyncio.wait_for(main(), BOUND))
