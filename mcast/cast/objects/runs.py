"""Messages as they came, with pieces that follow one another taken together: most messages are pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from mcast.api import Series
from mcast.cast.nack.closed import Letters
from mcast.cast.nack.header import Rejected
from mcast.cast.nack.messages import AROUND, Piece, Spoken


class Pieces(NamedTuple):
    """Pieces first, first+1, … of a block, `pieces` of them.

    They lie in `memory` from `begin` on, and have `size` bytes each; each begins `step` bytes after the one
    before it.
    """

    session: int
    object: int
    block: int
    first: int
    pieces: int
    memory: memoryview
    begin: int
    step: int
    size: int


def in_runs(
    letters: Letters, heard: Iterable[tuple[Series, str]], refuse: Callable[[str, str], None]
) -> Iterator[tuple[Pieces | Spoken, str]]:
    """What messages of these addresses say, in order. `refuse` takes why one says nothing, and where from."""
    read: list[Piece] = []  # pieces that follow one another, each of which had to be read by itself
    for series, address in heard:
        memory, step, size, at = series.memory, series.step, series.size, 0
        while at < series.messages:
            begin = at * step
            found = letters.pieces(memory, begin, step, size, series.messages - at, address)
            if found is not None:
                at += found[-1]
                yield Pieces(*found, memory, begin + AROUND, step, size - AROUND), address
                continue
            at += 1
            try:
                spoken = letters.read(memory[begin : begin + size], address)
            except Rejected as rejected:
                refuse(str(rejected), address)
                continue
            if read and not (isinstance(spoken, Piece) and _follows(read[-1], spoken)):
                yield _joined(read), address
                read = []
            if isinstance(spoken, Piece):
                read.append(spoken)
            else:
                yield spoken, address
        if read:
            yield _joined(read), address
            read = []


def _follows(last: Piece, piece: Piece) -> bool:
    same_size = memoryview(piece.payload).nbytes == memoryview(last.payload).nbytes
    return same_size and piece[:4] == (*last[:3], last.place + 1)


def _joined(pieces: list[Piece]) -> Pieces:
    first = pieces[0]
    size = memoryview(first.payload).nbytes
    memory = memoryview(b"".join([piece.payload for piece in pieces]))
    return Pieces(*first[:4], len(pieces), memory, 0, size, size)
