"""Files and folders as objects: the metadata of each, and its path at a receiver.

A sender turns paths into a `Bundle` of items. Each item has a `Label`, which travels as the object's
metadata. A receiver passes `OneFile` or `Folder` to `receive` as `into`; both return the sink for an offered
object. Names come from an untrusted sender: `Folder` never writes outside of its folder.
"""

from __future__ import annotations

import errno as E
import os
import stat
import struct
import time
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mcast.cast.io.files import STANDARD, ExistingFile, Sink, open_sink, require_access, sink_of_path
from mcast.cast.protocol.packets import MAX_METADATA, UNKNOWN_SIZE

__all__ = ["Bundle", "Content", "Folder", "Item", "Label", "OneFile", "bundle_of"]

if TYPE_CHECKING:
    from mcast.cast.io.sinks import Offered

_MAGIC = b"mcL2"
_HEADER = struct.Struct("!4sBIQq")
_NO_TIME = -(1 << 63)
"""Modification time that is unknown, or does not fit into 64 bits of nanoseconds."""

ONE_FILE_ONLY = "this receiver accepts one file only"
"""Reason to refuse one of several files: the receiver was given the name of a file, not of a folder."""

SAME_NAME = "another file of this transfer has the same name here"
"""Reason to refuse a file: cursor-moving characters become "_", so two names may become equal."""

_OUTSIDE = "the name leads out of the folder of this receiver"
"""Reason to refuse a name that is absolute, has "..", or passes a link to another folder."""

_CURSOR_MOVING = {"Cc", "Cf", "Zl", "Zp"}
"""Unicode categories of characters that move the cursor or change the direction of a line."""


class Content(IntEnum):
    """Kind of an object."""

    FILE = 0
    PROGRAM = 1
    """An executable file."""
    FOLDER = 2
    """A folder, which has no bytes."""


class Label(NamedTuple):
    """Metadata of an object that is a file or a folder.

    kind   file, program or folder
    files  number of objects in the transfer
    size   total size of the transfer in bytes; None if unknown before its end
    name   path below the receiver's folder, with "/" between folders: its bytes decoded as UTF-8 in every
           locale, with surrogates (PEP 383) for bytes that are not UTF-8
    mtime  modification time in ns since 1970; None if unknown
    """

    kind: Content
    files: int
    size: int | None
    name: str
    mtime: int | None = None

    def encode(self) -> bytes:
        """Encode the label as metadata. Raises ValueError if the name is too long."""
        size = UNKNOWN_SIZE if self.size is None else self.size
        mtime = _NO_TIME if self.mtime is None or abs(self.mtime) >= 1 << 63 else self.mtime
        encoded = _HEADER.pack(_MAGIC, self.kind, self.files, size, mtime) + _bytes_of(self.name)
        if len(encoded) > MAX_METADATA:
            max_name = MAX_METADATA - _HEADER.size
            raise ValueError(
                f"{self.name}: the path is longer than {max_name} bytes: send a folder further inside"
            )
        return encoded

    @classmethod
    def decode(cls, metadata: bytes) -> Label | None:
        """Decode an object's metadata; return None if it is not a label."""
        if len(metadata) <= _HEADER.size or metadata[: len(_MAGIC)] != _MAGIC:
            return None
        _, kind, files, size, mtime = _HEADER.unpack_from(metadata)
        if kind not in Content.__members__.values():
            return None
        return cls(
            Content(kind),
            files,
            None if size == UNKNOWN_SIZE else size,
            _text_of(metadata[_HEADER.size :]),
            None if mtime == _NO_TIME else mtime,
        )


def _text_of(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _bytes_of(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


class Item(NamedTuple):
    """A file or folder to send: its local path ("-" for stdin) and its label."""

    path: str
    label: Label


class Bundle(NamedTuple):
    """Items of one transfer.

    size     total size in bytes; None if unknown before the end
    skipped  path -> reason, of files that are not sent
    """

    items: list[Item]
    size: int | None
    skipped: dict[str, str]


def bundle_of(paths: Iterable[str]) -> Bundle:
    """Return the items of these paths: files, pipes, "-" for stdin, and folders with all that is in them.

    A link to a file is sent as that file. In a folder, links to folders, named pipes, sockets and devices are
    skipped. Raises OSError for a path that cannot be read, and ValueError for two items of the same name or
    a path that is too long.
    """
    found: list[Item] = []
    skipped: dict[str, str] = {}
    sizes: list[int | None] = []
    for path in paths:
        for item, size in _items_of(path, skipped):
            found.append(item)
            sizes.append(size)
    for name, count in Counter(item.label.name for item in found).items():
        if count > 1:
            raise ValueError(f"{count} of these would be named {name} at the receiver: send them one by one")
    total = None if None in sizes else sum(size or 0 for size in sizes)
    items = [item._replace(label=item.label._replace(files=len(found), size=total)) for item in found]
    for item in items:
        item.label.encode()
    return Bundle(items, total, skipped)


def _items_of(path: str, skipped: dict[str, str]) -> Iterator[tuple[Item, int | None]]:
    """Yield the items of one path, each with its size; add files that are not sent to `skipped`."""
    if path == STANDARD:
        os.fstat(0)
        yield Item(path, Label(Content.FILE, 1, None, "stdin")), None
        return
    top = Path(path)
    if not top.is_dir():
        yield _file_item(path, _text_of(os.fsencode(top.name)), top.stat())
        return
    name = top.resolve().name if top.name in ("", "..") else top.name
    for folder, folders, files in os.walk(path, onerror=_raise):
        folders.sort()
        here = Path(folder)
        below = _text_of(os.fsencode("/".join([name or "root", *here.relative_to(top).parts])))
        yield Item(folder, Label(Content.FOLDER, 1, 0, below, here.stat().st_mtime_ns)), 0
        for file in sorted([*files, *(link for link in folders if (here / link).is_symlink())]):
            if reason := _skip_reason(here / file):
                skipped[str(here / file)] = reason
            else:
                name_below = f"{below}/{_text_of(os.fsencode(file))}"
                yield _file_item(str(here / file), name_below, (here / file).stat())


def _raise(error: OSError) -> None:
    raise error


def _skip_reason(path: Path) -> str:
    """Return the reason not to send this file of a folder; empty to send it."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return "a broken link"
    if stat.S_ISDIR(mode):
        return "a link to a folder"
    kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return "" if stat.S_ISREG(mode) else kinds.get(stat.S_IFMT(mode), "a device")


def _file_item(path: str, name: str, status: os.stat_result) -> tuple[Item, int | None]:
    require_access(path, os.R_OK)
    regular = stat.S_ISREG(status.st_mode)
    kind = Content.PROGRAM if regular and status.st_mode & stat.S_IXUSR else Content.FILE
    label = Label(kind, 1, None, name, status.st_mtime_ns if regular else None)
    sized = regular and status.st_size  # files in /proc report 0, but have bytes
    return Item(path, label), status.st_size if sized else None


class OneFile:
    """Target of one object: a file, a pipe or a device."""

    def __init__(self, path: str) -> None:
        """Create the sink. Raises OSError if the path cannot be written."""
        self._path = path
        self._sink: Sink | None = open_sink(path, wait_for_reader=True)
        self.name: str = self._sink.name
        """Name of the target in messages to the user."""

    def open(self) -> None:
        """Open the sink, to detect errors before a transfer begins. Raises OSError."""
        if self._sink is not None:
            self._sink.open()

    def __call__(self, offered: Offered) -> Sink:
        """Return the sink for the object. Raises OSError if it is one of several, or a folder."""
        label = Label.decode(offered.metadata)
        if label is not None and (label.kind is Content.FOLDER or label.files > 1):
            raise OSError(ONE_FILE_ONLY)
        sink, self._sink = self._sink or open_sink(self._path), None
        sink.mtime = None if label is None else label.mtime
        return sink

    def close(self) -> None:
        """Close the sink if no object has used it."""
        if self._sink is not None:
            self._sink.close()
            self._sink = None


class Folder:
    """Target of any number of objects. No name that a sender chooses leads outside of the folder.

    replace  True to replace existing files; otherwise an existing file is accepted only if it is equal
    """

    name = ""
    """Empty: messages to the user name each object instead."""

    def __init__(self, path: Path, replace: bool = False) -> None:
        """Check that the folder is writable, or can be created with the first object. Raises OSError."""
        self._path, self._replace = path, replace
        self._mtimes: dict[Path, int] = {}
        """Received folder -> its modification time at the sender."""
        self._names: dict[Path, str] = {}
        """Path that was written -> the name that the sender gave it."""
        existing = path if path.exists() else path.parent
        if not existing.is_dir():
            raise NotADirectoryError(E.ENOTDIR, os.strerror(E.ENOTDIR), str(existing))
        require_access(str(existing), os.W_OK | os.X_OK)

    def path_of(self, offered: Offered) -> Path:
        """Return the object's path below the folder. Raises OSError if its name leads outside."""
        name = _name_of(offered, Label.decode(offered.metadata))
        parts = [_without_cursor_moves(part) for part in name.split("/")]
        if any(part in ("", ".", "..") for part in parts):
            raise OSError(_OUTSIDE)
        return Path(*(os.fsdecode(_bytes_of(part)) for part in parts))

    def __call__(self, offered: Offered) -> Sink | None:
        """Return the sink for the object; create a folder and return None. Raises OSError to refuse."""
        label = Label.decode(offered.metadata)
        root, path = Path(os.path.realpath(self._path)), self.path_of(offered)
        target = Path(os.path.realpath((root / path).parent)) / path.name
        if not target.is_relative_to(root):  # a link below the folder leads elsewhere
            raise OSError(_OUTSIDE)
        if label is not None and label.kind is Content.FOLDER and not target.is_symlink():
            target.mkdir(parents=True, exist_ok=True)
            if label.mtime is not None:
                self._mtimes[target] = label.mtime
            return None
        if self._names.setdefault(target, name := _name_of(offered, label)) != name:
            raise OSError(SAME_NAME)
        if os.path.lexists(target) and not (self._replace and not target.is_dir()):
            return ExistingFile(target, offered.size)
        target.parent.mkdir(parents=True, exist_ok=True)
        executable = label is not None and label.kind is Content.PROGRAM
        sink = sink_of_path(str(target), follow_links=False, executable=executable, replace=self._replace)
        sink.mtime = None if label is None else label.mtime
        return sink

    def close(self) -> None:
        """Set the modification times of folders, which creating files in them has changed."""
        while self._mtimes:
            path, mtime = self._mtimes.popitem()  # the last first: a folder arrives before its contents
            with suppress(OSError):
                os.utime(path, ns=(time.time_ns(), mtime), follow_symlinks=False)


def _name_of(offered: Offered, label: Label | None) -> str:
    return label.name if label is not None else offered.name or f"object {offered.number}"


def _without_cursor_moves(part: str) -> str:
    """Return the part of a path with "_" for each character that would move a terminal's cursor."""
    return "".join("_" if unicodedata.category(char) in _CURSOR_MOVING else char for char in part)
