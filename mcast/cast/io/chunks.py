"""An object as an iterable of chunks, to process the first bytes while the rest is still arriving."""

from __future__ import annotations

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
    """The verified bytes of one object in order, as an iterable.

    Pass this to `receive` as `into` in one thread or task, and iterate by `for` or `async for` in another.
    Several iterators may share the chunks: each chunk goes to one of them.

    The iteration ends when the complete object is verified, and raises EOFError if the object is missed.
    Close this after `receive` has ended, because no object may have arrived, and wherever the iteration stops
    early: the object is abandoned then, and its sender does not wait for it.

    ahead  maximum number of bytes that wait here; beyond it the sender waits for the program
    """

    name = "the program"
    streams = True

    def __init__(self, ahead: int = 1 << 20) -> None:
        self._ahead = ahead
        self._queue = SimpleQueue[bytes]()
        """Chunks to be consumed; empty bytes mark the end."""
        self._received = self._consumed = 0
        self._consume_lock = RLock()
        self._opened = self._complete = self._closed = False
        self._wakeups = set[Callable[[], object]]()

    def open(self) -> None:
        if self._opened or self._closed:
            raise OSError("this receiver accepts one object only")
        self._opened = True

    def ready(self) -> bool:
        return self._closed or self._received - self._consumed <= self._ahead

    def write(self, data: Buffer) -> None:
        if self._closed:
            raise OSError("the program has stopped before the end")
        chunk = bytes(data)
        self._received += len(chunk)
        self._put(chunk)

    def commit(self) -> bool:
        self._complete = True
        return True

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._put(b"")

    def _put(self, chunk: bytes) -> None:
        self._queue.put(chunk)
        for wake in [*self._wakeups]:
            with suppress(RuntimeError):  # the event loop has been closed meanwhile
                wake()

    def _consume(self, chunk: bytes, end: type[Exception]) -> bytes:
        if not chunk:
            self._put(chunk)  # for other iterators, and for another call of this one
            raise end() if self._complete else EOFError("the object is incomplete: its transfer has ended")
        with self._consume_lock:
            self._consumed += len(chunk)
        return chunk

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        return self._consume(self._queue.get(), StopIteration)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        import asyncio  # which takes long, and a program that blocks has no use for it

        more = asyncio.Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, more.set)
        self._wakeups.add(wake)
        try:
            while True:
                more.clear()
                with suppress(Empty):
                    return self._consume(self._queue.get_nowait(), StopAsyncIteration)
                await more.wait()
        finally:
            self._wakeups.discard(wake)
