"""Where a file comes from and where it goes: files, pipes, devices. No half-written file is left behind."""

from __future__ import annotations

import errno as E
import os
import select
import signal
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from typing_extensions import Buffer

STANDARD = "-"
"""The name that stands for stdin and stdout."""

_KEPT_OF_NAME = 100
"""How many bytes of a file's name its hidden file's name has; most file systems allow 255 in all."""


class Source:
    """An open file to send. `size` is in bytes; None where only the end will tell."""

    def __init__(self, path: str) -> None:
        """Open the file `path`, or stdin for "-". Raises OSError."""
        self.name: str = "stdin" if path == STANDARD else path
        self._fd = os.dup(0) if path == STANDARD else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(self._fd)
        if stat.S_ISDIR(found.st_mode):
            self.close()
            raise IsADirectoryError(
                E.EISDIR, "a directory cannot be sent: pack it, with tar for example", path
            )
        self.size: int | None = None
        self._left: int | None = None
        self._poll: select.poll | None = None
        if not stat.S_ISREG(found.st_mode):
            self._poll = select.poll()
            self._poll.register(self._fd, select.POLLIN)
        elif found.st_size:  # files in /proc say 0, and have bytes all the same
            self._left = self.size = max(0, found.st_size - os.lseek(self._fd, 0, os.SEEK_CUR))

    def read(self, most: int) -> bytes | None:
        """Read up to `most` bytes; empty at the end, None where no byte is there yet. Never waits for a pipe.

        A file that grows ends where it ended when it was opened. Raises OSError, which names the file.
        """
        if self._poll is not None and not self._poll.poll(0):
            return None
        try:
            data = os.read(self._fd, most if self._left is None else min(most, self._left))
        except OSError as error:
            error.filename = self.name
            raise
        if self._left is not None:
            self._left -= len(data)
        return data

    def close(self) -> None:
        os.close(self._fd)


class Sink:
    """Where a received file goes. An OSError of any method ends the transfer."""

    name: str
    most: int | None = None
    """The most bytes that one `write` may have; None: any number."""

    def open(self) -> None:
        """Create whatever `close` removes; what is open stays as it is."""

    def place(self, at: int, size: int) -> memoryview | None:
        """Where those bytes of the file may be put before they are known to be right; None: nowhere, they are
        written when they are. `write` is not called for what was placed."""
        return None

    def ready(self) -> bool:
        """Whether `write` would not wait for a reader."""
        return True

    def write(self, piece: Buffer) -> None:
        """Take the next bytes of the file, at most `most`."""
        raise NotImplementedError

    def commit(self) -> bool:
        """Put the whole file in its place.

        Returns False while that takes time: call again until it is True.
        """
        return True

    def finish(self) -> None:
        """Put the whole file in its place, as `commit`, and wait until that is done."""

    def close(self) -> None:
        """Free the sink; a file that is not whole is removed, where it can be."""


class Nowhere(Sink):
    """Keeps no byte. The receiver's digest says what came."""

    name = "nowhere"

    def write(self, piece: Buffer) -> None:
        pass


class StreamSink(Sink):
    """A pipe, a device or a terminal: its bytes are written when they have come."""

    most: int | None = select.PIPE_BUF  # a pipe that is ready takes so many at once

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self.name: str = name
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def ready(self) -> bool:
        return bool(self._poll.poll(0))

    def write(self, piece: Buffer) -> None:
        left = memoryview(piece)
        while left:
            left = left[os.write(self._fd, left) :]

    def close(self) -> None:
        os.close(self._fd)


class NewFile(Sink):
    """A file that gets its name when it is whole and on the disk; until then it is a hidden file in the same
    folder."""

    def __init__(self, path: Path, name: str = "", runs: bool = False) -> None:
        self.name: str = name or str(path)
        self._target, self._runs = path, runs
        self._part: Path | None = None
        self._placer = ThreadPoolExecutor(1)
        self._placing: Future[None] | None = None

    def open(self) -> None:
        if self._part is not None:
            return
        beginning = os.fsencode(self._target.name)[:_KEPT_OF_NAME].decode(errors="ignore")
        with _signals_held():  # a signal between these lines would leave the file behind
            fd, made = tempfile.mkstemp(prefix=f".{beginning}.", suffix=".part", dir=self._target.parent)
            self._part = Path(made)
            self._file = os.fdopen(fd, "wb", buffering=1 << 16)

    def write(self, piece: Buffer) -> None:
        self._file.write(piece)

    def commit(self) -> bool:
        # In a thread, because a disk may take longer than the sender waits for an answer.
        if self._placing is None:
            self._placing = self._placer.submit(self._place, _mode(self._target, self._runs))
        if not self._placing.done():
            return False
        self.finish()
        return True

    def finish(self) -> None:
        if self._placing is None:
            self.commit()
        assert self._placing is not None
        self._placing.result()

    def _place(self, mode: int) -> None:
        """Give the file its name; when this returns, the file survives a crash of the host."""
        assert self._part is not None
        with self._file:
            self._file.flush()
            os.fchmod(self._file.fileno(), mode)
            os.fsync(self._file.fileno())
        self._part.replace(self._target)
        self._part = None
        _sync_folder(self._target.parent)

    def close(self) -> None:
        # Removed first, so that nothing stays if a second Ctrl-C ends the wait for the disk below.
        if (part := self._part) is not None:
            part.unlink(missing_ok=True)
        self._placer.shutdown()
        if self._part is not None:
            with suppress(OSError):
                self._file.close()
            self._part = None


def _sync_folder(path: Path) -> None:
    """Make the names in the folder survive a crash, where the file system can promise that and the folder may
    be read."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (E.EINVAL, E.ENOTSUP):
            raise
    finally:
        os.close(folder)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Hold back the signals that end the command until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _mode(path: Path, runs: bool) -> int:
    """The permissions of the file that is replaced, or those of a new file, which may be a program that runs.

    The bits setuid and setgid are left out, because they were given to other bytes.
    """
    try:
        return path.stat().st_mode & 0o777
    except FileNotFoundError:
        os.umask(mask := os.umask(0))
        return (0o777 if runs else 0o666) & ~mask


def open_sink(path: str) -> Sink:
    """The sink for `path`, to be opened by `Sink.open`.

    Both raise OSError if nothing can be written there.
    """
    if path == STANDARD:
        return StreamSink(os.dup(1), "stdout")
    try:
        mode = Path(path).stat().st_mode
    except FileNotFoundError:
        return NewFile(Path(os.path.realpath(path)), path)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(E.EISDIR, "this is a directory, name a file", path)
    if not stat.S_ISREG(mode):
        return StreamSink(os.open(path, os.O_WRONLY | os.O_CLOEXEC), path)
    if not os.access(path, os.W_OK):
        raise PermissionError(E.EACCES, os.strerror(E.EACCES), path)
    return NewFile(Path(os.path.realpath(path)), path)
