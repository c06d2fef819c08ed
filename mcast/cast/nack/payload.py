"""The bytes of blocks: the sender's cut into pieces with their parity, the receiver's joined and checked."""

from __future__ import annotations

from collections.abc import Mapping

from blake3 import blake3
from typing_extensions import Buffer

from mcast.cast.nack.messages import Sealed
from mcast.cast.nack.parity import parity_of, restored


class Digest:
    """A BLAKE3 digest of what has come so far: of a block, or of an object."""

    def __init__(self, data: bytes = b"") -> None:
        self._hash = blake3(data)

    def update(self, data: Buffer) -> None:
        """Take in what follows."""
        self._hash.update(data)

    def __bytes__(self) -> bytes:
        return bytes(self._hash.digest())


class BlockBytes:
    """A block that is sent: its pieces, and its parity pieces when they are asked for."""

    def __init__(self, data: bytes, piece: int, width: int) -> None:
        self.sealed: Sealed = Sealed(-(-len(data) // piece), len(data), bytes(Digest(data)))
        self._data, self._piece, self._width = data, piece, width
        self._parity: list[bytes] | None = None

    def piece(self, place: int) -> bytes:
        """The piece at that place: a data piece below the width, else a parity piece."""
        if place < self._width:
            return self._data[place * self._piece : (place + 1) * self._piece]
        if self._parity is None:
            self._parity = parity_of(cut(self._data, self._piece))
        return self._parity[place - self._width]


def cut(data: bytes, piece: int) -> list[bytes]:
    """The pieces of a block, the last one filled up with zeros."""
    found = [data[at : at + piece] for at in range(0, len(data), piece)]
    found[-1] = found[-1].ljust(piece, b"\0")
    return found


def joined(sealed: Sealed, pieces: Mapping[int, bytes], piece: int, width: int) -> bytes | None:
    """The bytes of a block of which enough pieces are there; None if they are not what the seal says."""
    if any(len(one) > piece for one in pieces.values()):
        return None
    data = {place: one.ljust(piece, b"\0") for place, one in pieces.items() if place < sealed.pieces}
    parity = {place - width: one.ljust(piece, b"\0") for place, one in pieces.items() if place >= width}
    try:
        whole = b"".join(restored(sealed.pieces, data, parity))[: sealed.size]
    except ValueError:
        return None
    return whole if bytes(Digest(whole)) == sealed.digest else None
