"""The messages of the protocol of objects: a value for each kind, and the table that packs and reads them."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from typing_extensions import Buffer

from mcast.arguments.rows import copy_rows
from mcast.cast.nack.header import (
    FOREIGN,
    FORGED,
    HEADER,
    MALFORMED,
    TEXT,
    VERSION,
    Rejected,
    number_at,
    printable,
)

SIGN = b"mcC2"
"""Protocol and its version: ends of different versions do not understand each other."""
MOST_WIDTH = 128
"""The most pieces of data in a block."""
MOST_SPARE = 32
"""The most pieces of parity of a block."""
MOST_SEALS = 16
"""The most blocks that a SEAL describes."""
MOST_MEMBERS = 8192
"""The most receivers of a session."""
MOST_ADMITTED = 48
"""The most receivers that one ADMIT names: so many fit into the smallest message."""
MOST_METADATA = 512
"""The most bytes of metadata of an object."""
MOST_ROOM = 4096
"""The most blocks that are ever under way."""
MOST_BLOCKS = 1 << 31
"""The most blocks of an object."""
MOST_AROUND = 1 << 16
"""The most objects that go round together."""
MOST_PIECE = 1 << 14
"""The most bytes of a piece."""
MOST_ROUND_TRIP = 1.0
"""The longest round trip, in seconds, that a sender announces."""
LARGEST = 1000
"""A member takes messages of at least so many bytes; with the key's tag they are 1,024."""
UNTOLD = (1 << 64) - 1
"""The size of a stream whose end is not known."""
OPEN = (1 << 32) - 1
"""The number of blocks of an object whose end is not known."""
NO_DIGEST = bytes(32)
"""The digest of such an object."""
ALL = 0
"""The receiver of a BYE that is for everybody."""

UNDECIDED, WHOLE, BROKEN, LEFT, HOLDS, DONE = range(6)
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


class Enter(NamedTuple):
    """A receiver takes part. `room` is in blocks; `parity` says whether it can use parity.

    `nonce` is random, and of this receiver in this session. `queue` is how many messages its receive queue
    holds, or 0 where it does not say.
    """

    session: int
    member: int
    room: int
    largest: int
    parity: int
    stamp: int
    nonce: int
    queue: int
    name: str


class Admit(NamedTuple):
    """Receivers that take part: number -> index in the bitmaps of the sender, and the receiver's nonce."""

    session: int
    indexes: dict[int, tuple[int, int]]


class Describe(NamedTuple):
    """An object: bytes or UNTOLD, bytes of a piece, most data pieces and parity pieces of a block.

    `around` says how many objects go round and round, this one at that `place`, from 0: each that hears this
    takes part, and says nothing. It is 0 for an object that is sent once.
    """

    session: int
    object: int
    size: int
    piece: int
    width: int
    spare: int
    around: int
    place: int
    name: str
    metadata: bytes


class Piece(NamedTuple):
    """One piece. A place below the object's width is a data piece, one from the width on a parity piece."""

    session: int
    object: int
    block: int
    place: int
    payload: Buffer


class Sealed(NamedTuple):
    """A block: its data pieces, its bytes, and a digest.

    That is the digest of the object up to the block's end, so that bytes are taken in once for it and for
    that of the whole; of the block alone where the object goes round, for there blocks come in any order.
    """

    pieces: int
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
    blocks: tuple[Sealed, ...]


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
    waits: int
    digest: bytes
    first: int
    asked: int


class Want(NamedTuple):
    """What one receiver lacks of a block: how many pieces, or 0 where it cannot use parity; and which.

    Without a piece that is missing, the receiver lacks the block's seal.
    """

    block: int
    need: int
    missing: int


class Lack(NamedTuple):
    """A receiver has all blocks before `base`, and asks for pieces of others.

    `stamp` is the last that it has heard, `held` how many µs ago.
    """

    session: int
    object: int
    member: int
    base: int
    stamp: int
    held: int
    wants: tuple[Want, ...]


class Have(NamedTuple):
    """A receiver has all blocks before `base`; `state` is one of UNDECIDED to DONE, with a reason."""

    session: int
    object: int
    member: int
    base: int
    stamp: int
    held: int
    state: int
    words: str


class Over(NamedTuple):
    """The sender is done with the object. The members first+i whose bit i is set have it whole."""

    session: int
    object: int
    first: int
    whole: int


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
    words: str


Spoken = Offer | Enter | Admit | Describe | Piece | Seal | Flush | Lack | Have | Over | Bye | Behind


class _Tail(NamedTuple):
    """How the fields after the fixed ones are packed and read; reading raises ValueError."""

    fields: int
    pack: Callable[..., bytes]
    read: Callable[[bytes], tuple[Any, ...]]


def _read_words(raw: bytes) -> tuple[str]:
    if len(raw) > TEXT:
        raise ValueError
    if not raw:  # as in nearly all answers
        return ("",)
    return (printable(raw.decode(errors="replace")),)


def _pack_described(name: str, metadata: bytes) -> bytes:
    encoded = name.encode()
    return bytes((len(encoded),)) + encoded + metadata


def _read_described(raw: bytes) -> tuple[str, bytes]:
    metadata = raw[1 + raw[0] :] if raw else b""
    if not raw or len(raw) <= raw[0] or len(metadata) > MOST_METADATA:
        raise ValueError
    return *_read_words(raw[1 : 1 + raw[0]]), metadata


_BITS = MOST_MEMBERS // 8


def _pack_bits(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def _read_bits(raw: bytes) -> tuple[int]:
    if len(raw) > _BITS:
        raise ValueError
    return (int.from_bytes(raw, "little"),)


def _read_payload(raw: bytes) -> tuple[bytes]:
    if not 0 < len(raw) <= MOST_PIECE:
        raise ValueError
    return (raw,)


def _rows(form: struct.Struct, raw: bytes, most: int) -> list[tuple[Any, ...]]:
    rows, odd = divmod(len(raw), form.size)
    if odd or not 0 < rows <= most:
        raise ValueError
    return list(form.iter_unpack(raw))


_SEALED = struct.Struct("!HI32s")
_SEALED_ROW = struct.Struct(f"{_SEALED.size}s")
_WANT = struct.Struct("!IB16s")
_ADMITTED = struct.Struct("!QIQ")
WANT_BYTES = _WANT.size


@lru_cache(maxsize=1024)  # a block is in as many seals as there may be rows
def _sealed_row(block: Sealed) -> bytes:
    return _SEALED.pack(*block)


def _pack_sealed(blocks: tuple[Sealed, ...]) -> bytes:
    return b"".join([_sealed_row(block) for block in blocks])


@lru_cache(maxsize=1024)
def _one_sealed(row: bytes) -> Sealed:
    found = Sealed(*_SEALED.unpack(row))
    if not 0 < found.pieces <= MOST_WIDTH:
        raise ValueError
    return found


def _read_sealed(raw: bytes) -> tuple[tuple[Sealed, ...]]:
    rows = _rows(_SEALED_ROW, raw, MOST_SEALS)
    return (tuple([_one_sealed(row) for (row,) in rows]),)


def _pack_wants(wants: tuple[Want, ...]) -> bytes:
    return b"".join(_WANT.pack(block, need, bits.to_bytes(16, "little")) for block, need, bits in wants)


def _read_wants(raw: bytes) -> tuple[tuple[Want, ...]]:
    rows = _rows(_WANT, raw, len(raw) // WANT_BYTES)
    return (tuple(Want(block, need, int.from_bytes(bits, "little")) for block, need, bits in rows),)


def _pack_admitted(indexes: dict[int, tuple[int, int]]) -> bytes:
    return b"".join(_ADMITTED.pack(number, *row) for number, row in indexes.items())


def _read_admitted(raw: bytes) -> tuple[dict[int, tuple[int, int]]]:
    rows = {number: (index, nonce) for number, index, nonce in _rows(_ADMITTED, raw, MOST_ADMITTED)}
    if len(rows) * _ADMITTED.size != len(raw):
        raise ValueError
    return (rows,)


_WORDS = _Tail(1, str.encode, _read_words)
_BITMAP = _Tail(1, _pack_bits, _read_bits)

_FORMS: dict[type[Spoken], tuple[struct.Struct, _Tail]] = {
    Offer: (struct.Struct("!IQIIQ"), _WORDS),
    Enter: (struct.Struct("!QHHBQQI"), _WORDS),
    Admit: (struct.Struct(""), _Tail(1, _pack_admitted, _read_admitted)),
    Describe: (struct.Struct("!IQHBBII"), _Tail(2, _pack_described, _read_described)),
    Piece: (struct.Struct("!IIH"), _Tail(1, bytes, _read_payload)),
    Seal: (struct.Struct("!IIIQII"), _Tail(1, _pack_sealed, _read_sealed)),
    Flush: (struct.Struct("!IIIIQIIB32sI"), _BITMAP),
    Lack: (struct.Struct("!IQIQI"), _Tail(1, _pack_wants, _read_wants)),
    Have: (struct.Struct("!IQIQIB"), _WORDS),
    Over: (struct.Struct("!II"), _BITMAP),
    Bye: (struct.Struct("!Q"), _WORDS),
    Behind: (struct.Struct("!II"), _BITMAP),
}
_NUMBERS = {kind: number for number, kind in enumerate(_FORMS, 1)}

OF_MEMBERS = {_NUMBERS[Enter]: 0, _NUMBERS[Lack]: 4, _NUMBERS[Have]: 4}
"""The kinds that receivers send -> where the number of the receiver stands in the body."""

_PIECE_HEAD = struct.Struct(HEADER.format + _FORMS[Piece][0].format[1:])
AROUND = _PIECE_HEAD.size
"""Bytes of a PIECE message that are not the piece."""
_PIECE, _LONGEST = _NUMBERS[Piece], AROUND + MOST_PIECE
_PLACES = MOST_WIDTH + MOST_SPARE
"""A place is less."""
_AT = [place.to_bytes(2) for place in range(_PLACES)]
"""The places, as heads end with them."""
WANTS_AT = HEADER.size + _FORMS[Lack][0].size
"""Bytes of a LACK before its rows."""

_BOUNDS: dict[type[Spoken], Callable[[Any], bool]] = {
    Offer: lambda it: it.members <= MOST_MEMBERS,
    Enter: lambda it: it.room > 0 and it.largest >= LARGEST and it.parity <= 1,
    Admit: lambda it: all(index < MOST_MEMBERS for index, _ in it.indexes.values()),
    Describe: lambda it: (
        piece_size(LARGEST) <= it.piece <= MOST_PIECE  # smaller ones cost a receiver more than they bring
        and 0 < it.width <= MOST_WIDTH
        and it.spare <= MOST_SPARE
        and it.around <= MOST_AROUND * (it.size != UNTOLD)
        and it.place <= min(it.object, max(0, it.around - 1))
        and (it.size == UNTOLD or it.size <= MOST_BLOCKS * it.width * it.piece)
    ),
    Piece: lambda it: it.block < MOST_BLOCKS and it.place < _PLACES,
    Seal: lambda it: (
        it.members <= MOST_MEMBERS and len(it.blocks) - 1 <= it.block < MOST_BLOCKS and it.low <= MOST_BLOCKS
    ),
    Flush: lambda it: (
        it.members <= MOST_MEMBERS
        and it.low <= it.blocks <= min(it.total, MOST_BLOCKS)
        and (it.total == OPEN or it.total <= MOST_BLOCKS)
        and it.waits <= 1
        and it.first + it.asked.bit_length() <= MOST_MEMBERS
    ),
    Lack: lambda it: (
        it.base < MOST_BLOCKS
        and all(it.base <= want.block and want.need <= want.missing.bit_count() for want in it.wants)
    ),
    Have: lambda it: it.base <= MOST_BLOCKS and it.state <= DONE,
    Over: lambda it: it.first + it.whole.bit_length() <= MOST_MEMBERS,
    Behind: lambda it: it.first + it.slow.bit_length() <= MOST_MEMBERS,
}
"""What is not between its bounds is malformed, before an end sees it."""

_READERS = {
    number: (kind, fixed, tail.read, _BOUNDS.get(kind, bool))
    for number, (kind, (fixed, tail)) in enumerate(_FORMS.items(), 1)
}
OF_A_MEMBER = Enter, Lack, Have
"""The messages of receivers."""


def micros(seconds: float) -> int:
    """A time as messages have it, in whole µs."""
    return int(seconds * 1e6)


def piece_size(largest: int) -> int:
    """How many bytes a piece has in messages of at most `largest` bytes: whole words of a code's 16 bytes."""
    return min(MOST_PIECE, (largest - AROUND) // 16 * 16)


def pieces_in(
    memory: Buffer, begin: int, step: int, size: int, most: int
) -> tuple[int, int, int, int, int] | None:
    """Session, object, block and place of the PIECE at `begin`, and how many there follow one another.

    memory, begin, step, size  where `most` messages lie: each has `size` bytes, and begins `step` bytes after
                               the one before it

    None where no PIECE is whose fields are in bounds. As `unpacked`, in a fraction of its time.
    """
    if not AROUND < size <= _LONGEST:
        return None
    sign, kind, session, object_, block, first = _PIECE_HEAD.unpack_from(memory, begin)
    if kind != _PIECE or sign != SIGN or block >= MOST_BLOCKS or first >= _PLACES:
        return None
    most = min(most, _PLACES - first)
    found, count = bytearray(AROUND * most), most
    copy_rows(found, 0, AROUND, memory, begin, step, AROUND, most)
    expected = _numbered(bytes(found[: AROUND - len(_AT[0])]), first, most)
    if found != expected:
        ends = range(AROUND, AROUND * most, AROUND)
        count = bisect_left(ends, True, key=lambda end: found[:end] != expected[:end])
    return session, object_, block, first, count


def heads(session: int, object_: int, block: int, first: int, count: int) -> bytes:
    """What stands before the pieces first..first+count-1 of a block, each in a message of its own: one after
    another, AROUND bytes for each."""
    return _numbered(_PIECE_HEAD.pack(SIGN, _PIECE, session, object_, block, 0)[: -len(_AT[0])], first, count)


def _numbered(same: bytes, first: int, count: int) -> bytes:
    """Heads that differ in their places alone."""
    return same + same.join(_AT[first : first + count])


def packed(spoken: Spoken) -> bytes:
    """The bytes of a message."""
    fixed, tail = _FORMS[type(spoken)]
    session, *rest = spoken
    cut = len(rest) - tail.fields
    head = HEADER.pack(SIGN, _NUMBERS[type(spoken)], session)
    return head + fixed.pack(*rest[:cut]) + tail.pack(*rest[cut:])


def unpacked(message: Buffer) -> Spoken:
    """The values in a message. Raises Rejected if the bytes are none of the protocol, or out of bounds."""
    raw = bytes(message)
    if raw[: len(SIGN)] != SIGN:
        raise Rejected(VERSION if raw[: len(SIGN) - 1] == SIGN[:-1] else FOREIGN)
    try:
        _, number, session = HEADER.unpack_from(raw)
        kind, fixed, read, is_bounded = _READERS[number]
        rest = read(raw[HEADER.size + fixed.size :])
        spoken = kind(session, *fixed.unpack_from(raw, HEADER.size), *rest)
    except (struct.error, KeyError, ValueError):
        raise Rejected(MALFORMED) from None
    if not is_bounded(spoken):
        raise Rejected(MALFORMED)
    return spoken


def told(message: Buffer, address: str) -> Spoken:
    """The values in a message that came from that address.

    Raises Rejected if there are none, or if the message speaks for an end at another address.
    """
    spoken = unpacked(message)
    number = spoken.member if isinstance(spoken, OF_A_MEMBER) else spoken.session
    if number != number_at(address, number >> 32):
        raise Rejected(FORGED)
    return spoken
