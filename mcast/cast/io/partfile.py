"""Hidden `.part` file of an incomplete transfer, from which a later run resumes.

Theory of operation. `PartFile` opens `.NAME.part` beside the target, and locks it (flock) so that one run at
a time uses it. A run that does not get the lock, or finds a file that it must not trust, uses a file of a
random name, which no later run resumes. A `.part` file is trusted if it is a regular file of this user with
one link and with the sticky bit, which nothing sets by default and which has no effect on a file: a file that
somebody else created under this name is not used.

The file has three parts: bytes below `offset` are verified; bytes from there to `stored_size` are those of an
earlier run, to be verified; a block that arrives out of order is written by `write_at` anywhere. The caller
renames the file when it is complete, or removes it, or leaves it for the next run.
"""

from __future__ import annotations

import fcntl
import os
import stat
from codecs import utf_8_decode
from contextlib import suppress
from io import FileIO
from pathlib import Path

from typing_extensions import Buffer

_NAME_BYTES = 100
"""Maximum length in bytes of the target's name within the hidden name; most file systems allow 255 in all."""
_MARK_BIT = stat.S_ISVTX
"""Mode bit that marks files of this module."""


class PartFile:
    """An open, locked part file of a target.

    path         path of the part file
    resumable    True if a later run finds the file: its name is not random
    file         the open file
    offset       number of verified bytes, where `write` continues
    stored_size  number of bytes that an earlier run has left; 0 once `write` has dropped the rest of them
    """

    def __init__(self, target: Path) -> None:
        name = os.fsencode(target.name)
        beginning = target.name
        if len(name) > _NAME_BYTES:
            # Cut between two characters of UTF-8: some file systems refuse names with half a character.
            cut, _ = utf_8_decode(name[:_NAME_BYTES], "surrogateescape", False)
            beginning = os.fsdecode(cut.encode("utf-8", "surrogateescape"))
            from hashlib import blake2b

            beginning += "." + blake2b(name, digest_size=8).hexdigest()
        self.path: Path = target.parent / f".{beginning}.part"
        fd = _open_exclusively(self.path)
        self.resumable: bool = fd is not None
        if fd is None:
            import tempfile

            fd, made = tempfile.mkstemp(prefix=f".{beginning}.", suffix=".part", dir=target.parent)
            self.path = Path(made)
        self.file: FileIO = FileIO(fd, "r+b")
        self.offset: int = 0
        self._made = os.fstat(fd)
        self.stored_size: int = self._made.st_size

    @property
    def exists(self) -> bool:
        """True if `path` still names this file: another process may have removed or replaced it."""
        try:
            return os.path.samestat(self._made, self.path.lstat())
        except OSError:
            return False

    def read_back(self, size: int) -> bytes:
        """Return up to `size` stored bytes at `offset`; fewer at the end or after a disk error."""
        found = b""
        with suppress(OSError):  # bytes that cannot be read are received again
            while more := os.pread(self.file.fileno(), size - len(found), self.offset + len(found)):
                found += more
        return found

    def write(self, data: Buffer) -> None:
        """Write verified bytes at `offset`, and drop what an earlier run has left after it."""
        if self.stored_size:
            self.cut()
        self._write(self.offset, data)
        self.offset += memoryview(data).nbytes

    def write_at(self, at: int, data: Buffer) -> None:
        """Write bytes anywhere; other bytes that an earlier run has left stay."""
        self._write(at, data)

    def _write(self, at: int, data: Buffer) -> None:
        # Not buffered: the sender is informed which blocks are on the disk, and a later run relies on it.
        rest = memoryview(data).cast("B")
        while rest:
            done = os.pwrite(self.file.fileno(), rest, at)
            rest = rest[done:]
            at += done

    def cut(self) -> None:
        """Truncate the file to its verified bytes."""
        os.ftruncate(self.file.fileno(), self.offset)
        self.stored_size = 0


def _open_exclusively(part: Path) -> int | None:
    """Open or create the part file and lock it; None if it is in use or must not be trusted.

    In a folder that other users may write to, the name may be a link, or a file of somebody else.
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
        if ours and os.path.samestat(found, part.lstat()):  # another run may have renamed it meanwhile
            return fd
    except OSError:
        pass
    os.close(fd)
    return None
