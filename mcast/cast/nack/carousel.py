"""An object that goes round and round, without a word of its receivers: what its ends do otherwise.

The sender sends all blocks, some parity with each, and begins anew. It keeps what each block was in the first
round, and says the digest of the whole from the first round's end on. Receivers take blocks in the order in
which they come, and what they lose in the next round. Each block, and the whole, is compared as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from mcast.cast.nack.arriving import Arriving, Block
from mcast.cast.nack.messages import NO_DIGEST, Describe, Sealed, Want
from mcast.cast.nack.outgoing import AHEAD, Outgoing, Terms
from mcast.cast.nack.repairs import Run
from mcast.cast.nack.shape import Shape

_PARITY = 16
"""To so many pieces of data comes one of parity, another one in each round, where parity can be had."""

_REACH = 1 << 20
"""Blocks so far beyond the first that is missing are taken, where they may come in any order."""


class Around(Outgoing):
    """An object that its sender sends round and round."""

    def __init__(self, about: Describe, terms: Terms) -> None:
        super().__init__(about, terms)
        self._block = self._rounds = 0

    @property
    def rounds(self) -> int:
        return self._rounds

    @property
    def room(self) -> int:
        if not self.rounds:
            return super().room
        return min(AHEAD - len(self._waiting), self.sent - self.offered)

    @property
    def offered(self) -> int:
        return self._block + len(self._waiting)

    @property
    def passed(self) -> int:
        return self._block

    @property
    def expected(self) -> Sealed | None:
        return self._sealed[self.offered] if self.rounds else None

    @property
    def full(self) -> bool:
        return False

    @property
    def all_sent(self) -> bool:
        return self.rounds > 0

    def next(self, most: int, now: float) -> Run | None:
        """The next pieces to send, at most so many: the data of a block, then its parity of this round."""
        if self.waits:
            return None
        data, spare = self._waiting[0].pieces, self.about.spare
        parity = min(-(-data // _PARITY), spare)
        if self._at < data:
            run = Run(self._block, self._at, min(most, data - self._at))
        else:
            first = self.about.width + self.rounds % (spare // parity) * parity
            run = Run(self._block, first + self._at - data, min(most, data + parity - self._at))
        self._count(run.pieces, not self.rounds and self._at < data)
        self._at += run.pieces
        if self._at == data + parity:
            self._block += 1
            if self.rounds:
                self._waiting.popleft()
                self._at = 0
            else:
                self._done()
        return run

    def turned(self) -> bool:
        """Whether all blocks have been sent in this round; the next round begins then."""
        if self.digest is None or self._waiting or self._block < self.sent:
            return False
        self._rounds += 1
        self._block = 0
        return True


class Gathered(Arriving):
    """An object whose blocks come as they come, and of which nothing is asked for.

    At most `room` blocks are there in part. What finds no place comes again in the next round.
    """

    def __init__(self, number: int, shape: Shape, room: int, parity: bool) -> None:
        super().__init__(number, shape, room, parity)
        self.reach: int = room
        """Blocks so far beyond the first that is missing are taken."""
        self.dropped: list[int] = []
        """Blocks of which nothing is kept any more; the driver takes them away."""

    def scatter(self) -> None:
        """The driver can put each block into its place as it comes."""
        self.reach = _REACH

    def sent(self, blocks: int, total: int, low: int, digest: bytes = NO_DIGEST) -> None:
        """Take in what the whole is; what has been sent comes again, and nothing is ever gone."""
        super().sent(0, total, 0, digest)

    def wants(self) -> Iterator[Want]:
        """Nothing: all of it comes again."""
        return iter(())

    def _opened(self, block: int) -> Block | None:
        found = self._open.get(block)
        if found is not None or block < self._base or block in self._done:
            return found
        if block >= min(self.total or 0, self._base + self.reach):
            return None
        while len(self._open) >= self._room:
            # What was begun long ago comes again soonest; the newest one is still on its way.
            dropped = [*islice(reversed(self._open), 2)][-1]
            del self._open[dropped]
            self.dropped.append(dropped)
        self._open[block] = Block(self.shape.pieces_of(block))
        self._edge = max(self._edge, block + 1)
        return self._open[block]

    def _sealed(self, block: int) -> Block | None:
        return self._open.get(block)  # a seal alone takes no place

    def _hold_no_more(self, until: int) -> None:
        # What has come meanwhile is right, whatever the disk had.
        self._done.update(range(self.held.until, self._base))
        self.held.end(until)
        self._base = self.held.until
        self._close_up()
