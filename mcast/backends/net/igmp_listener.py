"""IGMP on the wire: counts membership reports as they enter the ports of a bridge, and hears queriers."""

from __future__ import annotations

import ctypes
import select
import socket
import struct
from collections import Counter
from collections.abc import Collection, Iterator
from ipaddress import IPv4Address
from time import monotonic

_ETH_P_ALL, _ETH_P_IP = 0x0003, 0x0800
_SO_ATTACH_FILTER = 26
_IGMP_PROTOCOL = 2
_IPV4_BYTES, _IGMP_BYTES = 20, 8
"""The least of a header, and of a message."""
_QUERY = 0x11
_V1_REPORT, _V2_REPORT, _V3_REPORT = 0x12, 0x16, 0x22
_V3_EXCLUDES = frozenset({2, 4})
"""Group record types that ask for every source: MODE_IS_EXCLUDE, CHANGE_TO_EXCLUDE (RFC 3376, 4.2.12)."""

_ONLY_IGMP = (
    (0x28, 0, 0, 0xFFFFF000),  # load the protocol that the packet came as
    (0x15, 0, 3, _ETH_P_IP),
    (0x30, 0, 0, 9),  # load the protocol byte of the IPv4 header
    (0x15, 0, 1, _IGMP_PROTOCOL),
    (0x06, 0, 0, 0xFFFF),  # take the packet
    (0x06, 0, 0, 0),  # drop the packet, because data must not fill the socket's buffer
)
"""Classic BPF: code, jump if true, jump if false, operand."""


def _igmp(packet: bytes) -> bytes:
    """The IGMP message in an IPv4 packet; b"" if there is none.

    The socket hears packets of all kinds until its filter is set, and those that the kernel will drop.
    """
    if len(packet) < _IPV4_BYTES or packet[0] >> 4 != 4 or packet[9] != _IGMP_PROTOCOL:
        return b""
    header = (packet[0] & 0xF) * 4
    if header < _IPV4_BYTES or len(packet) < header + _IGMP_BYTES:
        return b""
    return packet[header:]


def querier(packet: bytes) -> IPv4Address | None:
    """Who asks for reports with this packet; None if it is no query."""
    igmp = _igmp(packet)
    return IPv4Address(packet[12:16]) if igmp and igmp[0] == _QUERY else None


def reports(packet: bytes) -> Iterator[IPv4Address]:
    """The groups that a packet reports membership of (RFC 2236, RFC 3376), as far as it is whole."""
    igmp = _igmp(packet)
    kind = igmp[0] if igmp else None
    if kind in (_V1_REPORT, _V2_REPORT):
        yield IPv4Address(igmp[4:8])
    elif kind == _V3_REPORT:
        (count,) = struct.unpack_from("!H", igmp, 6)
        at = 8
        while count and at + 8 <= len(igmp):
            record, auxiliary, sources, group = struct.unpack_from("!BBH4s", igmp, at)
            if record in _V3_EXCLUDES:
                yield IPv4Address(group)
            at += 8 + 4 * sources + 4 * auxiliary
            count -= 1


def hear_queriers(netdevs: Collection[str], seconds: float) -> dict[str, IPv4Address]:
    """Interface -> the addresses that have asked for reports there.

    Ends early when a query came on every interface.

    A querier asks every 125 s unless it is set otherwise (RFC 3376, 8.2). Raises PermissionError without
    CAP_NET_RAW.
    """
    heard: dict[str, IPv4Address] = {}
    with _packets() as packets:
        deadline = monotonic() + seconds
        while (left := deadline - monotonic()) > 0 and set(netdevs) - set(heard):
            if select.select([packets], [], [], left)[0]:
                packet, (netdev, _, direction, *_) = packets.recvfrom(2048)
                asks = querier(packet)
                if netdev in netdevs and direction != socket.PACKET_OUTGOING and asks is not None:
                    heard[netdev] = asks
    return heard


def _packets() -> socket.socket:
    """IGMP of every interface, as IPv4 packets."""
    # all protocols, because the bridge takes packets before a socket for IP alone would get them
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ETH_P_ALL))
    packets.setblocking(False)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in _ONLY_IGMP))
    program = struct.pack("@HP", len(_ONLY_IGMP), ctypes.addressof(code))
    packets.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    return packets


class IgmpListener:
    """Listens from its creation on; needs CAP_NET_RAW."""

    def __init__(self, bridge_ports: frozenset[str]) -> None:
        self._ports = bridge_ports
        self._seen: Counter[IPv4Address] = Counter()
        self._socket = _packets()

    def count(self, group: IPv4Address) -> int:
        """Reports for the group so far."""
        while True:
            try:
                packet, address = self._socket.recvfrom(2048)
            except BlockingIOError:
                return self._seen[group]
            if address[0] in self._ports and address[2] != socket.PACKET_OUTGOING:
                self._seen.update(reports(packet))

    def close(self) -> None:
        self._socket.close()
