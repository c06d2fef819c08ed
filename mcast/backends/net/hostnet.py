"""Asks and changes the host's network and RDMA settings: ip, bridge, rdma, sysfs, /proc."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any, NamedTuple

from mcast.backends.net import netlink
from mcast.wire.addresses import needs_interface

NET = Path("/sys/class/net")
_SYSCTL = Path("/proc/sys")
_IGMP = Path("/proc/net/igmp")
_BYTES = "surrogateescape"
"""The name of an interface may have any bytes: they become what `os.fsdecode` makes of them."""
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
_ALL_SYSTEMS = IPv4Address("224.0.0.1")
"""The group that every interface is always a member of."""


class InterfaceAddress(NamedTuple):
    """An address of an interface, and its prefix length."""

    ip: IPv4Address | IPv6Address
    prefix: int

    def __str__(self) -> str:
        return f"{self.ip}/{self.prefix}"


@cache
def program(name: str) -> str:
    """The path of a program, looked for in the administrator's directories, too."""
    found = shutil.which(name, path=_PATH)
    if found is None:
        package = {"nft": "nftables", "saquery": "infiniband-diags", "ibroute": "infiniband-diags"}.get(
            name, "iproute2"
        )
        raise FileNotFoundError(f"{name} is not installed: apt-get install {package}")
    return found


def run(*command: str) -> str:
    """The standard output of a command. Raises RuntimeError with the command's words if it fails."""
    words = [program(command[0]), *command[1:]]
    done = subprocess.run(words, capture_output=True, text=True, errors=_BYTES, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def ask(*command: str) -> Any:
    """The JSON output of a command; None if it prints nothing."""
    import json

    return json.loads(run(*command) or "null")


def addresses() -> dict[str, list[InterfaceAddress]]:
    """Interface -> its addresses, without those of fe80::/10."""
    return {
        link["ifname"]: [
            InterfaceAddress(address, info["prefixlen"])
            for info in link["addr_info"]
            if not needs_interface(address := ip_address(info["local"]))
        ]
        for link in ask("ip", "-j", "addr", "show")
    }


def bridge_port_of(netdev: str) -> str | None:
    """The other end of a veth, if that is a port of a bridge of this network namespace."""
    try:
        there = netlink.links()
    except OSError:
        return None
    peers = [one.peer for one in there.values() if one.name == netdev]
    other = there.get(peers[0]) if peers else None
    return other.name if other is not None and other.is_bridge_port and other.name != netdev else None


def rp_filter_of(netdev: str) -> str:
    """The interface's reverse path filter, as sysctl names it; with slashes, for names such as eth0.5."""
    return f"net/ipv4/conf/{netdev}/rp_filter"


def reverse_path_is_strict(netdev: str) -> bool:
    """Return True if packets are dropped whose source is routed through another interface."""
    try:  # the larger one counts: 1 is strict, 2 loose
        return max(int((_SYSCTL / rp_filter_of(one)).read_text()) for one in ("all", netdev)) == 1
    except (OSError, ValueError):
        return False


def igmp_versions() -> dict[str, str]:
    """Interface -> "V1", "V2" or "V3": the IGMP version that its queriers have set."""
    lines = (
        line.split() for line in _IGMP.read_text(errors=_BYTES).splitlines()[1:] if not line[0].isspace()
    )
    return {fields[1].rstrip(":"): fields[-1] for fields in lines}


def igmp_memberships() -> dict[str, set[IPv4Address]]:
    """Interface -> the groups that it is a member of, without 224.0.0.1 (/proc/net/igmp; K-DEVICE-9)."""
    found: dict[str, set[IPv4Address]] = {}
    netdev = ""
    for line in _IGMP.read_text(errors=_BYTES).splitlines()[1:]:
        fields = line.split()
        if not line[0].isspace():
            netdev = fields[1].rstrip(":")
        else:
            # the kernel prints the network-order word as a host-order number
            group = IPv4Address(int(fields[0], 16).to_bytes(4, "little"))
            if group != _ALL_SYSTEMS:
                found.setdefault(netdev, set()).add(group)
    return found


def container() -> str:
    """The kind of container that this process is in, by its usual marks; "" if this is none."""
    if _read("/proc/2/comm") == "kthreadd":  # the kernel's processes are not to be seen from inside one
        return ""
    marks = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    named = _read("/run/systemd/container") or os.environ.get("container", "")  # noqa: SIM112
    return named or next((kind for mark, kind in marks.items() if Path(mark).exists()), "")


def _read(path: str) -> str:
    try:
        return os.fsdecode(Path(path).read_bytes().strip())
    except OSError:
        return ""
