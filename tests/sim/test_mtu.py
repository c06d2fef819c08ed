"""Ports of one fabric with different MTUs: what a port cannot take is dropped there, and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import mcast
from mcast.api import InvalidArgument, QpState
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.scenario import model
from mcast.backends.sim.scenario.runner import run
from mcast.backends.sim.trace.events import MessagesLost, PortMade
from mcast.backends.sim.trace.timeline import page

from .test_forwarding import join_all, nodes

GROUP = "239.1.1.1"
MTUS = (4096, 1024, 2048)
MAKE = [Fabric.roce, Fabric.infiniband]


@pytest.mark.parametrize("make", MAKE)
def test_each_port_has_its_mtu(make: Callable[..., Fabric]) -> None:
    """Devices and queue pairs name the MTU of their own port."""
    fabric = make(ports=3, mtu=list(MTUS))
    backend = open_fabric(fabric)
    assert tuple(device.ports[0].active_mtu for device in backend.devices()) == MTUS
    assert tuple(node.qp.max_message_size for node in nodes(fabric, 3)) == MTUS


def test_a_port_drops_and_counts_what_is_too_large() -> None:
    """The sender and the ports that can take a message notice nothing, and the queue pair goes on."""
    fabric = Fabric.roce(ports=3, mtu=MTUS, trace=True)
    sender, small, middle = nodes(fabric, 3)
    destination = join_all(sender, small, middle)
    sizes = [1024, 1025, 2048, 4096, 1]
    sender.qp.send(destination, [bytes(size) for size in sizes])
    assert [[len(one) for one in node.received()] for node in (sender, small, middle)] == [
        sizes,
        [1024, 1],
        [1024, 1025, 2048, 1],
    ]
    assert [port.oversized for port in fabric.ports] == [0, 3, 1]
    assert [node.qp.counters.dropped_mtu for node in (sender, small, middle)] == [0, 3, 1]
    assert small.qp.state is QpState.RTS
    assert fabric.trace is not None
    lost = [event for _, event in fabric.trace if isinstance(event, MessagesLost)]
    reason = "it is larger than the port's MTU"
    assert [(one.port, one.first, one.count, one.reason) for one in lost] == [
        ("roce1", 1, 3, reason),
        ("roce2", 3, 1, reason),
    ]
    made = {event.port: event.mtu for _, event in fabric.trace if isinstance(event, PortMade)}
    assert tuple(made.values()) == MTUS
    assert "it is larger than the port&#x27;s MTU" in page(fabric.trace, "mixed MTUs")


def test_the_port_drops_before_a_key_is_looked_at() -> None:
    """Neither the Q_Key nor the room of a receive matters for a message that the port does not take."""
    fabric = Fabric.roce(ports=2, mtu=[2048, 1024])
    sender, small = nodes(fabric, 2)
    destination = join_all(sender, small)
    wrong = destination.model_copy(update={"qkey": destination.qkey ^ 1})
    sender.qp.send(wrong, [bytes(2048), b"x"])
    counters = small.qp.counters
    assert (counters.dropped_mtu, counters.dropped_qkey, counters.dropped_too_long) == (1, 1, 0)
    assert fabric.ports[1].qkey_violations == 1


@pytest.mark.parametrize("shared", [False, True], ids=["own", "served"])
def test_stats_say_what_was_too_large(shared: bool, path: Any) -> None:
    """The receiver's statistics have the reason; the counter of its port is beside it."""
    from mcast.backends.sim.served.server import FabricServer, Serving

    fabric = Fabric.roce(ports=2, mtu=[4096, 1024], clock="wall" if shared else "virtual")
    if shared:
        with (
            Serving(FabricServer(fabric, path)),
            mcast.open_backend("sim", socket=path, host="all") as backend,
        ):
            _say_what_was_too_large(backend)
    else:
        with open_fabric(fabric) as backend:
            _say_what_was_too_large(backend)


def _say_what_was_too_large(backend: mcast.Backend) -> None:
    with (
        mcast.open_endpoint(backend, "10.0.0.1") as one,
        mcast.open_endpoint(backend, "10.0.0.2") as other,
        one.sender(GROUP) as sender,
        other.join(GROUP) as member,
    ):
        assert sender.max_message_size == 4096
        sender.send(bytes(4096))
        sender.send(b"small")
        message = member.recv(timeout=30)
        assert message is not None
        assert bytes(message.payload) == b"small"
        stats = other.stats()
        assert stats.dropped["larger than the MTU"] == 1
        assert stats.port_counters["oversized"] == 1
        assert one.stats().dropped["larger than the MTU"] == 0


def test_infiniband_refuses_the_join_instead() -> None:
    """The maker of a group gives it its MTU, and the SA keeps out a port that has less."""
    fabric = Fabric.infiniband(ports=2, mtu=[4096, 1024])
    large, small = nodes(fabric, 2)
    large.join("239.1.1.1")
    with pytest.raises(InvalidArgument, match="the port's MTU is 1024 bytes, the group's 4096 bytes"):
        small.join("239.1.1.1")
    small.join("239.1.1.2")
    assert large.qp.max_message_to(large.join("239.1.1.2")) == 1024


@pytest.mark.parametrize(
    ("mtu", "sentence"),
    [
        ([4096, 1024, 1024], "mtu has 3 numbers for 2 ports: give one for each port, or one number for all"),
        ([4096, 1500], "mtu is 1500: allowed are 256, 512, 1024, 2048, 4096"),
        ([4096, "1024"], "mtu is '1024': allowed are"),
        ([4096, True], "mtu is True: allowed are"),
        ([], r"mtu is \[\]: allowed are"),
    ],
)
def test_a_wrong_list_of_mtus_is_refused(mtu: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Fabric.roce(ports=2, mtu=mtu)


SCENARIO: dict[str, Any] = {
    "name": "mixed MTUs",
    "seconds": 1,
    "fabric": {"ports": 3, "mtu": MTUS},
    "members": [{"group": GROUP, "ports": [0, 1, 2]}],
    "traffic": [{"group": GROUP, "port": 0, "start": 0.1, "every": 0.1, "size": 2048}],
}


def test_a_scenario_has_an_mtu_for_each_port() -> None:
    result = run(model.Scenario.model_validate(SCENARIO))
    causes = [dict(member.causes) for member in result.members]
    assert causes == [{}, {"it is larger than the port's MTU": 9}, {}]


@pytest.mark.parametrize(
    ("mtu", "port", "sentence"),
    [
        (MTUS, 1, "size 2048 is larger than the MTU, 1024 bytes"),
        ((4096, 1024), 0, "mtu has 2 numbers for 3 ports"),
        ((4096, 1025, 4096), 0, "is neither 256, 512, 1024, 2048 or 4096, nor a list of these"),
        (1000, 0, "1000 is neither 256, 512, 1024, 2048 or 4096, nor a list of these"),
    ],
)
def test_a_scenario_with_a_wrong_mtu_is_refused(mtu: Any, port: int, sentence: str) -> None:
    fabric, traffic = {"ports": 3, "mtu": mtu}, [{**SCENARIO["traffic"][0], "port": port}]
    with pytest.raises(ValueError, match=sentence):
        model.Scenario.model_validate(SCENARIO | {"fabric": fabric, "traffic": traffic})
