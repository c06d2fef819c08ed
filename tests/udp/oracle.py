"""Fate of a datagram: the rules of mcast/backends/udp/csrc/ring.c once more, by other means."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import cache
from ipaddress import IPv4Address

from mcast.wire.packets import ROCE_UDP_PORT
from mcast.wire.partition import matching_pkeys

_HEAD, _ICRC = 20, 4


@dataclass
class Receiver:
    """A queue pair, and what it has counted."""

    address: IPv4Address
    qp_num: int
    qkey: int
    pkey: int
    mtu: int
    room: int
    blocks_own: bool
    groups: frozenset[IPv4Address]
    free: int
    delivered: list[tuple[bytes, int | None, int, IPv4Address]] = field(default_factory=list)

    def fate(
        self, data: bytes, source: IPv4Address, source_port: int, dest: IPv4Address, dest_port: int
    ) -> str:
        """Judge a datagram that the socket of `dest_port` received; keep it if it is delivered."""
        if len(data) < _HEAD + _ICRC or len(data) % 4 or data[0] not in (0x64, 0x65) or data[1] & 0xF:
            return "malformed"
        imm_bytes = 4 if data[0] == 0x65 else 0
        payload_end = len(data) - _ICRC - (data[1] >> 4 & 3)
        if payload_end < _HEAD + imm_bytes:
            return "malformed"
        payload = data[_HEAD + imm_bytes : payload_end]
        if not _has_icrc(data, source, source_port, dest, dest_port):
            return "icrc_errors"
        dest_qp, src_qp = int.from_bytes(data[5:8]), int.from_bytes(data[17:20])
        if dest.is_multicast:
            if dest_qp != 0xFFFFFF or dest not in self.groups:
                return "foreign"
        elif dest_qp != self.qp_num or dest != self.address:
            return "foreign"
        if int.from_bytes(data[2:4]) not in matching_pkeys(self.pkey):
            return "pkey_violations"
        if int.from_bytes(data[12:16]) != self.qkey:
            return "qkey_violations"
        if len(payload) > self.mtu:
            return "oversized"
        if self.blocks_own and dest.is_multicast and (source, src_qp) == (self.address, self.qp_num):
            return "own_blocked"
        if len(payload) > self.room:
            return "too_long"
        if not self.free:
            return "no_receive"
        self.free -= 1
        imm = int.from_bytes(data[_HEAD : _HEAD + 4]) if imm_bytes else None
        self.delivered.append((payload, imm, src_qp, source))
        return "delivered"


def masked(
    data: bytes, source: IPv4Address, source_port: int, dest: IPv4Address, dest_port: int, identification: int
) -> bytes:
    """Return the bytes that the ICRC of a datagram covers, without the ICRC itself."""
    size = len(data) + 8
    ip = b"\x45\xff" + (20 + size).to_bytes(2) + identification.to_bytes(2) + b"\x40\x00\xff\x11\xff\xff"
    ip += source.packed + dest.packed
    udp = source_port.to_bytes(2) + dest_port.to_bytes(2) + size.to_bytes(2) + b"\xff\xff"
    return b"\xff" * 8 + ip + udp + data[:4] + b"\xff" + data[5:-4]


@cache
def _basis(behind: int) -> list[int]:
    """Return the change of a CRC by each bit of two bytes, with others behind them; a reduced basis."""
    zero, found = zlib.crc32(bytes(behind + 2)), list[int]()
    for bit in range(16):
        one = zlib.crc32((1 << bit).to_bytes(2) + bytes(behind)) ^ zero
        for known in found:
            one = min(one, one ^ known)
        found.append(one)
        found.sort(reverse=True)
    return found


def _has_icrc(data: bytes, source: IPv4Address, source_port: int, dest: IPv4Address, dest_port: int) -> bool:
    covered = masked(data, source, source_port, dest, dest_port, 0)
    difference = zlib.crc32(covered) ^ int.from_bytes(data[-4:], "little")
    for known in _basis(len(covered) - 14):
        difference = min(difference, difference ^ known)
    return not difference


def sealed(
    data: bytes,
    source: IPv4Address,
    source_port: int,
    dest: IPv4Address,
    identification: int = 0,
    dest_port: int = ROCE_UDP_PORT,
) -> bytes:
    """The datagram with a right ICRC in place of its last four bytes."""
    crc = zlib.crc32(masked(data, source, source_port, dest, dest_port, identification))
    return data[:-4] + crc.to_bytes(4, "little")
