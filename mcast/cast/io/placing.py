"""Received batches: segments are put into place by C, other messages are decoded.

Theory of operation. Most messages are segments. A `Placer` puts those of open blocks into place in C, a batch
in a call, and leaves the other messages to `coalesced`, which decodes them. Where the extension is not built,
and in a closed group, where each message has a tag to be verified first, `coalesced` decodes all messages. It
joins consecutive segments of a block into runs, so that a run costs one pass through Python. Segments that
lie at a fixed distance in the receive memory are not copied; others are joined into new memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from mcast.api import Batch, Series
from mcast.cast.protocol.auth import Authenticator
from mcast.cast.protocol.packets import (
    DATA_HEADER_SIZE,
    MAX_K,
    MAX_PARITY,
    Data,
    Packet,
    Rejected,
    data_header,
)
from mcast.wire.addresses import Gid

PLACER: type[Placer] | None = None
"""What places segments; None where there was no compiler."""
with suppress(ImportError):
    from mcast.cast._plane import Placer

    PLACER = Placer

_BITMAP_SIZE = (MAX_K + MAX_PARITY + 63) // 64 * 8
"""Bytes of a bitmap of segments, as a placer takes and returns it."""


def placer_for(authenticator: Authenticator) -> Placer | None:
    """Return a new placer; None if each message is to be decoded."""
    if PLACER is None or authenticator.overhead:
        return None
    return PLACER(data_header(0, 0))


def encode_bitmap(segments: int) -> bytes:
    """Return a bitmap of segments as a placer takes it."""
    return segments.to_bytes(_BITMAP_SIZE, "little")


def gid_of(address: str) -> Gid:
    """Return the GID whose `address_text` this is."""
    return Gid(address if ":" in address else f"::ffff:{address}")


def run_of(batch: Batch, memory: memoryview, first: int, count: int, begin: int, step: int) -> Series:
    """Return messages of a batch, which begin `step` bytes apart in its memory, from `begin` on."""
    one = batch[first]
    size = len(one.payload)
    payloads = one.payload if count == 1 else memory[begin : begin + (count - 1) * step + size]
    return Series(payloads, step, size, count, one.source, one.src_qp, one.from_self)


class DataRun(NamedTuple):
    """Consecutive segments `first`, `first` + 1, … of a block; `segments` is their number.

    begin  offset of the first segment in `memory`
    step   distance between the beginnings of two segments, in bytes
    size   bytes of each segment
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
    authenticator: Authenticator, received: Iterable[tuple[Series, str]], reject: Callable[[str, str], None]
) -> Iterator[tuple[DataRun | Packet, str]]:
    """Decode messages in order; yield runs of segments and other packets, each with its source address.

    received  messages and their source addresses
    reject    called with the reason and the source address of each message that is not valid
    """
    pending: list[Data] = []  # consecutive segments that had to be decoded one by one
    for series, address in received:
        memory, step, size, at = series.memory, series.step, series.size, 0
        while at < series.messages:
            begin = at * step
            run = authenticator.decode_run(memory, begin, step, size, series.messages - at, address)
            if run is not None:
                at += run[-1]
                yield (
                    DataRun(*run, memory, begin + DATA_HEADER_SIZE, step, size - DATA_HEADER_SIZE),
                    address,
                )
                continue
            at += 1
            try:
                packet = authenticator.decode(memory[begin : begin + size], address)
            except Rejected as rejected:
                reject(str(rejected), address)
                continue
            if pending and not (isinstance(packet, Data) and _is_next(pending[-1], packet)):
                yield _join(pending), address
                pending = []
            if isinstance(packet, Data):
                pending.append(packet)
            else:
                yield packet, address
        if pending:
            yield _join(pending), address
            pending = []


def _is_next(last: Data, segment: Data) -> bool:
    same_size = memoryview(segment.payload).nbytes == memoryview(last.payload).nbytes
    return same_size and segment[:4] == (*last[:3], last.esi + 1)


def _join(segments: list[Data]) -> DataRun:
    first = segments[0]
    size = memoryview(first.payload).nbytes
    memory = memoryview(b"".join([segment.payload for segment in segments]))
    return DataRun(*first[:4], len(segments), memory, 0, size, size)
