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
from mcast.cast.protocol.packets import DATA_HEADER_SIZE, BlockInfo, Describe, data_headers
from mcast.cast.protocol.rate import MAX_BURST
from mcast.cast.protocol.repairs import SegmentRange

_FREED = 16 << 20

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


class SourceBlock:
    """Block of a sender; its parity segments are computed when they are first requested.

    data     its bytes, not copied: they must not change while the block is in use
    segment  bytes of a segment
    k        maximum source segments of a block
    digest   for its SEAL; None for the digest of the block alone
    """

    def __init__(self, data: bytes | memoryview, segment: int, k: int, digest: bytes | None = None) -> None:
        digest = bytes(Digest(data)) if digest is None else digest
        self.info: BlockInfo = BlockInfo(-(-len(data) // segment), len(data), digest)
        self._data, self._segment, self._k = memoryview(data), segment, k
        self._parity: list[bytes] = []

    def segments(self, first: int, count: int) -> list[bytes | memoryview]:
        """Return the segments with encoding symbol ids first..first+count-1: source below k, then parity."""
        data, segment, last = self._data, self._segment, min(first + count, self._k)
        found: list[bytes | memoryview] = [
            data[at : at + segment] for at in range(first * segment, last * segment, segment)
        ]
        if first + count > self._k:
            parity = first + count - self._k  # compute no more than requested: most repairs need few
            if parity > len(self._parity):
                self._parity = parity_segments(data, segment, parity)
            found += self._parity[max(0, first - self._k) : parity]
        return found

    def ranges(self, first: int, count: int) -> Iterator[tuple[int, memoryview]]:
        """Yield the same segments as contiguous memory: encoding symbol id of the first one, and bytes."""
        end, k = first + count, self._k
        if first < k:
            yield first, self._data[first * self._segment : min(end, k) * self._segment]
        if end > k:
            begin = max(first, k)
            yield begin, memoryview(b"".join(self.segments(begin, end - begin)))

    def segment(self, esi: int) -> bytes | memoryview:
        """Return the segment with that encoding symbol id."""
        return self.segments(esi, 1)[0]


class Framer:
    """Maker of DATA packets of at most `max_message` bytes.

    Long runs of segments are framed where they are, as a `HeaderBodyBatch`. Others are copied into memory of
    the framer, which the next batch overwrites.
    """

    def __init__(self, max_message: int) -> None:
        self._memory = memoryview(bytearray(MAX_BURST * max_message))

    def packets(
        self, about: Describe, runs: Iterable[tuple[SourceBlock, SegmentRange]]
    ) -> Iterator[memoryview | HeaderBodyBatch]:
        """Yield the packets of these runs, in order, in batches; each batch is valid until the next one."""
        copied, segment = 0, about.segment
        for block, run in runs:
            for first, left in block.ranges(run.first, run.segments):
                while left:
                    size = min(segment, len(left))
                    is_long = len(left) // size >= MIN_BATCH
                    if copied == MAX_BURST or (copied and (is_long or size < segment)):
                        yield self._rows(copied, segment)
                        copied = 0
                    count = min(MAX_BURST - copied, len(left) // size)
                    headers = data_headers(about.session, about.object, run.block, first, count)
                    if is_long:
                        yield HeaderBodyBatch(
                            _as_rows(headers, DATA_HEADER_SIZE), _as_rows(left[: count * size], size)
                        )
                    else:
                        self._copy(copied, headers, left, size, count)
                        copied += count
                        if size < segment:
                            yield self._rows(1, size)
                            copied = 0
                    first, left = first + count, left[count * size :]
        if copied:
            yield self._rows(copied, segment)

    def _copy(self, row: int, headers: bytes, segments: memoryview, size: int, count: int) -> None:
        """Copy headers and segments of `size` bytes into the rows from `row` on."""
        step = DATA_HEADER_SIZE + size
        copy_rows(self._memory, row * step, step, headers, 0, DATA_HEADER_SIZE, DATA_HEADER_SIZE, count)
        copy_rows(self._memory, row * step + DATA_HEADER_SIZE, step, segments, 0, size, size, count)

    def _rows(self, count: int, size: int) -> memoryview:
        step = DATA_HEADER_SIZE + size
        return _as_rows(self._memory[: count * step], step)


def _as_rows(data: Buffer, size: int) -> memoryview:
    view = memoryview(data)
    return view.cast("B", (len(view) // size, size))


class BlockBuffer:
    """Block of a receiver: source segments are copied into place as they arrive, parity is stored apart.

    memory   as long as the block; in a stream, whose SEAL brings the length, as long as the longest block
    segment  bytes of a segment
    k        maximum source segments of a block
    """

    def __init__(self, memory: memoryview, segment: int, k: int) -> None:
        self._memory, self._segment, self._k = memory, segment, k
        self._parity: dict[int, bytes] = {}

    def put_run(self, first: int, count: int, memory: memoryview, begin: int, step: int, size: int) -> None:
        """Copy `count` segments of `size` bytes from receive memory, where they are `step` bytes apart."""
        at, segment = first * self._segment, self._segment
        if size == segment and at + count * segment <= len(self._memory):
            copy_rows(self._memory, at, segment, memory, begin, step, segment, count)
            return
        for esi in range(first, first + count):
            self.put(esi, memory[begin : begin + size])
            begin += step

    def put(self, esi: int, data: Buffer) -> None:
        """Copy the segment with that encoding symbol id; what is too long, from a faulty sender, is cut."""
        data = memoryview(data)[: self._segment]
        if esi < self._k:
            at = esi * self._segment
            slot = self._memory[at : at + len(data)]
            slot[:] = data[: len(slot)]
        else:
            self._parity[esi - self._k] = bytes(data)

    def assemble(self, info: BlockInfo, segments: int) -> memoryview | None:
        """Return the bytes of the block, decoded but not verified; None if parity does not suffice.

        segments  bitmap of the segments that have arrived
        """
        block = self._memory[: info.size]
        lost = []
        if ~segments & (1 << info.segments) - 1:
            lost = [index for index in range(info.segments) if not segments >> index & 1]
        if len(block) < info.size or (lost and not self._restore(block, lost)):
            return None
        return block

    def assemble_verified(self, info: BlockInfo, segments: int) -> memoryview | None:
        """Return the bytes of the block as `assemble` does; None, too, if they do not have its own digest."""
        block = self.assemble(info, segments)
        return block if block is not None and bytes(Digest(block)) == info.digest else None

    def _restore(self, block: memoryview, lost: list[int]) -> bool:
        """Decode the lost source segments in place. False if there is too little parity."""
        for index in lost:
            self.put(index, bytes(self._segment))
        parity = {row: one.ljust(self._segment, b"\0") for row, one in self._parity.items()}
        try:
            restored = restore(block, self._segment, lost, parity)
        except ValueError:
            return False
        for index, one in zip(lost, restored, strict=True):
            self.put(index, one)
        return True
