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


def _header(packet: bytes) -> int:
    """Bytes of the IPv4 header."""
    return (packet[0] & 0xF) * 4


def _kind(packet: bytes) -> int:
    return packet[_header(packet)]


def reports(packet: bytes) -> Iterator[IPv4Address]:
    """The groups that an IPv4 packet with IGMP inside reports membership of (RFC 2236, RFC 3376)."""
    igmp = packet[_header(packet) :]
    kind = _kind(packet)
    if kind in (_V1_REPORT, _V2_REPORT):
        yield IPv4Address(igmp[4:8])
    elif kind == _V3_REPORT:
        (count,) = struct.unpack_from("!H", igmp, 6)
        at = 8
        for _ in range(count):
            record, auxiliary, sources, group = struct.unpack_from("!BBH4s", igmp, at)
            if record in _V3_EXCLUDES:
                yield IPv4Address(group)
            at += 8 + 4 * sources + 4 * auxiliary


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
                if netdev in netdevs and direction != socket.PACKET_OUTGOING and _kind(packet) == _QUERY:
                    heard[netdev] = IPv4Address(packet[12:16])
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
