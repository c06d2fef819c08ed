"""Topology of a fabric: ports on hosts, and switches joined by links."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from mcast.backends.model.port import Limits, Port
from mcast.backends.sim.core.options import Options
from mcast.backends.sim.core.port import FabricPort


class Topology:
    """Ports, dealt to hosts and switches in turn. Switch 0 is the root, if there are leaves."""

    def __init__(self, options: Options) -> None:
        hosts, switches, limits = options.hosts or options.ports, options.switches, options.limits or Limits()
        self.switches = switches
        self.hosts: frozenset[int] = frozenset(range(hosts))
        self.ports: list[FabricPort] = [
            FabricPort(
                index,
                index % hosts,
                options.link_layer,
                1 + index % (switches - 1) if switches > 1 else 0,
                mtu,
                options.rate,
                limits,
            )
            for index, mtu in enumerate(options.mtus)
        ]
        self.cut: set[int] = set()
        """Leaf switches that have lost their link to the root."""
        self._guids = {port.guid: port for port in self.ports}

    def port_with(self, guid: int) -> FabricPort:
        """The port with that GUID. Raises KeyError."""
        return self._guids[guid]

    def ports_of(self, hosts: frozenset[int]) -> list[FabricPort]:
        """The ports of these hosts, by index."""
        if hosts == self.hosts:
            return self.ports
        dealt = (self.ports[host :: len(self.hosts)] for host in hosts)
        return sorted((port for ports in dealt for port in ports), key=attrgetter("index"))

    def ports_of_switch(self, switch: int) -> Iterator[FabricPort]:
        """The ports on that switch."""
        return (port for port in self.ports if port.switch == switch)

    def is_cut_off(self, port: Port) -> bool:
        """Return True if the port's switch has lost its link to the root."""
        return self.ports[port.index].switch in self.cut

    def are_separated(self, one: Port, other: Port) -> bool:
        """Return True if a switch between these two ports is cut off."""
        switches = {self.ports[one.index].switch, self.ports[other.index].switch}
        return len(switches) > 1 and bool(switches & self.cut)

    def reaches(self, source: Port, target: Port) -> bool:
        """Return True if a message of one port reaches the other, provided the switches forward it there."""
        return target.up and not target.removed and not self.are_separated(source, target)
