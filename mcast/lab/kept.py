"""Guests that are ready, kept in files: a later guest of the same kind is resumed from the file, and need not
boot.

QEMU migrates a guest to a file while the guest waits, before it sees the host's files, because a guest with
9p mounts cannot be migrated.
"""

import hashlib
import json
import logging
import os
import re
import shlex
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mcast.lab.kernels import cache_dir

MAX_BYTES = 1 << 30
"""The most bytes of all kept guests together; the least recently used are removed first.

A guest has some 110 MB.
"""
PARTIAL, ABANDONED = ".partial-", 86_400.0
"""How the name of a file that is not whole yet begins, and the seconds after which nobody is writing to it
any more."""
DIGEST = hashlib.sha256().digest_size
"""The last bytes of a file, which tell whether the others are those that were written."""
UNLIMITED = 1 << 40
"""Bytes each second, which is more than any file takes."""

logger = logging.getLogger("mcast")


@dataclass(frozen=True, slots=True)
class GuestKind:
    """Guests that may be resumed from one another: the same machine, kernel, initramfs and QEMU."""

    key: str

    @classmethod
    def of(cls, argv: Sequence[str]) -> "GuestKind":
        """The kind of the guest that `argv` boots.

        The paths of a run, of its pipes and shares, do not count. QEMU and the kernel count as files that
        were not changed, the initramfs by its contents.
        """
        said = hashlib.sha256()
        for option, word in zip(("", *argv), argv, strict=False):
            if option == "-initrd":
                said.update(Path(word).read_bytes())
                continue
            said.update(re.sub(r"(path|fd)=([^,]|,,)*", r"\1=", word).encode() + b"\0")
            if option in ("", "-kernel"):
                stat = Path(word).stat()
                said.update(f"{stat.st_size} {stat.st_mtime_ns}\0".encode())
        return cls(said.hexdigest()[:32])

    def find(self) -> Path | None:
        """The file of such a guest, if there is a sound one; a damaged one is discarded."""
        path = _folder() / self.key
        try:
            with path.open("rb") as file:
                size = path.stat().st_size - DIGEST
                sound = _digest(file, size) == file.read()
            if sound:
                os.utime(path)  # used last
                return path
        except OSError:  # there is none, or it is not ours
            return None
        discard(path, "is damaged")
        return None

    def keep(self, monitor: socket.socket) -> None:
        """Keep the guest whose QEMU is at the other end of `monitor`.

        If that fails, later runs only take longer.
        """
        folder = _folder()
        partial = folder / f"{PARTIAL}{os.getpid()}-{threading.get_ident()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _migrate(monitor, partial)
            with partial.open("r+b") as file:
                file.write(_digest(file, partial.stat().st_size))
            partial.replace(folder / self.key)
            _make_room(folder)
        except (OSError, MonitorError) as error:
            logger.warning("the lab's guest is not kept for later runs: %s", error)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


def resumed_from(path: Path) -> list[str]:
    """QEMU's words to resume the guest in `path`."""
    size = path.stat().st_size - DIGEST
    return ["-incoming", f"exec:head -c {size} {shlex.quote(str(path))}"]


def monitored(fd: int) -> list[str]:
    """QEMU's words for a monitor at the other end of the socket `fd`."""
    return ["-chardev", f"socket,id=mcast.monitor,fd={fd}", "-mon", "chardev=mcast.monitor,mode=control"]


def discard(path: Path, why: str) -> None:
    """Remove a kept guest, and say so."""
    path.unlink(missing_ok=True)
    logger.warning("the lab boots a guest anew, for %s, which was kept, %s", path, why)


def _folder() -> Path:
    return cache_dir() / "guests"


def _digest(file: BinaryIO, size: int) -> bytes:
    """Of the next `size` bytes."""
    said = hashlib.sha256()
    while size > 0 and (data := file.read(min(size, 1 << 20))):
        said.update(data)
        size -= len(data)
    return said.digest()


def _make_room(folder: Path) -> None:
    """Remove the least recently used guests until MAX_BYTES suffice, and files that a killed process left
    behind."""
    now, taken = time.time(), 0
    stats = [(path, path.stat()) for path in folder.iterdir()]
    for path, stat in sorted(stats, key=lambda each: each[1].st_mtime, reverse=True):
        abandoned = path.name.startswith(PARTIAL) and stat.st_mtime < now - ABANDONED
        taken += stat.st_size
        if abandoned or taken > MAX_BYTES:
            path.unlink(missing_ok=True)


class MonitorError(Exception):
    """QEMU's monitor said no, or nothing any more."""


def _migrate(monitor: socket.socket, path: Path) -> None:
    """Write the guest to `path`, and let the guest go on. Raises MonitorError."""
    with monitor.makefile("rwb") as stream:

        def heard() -> dict[str, Any]:
            line = stream.readline()
            if not line:
                raise MonitorError("QEMU has ended")
            answer: dict[str, Any] = json.loads(line)
            if "error" in answer:
                raise MonitorError(answer["error"]["desc"])
            return answer

        def ask(command: str, **arguments: object) -> dict[str, Any]:
            stream.write(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
            stream.flush()
            while "return" not in (answer := heard()):  # an event
                pass
            returned: dict[str, Any] = answer["return"]
            return returned

        heard()  # its greeting
        ask("qmp_capabilities")
        ask("migrate-set-capabilities", capabilities=[{"capability": "events", "state": True}])
        ask("migrate-set-parameters", **{"max-bandwidth": UNLIMITED})
        ask("migrate", uri=f"exec:cat >{shlex.quote(str(path))}")
        status = ""
        while status not in ("completed", "failed"):
            event = heard()
            if event.get("event") == "MIGRATION":
                status = event["data"]["status"]
        if status == "failed":
            raise MonitorError(f"QEMU could not write it to {path.parent}")
        end = time.monotonic() + (monitor.gettimeout() or 0)
        while ask("query-status")["status"] != "postmigrate":  # it says so a moment before it can go on
            if time.monotonic() > end:
                raise MonitorError("QEMU does not come to its end")
            time.sleep(0.01)
        ask("cont")
