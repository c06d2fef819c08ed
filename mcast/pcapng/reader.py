"""Reads the packets of a pcapng or pcap file, and checks every length in the file.

A file that ends in the middle of a packet, as that of a killed tcpdump, loses this packet alone.

Formats: draft-ietf-opsawg-pcapng, 3.1, 4.1 to 4.4, and appendix A for the obsolete Packet Block, which old
programs wrote; draft-ietf-opsawg-pcap, 4 and 5.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from mcast.arguments.file_objects import read_exactly
from mcast.pcapng.writer import BYTE_ORDER, INTERFACE, NS, PACKET, RESOLUTION, SECTION

_OBSOLETE_PACKET, _SIMPLE_PACKET = 2, 3
_PACKETS = (PACKET, _SIMPLE_PACKET, _OBSOLETE_PACKET)
_OTHER_BLOCKS = {
    4: "name resolution",
    5: "interface statistics",
    9: "a system's journal",
    10: "secrets for decryption",
    0x0BAD: "another program's own kind",
    0x40000BAD: "another program's own kind",
}
"""Type of a block without packets -> its content."""

_END, _TIME_OFFSET = 0, 14
_MAX_BLOCK = 16 << 20
"""The longest block, in bytes, which is more than any packet needs. A longer one means a damaged file."""

_PCAP = {
    bytes.fromhex("a1b2c3d4"): (">", 1000),
    bytes.fromhex("d4c3b2a1"): ("<", 1000),
    bytes.fromhex("a1b23c4d"): (">", 1),
    bytes.fromhex("4d3cb2a1"): ("<", 1),
}
"""The first bytes of a pcap file -> its byte order, and the unit of its fractions.

The unit is in nanoseconds.
"""

_COMPRESSIONS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"\xfd7zX": "xz",
}
"""Magic numbers of compressed files: tcpdump and Wireshark compress captures on request."""

_MICROSECONDS = 6

_MAX_INTERFACES = 1 << 16
"""Maximum number of interfaces of a section. More mean a damaged file, and would fill the memory."""

_MAX_REASONS = 64
"""Maximum number of reasons for leaving something out, so that a damaged file fills no screen."""


class CaptureError(ValueError):
    """The file is damaged, or has none of the formats; `offset` is where in the file, in bytes."""

    def __init__(self, offset: int, what: str) -> None:
        super().__init__(offset, what)
        self.offset = offset
        self.what = what

    def __str__(self) -> str:
        return f"at offset {self.offset}: {self.what}"


class Frame(NamedTuple):
    """A captured packet.

    t          when, in nanoseconds since 1970
    link_type  the LINKTYPE_ of `data`
    data       the captured bytes
    length     the size on the wire in bytes; more than `data` has if the capture cut the packet
    offset     where in the file the packet's block begins, in bytes
    interface  the number of the interface that the packet was captured on, among all of the file
    """

    t: int
    link_type: int
    data: bytes
    length: int
    offset: int
    interface: int = 0


class _Truncated(CaptureError):
    """The file ends where more should follow."""


class _Interface(NamedTuple):
    """Interface description of a section.

    units           ticks of its clock in a second
    offset_seconds  added to its times
    """

    link_type: int
    snap_length: int
    units: int
    offset_seconds: int


def read_frames(file: BinaryIO, skipped: Counter[str] | None = None) -> Iterator[Frame]:
    """Yield the packets of the file, in its order. `skipped` counts by reason what else there is.

    Raises CaptureError where the file is damaged, after the packets before. A file that ends in the middle of
    a packet or a block is not: the packets before are whole, and `skipped` says where the file ends.
    """
    source, left_out = _Source(file), Counter[str]() if skipped is None else skipped
    magic = source.read(4, "the file")
    if magic == SECTION.to_bytes(4):
        yield from _pcapng(source, left_out)
    elif magic in _PCAP:
        yield from _pcap(source, left_out, *_PCAP[magic])
    else:
        compression = next((name for begin, name in _COMPRESSIONS.items() if magic.startswith(begin)), None)
        looks = (
            f"it is compressed by {compression}: decompress it first"
            if compression
            else f"it begins with {magic.hex(' ')}"
        )
        raise CaptureError(0, f"the file is neither pcapng nor pcap: {looks}")


def count_skipped(skipped: Counter[str], why: str) -> None:
    """Count what is left out, by its reason, or with all other reasons if there are too many."""
    skipped[why if why in skipped or len(skipped) < _MAX_REASONS else "of other kinds"] += 1


class _Source:
    """The file, and how far it has been read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._ahead = b""
        self.offset = 0

    def read(self, size: int, what: str) -> bytes:
        data, self._ahead = read_exactly(self._file, size, self._ahead)
        if len(data) < size:
            raise _Truncated(self.offset, f"{what} is truncated: it has {len(data)} of {size} bytes")
        self.offset += size
        return data

    def at_end(self) -> bool:
        """Return True at the end of the file.

        The byte that this reads ahead is kept for the next `read`, of 1 byte or more.
        """
        found, rest = read_exactly(self._file, 1, self._ahead)
        self._ahead = found + rest
        return not self._ahead


# --- pcapng ------------------------------------------------------------------------------


def _pcapng(source: _Source, skipped: Counter[str]) -> Iterator[Frame]:
    """Read everything after the type of the first section header."""
    order, interfaces, before = _section(source, 0), list[_Interface](), 0
    while not source.at_end():
        start, kind = source.offset, None
        try:
            kind_bytes = source.read(4, "a block")
            if kind_bytes == SECTION.to_bytes(4):
                order, interfaces, before = _section(source, start), [], before + len(interfaces)
                continue
            (kind,) = struct.unpack(f"{order}I", kind_bytes)
            (length,) = struct.unpack(f"{order}I", source.read(4, "a block's length"))
            body = _body(source, start, order, length, 8)
        except _Truncated:
            count_skipped(skipped, _ends_in("packet" if kind in _PACKETS else "block", start))
            return
        if kind == INTERFACE:
            if len(interfaces) >= _MAX_INTERFACES:
                raise CaptureError(start, f"more than {_MAX_INTERFACES:,} interfaces are described")
            interfaces.append(_interface(body, order, start))
        elif kind in _PACKETS:
            frame = _packet(kind, body, order, interfaces, start)
            yield frame._replace(interface=before + frame.interface)
        else:
            count_skipped(skipped, f"a block of {_OTHER_BLOCKS.get(kind, f'the unknown type {kind:#x}')}")


def _ends_in(what: str, start: int) -> str:
    """Return the reason for leaving out what the end of the file cuts short."""
    return f"the last {what}, at offset {start}: the file ends in its middle"


def _section(source: _Source, start: int) -> str:
    """Read the rest of a section header; return the byte order of what follows."""
    length_bytes, magic = source.read(4, "the section header"), source.read(4, "the section header")
    order = next((o for o in "<>" if struct.unpack(f"{o}I", magic)[0] == BYTE_ORDER), None)
    if order is None:
        raise CaptureError(start + 8, f"the section header has no byte order: {magic.hex(' ')}")
    (length,) = struct.unpack(f"{order}I", length_bytes)
    (major,) = struct.unpack_from(f"{order}H", _body(source, start, order, length, 12, at_least=12))
    if major != 1:
        raise CaptureError(start + 12, f"the section is of version {major}, known is 1")
    return order


def _body(source: _Source, start: int, order: str, length: int, done: int, at_least: int = 0) -> bytes:
    """Read the rest of a block whose first `done` bytes were read.

    Returned without the length at its end.
    """
    if length % 4 or not done + at_least + 4 <= length <= _MAX_BLOCK:
        raise CaptureError(start + 4, f"a block has the impossible length of {length} bytes")
    body = source.read(length - done - 4, "a block")
    (again,) = struct.unpack(f"{order}I", source.read(4, "a block"))
    if again != length:
        raise CaptureError(source.offset - 4, f"a block of {length} bytes ends with the length {again}")
    return body


def _interface(body: bytes, order: str, start: int) -> _Interface:
    if len(body) < 8:
        raise CaptureError(start, "an interface description is too short")
    link_type, _, snap_length = struct.unpack_from(f"{order}HHI", body)
    resolution, offset_seconds, at = _MICROSECONDS, 0, 8
    while at + 4 <= len(body):
        code, size = struct.unpack_from(f"{order}HH", body, at)
        value = body[at + 4 : at + 4 + size]
        if code == _END:
            break
        if len(value) < size or (code == RESOLUTION and size != 1) or (code == _TIME_OFFSET and size != 8):
            raise CaptureError(start + 8 + at, f"option {code} of an interface has {size} bytes")
        if code == RESOLUTION:
            resolution = value[0]
        elif code == _TIME_OFFSET:
            (offset_seconds,) = struct.unpack(f"{order}q", value)
        at += 4 + size + -size % 4
    units = 2 ** (resolution & 0x7F) if resolution & 0x80 else 10**resolution
    return _Interface(link_type, snap_length, units, offset_seconds)


def _packet(kind: int, body: bytes, order: str, interfaces: list[_Interface], start: int) -> Frame:
    head = 4 if kind == _SIMPLE_PACKET else 20
    if len(body) < head:
        raise CaptureError(start, "a packet block is too short")
    if kind == PACKET:
        number, high, low, size, length = struct.unpack_from(f"{order}IIIII", body)
    elif kind == _OBSOLETE_PACKET:
        number, _drops, high, low, size, length = struct.unpack_from(f"{order}HHIIII", body)
    else:
        number = high = low = 0
        (length,) = struct.unpack_from(f"{order}I", body)
        size = min(length, (interfaces[0].snap_length if interfaces else 0) or length)
    if number >= len(interfaces):
        raise CaptureError(start + 8, f"a packet is of interface {number}, {len(interfaces)} are described")
    if size > len(body) - head:
        raise CaptureError(start + head + 8, f"a packet of {size} bytes is in a block of {len(body)}")
    interface = interfaces[number]
    t = (high << 32 | low) * NS // interface.units + interface.offset_seconds * NS
    return Frame(t, interface.link_type, body[head : head + size], length, start, number)


# --- pcap --------------------------------------------------------------------------------


def _pcap(source: _Source, skipped: Counter[str], order: str, unit: int) -> Iterator[Frame]:
    """Read everything after the magic number."""
    *_, link_type = struct.unpack(f"{order}HHIIII", source.read(20, "the file's header"))
    while not source.at_end():
        start = source.offset
        try:
            record = source.read(16, "a packet's header")
            seconds, fraction, size, length = struct.unpack(f"{order}IIII", record)
            if size > _MAX_BLOCK:
                raise CaptureError(start + 8, f"a packet has the impossible size of {size} bytes")
            data = source.read(size, "a packet")
        except _Truncated:
            count_skipped(skipped, _ends_in("packet", start))
            return
        yield Frame(seconds * NS + fraction * unit, link_type & 0xFFFF, data, length, start)
