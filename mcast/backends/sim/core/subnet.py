"""A simulated InfiniBand subnet: connects ports to SM and SA, and joins them to IPoIB's broadcast group."""

from __future__ import annotations

from functools import partial

from mcast.backends.model.port import Port
from mcast.backends.model.sa_client import SaClient
from mcast.backends.model.times import Scheduler
from mcast.backends.sim.core.forwarding import Forwarding
from mcast.backends.sim.core.log import Log
from mcast.backends.sim.core.options import InfinibandOptions
from mcast.backends.sim.core.receivers import Receivers
from mcast.backends.sim.core.sa import Quirks, SaPort, SaReply, SubnetAdmin, WellKnownGroup
from mcast.backends.sim.core.sa_exchange import SaExchange
from mcast.backends.sim.core.topology import Topology
from mcast.backends.sim.faults.rules import Rules
from mcast.wire.mapping import ipoib_broadcast_mgid
from mcast.wire.mcmember import JoinState, McMask, McMemberRecord, SaMethod, SaStatus
from mcast.wire.partition import FULL_MEMBER, find_pkey, matching_pkeys
from mcast.wire.units import MTU, RATE


class Subnet:
    """The SM, its SA, and the SA clients of the ports.

    sa          the SA's records
    clients     index of a port -> its SA client
    forwarding  the switches' entries for the SA's groups
    up, ends    whether the SM runs; how often it has ended
    """

    def __init__(
        self,
        options: InfinibandOptions,
        topology: Topology,
        receivers: Receivers,
        rules: Rules,
        clock: Scheduler,
        log: Log,
    ) -> None:
        # No port may be kept out of the groups of IPoIB by its MTU.
        mtu, rate = MTU.code[min(options.mtus)], RATE.code[options.rate]
        self.sa: SubnetAdmin = SubnetAdmin(
            well_known=[
                WellKnownGroup(pkey=base | FULL_MEMBER, mtu=mtu, rate=rate) for base in options.pkey_bases
            ],
            quirks=options.quirks or Quirks(),
            max_mlid=options.max_mlid,
        )
        self.forwarding: Forwarding = Forwarding(self.sa, topology, receivers, clock)
        self.up: bool = True
        self.ends: int = 0
        self._topology, self._ipoib = topology, options.ipoib
        self._seen: set[int] = set()  # GUIDs of the ports that the SM sees
        ask = SaExchange(self._serve, rules, clock, log).ask
        self.clients: dict[int, SaClient] = {
            port.index: SaClient(partial(ask, port), port.gids[0]) for port in topology.ports
        }
        _add_partitions(options, topology)
        for port in topology.ports:
            self.discover(port)
            self.join_broadcasts(port)

    def clear(self) -> None:
        """Forget all memberships, those of the ports and those in the SA."""
        for client in self.clients.values():
            client.groups.clear()
            client.active.clear()
        self.sa.restart()
        self.forwarding.changed()

    def reaches_sm(self, port: Port) -> bool:
        """Return True if a request of the port reaches a running SM."""
        topology = self._topology
        return self.up and port.up and not (topology.cut and topology.is_cut_off(port))

    def knows(self, port: Port) -> bool:
        """Return True if the SM knows the port."""
        return port.guid in self._seen

    def update(self, port: Port) -> None:
        """The SM has changed values of the port: tell the SA, if the SM sees the port."""
        if self.knows(port):
            self._book(port)

    def discover(self, port: Port) -> bool:
        """Have the SM discover the port, as its sweep does; return True if it had lost it."""
        missed = not self.knows(port) and not self._topology.is_cut_off(port)
        if missed:
            self._book(port)
            self._seen.add(port.guid)
        return missed

    def drop_unreachable(self, *ports: Port) -> None:
        """The SM has noticed that ports are gone: their memberships end by the leave rules."""
        for port in ports:
            if not (port.up and not self._topology.is_cut_off(port)) and self.knows(port):
                self.sa.port_down(port.guid)
                self._seen.remove(port.guid)
        self.forwarding.changed()

    def join_broadcasts(self, port: Port) -> None:
        """Join the broadcast groups.

        IPoIB does so by itself when its interfaces come up or the SM has forgotten them.
        """
        for interface in port.interfaces if self._ipoib else ():
            if find_pkey(port.pkeys, interface.pkey) is not None and port.up and self.reaches_sm(port):
                interface.broadcast = self._join_broadcast(port, interface.pkey)
        self.forwarding.changed()

    def _book(self, port: Port) -> None:
        self.sa.add_port(SaPort(port.guid, port.lid, port.pkeys, MTU.code[port.mtu], RATE.code[port.rate]))

    def _serve(self, port: Port, method: SaMethod, mask: int, record: McMemberRecord) -> SaReply | None:
        if not self.reaches_sm(port):
            return None
        reply = self.sa.handle(port.guid, method, mask, record)
        self.forwarding.changed()
        return reply

    def _join_broadcast(self, port: Port, pkey: int) -> McMemberRecord | None:
        """Return the request of an IPoIB interface; None if the SA refuses.

        OpenSM may have no MLID for the partition's group, or have the group that a port has made under its
        MGID (SA-SM-6).
        """
        record = McMemberRecord(
            mgid=ipoib_broadcast_mgid(pkey | FULL_MEMBER), port_gid=port.gids[0], join_state=JoinState.FULL
        )
        reply = self.sa.handle(port.guid, SaMethod.SET, McMask.JOIN, record)
        assert reply is not None
        return reply.records[0] if reply.status is SaStatus.OK else None


def _add_partitions(options: InfinibandOptions, topology: Topology) -> None:
    """Give the ports their P_Keys, and an interface for each."""
    for number, base in enumerate(options.pkey_bases):
        for pkey in matching_pkeys(base | FULL_MEMBER):
            for index in (options.partitions or {}).get(pkey, ()):
                topology.ports[index].add_interface(number, pkey)
    for port in topology.ports:
        port.pkeys = tuple(interface.pkey for interface in port.interfaces)
