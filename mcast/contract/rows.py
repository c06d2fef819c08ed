"""Rows of bytes that begin at equal distances in memory: messages of a batch, and the payloads in them."""

from __future__ import annotations

from mcast.interrupts import copy_rows

__all__ = ["copy_rows", "rows_of"]


def rows_of(rows: memoryview) -> list[memoryview]:
    """Each row of a memoryview of two dimensions, as a view of bytes."""
    if not rows.nbytes:
        return [memoryview(b"")] * len(rows)
    flat, size = rows.cast("B"), rows.nbytes // len(rows)
    return [flat[at : at + size] for at in range(0, rows.nbytes, size)]
