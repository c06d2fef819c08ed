"""`mcast doctor --backend udp`: what on this host keeps groups over UDP sockets from working."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from mcast.api import Finding, Level, Status
from mcast.backends.net import hostnet
from mcast.backends.net.bridges import Bridge, bridges, querier
from mcast.backends.net.firewall import dropping_chains, igmp_findings, ruleset
from mcast.backends.net.igmp_listener import hear_queriers
from mcast.backends.udp.availability import LOOPBACK_DOWN, status
from mcast.backends.udp.sockets import max_buffer
from mcast.wire.packets import ROCE_UDP_PORT

_WANTED_BYTES = 4 << 20
"""Bytes that a receive queue of some hundred large messages takes."""
_UP, _LOOPBACK, _MULTICAST = 0x1, 0x8, 0x1000
_SMALL_MTU = 1024
_ROCE_DEVICES = Path("/sys/class/infiniband")


def examine(listen: float = 0) -> tuple[Finding, ...]:
    """Inspect this host, listening for IGMP queriers for `listen` seconds, and change nothing."""
    found, known = status(), _bridges()
    here = (*_of_interfaces(), *_reverse_path(), *_queriers(listen, known)) if found.available else ()
    return (_provider(found), *here, *_firewall(), *_container(), _buffers(), *_devices())


def _bridges() -> dict[str, Bridge]:
    try:
        return bridges(hostnet.ask("ip", "-j", "-d", "addr", "show") or ())
    except (OSError, RuntimeError):
        return {}


def _firewall() -> list[Finding]:
    rules = ruleset()
    if rules is None:
        seen = "the packet filter's rules cannot be read"
        fix = "run this as root, with nft installed: apt-get install nftables"
        return [Finding("firewall", "", Level.WARNING, seen, fix)]
    found = [*map(_port_dropped, dropping_chains(rules)), *igmp_findings(rules)]
    return found or [Finding("firewall", "", Level.OK, f"no rule drops UDP port {ROCE_UDP_PORT} or IGMP")]


def _port_dropped(chain: str) -> Finding:
    seen = f"the chain {chain} drops UDP port {ROCE_UDP_PORT}, which is RoCEv2"
    fix = f"nft insert rule {chain} udp dport {ROCE_UDP_PORT} accept"
    return Finding("firewall", "", Level.PROBLEM, seen, fix)


def _container() -> list[Finding]:
    kind = hostnet.container()
    if not kind:
        return []
    fix = "if members on other hosts are not heard, run it with --network=host"
    seen = f"this is {kind}: its network may carry no multicast"
    return [Finding("container", "", Level.WARNING, seen, fix)]


def _used() -> list[str]:
    """The interfaces that groups may use, without loopback."""
    native = import_module("mcast.backends.udp._native")
    return [
        name
        for name, _, flags, _, _, addresses in native.interfaces()
        if addresses and flags & _UP and flags & _MULTICAST and not flags & _LOOPBACK
    ]


def _reverse_path() -> list[Finding]:
    """A note alone, because the senders' addresses are not known."""
    seen = "rp_filter is 1: a sender is not heard if the route to it leads through another interface"
    return [
        Finding("rp_filter", name, Level.NOTE, seen, f"sysctl -w {hostnet.rp_filter_of(name)}=2")
        for name in _used()
        if hostnet.reverse_path_is_strict(name)
    ]


def _queriers(listen: float, known: Mapping[str, Bridge]) -> list[Finding]:
    """Look at the bridges of this host: notes, if they only carry others; elsewhere listen."""
    used = _used()
    found = [querier(known[name], name) for name in used if name in known]
    others = [querier(bridge, name) for name, bridge in known.items() if bridge.mtus and name not in used]
    found += [one._replace(level=Level.NOTE) for one in others if one.level is not Level.OK]
    names = [name for name in used if name not in known]
    try:
        heard = hear_queriers(names, listen) if listen else None
    except PermissionError:
        heard = None
    for name in names:
        if heard is None:
            if listen:
                seen = "not listened: only root may"
                fix = f"run this as root: mcast doctor --backend udp --listen {listen:g}"
                found.append(Finding("querier", name, Level.WARNING, seen, fix))
            else:
                seen = "what the switch does cannot be seen: listen for a querier for two minutes, as root"
                fix = "mcast doctor --backend udp --listen 130"
                found.append(Finding("querier", name, Level.NOTE, seen, fix))
        elif name in heard:
            found.append(Finding("querier", name, Level.OK, f"{heard[name]} asks"))
        else:
            seen = (
                f"none was heard in {listen:g} s: a switch that snoops IGMP, without a querier, stops the "
                "group's messages minutes after a join, or at once"
            )
            fix = (
                "switch on an IGMP querier in that network; on a Linux bridge: "
                "ip link set BRIDGE type bridge mcast_querier 1"
            )
            found.append(Finding("querier", name, Level.WARNING, seen, fix))
    return found


def _provider(found: Status) -> Finding:
    level = Level.OK if found.available else Level.PROBLEM
    return Finding("provider", "", level, found.detail, found.fix)


def _of_interfaces() -> list[Finding]:
    native, findings = import_module("mcast.backends.udp._native"), []
    roce_mtu = import_module("mcast.backends.udp.host").roce_mtu
    for name, _, flags, mtu, _, addresses in native.interfaces():
        if flags & _LOOPBACK:
            if not flags & _UP:
                fix = f"ip link set {name} up"
                findings.append(Finding("interface", name, Level.NOTE, LOOPBACK_DOWN, fix))
            continue
        if not addresses:
            continue
        if not flags & _UP:
            findings.append(Finding("interface", name, Level.WARNING, "it is down", f"ip link set {name} up"))
        elif not flags & _MULTICAST:
            fix = f"ip link set {name} multicast on, or use another interface"
            findings.append(Finding("interface", name, Level.PROBLEM, "it has no multicast", fix))
        elif (found := roce_mtu(mtu)) < _SMALL_MTU:
            seen = f"its MTU of {mtu} bytes carries messages of {found}: objects need {_SMALL_MTU}"
            findings.append(Finding("MTU", name, Level.WARNING, seen, f"ip link set {name} mtu 1500"))
    return findings


def _buffers() -> Finding:
    most = max_buffer()
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
