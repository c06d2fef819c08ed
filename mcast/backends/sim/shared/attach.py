"""Which served fabric a process attaches to: the one it names, the one of MCAST_SIM, or that of the user."""

from __future__ import annotations

import os
from errno import EPERM
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcast.api import Backend, BackendUnavailable, LinkLayer, McastError, Status, UnavailableReason

if TYPE_CHECKING:
    from mcast.backends.sim.shared.client import SharedBackend

VARIABLE = "MCAST_SIM"
"""The environment variable with the path of a socket; empty: no fabric but one's own."""

_SERVE = "run `mcast sim serve` in another terminal, or name its socket by MCAST_SIM=PATH or socket="


def default_socket() -> Path:
    """The user's own place: a directory that nobody else can write to."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, "mcast", "sim.sock") if runtime else Path(f"/tmp/mcast-{os.geteuid()}/sim.sock")


def make_place(path: Path) -> Path:
    """The directory of the user's own socket, made if need be. Raises OSError for somebody else's."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = path.parent.lstat()
    if about.st_uid != os.geteuid() or not path.parent.is_dir() or about.st_mode & 0o022:
        raise PermissionError(EPERM, f"others may write to {path.parent}: remove it, or give --socket")
    return path


def named_socket() -> Path | None:
    """The socket that MCAST_SIM names, or the user's own if there is one; else None."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    path = default_socket()
    return path if path.is_socket() and path.parent.stat().st_uid in (0, os.geteuid()) else None


def attach(
    name: str,
    layer: LinkLayer | None = None,
    socket: str | os.PathLike[str] | None = None,
    host: int | str | None = None,
    bind: object = None,
) -> SharedBackend:
    """Attach this process to a served fabric. Raises BackendUnavailable.

    layer   what the fabric must be; None: either
    socket  its path; None: see `named_socket`
    host    the number of the host to be, also one that another process is; None: a free one; "all": all of
            them, to look on
    bind    be the host that has the address
    """
    from mcast.backends.sim.shared import frames  # which a program with a fabric of its own need not load
    from mcast.backends.sim.shared.client import SharedBackend

    path = named_socket() if socket is None else Path(socket)
    if path is None:
        raise BackendUnavailable(name, UnavailableReason.NO_DEVICE, "no fabric is served", _SERVE)
    try:
        request = frames.AttachTo(
            host="free" if host is None else host,  # type: ignore[arg-type]  # pydantic looks
            bind=None if bind is None else ip_address(str(bind)),
        )
    except ValueError as error:
        raise ValueError(
            f"host is {host!r}, bind is {bind!r}: give a host's number, or an address"
        ) from error
    try:
        backend = SharedBackend(path, request)
    except McastError as error:
        fix = "end a program that is attached, or serve a fabric with more --ports"
        raise BackendUnavailable(name, UnavailableReason.NO_DEVICE, error.detail, fix) from None
    except PermissionError as error:
        fix = "run as the user who serves it, or serve it with --group"
        raise BackendUnavailable(name, UnavailableReason.NO_PERMISSION, str(error), fix) from None
    except OSError as error:
        detail = f"no fabric is served at {path}: {error.strerror or error}"
        raise BackendUnavailable(name, UnavailableReason.NO_DEVICE, detail, _SERVE) from None
    found = backend.fabric.link_layer
    if layer not in (None, found):
        backend.close()
        detail = f"the fabric at {path} speaks {found.value}"
        raise BackendUnavailable(name, UnavailableReason.NO_DEVICE, detail, "open 'sim', which takes either")
    return backend


def shared_status() -> Status:
    """The provider runs wherever there are Unix sockets; the words say whether a fabric is served now."""
    return Status(True, shared_words() or f"no fabric is served now: {_SERVE}")


def shared_words() -> str:
    """Which fabric of other processes this one would attach to; "" where there is none."""
    path = named_socket()
    return "" if path is None else f"the fabric served at {path}"


def open_sim(make_own: Any, name: str, **options: Any) -> Backend:
    """Attach if that is asked for, or a fabric is served and none is described; else make one."""
    attaching = options.keys() & {"socket", "host", "bind"}
    if attaching and options.keys() - {"socket", "host", "bind"}:
        others = ", ".join(sorted(options.keys() - attaching))
        raise ValueError(
            f"a fabric that is served has its own options: leave out {others}, or {attaching.pop()}"
        )
    if attaching or (not options and named_socket() is not None):
        return attach(name, **options)
    own: Backend = make_own(**options)
    return own
