"""Files and folders as objects: what goes with each, and where a receiver puts it."""

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
from typing import NamedTuple

from mcast.cast.io.files import STANDARD, ExistingFile, Sink, open_sink, require_access, sink_of_path
from mcast.cast.io.sinks import Offered
from mcast.cast.protocol.packets import MAX_METADATA, UNKNOWN_SIZE

_MAGIC = b"mcL2"
_HEADER = struct.Struct("!4sBIQq")
_NO_TIME = -(1 << 63)
"""Stands for a time of change that is not known, or that 64 bits of nanoseconds cannot say."""

ONE_FILE_ONLY = "this receiver takes one file alone"
"""What a sender of several files is told by a receiver that was given the name of one."""

SAME_NAME = "another name is written as this one, too"
"""Reason to refuse a file: characters that move a cursor become "_", so two names may become one."""

_CURSOR_MOVING = {"Cc", "Cf", "Zl", "Zp"}
"""The categories of Unicode that move a cursor, or turn the direction of a line."""


class Content(IntEnum):
    """What an object is."""

    FILE = 0
    PROGRAM = 1
    """A file that may be run."""
    FOLDER = 2
    """A folder, which has no bytes."""


class Label(NamedTuple):
    """What goes with an object as its metadata.

    kind   what the object is
    files  how many objects the sender sends
    size   of all of them, in bytes; None where only the end will tell
    name   below the folder that receives, with "/" between folders: its bytes read as UTF-8, whatever the
           locale, with surrogates (PEP 383) for bytes that are not
    mtime  when it was last changed, in ns since 1970; None where that is not known
    """

    kind: Content
    files: int
    size: int | None
    name: str
    mtime: int | None = None

    def pack(self) -> bytes:
        """The bytes of the label. Raises ValueError if the name is too long."""
        size = UNKNOWN_SIZE if self.size is None else self.size
        mtime = _NO_TIME if self.mtime is None or abs(self.mtime) >= 1 << 63 else self.mtime
        packed = _HEADER.pack(_MAGIC, self.kind, self.files, size, mtime) + _bytes_of(self.name)
        if len(packed) > MAX_METADATA:
            most = MAX_METADATA - _HEADER.size
            raise ValueError(f"{self.name}: the path is longer than {most} bytes: send from a folder inside")
        return packed

    @classmethod
    def of(cls, metadata: bytes) -> Label | None:
        """The label in an object's metadata; None if there is none."""
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
    """One thing to send: its path here, "-" for stdin, and its label."""

    path: str
    label: Label


class Bundle(NamedTuple):
    """What is sent: `items`, their `size` in bytes, None where only the end will tell, and the paths that are
    `skipped`, each with the reason."""

    items: list[Item]
    size: int | None
    skipped: dict[str, str]


def bundle_of(paths: Iterable[str]) -> Bundle:
    """All that the paths name: a file, a pipe, "-" for stdin, and of a folder each file and folder in it.

    Links to files are sent as the files that they lead to. Links to folders are skipped, as are
    named pipes, sockets and devices in a folder.
    Raises OSError for what cannot be read, ValueError for two things of one name, and for a path that is too
    long.
    """
    found: list[Item] = []
    skipped: dict[str, str] = {}
    sizes: list[int | None] = []
    for path in paths:
        for item, size in _found(path, skipped):
            found.append(item)
            sizes.append(size)
    for name, count in Counter(item.label.name for item in found).items():
        if count > 1:
            raise ValueError(f"{count} of these would be named {name}: send them one by one")
    total = None if None in sizes else sum(size or 0 for size in sizes)
    whole = [item._replace(label=item.label._replace(files=len(found), size=total)) for item in found]
    for item in whole:
        item.label.pack()
    return Bundle(whole, total, skipped)


def _found(path: str, skipped: dict[str, str]) -> Iterator[tuple[Item, int | None]]:
    if path == STANDARD:
        os.fstat(0)
        yield Item(path, Label(Content.FILE, 1, None, "stdin")), None
        return
    top = Path(path)
    if not top.is_dir():
        yield _file(path, _text_of(os.fsencode(top.name)), top.stat())
        return
    name = top.resolve().name if top.name in ("", "..") else top.name
    for folder, folders, files in os.walk(path, onerror=_raise):
        folders.sort()
        here = Path(folder)
        below = _text_of(os.fsencode("/".join([name or "root", *here.relative_to(top).parts])))
        yield Item(folder, Label(Content.FOLDER, 1, 0, below, here.stat().st_mtime_ns)), 0
        for one in sorted([*files, *(link for link in folders if (here / link).is_symlink())]):
            if reason := _unfit_reason(here / one):
                skipped[str(here / one)] = reason
            else:
                name_below = f"{below}/{_text_of(os.fsencode(one))}"
                yield _file(str(here / one), name_below, (here / one).stat())


def _raise(error: OSError) -> None:
    raise error


def _unfit_reason(path: Path) -> str:
    """Why that file of a folder is not sent; empty if it is."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return "a link that leads nowhere"
    if stat.S_ISDIR(mode):
        return "a link to a folder"
    kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return "" if stat.S_ISREG(mode) else kinds.get(stat.S_IFMT(mode), "a device")


def _file(path: str, name: str, status: os.stat_result) -> tuple[Item, int | None]:
    require_access(path, os.R_OK)
    regular = stat.S_ISREG(status.st_mode)
    kind = Content.PROGRAM if regular and status.st_mode & stat.S_IXUSR else Content.FILE
    label = Label(kind, 1, None, name, status.st_mtime_ns if regular else None)
    sized = regular and status.st_size  # files in /proc say 0, and have bytes
    return Item(path, label), status.st_size if sized else None


class OneFile:
    """One file, pipe or device, for one object."""

    def __init__(self, path: str) -> None:
        """Know the place, of which `close` frees what there is. Raises OSError if it cannot be written."""
        self._path = path
        self._sink: Sink | None = open_sink(path, waits=True)
        self.name: str = self._sink.name
        """What the place is called."""

    def open(self) -> None:
        """Open the place, so that what cannot be written is known before. Raises OSError."""
        if self._sink is not None:
            self._sink.open()

    def __call__(self, offered: Offered) -> Sink:
        """The sink for the object. Raises OSError if that is not the only one."""
        label = Label.of(offered.metadata)
        if label is not None and (label.kind is Content.FOLDER or label.files > 1):
            raise OSError(ONE_FILE_ONLY)
        sink, self._sink = self._sink or open_sink(self._path), None
        sink.mtime = None if label is None else label.mtime
        return sink

    def close(self) -> None:
        """Free what no object has used."""
        if self._sink is not None:
            self._sink.close()
            self._sink = None


class Folder:
    """A folder for any number of objects. A stranger's name leads to nothing outside of it.

    replace  whether files that are there may be replaced; else each must be the object already
    """

    name = ""
    """Each object has its own."""

    def __init__(self, path: Path, replace: bool = False) -> None:
        """Raises OSError if nothing can be written there; the folder is made with the first object."""
        self._path, self._replace = path, replace
        self._times: dict[Path, int] = {}
        """Folders that have come, and when each was last changed."""
        self._names: dict[Path, str] = {}
        """What has come, and by which name it was offered."""
        there = path if path.exists() else path.parent
        if not there.is_dir():
            raise NotADirectoryError(E.ENOTDIR, os.strerror(E.ENOTDIR), str(there))
        require_access(str(there), os.W_OK | os.X_OK)

    def path_of(self, offered: Offered) -> Path:
        """Where the object goes, below the folder. Raises OSError if its name leads elsewhere."""
        name = _name_of(offered, Label.of(offered.metadata))
        parts = [_harmless(part) for part in name.split("/")]
        if any(part in ("", ".", "..") for part in parts):
            raise OSError("the name leads out of the folder of this receiver")
        return Path(*(os.fsdecode(_bytes_of(part)) for part in parts))

    def __call__(self, offered: Offered) -> Sink | None:
        """The sink for the object; None for a folder, which is there then. Raises OSError."""
        label = Label.of(offered.metadata)
        root, path = Path(os.path.realpath(self._path)), self.path_of(offered)
        target = Path(os.path.realpath((root / path).parent)) / path.name
        if not target.is_relative_to(root):
            raise OSError("the name leads out of the folder of this receiver")
        if label is not None and label.kind is Content.FOLDER and not target.is_symlink():
            target.mkdir(parents=True, exist_ok=True)
            if label.mtime is not None:
                self._times[target] = label.mtime
            return None
        if self._names.setdefault(target, name := _name_of(offered, label)) != name:
            raise OSError(SAME_NAME)
        if os.path.lexists(target) and not (self._replace and not target.is_dir()):
            return ExistingFile(target, offered.size)
        target.parent.mkdir(parents=True, exist_ok=True)
        runs = label is not None and label.kind is Content.PROGRAM
        sink = sink_of_path(str(target), follows=False, runs=runs, replaces=self._replace)
        sink.mtime = None if label is None else label.mtime
        return sink

    def close(self) -> None:
        """Give the folders their times, which what came into them has changed."""
        while self._times:
            path, mtime = self._times.popitem()  # the last first: a folder comes before what is in it
            with suppress(OSError):
                os.utime(path, ns=(time.time_ns(), mtime), follow_symlinks=False)


def _name_of(offered: Offered, label: Label | None) -> str:
    return label.name if label is not None else offered.name or f"object {offered.number}"


def _harmless(part: str) -> str:
    """One part of a path in UTF-8, without characters that move a cursor."""
    return "".join("_" if unicodedata.category(one) in _CURSOR_MOVING else one for one in part)
