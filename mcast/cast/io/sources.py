"""Sources of the bytes of an object, and the buffer of its blocks until no receiver can need them.

`source_of` wraps what a program sends into a `ByteSource`. `SendBuffer` reads blocks from it as the protocol
asks for them, computes their digests, and keeps them for repairs. A source never waits for a pipe, a terminal
or a socket: it returns None, and is asked again in a later step.
"""

from __future__ import annotations

import os
import select
import socket
import stat
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from io import BufferedRandom, BufferedReader, BufferedWriter, BytesIO, FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast

from typing_extensions import Buffer

from mcast.api import HeaderBodyBatch, McastError, Region
from mcast.arguments.buffers import flat_bytes, is_buffer
from mcast.arguments.file_objects import SupportsRead, read_some
from mcast.cast.io.files import Source, native
from mcast.cast.io.workers import Task, Workers
from mcast.cast.protocol.blocks import Digest, Framer, SourceBlock
from mcast.cast.protocol.outgoing import MAX_READ_AHEAD
from mcast.cast.protocol.packets import UNKNOWN_BLOCKS, UNKNOWN_SIZE, Describe
from mcast.cast.protocol.repairs import SegmentRange
from mcast.cast.protocol.sender import ObjectSender
from mcast.endpoint.waiting import call_user

if TYPE_CHECKING:
    import asyncio

_CPU_DEVICES = (1, 3)
"""DLPack device types of memory that the CPU can read: kDLCPU, and kDLCUDAHost (pinned host memory)."""

MAX_REGISTERED, MIN_REGISTERED = 64 << 20, 1 << 20
"""Maximum and minimum number of bytes to register with a device at once: pinning pages takes time."""

_MAX_READ_AHEAD = 1 << 20
"""Maximum number of bytes read from an async iterable before they are sent."""

Lend = Callable[[memoryview], Region | None]
"""Registers memory that does not change while it is sent; returns None if that is not possible."""


def lend_nothing(part: memoryview) -> None:
    """Register nothing, for a session without a queue pair."""


class Tensor(Protocol):
    """An array of another library, in memory that the CPU can read."""

    def __dlpack__(self, *, stream: None = None) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


Sendable = (
    Buffer
    | os.PathLike[str]
    | Source
    | SupportsRead
    | Tensor
    | Iterable[Buffer | Tensor]
    | AsyncIterable[Buffer | Tensor]
)
"""Data that can be sent as an object.

- A buffer, such as bytes or a numpy array: contiguous memory without Python objects; or a tensor with
  `__dlpack__`.
- The path of a file, or an open binary file from its current position. A regular file ends where it ends
  now, a pipe when its writer closes it. A `mcast.cast.io.files.Source` is closed after the transfer.
- An iterable of buffers, of any length. It is asked for more as receivers accept what it has given.
- With a membership of `mcast.aio`, also an async iterable of buffers: other tasks run while it waits.
"""


class ByteSource(Protocol):
    """Origin of the bytes of an object. `size` is None if unknown before the end."""

    size: int | None

    def read(self, size: int) -> bytes | memoryview | None:
        """Return the next bytes, about `size` of them; empty at the end, None if there are none yet."""

    def rewind(self) -> bool:
        """Continue with the first byte; return False if that is not possible."""

    def suspend(self) -> None:
        """Free resources that `rewind` can take again."""

    def close(self) -> None:
        """Free all resources."""


class _NothingToSuspend:
    """Source of which `suspend` frees nothing: the buffer or the file belongs to the caller."""

    def suspend(self) -> None:
        pass


class MemorySource:
    """A contiguous buffer, sent from where it is.

    A large buffer is registered with the device in parts, which the device sends from directly. Messages of a
    part that is not registered are copied.
    """

    def __init__(self, data: Buffer) -> None:
        self.view: memoryview = flat_bytes(data)
        self.size: int | None = self.view.nbytes
        self._at = self._lent_end = 0
        self._region: Region | None = None
        self.lend: Lend = lend_nothing

    def read(self, size: int) -> memoryview:
        if self._at >= self._lent_end:
            self._lend_next()
        data = self.view[self._at : self._at + size]
        self._at += len(data)
        return data

    def _lend_next(self) -> None:
        self.suspend()
        self._lent_end = self._at + MAX_REGISTERED
        part = self.view[self._at : self._lent_end]
        if part.nbytes >= MIN_REGISTERED:
            self._region = self.lend(part)

    def rewind(self) -> bool:
        self._at = self._lent_end = 0
        return True

    def suspend(self) -> None:
        """Deregister the memory."""
        region, self._region, self._lent_end = self._region, None, 0
        if region is not None:
            with suppress(McastError):  # the queue pair's end deregisters the memory then
                region.close()

    def close(self) -> None:
        self.suspend()
        self.view.release()


class OpenFileSource(_NothingToSuspend):
    """The rest of an open binary file, which stays open.

    A pipe, a terminal or a socket is read when it is ready; a read of any other file may block.
    """

    def __init__(self, file: SupportsRead) -> None:
        if hasattr(file, "encoding"):
            raise TypeError(f"{type(file).__name__} is open as text: open the file in binary mode")
        self.size: int | None = _remaining_size(file)
        self._remaining = self.size
        self._file = cast(Any, file)
        self._start: int = 0 if self.size is None else self._file.tell()
        self._poll = None if self.size is not None else poll_of(file, select.POLLIN)
        self._method = "read1" if self._poll is not None and hasattr(file, "read1") else "read"

    def read(self, size: int) -> bytes | None:
        if self._poll is not None and not self._poll.poll(0):
            return None
        if self._remaining is not None:
            size = min(size, self._remaining)
        data = call_user(read_some, self._file, size, self._method)
        if self._remaining is not None:
            self._remaining -= len(data or b"")
        return data

    def rewind(self) -> bool:
        if self.size is not None:
            self._file.seek(self._start)
            self._remaining = self.size
        return self.size is not None

    def close(self) -> None:
        """The file stays open."""


class IterableSource(_NothingToSuspend):
    """The concatenated buffers of an iterable."""

    def __init__(self, buffers: Iterable[Buffer | Tensor]) -> None:
        self.size: int | None = None
        self._buffers = iter(buffers)
        self._rest = memoryview(b"")

    def read(self, size: int) -> bytes:
        while not self._rest:
            try:
                buffer = call_user(next, self._buffers)
            except StopIteration:
                return b""
            self._rest = memoryview(_bytes_of(buffer))
        data, self._rest = self._rest[:size], self._rest[size:]
        return bytes(data)

    def rewind(self) -> bool:
        return False

    def close(self) -> None:
        """Leave the iterator to the caller."""


class AsyncIterableSource(_NothingToSuspend):
    """The concatenated buffers of an async iterable, which a task reads slightly ahead of the sender."""

    def __init__(self, buffers: AsyncIterable[Buffer | Tensor]) -> None:
        self.size: int | None = None
        self._buffers = buffers
        self._ready = bytearray()
        import asyncio  # which takes long, and a program that blocks has no use for it

        self._consumed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def _read_ahead(self) -> None:
        async for buffer in self._buffers:
            self._ready += _bytes_of(buffer)
            while len(self._ready) >= _MAX_READ_AHEAD:
                self._consumed.clear()
                await self._consumed.wait()

    def read(self, size: int) -> bytes | None:
        if self._task is None:
            import asyncio

            self._task = asyncio.get_running_loop().create_task(self._read_ahead())
        if not self._ready:
            if not self._task.done():
                return None
            self._task.result()
        data = bytes(self._ready[:size])
        del self._ready[:size]
        self._consumed.set()
        return data

    def rewind(self) -> bool:
        return False

    def close(self) -> None:
        """Cancel the task, and leave the iterator to the caller."""
        if self._task is not None and not self._task.cancel() and not self._task.cancelled():
            self._task.exception()  # otherwise asyncio logs that the exception was never retrieved


def _bytes_of(buffer: Buffer | Tensor) -> bytes:
    memory = memory_of(buffer)
    if memory is None:
        raise TypeError(f"{type(buffer).__name__} is not a buffer: the iterable must yield buffers")
    return bytes(memory)


def poll_of(file: object, events: int) -> select.poll | None:
    """Return a poll object that tells when a pipe, a terminal or a socket is ready; None for other files.

    None, too, if anything between the program and the descriptor may hold bytes back or change them: a
    compressed file, TLS, an HTTP response, a wrapper or a subclass of the caller's.
    """
    raw = _raw_of(file)
    if raw is None or (type(raw) is not FileIO and type(getattr(raw, "_sock", None)) is not socket.socket):
        return None
    try:
        fd = raw.fileno()
    except OSError:  # io.UnsupportedOperation is one
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return None
    poll = select.poll()
    poll.register(fd, events)
    return poll


def _raw_of(file: object) -> FileIO | socket.SocketIO | None:
    """Return the unbuffered file or socket whose bytes `file` passes on unchanged; None for other objects.

    Only exact types count: a subclass may change the bytes.
    """
    raw: object = file
    if isinstance(file, BufferedReader | BufferedWriter | BufferedRandom):
        raw = file.raw if type(file) in (BufferedReader, BufferedWriter, BufferedRandom) else None
    return raw if type(raw) is FileIO or type(raw) is socket.SocketIO else None


def _remaining_size(file: object) -> int | None:
    """Return the number of bytes after the file's position; None if unknown before the end.

    It is unknown for a file of the caller's own class, which may read more or fewer bytes than its size.
    """
    known = file if type(file) is BytesIO else _raw_of(file)
    if known is None or isinstance(file, BufferedWriter) or not known.seekable():
        return None
    opened = cast(BinaryIO, file)
    at = opened.tell()
    end = opened.seek(0, os.SEEK_END)
    opened.seek(at)
    return max(0, end - at)


def source_of(data: Sendable) -> ByteSource:
    """Open a source for the data. Raises OSError if a file cannot be read, TypeError for unsuitable types."""
    if isinstance(data, Source):
        return data
    if isinstance(data, os.PathLike):
        return Source(str(Path(native(data)).absolute()))
    if isinstance(data, str):
        raise TypeError("str cannot be sent: give a path as pathlib.Path, and a text as text.encode()")
    if (memory := memory_of(data)) is not None:
        return MemorySource(memory)
    if hasattr(data, "read"):
        return OpenFileSource(cast(SupportsRead, data))
    if isinstance(data, Iterable):
        return IterableSource(data)
    if isinstance(data, AsyncIterable):
        return AsyncIterableSource(data)
    raise TypeError(
        f"{type(data).__name__} cannot be sent: give a buffer, a tensor, a path, an open binary file or "
        "an iterable of buffers"
    )


def memory_of(data: object) -> memoryview | None:
    """Return the bytes of a buffer or a tensor; None for other objects.

    Raises TypeError for a buffer that cannot be a payload, and for a tensor that the CPU cannot read or whose
    type numpy does not have.
    """
    if is_buffer(data):
        return flat_bytes(cast(Buffer, data))
    if not hasattr(data, "__dlpack__"):
        return None
    kind = type(data).__name__
    try:
        import numpy
    except ImportError:
        raise TypeError(
            f"{kind} has __dlpack__, which needs numpy to be read: python -m pip install numpy"
        ) from None
    tensor = cast(Any, data)
    if tensor.__dlpack_device__()[0] not in _CPU_DEVICES:
        raise TypeError(f"{kind} is in the memory of a device: copy the tensor to the CPU first")
    try:
        array: Any = numpy.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{kind}: {error}; view a tensor of a type that numpy does not have as bytes"
        ) from None
    return flat_bytes(array)


class SendBuffer:
    """Blocks of one object, kept until no receiver can need them or until a carousel sends them again.

    Blocks are read ahead of those that the protocol wants, and a thread computes their digests meanwhile. Of
    a stream it is one block, because its source may wait for somebody.

    about    description of the object
    offered  number of blocks that were offered to the protocol, in this cycle of a carousel
    size     number of bytes that were offered, in the first cycle of a carousel
    done     bytes that no receiver can need any more; for a carousel, bytes sent in this cycle
    """

    def __init__(
        self, source: ByteSource, about: Describe, workers: Workers, expected: bytes | None = None
    ) -> None:
        """Buffer the blocks of an object; `expected` is the digest of its bytes, if it was sent before."""
        self._source, self._workers, self._expected = source, workers, expected
        self.about: Describe = about
        self._blocks: dict[int, SourceBlock] = {}
        self._next_bytes: bytes | bytearray | memoryview = b""
        """Bytes read ahead: less than a block, unless the source returned more than it was asked for."""
        self._released = 0
        self.offered: int = 0
        self.size: int = 0
        self.done: int = 0
        self._digest = Digest()
        self._hashing: Task[list[SourceBlock]] | None = None
        """Blocks that were read, and whose digests are being computed."""
        self._hashed = deque[SourceBlock]()
        """Blocks whose digests are known, and which the protocol did not want yet."""
        self._remaining = None if about.size == UNKNOWN_SIZE else about.size
        self._read_all = False
        """True at the end of a stream."""

    def offer(self, core: ObjectSender) -> bool:
        """Offer as many blocks as `core` wants; return False if the source has no bytes for another one yet.

        Raises OSError if the object is shorter than its size, or has changed since an earlier cycle.
        """
        outgoing = core.outgoing
        if outgoing is None:
            return True
        if outgoing.offered < self.offered:
            self._rewind()
        while self._released < outgoing.released:
            self.done += self._blocks.pop(self._released).info.size
            self._released += 1
        for _ in range(core.blocks_wanted):
            if not self._hashed:
                is_first = not outgoing.cycles
                self._read_ahead(is_first)
                hashing, self._hashing = self._hashing, None
                if hashing is not None:
                    self._hashed.extend(hashing.result())
                    if self._workers.threads:
                        self._read_ahead(is_first)
                elif self._read_all or self._remaining == 0:
                    self._end(core)
                    break
                else:
                    return False
            block = self._blocks[self.offered] = self._hashed.popleft()
            if outgoing.expected_info not in (None, block.info):
                raise OSError(f"{self._subject} has changed while it was sent")
            if not outgoing.cycles:
                self.size += block.info.size
            core.offer(block.info)
            self.offered += 1
        return True

    def _end(self, core: ObjectSender) -> None:
        digest = bytes(self._digest)
        if self._expected not in (None, digest):
            raise OSError(f"{self._subject} has changed since it was published: publish it as a new version")
        core.end(digest)

    def _read_ahead(self, is_first: bool) -> None:
        """Read blocks, and have their digests computed, unless a thread does that already."""
        if self._hashing is None and (found := self._read()):
            size = sum([size for _, _, size in found])
            self._hashing = self._workers.submit(partial(self._hash, found, is_first), size)

    def _hash(self, found: list[tuple[memoryview, int, int]], is_first: bool) -> list[SourceBlock]:
        """Return the blocks with their digests; a thread calls it for one batch of blocks after the other."""
        blocks: list[SourceBlock] = []
        about, digest = self.about, None
        for memory, begin, size in found:
            if is_first:
                self._digest.update(memory[begin : begin + size])
            if not about.carousel:
                digest = bytes(self._digest)
            blocks.append(SourceBlock(memory, about.segment, about.k, digest, begin, size))
        return blocks

    def _rewind(self) -> None:
        """Begin another cycle of a carousel."""
        self._drop()
        self._source.rewind()
        self._remaining = self.about.size
        self._released = self.offered = self.done = 0

    def suspend(self) -> None:
        """Free blocks and source while a carousel sends other objects; the next `offer` rewinds."""
        self._drop()
        self._source.suspend()
        self.offered = UNKNOWN_BLOCKS  # more than `core` has, which makes `offer` rewind

    @property
    def _subject(self) -> str:
        """The object in error messages, by name if it is one of several."""
        return f"the object {self.about.name}" if self.about.carousel > 1 else "the object"

    def close(self) -> None:
        """Drop the blocks, which may be views of the caller's memory."""
        self._drop()

    def _drop(self) -> None:
        """Drop all blocks, once no thread uses them."""
        hashing, self._hashing = self._hashing, None
        if hashing is not None:
            with suppress(Exception):  # of blocks that nobody asks for any more
                hashing.result()
        self._hashed.clear()
        self._blocks.clear()
        self._next_bytes = b""

    def _read(self) -> list[tuple[memoryview, int, int]]:
        """Read the next blocks: the memory of each, and where it is. Empty: there are none yet, or no more.

        The last block of an object, and any of a stream, may be shorter than others.
        """
        block = size = self.about.segment * self.about.k
        at = None
        if self._remaining is not None:
            size = min(block * MAX_READ_AHEAD, self._remaining)
            at = self.about.size - self._remaining
        while len(self._next_bytes) < size:
            more = self._source.read(size - len(self._next_bytes))
            if more and not self._next_bytes:
                self._next_bytes = more
            elif more:
                if not isinstance(self._next_bytes, bytearray):
                    self._next_bytes = bytearray(self._next_bytes)
                self._next_bytes += more
            elif more is None and self._remaining is not None:
                size = len(self._next_bytes) // block * block  # complete blocks need not wait
                break
            elif more is None and not self._next_bytes:
                return []
            else:
                break
        data, self._next_bytes = self._next_bytes[:size], self._next_bytes[size:] or b""
        if self._remaining is None:
            self._read_all = not data
        else:
            if len(data) < size:
                missing = self._remaining - len(data)
                raise OSError(f"{self._subject} became {missing} bytes shorter while it was sent")
            self._remaining -= size
        if isinstance(self._source, MemorySource):  # all blocks are in one memory
            memory, begin = self._source.view, at or 0
        else:
            memory, begin = memoryview(bytes(data) if isinstance(data, bytearray) else data), 0
        end = begin + len(data)
        return [(memory, one, min(block, end - one)) for one in range(begin, end, block)]

    def packets(self, runs: Iterable[SegmentRange], frames: Framer) -> Iterator[memoryview | HeaderBodyBatch]:
        """Build the messages of these segments; skip blocks that no receiver needs any more."""
        return frames.packets(self.about, self._prepared(runs))

    def _prepared(self, runs: Iterable[SegmentRange]) -> Iterator[tuple[SourceBlock, SegmentRange]]:
        """Yield runs with their blocks; threads compute the parity of the later ones meanwhile."""
        prepared: list[tuple[SourceBlock, SegmentRange, Task[None] | None]] = []
        for run in runs:
            if (block := self._blocks.get(run.block)) is not None:
                parity = run.first + run.segments - self.about.k
                task = self._workers.submit(partial(block.make_parity, parity)) if parity > 0 else None
                prepared.append((block, run, task))
        for block, run, task in prepared:
            if task is not None:
                task.result()
            yield block, run
