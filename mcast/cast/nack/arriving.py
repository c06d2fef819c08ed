"""What a receiver has of one object: which pieces of which blocks, and what is missing.

The driver keeps the bytes: it asks here which pieces are new, and says which blocks are right.

The blocks of an object that goes round and round come as they come, and nothing is asked for: what is lost,
or finds no place, comes again in the next round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mcast.cast.nack.circle import INVITED, ROUNDS, Circle
from mcast.cast.nack.messages import MOST_BLOCKS, MOST_WIDTH, NO_DIGEST, OPEN, Sealed, Want
from mcast.cast.nack.on_disk import OnDisk
from mcast.cast.nack.shape import Shape

TRIES = 8
"""A block may so often differ from its digest."""

_REACH = 1 << 20
"""Blocks of the full width so far beyond the first that is missing are taken, where they may come in any
order; fewer narrow ones, because to know of a block costs as much, however little it brings."""


class Ready(NamedTuple):
    """A block of which enough pieces are there: `pieces` has a bit for each, data and parity.

    Without a piece, the block is one that an earlier run has left on the disk.
    """

    object: int
    block: int
    sealed: Sealed
    pieces: int


class Block:
    """A block that is not there yet."""

    __slots__ = ("count", "pieces", "sealed", "waits", "wrong")

    def __init__(self, count: int | None) -> None:
        self.count: int | None = count
        self.pieces: int = 0
        self.sealed: Sealed | None = None
        self.waits: bool = False
        self.wrong: int = 0


class Arriving:
    """One object, of which at most `room` blocks are held beyond the first that lacks something.

    circle  the objects with which it goes round and round; None for one that is sent once
    """

    def __init__(
        self, number: int, shape: Shape, room: int, parity: bool, circle: Circle | None = None
    ) -> None:
        self.number: int = number
        self.shape: Shape = shape
        self.total = shape.blocks
        self.held: OnDisk = OnDisk()
        """What the disk has of an earlier run."""
        self.since = 0
        """What is before this block is not asked for yet."""
        self.digest: bytes | None = None
        """What the sender says that the whole object's digest is, once all has been sent."""
        self.gone: bool = False
        """What is missing cannot come any more: the sender is further than the window."""
        self.ready: list[Ready] = []
        """The blocks to decode and check; what comes of them from now on is not new."""
        self.circle: Circle | None = circle
        self.reach: int = room
        """Of what goes round, blocks so far beyond the first that is missing are taken."""
        self.dropped: list[int] = []
        """Blocks of which nothing is kept any more; the driver takes them away."""
        self._heard = 0
        self._room, self._parity = room, parity
        self._base = self._low = self._edge = self._sent = self._flushed = 0
        self._open: dict[int, Block] = {}
        self._done = set[int]()

    @property
    def base(self) -> int:
        """All blocks before this one are there and right."""
        return self.held.base if self.held.active else self._base

    def hold(self, blocks: int) -> None:
        """So many blocks seem to be on the disk. They count when they were compared; others are taken now."""
        self.held = OnDisk(min(blocks, MOST_BLOCKS if self.total is None else self.total))
        self._base = self._edge = self.held.until

    def scatter(self) -> None:
        """The driver can put each block of what goes round into its place as it comes."""
        self.reach = max(self.reach, _REACH * self.shape.width // MOST_WIDTH)

    @property
    def whole(self) -> bool:
        """Whether all blocks are there and right, and the digest of the whole is known."""
        return self.base == self.total and self.digest is not None

    @property
    def begun(self) -> bool:
        """Whether the sender has been seen to send blocks."""
        return self._edge > 0

    def takes(self, block: int, first: int, count: int) -> int:
        """A bit for each new piece among first..first+count-1 of a block; they count as kept from now on."""
        self._heard += count
        if self.circle is not None:
            self.circle.invited = 0
        self._note(block)
        found = self._opened(block)
        if found is None or found.waits:
            return 0
        allowed = self.shape.every
        if found.count is not None:
            allowed &= ~(((1 << self.shape.width) - 1) >> found.count << found.count)
        new = ((1 << count) - 1) << first & allowed & ~found.pieces
        found.pieces |= new
        if found.sealed is not None:
            self._judge(block, found, found.sealed)
        return new

    def seal(self, block: int, blocks: Iterable[Sealed]) -> bool:
        """Take in what the blocks `block`, block-1, … are. False if one of them cannot be that."""
        sound, held, opened = True, self.held.active, self._open
        for number, sealed in zip(range(block, -1, -1), blocks, strict=False):
            if not held and (number < self._base or ((known := opened.get(number)) and known.sealed)):
                continue  # as most of them: each block is in many seals
            if not self.shape.fits(number, sealed):
                sound = False
                continue
            self.held.seal(number, sealed)
            # Of what goes round, a seal alone takes no place.
            found = self._opened(number) if self.circle is None else self._open.get(number)
            if found is not None and found.sealed is None:
                found.sealed, found.count = sealed, sealed.pieces
                found.pieces &= ~(((1 << self.shape.width) - 1) >> sealed.pieces << sealed.pieces)
                self._judge(number, found, sealed)
        self._note(block + 1)
        self._compare()
        return sound

    def sent(self, blocks: int, total: int, low: int, digest: bytes = NO_DIGEST) -> None:
        """Take in how many blocks have been sent, how many there are, or OPEN, and which are gone."""
        if self.circle is not None:
            blocks = low = 0  # what has been sent comes again, and nothing is ever gone
        self._flushed = max(self._flushed, blocks)
        if blocks:
            self._opened(blocks - 1)
            self._note(blocks)
        if total < self.held.until and self.held.active:
            self._hold_no_more(total)
        if self.digest is None and total != OPEN and total >= self._edge and self.total in (None, total):
            self.total, self.digest = total, digest
        self._low = max(self._low, low)
        self.gone |= self._low > self._base

    def right(self, block: int) -> None:
        """The block is as its digest says."""
        self._heard = 0
        if self.held.active and block == self.held.base:
            self.held.right()
            self._compare()
        elif self._open.pop(block, None) is not None:
            if self.circle is not None:
                self.circle.places.closes(self, block)
            self._done.add(block)
            self._close_up()

    def drop(self, block: int) -> None:
        """Keep nothing of a block that comes again."""
        if self.circle is not None and self._open.pop(block, None) is not None:
            self.circle.places.closes(self, block)
            self.dropped.append(block)

    def drop_all(self) -> None:
        """Keep no block that is there in part."""
        for block in [*self._open]:
            self.drop(block)

    def forget(self) -> None:
        """Keep nothing but the number of the first block that was missing: the object has ended."""
        self._base, self.held = self.base, OnDisk()
        for kept in (self._open, self._done, self.ready, self.dropped):
            kept.clear()

    def keeps(self, block: int) -> bool:
        """Whether the driver has all of a block that is there in part, and works on it."""
        found = self._open.get(block)
        return found is not None and found.waits

    def wrong(self, block: int) -> bool:
        """The block differs from its digest, and is wanted anew. False if that has been so too often.

        After a block on the disk that differs, nothing there is trusted, and what came beyond is dropped.
        """
        if self.held.active and block == self.held.base:
            self._hold_no_more(block)
            return True
        found = self._open.get(block)
        if found is None:  # the sender has said meanwhile that the object ends before it
            return True
        found.pieces, found.waits = 0, False
        found.wrong += 1
        return found.wrong < TRIES

    @property
    def lacking(self) -> bool:
        """Whether something that has been sent is missing, and may be asked for."""
        if not self.held.active and next(iter(self._open), self._sent) >= self._sent:
            return False
        return next(self.wants(), None) is not None

    def wants(self) -> Iterator[Want]:
        """What is missing of the blocks that have been sent. Nothing of what goes round: all comes again."""
        if self.gone or self.circle is not None:
            return
        yield from self.held.wants()
        for number, found in self._open.items():
            if number >= self._sent:
                return
            if number < self.since or found.waits:
                continue
            if found.count is None or not (need := self._need(found)):
                if number < self._flushed:
                    yield Want(number, 0, 0)  # its seal, which no later one will bring
            else:
                missing = ~found.pieces & (1 << found.count) - 1
                yield Want(number, need if self._parity else 0, missing)

    @property
    def taking(self) -> bool:
        """Whether the driver has the next block, and has yet to put it into its place: a pipe may be slow."""
        first = self._open.get(self._base)
        return first is not None and first.waits

    @property
    def hopeless(self) -> str:
        """Why what is missing of what goes round will not come, and what that is; empty if it may."""
        if self.circle is None or self.taking:
            return ""
        if self.circle.invited >= INVITED:
            how = f"the carousel's sender invited {INVITED} times, and no piece came between"
        elif self._heard >= ROUNDS * max(1, self.shape.pieces) or self.circle.hopeless:
            how = f"the carousel did not bring what is missing in {ROUNDS} rounds"
        else:
            return ""
        if self.base == self.total:
            return f"{how}: the digest of the whole"
        total, held = self.total or 0, self.held.until - self.held.base
        left = total - self._base - len(self._done) + held
        return f"{how}: {left:,} of {total:,} blocks, the first at byte {self.shape.begins(self.base):,}"

    def lacks(self, block: int) -> bool:
        """Whether the block is not there yet."""
        return block in self._open or self.held.lacks(block)

    def _note(self, blocks: int) -> None:
        """So many blocks have been sent, as far as this end takes them."""
        self.held.sent(blocks)
        self._sent = max(self._sent, min(blocks, self._base + self._room))

    def _close_up(self) -> None:
        while self._base in self._done:
            self._done.remove(self._base)
            self._base += 1

    def _compare(self) -> None:
        """The next block on the disk is ready, if its seal is known."""
        block = self.held.base
        if self.held.active and (sealed := self.held.next()) is not None:
            self.ready.append(Ready(self.number, block, sealed, 0))

    def _hold_no_more(self, until: int) -> None:
        """The disk has no more than the blocks before that one: what follows is taken from there."""
        came = range(self.held.until, self._base)
        self.held.end(until)
        self._base = self.held.until
        if self.circle is not None:  # what has come meanwhile is right, whatever the disk had
            self._done.update(came)
            self._close_up()
            return
        self._edge = self._base
        self._sent = min(self._sent, self._base + self._room)
        self.gone |= self._low > self._base
        self._open.clear()
        self._done.clear()
        self.ready = [one for one in self.ready if one.block < until]
        self._compare()

    def _judge(self, number: int, found: Block, sealed: Sealed) -> None:
        if not self._need(found):
            found.waits = True
            self.ready.append(Ready(self.number, number, sealed, found.pieces))

    def _need(self, found: Block) -> int:
        """How many pieces a block whose length is known still needs."""
        useful = found.pieces if self._parity else found.pieces & (1 << self.shape.width) - 1
        return max(0, (found.count or 0) - useful.bit_count())

    def _opened(self, block: int) -> Block | None:
        """The block, unless it is there, or is beyond the window or the object."""
        if self.circle is not None:
            return self._gathered(self.circle, block)
        if block >= self._edge:
            if self.total is not None and block >= self.total:
                return None
            if block >= self._base + self._room:
                self.gone = True  # the sender does not wait for this end: it came too late
                return None
            for number in range(self._edge, block + 1):
                self._open[number] = Block(self.shape.pieces_of(number))
            self._edge = block + 1
        return self._open.get(block)

    def _gathered(self, circle: Circle, block: int) -> Block | None:
        """As `_opened`, for what goes round: the blocks may come in any order."""
        found = self._open.get(block)
        if found is not None or block < self._base or block in self._done:
            return found
        if block >= min(self.total or 0, self._base + self.reach) or not circle.places.opens(self, block):
            return None
        self._edge = max(self._edge, block + 1)
        found = self._open[block] = Block(self.shape.pieces_of(block))
        return found
