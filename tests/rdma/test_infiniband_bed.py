"""What the InfiniBand test bed reads from OpenSM and switches; no device is needed."""

from __future__ import annotations

from ipaddress import IPv4Address, ip_address

import pytest

from mcast.api import Gid
from mcast.backends.rdma.host_bed import of_one_network
from mcast.backends.rdma.net.groups import SaRecord, read_records
from mcast.backends.rdma.net.hostnet import InterfaceAddress
from mcast.backends.rdma.roce_bed import RocePort
from mcast.wire import mad
from mcast.wire.mcmember import JoinState

SAQUERY = """MCMember Record dump:
\t\tMGID....................ff12:4001:ffff::f01:109
\t\tPortGid.................fe80::5254:0:1:11
\t\tqkey....................0x1234567
\t\tmlid....................0xc00d
\t\tmtu.....................0x84
\t\tJoinState...............0x1
\t\tProxyJoin...............0x0
MCMember Record dump:
\t\tMGID....................ff12:401b:ffff::1
\t\tPortGid.................::
\t\tmlid....................0xc003
\t\tJoinState...............0x8
"""


def test_each_dump_of_saquery_is_one_port_in_one_group() -> None:
    one, other = Gid("ff12:4001:ffff::f01:109"), Gid("ff12:401b:ffff::1")
    assert list(read_records(SAQUERY)) == [
        SaRecord(one, 0xC00D, Gid("fe80::5254:0:1:11"), JoinState.FULL),
        SaRecord(other, 0xC003, None, JoinState.SEND_ONLY_FULL),
    ]
    assert list(read_records("")) == []


@pytest.mark.parametrize(
    ("port", "mlid", "modifier"),
    [(1, 0xC000, 0), (15, 0xC01F, 0), (16, 0xC020, 1 << 28 | 1), (35, 0xC3FF, 2 << 28 | 31)],
)
def test_a_switch_is_asked_for_the_block_of_the_port_and_the_mlid(
    port: int, mlid: int, modifier: int
) -> None:
    request = mad.get_multicast_block(7, port, mlid)
    assert len(request) == mad.MAD_BYTES
    assert request[:4] == bytes((1, 1, 1, 1))  # a Get of class 1, the LID-routed one
    assert int.from_bytes(request[16:18]) == 0x1B
    assert int.from_bytes(request[20:24]) == modifier


def test_a_bit_of_a_block_is_a_port_of_an_mlid() -> None:
    block = bytearray(64)
    block[2 * 5 : 2 * 5 + 2] = (1 << 3).to_bytes(2)  # the sixth MLID, the fourth port
    said = {
        (port, mlid)
        for port in range(16, 32)
        for mlid in range(0xC020, 0xC040)
        if mad.block_sends(bytes(block), port, mlid)
    }
    assert said == {(19, 0xC025)}


def test_the_ports_of_a_fabric_are_those_of_the_largest_network() -> None:
    def port(text: str) -> RocePort:
        return RocePort(f"of {text}", 1, "eth0", InterfaceAddress(ip_address(text), 24), None)

    ports = {IPv4Address(text): port(text) for text in ("10.0.0.1", "10.0.1.1", "10.0.1.2")}
    assert set(of_one_network(ports)) == {IPv4Address("10.0.1.1"), IPv4Address("10.0.1.2")}
    assert of_one_network({}) == {}
