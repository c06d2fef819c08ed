"""An object as an iterable of its bytes, for a program that works on them while others are on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Self

from typing_extensions import Buffer

from mcast.cast.files import Sink


class Chunks(Sink):
    """The bytes of one object in order, each part when it is right: `into` of `receive` in one thread or
    task, and iterated over, by `for` or `async for`, in another.

    The iteration ends when the whole is right, and raises EOFError if that does not come. Close this where
    the receiving ends, because there may have been no object.

    ahead  so many bytes wait here; when there are more, the sender waits for the program
    """

    name = "the program"

    def __init__(self, ahead: int = 1 << 20) -> None:
        self._ahead = ahead
        self._parts = SimpleQueue[bytes]()
        """What waits; empty bytes are the end."""
        self._came = self._taken = 0
        self._whole = self._closed = False
        self._wake: Callable[[], object] = bool

    def open(self) -> None:
        if self._closed:
            raise OSError("this receiver takes one object alone")

    def ready(self) -> bool:
        return self._came - self._taken < self._ahead  # each is changed by one thread

    def write(self, piece: Buffer) -> None:
        part = bytes(piece)
        self._came += len(part)
        self._put(part)

    def commit(self) -> bool:
        self._whole = True
        return True

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._put(b"")

    def _put(self, part: bytes) -> None:
        self._parts.put(part)
        self._wake()

    def _take(self, part: bytes, end: type[Exception]) -> bytes:
        if not part:
            self._parts.put(part)  # for those that ask again
            raise end() if self._whole else EOFError("the object has not come whole")
        self._taken += len(part)
        return part

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        return self._take(self._parts.get(), StopIteration)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        more = asyncio.Event()
        self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, more.set)
        try:
            while self._parts.empty():
                await more.wait()
                more.clear()
        finally:
            self._wake = bool
        return self._take(self._parts.get_nowait(), StopAsyncIteration)
