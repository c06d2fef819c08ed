"""The conformance suite's read-only test bed on a host's Ethernet ports: it reads the kernel's IGMP table.

The evidence is the kernel's own list of groups, /proc/net/igmp, and `rdma resource`. Nothing of the host is
changed: what needs a route, a link that goes down or a device that goes away does not apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from ipaddress import IPv4Address, IPv6Address
from time import monotonic
from typing import NamedTuple

from mcast.api import Backend, Feature, Gid, LinkLayer, Observer, PortState
from mcast.backends.net import hostnet
from mcast.backends.net.netlink import more_objects
from mcast.backends.rdma.devices import netdevs_of, read_devices
from mcast.backends.rdma.host_bed import HostTestbed, of_one_network, own_objects, qkey_violations
from mcast.backends.rdma.kernel_devices import SYSFS
from mcast.backends.rdma.native import Native

OVER_LO = {
    "test_a_reply_goes_to_the_source_of_a_message_alone": "all ports are in one network namespace: the "
    "kernel takes a unicast to another port's address over lo, where no Soft-RoCE device listens",
}
"""Test name -> how several Soft-RoCE devices of one host differ."""

REPORTED = 0.3
"""Seconds after which the kernel has reported a member by IGMP, which takes a tick or two of its clock."""


class RocePort(NamedTuple):
    """A port of a device, and its interface with the addresses."""

    device: str
    port_num: int
    netdev: str
    ipv4: hostnet.InterfaceAddress
    ipv6: hostnet.InterfaceAddress | None


@cache
def find_roce_ports(native: Native) -> dict[IPv4Address, RocePort]:
    """The active Ethernet ports of this host in one IPv4 network, by their IPv4 address; looked up once."""
    found: dict[IPv4Address, RocePort] = {}
    all_addresses = hostnet.addresses()
    for device in read_devices(native):
        for port in device.ports:
            if port.link_layer is not LinkLayer.ETHERNET or port.state is not PortState.ACTIVE:
                continue
            for netdev in netdevs_of(device.name, port):
                own = all_addresses.get(netdev, [])
                ipv4 = next((one for one in own if isinstance(one.ip, IPv4Address)), None)
                ipv6 = next((one for one in own if isinstance(one.ip, IPv6Address)), None)
                if ipv4 is not None:
                    assert isinstance(ipv4.ip, IPv4Address)
                    found[ipv4.ip] = RocePort(device.name, port.port_num, netdev, ipv4, ipv6)
                    break
    return of_one_network(found)


class RoceObserver(Observer):
    def __init__(self, native: Native, ports: Mapping[IPv4Address, RocePort]) -> None:
        self._native, self._ports = native, ports
        self._objects_before = own_objects()
        self._before = {port: self._groups(port) for port in ports}
        self._since: dict[tuple[IPv4Address, Gid], float] = {}

    def _groups(self, port: IPv4Address) -> frozenset[Gid]:
        return frozenset(map(Gid, hostnet.igmp_memberships().get(self._ports[port].netdev, ())))

    def group_ports(self, group: Gid) -> frozenset[IPv4Address]:
        """The members since REPORTED seconds, because nothing on this host says what the switch has heard."""
        members = {(port, group) for port in self._members(group)}
        self._since = {one: at for one, at in self._since.items() if one in members or one[1] != group}
        now = monotonic()
        return frozenset(one[0] for one in members if now - self._since.setdefault(one, now) >= REPORTED)

    def _members(self, group: Gid) -> list[IPv4Address]:
        return [port for port in self._ports if group in self.port_memberships(port)]

    def group_exists(self, group: Gid) -> bool:
        return bool(self._members(group))

    def port_memberships(self, port: IPv4Address) -> frozenset[Gid]:
        return self._groups(port) - self._before[port]

    def leftovers(self) -> tuple[str, ...]:
        memberships = (
            f"{port} is a member of {group}"
            for port in self._ports
            for group in sorted(self.port_memberships(port))
        )
        return (*more_objects(self._objects_before, own_objects()), *memberships)

    def qkey_violations(self, port: IPv4Address) -> int:
        return qkey_violations(self._native, self._ports[port].device, self._ports[port].port_num)


class RoceTestbed(HostTestbed):
    features: frozenset[Feature] = frozenset({Feature.IPV6_SOURCE, Feature.QKEY_VIOLATIONS})

    def __init__(self, backend: Backend, native: Native, ports: dict[IPv4Address, RocePort]) -> None:
        if not all(port.ipv6 for port in ports.values()):
            self.features -= {Feature.IPV6_SOURCE}
        soft = all((SYSFS / port.device / "parent").exists() for port in ports.values())
        self.deviations: Mapping[str, str] = OVER_LO if soft and len(ports) > 1 else {}
        self._where = ports
        self.backend: Backend = backend
        self.ports: tuple[IPv4Address, ...] = tuple(sorted(ports))
        self.observer: RoceObserver = RoceObserver(native, ports)
