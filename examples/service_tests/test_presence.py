"""Tests of the service with mcast's pytest plugin.

Each test has a fabric of its own, with the faults that its marks name. The service opens the backend "sim" by
name, as it would open "rdma". Time is virtual: the minutes of these tests take milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from mcast.testing.plugin import McastEndpoints, McastFabric
from presence import GROUP, INTERVAL, MAX_AGE, Presence

Start = Callable[[str], Presence]
both_fabrics = pytest.mark.mcast(fabric=["roce", "infiniband"])


@pytest.fixture
def start(mcast_fabric: McastFabric) -> Iterator[Start]:
    """Start a service on the next port of the test's fabric."""
    addresses = (str(port.interfaces[0].ipv4) for port in mcast_fabric.ports)
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(closing(Presence("sim", next(addresses), name)))


def run(seconds: float, *services: Presence) -> None:
    """Let the services run side by side."""
    for _ in range(round(seconds / 0.25)):
        for service in services:
            service.step(0.25 / len(services))


@both_fabrics
def test_hosts_see_each_other(start: Start) -> None:
    services = [start(name) for name in "abc"]
    run(2 * INTERVAL, *services)
    assert [service.alive for service in services] == [{"b", "c"}, {"a", "c"}, {"a", "b"}]


def test_a_late_joiner_is_seen(start: Start) -> None:
    first = start("first")
    run(60, first)
    late = start("late")
    run(2 * INTERVAL, first, late)
    assert (first.alive, late.alive) == ({"late"}, {"first"})


def test_a_host_that_stops_is_missed(start: Start) -> None:
    one, other = start("one"), start("other")
    run(10, one, other)
    other.close()
    run(MAX_AGE - INTERVAL - 0.5, one)
    assert one.alive == {"other"}
    run(INTERVAL + 1, one)
    assert one.alive == set()


@pytest.mark.mcast_faults("drop", group=GROUP, source=1, nth=[3, 4, 5])
def test_three_losses_in_a_row_are_borne(start: Start) -> None:
    one, other = start("one"), start("other")
    run(2 * INTERVAL, one, other)
    for _ in range(20):
        run(0.5, one, other)
        assert one.alive == {"other"}


@pytest.mark.mcast_faults("drop", rate=0.02)
@pytest.mark.mcast_faults("reorder", rate=0.2)
@pytest.mark.mcast_faults("duplicate", rate=0.2)
def test_a_bad_network_for_ten_minutes(start: Start) -> None:
    services = [start(name) for name in "abc"]
    run(2 * INTERVAL, *services)
    for _ in range(300):
        run(2.0, *services)
        assert [len(service.alive) for service in services] == [2, 2, 2]


@pytest.mark.mcast(ports=2, switches=3)
@pytest.mark.mcast_faults("cut-cable", switch=1, at=10, until=30)
def test_a_switch_loses_its_cable(start: Start) -> None:
    """No host gets an event of that: each sees the other's silence, and its return."""
    one, other = start("one"), start("other")
    run(9, one, other)
    assert (one.alive, other.alive) == ({"other"}, {"one"})
    run(10, one, other)
    assert (one.alive, other.alive) == (set(), set())
    run(15, one, other)
    assert (one.alive, other.alive) == ({"other"}, {"one"})


@pytest.mark.mcast(fabric="infiniband")
@pytest.mark.mcast_faults("restart-sm", at=10, outage=2)
def test_the_subnet_manager_restarts(start: Start) -> None:
    """All memberships are lost, and mcast joins again once there is an SM."""
    services = [start(name) for name in "abc"]
    run(20, *services)
    assert [service.alive for service in services] == [{"b", "c"}, {"a", "c"}, {"a", "b"}]
    for service in services:
        (outage,) = service.outages
        assert 0 < outage < 1


@both_fabrics
@pytest.mark.mcast_faults("link-down", port=1, at=10, until=20)
def test_a_pulled_cable(start: Start) -> None:
    one, other = start("one"), start("other")
    run(17, one, other)
    assert (one.alive, other.alive) == (set(), set())
    run(15, one, other)
    assert (one.alive, other.alive) == ({"other"}, {"one"})


def test_bytes_of_strangers_break_nothing(start: Start, mcast_endpoints: McastEndpoints) -> None:
    one = start("one")
    *_, stranger = mcast_endpoints(2)
    stranger.sender(GROUP).send_batch([b"", b"nonsense", b"alive \xff"])
    run(INTERVAL, one)
    assert one.alive == {"\ufffd"}
