"""What the test beds on a Linux host have in common, whatever their ports are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from typing import Protocol

from mcast.backends.rdma.net import hostnet
from mcast.contract.testbed import Testbed


@contextmanager
def for_a_while(do: Sequence[str], undo: Sequence[str]) -> Iterator[None]:
    """Run a command, and at the end the one that undoes it."""
    hostnet.run(*do)
    try:
        yield
    finally:
        hostnet.run(*undo)


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
