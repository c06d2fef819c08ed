"""Messages as they came, with pieces that follow one another taken together: most messages are pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from mcast.api import Series
from mcast.cast.protocol.auth import Authenticator
from mcast.cast.protocol.packets import DATA_HEADER_SIZE, Data, Packet, Rejected


class DataRun(NamedTuple):
    """Pieces first, first+1, … of a block, `pieces` of them.

    They lie in `memory` from `begin` on, and have `size` bytes each; each begins `step` bytes after the one
    before it.
    """

    session: int
    object: int
    block: int
    first: int
    segments: int
    memory: memoryview
    begin: int
    step: int
    size: int


def coalesced(
    authenticator: Authenticator, heard: Iterable[tuple[Series, str]], refuse: Callable[[str, str], None]
) -> Iterator[tuple[DataRun | Packet, str]]:
    """What messages of these addresses say, in order. `refuse` takes why one says nothing, and where from."""
    read: list[Data] = []  # pieces that follow one another, each of which had to be read by itself
    for series, address in heard:
        memory, step, size, at = series.memory, series.step, series.size, 0
        while at < series.messages:
            begin = at * step
            found = authenticator.decode_run(memory, begin, step, size, series.messages - at, address)
            if found is not None:
                at += found[-1]
                yield (
                    DataRun(*found, memory, begin + DATA_HEADER_SIZE, step, size - DATA_HEADER_SIZE),
                    address,
                )
                continue
            at += 1
            try:
                packet = authenticator.decode(memory[begin : begin + size], address)
            except Rejected as rejected:
                refuse(str(rejected), address)
                continue
            if read and not (isinstance(packet, Data) and _follows(read[-1], packet)):
                yield _joined(read), address
                read = []
            if isinstance(packet, Data):
                read.append(packet)
            else:
                yield packet, address
        if read:
            yield _joined(read), address
            read = []


def _follows(last: Data, segment: Data) -> bool:
    same_size = memoryview(segment.payload).nbytes == memoryview(last.payload).nbytes
    return same_size and segment[:4] == (*last[:3], last.esi + 1)


def _joined(segments: list[Data]) -> DataRun:
    first = segments[0]
    size = memoryview(first.payload).nbytes
    memory = memoryview(b"".join([segment.payload for segment in segments]))
    return DataRun(*first[:4], len(segments), memory, 0, size, size)
