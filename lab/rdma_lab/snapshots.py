"""Snapshots of guests that have booted: a later guest of the same kind is resumed, and need not boot.

Theory of operation. A guest is kept once, when it has booted and waits, before it sees the host's files: a
guest with 9p mounts cannot be migrated. `GuestKind.keep` asks QEMU over its monitor (QMP) to migrate the
guest into a stream, and a thread copies the stream to a file and hashes it. The states, by QEMU's events:

    running -> migrating -> completed -> postmigrate -> running (`cont`)
                         -> failed: MonitorError

Whoever writes fails alone: if the disk is full, the copying thread closes the stream, and QEMU's migration
fails; if QEMU ends, the stream ends. Either way the guest of this run goes on or ends by itself, nothing is
kept, and a warning says why. A file has its name only when it is complete (`partial` writes under another
name), and its digest at the end, which `find` checks.

Runs share the folder without a lock. A run holds the file that it found open, so another run may replace or
remove the name. Two runs that keep the same kind both write, and the last name wins. `_make_room` removes
the least recently used guests beyond MAX_BYTES.

Deliberately not handled: guests of other machines or users. The key covers the machine, kernel, initramfs
and QEMU, and a file or folder that another user could have written is refused, because a guest sees the
host's files.
"""

import hashlib
import json
import logging
import os
import re
import shlex
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any, NamedTuple

from rdma_lab import host
from rdma_lab.cache import DIGEST, is_whole, partial
from rdma_lab.kernels import cache_dir

MAX_BYTES = 1 << 30
"""The most bytes of all kept guests together; the least recently used are removed first.

A guest has some 110 MB.
"""
KEY = re.compile("[0-9a-f]{32}")
"""The name of a file with a guest."""
UNLIMITED = 1 << 40
"""Bytes each second, which is more than any file takes."""

logger: logging.Logger = logging.getLogger("rdma_lab")


class GuestSnapshot(NamedTuple):
    """A guest in an open file: whatever other runs do to the file's name, this run resumes this guest."""

    path: Path
    file: IO[bytes]
    size: int
    """Bytes of the guest; the digest is behind them."""

    def resumed(self) -> list[str]:
        """The words for a QEMU that inherits the file's descriptor."""
        head = shlex.quote(host.tool("head") or "head")  # without it, QEMU would wait for ever
        return ["-incoming", f"exec:{head} -c {self.size} /proc/$PPID/fd/{self.file.fileno()}"]

    def discard(self, why: str) -> None:
        """Say why this guest is booted anew, and remove the file, unless another run has replaced it."""
        with suppress(OSError):
            if os.path.samestat(self.path.stat(), os.fstat(self.file.fileno())):
                self.path.unlink()
        logger.warning("the lab boots a new guest: the snapshot %s %s", self.path, why)


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

    def find(self) -> GuestSnapshot | None:
        """Such a guest, if one is kept; the caller closes its file. A damaged one is discarded.

        A guest that another user could have written is not resumed, because a guest sees the host's files.
        """
        path = _folder() / self.key
        with ExitStack() as opened:
            try:
                # Whatever has that name, opening it does not wait.
                file = opened.enter_context(os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb"))
                stat = os.fstat(file.fileno())
                if not S_ISREG(stat.st_mode):
                    return None
                for place, its in ((path.parent, path.parent.stat()), (path, stat)):
                    if its.st_uid != os.geteuid() or its.st_mode & 0o022:
                        logger.warning(
                            "the lab boots a new guest instead of resuming one: others may write to %s", place
                        )
                        return None
                guest = GuestSnapshot(path, file, stat.st_size - DIGEST)
                if not is_whole(file):
                    guest.discard("is damaged")
                    return None
            except OSError:  # there is none, or it cannot be read
                return None
            with suppress(OSError):  # a cache that is only read
                os.utime(path)  # used last
            opened.pop_all()
            return guest

    def keep(self, monitor: socket.socket) -> None:
        """Keep the guest whose QEMU is at the other end of `monitor`.

        If that fails, later runs only take longer.
        """
        folder = _folder()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with partial(folder) as file:
                file.write(_migrate(monitor, file))
                file.flush()
                Path(file.name).replace(folder / self.key)
        except (OSError, MonitorError) as error:
            logger.warning("the lab's guest could not be saved, so later runs boot again: %s", error)
        _make_room(folder)


def monitor_arguments(fd: int) -> list[str]:
    """Return QEMU's arguments for a monitor at the other end of the socket `fd`."""
    return ["-chardev", f"socket,id=lab.monitor,fd={fd}", "-mon", "chardev=lab.monitor,mode=control"]


def _folder() -> Path:
    return cache_dir() / "guests"


def _make_room(folder: Path) -> None:
    """Remove the least recently used guests until MAX_BYTES suffice. Files of other names are not touched."""
    kept = []
    with suppress(OSError):  # what goes meanwhile, another run has removed
        for path in folder.iterdir():
            if KEY.fullmatch(path.name):
                with suppress(OSError):
                    kept.append((path.stat(), path))
    taken = 0
    for stat, path in sorted(kept, key=lambda each: each[0].st_mtime, reverse=True):
        taken += stat.st_size
        if taken > MAX_BYTES:
            with suppress(OSError):
                path.unlink()


class MonitorError(Exception):
    """QEMU's monitor said no, or nothing any more."""


def _copy(stream: socket.socket, file: IO[bytes]) -> bytes:
    """Write to `file` what comes from `stream`, and return the digest of that.

    If a write fails, the other end cannot send any more.
    """
    said = hashlib.sha256()
    with stream:
        while data := stream.recv(1 << 20):
            said.update(data)
            file.write(data)
    return said.digest()


def _migrate(monitor: socket.socket, file: IO[bytes]) -> bytes:
    """Write the guest to `file`, let it go on, and return the digest of what QEMU sent.

    Raises MonitorError, OSError.
    """
    stream, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as other:
        copied = other.submit(_copy, stream, file)
        try:
            with theirs:
                _ask_to_migrate(monitor, theirs)
            return copied.result(monitor.gettimeout())
        except MonitorError:
            if copied.done():
                copied.result()  # a write that failed is the reason
            raise
        finally:
            with suppress(OSError):  # closed
                stream.shutdown(socket.SHUT_RDWR)


def _ask_to_migrate(monitor: socket.socket, stream: socket.socket) -> None:
    """Let QEMU send the guest to `stream`, then let the guest go on. Raises MonitorError."""
    with monitor.makefile("rb") as answers:

        def heard() -> dict[str, Any]:
            line = answers.readline()
            if not line.endswith(b"\n"):
                raise MonitorError("QEMU has ended")
            answer: dict[str, Any] = json.loads(line)
            if "error" in answer:
                raise MonitorError(answer["error"]["desc"])
            return answer

        def ask(command: str, *fds: int, **arguments: object) -> dict[str, Any]:
            line = json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n"
            socket.send_fds(monitor, [line], fds)
            while "return" not in (answer := heard()):  # an event
                pass
            returned: dict[str, Any] = answer["return"]
            return returned

        heard()  # its greeting
        ask("qmp_capabilities")
        ask("migrate-set-capabilities", capabilities=[{"capability": "events", "state": True}])
        ask("migrate-set-parameters", **{"max-bandwidth": UNLIMITED})
        ask("getfd", stream.fileno(), fdname="kept")
        ask("migrate", uri="fd:kept")
        status = ""
        while status not in ("completed", "failed"):
            event = heard()
            if event.get("event") == "MIGRATION":
                status = event["data"]["status"]
        if status == "failed":
            raise MonitorError("QEMU could not send the guest")
        end = time.monotonic() + (monitor.gettimeout() or 0)
        while ask("query-status")["status"] != "postmigrate":  # later than the event
            if time.monotonic() > end:
                raise MonitorError("QEMU does not finish the migration")
            time.sleep(0.01)
        ask("cont")
