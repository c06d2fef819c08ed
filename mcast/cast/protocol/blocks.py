"""The bytes of blocks: cut into pieces with their parity, and put together from pieces and checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

from blake3 import blake3
from typing_extensions import Buffer

from mcast.api import HeaderBodyBatch
from mcast.arguments.rows import copy_rows
from mcast.cast.protocol.fec import parity_segments, restore
from mcast.cast.protocol.packets import DATA_HEADER_SIZE, BlockInfo, Describe, data_headers
from mcast.cast.protocol.rate import MAX_BURST
from mcast.cast.protocol.repairs import SegmentRange

_FREED = 16 << 20

MIN_BATCH = 16
"""Pieces in a row that make a batch of their own: to copy fewer takes no longer than a batch."""


@cache
def keep_freed_memory() -> None:
    """Have malloc of glibc keep freed memory for the next turn, as it does once a block of so many bytes was
    freed: to get pages from the kernel anew takes several times as long as to fill them (mallopt(3),
    M_MMAP_THRESHOLD). Once in a process, because malloc keeps the next such block itself.
    """
    bytes(_FREED)


class Digest:
    """A BLAKE3 digest of what has come so far: of a block, or of an object."""

    def __init__(self, data: Buffer = b"") -> None:
        self._hash = blake3(data)

    def update(self, data: Buffer) -> None:
        """Take in what follows."""
        self._hash.update(data)

    def extend_if(self, data: Buffer, digest: bytes) -> bool:
        """Take in what follows, if the digest is that one then; whether it is."""
        more = self._hash.copy()
        more.update(data)
        if more.digest() != digest:
            return False
        self._hash = more
        return True

    def __bytes__(self) -> bytes:
        return bytes(self._hash.digest())


class SourceBlock:
    """A block that is sent: its pieces, and its parity pieces when they are asked for.

    data  bytes, or a view of bytes that nobody changes meanwhile: no copy is made
    digest  what its seal says; None: the digest of the block alone
    """

    def __init__(self, data: bytes | memoryview, segment: int, k: int, digest: bytes | None = None) -> None:
        digest = bytes(Digest(data)) if digest is None else digest
        self.info: BlockInfo = BlockInfo(-(-len(data) // segment), len(data), digest)
        self._data, self._segment, self._k = memoryview(data), segment, k
        self._parity: list[bytes] = []

    def segments(self, first: int, count: int) -> list[bytes | memoryview]:
        """The pieces from that place on: data pieces below the width, parity pieces from there on."""
        data, segment, last = self._data, self._segment, min(first + count, self._k)
        found: list[bytes | memoryview] = [
            data[at : at + segment] for at in range(first * segment, last * segment, segment)
        ]
        if first + count > self._k:
            most = first + count - self._k  # to repair a few losses, few of them are asked for
            if most > len(self._parity):
                self._parity = parity_segments(data, segment, most)
            found += self._parity[max(0, first - self._k) : most]
        return found

    def ranges(self, first: int, count: int) -> Iterator[tuple[int, memoryview]]:
        """The same, as they follow one another in memory: where each part begins, and its bytes."""
        end, k = first + count, self._k
        if first < k:
            yield first, self._data[first * self._segment : min(end, k) * self._segment]
        if end > k:
            begin = max(first, k)
            yield begin, memoryview(b"".join(self.segments(begin, end - begin)))

    def segment(self, place: int) -> bytes | memoryview:
        """The piece at that place."""
        return self.segments(place, 1)[0]


class Framer:
    """Messages of at most `max_message` bytes, with segments: many of one size where they lie, as a
    `HeaderBodyBatch`; the others copied into memory that the next ones use again.
    """

    def __init__(self, max_message: int) -> None:
        self._memory = memoryview(bytearray(MAX_BURST * max_message))

    def packets(
        self, about: Describe, runs: Iterable[tuple[SourceBlock, SegmentRange]]
    ) -> Iterator[memoryview | HeaderBodyBatch]:
        """The messages of runs of these blocks, in order: batches, of which each ends with the next."""
        there, segment = 0, about.segment
        for block, run in runs:
            for first, left in block.ranges(run.first, run.segments):
                while left:
                    size = min(segment, len(left))
                    is_long = len(left) // size >= MIN_BATCH
                    if there == MAX_BURST or (there and (is_long or size < segment)):
                        yield self._rows(there, segment)
                        there = 0
                    count = min(MAX_BURST - there, len(left) // size)
                    head = data_headers(about.session, about.object, run.block, first, count)
                    if is_long:
                        yield HeaderBodyBatch(
                            _as_rows(head, DATA_HEADER_SIZE), _as_rows(left[: count * size], size)
                        )
                    else:
                        self._copy(there, head, left, size, count)
                        there += count
                        if size < segment:
                            yield self._rows(1, size)
                            there = 0
                    first, left = first + count, left[count * size :]
        if there:
            yield self._rows(there, segment)

    def _copy(self, row: int, head: bytes, segments: memoryview, size: int, count: int) -> None:
        """Make rows, each of a head and a piece of so many bytes."""
        apart = DATA_HEADER_SIZE + size
        copy_rows(self._memory, row * apart, apart, head, 0, DATA_HEADER_SIZE, DATA_HEADER_SIZE, count)
        copy_rows(self._memory, row * apart + DATA_HEADER_SIZE, apart, segments, 0, size, size, count)

    def _rows(self, count: int, size: int) -> memoryview:
        apart = DATA_HEADER_SIZE + size
        return _as_rows(self._memory[: count * apart], apart)


def _as_rows(data: Buffer, size: int) -> memoryview:
    view = memoryview(data)
    return view.cast("B", (len(view) // size, size))


class BlockBuffer:
    """A block that is received: each piece of data goes to its place as it comes, parity is kept apart.

    memory  as long as the block, or, where only its seal will tell how long it is, as the longest one
    """

    def __init__(self, memory: memoryview, segment: int, k: int) -> None:
        self._memory, self._segment, self._k = memory, segment, k
        self._parity: dict[int, bytes] = {}

    def put_run(self, first: int, count: int, memory: memoryview, begin: int, step: int, size: int) -> None:
        """Take in pieces first, first+1, …, which lie in a memory from `begin` on, `step` bytes apart."""
        at, segment = first * self._segment, self._segment
        if size == segment and at + count * segment <= len(self._memory):
            copy_rows(self._memory, at, segment, memory, begin, step, segment, count)
            return
        for place in range(first, first + count):
            self.put(place, memory[begin : begin + size])
            begin += step

    def put(self, place: int, message: Buffer) -> None:
        """Take in a piece. A liar's may be too long."""
        data = memoryview(message)[: self._segment]
        if place < self._k:
            at = place * self._segment
            there = self._memory[at : at + len(data)]
            there[:] = data[: len(there)]
        else:
            self._parity[place - self._k] = bytes(data)

    def assemble(self, info: BlockInfo, segments: int) -> memoryview | None:
        """The bytes of the block, of which enough pieces are there, a bit for each, and which nobody has
        compared with a digest; None if there is too little parity."""
        found = self._memory[: info.size]
        lost = []
        if ~segments & (1 << info.segments) - 1:
            lost = [place for place in range(info.segments) if not segments >> place & 1]
        if len(found) < info.size or (lost and not self._restore(found, lost)):
            return None
        return found

    def assemble_verified(self, info: BlockInfo, segments: int) -> memoryview | None:
        """As `whole`; None, too, if the digest of the block alone is not what the seal says."""
        found = self.assemble(info, segments)
        return found if found is not None and bytes(Digest(found)) == info.digest else None

    def _restore(self, found: memoryview, lost: list[int]) -> bool:
        """Put the lost pieces into their places. False if there is too little parity for that."""
        for place in lost:
            self.put(place, bytes(self._segment))
        parity = {row: one.ljust(self._segment, b"\0") for row, one in self._parity.items()}
        try:
            whole = restore(found, self._segment, lost, parity)
        except ValueError:
            return False
        for place, one in zip(lost, whole, strict=True):
            self.put(place, one)
        return True
