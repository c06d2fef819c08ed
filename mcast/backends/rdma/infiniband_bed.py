"""The conformance suite's test bed on InfiniBand ports: those of the lab's softib, or this host's own.

Evidence comes from OpenSM (saquery), the switches' forwarding tables (ibroute), `rdma resource` and port
counters. Nothing outside the suite's own groups is touched; what would disturb a fabric is done to softib
alone.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

from mcast.api import Backend, Feature, Gid, LinkLayer, Observer, PortState
from mcast.backends.net import hostnet
from mcast.backends.net.groups import SaRecord, read_records
from mcast.backends.net.netlink import more_objects, rdma_objects
from mcast.backends.rdma.devices import read_devices
from mcast.backends.rdma.host_bed import (
    SETTLE_TIMEOUT,
    HostTestbed,
    eventually,
    for_a_while,
    of_one_network,
    own_objects,
    qkey_violations,
)
from mcast.backends.rdma.native import Native
from mcast.backends.rdma.net.ipoib import interfaces_of
from mcast.backends.rdma.sa.umad import SaUnreachable, SubnetAdministrator, subnet_administrator
from mcast.wire.mcmember import RECEIVING, JoinState
from mcast.wire.partition import DEFAULT_PKEY, PARTITION

SM_KEY = 1
"""OpenSM's default SM_Key. The SA tells the members of a group only to a request with this key."""
_IPOIB_SIGNATURES = (b"\x40\x1b", b"\x60\x1b")
_LINKS = Path("/sys/kernel/debug/softib/links")
"""softib's cables, which a line takes out and puts in."""
_HCAS = Path("/sys/kernel/debug/softib/hcas")
"""softib's HCAs, which a line removes and adds, with multicast or without."""
_ATTACHED = Path("/sys/kernel/debug/softib/attached")
"""softib's list of queue pairs in groups: HCA, number, MGID, MLID."""
_PKEYS = "/sys/class/infiniband/{}/ports/{}/pkeys"
_NO_SEND_ONLY = "/run/no_send_only.so"
"""Preloaded, makes the lab's OpenSM one that knows no send-only members."""
_LAB_SM = ("opensm", "-B", "-g", "0x5254000000010001")
"""Command by which the lab starts OpenSM (lab/rdma_lab/infiniband.sh)."""
HOST_FEATURES = frozenset({Feature.SWITCH_TABLE, Feature.IPV6_SOURCE, Feature.QKEY_VIOLATIONS})
"""Features of any InfiniBand ports, which do not disturb their fabric."""
NEEDS_SPARE_PORT = frozenset({Feature.DEVICE_REMOVAL, Feature.NO_MULTICAST})
"""Features that need an HCA which neither OpenSM nor requests to the SA use."""
SOFTIB_FEATURES = HOST_FEATURES | {
    Feature.ROUTES,
    Feature.LINK,
    Feature.ADDRESS_REMOVAL,
    Feature.ATTACH_TABLE,
    Feature.SM_WITHOUT_SEND_ONLY,
    Feature.PARTITION,
    *NEEDS_SPARE_PORT,
}
"""Features of the lab's ports alone, because nobody else uses them."""
ENOSYS_IS_EOPNOTSUPP: Mapping[str, str] = {
    "test_a_device_without_multicast_says_so": "the kernel says EOPNOTSUPP where the document has ENOSYS, "
    "and EINVAL to a detach, because nothing is attached (facts/sa.md, SA-ATTACH-1)"
}


class InfinibandPort(NamedTuple):
    """A port of an HCA, its LID and GID, and its IPoIB interface with the addresses."""

    device: str
    port_num: int
    lid: int
    gid: Gid
    netdev: str
    ipv4: hostnet.InterfaceAddress
    ipv6: hostnet.InterfaceAddress | None


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
    return of_one_network(found)


def _saquery(*words: str) -> str:
    """Return the output of saquery. The option lengthens its timeout, which is one second."""
    return hostnet.run("saquery", "--timeout", "50000", *words)


@cache
def cables() -> dict[int, tuple[int, int]]:
    """LID of a port -> LID of the node at its cable's other end, and the number of that node's port; once."""
    links = re.findall(r"FromLID\.*(\d+)\s+FromPort\.*\d+\s+ToPort\.*(\d+)\s+ToLID\.*(\d+)", _saquery("LR"))
    return {int(lid): (int(to), int(at)) for lid, at, to in links}


def trusted_records() -> list[SaRecord]:
    """Each port in each group of the fabric, as saquery has it from the SA."""
    return list(read_records(_saquery("--smkey", str(SM_KEY), "MCMR")))


@cache
def _before_the_first_bed() -> frozenset[tuple[Gid, Gid | None]]:
    """Group and port of each membership, once: saquery takes longer to start than most tests last."""
    return frozenset((one.mgid, one.port_gid) for one in trusted_records())


def is_of_ipoib(one: SaRecord) -> bool:
    """Return True if IPoIB joined the group by itself, to send a packet of the host (RFC 4391)."""
    return one.mgid[2:4] in _IPOIB_SIGNATURES


def with_more_ids(
    before: Mapping[tuple[str, str], int], now: Mapping[tuple[str, str], int]
) -> frozenset[str]:
    """The devices that have more ids than `before`; only these can have memberships that were left behind.

    An id that goes leaves its groups first (cma_leave_mc_groups in the kernel's core/cma.c). A membership
    that the SA has all the same is the SA's: the kernel gave up the Set (SA-STATUS-1), or every Delete was
    lost, of which nobody is told (SA-SHARE-2).
    """
    return frozenset(
        device
        for (device, kind), count in now.items()
        if kind == "cm_id" and count > before.get((device, kind), 0)
    )


def _are_of_softib(ports: Mapping[IPv4Address, InfinibandPort]) -> bool:
    """Return True if the ports are those of the lab, on a fabric that nobody else uses."""
    return all(port.device.startswith("softib") for port in ports.values())


class InfinibandObserver(Observer):
    """Observer that reads the tables of the SA, the switches and the kernel.

    This process asks for what is polled; saquery, which takes far longer to start than OpenSM to answer, for
    the rest. `tests/rdma/in_lab/infiniband/test_bed.py` compares both.
    """

    def __init__(
        self, native: Native, ports: Mapping[IPv4Address, InfinibandPort], sa: SubnetAdministrator
    ) -> None:
        self._native, self._ports, self._sa = native, ports, sa
        self._by_gid = {port.gid: address for address, port in ports.items()}
        self._objects = rdma_objects if _are_of_softib(ports) else own_objects
        self._objects_before = self._objects()
        if not _are_of_softib(ports):  # others come and go on their fabric
            _before_the_first_bed.cache_clear()
        self._before = _before_the_first_bed()
        """IPoIB's own, and what others on the fabric have."""

    def _carries(self, port: IPv4Address, group: Gid, states: JoinState) -> bool:
        """Return True if the port is a member in one of these states, also in the table of its switch.

        OpenSM writes no table for one port alone.
        """
        record = self._sa.member(group, self._ports[port].gid, SM_KEY)
        if record is None or not record.join_state & states:
            return False
        others = (other.gid for at, other in self._ports.items() if at != port)
        return self._routed(port, record.mlid) or not any(
            self._sa.member(group, other, SM_KEY) for other in others
        )

    def _routed(self, port: IPv4Address, mlid: int) -> bool:
        switch, number = cables()[self._ports[port].lid]
        return self._sa.switch_forwards(switch, number, mlid)

    def group_ports(self, group: Gid) -> frozenset[IPv4Address]:
        return frozenset(port for port in self._ports if self.delivers_to(port, group))

    def delivers_to(self, port: IPv4Address, group: Gid) -> bool:
        return self._carries(port, group, RECEIVING)

    def forwards_from(self, port: IPv4Address, group: Gid) -> bool:
        return self._carries(port, group, ~JoinState(0))

    def group_exists(self, group: Gid) -> bool:
        return self._sa.group(group) is not None

    def port_memberships(self, port: IPv4Address) -> frozenset[Gid]:
        gid = self._ports[port].gid
        return frozenset(
            one.mgid
            for one in trusted_records()
            if one.port_gid == gid and (one.mgid, one.port_gid) not in self._before
        )

    def leftovers(self) -> tuple[str, ...]:
        """Return leftovers, once the kernel and the SA have had time to follow."""
        deadline = monotonic() + SETTLE_TIMEOUT
        while (left := self._left()) and monotonic() < deadline:
            sleep(0.1)
        return left

    def _left(self) -> tuple[str, ...]:
        now = self._objects()
        holders = with_more_ids(self._objects_before, now)
        members = [
            f"{self._by_gid[one.port_gid]} is a member of {one.mgid}"
            for one in (trusted_records() if holders else ())
            if one.port_gid in self._by_gid
            and self._ports[self._by_gid[one.port_gid]].device in holders
            and (one.mgid, one.port_gid) not in self._before
            and not is_of_ipoib(one)
        ]
        return (*more_objects(self._objects_before, now), *members)

    def attached(self, port: IPv4Address, group: Gid) -> frozenset[int]:
        return _attached(self._ports[port], group)

    def qkey_violations(self, port: IPv4Address) -> int:
        where = self._ports[port]
        return qkey_violations(self._native, where.device, where.port_num)


class InfinibandTestbed(HostTestbed):
    deviations: Mapping[str, str] = ENOSYS_IS_EOPNOTSUPP
    spare: int = 1  # OpenSM uses the first, and so do the questions to it

    def __init__(
        self,
        backend: Backend,
        native: Native,
        ports: dict[IPv4Address, InfinibandPort],
        sa: SubnetAdministrator,
    ) -> None:
        self.features: frozenset[Feature] = SOFTIB_FEATURES if _are_of_softib(ports) else HOST_FEATURES
        if not all(port.ipv6 for port in ports.values()):
            self.features -= {Feature.IPV6_SOURCE}
        if len(ports) <= self.spare:
            self.features -= NEEDS_SPARE_PORT
        self._where: Mapping[IPv4Address, InfinibandPort] = ports
        self._sa, self._native = sa, native
        self._removals: dict[IPv4Address, subprocess.Popen[bytes]] = {}
        self.backend: Backend = backend
        self.ports: tuple[IPv4Address, ...] = tuple(sorted(ports))
        self.observer: InfinibandObserver = InfinibandObserver(native, ports, sa)

    def without_address(self, port: IPv4Address) -> AbstractContextManager[None]:
        where = (str(self._where[port].ipv4), "dev", self._where[port].netdev)
        return for_a_while(("ip", "addr", "del", *where), ("ip", "addr", "add", *where))

    @contextmanager
    def link_down(self, port: IPv4Address) -> Iterator[None]:
        """Take the port's cable out, and put it in; both ends when OpenSM and IPoIB have followed."""
        where = self._where[port]
        _LINKS.write_text(f"{where.device} out\n")
        try:
            eventually(lambda: self._sa_has(where) is False, f"OpenSM still has {where.device}")
            yield
        finally:
            _LINKS.write_text(f"{where.device} in\n")
            eventually(lambda: self._is_back(where), f"{where.device} does not come back")

    def remove_device(self, port: IPv4Address) -> None:
        device = self._where[port].device
        # softib, too, lets an HCA go when every process has closed its verbs context (K-FABRIC-4)
        self._removals[port] = subprocess.Popen(["sh", "-c", f"echo {device} remove >{_HCAS}"])
        eventually(lambda: device not in self._native.device_names(), f"{device} does not go away")
        self._native.sync_devices()  # as in RdmaTestbed

    @contextmanager
    def without_multicast(self, port: IPv4Address) -> Iterator[None]:
        """Make the HCA anew, without; at the end of the test it comes back as it was."""
        self.remove_device(port)
        self._removals.pop(port).wait(SETTLE_TIMEOUT)
        self._add(port, "unicast")
        try:
            yield
        finally:
            self.remove_device(port)

    def _add(self, port: IPv4Address, how: str) -> None:
        where = self._where[port]
        addresses = filter(None, (where.ipv4, where.ipv6))
        add_hca(where.device, where.gid, where.netdev, *addresses, how=how)
        self._native.sync_devices()

    def restore(self) -> None:
        """Make the fabric as it was: HCAs back, with their IPoIB interfaces."""
        for port, removal in self._removals.items():
            self._native.sync_devices()
            removal.wait(SETTLE_TIMEOUT)
            self._add(port, "add")
            where = self._where[port]
            eventually(partial(self._is_back, where), f"{where.device} does not come back")

    @contextmanager
    def sm_without_send_only(self) -> Iterator[None]:
        """OpenSM ends and starts as an older one, and later again as it is: each time all groups are lost."""
        self.restart_sm(preload=_NO_SEND_ONLY)
        try:
            yield
        finally:
            self.restart_sm()

    def restart_sm(self, *options: str, preload: str = "") -> None:
        """Start OpenSM anew, with these options; until every port is in its IPoIB broadcast group again."""
        for pid in _managers():
            os.kill(pid, signal.SIGTERM)
        eventually(lambda: not _managers(), "OpenSM does not end")
        env = os.environ | {"LD_PRELOAD": preload}
        subprocess.run((*_LAB_SM, *options), check=True, stdout=subprocess.DEVNULL, env=env)
        self.until_whole()

    def until_whole(self) -> None:
        """Wait until every port is in its IPoIB broadcast group."""
        for where in self._where.values():
            eventually(partial(self._is_back, where), f"{where.device} does not come back")

    def without_partition(self, port: IPv4Address) -> AbstractContextManager[None]:
        """OpenSM itself leaves everybody a limited member (SA-PKEY-3)."""
        where = self._where[port]
        left = _broadcast(where)  # looked up before: without a P_Key IPoIB calls another group its own
        # the SA has the port in its groups all the same; only its host knows that it is in none
        return self._with_pkeys(where, (), lambda: not _attached(where, left))

    def limited_member(self, port: IPv4Address) -> AbstractContextManager[None]:
        return self._with_pkeys(self._where[port], (DEFAULT_PKEY & PARTITION,), lambda: True)

    @contextmanager
    def _with_pkeys(
        self, where: InfinibandPort, pkeys: tuple[int, ...], is_done: Callable[[], bool]
    ) -> Iterator[None]:
        """The table is written as an SM does; until the host has followed."""
        self._sa.set_pkeys(where.lid, pkeys)
        try:
            eventually(lambda: pkeys_of(where) == set(pkeys) and is_done(), f"{where.device} keeps its P_Key")
            yield
        finally:
            self._sa.set_pkeys(where.lid, (DEFAULT_PKEY,))
            eventually(
                lambda: pkeys_of(where) == {DEFAULT_PKEY} and self._is_back(where),
                f"{where.device} does not come back",
            )

    def _is_back(self, where: InfinibandPort) -> bool:
        """Return True if the IPoIB interface of the port has joined its group, for the SA and for the host.

        The host gets the answer after the SA has recorded the port, and refuses joins until then (SA-PATH-1).
        """
        return bool(self._sa_has(where) and _attached(where, _broadcast(where)))

    def _sa_has(self, where: InfinibandPort) -> bool | None:
        """Return True if the SA has the port in the group of its IPoIB interface; None without an answer."""
        try:
            return self._sa.member(_broadcast(where), where.gid, SM_KEY) is not None
        except SaUnreachable:
            return None


def add_hca(device: str, gid: Gid, netdev: str, *addresses: object, how: str = "add") -> None:
    """Bring back an HCA of softib, with its interface, as `lab/rdma_lab/infiniband.sh` has made both."""
    _HCAS.write_text(f"{device} {how}\n")
    eventually(lambda: bool(interfaces_of([gid])), f"{device} gets no IPoIB interface")
    (interface,) = interfaces_of([gid])
    hostnet.run("ip", "link", "set", interface.name, "name", netdev)
    for address in map(str, addresses):
        hostnet.run("ip", "addr", "add", address, "dev", netdev, *(("nodad",) if ":" in address else ()))
    hostnet.run("ip", "link", "set", netdev, "up")


def _managers() -> list[int]:
    """The processes of OpenSM."""
    found = subprocess.run(["pidof", "opensm"], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def _attached(where: InfinibandPort, group: Gid) -> frozenset[int]:
    """The numbers of the HCA's queue pairs that are attached to the group, IPoIB's among them."""
    lines = (line.split() for line in _ATTACHED.read_text().splitlines())
    return frozenset(
        int(number) for name, number, mgid, _ in lines if name == where.device and Gid(mgid) == group
    )


def _broadcast(where: InfinibandPort) -> Gid:
    """The group that the port's IPoIB interface joins, of which the kernel takes the parameters of others."""
    (interface,) = interfaces_of([where.gid])
    assert interface.broadcast is not None
    return interface.broadcast


def pkeys_of(where: InfinibandPort) -> set[int]:
    """The P_Keys in the port's table."""
    table = Path(_PKEYS.format(where.device, where.port_num)).glob("*")
    return {int(one.read_text(), 0) for one in table} - {0}


@contextmanager
def infiniband_testbed(
    backend: Backend, native: Native, ports: dict[IPv4Address, InfinibandPort]
) -> Iterator[InfinibandTestbed]:
    """A test bed on these ports; the SA is asked through the first."""
    first = ports[min(ports)]
    with subnet_administrator(first.device, first.port_num, SETTLE_TIMEOUT) as sa:
        bed = InfinibandTestbed(backend, native, ports, sa)
        try:
            yield bed
        finally:
            backend.close()
            bed.restore()
