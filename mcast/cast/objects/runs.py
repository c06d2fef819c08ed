"""Messages as they came, with pieces that follow one another taken together: most messages are pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from typing_extensions import Buffer

from mcast.cast.nack.closed import Letters
from mcast.cast.nack.header import Rejected
from mcast.cast.nack.messages import AROUND, Piece, Spoken


class Pieces(NamedTuple):
    """Pieces first, first+1, … of a block. Each is what its message has after the first `skip` bytes."""

    session: int
    object: int
    block: int
    first: int
    skip: int
    messages: list[Buffer]


def in_runs(
    letters: Letters, messages: Iterable[tuple[Buffer, str]], refuse: Callable[[str, str], None]
) -> Iterator[tuple[Pieces | Spoken, str]]:
    """What messages of these addresses say, in order. `refuse` takes why one says nothing, and where from."""
    run: Pieces | None = None
    at, follows = "", (0, 0, 0, 0)
    for message, address in messages:
        skip, found = AROUND, letters.piece(message, address)
        if found is None:
            try:
                spoken = letters.read(message, address)
            except Rejected as rejected:
                refuse(str(rejected), address)
                continue
            if not isinstance(spoken, Piece):
                if run is not None:
                    yield run, at
                    run = None
                yield spoken, address
                continue
            skip, message = 0, spoken.payload
            found = spoken[:4]
        if run is not None and found == follows:
            run.messages.append(message)
        else:
            if run is not None:
                yield run, at
            run, at = Pieces(*found, skip, [message]), address
        session, number, block, place = found
        follows = session, number, block, place + 1
    if run is not None:
        yield run, at
