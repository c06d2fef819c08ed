"""Where a file comes from and where it goes: files, pipes, devices; and nothing half-written is left."""

from __future__ import annotations

import errno as E
import os
import select
import signal
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STANDARD = "-"
"""The name of stdin and stdout."""


class Source:
    """An open file to send. `size` in bytes, None where only the end will tell."""

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self.name = "stdin" if path == STANDARD else path
        self._fd = os.dup(0) if path == STANDARD else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(self._fd)
        if stat.S_ISDIR(found.st_mode):
            self.close()
            raise IsADirectoryError(E.EISDIR, "it is a directory: pack it, with tar for example", path)
        self._regular = stat.S_ISREG(found.st_mode)
        self.size = None
        if self._regular:
            self.size = max(0, found.st_size - os.lseek(self._fd, 0, os.SEEK_CUR))

    def read(self, most: int) -> bytes | None:
        """Up to `most` bytes; empty at the end, None where none are there yet. Never waits for a pipe."""
        if not self._regular and not select.select([self._fd], [], [], 0)[0]:
            return None
        return os.read(self._fd, most)

    def close(self) -> None:
        os.close(self._fd)


class Sink:
    """Where a received file goes. An OSError of any method ends the transfer."""

    name: str

    def open(self) -> None:
        """Make what `close` removes: called once, by who will close it."""

    def ready(self) -> bool:
        """Whether a piece can be written without waiting for a reader."""
        return True

    def write(self, piece: bytes) -> None:
        """Take the next bytes of the file, at most PIPE_BUF."""
        raise NotImplementedError

    def commit(self) -> None:
        """The file is whole."""

    def close(self) -> None:
        """Let go of it; what is not whole is removed, where it can be."""


class Stream(Sink):
    """A pipe, a device or a terminal: bytes go there as they come."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd, self.name = fd, name
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def ready(self) -> bool:
        return bool(self._poll.poll(0))

    def write(self, piece: bytes) -> None:
        # A pipe that is ready takes PIPE_BUF bytes at once, and no piece is longer.
        while piece:
            piece = piece[os.write(self._fd, piece) :]

    def close(self) -> None:
        os.close(self._fd)


class NewFile(Sink):
    """A file that gets its name when it is whole; until then it is a hidden one beside it."""

    def __init__(self, path: Path, name: str = "") -> None:
        self.name = name or str(path)
        self._target = path
        self._part: Path | None = None

    def open(self) -> None:
        with _signals_held():  # a file that nobody knows of would stay
            fd, made = tempfile.mkstemp(
                prefix=f".{self._target.name[:100]}.", suffix=".part", dir=self._target.parent
            )
            self._part = Path(made)
            self._file = os.fdopen(fd, "wb", buffering=1 << 16)

    def write(self, piece: bytes) -> None:
        self._file.write(piece)

    def commit(self) -> None:
        assert self._part is not None
        self._file.close()
        self._part.chmod(_mode(self._target))
        self._part.replace(self._target)
        self._part = None

    def close(self) -> None:
        if self._part is not None:
            with suppress(OSError):
                self._file.close()
            self._part.unlink(missing_ok=True)
            self._part = None


@contextmanager
def _signals_held() -> Iterator[None]:
    """What ends the command waits until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _mode(path: Path) -> int:
    """The permissions of a file that is replaced, or those of a new one."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        os.umask(mask := os.umask(0))
        return 0o666 & ~mask


def open_sink(path: str) -> Sink:
    """Where `path` says; `Sink.open` is next. Both raise OSError if nothing can be written there."""
    if path == STANDARD:
        return Stream(os.dup(1), "stdout")
    if Path(path).is_dir():
        raise IsADirectoryError(E.EISDIR, "it is a directory", path)
    if Path(path).exists() and not Path(path).is_file():
        return Stream(os.open(path, os.O_WRONLY | os.O_CLOEXEC), path)
    if Path(path).exists() and not os.access(path, os.W_OK):
        raise PermissionError(E.EACCES, os.strerror(E.EACCES), path)
    return NewFile(Path(path).resolve(), path)
