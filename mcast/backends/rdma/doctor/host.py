"""Inspects this host without changing it, for `checks` to judge."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, ip_interface
from pathlib import Path
from typing import Any, NamedTuple

from mcast.api import DeviceInfo, LinkLayer, PortInfo
from mcast.backends.net import hostnet
from mcast.backends.net.bridges import Bridge, bridges
from mcast.backends.net.firewall import ruleset
from mcast.backends.net.hostnet import NET
from mcast.backends.net.igmp_listener import hear_queriers
from mcast.backends.rdma import availability
from mcast.backends.rdma.kernel_devices import SYSFS, kernel_devices
from mcast.backends.rdma.net.ipoib import IFF_UP, IpoibInterface, interfaces_of
from mcast.backends.rdma.sa.refusal import broadcast_causes
from mcast.backends.rdma.sa.umad import SaTimeout, SaUnreachable, subnet_administrator
from mcast.errors.cause import Cause
from mcast.wire import mad

_CONF = Path("/proc/sys/net/ipv4/conf")
_CGROUPS = Path("/sys/fs/cgroup")
SA_SECONDS = 1.0
"""Maximum number of seconds to wait for the SA of a port."""
_A_GROUP = "239.255.0.1"
"""Stands for any group when a route is looked up."""


class PortFacts(NamedTuple):
    """A port, and what the host does with it.

    `gid_types`     GID index -> "RoCE v1", "RoCE v2" or "IB"
    `netdev`        the interface that its GIDs belong to, "" if none
    `netdev_here`   True if that interface is in this network namespace
    `software`      True if its packets pass the host's IP stack (Soft-RoCE)
    `igmp_version`  the IGMP version that the querier on that link has set, "" if the interface has no IGMP
    `send_only`     True if the SM knows send-only full members; None: the SM could not be asked
    `sm_silent`     True if the SM was asked, and did not answer
    `pkeys`         the P_Keys in its table
    `refusals`      IPoIB interface -> why the SA keeps that interface out of its broadcast group
    `subnets`       the IPv4 networks of the interface
    `listened`      how many seconds IGMP queries were listened for, 0 if not at all
    `querier`       the address that sent one, "" if none did
    """

    device: str
    info: PortInfo
    gid_types: Mapping[int, str] = {}
    netdev: str = ""
    netdev_here: bool = True
    netdev_up: bool = True
    netdev_mtu: int = 0
    software: bool = False
    igmp_version: str = ""
    force_igmp_version: int = 0
    rp_filter: int = 0
    accept_local: bool = False
    subnets: tuple[str, ...] = ()
    bridge: Bridge | None = None
    listened: float = 0
    querier: str = ""
    sm_lid: int = 0
    capability_mask: int = 0
    send_only: bool | None = None
    sm_silent: bool = False
    pkeys: tuple[int, ...] = ()
    refusals: Mapping[str, tuple[Cause, ...]] = {}
    ipoib: tuple[IpoibInterface, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.device}/{self.info.port_num}"

    @property
    def is_roce(self) -> bool:
        return self.info.link_layer is LinkLayer.ETHERNET


class HostFacts(NamedTuple):
    """Facts about this host.

    `has_device`   True if the kernel has an RDMA device, in whatever network namespace
    `release`      the kernel's release, as `uname -r` prints it
    `container`    the kind of container, "" if this is none
    `netns_shared` True if every network namespace sees every device; None: cannot be told
    `cgroup`       device -> what its rdma cgroup has left, such as {"hca_handle": 2}
    `ruleset`      the rules of the packet filter; None: cannot be read
    `route`        the interface that the route to a group leaves by, "" if none
    """

    available: availability.Facts
    has_device: bool = True
    release: str = ""
    container: str = ""
    netns_shared: bool | None = None
    cgroup: Mapping[str, Mapping[str, int]] = {}
    ruleset: tuple[dict[str, Any], ...] | None = ()
    route: str = ""
    ports: tuple[PortFacts, ...] = ()

    @property
    def devices(self) -> tuple[DeviceInfo, ...]:
        return self.available.devices


def gather(listen: float = 0) -> HostFacts:
    """Inspect this host now.

    `listen`: seconds to wait for queriers on links that lead to unknown switches.
    """
    found = availability.gather()
    igmp = hostnet.igmp_versions() if found.devices else {}
    links = _links() if found.devices else {}
    ports = tuple(_port(device.name, port, igmp, links) for device in found.devices for port in device.ports)
    return HostFacts(
        available=found,
        has_device=bool(kernel_devices()),
        release=platform.release(),
        container=hostnet.container(),
        netns_shared={"Y": True, "N": False}.get(_read("/sys/module/ib_core/parameters/netns_mode")),
        cgroup=_cgroup(),
        ruleset=ruleset(),
        route=_route(),
        ports=_listen(ports, listen) if listen else ports,
    )


def _listen(ports: tuple[PortFacts, ...], seconds: float) -> tuple[PortFacts, ...]:
    """The ports, with the querier on each link; unchanged where this process may not listen."""
    wanted = {port.netdev for port in ports if port.is_roce and port.netdev_here and port.bridge is None}
    if not wanted:
        return ports
    try:
        heard = hear_queriers(wanted, seconds)
    except PermissionError:
        return ports
    return tuple(
        port._replace(listened=seconds, querier=str(heard.get(port.netdev, "")))
        if port.netdev in wanted
        else port
        for port in ports
    )


def _read(path: Path | str) -> str:
    """The text of a small file; "" if it does not exist or may not be read."""
    try:
        return os.fsdecode(Path(path).read_bytes().strip())
    except OSError:
        return ""


def _number(path: Path | str) -> int:
    return int(_read(path) or "0", 0)


def _ask(*command: str) -> Any:
    """The JSON output of a command; None if the command is not installed, fails or prints nothing."""
    try:
        return hostnet.ask(*command)
    except (OSError, RuntimeError, ValueError, subprocess.TimeoutExpired):
        return None


def _links() -> dict[str, dict[str, Any]]:
    """Return the output of `ip` for each interface, by name.

    One call lists all: for a name that does not exist the kernel would try to load a module.
    """
    return {link["ifname"]: link for link in _ask("ip", "-j", "-d", "addr", "show") or () if link}


def _port(
    device: str, info: PortInfo, igmp: Mapping[str, str], links: Mapping[str, dict[str, Any]]
) -> PortFacts:
    sysfs = SYSFS / device / "ports" / str(info.port_num)
    attributes = sysfs / "gid_attrs"
    netdevs = [_read(attributes / "ndevs" / str(index)) for index in info.gids]
    # Soft-RoCE names it as its parent, also while it has no GID
    netdev = next(filter(None, netdevs), _read(SYSFS / device / "parent"))
    conf = _CONF / netdev
    ipoib = () if info.link_layer is LinkLayer.ETHERNET else interfaces_of(set(info.gids.values()))
    said = _ask_sm(device, info, ipoib)
    return PortFacts(
        device=device,
        info=info,
        gid_types={index: _read(attributes / "types" / str(index)) for index in info.gids},
        netdev=netdev,
        netdev_here=not netdev or netdev in {name for _, name in socket.if_nameindex()},
        netdev_up=bool(_number(NET / netdev / "flags") & IFF_UP) if netdev else True,
        netdev_mtu=_number(NET / netdev / "mtu") if netdev else 0,
        software="/virtual/" in str((SYSFS / device).resolve()),
        igmp_version=igmp.get(netdev, ""),
        force_igmp_version=max(
            _number(conf / "force_igmp_version"), _number(_CONF / "all/force_igmp_version")
        ),
        rp_filter=max(_number(conf / "rp_filter"), _number(_CONF / "all/rp_filter")),
        accept_local=bool(_number(conf / "accept_local") or _number(_CONF / "all/accept_local")),
        subnets=_subnets(links.get(netdev, {})),
        bridge=_bridge(netdev, links),
        sm_lid=_number(sysfs / "sm_lid"),
        capability_mask=_number(sysfs / "cap_mask"),
        send_only=said.send_only,
        sm_silent=said.silent,
        pkeys=tuple(filter(None, map(_number, sorted((sysfs / "pkeys").glob("*"))))),
        refusals=said.refusals,
        ipoib=ipoib,
    )


def _subnets(link: Mapping[str, Any]) -> tuple[str, ...]:
    interfaces = (ip_interface(f"{one['local']}/{one['prefixlen']}") for one in link.get("addr_info", ()))
    return tuple(str(one.network) for one in interfaces if isinstance(one.ip, IPv4Address))


def _bridge(netdev: str, links: Mapping[str, dict[str, Any]]) -> Bridge | None:
    """The bridge of this host that the interface is, is a port of, or is tied to by a veth pair."""
    if not netdev:
        return None
    if (NET / netdev / "bridge").exists():
        name = netdev
    else:
        port = netdev if (NET / netdev / "brport").exists() else hostnet.bridge_port_of(netdev)
        if port is None:
            return None
        name = (NET / port / "brport/bridge").resolve().name
    return bridges(links.values()).get(name)


class _SmSaid(NamedTuple):
    """Fields of PortFacts about the SM. All are unknown without access to /dev/infiniband/umad*."""

    send_only: bool | None = None
    silent: bool = False
    refusals: Mapping[str, tuple[Cause, ...]] = {}


def _ask_sm(device: str, info: PortInfo, ipoib: Iterable[IpoibInterface]) -> _SmSaid:
    if info.link_layer is not LinkLayer.INFINIBAND:
        return _SmSaid()
    waiting = {one.name: one.broadcast for one in ipoib if one.up and not one.carrier and one.broadcast}
    try:
        with subnet_administrator(device, info.port_num, SA_SECONDS) as sa:
            capabilities = sa.capability_mask2()
            causes = {name: broadcast_causes(sa, mgid, info.active_mtu) for name, mgid in waiting.items()}
    except SaUnreachable as silent:
        return _SmSaid(silent=isinstance(silent, SaTimeout))
    known = None if capabilities is None else bool(capabilities & mad.SEND_ONLY_FULL_MEMBER)
    return _SmSaid(known, refusals=causes)


def _cgroup() -> dict[str, dict[str, int]]:
    """Device -> the smallest limit of each kind in the cgroups above this process."""
    own = next((line[3:] for line in _read("/proc/self/cgroup").splitlines() if line.startswith("0::")), None)
    found: dict[str, dict[str, int]] = {}
    path = _CGROUPS / own.lstrip("/") if own else _CGROUPS
    while own and path != _CGROUPS and _CGROUPS in path.parents:
        for line in _read(path / "rdma.max").splitlines():
            device, *limits = line.split()
            for kind, _, value in (limit.partition("=") for limit in limits):
                if value != "max":
                    known = found.setdefault(device, {})
                    known[kind] = min(int(value), known.get(kind, int(value)))
        path = path.parent
    return found


def _route() -> str:
    answer = _ask("ip", "-j", "route", "get", _A_GROUP) or [{}]
    return str(answer[0].get("dev", ""))
