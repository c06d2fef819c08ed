"""Bytes of blocks: cut into segments and framed as messages, or assembled from segments and verified.

`SourceBlock` and `Framer` are a sender's, `BlockBuffer` is a receiver's. They hold bytes for the driver; the
state machines in `sender` and `receiver` refer to segments by number alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

from blake3 import blake3
from typing_extensions import Buffer

from mcast.api import HeaderBodyBatch
from mcast.arguments.rows import copy_rows
from mcast.cast.protocol.fec import parity_segments, restore
from mcast.cast.protocol.packets import (
    DATA_HEADER_SIZE,
    MAX_BLOCKS,
    MAX_K,
    MAX_PARITY,
    MAX_SEGMENT,
    BlockInfo,
    Describe,
    data_header,
    set_segment,
)
from mcast.cast.protocol.rate import MAX_BURST
from mcast.cast.protocol.repairs import SegmentRange

_FREED = 16 << 20
_MAX_RUN = 1 << 20
"""Maximum segments of one call of `frame`."""

MIN_BATCH = 16
"""Minimum run of segments that is sent without a copy; copying a shorter one is no slower."""


@cache
def keep_freed_memory() -> None:
    """Have malloc of glibc keep freed memory instead of returning it to the kernel.

    It does so once a block of _FREED bytes was freed (mallopt(3), M_MMAP_THRESHOLD). Getting pages from the
    kernel anew takes several times as long as filling them. One call per process is enough.
    """
    bytes(_FREED)


class Digest:
    """Running BLAKE3 digest of a block or of an object."""

    def __init__(self, data: Buffer = b"") -> None:
        self._hash = blake3(data)

    def update(self, data: Buffer) -> None:
        """Hash the bytes that follow."""
        self._hash.update(data)

    def update_if(self, data: Buffer, digest: bytes) -> bool:
        """Hash the bytes that follow if this gives `digest`; return False, and change nothing, if not."""
        more = self._hash.copy()
        more.update(data)
        if more.digest() != digest:
            return False
        self._hash = more
        return True

    def __bytes__(self) -> bytes:
        return bytes(self._hash.digest())


def frame_in_python(
    to: Buffer,
    at: int,
    header: Buffer,
    k: int,
    block: int,
    first: int,
    count: int,
    segments: Buffer = b"",
    begin: int = 0,
    size: int = 0,
    /,
) -> None:
    """Write the headers of `count` consecutive segments into `to`, from byte `at` on.

    header       of any segment of the object; its block and encoding symbol id are replaced
    k            source segments of a block; behind the last one follows the first one of the next block
    block, first of the first segment; parity segments, from k on, are of one block
    segments     memory of the segments, `size` bytes each, from `begin` on; each is copied behind its header

    Raises ValueError where there are no such segments, or no room for them.
    """
    target, source, header = memoryview(to).cast("B"), memoryview(segments).cast("B"), bytes(header)
    step, last = DATA_HEADER_SIZE + size, first + count - 1
    if (
        len(header) != DATA_HEADER_SIZE
        or not (0 < k <= MAX_K and 0 <= size <= MAX_SEGMENT and 0 <= count <= _MAX_RUN)
        or not (first >= 0 and 0 <= block < MAX_BLOCKS)
        or (last >= MAX_K + MAX_PARITY if first >= k else block + last // k >= MAX_BLOCKS)
        or not 0 <= at <= at + count * step <= len(target)
        or (size and not 0 <= begin <= begin + count * size <= len(source))
    ):
        raise ValueError("there are no such segments")
    for _ in range(count):
        target[at : at + step] = set_segment(header, block, first) + source[begin : begin + size]
        at, begin, first = at + step, begin + size, first + 1
        if first == k:
            block, first = block + 1, 0


try:
    from mcast.cast._plane import frame as frame
except ImportError:  # there was no compiler
    frame = frame_in_python


class SourceBlock:
    """Block of a sender; its parity segments are computed when they are first requested.

    memory       holds its bytes, which must not change while the block is in use
    segment      bytes of a segment
    k            maximum source segments of a block
    digest       for its SEAL; None for the digest of the block alone
    begin, size  of the block in `memory`, which may hold others behind it; None: up to its end
    """

    def __init__(
        self,
        memory: Buffer,
        segment: int,
        k: int,
        digest: bytes | None = None,
        begin: int = 0,
        size: int | None = None,
    ) -> None:
        self._memory = memory if isinstance(memory, memoryview) else memoryview(memory)
        self._data = self._memory[begin : None if size is None else begin + size]
        size, self._begin, self._segment, self._k = len(self._data), begin, segment, k
        digest = bytes(Digest(self._data)) if digest is None else digest
        self.info: BlockInfo = BlockInfo(-(-size // segment), size, digest)
        self._parity: list[bytes] = []

    def make_parity(self, count: int) -> None:
        """Compute so many parity segments, and no more, unless they are there: most repairs need few."""
        if count > len(self._parity):
            self._parity = parity_segments(self._data, self._segment, count)

    def stretches(self, first: int, count: int) -> Iterator[tuple[int, int, memoryview, int, int]]:
        """Yield the segments with encoding symbol ids first..first+count-1 as contiguous memory.

        For each stretch: id of the first segment, number of segments, their memory, where they begin in it,
        and the size of each. Source segments are below k, parity follows; a short segment is a stretch alone.
        """
        end, segment, k = first + count, self._segment, self._k
        whole, rest = divmod(self.info.size, segment)
        if first < min(end, whole):
            yield first, min(end, whole) - first, self._memory, self._begin + first * segment, segment
        if rest and first <= whole < end:
            yield whole, 1, self._memory, self._begin + whole * segment, rest
        if end > k:
            first = max(first, k)
            self.make_parity(end - k)
            joined = b"".join(self._parity[first - k : end - k])
            yield first, end - first, memoryview(joined), 0, segment

    def segment(self, esi: int) -> bytes:
        """Return the segment with that encoding symbol id; empty if the block has none."""
        found = [memory[begin : begin + size] for _, _, memory, begin, size in self.stretches(esi, 1)]
        return b"".join(found)


class Framer:
    """Maker of DATA packets of at most `max_message` bytes.

    Long stretches of segments are framed where they are, as a `HeaderBodyBatch`. Others are copied into
    memory of the framer, which the next batch overwrites.
    """

    def __init__(self, max_message: int) -> None:
        self._memory = memoryview(bytearray(MAX_BURST * max_message))

    def packets(
        self, about: Describe, runs: Iterable[tuple[SourceBlock, SegmentRange]]
    ) -> Iterator[memoryview | HeaderBodyBatch]:
        """Yield the packets of these runs, in order, in batches; each batch is valid until the next one."""
        header, segment, k = data_header(about.session, about.object), about.segment, about.k
        copied = 0
        for block, first, count, memory, begin, size in _joined(runs, k):
            is_long = count >= MIN_BATCH
            if copied and (is_long or size < segment or copied + count > MAX_BURST):
                yield self._rows(copied, segment)
                copied = 0
            if is_long:
                headers = bytearray(count * DATA_HEADER_SIZE)
                frame(headers, 0, header, k, block, first, count)
                yield HeaderBodyBatch(
                    _as_rows(headers, DATA_HEADER_SIZE), _as_rows(memory[begin : begin + count * size], size)
                )
                continue
            at = copied * (DATA_HEADER_SIZE + segment)
            frame(self._memory, at, header, k, block, first, count, memory, begin, size)
            copied += count
            if size < segment:
                yield self._rows(1, size)
                copied = 0
        if copied:
            yield self._rows(copied, segment)

    def _rows(self, count: int, size: int) -> memoryview:
        step = DATA_HEADER_SIZE + size
        return _as_rows(self._memory[: count * step], step)


def _joined(
    runs: Iterable[tuple[SourceBlock, SegmentRange]], k: int
) -> Iterator[tuple[int, int, int, memoryview, int, int]]:
    """Yield block and stretch (`SourceBlock.stretches`) of these runs; join those that continue one another.

    They do where blocks of an object follow one another in memory.
    """
    block = first = count = begin = size = 0
    memory: memoryview | None = None
    for source, run in runs:
        for esi, more, where, start, each in source.stretches(run.first, run.segments):
            # parity and short segments end a stretch
            if (
                where is memory
                and start == begin + count * size
                and each == size
                and (run.block, esi) == (block + (first + count) // k, (first + count) % k)
            ):
                count += more
                continue
            if memory is not None:
                yield block, first, count, memory, begin, size
            block, first, count, memory, begin, size = run.block, esi, more, where, start, each
    if memory is not None:
        yield block, first, count, memory, begin, size


def _as_rows(data: Buffer, size: int) -> memoryview:
    view = memoryview(data)
    return view.cast("B", (len(view) // size, size))


class BlockBuffer:
    """Block of a receiver: source segments are copied into place as they arrive, parity is stored apart.

    memory   as long as the block; in a stream, whose SEAL brings the length, as long as the longest block
    segment  bytes of a segment
    k        maximum source segments of a block
    parity   memory of the parity segments; None before the first one arrives
    """

    def __init__(self, memory: memoryview, segment: int, k: int) -> None:
        self.memory: memoryview = memory
        self.parity: memoryview | None = None
        self._segment, self._k = segment, k

    def put_run(self, first: int, count: int, memory: memoryview, begin: int, step: int, size: int) -> None:
        """Copy `count` segments of `size` bytes from receive memory, where they are `step` bytes apart.

        What is too long, from a faulty sender, is cut.
        """
        target, at, segment = *self._place_of(first), self._segment
        is_of_one_kind = first >= self._k or first + count <= self._k
        if size == segment and is_of_one_kind and at + count * segment <= len(target):
            copy_rows(target, at, segment, memory, begin, step, segment, count)
            return
        for esi in range(first, first + count):
            self.put(esi, memory[begin : begin + size])
            begin += step

    def put(self, esi: int, data: Buffer) -> None:
        """Copy the segment with that encoding symbol id as `put_run` does."""
        target, at = self._place_of(esi)
        segment = bytes(data)[: self._segment]
        if esi >= self._k:  # the code needs whole segments
            segment = segment.ljust(self._segment, b"\0")
        slot = target[at : at + len(segment)]
        slot[:] = segment[: len(slot)]

    def _place_of(self, esi: int) -> tuple[memoryview, int]:
        """Return the memory that a segment belongs to, and its offset there."""
        if esi < self._k:
            return self.memory, esi * self._segment
        if self.parity is None:
            self.parity = memoryview(bytearray(MAX_PARITY * self._segment))
        return self.parity, (esi - self._k) * self._segment

    def assemble(self, info: BlockInfo, segments: int) -> memoryview | None:
        """Return the bytes of the block, decoded but not verified; None if parity does not suffice.

        segments  bitmap of the segments that have arrived
        """
        block = self.memory[: info.size]
        lost = []
        if ~segments & (1 << info.segments) - 1:
            lost = [index for index in range(info.segments) if not segments >> index & 1]
        if len(block) < info.size or (lost and not self._restore(block, lost, segments >> self._k)):
            return None
        return block

    def assemble_verified(self, info: BlockInfo, segments: int) -> memoryview | None:
        """Return the bytes of the block as `assemble` does; None, too, if they do not have its own digest."""
        block = self.assemble(info, segments)
        return block if block is not None and bytes(Digest(block)) == info.digest else None

    def _restore(self, block: memoryview, lost: list[int], rows: int) -> bool:
        """Decode the lost source segments in place. False if there is too little parity.

        rows  bitmap of the parity segments that have arrived
        """
        size, stored = self._segment, self.parity or b""
        for index in lost:
            self.put(index, bytes(size))
        parity = {
            row: bytes(stored[row * size : (row + 1) * size]) for row in range(MAX_PARITY) if rows >> row & 1
        }
        try:
            restored = restore(block, size, lost, parity)
        except ValueError:
            return False
        for index, one in zip(lost, restored, strict=True):
            self.put(index, one)
        return True
