"""Files of the lab's cache: written whole or not at all, and used only if they are as they were written.

A file ends with a digest of what is before it, because a disk that was full or a machine that lost power may
leave a file of the right name and the wrong contents, and a guest that boots from it hangs without a word.
"""

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

PARTIAL = ".partial-"
"""Prefix of a file that is not complete yet. The process that writes the file has a lock on it."""
DIGEST: int = hashlib.sha256().digest_size
"""Bytes of the digest at the end of a file."""


def is_whole(file: IO[bytes]) -> bool:
    """Read the file to its end, and return True if that is the digest of what is before it."""
    left = os.fstat(file.fileno()).st_size - DIGEST
    digest = hashlib.sha256()
    while left > 0 and (data := file.read(min(left, 1 << 20))):
        digest.update(data)
        left -= len(data)
    return file.read() == digest.digest()


def has(path: Path) -> bool:
    """Return True if `store` has written the file, and it is not damaged."""
    try:
        with path.open("rb") as file:
            return is_whole(file)
    except OSError:
        return False


def store(path: Path, data: bytes) -> None:
    """Write `data` and its digest to `path`, in a folder that is made if need be. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with partial(path.parent) as file:
        file.write(data)
        file.write(hashlib.sha256(data).digest())
        file.flush()
        Path(file.name).replace(path)


@contextmanager
def partial(folder: Path) -> Iterator[IO[bytes]]:
    """Yield a new file, locked, which is gone after the block unless it got another name there.

    Those that a killed process left behind are removed before.
    """
    with suppress(OSError):  # what goes meanwhile, another run has removed
        for path in folder.glob(f"{PARTIAL}*"):
            with suppress(OSError):
                if _is_abandoned(path):
                    path.unlink()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=PARTIAL, delete=False) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            Path(file.name).unlink(missing_ok=True)


def _is_abandoned(path: Path) -> bool:
    """Return True if the process that wrote the file has ended."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
