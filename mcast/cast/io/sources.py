"""Where the bytes of an object come from, and its blocks while receivers may still need them."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import stat
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from contextlib import suppress
from io import BufferedRandom, BufferedReader, BufferedWriter, BytesIO, FileIO
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from typing_extensions import Buffer

from mcast.api import HeaderBodyBatch, McastError, Region
from mcast.arguments.buffers import flat_bytes, is_buffer
from mcast.arguments.file_objects import SupportsRead, read_some
from mcast.cast.io.files import Source, native
from mcast.cast.protocol.blocks import Digest, Framer, SourceBlock
from mcast.cast.protocol.packets import UNKNOWN_BLOCKS, UNKNOWN_SIZE, Describe
from mcast.cast.protocol.repairs import SegmentRange
from mcast.cast.protocol.sender import ObjectSender
from mcast.endpoint.waiting import call_user

_CPU_DEVICES = (1, 3)
"""DLPack's kDLCPU, and kDLCUDAHost, which is pinned memory of the host."""

MAX_REGISTERED, MIN_REGISTERED = 64 << 20, 1 << 20
"""The most bytes of a buffer that are lent to a device at a time, and the fewest: to pin pages takes time."""

_AHEAD = 1 << 20
"""Bytes that an async iterable may be ahead of what is sent."""


Lend = Callable[[memoryview], Region | None]
"""Registers a part of a buffer that stays as it is; None where that cannot be."""


def lend_nothing(part: memoryview) -> None:
    """For an end that has no queue pair."""


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
"""What can be sent.

- A buffer, such as bytes or a numpy array: contiguous memory without Python objects in it; a tensor with
  `__dlpack__`.
- A file's path, or a binary file that is open, from where it stands. Its end is that of now; a pipe has none
  before it comes. A `mcast.cast.io.files.Source`, which is closed then.
- An iterable of buffers, whose end nobody has to know. It is asked for more as receivers take what there is.
- With a membership of `mcast.aio`, an async iterable of buffers, too: others have their turns meanwhile.
"""


class ByteSource(Protocol):
    """Where bytes come from. `size` is None where only the end tells."""

    size: int | None

    def read(self, most: int) -> bytes | memoryview | None:
        """The next bytes, about so many, perhaps more; empty at the end, None where none is there yet."""

    def rewind(self) -> bool:
        """Begin anew with the first byte. False if that cannot be."""

    def suspend(self) -> None:
        """Free what `again` can open."""

    def close(self) -> None:
        """Free the origin."""


class _NothingToSuspend:
    """What has nothing that can be freed meanwhile."""

    def suspend(self) -> None:
        """The buffer or the file is the caller's."""


class MemorySource:
    """The bytes of a buffer, which must be contiguous, where they are: no copy is made.

    A large one is lent to the device, a part at a time, which sends from there. From a part that is not lent
    messages are copied.
    """

    def __init__(self, data: Buffer) -> None:
        self._view = flat_bytes(data)
        self.size: int | None = self._view.nbytes
        self._at = self._lent_to = 0
        self._part: Region | None = None
        self.lend: Lend = lend_nothing

    def read(self, most: int) -> memoryview:
        if self._at >= self._lent_to:
            self._lend_next()
        found = self._view[self._at : self._at + most]
        self._at += len(found)
        return found

    def _lend_next(self) -> None:
        self.suspend()
        self._lent_to = self._at + MAX_REGISTERED
        part = self._view[self._at : self._lent_to]
        if part.nbytes >= MIN_REGISTERED:
            self._part = self.lend(part)

    def rewind(self) -> bool:
        self._at = self._lent_to = 0
        return True

    def suspend(self) -> None:
        """What is lent comes back."""
        part, self._part, self._lent_to = self._part, None, 0
        if part is not None:
            with suppress(McastError):  # the memory is let go with the queue pair then
                part.close()

    def close(self) -> None:
        self.suspend()
        self._view.release()


class OpenFileSource(_NothingToSuspend):
    """The rest of an open binary file, which stays open.

    A pipe, a terminal or a socket is read when it has something; other files are waited for.
    """

    def __init__(self, file: SupportsRead) -> None:
        if hasattr(file, "encoding"):
            raise TypeError(f"{type(file).__name__} is open as text: open the file in binary mode")
        self.size: int | None = _rest_of(file)
        self._left = self.size
        self._file = cast(Any, file)
        self._begins: int = 0 if self.size is None else self._file.tell()
        self._poll = None if self.size is not None else poll_of(file, select.POLLIN)
        self._method = "read1" if self._poll is not None and hasattr(file, "read1") else "read"

    def read(self, most: int) -> bytes | None:
        if self._poll is not None and not self._poll.poll(0):
            return None
        # One that cannot be asked whether it is ready is waited for.
        size = most if self._left is None else min(most, self._left)
        data = call_user(read_some, self._file, size, self._method)
        if self._left is not None:
            self._left -= len(data or b"")
        return data

    def rewind(self) -> bool:
        if self.size is not None:
            self._file.seek(self._begins)
            self._left = self.size
        return self.size is not None

    def close(self) -> None:
        """The file stays open."""


class IterableSource(_NothingToSuspend):
    """The bytes of all buffers, one after another."""

    def __init__(self, parts: Iterable[Buffer | Tensor]) -> None:
        self.size: int | None = None
        self._parts = iter(parts)
        self._rest = memoryview(b"")

    def read(self, most: int) -> bytes:
        while not self._rest:
            try:
                part = call_user(next, self._parts)
            except StopIteration:
                return b""
            self._rest = memoryview(_bytes_of(part))
        found, self._rest = self._rest[:most], self._rest[most:]
        return bytes(found)

    def rewind(self) -> bool:
        return False

    def close(self) -> None:
        """The iterator stays where it is."""


class AsyncIterableSource(_NothingToSuspend):
    """The bytes of all buffers of an async iterable. A task asks for them, a little ahead of what is sent."""

    def __init__(self, parts: AsyncIterable[Buffer | Tensor]) -> None:
        self.size: int | None = None
        self._parts = parts
        self._ready = bytearray()
        self._room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def _gather(self) -> None:
        async for part in self._parts:
            self._ready += _bytes_of(part)
            while len(self._ready) >= _AHEAD:
                self._room.clear()
                await self._room.wait()

    def read(self, most: int) -> bytes | None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._gather())
        if not self._ready:
            if not self._task.done():
                return None
            self._task.result()
        found = bytes(self._ready[:most])
        del self._ready[:most]
        self._room.set()
        return found

    def rewind(self) -> bool:
        return False

    def close(self) -> None:
        """What waits for the next buffer is cancelled; the iterator stays where it is."""
        if self._task is not None and not self._task.cancel() and not self._task.cancelled():
            self._task.exception()  # asyncio would log an error that nobody asked for


def _bytes_of(part: Buffer | Tensor) -> bytes:
    memory = memory_of(part)
    if memory is None:
        raise TypeError(f"{type(part).__name__} has no bytes: the iterable gives buffers")
    return bytes(memory)


def poll_of(file: object, events: int) -> select.poll | None:
    """What tells whether a pipe, a terminal or a socket is ready; None for what has no descriptor to ask.

    None, too, for what is between the program and the descriptor, and may keep bytes back or change them: a
    compressed file, TLS, the answer of an HTTP server, a wrapper or a subclass of the caller's.
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
    found = select.poll()
    found.register(fd, events)
    return found


def _raw_of(file: object) -> FileIO | socket.SocketIO | None:
    """The file or socket that `file` reads and writes as it is, perhaps ahead; None for other things.

    The exact types are asked for: a subclass may do anything between.
    """
    raw: object = file
    if isinstance(file, BufferedReader | BufferedWriter | BufferedRandom):
        raw = file.raw if type(file) in (BufferedReader, BufferedWriter, BufferedRandom) else None
    return raw if type(raw) is FileIO or type(raw) is socket.SocketIO else None


def _rest_of(file: object) -> int | None:
    """How many bytes of a file follow; None where only the end tells.

    Of a file of the caller's own kind only the end tells: such a file may read more or less than its size.
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
    """Open what is to be sent. Raises OSError for a file that cannot be read, TypeError for other things."""
    if isinstance(data, Source):
        return data
    if isinstance(data, os.PathLike):
        return Source(str(Path(native(data)).absolute()))
    if isinstance(data, str):
        raise TypeError("str has no bytes: a path is a pathlib.Path, and a text is sent as text.encode()")
    if (memory := memory_of(data)) is not None:
        return MemorySource(memory)
    if hasattr(data, "read"):
        return OpenFileSource(cast(SupportsRead, data))
    if isinstance(data, Iterable):
        return IterableSource(data)
    if isinstance(data, AsyncIterable):
        return AsyncIterableSource(data)
    raise TypeError(
        f"{type(data).__name__} cannot be sent: a buffer, a tensor, a path, an open binary file and "
        "an iterable of buffers can"
    )


def memory_of(info: object) -> memoryview | None:
    """Return the bytes of a buffer or a tensor; None for other things.

    Raises TypeError for a buffer that is no payload, and for a tensor that the CPU cannot read, or whose type
    numpy does not know.
    """
    if is_buffer(info):
        return flat_bytes(cast(Buffer, info))
    if not hasattr(info, "__dlpack__"):
        return None
    kind = type(info).__name__
    try:
        import numpy
    except ImportError:
        raise TypeError(f"{kind} has __dlpack__, which numpy reads: python -m pip install numpy") from None
    tensor = cast(Any, info)
    if tensor.__dlpack_device__()[0] not in _CPU_DEVICES:
        raise TypeError(f"{kind} is in the memory of a device: copy the tensor to the CPU first")
    try:
        found: Any = numpy.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{kind}: {error}; view a tensor of a type that numpy does not have as bytes"
        ) from None
    return flat_bytes(found)


class SendBuffer:
    """The blocks of one object, which are kept until no receiver can need them, or until they come again."""

    def __init__(self, source: ByteSource, about: Describe) -> None:
        self._source = source
        self.about: Describe = about
        self._blocks: dict[int, SourceBlock] = {}
        self._left = None if about.size == UNKNOWN_SIZE else about.size
        self._next_bytes: bytes | bytearray | memoryview = b""
        """What was read of the next blocks: less than a block, unless the origin gave more than was asked."""
        self._forgotten = 0
        self.offered: int = 0
        self.size: int = 0
        self.done: int = 0
        """Bytes that no receiver can need any more; of a carousel, those that this round has sent."""
        self._digest = Digest()

    @property
    def digest(self) -> bytes:
        """The BLAKE3 digest of the object's bytes, as far as they were offered."""
        return bytes(self._digest)

    def offer(self, core: ObjectSender) -> bool:
        """Offer as many blocks as the core has room for. False if there would be more, but not yet.

        Raises OSError if the object ends too early, or is another one in a later round.
        """
        outgoing = core.outgoing
        if outgoing is None:
            return True
        if outgoing.offered < self.offered:
            self._rewind()
        while self._forgotten < outgoing.released:
            self.done += self._blocks.pop(self._forgotten).info.size
            self._forgotten += 1
        while core.blocks_wanted:
            if self._left == 0:
                core.end(self.digest)
                break
            block = self._block()
            if block is None:
                return False
            if not block:
                core.end(self.digest)
                break
            digest = None
            if not outgoing.cycles:
                self._digest.update(block)
                self.size += len(block)
            if not self.about.carousel:
                digest = self.digest
            entry = self._blocks[self.offered] = SourceBlock(block, self.about.segment, self.about.k, digest)
            if outgoing.expected_info not in (None, entry.info):
                raise OSError(f"{self._it} has changed while it was sent")
            core.offer(entry.info)
            self.offered += 1
        return True

    def _rewind(self) -> None:
        """A round begins."""
        self._blocks.clear()
        self._next_bytes = b""
        self._source.rewind()
        self._left = self.about.size
        self._forgotten = self.offered = self.done = 0

    def suspend(self) -> None:
        """Others have their turns, and this object begins anew then."""
        self._blocks.clear()
        self._source.suspend()
        self.offered = UNKNOWN_BLOCKS  # beyond all that the core knows of: a round begins

    @property
    def _it(self) -> str:
        """The object in words; one of several is named."""
        return f"the object {self.about.name}" if self.about.carousel > 1 else "the object"

    def close(self) -> None:
        """Drop the blocks, which may be views of the caller's memory."""
        self._blocks.clear()
        self._next_bytes = b""

    def _block(self) -> bytes | memoryview | None:
        """The next block; a shorter one, or None, where the origin has no more for the moment."""
        most = self.about.segment * self.about.k
        if self._left is not None:
            most = min(most, self._left)
        while len(self._next_bytes) < most:
            more = self._source.read(most - len(self._next_bytes))
            if more and not self._next_bytes:
                self._next_bytes = more
            elif more:
                if not isinstance(self._next_bytes, bytearray):
                    self._next_bytes = bytearray(self._next_bytes)
                self._next_bytes += more
            elif more is None and (self._left is not None or not self._next_bytes):
                return None
            else:
                break
        found, self._next_bytes = self._next_bytes[:most], self._next_bytes[most:] or b""
        if isinstance(found, bytearray):
            found = bytes(found)
        if self._left is not None:
            if len(found) < most:
                raise OSError(
                    f"{self._it} has become shorter while it was sent, by {self._left - len(found)}"
                )
            self._left -= len(found)
        return found

    def packets(self, runs: Iterable[SegmentRange], frames: Framer) -> Iterator[memoryview | HeaderBodyBatch]:
        """The messages of these runs, as the frames have them; none where all have the block by now."""
        block = self._blocks
        return frames.packets(self.about, ((block[run.block], run) for run in runs if run.block in block))
