"""A simulated fabric: its parts, put together. `mcast.backends.sim.fabric.Fabric` is the class for users."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random

from mcast.backends.model.port import Port
from mcast.backends.model.queue_pairs import QueuePairs
from mcast.backends.model.sa_client import SaClient
from mcast.backends.model.times import Scheduler
from mcast.backends.sim.core.delivery import MessageDelivery
from mcast.backends.sim.core.hosts import Hosts
from mcast.backends.sim.core.igmp import Igmp
from mcast.backends.sim.core.log import Listener, Log
from mcast.backends.sim.core.message_log import MessageLog
from mcast.backends.sim.core.options import InfinibandOptions, Options
from mcast.backends.sim.core.receivers import Receivers
from mcast.backends.sim.core.subnet import Subnet
from mcast.backends.sim.core.switching import Switching
from mcast.backends.sim.core.topology import Topology
from mcast.backends.sim.faults.rules import Rules
from mcast.backends.sim.trace.events import FabricMade, PortMade, Trace


class FabricCore:
    """One attribute for each part. This class has many, because it only knows which part needs which.

    The clock is an argument, and no part reads another one. No part takes a lock or waits; calls return
    errnos.
    """

    def __init__(self, options: Options, clock: Scheduler) -> None:
        self.options: Options = options
        self.clock: Scheduler = clock
        self.random: Random = Random(options.seed)
        self.seeds: Random = Random(f"{options.seed}")
        """Draws the seeds of endpoints, apart from what the rules draw."""
        self.log: Log = Log(clock, Trace() if options.trace else None)
        self.id_numbers: Iterator[int] = count(1)
        self.topology: Topology = Topology(options)
        self.rules: Rules = Rules(self.random, ports=[port.name for port in self.topology.ports])
        self.receivers: Receivers = Receivers()
        self.igmp: Igmp = Igmp(self.topology, self.receivers, clock, self.log)
        self.subnet: Subnet | None = None
        """None on RoCE, which has no SM."""
        members = self.igmp.members
        if isinstance(options, InfinibandOptions):
            self.subnet = Subnet(options, self.topology, self.receivers, self.rules, clock, self.log)
            members = self.subnet.forwarding.members
        self.hosts: Hosts = Hosts(self.topology)
        self.queue_pairs: QueuePairs = QueuePairs(self.topology.ports, self.receivers, self.log)
        switching = Switching(members, self.topology, self.queue_pairs, self.receivers)
        messages = MessageLog(self.log, self.topology, self.queue_pairs, switching)
        honours_block_loopback = options.block_loopback == "honoured"
        is_traced = self.log.is_enabled
        self.wire: MessageDelivery = MessageDelivery(
            switching, self.receivers, self.rules, clock, messages, honours_block_loopback, is_traced
        )
        if is_traced:
            for event in self.introduction():
                self.log.write(event)

    @property
    def refuses_block_loopback(self) -> bool:
        """True if no queue pair can be made with QpInit.block_loopback."""
        return self.options.block_loopback == "refused"

    @property
    def sa_capabilities(self) -> int:
        """The capability bits of the SA."""
        assert self.subnet is not None
        return self.subnet.sa.capability_mask2

    def sa_client(self, port: Port) -> SaClient:
        """Return the SA client of an InfiniBand port."""
        assert self.subnet is not None
        return self.subnet.clients[port.index]

    def topology_changed(self) -> None:
        """Forget which ports receive what, and with which headers, in every group."""
        self.receivers.forget_all()
        self.hosts.forget_devices()

    def clear(self) -> None:
        """Forget all objects and memberships, whatever state an interrupted change has left them in."""
        for port in self.topology.ports:
            port.ids.clear()
            port.igmp.clear()
        self.igmp.clear()
        if self.subnet is not None:
            self.subnet.clear()
        self.queue_pairs.clear()
        self.wire.clear()
        self.receivers.forget_all()

    def listen(self, listener: Listener) -> None:
        """Tell `listener` what happens on the fabric from now on, with the time in ns."""
        self.log.listen(listener)
        self.wire.is_traced = True

    def unlisten(self, listener: Listener) -> None:
        """Undo `listen`."""
        self.log.unlisten(listener)
        self.wire.is_traced = self.log.is_enabled

    def introduction(self) -> Iterator[FabricMade | PortMade]:
        """The first lines of a trace."""
        yield FabricMade(link_layer=self.options.link_layer.value, seed=self.options.seed)
        for port in self.topology.ports:
            yield PortMade(
                port=port.name,
                host=port.host,
                switch=port.switch,
                guid=port.guid,
                lid=port.lid,
                mtu=port.mtu,
                addresses=tuple(map(str, port.addresses)),
                gids=tuple(port.gids.values()),
            )
