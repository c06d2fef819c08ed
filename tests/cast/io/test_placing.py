"""Placement of received segments in C, as far as the fuzzed comparison with Python does not reach."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import cast

import pytest

from mcast.cast.io.placing import PLACER, encode_bitmap, gid_of
from mcast.cast.protocol.packets import DATA_HEADER_SIZE, Data, data_header, encode
from mcast.contract.batch import RECORD_DTYPE
from mcast.wire.addresses import Gid
from tests.cast.batches import batch_of

from .alone import SESSION

if PLACER is None:
    pytest.skip("mcast.cast._plane is not built", allow_module_level=True)

SIZE = 16
ALL = encode_bitmap((1 << 160) - 1)
RECORD = struct.Struct("<QIII4xB1xH4x16s16sQ")


def segment(esi: int, block: int = 0, session: int = SESSION) -> tuple[bytes, str]:
    return encode(Data(session, 0, block, esi, bytes([esi + 1]) * SIZE)), "10.0.0.3"


class Placement:
    """A placer with one session, and one open block of four segments."""

    def __init__(self, need: int = 4, parity: int = 0) -> None:
        assert PLACER is not None
        self.placer = PLACER(data_header(0, 0))
        self.placer.begin(SESSION, gid_of("10.0.0.3"))
        self.memory, self.parity = bytearray(4 * SIZE), bytearray(parity * SIZE)
        self.placer.open(SESSION, 0, 0, ALL, need, self.memory, self.parity or None, SIZE, 4)

    def place(self, *messages: tuple[bytes, str], first: int = 0) -> tuple[object, ...]:
        batch = batch_of(*messages)
        return self.placer.place(batch.records, batch.memory, first)


def test_it_stops_where_a_block_is_complete() -> None:
    one = Placement(need=2)
    messages = [segment(0), segment(0), segment(3), segment(1)]
    assert one.place(*messages) == (3, [(SESSION, 0, 0, encode_bitmap(0b1001), 3)], None, 0)
    assert one.place(*messages, first=3) == (4, [(SESSION, 0, 0, encode_bitmap(0b10), 1)], None, 0)
    assert one.memory == b"\1" * SIZE + b"\2" * SIZE + bytes(SIZE) + b"\4" * SIZE


def test_it_stops_before_a_block_that_is_not_open() -> None:
    """The number of its segments is known, so that Python can pass over them."""
    one = Placement()
    messages = [segment(0), segment(0, block=7), segment(3, block=7), segment(1)]
    placed = [(SESSION, 0, 0, encode_bitmap(1), 1)]
    assert one.place(*messages) == (1, placed, (SESSION, 0, 7), 2)


def test_it_stops_at_messages_for_python() -> None:
    """Alike ones are a run; those of another session and of another address are among them."""
    one, size = Placement(), DATA_HEADER_SIZE + SIZE
    strangers = [segment(0, session=1), (segment(0)[0], "10.0.0.4")]
    messages = [segment(0), strangers[0], strangers[0], strangers[1], segment(1)]
    assert one.place(*messages)[2:] == ((size, size), 2)
    assert one.place(*messages, first=3)[0::2] == (3, (3 * size, size))


def test_parity_without_memory_is_for_python() -> None:
    assert Placement().place(segment(4)) == (0, [], (0, DATA_HEADER_SIZE + SIZE), 1)
    one = Placement(parity=1)
    assert one.place(segment(4), segment(5))[0::2] == (1, (DATA_HEADER_SIZE + SIZE,) * 2)
    assert one.parity == b"\5" * SIZE


def test_a_closed_block_and_session_are_not_written() -> None:
    one = Placement()
    one.placer.close(SESSION, 0, 0)
    assert one.place(segment(0))[2] == (SESSION, 0, 0)
    one.memory += b"free"  # the buffer is released
    one.placer.open(SESSION, 0, 0, ALL, 4, one.memory, None, SIZE, 4)
    one.placer.end(SESSION)
    assert one.place(segment(0))[2] == (0, DATA_HEADER_SIZE + SIZE)
    one.memory += b"free"
    assert not any(one.memory[: 4 * SIZE])


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 1 << 31), (1 << 63, 42), ((1 << 64) - 1, 42), (1, 42), (42, 1), (0, 43)],
)
def test_a_record_outside_of_memory_is_refused(offset: int, length: int) -> None:
    one, (message, _) = Placement(), segment(0)
    assert RECORD.size == RECORD_DTYPE["itemsize"]
    record = RECORD.pack(offset, length, 7, 0, 0, 0, gid_of("10.0.0.3"), bytes(Gid("ff0e::1")), 0)
    with pytest.raises(ValueError, match="outside of the memory"):
        one.placer.place(record, message, 0)
    with pytest.raises(ValueError, match="no such records"):
        one.placer.place(record[1:], message, 0)
    with pytest.raises(ValueError, match="no such records"):
        one.placer.place(record, message, 2)
    assert not any(one.memory)


BAD_BLOCKS: list[Callable[[Placement], object]] = [
    lambda it: it.placer.open(SESSION + 1, 0, 0, ALL, 4, None, None, SIZE, 4),
    lambda it: it.placer.open(SESSION, 0, 0, ALL[1:], 4, None, None, SIZE, 4),
    lambda it: it.placer.open(SESSION, 0, 0, ALL, 4, None, None, 0, 4),
    lambda it: it.placer.open(SESSION, 0, 0, ALL, 4, None, None, SIZE, 129),
    lambda it: it.placer.open(SESSION, 0, 0, ALL, 4, None, None, 1 << 15, 4),
    lambda it: it.placer.begin(SESSION, gid_of("10.0.0.3")),
    lambda it: it.placer.begin(1, b"short"),
    lambda it: [*map(it.placer.begin, range(65), [bytes(16)] * 65)],
    lambda it: type(it.placer)(b"short"),
]


@pytest.mark.parametrize("call", BAD_BLOCKS)
def test_what_cannot_be_is_refused(call: Callable[[Placement], object]) -> None:
    with pytest.raises(ValueError, match=r"there (is|can be) no such|26 bytes"):
        call(Placement())
    with pytest.raises((BufferError, TypeError)):
        Placement().placer.open(SESSION, 0, 0, ALL, 4, cast(bytearray, b"read-only"), None, SIZE, 4)


def test_a_short_memory_takes_what_fits() -> None:
    one, memory = Placement(), bytearray(SIZE + 3)
    one.placer.open(SESSION, 0, 0, ALL, 0, memory, None, SIZE, 4)
    one.place(segment(1), segment(2), segment(3))
    assert memory == bytes(SIZE) + b"\2" * 3


def test_two_threads_do_not_place_at_once() -> None:
    """One of them is refused, or comes later; no segment is written twice, and none is lost."""
    one, refused = Placement(need=0), list[str]()
    batch = batch_of(*[segment(esi % 4) for esi in range(4000)])
    records, memory, seen = batch.records, batch.memory, list[int]()

    def places() -> None:
        for _ in range(50):
            try:
                placed = one.placer.place(records, memory, 0)[1]
            except RuntimeError as error:
                refused.append(str(error))
            else:
                seen.extend(messages for *_, messages in placed)

    threads = [threading.Thread(target=places) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {*refused} <= {"another call of this placer is running"}
    assert sum(seen) == 4000 * (100 - len(refused))
