"""The conformance suite's test bed on InfiniBand ports: those of the lab's softib, or this host's own.

Evidence comes from OpenSM (saquery), the switches' forwarding tables (ibroute), `rdma resource` and port
counters. Nothing outside the suite's own groups is touched; what would disturb a fabric is done to softib
alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

from mcast.api import Backend, Gid, LinkLayer, PortState
from mcast.backends.rdma.devices import read_devices
from mcast.backends.rdma.host_bed import HostTestbed, for_a_while
from mcast.backends.rdma.native import Native
from mcast.backends.rdma.net import hostnet
from mcast.backends.rdma.net.ipoib import interfaces_of
from mcast.backends.rdma.net.netlink import rdma_objects, rdma_objects_since
from mcast.contract.testbed import Feature, Observer
from mcast.wire.mcmember import RECEIVING, JoinState

_SETTLE = 60.0
"""Seconds that the kernel and the SA may take to carry a change through."""
_SM_KEY = "1"
"""OpenSM's default: who has the SM_Key may see who is in a group."""
_IPOIB_SIGNATURES = (b"\x40\x1b", b"\x60\x1b")
_ATTACHED = Path("/sys/kernel/debug/softib/attached")
"""softib's list of queue pairs in groups: HCA, number, MGID, MLID."""
OWN = frozenset({Feature.IPV6_SOURCE, Feature.QKEY_VIOLATIONS})
"""What any InfiniBand ports can show without disturbing their fabric."""
SOFTIB = OWN | {Feature.ROUTES, Feature.ADDRESS_REMOVAL, Feature.ATTACH_TABLE}
"""What the lab's ports can be made to show: they are nobody else's."""


class InfinibandPort(NamedTuple):
    """A port of an HCA, its LID and GID, and its IPoIB interface with the addresses."""

    device: str
    port_num: int
    lid: int
    gid: Gid
    netdev: str
    ipv4: hostnet.InterfaceAddress
    ipv6: hostnet.InterfaceAddress | None


class PortInGroup(NamedTuple):
    """One port in one group, as the SA has it."""

    group: Gid
    port: Gid
    mlid: int
    state: JoinState


@cache
def find_infiniband_ports(native: Native) -> dict[IPv4Address, InfinibandPort]:
    """The active InfiniBand ports of this host whose IPoIB interface has an IPv4 address, by that.

    Looked up once: each test bed leaves the host as it was.
    """
    found: dict[IPv4Address, InfinibandPort] = {}
    all_addresses = hostnet.addresses()
    for device in read_devices(native):
        for port in device.ports:
            if port.link_layer is not LinkLayer.INFINIBAND or port.state is not PortState.ACTIVE:
                continue
            for interface in interfaces_of(port.gids.values()):
                own = all_addresses.get(interface.name, [])
                ipv4 = next((one for one in own if isinstance(one.ip, IPv4Address)), None)
                ipv6 = next((one for one in own if isinstance(one.ip, IPv6Address)), None)
                if ipv4 is not None:
                    assert isinstance(ipv4.ip, IPv4Address)
                    where = (device.name, port.port_num, port.lid, port.gids[0], interface.name)
                    found[ipv4.ip] = InfinibandPort(*where, ipv4, ipv6)
                    break
    return found


@cache
def cables() -> dict[int, tuple[int, int]]:
    """LID of a port -> LID of the node at its cable's other end, and the number of that node's port; once."""
    links = re.findall(
        r"FromLID\.*(\d+)\s+FromPort\.*\d+\s+ToPort\.*(\d+)\s+ToLID\.*(\d+)", hostnet.run("saquery", "LR")
    )
    return {int(lid): (int(to), int(at)) for lid, at, to in links}


def memberships(said: str) -> list[PortInGroup]:
    """What `saquery MCMR` says, one dump of fields for each port in each group."""
    found = []
    for dump in said.split("MCMember Record dump:")[1:]:
        fields = dict(re.findall(r"^\s*(\w+)\.{2,}(\S+)$", dump, re.MULTILINE))
        state = JoinState(int(fields["JoinState"], 16))
        found.append(PortInGroup(Gid(fields["MGID"]), Gid(fields["PortGid"]), int(fields["mlid"], 16), state))
    return found


def multicast_table(said: str) -> dict[int, frozenset[int]]:
    """MLID -> ports, of what `ibroute -M` says: a column for each port, below its number."""
    header = re.search(r"^ *Ports: (.*)$", said, re.MULTILINE)
    if header is None:
        raise RuntimeError(f"ibroute: {said.strip()}")
    first = header.start(1) - header.start()
    table = {}
    for line in re.findall(r"^0x[0-9a-f]{4} .*$", said, re.MULTILINE):
        marks = (mark.start() for mark in re.finditer("x", line) if mark.start() >= first)
        table[int(line[:6], 16)] = frozenset((at - first) // 2 for at in marks)
    return table


def _of_ipoib(one: PortInGroup) -> bool:
    """Whether IPoIB has joined by itself, as what the host sends makes it do (RFC 4391)."""
    return one.group[2:4] in _IPOIB_SIGNATURES


class InfinibandObserver(Observer):
    def __init__(self, native: Native, ports: Mapping[IPv4Address, InfinibandPort]) -> None:
        self._native, self._ports = native, ports
        self._by_gid = {port.gid: address for address, port in ports.items()}
        self._objects_before = rdma_objects()
        self._before = {(one.group, one.port) for one in self._members()}
        """IPoIB's own, and what others on the fabric have."""

    def _members(self, *of: str) -> list[PortInGroup]:
        return memberships(hostnet.run("saquery", "--smkey", _SM_KEY, "MCMR", *of))

    def _members_of(self, group: Gid) -> list[PortInGroup]:
        return self._members("--mgid", str(group))

    def _delivered(self, group: Gid) -> list[PortInGroup]:
        """The members of the group that the tables of their switches send it to, or take it from."""
        members = self._members_of(group)
        if len({one.port for one in members}) < 2:  # OpenSM writes no table for one port alone
            return members
        at = {port.gid: cables()[port.lid] for port in self._ports.values()}
        tables = {
            switch: multicast_table(hostnet.run("ibroute", "-M", str(switch)))
            for switch in {at[one.port][0] for one in members if one.port in self._by_gid}
        }

        def routed(one: PortInGroup) -> bool:
            switch, number = at[one.port]
            return number in tables[switch].get(one.mlid, ())

        return [one for one in members if one.port not in self._by_gid or routed(one)]

    def group_ports(self, group: Gid) -> frozenset[IPv4Address]:
        return frozenset(
            self._by_gid[one.port]
            for one in self._delivered(group)
            if one.port in self._by_gid and one.state & RECEIVING
        )

    def takes_from(self, port: IPv4Address, group: Gid) -> bool:
        return any(one.port == self._ports[port].gid for one in self._delivered(group))

    def group_exists(self, group: Gid) -> bool:
        return bool(self._members_of(group))

    def port_memberships(self, port: IPv4Address) -> frozenset[Gid]:
        gid = self._ports[port].gid
        return frozenset(
            one.group
            for one in self._members()
            if one.port == gid and (one.group, one.port) not in self._before
        )

    def leftovers(self) -> tuple[str, ...]:
        """What is left once the SA has had the time to hear of every leave."""
        deadline = monotonic() + _SETTLE
        while (left := self._left()) and monotonic() < deadline:
            sleep(0.1)
        return left

    def _left(self) -> tuple[str, ...]:
        members = [
            f"{self._by_gid[one.port]} is a member of {one.group}"
            for one in self._members()
            if one.port in self._by_gid and (one.group, one.port) not in self._before and not _of_ipoib(one)
        ]
        return (*rdma_objects_since(self._objects_before), *members)

    def attached(self, port: IPv4Address, group: Gid) -> frozenset[int]:
        lines = (line.split() for line in _ATTACHED.read_text().splitlines())
        device = self._ports[port].device
        return frozenset(
            int(number) for name, number, mgid, _ in lines if name == device and Gid(mgid) == group
        )

    def qkey_violations(self, port: IPv4Address) -> int:
        where = self._ports[port]
        context = self._native.open_device(where.device)
        try:
            return int(self._native.query_port(context, where.port_num).qkey_violations)
        finally:
            self._native.close_device(context)


class InfinibandTestbed(HostTestbed):
    def __init__(self, backend: Backend, native: Native, ports: dict[IPv4Address, InfinibandPort]) -> None:
        ours = all(port.device.startswith("softib") for port in ports.values())
        self.features = SOFTIB if ours else OWN
        if not all(port.ipv6 for port in ports.values()):
            self.features -= {Feature.IPV6_SOURCE}
        self.backend, self._where = backend, ports
        self.ports = tuple(sorted(ports))
        self.observer: InfinibandObserver = InfinibandObserver(native, ports)

    def without_address(self, port: IPv4Address) -> AbstractContextManager[None]:
        where = (str(self._where[port].ipv4), "dev", self._where[port].netdev)
        return for_a_while(("ip", "addr", "del", *where), ("ip", "addr", "add", *where))
