"""Where the bytes of an object come from, and its blocks while receivers may still need them."""

from __future__ import annotations

import os
from typing import Protocol

from typing_extensions import Buffer

from mcast.cast.files import Source
from mcast.cast.nack.messages import UNTOLD, Describe, heads
from mcast.cast.nack.payload import BlockBytes, Digest
from mcast.cast.nack.repairs import Run
from mcast.cast.nack.sender import ObjectSender

Sendable = Buffer | os.PathLike[str]
"""What can be sent: anything with the buffer protocol, such as bytes or a numpy array, or a file's path."""


class Origin(Protocol):
    """Where bytes come from. `size` is None where only the end tells."""

    size: int | None

    def read(self, most: int) -> bytes | None:
        """The next bytes, at most so many; empty at the end, None where none is there yet."""

    def close(self) -> None:
        """Free the origin."""


class FromMemory:
    """The bytes of a buffer, which must be contiguous. Raises TypeError for what is no buffer."""

    def __init__(self, data: Buffer) -> None:
        view = memoryview(data)
        if not view.c_contiguous:
            raise ValueError("the rows of this buffer do not follow one another: send a copy of it")
        self._view = view.cast("B") if view.nbytes else memoryview(b"")
        self.size: int | None = self._view.nbytes
        self._at = 0

    def read(self, most: int) -> bytes:
        found = bytes(self._view[self._at : self._at + most])
        self._at += len(found)
        return found

    def close(self) -> None:
        self._view.release()


def origin_of(data: Sendable) -> Origin:
    """Open what is to be sent. Raises OSError for a file that cannot be read, TypeError for other things."""
    return Source(os.fspath(data)) if isinstance(data, os.PathLike) else FromMemory(data)


class Outflow:
    """The blocks of one object, which are kept until no receiver can need them."""

    def __init__(self, origin: Origin, about: Describe) -> None:
        self._origin, self._about = origin, about
        self._kept: dict[int, BlockBytes] = {}
        self._left = None if about.size == UNTOLD else about.size
        self._begun = b""
        self._forgotten = 0
        self.offered: int = 0
        self.size: int = 0
        self._digest = Digest()

    @property
    def digest(self) -> bytes:
        """The BLAKE3 digest of the object's bytes, as far as they were offered."""
        return bytes(self._digest)

    def offer(self, core: ObjectSender) -> bool:
        """Offer as many blocks as the core has room for. False if there would be more, but not yet.

        Raises OSError if the object ends too early.
        """
        outgoing = core.outgoing
        if outgoing is None:
            return True
        while self._forgotten < outgoing.low:
            self._kept.pop(self._forgotten, None)
            self._forgotten += 1
        while core.room:
            if self._left == 0:
                core.end(self.digest)
                break
            block = self._block()
            if block is None:
                return False
            if not block:
                core.end(self.digest)
                break
            self._kept[self.offered] = BlockBytes(block, self._about.piece, self._about.width)
            core.offer(self._kept[self.offered].sealed)
            self._digest.update(block)
            self.size += len(block)
            self.offered += 1
        return True

    def _block(self) -> bytes | None:
        """The next block; a shorter one, or None, where the origin has no more for the moment."""
        most = self._about.piece * self._about.width
        if self._left is not None:
            most = min(most, self._left)
        while len(self._begun) < most:
            more = self._origin.read(most - len(self._begun))
            if more:
                self._begun = self._begun + more if self._begun else more
            elif more is None and (self._left is not None or not self._begun):
                return None
            else:
                break
        found, self._begun = self._begun, b""
        if self._left is not None:
            if len(found) < most:
                raise OSError(
                    f"the object has become shorter while it was sent, by {self._left - len(found)}"
                )
            self._left -= len(found)
        return found

    def framed(self, run: Run) -> list[bytes]:
        """The messages of a run; none if all have its block by now."""
        about, block = self._about, self._kept.get(run.block)
        if block is None:
            return []
        found = heads(about.session, about.object, run.block, run.first, run.pieces)
        return [head + block.piece(place) for place, head in enumerate(found, run.first)]
