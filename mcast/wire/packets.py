"""The packets on the wire, as bytes: RoCEv2 and InfiniBand datagrams, SA MADs, IGMPv3 reports.

Sources: IBA vol 1, 5.2 and 7.7 (LRH), 8.3 (GRH), 9.2 and 9.3 (BTH, DETH), 7.8 (ICRC, VCRC); annex A17
(RoCEv2); RFC 3376 (IGMPv3).
"""

from __future__ import annotations

import struct
import zlib
from ipaddress import IPv4Address
from typing import NamedTuple

from mcast.wire import mad
from mcast.wire.addresses import ZERO_GID, Gid
from mcast.wire.mapping import group_mac
from mcast.wire.mcmember import McMemberRecord, SaMethod, SaStatus
from mcast.wire.partition import DEFAULT_PKEY

ROCE_UDP_PORT = 4791
ROCE_HEADERS = 20 + 8 + 12 + 8 + 4
"""The bytes that a RoCEv2 packet to an IPv4 group has beside its payload: IP, UDP, BTH, DETH, ICRC."""
IGMP_ROUTERS = IPv4Address("224.0.0.22")
SA_LID = 0xBFFF
"""The LID of the simulated SA: the highest unicast LID, because ports are numbered from the lowest."""

_UD_SEND_ONLY, _UD_SEND_ONLY_IMM = 0x64, 0x65
_LNH_LOCAL, LNH_GLOBAL = 2, 3
IBA_NEXT_HEADER = 0x1B
ETHER_IPV4, ETHER_IPV6 = 0x0800, 0x86DD
UDP, _IGMP = 17, 2
_DATA_WORDS = 7  # an MCMemberRecord in an answer takes this many times 8 bytes
_FIRST_UDP_SOURCE = 0xC000
_VCRC_POLYNOMIAL = 0xD008  # x^16 + x^12 + x^3 + x + 1, lowest bit first


class Datagram(NamedTuple):
    """One UD message with the contents of its headers. Only InfiniBand uses LIDs and `sl`."""

    source: Gid
    dest: Gid
    src_qp: int
    dest_qp: int
    qkey: int
    pkey: int
    psn: int
    payload: bytes
    imm: int | None = None
    hop_limit: int = 64
    traffic_class: int = 0
    flow_label: int = 0
    slid: int = 0
    dlid: int = 0
    sl: int = 0


def mac_of(guid: int) -> bytes:
    """The MAC address of a port: locally administered, and ending in the last four bytes of the GUID."""
    return b"\x02\x00" + (guid & 0xFFFFFFFF).to_bytes(4)


def udp_source_port(qp_num: int) -> int:
    """Return the UDP source port of a queue pair, by which switches spread flows.

    Soft-RoCE's rule, a 14-bit hash.
    """
    return _FIRST_UDP_SOURCE + ((qp_num * 0x61C88647 & 0xFFFFFFFF) >> 18)


# --- RoCEv2 ------------------------------------------------------------------------------


def roce(message: Datagram, src_mac: bytes, dest_mac: bytes) -> bytes:
    """An Ethernet frame without FCS, with IPv4 if both GIDs have IPv4 addresses and IPv6 otherwise."""
    transport = _transport(message)
    length = 8 + len(transport) + 4
    udp = struct.pack(">HHHH", udp_source_port(message.src_qp), ROCE_UDP_PORT, length, 0)
    source, dest = message.source.ipv4, message.dest.ipv4
    if source is not None and dest is not None:
        ip = _ipv4(source, dest, UDP, length, message.hop_limit, message.traffic_class)
        masked = mask_ipv4(ip)
        ether_type = ETHER_IPV4
    else:
        ip = _ipv6(message, UDP, length)
        masked = mask_ipv6(ip)
        ether_type = ETHER_IPV6
    crc = icrc(b"\xff" * 8 + masked + mask_udp(udp) + mask_bth(transport))
    return ethernet(dest_mac, src_mac, ether_type) + ip + udp + transport + crc


def ethernet(dest: bytes, source: bytes, ether_type: int) -> bytes:
    """The header of an Ethernet frame."""
    return dest + source + ether_type.to_bytes(2)


def igmp_report(source: IPv4Address, group: IPv4Address, joined: bool, src_mac: bytes) -> bytes:
    """An IGMPv3 report with one record, in an Ethernet frame (RFC 3376, 4.2 and 5.1).

    The record changes to EXCLUDE {} for a join, and to INCLUDE {} for a leave.
    """
    change = 4 if joined else 3
    unsummed = struct.pack(">BxHxxHBBH4s", 0x22, 0, 1, change, 0, 0, group.packed)
    body = unsummed[:2] + _checksum(unsummed) + unsummed[4:]
    router_alert = b"\x94\x04\x00\x00"
    ip = _ipv4(source, IGMP_ROUTERS, _IGMP, len(body), 1, 0xC0, router_alert)
    return ethernet(group_mac(Gid(IGMP_ROUTERS)), src_mac, ETHER_IPV4) + ip + body


def _ipv4(
    source: IPv4Address,
    dest: IPv4Address,
    protocol: int,
    length: int,
    ttl: int,
    tos: int,
    options: bytes = b"",
) -> bytes:
    size = 20 + len(options)
    dont_fragment = 0x4000
    unsummed = (
        struct.pack(">BBHHHBBH", 0x40 | size // 4, tos, size + length, 0, dont_fragment, ttl, protocol, 0)
        + source.packed
        + dest.packed
        + options
    )
    return unsummed[:10] + _checksum(unsummed) + unsummed[12:]


def _ipv6(message: Datagram, next_header: int, length: int) -> bytes:
    """An IPv6 header, which has the same form as a GRH."""
    first = 6 << 28 | message.traffic_class << 20 | message.flow_label
    addresses = bytes(message.source) + bytes(message.dest)
    return struct.pack(">IHBB", first, length, next_header, message.hop_limit) + addresses


def _checksum(data: bytes) -> bytes:
    """The Internet checksum (RFC 1071)."""
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return (~total & 0xFFFF).to_bytes(2)


# --- InfiniBand --------------------------------------------------------------------------


def infiniband(message: Datagram) -> bytes:
    """An InfiniBand packet with a GRH, from LRH to VCRC."""
    transport = _transport(message)
    grh = _ipv6(message, IBA_NEXT_HEADER, len(transport) + 4)
    lrh = _lrh(message, LNH_GLOBAL, len(grh) + len(transport))
    crc = icrc(b"\xff" * 8 + mask_ipv6(grh) + mask_bth(transport))
    packet = lrh + grh + transport + crc
    return packet + vcrc(packet)


def sa_request(method: SaMethod, tid: int, mask: int, record: McMemberRecord, lid: int) -> bytes:
    """A request for MCMemberRecord to the SA, from the port with that LID; a packet from LRH to VCRC."""
    return _gsi(mad.sa_mad(method, tid, mad.MC_MEMBER_RECORD, mask, record.pack()), tid, lid, SA_LID)


def sa_answer(
    method: SaMethod, status: SaStatus, tid: int, mask: int, record: McMemberRecord, lid: int
) -> bytes:
    """The SA's answer to such a request, to the port with that LID. The answer to Set and Get is GetResp."""
    answer = mad.RESPONSE | (SaMethod.GET if method is SaMethod.SET else method)
    data = record.pack()
    made = mad.sa_mad(answer, tid, mad.MC_MEMBER_RECORD, mask, data, status, _DATA_WORDS)
    return _gsi(made, tid, SA_LID, lid)


def _gsi(payload: bytes, psn: int, slid: int, dlid: int) -> bytes:
    """A MAD from one port's queue pair 1 to another's, without a GRH."""
    message = Datagram(
        ZERO_GID,
        ZERO_GID,
        mad.GSI_QP,
        mad.GSI_QP,
        mad.GSI_QKEY,
        DEFAULT_PKEY,
        psn & 0xFFFFFF,
        payload,
        slid=slid,
        dlid=dlid,
    )
    transport = _transport(message)
    lrh = _lrh(message, _LNH_LOCAL, len(transport))
    crc = icrc(bytes((lrh[0] | 0xF0,)) + lrh[1:] + mask_bth(transport))
    packet = lrh + transport + crc
    return packet + vcrc(packet)


def _lrh(message: Datagram, next_header: int, length: int) -> bytes:
    """Return the LRH, with VL 0 and link version 0.

    The packet length counts 4-byte words from the LRH to the ICRC.
    """
    words = (8 + length + 4) // 4
    return struct.pack(">BBHHH", 0, message.sl << 4 | next_header, message.dlid, words, message.slid)


# --- both --------------------------------------------------------------------------------


def _transport(message: Datagram) -> bytes:
    """BTH, DETH, the immediate if there is one, the payload, and padding to 4-byte words."""
    pad = -len(message.payload) % 4
    has_imm = message.imm is not None
    bth = struct.pack(
        ">BBHII",
        _UD_SEND_ONLY_IMM if has_imm else _UD_SEND_ONLY,
        pad << 4,
        message.pkey,
        message.dest_qp,
        message.psn,
    )
    deth = struct.pack(">II", message.qkey, message.src_qp)
    imm = b"" if message.imm is None else message.imm.to_bytes(4)
    return bth + deth + imm + message.payload + bytes(pad)


def mask_ipv4(header: bytes) -> bytes:
    """The header with ones for what may change on the way: TOS, TTL and checksum."""
    return header[:1] + b"\xff" + header[2:8] + b"\xff" + header[9:10] + b"\xff\xff" + header[12:]


def mask_udp(header: bytes) -> bytes:
    """The header with ones for what may change on the way: the checksum."""
    return header[:6] + b"\xff\xff"


def mask_bth(transport: bytes) -> bytes:
    """The transport headers with ones for what may change on the way: byte 4 of the BTH (FECN, BECN)."""
    return transport[:4] + b"\xff" + transport[5:]


def mask_ipv6(header: bytes) -> bytes:
    """The header with ones for what may change on the way: traffic class, flow label and hop limit."""
    return bytes((header[0] | 0x0F,)) + b"\xff" * 3 + header[4:7] + b"\xff" + header[8:]


def icrc(masked: bytes) -> bytes:
    """The invariant CRC of a packet whose changing fields are masked with ones, in wire order."""
    return zlib.crc32(masked).to_bytes(4, "little")


def vcrc(packet: bytes) -> bytes:
    """The variant CRC of all bytes from LRH to ICRC, in wire order."""
    crc = 0xFFFF
    for byte in packet:
        crc = crc >> 8 ^ _VCRC_TABLE[(crc ^ byte) & 0xFF]
    return (crc ^ 0xFFFF).to_bytes(2, "little")


def _shift_out(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_VCRC_POLYNOMIAL if byte & 1 else 0)
    return byte


_VCRC_TABLE = tuple(map(_shift_out, range(256)))
