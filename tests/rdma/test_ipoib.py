"""The IPoIB interfaces of a port, found in a sysfs that the test has planted."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

import pytest

from mcast.addresses import Gid
from mcast.backends.rdma import ipoib
from mcast.backends.rdma.backend import RdmaBackend
from mcast.backends.rdma.ipoib import Interface, interfaces_of
from mcast.backends.rdma.native import Native
from mcast.mapping import ipoib_broadcast_mgid

from ..card.card import Card, infiniband_port
from ..card.provider import CardBackend

FIRST, SECOND = Gid("fe80::1"), Gid("fe80::2")
WHOLE, PART = Gid(ipoib_broadcast_mgid()), Gid(ipoib_broadcast_mgid(0x8001))
INFINIBAND, ETHERNET = 32, 1


def hardware(queue_pair: int, gid: bytes) -> str:
    return (queue_pair.to_bytes(4) + gid).hex(":")


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The interfaces of one device with two ports, one of a partition, and some that are of no port."""
    net = tmp_path / "net"
    monkeypatch.setattr(ipoib, "NET", net)
    for name, kind, address, broadcast, mtu in (
        ("ib0", INFINIBAND, hardware(0x80000208, FIRST), hardware(0xFFFFFF, WHOLE), 2044),
        ("ib0.8001", INFINIBAND, hardware(0x80000209, FIRST), hardware(0xFFFFFF, PART), 4092),
        ("ib1", INFINIBAND, hardware(0x8000020A, SECOND), hardware(0xFFFFFF, WHOLE), 65520),
        ("eth0", ETHERNET, "02:00:00:00:00:01", "ff:ff:ff:ff:ff:ff", 1500),
        ("opa0", INFINIBAND, "00:01", "", 0),
        ("odd0", INFINIBAND, "not hexadecimal", "", 0),
    ):
        (net / name).mkdir(parents=True)
        files = {"type": kind, "address": address, "broadcast": broadcast, "mtu": mtu, "flags": "0x1003"}
        for file, text in files.items():
            (net / name / file).write_text(f"{text}\n")
    (net / "ib0" / "carrier").write_text("1\n")
    (net / "ib1" / "flags").write_text("0x1002\n")
    (net / "gone").mkdir()
    return net


def test_a_port_has_the_interfaces_with_its_gid_in_their_hardware_address(net: Path) -> None:
    assert interfaces_of({FIRST}) == (
        Interface("ib0", WHOLE, 2048, up=True, carrier=True),
        Interface("ib0.8001", PART, 4096, up=True, carrier=False),
    )
    assert interfaces_of({Gid("fe80::9"), SECOND}) == (
        Interface("ib1", WHOLE, 65524, up=False, carrier=False),
    )
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
