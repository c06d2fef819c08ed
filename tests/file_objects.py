"""File objects of every kind that a program may hand in: what each takes of a write, and gives for a read."""

from __future__ import annotations

import errno
import io
import os
import tempfile
from collections.abc import Callable
from itertools import cycle
from typing import Any


class Plain:
    """A writer of no class of io: `took` is what it has, and `answers` says what each write does."""

    def __init__(self, answer: Callable[[Plain, bytes], object]) -> None:
        self.took = b""
        self._answer = answer

    def write(self, part: bytes) -> object:
        return self._answer(self, part)

    def takes(self, part: bytes, most: int) -> int:
        """Take at most so many bytes, and return how many these are."""
        self.took += part[:most]
        return len(part[:most])


class Raw(io.RawIOBase):
    """A raw file, which takes at most so many bytes at a time, by turns; 0: it would block."""

    def __init__(self, *most: int) -> None:
        self.took = b""
        self._most = cycle(most)

    def writable(self) -> bool:
        return True

    def write(self, part: Any) -> int | None:
        taken = bytes(part[: next(self._most)])
        self.took += taken
        return len(taken) or None


class Wrapper:
    """Delegates everything, as the wrappers of tempfile do."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Slim:
    """Delegates the write alone, so that nobody sees what is behind it."""

    def __init__(self, file: Any) -> None:
        self._file = file

    @property
    def took(self) -> bytes:
        return bytes(self._file.took)

    def write(self, part: bytes) -> object:
        return self._file.write(part)


class Named:
    """A temporary file without a buffer: a wrapper whose class says nothing."""

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile(buffering=0)  # noqa: SIM115 (freed with this)
        self.write = self._file.write

    @property
    def took(self) -> bytes:
        self._file.seek(0)
        return self._file.read()


def blocks(file: Plain, part: bytes) -> int:
    """Take half, and raise as a buffered file that would block does."""
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), file.takes(part, len(part) // 2 or 1))


def none_for_all(file: Plain, part: bytes) -> None:
    file.takes(part, len(part))


def by_turns(*most: int) -> Callable[[Plain, bytes], int]:
    turns = cycle(most)
    return lambda file, part: file.takes(part, next(turns))


def now_and_then(size: int) -> Callable[[int], int | None]:
    turns = cycle((None, size))
    return lambda _: next(turns)


WRITERS: dict[str, Callable[[], Any]] = {
    "all at once": lambda: Plain(lambda file, part: file.takes(part, len(part))),
    "None for all": lambda: Plain(none_for_all),
    "short writes": lambda: Plain(lambda file, part: file.takes(part, 1000)),
    "one byte at a time": lambda: Plain(lambda file, part: file.takes(part, 1)),
    "nothing every other time": lambda: Plain(by_turns(0, 700)),
    "blocks after a half": lambda: Plain(blocks),
    "a raw file": lambda: Raw(1000),
    "a raw file that blocks": lambda: Raw(0, 0, 1000),
    "a wrapped raw file that blocks": lambda: Wrapper(Raw(0, 1000)),
    "a hidden raw file that blocks later": lambda: Slim(Raw(1000, 0)),
    "a temporary file without a buffer": Named,
}
"""Writers that take all, sooner or later: `took` is the whole."""


def raises(error: Exception) -> Callable[[Plain, bytes], object]:
    """Take a little, and raise at the second write."""

    def write(file: Plain, part: bytes) -> int:
        if file.took:
            raise error
        return file.takes(part, 10)

    return write


BROKEN: dict[str, tuple[Callable[[Plain, bytes], object], type[Exception], str]] = {
    "negative": (lambda file, part: -1, ValueError, r"Plain\.write returned -1 for 1,000 bytes"),
    "more than given": (
        lambda file, part: len(part) + 1,
        ValueError,
        r"Plain\.write returned 1001 for 1,000 bytes",
    ),
    "a text": (lambda file, part: "1000", TypeError, r"Plain\.write returned str for 1,000 bytes"),
    "True": (lambda file, part: True, TypeError, r"Plain\.write returned True for 1,000 bytes"),
    "a fraction": (lambda file, part: 5.0, TypeError, r"Plain\.write returned 5\.0 for 1,000 bytes"),
    "a full disk": (
        raises(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
        OSError,
        os.strerror(errno.ENOSPC),
    ),
    "no count of what it took": (
        raises(BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))),
        BlockingIOError,
        os.strerror(errno.EAGAIN),
    ),
    "an error of its own": (raises(ZeroDivisionError("mine")), ZeroDivisionError, "mine"),
}
"""Mistake of a writer -> the error, which names what the writer did."""


class Reader:
    """Reads `data` in its own way: `answer` gets what is left and the size, and returns how much to give."""

    def __init__(self, data: bytes, answer: Callable[[int], int | None]) -> None:
        self._data = data
        self._answer = answer

    def read(self, size: int) -> Any:
        give = self._answer(size)
        if give is None:
            return None
        found, self._data = self._data[:give], self._data[give:]
        return found


class Reuses(Reader):
    """Returns the same memory each time."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data, lambda size: min(size, 500))
        self._memory = bytearray(500)

    def read(self, size: int) -> memoryview:
        found = super().read(size)
        self._memory[: len(found)] = found
        return memoryview(self._memory)[: len(found)]


class Blocking(Reader):
    """Raises BlockingIOError at every other read."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data, lambda size: size)
        self._turns = cycle((False, True))

    def read(self, size: int) -> Any:
        if next(self._turns):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return super().read(size)


class Doubled(io.BytesIO):
    """A subclass whose bytes are not those of its class: it gives each byte twice."""

    def read(self, size: int | None = -1, /) -> bytes:
        return b"".join(bytes((one, one)) for one in super().read(size))


READERS: dict[str, Callable[[bytes], Any]] = {
    "as much as asked": lambda data: Reader(data, lambda size: size),
    "less than asked": lambda data: Reader(data, lambda size: min(size, 999)),
    "one byte": lambda data: Reader(data, lambda size: 1),
    "more than asked": lambda data: Reader(data, lambda size: size + 12_345),
    "all at once": lambda data: Reader(data, lambda size: len(data)),
    "nothing every other time": lambda data: Reader(data, now_and_then(900)),
    "the same memory": Reuses,
    "blocks every other time": Blocking,
    "a subclass that gives more": lambda data: Doubled(data[::2]),
}
"""Readers of data whose bytes come in pairs: what each gives is the whole data, sooner or later."""

NONSENSE: dict[str, tuple[object, str]] = {
    "a text": ("text", r"returned str instead of bytes: open it in binary mode"),
    "a number": (7, r"returned 7 instead of bytes"),
    "a list": ([b"x"], r"returned list instead of bytes"),
}
"""Wrong return value of a reader -> the error."""
