"""One object as its sender knows it: which blocks are there, how far they have been sent.

Of an object that goes round and round all blocks are sent, some parity with each, and then all again. What
each block was in the first round is kept: it has to be the same in the others.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import NamedTuple

from mcast.cast.protocol.layout import ObjectLayout
from mcast.cast.protocol.packets import MAX_SEALS, NO_DIGEST, UNKNOWN_BLOCKS, BlockInfo, Describe, Flush, Seal
from mcast.cast.protocol.repairs import Repairs, SegmentRange
from mcast.cast.protocol.strategy import Strategy

MAX_READ_AHEAD = 4
"""How many blocks are asked of the driver before their turn."""

_SEGMENTS_PER_PARITY = 16
"""Of what goes round, so many pieces of data come with one of parity, another one in each round, where parity
can be had."""


class Terms(NamedTuple):
    """What the sender promises of an object, and since when."""

    strategy: Strategy
    begun: float


class OutgoingObject:
    """An object on its way. The driver offers blocks; their pieces are handed out as runs."""

    def __init__(self, about: Describe, terms: Terms) -> None:
        self.about: Describe = about
        self.terms: Terms = terms
        self.sent_at: float = terms.begun
        """When something was sent for the first time."""
        self.repairs: Repairs = Repairs(about.k, about.parity)
        self.low = 0
        """Blocks before this one are not needed any more."""
        self.window = 1
        self.digest: bytes | None = None
        """Of the whole object; None before its end is known."""
        self.sent: int = 0
        """How many blocks have been sent whole."""
        self.segments: int = 0
        """How many pieces were sent for the first time."""
        self.repaired: int = 0
        """How many were sent to repair losses."""
        self.stored = 0
        """All that take part say that they have the blocks before this one."""
        self.skipped: int = 0
        """How many pieces were not sent, because all have them already."""
        self.cycles: int = 0
        """How often all of it has been sent, of what goes round and round."""
        self.blocks: int | None = ObjectLayout.of(about).blocks
        """Number of blocks; None where only the end tells."""
        self._infos: list[BlockInfo] = []
        self._waiting = deque[BlockInfo]()
        self._block = self._at = 0

    @property
    def blocks_wanted(self) -> int:
        """How many blocks the driver may offer now."""
        most = MAX_READ_AHEAD - len(self._waiting)
        if self.cycles:
            return min(most, self.sent - self.offered)
        return 0 if self.digest is not None else max(0, most)

    @property
    def offered(self) -> int:
        """How many blocks the driver has offered, in this round."""
        return self._block + len(self._waiting)

    @property
    def released(self) -> int:
        """The driver's blocks before this one are not needed any more, in this round."""
        return self._block if self.about.carousel else self.low

    @property
    def expected_info(self) -> BlockInfo | None:
        """What the next block to offer was in an earlier round; None if there was none."""
        return self._infos[self.offered] if self.cycles else None

    @property
    def full(self) -> bool:
        """Whether the window is full."""
        return not self.about.carousel and self.sent >= self.low + self.window

    @property
    def idle(self) -> bool:
        """Whether there is no block to send now."""
        return not self._waiting or self.full

    @property
    def all_sent(self) -> bool:
        """Whether every block has been sent once."""
        return self.digest is not None and (self.cycles > 0 or not self._waiting)

    def offer(self, info: BlockInfo) -> None:
        """The next block is there."""
        self._waiting.append(info)

    def next_run(self, most: int, now: float) -> SegmentRange | None:
        """The next pieces to send, at most so many; the block's seal follows the last.

        The data of a block come first; of what goes round, its parity of this round follows.
        """
        if self.idle:
            return None
        data, max_parity = self._waiting[0].segments, self.about.parity
        parity = min(-(-data // _SEGMENTS_PER_PARITY), max_parity) if self.about.carousel else 0
        if self._at < data:
            run = SegmentRange(self._block, self._at, min(most, data - self._at))
        else:
            first = self.about.k + self.cycles % (max_parity // parity) * parity
            run = SegmentRange(self._block, first + self._at - data, min(most, data + parity - self._at))
        if self._at < data and not self.cycles:
            self.segments += run.segments
        else:
            self.repaired += run.segments
        self._at += run.segments
        self.sent_at = now
        if self._at == data + parity:
            self._done()
        return run

    def _done(self) -> None:
        """The next block has been sent whole."""
        info = self._waiting.popleft()
        if not self.cycles:
            self._infos.append(info)
            self.sent += 1
        self._block += 1
        self._at = 0

    def segments_of(self, block: int) -> int:
        """How many pieces of data a block has that has been sent."""
        return self._infos[block].segments

    def end_cycle(self) -> bool:
        """Whether all blocks have been sent in this round; the next round begins then."""
        if self.digest is None or self._waiting or self._block < self.sent:
            return False
        self.cycles += 1
        self._block = 0
        return True

    def skip_stored(self) -> bool:
        """Pass over the next block, if all have it already; its seal is to be sent all the same."""
        if self.idle or self._at or self.sent >= self.stored:
            return False
        self.skipped += self._waiting[0].segments
        self._done()
        return True

    @property
    def between_blocks(self) -> bool:
        """Whether the last run ended a block, whose seal is to be sent."""
        return self._at == 0

    def seal(self, block: int, stamp: int, members: int, round_trip: int, most: int = MAX_SEALS) -> Seal:
        """What that block is, and those before it."""
        last = min(block, self.sent - 1)
        blocks = tuple(reversed(self._infos[max(0, last + 1 - most) : last + 1]))
        return Seal(self.about.session, self.about.object, last, self.low, stamp, members, round_trip, blocks)

    def flush(self, stamp: int, members: int, round_trip: int, first: int, asked: int) -> Flush:
        """What has been sent; the members of these bits are asked."""
        digest = self.digest if self.all_sent else None
        total = UNKNOWN_BLOCKS if digest is None else self.sent
        digest = NO_DIGEST if digest is None else digest
        session, number = self.about.session, self.about.object
        waits = int(self.idle)
        return Flush(
            session,
            number,
            self.sent,
            total,
            self.low,
            stamp,
            members,
            round_trip,
            waits,
            digest,
            first,
            asked,
        )


class FlushTimer:
    """The questions of a sender that has nothing to send: the missing pieces, and the missing answers."""

    def __init__(self) -> None:
        self.at: float = inf
        """When to ask next."""
        self.idle_flushes: int = 0
        """How many questions in a row nobody has answered with a request."""
        self._count = 0
        self._wait = 0.0
        self._active = False

    def begin(self, at: float) -> None:
        """There is nothing to send: ask then, if no round is under way."""
        if self.at == inf:
            self.at, self._active = at, True

    def end(self) -> None:
        """There is something to send."""
        self.at = inf

    def on_activity(self) -> None:
        """A receiver has asked for something, or a repair was sent."""
        self._active = True

    def next_flush(self, now: float, shortest: float, longest: float) -> bool:
        """A question is asked now; True if it shall name those that have not answered."""
        self._wait = shortest if self._active else min(max(self._wait, shortest) * 1.5, longest)
        self.idle_flushes = 0 if self._active else self.idle_flushes + 1
        self._active = False
        self._count += 1
        self.at = now + self._wait
        return self.idle_flushes > 0 or self._count % 8 == 0
