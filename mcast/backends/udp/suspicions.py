"""Causes why members do not hear each other although each has joined; the kernel reports none of them.

`mcast doctor --backend udp` runs the checks that change nothing.
"""

from __future__ import annotations

from mcast.api import Cause
from mcast.backends.net import hostnet
from mcast.wire.packets import ROCE_UDP_PORT

LOOPBACK = "lo"


def suspicions(device: str, has_link: bool) -> tuple[Cause, ...]:
    """Return what keeps others from being heard by that interface, or may; nothing for loopback."""
    if not has_link:
        return (Cause(f"{device} has no link", f"ip link show {device}", f"ip link set {device} up"),)
    if device == LOOPBACK:
        return ()
    strict = Cause(
        "rp_filter drops senders routed through another interface",
        f"ip route get SENDER names {device}, or not; mcast doctor --backend udp",
        "loosen it",
    )
    return (
        Cause(
            f"a firewall, here or there, drops UDP port {ROCE_UDP_PORT} or IGMP",
            "nft list ruleset; or as root: mcast doctor --backend udp",
            "let both pass",
        ),
        Cause(
            "a switch that snoops IGMP has no querier",
            "as root: mcast doctor --backend udp --listen 130",
            "switch one on",
        ),
        Cause(
            "a container's network carries no multicast",
            "run both ends with --network=host: they hear each other",
            "use the host's",
        ),
        Cause(
            "a RoCE card takes the packets before sockets",
            f"rdma link | grep 'netdev {device}'",
            "use the provider rdma",
        ),
        *([strict] if hostnet.reverse_path_is_strict(device) else []),
    )
