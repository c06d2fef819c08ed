"""Destinations of received objects: new memory, the caller's buffer, a stream, a file."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable
from functools import cache, partial
from time import monotonic
from typing import Any, NamedTuple, TypeVar, cast

from pydantic import BaseModel
from typing_extensions import Buffer

from mcast.arguments.buffers import writable_bytes
from mcast.arguments.file_objects import FileWriter, SupportsWrite
from mcast.cast.io.files import Sink, StreamSink, native, sink_of_path
from mcast.cast.io.sources import Tensor, memory_of, poll_of
from mcast.endpoint.waiting import call_user

Target = Buffer | Tensor | os.PathLike[str] | SupportsWrite | Sink | None
"""Destination of one object: a writable buffer or CPU tensor, the path of a file, an object with `write`, a
`mcast.cast.io.files.Sink`, or None for new memory."""

M = TypeVar("M", bound=BaseModel)


class Offered(NamedTuple):
    """Announcement of an object, before its bytes arrive. Do not use `name` as a path without a check.

    name      name of the object: at most 64 bytes, printable
    size      size in bytes; None if unknown before the end
    metadata  at most 512 bytes; `read` parses them as a pydantic model
    sender    name that the sender gives itself
    address   source address of the sender
    number    number of the object in the sender's session, from 0
    version   version of a published object; None for others
    """

    name: str
    size: int | None
    metadata: bytes
    sender: str
    address: str
    number: int
    version: int | None = None

    def read(self, model: type[M]) -> M:
        """Parse the metadata as that model. Raises ValueError, which names the field that is wrong."""
        from pydantic import ValidationError

        from mcast.errors.validation import describe_validation_error

        try:
            return model.model_validate_json(self.metadata)
        except ValidationError as error:
            reason = describe_validation_error(dict(error.errors()[0]))
            raise ValueError(f"the metadata is no {model.__name__}: {reason}") from None


ReceiveTarget = Target | Callable[[Offered], Target]
"""Destination of objects: one for all, or a function that returns one for each object.

The function may raise OSError to refuse the object.
"""


class GrowingMemorySink(Sink):
    """New memory for an object of unknown size, which grows to at most `max_size` bytes."""

    name = "memory"

    def __init__(self, max_size: int) -> None:
        self.data: bytearray = bytearray()
        self._max_size = max_size

    def write(self, data: Buffer) -> None:
        if len(self.data) + memoryview(data).nbytes > self._max_size:
            raise _too_large(self._max_size)
        self.data += data


class BufferSink(Sink):
    """The caller's buffer, for one object at a time. A larger object raises OSError."""

    name = "the buffer"
    random_access = True

    def __init__(self, buffer: Buffer) -> None:
        self.view: memoryview[int] = writable_bytes(buffer)
        self._at = 0

    def buffer_at(self, at: int, size: int) -> memoryview | None:
        found = self.view[at : at + size]
        return found if len(found) == size else None

    def write(self, data: Buffer) -> None:
        view = memoryview(data)
        end = self._at + len(view)
        if end > len(self.view):
            raise _too_large(len(self.view))
        self.view[self._at : end] = view
        self._at = end


class NewMemorySink(BufferSink):
    """New memory for an object of known size."""

    name = "memory"

    def __init__(self, size: int) -> None:
        self._data = _allocate(size)
        super().__init__(self._data)

    def take(self) -> bytearray:
        """Release the view, and return the memory to hand it to the caller."""
        self.view.release()
        return self._data


class StagedBufferSink(BufferSink):
    """New memory that replaces the contents of the caller's buffer when the object is complete.

    The copy is one call, which no exception interrupts: the buffer has the old object, or the new one.
    """

    def __init__(self, buffer: BufferSink, size: int) -> None:
        super().__init__(_allocate(size))
        self._buffer = buffer.view

    def commit(self) -> bool:
        if self.view is not self._buffer:
            self._buffer[: len(self.view)] = self.view
            self.view: memoryview[int] = self._buffer
        return True


_MAX_WRITE_TIME = 0.1
"""Time limit of consecutive small writes, in seconds; then the sender gets its answers before more."""


class WritableSink(Sink):
    """An object with `write`, which stays open. Bytes that it does not accept now are written later."""

    name = "the stream"
    streams = True

    def __init__(self, file: SupportsWrite) -> None:
        self._writer = FileWriter(file)
        self._unwritten = memoryview(b"")

    def ready(self) -> bool:
        end = monotonic() + _MAX_WRITE_TIME
        while self._unwritten:
            written = call_user(self._writer.write_some, self._unwritten)  # may block
            self._unwritten = self._unwritten[written:]
            if not written or monotonic() > end:
                break
        return not self._unwritten

    def write(self, data: Buffer) -> None:
        pending = self._unwritten
        self._unwritten = memoryview(bytes(pending) + bytes(data) if pending else bytes(data))
        self.ready()

    def commit(self) -> bool:
        if not self.ready():
            return False
        return call_user(self._writer.flush)


def require_whole(sink: Sink) -> None:
    """Raise TypeError for a sink that takes a part of an object before the object is complete."""
    if sink.streams:
        raise TypeError(
            f"into: {sink.name} takes a version in parts, and latest=True replaces it as a whole: give a "
            "writable buffer, the path of a file, or None"
        )


def sink_of(target: Target, size: int | None, max_size: int) -> Sink:
    """Return the sink of a target for an object of that size. Raises OSError if the object is too large.

    max_size  maximum size in new memory, in bytes
    """
    if isinstance(target, Sink):
        return target
    if isinstance(target, os.PathLike):
        return sink_of_path(native(target))
    sink = None if target is None else sink_at(target)
    limit = len(sink.view) if isinstance(sink, BufferSink) else max_size
    if size is not None and size > limit and (sink is None or isinstance(sink, BufferSink)):
        raise _too_large(limit)
    if sink is not None:
        return sink
    return GrowingMemorySink(max_size) if size is None else NewMemorySink(size)


def sink_at(target: Buffer | Tensor | SupportsWrite) -> Sink:
    """Return the sink of memory or of a stream. Raises TypeError if it is neither, or is read-only."""
    if (memory := memory_of(target)) is not None:
        if memory.readonly:
            raise TypeError(
                f"into: this {type(target).__name__} is read-only: give a bytearray or an array that can be "
                "written; a tensor of a library without DLPack 1.0 is always read-only: give its .numpy()"
            )
        return BufferSink(memory)
    if not hasattr(target, "write"):
        raise TypeError(
            f"into: {type(target).__name__} cannot be received into: give a writable buffer, a path, an "
            "object with write, or None"
        )
    if poll_of(target, select.POLLOUT) is None:
        return WritableSink(cast(SupportsWrite, target))
    FileWriter(cast(SupportsWrite, target)).flush()
    # By its descriptor: only then a write to a full pipe does not block the receiver.
    return StreamSink(os.dup(target.fileno()), WritableSink.name)  # type: ignore[union-attr]


@cache
def _new_memory() -> Callable[[int], bytearray]:
    """Return an allocator of a bytearray whose pages stay untouched until they are written.

    `bytearray(size)` writes zeros: a single message of a stranger, which announces a large object, would make
    this process use that much memory.
    """
    try:
        from ctypes import PYFUNCTYPE, c_char_p, c_ssize_t, py_object, pythonapi
    except ImportError:  # a Python without libffi
        return bytearray
    kind = PYFUNCTYPE(py_object, c_char_p, c_ssize_t)
    return partial(cast(Any, kind(("PyByteArray_FromStringAndSize", pythonapi))), None)


def _allocate(size: int) -> bytearray:
    """Return new memory, whose bytes are undefined. Raises OSError if there is not enough."""
    try:
        return _new_memory()(size)
    except MemoryError:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None


def _too_large(limit: int) -> OSError:
    return OSError(f"the object is larger than the {limit} bytes allowed here")
