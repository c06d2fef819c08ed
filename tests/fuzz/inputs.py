"""Inputs at random, for where nothing guides them: the seeds, changed here and there."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

_TELLING = [
    b"\0",
    b"\xff",
    b"\x80",
    b"\0\0\0\0",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"-",
    b"9" * 40,
    b"[" * 40,
]


@st.composite
def changed(draw: st.DrawFn, seed: bytes) -> bytes:
    """The seed with some bytes replaced, left out, said again or put in."""
    data = bytearray(seed)
    for _ in range(draw(st.integers(0, 6))):
        begin = draw(st.integers(0, len(data)))
        end = draw(st.integers(begin, min(len(data), begin + 16)))
        again = bytes(data[begin:end]) * 2
        data[begin:end] = draw(st.one_of(st.binary(max_size=8), st.sampled_from([*_TELLING, b"", again])))
    return bytes(data)


def inputs(seeds: Sequence[bytes], most: int) -> st.SearchStrategy[bytes]:
    """Any bytes, up to `most` of them; mostly seeds that were changed."""
    return st.one_of(st.sampled_from(seeds).flatmap(changed), st.binary(max_size=200)).map(
        lambda data: data[:most]
    )
