"""Availability of `udp` on this host, and the errors that say why it cannot run."""

from __future__ import annotations

import errno
from importlib import import_module

from mcast.api import BackendUnavailable, Status, UnavailableReason
from mcast.backends.net.extension import how_to_build
from mcast.wire.packets import ROCE_UDP_PORT

BUILD = (
    "install a C compiler and Python's headers, and build it again: "
    "apt-get install gcc libc6-dev python3-dev && in a clone: pip install --force-reinstall --no-deps ."
)
LIBRARY = "libisal.so.2"
PACKAGE = "libisal2"
IN_USE = (
    f"UDP port {ROCE_UDP_PORT} is in use by somebody who does not share it: the kernel, where Soft-RoCE or "
    "a RoCE card takes RoCE itself, or another program"
)
INSTEAD = (
    "on a host with a RoCE device use the provider `rdma` (`mcast info` lists its devices); else find the "
    f"program: ss -ulpn 'sport = :{ROCE_UDP_PORT}'"
)
LOOPBACK_DOWN = (
    "loopback is down, by which unicast from RoCE devices reaches queue pairs here: answers are lost"
)
_NO_ADDRESS = "no interface of this network namespace is up and has an IPv4 address"
_LO_UP = "ip link set lo up, or give an interface an address: ip addr add 10.0.0.1/24 dev DEV"


def status() -> Status:
    """Look for the extension, for an interface, and whether port 4791 can be shared."""
    try:
        native = import_module("mcast.backends.udp._native")
    except ImportError as error:
        if error.name == LIBRARY:
            return Status(False, str(error), UnavailableReason.NO_LIBRARY, f"apt-get install {PACKAGE}")
        detail = f"the extension mcast.backends.udp._native is not built ({error})"
        return Status(False, detail, UnavailableReason.NOT_BUILT, how_to_build(BUILD))
    from mcast.backends.udp.sockets import open_group

    try:
        open_group().close()
        interfaces = native.interfaces()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return no_socket(error)
        return Status(False, IN_USE, UnavailableReason.PORT_IN_USE, INSTEAD)
    names = [name for name, _, flags, _, _, addresses in interfaces if addresses and flags & 1]
    if not names:
        return Status(False, _NO_ADDRESS, UnavailableReason.NO_ADDRESS, _LO_UP)
    return Status(True, f"RoCEv2 over UDP sockets on {', '.join(names)}")


def no_socket(error: OSError) -> Status:
    """Return the status of a host, or a process, that has no socket to give."""
    fix = "ulimit -n; dmesg | tail"
    return Status(False, f"no socket can be opened: {error}", UnavailableReason.BROKEN, fix)


def unavailable(found: Status) -> BackendUnavailable:
    assert found.reason is not None
    return BackendUnavailable("udp", found.reason, found.detail, found.fix)


def require_available() -> None:
    """Raise BackendUnavailable with the reason and what to do."""
    found = status()
    if not found.available:
        raise unavailable(found)


def why_refused(failed: OSError) -> str:
    """Explain an errno of a socket call beyond its text; "" if nothing."""
    if failed.errno == errno.EADDRINUSE:
        return f"{IN_USE}; {INSTEAD}"
    if failed.errno in (errno.EMFILE, errno.ENFILE):
        return "each queue pair has some four descriptors: raise the limit of open files: ulimit -n"
    return ""
