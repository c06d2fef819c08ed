"""Finds the UD message in a captured packet: Ethernet, IP, UDP or LRH; then GRH, BTH, DETH.

Sources as in `mcast.wire.packets`; LINKTYPE_ numbers and their headers:
https://www.tcpdump.org/linktypes.html.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from ipaddress import IPv4Address
from typing import NamedTuple

from mcast.pcapng.reader import Frame
from mcast.pcapng.writer import ERF, ERF_INFINIBAND, ETHERNET
from mcast.wire import packets
from mcast.wire.addresses import Gid
from mcast.wire.packets import Datagram

_RAW_IP, _SLL, _SLL2, _IPV4, _IPV6, _INFINIBAND = 101, 113, 276, 228, 229, 247
_VLAN_TAGS = frozenset({0x8100, 0x88A8})
_ETHER_ROCE_V1 = 0x8915
_ERF_MORE = 0x80
_UD_IMMEDIATE = {0x64: 0, 0x65: 4}
"""Opcode of a UD message -> size of its immediate in bytes."""


class SkipPacket(Exception):
    """The packet is no UD message, or cannot be read; the text says why."""


class _Carrier(NamedTuple):
    """The headers below the transport headers.

    `masked` are their bytes in the ICRC; None: the ICRC is not checked.
    """

    source: Gid
    dest: Gid
    transport: bytes
    masked: bytes | None
    hop_limit: int
    traffic_class: int
    flow_label: int
    slid: int = 0
    dlid: int = 0
    sl: int = 0


def datagram(frame: Frame) -> Datagram:
    """The UD message in a frame. Raises Skipped."""
    carrier_of = _LINKS.get(frame.link_type)
    if carrier_of is None:
        raise SkipPacket(f"link type {frame.link_type} is not known")
    try:
        carrier = carrier_of(frame.data)
        return _message(carrier)
    except (struct.error, IndexError):
        if len(frame.data) < frame.length:
            raise SkipPacket("cut short by the capture") from None
        raise SkipPacket("shorter than its headers say") from None


def capture_point(frame: Frame) -> tuple[int, ...] | None:
    """Return where a packet was captured: the interface, and the direction where its header says that.

    None if the header does not say which of the host's interfaces it was, as with older tcpdumps and "any".
    """
    if frame.link_type == _SLL:
        return None
    if frame.link_type == _SLL2:
        return frame.interface, *frame.data[4:8], frame.data[10]
    return (frame.interface,)


def _message(carrier: _Carrier) -> Datagram:
    bth = carrier.transport
    opcode, flags, pkey, dest_qp, psn = struct.unpack_from(">BBHII", bth)
    if opcode not in _UD_IMMEDIATE:
        raise SkipPacket("not a UD message")
    qkey, src_qp = struct.unpack_from(">II", bth, 12)
    begin = 20 + _UD_IMMEDIATE[opcode]
    imm = int.from_bytes(bth[20:begin]) if begin > 20 else None
    end = len(bth) - 4 - (flags >> 4 & 3)
    if end < begin:
        raise IndexError
    if carrier.masked is not None and packets.icrc(carrier.masked + packets.mask_bth(bth[:-4])) != bth[-4:]:
        raise SkipPacket("wrong ICRC")
    return Datagram(
        carrier.source,
        carrier.dest,
        src_qp & 0xFFFFFF,
        dest_qp & 0xFFFFFF,
        qkey,
        pkey,
        psn & 0xFFFFFF,
        bth[begin:end],
        imm,
        carrier.hop_limit,
        carrier.traffic_class,
        carrier.flow_label,
        carrier.slid,
        carrier.dlid,
        carrier.sl,
    )


def _exactly(data: bytes, begin: int, end: int) -> bytes:
    """data[begin:end]; IndexError if some of these bytes are missing."""
    if not begin <= end <= len(data):
        raise IndexError
    return data[begin:end]


# --- link layers -------------------------------------------------------------------------


def _ethernet(data: bytes) -> _Carrier:
    at = 12
    (kind,) = struct.unpack_from(">H", data, at)
    while kind in _VLAN_TAGS:
        at += 4
        (kind,) = struct.unpack_from(">H", data, at)
    return _network(kind, data[at + 2 :])


def _sll(data: bytes) -> _Carrier:
    return _network(struct.unpack_from(">H", data, 14)[0], data[16:])


def _sll2(data: bytes) -> _Carrier:
    return _network(struct.unpack_from(">H", data)[0], data[20:])


def _raw_ip(data: bytes) -> _Carrier:
    return _network(packets.ETHER_IPV6 if data[0] >> 4 == 6 else packets.ETHER_IPV4, data)


def _erf(data: bytes) -> _Carrier:
    kind, at = data[8], 16
    more = kind & _ERF_MORE
    while more:
        more = data[at] & _ERF_MORE
        at += 8
    if kind & ~_ERF_MORE != ERF_INFINIBAND:
        raise SkipPacket("not RoCE or InfiniBand")
    return _infiniband(data[at:])


def _infiniband(data: bytes) -> _Carrier:
    _, kind, dlid, words, slid = struct.unpack_from(">BBHHH", data)
    if kind & 3 != packets.LNH_GLOBAL:
        raise SkipPacket("without a GRH, so not for a group")
    # The length counts words from the LRH to the ICRC.
    carrier = _grh(_exactly(data, 8, (words & 0x7FF) * 4), b"\xff" * 8)
    return carrier._replace(slid=slid, dlid=dlid, sl=kind >> 4)


# --- network layers ----------------------------------------------------------------------


def _network(ether_type: int, data: bytes) -> _Carrier:
    if ether_type == packets.ETHER_IPV4:
        return _ipv4(data)
    if ether_type == packets.ETHER_IPV6:
        return _ipv6(data)
    if ether_type == _ETHER_ROCE_V1:
        return _grh(data, None)
    raise SkipPacket("not RoCE or InfiniBand")


def _ipv4(data: bytes) -> _Carrier:
    first, tos, length, _, fragment, ttl, protocol = struct.unpack_from(">BBHHHBB", data)
    size = (first & 15) * 4
    if first >> 4 != 4 or protocol != packets.UDP:
        raise SkipPacket("not RoCE or InfiniBand")
    if fragment & 0x3FFF:
        raise SkipPacket("an IP fragment")
    header = _exactly(data, 0, max(size, 20))
    udp, transport = _udp(_exactly(data, size, length))
    source, dest = IPv4Address(header[12:16]), IPv4Address(header[16:20])
    masked = b"\xff" * 8 + packets.mask_ipv4(header) + packets.mask_udp(udp)
    return _Carrier(Gid(source), Gid(dest), transport, masked, ttl, tos, 0)


def _ipv6(data: bytes) -> _Carrier:
    first, length, next_header, hops = struct.unpack_from(">IHBB", data)
    if next_header != packets.UDP:
        raise SkipPacket("not RoCE or InfiniBand")
    header = _exactly(data, 0, 40)
    udp, transport = _udp(_exactly(data, 40, 40 + length))
    masked = b"\xff" * 8 + packets.mask_ipv6(header) + packets.mask_udp(udp)
    return _of_ipv6_header(header, first, hops, transport, masked)


def _udp(data: bytes) -> tuple[bytes, bytes]:
    _, port, length, _ = struct.unpack_from(">HHHH", data)
    if port != packets.ROCE_UDP_PORT:
        raise SkipPacket("not RoCE or InfiniBand")
    return data[:8], _exactly(data, 8, length)


def _grh(data: bytes, before: bytes | None) -> _Carrier:
    first, length, next_header, hops = struct.unpack_from(">IHBB", data)
    if next_header != packets.IBA_NEXT_HEADER:
        raise SkipPacket("not RoCE or InfiniBand")
    header = _exactly(data, 0, 40)
    transport = _exactly(data, 40, 40 + length)
    masked = None if before is None else before + packets.mask_ipv6(header)
    return _of_ipv6_header(header, first, hops, transport, masked)


def _of_ipv6_header(header: bytes, first: int, hops: int, transport: bytes, masked: bytes | None) -> _Carrier:
    source, dest = Gid(header[8:24]), Gid(header[24:40])
    return _Carrier(source, dest, transport, masked, hops, first >> 20 & 0xFF, first & 0xFFFFF)


_LINKS: dict[int, Callable[[bytes], _Carrier]] = {
    ETHERNET: _ethernet,
    ERF: _erf,
    _RAW_IP: _raw_ip,
    _IPV4: _raw_ip,
    _IPV6: _raw_ip,
    _SLL: _sll,
    _SLL2: _sll2,
    _INFINIBAND: _infiniband,
}
