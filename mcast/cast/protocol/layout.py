"""How an object is cut: pieces of equal size, blocks of at most `width` pieces; the last ones are shorter."""

from __future__ import annotations

from typing import NamedTuple

from mcast.cast.protocol.packets import UNKNOWN_SIZE, BlockInfo, Describe


class ObjectLayout(NamedTuple):
    """How an object of `size` bytes is cut; `size` is None for a stream, whose blocks may have any length."""

    size: int | None
    segment: int
    k: int
    parity: int

    @classmethod
    def of(cls, about: Describe) -> ObjectLayout:
        """How the object is cut that a DESCRIBE is about."""
        return cls(None if about.size == UNKNOWN_SIZE else about.size, about.segment, about.k, about.parity)

    @property
    def blocks(self) -> int | None:
        """How many blocks the object has; None for a stream."""
        return None if self.size is None else -(-self.size // self.offset_of(1))

    @property
    def segments(self) -> int:
        """How many data pieces the object has; 0 for a stream."""
        return -(-(self.size or 0) // self.segment)

    def offset_of(self, block: int) -> int:
        """At which byte a block of the object begins."""
        return block * self.segment * self.k

    @property
    def all_segments(self) -> int:
        """A bit for each piece that a block may have, data and parity."""
        return (1 << self.k + self.parity) - 1

    def length(self, block: int) -> int | None:
        """How many bytes a block of the object has; None for a stream."""
        return None if self.size is None else min(self.offset_of(1), self.size - self.offset_of(block))

    def segments_of(self, block: int) -> int | None:
        """How many data pieces a block of the object has; None for a stream."""
        length = self.length(block)
        return None if length is None else -(-length // self.segment)

    def fits(self, block: int, info: BlockInfo) -> bool:
        """Whether a block of the object can be what a SEAL says."""
        known = self.length(block)
        if known is not None and known != info.size:
            return False
        return 0 < info.segments <= self.k and info.segments == -(-info.size // self.segment)
