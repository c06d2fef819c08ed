"""The messages of the protocol of objects: a value for each kind, and the table that packs and reads them."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

from typing_extensions import Buffer

from mcast.arguments.rows import copy_rows

MAX_TEXT = 64
"""Names and reasons are cut to this many bytes."""

HEADER = struct.Struct("!4sB3xQ")
"""Magic, kind, session."""


class Rejected(Exception):
    """The bytes are no message of the protocol. The text is the reason under which they are counted."""


FOREIGN, MALFORMED, FORGED = "foreign", "malformed", "another's number"
VERSION = "of another version of this protocol: install the same mcast at both ends"


@lru_cache(maxsize=4096)
def number_at(address: str, salt: int) -> int:
    """The number of an end at that address, from a random salt of 1..2^32-1.

    No other address can use the number.

    Its lower half is a digest of salt and address, so an end at another address does not get the same number.
    """
    digest = blake2b(f"{salt} {address}".encode(), digest_size=4).digest()
    return salt << 32 | int.from_bytes(digest)


def printable(text: str) -> str:
    """The text cut to TEXT bytes, without characters that move a cursor."""
    clean = text
    if not text.isprintable():
        clean = "".join(letter if letter.isprintable() else "?" for letter in text)
    return clean.encode()[:MAX_TEXT].decode(errors="ignore")


MAGIC = b"mcC2"
"""Protocol and its version: ends of different versions do not understand each other."""
MAX_K = 128
"""The most pieces of data in a block."""
MAX_PARITY = 32
"""The most pieces of parity of a block."""
MAX_SEALS = 16
"""The most blocks that a SEAL describes."""
MAX_MEMBERS = 8192
"""The most receivers of a session."""
MAX_ADMITTED = 48
"""The most receivers that one ADMIT names: so many fit into the smallest message."""
MAX_METADATA = 512
"""The most bytes of metadata of an object."""
MAX_WINDOW = 4096
"""The most blocks that are ever under way."""
MAX_BLOCKS = 1 << 31
"""The most blocks of an object."""
MAX_CAROUSEL = 1 << 16
"""The most objects that go round together."""
MAX_SEGMENT = 1 << 14
"""The most bytes of a piece."""
MAX_ROUND_TRIP = 1.0
"""The longest round trip, in seconds, that a sender announces."""
MIN_MESSAGE_SIZE = 1000
"""A member takes messages of at least so many bytes; with the key's tag they are 1,024."""
UNKNOWN_SIZE = (1 << 64) - 1
"""The size of a stream whose end is not known."""
UNKNOWN_BLOCKS = (1 << 32) - 1
"""The number of blocks of an object whose end is not known."""
NO_DIGEST = bytes(32)
"""The digest of such an object."""
ALL_MEMBERS = 0
"""The receiver of a BYE that is for everybody."""

PENDING, COMPLETE, FAILED, LEFT, STORED, COMPLETE_LEFT = range(6)
"""What a HAVE says of the object: parts have arrived, all has arrived, it cannot; its receiver leaves; the
blocks before its base seem to be on the receiver's disk, and are not compared yet; all has arrived, and its
receiver leaves."""


class Offer(NamedTuple):
    """A sender invites. `object` is the number of its next object, or of the first of those that go round.
    Times are in µs.

    `nonce` is random, and the session's.
    """

    session: int
    object: int
    stamp: int
    members: int
    round_trip: int
    nonce: int
    name: str


class Join(NamedTuple):
    """A receiver takes part. `room` is in blocks; `parity` says whether it can use parity.

    `nonce` is random, and of this receiver in this session. `queue` is how many messages its receive queue
    holds, or 0 where it does not say.
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


class Admit(NamedTuple):
    """Receivers that take part: number -> index in the bitmaps of the sender, and the receiver's nonce."""

    session: int
    indexes: dict[int, tuple[int, int]]


class Describe(NamedTuple):
    """An object: bytes or UNKNOWN_SIZE, bytes of a piece, most data pieces and parity pieces of a block.

    `around` says how many objects go round and round, this one at that `place`, from 0: each that hears this
    takes part, and says nothing. It is 0 for an object that is sent once.
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


class Data(NamedTuple):
    """One piece. A place below the object's width is a data piece, one from the width on a parity piece."""

    session: int
    object: int
    block: int
    esi: int
    payload: Buffer


class BlockInfo(NamedTuple):
    """A block: its data pieces, its bytes, and a digest.

    That is the digest of the object up to the block's end, so that bytes are taken in once for it and for
    that of the whole; of the block alone where the object goes round, for there blocks come in any order.
    """

    segments: int
    size: int
    digest: bytes


class Seal(NamedTuple):
    """The blocks `block`, block-1, … of an object; those before `low` are gone. Times are in µs."""

    session: int
    object: int
    block: int
    low: int
    stamp: int
    members: int
    round_trip: int
    blocks: tuple[BlockInfo, ...]


class Flush(NamedTuple):
    """Blocks 0..blocks-1 are sent, of `total` or OPEN.

    The members first+i whose bit i is set shall answer. `waits` says that the sender has nothing else to
    send. Blocks before `low` are gone. `digest` is the whole object's where `total` is not OPEN.
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
    """What one receiver lacks of a block: how many pieces, or 0 where it cannot use parity; and which.

    Without a piece that is missing, the receiver lacks the block's seal.
    """

    block: int
    need: int
    missing: int


class Nack(NamedTuple):
    """A receiver has all blocks before `base`, and asks for pieces of others.

    `stamp` is the last that it has heard, `held` how many µs ago.
    """

    session: int
    object: int
    member: int
    base: int
    stamp: int
    hold_time: int
    requests: tuple[RepairRequest, ...]


class Ack(NamedTuple):
    """A receiver has all blocks before `base`; `state` is one of UNDECIDED to DONE, with a reason."""

    session: int
    object: int
    member: int
    base: int
    stamp: int
    hold_time: int
    state: int
    reason: str


class Done(NamedTuple):
    """The sender is done with the object. The members first+i whose bit i is set have it whole."""

    session: int
    object: int
    first: int
    complete: int


class Behind(NamedTuple):
    """The sender leaves the members first+i whose bit i is set behind in this object: they are too slow for
    its strategy."""

    session: int
    object: int
    first: int
    slow: int


class Bye(NamedTuple):
    """The sender is done with one receiver, or with ALL, and says why."""

    session: int
    member: int
    reason: str


Packet = Offer | Join | Admit | Describe | Data | Seal | Flush | Nack | Ack | Done | Bye | Behind


class _TailFormat(NamedTuple):
    """How the fields after the fixed ones are packed and read; reading raises ValueError."""

    fields: int
    pack: Callable[..., bytes]
    read: Callable[[bytes], tuple[Any, ...]]


def _unpack_text(raw: bytes) -> tuple[str]:
    if len(raw) > MAX_TEXT:
        raise ValueError
    if not raw:  # as in nearly all answers
        return ("",)
    return (printable(raw.decode(errors="replace")),)


def _pack_described(name: str, metadata: bytes) -> bytes:
    encoded = name.encode()
    return bytes((len(encoded),)) + encoded + metadata


def _unpack_described(raw: bytes) -> tuple[str, bytes]:
    metadata = raw[1 + raw[0] :] if raw else b""
    if not raw or len(raw) <= raw[0] or len(metadata) > MAX_METADATA:
        raise ValueError
    return *_unpack_text(raw[1 : 1 + raw[0]]), metadata


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


def _unpack_rows(form: struct.Struct, raw: bytes, most: int) -> list[tuple[Any, ...]]:
    rows, odd = divmod(len(raw), form.size)
    if odd or not 0 < rows <= most:
        raise ValueError
    return list(form.iter_unpack(raw))


_BLOCK = struct.Struct("!HI32s")
_BLOCK_ROW = struct.Struct(f"{_BLOCK.size}s")
_REQUEST = struct.Struct("!IB16s")
_ADMITTED = struct.Struct("!QIQ")
REQUEST_SIZE = _REQUEST.size


@lru_cache(maxsize=1024)  # a block is in as many seals as there may be rows
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
    Join: (struct.Struct("!QHHBQQI"), _TEXT_TAIL),
    Admit: (struct.Struct(""), _TailFormat(1, _pack_admitted, _unpack_admitted)),
    Describe: (struct.Struct("!IQHBBII"), _TailFormat(2, _pack_described, _unpack_described)),
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
"""The kinds that receivers send -> where the number of the receiver stands in the body."""

_DATA_HEADER = struct.Struct(HEADER.format + _FORMATS[Data][0].format[1:])
DATA_HEADER_SIZE = _DATA_HEADER.size
"""Bytes of a PIECE message that are not the piece."""
_DATA, _MAX_DATA = _KINDS[Data], DATA_HEADER_SIZE + MAX_SEGMENT
_INDEX_LIMIT = MAX_K + MAX_PARITY
"""A place is less."""
_PACKED_INDEXES = [place.to_bytes(2) for place in range(_INDEX_LIMIT)]
"""The places, as heads end with them."""
NACK_HEADER_SIZE = HEADER.size + _FORMATS[Nack][0].size
"""Bytes of a LACK before its rows."""

_BOUNDS: dict[type[Packet], Callable[[Any], bool]] = {
    Offer: lambda it: it.members <= MAX_MEMBERS,
    Join: lambda it: it.window > 0 and it.max_message >= MIN_MESSAGE_SIZE and it.uses_parity <= 1,
    Admit: lambda it: all(index < MAX_MEMBERS for index, _ in it.indexes.values()),
    Describe: lambda it: (
        segment_size(MIN_MESSAGE_SIZE)
        <= it.segment
        <= MAX_SEGMENT  # smaller ones cost a receiver more than they bring
        and 0 < it.k <= MAX_K
        and it.parity <= MAX_PARITY
        and it.carousel <= MAX_CAROUSEL * (it.size != UNKNOWN_SIZE)
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
"""What is not between its bounds is malformed, before an end sees it."""

_DECODERS = {
    number: (kind, fixed, tail.read, _BOUNDS.get(kind, bool))
    for number, (kind, (fixed, tail)) in enumerate(_FORMATS.items(), 1)
}
MEMBER_PACKETS = Join, Nack, Ack
"""The messages of receivers."""


def micros(seconds: float) -> int:
    """A time as messages have it, in whole µs."""
    return int(seconds * 1e6)


def segment_size(max_message: int) -> int:
    """How many bytes a piece has in messages of at most `largest` bytes: whole words of a code's 16 bytes."""
    return min(MAX_SEGMENT, (max_message - DATA_HEADER_SIZE) // 16 * 16)


def decode_run(
    memory: Buffer, begin: int, step: int, size: int, most: int
) -> tuple[int, int, int, int, int] | None:
    """Session, object, block and place of the PIECE at `begin`, and how many there follow one another.

    memory, begin, step, size  where `most` messages lie: each has `size` bytes, and begins `step` bytes after
                               the one before it

    None where no PIECE is whose fields are in bounds. As `unpacked`, in a fraction of its time.
    """
    if not DATA_HEADER_SIZE < size <= _MAX_DATA:
        return None
    sign, kind, session, object_, block, first = _DATA_HEADER.unpack_from(memory, begin)
    if kind != _DATA or sign != MAGIC or block >= MAX_BLOCKS or first >= _INDEX_LIMIT:
        return None
    most = min(most, _INDEX_LIMIT - first)
    found, count = bytearray(DATA_HEADER_SIZE * most), most
    copy_rows(found, 0, DATA_HEADER_SIZE, memory, begin, step, DATA_HEADER_SIZE, most)
    expected = _with_indexes(bytes(found[: DATA_HEADER_SIZE - len(_PACKED_INDEXES[0])]), first, most)
    if found != expected:
        ends = range(DATA_HEADER_SIZE, DATA_HEADER_SIZE * most, DATA_HEADER_SIZE)
        count = bisect_left(ends, True, key=lambda end: found[:end] != expected[:end])
    return session, object_, block, first, count


def data_headers(session: int, object_: int, block: int, first: int, count: int) -> bytes:
    """What stands before the pieces first..first+count-1 of a block, each in a message of its own: one after
    another, AROUND bytes for each."""
    return _with_indexes(
        _DATA_HEADER.pack(MAGIC, _DATA, session, object_, block, 0)[: -len(_PACKED_INDEXES[0])], first, count
    )


def _with_indexes(same: bytes, first: int, count: int) -> bytes:
    """Heads that differ in their places alone."""
    return same + same.join(_PACKED_INDEXES[first : first + count])


def encode(packet: Packet) -> bytes:
    """The bytes of a message."""
    fixed, tail = _FORMATS[type(packet)]
    session, *rest = packet
    cut = len(rest) - tail.fields
    head = HEADER.pack(MAGIC, _KINDS[type(packet)], session)
    return head + fixed.pack(*rest[:cut]) + tail.pack(*rest[cut:])


def decode(message: Buffer) -> Packet:
    """The values in a message. Raises Rejected if the bytes are none of the protocol, or out of bounds."""
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
    """The values in a message that came from that address.

    Raises Rejected if there are none, or if the message speaks for an end at another address.
    """
    packet = decode(message)
    number = packet.member if isinstance(packet, MEMBER_PACKETS) else packet.session
    if number != number_at(address, number >> 32):
        raise Rejected(FORGED)
    return packet
