"""Cost grows with members, not with ports times members; and what happens at the edges of a fabric.

Cost is counted in function calls, which no other load on the machine changes.
"""

from __future__ import annotations

import errno
import runpy
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mcast
from mcast.api import CmEventType, CmId, Destination, EventChannel
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.testbed import SimObserver
from mcast.wire.addresses import Gid

from ..profiled import profiled

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "test_scale.py"))
GROUP = Gid("::ffff:239.1.1.1")
MAKE = {"sim-roce": Fabric.roce, "sim-ib": Fabric.infiniband}


def calls(work: Callable[[], Any]) -> int:
    """Return the number of functions, of Python and of C, that `work` calls."""
    count = 0

    def counted(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    profiled(counted, work)
    return count


def run(backend: str, ports: int, groups: int, members: int) -> None:
    BENCHMARK["run"](backend, ports, groups, members)


@pytest.mark.parametrize("backend", MAKE)
@pytest.mark.parametrize(
    ("small", "large", "factor"),
    [
        ((60, 6, 10), (240, 24, 10), 4),  # four times the ports, with as many members each
        ((40, 4, 10), (40, 16, 10), 4),  # four times the groups
        ((160, 4, 20), (160, 4, 80), 4),  # four times the members of each
    ],
)
def test_cost_is_linear(backend: str, small: tuple[int, ...], large: tuple[int, ...], factor: int) -> None:
    run(backend, *small)  # the first run fills caches
    less, more = (calls(lambda sizes=sizes: run(backend, *sizes)) for sizes in (small, large))  # type: ignore[misc]
    assert more < 1.1 * factor * less


@pytest.mark.parametrize("backend", MAKE)
def test_a_membership_takes_less_than_a_kibibyte(backend: str) -> None:
    """With the join event that its user holds, ten on each port; and ten times more, no more each."""
    few, many = (
        BENCHMARK["run"](backend, 10 * members, 100, members, BENCHMARK["traced"]).membership_bytes
        for members in (5, 50)
    )
    assert many < 1024
    assert many < 1.05 * few


@pytest.mark.parametrize("backend", MAKE)
def test_a_port_costs_the_same_to_find_in_any_fabric(backend: str) -> None:
    def cost(ports: int) -> int:
        fabric = MAKE[backend](ports=ports)
        last = fabric.ports[-1].interfaces[0].ipv4
        assert last is not None

        def read() -> None:
            with open_fabric(fabric, host=ports - 1) as program:
                assert [device.name for device in program.devices()] == [fabric.ports[-1].name]
                program.event_channel().create_id().bind_addr(last)
            observer = SimObserver(fabric)
            observer.port_memberships(last)
            observer.group_ports(GROUP)

        read()
        return calls(read)

    assert cost(2000) == pytest.approx(cost(20), rel=0.1)


@pytest.mark.parametrize("order", [1, -1])
def test_unread_events_are_removed_in_linear_time(order: int) -> None:
    """Events that nobody read are taken back in linear time."""

    def cost(groups: int) -> int:
        channel, cm_id = on_port(Fabric.roce(), 0)
        names = [f"239.1.{n // 256}.{n % 256}" for n in range(groups)]
        for name in names:
            cm_id.join_multicast(name)

        def leave_all() -> None:
            for name in names[::order]:
                cm_id.leave_multicast(name)

        count = calls(leave_all)
        assert channel.get_event(0) is None
        return count

    assert cost(800) < 4.4 * cost(200)


def on_port(fabric: Fabric, number: int) -> tuple[EventChannel, CmId]:
    channel = open_fabric(fabric).event_channel()
    cm_id = channel.create_id()
    cm_id.bind_addr(f"10.0.0.{number + 1}")
    cm_id.create_qp()
    return channel, cm_id


def destination(channel: EventChannel) -> Destination:
    event = channel.get_event(10)
    assert event is not None
    assert event.check().ud is not None
    return event.ud.destination  # type: ignore[union-attr]


@pytest.mark.parametrize("backend", MAKE)
def test_routes_follow_attach_and_detach(backend: str) -> None:
    """Cached routes follow every attach and detach.

    AT-1, DT-1: also when the sender has sent to the group before.
    """
    fabric = MAKE[backend](ports=2)
    (there, sender), (here, receiver) = (on_port(fabric, number) for number in range(2))
    sender.join_multicast("239.1.1.1")
    receiver.join_multicast("239.1.1.1")
    to, _ = destination(there), destination(here)
    assert sender.qp is not None
    assert receiver.qp is not None
    for step in (None, receiver.qp.detach_mcast, receiver.qp.attach_mcast):
        if step is not None:
            step(to.gid, to.dlid)
        sender.qp.send_one(to, b"x")
        with receiver.qp.recv(9, timeout=0) as batch:
            assert len(batch) == (step != receiver.qp.detach_mcast)


def test_change_of_a_group_keeps_other_routes() -> None:
    """A change in one group leaves the routes of others alone."""
    fabric = Fabric.infiniband(ports=3)
    nodes = [on_port(fabric, number) for number in range(3)]
    to = {}
    for group in ("239.1.1.1", "239.2.2.2"):
        for channel, cm_id in nodes:
            cm_id.join_multicast(group)
            to[group] = destination(channel)
    sender = nodes[0][1].qp
    assert sender is not None
    for found in to.values():
        sender.send_one(found, b"x")
    nodes[2][1].leave_multicast("239.2.2.2")
    fabric.clock.run_until_idle()
    assert set(fabric.core.receivers.known) == {to["239.1.1.1"].dlid}


def test_mlids_end_at_0xfffe() -> None:
    """SA-MLID-1: lowest free from 0xC000, which is the IPoIB broadcast group's; SA-MLID-3: out
    of MLIDs: 0x0100, so -EINVAL, and joins of existing groups still work.
    """
    fabric = Fabric.infiniband(ports=2)
    (channel, one), (other, two) = (on_port(fabric, number) for number in range(2))
    last = 0
    for number in range(0xFFFF - 0xC001):
        one.join_multicast(f"239.0.{number // 256}.{number % 256}")
        event = channel.get_event(10)
        assert event is not None
        assert event.ud is not None
        last = event.ud.destination.dlid
        one.qp.detach_mcast(event.ud.destination.gid, last)  # type: ignore[union-attr]  # a device holds 8192
    assert last == 0xFFFE
    for cm_id, events in ((one, channel), (two, other)):
        cm_id.join_multicast("239.255.0.1")
        refused = events.get_event(10)
        assert refused is not None
        assert (refused.type, refused.errno) == (CmEventType.MULTICAST_ERROR, errno.EINVAL)
        assert "NO_RESOURCES (0x0100)" in refused.detail
    two.join_multicast("239.0.0.7")
    assert destination(other).dlid == 0xC008
    one.leave_multicast("239.0.0.9")
    two.leave_multicast("239.255.0.1")
    two.join_multicast("239.255.0.1")
    assert destination(other).dlid == 0xC00A


@pytest.mark.long
@pytest.mark.parametrize("backend", MAKE)
def test_the_largest_fabric_runs(backend: str) -> None:
    run(backend, 65_000, 10, 10)


@pytest.mark.parametrize("backend", MAKE)
def test_a_larger_one_is_refused(backend: str) -> None:
    with pytest.raises(ValueError, match=r"ports is 65001: allowed are 1\.\.65000"):
        MAKE[backend](ports=65_001)


def test_open_endpoint_reuses_port_descriptions() -> None:
    """Opening an endpoint does not describe every port anew."""
    cost = {}
    for ports in (10, 10, 1000):  # the first one of a process makes what all others find made
        backend = open_fabric(Fabric.roce(ports=ports))
        addresses = [str(device.ports[0].addresses[0]) for device in backend.devices()]
        cost[ports] = calls(lambda: mcast.open_endpoint(backend, addresses[-1]))  # noqa: B023
    assert (cost[1000] - cost[10]) / 990 < 10


@pytest.mark.parametrize("make", MAKE.values())
def test_devices_are_described_as_they_are_now(make: Callable[..., Fabric]) -> None:
    fabric = make(ports=2)
    backend, port = open_fabric(fabric), fabric.ports[0]
    seen = [backend.devices()]

    def changed() -> bool:
        seen.append(backend.devices())
        return seen[-1] != seen[-2] and seen[-1] == tuple(p.info() for p in fabric.ports if not p.removed)

    assert backend.devices() == seen[0]
    fabric.set_link(port, up=False)
    assert changed()
    fabric.set_link(port, up=True)
    assert changed()
    fabric.set_ipv4(port, None)
    assert changed()
    fabric.remove_device(port)
    assert changed()
    fabric.restore_device(port)
    assert changed()
    if fabric.sa is not None:
        fabric.change_lid(port)
        assert changed()
