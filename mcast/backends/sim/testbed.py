"""The conformance suite's test bed on simulated fabrics, with evidence from the fabrics' tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from ipaddress import IPv4Address, IPv4Network, IPv6Address

from mcast.api import Backend, Feature, Observer, Testbed
from mcast.backends.sim.backend import SimBackend
from mcast.backends.sim.fabric import Fabric
from mcast.wire.addresses import Gid
from mcast.wire.mcmember import RECEIVING, McMask, McMemberRecord, SaMethod
from mcast.wire.partition import DEFAULT_PKEY, PARTITION
from mcast.wire.units import MTU

_COMMON = frozenset(
    {
        Feature.SWITCH_TABLE,
        Feature.ROUTES,
        Feature.IPV6_SOURCE,
        Feature.LINK,
        Feature.ADDRESS_REMOVAL,
        Feature.DEVICE_REMOVAL,
        Feature.NO_MULTICAST,
        Feature.ATTACH_TABLE,
        Feature.QKEY_VIOLATIONS,
        Feature.DROP_COUNTERS,
    }
)
_OF_IGMP = frozenset({Feature.IGMP_ON_WIRE, Feature.MIXED_MTU})
_OF_THE_SM = frozenset({Feature.SM_WITHOUT_SEND_ONLY, Feature.PARTITION})


class SimObserver(Observer):
    """Reads the switches', the SA's and the devices' tables."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def group_ports(self, group: Gid) -> frozenset[IPv4Address]:
        fabric = self._fabric
        if fabric.sa is None:
            return frozenset(_address(fabric, index) for index in fabric.core.igmp.snooping.get(group, {}))
        known, port_with = fabric.sa.group(group), fabric.core.topology.port_with
        receiving = (m.guid for m in (known.members if known else ()) if m.join_state & RECEIVING)
        return frozenset(_address(fabric, port_with(guid).index) for guid in receiving)

    def group_exists(self, group: Gid) -> bool:
        fabric = self._fabric
        if fabric.sa is None:
            return group in fabric.core.igmp.snooping
        reply = fabric.sa.handle(
            fabric.ports[-1].guid, SaMethod.GET_TABLE, McMask.MGID, McMemberRecord(mgid=group)
        )
        return reply is not None and bool(reply.records)

    def port_memberships(self, port: IPv4Address) -> frozenset[Gid]:
        at = self._fabric.port_of(port)
        subnet = self._fabric.core.subnet
        return frozenset(at.igmp if subnet is None else subnet.clients[at.index].memberships)

    def attached(self, port: IPv4Address, group: Gid) -> frozenset[int]:
        at = self._fabric.port_of(port)
        return frozenset(qp.number for qp in self._fabric.core.queue_pairs.attached(at).get(group, ()))

    def igmp_reports(self, group: Gid) -> int:
        return self._fabric.core.igmp.reports.get(group, 0)

    def qkey_violations(self, port: IPv4Address) -> int:
        return self._fabric.port_of(port).qkey_violations

    def oversized(self, port: IPv4Address) -> int:
        return self._fabric.port_of(port).oversized

    def leftovers(self) -> tuple[str, ...]:
        fabric, parts = self._fabric, self._fabric.core
        # What is on its way (the SA's answer to a Delete) may still arrive.
        fabric.clock.run_until_idle()
        found = [f"QP {qp.number} on {qp.port.name}" for qp in fabric.qps]
        for port in fabric.ports:
            found += [f"{group} attached on {port.name}" for group in parts.queue_pairs.attached(port)]
            found += [f"IGMP membership of {group} on {port.name}" for group in port.igmp]
        for index, client in (parts.subnet.clients if parts.subnet is not None else {}).items():
            found += [f"SA membership of {mgid} on {fabric.ports[index].name}" for mgid in client.memberships]
        return tuple(found)


class SimTestbed(Testbed):
    """Four ports on four devices."""

    def __init__(self, fabric: Fabric, backend: Backend) -> None:
        self.fabric: Fabric = fabric
        self.backend: Backend = backend
        self.ports: tuple[IPv4Address, ...] = tuple(_address(fabric, port.index) for port in fabric.ports)
        self.observer: SimObserver = SimObserver(fabric)
        shown = _OF_IGMP if fabric.sa is None else _OF_THE_SM
        self.features: frozenset[Feature] = _COMMON | shown

    def ipv6_of(self, port: IPv4Address) -> IPv6Address:
        address = self.fabric.port_of(port).interfaces[0].ipv6
        assert address is not None
        return address

    @contextmanager
    def route(self, network: IPv4Network, port: IPv4Address) -> Iterator[None]:
        at = self.fabric.port_of(port)
        route = (at.host, network, at.interfaces[0])
        self.fabric.add_route(*route)
        try:
            yield
        finally:
            self.fabric.remove_route(*route)

    @contextmanager
    def link_down(self, port: IPv4Address) -> Iterator[None]:
        at = self.fabric.port_of(port)
        self.fabric.set_link(at, up=False)
        try:
            yield
        finally:
            self.fabric.set_link(at, up=True)

    @contextmanager
    def without_address(self, port: IPv4Address) -> Iterator[None]:
        at = self.fabric.port_of(port)
        self.fabric.set_ipv4(at, None)
        try:
            yield
        finally:
            self.fabric.set_ipv4(at, port)

    def remove_device(self, port: IPv4Address) -> None:
        self.fabric.remove_device(self.fabric.port_of(port))

    @contextmanager
    def sm_without_send_only(self) -> Iterator[None]:
        assert self.fabric.sa is not None
        self.fabric.sa.send_only_full_member = False
        try:
            yield
        finally:
            self.fabric.sa.send_only_full_member = True

    def without_partition(self, port: IPv4Address) -> AbstractContextManager[None]:
        return self._with_pkeys(port, ())

    def limited_member(self, port: IPv4Address) -> AbstractContextManager[None]:
        return self._with_pkeys(port, (DEFAULT_PKEY & PARTITION,))

    @contextmanager
    def _with_pkeys(self, port: IPv4Address, pkeys: tuple[int, ...]) -> Iterator[None]:
        at = self.fabric.port_of(port)
        before = at.pkeys
        self.fabric.set_pkeys(at, pkeys)
        try:
            yield
        finally:
            self.fabric.set_pkeys(at, before)

    @contextmanager
    def largest_mtu(self, port: IPv4Address) -> Iterator[None]:
        at = self.fabric.port_of(port)
        before, at.mtu = at.mtu, max(MTU.code)
        try:
            yield
        finally:
            at.mtu = before

    @contextmanager
    def without_multicast(self, port: IPv4Address) -> Iterator[None]:
        at = self.fabric.port_of(port)
        at.multicast = False
        try:
            yield
        finally:
            at.multicast = True


def _address(fabric: Fabric, index: int) -> IPv4Address:
    """The IPv4 address that the port was made with, which is its name here."""
    return IPv4Address(b"\x0a\x00" + (index + 1).to_bytes(2))


@contextmanager
def sim_testbed(name: str, make: Callable[..., Fabric]) -> Iterator[Testbed]:
    """A new fabric for one test, closed after it."""
    fabric = make(ports=4)
    bed = SimTestbed(fabric, SimBackend(fabric, name))
    try:
        with bed.backend:
            yield bed
    finally:
        fabric.close()
