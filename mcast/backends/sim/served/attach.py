"""Which served fabric a process attaches to: the one that is named, that of MCAST_SIM, or the user's own.

A program that opens `sim` gets a fabric of its own, unless MCAST_SIM or `socket=` names a served one. The
fabric at the user's own place is used only by the name `sim-shared`.
"""

from __future__ import annotations

import os
from errno import EBUSY, ENODEV, EPERM, EPROTO, EUSERS
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcast.api import Backend, BackendUnavailable, LinkLayer, McastError, Status, UnavailableReason

if TYPE_CHECKING:
    from mcast.backends.sim.served.client import ServedBackend

VARIABLE = "MCAST_SIM"
"""The environment variable with the path of a socket; empty: none."""

_SERVE = "run `mcast sim serve` in another terminal, or name its socket by MCAST_SIM=PATH or socket="
_FIXES = {
    EBUSY: "end a program that is attached, or serve a fabric with more --ports",
    ENODEV: "`mcast info --backend sim-shared` lists the ports",
    EPROTO: "use the same version of mcast at both ends",
    EUSERS: "end a program that is attached, or serve another fabric",
}
"""Errno of a refusal by the server -> next step."""
_OPTIONS = frozenset({"socket", "host", "bind", "timeout"})


def default_socket() -> Path:
    """Return the user's own place: in a directory that nobody else can write to."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, "mcast", "sim.sock") if runtime else Path(f"/tmp/mcast-{os.geteuid()}/sim.sock")


def make_socket_dir(path: Path) -> Path:
    """Make the directory of the user's own socket, if need be. Raises OSError for somebody else's."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = path.parent.lstat()
    if about.st_uid != os.geteuid() or not path.parent.is_dir() or about.st_mode & 0o022:
        raise PermissionError(EPERM, f"others may write to {path.parent}: remove it, or give --socket")
    return path


def socket_from_environment() -> Path | None:
    """Return the socket that MCAST_SIM names; None if it names none."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def find_socket() -> Path | None:
    """Return the socket that MCAST_SIM names, or else the user's own if there is one."""
    if VARIABLE in os.environ:
        return socket_from_environment()
    path = default_socket()
    return path if path.is_socket() and path.parent.stat().st_uid in (0, os.geteuid()) else None


def attach(
    name: str,
    layer: LinkLayer | None = None,
    socket: str | os.PathLike[str] | None = None,
    host: int | str | None = None,
    bind: object = None,
    timeout: float | None = None,
) -> ServedBackend:
    """Attach this process to a served fabric. Raises BackendUnavailable.

    layer    what the fabric must be; None: either
    socket   its path; None: see `find_socket`
    host     the number of the host to be, also one that another process is; None: a free one; "all": all of
             them, to look on
    bind     be the host that has the address
    timeout  seconds that a call waits for a server that does not answer; by default 5
    """
    from mcast.arguments.seconds import check_seconds
    from mcast.backends.sim.served.client import ServedBackend  # a fabric of one's own needs none of it
    from mcast.backends.sim.served.connection import DEFAULT_TIMEOUT

    unavailable = partial(BackendUnavailable, name, UnavailableReason.NO_DEVICE)
    path = find_socket() if socket is None else Path(socket)
    if path is None:
        raise unavailable("no fabric is served", _SERVE)
    seconds = DEFAULT_TIMEOUT if timeout is None else check_seconds(timeout)
    is_host = host is None or host == "all" or (type(host) is int and host >= 0)
    try:
        address = None if bind is None else ip_address(str(bind))
    except ValueError:
        is_host = False
    if not is_host:
        raise ValueError(f"host is {host!r}, bind is {bind!r}: give a host's number, or an address")
    try:
        backend = ServedBackend(path, "free" if host is None else host, address, seconds)
    except McastError as error:
        raise unavailable(error.detail, _FIXES.get(error.errno or ENODEV, _FIXES[ENODEV])) from None
    except PermissionError as error:
        fix = "run as the user of the server, or start the server with --group"
        raise BackendUnavailable(name, UnavailableReason.NO_PERMISSION, str(error), fix) from None
    except TimeoutError as error:
        raise unavailable(
            f"{error.strerror} (socket {path})",
            "resume the server (kill -CONT), or end it and run `mcast sim serve` again",
        ) from None
    except OSError as error:
        raise unavailable(f"no fabric is served at {path}: {error.strerror or error}", _SERVE) from None
    found = backend.fabric.link_layer
    if layer not in (None, found):
        backend.close()
        other = "sim-shared" if found is LinkLayer.ETHERNET else "sim-shared-ib"
        raise unavailable(f"the fabric at {path} is {found.value}", f"open {other!r}")
    return backend


def served_status() -> Status:
    """The provider runs wherever there are Unix sockets; the words say whether a fabric is served now."""
    return Status(True, describe_served() or f"no fabric is served now: {_SERVE}")


def describe_served() -> str:
    """Return in words which served fabric `sim-shared` attaches to; "" where there is none."""
    path = find_socket()
    return "" if path is None else f"the fabric served at {path}"


def describe_from_environment() -> str:
    """Return in words which served fabric `sim` attaches to, because MCAST_SIM names it; "" for none."""
    path = socket_from_environment()
    return "" if path is None else f"the fabric served at {path}"


def open_sim(make_own: Any, name: str, **options: Any) -> Backend:
    """Attach to the fabric that MCAST_SIM or `socket` names; else make one."""
    attaching = options.keys() & _OPTIONS
    if attaching and options.keys() - _OPTIONS:
        others = ", ".join(sorted(options.keys() - _OPTIONS))
        raise ValueError(
            f"a fabric that is served has its own options: leave out {others}, or {attaching.pop()}"
        )
    if "socket" in options or ((attaching or not options) and socket_from_environment() is not None):
        return attach(name, **options)
    if attaching:
        raise ValueError(
            f"{', '.join(sorted(attaching))}: this is for a served fabric, and {name!r} makes its own: "
            f"name the served one by {VARIABLE}=PATH or socket=, or open 'sim-shared'"
        )
    own: Backend = make_own(**options)
    return own
