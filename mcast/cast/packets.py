"""The messages of the protocol: one NamedTuple for each kind, and the one table that packs and reads them."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

from typing_extensions import Buffer

MAGIC = b"mcF1"
WINDOW = 512
"""The most pieces that are ever under way, or held before their turn; a bitmap covers them."""
TEXT = 64
"""Names and reasons are cut to this many bytes."""
UNKNOWN_SIZE = (1 << 64) - 1
MOST_RECEIVERS = 1000
"""The most receivers of a transfer."""
EVERYBODY = 0
"""The receiver id of a CLOSE that is for all receivers."""

HEADER = struct.Struct("!4sB3xQ")


class Verdict(IntEnum):
    """How a transfer ended for a receiver."""

    VERIFIED = 0
    DIFFERS = 1
    FAILED = 2


class Reason(IntEnum):
    """Why a sender closes a transfer, or ends it for one receiver."""

    COMPLETE = 0
    ABORTED = 1
    GIVEN_UP = 2
    TOO_LATE = 3


class Hello(NamedTuple):
    """A transfer of `size` bytes, or UNKNOWN_SIZE, is about to begin."""

    session: int
    size: int
    name: str


class Join(NamedTuple):
    """A receiver asks to take part.

    `room` is how many messages it can hold, `largest` the largest one in bytes.
    """

    session: int
    receiver: int
    room: int
    largest: int
    name: str


class Welcome(NamedTuple):
    """The receiver with that id takes part."""

    session: int
    receiver: int


class Data(NamedTuple):
    """One piece of the file, not empty."""

    session: int
    number: int
    piece: bytes


class Ask(NamedTuple):
    """The receivers shall report. Pieces 0..pieces-1 have been sent."""

    session: int
    pieces: int
    serial: int


class Report(NamedTuple):
    """What a receiver has: all pieces before `next`, and piece next+i for each bit i that is set in `bitmap`.

    `room` is how many pieces from `next` on it has memory for, `serial` that of the ASK which it answers.
    """

    session: int
    receiver: int
    serial: int
    next: int
    room: int
    bitmap: int


class End(NamedTuple):
    """All pieces have been sent: `pieces` of them, `size` bytes in all, with this digest."""

    session: int
    pieces: int
    size: int
    sha256: bytes


class Done(NamedTuple):
    """How the transfer ended for this receiver, and why, in words."""

    session: int
    receiver: int
    verdict: Verdict
    text: str


class Close(NamedTuple):
    """The sender sends no more: to one receiver, or to EVERYBODY."""

    session: int
    receiver: int
    reason: Reason
    text: str


Packet = Hello | Join | Welcome | Data | Ask | Report | End | Done | Close


class Rejected(Exception):
    """The bytes are no message of the protocol. The text is the reason under which they are counted."""


FOREIGN, MALFORMED, FORGED = "foreign", "malformed", "another's number"


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
    clean = "".join(letter if letter.isprintable() else "?" for letter in text)
    return clean.encode()[:TEXT].decode(errors="ignore")


class _Rest(NamedTuple):
    """How the last field of a packet, which follows the fixed fields, is packed and read."""

    pack: Callable[[Any], bytes]
    read: Callable[[bytes], Any]


def _read_text(raw: bytes) -> str:
    if len(raw) > TEXT:
        raise ValueError
    return printable(raw.decode(errors="replace"))


def _read_piece(raw: bytes) -> bytes:
    if not raw:
        raise ValueError
    return raw


def _pack_bitmap(bitmap: int) -> bytes:
    return bitmap.to_bytes((bitmap.bit_length() + 7) // 8, "little")


def _read_bitmap(raw: bytes) -> int:
    if len(raw) > WINDOW // 8:
        raise ValueError
    return int.from_bytes(raw, "little")


_TEXT = _Rest(str.encode, _read_text)
_PIECE = _Rest(bytes, _read_piece)
_BITMAP = _Rest(_pack_bitmap, _read_bitmap)

_FORMS: dict[type[Packet], tuple[struct.Struct, _Rest | None]] = {
    Hello: (struct.Struct("!Q"), _TEXT),
    Join: (struct.Struct("!QHH"), _TEXT),
    Welcome: (struct.Struct("!Q"), None),
    Data: (struct.Struct("!Q"), _PIECE),
    Ask: (struct.Struct("!QI"), None),
    Report: (struct.Struct("!QIQH"), _BITMAP),
    End: (struct.Struct("!QQ32s"), None),
    Done: (struct.Struct("!QB"), _TEXT),
    Close: (struct.Struct("!QB"), _TEXT),
}
_NUMBERS = {kind: number for number, kind in enumerate(_FORMS, 1)}
_KINDS = dict(enumerate(_FORMS, 1))
_CODES: dict[type[Packet], type[Verdict] | type[Reason]] = {Done: Verdict, Close: Reason}

OVERHEAD = HEADER.size + _FORMS[Data][0].size
"""Bytes of a DATA message that are not the piece."""


def encode(packet: Packet) -> bytes:
    """The bytes of a packet."""
    fixed, rest = _FORMS[type(packet)]
    session, *fields = packet
    tail = b"" if rest is None else rest.pack(fields.pop())
    return HEADER.pack(MAGIC, _NUMBERS[type(packet)], session) + fixed.pack(*fields) + tail


def decode(message: Buffer) -> Packet:
    """The packet in a message. Raises Rejected if the bytes are none."""
    data = bytes(message)
    if data[: len(MAGIC)] != MAGIC:
        raise Rejected(FOREIGN)
    try:
        _, number, session = HEADER.unpack_from(data)
        kind = _KINDS[number]
        fixed, rest = _FORMS[kind]
        fields: list[Any] = [session, *fixed.unpack_from(data, HEADER.size)]
        tail = data[HEADER.size + fixed.size :]
        if rest is not None:
            fields.append(rest.read(tail))
        elif tail:
            raise Rejected(MALFORMED)
        if kind in _CODES:
            fields[2] = _CODES[kind](fields[2])
        return kind(*fields)
    except (struct.error, KeyError, ValueError):
        raise Rejected(MALFORMED) from None


def heard(message: Buffer, address: str, rejected: Counter[str]) -> Packet | None:
    """The packet in a message from that address; None if there is none, or if it speaks for another address.

    Each message that is not taken is counted in `rejected`, by reason.
    """
    try:
        packet = decode(message)
    except Rejected as why:
        rejected[str(why)] += 1
        return None
    number = packet.receiver if isinstance(packet, Join | Report | Done) else packet.session
    if number != number_at(address, number >> 32):
        rejected[FORGED] += 1
        return None
    return packet
