"""The hidden file in which a file comes, and which another run goes on with."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from codecs import utf_8_decode
from contextlib import suppress
from hashlib import blake2b
from io import FileIO
from pathlib import Path

from typing_extensions import Buffer

_NAME_BYTES = 100
"""How many bytes of a file's name its hidden file's name has; most file systems allow 255 in all."""
_MARK_BIT = stat.S_ISVTX
"""The bit of its mode by which a hidden file is told from one that somebody has given such a name: no umask
makes that bit, and on a file it means nothing."""


class PartFile:
    """The hidden file of a target, open: `.NAME.part`, which one run at a time has, or one of a random name.

    path   where the file is
    lasts  whether another run would find the file
    at     how many bytes are right; `write` goes on there
    left   how many bytes an earlier run has left, as long as none of these has been written over
    """

    def __init__(self, target: Path) -> None:
        name = os.fsencode(target.name)
        beginning = target.name
        if len(name) > _NAME_BYTES:
            # Cut between two characters of UTF-8, because some file systems take nothing else.
            cut, _ = utf_8_decode(name[:_NAME_BYTES], "surrogateescape", False)
            beginning = os.fsdecode(cut.encode("utf-8", "surrogateescape"))
            beginning += "." + blake2b(name, digest_size=8).hexdigest()
        self.path: Path = target.parent / f".{beginning}.part"
        fd = _open_exclusively(self.path)
        self.resumable: bool = fd is not None
        if fd is None:
            fd, made = tempfile.mkstemp(prefix=f".{beginning}.", suffix=".part", dir=target.parent)
            self.path = Path(made)
        self.file: FileIO = FileIO(fd, "r+b")
        self.offset: int = 0
        self._made = os.fstat(fd)
        self.stored_size: int = self._made.st_size

    @property
    def exists(self) -> bool:
        """Whether `path` still leads to this file; another process may have removed or replaced the file."""
        try:
            return os.path.samestat(self._made, self.path.lstat())
        except OSError:
            return False

    def read_back(self, size: int) -> bytes:
        """The next bytes, as an earlier run has left them; fewer where there are fewer, or the disk fails."""
        found = b""
        with suppress(OSError):  # what cannot be read is taken anew
            while more := os.pread(self.file.fileno(), size - len(found), self.offset + len(found)):
                found += more
        return found

    def write(self, data: Buffer) -> None:
        """Write the next bytes; what an earlier run has left is dropped from there on."""
        if self.stored_size:
            self.cut()
        self._write(self.offset, data)
        self.offset += memoryview(data).nbytes

    def write_at(self, at: int, data: Buffer) -> None:
        """Write bytes in the middle. What an earlier run has left stays, until the bytes are written over."""
        self._write(at, data)

    def _write(self, at: int, data: Buffer) -> None:
        # Not kept in memory meanwhile: the sender is told what is here, and another run counts on that.
        rest = memoryview(data).cast("B")
        while rest:
            done = os.pwrite(self.file.fileno(), rest, at)
            rest = rest[done:]
            at += done

    def cut(self) -> None:
        """Drop what an earlier run has left behind the bytes that are right."""
        os.ftruncate(self.file.fileno(), self.offset)
        self.stored_size = 0


def _open_exclusively(part: Path) -> int | None:
    """Open the hidden file of that name, which no other run has; None if that cannot be.

    In a folder of many users another may have made the file, or a link: such a file is not taken. Nor is one
    that no run has made.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    new = True
    try:
        try:
            fd = os.open(part, flags | os.O_CREAT | os.O_EXCL, 0o600 | _MARK_BIT)
        except FileExistsError:
            fd, new = os.open(part, flags), False
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(fd)
        ours = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid()
        ours = ours and (new or found.st_mode & _MARK_BIT > 0)
        if ours and os.path.samestat(found, part.lstat()):  # another run may have given it its name meanwhile
            return fd
    except OSError:
        pass
    os.close(fd)
    return None
