"""Repair requests of all receivers, merged (RFC 5401, section 3.2): one repair serves different losses.

A block needs as many parity segments as its neediest receiver requests. Each round of repairs has the stamp
of the moment at which its last segment was sent. A NACK repeats the last stamp that its receiver has
received, so repairs that were sent after that stamp are still under way for it, and are not sent again.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import NamedTuple

from mcast.cast.protocol.packets import RepairRequest


class SegmentRange(NamedTuple):
    """Run of segments to send: those of a block with encoding symbol ids first..first+segments-1."""

    block: int
    first: int
    segments: int


_MAX_REMEMBERED = 16
"""Maximum repair rounds that are remembered, for each block and in all."""


class _BlockRepairs:
    """Requests for one block that are not answered yet, and the repairs of it that were sent."""

    __slots__ = ("missing", "need", "sent", "used")

    def __init__(self) -> None:
        self.need = self.missing = self.used = 0
        self.sent: list[tuple[_RepairRound, int, int]] = []
        """Repair round, number of parity segments in it, bitmap of source segments in it."""

    def between(self, stamp: float, until: float) -> tuple[int, int]:
        """Return the number of parity segments and the bitmap of source segments sent between two stamps."""
        bits = parity = 0
        for sent_in, segments, named in reversed(self.sent):
            if sent_in.stamp <= stamp:
                break
            if sent_in.stamp <= until:
                parity += segments
                bits |= named
        return parity, bits


class _RepairRound:
    """Repairs that were sent together: number of segments, stamp of the last one (inf until it is sent)."""

    __slots__ = ("segments", "stamp")

    def __init__(self, segments: int) -> None:
        self.segments, self.stamp = segments, inf


class Repairs:
    """Repairs of one object, whose blocks have at most `k` source and `parity` parity segments."""

    def __init__(self, k: int, parity: int) -> None:
        self._k, self._parity = k, parity
        self._blocks: dict[int, _BlockRepairs] = {}
        self._due: dict[int, None] = {}
        self._seals = set[int]()
        self._sent = deque[_RepairRound](maxlen=_MAX_REMEMBERED)
        self.at: float = inf
        """When to send the requested repairs; inf if there are none."""

    def request(self, request: RepairRequest, stamp: int, at: float) -> int:
        """Add a request of a receiver, and return the number of segments that it adds to the next repair.

        stamp  the last stamp that the receiver has received
        at     when to send the repair
        """
        if not request.missing:
            self._seals.add(request.block)
            self.at = min(self.at, at)
            return 1
        block = self._blocks.setdefault(request.block, _BlockRepairs())
        parity, named = block.between(stamp, inf)
        missing = request.missing & ~named
        need = (
            request.need - parity - (request.missing & named).bit_count()
            if request.need
            else missing.bit_count()
        )
        if need <= 0:
            return 0
        if request.need and need <= self._parity - block.used:
            more = max(0, need - block.need)
            block.need = max(block.need, need)
        else:
            more = (missing & ~block.missing).bit_count()
            block.missing |= missing
        if more:
            self._due[request.block] = None
            self.at = min(self.at, at)
        return more

    def lost(self, request: RepairRequest, before: int, stamp: int) -> int:
        """Return the number of missing segments that were already sent as repairs between two stamps."""
        block = self._blocks.get(request.block)
        if block is None:
            return 0
        parity, named = block.between(before, stamp)
        return min(
            request.need or request.missing.bit_count(), parity + (request.missing & named).bit_count()
        )

    def sent(self, before: int, stamp: int) -> int:
        """Return the number of repair segments that were sent between two stamps."""
        return sum(one.segments for one in self._sent if before < one.stamp <= stamp)

    def take(self) -> tuple[list[SegmentRange], list[int]]:
        """Start a repair round: return its runs, and the blocks whose SEAL is requested.

        The caller calls `mark_sent` when the last of them is sent.
        """
        runs: list[SegmentRange] = []
        self._sent.append(started := _RepairRound(0))
        for number in self._due:
            block = self._blocks[number]
            if block.need:
                runs.append(SegmentRange(number, self._k + block.used, block.need))
            runs += _ranges(number, block.missing)
            block.sent.append((started, block.need, block.missing))
            del block.sent[:-_MAX_REMEMBERED]
            block.used += block.need
            started.segments += block.need + block.missing.bit_count()
            block.need = block.missing = 0
        seals = sorted(self._seals)
        self._due, self._seals = {}, set()
        self.at = inf
        return runs, seals

    def mark_sent(self, stamp: int) -> None:
        """Set the stamp of the rounds that are sent; receivers with an earlier stamp did not see them."""
        for one in self._sent:
            one.stamp = min(one.stamp, stamp)

    def forget(self, low: int) -> None:
        """Drop the blocks before `low`, which all receivers have."""
        for number in [one for one in self._blocks if one < low]:
            del self._blocks[number]
            self._due.pop(number, None)


def _ranges(block: int, bits: int) -> list[SegmentRange]:
    """Return the runs of consecutive set bits."""
    found = []
    while bits:
        first = (bits & -bits).bit_length() - 1
        rest = bits >> first
        count = (~rest & rest + 1).bit_length() - 1
        found.append(SegmentRange(block, first, count))
        bits = rest >> count << first + count
    return found
