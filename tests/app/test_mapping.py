"""From address to MGID (facts: SA, MGID mapping), and the address values themselves."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mcast.addresses import AF_IB, AF_INET, AF_INET6, Gid, McastAddress, Mgid
from mcast.api import PortSpace
from mcast.mapping import ZERO_GID, infiniband_mgid, ipoib_broadcast_mgid, roce_mgid

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
def test_the_rows_of_the_fact_sheet(
    address: IPv4Address | IPv6Address | Mgid, space: PortSpace, mgid: str
) -> None:
    assert infiniband_mgid(address, space, BROADCAST) == Gid(mgid)


@given(groups_v4, scopes, pkeys)
def test_ipv4_keeps_28_bits_and_takes_scope_and_pkey_of_the_broadcast_group(
    address: IPv4Address, scope: int, pkey: int
) -> None:
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
    assert McastAddress.model_validate(made.model_dump()) == made
    assert hash(McastAddress(address=address, port=port)) == hash(made)


@given(st.integers(0, (1 << 32) - 1).map(IPv4Address).filter(lambda address: not address.is_multicast))
def test_no_unicast_address_is_a_group(address: IPv4Address) -> None:
    with pytest.raises(ValidationError, match=r"not a multicast group: allowed are 224\.0\.0\.0/4"):
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
