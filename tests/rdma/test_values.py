"""Addresses, memory layout and IGMP packets: pure functions, checked against what the standards print."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest

from mcast.api import QpInit
from mcast.backends.net.igmp_listener import querier, reports
from mcast.backends.rdma import slab, sockaddr
from mcast.wire.addresses import AF_IB, AF_UNIX, McastAddress, Mgid


def test_an_ipv4_group_is_a_sockaddr_in() -> None:
    raw = sockaddr.group(McastAddress.of("239.1.2.3", 5000))
    assert raw == struct.pack("=H", socket.AF_INET) + bytes([0x13, 0x88, 239, 1, 2, 3]) + bytes(8)


def test_an_ipv6_group_is_a_sockaddr_in6() -> None:
    raw = sockaddr.group(McastAddress.of("ff0e::1"))
    assert raw is not None
    assert len(raw) == 28
    assert raw[:2] == struct.pack("=H", socket.AF_INET6)
    assert raw[8:24] == IPv6Address("ff0e::1").packed


def test_a_raw_mgid_is_a_sockaddr_ib() -> None:
    mgid = Mgid("ff12:401b::1")
    raw = sockaddr.group(McastAddress.of(mgid))
    assert raw is not None
    assert (len(raw), raw[:2], raw[8:24]) == (48, struct.pack("=H", AF_IB), mgid)


@pytest.mark.parametrize(("address", "family"), [(None, 0), (AF_UNIX, AF_UNIX)])
def test_raw_values_are_bare_families(address: object, family: int) -> None:
    raw = sockaddr.group(McastAddress.model_construct(address=address))
    assert raw == struct.pack("=H", family) + bytes(126)


def test_no_address_is_null() -> None:
    assert sockaddr.group(None) is None


def test_a_source_has_no_port() -> None:
    assert sockaddr.source(ip_address("10.0.0.1"))[2:8] == bytes([0, 0, 10, 0, 0, 1])


@pytest.mark.parametrize("size", [0, 1, 64, 1000, None])
def test_nothing_overlaps_in_the_slab(size: int | None) -> None:
    plan, total = slab.layout(QpInit(max_send_wr=3, max_recv_wr=5, max_recv_size=size), 1024, 4096)
    headers = [(slot * plan.grh_stride, 40) for slot in range(5)]
    receives = [(plan.recv_offset + slot * plan.recv_stride, plan.recv_room) for slot in range(5)]
    sends = [(plan.send_offset + slot * plan.send_stride, 4096) for slot in range(3)]
    end = 0
    for start, length in [*headers, *receives, *sends]:
        assert start >= end
        end = start + length
    assert end <= total
    assert plan.recv_room == (1024 if size is None else size)
    assert all(start % 64 == 0 for start, _ in [*receives, *sends])


HOST, GROUP = IPv4Address("10.0.0.1"), IPv4Address("239.1.2.3")
QUERY = b"\x11\x64\0\0" + bytes(4)


def ip(igmp: bytes, options: bytes = b"\x94\x04\0\0", protocol: int = 2) -> bytes:
    first = 0x40 | (20 + len(options)) // 4
    return bytes([first, *bytes(8), protocol, 0, 0]) + HOST.packed + bytes(4) + options + igmp


@pytest.mark.parametrize(
    ("igmp", "groups"),
    [
        (b"\x16\0\0\0" + GROUP.packed, [GROUP]),
        (b"\x12\0\0\0" + GROUP.packed, [GROUP]),
        (b"\x17\0\0\0" + GROUP.packed, []),
        (b"\x11\0\0\0" + GROUP.packed, []),
        (b"\x22\0\0\0\0\0\0\2" + b"\3\0\0\0" + bytes(4) + b"\4\0\0\0" + GROUP.packed, [GROUP]),
        (b"\x22\0\0\0\0\0\0\2" + b"\1\1\0\1" + bytes(12) + b"\2\0\0\0" + GROUP.packed, [GROUP]),
    ],
    ids=[
        "v2 report",
        "v1 report",
        "v2 leave",
        "query",
        "v3 change to exclude",
        "v3 after sources and auxiliary",
    ],
)
def test_igmp_reports(igmp: bytes, groups: list[IPv4Address]) -> None:
    assert list(reports(ip(igmp))) == groups
    assert list(reports(ip(igmp, b""))) == groups
    assert querier(ip(igmp)) == (HOST if igmp[0] == QUERY[0] else None)


def broken() -> Iterator[bytes]:
    """Each beginning of each message, and headers that promise more, or less, than they can."""
    for whole in (ip(QUERY), ip(b"\x16\0\0\0" + GROUP.packed), ip(b"\x22" + bytes(15))):
        yield from (whole[:size] for size in range(len(whole)))
        yield b"\x4f" + whole[1:]
    yield b"\x44" + ip(QUERY)[1:16] + QUERY[:1] * 12
    yield ip(b"\x22" + bytes(5) + b"\xff\xff\1\xff\xff\xff" + GROUP.packed)


def test_broken_igmp_says_nothing() -> None:
    for packet in broken():
        assert (querier(packet), list(reports(packet))) == (None, []), packet


@pytest.mark.parametrize(
    "packet", [ip(QUERY, protocol=17), b"\x66" + ip(QUERY)[1:], QUERY[:1] * 64], ids=["UDP", "IPv6", "other"]
)
def test_only_igmp_is_a_query(packet: bytes) -> None:
    """A socket hears all until it has its filter."""
    assert querier(packet) is None
