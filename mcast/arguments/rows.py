"""Rows of bytes that begin at equal distances in memory: messages of a batch, and the payloads in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final, overload

from typing_extensions import Buffer

from mcast.arguments.buffers import flat_bytes, writable_bytes
from mcast.arguments.copies import reduce_with_copies

__all__ = ["HeaderBodyBatch", "copy_rows", "flat_rows", "list_rows"]


def copy_rows_in_python(
    to: Buffer, at: int, apart: int, of: Buffer, begin: int, step: int, size: int, count: int, /
) -> None:
    """Copy `count` rows of `size` bytes, which begin `step` bytes apart in `of`, from `begin` on.

    In `to`, which is another memory, they begin `apart` bytes apart, from `at` on. Raises ValueError where
    there are no such rows.
    """
    target, source = memoryview(to).cast("B"), memoryview(of).cast("B")
    for memory, first, distance in ((target, at, apart), (source, begin, step)):
        end = first + (count - 1) * distance + size if count else first
        if min(first, size, count) < 0 or distance < size or end > len(memory):
            raise ValueError("there are no such rows")
    for _ in range(count):
        target[at : at + size] = source[begin : begin + size]
        at, begin = at + apart, begin + step


try:
    from mcast.arguments._rows import copy_rows
except ImportError:  # there was no compiler
    copy_rows = copy_rows_in_python


def flat_rows(rows: memoryview) -> memoryview:
    """Return the bytes of a memoryview of two dimensions, row by row.

    Raises TypeError if the rows are no payloads, or lie apart.
    """
    if not rows.c_contiguous:
        raise TypeError(
            "the rows of this memoryview do not follow one another in memory: send a copy, or a list of "
            "its rows"
        )
    return flat_bytes(rows)


def list_rows(batch: memoryview | HeaderBodyBatch) -> list[memoryview]:
    """Return each row of a two-dimensional memoryview as a view of bytes, or a copy of each message."""
    rows = batch.joined() if isinstance(batch, HeaderBodyBatch) else batch
    flat = flat_rows(rows)
    if not flat.nbytes:
        return [memoryview(b"")] * len(rows)
    size = flat.nbytes // len(rows)
    return [flat[at : at + size] for at in range(0, rows.nbytes, size)]


@final  # to look at its type is quick, to ask an abstract class whether it has instances is not
@dataclass(frozen=True, slots=True, eq=False)  # what was checked stays: C relies on it
class HeaderBodyBatch(Sequence[bytes]):
    """A batch of messages of one size, each of which is a head and a body that lie apart in memory.

    Message i is row i of `heads`, followed by row i of `bodies`: two C-contiguous memoryviews of bytes with
    two dimensions, as many rows each, and no row empty. To look at a message copies both parts; to send the
    batch copies as little as the provider can (`QueuePair.send`). Raises ValueError for other views, and
    TypeError for those that are no payloads.
    """

    heads: memoryview
    bodies: memoryview

    def __post_init__(self) -> None:
        for view in (self.heads, self.bodies):
            if view.c_contiguous:
                flat_bytes(view)
            is_rows = view.ndim == 2 and view.itemsize == 1 and view.c_contiguous
            if not is_rows or (len(view) and not view.nbytes):
                raise ValueError(
                    f"a view of shape {view.shape}, format {view.format}: heads and bodies are C-contiguous "
                    "rows of bytes, and none is empty"
                )
        heads, bodies = len(self.heads), len(self.bodies)
        if heads != bodies:
            raise ValueError(f"{heads} heads for {bodies} bodies: each message has one of both")

    def __reduce__(self) -> tuple[object, ...]:
        return reduce_with_copies((self.heads, self.bodies), HeaderBodyBatch)

    @property
    def nbytes(self) -> int:
        """Of all messages."""
        return self.heads.nbytes + self.bodies.nbytes

    def into(self, memory: Buffer, begin: int = 0) -> None:
        """Write the messages into a memory, one after another, from that byte on."""
        count = len(self)
        if not count:
            return
        memory = writable_bytes(memory)
        head, body = self.heads.nbytes // count, self.bodies.nbytes // count
        apart = head + body
        copy_rows(memory, begin, apart, self.heads.cast("B"), 0, head, head, count)
        copy_rows(memory, begin + head, apart, self.bodies.cast("B"), 0, body, body, count)

    def joined(self) -> memoryview:
        """The messages as rows in memory of their own."""
        if not len(self):
            return self.bodies
        memory = memoryview(bytearray(self.nbytes))
        self.into(memory)
        return memory.cast("B", (len(self), self.nbytes // len(self)))

    def __len__(self) -> int:
        return len(self.heads)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> HeaderBodyBatch: ...
    def __getitem__(self, index: int | slice) -> bytes | HeaderBodyBatch:
        if isinstance(index, slice):
            return HeaderBodyBatch(self.heads[index], self.bodies[index])
        place = range(len(self))[index]
        return b"".join(bytes(rows[place : place + 1]) for rows in (self.heads, self.bodies))
