"""What receivers ask for, taken together: one repair for different losses, and nothing that is on its way."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import NamedTuple

from mcast.cast.protocol.packets import RepairRequest


class SegmentRange(NamedTuple):
    """Pieces first..first+pieces-1 of a block, to be sent one after another."""

    block: int
    first: int
    segments: int


_MAX_REMEMBERED = 16
"""How many repairs of one block are remembered, and how many of all."""


class _BlockRepairs:
    """What is asked for of one block, and what was sent to repair it."""

    __slots__ = ("missing", "need", "sent", "used")

    def __init__(self) -> None:
        self.need = self.missing = self.used = 0
        self.sent: list[tuple[_RepairRound, int, int]] = []
        """When, parity pieces, bits of data pieces."""

    def between(self, stamp: float, until: float) -> tuple[int, int]:
        """What was sent after one stamp and not after the other."""
        bits = parity = 0
        for when, segments, named in reversed(self.sent):
            if when.stamp <= stamp:
                break
            if when.stamp <= until:
                parity += segments
                bits |= named
        return parity, bits


class _RepairRound:
    """Repairs that were sent together: how many pieces, and the stamp when the last had gone; before, inf."""

    __slots__ = ("segments", "stamp")

    def __init__(self, segments: int) -> None:
        self.segments, self.stamp = segments, inf


class Repairs:
    """The repairs of one object, whose blocks have at most `width` data pieces and `spare` parity pieces."""

    def __init__(self, k: int, parity: int) -> None:
        self._k, self._parity = k, parity
        self._blocks: dict[int, _BlockRepairs] = {}
        self._due: dict[int, None] = {}
        self._seals = set[int]()
        self._sent = deque[_RepairRound](maxlen=_MAX_REMEMBERED)
        self.at: float = inf
        """When to send what has been asked for."""

    def request(self, request: RepairRequest, stamp: int, at: float) -> int:
        """A receiver that has heard all up to `stamp` lacks this; the repair shall be sent at that time.

        How many pieces more will be sent therefore.
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
        """How many of the pieces that a receiver lacks were sent to repair it, between these stamps."""
        block = self._blocks.get(request.block)
        if block is None:
            return 0
        parity, named = block.between(before, stamp)
        return min(
            request.need or request.missing.bit_count(), parity + (request.missing & named).bit_count()
        )

    def sent(self, before: int, stamp: int) -> int:
        """How many pieces were sent to repair losses between these stamps."""
        return sum(one.segments for one in self._sent if before < one.stamp <= stamp)

    def take(self) -> tuple[list[SegmentRange], list[int]]:
        """The repairs to send now, and the blocks whose seal is asked for. `gone` says when all are sent."""
        runs: list[SegmentRange] = []
        self._sent.append(now := _RepairRound(0))
        for number in self._due:
            block = self._blocks[number]
            if block.need:
                runs.append(SegmentRange(number, self._k + block.used, block.need))
            runs += _ranges(number, block.missing)
            block.sent.append((now, block.need, block.missing))
            del block.sent[:-_MAX_REMEMBERED]
            block.used += block.need
            now.segments += block.need + block.missing.bit_count()
            block.need = block.missing = 0
        seals = sorted(self._seals)
        self._due, self._seals = {}, set()
        self.at = inf
        return runs, seals

    def mark_sent(self, stamp: int) -> None:
        """All that was taken is sent: what is heard before this stamp knows nothing of it."""
        for one in self._sent:
            one.stamp = min(one.stamp, stamp)

    def forget(self, low: int) -> None:
        """All have the blocks before this one."""
        for number in [one for one in self._blocks if one < low]:
            del self._blocks[number]
            self._due.pop(number, None)


def _ranges(block: int, bits: int) -> list[SegmentRange]:
    """The runs of set bits."""
    found = []
    while bits:
        first = (bits & -bits).bit_length() - 1
        rest = bits >> first
        count = (~rest & rest + 1).bit_length() - 1
        found.append(SegmentRange(block, first, count))
        bits = rest >> count << first + count
    return found
