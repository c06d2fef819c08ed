"""Framing of segments in C, and in Python, which is the oracle."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcast.api import list_rows
from mcast.cast.protocol import blocks as module
from mcast.cast.protocol.blocks import MIN_BATCH, Framer, SourceBlock, frame, frame_in_python
from mcast.cast.protocol.packets import (
    DATA_HEADER_SIZE,
    MAX_BLOCKS,
    MAX_K,
    MAX_PARITY,
    MAX_SEGMENT,
    Data,
    Describe,
    data_header,
    encode,
)
from mcast.cast.protocol.repairs import SegmentRange

IN_C = import_module("mcast.cast._plane")
BOTH = pytest.mark.parametrize("way", [IN_C.frame, frame_in_python], ids=["C", "Python"])
HEADER = data_header(0x0102030405060708, 0x090A0B0C)

Way = Callable[..., None]


def test_c_is_used_where_it_is_built() -> None:
    assert frame is IN_C.frame


@BOTH
@pytest.mark.parametrize(("first", "k"), [(0, 128), (126, 128), (3, 4), (0, 1), (128, 128), (9, 7)])
def test_headers_are_those_of_data_packets(way: Way, first: int, k: int) -> None:
    """Source segments lead into the next block; parity stays in its block."""
    memory, count = bytearray(7 + 20 * 126), 20
    segments = bytes(range(100)) * 25
    way(memory, 7, HEADER, k, 5, first, count, segments, 3, 100)
    assert memory[:7] == bytes(7)
    for number in range(count):
        block, esi = (5, first + number) if first >= k else (5 + (first + number) // k, (first + number) % k)
        payload = segments[3 + number * 100 :][:100]
        message = encode(Data(0x0102030405060708, 0x090A0B0C, block, esi, payload))
        assert memory[7 + number * 126 :][:126] == message


NUMBERS = {
    "at": st.integers(-2, 400),
    "k": st.integers(-1, MAX_K + 1),
    "block": st.integers(-1, 9) | st.integers(MAX_BLOCKS - 9, MAX_BLOCKS + 1),
    "first": st.integers(-1, MAX_K + MAX_PARITY + 1),
    "count": st.integers(-1, 40) | st.just((1 << 62) + 1),
    "begin": st.integers(-1, 200) | st.just(1 << 62),
    "size": st.integers(-1, 40) | st.sampled_from([MAX_SEGMENT, MAX_SEGMENT + 1, 1 << 62]),
}


@given(
    st.fixed_dictionaries(NUMBERS),
    st.integers(DATA_HEADER_SIZE - 1, DATA_HEADER_SIZE + 1),
    st.integers(0, 2000),
)
def test_c_and_python_do_and_refuse_the_same(numbers: dict[str, int], header: int, room: int) -> None:
    at, k, block, first, count, begin, size = numbers.values()
    found = []
    for way in (IN_C.frame, frame_in_python):
        memory = bytearray(room)
        try:
            way(
                memory,
                at,
                HEADER.ljust(header)[:header],
                k,
                block,
                first,
                count,
                bytes(range(200)),
                begin,
                size,
            )
        except ValueError:
            found.append("there are no such segments")
            assert not any(memory)
        else:
            found.append(memory.hex())
    assert found[0] == found[1]


@BOTH
@pytest.mark.parametrize(
    "change",
    [
        {"header": bytes(DATA_HEADER_SIZE - 1)},
        {"at": 1},
        {"at": -1},
        {"k": 0},
        {"k": MAX_K + 1},
        {"block": -1},
        {"block": MAX_BLOCKS - 1},
        {"first": -1},
        {"first": MAX_K + MAX_PARITY - 1},
        {"first": sys.maxsize},
        {"count": -1},
        {"count": 3},
        {"begin": 1},
        {"begin": -1},
        {"size": -1},
        {"size": MAX_SEGMENT + 1},
    ],
    ids=str,
)
def test_what_is_out_of_bounds_is_refused(way: Way, change: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "to": bytearray(2 * 126),
        "at": 0,
        "header": HEADER,
        "k": 4,
        "block": 0,
        "first": 3,
        "count": 2,
    }
    given |= {"segments": bytes(200), "begin": 0, "size": 100}
    way(*given.values())
    given["to"] = bytearray(2 * 126)
    with pytest.raises(ValueError, match="there are no such segments"):
        way(*(given | change).values())
    assert not any(given["to"])


def test_c_writes_to_writable_memory_alone() -> None:
    with pytest.raises((TypeError, BufferError)):
        IN_C.frame(bytes(DATA_HEADER_SIZE), 0, HEADER, 4, 0, 0, 1)
    with pytest.raises(TypeError):
        IN_C.frame(bytearray(126), 0, HEADER, 4, 0, 0, 1, None, 0, 100)


def runs_of(blocks: int) -> st.SearchStrategy[list[SegmentRange]]:
    """Runs of segments, mostly neighbours of the one before."""
    one = st.tuples(st.integers(0, blocks - 1), st.integers(0, MAX_PARITY + 7), st.integers(1, 50))
    return st.lists(one.map(lambda it: SegmentRange(*it)), max_size=9)


@given(st.data(), st.integers(1, 24), st.integers(1, 3000), st.booleans())
def test_framers_agree_on_random_objects(data: st.DataObject, k: int, size: int, is_whole: bool) -> None:
    """Objects in one memory, and block by block: the same messages in C and in Python, and by `encode`."""
    segment = 16
    content = data.draw(st.randoms(use_true_random=False)).randbytes(size)
    starts = range(0, size, k * segment)

    def parity_segments(data: memoryview, segment: int, count: int) -> list[bytes]:
        return [bytes((row + data[0]) % 256 for row in range(at, at + segment)) for at in range(count)]

    whole = memoryview(content)
    blocks = [
        SourceBlock(whole, segment, k, bytes(32), at, min(k * segment, size - at))
        if is_whole
        else SourceBlock(content[at : at + k * segment], segment, k, bytes(32))
        for at in starts
    ]
    about = Describe(7, 3, size, segment, k, MAX_PARITY, 0, 0, "", b"")
    runs = []
    for block, first, count in data.draw(runs_of(len(blocks))):
        last = blocks[block].info.segments if first < k else k + MAX_PARITY
        if first < last:
            runs.append(SegmentRange(block, first, min(count, last - first)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "parity_segments", parity_segments)
        expected = [
            encode(Data(7, 3, run.block, esi, blocks[run.block].segment(esi)))
            for run in runs
            for esi in range(run.first, run.first + run.segments)
        ]
        for way in (IN_C.frame, frame_in_python):
            patch.setattr(module, "frame", way)
            batches = Framer(DATA_HEADER_SIZE + segment).packets(
                about, [(blocks[run.block], run) for run in runs]
            )
            assert [bytes(row) for batch in batches for row in list_rows(batch)] == expected


def test_neighbouring_blocks_are_one_batch() -> None:
    """Three blocks of one memory, and the first half of the fourth; then one that is elsewhere."""
    content = memoryview(bytes(range(256)) * 64)
    blocks = [SourceBlock(content, 16, 32, bytes(32), at, 512) for at in range(0, 2048, 512)]
    runs = [
        *(SegmentRange(block, 0, 32) for block in range(3)),
        SegmentRange(3, 0, MIN_BATCH),
        SegmentRange(0, 0, 32),
    ]
    about = Describe(7, 3, 1 << 20, 16, 32, 0, 0, 0, "", b"")
    batches = [len(one) for one in Framer(1000).packets(about, [(blocks[run.block], run) for run in runs])]
    assert batches == [3 * 32 + MIN_BATCH, 32]
