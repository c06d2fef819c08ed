"""The conformance suite's test beds: ports on a snooping bridge in a network namespace, or loopback alone.

The namespace belongs to the main thread while a bed is open, and threads that start then are in it, too. It
is made once in a process, because a bed leaves it as it was, and it ends with the process. The evidence is
the kernel's: /proc/net/igmp, the bridge's multicast database, packets on the bridge's ports.

Where no namespace may be made (that takes CAP_SYS_ADMIN), the bed is loopback, of which nothing is changed,
for one process at a time. MCAST_UDP_BED=loopback asks for that one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from time import monotonic, sleep

from mcast.api import Feature, Gid, Observer, PortInfo, PortState, Testbed
from mcast.backends.net import hostnet
from mcast.backends.net.igmp_listener import IgmpListener
from mcast.backends.net.namespace import Namespace, namespace_lock
from mcast.backends.net.netlink import SnoopingEntry, delete_entries, snooping_table
from mcast.backends.udp import _native
from mcast.backends.udp.backend import UdpBackend
from mcast.wire.units import MTU

BED = "MCAST_UDP_BED"
LOOPBACK = IPv4Address("127.0.0.1")
PORTS = {IPv4Address("10.77.0.0") + number: number for number in range(1, 5)}
"""Address -> number of the interface, which is u1, and of the port of the bridge, which is p1."""
SETTLE_TIMEOUT = 60.0
"""Seconds that the kernel may take to carry a change through."""
JUMBO = 4200
"""The MTU of an interface, in bytes, whose RoCE MTU is 4096."""
_IFF_RUNNING = 0x40

_LOOPBACK_DEVICE = (
    "loopback is a device here, so that two programs of one host need no network: an id that is bound to "
    "127.0.0.1 has it, and may join"
)
DEVIATIONS = {
    "test_join_needs_a_bound_id[127.0.0.1-by_join]": _LOOPBACK_DEVICE,
    "test_join_needs_a_bound_id[127.0.0.1-by_join_ex]": _LOOPBACK_DEVICE,
    "test_a_unicast_join_with_a_qp_fails_at_the_attach": "a socket cannot be a member of a unicast address, "
    "so /proc/net/igmp never lists one; the join and its event are the same",
}
"""Test name -> how `udp` differs from the kernel's RDMA stack."""
FEATURES = frozenset(
    {
        Feature.SWITCH_TABLE,
        Feature.ROUTES,
        Feature.LINK,
        Feature.ADDRESS_REMOVAL,
        Feature.DEVICE_REMOVAL,
        Feature.NO_MULTICAST,
        Feature.IGMP_ON_WIRE,
        Feature.QKEY_VIOLATIONS,
        Feature.DROP_COUNTERS,
        Feature.MIXED_MTU,
    }
)


def _make_bridge() -> None:
    """Make the bridge of the lab's guest.

    It floods every group for one query response interval after it became querier, so that is short until
    then.
    """
    hostnet.run("ip", "link", "set", "lo", "up")
    bridge = ("type", "bridge")
    short = ("mcast_query_response_interval", "1", "mcast_last_member_interval", "10")
    hostnet.run("ip", "link", "add", "br0", *bridge, "mcast_snooping", "1", *short)
    hostnet.run("ip", "link", "set", "br0", "addrgenmode", "none", "up")
    hostnet.run("ip", "link", "set", "br0", *bridge, "mcast_querier", "1")
    hostnet.run("ip", "link", "set", "br0", *bridge, "mcast_query_response_interval", "1000")
    for address in PORTS:
        make_port(address)
    with suppress(OSError):
        Path("/proc/sys/net/ipv4/conf/all/accept_local").write_text("1")
    Path("/proc/sys/net/ipv4/conf/all/rp_filter").write_text("0")
    eventually(lambda: all(map(_has_carrier, PORTS.values())), "the ports do not come up")


def make_port(address: IPv4Address) -> None:
    """Make the veth whose one end is the port with that address, and whose other end is on the bridge."""
    number = PORTS[address]
    hostnet.run("ip", "link", "add", f"u{number}", "type", "veth", "peer", "name", f"p{number}")
    for name in (f"u{number}", f"p{number}"):
        hostnet.run("ip", "link", "set", name, "addrgenmode", "none")
    hostnet.run("ip", "link", "set", f"p{number}", "master", "br0", "up")
    hostnet.run("ip", "addr", "add", f"{address}/24", "dev", f"u{number}")
    hostnet.run("ip", "link", "set", f"u{number}", "up")
    for name, value in (("accept_local", "1"), ("rp_filter", "0")):  # senders are local addresses
        Path(f"/proc/sys/net/ipv4/conf/u{number}/{name}").write_text(value)


def _has_carrier(number: int) -> bool:
    up = {name for name, _, flags, *_ in _native.interfaces() if flags & _IFF_RUNNING}
    return {f"u{number}", f"p{number}"} <= up


def eventually(condition: Callable[[], bool], otherwise: str) -> None:
    """Wait until the condition holds; raises TimeoutError."""
    deadline = monotonic() + SETTLE_TIMEOUT
    while not condition():
        if monotonic() > deadline:
            raise TimeoutError(otherwise)
        sleep(0.01)


@cache
def _namespace() -> Namespace | None:
    """The namespace of this process, with a bridge and four ports; None where none may be made."""
    if os.environ.get(BED) == "loopback":
        return None
    try:
        made = Namespace()
    except PermissionError:
        return None
    with made.entered():
        _make_bridge()
    return made


class _Memberships(Observer):
    """The evidence that every host has: /proc/net/igmp."""

    _ports: Mapping[IPv4Address, str]
    _backend: UdpBackend

    def port_memberships(self, port: IPv4Address) -> frozenset[Gid]:
        return frozenset(map(Gid, hostnet.igmp_memberships().get(self._ports[port], ())))

    def qkey_violations(self, port: IPv4Address) -> int:
        return self._backend.port_counters(self._ports[port])["qkey_violations"]


class LoopbackObserver(_Memberships):
    def __init__(self, backend: UdpBackend) -> None:
        self._backend, self._ports = backend, {LOOPBACK: "lo"}
        self._before = super().port_memberships(LOOPBACK)

    def port_memberships(self, port: IPv4Address) -> frozenset[Gid]:
        return super().port_memberships(port) - self._before

    def group_ports(self, group: Gid) -> frozenset[IPv4Address]:
        return frozenset({LOOPBACK} if group in self.port_memberships(LOOPBACK) else ())

    def group_exists(self, group: Gid) -> bool:
        return group in self.port_memberships(LOOPBACK)

    def leftovers(self) -> tuple[str, ...]:
        return tuple(f"lo is a member of {group}" for group in sorted(self.port_memberships(LOOPBACK)))


class BridgeObserver(_Memberships):
    def __init__(self, backend: UdpBackend) -> None:
        self._backend, self._ports = backend, {address: f"u{number}" for address, number in PORTS.items()}
        self._by_bridge_port = {f"p{number}": address for address, number in PORTS.items()}
        self._igmp = IgmpListener(frozenset(self._by_bridge_port))

    def group_ports(self, group: Gid) -> frozenset[IPv4Address]:
        ports = (self._by_bridge_port.get(one.port) for one in snooping_table() if one.group == group.ipv4)
        return frozenset(port for port in ports if port is not None)

    def group_exists(self, group: Gid) -> bool:
        return any(entry.group == group.ipv4 for entry in snooping_table())

    def leftovers(self) -> tuple[str, ...]:
        members = [
            f"{port} is a member of {group}"
            for port in self._ports
            for group in sorted(self.port_memberships(port))
        ]
        return tuple(members)

    def igmp_reports(self, group: Gid) -> int:
        return 0 if group.ipv4 is None else self._igmp.count(group.ipv4)

    def oversized(self, port: IPv4Address) -> int:
        """Messages that the interface has dropped, and those that queue pairs have."""
        name = self._ports[port]
        (link,) = hostnet.ask("ip", "-s", "-j", "link", "show", "dev", name)
        return self._backend.port_counters(name)["oversized"] + int(link["stats64"]["rx"]["dropped"])

    def close(self) -> None:
        self._igmp.close()


class LoopbackTestbed(Testbed):
    """The loopback interface of the host, which two programs of one host may use."""

    features: frozenset[Feature] = frozenset({Feature.QKEY_VIOLATIONS, Feature.DROP_COUNTERS})
    deviations: Mapping[str, str] = DEVIATIONS

    def __init__(self, backend: UdpBackend) -> None:
        self.backend: UdpBackend = backend
        self.ports: tuple[IPv4Address, ...] = (LOOPBACK,)
        self.observer: LoopbackObserver = LoopbackObserver(backend)


class BridgeTestbed(Testbed):
    """Four interfaces on a snooping bridge."""

    features: frozenset[Feature] = FEATURES
    deviations: Mapping[str, str] = DEVIATIONS

    def __init__(self, backend: UdpBackend) -> None:
        self.backend: UdpBackend = backend
        self.ports: tuple[IPv4Address, ...] = tuple(PORTS)
        self.observer: BridgeObserver = BridgeObserver(backend)
        self._removed: list[IPv4Address] = []

    def _info(self, port: IPv4Address) -> PortInfo | None:
        found = (one for device in self.backend.devices() for one in device.ports if port in one.addresses)
        return next(found, None)

    def _is_usable(self, port: IPv4Address) -> bool:
        found = self._info(port)
        return found is not None and found.state is PortState.ACTIVE

    def route(self, network: IPv4Network, port: IPv4Address) -> AbstractContextManager[None]:
        where = (str(network), "dev", f"u{PORTS[port]}")
        return _for_a_while(("ip", "route", "add", *where), ("ip", "route", "del", *where))

    @contextmanager
    def link_down(self, port: IPv4Address) -> Iterator[None]:
        link = ("ip", "link", "set", f"u{PORTS[port]}")
        with _for_a_while((*link, "down"), (*link, "up")):
            eventually(lambda: not self._is_usable(port), f"the link of {port} does not go down")
            yield
        eventually(lambda: self._is_usable(port), f"the link of {port} does not come back")

    @contextmanager
    def without_address(self, port: IPv4Address) -> Iterator[None]:
        where = (f"{port}/24", "dev", f"u{PORTS[port]}")
        with _for_a_while(("ip", "addr", "del", *where), ("ip", "addr", "add", *where)):
            eventually(lambda: self._info(port) is None, f"{port} does not go")
            yield
        eventually(lambda: self._is_usable(port), f"{port} does not come back")

    @contextmanager
    def largest_mtu(self, port: IPv4Address) -> Iterator[None]:
        names = [f"u{PORTS[port]}", *(f"p{number}" for number in PORTS.values())]
        before = {name: str(mtu) for name, _, _, mtu, *_ in _native.interfaces() if name in names}
        for name in names:
            hostnet.run("ip", "link", "set", name, "mtu", str(JUMBO))
        try:
            eventually(lambda: self._mtu(port) == max(MTU.code), f"the MTU of {port} does not grow")
            yield
        finally:
            for name, mtu in before.items():
                hostnet.run("ip", "link", "set", name, "mtu", mtu)
            eventually(lambda: self._mtu(port) < max(MTU.code), f"the MTU of {port} does not shrink again")

    def _mtu(self, port: IPv4Address) -> int:
        found = self._info(port)
        return 0 if found is None else found.active_mtu

    @contextmanager
    def without_multicast(self, port: IPv4Address) -> Iterator[None]:
        link = ("ip", "link", "set", f"u{PORTS[port]}", "multicast")
        with _for_a_while((*link, "off"), (*link, "on")):
            yield

    def remove_device(self, port: IPv4Address) -> None:
        self._removed.append(port)
        hostnet.run("ip", "link", "del", f"u{PORTS[port]}")

    def restore(self) -> None:
        """Make the namespace as it was: all ports there, no group left over in the bridge."""
        self.observer.close()
        for port in self._removed:
            make_port(port)
        eventually(lambda: all(map(_has_carrier, PORTS.values())), "the ports do not come back")
        eventually(_forget_groups, "the bridge keeps groups that everyone has left")


def _forget_groups() -> bool:
    """Take out every IPv4 group that the bridge knows on our ports; whether all went."""
    delete_entries(_snooped())
    return not _snooped()


def _snooped() -> list[SnoopingEntry]:
    return [one for one in snooping_table() if one.port != one.bridge and isinstance(one.group, IPv4Address)]


@contextmanager
def _for_a_while(do: tuple[str, ...], undo: tuple[str, ...]) -> Iterator[None]:
    hostnet.run(*do)
    try:
        yield
    finally:
        hostnet.run(*undo)


@contextmanager
def udp_testbed() -> Iterator[Testbed]:
    """A test bed in the process's namespace, or on loopback."""
    namespace = _namespace()
    if namespace is None:
        with namespace_lock(), UdpBackend() as backend:
            yield LoopbackTestbed(backend)
        return
    with namespace.entered():
        backend = UdpBackend()
        bed = BridgeTestbed(backend)
        try:
            yield bed
        finally:
            backend.close()
            bed.restore()
