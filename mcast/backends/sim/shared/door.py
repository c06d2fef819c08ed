"""The socket that a fabric is served on: which users may come in, and which server and hosts have a place."""

from __future__ import annotations

import errno as E
import fcntl
import logging
import os
import socket
import stat
import struct
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from mcast.interrupts import interruptible

logger: logging.Logger = logging.getLogger("mcast")

MOST_GROUPS_OF_USER = 1024
MOST_PROBES = 128
"""Newcomers that may come while the process has not returned."""
AT_ONCE = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
"""Flags of each send of either side; a number, because to join members of an enum takes as long as a send."""
_BEGINNING, _LOOK = 5.0, 0.005
"""Seconds that a newcomer waits for a server that begins, and between two looks or tries."""
_MOST_PATH = 107
"""Bytes of the path of a Unix socket (unix(7))."""
_CREDENTIALS = struct.Struct("iII")
_SO_PEERGROUPS = 59
"""The further groups of a peer's user; `socket` has no name for the option."""


class Door:
    """Listens at `path`, which this makes, with mode 0600, and `close` removes.

    `group`: the number of a group whose members may come in besides the user. Raises OSError.
    """

    def __init__(self, path: Path, group: int | None) -> None:
        self._path, self._group = path, group
        self._listener, self._made = _listen(path, group)
        self._spare = _spare()

    def fileno(self) -> int:
        """Readable while somebody waits outside."""
        return self._listener.fileno()

    def accept(self) -> socket.socket | None:
        """The connection of a peer; None if the peer has gone again, or may not come in."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return None
        except OSError as error:
            logger.warning("nobody attached: %s", error)
            self._turn_away()
            return None
        try:
            if self._may(connection):
                return connection
        except OSError as error:
            logger.warning("nobody attached: %s", error)
        connection.close()
        return None

    def keeps(self, host: int) -> bool:
        """Whether a process that may come in was the host before the last server ended, and will return."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.setblocking(False)
            try:
                probe.connect(_name_of(self._path, host))
                return self._may(probe)
            except OSError:  # nobody has the name; or somebody who has it does not want to be known
                return False

    def _turn_away(self) -> None:
        """No descriptor is left: take the newcomer by the spare one, or it would wake the server for ever."""
        if self._spare is not None:
            os.close(self._spare)
            try:
                self._listener.accept()[0].close()
            except OSError:
                pass
            self._spare = _spare()

    def _may(self, connection: socket.socket) -> bool:
        """The mode of the socket says the same, until somebody changes it."""
        uid, gid = credentials(connection)[1:]
        if uid in (0, os.geteuid()):
            return True
        others = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * MOST_GROUPS_OF_USER)
        return self._group in {gid, *struct.unpack(f"{len(others) // 4}I", others)}

    def close(self) -> None:
        """Remove the socket."""
        self._listener.close()
        if self._spare is not None:
            os.close(self._spare)
        _remove(self._path, self._made)


def reach(client: socket.socket, path: Path, patience: float) -> None:
    """Connect to the server at `path`, or to one that has just made its socket and is about to listen there.

    Raises OSError as connect does, and BlockingIOError if many others wait for so many seconds.
    """
    _check_length(path)
    client.setblocking(False)
    end = time.monotonic() + patience
    try:
        _connect(client, path, end)
    except ConnectionRefusedError:  # the server is dead, or has begun and holds the folder's lock
        _until_begun(path.parent)
        _connect(client, path, end)


def _connect(client: socket.socket, path: Path, end: float) -> None:
    """A connect that waits by itself is over for Python, and yet not done, when a signal's handler runs."""
    while True:
        try:
            return client.connect(str(path))
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
        with interruptible():
            time.sleep(_LOOK)


def _check_length(path: Path) -> None:
    if (length := len(os.fsencode(path))) > _MOST_PATH:
        raise OSError(f"the path of a socket has {_MOST_PATH} bytes at most, and this one {length}")


def _until_begun(folder: Path) -> None:
    end = time.monotonic() + _BEGINNING
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        while time.monotonic() < end:
            with suppress(BlockingIOError):
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            with interruptible():
                time.sleep(_LOOK)
    finally:
        os.close(held)


def keep_host(path: Path, host: int) -> socket.socket | None:
    """Keep the host for this process until the socket is closed; None where another process keeps it.

    The name is the kernel's, and is gone with the process. A server in another network namespace cannot see
    it.
    """
    kept = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        kept.bind(_name_of(path, host))
        kept.listen(MOST_PROBES)
    except OSError:
        kept.close()
        return None
    return kept


def _name_of(path: Path, host: int) -> bytes:
    """An abstract address."""
    place = sha256(os.fsencode(os.path.realpath(path))).hexdigest()
    return f"\0mcast-sim-{place}-{host}".encode()


def credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of the peer, as they were when it connected."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(found)
    return pid, uid, gid


def _spare() -> int | None:
    try:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # no descriptor is left
        return None


def _listen(path: Path, group: int | None) -> tuple[socket.socket, os.stat_result]:
    """The socket, which nobody but the user (and the group) can open, not even while it is made.

    Raises FileExistsError where a fabric is served, or something else lies. A socket that nobody listens on
    is a server's that was killed, and is replaced; by one server at a time.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            return listener, _bind(listener, path, group)
        finally:
            os.close(folder)
    except BaseException:
        listener.close()
        raise


def _bind(listener: socket.socket, path: Path, group: int | None) -> os.stat_result:
    """Make the socket in its place, where `bind` replaces nothing; `reach` waits for what is done after."""
    _check_length(path)
    _remove_dead(path)
    os.fchmod(listener.fileno(), 0o600)  # which bind gives to the file that it makes
    try:
        listener.bind(str(path))
    except OSError as error:
        if error.errno != E.EADDRINUSE:
            raise
        raise FileExistsError(E.EEXIST, "this has just appeared, and stays", str(path)) from None
    made = os.lstat(path)
    try:
        if group is not None:
            os.chown(path, -1, group)
            path.chmod(0o660)
        listener.listen(64)
        listener.setblocking(False)
        return made
    except BaseException:
        _remove(path, made)
        raise


def _remove(path: Path, made: os.stat_result) -> None:
    """Somebody else may serve there by now."""
    with suppress(FileNotFoundError):
        if os.path.samestat(made, os.lstat(path)):
            path.unlink()


def _remove_dead(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(E.EEXIST, "this is no socket, and stays", str(path))
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:  # it is busy, or stopped
            pass
    raise FileExistsError(E.EADDRINUSE, "a fabric is served there already", str(path))
