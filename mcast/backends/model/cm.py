"""The connection manager: ids, their groups, and the events of a channel (librdmacm and the kernel's CMA).

Calls return an errno, 0 for success; later outcomes are events. There is no lock and no I/O: delayed steps
are scheduled on the network's clock, and `on_event` is called whenever the channel's queue changes. `Network`
is all that an id needs from outside.

States of an id (`IdState`):

    IDLE --bind--> BOUND --resolve--> QUERY --ADDR_RESOLVED is fetched--> RESOLVED
    IDLE --resolve--> QUERY
    any state --the device is removed--> REMOVED

A join needs BOUND or RESOLVED. An id owns its memberships (`groups`) and at most one queue pair; a channel
owns the queue of events, and an event knows the id or the membership that it is about. A leave or destroy
takes the unread events of its owner back, so no event names an object that has ended.

Fetching has effects, as in librdmacm: ADDR_RESOLVED moves the id to RESOLVED, and MULTICAST_JOIN attaches the
queue pair. If the attach fails, the event becomes a MULTICAST_ERROR.

Deliberately not handled: connections. RC and UC queue pairs can be made, in INIT, and not connected.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, Protocol

from mcast.api import (
    JOIN_MASK,
    MULTICAST_QPN,
    RDMA_UDP_QKEY,
    CmEventType,
    Destination,
    JoinFlag,
    MtuSource,
    PortSpace,
    QpInit,
    QpState,
    QpType,
    UdParam,
)
from mcast.backends.model.port import Interface, Port
from mcast.backends.model.qp import Qp
from mcast.backends.model.queue_pairs import QueuePairs
from mcast.backends.model.sa_client import SaClient, SaMember
from mcast.backends.model.times import Scheduler
from mcast.errors.cause import ENOTSUPP, Cause
from mcast.errors.causes import causes_of_status
from mcast.errors.sa_refusal import PortView, refusal_causes
from mcast.wire.addresses import AF_IB, AF_INET, AF_INET6, ZERO_GID, Gid, LocalAddress, McastAddress
from mcast.wire.kernel_join import kernel_join
from mcast.wire.mapping import infiniband_group, infiniband_mgid, ipoib_broadcast_mgid, roce_mgid
from mcast.wire.mcmember import JoinState, McMemberRecord, SaStatus
from mcast.wire.partition import FULL_MEMBER, find_pkey
from mcast.wire.units import MTU, RATE

if TYPE_CHECKING:
    from mcast.backends.model.log import Log

ADDR_RESOLUTION_NS = 10_000
"""A multicast address needs a route, no ARP: the event comes almost at once."""

ROCE_HOP_LIMIT = 64
_REFUSED = (errno.EINVAL, -errno.EINVAL)
"""Errno and status of a MULTICAST_ERROR by which the SA, and not a failed attach, ended the join."""
_NO_UD = (None, None)
_KNOWN_FAMILIES = (AF_INET, AF_INET6, AF_IB)
_UD_TYPES = {PortSpace.UDP: {QpType.UD}, PortSpace.IPOIB: {QpType.UD}}
_CONNECTED_TYPES = {QpType.RC, QpType.UC}

# Plain ints of this module, because looking up and combining enum members takes ten times as long.
_FULL, _SEND_ONLY = int(JoinState.FULL), int(JoinState.SEND_ONLY_FULL)
_SEND_ONLY_FLAG, _FLAGS = int(JoinFlag.SENDONLY_FULLMEMBER), tuple(map(int, JoinFlag))
_JOIN_MASK = int(JOIN_MASK)
_JOINED, _ERROR, _RESOLVED = (
    CmEventType.MULTICAST_JOIN,
    CmEventType.MULTICAST_ERROR,
    CmEventType.ADDR_RESOLVED,
)


class Addresses(Protocol):
    """The interfaces and routes of hosts."""

    def interface(self, hosts: frozenset[int], address: LocalAddress) -> Interface | None:
        """Return the interface on one of these hosts that has the address."""

    def route(self, hosts: frozenset[int], address: object) -> Interface | None:
        """Return the interface of the longest route to the address."""


class IgmpReporter(Protocol):
    """IGMP: announces the full members of RoCE groups."""

    def join(self, port: Port, group: Gid) -> int:
        """Count a full member; announce the port's first one. Return the errno of a host that cannot."""

    def leave(self, port: Port, group: Gid) -> None:
        """Undo `join`."""


class Network(Protocol):
    """The services of the fabric, or of the host, that the connection manager uses.

    `id_numbers` number the ids; `refuses_block_loopback` is True where a queue pair cannot be made so;
    `sa_capabilities` are the capability bits of the SA's ClassPortInfo.
    """

    @property
    def clock(self) -> Scheduler: ...
    @property
    def hosts(self) -> Addresses: ...
    @property
    def id_numbers(self) -> Iterator[int]: ...
    @property
    def igmp(self) -> IgmpReporter: ...
    @property
    def log(self) -> Log: ...
    @property
    def queue_pairs(self) -> QueuePairs: ...
    @property
    def refuses_block_loopback(self) -> bool: ...
    @property
    def sa_capabilities(self) -> int: ...

    def sa_client(self, port: Port) -> SaClient:
        """Return the SA client of an InfiniBand port."""


class IdState(Enum):
    """Where an id stands; groups are joined in BOUND and RESOLVED."""

    IDLE = "idle"
    QUERY = "query"
    BOUND = "bound"
    RESOLVED = "resolved"
    REMOVED = "removed"


_MAY_JOIN, _REMOVED = (IdState.BOUND, IdState.RESOLVED), IdState.REMOVED


class QueuedEvent:
    """An event in the queue of a channel. When `owner` ends, the event is taken back."""

    __slots__ = ("answers", "detail", "errno", "id", "membership", "owner", "status", "type", "ud")

    def __init__(
        self,
        type: CmEventType,
        cm_id: CmaId,
        membership: CmaMembership | None = None,
        ud: UdParam | None = None,
        status: int = 0,
        errno: int = 0,
        detail: str = "",
    ) -> None:
        self.type: CmEventType = type
        self.id: CmaId = cm_id
        self.membership: CmaMembership | None = membership
        self.ud: UdParam | None = ud
        self.status: int = status
        self.errno: int = errno
        self.detail: str = detail
        self.owner: CmaId | CmaMembership = cm_id if membership is None else membership
        self.answers: list[tuple[Cause, ...]] | None = None
        """Causes of a failure by the SA's word; None before it was asked."""


class CmaMembership(SaMember):
    """A join of an id, from the call to its leave.

    igmp        True once the membership was announced
    event_mlid  the MLID in its JOIN event, from which the leave detaches the queue pair, if it is attached
    unread      its events in the channel's queue
    """

    __slots__ = ("address", "context", "event_mlid", "id", "igmp", "mgid", "unread")

    def __init__(self, cm_id: CmaId, address: McastAddress, context: object, bits: int, mgid: Gid) -> None:
        self.mgid: Gid = mgid
        self.id: CmaId = cm_id
        self.address: McastAddress = address
        self.context: object = context
        self.bits: int = bits
        self.igmp: bool = False
        self.event_mlid: int | None = None
        self.unread: tuple[QueuedEvent, ...] = ()

    def on_join_result(self, failed: int, record: McMemberRecord | None, why: str) -> None:
        """Queue the event of a join that ended, or of a membership that was lost."""
        if failed or record is None:
            self.id.channel.put(QueuedEvent(_ERROR, self.id, self, None, -failed, failed, why))
        else:
            self.mgid = self.group.mgid
            self.id._joined(self, self.id._ud_of(record))


@dataclass(slots=True, eq=False)
class CmChannel:
    """The event queue of a channel: in order of happening, purged by leave and destroy.

    `on_event` is told that there are more events, or fewer.
    """

    on_event: Callable[[], None] | None = None
    queue: OrderedDict[QueuedEvent, None] = field(default_factory=OrderedDict)

    def put(self, event: QueuedEvent) -> None:
        if event.id.network.log.is_enabled:
            event.id.note_event(event)
        self.queue[event] = None
        event.owner.unread += (event,)
        if self.on_event is not None:
            self.on_event()

    def purge(self, owner: CmaId | CmaMembership) -> None:
        """Take back the unread events of an id itself, or of a membership."""
        if owner.unread:
            for event in owner.unread:
                del self.queue[event]
            owner.unread = ()
            if self.on_event is not None:
                self.on_event()

    def get(self) -> QueuedEvent:
        """The next event, with the effects of fetching it. There must be one."""
        event, _ = self.queue.popitem(last=False)
        owner = event.owner
        owner.unread = owner.unread[1:]
        if self.on_event is not None:
            self.on_event()
        if event.type is _JOINED:
            return event.id.attach_on_retrieval(event)
        if event.type is _RESOLVED:
            event.id.state = IdState.RESOLVED
        return event


class CmaId:
    """An rdma_cm_id on the hosts `hosts`; `interface` is set once it is bound to a device.

    `owner` is the object that events name as their id.
    """

    __slots__ = (
        "channel",
        "groups",
        "hosts",
        "interface",
        "known_group",
        "known_mgid",
        "known_ud",
        "network",
        "number",
        "owner",
        "port_space",
        "qp",
        "source",
        "state",
        "unread",
    )

    def __init__(
        self, network: Network, hosts: frozenset[int], channel: CmChannel, port_space: PortSpace
    ) -> None:
        self.network: Network = network
        self.hosts: frozenset[int] = hosts
        self.channel: CmChannel = channel
        self.port_space: PortSpace = port_space
        self.owner: object = self
        self.number: int = next(network.id_numbers)
        self.state: IdState = IdState.IDLE
        self.interface: Interface | None = None
        self.known_group: tuple[McastAddress | None, int, object] = (None, 0, None)
        """The last address that was asked about, the partition at that time, and the address's group."""
        self.known_mgid: tuple[McastAddress | None, bytes, Gid] = (None, b"", ZERO_GID)
        """The address of the last join, the broadcast MGID then (b"" on RoCE), and the MGID of the join."""
        self.known_ud: tuple[McMemberRecord | None, UdParam | None] = _NO_UD
        """The record of the last group that was joined on InfiniBand, and what its join event had."""
        self.source: IPv4Address | IPv6Address | None = None
        self.qp: Qp | None = None
        self.unread: tuple[QueuedEvent, ...] = ()
        self.groups: dict[McastAddress, CmaMembership] = {}

    # --- bind and resolve ----------------------------------------------------------------

    def bind(self, source: IPv4Address | IPv6Address) -> int:
        """Bind the id to the device with that address.

        The wildcard leaves the id without a device, and so does a loopback address that no device has.
        """
        if self.state is not IdState.IDLE:
            return errno.EINVAL
        interface = None if source.is_unspecified else self.network.hosts.interface(self.hosts, source)
        if interface is None and not (source.is_unspecified or source.is_loopback):
            return errno.EADDRNOTAVAIL
        if interface is not None:
            if self.port_space is PortSpace.IPOIB and not interface.port.is_infiniband:
                return errno.EINVAL
            self._take(interface)
            # The very object, which is compared in a tenth of the time.
            source = next(address for address in interface.addresses if address == source)
        self.state, self.source = IdState.BOUND, source
        return 0

    def resolve(self, group: McastAddress, source: IPv4Address | IPv6Address | None) -> int:
        """Take the device of the source, or of the route to the group; ADDR_RESOLVED follows."""
        if self.state is IdState.IDLE and source is not None and (refused := self.bind(source)):
            return refused
        if self.state not in (IdState.IDLE, IdState.BOUND):
            return errno.EINVAL
        interface = self.interface or self.network.hosts.route(self.hosts, group.address)
        if interface is None:
            return errno.ENETUNREACH
        self._take(interface)
        self.state = IdState.QUERY
        self.source = self.source or interface.ipv4
        self.network.clock.call_later(ADDR_RESOLUTION_NS, self._resolved)
        return 0

    def _take(self, interface: Interface) -> None:
        self.interface = interface
        interface.port.ids[self] = None

    def _resolved(self) -> None:
        if self.state is IdState.QUERY:
            self.channel.put(QueuedEvent(CmEventType.ADDR_RESOLVED, self))

    # --- the QP --------------------------------------------------------------------------

    def create_qp(self, init: QpInit) -> int:
        """Make the id's only queue pair, of a type that goes with the port space.

        UD goes to RTS, RC and UC to INIT.
        """
        if self.state is _REMOVED:
            return errno.ENODEV
        allowed = _UD_TYPES.get(self.port_space, _CONNECTED_TYPES)
        if self.interface is None or self.qp is not None or init.qp_type not in allowed:
            return errno.EINVAL
        port = self.interface.port
        if max(init.max_recv_wr, init.max_send_wr) > port.limits.queue_depth:
            return errno.EINVAL
        if init.block_loopback and self.network.refuses_block_loopback:
            return errno.EOPNOTSUPP
        pkey_index = find_pkey(port.pkeys, self.interface.pkey)
        if pkey_index is None:
            return errno.ENOENT
        self.qp = self.network.queue_pairs.create(port, init, RDMA_UDP_QKEY, pkey_index)
        last = QpState.RTS if init.qp_type is QpType.UD else QpState.INIT
        for state in (QpState.INIT, QpState.RTR, QpState.RTS)[: last.value]:
            self.qp.modify(state)
        return 0

    def destroy_qp(self) -> None:
        if self.qp is not None:
            self.network.queue_pairs.destroy(self.qp)
            self.qp = None

    # --- join ----------------------------------------------------------------------------

    def group_of(self, address: McastAddress) -> object:
        """The MGID that the address leads to on this id, as far as it is known before a join."""
        at = self.interface
        if at is None:
            return address.key
        group = address.key
        if at.port.is_infiniband:
            broadcast = ipoib_broadcast_mgid(at.pkey | FULL_MEMBER)
            group = infiniband_group(address, self.port_space, broadcast)
        self.known_group = (address, at.pkey, group)
        return group

    def join(self, mask: int, flags: int, address: McastAddress, context: object) -> int:
        """rdma_join_multicast_ex: first the library's checks, then the kernel's (K-JOIN-2, SA-ENTRY-1)."""
        refused = _refused_by_library(mask, flags, address) or self._refused_by_kernel(address)
        if refused:
            return refused
        assert self.interface is not None
        join = self._join_infiniband if self.interface.port.is_infiniband else self._join_roce
        return join(address, context, _SEND_ONLY if flags == _SEND_ONLY_FLAG else _FULL)

    def _refused_by_kernel(self, address: McastAddress) -> int:
        if self.state not in _MAY_JOIN:
            return errno.ENXIO if self.state is IdState.REMOVED else errno.EINVAL
        if self.interface is None:
            return errno.EINVAL
        if self.port_space not in _UD_TYPES:
            return errno.EINVAL
        if self.interface.port.is_infiniband:
            return 0 if self.interface.broadcast is not None else errno.EADDRNOTAVAIL
        if not address.key:  # the number of an IP address
            return errno.EINVAL
        return 0 if isinstance(address.address, IPv4Address) else ENOTSUPP

    def _join_roce(self, address: McastAddress, context: object, bits: int) -> int:
        """IGMP goes out in the call itself, the event is there at once (K-EVENT-2)."""
        assert self.interface is not None
        port = self.interface.port
        request, _, mgid = self.known_mgid
        if request is not address:
            mgid = _roce_mgid(address)
            self.known_mgid = (address, b"", mgid)
        membership = self._new_membership(port, address, context, bits, mgid)
        if self.source not in self.interface.addresses:
            self.channel.put(QueuedEvent(_ERROR, self, membership))
            return 0
        if bits == _FULL:
            if refused := self.network.igmp.join(port, mgid):
                del self.groups[address]
                return refused
            membership.igmp = True
        self._joined(membership, _roce_ud(mgid, port.sgid_index(self.source)))
        return 0

    def _join_infiniband(self, address: McastAddress, context: object, bits: int) -> int:
        """A request to the SA, made from the IPoIB broadcast group's record (SA-PATH-2, SA-PATH-3)."""
        assert self.interface is not None
        assert self.interface.broadcast is not None
        port, pattern = self.interface.port, self.interface.broadcast
        request, broadcast, mgid = self.known_mgid
        if request is not address or broadcast is not pattern.mgid:
            mgid = _infiniband_mgid(address, self.port_space, pattern.mgid)
            self.known_mgid = (address, pattern.mgid, mgid)
        mask, record = kernel_join(pattern, mgid, port.gids[0], self.port_space, bits)
        membership = self._new_membership(port, address, context, bits, mgid)
        self.network.sa_client(port).join(membership, mask, record)
        return 0

    def _new_membership(
        self, port: Port, address: McastAddress, context: object, bits: int, mgid: Gid
    ) -> CmaMembership:
        if self.network.log.is_enabled:
            from mcast.backends.model.log_events import JoinAccepted

            self.network.log.note(
                JoinAccepted,
                port=port.name,
                id=self.number,
                qp=None if self.qp is None else self.qp.number,
                address=str(address),
                group=mgid,
                send_only=bits == _SEND_ONLY,
            )
        membership = self.groups[address] = CmaMembership(self, address, context, bits, mgid)
        return membership

    def note_event(self, event: QueuedEvent) -> None:
        """Record an event of this id in the trace."""
        from mcast.backends.model.log_events import EventQueued

        self.network.log.note(
            EventQueued,
            port=None if self.interface is None else self.interface.port.name,
            id=self.number,
            type=event.type.name,
            status=event.status,
            errno=event.errno,
            group=None if event.membership is None else event.membership.mgid,
        )

    def _ud_of(self, record: McMemberRecord) -> UdParam:
        known, ud = self.known_ud
        if known is not record or ud is None:
            ud = _infiniband_ud(record)
            self.known_ud = (record, ud)
        return ud

    def _joined(self, membership: CmaMembership, ud: UdParam) -> None:
        self.channel.put(QueuedEvent(_JOINED, self, membership, ud))

    def attach_on_retrieval(self, event: QueuedEvent) -> QueuedEvent:
        """Attach the queue pair when a JOIN event is fetched, as librdmacm does.

        If that fails, the event becomes an error.
        """
        membership, ud = event.membership, event.ud
        assert membership is not None
        assert ud is not None
        if membership.bits == _SEND_ONLY:
            return event
        lid = membership.event_mlid = ud.destination.dlid
        if self.qp is not None and (failed := self.network.queue_pairs.attach(self.qp, membership.mgid, lid)):
            return QueuedEvent(_ERROR, self, membership, None, -1, failed)
        return event

    def abort(self) -> None:
        """Destroy the id of a fabric that an interrupted change has broken: free its queue pair."""
        if self.qp is not None:
            self.network.queue_pairs.forget(self.qp)
        self.groups.clear()
        self.channel.queue.clear()
        self.qp, self.state = None, IdState.IDLE
        if self.interface is not None:
            self.interface.port.ids.pop(self, None)

    def query_refusal(self, event: QueuedEvent, answered: Callable[[tuple[Cause, ...]], None]) -> bool:
        """Ask the SA why it refused a join, as any program on this host could; False if it refused none.

        `answered` is called with the causes that were found, when the SA has answered the Get.
        """
        member = event.membership
        if member is None or self.interface is None or (event.errno, event.status) != _REFUSED:
            return False
        if member.request is None:
            return False
        port, (mask, request) = self.interface.port, member.request
        client, status = member.group.client, member.refused
        view = PortView(port.pkeys, MTU.code[port.mtu], RATE.code[port.rate])

        def compare(group: McMemberRecord | None) -> None:
            found = refusal_causes(mask, request, group, view, self.network.sa_capabilities)
            named = status not in (None, SaStatus.REQ_INVALID)  # that one says only that something is wrong
            answered(causes_of_status(status.name) if status is not None and named else found)

        client.query(Gid(request.mgid), compare)
        return True

    # --- leave, destroy ------------------------------------------------------------------

    def leave(self, address: McastAddress) -> int:
        """Leave a group of this id: detach, take back unread events, end the membership (LV-1, LV-2)."""
        if self.state is _REMOVED and address in self.groups:
            return errno.ENXIO
        membership = self.groups.pop(address, None)
        if membership is None:
            return errno.EADDRNOTAVAIL if address.family in _KNOWN_FAMILIES else errno.EINVAL
        self._end(membership)
        return 0

    def _end(self, membership: CmaMembership) -> None:
        if membership.unread:
            self.channel.purge(membership)
        lid = membership.event_mlid
        if self.qp is not None and lid is not None and self.qp.attached.get(membership.mgid) == lid:
            self.network.queue_pairs.detach(self.qp, membership.mgid, lid)
        self._give_up(membership)

    def _give_up(self, membership: CmaMembership) -> None:
        """End the port's part in the group, by IGMP leave or SA Delete, if no other id has joined it."""
        assert self.interface is not None
        port = self.interface.port
        if self.network.log.is_enabled:
            from mcast.backends.model.log_events import Leave

            self.network.log.note(Leave, port=port.name, id=self.number, group=membership.mgid)
        if port.is_infiniband:
            membership.group.client.leave(membership)
        elif membership.igmp:
            self.network.igmp.leave(port, membership.mgid)

    def destroy(self) -> None:
        """Leave every group, discard unread events, destroy the queue pair (LV-4)."""
        for membership in self.groups.values():
            if self.state is not IdState.REMOVED:
                self._end(membership)
        self.groups.clear()
        self.channel.purge(self)
        self.destroy_qp()
        if self.interface is not None:
            self.interface.port.ids.pop(self, None)
        self.state = IdState.IDLE

    def device_removed(self) -> None:
        """The device is gone, and its memberships with it; the id gets an event (K-DEVICE-1)."""
        assert self.interface is not None
        for membership in self.groups.values():
            self.channel.purge(membership)
            self._give_up(membership)
        self.channel.purge(self)
        self.state = IdState.REMOVED
        self.channel.put(QueuedEvent(CmEventType.DEVICE_REMOVAL, self, errno=errno.ENODEV))

    def address_changed(self) -> None:
        """The bond below the device has changed its link.

        The program has to act on the event (K-DEVICE-5).
        """
        self.channel.put(QueuedEvent(CmEventType.ADDR_CHANGE, self))


def _refused_by_library(mask: int, flags: int, address: object) -> int:
    """The checks that librdmacm makes itself, in its order."""
    if mask & ~_JOIN_MASK:
        return errno.EOPNOTSUPP
    if mask != _JOIN_MASK:
        return errno.EINVAL
    if not isinstance(address, McastAddress):
        return errno.EINVAL
    if type(address.address) is not IPv4Address and address.family not in _KNOWN_FAMILIES:
        return errno.EINVAL
    return 0 if flags in _FLAGS else errno.EINVAL


# What many memberships have in common is made once, so that they also share it.


@lru_cache(maxsize=4096)
def _infiniband_mgid(address: McastAddress, port_space: PortSpace, broadcast: bytes) -> Gid:
    return infiniband_mgid(address.address, port_space, broadcast)


@lru_cache(maxsize=4096)
def _roce_mgid(address: McastAddress) -> Gid:
    assert not isinstance(address.address, Gid)
    return roce_mgid(address.address)


@lru_cache(maxsize=4096)
def _infiniband_ud(record: McMemberRecord) -> UdParam:
    """Return the UD parameters of a join event, from the record of the group."""
    to = Destination(
        gid=Gid(record.mgid),
        qkey=record.qkey,
        dlid=record.mlid,
        sl=record.sl,
        hop_limit=record.hop_limit,
        traffic_class=record.tclass,
        flow_label=record.flow_label,
        group_mtu=MTU.value[record.mtu],
        mtu_source=MtuSource.SA,
    )
    return UdParam(MULTICAST_QPN, record.qkey, to)


@lru_cache(maxsize=4096)
def _roce_ud(gid: Gid, sgid_index: int) -> UdParam:
    """Return the UD parameters of a join event, for a group whose messages have that source GID."""
    to = Destination(gid=gid, qkey=RDMA_UDP_QKEY, sgid_index=sgid_index, hop_limit=ROCE_HOP_LIMIT)
    return UdParam(MULTICAST_QPN, RDMA_UDP_QKEY, to)
