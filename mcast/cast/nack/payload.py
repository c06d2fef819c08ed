"""The bytes of blocks: cut into pieces with their parity, and put together from pieces and checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

from blake3 import blake3
from typing_extensions import Buffer

from mcast.api import HeaderBodyBatch
from mcast.arguments.rows import copy_rows
from mcast.cast.nack.messages import AROUND, Describe, Sealed, heads
from mcast.cast.nack.parity import parity_of, restored
from mcast.cast.nack.rate import BURST
from mcast.cast.nack.repairs import Run

_KEPT = 16 << 20

WORTH_A_BATCH = 16
"""Pieces in a row that make a batch of their own: to copy fewer takes no longer than a batch."""


@cache
def keep_freed_memory() -> None:
    """Have malloc of glibc keep freed memory for the next turn, as it does once a block of so many bytes was
    freed: to get pages from the kernel anew takes several times as long as to fill them (mallopt(3),
    M_MMAP_THRESHOLD). Once in a process, because malloc keeps the next such block itself.
    """
    bytes(_KEPT)


class Digest:
    """A BLAKE3 digest of what has come so far: of a block, or of an object."""

    def __init__(self, data: Buffer = b"") -> None:
        self._hash = blake3(data)

    def update(self, data: Buffer) -> None:
        """Take in what follows."""
        self._hash.update(data)

    def goes_on(self, data: Buffer, digest: bytes) -> bool:
        """Take in what follows, if the digest is that one then; whether it is."""
        more = self._hash.copy()
        more.update(data)
        if more.digest() != digest:
            return False
        self._hash = more
        return True

    def __bytes__(self) -> bytes:
        return bytes(self._hash.digest())


class BlockBytes:
    """A block that is sent: its pieces, and its parity pieces when they are asked for.

    data  bytes, or a view of bytes that nobody changes meanwhile: no copy is made
    digest  what its seal says; None: the digest of the block alone
    """

    def __init__(self, data: bytes | memoryview, piece: int, width: int, digest: bytes | None = None) -> None:
        digest = bytes(Digest(data)) if digest is None else digest
        self.sealed: Sealed = Sealed(-(-len(data) // piece), len(data), digest)
        self._data, self._piece, self._width = memoryview(data), piece, width
        self._parity: list[bytes] = []

    def pieces(self, first: int, count: int) -> list[bytes | memoryview]:
        """The pieces from that place on: data pieces below the width, parity pieces from there on."""
        data, piece, last = self._data, self._piece, min(first + count, self._width)
        found: list[bytes | memoryview] = [
            data[at : at + piece] for at in range(first * piece, last * piece, piece)
        ]
        if first + count > self._width:
            most = first + count - self._width  # to repair a few losses, few of them are asked for
            if most > len(self._parity):
                self._parity = parity_of(data, piece, most)
            found += self._parity[max(0, first - self._width) : most]
        return found

    def parts(self, first: int, count: int) -> Iterator[tuple[int, memoryview]]:
        """The same, as they follow one another in memory: where each part begins, and its bytes."""
        end, width = first + count, self._width
        if first < width:
            yield first, self._data[first * self._piece : min(end, width) * self._piece]
        if end > width:
            begin = max(first, width)
            yield begin, memoryview(b"".join(self.pieces(begin, end - begin)))

    def piece(self, place: int) -> bytes | memoryview:
        """The piece at that place."""
        return self.pieces(place, 1)[0]


class Frames:
    """Messages of at most `largest` bytes, with pieces: many of one size where they lie, as a
    `HeaderBodyBatch`; the others copied into memory that the next ones use again.
    """

    def __init__(self, largest: int) -> None:
        self._memory = memoryview(bytearray(BURST * largest))

    def of(
        self, about: Describe, runs: Iterable[tuple[BlockBytes, Run]]
    ) -> Iterator[memoryview | HeaderBodyBatch]:
        """The messages of runs of these blocks, in order: batches, of which each ends with the next."""
        there, piece = 0, about.piece
        for block, run in runs:
            for first, left in block.parts(run.first, run.pieces):
                while left:
                    size = min(piece, len(left))
                    is_long = len(left) // size >= WORTH_A_BATCH
                    if there == BURST or (there and (is_long or size < piece)):
                        yield self._rows(there, piece)
                        there = 0
                    count = min(BURST - there, len(left) // size)
                    head = heads(about.session, about.object, run.block, first, count)
                    if is_long:
                        yield HeaderBodyBatch(_rows_of(head, AROUND), _rows_of(left[: count * size], size))
                    else:
                        self._put(there, head, left, size, count)
                        there += count
                        if size < piece:
                            yield self._rows(1, size)
                            there = 0
                    first, left = first + count, left[count * size :]
        if there:
            yield self._rows(there, piece)

    def _put(self, row: int, head: bytes, pieces: memoryview, size: int, count: int) -> None:
        """Make rows, each of a head and a piece of so many bytes."""
        apart = AROUND + size
        copy_rows(self._memory, row * apart, apart, head, 0, AROUND, AROUND, count)
        copy_rows(self._memory, row * apart + AROUND, apart, pieces, 0, size, size, count)

    def _rows(self, count: int, size: int) -> memoryview:
        apart = AROUND + size
        return _rows_of(self._memory[: count * apart], apart)


def _rows_of(data: Buffer, size: int) -> memoryview:
    view = memoryview(data)
    return view.cast("B", (len(view) // size, size))


class BlockPlace:
    """A block that is received: each piece of data goes to its place as it comes, parity is kept apart.

    memory  as long as the block, or, where only its seal will tell how long it is, as the longest one
    """

    def __init__(self, memory: memoryview, piece: int, width: int) -> None:
        self._memory, self._piece, self._width = memory, piece, width
        self._parity: dict[int, bytes] = {}

    def put_all(self, first: int, count: int, memory: memoryview, begin: int, step: int, size: int) -> None:
        """Take in pieces first, first+1, …, which lie in a memory from `begin` on, `step` bytes apart."""
        at, piece = first * self._piece, self._piece
        if size == piece and at + count * piece <= len(self._memory):
            copy_rows(self._memory, at, piece, memory, begin, step, piece, count)
            return
        for place in range(first, first + count):
            self.put(place, memory[begin : begin + size])
            begin += step

    def put(self, place: int, message: Buffer) -> None:
        """Take in a piece. A liar's may be too long."""
        data = memoryview(message)[: self._piece]
        if place < self._width:
            at = place * self._piece
            there = self._memory[at : at + len(data)]
            there[:] = data[: len(there)]
        else:
            self._parity[place - self._width] = bytes(data)

    def whole(self, sealed: Sealed, pieces: int) -> memoryview | None:
        """The bytes of the block, of which enough pieces are there, a bit for each, and which nobody has
        compared with a digest; None if there is too little parity."""
        found = self._memory[: sealed.size]
        lost = []
        if ~pieces & (1 << sealed.pieces) - 1:
            lost = [place for place in range(sealed.pieces) if not pieces >> place & 1]
        if len(found) < sealed.size or (lost and not self._restore(found, lost)):
            return None
        return found

    def right(self, sealed: Sealed, pieces: int) -> memoryview | None:
        """As `whole`; None, too, if the digest of the block alone is not what the seal says."""
        found = self.whole(sealed, pieces)
        return found if found is not None and bytes(Digest(found)) == sealed.digest else None

    def _restore(self, found: memoryview, lost: list[int]) -> bool:
        """Put the lost pieces into their places. False if there is too little parity for that."""
        for place in lost:
            self.put(place, bytes(self._piece))
        parity = {row: one.ljust(self._piece, b"\0") for row, one in self._parity.items()}
        try:
            whole = restored(found, self._piece, lost, parity)
        except ValueError:
            return False
        for place, one in zip(lost, whole, strict=True):
            self.put(place, one)
        return True
