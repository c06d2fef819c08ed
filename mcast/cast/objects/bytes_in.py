"""Where the bytes of an object go: into memory, into a buffer of the caller's, into a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from typing_extensions import Buffer

from mcast.cast.files import NewFile, Sink

Target = Buffer | os.PathLike[str] | None
"""A writable buffer, the path of a file, or None for new memory."""


class Offered(NamedTuple):
    """What a sender says of an object before its bytes come. Do not use `name` as a path without a check.

    name      of the object, at most 64 bytes, printable
    size      in bytes; None where only the end will tell
    metadata  at most 512 bytes
    sender    the name that the sender gives itself
    address   the address that the sender sends from
    number    of the object in the sender's session, from 0
    """

    name: str
    size: int | None
    metadata: bytes
    sender: str
    address: str
    number: int


Into = Target | Callable[[Offered], Target]
"""Where objects go: one place, or what a function says of each object; it may raise OSError to refuse one."""


class ToMemory(Sink):
    """New memory, at most so many bytes."""

    name = "memory"

    def __init__(self, most: int) -> None:
        self.data: bytearray = bytearray()
        self._most = most

    def write(self, piece: bytes) -> None:
        if len(self.data) + len(piece) > self._most:
            raise _too_large(self._most)
        self.data += piece


class ToBuffer(Sink):
    """A buffer of the caller's, which one object at a time may fill."""

    name = "the buffer"

    def __init__(self, buffer: Buffer) -> None:
        view = memoryview(buffer)
        if view.readonly or not view.c_contiguous:
            raise TypeError(f"into: this {type(buffer).__name__} is not writable, or its rows lie apart")
        self.view: memoryview[int] = view.cast("B") if view.nbytes else memoryview(bytearray())
        self.size: int = 0

    def write(self, piece: bytes) -> None:
        end = self.size + len(piece)
        if end > len(self.view):
            raise _too_large(len(self.view))
        self.view[self.size : end] = piece
        self.size = end


def sink_of(place: Target, size: int | None, most: int) -> Sink:
    """The sink for an object of that size. Raises OSError if the object is larger than the place."""
    if isinstance(place, os.PathLike):
        return NewFile(Path(os.path.realpath(place)), os.fspath(place))
    sink = ToMemory(most) if place is None else ToBuffer(place)
    room = most if isinstance(sink, ToMemory) else len(sink.view)
    if size is not None and size > room:
        raise _too_large(room)
    return sink


def _too_large(room: int) -> OSError:
    return OSError(f"the object is larger than the {room} bytes that there are for it")
