"""What receivers ask for, taken together: one repair for different losses, and nothing that is on its way."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from mcast.cast.nack.messages import Want


class Run(NamedTuple):
    """Pieces first..first+pieces-1 of a block, to be sent one after another."""

    block: int
    first: int
    pieces: int


class _Asked:
    """What is asked for of one block, and what was sent to repair it."""

    __slots__ = ("missing", "need", "sent", "used")

    def __init__(self) -> None:
        self.need = self.missing = self.used = 0
        self.sent: list[tuple[int, int, int]] = []
        """Stamp, parity pieces, bits of data pieces."""

    def since(self, stamp: int) -> tuple[int, int]:
        """What was sent after that stamp."""
        bits = parity = 0
        for at, pieces, named in reversed(self.sent):
            if at <= stamp:
                break
            parity += pieces
            bits |= named
        return parity, bits


class Repairs:
    """The repairs of one object, whose blocks have at most `width` data pieces and `spare` parity pieces."""

    def __init__(self, width: int, spare: int) -> None:
        self._width, self._spare = width, spare
        self._blocks: dict[int, _Asked] = {}
        self._due: dict[int, None] = {}
        self._seals = set[int]()
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
        parity, named = block.since(stamp)
        need = want.need - parity - (want.missing & named).bit_count() if want.need else 0
        missing = want.missing & ~named
        if need <= 0 and (want.need or not missing):
            return 0
        more = max(0, need - block.need)
        block.need = max(block.need, need)
        if need > self._spare - block.used or not want.need:
            more += (missing & ~block.missing).bit_count()
            block.missing |= missing
        if more:
            self._due[want.block] = None
            self.at = min(self.at, at)
        return more

    def take(self, stamp: int) -> tuple[list[Run], list[int]]:
        """The repairs to send now, at that stamp, and the blocks whose seal is asked for."""
        runs: list[Run] = []
        for number in self._due:
            block = self._blocks[number]
            parity = min(block.need, self._spare - block.used)
            if parity < block.need and block.missing:
                parity = 0  # the pieces by name serve those that asked
            if parity:
                runs.append(Run(number, self._width + block.used, parity))
                block.used += parity
            runs += _runs(number, block.missing)
            block.sent.append((stamp, parity, block.missing))
            del block.sent[:-16]
            block.need = block.missing = 0
        seals = sorted(self._seals)
        self._due, self._seals = {}, set()
        self.at = inf
        return runs, seals

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
