"""The bytes of blocks: cut into pieces with their parity, and put together from pieces and checked."""

from __future__ import annotations

from blake3 import blake3
from typing_extensions import Buffer

from mcast.cast.nack.messages import Sealed
from mcast.cast.nack.parity import parity_of, restored


class Digest:
    """A BLAKE3 digest of what has come so far: of a block, or of an object."""

    def __init__(self, data: Buffer = b"") -> None:
        self._hash = blake3(data)

    def update(self, data: Buffer) -> None:
        """Take in what follows."""
        self._hash.update(data)

    def __bytes__(self) -> bytes:
        return bytes(self._hash.digest())


class BlockBytes:
    """A block that is sent: its pieces, and its parity pieces when they are asked for.

    data  bytes, or a view of bytes that nobody changes meanwhile: no copy is made
    """

    def __init__(self, data: bytes | memoryview, piece: int, width: int) -> None:
        self.sealed: Sealed = Sealed(-(-len(data) // piece), len(data), bytes(Digest(data)))
        self._data, self._piece, self._width = memoryview(data), piece, width
        self._parity: list[bytes] | None = None

    def piece(self, place: int) -> bytes | memoryview:
        """The piece at that place: a data piece below the width, else a parity piece."""
        if place < self._width:
            return self._data[place * self._piece : (place + 1) * self._piece]
        if self._parity is None:
            self._parity = parity_of(cut(self._data, self._piece))
        return self._parity[place - self._width]


def cut(data: memoryview, piece: int) -> list[bytes | memoryview]:
    """The pieces of a block, the last one filled up with zeros."""
    found: list[bytes | memoryview] = [data[at : at + piece] for at in range(0, len(data), piece)]
    found[-1] = bytes(found[-1]).ljust(piece, b"\0")
    return found


class BlockPlace:
    """A block that is received: each piece of data goes to its place as it comes, parity is kept apart.

    memory  as long as the block, or, where only its seal will tell how long it is, as the longest one
    """

    def __init__(self, memory: memoryview, piece: int, width: int) -> None:
        self._memory, self._piece, self._width = memory, piece, width
        self._parity: dict[int, bytes] = {}

    def put(self, place: int, message: Buffer, skip: int) -> None:
        """Take in a piece: what a message has after its first `skip` bytes. A liar's may be too long."""
        data = memoryview(message)[skip : skip + self._piece]
        if place < self._width:
            at = place * self._piece
            room = min(len(data), len(self._memory) - at)
            self._memory[at : at + room] = data[:room]
        else:
            self._parity[place - self._width] = bytes(data)

    def whole(self, sealed: Sealed, pieces: int) -> memoryview | None:
        """The bytes of the block, of which enough pieces are there, a bit for each; None if they are not what
        the seal says."""
        found = self._memory[: sealed.size]
        lost = [place for place in range(sealed.pieces) if not pieces >> place & 1]
        if len(found) < sealed.size or (lost and not self._restore(found, sealed.pieces, lost)):
            return None
        return found if bytes(Digest(found)) == sealed.digest else None

    def _restore(self, found: memoryview, pieces: int, lost: list[int]) -> bool:
        """Put the lost pieces into their places. False if there is too little parity for that."""
        missing = set(lost)
        data = {place: one for place, one in enumerate(cut(found, self._piece)) if place not in missing}
        parity = {place: one.ljust(self._piece, b"\0") for place, one in self._parity.items()}
        try:
            whole = restored(pieces, data, parity)
        except ValueError:
            return False
        for place in lost:
            at = place * self._piece
            room = min(self._piece, len(found) - at)
            found[at : at + room] = whole[place][:room]
        return True
