"""One object of a receiver: segments that have arrived, blocks that are ready to verify, repairs to request.

The driver has the bytes. `add_segments` tells it which segments are new; a block with enough segments and a
SEAL goes into `ready`; the driver decodes and verifies it, and calls `accept` or `reject`.

A block is unknown, then open (in `_open`, some segments or its SEAL missing), then verifying (in `_open`, the
driver works on it), then done. All blocks before `base` are done. The blocks from `base` to `base + window`
may be open; if the sender is beyond that, it no longer waits for this receiver, and the object is
unrecoverable.

Blocks that an earlier run stored are in `prefix`; they are verified in order while new blocks after them
arrive.

In a carousel blocks are open in any order, `Carousel.partial_blocks` bounds their number, and nothing is
requested: what is lost or dropped arrives again in the next cycle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mcast.cast.protocol.carousel import MAX_FRUITLESS_CYCLES, MAX_FRUITLESS_OFFERS, Carousel
from mcast.cast.protocol.layout import ObjectLayout
from mcast.cast.protocol.packets import MAX_BLOCKS, MAX_K, NO_DIGEST, UNKNOWN_BLOCKS, BlockInfo, RepairRequest
from mcast.cast.protocol.resume import StoredPrefix

MAX_MISMATCHES = 8
"""Number of times that a block may differ from its digest before the object fails."""

_MAX_REACH = 1 << 20
"""Maximum distance of a carousel's block from the first missing one, in blocks of MAX_K source segments.

It is less for smaller blocks, because the state of a block takes the same memory however little it carries.
"""


class ReadyBlock(NamedTuple):
    """Block to decode and verify; `segments` is the bitmap of those that have arrived, source and parity.

    The bitmap is 0 for a block that an earlier run has stored.
    """

    object: int
    block: int
    info: BlockInfo
    segments: int


class PartialBlock:
    """Block that is open or verifying. `count` is its number of source segments; None if unknown."""

    __slots__ = ("count", "info", "mismatches", "segments", "verifying")

    def __init__(self, count: int | None) -> None:
        self.count: int | None = count
        self.segments: int = 0
        self.info: BlockInfo | None = None
        self.verifying: bool = False
        self.mismatches: int = 0


class IncomingObject:
    """State of one object at its receiver.

    number    of the object
    layout    its partition
    window    maximum blocks that are open beyond the first missing one
    parity    True if this receiver can use parity
    carousel  of the object; None if it is sent once
    """

    def __init__(
        self, number: int, layout: ObjectLayout, window: int, parity: bool, carousel: Carousel | None = None
    ) -> None:
        self.number: int = number
        self.layout: ObjectLayout = layout
        self.total = layout.blocks
        self.prefix: StoredPrefix = StoredPrefix()
        """Blocks that an earlier run has stored."""
        self.request_from = 0
        """Blocks before this one, which a late receiver missed, are requested once the sender is idle."""
        self.digest: bytes | None = None
        """Digest of the object, from the sender; None until all was sent."""
        self.unrecoverable: bool = False
        """True if missing blocks are not sent any more, because the sender is beyond the window."""
        self.ready: list[ReadyBlock] = []
        """Blocks to decode and verify, which the driver removes; further segments of them are not new."""
        self.carousel: Carousel | None = carousel
        self.reach: int = window
        """Maximum distance of a carousel's block from the first missing one."""
        self.dropped: list[int] = []
        """Blocks whose segments the driver shall drop; the driver removes them."""
        self._heard = 0
        self._window, self._uses_parity = window, parity
        self._usable = layout.all_segments if parity else (1 << layout.k) - 1
        """Bitmap of the segments of a block that this receiver can use."""
        self._whole_blocks = 0 if layout.size is None else layout.size // layout.offset_of(1)
        """Number of blocks that are known to have k source segments."""
        self._base = self._low = self._edge = self._sent = self._flushed = 0
        self._open: dict[int, PartialBlock] = {}
        self._done = set[int]()

    @property
    def base(self) -> int:
        """Number of the first block that is not verified."""
        return self.prefix.base if self.prefix.active else self._base

    def resume(self, blocks: int) -> None:
        """Note that the first `blocks` blocks are stored, but not verified; later ones may arrive."""
        self.prefix = StoredPrefix(min(blocks, MAX_BLOCKS if self.total is None else self.total))
        self._base = self._edge = self.prefix.until

    def allow_any_order(self) -> None:
        """Accept blocks of a carousel far ahead, because the driver can write blocks in any order."""
        self.reach = max(self.reach, _MAX_REACH * self.layout.k // MAX_K)

    @property
    def complete(self) -> bool:
        """True if all blocks are verified, and the digest of the object is known."""
        return self.base == self.total and self.digest is not None

    @property
    def begun(self) -> bool:
        """True if a segment, a SEAL or a FLUSH of any block was received."""
        return self._edge > 0

    @property
    def has_segments(self) -> bool:
        """True if a segment of any block was received, or stored by an earlier run."""
        return bool(
            self._base or self._done or self.ready or any(one.segments for one in self._open.values())
        )

    def wanted(self, block: int) -> tuple[int, int]:
        """Open a block; return what `ObjectReceiver.wanted` does."""
        self._note_sent(block)
        found = self._open_block(block)
        if found is None or found.verifying:
            return 0, 0
        # Nothing is to be done when a block has enough segments, before its SEAL is there.
        return self._missing_of(found), self._need(found) if found.info is not None else 0

    def add_segments(self, block: int, segments: int, messages: int) -> int:
        """Add segments of a block, and return a bitmap of the new ones, which the driver must store.

        segments  bitmap of segments that have arrived
        messages  number of messages with a segment of the block, also with one that had arrived before
        """
        self._heard += messages
        if self.carousel is not None:
            self.carousel.invited = 0
        found = self._open.get(block)
        if found is None or block > self._sent:  # else the block was opened by `wanted`, say
            self._note_sent(block)
            found = self._open_block(block)
        if found is None or found.verifying:
            return 0
        new = segments & self._missing_of(found)
        found.segments |= new
        if found.info is not None:
            self._check_ready(block, found, found.info)
        return new

    def add_infos(self, block: int, blocks: Iterable[BlockInfo]) -> bool:
        """Add lengths and digests of the blocks `block`, block-1, …. False if one is impossible."""
        possible, resuming, opened = True, self.prefix.active, self._open
        for number, info in zip(range(block, -1, -1), blocks, strict=False):
            if not resuming and (number < self._base or ((known := opened.get(number)) and known.info)):
                continue  # fast path: each block is in several SEALs
            if not self.layout.fits(number, info):
                possible = False
                continue
            self.prefix.add_info(number, info)
            # In a carousel a SEAL alone opens no block, or SEALs would use up the bound of open blocks.
            found = self._open_block(number) if self.carousel is None else self._open.get(number)
            if found is not None and found.info is None:
                found.info, found.count = info, info.segments
                found.segments &= ~(((1 << self.layout.k) - 1) >> info.segments << info.segments)
                self._check_ready(number, found, info)
        self._note_sent(block + 1)
        self._queue_stored()
        return possible

    def update_sent(self, blocks: int, total: int, low: int, digest: bytes = NO_DIGEST) -> None:
        """Add the sender's progress from a SEAL or FLUSH.

        blocks  number of blocks that were sent
        total   number of blocks, or UNKNOWN_BLOCKS
        low     no segment of an earlier block is sent again
        digest  of the object, if `total` is known
        """
        if self.carousel is not None:
            blocks = low = 0  # all blocks are sent again in the next cycle
        self._flushed = max(self._flushed, blocks)
        if blocks:
            self._open_block(blocks - 1)
            self._note_sent(blocks)
        if total < self.prefix.until and self.prefix.active:
            self._end_prefix(total)
        if (
            self.digest is None
            and total != UNKNOWN_BLOCKS
            and total >= self._edge
            and self.total in (None, total)
        ):
            self.total, self.digest = total, digest
        self._low = max(self._low, low)
        self.unrecoverable |= self._low > self._base

    def accept(self, block: int) -> None:
        """Count a block as verified."""
        self._heard = 0
        if self.prefix.active and block == self.prefix.base:
            self.prefix.accept()
            self._queue_stored()
        elif self._open.pop(block, None) is not None:
            if self.carousel is not None:
                self.carousel.partial_blocks.discard(self, block)
            self._done.add(block)
            self._advance()

    def drop(self, block: int) -> None:
        """Drop the segments of a carousel's open block."""
        if self.carousel is not None and self._open.pop(block, None) is not None:
            self.carousel.partial_blocks.discard(self, block)
            self.dropped.append(block)

    def drop_all(self) -> None:
        """Drop all open blocks of a carousel."""
        for block in [*self._open]:
            self.drop(block)

    def forget(self) -> None:
        """Free the memory of an object that has ended, but for `base`, which ACKs repeat."""
        self._base, self.prefix = self.base, StoredPrefix()
        for blocks in (self._open, self._done, self.ready, self.dropped):
            blocks.clear()

    def is_verifying(self, block: int) -> bool:
        """Return True while the driver decodes and verifies the block."""
        found = self._open.get(block)
        return found is not None and found.verifying

    def reject(self, block: int) -> bool:
        """Request a block anew, because it differs from its digest. False after MAX_MISMATCHES times.

        After a stored block that differs, no stored block is trusted; later blocks are dropped, too, except
        in a carousel.
        """
        if self.prefix.active and block == self.prefix.base:
            self._end_prefix(block)
            return True
        found = self._open.get(block)
        if found is None:  # a FLUSH meanwhile announced that the object ends before this block
            return True
        found.segments, found.verifying = 0, False
        found.mismatches += 1
        return found.mismatches < MAX_MISMATCHES

    @property
    def has_requests(self) -> bool:
        """True if `requests` is not empty."""
        if not self.prefix.active:
            missing = (number for number, found in self._open.items() if not found.verifying)
            if next(missing, self._sent) >= self._sent:
                return False
        return next(self.requests(), None) is not None

    def requests(self) -> Iterator[RepairRequest]:
        """Yield a request for each incomplete block that was sent. Empty for a carousel."""
        if self.unrecoverable or self.carousel is not None:
            return
        yield from self.prefix.requests()
        for number, found in self._open.items():
            if number >= self._sent:
                return
            if number < self.request_from or found.verifying:
                continue
            if found.count is None or not (need := self._need(found)):
                if number < self._flushed:
                    yield RepairRequest(number, 0, 0)  # for the SEAL: no later one describes the block
            else:
                missing = ~found.segments & (1 << found.count) - 1
                yield RepairRequest(number, need if self._uses_parity else 0, missing)

    @property
    def is_writing(self) -> bool:
        """True while the driver verifies and writes the first missing block, perhaps into a slow pipe."""
        first = self._open.get(self._base)
        return first is not None and first.verifying

    @property
    def hopeless_reason(self) -> str:
        """Reason to give up a carousel's object, with what is missing; empty while there is hope."""
        if self.carousel is None or self.is_writing:
            return ""
        if self.carousel.invited >= MAX_FRUITLESS_OFFERS:
            how = f"the carousel's sender sent {MAX_FRUITLESS_OFFERS} invitations and no segment between them"
        elif self._heard >= MAX_FRUITLESS_CYCLES * max(1, self.layout.segments) or self.carousel.hopeless:
            how = f"the carousel did not send what is missing in {MAX_FRUITLESS_CYCLES} cycles"
        else:
            return ""
        if self.base == self.total:
            return f"{how}: the digest of the object"
        total, unverified = self.total or 0, self.prefix.until - self.prefix.base
        left = total - self._base - len(self._done) + unverified
        return f"{how}: {left:,} of {total:,} blocks, the first at byte {self.layout.offset_of(self.base):,}"

    def misses_block(self, block: int) -> bool:
        """Return True if the block is open, or if it is stored and its SEAL is missing."""
        return block in self._open or self.prefix.misses_info(block)

    def _note_sent(self, blocks: int) -> None:
        """Note that the blocks before `blocks` were sent, as far as the window reaches."""
        if self.prefix.active:
            self.prefix.sent(blocks)
        if blocks > self._sent:
            self._sent = max(self._sent, min(blocks, self._base + self._window))

    def _advance(self) -> None:
        while self._base in self._done:
            self._done.remove(self._base)
            self._base += 1

    def _queue_stored(self) -> None:
        """Make the next stored block ready to verify, if its SEAL is known."""
        block = self.prefix.base
        if self.prefix.active and (info := self.prefix.next()) is not None:
            self.ready.append(ReadyBlock(self.number, block, info, 0))

    def _end_prefix(self, until: int) -> None:
        """Trust only the stored blocks before `until`; receive all later blocks anew."""
        verified = range(self.prefix.until, self._base)
        self.prefix.end(until)
        self._base = self.prefix.until
        if self.carousel is not None:  # later blocks have digests of their own, so they stay verified
            self._done.update(verified)
            self._advance()
            return
        self._edge = self._base
        self._sent = min(self._sent, self._base + self._window)
        self.unrecoverable |= self._low > self._base
        self._open.clear()
        self._done.clear()
        self.ready = [one for one in self.ready if one.block < until]
        self._queue_stored()

    def _check_ready(self, number: int, found: PartialBlock, info: BlockInfo) -> None:
        if not self._need(found):
            found.verifying = True
            self.ready.append(ReadyBlock(self.number, number, info, found.segments))

    def _missing_of(self, found: PartialBlock) -> int:
        """Return a bitmap of the segments that an open block may have, and that have not arrived."""
        missing = self._usable & ~found.segments
        if found.count is not None and found.count < self.layout.k:
            missing &= ~(((1 << self.layout.k) - 1) >> found.count << found.count)
        return missing

    def _need(self, found: PartialBlock) -> int:
        """Return the number of segments that a block whose length is known still needs."""
        need = (found.count or 0) - found.segments.bit_count()
        return need if need > 0 else 0

    def _open_block(self, block: int) -> PartialBlock | None:
        """Return an open block, opening it if needed; None if it is done, or beyond window or object."""
        if self.carousel is not None:
            return self._open_any(self.carousel, block)
        if block >= self._edge:
            if self.total is not None and block >= self.total:
                return None
            if block >= self._base + self._window:
                self.unrecoverable = True  # the sender does not wait for this receiver, which joined too late
                return None
            for number in range(self._edge, block + 1):
                self._open[number] = self._new_block(number)
            self._edge = block + 1
        return self._open.get(block)

    def _open_any(self, carousel: Carousel, block: int) -> PartialBlock | None:
        """Return an open block of a carousel as `_open_block` does; blocks are opened in any order."""
        found = self._open.get(block)
        if found is not None or block < self._base or block in self._done:
            return found
        if block >= min(self.total or 0, self._base + self.reach) or not carousel.partial_blocks.add(
            self, block
        ):
            return None
        self._edge = max(self._edge, block + 1)
        found = self._open[block] = self._new_block(block)
        return found

    def _new_block(self, block: int) -> PartialBlock:
        layout = self.layout
        return PartialBlock(layout.k if block < self._whole_blocks else layout.segments_of(block))
