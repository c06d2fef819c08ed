"""The two frames of a message's path that are not JSON: what a sender posts, and what its receivers are told.

Both hold headers only; the payloads lie in the sender's ring. Who reads a frame believes no length in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import NamedTuple

from mcast.backends.sim.shared.frames import MOST_MESSAGES

POST = 3
"""What a posted frame says that it is, where other requests say 0."""

_POST = Struct("<IBBHIIQ")  # the first two as in frames.PREFIX
_ONE = Struct("<16sQI")
"""A post of one message: all that it shares with others to the same destination, its place, its length."""
ONE = _ONE.size
"""Bytes of such a post."""
_IMM, _OWN, _STAMPED = 1, 2, 4
_RECORD = Struct("<40sQQQIHBx")
_FIRST = Struct("<Q")
_ALONE = Struct("<Q40sQQQIHBxI")
"""A frame for a receiver with one message, in one piece."""

LOOK = b"L"
"""A frame that tells a receiver to ask: its port has news, or its queue pair an error."""
MOST_TOLD = 256
"""Messages in a frame for a receiver; each takes no more than a record and a length."""
MOST_FRAME = _FIRST.size + MOST_TOLD * (_RECORD.size + 4)


class PostedFrame(NamedTuple):
    """Messages in the sender's ring: the queue pair and the destination, by their numbers."""

    qp: int
    slot: int
    imm: int | None
    place: int
    lengths: Sequence[int]


class Told(NamedTuple):
    """Messages for a receiver, which came together. `ring` 0: they lie in no ring, ask for them."""

    header: bytes
    ring: int
    place: int
    at: int | None
    imm: int | None
    own: bool
    lengths: Sequence[int]


def pack_post(post: PostedFrame) -> bytes:
    """A frame."""
    qp, slot, imm, place, lengths = post
    head = _POST.pack(0, POST, imm is not None, slot, qp, imm or 0, place)
    return head + array("I", lengths).tobytes()


def one_head(qp: int, slot: int) -> bytes:
    """What posts of one message each, without an immediate value, begin with."""
    return _POST.pack(0, POST, False, slot, qp, 0, 0)[: -_FIRST.size]


pack_one: Callable[[bytes, int, int], bytes] = _ONE.pack
"""A post of one message, of its head, its place and its length."""
unpack_one: Callable[[memoryview], tuple[bytes, int, int]] = _ONE.unpack
"""Head, place and length of a frame of `ONE` bytes."""
iter_ones: Callable[[bytes], Iterator[tuple[bytes, int, int]]] = _ONE.iter_unpack
"""Of as many posts as there are."""


def is_post(frame: memoryview) -> bool:
    """Whether a frame of a client is one of these."""
    return len(frame) > 4 and frame[4] == POST


def unpack_post(frame: memoryview) -> PostedFrame:
    """What a stranger has sent. Raises ValueError for what is no post."""
    if len(frame) < _POST.size or len(frame) - _POST.size > 4 * MOST_MESSAGES:
        raise ValueError(f"a post of {len(frame)} bytes")
    _, _, has_imm, slot, qp, imm, place = _POST.unpack_from(frame)
    lengths = array("I", bytes(frame[_POST.size :]))
    return PostedFrame(qp, slot, imm if has_imm else None, place, lengths)


def pack_told(first: int, told: Sequence[Told]) -> bytes:
    """A frame; `first` numbers its first message among all that the queue pair was told of."""
    parts = [_FIRST.pack(first)]
    for header, ring, place, at, imm, own, lengths in told:
        flags, count = _IMM * (imm is not None) | _OWN * own | _STAMPED * (at is not None), len(lengths)
        if count == 1 == len(told):
            return _ALONE.pack(first, header, ring, place, at or 0, imm or 0, 1, flags, lengths[0])
        parts.append(_RECORD.pack(header, ring, place, at or 0, imm or 0, count, flags))
        parts.append(array("I", lengths).tobytes())
    return b"".join(parts)


def unpack_alone(frame: bytes) -> Told | None:
    """The message of a frame that has no other one; None for any other frame, which `unpack_told` knows."""
    if len(frame) != _ALONE.size:
        return None
    _, header, ring, place, stamp, imm, count, flags, length = _ALONE.unpack(frame)
    if count != 1:
        return None
    at = stamp if flags & _STAMPED else None
    return Told(header, ring, place, at, imm if flags & _IMM else None, bool(flags & _OWN), (length,))


def unpack_told(frame: bytes) -> tuple[int, list[Told]]:
    """The number of the first message, and the messages. Raises ValueError for what is no such frame."""
    if len(frame) < _FIRST.size:
        raise ValueError(f"a frame of {len(frame)} bytes")
    return _FIRST.unpack_from(frame)[0], list(_records(frame, _FIRST.size))


def _records(frame: bytes, at: int) -> Iterator[Told]:
    end = len(frame)
    while at < end:
        lengths_at = at + _RECORD.size
        if lengths_at > end:
            raise ValueError("a record is cut short")
        header, ring, place, stamp, imm, count, flags = _RECORD.unpack_from(frame, at)
        at = lengths_at + 4 * count
        if at > end:
            raise ValueError("the lengths are cut short")
        lengths = array("I", frame[lengths_at:at])
        yield Told(
            header,
            ring,
            place,
            stamp if flags & _STAMPED else None,
            imm if flags & _IMM else None,
            bool(flags & _OWN),
            lengths,
        )
