"""From address to MGID (SA-MAP-3), and the address values themselves."""

from __future__ import annotations

import copy
import pickle
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from mcast.api import PortSpace
from mcast.wire import mapping
from mcast.wire.addresses import AF_IB, AF_INET, AF_INET6, ZERO_GID, Gid, McastAddress, Mgid
from mcast.wire.mapping import (
    Signature,
    group_mac,
    infiniband_mgid,
    ipoib_broadcast_mgid,
    ipv4_group_of,
    ipv4_groups_of,
    is_mapped,
    mgid_fields,
    roce_mgid,
    roce_v1_mgid,
)

groups_v4 = st.integers(0xE0000000, 0xEFFFFFFF).map(IPv4Address)
groups_v6 = st.integers(0xFF << 120, (1 << 128) - 1).map(IPv6Address)
groups = groups_v4 | groups_v6 | groups_v6.map(Mgid)
pkeys = st.integers(1, 0x7FFF).map(lambda base: base | 0x8000)
scopes = st.integers(0, 15)

BROADCAST = ipoib_broadcast_mgid(0xFFFF)


@pytest.mark.parametrize(
    ("address", "space", "mgid"),
    [
        (IPv4Address("239.1.1.1"), PortSpace.UDP, "ff12:4001:ffff::f01:101"),
        (IPv4Address("239.1.1.1"), PortSpace.IPOIB, "ff12:401b:ffff::f01:101"),
        (IPv6Address("ff0e::1:2"), PortSpace.UDP, "ff12:6001:ffff::1:2"),
        (IPv6Address("ff0e::1:2"), PortSpace.IPOIB, "ff12:601b:ffff::1:2"),
        (IPv6Address("ff12:a01b:fe80::1"), PortSpace.UDP, "ff12:a01b:fe80::1"),
        (Mgid("ff0e::1234"), PortSpace.UDP, "ff0e::1234"),
        (IPv4Address(0), PortSpace.UDP, "::"),
        (IPv6Address(0), PortSpace.UDP, "::"),
    ],
)
def test_an_address_leads_to_its_mgid(
    address: IPv4Address | IPv6Address | Mgid, space: PortSpace, mgid: str
) -> None:
    assert infiniband_mgid(address, space, BROADCAST) == Gid(mgid)


@given(groups_v4, scopes, pkeys)
def test_ipv4_keeps_28_bits(address: IPv4Address, scope: int, pkey: int) -> None:
    """IPv4 keeps 28 bits and takes scope and P_Key of the broadcast group."""
    mgid = infiniband_mgid(address, PortSpace.UDP, ipoib_broadcast_mgid(pkey, scope))
    assert mgid[:2] == bytes((0xFF, 0x10 | scope))
    assert mgid[2:4] == b"\x40\x01"
    assert int.from_bytes(mgid[4:6]) == pkey
    assert int.from_bytes(mgid[6:]) == int(address) & 0x0FFFFFFF


@given(groups_v4)
def test_roce_maps_ipv4_one_to_one(address: IPv4Address) -> None:
    mgid = roce_mgid(address)
    assert mgid.ipv4 == address
    assert mgid.is_multicast
    assert str(mgid) == f"::ffff:{address}"


@given(groups_v4, scopes, pkeys)
def test_every_mgid_of_an_ipv4_group_leads_back_to_it(address: IPv4Address, scope: int, pkey: int) -> None:
    broadcast = ipoib_broadcast_mgid(pkey, scope)
    on_infiniband = [infiniband_mgid(address, space, broadcast) for space in (PortSpace.UDP, PortSpace.IPOIB)]
    for mgid in (*on_infiniband, roce_mgid(address), roce_v1_mgid(address)):
        assert ipv4_group_of(mgid) == address
    for mgid, signature in zip(on_infiniband, (Signature.RDMA_CM_IPV4, Signature.IPOIB_IPV4), strict=True):
        assert is_mapped(address, mgid)
        assert mgid_fields(mgid) == (1, scope, signature, pkey)


@given(st.binary(min_size=16, max_size=16).map(Gid) | groups_v6.map(Gid))
def test_an_mgid_leads_back_only_to_what_leads_to_it(mgid: Gid) -> None:
    address = ipv4_group_of(mgid)
    if address is not None:
        assert is_mapped(address, mgid) or mgid == roce_v1_mgid(address)


@pytest.mark.parametrize(
    "mgid",
    [
        "ff12:401b:ffff::ffff:ffff",  # IPoIB's broadcast is no group of IPv4
        "ff12:401b:ffff:1::f01:101",
        "ff12:6001:ffff::1:2",
        "ff0e::1:2",
        "ff0e::ffff:a00:1",  # the shape of RoCEv1's, of a unicast address
        "::ffff:10.0.0.1",
    ],
)
def test_what_no_ipv4_group_made_leads_to_none(mgid: str) -> None:
    assert ipv4_group_of(Gid(mgid)) is None


@pytest.mark.parametrize(
    ("group", "mac"),
    [
        ("::ffff:224.128.64.32", "01:00:5e:00:40:20"),  # RFC 1112, 6.4
        ("::ffff:239.129.2.3", "01:00:5e:01:02:03"),
        ("ff02::1:ff28:9c5a", "33:33:ff:28:9c:5a"),  # RFC 2464, 7
        ("ff0e::ffff:ef01:101", "33:33:ef:01:01:01"),
    ],
)
def test_the_mac_address_of_a_group(group: str, mac: str) -> None:
    assert group_mac(Gid(group)).hex(":") == mac


@given(groups_v4)
def test_32_ipv4_groups_share_a_mac_address(address: IPv4Address) -> None:
    mac = group_mac(roce_mgid(address))
    same = ipv4_groups_of(mac)
    assert len(set(same)) == 32
    assert address in same
    assert {group_mac(roce_mgid(other)) for other in same} == {mac}
    assert all(other.is_multicast for other in same)


@pytest.mark.parametrize("mac", ["01:00:5e:80:00:00", "33:33:00:00:00:01", "02:00:5e:01:02:03"])
def test_another_mac_address_has_no_ipv4_group(mac: str) -> None:
    assert ipv4_groups_of(bytes.fromhex(mac.replace(":", ""))) == ()


@given(groups)
def test_every_mapped_group_is_a_multicast_gid(address: IPv4Address | IPv6Address | Mgid) -> None:
    assert infiniband_mgid(address, PortSpace.UDP, BROADCAST).is_multicast


@given(groups, st.integers(0, 0xFFFF))
def test_an_address_survives_its_text(address: IPv4Address | IPv6Address | Mgid, port: int) -> None:
    made = McastAddress(address=address, port=port)
    family = {IPv4Address: AF_INET, IPv6Address: AF_INET6, Mgid: AF_IB}[type(address)]
    assert made.family == family
    if family != AF_IB:
        assert McastAddress.of(str(made)) == made
    assert hash(McastAddress(address=address, port=port)) == hash(made)
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made
    assert eval(repr(made)) == made


def test_an_address_in_a_model_is_text_in_json() -> None:
    adapter = TypeAdapter(list[McastAddress])
    assert adapter.validate_json(b'["239.1.1.1:7"]') == [McastAddress.of("239.1.1.1", 7)]
    assert adapter.dump_json(adapter.validate_python(["ff0e::1"])) == b'["ff0e::1"]'
    with pytest.raises(ValueError, match="not a multicast group"):
        adapter.validate_python(["10.0.0.1"])


def test_an_address_is_frozen() -> None:
    made = McastAddress.of("239.1.1.1")
    with pytest.raises(AttributeError, match="frozen"):
        made.port = 7
    with pytest.raises(AttributeError, match="frozen"):
        del made.port
    assert not hasattr(made, "__dict__")


@pytest.mark.parametrize("port", [-1, 0x10000, True, "7", 7.0])
def test_a_port_has_16_bits(port: Any) -> None:
    with pytest.raises(ValueError, match=r"it is one number, 0\.\.65535"):
        McastAddress(address="239.1.1.1", port=port)


@given(st.integers(0, (1 << 32) - 1).map(IPv4Address).filter(lambda address: not address.is_multicast))
def test_no_unicast_address_is_a_group(address: IPv4Address) -> None:
    with pytest.raises(ValueError, match=r"not a multicast group: allowed are 224\.0\.0\.0/4"):
        McastAddress.of(str(address))
    with pytest.raises(ValueError, match="not a multicast GID"):
        Mgid(address)


@given(st.binary(min_size=16, max_size=16))
def test_a_gid_survives_its_text(raw: bytes) -> None:
    gid = Gid(raw)
    assert Gid(str(gid)) == gid == raw
    assert gid.is_multicast == (
        raw[0] == 0xFF or (raw[:12] == bytes(10) + b"\xff\xff" and raw[12] >> 4 == 14)
    )


def test_zero_asks_the_sa_to_assign() -> None:
    assert bytes(16) == ZERO_GID


def test_ipv6_groups_of_an_mgid_lead_to_it() -> None:
    group = IPv6Address("ff15::1:2:3")
    broadcast = ipoib_broadcast_mgid()
    mgid = infiniband_mgid(group, PortSpace.UDP, broadcast)
    for one in (*mapping.ipv6_groups_like(group), mapping.ipv6_group_of(mgid)):
        assert infiniband_mgid(one, PortSpace.UDP, broadcast) == mgid


def test_broadcast_groups_and_group_macs_are_known() -> None:
    assert mapping.is_ipoib_broadcast(Gid(ipoib_broadcast_mgid(0x8001, 5)))
    assert not mapping.is_ipoib_broadcast(Gid(IPv4Address("239.1.1.1")))
    for mac, is_group in (
        ("01005e010101", True),
        ("01005e800001", False),
        ("333300000001", True),
        ("021122334455", False),
    ):
        assert mapping.is_group_mac(bytes.fromhex(mac)) is is_group
