"""Devices, addresses and routes, as programs on the hosts see them."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

from mcast.api import DeviceInfo, Refused
from mcast.backends.model.port import Interface, Port
from mcast.backends.sim.core.port import FabricPort
from mcast.backends.sim.core.topology import Topology
from mcast.wire.addresses import LocalAddress


class Hosts:
    """The tables of all hosts in one; each call says for which hosts it asks."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._interfaces = {a: i for p in topology.ports for i in p.interfaces for a in i.addresses}
        self._routes: list[tuple[int, IPv4Network, Interface]] = []
        self._devices: dict[frozenset[int], tuple[DeviceInfo, ...]] = {}

    def port_of(self, address: LocalAddress) -> FabricPort:
        """The port that has the address. Raises KeyError."""
        interface = self._interfaces.get(address)
        if interface is None or address not in interface.addresses:
            raise KeyError(f"no port of this fabric has {address}")
        return self._topology.ports[interface.port.index]

    def devices(self, hosts: frozenset[int]) -> tuple[DeviceInfo, ...]:
        """The devices of these hosts that are there, as they are until `forget_devices`."""
        known = self._devices.get(hosts)
        if known is None:
            there = (port for port in self._topology.ports_of(hosts) if not port.removed)
            known = self._devices[hosts] = tuple(port.info() for port in there)
        return known

    def forget_devices(self) -> None:
        """A device has changed."""
        self._devices.clear()

    def interface(self, hosts: frozenset[int], address: LocalAddress) -> Interface | None:
        """The interface on one of these hosts that has the address."""
        found = self._interfaces.get(address)
        if found is None or address not in found.addresses or found.port.removed:
            return None
        return found if self._topology.ports[found.port.index].host in hosts else None

    def set_ipv4(self, port: Port, address: IPv4Address | None) -> None:
        """Give the port's default interface another IPv4 address, or take its address away (None).

        Refuses an address that another port has, by ValueError.
        """
        if address is not None:
            has = self._interfaces.get(address)
            if has is not None and has is not port.interfaces[0] and address in has.addresses:
                raise Refused(ValueError(f"address is {address}: {has.port.name} has it"))
            self._interfaces[address] = port.interfaces[0]
        port.set_ipv4(address)

    def add_route(self, host: int, network: IPv4Network, interface: Interface) -> None:
        """The host sends `network` out of that interface."""
        self._routes.append((host, network, interface))

    def remove_route(self, host: int, network: IPv4Network, interface: Interface) -> None:
        """Undo `add_route`."""
        self._routes.remove((host, network, interface))

    def route(self, hosts: frozenset[int], address: object) -> Interface | None:
        """The interface of the longest route to the address, None without a route."""
        fits = [
            (network.prefixlen, interface)
            for host, network, interface in self._routes
            if host in hosts and isinstance(address, IPv4Address) and address in network
            if not interface.port.removed
        ]
        return max(fits, key=lambda fit: fit[0])[1] if fits else None
