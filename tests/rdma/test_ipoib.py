"""The IPoIB interfaces of a port, found in a sysfs that the test has planted."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

import pytest

from mcast.backends.rdma.backend import RdmaBackend
from mcast.backends.rdma.doctor import host
from mcast.backends.rdma.native import Native
from mcast.backends.rdma.net import ipoib
from mcast.backends.rdma.net.ipoib import IpoibInterface, interfaces_of
from mcast.wire.addresses import Gid
from mcast.wire.mapping import ipoib_broadcast_mgid

from ..card.card import Card, infiniband_port
from ..card.ipoib import plant
from ..card.provider import CardBackend

FIRST, SECOND = Gid("fe80::1"), Gid("fe80::2")
WHOLE, PART = Gid(ipoib_broadcast_mgid()), Gid(ipoib_broadcast_mgid(0x8001))


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The interfaces of one device with two ports, one of a partition, and some that are of no port."""
    net = tmp_path / "net"
    monkeypatch.setattr(ipoib, "NET", net)
    plant(net, "ib0", gid=FIRST, broadcast=WHOLE, mtu=2044, carrier=1)
    plant(net, "ib0.8001", gid=FIRST, broadcast=PART, mtu=4092)
    plant(net, "ib1", gid=SECOND, broadcast=WHOLE, mtu=65520, flags="0x1002")
    plant(net, "eth0", type=1, address="02:00:00:00:00:01", mtu=1500)
    plant(net, "opa0", address="00:01")
    plant(net, "odd0", address="not hexadecimal")
    (net / "gone").mkdir()
    return net


def test_interfaces_are_found_by_the_gid(net: Path) -> None:
    """A port has the interfaces with its gid in their hardware address."""
    assert interfaces_of({FIRST}) == (
        IpoibInterface("ib0", WHOLE, 2048, up=True, carrier=True),
        IpoibInterface("ib0.8001", PART, 4096, up=True, carrier=False),
    )
    assert interfaces_of({Gid("fe80::9"), SECOND}) == (
        IpoibInterface("ib1", WHOLE, 65524, up=False, carrier=False),
    )
    (part,) = interfaces_of({FIRST}, {"ib0.8001", "ib1", "eth0", "nowhere"})
    assert part.name == "ib0.8001"
    assert interfaces_of(set()) == interfaces_of({Gid("fe80::9")}) == ()


def test_each_port_of_a_device_has_its_own_addresses(
    net: Path, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = {"ib0": "10.0.0.1", "ib0.8001": "10.1.0.1", "ib1": "10.0.0.2", "eth0": "192.0.2.1"}
    known = [(name, ip_address(text).packed) for name, text in addresses.items()]
    monkeypatch.setattr(Native, "netdev_addresses", lambda self: known)
    card.add(infiniband_port("10.0.0.1", 1), infiniband_port("10.0.0.2", 2), name=b"hca0")
    with CardBackend(card) as backend:
        (device,) = RdmaBackend.devices(backend)
    assert [[str(one) for one in port.addresses] for port in device.ports] == [
        ["10.0.0.1", "10.1.0.1"],
        ["10.0.0.2"],
    ]
    facts = [host._port(device.name, port, {}, {}) for port in device.ports]
    assert [[one.name for one in port.ipoib] for port in facts] == [["ib0", "ib0.8001"], ["ib1"]]
