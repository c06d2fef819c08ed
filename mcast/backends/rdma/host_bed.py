"""Base of the test beds on a Linux host, for any kind of port."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from time import monotonic, sleep
from typing import Protocol, TypeVar

from mcast.api import Testbed
from mcast.backends.net import hostnet
from mcast.backends.rdma.native import Native

SETTLE_TIMEOUT = 60.0
"""Seconds that the kernel and the fabric may take to carry a change through."""


@contextmanager
def for_a_while(do: Sequence[str], undo: Sequence[str]) -> Iterator[None]:
    """Run a command, and at the end the one that undoes it."""
    hostnet.run(*do)
    try:
        yield
    finally:
        hostnet.run(*undo)


def eventually(condition: Callable[[], bool], otherwise: str) -> None:
    """Wait until the condition holds; raises TimeoutError."""
    deadline = monotonic() + SETTLE_TIMEOUT
    while not condition():
        if monotonic() > deadline:
            raise TimeoutError(otherwise)
        sleep(0.05)


def own_objects() -> Counter[tuple[str, str]]:
    """(device, kind of object) -> how many this process has, whatever other programs have."""
    return Counter(
        (one["ifname"], kind)
        for kind in ("qp", "cm_id", "cq", "mr", "pd")
        for one in hostnet.ask("rdma", "-j", "resource", "show", kind) or []
        if one.get("pid") == os.getpid()
    )


def qkey_violations(native: Native, device: str, port_num: int) -> int:
    """The port's counter of messages with a wrong Q_Key."""
    ref = native.device_ref()
    try:
        return int(native.query_port(native.open_device(device, ref), port_num).qkey_violations)
    finally:
        native.close_device(ref)


class HostPort(Protocol):
    """A port, by its device and its interface with the addresses."""

    @property
    def device(self) -> str: ...
    @property
    def netdev(self) -> str: ...
    @property
    def ipv4(self) -> hostnet.InterfaceAddress: ...
    @property
    def ipv6(self) -> hostnet.InterfaceAddress | None: ...


P = TypeVar("P", bound=HostPort)


def of_one_network(ports: dict[IPv4Address, P]) -> dict[IPv4Address, P]:
    """The ports in the IPv4 network that has most of them: of one fabric, as far as a host can know."""

    def network(port: P) -> IPv4Network:
        return IPv4Network(str(port.ipv4), strict=False)

    most = [found for found, _ in Counter(map(network, ports.values())).most_common(1)]
    return {address: port for address, port in ports.items() if network(port) in most}


class HostTestbed(Testbed):
    """Asks and changes the interfaces of the ports in `_where`, by their IPv4 addresses."""

    _where: Mapping[IPv4Address, HostPort]

    def ipv6_of(self, port: IPv4Address) -> IPv6Address:
        address = self._where[port].ipv6
        assert address is not None, f"{port} has no IPv6 address"
        assert isinstance(address.ip, IPv6Address)
        return address.ip

    def route(self, network: IPv4Network, port: IPv4Address) -> AbstractContextManager[None]:
        where = (str(network), "dev", self._where[port].netdev)
        return for_a_while(("ip", "route", "add", *where), ("ip", "route", "del", *where))
