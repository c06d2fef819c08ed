"""Files, pipes and devices to read objects from and to write them to.

An incomplete file never has its final name: `FileSink` writes a hidden file in the same folder (see
`partfile`), and renames it when the object is complete and on the disk. After a kill the hidden file stays,
and the next run resumes from it.
"""

from __future__ import annotations

import errno as E
import os
import re
import select
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import Buffer

from mcast.cast.io.partfile import PartFile

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["Sink", "Source"]

STANDARD = "-"
"""Path that means stdin or stdout."""


class Source:
    """An open file to send. `size` is in bytes; None if unknown before the end."""

    def __init__(self, path: str) -> None:
        """Open the file `path`, or stdin for "-". Raises OSError."""
        self.name: str = "stdin" if path == STANDARD else path
        self._path = path
        self._fd = os.dup(0) if path == STANDARD else _open_for_reading(path)
        found = os.fstat(self._fd)
        if stat.S_ISDIR(found.st_mode):
            self.close()
            raise IsADirectoryError(
                E.EISDIR, "a directory cannot be sent: pack it into one file, with tar for example", path
            )
        self.size: int | None = None
        self._remaining: int | None = None
        self._start = 0
        self._poll: select.poll | None = None
        if not stat.S_ISREG(found.st_mode):
            self._poll = select.poll()
            self._poll.register(self._fd, select.POLLIN)
        elif found.st_size:  # files in /proc report 0, but have bytes
            self._start = os.lseek(self._fd, 0, os.SEEK_CUR)
            self._remaining = self.size = max(0, found.st_size - self._start)

    def read(self, size: int) -> bytes | None:
        """Read up to `size` bytes; empty at the end, None if a pipe has no bytes yet. Never waits for a pipe.

        Bytes that are appended after the file was opened are not read. Raises OSError with the file's name.
        """
        if self._poll is not None and not self._poll.poll(0):
            return None
        try:
            data = os.read(self._fd, size if self._remaining is None else min(size, self._remaining))
        except BlockingIOError:  # another process read the bytes after the poll
            return None
        except OSError as error:
            error.filename = self.name
            raise
        if self._remaining is not None:
            self._remaining -= len(data)
        return data

    def rewind(self) -> bool:
        """Continue with the first byte; return False if the file has no known size and cannot seek."""
        if self._fd < 0:
            self._fd = _open_for_reading(self._path)
        if self.size is None and self._poll is None and not os.pread(self._fd, 1, 0):
            self.size = 0  # an empty file, not one of /proc
        if self.size is not None:
            os.lseek(self._fd, self._start, os.SEEK_SET)
            self._remaining = self.size
        return self.size is not None

    def suspend(self) -> None:
        """Close the descriptor until `rewind` opens the path again."""
        if self._path != STANDARD:
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open_for_reading(path: str) -> int:
    """Open a file to read, without waiting for the writer of a named pipe."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(fd, True)
    return fd


class Sink:
    """Destination of one received object. An OSError of any method ends the transfer.

    A receiver calls `open`, verifies stored bytes of an earlier run by `read_back` and `mark_verified`, then
    calls `write` for the following bytes in order, `commit` after the last one, and always `close`.
    """

    name: str
    max_write: int | None = None
    """Maximum number of bytes for one `write`; None: no limit."""
    random_access: bool = False
    """True if `buffer_at` or `write_at` accepts the bytes of an object of known size in any order."""
    streams: bool = False
    """True if the bytes of an object are used before `commit`."""
    mtime: int | None = None
    """Modification time to give to a new file, in ns since 1970; None: now."""
    mismatch: str = ""
    """Reason to report if the object differs from stored bytes that must stay; empty: overwrite them.

    Reported only after the complete object was compared: a sender must not learn which block differs, or it
    could guess the file block by block.
    """

    def open(self) -> None:
        """Create the file or take other resources that `close` frees; do nothing if already open."""

    @property
    def stored_size(self) -> int:
        """Number of bytes that an earlier run has left from the beginning on, perhaps of another file."""
        return 0

    def read_back(self, size: int) -> bytes:
        """Return up to `size` of the next stored bytes."""
        return b""

    def mark_verified(self, size: int) -> None:
        """Accept the next `size` stored bytes, which `read_back` has returned, as verified."""

    def keep_part(self) -> None:
        """Make `close` keep an incomplete file, from which a later run resumes."""

    @property
    def part_file(self) -> Path | None:
        """File that `close` has kept for a later run; None if there is none."""
        return None

    def buffer_at(self, at: int, size: int) -> memoryview | None:
        """Return memory for these bytes, to be filled before they are verified; None if there is none.

        `write` is not called for bytes that were received into such memory.
        """
        return None

    def write_at(self, at: int, data: Buffer) -> None:
        """Write verified bytes anywhere; `read_back` and `mark_verified` reach them later, in order.

        Called only if `random_access` is True and `buffer_at` returns None.
        """
        raise NotImplementedError

    def ready(self) -> bool:
        """Return True if `write` would not wait for a reader."""
        return True

    def write(self, data: Buffer) -> None:
        """Write the next bytes, at most `max_write`."""
        raise NotImplementedError

    def commit(self) -> bool:
        """Publish the complete file; return False while that takes time, and call again until True."""
        return True

    def finish(self) -> None:
        """Publish the complete file, as `commit` does, and wait until it is done."""

    def close(self) -> None:
        """Free the sink, and remove an incomplete file if possible."""


class NullSink(Sink):
    """Discards all bytes. The digest of the received object still tells that they were right."""

    name = "nowhere"

    def write(self, data: Buffer) -> None:
        pass


class StreamSink(Sink):
    """A pipe, a device or a terminal. Writes what it accepts without waiting, and the rest later."""

    max_write: int | None = select.PIPE_BUF  # a pipe that is ready accepts this many bytes at once
    streams = True

    def __init__(self, fd: int, name: str) -> None:
        self._fd = -1
        self.name: str = name
        self._unwritten = b""
        self._poll = select.poll()
        if fd >= 0:
            self._set_fd(fd)

    def _set_fd(self, fd: int) -> None:
        self._fd = fd
        self._poll.register(fd, select.POLLOUT)

    def ready(self) -> bool:
        return self.commit() and bool(self._poll.poll(0))

    def write(self, data: Buffer) -> None:
        self._unwritten += bytes(data)
        self.commit()

    def commit(self) -> bool:
        while self._unwritten and self._poll.poll(0):
            try:
                done = os.write(self._fd, self._unwritten[: select.PIPE_BUF])
            except BlockingIOError:  # another process filled the pipe after the poll
                break
            self._unwritten = self._unwritten[done:]
        return not self._unwritten

    def finish(self) -> None:
        while not self.commit():
            self._poll.poll()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class NamedPipeSink(StreamSink):
    """A named pipe, which is not ready until a reader has opened it."""

    def __init__(self, path: str) -> None:
        super().__init__(-1, path)

    def commit(self) -> bool:
        if self._fd < 0:
            try:
                fd = _open_for_writing(self.name)
            except OSError as error:
                if error.errno != E.ENXIO:
                    raise
                return False  # no reader yet
            self._set_fd(fd)
        return super().commit()


def _open_for_writing(path: str, wait_for_reader: bool = False) -> int:
    """Open a pipe or a device to write; wait for the reader of a named pipe if asked to.

    Raises FileExistsError for a regular file, which is replaced but never written into.
    """
    flags = os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC
    fd = os.open(path, flags if wait_for_reader else flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):  # was created after the caller looked
        os.close(fd)
        raise FileExistsError(E.EEXIST, os.strerror(E.EEXIST), path)
    return fd


class FileSink(Sink):
    """A regular file, which gets its name when it is complete and on the disk.

    Until then it is the hidden file `.NAME.part` in the same folder, from which a later run resumes if this
    one is killed or `keep_part` was called. A second run at the same time uses a file of a random name, and
    leaves nothing.

    path        target; its folder is a real path, without links
    name        name in messages to the user; default: the path
    executable  True to give a new file the permissions of a program
    replace     True to replace a different file that was created at `path` during the transfer
    """

    random_access = True

    def __init__(self, path: Path, name: str = "", executable: bool = False, replace: bool = True) -> None:
        self.name: str = name or str(path)
        self._target, self._executable, self._replace = path, executable, replace
        self._part: PartFile | None = None
        self._keep_part = False
        self._part_path: Path | None = None
        from concurrent.futures import ThreadPoolExecutor

        self._publisher = ThreadPoolExecutor(1)
        self._publishing: Future[None] | None = None

    def open(self) -> None:
        if self._part is None:
            with _signals_blocked():  # an interrupt within would leave a file that `close` does not know
                self._part = PartFile(self._target)
        self._require_folder()

    def _require_folder(self) -> None:
        """Raise OSError if a folder of the path was replaced by a link, which may lead anywhere."""
        folder = self._target.parent
        if folder.is_absolute() and Path(os.path.realpath(folder)) != folder:
            raise NotADirectoryError(
                E.ENOTDIR, "the folder was replaced by a link during the transfer", str(folder)
            )

    @property
    def stored_size(self) -> int:
        return 0 if self._part is None else self._part.stored_size

    def read_back(self, size: int) -> bytes:
        return self._opened.read_back(size)

    def mark_verified(self, size: int) -> None:
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
        # In a thread: fsync may take longer than the sender waits for an answer.
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
        """Sync the file and rename it; when this returns, the file survives a crash of the host."""
        part = self._opened
        with part.file:
            part.cut()
            if self.mtime is not None:
                with suppress(OSError):  # a file system without such times still stores the bytes
                    os.utime(part.file.fileno(), ns=(time.time_ns(), self.mtime))
            os.fsync(part.file.fileno())
            os.fchmod(part.file.fileno(), mode)  # last: it clears the mark without which no run resumes
            self._require_folder()
            if not part.exists:
                raise FileNotFoundError(E.ENOENT, os.strerror(E.ENOENT), str(part.path))
            if not self._replace and os.path.lexists(self._target) and not self._equals_target(part.path):
                raise FileExistsError(E.EEXIST, os.strerror(E.EEXIST), str(self._target))
            if self._replace:
                _require_replaceable(self._target)
            part.path.replace(self._target)  # while this run still holds the lock
        self._part = None
        _sync_folder(self._target.parent)

    def _equals_target(self, part: Path) -> bool:
        """Return True if the target has the same bytes: another run may have received the same object."""
        import filecmp

        return not self._target.is_symlink() and filecmp.cmp(part, self._target, shallow=False)

    def close(self) -> None:
        # Removed first, so that no file is left if a second Ctrl-C ends the wait for the disk below.
        if (part := self._part) is not None:
            exists = part.exists
            keep = exists and (part.resumable and self._keep_part if part.offset else part.stored_size > 0)
            if exists and not keep:
                with suppress(OSError):
                    part.path.unlink()
        # Wait for the future, not for the thread: a join in a finalizer that runs while that thread starts
        # would never return.
        if self._publishing is not None:
            from concurrent.futures import wait

            wait([self._publishing])
        self._publisher.shutdown(wait=False)
        if (part := self._part) is not None:
            self._part_path = part.path if keep else None
            with suppress(OSError):
                part.file.close()
            self._part = None


class ExistingFile(Sink):
    """An existing file, compared with the object and never written.

    The object counts as received if the bytes are equal; otherwise `commit` raises FileExistsError.
    """

    mismatch: str = os.strerror(E.EEXIST)

    def __init__(self, path: Path, size: int | None) -> None:
        """Open the file. Raises FileExistsError if it is not a readable regular file of `size` bytes."""
        self.name: str = str(path)
        self._at = 0
        self._equal = True
        try:
            if not path.is_file():  # opening a named pipe would wake a writer that waits for a reader
                raise self._mismatch_error()
            self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            raise self._mismatch_error() from None
        found = os.fstat(self._fd)
        self._size = found.st_size
        self._size_known = size is not None
        if not stat.S_ISREG(found.st_mode) or size not in (None, self._size):
            self.close()
            raise self._mismatch_error()

    def _mismatch_error(self) -> FileExistsError:
        return FileExistsError(E.EEXIST, self.mismatch, self.name)

    @property
    def stored_size(self) -> int:
        # The group learns this number. For a stream it stays 0, or the group would learn the file's size.
        return self._size if self._size_known else 0

    def read_back(self, size: int) -> bytes:
        return os.pread(self._fd, size, self._at)

    def mark_verified(self, size: int) -> None:
        self._at += size

    def write(self, data: Buffer) -> None:
        size = memoryview(data).nbytes
        self._equal &= self.read_back(size) == data
        self.mark_verified(size)

    def commit(self) -> bool:
        if not self._equal or self._at != self._size:
            raise self._mismatch_error()
        return True

    def close(self) -> None:
        os.close(self._fd)


def _sync_folder(path: Path) -> None:
    """Sync the folder, so that a new name survives a crash, if it is readable and the file system can."""
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
def _signals_blocked() -> Iterator[None]:
    """Block SIGINT, SIGTERM and SIGHUP in this thread until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _mode(path: Path, executable: bool) -> int:
    """Return the permissions of the file that is replaced, or those of a new file.

    The setuid and setgid bits are dropped: they were granted to other bytes.
    """
    with suppress(FileNotFoundError):
        if stat.S_ISREG(mode := path.lstat().st_mode):
            return mode & 0o777
    return (0o777 if executable else 0o666) & ~_umask()


def _umask() -> int:
    """Return the process's umask; 0o077 if unknown."""
    # Not by os.umask, which would clear the mask for a moment in all threads.
    with suppress(OSError):
        status = Path("/proc/self/status").read_text(errors="replace")
        if found := re.search(r"^Umask:\s*(\d+)$", status, re.MULTILINE):
            return int(found[1], 8)
    return 0o077


def native(path: os.PathLike[str]) -> str:
    """Return the path as this process can open it: characters that the locale lacks are encoded as UTF-8."""
    given = os.fspath(path)
    with suppress(UnicodeEncodeError):
        return os.fsdecode(os.fsencode(given))
    return os.fsdecode(given.encode("utf-8", "surrogateescape"))


def open_sink(path: str, wait_for_reader: bool = False) -> Sink:
    """Return the sink for `path`, or for stdout if it is "-"; see `sink_of_path`."""
    if path == STANDARD:
        return StreamSink(os.dup(1), "stdout")
    return sink_of_path(path, wait_for_reader=wait_for_reader)


def sink_of_path(
    path: str,
    follow_links: bool = True,
    executable: bool = False,
    replace: bool = True,
    wait_for_reader: bool = False,
) -> Sink:
    """Return the sink for a path, to be opened by `Sink.open`. Both raise OSError if it cannot be written.

    - A regular file is replaced in one step when the new one is on the disk. A read-only file is refused,
      even if root could replace it, and so is a folder.
    - A pipe, a device or a socket is opened, gets the bytes as they arrive, and is never replaced.
    - A link is followed and stays. With `follow_links=False` the link itself is replaced, and the file that
      it leads to stays: for names that a sender has chosen.

    executable       True to give a new file the permissions of a program
    replace          True to replace a different file that is created at `path` during the transfer
    wait_for_reader  True to wait for the reader of a named pipe; otherwise the sink is not ready without one
    """
    target = Path(os.path.realpath(path) if follow_links else path)
    try:
        mode = Path(path).stat(follow_symlinks=follow_links).st_mode
    except FileNotFoundError:
        return FileSink(target, path, executable, replace)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(E.EISDIR, "this is a directory: name a file", path)
    if stat.S_ISREG(mode) or stat.S_ISLNK(mode):
        _require_replaceable(target)
        return FileSink(target, path, executable, replace)
    if stat.S_ISFIFO(mode) and not wait_for_reader:
        return NamedPipeSink(path)
    return StreamSink(_open_for_writing(path, wait_for_reader), path)


def _require_replaceable(path: Path) -> None:
    """Raise OSError for a read-only file, a pipe, a socket or a device at the path."""
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
    elif not (stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):  # the system refuses to replace a folder
        raise OSError("a pipe, a socket or a device has this name, and is not replaced")


def require_access(path: str, mode: int) -> None:
    """Raise the system's OSError if this process may not access the path.

    mode  os.R_OK or os.W_OK for a file; os.W_OK | os.X_OK for a folder, to create files in it
    """
    if os.access(path, mode):
        return
    flags = {os.R_OK: os.O_RDONLY, os.W_OK: os.O_WRONLY}.get(mode, os.O_TMPFILE | os.O_WRONLY)
    os.close(os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC))  # os.access gives no reason, open does
    raise PermissionError(E.EACCES, os.strerror(E.EACCES), path)
