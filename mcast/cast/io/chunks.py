"""An object as an iterable of its bytes, for a program that works on them while others are on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import RLock
from typing import Self

from typing_extensions import Buffer

from mcast.api import Handle
from mcast.cast.io.files import Sink


class Chunks(Handle, Sink):
    """The bytes of one object in order, each part when it is right: `into` of `receive` in one thread or
    task, and iterated over, by `for` or `async for`, in another. Several may share the parts.

    The iteration ends when the whole is right, and raises EOFError if that does not come. Close this where
    the receiving ends, because there may have been no object; and where the iteration stops before the end:
    the object is given up then, and its sender does not wait for it.

    ahead  so many bytes may wait here; when there are more, the sender waits for the program
    """

    name = "the program"

    def __init__(self, ahead: int = 1 << 20) -> None:
        self._ahead = ahead
        self._parts = SimpleQueue[bytes]()
        """What waits; empty bytes are the end."""
        self._came = self._taken = 0
        self._taking = RLock()
        self._begun = self._whole = self._closed = False
        self._wakes = set[Callable[[], object]]()

    def open(self) -> None:
        if self._begun or self._closed:
            raise OSError("this receiver takes one object alone")
        self._begun = True

    def ready(self) -> bool:
        return self._closed or self._came - self._taken <= self._ahead

    def write(self, data: Buffer) -> None:
        if self._closed:
            raise OSError("the program has stopped before the end")
        part = bytes(data)
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
        for wake in [*self._wakes]:
            with suppress(RuntimeError):  # its loop has been closed meanwhile
                wake()

    def _take(self, part: bytes, end: type[Exception]) -> bytes:
        if not part:
            self._put(part)  # for those that ask again
            raise end() if self._whole else EOFError("the object has not come whole")
        with self._taking:
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
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, more.set)
        self._wakes.add(wake)
        try:
            while True:
                more.clear()
                with suppress(Empty):
                    return self._take(self._parts.get_nowait(), StopAsyncIteration)
                await more.wait()
        finally:
            self._wakes.discard(wake)
