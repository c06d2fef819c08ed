"""Partition of an object into blocks of k source segments; the last block and segment may be shorter."""

from __future__ import annotations

from typing import NamedTuple

from mcast.cast.protocol.packets import UNKNOWN_SIZE, BlockInfo, Describe


class ObjectLayout(NamedTuple):
    """Partition of an object.

    size     in bytes; None for a stream, each of whose blocks may be shorter than k segments
    segment  bytes of a segment
    k        maximum source segments of a block
    parity   maximum parity segments of a block
    """

    size: int | None
    segment: int
    k: int
    parity: int

    @classmethod
    def of(cls, about: Describe) -> ObjectLayout:
        """Return the partition of the object that a DESCRIBE announces."""
        return cls(None if about.size == UNKNOWN_SIZE else about.size, about.segment, about.k, about.parity)

    @property
    def blocks(self) -> int | None:
        """Number of blocks of the object; None for a stream."""
        return None if self.size is None else -(-self.size // self.offset_of(1))

    @property
    def segments(self) -> int:
        """Number of source segments of the object; 0 for a stream."""
        return -(-(self.size or 0) // self.segment)

    def offset_of(self, block: int) -> int:
        """Return the offset of a block in the object, in bytes."""
        return block * self.segment * self.k

    @property
    def all_segments(self) -> int:
        """Bitmap of all segments that a block may have, source and parity."""
        return (1 << self.k + self.parity) - 1

    def length(self, block: int) -> int | None:
        """Return the number of bytes of a block; None for a stream."""
        return None if self.size is None else min(self.offset_of(1), self.size - self.offset_of(block))

    def segments_of(self, block: int) -> int | None:
        """Return the number of source segments of a block; None for a stream."""
        length = self.length(block)
        return None if length is None else -(-length // self.segment)

    def fits(self, block: int, info: BlockInfo) -> bool:
        """Return True if the lengths in a SEAL are possible for that block."""
        known = self.length(block)
        if known is not None and known != info.size:
            return False
        return 0 < info.segments <= self.k and info.segments == -(-info.size // self.segment)
