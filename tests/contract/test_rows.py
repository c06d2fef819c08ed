"""Rows of bytes are copied alike by C and by Python."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import pytest

from mcast.arguments.rows import copy_rows, copy_rows_in_python

IN_C = import_module("mcast.arguments._rows")
CopyRows = Callable[..., None]


def test_c_is_used_where_it_was_built() -> None:
    assert copy_rows is IN_C.copy_rows


@pytest.mark.parametrize("copy_rows", [IN_C.copy_rows, copy_rows_in_python], ids=["C", "Python"])
@pytest.mark.parametrize("size", [0, 1, 3, 5000])
@pytest.mark.parametrize("count", [0, 1, 20])
def test_rows_are_copied_to_their_places(copy_rows: CopyRows, size: int, count: int) -> None:
    of, to = bytes(range(251)) * 600, bytearray(120_000)
    copy_rows(to, 7, size + 2, of, 5, size + 100, size, count)
    expected = bytearray(120_000)
    for row in range(count):
        begin = 5 + row * (size + 100)
        expected[7 + row * (size + 2) : 7 + row * (size + 2) + size] = of[begin : begin + size]
    assert to == expected


WHOLE: tuple[int, ...] = (0, 10, 0, 10, 10, 10)
"""Ten rows of ten bytes in each of two memories of a hundred."""


@pytest.mark.parametrize("copy_rows", [IN_C.copy_rows, copy_rows_in_python], ids=["C", "Python"])
@pytest.mark.parametrize(
    "rows",
    [
        (1, *WHOLE[1:]),
        (-1, *WHOLE[1:]),
        (0, 11, *WHOLE[2:]),
        (0, 9, *WHOLE[2:]),
        (0, 10, 1, *WHOLE[3:]),
        (0, 10, -1, *WHOLE[3:]),
        (0, 10, 0, 11, 10, 10),
        (0, 10, 0, 9, 10, 10),
        (0, 10, 0, 10, -1, 10),
        (0, 10, 0, 10, 10, -1),
        (0, 10, 0, 10, 10, 11),
        (0, 1 << 62, 0, 10, 10, 10),
        (101, 10, 0, 10, 10, 0),
    ],
)
def test_rows_that_are_not_there_are_refused(copy_rows: CopyRows, rows: tuple[int, ...]) -> None:
    to = bytearray(100)
    at, apart, *others = WHOLE
    copy_rows(to, at, apart, bytes(range(100)), *others)
    assert to == bytes(range(100))
    at, apart, *others = rows
    with pytest.raises(ValueError, match="no such rows"):
        copy_rows(to, at, apart, bytes(100), *others)
    assert to == bytes(range(100))
    with pytest.raises((BufferError, TypeError)):
        copy_rows(bytes(100), 0, 10, to, 0, 10, 10, 10)
