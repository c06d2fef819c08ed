"""The conformance suite's test bed on a Linux host, and the one for Soft-RoCE on a snooping bridge.

The lab makes such a bridge (`mcast lab run`). The evidence is the kernel's: the bridge's multicast database,
/proc/net/igmp, `rdma resource`, packets on the bridge's ports. Each is read when it is asked for; the
multicast database follows a join or leave with a delay.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import NamedTuple

from mcast.api import (
    Backend,
    BackendUnavailable,
    Feature,
    Gid,
    Observer,
    PortState,
    Testbed,
    UnavailableReason,
)
from mcast.backends.net import hostnet
from mcast.backends.net.igmp_listener import IgmpListener
from mcast.backends.net.netlink import (
    SnoopingEntry,
    delete_entries,
    more_objects,
    rdma_objects,
    snooping_table,
)
from mcast.backends.rdma.backend import RdmaBackend
from mcast.backends.rdma.devices import read_devices
from mcast.backends.rdma.host_bed import SETTLE_TIMEOUT, HostTestbed, eventually, qkey_violations
from mcast.backends.rdma.infiniband_bed import find_infiniband_ports, infiniband_testbed
from mcast.backends.rdma.native import Native, load
from mcast.backends.rdma.roce_bed import OVER_LO, RoceTestbed, find_roce_ports
from mcast.wire.units import MTU

PORTS_NEEDED = 3
"""The ports of a bridge that its test bed wants; with fewer, the one for any host's ports does."""
FEATURES = frozenset(
    {
        Feature.SWITCH_TABLE,
        Feature.ROUTES,
        Feature.IPV6_SOURCE,
        Feature.LINK,
        Feature.ADDRESS_REMOVAL,
        Feature.DEVICE_REMOVAL,
        Feature.IGMP_ON_WIRE,
        Feature.QKEY_VIOLATIONS,
        Feature.MIXED_MTU,
    }
)
JUMBO = 4200
"""The MTU of an interface, in bytes, that gives its RoCE device an MTU of 4096."""
_NET = Path("/sys/class/net")


class BridgedPort(NamedTuple):
    """A Soft-RoCE device, its interface, and the bridge port at the other end."""

    device: str
    netdev: str
    bridge_port: str
    ipv4: hostnet.InterfaceAddress
    ipv6: hostnet.InterfaceAddress | None


@cache
def find_ports() -> dict[IPv4Address, BridgedPort]:
    """The devices of this host that are connected to a bridge, by their IPv4 address.

    Looked up once, because each test bed leaves the host as it was.
    """
    found: dict[IPv4Address, BridgedPort] = {}
    all_addresses = hostnet.addresses()
    for link in hostnet.ask("rdma", "-j", "link", "show") or []:
        netdev = link.get("netdev", "")
        bridge_port = hostnet.bridge_port_of(netdev) if netdev else None
        if bridge_port is None:
            continue
        addresses = all_addresses[netdev]
        ipv4 = next((one for one in addresses if isinstance(one.ip, IPv4Address)), None)
        ipv6 = next((one for one in addresses if isinstance(one.ip, IPv6Address)), None)
        if ipv4 is not None:
            assert isinstance(ipv4.ip, IPv4Address)
            found[ipv4.ip] = BridgedPort(link["ifname"], netdev, bridge_port, ipv4, ipv6)
    return found


class RdmaObserver(Observer):
    def __init__(self, native: Native, ports: dict[IPv4Address, BridgedPort]) -> None:
        self._native, self._ports = native, ports
        self._by_bridge_port = {port.bridge_port: address for address, port in ports.items()}
        self._objects_before = rdma_objects()
        self._igmp = IgmpListener(frozenset(self._by_bridge_port))

    def group_ports(self, group: Gid) -> frozenset[IPv4Address]:
        ports = (self._by_bridge_port.get(one.port) for one in snooping_table() if one.group == group.ipv4)
        return frozenset(port for port in ports if port is not None)

    def group_exists(self, group: Gid) -> bool:
        return any(entry.group == group.ipv4 for entry in snooping_table())

    def port_memberships(self, port: IPv4Address) -> frozenset[Gid]:
        return frozenset(map(Gid, hostnet.igmp_memberships().get(self._ports[port].netdev, ())))

    def leftovers(self) -> tuple[str, ...]:
        memberships = [
            f"{port} is a member of {group}"
            for port in self._ports
            for group in sorted(self.port_memberships(port))
        ]
        return (*more_objects(self._objects_before, rdma_objects()), *memberships)

    def igmp_reports(self, group: Gid) -> int:
        return 0 if group.ipv4 is None else self._igmp.count(group.ipv4)

    def qkey_violations(self, port: IPv4Address) -> int:
        return qkey_violations(self._native, self._ports[port].device, 1)

    def oversized(self, port: IPv4Address) -> int:
        """Return what the interface has dropped: nothing else counts such a message (K-DATA-26)."""
        return int((_NET / self._ports[port].netdev / "statistics/rx_dropped").read_text())

    def close(self) -> None:
        self._igmp.close()


class RdmaTestbed(HostTestbed):
    deviations: Mapping[str, str] = OVER_LO

    def __init__(self, backend: Backend, native: Native, ports: dict[IPv4Address, BridgedPort]) -> None:
        self.features: frozenset[Feature] = (
            FEATURES if all(port.ipv6 for port in ports.values()) else FEATURES - {Feature.IPV6_SOURCE}
        )
        self._native, self._ports = native, ports
        self.backend: Backend = backend
        self._where = ports
        self.ports: tuple[IPv4Address, ...] = tuple(sorted(ports))
        self.observer: RdmaObserver = RdmaObserver(native, ports)
        self._removals: dict[IPv4Address, subprocess.Popen[bytes]] = {}

    @contextmanager
    def link_down(self, port: IPv4Address) -> Iterator[None]:
        netdev = self._ports[port].netdev
        # else the IPv6 addresses, and the GIDs made of them, go with the link
        Path(f"/proc/sys/net/ipv6/conf/{netdev}/keep_addr_on_down").write_text("1")
        hostnet.run("ip", "link", "set", netdev, "down")
        try:
            eventually(lambda: not self._is_usable(port), f"the link of {port} does not go down")
            yield
        finally:
            hostnet.run("ip", "link", "set", netdev, "up")
            eventually(lambda: self._is_usable(port), f"the link of {port} does not come back")

    @contextmanager
    def without_address(self, port: IPv4Address) -> Iterator[None]:
        where = (str(self._ports[port].ipv4), "dev", self._ports[port].netdev)
        hostnet.run("ip", "addr", "del", *where)
        try:
            eventually(lambda: not self._is_usable(port), f"{port} does not lose its GID")
            yield
        finally:
            hostnet.run("ip", "addr", "add", *where)
            eventually(lambda: self._is_usable(port), f"{port} does not get its GID back")

    @contextmanager
    def largest_mtu(self, port: IPv4Address) -> Iterator[None]:
        netdevs = [self._ports[port].netdev, *(one.bridge_port for one in self._ports.values())]
        before = {netdev: (_NET / netdev / "mtu").read_text().strip() for netdev in netdevs}
        for netdev in netdevs:
            hostnet.run("ip", "link", "set", netdev, "mtu", str(JUMBO))
        try:
            eventually(lambda: self._mtu(port) == max(MTU.code), f"the MTU of {port} does not grow")
            yield
        finally:
            for netdev, mtu in before.items():
                hostnet.run("ip", "link", "set", netdev, "mtu", mtu)
            eventually(lambda: self._mtu(port) < max(MTU.code), f"the MTU of {port} does not shrink again")

    def _mtu(self, port: IPv4Address) -> int:
        native, ref = self._native, self._native.device_ref()
        try:
            return int(native.query_port(native.open_device(self._ports[port].device, ref), 1).active_mtu)
        finally:
            native.close_device(ref)

    def remove_device(self, port: IPv4Address) -> None:
        device = self._ports[port].device
        # the command ends when every process, this one too, has closed its verbs context (K-FABRIC-4)
        command = [hostnet.program("rdma"), "link", "delete", device]
        self._removals[port] = subprocess.Popen(command)
        eventually(lambda: device not in self._native.device_names(), f"{device} does not go away")
        # librdmacm looks for removed devices only while one is left, and would hold this one for ever
        self._native.sync_devices()

    def restore(self) -> None:
        """Make the host as it was: devices back, no group left over in the bridge."""
        self.observer.close()
        for port, removal in self._removals.items():
            self._native.sync_devices()
            removal.wait(SETTLE_TIMEOUT)
            where = self._ports[port]
            hostnet.run("rdma", "link", "add", where.device, "type", "rxe", "netdev", where.netdev)
            eventually(partial(self._is_usable, port), f"{where.device} does not come back")
        eventually(self._forget_groups, "the bridge keeps groups that everyone has left")

    def _forget_groups(self) -> bool:
        """Take out every IPv4 group that the bridge knows on our ports; whether all went."""
        delete_entries(self._snooped())
        return not self._snooped()

    def _snooped(self) -> list[SnoopingEntry]:
        ours = {port.bridge_port for port in self._ports.values()}
        return [one for one in snooping_table() if one.port in ours and isinstance(one.group, IPv4Address)]

    def _is_usable(self, port: IPv4Address) -> bool:
        """Return True if the device's port is up and has the address as a GID."""
        return any(
            info.state == PortState.ACTIVE and Gid(port) in info.gids.values()
            for device in read_devices(self._native)
            if device.name == self._ports[port].device
            for info in device.ports
        )


@contextmanager
def rdma_testbed() -> Iterator[Testbed]:
    """A test bed on the ports of this host: Soft-RoCE on a bridge, else InfiniBand, else Ethernet.

    Raises BackendUnavailable, also where no port can be used.
    """
    backend = RdmaBackend()
    try:
        bridged, native = find_ports(), load()
        if len(bridged) >= PORTS_NEEDED:
            bed = RdmaTestbed(backend, native, bridged)
            try:
                yield bed
            finally:
                backend.close()
                bed.restore()
        elif infiniband := find_infiniband_ports(native):
            with infiniband_testbed(backend, native, infiniband) as opened:
                yield opened
        elif roce := find_roce_ports(native):
            yield RoceTestbed(backend, native, roce)
        else:
            raise BackendUnavailable(
                "rdma",
                UnavailableReason.NO_DEVICE,
                "no active port has an IPv4 address, which the suite binds its ids to",
                "`ip addr add` one to the port's interface, or run it in the lab: mcast lab run -- COMMAND",
            )
    finally:
        backend.close()
