"""Writes packets as a pcapng file that Wireshark reads: one interface for each port.

InfiniBand packets stand in ERF records, because Wireshark 4.0 does not know LINKTYPE_INFINIBAND. Formats:
draft-ietf-opsawg-pcapng, 4.1 to 4.3; Endace ERF, type 21.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import BinaryIO, NamedTuple

from mcast.api import LinkLayer
from mcast.arguments.file_objects import FileWriter

NS = 1_000_000_000
ETHERNET, ERF = 1, 197
"""LINKTYPE_ of the packets that are written."""

ERF_INFINIBAND, _ERF_VARYING_LENGTH = 21, 4
SECTION, INTERFACE, PACKET = 0x0A0D0D0A, 1, 6
BYTE_ORDER = 0x1A2B3C4D
_COMMENT, _NAME, _FLAGS, RESOLUTION, _APPLICATION = 1, 2, 2, 9, 4
_MAX_OPTION = 0xFFFF
"""The longest value of an option in bytes, because its length has 16 bits."""

_NANOSECONDS = b"\x09"
_LINKTYPES = {LinkLayer.ETHERNET: ETHERNET, LinkLayer.INFINIBAND: ERF}


class Direction(IntEnum):
    """The way of a packet through its interface: the low bits of epb_flags."""

    IN = 1
    OUT = 2


class CapturedPacket(NamedTuple):
    """One packet on the interface of `port`.

    t          when, in nanoseconds since 1970, or since a simulated fabric was made
    port       the name of the interface
    direction  whether the port received or sent the packet
    data       the bytes of the packet
    comment    a text to show with the packet
    """

    t: int
    port: str
    direction: Direction
    data: bytes
    comment: str = ""


class Writer:
    """Writes packets of these ports to a file, each when it comes. The file stays open."""

    def __init__(
        self, file: BinaryIO, link_layer: LinkLayer, ports: Sequence[str], comment: str = ""
    ) -> None:
        self._file = FileWriter(file)
        self._numbers = {port: index for index, port in enumerate(ports)}
        self._in_record = _erf if link_layer is LinkLayer.INFINIBAND else _bare
        self._file.write_all(_section(comment))
        for port in ports:
            self._file.write_all(_interface(_LINKTYPES[link_layer], port))

    def write(self, packet: CapturedPacket) -> None:
        self._file.write_all(_packet(self._numbers[packet.port], packet, self._in_record(packet)))


def write_packets(
    link_layer: LinkLayer, ports: Sequence[str], captured: Iterable[CapturedPacket], file: BinaryIO
) -> None:
    """Write packets of these ports to a file."""
    writer = Writer(file, link_layer, ports)
    for packet in captured:
        writer.write(packet)


def _section(comment: str) -> bytes:
    version, unknown_length = (1, 0), -1
    body = struct.pack("<IHHq", BYTE_ORDER, *version, unknown_length)
    options = [(_COMMENT, _text(comment))] if comment else []
    return _block(SECTION, body, [*options, (_APPLICATION, b"mcast")])


def _interface(link_type: int, name: str) -> bytes:
    options = [(_NAME, _text(name)), (RESOLUTION, _NANOSECONDS)]
    return _block(INTERFACE, struct.pack("<HHI", link_type, 0, 0), options)


def _bare(packet: CapturedPacket) -> bytes:
    return packet.data


def _erf(packet: CapturedPacket) -> bytes:
    """The packet in an ERF record.

    The record's time is in seconds, with 32 bits before the point and 32 after.

    In the year 2106 that overflows, so readers take the time of the block around the record.
    """
    size, time = len(packet.data), (packet.t << 32) // NS & 0xFFFFFFFFFFFFFFFF
    return (
        struct.pack("<QBB", time, ERF_INFINIBAND, _ERF_VARYING_LENGTH)
        + struct.pack(">HHH", 16 + size, 0, size)
        + packet.data
    )


def _packet(interface: int, packet: CapturedPacket, data: bytes) -> bytes:
    size = len(data)
    head = struct.pack("<IIIII", interface, packet.t >> 32, packet.t & 0xFFFFFFFF, size, size)
    options = [(_FLAGS, struct.pack("<I", packet.direction))]
    if packet.comment:
        options.append((_COMMENT, _text(packet.comment)))
    return _block(PACKET, head + _padded(data), options)


def _block(kind: int, body: bytes, options: Iterable[tuple[int, bytes]]) -> bytes:
    listed = b"".join(struct.pack("<HH", code, len(value)) + _padded(value) for code, value in options)
    end_of_options = bytes(4)
    length = 12 + len(body) + len(listed) + len(end_of_options)
    return struct.pack("<II", kind, length) + body + listed + end_of_options + struct.pack("<I", length)


def _text(value: str) -> bytes:
    """The value of an option in UTF-8, cut to the longest there may be."""
    return value.encode()[:_MAX_OPTION].decode(errors="ignore").encode()


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
