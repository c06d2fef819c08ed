"""Addresses as the kernel takes them.

Raw values pass unchanged, because the stack has to refuse them, not this module.

Padding is zero, because a leave compares it (K-LEAVE-5).
"""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv6Address

from mcast.wire.addresses import AF_IB, AF_INET, AF_INET6, Gid, McastAddress

_STORAGE = 128
_FULL_MEMBER_PKEY = 0xFFFF
_FAMILY_INET, _INET = struct.pack("=H", AF_INET), struct.Struct("!2sHI8x")


def source(address: IPv4Address | IPv6Address) -> bytes:
    """sockaddr_in or sockaddr_in6 of a unicast address, port 0."""
    if isinstance(address, IPv4Address):
        return _INET.pack(_FAMILY_INET, 0, int(address))
    return _inet6(address, 0)


def group(address: McastAddress | None) -> bytes | None:
    """The sockaddr of a group; None (NULL) for None, a bare family for a value without an address."""
    if address is None:
        return None
    value: object = address.address
    if type(value) is IPv4Address:
        return _INET.pack(_FAMILY_INET, address.port, address.key)  # the key is the address as a number
    if isinstance(value, IPv6Address):
        return _inet6(value, address.port)
    if isinstance(value, Gid):
        return _ib(value, address.port)
    return struct.pack("=H", address.family).ljust(_STORAGE, b"\0")


def _inet6(address: IPv6Address, port: int) -> bytes:
    return struct.pack("=H", AF_INET6) + struct.pack("!HI16s4x", port, 0, address.packed)


def _ib(gid: Gid, port: int) -> bytes:
    return struct.pack("=H", AF_IB) + struct.pack("!HI16sQQQ", _FULL_MEMBER_PKEY, 0, gid, port, 0, 0)
