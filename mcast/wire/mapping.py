"""Mapping between multicast addresses, MGIDs and Ethernet MAC addresses, as the kernel does it.

Sources: SA-MAP-1, SA-MAP-2, SA-MAP-3, SA-MAP-4 in docs/facts/sa.md; RFC 4391, 4 (MGIDs of IPoIB); RFC 1112,
6.4 and RFC 2464, 7 (MAC addresses of groups); RFC 4291, 2.7 (flags and scope, the same in an MGID: IBA vol 1,
4.1.1).
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

from mcast.wire.addresses import ZERO_GID, Gid, GroupName, McastAddress
from mcast.wire.kinds import PortSpace
from mcast.wire.partition import DEFAULT_PKEY

LINK_LOCAL = 2
"""The scope of the IPoIB broadcast group unless somebody chose another."""

TRANSIENT = 1
"""The flag T of an MGID: not assigned for good."""

_AS_IS_MASK, _AS_IS = 0xFFF0FFFF, 0xFF10A01B
"""An IPv6 address with these bits is an MGID that an SA assigned; a join uses it unchanged."""

_ROCE_V1_IPV4 = b"\xff\x0e" + bytes(8) + b"\xff\xff"
_IPV4_GROUPS = 0xE0000000
_IPV4_MAC, _IPV6_MAC = b"\x01\x00\x5e", b"\x33\x33"


IPV6_GROUPS_OF_MGID = 1 << 40
"""Number of IPv6 groups with one MGID on InfiniBand: they differ in 120 bits, of which the MGID has 80."""
IPV6_GROUPS_OF_MAC = 1 << 88
"""Number of IPv6 groups with one MAC address, which has 32 of these bits."""


class Signature(Enum):
    """Bytes 2 and 3 of an MGID, if they say what made the MGID, and from which kind of address."""

    IPOIB_IPV4 = 0x401B
    IPOIB_IPV6 = 0x601B
    RDMA_CM_IPV4 = 0x4001
    RDMA_CM_IPV6 = 0x6001
    SA_ASSIGNED = 0xA01B


_IPV4_SIGNATURES = frozenset({Signature.IPOIB_IPV4, Signature.RDMA_CM_IPV4})


class MgidFields(NamedTuple):
    """The fields of an MGID that begins with ff.

    flags      4 bits, 0, R, P and T; only MGIDs with flags 1 (T, transient) have a signature
    scope      4 bits, as in an IPv6 address
    signature  None if bytes 2 and 3 have no meaning of their own
    pkey       bytes 4 and 5, if the signature says that they are the partition's P_Key; else None
    """

    flags: int
    scope: int
    signature: Signature | None
    pkey: int | None


# --- from an address to its MGID and MAC -------------------------------------------------


def infiniband_mgid(address: GroupName, port_space: PortSpace, broadcast: bytes) -> Gid:
    """Return the MGID of an address on InfiniBand.

    `broadcast` is the IPoIB broadcast MGID, which gives scope and P_Key.

    239.1.1.1 in PortSpace.UDP becomes ff12:4001:ffff::f01:101: the last 28 bits of the IPv4 address, or the
    last 10 bytes of an IPv6 address, behind the signature 401B (601B for IPv6), whose second byte
    PortSpace.UDP changes to 01.
    """
    if isinstance(address, Gid):
        return Gid(bytes(address))
    if not int(address):
        return ZERO_GID
    packed = address.packed
    if isinstance(address, IPv4Address):
        signature, tail = b"\x40\x1b", bytes(6) + bytes((packed[0] & 0x0F,)) + packed[1:]
    elif is_sa_assigned(address):
        return Gid(packed)
    else:
        signature, tail = b"\x60\x1b", packed[6:]
    if port_space is PortSpace.UDP:
        signature = signature[:1] + b"\x01"
    return Gid(broadcast[:2] + signature + broadcast[4:6] + tail)


@lru_cache(maxsize=4096)
def infiniband_group(address: McastAddress, port_space: PortSpace, broadcast: bytes) -> object:
    """Return a value that is equal for all addresses of one group on InfiniBand.

    The MGID, or else the address's key.
    """
    group: object = address.address
    return infiniband_mgid(group, port_space, broadcast) if isinstance(group, GroupName) else address.key


@lru_cache(maxsize=4096)
def ipoib_broadcast_mgid(pkey: int = DEFAULT_PKEY, scope: int = LINK_LOCAL) -> bytes:
    """The MGID of a partition's IPoIB broadcast group, ff1<scope>:401b:<pkey>::ffff:ffff (RFC 4391, 4)."""
    return bytes((0xFF, 0x10 | scope)) + b"\x40\x1b" + pkey.to_bytes(2) + bytes(6) + b"\xff" * 4


def is_sa_assigned(address: IPv6Address) -> bool:
    """Return True if the kernel takes the IPv6 address for an MGID that an SA assigned."""
    return int.from_bytes(address.packed[:4]) & _AS_IS_MASK == _AS_IS


def roce_mgid(address: IPv4Address | IPv6Address) -> Gid:
    """The MGID on RoCEv2: `::ffff:a.b.c.d` for an IPv4 address, an IPv6 address unchanged."""
    return Gid(address)


def roce_v1_mgid(address: IPv4Address | IPv6Address) -> Gid:
    """The MGID on RoCEv1: `ff0e::ffff:a.b.c.d` for an IPv4 address, an IPv6 address unchanged."""
    return Gid(_ROCE_V1_IPV4 + address.packed if isinstance(address, IPv4Address) else address)


def group_mac(group: Gid) -> bytes:
    """Return the MAC address of a group on RoCE.

    From 23 bits of an IPv4 address, otherwise from the last 32 bits of the MGID.
    """
    if group.ipv4 is not None:
        return _IPV4_MAC + bytes((group[13] & 0x7F,)) + group[14:]
    return _IPV6_MAC + group[12:]


def is_mapped(address: GroupName, mgid: bytes) -> bool:
    """Return True if a join of `address` can lead to `mgid`.

    That is on either link layer, in some partition and port space."""
    if mgid == bytes(Gid(address)):
        return True
    if isinstance(address, Gid):
        return False
    broadcast = mgid[:2] + bytes(2) + mgid[4:6]
    return any(
        infiniband_mgid(address, space, broadcast) == mgid for space in (PortSpace.UDP, PortSpace.IPOIB)
    )


# --- and back ----------------------------------------------------------------------------


def mgid_fields(mgid: Gid) -> MgidFields | None:
    """Return the fields of an MGID; None if the MGID does not begin with ff.

    The MGID of an IPv4 group on RoCEv2 does not.
    """
    if mgid[0] != 0xFF:
        return None
    flags, number = mgid[1] >> 4, int.from_bytes(mgid[2:4])
    signature = next((one for one in Signature if one.value == number and flags == TRANSIENT), None)
    has_pkey = signature is not None and signature is not Signature.SA_ASSIGNED
    return MgidFields(flags, mgid[1] & 15, signature, int.from_bytes(mgid[4:6]) if has_pkey else None)


def ipv4_group_of(mgid: Gid) -> IPv4Address | None:
    """The IPv4 group whose join leads to this MGID, on either link layer; None if there is none."""
    if mgid.ipv4 is not None or mgid.startswith(_ROCE_V1_IPV4):
        found = IPv4Address(mgid[12:])
        return found if found.is_multicast else None
    fields, tail = mgid_fields(mgid), int.from_bytes(mgid[6:])
    if fields is None or fields.signature not in _IPV4_SIGNATURES or tail >> 28:
        return None
    return IPv4Address(_IPV4_GROUPS | tail)


def is_ipoib_broadcast(mgid: Gid) -> bool:
    """Return True for the MGID of an IPoIB broadcast group, in any partition and scope."""
    fields = mgid_fields(mgid)
    return (
        fields is not None
        and fields.pkey is not None
        and mgid == ipoib_broadcast_mgid(fields.pkey, fields.scope)
    )


def ipv6_group_of(mgid: Gid) -> IPv6Address:
    """Return one of the IPv6 groups whose join leads to this MGID on InfiniBand: the global one."""
    return IPv6Address(bytes((0xFF, 0x0E)) + bytes(4) + mgid[6:])


def ipv6_groups_like(group: IPv6Address) -> tuple[IPv6Address, ...]:
    """Return some of the IPv6 groups with the MGID of this one, in other scopes."""
    return tuple(IPv6Address(bytes((0xFF, scope)) + group.packed[2:]) for scope in (0x2, 0x5, 0x8, 0xE))


def is_group_mac(mac: bytes) -> bool:
    """Return True for the MAC address of IPv4 or IPv6 groups on RoCE."""
    return mac[:2] == _IPV6_MAC or bool(ipv4_groups_of(mac))


def ipv4_groups_of(mac: bytes) -> tuple[IPv4Address, ...]:
    """The 32 IPv4 groups of a MAC address 01:00:5e:..., in order; () for another MAC address."""
    if mac[:3] != _IPV4_MAC or mac[3] >> 7:
        return ()
    low = int.from_bytes(mac[3:])
    return tuple(IPv4Address(_IPV4_GROUPS | high << 23 | low) for high in range(32))
