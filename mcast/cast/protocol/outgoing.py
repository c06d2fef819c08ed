"""One object of a sender: blocks that the driver offers, progress of sending them, and the FLUSH timer.

The driver reads up to MAX_READ_AHEAD blocks ahead and offers length and digest of each; `next_run` hands
their segments out in order. The driver keeps the bytes of a block until `released` is beyond it.

An object of a carousel is sent in cycles: all blocks, with some parity segments each, and then all again. In
later cycles the driver offers the blocks anew. Their lengths and digests must be those of the first cycle,
because receivers combine segments of all cycles.
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
"""Maximum blocks that the driver offers ahead of the one that is sent."""

_SEGMENTS_PER_PARITY = 16
"""Source segments of a carousel per parity segment; each cycle sends other parity segments."""


class Terms(NamedTuple):
    """Strategy of an object, and the time at which it began."""

    strategy: Strategy
    begun: float


class OutgoingObject:
    """State of one object at its sender. The driver offers blocks; `next_run` returns segments to send."""

    def __init__(self, about: Describe, terms: Terms) -> None:
        self.about: Describe = about
        self.terms: Terms = terms
        self.sent_at: float = terms.begun
        """Time at which a new segment was sent last, later by the time spent on repairs since."""
        self.repairs: Repairs = Repairs(about.k, about.parity)
        self.low = 0
        """All receivers have the blocks before this one."""
        self.window = 1
        """Maximum blocks sent beyond `low`."""
        self.digest: bytes | None = None
        """Digest of the object; None before its end is known."""
        self.sent: int = 0
        """Number of blocks of which all source segments were sent or skipped."""
        self.segments: int = 0
        """Number of source segments that were sent once at least."""
        self.repaired: int = 0
        """Number of repair segments that were sent: parity, and source segments again."""
        self.stored = 0
        """All receivers report that they have stored the blocks before this one."""
        self.skipped: int = 0
        """Number of source segments that were not sent, because all receivers have them stored."""
        self.cycles: int = 0
        """Complete cycles of a carousel."""
        self.blocks: int | None = ObjectLayout.of(about).blocks
        """Number of blocks; None for a stream."""
        self._infos: list[BlockInfo] = []
        self._waiting = deque[BlockInfo]()
        self._block = self._at = 0

    @property
    def blocks_wanted(self) -> int:
        """Number of blocks that the driver may offer now."""
        wanted = MAX_READ_AHEAD - len(self._waiting)
        if self.cycles:
            return min(wanted, self.sent - self.offered)
        return 0 if self.digest is not None else max(0, wanted)

    @property
    def offered(self) -> int:
        """Number of blocks that the driver has offered in this cycle."""
        return self._block + len(self._waiting)

    @property
    def released(self) -> int:
        """Number of the first block whose bytes are still needed in this cycle."""
        return self._block if self.about.carousel else self.low

    @property
    def expected_info(self) -> BlockInfo | None:
        """Length and digest of the next block in the first cycle; None during that cycle."""
        return self._infos[self.offered] if self.cycles else None

    @property
    def full(self) -> bool:
        """True if no new block may be sent before a receiver advances."""
        return not self.about.carousel and self.sent >= self.low + self.window

    @property
    def idle(self) -> bool:
        """True if there is no new segment to send now."""
        return not self._waiting or self.full

    @property
    def all_sent(self) -> bool:
        """True if every block was sent or skipped."""
        return self.digest is not None and (self.cycles > 0 or not self._waiting)

    def offer(self, info: BlockInfo) -> None:
        """Add the next block."""
        self._waiting.append(info)

    def next_run(self, limit: int, now: float) -> SegmentRange | None:
        """Return the next segments to send, at most `limit`; the block's SEAL follows the last ones.

        The source segments of a block are first; in a carousel, its parity segments of this cycle follow.
        """
        if self.idle:
            return None
        data, max_parity = self._waiting[0].segments, self.about.parity
        parity = min(-(-data // _SEGMENTS_PER_PARITY), max_parity) if self.about.carousel else 0
        if self._at < data:
            run = SegmentRange(self._block, self._at, min(limit, data - self._at))
        else:
            first = self.about.k + self.cycles % (max_parity // parity) * parity
            run = SegmentRange(self._block, first + self._at - data, min(limit, data + parity - self._at))
        if self._at < data and not self.cycles:
            self.segments += run.segments
        else:
            self.repaired += run.segments
        self._at += run.segments
        self.sent_at = now
        if self._at == data + parity:
            self._end_block()
        return run

    def _end_block(self) -> None:
        """Turn to the next block."""
        info = self._waiting.popleft()
        if not self.cycles:
            self._infos.append(info)
            self.sent += 1
        self._block += 1
        self._at = 0

    def segments_of(self, block: int) -> int:
        """Return the number of source segments of a block that was sent."""
        return self._infos[block].segments

    def end_cycle(self) -> bool:
        """Return True if all blocks of this cycle were sent, and begin the next cycle then."""
        if self.digest is None or self._waiting or self._block < self.sent:
            return False
        self.cycles += 1
        self._block = 0
        return True

    def skip_stored(self) -> bool:
        """Skip the next block if all receivers have it stored, and return True; the caller sends its SEAL."""
        if self.sent >= self.stored or self._at or self.idle:
            return False
        self.skipped += self._waiting[0].segments
        self._end_block()
        return True

    @property
    def between_blocks(self) -> bool:
        """True if the last run ended a block, whose SEAL is to be sent."""
        return self._at == 0

    def seal(self, block: int, stamp: int, members: int, round_trip: int, count: int = MAX_SEALS) -> Seal:
        """Return the SEAL of a block and of the blocks before it, at most `count` in all."""
        last = min(block, self.sent - 1)
        blocks = tuple(reversed(self._infos[max(0, last + 1 - count) : last + 1]))
        return Seal(self.about.session, self.about.object, last, self.low, stamp, members, round_trip, blocks)

    def flush(self, stamp: int, members: int, round_trip: int, first: int, ack_bits: int) -> Flush:
        """Return a FLUSH, which the members first+i whose bit i is set shall answer."""
        digest = self.digest if self.all_sent else None
        total = UNKNOWN_BLOCKS if digest is None else self.sent
        digest = NO_DIGEST if digest is None else digest
        session, number = self.about.session, self.about.object
        return Flush(
            session,
            number,
            self.sent,
            total,
            self.low,
            stamp,
            members,
            round_trip,
            int(self.idle),
            digest,
            first,
            ack_bits,
        )


class FlushTimer:
    """Timer of FLUSHes while a sender has nothing else to send; slower while nobody sends NACKs."""

    def __init__(self) -> None:
        self.at: float = inf
        """When to send the next FLUSH; inf while there is something to send."""
        self.idle_flushes: int = 0
        """Number of FLUSHes in a row without a NACK or repair in between."""
        self._count = 0
        self._wait = 0.0
        self._active = False

    def begin(self, at: float) -> None:
        """Send the first FLUSH at that time, unless the timer runs already."""
        if self.at == inf:
            self.at, self._active = at, True

    def end(self) -> None:
        """Stop the timer, because there is something to send."""
        self.at = inf

    def on_activity(self) -> None:
        """Note that a NACK was received, or a repair sent."""
        self._active = True

    def next_flush(self, now: float, min_wait: float, max_wait: float) -> bool:
        """Set the time of the next FLUSH, and return True if the current one shall request ACKs.

        min_wait, max_wait  bounds of the seconds between two FLUSHes
        """
        self._wait = min_wait if self._active else min(max(self._wait, min_wait) * 1.5, max_wait)
        self.idle_flushes = 0 if self._active else self.idle_flushes + 1
        self._active = False
        self._count += 1
        self.at = now + self._wait
        return self.idle_flushes > 0 or self._count % 8 == 0
