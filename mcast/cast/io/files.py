"""Where a file comes from and where it goes: files, pipes, devices.

No half-written file has the name of a whole one. What came before a kill stays hidden beside that name.
"""

from __future__ import annotations

import errno as E
import filecmp
import os
import re
import select
import signal
import stat
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path

from typing_extensions import Buffer

from mcast.cast.io.partfile import PartFile

STANDARD = "-"
"""The name that stands for stdin and stdout."""


class Source:
    """An open file to send. `size` is in bytes; None where only the end will tell."""

    def __init__(self, path: str) -> None:
        """Open the file `path`, or stdin for "-". Raises OSError."""
        self.name: str = "stdin" if path == STANDARD else path
        self._path = path
        self._fd = os.dup(0) if path == STANDARD else _opened(path)
        found = os.fstat(self._fd)
        if stat.S_ISDIR(found.st_mode):
            self.close()
            raise IsADirectoryError(
                E.EISDIR, "a directory cannot be sent: pack it, with tar for example", path
            )
        self.size: int | None = None
        self._left: int | None = None
        self._begins = 0
        self._poll: select.poll | None = None
        if not stat.S_ISREG(found.st_mode):
            self._poll = select.poll()
            self._poll.register(self._fd, select.POLLIN)
        elif found.st_size:  # files in /proc say 0, and have bytes all the same
            self._begins = os.lseek(self._fd, 0, os.SEEK_CUR)
            self._left = self.size = max(0, found.st_size - self._begins)

    def read(self, most: int) -> bytes | None:
        """Read up to `most` bytes; empty at the end, None where no byte is there yet. Never waits for a pipe.

        A file that grows ends where it ended when it was opened. Raises OSError, which names the file.
        """
        if self._poll is not None and not self._poll.poll(0):
            return None
        try:
            data = os.read(self._fd, most if self._left is None else min(most, self._left))
        except BlockingIOError:  # others read there, too
            return None
        except OSError as error:
            error.filename = self.name
            raise
        if self._left is not None:
            self._left -= len(data)
        return data

    def rewind(self) -> bool:
        """Begin anew with the first byte. False if that cannot be: this is no file of a known size."""
        if self._fd < 0:
            self._fd = _opened(self._path)
        if self.size is None and self._poll is None and not os.pread(self._fd, 1, 0):
            self.size = 0  # an empty file, and none of /proc
        if self.size is not None:
            os.lseek(self._fd, self._begins, os.SEEK_SET)
            self._left = self.size
        return self.size is not None

    def suspend(self) -> None:
        """Free the descriptor until `again`, which opens the path anew."""
        if self._path != STANDARD:
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _opened(path: str) -> int:
    """Open a file to read, without waiting for one that writes to a named pipe."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(fd, True)
    return fd


class Sink:
    """Where a received file goes. An OSError of any method ends the transfer."""

    name: str
    max_write: int | None = None
    """The most bytes that one `write` may have; None: any number."""
    random_access: bool = False
    """Whether `place` or `put` takes the bytes of an object of known size in any order."""
    mtime: int | None = None
    """When the file was last changed, in ns since 1970, which a new file gets; None: now."""
    mismatch: str = ""
    """What is said of bytes that stay as they are, where the whole differs from them. Which part does is not
    said, or a stranger could guess at one after another."""

    def open(self) -> None:
        """Create whatever `close` removes; what is open stays as it is."""

    @property
    def stored_size(self) -> int:
        """How many bytes an earlier run has left, from the beginning on. They may be of another file."""
        return 0

    def read_back(self, size: int) -> bytes:
        """The next bytes, as an earlier run has left them; fewer where it has left fewer."""
        return b""

    def skip(self, size: int) -> None:
        """So many bytes, which `again` has shown, are right as they are: `write` takes what follows them."""

    def keep_part(self) -> None:
        """Let `close` leave what has been written, for another run to go on from there."""

    @property
    def part_file(self) -> Path | None:
        """The file that `close` has left for another run; None if there is none."""
        return None

    def buffer_at(self, at: int, size: int) -> memoryview | None:
        """Where those bytes of the file may be put before they are known to be right; None: nowhere, they are
        written when they are. `write` is not called for what was placed."""
        return None

    def write_at(self, at: int, data: Buffer) -> None:
        """Take bytes in the middle of the file, which are right; `again` and `skip` come to them in their
        turn. Only for a sink that `scatters`, and has no `place`."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Whether `write` would not wait for a reader."""
        return True

    def write(self, data: Buffer) -> None:
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


class NullSink(Sink):
    """Keeps no byte. The receiver's digest says what came."""

    name = "nowhere"

    def write(self, data: Buffer) -> None:
        pass


class StreamSink(Sink):
    """A pipe, a device or a terminal, which gets what it takes without waiting, and the rest later."""

    max_write: int | None = select.PIPE_BUF  # a pipe that is ready takes so many at once

    def __init__(self, fd: int, name: str) -> None:
        self._fd = -1
        self.name: str = name
        self._left = b""
        self._poll = select.poll()
        if fd >= 0:
            self._take(fd)

    def _take(self, fd: int) -> None:
        self._fd = fd
        self._poll.register(fd, select.POLLOUT)

    def ready(self) -> bool:
        return self.commit() and bool(self._poll.poll(0))

    def write(self, data: Buffer) -> None:
        self._left += bytes(data)
        self.commit()

    def commit(self) -> bool:
        while self._left and self._poll.poll(0):
            try:
                done = os.write(self._fd, self._left[: select.PIPE_BUF])
            except BlockingIOError:  # others write there, too
                break
            self._left = self._left[done:]
        return not self._left

    def finish(self) -> None:
        while not self.commit():
            self._poll.poll()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class NamedPipeSink(StreamSink):
    """A named pipe, which is not ready until somebody has opened it to read."""

    def __init__(self, path: str) -> None:
        super().__init__(-1, path)

    def commit(self) -> bool:
        if self._fd < 0:
            try:
                fd = _opened_to_write(self.name)
            except OSError as error:
                if error.errno != E.ENXIO:
                    raise
                return False  # nobody reads yet
            self._take(fd)
        return super().commit()


def _opened_to_write(path: str, waits: bool = False) -> int:
    """Open what is no regular file, and is written to as it is; `waits` for the reader of a named pipe."""
    flags = os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC
    fd = os.open(path, flags if waits else flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):  # has come to be there meanwhile, and is not written into
        os.close(fd)
        raise FileExistsError(E.EEXIST, os.strerror(E.EEXIST), path)
    return fd


class FileSink(Sink):
    """A file that gets its name when it is whole and on the disk; until then it is a hidden file in the same
    folder.

    The hidden file `.NAME.part` has what an earlier run has left, if that was killed or `keep` was called.
    One run at a time has that file; others have one of a random name, and leave nothing.

    path      of which the folder has no link on its way, and gets none meanwhile
    replaces  whether a file may be replaced that has come to be there meanwhile, and differs
    """

    random_access = True

    def __init__(self, path: Path, name: str = "", runs: bool = False, replaces: bool = True) -> None:
        self.name: str = name or str(path)
        self._target, self._executable, self._replaces = path, runs, replaces
        self._part: PartFile | None = None
        self._keep_part = False
        self._part_path: Path | None = None
        self._publisher = ThreadPoolExecutor(1)
        self._publishing: Future[None] | None = None

    def open(self) -> None:
        if self._part is None:
            with _signals_held():  # a signal between its lines would leave the file behind
                self._part = PartFile(self._target)
        self._require_folder()

    def _require_folder(self) -> None:
        """Raise OSError if a link has taken the place of a folder on the way, and may lead anywhere."""
        folder = self._target.parent
        if folder.is_absolute() and Path(os.path.realpath(folder)) != folder:
            raise NotADirectoryError(
                E.ENOTDIR, "a link has come to be there instead of a folder", str(folder)
            )

    @property
    def stored_size(self) -> int:
        return 0 if self._part is None else self._part.stored_size

    def read_back(self, size: int) -> bytes:
        return self._opened.read_back(size)

    def skip(self, size: int) -> None:
        self._opened.offset += size

    def write(self, data: Buffer) -> None:
        self._opened.write(data)

    def write_at(self, at: int, data: Buffer) -> None:
        self._opened.write_at(at, data)

    @property
    def _opened(self) -> PartFile:
        assert self._part is not None
        return self._part

    def keep_part(self) -> None:
        self._keep_part = True

    @property
    def part_file(self) -> Path | None:
        return self._part_path

    def commit(self) -> bool:
        # In a thread, because a disk may take longer than the sender waits for an answer.
        if self._publishing is None:
            self._publishing = self._publisher.submit(self._publish, _mode(self._target, self._executable))
        if not self._publishing.done():
            return False
        self.finish()
        return True

    def finish(self) -> None:
        if self._publishing is None:
            self.commit()
        assert self._publishing is not None
        self._publishing.result()

    def _publish(self, mode: int) -> None:
        """Give the file its name; when this returns, the file survives a crash of the host."""
        part = self._opened
        with part.file:
            part.cut()
            if self.mtime is not None:
                with suppress(OSError):  # a file system without such times has the bytes all the same
                    os.utime(part.file.fileno(), ns=(time.time_ns(), self.mtime))
            os.fsync(part.file.fileno())
            os.fchmod(part.file.fileno(), mode)  # not before: another run goes on if this one is killed
            self._require_folder()
            if not part.exists:
                raise FileNotFoundError(E.ENOENT, os.strerror(E.ENOENT), str(part.path))
            if not self._replaces and os.path.lexists(self._target) and not self._same(part.path):
                raise FileExistsError(E.EEXIST, os.strerror(E.EEXIST), str(self._target))
            if self._replaces:
                _require_replaceable(self._target)
            part.path.replace(self._target)  # while this run still has the file to itself
        self._part = None
        _sync_folder(self._target.parent)

    def _same(self, part: Path) -> bool:
        """Whether the target is a file already that has the same bytes, as another run may have made it."""
        return not self._target.is_symlink() and filecmp.cmp(part, self._target, shallow=False)

    def close(self) -> None:
        # Removed first, so that nothing stays if a second Ctrl-C ends the wait for the disk below.
        if (part := self._part) is not None:
            there = part.exists
            stays = there and (part.resumable and self._keep_part if part.offset else part.stored_size > 0)
            if there and not stays:
                with suppress(OSError):
                    part.path.unlink()
        # Not joined: where Python collects garbage as a thread begins, that would wait for ever.
        if self._publishing is not None:
            wait([self._publishing])
        self._publisher.shutdown(wait=False)
        if (part := self._part) is not None:
            self._part_path = part.path if stays else None
            with suppress(OSError):
                part.file.close()
            self._part = None


class ExistingFile(Sink):
    """A file that is there already: it counts as received if it has the object's bytes, and is never written.

    The end of whatever differs raises FileExistsError.
    """

    mismatch: str = os.strerror(E.EEXIST)

    def __init__(self, path: Path, size: int | None) -> None:
        """Raises FileExistsError, too, for what is no file, cannot be read, or is not `size` bytes long."""
        self.name: str = str(path)
        self._at = 0
        self._same = True
        try:
            if not path.is_file():  # a program that waits for a pipe's reader must not find this one
                raise self._differs()
            self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            raise self._differs() from None
        found = os.fstat(self._fd)
        self._size = found.st_size
        self._sized = size is not None
        if not stat.S_ISREG(found.st_mode) or size not in (None, self._size):
            self.close()
            raise self._differs()

    def _differs(self) -> FileExistsError:
        return FileExistsError(E.EEXIST, self.mismatch, self.name)

    @property
    def stored_size(self) -> int:
        return self._size if self._sized else 0  # others are told this, and need not know the size

    def read_back(self, size: int) -> bytes:
        return os.pread(self._fd, size, self._at)

    def skip(self, size: int) -> None:
        self._at += size

    def write(self, data: Buffer) -> None:
        size = memoryview(data).nbytes
        self._same &= self.read_back(size) == data
        self.skip(size)

    def commit(self) -> bool:
        if not self._same or self._at != self._size:
            raise self._differs()
        return True

    def close(self) -> None:
        os.close(self._fd)


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
    with suppress(FileNotFoundError):
        if stat.S_ISREG(mode := path.lstat().st_mode):
            return mode & 0o777
    return (0o777 if runs else 0o666) & ~_umask()


def _umask() -> int:
    """What a new file is not permitted, without a moment in which files of other threads have no mask."""
    with suppress(OSError):
        status = Path("/proc/self/status").read_text(errors="replace")
        if found := re.search(r"^Umask:\s*(\d+)$", status, re.MULTILINE):
            return int(found[1], 8)
    return 0o077


def native(path: os.PathLike[str]) -> str:
    """The path as this process can open it: what the locale cannot say is taken as UTF-8."""
    given = os.fspath(path)
    with suppress(UnicodeEncodeError):
        return os.fsdecode(os.fsencode(given))
    return os.fsdecode(given.encode("utf-8", "surrogateescape"))


def open_sink(path: str, waits: bool = False) -> Sink:
    """The sink for `path`, or stdout for "-", to be opened by `Sink.open`.

    Both raise OSError if nothing can be written there. `waits` for the reader of a named pipe.
    """
    return StreamSink(os.dup(1), "stdout") if path == STANDARD else sink_of_path(path, waits=waits)


def sink_of_path(
    path: str, follows: bool = True, runs: bool = False, replaces: bool = True, waits: bool = False
) -> Sink:
    """The sink for a path: the one rule for what is there already.

    - A regular file is replaced, whole and at once, when the new one is on the disk. One that may not be
      written is refused, even where root could; so is a folder.
    - A pipe, a device or a socket is opened, and written to as the bytes come; it is never replaced.
    - A link counts as what it leads to, and stays. With `follows=False` the link itself is replaced, and what
      it leads to stays: for names that a stranger has chosen.

    runs      whether a new file is a program
    replaces  whether a file may be replaced that has come to be there meanwhile, and differs
    waits     whether to wait for the reader of a named pipe; else the sink is not ready until there is one
    """
    target = Path(os.path.realpath(path) if follows else path)
    try:
        mode = Path(path).stat(follow_symlinks=follows).st_mode
    except FileNotFoundError:
        return FileSink(target, path, runs, replaces)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(E.EISDIR, "this is a directory, name a file", path)
    if stat.S_ISREG(mode) or stat.S_ISLNK(mode):
        _require_replaceable(target)
        return FileSink(target, path, runs, replaces)
    if stat.S_ISFIFO(mode) and not waits:
        return NamedPipeSink(path)
    return StreamSink(_opened_to_write(path, waits), path)


def _require_replaceable(path: Path) -> None:
    """Raise OSError if there is a file that is read-only, or neither a file nor a link."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISREG(mode):
        require_access(str(path), os.W_OK)
        if not mode & 0o222:
            reason = (
                f"{os.strerror(E.EACCES)}: its mode is {stat.S_IMODE(mode):04o}; chmod u+w makes it writable"
            )
            raise PermissionError(E.EACCES, reason, str(path))
    elif not (stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):  # nothing replaces a folder: the system refuses
        raise OSError("a pipe, a socket or a device is there, and is not replaced")


def require_access(path: str, mode: int) -> None:
    """Raise OSError, as the system says it, if the path may not be read or written.

    mode  os.R_OK or os.W_OK; os.W_OK | os.X_OK: whether there may be new files in a folder
    """
    if os.access(path, mode):
        return
    flags = {os.R_OK: os.O_RDONLY, os.W_OK: os.O_WRONLY}.get(mode, os.O_TMPFILE | os.O_WRONLY)
    os.close(os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC))  # access does not say why, this does
    raise PermissionError(E.EACCES, os.strerror(E.EACCES), path)
