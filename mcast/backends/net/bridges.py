"""The bridges of this host: what they do with multicast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mcast.api import Finding, Level

MEMBERSHIP_SECONDS = 260
"""A snooping switch forgets a membership that no query renews (RFC 3376, 8.4)."""


class Bridge(NamedTuple):
    """A bridge of this host.

    `other_querier`: the address of a querier that it hears, "" if none. `mtus`: port -> MTU in bytes.
    """

    name: str
    snooping: bool
    querier: bool
    other_querier: str = ""
    mtus: Mapping[str, int] = {}


def bridges(links: Iterable[Mapping[str, Any]]) -> dict[str, Bridge]:
    """Name -> bridge, in what `ip -json -details addr show` says of the interfaces."""
    links = [link for link in links if link]
    found = {}
    for link in links:
        info = link.get("linkinfo", {})
        if info.get("info_kind") == "bridge":
            name, data = link["ifname"], info.get("info_data", {})
            found[name] = Bridge(
                name,
                snooping=data.get("mcast_snooping") == 1,
                querier=data.get("mcast_querier") == 1,
                other_querier=data.get("mcast_querier_ipv4_addr", ""),
                mtus={one["ifname"]: one["mtu"] for one in links if one.get("master") == name},
            )
    return found


def querier(bridge: Bridge, subject: str) -> Finding:
    """Whether somebody asks the hosts behind it for their memberships, if it has to know them."""
    if not bridge.snooping:
        seen = f"{bridge.name} does not snoop: every port gets every group"
        return Finding("querier", subject, Level.OK, seen)
    if bridge.querier or bridge.other_querier:
        who = bridge.name if bridge.querier else bridge.other_querier
        return Finding("querier", subject, Level.OK, f"{who} asks, {bridge.name} snoops")
    seen = (
        f"{bridge.name} snoops and nobody asks: it sends each group to every port if it never heard a "
        f"querier, and stops {MEMBERSHIP_SECONDS} s after a join if one has fallen silent"
    )
    fix = f"ip link set {bridge.name} type bridge mcast_querier 1"
    return Finding("querier", subject, Level.WARNING, seen, fix)
