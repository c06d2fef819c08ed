"""The communication id: binding, joining, leaving, and its one queue pair."""

from __future__ import annotations

import errno as E
from ipaddress import IPv4Address, IPv6Address
from itertools import count
from typing import Any, Protocol

from mcast.api import (
    Cause,
    CmEvent,
    CmId,
    Gid,
    Guard,
    JoinAttrEx,
    JoinFlag,
    LinkLayer,
    McastAddress,
    McastError,
    Phase,
    PortSpace,
    QpInit,
    QueuePair,
    Refused,
    UdParam,
    UnusableDevice,
    mcast_error,
)
from mcast.backends.rdma import sockaddr
from mcast.backends.rdma.devices import link_layer_of, no_multicast, survey
from mcast.backends.rdma.error_collector import ErrorCollector
from mcast.backends.rdma.native import Native, NativeChannel, NativeId
from mcast.backends.rdma.net.ipoib import IpoibInterface, interfaces_of
from mcast.backends.rdma.pds import ProtectionDomains
from mcast.backends.rdma.process import OwnedByProcess, Process
from mcast.backends.rdma.qp import RdmaQueuePair
from mcast.backends.rdma.sa.group_mtu import mtu_of
from mcast.backends.rdma.sa.refusal import find_causes, netdevs_with
from mcast.wire.mapping import infiniband_group, ipoib_broadcast_mgid
from mcast.wire.partition import FULL_MEMBER

_NOTHING_LEFT = frozenset({E.EADDRNOTAVAIL, E.EINVAL})
"""Errnos of a leave that found no membership. After any other errno librdmacm has dropped the membership."""


_LONGEST_MS = 0x7FFFFFFF
"""The largest timeout in ms, because it is an int in C."""


class RdmaJoin:
    """One membership of an id.

    `token` finds the membership when its event arrives; `sockaddr` is its address.
    """

    __slots__ = ("address", "attachment", "context", "receives", "sockaddr", "token")

    def __init__(
        self, token: int, address: McastAddress, sockaddr: bytes | None, receives: bool, context: object
    ) -> None:
        self.token: int = token
        self.address: McastAddress = address
        self.sockaddr: bytes | None = sockaddr
        self.receives: bool = receives
        self.context: object = context
        self.attachment: tuple[Gid, int] | None = None
        """Attachment that librdmacm undoes at the leave; known once the event was read."""


class IdOwner(Protocol):
    """The part of the channel that an id uses; `joins` maps the token in an event to its join.

    `tables` is the lock under which an event is taken and noted, and a membership ends.
    """

    native: Native
    process: Process
    handle: NativeChannel
    descriptor: int
    tables: Any
    pds: ProtectionDomains
    tokens: count[int]
    joins: dict[int, RdmaJoin]

    def forget_join(self, token: int) -> None: ...
    def forget_id(self, cm_id: RdmaCmId) -> None: ...


class RdmaCmId(OwnedByProcess, CmId):
    """An id. It is held by its channel, and holds nothing, before `make`."""

    handle: NativeId

    def __init__(self, channel: IdOwner, token: int, port_space: PortSpace) -> None:
        super().__init__()
        self._guard = Guard("id")
        self.lock: Any = self._guard.lock
        self.native: Native = channel.native
        self.process: Process = channel.process
        self.pds: ProtectionDomains = channel.pds
        self.token: int = token
        self.channel: IdOwner = channel
        self.tables: Any = channel.tables
        self._ref = self.native.id_ref()
        self._port_space = port_space
        self._source: IPv4Address | IPv6Address | None = None
        self._qp: RdmaQueuePair | None = None
        self._qps: list[RdmaQueuePair] = []
        """The queue pairs that are not closed completely. The next close carries on with them."""
        self._broadcast: bytes | None = None
        """Broadcast group from which `_group_of` makes MGIDs, once it is known."""
        self._joins: dict[object, RdmaJoin] = {}
        """By group; whatever the port, there is one membership of each (G-JOIN)."""
        self._known_layer: tuple[object, LinkLayer | None] = None, None
        """The last port and its link layer, kept because reading the file costs more than a join."""
        self.is_destroyed: bool = False
        self.awaits_qp: bool = False
        """True if a destroy came in the middle of a call of the queue pair, and goes on after it."""
        self.device_is_gone = False
        """True if DEVICE_REMOVAL was read. The kernel removes the device when no id holds it any more."""

    def make(self) -> None:
        """Make the id."""
        self.native.guarded.create_id(self.channel.handle, self.token, self._port_space, self._ref)
        self.handle = self.native.id(self._ref)

    @property
    def device(self) -> str | None:
        with self.lock:
            self._require_whole("device", Phase.BIND)
            return self.native.id_device(self.handle)

    @property
    def link_layer(self) -> LinkLayer | None:
        with self.lock:
            device = None if self._closed else self.native.id_device(self.handle)
            if device is None:
                return None
            place = device, self.native.id_port(self.handle)
            if place != self._known_layer[0]:
                self._known_layer = place, link_layer_of(*place)
            return self._known_layer[1]

    def why_refused(self, join: RdmaJoin) -> tuple[Cause, ...]:
        """Return the causes of a refused join, found by asking the SA; () if the SA cannot be asked."""
        if self.link_layer is not LinkLayer.INFINIBAND:
            return ()
        with self.lock:
            if self._closed:
                return ()
            device, port = self.native.id_device(self.handle), self.native.id_port(self.handle)
            interface = self._ipoib_interface()
        broadcast = None if interface is None else interface.broadcast
        return find_causes(device or "", port, join.address, self._port_space, not join.receives, broadcast)

    def why_not_attached(self) -> str:
        """Return that the device's driver has no multicast; "" if it is not known to have none."""
        with self.lock:
            device = None if self._closed else self.native.id_device(self.handle)
        why = "" if device is None else no_multicast(device)
        return f"{device} has no multicast, for {why}" if why else ""

    def with_group_mtu(self, event: CmEvent, ud: UdParam) -> CmEvent:
        """The event of a join on InfiniBand, with the MTU of its group."""
        with self.lock:
            context = None if self._closed else self.native.id_context(self.handle)
            if context is None:
                return event
            device, port = self.native.id_device(self.handle), self.native.id_port(self.handle)
            interface = self._ipoib_interface()
            try:
                port_mtu = self.native.query_port(context, port).active_mtu
            except McastError:  # the device is gone, which another event says
                return event
        to = ud.destination
        found = mtu_of(to.gid, device or "", port, port_mtu, interface)
        if found is None:
            return event
        mtu, source = found
        to = to.model_copy(update={"group_mtu": mtu, "mtu_source": source})
        return event._replace(ud=ud._replace(destination=to))

    def _ipoib_interface(self) -> IpoibInterface | None:
        """The interface that the id is bound to; with the lock held."""
        context, port = self.native.id_context(self.handle), self.native.id_port(self.handle)
        if context is None:
            return None
        gids = {Gid(gid) for number, _, _, gid in self.native.query_gids(context) if number == port}
        names = netdevs_with(self.native.netdev_addresses(), self._source)
        return next(iter(interfaces_of(gids, names)), None)

    def _group_of(self, address: McastAddress) -> object:
        """On InfiniBand the MGID that the kernel makes of the address, in IPoIB's default scope."""
        broadcast = self._broadcast
        if broadcast is None:
            layer = self.link_layer
            if self._known_layer[0] is not None:  # else there is no port yet, and a join is refused
                broadcast = self._broadcast = self._find_broadcast(layer)
                self._keys_are_groups = not broadcast
        return infiniband_group(address, self._port_space, broadcast) if broadcast else address.key

    def _find_broadcast(self, layer: LinkLayer | None) -> bytes:
        """The MGID of the port's IPoIB broadcast group; b"" on Ethernet, and on a port that says nothing."""
        if layer is not LinkLayer.INFINIBAND:
            return b""
        with self.lock:
            if self._closed:
                return b""
            return ipoib_broadcast_mgid(self.native.id_pkey(self.handle) | FULL_MEMBER)

    @property
    def qp(self) -> RdmaQueuePair | None:
        return self._qp

    def _bind_addr(self, src: IPv4Address | IPv6Address) -> None:
        try:
            self.native.guarded.bind_addr(self.handle, sockaddr.source(src), {"src": src})
        except Refused as refused:
            raise self._left_out(src, refused) from None
        self._source = src

    def _left_out(self, src: IPv4Address | IPv6Address, refused: Refused) -> Refused:
        """The refusal, or the reason why the device with that address cannot be used."""
        left_out: tuple[UnusableDevice, ...] = ()
        try:
            left_out = survey(self.native).unusable
        except McastError:
            pass  # why the devices cannot be listed would hide this error
        for device in left_out:
            if src in device.addresses:
                return Refused(device.error("bind_addr", {"src": src}))
        return refused

    def _resolve_addr(self, dst: McastAddress, src: IPv4Address | IPv6Address | None, timeout: float) -> None:
        source = None if src is None else sockaddr.source(src)
        destination = sockaddr.group(dst)
        milliseconds = int(min(timeout * 1000, _LONGEST_MS))
        given = {"dst": dst, "src": src}
        self.native.guarded.resolve_addr(self.handle, source, destination, milliseconds, given)
        self._source = src or self._source

    def _create_qp(self, init: QpInit) -> QueuePair:
        context = self.native.id_context(self.handle)
        if context is None:
            detail = "the id is bound to no device"
            raise Refused(mcast_error(E.EINVAL, "create_qp", Phase.CREATE_QP, None, detail))
        qp = RdmaQueuePair(self, init)
        self._qps.append(qp)
        try:
            qp.make(self.channel.descriptor, context)
        except Refused:
            try:
                qp._close()
            except Refused:
                pass  # it is freed later; why there is no queue pair says more
            raise
        self._qp = qp
        return qp

    def note_attached(self, gid: Gid, lid: int) -> None:
        """Note that librdmacm attached the queue pair, if there is one, when it read the join's event.

        Called under `tables`.
        """
        if (qp := self._qp) is not None:
            qp.ever_attached.add((gid, lid))
            qp.attached[gid] = lid

    def forget_qp(self, qp: RdmaQueuePair) -> None:
        """The QP is closed completely."""
        if self._qp is qp:
            self._qp = None
        if qp in self._qps:
            self._qps.remove(qp)

    def _join_multicast(self, addr: McastAddress, context: object) -> None:
        join = self._note_join(addr, True, context)
        if result := self.native.join(self.handle, join.sockaddr, join.token):
            self._forget_join(join)
            self.native.guarded.check_join(result, addr)

    def _join_multicast_ex(self, attr: JoinAttrEx, context: object) -> None:
        addr, mask, flags = attr.addr, int(attr.comp_mask), int(attr.join_flags)
        join = self._note_join(addr, flags == JoinFlag.FULLMEMBER, context)
        try:
            self.native.guarded.join_ex(self.handle, mask, flags, join.sockaddr, join.token, addr)
        except Refused:
            self._forget_join(join)
            raise

    def _note_join(self, addr: McastAddress, receives: bool, context: object) -> RdmaJoin:
        token = next(self.channel.tokens)
        join = RdmaJoin(token, addr, sockaddr.group(addr), receives, context)
        self._joins[_key(addr)] = self.channel.joins[token] = join
        return join

    def _forget_join(self, join: RdmaJoin) -> None:
        if self._joins.get(_key(join.address)) is join:
            del self._joins[_key(join.address)]
        self.channel.forget_join(join.token)

    def _leave_multicast(self, addr: McastAddress) -> None:
        if result := self._leave_group(addr):
            self.native.guarded.check_leave(result, addr)

    def _leave_group(self, addr: McastAddress) -> int:
        join = self._joins.get(addr.key)
        raw = join.sockaddr if join is not None and join.address is addr else sockaddr.group(addr)
        with self.tables:
            result = self.native.leave(self.handle, raw)
            if join is not None and -result not in _NOTHING_LEFT:
                del self._joins[addr.key]
                self.channel.forget_join(join.token)  # no event of it can come any more
                if join.attachment and (qp := self._qp) is not None:
                    gid, lid = join.attachment
                    if qp.attached.get(gid) == lid:
                        del qp.attached[gid]
        return result

    def _close(self) -> None:
        """Leave, destroy the queue pair and the id; what failed before is tried again.

        A second thread that destroys the id waits until all is done.
        """
        if not self._freed:
            super()._close()
        elif self._qps or not self.is_destroyed:
            self._destroy()

    def _destroy(self) -> None:
        if not self.process.is_here:
            return
        for join in list(self._joins.values()):
            # also a join that failed holds a reference; a removed device answers ENXIO
            self._leave_group(join.address)
        errors = ErrorCollector()
        for qp in list(self._qps):
            errors.attempt(qp._guard.close, qp._close)
        self.awaits_qp = any(not qp.closed for qp in self._qps)
        if self.awaits_qp:
            return
        self.is_destroyed = errors.attempt(self.native.guarded.destroy_id, self.native.id(self._ref))
        if self.is_destroyed and not self._qps:
            self.channel.forget_id(self)
        if self.device_is_gone:
            errors.attempt(self.native.guarded.sync_devices)
        errors.done()


def _key(address: McastAddress) -> int | None:
    """Return the address without its port; None for what the kernel refuses as no address (K-JOIN-5)."""
    return getattr(address, "key", None)
