"""How an object is cut: pieces of equal size, blocks of at most `width` pieces; the last ones are shorter."""

from __future__ import annotations

from typing import NamedTuple

from mcast.cast.nack.messages import UNTOLD, Describe, Sealed


class Shape(NamedTuple):
    """How an object of `size` bytes is cut; `size` is None for a stream, whose blocks may have any length."""

    size: int | None
    piece: int
    width: int
    spare: int

    @classmethod
    def of(cls, about: Describe) -> Shape:
        """How the object is cut that a DESCRIBE is about."""
        return cls(None if about.size == UNTOLD else about.size, about.piece, about.width, about.spare)

    @property
    def blocks(self) -> int | None:
        """How many blocks the object has; None for a stream."""
        return None if self.size is None else -(-self.size // self.begins(1))

    @property
    def pieces(self) -> int:
        """How many data pieces the object has; 0 for a stream."""
        return -(-(self.size or 0) // self.piece)

    def begins(self, block: int) -> int:
        """At which byte a block of the object begins."""
        return block * self.piece * self.width

    @property
    def every(self) -> int:
        """A bit for each piece that a block may have, data and parity."""
        return (1 << self.width + self.spare) - 1

    def length(self, block: int) -> int | None:
        """How many bytes a block of the object has; None for a stream."""
        return None if self.size is None else min(self.begins(1), self.size - self.begins(block))

    def pieces_of(self, block: int) -> int | None:
        """How many data pieces a block of the object has; None for a stream."""
        length = self.length(block)
        return None if length is None else -(-length // self.piece)

    def fits(self, block: int, sealed: Sealed) -> bool:
        """Whether a block of the object can be what a SEAL says."""
        known = self.length(block)
        if known is not None and known != sealed.size:
            return False
        return 0 < sealed.pieces <= self.width and sealed.pieces == -(-sealed.size // self.piece)
