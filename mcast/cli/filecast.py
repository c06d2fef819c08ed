"""A file as multicast messages, and back. A message is the 8-byte offset of its piece, and the piece."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import BinaryIO

HEADER = struct.Struct("!Q")


def count_pieces(size: int, piece: int) -> int:
    """How many messages a file of `size` bytes takes, `piece` bytes of it in each."""
    return -(-size // piece)


def read_pieces(file: BinaryIO, piece: int, window: int) -> Iterator[list[bytes]]:
    """The file's messages in order, in lists of at most `window`."""
    offset = 0
    while block := file.read(piece * window):
        yield [
            HEADER.pack(offset + start) + block[start : start + piece]
            for start in range(0, len(block), piece)
        ]
        offset += len(block)


class Reassembly:
    """Puts a file together from messages that may be lost, doubled or out of order, and hashes it.

    Holds only what came early: at most `window` pieces wait for one before them, then that one is lost
    for good, and with it the digest.
    """

    def __init__(self, size: int, piece: int, window: int) -> None:
        self.bytes = self.received = 0
        self._size, self._piece, self._window = size, piece, window
        self._seen = bytearray(count_pieces(size, piece))
        self._early: dict[int, bytes] = {}
        self._hash = hashlib.sha256()
        self._next = 0
        self._intact = True

    @property
    def lost(self) -> int:
        """The messages that have not come so far."""
        return len(self._seen) - self.received

    @property
    def digest(self) -> str | None:
        """SHA-256 of the file in hex; None if a part is missing."""
        return self._hash.hexdigest() if self._intact and not self.lost else None

    def add(self, message: memoryview) -> int | None:
        """Take a message; return the number of its piece, or None if it is no piece of this file."""
        if message.nbytes < HEADER.size:
            return None
        (offset,) = HEADER.unpack_from(message)
        number, rest = divmod(offset, self._piece)
        length = message.nbytes - HEADER.size
        if rest or offset >= self._size or length != min(self._piece, self._size - offset):
            return None
        if not self._seen[number]:
            self._seen[number] = 1
            self.received += 1
            self.bytes += length
            if self._intact:
                self._place(number, message[HEADER.size :])
        return int(number)

    def _place(self, number: int, piece: memoryview) -> None:
        if number == self._next:
            self._hash.update(piece)
            self._next += 1
            while self._next in self._early:
                self._hash.update(self._early.pop(self._next))
                self._next += 1
        elif len(self._early) < self._window:
            self._early[number] = bytes(piece)
        else:
            self._intact = False
            self._early.clear()
