"""Causes why members do not hear each other although each has joined; the kernel reports none of them.

Each is a sentence with the command that decides. `mcast doctor --backend udp` runs those that change nothing.
"""

from __future__ import annotations

from mcast.wire.packets import ROCE_UDP_PORT

NO_QUERIER = "a switch that snoops IGMP, without a querier, stops the group's messages minutes after a join"
LOOPBACK = "lo"
CONTAINER = "the network of a container may carry no multicast"


def suspicions(device: str) -> tuple[str, ...]:
    """Return what may keep others from being heard by that interface; nothing for loopback."""
    if device == LOOPBACK:
        return ()
    return (
        "if others are there, perhaps a firewall, here or there, drops UDP: nft list ruleset shows whether a "
        f"rule drops port {ROCE_UDP_PORT}",
        f"or {NO_QUERIER}: mcast doctor --backend udp --listen 130, as root, detects a querier",
        f"or {CONTAINER}: run both with --network=host, and check that they receive each other's messages",
        "or a RoCE card takes the packets before sockets see them: rdma link shows whether a device has the "
        f"netdev {device}",
    )
