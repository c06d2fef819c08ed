"""The messages of the feed and their bytes; what does not parse is refused as a whole, as `BadMessage`."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

FEED, REPAIR = "239.7.1.1", "239.7.1.2"
"""The groups: prices come down the first, what subscribers ask for goes up the second."""

_HEAD = struct.Struct("!cQHH")  # kind, version, part, parts
_ENTRY = struct.Struct("!8sq")  # symbol, price


class BadMessage(ValueError):
    """These bytes are no message of the feed."""


class Update(NamedTuple):
    """Version `version` of the book differs from the one before in this price, in cents."""

    version: int
    symbol: str
    price: int


class Heartbeat(NamedTuple):
    """The book has this version; a subscriber with an older one has missed something."""

    version: int


class Part(NamedTuple):
    """Part `part` (from 0) of `parts` of the whole book at `version`."""

    version: int
    part: int
    parts: int
    prices: Mapping[str, int]


class Request(NamedTuple):
    """Somebody has the book as of `version` and has missed what came then: send all of it."""

    version: int


Message = Update | Heartbeat | Part | Request


def snapshot(version: int, prices: Mapping[str, int], room: int) -> Iterator[Part]:
    """The whole book in parts of at most `room` bytes."""
    fit = (room - _HEAD.size) // _ENTRY.size
    entries = list(prices.items())
    parts = max(1, -(-len(entries) // fit))
    return (Part(version, n, parts, dict(entries[n * fit : (n + 1) * fit])) for n in range(parts))


def encode(message: Message) -> bytes:
    """The bytes of a message. A symbol has at most 8 ASCII letters."""
    match message:
        case Update(version, symbol, price):
            return _HEAD.pack(b"U", version, 0, 1) + _entry(symbol, price)
        case Heartbeat(version):
            return _HEAD.pack(b"H", version, 0, 1)
        case Request(version):
            return _HEAD.pack(b"R", version, 0, 1)
        case Part(version, part, parts, prices):
            return _HEAD.pack(b"P", version, part, parts) + b"".join(_entry(*one) for one in prices.items())


def _entry(symbol: str, price: int) -> bytes:
    name = symbol.encode("ascii")
    if not 1 <= len(name) <= 8:
        raise ValueError(f"the symbol {symbol!r} does not have 1 to 8 letters")
    return _ENTRY.pack(name, price)


def decode(payload: bytes | memoryview) -> Message:
    """The message in these bytes. Raises BadMessage: anybody may send to a group."""
    try:
        kind, version, part, parts = _HEAD.unpack_from(payload)
        entries = {
            name.rstrip(b"\0").decode("ascii"): price
            for name, price in _ENTRY.iter_unpack(payload[_HEAD.size :])
        }
    except (struct.error, UnicodeDecodeError) as error:
        raise BadMessage(f"{len(payload)} bytes that do not parse: {error}") from None
    match kind:
        case b"U" if len(entries) == 1:
            ((symbol, price),) = entries.items()
            return Update(version, symbol, price)
        case b"H" if not entries:
            return Heartbeat(version)
        case b"R" if not entries:
            return Request(version)
        case b"P" if part < parts:
            return Part(version, part, parts, entries)
    raise BadMessage(f"kind {kind!r} with {len(entries)} prices, part {part} of {parts}")
