"""`mcast doctor --backend udp`: what on this host keeps groups over UDP sockets from working."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from mcast.api import Finding, Level, Status
from mcast.backends.udp.availability import status
from mcast.wire.packets import ROCE_UDP_PORT

_WANTED_BYTES = 4 << 20
"""What a receive queue of some hundred large messages takes."""
_UP, _LOOPBACK, _MULTICAST = 0x1, 0x8, 0x1000
_ROCE_DEVICES = Path("/sys/class/infiniband")


def examine() -> tuple[Finding, ...]:
    """Inspect this host, and change nothing."""
    found = status()
    return (_provider(found), *(_of_interfaces() if found.available else ()), _buffers(), *_devices())


def _provider(found: Status) -> Finding:
    level = Level.OK if found.available else Level.PROBLEM
    return Finding("provider", "", level, found.detail, found.fix)


def _of_interfaces() -> list[Finding]:
    native, findings = import_module("mcast.backends.udp._native"), []
    for name, _, flags, _, _, addresses in native.interfaces():
        if not addresses or flags & _LOOPBACK:
            continue
        if not flags & _UP:
            findings.append(Finding("interface", name, Level.WARNING, "it is down", f"ip link set {name} up"))
        elif not flags & _MULTICAST:
            fix = f"ip link set {name} multicast on, or use another interface"
            findings.append(Finding("interface", name, Level.PROBLEM, "it has no multicast", fix))
    return findings


def _buffers() -> Finding:
    most = int(Path("/proc/sys/net/core/rmem_max").read_text())
    seen = f"a socket may have {most} bytes for messages that nobody has read yet"
    if most >= _WANTED_BYTES:
        return Finding("buffers", "", Level.OK, seen)
    fix = f"sysctl -w net.core.rmem_max={_WANTED_BYTES}"
    return Finding("buffers", "", Level.WARNING, f"{seen}: fast senders overrun it", fix)


def _devices() -> list[Finding]:
    try:
        names = sorted(one.name for one in _ROCE_DEVICES.iterdir())
    except OSError:
        return []
    if not names:
        return []
    seen = (
        f"there are RDMA devices ({', '.join(names)}): a RoCE card takes packets to port {ROCE_UDP_PORT} "
        "before sockets see them"
    )
    return [Finding("devices", "", Level.WARNING, seen, "use the provider `rdma` on their interfaces")]
