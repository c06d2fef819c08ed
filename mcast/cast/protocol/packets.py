"""Packets of the protocol: a named tuple for each kind, and the table that encodes and decodes them.

All integers are in network order; bitmaps and texts end a packet and are as long as they need to be. A packet
with a field out of its bounds (`_BOUNDS`) is rejected here, so that the ends need not check it.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from blake3 import blake3
from typing_extensions import Buffer

from mcast.arguments.rows import copy_rows

MAX_TEXT = 64
"""Maximum bytes of a name or of a reason; longer ones are cut, and end with "..."."""

HEADER = struct.Struct("!4sB3xQ")
"""Packet header: magic, kind, session."""


class Rejected(Exception):
    """Raised for a message that is not accepted; the text is the reason under which it is counted."""


FOREIGN, MALFORMED, FORGED = "foreign", "malformed", "forged: the number is of another address"
VERSION = "of another version of this protocol: install the same mcast at both ends"


@lru_cache(maxsize=4096)
def number_at(address: str, salt: int) -> int:
    """Return the number of an end at that address, from a random salt of 1..2^32-1.

    The lower half is a digest of salt and address, so that an end at another address cannot use the number.
    """
    digest = blake3(f"{salt} {address}".encode()).digest(length=4)
    return salt << 32 | int.from_bytes(digest)


def printable(text: str) -> str:
    """Return the text cut to MAX_TEXT bytes, with "?" for each character that could move a cursor."""
    clean = text
    if not text.isprintable():
        clean = "".join(letter if letter.isprintable() else "?" for letter in text)
    raw = clean.encode()
    return clean if len(raw) <= MAX_TEXT else raw[: MAX_TEXT - 3].decode(errors="ignore") + "..."


MAGIC = b"mcC4"
"""Magic of a packet; the last byte is the protocol's version, and ends accept their own version alone."""
MAX_K = 128
"""Maximum source segments of a block (k of RFC 5052)."""
MAX_PARITY = 32
"""Maximum parity segments of a block."""
MAX_SEALS = 16
"""Maximum blocks that one SEAL describes."""
MAX_MEMBERS = 8192
"""Maximum receivers of a session."""
MAX_ADMITTED = 48
"""Maximum receivers that one ADMIT names, because no more fit into MIN_MESSAGE_SIZE."""
MAX_METADATA = 512
"""Maximum bytes of an object's metadata."""
MAX_WINDOW = 4096
"""Maximum blocks that a sender is ahead of a receiver."""
MAX_BLOCKS = 1 << 31
"""Maximum blocks of an object."""
MAX_CAROUSEL = 1 << 16
"""Maximum objects of one carousel."""
MAX_SEGMENT = 1 << 14
"""Maximum bytes of a segment."""
MAX_ROUND_TRIP = 1.0
"""Maximum round trip, in seconds, that a sender announces."""
MIN_MESSAGE_SIZE = 1000
"""Minimum bytes of a message that each member can receive; 1,024 with the tag of a closed group."""
UNKNOWN_SIZE = (1 << 64) - 1
"""Size of a stream whose end is not known yet."""
UNKNOWN_BLOCKS = (1 << 32) - 1
"""Number of blocks of an object whose end is not known yet."""
NO_VERSION = -1
"""Version of an object that is not published; versions begin with 0."""
MAX_VERSION = (1 << 63) - 1
"""Maximum version of an object."""
NO_DIGEST = bytes(32)
"""Digest of an object whose end is not known yet."""
ALL_MEMBERS = 0
"""Member number in a BYE that ends the session for all receivers."""

PENDING, COMPLETE, FAILED, LEFT, STORED, COMPLETE_LEFT = range(6)
"""States of an object in an ACK.

PENDING        some blocks are missing
COMPLETE       the receiver has the object
FAILED         the receiver gave the object up
LEFT           the receiver leaves the session without the object
STORED         an earlier run stored the blocks before `base`; they are not verified yet
COMPLETE_LEFT  the receiver has the object, and leaves the session
"""


class Offer(NamedTuple):
    """Invitation of a sender to join its session.

    object      number of the next object, or of the first object of the carousel
    stamp       the sender's clock, in µs
    round_trip  of the group, in µs
    nonce       random, of this session
    """

    session: int
    object: int
    stamp: int
    members: int
    round_trip: int
    nonce: int
    name: str


class Join(NamedTuple):
    """Request of a receiver to join the session.

    window       maximum blocks that it buffers beyond its first missing block
    max_message  maximum bytes of a message that it can receive
    uses_parity  1 if it can decode parity segments, else 0
    stamp        the last stamp of the sender that it received
    nonce        random, of this receiver in this session
    queue        messages that its receive queue holds; 0 if unknown
    version      the newest version of this session that it has; NO_VERSION if it has none
    """

    session: int
    member: int
    window: int
    max_message: int
    uses_parity: int
    stamp: int
    nonce: int
    queue: int
    name: str
    version: int = NO_VERSION


class Admit(NamedTuple):
    """Receivers that have joined: number -> bit in the sender's bitmaps, and nonce of the receiver's JOIN."""

    session: int
    indexes: dict[int, tuple[int, int]]


class Describe(NamedTuple):
    """Description of an object, which precedes its segments.

    size      in bytes, or UNKNOWN_SIZE
    segment   bytes of a segment
    k         maximum source segments of a block
    parity    maximum parity segments of a block; 0 if the sender has none
    carousel  number of objects in the carousel; 0 if the object is sent once. Receivers of a carousel take
              part without ADMIT, and send neither NACK nor ACK
    position  of this object in the carousel, from 0
    version   of a published object, which may be sent again under another number; NO_VERSION for others
    """

    session: int
    object: int
    size: int
    segment: int
    k: int
    parity: int
    carousel: int
    position: int
    name: str
    metadata: bytes
    version: int = NO_VERSION


class Data(NamedTuple):
    """One segment: source segment `esi` if the encoding symbol id is below k, else parity segment esi-k."""

    session: int
    object: int
    block: int
    esi: int
    payload: Buffer


class BlockInfo(NamedTuple):
    """Length of a block in source segments and bytes, and a BLAKE3 digest.

    The digest is of the object up to the end of the block, so that each byte is hashed once for the block and
    for the object. In a carousel, whose blocks are verified in any order, it is of the block alone.
    """

    segments: int
    size: int
    digest: bytes


class Seal(NamedTuple):
    """Lengths and digests of the blocks `block`, block-1, … of an object.

    low                no segment of an earlier block is sent again
    stamp, round_trip  as in OFFER
    """

    session: int
    object: int
    block: int
    low: int
    stamp: int
    members: int
    round_trip: int
    blocks: tuple[BlockInfo, ...]


class Flush(NamedTuple):
    """Progress of the sender: all segments of the blocks before `blocks` were sent.

    total              number of blocks, or UNKNOWN_BLOCKS
    low                no segment of an earlier block is sent again
    stamp, round_trip  as in OFFER
    idle               1 if the sender has nothing else to send
    digest             of the object; NO_DIGEST while `total` is unknown
    first, ack_bits    the members first+i whose bit i is set shall answer with an ACK
    """

    session: int
    object: int
    blocks: int
    total: int
    low: int
    stamp: int
    members: int
    round_trip: int
    idle: int
    digest: bytes
    first: int
    ack_bits: int


class RepairRequest(NamedTuple):
    """Request for a block's missing segments, or for its SEAL if `missing` is 0.

    need     number of segments that complete the block; 0 if the receiver cannot use parity
    missing  bitmap of the missing source segments
    """

    block: int
    need: int
    missing: int


class Nack(NamedTuple):
    """Repair requests of a receiver, which has all blocks before `base`.

    stamp      the last stamp of the sender that it received
    hold_time  µs since it received the stamp
    """

    session: int
    object: int
    member: int
    base: int
    stamp: int
    hold_time: int
    requests: tuple[RepairRequest, ...]


class Ack(NamedTuple):
    """State of an object at a receiver, which has all blocks before `base`.

    stamp, hold_time  as in NACK
    state             PENDING to COMPLETE_LEFT
    reason            for FAILED, LEFT and COMPLETE_LEFT
    """

    session: int
    object: int
    member: int
    base: int
    stamp: int
    hold_time: int
    state: int
    reason: str


class Done(NamedTuple):
    """End of an object. The members first+i whose bit i is set in `complete` have it, as the sender knows."""

    session: int
    object: int
    first: int
    complete: int


class Behind(NamedTuple):
    """End of an object for the members first+i whose bit i is set, which are too slow for the strategy."""

    session: int
    object: int
    first: int
    slow: int


class Bye(NamedTuple):
    """End of the session for one receiver, or for ALL_MEMBERS."""

    session: int
    member: int
    reason: str


Packet = Offer | Join | Admit | Describe | Data | Seal | Flush | Nack | Ack | Done | Bye | Behind


class _TailFormat(NamedTuple):
    """Codec of the fields of variable length, which end a packet; `read` raises ValueError."""

    fields: int
    pack: Callable[..., bytes]
    read: Callable[[bytes], tuple[Any, ...]]


def _unpack_text(raw: bytes) -> tuple[str]:
    if len(raw) > MAX_TEXT:
        raise ValueError
    if not raw:  # fast path: nearly all ACKs have no reason
        return ("",)
    return (printable(raw.decode(errors="replace")),)


_VERSION = struct.Struct("!q")


def _pack_joining(name: str, version: int) -> bytes:
    return _VERSION.pack(version) + name.encode()


def _unpack_joining(raw: bytes) -> tuple[str, int]:
    (version,) = _VERSION.unpack_from(raw)
    return *_unpack_text(raw[_VERSION.size :]), version


def _pack_described(name: str, metadata: bytes, version: int) -> bytes:
    encoded = name.encode()
    return _VERSION.pack(version) + bytes((len(encoded),)) + encoded + metadata


def _unpack_described(raw: bytes) -> tuple[str, bytes, int]:
    (version,), raw = _VERSION.unpack_from(raw), raw[_VERSION.size :]
    metadata = raw[1 + raw[0] :] if raw else b""
    if not raw or len(raw) <= raw[0] or len(metadata) > MAX_METADATA:
        raise ValueError
    return *_unpack_text(raw[1 : 1 + raw[0]]), metadata, version


_BITS = MAX_MEMBERS // 8


def _pack_bits(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def _unpack_bits(raw: bytes) -> tuple[int]:
    if len(raw) > _BITS:
        raise ValueError
    return (int.from_bytes(raw, "little"),)


def _unpack_payload(raw: bytes) -> tuple[bytes]:
    if not 0 < len(raw) <= MAX_SEGMENT:
        raise ValueError
    return (raw,)


def _unpack_rows(form: struct.Struct, raw: bytes, max_rows: int) -> list[tuple[Any, ...]]:
    rows, odd = divmod(len(raw), form.size)
    if odd or not 0 < rows <= max_rows:
        raise ValueError
    return list(form.iter_unpack(raw))


_BLOCK = struct.Struct("!HI32s")
_BLOCK_ROW = struct.Struct(f"{_BLOCK.size}s")
_REQUEST = struct.Struct("!IB16s")
_ADMITTED = struct.Struct("!QIQ")
REQUEST_SIZE = _REQUEST.size


@lru_cache(maxsize=1024)  # each block is in several SEALs
def _pack_block(block: BlockInfo) -> bytes:
    return _BLOCK.pack(*block)


def _pack_blocks(blocks: tuple[BlockInfo, ...]) -> bytes:
    return b"".join([_pack_block(block) for block in blocks])


@lru_cache(maxsize=1024)
def _unpack_block(row: bytes) -> BlockInfo:
    found = BlockInfo(*_BLOCK.unpack(row))
    if not 0 < found.segments <= MAX_K:
        raise ValueError
    return found


def _unpack_blocks(raw: bytes) -> tuple[tuple[BlockInfo, ...]]:
    rows = _unpack_rows(_BLOCK_ROW, raw, MAX_SEALS)
    return (tuple([_unpack_block(row) for (row,) in rows]),)


def _pack_requests(requests: tuple[RepairRequest, ...]) -> bytes:
    return b"".join(_REQUEST.pack(block, need, bits.to_bytes(16, "little")) for block, need, bits in requests)


def _unpack_requests(raw: bytes) -> tuple[tuple[RepairRequest, ...]]:
    rows = _unpack_rows(_REQUEST, raw, len(raw) // REQUEST_SIZE)
    return (tuple(RepairRequest(block, need, int.from_bytes(bits, "little")) for block, need, bits in rows),)


def _pack_admitted(indexes: dict[int, tuple[int, int]]) -> bytes:
    return b"".join(_ADMITTED.pack(number, *row) for number, row in indexes.items())


def _unpack_admitted(raw: bytes) -> tuple[dict[int, tuple[int, int]]]:
    rows = {number: (index, nonce) for number, index, nonce in _unpack_rows(_ADMITTED, raw, MAX_ADMITTED)}
    if len(rows) * _ADMITTED.size != len(raw):
        raise ValueError
    return (rows,)


_TEXT_TAIL = _TailFormat(1, str.encode, _unpack_text)
_BITMAP_TAIL = _TailFormat(1, _pack_bits, _unpack_bits)

_FORMATS: dict[type[Packet], tuple[struct.Struct, _TailFormat]] = {
    Offer: (struct.Struct("!IQIIQ"), _TEXT_TAIL),
    Join: (struct.Struct("!QHHBQQI"), _TailFormat(2, _pack_joining, _unpack_joining)),
    Admit: (struct.Struct(""), _TailFormat(1, _pack_admitted, _unpack_admitted)),
    Describe: (struct.Struct("!IQHBBII"), _TailFormat(3, _pack_described, _unpack_described)),
    Data: (struct.Struct("!IIH"), _TailFormat(1, bytes, _unpack_payload)),
    Seal: (struct.Struct("!IIIQII"), _TailFormat(1, _pack_blocks, _unpack_blocks)),
    Flush: (struct.Struct("!IIIIQIIB32sI"), _BITMAP_TAIL),
    Nack: (struct.Struct("!IQIQI"), _TailFormat(1, _pack_requests, _unpack_requests)),
    Ack: (struct.Struct("!IQIQIB"), _TEXT_TAIL),
    Done: (struct.Struct("!II"), _BITMAP_TAIL),
    Bye: (struct.Struct("!Q"), _TEXT_TAIL),
    Behind: (struct.Struct("!II"), _BITMAP_TAIL),
}
_KINDS = {kind: number for number, kind in enumerate(_FORMATS, 1)}

MEMBER_KINDS = {_KINDS[Join]: 0, _KINDS[Nack]: 4, _KINDS[Ack]: 4}
"""Kinds that receivers send -> offset of the member's number in the body."""

_DATA_HEADER = struct.Struct(HEADER.format + _FORMATS[Data][0].format[1:])
DATA_HEADER_SIZE = _DATA_HEADER.size
_SEGMENT = struct.Struct("!IH")
"""Bytes of a DATA packet before its segment."""
_DATA, _MAX_DATA = _KINDS[Data], DATA_HEADER_SIZE + MAX_SEGMENT
_INDEX_LIMIT = MAX_K + MAX_PARITY
"""Upper bound of an encoding symbol id, exclusive."""
_PACKED_INDEXES = [esi.to_bytes(2) for esi in range(_INDEX_LIMIT)]
"""Encoding symbol ids as they end the header of a DATA packet."""
NACK_HEADER_SIZE = HEADER.size + _FORMATS[Nack][0].size
"""Bytes of a NACK before its requests."""

_BOUNDS: dict[type[Packet], Callable[[Any], bool]] = {
    Offer: lambda it: it.members <= MAX_MEMBERS,
    Join: lambda it: (
        it.window > 0
        and it.max_message >= MIN_MESSAGE_SIZE
        and it.uses_parity <= 1
        and it.version >= NO_VERSION
    ),
    Admit: lambda it: all(index < MAX_MEMBERS for index, _ in it.indexes.values()),
    Describe: lambda it: (
        segment_size(MIN_MESSAGE_SIZE)
        <= it.segment
        <= MAX_SEGMENT  # the header and the work for a smaller segment cost more than it carries
        and 0 < it.k <= MAX_K
        and it.parity <= MAX_PARITY
        and it.carousel <= MAX_CAROUSEL * (it.size != UNKNOWN_SIZE)
        and it.version >= NO_VERSION
        and (it.version == NO_VERSION or not (it.carousel or it.size == UNKNOWN_SIZE))
        and it.position <= min(it.object, max(0, it.carousel - 1))
        and (it.size == UNKNOWN_SIZE or it.size <= MAX_BLOCKS * it.k * it.segment)
    ),
    Data: lambda it: it.block < MAX_BLOCKS and it.esi < _INDEX_LIMIT,
    Seal: lambda it: (
        it.members <= MAX_MEMBERS and len(it.blocks) - 1 <= it.block < MAX_BLOCKS and it.low <= MAX_BLOCKS
    ),
    Flush: lambda it: (
        it.members <= MAX_MEMBERS
        and it.low <= it.blocks <= min(it.total, MAX_BLOCKS)
        and (it.total == UNKNOWN_BLOCKS or it.total <= MAX_BLOCKS)
        and it.idle <= 1
        and it.first + it.ack_bits.bit_length() <= MAX_MEMBERS
    ),
    Nack: lambda it: (
        it.base < MAX_BLOCKS
        and all(
            it.base <= request.block and request.need <= request.missing.bit_count()
            for request in it.requests
        )
    ),
    Ack: lambda it: it.base <= MAX_BLOCKS and it.state <= COMPLETE_LEFT,
    Done: lambda it: it.first + it.complete.bit_length() <= MAX_MEMBERS,
    Behind: lambda it: it.first + it.slow.bit_length() <= MAX_MEMBERS,
}
"""Predicate for each kind that is True while all fields are within their bounds."""

_DECODERS = {
    number: (kind, fixed, tail.read, _BOUNDS.get(kind, bool))
    for number, (kind, (fixed, tail)) in enumerate(_FORMATS.items(), 1)
}
MEMBER_PACKETS = Join, Nack, Ack
"""Kinds of packets that receivers send."""


def micros(seconds: float) -> int:
    """Convert a time to the unit of packets, whole µs."""
    return int(seconds * 1e6)


def segment_size(max_message: int) -> int:
    """Return the bytes of a segment that fit into a message: a multiple of 16, which the code needs."""
    return min(MAX_SEGMENT, (max_message - DATA_HEADER_SIZE) // 16 * 16)


def decode_run(
    memory: Buffer, begin: int, step: int, size: int, count: int
) -> tuple[int, int, int, int, int] | None:
    """Decode a run of DATA packets in receive memory, in a fraction of the time that `decode` takes.

    memory, begin  the first packet's place
    step           bytes from the beginning of one packet to that of the next
    size           bytes of each packet
    count          packets there

    Returns session, object, block and encoding symbol id of the first packet, and the number of packets from
    there on with consecutive ids. None if the first is not a DATA packet within its bounds.
    """
    if not DATA_HEADER_SIZE < size <= _MAX_DATA:
        return None
    magic, kind, session, object_, block, first = _DATA_HEADER.unpack_from(memory, begin)
    if kind != _DATA or magic != MAGIC or block >= MAX_BLOCKS or first >= _INDEX_LIMIT:
        return None
    count = min(count, _INDEX_LIMIT - first)
    headers, run = bytearray(DATA_HEADER_SIZE * count), count
    copy_rows(headers, 0, DATA_HEADER_SIZE, memory, begin, step, DATA_HEADER_SIZE, count)
    expected = _with_indexes(bytes(headers[: DATA_HEADER_SIZE - len(_PACKED_INDEXES[0])]), first, count)
    if headers != expected:
        ends = range(DATA_HEADER_SIZE, DATA_HEADER_SIZE * count, DATA_HEADER_SIZE)
        run = bisect_left(ends, True, key=lambda end: headers[:end] != expected[:end])
    return session, object_, block, first, run


def data_header(session: int, object_: int) -> bytes:
    """Return the header of an object's first segment, DATA_HEADER_SIZE bytes."""
    return _DATA_HEADER.pack(MAGIC, _DATA, session, object_, 0, 0)


def set_segment(header: bytes, block: int, esi: int) -> bytes:
    """Return the header with that block and encoding symbol id."""
    return header[: -_SEGMENT.size] + _SEGMENT.pack(block, esi)


def _with_indexes(prefix: bytes, first: int, count: int) -> bytes:
    """Return headers that differ in their encoding symbol id alone."""
    return prefix + prefix.join(_PACKED_INDEXES[first : first + count])


def encode(packet: Packet) -> bytes:
    """Encode a packet as the bytes of a message."""
    fixed, tail = _FORMATS[type(packet)]
    session, *rest = packet
    cut = len(rest) - tail.fields
    header = HEADER.pack(MAGIC, _KINDS[type(packet)], session)
    return header + fixed.pack(*rest[:cut]) + tail.pack(*rest[cut:])


def decode(message: Buffer) -> Packet:
    """Decode a message. Raises Rejected if it is not of this protocol, or a field is out of bounds."""
    raw = bytes(message)
    if raw[: len(MAGIC)] != MAGIC:
        raise Rejected(VERSION if raw[: len(MAGIC) - 1] == MAGIC[:-1] else FOREIGN)
    try:
        _, number, session = HEADER.unpack_from(raw)
        kind, fixed, read, is_bounded = _DECODERS[number]
        rest = read(raw[HEADER.size + fixed.size :])
        packet = kind(session, *fixed.unpack_from(raw, HEADER.size), *rest)
    except (struct.error, KeyError, ValueError):
        raise Rejected(MALFORMED) from None
    if not is_bounded(packet):
        raise Rejected(MALFORMED)
    return packet


def decode_from(message: Buffer, address: str) -> Packet:
    """Decode a message that came from that address.

    Raises Rejected as `decode` does, and if the number in it belongs to an end at another address.
    """
    packet = decode(message)
    number = packet.member if isinstance(packet, MEMBER_PACKETS) else packet.session
    if number != number_at(address, number >> 32):
        raise Rejected(FORGED)
    return packet
