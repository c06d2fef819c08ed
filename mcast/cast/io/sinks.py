"""Where the bytes of an object go: into memory, into a buffer of the caller's, into a file."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable
from functools import cache, partial
from time import monotonic
from typing import Any, NamedTuple, TypeVar, cast

from pydantic import BaseModel, ValidationError
from typing_extensions import Buffer

from mcast.arguments.buffers import writable_bytes
from mcast.arguments.file_objects import FileWriter, SupportsWrite
from mcast.cast.io.files import Sink, StreamSink, native, sink_of_path
from mcast.cast.io.sources import Tensor, memory_of, poll_of
from mcast.endpoint.waiting import call_user
from mcast.errors.validation import describe_validation_error

Target = Buffer | Tensor | os.PathLike[str] | SupportsWrite | Sink | None
"""A writable buffer or CPU tensor, the path of a file, what has `write`, a `mcast.cast.io.files.Sink`, or
None for new memory."""

Model = TypeVar("Model", bound=BaseModel)


class Offered(NamedTuple):
    """What a sender says of an object before its bytes come. Do not use `name` as a path without a check.

    name      of the object, at most 64 bytes, printable
    size      in bytes; None where only the end will tell
    metadata  at most 512 bytes: `read` makes a pydantic model of them
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

    def read(self, model: type[Model]) -> Model:
        """The metadata as that model. Raises ValueError, which says what does not fit."""
        try:
            return model.model_validate_json(self.metadata)
        except ValidationError as error:
            wrong = describe_validation_error(dict(error.errors()[0]))
            raise ValueError(f"the metadata is no {model.__name__}: {wrong}") from None


def metadata_of(metadata: bytes | BaseModel) -> bytes:
    """The bytes of metadata. A model becomes JSON."""
    return metadata.model_dump_json().encode() if isinstance(metadata, BaseModel) else metadata


ReceiveTarget = Target | Callable[[Offered], Target]
"""Where objects go: one place, or what a function says of each object; it may raise OSError to refuse one."""


class GrowingMemorySink(Sink):
    """New memory, at most so many bytes."""

    name = "memory"

    def __init__(self, most: int) -> None:
        self.data: bytearray = bytearray()
        self._most = most

    def write(self, data: Buffer) -> None:
        if len(self.data) + memoryview(data).nbytes > self._most:
            raise _too_large(self._most)
        self.data += data


class BufferSink(Sink):
    """A buffer of the caller's, which one object at a time may fill. What is longer raises OSError."""

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
    """New memory of a known size."""

    name = "memory"

    def __init__(self, size: int) -> None:
        try:
            self._data = _new_memory()(size)
        except MemoryError:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None
        super().__init__(self._data)

    def taken(self) -> bytearray:
        """The memory, of which this has no view from now on."""
        self.view.release()
        return self._data


_MAX_TURN = 0.1
"""Seconds for which small parts are written one after another, before the sender gets its answers."""


class WritableSink(Sink):
    """What has `write`, and stays open. What it does not take now is offered again later."""

    name = "the stream"

    def __init__(self, file: SupportsWrite) -> None:
        self._writer = FileWriter(file)
        self._left = memoryview(b"")

    def ready(self) -> bool:
        end = monotonic() + _MAX_TURN
        while self._left:
            taken = call_user(self._writer.write_some, self._left)  # it may wait
            self._left = self._left[taken:]
            if not taken or monotonic() > end:
                break
        return not self._left

    def write(self, data: Buffer) -> None:
        self._left = memoryview(bytes(self._left) + bytes(data) if self._left else bytes(data))
        self.ready()

    def commit(self) -> bool:
        if not self.ready():
            return False
        return call_user(self._writer.flush)


def sink_of(target: Target, size: int | None, most: int) -> Sink:
    """The sink for an object of that size. Raises OSError if the object is larger than the place."""
    if isinstance(target, Sink):
        return target
    if isinstance(target, os.PathLike):
        return sink_of_path(native(target))
    sink = None if target is None else sink_at(target)
    window = len(sink.view) if isinstance(sink, BufferSink) else most
    if size is not None and size > window and (sink is None or isinstance(sink, BufferSink)):
        raise _too_large(window)
    if sink is not None:
        return sink
    return GrowingMemorySink(most) if size is None else NewMemorySink(size)


def sink_at(target: Buffer | Tensor | SupportsWrite) -> Sink:
    """The sink for memory or for a stream. Raises TypeError for what is neither, or cannot be written."""
    if (memory := memory_of(target)) is not None:
        if memory.readonly:
            raise TypeError(
                f"into: this {type(target).__name__} is read-only: give a bytearray or an array that can be "
                "written; a tensor of a library without DLPack 1.0 is always read-only: give its .numpy()"
            )
        return BufferSink(memory)
    if not hasattr(target, "write"):
        raise TypeError(f"into: {type(target).__name__} is no buffer, no path, and has no write")
    if poll_of(target, select.POLLOUT) is None:
        return WritableSink(cast(SupportsWrite, target))
    FileWriter(cast(SupportsWrite, target)).flush()
    # A pipe gets what it takes without waiting, and the rest later.
    return StreamSink(os.dup(target.fileno()), WritableSink.name)  # type: ignore[union-attr]


@cache
def _new_memory() -> Callable[[int], bytearray]:
    """What makes memory of which no page is used before something is written there.

    One message of a stranger's describes a large object, and `bytearray(size)` would fill it with zeros.
    """
    try:
        from ctypes import PYFUNCTYPE, c_char_p, c_ssize_t, py_object, pythonapi
    except ImportError:  # of a Python that was built without libffi
        return bytearray
    kind = PYFUNCTYPE(py_object, c_char_p, c_ssize_t)
    return partial(cast(Any, kind(("PyByteArray_FromStringAndSize", pythonapi))), None)


def _too_large(window: int) -> OSError:
    return OSError(f"the object is larger than the {window} bytes that there are for it")
