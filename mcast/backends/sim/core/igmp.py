"""IGMP on a RoCE fabric: the reports of ports, and the snooping tables of the switches.

The first full member of a group on a port sends a report, which puts the port into the group's entry of
`snooping`; the last one to leave takes it out. Send-only members send no report (JEX-10). All switches see
the same reports, so one table stands for all of them.

With a querier an entry stays, because every port answers its queries; these answers are not modelled one by
one. Without a querier an entry ages out after MEMBERSHIP_INTERVAL_NS, unless the port reports the group
again; when a querier starts, every port that is up does. Each change calls `Receivers.forget`, because the
receivers of the group are cached.

Deliberately not handled: query intervals and elections of queriers, IGMPv1 and v2, and source filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address

from mcast.backends.model.port import Port
from mcast.backends.model.times import NS, Scheduler
from mcast.backends.sim.core.log import Log
from mcast.backends.sim.core.receivers import Receivers
from mcast.backends.sim.core.topology import Topology
from mcast.backends.sim.trace.events import FaultInjected, IgmpLeave, IgmpReport
from mcast.wire.addresses import Gid

MEMBERSHIP_INTERVAL_NS = 260 * NS
"""A membership that no report renews ages out: 2 x 125 s + 10 s (RFC 3376, 8.4)."""


class Igmp:
    """The snooping tables of all switches, which see the same reports.

    snooping  group -> index of a port -> the port: where the switches send the group's messages
    reports   group -> how often a port has reported it, since the switches last had no port for it
    querier   True while a querier asks for reports, so that a membership which was reported once does not age
    """

    def __init__(self, topology: Topology, receivers: Receivers, clock: Scheduler, log: Log) -> None:
        self._topology, self._receivers, self._clock, self._log = topology, receivers, clock, log
        self.snooping: dict[Gid, dict[int, Port]] = {}
        self.reports: dict[Gid, int] = {}
        self.querier: bool = True
        self._ages: dict[tuple[Gid, int], int] = {}

    def join(self, port: Port, group: Gid) -> int:
        """A full member joined on the port; the first one is announced to the switches (JEX-10)."""
        members = self._topology.ports[port.index].igmp
        count = members[group] = members.get(group, 0) + 1
        if count == 1:
            self.report(port, group)
        return 0

    def leave(self, port: Port, group: Gid) -> None:
        """A full member left; when the last one leaves, that is announced."""
        members = self._topology.ports[port.index].igmp
        members[group] -= 1
        if not members[group]:
            del members[group]
            self._forget(port, group)
            if self._log.is_enabled:
                self._log.note(IgmpLeave, port=port.name, source=_source(port), group=group)

    def report(self, port: Port, group: Gid) -> None:
        """The port reports its membership, and the switches learn it."""
        self.reports[group] = self.reports.get(group, 0) + 1
        if group.is_multicast:
            self.snooping.setdefault(group, {})[port.index] = port
            if self._ages:
                self._ages.pop((group, port.index), None)
            if not self.querier:
                self._age(port, group)
        self._receivers.forget(group)
        if self._log.is_enabled:
            self._log.note(IgmpReport, port=port.name, source=_source(port), group=group)

    def stop_querier(self) -> None:
        """Stop asking for reports: all that the switches have learnt begins to age."""
        self.querier = False
        for group, listeners in self.snooping.items():
            for port in listeners.values():
                self._age(port, group)

    def start_querier(self) -> None:
        """Ask for reports again; every port answers."""
        self.querier = True
        for port in self._topology.ports:
            if port.up and not port.removed:
                for group in port.igmp:
                    self.report(port, group)

    def clear(self) -> None:
        """Forget all memberships."""
        self.snooping.clear()
        self.reports.clear()
        self._ages.clear()

    def members(self, source: Port, group: Gid, mlid: int) -> Sequence[Port]:
        """The ports that a message of the source to the group reaches, the source among them if a member."""
        listeners = self.snooping.get(group, {})
        return [port for port in listeners.values() if self._topology.reaches(source, port)]

    def _age(self, port: Port, group: Gid) -> None:
        """Forget what the switches have learnt after the membership interval, unless it is reported again."""
        end = self._ages[group, port.index] = self._clock.now + MEMBERSHIP_INTERVAL_NS

        def expire() -> None:
            if self._ages.get((group, port.index)) == end:
                self._forget(port, group)
                self._log.note(FaultInjected, name="igmp-aged-out", port=port.name, detail=str(group))

        self._clock.call_later(MEMBERSHIP_INTERVAL_NS, expire)

    def _forget(self, port: Port, group: Gid) -> None:
        listeners = self.snooping.get(group, {})
        listeners.pop(port.index, None)
        if not listeners:
            self.snooping.pop(group, None)
            self.reports.pop(group, None)
        if self._ages:
            self._ages.pop((group, port.index), None)
        self._receivers.forget(group)


def _source(port: Port) -> str:
    return str(port.interfaces[0].ipv4 or IPv4Address(0))
