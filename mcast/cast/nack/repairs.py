"""What receivers ask for, taken together: one repair for different losses, and nothing that is on its way."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import NamedTuple

from mcast.cast.nack.messages import Want


class Run(NamedTuple):
    """Pieces first..first+pieces-1 of a block, to be sent one after another."""

    block: int
    first: int
    pieces: int


_REMEMBERED = 16
"""How many repairs of one block are remembered, and how many of all."""


class _Asked:
    """What is asked for of one block, and what was sent to repair it."""

    __slots__ = ("missing", "need", "sent", "used")

    def __init__(self) -> None:
        self.need = self.missing = self.used = 0
        self.sent: list[tuple[_Sent, int, int]] = []
        """When, parity pieces, bits of data pieces."""

    def between(self, stamp: float, until: float) -> tuple[int, int]:
        """What was sent after one stamp and not after the other."""
        bits = parity = 0
        for when, pieces, named in reversed(self.sent):
            if when.stamp <= stamp:
                break
            if when.stamp <= until:
                parity += pieces
                bits |= named
        return parity, bits


class _Sent:
    """Repairs that were sent together: how many pieces, and the stamp when the last had gone; before, inf."""

    __slots__ = ("pieces", "stamp")

    def __init__(self, pieces: int) -> None:
        self.pieces, self.stamp = pieces, inf


class Repairs:
    """The repairs of one object, whose blocks have at most `width` data pieces and `spare` parity pieces."""

    def __init__(self, width: int, spare: int) -> None:
        self._width, self._spare = width, spare
        self._blocks: dict[int, _Asked] = {}
        self._due: dict[int, None] = {}
        self._seals = set[int]()
        self._sent = deque[_Sent](maxlen=_REMEMBERED)
        self.at: float = inf
        """When to send what has been asked for."""

    def asked(self, want: Want, stamp: int, at: float) -> int:
        """A receiver that has heard all up to `stamp` lacks this; the repair shall be sent at that time.

        How many pieces more will be sent therefore.
        """
        if not want.missing:
            self._seals.add(want.block)
            self.at = min(self.at, at)
            return 1
        block = self._blocks.setdefault(want.block, _Asked())
        parity, named = block.between(stamp, inf)
        missing = want.missing & ~named
        need = want.need - parity - (want.missing & named).bit_count() if want.need else missing.bit_count()
        if need <= 0:
            return 0
        if want.need and need <= self._spare - block.used:
            more = max(0, need - block.need)
            block.need = max(block.need, need)
        else:
            more = (missing & ~block.missing).bit_count()
            block.missing |= missing
        if more:
            self._due[want.block] = None
            self.at = min(self.at, at)
        return more

    def lost(self, want: Want, before: int, stamp: int) -> int:
        """How many of the pieces that a receiver lacks were sent to repair it, between these stamps."""
        block = self._blocks.get(want.block)
        if block is None:
            return 0
        parity, named = block.between(before, stamp)
        return min(want.need or want.missing.bit_count(), parity + (want.missing & named).bit_count())

    def sent(self, before: int, stamp: int) -> int:
        """How many pieces were sent to repair losses between these stamps."""
        return sum(one.pieces for one in self._sent if before < one.stamp <= stamp)

    def take(self) -> tuple[list[Run], list[int]]:
        """The repairs to send now, and the blocks whose seal is asked for. `gone` says when all are sent."""
        runs: list[Run] = []
        self._sent.append(now := _Sent(0))
        for number in self._due:
            block = self._blocks[number]
            if block.need:
                runs.append(Run(number, self._width + block.used, block.need))
            runs += _runs(number, block.missing)
            block.sent.append((now, block.need, block.missing))
            del block.sent[:-_REMEMBERED]
            block.used += block.need
            now.pieces += block.need + block.missing.bit_count()
            block.need = block.missing = 0
        seals = sorted(self._seals)
        self._due, self._seals = {}, set()
        self.at = inf
        return runs, seals

    def gone(self, stamp: int) -> None:
        """All that was taken is sent: what is heard before this stamp knows nothing of it."""
        for one in self._sent:
            one.stamp = min(one.stamp, stamp)

    def forget(self, low: int) -> None:
        """All have the blocks before this one."""
        for number in [one for one in self._blocks if one < low]:
            del self._blocks[number]
            self._due.pop(number, None)


def _runs(block: int, bits: int) -> list[Run]:
    """The runs of set bits."""
    found = []
    while bits:
        first = (bits & -bits).bit_length() - 1
        rest = bits >> first
        count = (~rest & rest + 1).bit_length() - 1
        found.append(Run(block, first, count))
        bits = rest >> count << first + count
    return found
