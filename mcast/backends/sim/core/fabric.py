"""A simulated fabric: ports, switches, routes, and who gets a copy of a message.

RoCE: switches snoop IGMP, so a message goes to the ports that announced themselves. InfiniBand: switches hold
an entry for each MLID, made from the SA's members, send-only ones included; a switch without an entry drops.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from itertools import count, groupby
from operator import attrgetter, itemgetter
from random import Random
from typing import ParamSpec

from mcast.api import Destination, DeviceInfo, LinkLayer, PortEvent, QpInit, QpState, WcStatus
from mcast.backends.sim.clock import CLOCKS
from mcast.backends.sim.core.port import PKEYS, Interface, Limits, Port
from mcast.backends.sim.core.qp import Burst, Header, Path, Qp, make_burst
from mcast.backends.sim.core.sa import Quirks, SaPort, SubnetAdmin, WellKnownGroup
from mcast.backends.sim.core.sa_client import SaClient
from mcast.backends.sim.core.sa_exchange import ask_sa
from mcast.backends.sim.faults import incidents
from mcast.backends.sim.faults.rules import (
    HOLD_NS,
    CorruptQkey,
    Delay,
    Delivery,
    Drop,
    Duplicate,
    Reorder,
    Rules,
)
from mcast.backends.sim.trace.events import (
    Attach,
    Deliver,
    Detach,
    Event,
    FabricMade,
    Fault,
    IgmpLeave,
    IgmpReport,
    Lost,
    PortMade,
    Send,
    Trace,
    Unsent,
)
from mcast.wire.addresses import IPV4_MAPPED, Gid
from mcast.wire.mapping import ipoib_broadcast_mgid
from mcast.wire.mcmember import MLID_FIRST, MLID_LAST, JoinState, McMask, McMemberRecord, SaMethod, SaStatus
from mcast.wire.partition import DEFAULT_PKEY, FULL_MEMBER, PARTITION, partners
from mcast.wire.units import MTU, RATE

_RTS = QpState.RTS

P = ParamSpec("P")
Tables = dict[int, Sequence[int]]
"""MLID -> GUIDs of the ports that the switches connect."""

FATES: tuple[tuple[Callable[[Qp], int], str], ...] = (
    (attrgetter("received"), ""),
    (attrgetter("no_receive"), "no receive is free"),
    (attrgetter("too_long"), "a receive has too little room"),
    (attrgetter("wrong_qkey"), "the Q_Key differs"),
    (attrgetter("port.pkey_violations"), "the P_Key differs"),
    (attrgetter("port.oversized"), "it is larger than the MTU"),
)
"""Which counter moves when a QP is given a message -> why it was lost, "" if it was not."""


class Fabric:
    """Hosts with ports, joined by switches. Make one with `Fabric.roce` or `Fabric.infiniband`.

    ports       how many; each is a device of its own
    hosts       how many hosts share them, in turn; by default every port has its own
    switches    1, or a root (0) and leaves (1, 2, …) that the ports are dealt to in turn
    mtu, rate   of every port: bytes, Gbit/s
    partitions  InfiniBand: P_Key -> indices of the ports that have it (0x8001 full, 0x0001 limited); each
                gives its ports an IPoIB interface 10.<n>.<port> beside the default partition's 10.0.<port>
    block_loopback  what devices make of QpInit.block_loopback: "honoured", "refused", "ignored"
    clock       "virtual" (from 0, moves while a call waits) or "wall" (for threads and asyncio)
    seed        of everything that is drawn at random
    trace       record what happens in `trace`
    max_mlid    InfiniBand: the last MLID that the switches can hold, 0xC000..0xFFFE

    Above 49 151 ports an InfiniBand fabric has more than a subnet has unicast LIDs; nothing depends on them.
    """

    # Faults; see `incidents`, and `rules` for those of single messages.
    set_link = incidents.set_link
    remove_device = incidents.remove_device
    restore_device = incidents.restore_device
    bond_failover = incidents.bond_failover
    cut_cable = incidents.cut_cable
    mend_cable = incidents.mend_cable
    restart_sm = incidents.restart_sm
    change_lid = incidents.change_lid
    set_pkeys = incidents.set_pkeys
    program_late = incidents.program_late
    stop_querier = incidents.stop_querier
    start_querier = incidents.start_querier
    starved = incidents.starved
    overrun_cq = incidents.overrun_cq
    fail_qp = incidents.fail_qp

    def __init__(
        self,
        link_layer: LinkLayer,
        ports: int,
        hosts: int | None,
        switches: int,
        mtu: int,
        rate: float,
        seed: int,
        clock: str,
        trace: bool,
        limits: Limits | None,
        block_loopback: str,
    ) -> None:
        _check("ports", ports, range(1, 65_000 + 1))
        _check("switches", switches, range(1, 4_096))
        _check("hosts", ports if hosts is None else hosts, range(1, ports + 1))
        _check("mtu", mtu, MTU.code)
        _check("seed", seed, range(-1 << 64, 1 << 64))
        _check("rate", rate, RATE.code)
        _check("clock", clock, CLOCKS)
        _check("block_loopback", block_loopback, ("honoured", "refused", "ignored"))
        self.block_loopback = block_loopback
        self.link_layer = link_layer
        limits = limits or Limits()
        self.clock = CLOCKS[clock]()
        self.random = Random(seed)
        self.seeds = Random(f"{seed}")
        """Draws the seeds of endpoints, apart from what the rules draw."""
        self.rules = Rules(self.random)
        self.trace = Trace() if trace else None
        self.watch: Callable[..., None] | None = None
        """Told of each backend, channel, id and QP that is opened, of each batch with its QP (`census`)."""
        self.switches = switches
        self.hosts = frozenset(range(hosts or ports))
        self.ports = [
            Port(
                i,
                i % (hosts or ports),
                link_layer,
                1 + i % (switches - 1) if switches > 1 else 0,
                mtu,
                rate,
                limits,
            )
            for i in range(ports)
        ]
        self.cut: set[int] = set()
        """Leaf switches that have lost their link to the root."""
        self.snooping: dict[Gid, dict[int, Port]] = {}
        self.igmp_reports: dict[Gid, int] = {}
        self.querier = True
        self._ages: dict[tuple[Gid, int], int] = {}
        self.sa: SubnetAdmin | None = None
        self.sa_clients: dict[int, SaClient] = {}
        self.sa_ports: set[int] = set()
        """GUIDs of the ports that the SM sees."""
        self.sm_up = True
        self.sm_ends = 0
        """How often the SM has died."""
        self._ipoib = True
        self._programming_ns = 0
        self._late: Tables | None = None  # what the switches hold, while they lag behind the SA
        self._kept: dict[int, Tables] = {}  # what switches hold that the SM does not reach
        self._routes: list[tuple[int, IPv4Network, Interface]] = []
        self._guids = {port.guid: port for port in self.ports}
        self._by_address = {a: i for p in self.ports for i in p.interfaces for a in i.addresses}
        self.version = 0
        self._devices: dict[frozenset[int], tuple[DeviceInfo, ...]] = {}
        self._receivers: dict[int | Gid, dict[tuple[int, Gid], Sequence[Qp]]] = {}
        self._held: dict[Qp, _HeldBack] = {}
        self._qps: dict[int, Qp] = {}
        self._next_qp = 16
        self._next_id = 1
        self._transactions = 0
        self._sent = 0

    @classmethod
    def roce(
        cls,
        ports: int = 4,
        *,
        hosts: int | None = None,
        switches: int = 1,
        mtu: int = 1024,
        rate: float = 10,
        seed: int = 0,
        clock: str = "virtual",
        trace: bool = False,
        limits: Limits | None = None,
        block_loopback: str = "refused",
    ) -> Fabric:
        """A RoCEv2 fabric: switches with IGMP snooping and a querier. Raises ValueError for a bad option."""
        sizes = (ports, hosts, switches, mtu, rate, seed)
        fabric = cls(LinkLayer.ETHERNET, *sizes, clock, trace, limits, block_loopback)
        fabric._introduce(seed)
        return fabric

    @classmethod
    def infiniband(
        cls,
        ports: int = 4,
        *,
        hosts: int | None = None,
        switches: int = 1,
        mtu: int = 2048,
        rate: float = 40,
        partitions: Mapping[int, Iterable[int]] | None = None,
        ipoib: bool = True,
        quirks: Quirks | None = None,
        max_mlid: int = MLID_LAST,
        seed: int = 0,
        clock: str = "virtual",
        trace: bool = False,
        limits: Limits | None = None,
        block_loopback: str = "honoured",
    ) -> Fabric:
        """An InfiniBand fabric with its SA. `ipoib=False` leaves the IPoIB interfaces down, so that no join
        finds its broadcast group. Raises ValueError for a bad option."""
        sizes = (ports, hosts, switches, mtu, rate, seed)
        fabric = cls(LinkLayer.INFINIBAND, *sizes, clock, trace, limits, block_loopback)
        fabric._start_sa(partitions or {}, quirks or Quirks(), ipoib, max_mlid)
        fabric._introduce(seed)
        return fabric

    def close(self) -> None:
        """Nothing that is still scheduled happens any more."""
        with self.clock:
            self.clock.close()

    # --- hosts, addresses, routes --------------------------------------------------------

    def port_of(self, address: IPv4Address | IPv6Address) -> Port:
        """The port that has the address. Raises KeyError."""
        interface = self._by_address.get(address)
        if interface is None or address not in interface.addresses:
            raise KeyError(f"no port of this fabric has {address}")
        return interface.port

    def port_with(self, guid: int) -> Port:
        """The port with that GUID. Raises KeyError."""
        return self._guids[guid]

    def ports_of(self, hosts: frozenset[int]) -> list[Port]:
        """The ports of these hosts, by index."""
        if hosts == self.hosts:
            return self.ports
        dealt = (self.ports[host :: len(self.hosts)] for host in hosts)
        return sorted((port for ports in dealt for port in ports), key=attrgetter("index"))

    def devices(self, hosts: frozenset[int]) -> tuple[DeviceInfo, ...]:
        """The devices of these hosts that are there, as they are until the topology changes."""
        known = self._devices.get(hosts)
        if known is None:
            there = (port for port in self.ports_of(hosts) if not port.removed)
            known = self._devices[hosts] = tuple(port.info() for port in there)
        return known

    def interface(self, hosts: frozenset[int], address: IPv4Address | IPv6Address) -> Interface | None:
        """The interface on one of these hosts that has the address."""
        found = self._by_address.get(address)
        if found is None or address not in found.addresses or found.port.removed:
            return None
        return found if found.port.host in hosts else None

    def add_route(self, host: int, network: IPv4Network, interface: Interface) -> None:
        """The host sends `network` out of that interface."""
        self._routes.append((host, network, interface))

    def remove_route(self, host: int, network: IPv4Network, interface: Interface) -> None:
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

    def set_ipv4(self, port: Port, address: IPv4Address | None) -> None:
        """The port's default interface gets another IPv4 address, or loses its own. Raises ValueError for an
        address that another port has."""
        with self.clock:
            if address is not None:
                has = self._by_address.get(address)
                if has is not None and has is not port.interfaces[0] and address in has.addresses:
                    raise ValueError(f"address is {address}: {has.port.name} has it")
                self._by_address[address] = port.interfaces[0]
            port.set_ipv4(address)
            self.topology_changed()
            if not port.is_infiniband:
                self.tell(port, PortEvent.GID_CHANGE)

    def tell(self, port: Port, event: PortEvent) -> None:
        """Every QP of the port is told of what has happened to it."""
        for qp in self.qps:
            if qp.port is port and not qp.gone:
                qp.hear(event)

    def topology_changed(self) -> None:
        """Who receives what, and with which headers, must be worked out anew, in every group."""
        self._receivers.clear()
        self._devices.clear()
        self.version += 1

    def _group_changed(self, route: int | Gid) -> None:
        """Who receives what must be worked out anew in the group that switches know by `route`: the MLID on
        InfiniBand, on RoCE the group itself.
        """
        self._receivers.pop(route, None)
        self.version += 1

    def note(self, kind: Callable[P, Event], *args: P.args, **fields: P.kwargs) -> None:
        """Record an event in the trace, if there is one."""
        if self.trace is not None:
            self.trace.add(self.clock.now, kind(*args, **fields))

    def _introduce(self, seed: int) -> None:
        self.note(FabricMade, link_layer=self.link_layer.value, seed=seed)
        for port in self.ports if self.trace is not None else ():
            self.note(
                PortMade,
                port=port.name,
                host=port.host,
                switch=port.switch,
                guid=port.guid,
                lid=port.lid,
                mtu=port.mtu,
                addresses=tuple(map(str, port.addresses)),
                gids=tuple(port.gids.values()),
            )

    def number_id(self) -> int:
        """A number of its own for an id."""
        self._next_id += 1
        return self._next_id - 1

    def number_transaction(self) -> int:
        """A number of its own for an SA request."""
        self._transactions += 1
        return self._transactions

    # --- membership: IGMP on RoCE, the SA on InfiniBand ----------------------------------

    def igmp_join(self, port: Port, group: Gid) -> None:
        """A full member joined on the port: the first one is announced to the switches (JEX-10)."""
        count = port.igmp[group] = port.igmp.get(group, 0) + 1
        if count == 1:
            self.snoop(port, group)

    def igmp_leave(self, port: Port, group: Gid) -> None:
        """A full member left; the last one is announced."""
        port.igmp[group] -= 1
        if not port.igmp[group]:
            del port.igmp[group]
            self._unsnoop(port, group)
            if self.trace is not None:
                self.note(IgmpLeave, port=port.name, source=_igmp_source(port), group=group)

    def snoop(self, port: Port, group: Gid) -> None:
        """The port reports its membership, and the switches learn it."""
        self.igmp_reports[group] = self.igmp_reports.get(group, 0) + 1
        if group.is_multicast:
            self.snooping.setdefault(group, {})[port.index] = port
            self._ages.pop((group, port.index), None)
            if not self.querier:
                self.age(port, group)
        self._group_changed(group)
        if self.trace is not None:
            self.note(IgmpReport, port=port.name, source=_igmp_source(port), group=group)

    def _unsnoop(self, port: Port, group: Gid) -> None:
        listeners = self.snooping.get(group, {})
        listeners.pop(port.index, None)
        if not listeners:
            self.snooping.pop(group, None)
        self._ages.pop((group, port.index), None)
        self._group_changed(group)

    def age(self, port: Port, group: Gid) -> None:
        """Nobody asks for reports: what the switches have learnt ends with the membership interval."""
        end = self._ages[group, port.index] = self.clock.now + incidents.MEMBERSHIP_INTERVAL_NS

        def expire() -> None:
            if self._ages.get((group, port.index)) == end:
                self._unsnoop(port, group)
                self.note(Fault, name="igmp-aged-out", port=port.name, detail=str(group))

        self.clock.call_later(incidents.MEMBERSHIP_INTERVAL_NS, expire)

    def _start_sa(
        self, partitions: Mapping[int, Iterable[int]], quirks: Quirks, ipoib: bool, max_mlid: int
    ) -> None:
        _check("max_mlid", max_mlid, range(MLID_FIRST, MLID_LAST + 1))
        self._ipoib = ipoib
        mtu, rate = MTU.code[self.ports[0].mtu], RATE.code[self.ports[0].rate]
        for pkey in partitions:
            _check("P_Key", pkey, PKEYS)
            _check("P_Key & 0x7FFF", pkey & PARTITION, range(1, PARTITION + 1))
        bases = dict.fromkeys([DEFAULT_PKEY & PARTITION, *(pkey & PARTITION for pkey in partitions)])
        _check("number of partitions", len(bases), range(1, 257))
        self.sa = SubnetAdmin(
            well_known=[WellKnownGroup(pkey=base | FULL_MEMBER, mtu=mtu, rate=rate) for base in bases],
            quirks=quirks,
            max_mlid=max_mlid,
        )
        for number, base in enumerate(bases):
            for pkey in partners(base | FULL_MEMBER):
                for index in partitions.get(pkey, ()):
                    _check("port index", index, range(len(self.ports)))
                    interface = Interface(self.ports[index], number, pkey)
                    self.ports[index].interfaces.append(interface)
                    self._by_address |= dict.fromkeys(interface.addresses, interface)
        for port in self.ports:
            port.pkeys = tuple(interface.pkey for interface in port.interfaces)
            self.sa.add_port(self.sa_port(port))
            self.sa_ports.add(port.guid)
            self.sa_clients[port.index] = SaClient(partial(ask_sa, self, port), port.gids[0])
            self.join_broadcasts(port)

    def sa_port(self, port: Port) -> SaPort:
        """What the SA knows of a port."""
        return SaPort(port.guid, port.lid, port.pkeys, MTU.code[port.mtu], RATE.code[port.rate])

    def join_broadcasts(self, port: Port) -> None:
        """What IPoIB does by itself when its interfaces come up or the SM has forgotten them."""
        for interface in port.interfaces if self._ipoib else ():
            if interface.pkey in port.pkeys and port.up and self.sa_hears(port):
                interface.broadcast = self._join_broadcast(port, interface.pkey)
        self.tables_changed()

    def sa_hears(self, port: Port) -> bool:
        """Whether a request of the port gets to a running SM."""
        return self.sm_up and port.up and port.switch not in self.cut

    # --- the switches' tables on InfiniBand ------------------------------------------------

    def tables_changed(self) -> None:
        """The SA has changed groups: the switches learn it, at once unless they are slow."""
        assert self.sa is not None
        changed = self.sa.drain_changes()
        if self._late is None:
            for mlid in changed:
                self._receivers.pop(mlid, None)
            self.version += 1
        else:
            for mlid in changed:
                self.clock.call_later(self._programming_ns, partial(self._program, mlid))

    def _program(self, mlid: int) -> None:
        assert self.sa is not None
        if self._late is not None:
            self._late[mlid] = self.sa.forwarding(mlid)
            self._group_changed(mlid)

    def set_programming(self, delay: int) -> None:
        """From now on a change reaches the switches `delay` ns late."""
        self._programming_ns = delay
        self._late = (self._late or self._tables()) if delay else None
        self.topology_changed()

    def keep_tables(self, switch: int) -> None:
        """The SM no longer reaches the switch: it keeps the entries that it has."""
        self._kept[switch] = dict(self._late) if self._late is not None else self._tables()

    def forget_kept_tables(self, switch: int) -> None:
        self._kept.pop(switch, None)

    def _tables(self) -> Tables:
        assert self.sa is not None
        return {group.mlid: self.sa.forwarding(group.mlid) for group in self.sa.groups}

    def _entry(self, switch: int, mlid: int) -> Sequence[int]:
        """GUIDs of the ports that a message on that switch is sent towards."""
        assert self.sa is not None
        tables = self._kept.get(switch, self._late)
        return self.sa.forwarding(mlid) if tables is None else tables.get(mlid, ())

    def _join_broadcast(self, port: Port, pkey: int) -> McMemberRecord:
        """What IPoIB does when its interface comes up; the group itself is the partition's."""
        assert self.sa is not None
        record = McMemberRecord(
            mgid=ipoib_broadcast_mgid(pkey | FULL_MEMBER), port_gid=port.gids[0], join_state=JoinState.FULL
        )
        reply = self.sa.handle(port.guid, SaMethod.SET, McMask.JOIN, record)
        assert reply is not None
        assert reply.status is SaStatus.OK, reply
        return reply.records[0]

    # --- queue pairs and their attachments -----------------------------------------------

    def create_qp(self, port: Port, init: QpInit, qkey: int, pkey: int) -> Qp:
        """A QP with a number of its own, in RESET."""
        qp = self._qps[self._next_qp] = Qp(port, self._next_qp, init, qkey, pkey)
        self._next_qp += 1
        return qp

    def destroy_qp(self, qp: Qp) -> None:
        """Detach the QP from everything and forget it."""
        for gid, lid in list(qp.attached.items()):
            self.detach(qp, gid, lid)
        qp.modify(QpState.RESET)
        qp.alone = ()  # it names the QP itself, and would keep it
        del self._qps[qp.number]
        self.version += 1

    @property
    def qps(self) -> tuple[Qp, ...]:
        return tuple(self._qps.values())

    def attach(self, qp: Qp, gid: Gid, lid: int) -> int:
        result = qp.port.attach(qp, gid, lid)
        self._group_changed(gid if self.sa is None else lid)
        if self.trace is not None:
            self.note(Attach, port=qp.port.name, qp=qp.number, group=gid, lid=lid, errno=result)
        return result

    def detach(self, qp: Qp, gid: Gid, lid: int) -> int:
        result = qp.port.detach(qp, gid, lid)
        self._group_changed(gid if self.sa is None else lid)
        if self.trace is not None:
            self.note(Detach, port=qp.port.name, qp=qp.number, group=gid, lid=lid, errno=result)
        return result

    # --- messages -------------------------------------------------------------------------

    def send(self, qp: Qp, to: Destination, payloads: Sequence[bytes], imm: int | None) -> int:
        """Post the messages and carry them out; the errno of the post.

        A failure of the device itself puts the QP into ERR, and the post returns 0 (K-DATA-16).
        """
        path = qp.path
        known = path is not None and path.to is to and path.version == self.version
        if not known and (refused := _refused(qp, to)):
            return refused
        if qp.state is not _RTS:
            return 0 if qp.state is QpState.ERR else errno.EINVAL
        if not known:
            path = qp.path = self._path(qp, to)
        count = len(payloads)
        if path is not None:
            longest = len(payloads[0]) if count == 1 else max(map(len, payloads), default=0)
            self._carry(qp, path, make_burst((payloads, longest, path.header, imm, self._sent, None)))
        elif qp.port.is_infiniband and not qp.gone:
            self._note_unsent(qp, to, payloads, "the sender's link is down")
        else:
            qp.fail(WcStatus.LOC_QP_OP_ERR)
            self._note_unsent(qp, to, payloads, WcStatus.LOC_QP_OP_ERR.name)
            return 0
        qp.sent += count
        self._sent += count
        return 0

    def _path(self, qp: Qp, to: Destination) -> Path | None:
        """The way of a message, None if the device cannot send it.

        What it depends on changes with `version`; RoCE needs a source GID of the group's IP version besides.
        """
        port, source = qp.port, qp.port.gids.get(to.sgid_index)
        if qp.gone or not port.up or source is None or not (port.is_infiniband or _same_ip(source, to.gid)):
            return None
        header = Header(source, qp.number, to.gid, to.dlid, to.qkey, qp.pkey, port.lid)
        targets = self._targets(port, to)
        if qp.blocks_loopback and self.block_loopback == "honoured" and to.gid.is_multicast:
            targets = [target for target in targets if target is not qp]
        return Path(to, self.version, header, targets, any(target.stamps for target in targets))

    def _carry(self, qp: Qp, path: Path, burst: Burst) -> None:
        """Give the burst to all that the path reaches; faults judge each message for itself."""
        if self.rules.deliveries:
            if self.trace is not None:
                self._note_send(qp, path.to, burst)
            for index in range(len(burst.payloads)):
                for target in path.targets:
                    self._carry_one(qp.port, burst, index, target)
        elif self.trace is not None:
            self._note_send(qp, path.to, burst)
            for target in path.targets:
                self._deliver(target, burst, 0, len(burst.payloads))
        elif path.stamped:
            for target in path.targets:
                self._deliver(target, burst, 0, len(burst.payloads))
        else:
            for target in path.targets:
                target.deliver(burst, 0, len(burst.payloads))

    def _carry_one(self, port: Port, burst: Burst, index: int, qp: Qp) -> None:
        size = len(burst.payloads[index])
        delivery = Delivery(
            self.clock.now,
            burst.header.group,
            port.name,
            qp.port.name,
            burst.header.src_qp,
            qp.number,
            burst.first + index,
            size,
        )
        verdict = self.rules.judge_delivery(delivery)
        if isinstance(verdict, Drop):
            self._note_lost(qp, burst, index, 1, "a fault rule dropped it")
        elif isinstance(verdict, Delay):
            self.clock.call_later(verdict.ns, lambda: self._deliver_late(qp, burst, index))
        elif isinstance(verdict, Reorder):
            held = self._held.setdefault(qp, _HeldBack()).add(verdict.after, burst, index)
            self.clock.call_later(HOLD_NS, lambda: self._let_go(qp, held))
        else:
            if isinstance(verdict, CorruptQkey):
                qkey = burst.header.qkey ^ 1 if verdict.qkey is None else verdict.qkey
                burst = burst._replace(header=burst.header._replace(qkey=qkey))
            for _ in range(1 + verdict.copies if isinstance(verdict, Duplicate) else 1):
                self._deliver(qp, burst, index, index + 1)
            self._overtaken(qp)

    def _deliver_late(self, qp: Qp, burst: Burst, index: int) -> None:
        """A message comes after its time: only if the QP still is where it was sent to."""
        group, lid = burst.header.group, qp.attached.get(burst.header.group)
        attached = lid == burst.header.dlid or (lid is not None and not qp.port.is_infiniband)
        if not qp.port.up or qp.gone or (group.is_multicast and not attached):
            self._note_lost(qp, burst, index, 1, "it came too late")
        else:
            self._deliver(qp, burst, index, index + 1)

    def _overtaken(self, qp: Qp) -> None:
        """A message has come to the QP: those held back for it are nearer."""
        if (back := self._held.get(qp)) is not None:
            for held in back.pass_one():
                self._let_go(qp, held)

    def _let_go(self, qp: Qp, held: _Held) -> None:
        if held.waits:
            held.waits = False
            back = self._held[qp]
            back.waiting -= 1
            if not back.waiting:
                del self._held[qp]
            self._deliver_late(qp, held.burst, held.index)

    def _deliver(self, qp: Qp, burst: Burst, start: int, stop: int) -> None:
        """Messages start..stop arrive; a trace says what became of each, one line for a run of one fate."""
        if qp.stamps:
            burst = burst._replace(at=self.clock.now)
        if self.trace is None:
            qp.deliver(burst, start, stop)
            return
        fates = []
        for index in range(start, stop):
            before = [count(qp) for count, _ in FATES]
            qp.deliver(burst, index, index + 1)
            moved = (fate for (count, fate), was in zip(FATES, before, strict=True) if count(qp) != was)
            fates.append((index, next(moved, f"the QP is in {qp.state.name}")))
        for fate, run in groupby(fates, key=itemgetter(1)):
            indices = [index for index, _ in run]
            if fate:
                self._note_lost(qp, burst, indices[0], len(indices), fate)
            else:
                self.note(
                    Deliver,
                    port=qp.port.name,
                    qp=qp.number,
                    group=burst.header.group,
                    first=burst.first + indices[0],
                    count=len(indices),
                )

    def _note_send(self, qp: Qp, to: Destination, burst: Burst) -> None:
        """Record the burst, and which attached QPs it will not reach."""
        self.note(
            Send,
            port=qp.port.name,
            qp=qp.number,
            first=burst.first,
            psn=qp.sent & 0xFFFFFF,
            source=burst.header.source,
            group=to.gid,
            dest_qp=to.qp_num,
            slid=burst.header.slid,
            dlid=to.dlid,
            sl=to.sl,
            qkey=to.qkey,
            pkey=burst.header.pkey,
            hop_limit=to.hop_limit,
            traffic_class=to.traffic_class,
            flow_label=to.flow_label,
            imm=burst.imm,
            payloads=tuple(burst.payloads),
        )
        reached = set(self._targets(qp.port, to))
        for port in self.ports:
            for member in port.attached.get(to.gid, ()):
                if member not in reached:
                    reason = self._why_unreached(qp.port, member, to)
                    self._note_lost(member, burst, 0, len(burst.payloads), reason)

    def _why_unreached(self, source: Port, member: Qp, to: Destination) -> str:
        target, lid, dlid = member.port, member.attached[to.gid], to.dlid
        if member.gone:
            return "the device is gone"
        if not target.up:
            return "the link is down"
        if source.switch != target.switch and {source.switch, target.switch} & self.cut:
            return "a switch is cut off"
        if target.is_infiniband and lid != dlid:
            return f"it is attached with MLID {lid:#x}, not {dlid:#x}"
        return "the fabric does not deliver the group to the port"

    def _note_lost(self, qp: Qp, burst: Burst, index: int, count: int, reason: str) -> None:
        self.note(
            Lost,
            port=qp.port.name,
            qp=qp.number,
            group=burst.header.group,
            first=burst.first + index,
            count=count,
            reason=reason,
        )

    def _note_unsent(self, qp: Qp, to: Destination, payloads: Sequence[bytes], reason: str) -> None:
        self.note(Unsent, port=qp.port.name, qp=qp.number, group=to.gid, count=len(payloads), reason=reason)

    def _targets(self, port: Port, to: Destination) -> Sequence[Qp]:
        if not to.gid.is_multicast:
            qp = self._qps.get(to.qp_num)
            if qp is None or qp.gone or to.gid not in qp.port.gids.values():
                return []
            return [qp] if self._reaches(port, qp.port) else []
        known = self._receivers.setdefault(to.gid if self.sa is None else to.dlid, {})
        key = (port.index, to.gid)
        targets = known.get(key)
        if targets is None:
            targets = known[key] = list(self._attached(port, to.gid, to.dlid))
        return targets

    def _attached(self, port: Port, gid: Gid, dlid: int) -> Iterator[Qp]:
        """The QPs that get a copy, in order of their ports and of their attaching."""
        members = self._members(port, gid, dlid)
        for target in sorted(members, key=lambda member: member.index):
            for qp in target.attached.get(gid, ()):
                if not qp.gone and (not port.is_infiniband or qp.attached[gid] == dlid):
                    yield qp

    def _members(self, port: Port, gid: Gid, dlid: int) -> list[Port]:
        """The ports that a message from `port` reaches, itself among them if the device loops it back."""
        if self.sa is None:
            members = self.snooping.get(gid, {})
            return [member for member in members.values() if self._reaches(port, member)]
        joined = [self._guids[guid] for guid in self._entry(port.switch, dlid)]
        switch_has_entry = any(member.switch == port.switch for member in joined)
        far = joined if switch_has_entry else []
        # An InfiniBand device copies to its own QPs without the switch, member or not.
        return [port, *(member for member in far if member is not port and self._reaches(port, member))]

    def _reaches(self, source: Port, target: Port) -> bool:
        cut = source.switch != target.switch and bool({source.switch, target.switch} & self.cut)
        return target.up and not target.removed and not cut


@dataclass(slots=True, eq=False)
class _Held:
    """A message that is held back."""

    burst: Burst
    index: int
    waits: bool = True


class _HeldBack:
    """The messages held back for a QP; `waiting` says how many still are."""

    def __init__(self) -> None:
        self.waiting = 0
        self._passed = 0
        self._added = count()
        self._heap: list[tuple[int, int, _Held]] = []  # by the number of messages that pass before it

    def add(self, after: int, burst: Burst, index: int) -> _Held:
        """Hold a message back until `after` others have passed."""
        held = _Held(burst, index)
        heappush(self._heap, (self._passed + after, next(self._added), held))
        self.waiting += 1
        return held

    def pass_one(self) -> Iterator[_Held]:
        """Another message has passed: those that have waited for it."""
        self._passed += 1
        while self._heap and self._heap[0][0] <= self._passed:
            yield heappop(self._heap)[2]


def _igmp_source(port: Port) -> str:
    return str(port.interfaces[0].ipv4 or IPv4Address(0))


def _refused(qp: Qp, to: Destination) -> int:
    """The errno of making an address handle; one that was made outlives its source GID."""
    if to.port_num != 1 or not to.is_global:
        return errno.EINVAL
    if (to.gid, to.sgid_index) not in qp.handles:
        if to.sgid_index not in qp.port.gids:
            return errno.ENODATA
        qp.handles.add((to.gid, to.sgid_index))
    return 0


def _same_ip(source: Gid, gid: Gid) -> bool:
    return (source[:12] == IPV4_MAPPED) == (gid[:12] == IPV4_MAPPED)


def _check(name: str, value: object, allowed: Collection[object]) -> None:
    whole = isinstance(allowed, range)
    if not isinstance(value, int | float | str) or (whole and type(value) is not int) or value not in allowed:
        shown = f"{allowed[0]}..{allowed[-1]}" if isinstance(allowed, range) else ", ".join(map(str, allowed))
        raise ValueError(f"{name} is {value!r}: allowed are {shown}")
