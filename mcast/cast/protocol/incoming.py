"""What a receiver has of one object: which pieces of which blocks, and what is missing.

The driver keeps the bytes: it asks here which pieces are new, and says which blocks are right.

The blocks of an object that goes round and round come as they come, and nothing is asked for: what is lost,
or finds no place, comes again in the next round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mcast.cast.protocol.carousel import MAX_FRUITLESS_CYCLES, MAX_FRUITLESS_OFFERS, Carousel
from mcast.cast.protocol.layout import ObjectLayout
from mcast.cast.protocol.packets import MAX_BLOCKS, MAX_K, NO_DIGEST, UNKNOWN_BLOCKS, BlockInfo, RepairRequest
from mcast.cast.protocol.resume import StoredPrefix

MAX_MISMATCHES = 8
"""A block may so often differ from its digest."""

_MAX_REACH = 1 << 20
"""Blocks of the full width so far beyond the first that is missing are taken, where they may come in any
order; fewer narrow ones, because to know of a block costs as much, however little it brings."""


class ReadyBlock(NamedTuple):
    """A block of which enough pieces are there: `pieces` has a bit for each, data and parity.

    Without a piece, the block is one that an earlier run has left on the disk.
    """

    object: int
    block: int
    info: BlockInfo
    segments: int


class PartialBlock:
    """A block that is not there yet."""

    __slots__ = ("count", "info", "mismatches", "segments", "verifying")

    def __init__(self, count: int | None) -> None:
        self.count: int | None = count
        self.segments: int = 0
        self.info: BlockInfo | None = None
        self.verifying: bool = False
        self.mismatches: int = 0


class IncomingObject:
    """One object, of which at most `room` blocks are held beyond the first that lacks something.

    circle  the objects with which it goes round and round; None for one that is sent once
    """

    def __init__(
        self, number: int, layout: ObjectLayout, window: int, parity: bool, carousel: Carousel | None = None
    ) -> None:
        self.number: int = number
        self.layout: ObjectLayout = layout
        self.total = layout.blocks
        self.prefix: StoredPrefix = StoredPrefix()
        """What the disk has of an earlier run."""
        self.ask_from = 0
        """What is before this block is not asked for yet."""
        self.digest: bytes | None = None
        """What the sender says that the whole object's digest is, once all has been sent."""
        self.unrecoverable: bool = False
        """What is missing cannot come any more: the sender is further than the window."""
        self.ready: list[ReadyBlock] = []
        """The blocks to decode and check; what comes of them from now on is not new."""
        self.carousel: Carousel | None = carousel
        self.reach: int = window
        """Of what goes round, blocks so far beyond the first that is missing are taken."""
        self.dropped: list[int] = []
        """Blocks of which nothing is kept any more; the driver takes them away."""
        self._heard = 0
        self._window, self._uses_parity = window, parity
        self._base = self._low = self._edge = self._sent = self._flushed = 0
        self._open: dict[int, PartialBlock] = {}
        self._done = set[int]()

    @property
    def base(self) -> int:
        """All blocks before this one are there and right."""
        return self.prefix.base if self.prefix.active else self._base

    def resume(self, blocks: int) -> None:
        """So many blocks seem to be on the disk. They count when they were compared; others are taken now."""
        self.prefix = StoredPrefix(min(blocks, MAX_BLOCKS if self.total is None else self.total))
        self._base = self._edge = self.prefix.until

    def allow_any_order(self) -> None:
        """The driver can put each block of what goes round into its place as it comes."""
        self.reach = max(self.reach, _MAX_REACH * self.layout.k // MAX_K)

    @property
    def complete(self) -> bool:
        """Whether all blocks are there and right, and the digest of the whole is known."""
        return self.base == self.total and self.digest is not None

    @property
    def begun(self) -> bool:
        """Whether the sender has been seen to send blocks."""
        return self._edge > 0

    def add_segments(self, block: int, first: int, count: int) -> int:
        """A bit for each new piece among first..first+count-1 of a block; they count as kept from now on."""
        self._heard += count
        if self.carousel is not None:
            self.carousel.invited = 0
        self._note_sent(block)
        found = self._open_block(block)
        if found is None or found.verifying:
            return 0
        allowed = self.layout.all_segments
        if found.count is not None:
            allowed &= ~(((1 << self.layout.k) - 1) >> found.count << found.count)
        new = ((1 << count) - 1) << first & allowed & ~found.segments
        found.segments |= new
        if found.info is not None:
            self._check_ready(block, found, found.info)
        return new

    def add_infos(self, block: int, blocks: Iterable[BlockInfo]) -> bool:
        """Take in what the blocks `block`, block-1, … are. False if one of them cannot be that."""
        sound, held, opened = True, self.prefix.active, self._open
        for number, info in zip(range(block, -1, -1), blocks, strict=False):
            if not held and (number < self._base or ((known := opened.get(number)) and known.info)):
                continue  # as most of them: each block is in many seals
            if not self.layout.fits(number, info):
                sound = False
                continue
            self.prefix.add_info(number, info)
            # Of what goes round, a seal alone takes no place.
            found = self._open_block(number) if self.carousel is None else self._open.get(number)
            if found is not None and found.info is None:
                found.info, found.count = info, info.segments
                found.segments &= ~(((1 << self.layout.k) - 1) >> info.segments << info.segments)
                self._check_ready(number, found, info)
        self._note_sent(block + 1)
        self._compare()
        return sound

    def update_sent(self, blocks: int, total: int, low: int, digest: bytes = NO_DIGEST) -> None:
        """Take in how many blocks have been sent, how many there are, or OPEN, and which are gone."""
        if self.carousel is not None:
            blocks = low = 0  # what has been sent comes again, and nothing is ever gone
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
        """The block is as its digest says."""
        self._heard = 0
        if self.prefix.active and block == self.prefix.base:
            self.prefix.accept()
            self._compare()
        elif self._open.pop(block, None) is not None:
            if self.carousel is not None:
                self.carousel.partial_blocks.discard(self, block)
            self._done.add(block)
            self._advance()

    def drop(self, block: int) -> None:
        """Keep nothing of a block that comes again."""
        if self.carousel is not None and self._open.pop(block, None) is not None:
            self.carousel.partial_blocks.discard(self, block)
            self.dropped.append(block)

    def drop_all(self) -> None:
        """Keep no block that is there in part."""
        for block in [*self._open]:
            self.drop(block)

    def forget(self) -> None:
        """Keep nothing but the number of the first block that was missing: the object has ended."""
        self._base, self.prefix = self.base, StoredPrefix()
        for kept in (self._open, self._done, self.ready, self.dropped):
            kept.clear()

    def is_verifying(self, block: int) -> bool:
        """Whether the driver has all of a block that is there in part, and works on it."""
        found = self._open.get(block)
        return found is not None and found.verifying

    def reject(self, block: int) -> bool:
        """The block differs from its digest, and is wanted anew. False if that has been so too often.

        After a block on the disk that differs, nothing there is trusted, and what came beyond is dropped.
        """
        if self.prefix.active and block == self.prefix.base:
            self._end_prefix(block)
            return True
        found = self._open.get(block)
        if found is None:  # the sender has said meanwhile that the object ends before it
            return True
        found.segments, found.verifying = 0, False
        found.mismatches += 1
        return found.mismatches < MAX_MISMATCHES

    @property
    def lacking(self) -> bool:
        """Whether something that has been sent is missing, and may be asked for."""
        if not self.prefix.active and next(iter(self._open), self._sent) >= self._sent:
            return False
        return next(self.requests(), None) is not None

    def requests(self) -> Iterator[RepairRequest]:
        """What is missing of the blocks that have been sent. Nothing of what goes round: all comes again."""
        if self.unrecoverable or self.carousel is not None:
            return
        yield from self.prefix.requests()
        for number, found in self._open.items():
            if number >= self._sent:
                return
            if number < self.ask_from or found.verifying:
                continue
            if found.count is None or not (need := self._need(found)):
                if number < self._flushed:
                    yield RepairRequest(number, 0, 0)  # its seal, which no later one will bring
            else:
                missing = ~found.segments & (1 << found.count) - 1
                yield RepairRequest(number, need if self._uses_parity else 0, missing)

    @property
    def is_writing(self) -> bool:
        """Whether the driver has the next block, and has yet to put it into its place: a pipe may be slow."""
        first = self._open.get(self._base)
        return first is not None and first.verifying

    @property
    def hopeless_reason(self) -> str:
        """Why what is missing of what goes round will not come, and what that is; empty if it may."""
        if self.carousel is None or self.is_writing:
            return ""
        if self.carousel.invited >= MAX_FRUITLESS_OFFERS:
            how = f"the carousel's sender invited {MAX_FRUITLESS_OFFERS} times, and no piece came between"
        elif self._heard >= MAX_FRUITLESS_CYCLES * max(1, self.layout.segments) or self.carousel.hopeless:
            how = f"the carousel did not bring what is missing in {MAX_FRUITLESS_CYCLES} rounds"
        else:
            return ""
        if self.base == self.total:
            return f"{how}: the digest of the whole"
        total, held = self.total or 0, self.prefix.until - self.prefix.base
        left = total - self._base - len(self._done) + held
        return f"{how}: {left:,} of {total:,} blocks, the first at byte {self.layout.offset_of(self.base):,}"

    def lacks_block(self, block: int) -> bool:
        """Whether the block is not there yet."""
        return block in self._open or self.prefix.lacks_info(block)

    def _note_sent(self, blocks: int) -> None:
        """So many blocks have been sent, as far as this end takes them."""
        self.prefix.sent(blocks)
        self._sent = max(self._sent, min(blocks, self._base + self._window))

    def _advance(self) -> None:
        while self._base in self._done:
            self._done.remove(self._base)
            self._base += 1

    def _compare(self) -> None:
        """The next block on the disk is ready, if its seal is known."""
        block = self.prefix.base
        if self.prefix.active and (info := self.prefix.next()) is not None:
            self.ready.append(ReadyBlock(self.number, block, info, 0))

    def _end_prefix(self, until: int) -> None:
        """The disk has no more than the blocks before that one: what follows is taken from there."""
        came = range(self.prefix.until, self._base)
        self.prefix.end(until)
        self._base = self.prefix.until
        if self.carousel is not None:  # what has come meanwhile is right, whatever the disk had
            self._done.update(came)
            self._advance()
            return
        self._edge = self._base
        self._sent = min(self._sent, self._base + self._window)
        self.unrecoverable |= self._low > self._base
        self._open.clear()
        self._done.clear()
        self.ready = [one for one in self.ready if one.block < until]
        self._compare()

    def _check_ready(self, number: int, found: PartialBlock, info: BlockInfo) -> None:
        if not self._need(found):
            found.verifying = True
            self.ready.append(ReadyBlock(self.number, number, info, found.segments))

    def _need(self, found: PartialBlock) -> int:
        """How many pieces a block whose length is known still needs."""
        useful = found.segments if self._uses_parity else found.segments & (1 << self.layout.k) - 1
        return max(0, (found.count or 0) - useful.bit_count())

    def _open_block(self, block: int) -> PartialBlock | None:
        """The block, unless it is there, or is beyond the window or the object."""
        if self.carousel is not None:
            return self._open_any(self.carousel, block)
        if block >= self._edge:
            if self.total is not None and block >= self.total:
                return None
            if block >= self._base + self._window:
                self.unrecoverable = True  # the sender does not wait for this end: it came too late
                return None
            for number in range(self._edge, block + 1):
                self._open[number] = PartialBlock(self.layout.segments_of(number))
            self._edge = block + 1
        return self._open.get(block)

    def _open_any(self, carousel: Carousel, block: int) -> PartialBlock | None:
        """As `_opened`, for what goes round: the blocks may come in any order."""
        found = self._open.get(block)
        if found is not None or block < self._base or block in self._done:
            return found
        if block >= min(self.total or 0, self._base + self.reach) or not carousel.partial_blocks.add(
            self, block
        ):
            return None
        self._edge = max(self._edge, block + 1)
        found = self._open[block] = PartialBlock(self.layout.segments_of(block))
        return found
