"""The Unix socket that a fabric is served on, and the names by which processes keep their hosts."""

from __future__ import annotations

import errno as E
import fcntl
import os
import socket
import stat
import struct
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

_MAX_PATH = 107
"""Bytes of the path of a Unix socket (unix(7))."""
_BACKLOG = 128
_TRY_AGAIN = 0.005
"""Seconds between two tries to connect to a server that has its backlog full."""
_CREDENTIALS = struct.Struct("iII")


class Listener:
    """A socket at `path`, which is made with mode 0600, and which `close` removes.

    `group`: the number of a group whose members may connect besides the user. Raises OSError.
    """

    def __init__(self, path: Path, group: int | None) -> None:
        check_length(path)
        self._path = path
        self.socket: socket.socket = socket.socket(socket.AF_UNIX)
        try:
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)  # of two servers that find a dead socket one serves
                self._made = self._listen(folder, group)
            finally:
                os.close(folder)
        except BaseException:
            self.socket.close()
            raise
        self.socket.setblocking(False)

    def _listen(self, folder: int, group: int | None) -> os.stat_result:
        """Make the socket under another name, and link it to its path when it listens.

        Whoever sees the path reaches the server.
        """
        made = Path(f"/proc/self/fd/{folder}/.{os.getpid()}.{os.urandom(4).hex()}")
        os.fchmod(self.socket.fileno(), 0o600)  # bind gives this mode to the file
        self.socket.bind(str(made))
        try:
            if group is not None:
                os.chown(made, -1, group)
                made.chmod(0o660)
            self.socket.listen(_BACKLOG)
            _remove_dead(self._path)
            try:
                os.link(made, self._path)
            except FileExistsError:
                text = "another file has just appeared there, and is not removed"
                raise FileExistsError(E.EEXIST, text, str(self._path)) from None
            return os.lstat(self._path)
        finally:
            made.unlink()

    def close(self) -> None:
        """Remove the socket, unless another server has its place by now."""
        self.socket.close()
        with suppress(FileNotFoundError):
            if os.path.samestat(self._made, os.lstat(self._path)):
                self._path.unlink()


def _remove_dead(path: Path) -> None:
    """Remove the socket of a server that was killed. Raises FileExistsError for anything else."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(
                E.EEXIST, "there is a file that is no socket, and is not removed", str(path)
            )
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:  # its backlog is full: it is busy, or stopped
            pass
        except OSError as error:
            if error.errno != E.EPROTOTYPE:  # somebody serves something else there
                raise
    raise FileExistsError(E.EADDRINUSE, "a fabric is served there already", str(path))


def check_length(path: Path) -> None:
    """Raise OSError for a path that no socket may have."""
    if (length := len(os.fsencode(path))) > _MAX_PATH:
        raise OSError(f"the path of a socket has {_MAX_PATH} bytes at most, and this one {length}")


def connect(client: socket.socket, path: Path, timeout: float) -> None:
    """Connect a socket that does not block.

    Raises OSError as connect does; BlockingIOError if the server accepted nobody for `timeout` seconds.
    """
    check_length(path)
    end = time.monotonic() + timeout
    while True:
        try:
            return client.connect(str(path))
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
        time.sleep(_TRY_AGAIN)


def peer_of(connection: socket.socket) -> int:
    """Return the process at the other end; 0 where it has no number here."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[0])


def reserve_host(path: Path, host: int) -> socket.socket | None:
    """Keep the host for this process until the socket is closed; None if another process keeps it.

    The kernel frees the name with the process. A server in another network namespace cannot see it.
    """
    kept = socket.socket(socket.AF_UNIX)
    try:
        kept.bind(_name_of(path, host))
        kept.listen(_BACKLOG)
    except OSError:
        kept.close()
        return None
    return kept


def is_host_reserved(path: Path, host: int) -> bool:
    """Return True if a process was this host before the last server ended, and will return."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(_name_of(path, host))
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


def _name_of(path: Path, host: int) -> bytes:
    """Return an abstract address."""
    place = sha256(os.fsencode(os.path.realpath(path))).hexdigest()
    return f"\0mcast-sim-{place}-{host}".encode()
