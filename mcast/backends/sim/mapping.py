"""From a multicast address to the MGID that the kernel joins (facts: SA, MGID mapping and RoCE path)."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

from mcast.addresses import Gid, GroupName
from mcast.api import PortSpace

ZERO_GID = Gid(bytes(16))
"""Asks the SA to assign an MGID."""

_AS_IS_MASK, _AS_IS = 0xFFF0FFFF, 0xFF10A01B
"""An IPv6 address with these bits is an MGID that an SA assigned; it is used as it stands."""


def infiniband_mgid(address: GroupName, port_space: PortSpace, broadcast: bytes) -> Gid:
    """The MGID on InfiniBand; `broadcast` is the IPoIB broadcast MGID, which gives scope and P_Key.

    239.1.1.1 in PortSpace.UDP becomes ff12:4001:ffff::f01:101: 28 bits of IPv4, signature 401B (601B for
    IPv6, of which the last 10 bytes stay), and PS_UDP turns its second byte to 01.
    """
    if isinstance(address, Gid):
        return Gid(bytes(address))
    if not int(address):
        return ZERO_GID
    packed = address.packed
    if isinstance(address, IPv4Address):
        signature, tail = b"\x40\x1b", bytes(6) + bytes((packed[0] & 0x0F,)) + packed[1:]
    elif int.from_bytes(packed[:4]) & _AS_IS_MASK == _AS_IS:
        return Gid(packed)
    else:
        signature, tail = b"\x60\x1b", packed[6:]
    if port_space is PortSpace.UDP:
        signature = signature[:1] + b"\x01"
    return Gid(broadcast[:2] + signature + broadcast[4:6] + tail)


def roce_mgid(address: IPv4Address | IPv6Address) -> Gid:
    """The MGID on RoCEv2: `::ffff:a.b.c.d` for IPv4, IPv6 as it is."""
    return Gid(address)


def is_mapped(address: GroupName, mgid: bytes) -> bool:
    """Whether a join of `address` leads to `mgid`, on either link layer, in some partition and port space."""
    if mgid == bytes(Gid(address)):
        return True
    if isinstance(address, Gid):
        return False
    broadcast = mgid[:2] + bytes(2) + mgid[4:6]
    return any(
        infiniband_mgid(address, space, broadcast) == mgid for space in (PortSpace.UDP, PortSpace.IPOIB)
    )
