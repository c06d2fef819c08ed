"""The checks of `mcast doctor`, each a function of the facts that were found (`host.HostFacts`).

A check without a subject yields no finding: without a device there is no port to check.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from ipaddress import IPv4Address
from typing import NamedTuple

from mcast.api import Finding, Level, LinkLayer, PortState
from mcast.backends.net.bridges import MEMBERSHIP_SECONDS, querier
from mcast.backends.net.firewall import dropping_chains, igmp_findings
from mcast.backends.rdma.availability import REQUIREMENTS
from mcast.backends.rdma.doctor.host import HostFacts, PortFacts, gather
from mcast.backends.rdma.drivers import multicast_doubt
from mcast.backends.rdma.net.ipoib import IpoibInterface
from mcast.wire.packets import ROCE_HEADERS, ROCE_UDP_PORT
from mcast.wire.partition import find_pkey

SMALL_MTU = 1024
"""An MTU below this wastes an Ethernet frame. An interface with an MTU of 1500 bytes gives this MTU."""
_IGMP_V1 = 1
_STRICT = 1


def examine(listen: float = 0) -> tuple[Finding, ...]:
    """Look at this host, listening for IGMP queriers for `listen` seconds, and judge it."""
    return judge(gather(listen))


def judge(facts: HostFacts) -> tuple[Finding, ...]:
    """Every finding: of the host first, then of each port.

    On a host without RDMA devices nothing is a problem unless the user wants one.
    """
    found = (finding for check in CHECKS for finding in check(facts))
    if facts.has_device:
        return tuple(found)
    return tuple(one._replace(level=Level.INFO) if one.level is Level.PROBLEM else one for one in found)


def _ok(check: str, seen: str, subject: str = "") -> Finding:
    return Finding(check, subject, Level.OK, seen)


def _warning(check: str, seen: str, fix: str, subject: str = "") -> Finding:
    return Finding(check, subject, Level.WARNING, seen, fix)


def _problem(check: str, seen: str, fix: str, subject: str = "") -> Finding:
    return Finding(check, subject, Level.PROBLEM, seen, fix)


# --- what must be right before anything works: availability's hurdles -----------------------


def _requirement(name: str, needs: Sequence[str], well: Callable[[HostFacts], str]) -> _Check:
    """The check of one hurdle. It says nothing while one of the hurdles in `needs` is in the way."""

    def check(facts: HostFacts) -> Iterator[Finding]:
        if any(REQUIREMENTS[other](facts.available) for other in needs):
            return
        status = REQUIREMENTS[name](facts.available)
        yield _ok(name, well(facts)) if status is None else _problem(name, status.detail, status.fix)

    return check


def _memlock_well(facts: HostFacts) -> str:
    limit = facts.available.memlock
    return "no limit" if limit is None else f"{limit} bytes, one QP needs {facts.available.needed}"


def _devices(facts: HostFacts) -> Iterator[Finding]:
    """Each device by itself.

    One that is left out is no problem while another works: a container sees those of others, too.
    """
    found = facts.available
    if any(REQUIREMENTS[name](found) for name in ("libraries", "verbs")):
        return
    status = REQUIREMENTS["device"](found)
    if status is not None:
        yield _problem("device", status.detail, status.fix)
    if found.devices:
        yield _ok("device", ", ".join(device.name for device in found.devices))
    make = _warning if found.devices else _problem
    for one in found.unusable:
        yield make("device", f"left out: {one.detail}", one.fix, one.name)


# --- the host ---------------------------------------------------------------------------


class Quirk(NamedTuple):
    """A behaviour of kernels from `since` to before `before`; `link_layer` None: on both link layers."""

    since: tuple[int, int]
    before: tuple[int, int]
    link_layer: LinkLayer | None
    level: Level
    says: str
    fix: str


QUIRKS = (
    Quirk(
        *((0, 0), (5, 15), LinkLayer.ETHERNET, Level.WARNING),
        "leaving a send-only membership sends an IGMP leave, which silences a receiver on the same host",
        "run Linux 5.15 or later, or keep senders and receivers of a group on different hosts",
    ),
    Quirk(
        *((0, 0), (5, 12), LinkLayer.INFINIBAND, Level.WARNING),
        "a send-only join answers EOPNOTSUPP unless the SM is known to support it",
        "run Linux 5.12 or later, or join as a full member",
    ),
    Quirk(
        *((0, 0), (6, 12), LinkLayer.ETHERNET, Level.OK),
        "Soft-RoCE: a receive that is too small puts the QP into ERR",
        "",
    ),
    Quirk(
        *((6, 12), (99, 0), LinkLayer.ETHERNET, Level.OK),
        "Soft-RoCE: a message too large for its receive is dropped in silence; "
        "the step from SQD to RTS right after the one to SQD is EINVAL",
        "",
    ),
)
"""docs/pitfalls.md, 21; SA-ENTRY-3; K-DATA-7, K-DATA-25."""


def _kernel(facts: HostFacts) -> Iterator[Finding]:
    found = re.match(r"(\d+)\.(\d+)", facts.release)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    layers = {port.info.link_layer for port in facts.ports}
    quirks = [
        one
        for one in QUIRKS
        if found
        and one.since <= version < one.before
        and (one.link_layer in layers if one.link_layer else True)
    ]
    if not any(one.level is Level.OK for one in quirks):
        yield _ok("kernel", f"Linux {facts.release}")
    for one in quirks:
        yield Finding("kernel", "", one.level, f"Linux {facts.release}: {one.says}", one.fix)


def _container(facts: HostFacts) -> Iterator[Finding]:
    if facts.container:
        yield _ok("container", f"{facts.container}: devices, limits and interfaces are those given to it")
    found = facts.available
    hidden = facts.netns_shared is False and not (found.missing or found.devices or found.unusable)
    if hidden:
        yield _problem(
            "namespace",
            "RDMA devices are kept in single network namespaces (exclusive), and none is in this one",
            "rdma dev set DEV netns NAME, or for all: rdma system set netns shared",
        )


def _cgroup(facts: HostFacts) -> Iterator[Finding]:
    for device in (one.name for one in facts.devices):
        limits = facts.cgroup.get(device, {})
        left = ", ".join(f"{kind}={value}" for kind, value in limits.items())
        if 0 in limits.values():
            fix = f"echo '{device} hca_handle=max hca_object=max' > rdma.max of this process's cgroup"
            yield _problem("cgroup", f"an rdma cgroup allows {left}", fix, device)
        elif left:
            yield _ok("cgroup", f"an rdma cgroup allows {left}", device)


def _firewall(facts: HostFacts) -> Iterator[Finding]:
    """RoCEv2 of software devices alone passes the host's packet filter, and IGMP of all RoCE devices."""
    if facts.ruleset is not None and any(port.is_roce for port in facts.ports):
        yield from igmp_findings(facts.ruleset)
    names = sorted({port.device for port in facts.ports if port.software and port.is_roce})
    if not names:
        return
    if facts.ruleset is None:
        seen = "the packet filter's rules cannot be read, and these devices' packets pass it"
        yield _warning("firewall", seen, "run this as root, with nft installed: apt-get install nftables")
        return
    chains = dropping_chains(facts.ruleset)
    if not chains:
        yield _ok("firewall", f"no rule drops UDP port {ROCE_UDP_PORT}")
    for chain in chains:
        seen = f"the chain {chain} drops UDP port {ROCE_UDP_PORT}, which is RoCEv2"
        yield _problem("firewall", seen, f"nft insert rule {chain} udp dport {ROCE_UDP_PORT} accept")


def _route(facts: HostFacts) -> Iterator[Finding]:
    """Never a problem by itself, because a program that binds to an address needs no route."""
    if any(port.is_roce for port in facts.ports):
        where = f"groups go over {facts.route}" if facts.route else "none for groups"
        yield _ok("route", f"{where}; used only by resolve_addr without a source")


# --- each port --------------------------------------------------------------------------


def _each(check: Callable[[HostFacts, PortFacts], Iterator[Finding]]) -> _Check:
    return lambda facts: (finding for port in facts.ports for finding in check(facts, port))


def _link(facts: HostFacts, port: PortFacts) -> Iterator[Finding]:
    info = port.info
    if info.state == PortState.ACTIVE:
        rate = f"{info.rate:g} Gbit/s"
        yield _ok("link", f"ACTIVE, {info.link_layer.value}, {rate}", port.name)
        return
    if port.is_roce:
        fix = f"ip link set {port.netdev or 'DEV'} up"
        fix += "" if not port.netdev_up else "; then the cable and the switch's port"
    elif info.state == PortState.DOWN:
        fix = f"check the cable, then: ibportstate -D 0 {info.port_num} enable"
    else:
        fix = "start a subnet manager: systemctl start opensm"
    # A port that nobody gave an address is one that nobody uses.
    used = info.addresses or REQUIREMENTS["link"](facts.available)
    make = _problem if used else _warning
    yield make("link", f"the port is {info.state.name}", fix, port.name)


def _namespace(facts: HostFacts, port: PortFacts) -> Iterator[Finding]:
    """K-FABRIC-5."""
    if not port.netdev_here:
        seen = f"its interface {port.netdev} is in another network namespace: nothing arrives here"
        fix = f"ip link set {port.netdev} netns THIS, or run in that namespace (docker: --network=host)"
        yield _problem("namespace", seen, fix, port.name)


def _address(facts: HostFacts, port: PortFacts) -> Iterator[Finding]:
    if port.info.state != PortState.ACTIVE or not port.netdev_here:
        return
    addresses = port.info.addresses
    shown = ", ".join(map(str, addresses)) or "no address"
    if any(isinstance(one, IPv4Address) for one in addresses):
        yield _ok("address", shown, port.name)
        return
    usable = any(isinstance(one, IPv4Address) for other in facts.ports for one in other.info.addresses)
    device = port.netdev or next((one.name for one in port.ipoib), "DEV")
    why = "; RoCEv2 joins IPv4 groups alone" if addresses and port.is_roce else ""
    make = _warning if usable or (addresses and not port.is_roce) else _problem
    fix = f"ip addr add 10.0.0.1/24 dev {device}"
    yield make("address", f"no IPv4 address ({shown}){why}", fix, port.name)


def _gids(facts: HostFacts, port: PortFacts) -> Iterator[Finding]:
    if not port.is_roce or not port.info.addresses:
        return
    kinds = sorted({port.gid_types.get(index) or "unknown" for index in port.info.gids})
    count = len(port.info.gids)
    shown = f"{count} GID{'' if count == 1 else 's'}, {', '.join(kinds)}"
    if "RoCE v2" in kinds or kinds == ["unknown"]:
        yield _ok("GIDs", shown, port.name)
    else:
        fix = f"cma_roce_mode -d {port.device} -p {port.info.port_num} -m 2, or a RoCEv2 adapter"
        yield _problem("GIDs", f"{shown}: none of RoCE v2, which peers speak", fix, port.name)


def _mtu(facts: HostFacts, port: PortFacts) -> Iterator[Finding]:
    if port.info.state != PortState.ACTIVE:
        return
    mtu = port.info.active_mtu
    shown = f"a message carries up to {mtu} bytes"
    if port.is_roce:
        yield _roce_mtu(facts, port, mtu, shown)
    elif mtu >= SMALL_MTU:
        yield _ok("MTU", shown, port.name)
    else:
        yield _warning("MTU", shown, "raise the partition's MTU in partitions.conf of the SM", port.name)


def _roce_mtu(facts: HostFacts, port: PortFacts, mtu: int, shown: str) -> Finding:
    """Compare the MTU with those of this host's other ports and of its bridge.

    What one of them cannot take is lost in silence (K-DATA-26, K-DATA-27). Other hosts and switches are not
    seen from here.
    """
    senders = [
        other
        for other in facts.ports
        if other.is_roce and other.info.state == PortState.ACTIVE and set(other.subnets) & set(port.subnets)
    ]
    largest = max(senders, key=lambda other: other.info.active_mtu, default=port)
    narrow = [
        name for name, most in (port.bridge.mtus if port.bridge else {}).items() if most < mtu + ROCE_HEADERS
    ]
    if largest.info.active_mtu > mtu:
        seen = f"{shown}, and {largest.name} of the same subnet sends up to {largest.info.active_mtu}: "
        seen += "larger messages are lost here in silence"
        return _warning("MTU", seen, f"ip link set {port.netdev} mtu {largest.netdev_mtu}", port.name)
    if mtu < SMALL_MTU:
        seen = f"{shown}: {port.netdev}'s MTU is {port.netdev_mtu}"
        return _warning("MTU", seen, f"ip link set {port.netdev} mtu 1500", port.name)
    if port.bridge and narrow:
        seen = f"{shown}, and packets of that size are dropped in silence by {port.bridge.name}: at "
        seen += ", ".join(f"{name}, whose MTU is {port.bridge.mtus[name]}" for name in narrow)
        fix = " && ".join(f"ip link set {name} mtu {port.netdev_mtu}" for name in narrow)
        return _warning("MTU", seen, fix, port.name)
    if mtu > SMALL_MTU:
        shown += (
            ", if every receiver's port and every switch between takes that: `mcast ping -S "
            f"{mtu} GROUP` shows it, with `mcast ping --answer GROUP` at the receivers"
        )
    return _ok("MTU", shown, port.name)


def _limits(facts: HostFacts, port: PortFacts) -> Iterator[Finding]:
    device = next(one for one in facts.devices if one.name == port.device)
    if port.info.port_num != 1:
        return
    groups, qps = device.max_mcast_grp, device.max_mcast_qp_attach
    why = device.why_no_multicast
    if why:
        make = _problem if all(one.why_no_multicast for one in facts.devices) else _warning
        yield make("limits", f"no multicast: {why}", "use another device", port.device)
    elif doubt := multicast_doubt(device.driver):
        seen = f"multicast may work with this newer rdma-core: {doubt}"
        yield _warning("limits", seen, "join a group; if that fails, use another device", port.device)
    else:
        yield _ok("limits", f"{groups} groups, {qps} QPs in each", port.device)


def _igmp(facts: HostFacts, port: PortFacts) -> Iterator[Finding]:
    if not port.is_roce or not port.igmp_version:
        return
    if port.force_igmp_version == _IGMP_V1:
        seen = "IGMPv1 is forced: it has no leave, so switches go on sending for minutes"
        where = (f"net.ipv4.conf.{name}.force_igmp_version=0" for name in (port.netdev, "all"))
        fix = f"sysctl -w {' '.join(where)}"
        yield _warning("IGMP", seen, fix, port.name)
    elif port.igmp_version == "V1":
        seen = f"{port.netdev} speaks IGMPv1, because a querier does: it has no leave"
        yield _warning("IGMP", seen, "let the querier speak IGMPv2 or v3", port.name)
    else:
        yield _ok("IGMP", f"{port.netdev} speaks IGMP{port.igmp_version.lower()}", port.name)


def _querier(facts: HostFacts, port: PortFacts) -> Iterator[Finding]:
    if not port.is_roce or port.info.state != PortState.ACTIVE or not port.netdev_here:
        return
    bridge = port.bridge
    if bridge is None:
        yield _heard(port)
    else:
        yield querier(bridge, port.name)


def _heard(port: PortFacts) -> Finding:
    """A switch that is not this host's can only be listened to."""
    if not port.listened:
        seen = f"cannot be seen, {port.netdev} leads to another's switch: as root, this command can listen"
        return Finding("querier", port.name, Level.NOTE, seen, "mcast doctor --backend rdma --listen 130")
    if port.querier:
        return _ok("querier", f"{port.querier} asks", port.name)
    seen = f"none detected on {port.netdev} in {port.listened:g} s (they ask every 125 s): if the switch "
    seen += f"snoops, traffic stops {MEMBERSHIP_SECONDS} s after a join"
    return _warning("querier", seen, "switch on an IGMP querier in that network", port.name)


def _reverse_path(facts: HostFacts, port: PortFacts) -> Iterator[Finding]:
    """Check for two software ports of one host in one subnet.

    The kernel takes the packets of one for forged at the other (K-FABRIC-2).
    """
    others = [
        other
        for other in facts.ports
        if other.netdev != port.netdev and other.netdev_here and set(other.subnets) & set(port.subnets)
    ]
    if not (port.software and port.is_roce and others):
        return
    wrong = ["rp_filter is 1"] if port.rp_filter == _STRICT else []
    wrong += [] if port.accept_local else ["accept_local is 0"]
    if not wrong:
        yield _ok("rp_filter", "packets of this host's other ports are let in", port.name)
        return
    conf = f"net.ipv4.conf.{port.netdev}"  # of rp_filter the larger of this and `all` counts, and 2 is loose
    seen = f"{' and '.join(wrong)}: what {others[0].netdev} of the same subnet sends is dropped"
    fix = f"sysctl -w {conf}.accept_local=1 {conf}.rp_filter=2"
    yield _problem("rp_filter", seen, fix, port.name)


def _sm(facts: HostFacts, port: PortFacts) -> Iterator[Finding]:
    if port.is_roce or port.info.state == PortState.DOWN:
        return
    if not port.sm_lid or not port.info.lid:
        seen = f"no subnet manager has set the port up (SM LID {port.sm_lid}, LID {port.info.lid})"
        yield _problem("SM", seen, "systemctl start opensm, here or on another host", port.name)
    elif port.sm_silent:
        seen = f"the subnet manager at LID {port.sm_lid} does not answer: nothing can be joined"
        yield _problem("SM", seen, "systemctl start opensm, here or on another host", port.name)
    else:
        seen = f"LID {port.info.lid}, SM LID {port.sm_lid}, capability mask {port.capability_mask:#010x}"
        seen += {True: "", False: "; it knows no send-only members", None: "; could not be asked"}[
            port.send_only
        ]
        fix = "update the SM, or join as a full member: a send-only join is refused"
        yield _warning("SM", seen, fix, port.name) if port.send_only is False else _ok("SM", seen, port.name)


def _ipoib(facts: HostFacts, port: PortFacts) -> Iterator[Finding]:
    if port.is_roce or port.info.state != PortState.ACTIVE:
        return
    if not port.ipoib:
        seen = "no IPoIB interface: without its broadcast group every join is EADDRNOTAVAIL"
        yield _problem("IPoIB", seen, "modprobe ib_ipoib", port.name)
    for one in port.ipoib:
        if _is_outside(port, one):
            continue  # which P_Key's check says
        if not one.up:
            yield _problem("IPoIB", f"{one.name} is down", f"ip link set {one.name} up", port.name)
        elif not one.carrier:
            seen = f"{one.name} has not joined its broadcast group"
            why = next(iter(port.refusals.get(one.name, ())), None)
            if why:
                yield _problem("IPoIB", f"{seen}: {why.why}", f"{why.check}; {why.next_step}", port.name)
            else:
                yield _problem("IPoIB", seen, "ask the SM for it: saquery -g; then dmesg", port.name)
        else:
            yield _ok("IPoIB", f"{one.name} has joined its broadcast group", port.name)


def _is_outside(port: PortFacts, one: IpoibInterface) -> bool:
    """Return True if the port is known to be outside the partition of its IPoIB interface."""
    return bool(port.pkeys) and one.pkey is not None and find_pkey(port.pkeys, one.pkey) is None


def _partition(facts: HostFacts, port: PortFacts) -> Iterator[Finding]:
    """Check that the port receives from all members of the partition of each IPoIB interface (SA-PKEY-2)."""
    for one in () if port.is_roce else port.ipoib:
        if _is_outside(port, one):
            table = ", ".join(f"{pkey:#06x}" for pkey in port.pkeys)
            seen = f"{one.name} is of partition {one.pkey:#06x}, the port's table has {table}"
            fix = f"have the SM put the port into it (partitions.conf), or: ip link del {one.name}"
            yield _problem("P_Key", seen, fix, port.name)
        elif one.pkey is not None and port.pkeys and one.pkey not in port.pkeys:
            seen = (
                f"{one.name} is a limited member of its partition, and does not receive from limited members"
            )
            fix = "make the port a full member (=full behind its GUID in the SM's partitions.conf)"
            yield _warning("P_Key", seen, fix, port.name)
        elif one.pkey is not None and port.pkeys:
            yield _ok("P_Key", f"{one.name} is a full member of {one.pkey:#06x}", port.name)


_Check = Callable[[HostFacts], Iterator[Finding]]

CHECKS: tuple[_Check, ...] = (
    _requirement("libraries", (), lambda facts: "librdmacm and libibverbs are loaded"),
    _requirement("verbs", ("libraries",), lambda facts: f"{len(facts.ports)} ports answer"),
    _devices,
    _requirement("modules", ("libraries", "device"), lambda facts: "the connection manager's file is there"),
    _requirement("files", ("libraries", "device", "modules"), lambda facts: "this process may open it"),
    _requirement("memlock", ("libraries",), _memlock_well),
    _kernel,
    _container,
    _cgroup,
    _firewall,
    _route,
    *map(
        _each,
        (
            _namespace,
            _link,
            _address,
            _gids,
            _mtu,
            _limits,
            _igmp,
            _querier,
            _reverse_path,
            _sm,
            _ipoib,
            _partition,
        ),
    ),
)
"""In the order in which they are shown."""
