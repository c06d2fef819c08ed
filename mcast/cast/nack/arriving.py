"""What a receiver has of one object: which pieces of which blocks, and what is missing.

The driver keeps the bytes: it asks here which pieces are new, and says which blocks are right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mcast.cast.nack.messages import NO_DIGEST, OPEN, Sealed, Want
from mcast.cast.nack.shape import Shape

TRIES = 8
"""A block may so often differ from its digest."""


class Ready(NamedTuple):
    """A block of which enough pieces are there: `pieces` has a bit for each, data and parity."""

    object: int
    block: int
    sealed: Sealed
    pieces: int


class _Block:
    """A block that is not there yet."""

    __slots__ = ("count", "pieces", "sealed", "waits", "wrong")

    def __init__(self, count: int | None) -> None:
        self.count = count
        self.pieces = 0
        self.sealed: Sealed | None = None
        self.waits = False
        self.wrong = 0


class Arriving:
    """One object, of which at most `room` blocks are held beyond the first that lacks something."""

    def __init__(self, number: int, shape: Shape, room: int, parity: bool) -> None:
        self.number: int = number
        self.shape: Shape = shape
        self.total = shape.blocks
        self.base: int = 0
        self.since = 0
        """What is before this block is not asked for yet."""
        self.digest: bytes | None = None
        """What the sender says that the whole object's digest is, once all has been sent."""
        self.gone: bool = False
        """What is missing cannot come any more: the sender is further than the window."""
        self.ready: list[Ready] = []
        """The blocks to decode and check; what comes of them from now on is not new."""
        self._room, self._parity = room, parity
        self._edge = self._sent = self._flushed = 0
        self._open: dict[int, _Block] = {}
        self._done = set[int]()

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
        self._sent = max(self._sent, min(block, self.base + self._room))
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
        sound = True
        for number, sealed in zip(range(block, -1, -1), blocks, strict=False):
            if not self.shape.fits(number, sealed):
                sound = False
                continue
            found = self._opened(number)
            if found is not None and found.sealed is None:
                found.sealed, found.count = sealed, sealed.pieces
                found.pieces &= ~(((1 << self.shape.width) - 1) >> sealed.pieces << sealed.pieces)
                self._judge(number, found, sealed)
        self._sent = max(self._sent, min(block + 1, self.base + self._room))
        return sound

    def sent(self, blocks: int, total: int, low: int, digest: bytes = NO_DIGEST) -> None:
        """Take in how many blocks have been sent, how many there are, or OPEN, and which are gone."""
        self._flushed = max(self._flushed, blocks)
        if blocks:
            self._opened(blocks - 1)
            self._sent = max(self._sent, min(blocks, self.base + self._room))
        if self.digest is None and total != OPEN and total >= self._edge and self.total in (None, total):
            self.total, self.digest = total, digest
        self.gone |= low > self.base

    def right(self, block: int) -> None:
        """The block is as its digest says."""
        if self._open.pop(block, None) is not None:
            self._done.add(block)
            while self.base in self._done:
                self._done.remove(self.base)
                self.base += 1

    def wrong(self, block: int) -> bool:
        """The block differs from its digest, and is wanted anew. False if that has been so too often."""
        found = self._open[block]
        found.pieces, found.waits = 0, False
        found.wrong += 1
        return found.wrong < TRIES

    @property
    def lacking(self) -> bool:
        """Whether something that has been sent is missing, and may be asked for."""
        return next(self.wants(), None) is not None

    def wants(self) -> Iterator[Want]:
        """What is missing of the blocks that have been sent."""
        if self.gone:
            return
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

    def lacks(self, block: int) -> bool:
        """Whether the block is not there yet."""
        return block in self._open

    def _judge(self, number: int, found: _Block, sealed: Sealed) -> None:
        if not self._need(found):
            found.waits = True
            self.ready.append(Ready(self.number, number, sealed, found.pieces))

    def _need(self, found: _Block) -> int:
        """How many pieces a block whose length is known still needs."""
        useful = found.pieces if self._parity else found.pieces & (1 << self.shape.width) - 1
        return max(0, (found.count or 0) - useful.bit_count())

    def _opened(self, block: int) -> _Block | None:
        """The block, unless it is there, or is beyond the window or the object."""
        if block >= self._edge:
            if self.total is not None and block >= self.total:
                return None
            if block >= self.base + self._room:
                self.gone = True  # the sender does not wait for this end: it came too late
                return None
            for number in range(self._edge, block + 1):
                self._open[number] = _Block(self.shape.pieces_of(number))
            self._edge = block + 1
        return self._open.get(block)
