"""File objects of callers: how many bytes a `write` took, and what a `read` gave.

The rule, for every place that writes to or reads from an object that a program hands in. An object is
judged by what it returns, not by its class: wrappers such as `tempfile.NamedTemporaryFile` delegate to any
file.

`write(part)` returns
- a number from 0 to the size of the part: so many bytes were taken, and the rest is offered again;
- None: all was taken, which writers without a count mean by it. But nothing was taken, because it would
  block, if the object is raw (an `io.RawIOBase`, or with `readall` as these have), or has returned a number
  before.

Or it raises BlockingIOError with `characters_written`, as `io.BufferedIOBase` does: so many were taken.
A bool, a negative number, more than was offered and anything else are errors that name the object.

`read(size)` returns bytes, and more than `size` are taken, too; none at the end; None, or raises
BlockingIOError, where none is there yet. Anything else is an error that names the object.
"""

from __future__ import annotations

import errno
import os
import select
import sys
from io import RawIOBase
from operator import index
from typing import Any, Protocol

from typing_extensions import Buffer

_MIN_OFFER = 4096
"""The fewest bytes offered after a short write: one byte at a time costs no copy of all the rest."""


class SupportsWrite(Protocol):
    """An object with the `write` of a binary file."""

    def write(self, part: bytes, /) -> object:
        """Take the next bytes, or the first of them: the module says what the result means."""


class SupportsRead(Protocol):
    """An object with the `read` of a binary file: open files, pipes, sockets' files, `io.BytesIO`."""

    def read(self, size: int, /) -> bytes | None:
        """The next bytes, at most `size`; empty at the end, None where none is there yet."""


class FileWriter:
    """Writes to a file object of the caller's, which stays open. No byte is lost or written twice."""

    def __init__(self, file: SupportsWrite) -> None:
        self._file = file
        self._counts = isinstance(file, RawIOBase) or hasattr(file, "readall")
        self._max_offer = sys.maxsize

    def write_some(self, data: Buffer) -> int:
        """Offer `data`, and return how many bytes of it the object took; 0 if it takes none now.

        Raises what the object raises, and TypeError or ValueError where its result makes no sense.
        """
        part = bytes(memoryview(data)[: self._max_offer])
        if not part:
            return 0
        try:
            result = self._file.write(part)
        except BlockingIOError as error:
            if not hasattr(error, "characters_written"):
                raise  # nobody knows how much was taken
            result = error.characters_written
        taken = self._taken(result, len(part))
        self._max_offer = max(2 * taken, _MIN_OFFER) if taken < len(part) else sys.maxsize
        return taken

    def _taken(self, result: object, offered: int) -> int:
        """Return the number of bytes that a result of `write` says were taken."""
        if result is None:
            return 0 if self._counts else offered
        said = f"{_name(self._file)}.write returned {_short(result)} for {offered:,} bytes"
        wanted = "it must return how many of them it took, or None for all"
        if isinstance(result, bool) or not hasattr(result, "__index__"):
            raise TypeError(f"{said}: {wanted}")
        taken = index(result)
        if not 0 <= taken <= offered:
            raise ValueError(f"{said}: {wanted}")
        self._counts = True
        return taken

    def write_all(self, data: Buffer) -> None:
        """Write all of `data`; wait for an object with a descriptor that would block.

        Raises BlockingIOError for one that takes nothing, and for which nobody can wait.
        """
        left = memoryview(data).cast("B")
        waited = False
        while left:
            taken = self.write_some(left)
            if not taken and (waited or not _wait(self._file, select.POLLOUT)):
                said = f"{_name(self._file)}.write takes nothing, and {len(left):,} bytes are left"
                raise BlockingIOError(errno.EAGAIN, said)
            waited, left = not taken, left[taken:]

    def flush(self) -> bool:
        """Flush the object, if it has a `flush`; False if that would block, and has to be called again."""
        try:
            getattr(self._file, "flush", bool)()
        except BlockingIOError:
            return False
        return True


def read_some(file: SupportsRead, size: int, method: str = "read") -> bytes | None:
    """Read about `size` bytes, perhaps more; empty at the end, None where none is there yet.

    Raises what the object raises, and TypeError where its result makes no sense.
    """
    try:
        data: object = getattr(file, method)(size)
    except BlockingIOError:
        return None
    if data is None or type(data) is bytes:
        return data
    if not isinstance(data, bytes | bytearray | memoryview):
        hint = ": open it in binary mode" if isinstance(data, str) else ""
        raise TypeError(f"{_name(file)}.{method} returned {_short(data)} instead of bytes{hint}")
    return bytes(data)  # the object may fill the same memory again


def read_exactly(file: SupportsRead, size: int, ahead: bytes = b"") -> tuple[bytes, bytes]:
    """Read until there are `size` bytes, or the end. `ahead` has been read before.

    Returns the bytes, fewer only at the end, and what was read beyond them. Raises BlockingIOError for an
    object that has nothing yet, and for which nobody can wait.
    """
    found = bytearray(ahead)
    waited = False
    while len(found) < size:
        more = read_some(file, size - len(found))
        if more == b"":
            break
        if more is None and (waited or not _wait(file, select.POLLIN)):
            raise BlockingIOError(errno.EAGAIN, f"{_name(file)}.read has nothing yet")
        waited = more is None
        found += more or b""
    return bytes(found[:size]), bytes(found[size:])


def _wait(file: object, events: int) -> bool:
    """Wait until the object's descriptor is ready; False if it has none."""
    try:
        fd: int = file.fileno()  # type: ignore[attr-defined]
        os.fstat(fd)
    except (AttributeError, TypeError, ValueError, OSError):  # io.UnsupportedOperation is an OSError
        return False
    poll = select.poll()
    poll.register(fd, events)
    poll.poll()
    return True


def _name(file: object) -> str:
    """Return how an error calls the object: its class, and its name if it has one."""
    name: Any = getattr(file, "name", None)
    return type(file).__name__ + (f"({name!r})" if isinstance(name, str) else "")


def _short(result: object) -> str:
    """Return a result as an error shows it: a number as it is, else its type, for a text may be long."""
    return repr(result) if result is None or isinstance(result, int | float) else type(result).__name__
