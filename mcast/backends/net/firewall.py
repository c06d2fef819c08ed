"""Finds rules of the host's packet filter that drop RoCEv2 or IGMP, in the output of `nft -j list ruleset`.

RoCEv2 concerns sockets, Soft-RoCE and other software devices, because the packets of a RoCE card pass no
filter of the host.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mcast.api import Finding, Level
from mcast.backends.net import hostnet
from mcast.wire.packets import ROCE_UDP_PORT

_HOOKS = frozenset({"ingress", "prerouting", "input", "output", "postrouting"})
_VERDICTS = {"drop": "drop", "reject": "drop", "accept": "accept"}
_DEPTH = 16
"""Chains that may call each other, as many as the kernel allows (NFT_JUMP_STACK_SIZE)."""


class Traffic(NamedTuple):
    """Packets of one kind: the protocol's names in nft, and the port that they are sent to."""

    protocol: frozenset[str | int]
    port: int | None


ROCE = Traffic(frozenset({"udp", 17}), ROCE_UDP_PORT)
IGMP = Traffic(frozenset({"igmp", 2}), None)


def ruleset() -> tuple[dict[str, Any], ...] | None:
    """Return the packet filter's rules; () where this kernel has none, None where they cannot be read."""
    try:
        # nft would load a module; a kernel without modules has no list of them
        modules = Path("/proc/modules")
        loaded = not modules.exists() or "nf_tables" in modules.read_text()
        if not (loaded and Path("/proc/net/netfilter").exists()):
            return ()
        found: dict[str, Any] = json.loads(hostnet.run("nft", "-j", "list", "ruleset"))
    except (OSError, RuntimeError, ValueError, subprocess.TimeoutExpired):
        return None
    return tuple(found["nftables"])


def dropping_chains(ruleset: Sequence[dict[str, Any]], traffic: Traffic = ROCE) -> list[str]:
    """The chains whose rules or policy drop all of the traffic, each as `family table chain`.

    A rule that also tests something else (an address, an interface, a state) counts as not matching, because
    its effect cannot be told from here.
    """
    chains = {_key(one["chain"]): one["chain"] for one in ruleset if "chain" in one}
    rules: dict[tuple[str, str, str], list[Any]] = {}
    for rule in (one["rule"] for one in ruleset if "rule" in one):
        rules.setdefault((rule["family"], rule["table"], rule["chain"]), []).append(rule["expr"])
    found = []
    for key, chain in chains.items():
        if chain.get("hook") in _HOOKS and chain["family"] not in ("arp", "ip6"):
            verdict = _verdict(key, rules, 0, traffic) or chain.get("policy", "accept")
            if verdict == "drop":
                found.append(" ".join(key))
    return found


def igmp_findings(ruleset: Sequence[dict[str, Any]]) -> list[Finding]:
    """Return the doctor's finding for each chain that drops IGMP, which the host sends for cards, too."""
    return [
        Finding(
            "firewall",
            "",
            Level.WARNING,
            f"the chain {chain} drops IGMP: a switch that snoops does not know this host's groups for long",
            f"nft insert rule {chain} ip protocol igmp accept",
        )
        for chain in dropping_chains(ruleset, IGMP)
    ]


def _key(chain: dict[str, Any]) -> tuple[str, str, str]:
    return chain["family"], chain["table"], chain["name"]


def _verdict(
    key: tuple[str, str, str], rules: dict[tuple[str, str, str], list[Any]], depth: int, traffic: Traffic
) -> str | None:
    """Return the verdict of a chain on the traffic; None if it is not certain."""
    for expressions in rules.get(key, ()) if depth < _DEPTH else ():
        if not all(_matches(one["match"], traffic) for one in expressions if "match" in one):
            continue
        for one in expressions:
            name = next(iter(one))
            if name in _VERDICTS:
                return _VERDICTS[name]
            if name in ("jump", "goto"):
                found = _verdict((*key[:2], one[name]["target"]), rules, depth + 1, traffic)
                if found or name == "goto":
                    return found
            elif name == "return":
                return None
            elif name == "xt":  # a match of iptables that nft cannot show
                break
    return None


def _matches(match: dict[str, Any], traffic: Traffic) -> bool:
    """Return True if every packet of the traffic matches, whatever its addresses and interface."""
    left, values = match["left"], _values(match["right"])
    if values is None:
        return False
    inside = match.get("op", "==") in ("==", "in")
    if left in ({"payload": {"protocol": p, "field": "dport"}} for p in ("udp", "th")):
        port = traffic.port
        return port is not None and inside == any(
            isinstance(low, int) and low <= port <= high for low, high in values
        )
    if left in (
        {"meta": {"key": "l4proto"}},
        {"payload": {"protocol": "ip", "field": "protocol"}},
    ):
        return inside == any(low in traffic.protocol for low, _ in values)
    return False


def _values(right: Any) -> list[tuple[Any, Any]] | None:
    """The right side of a comparison as ranges; None if it is something else, such as a named set."""
    items: Iterable[Any] = right["set"] if isinstance(right, dict) and "set" in right else [right]
    found = []
    for item in items:
        if isinstance(item, dict):
            if list(item) != ["range"]:
                return None
            found.append(tuple(item["range"]))
        else:
            found.append((item, item))
    numbers = all(isinstance(low, int) for low, _ in found)
    names = all(isinstance(low, str) and not low.startswith("@") for low, _ in found)
    return found if numbers or names else None
