"""Fabric resources of an endpoint: a channel, an id and a queue pair on a port, and their groups.

The id and the queue pair are replaced when the device was lost; the channel stays. Nothing here waits or
decides by policy.
"""

from __future__ import annotations

import errno as E
import logging
from collections.abc import Callable, Mapping
from functools import partial
from ipaddress import IPv4Address, IPv6Address

from mcast.api import (
    Backend,
    Closed,
    CmId,
    Destination,
    EventChannel,
    InvalidArgument,
    JoinAttrEx,
    LinkLayer,
    McastError,
    NotSupported,
    Phase,
    QpCounters,
    QpInit,
    QueuePair,
    ReentrantCall,
    Refused,
    Region,
    mcast_error,
)
from mcast.endpoint.membership import EndpointGroup, GroupIndex
from mcast.endpoint.policy import LoopbackPolicy
from mcast.endpoint.ports import LocalPort
from mcast.endpoint.settings import Settings
from mcast.endpoint.waiting import call_provider
from mcast.wire.addresses import LocalAddress
from mcast.wire.probe import PROBE_SIZE

logger: logging.Logger = logging.getLogger("mcast")

WAKE_GROUPS = {4: "224.0.0.1", 6: "ff02::1"}
"""IP version -> a group whose address can always be resolved. Nothing is joined, and nothing sent."""


class PortResources:
    """An endpoint's channel, id, queue pair and groups.

    `find_port` finds the port again after its device was lost, or raises ValueError while it is not there.
    """

    def __init__(
        self, backend: Backend, local_port: LocalPort, find_port: Callable[[], LocalPort], settings: Settings
    ) -> None:
        self.local_port: LocalPort = local_port
        self.backend: Backend = backend
        self.settings: Settings = settings
        self._find_port = find_port
        self.channel: EventChannel = call_provider(backend.event_channel)
        self.group_index: GroupIndex = GroupIndex()
        self.closed: bool = False
        self.on_id_destroyed: Callable[[], None] = lambda: None
        self.blocking_loopback: bool = False
        self.isolation_logged: bool = False
        """True if the log says that this endpoint is alone on its fabric."""
        self._counted: tuple[QpCounters, QueuePair | None] = (
            QpCounters(0, 0, 0, 0, 0, 0, settings.receive_depth, dropped_mtu=0),
            None,
        )
        """Counters of destroyed queue pairs, added up, and the queue pair that counts now."""
        self.id: CmId
        self.qp: QueuePair
        try:
            self._open_id()
        except BaseException:
            self._close_channel()
            raise

    def _close_channel(self) -> None:
        """Close the channel with its ids, for an endpoint that could not be opened."""
        try:
            self.channel.close()
        except McastError as error:
            logger.debug("%s: the channel goes with its backend: %s", self.name, error)

    # --- the id and its QP -------------------------------------------------------------------

    def _open_id(self) -> None:
        """Make a new id on the endpoint's port, with a queue pair that receives.

        The channel owns the id: one that is half made goes with the channel.
        """
        cm_id = call_provider(self.channel.create_id)
        cm_id.on_destroyed = lambda: self.on_id_destroyed()
        try:
            call_provider(cm_id.bind_addr, self.local_port.address)
            self.qp = self._make_qp(cm_id)
        except Refused:
            self.destroy(cm_id)
            raise
        self.id = cm_id
        self._counted = self._counted[0], self.qp
        cm_id.on_destroying = partial(self._keep_counters, self.qp)

    def _make_qp(self, cm_id: CmId) -> QueuePair:
        """Make the queue pair.

        With loopback "off" one whose device does not return own messages, if the device can.
        """
        settings = self.settings
        init = QpInit(
            max_recv_wr=settings.receive_depth,
            max_send_wr=settings.send_depth,
            max_recv_size=self._receive_size,
            busy_poll=settings.busy_poll,
            comp_vector=settings.comp_vector,
            moderation=settings.moderation,
            timestamps=settings.timestamps,
        )
        self.blocking_loopback = False
        if settings.loopback is LoopbackPolicy.OFF:
            blocking = init.model_copy(update={"block_loopback": True})
            try:
                qp = call_provider(cm_id.create_qp, blocking)
            except Refused as refused:
                if not isinstance(refused.error, NotSupported | InvalidArgument):
                    raise
                logger.info("%s: the device cannot keep own messages back, so a filter does", self.name)
            else:
                self.blocking_loopback = True
                return qp
        return call_provider(cm_id.create_qp, init)

    def destroy(self, cm_id: CmId) -> None:
        """Destroy an id; one that the device does not let go of is freed with its channel."""
        try:
            cm_id.destroy()
        except McastError as error:  # a device that is gone refuses calls on its objects, perhaps for a while
            logger.debug("%s: the id goes with its channel: %s", self.name, error)

    def replace_id(self) -> None:
        """Make a new id and queue pair, in no group, on the port that has the address now."""
        self.destroy(self.id)
        try:
            self.local_port = call_provider(self._find_port)
        except ValueError as absent:
            raise Refused(mcast_error(E.EADDRNOTAVAIL, "bind_addr", Phase.BIND, None, str(absent))) from None
        self._open_id()

    def lend(self, buffer: memoryview) -> Region | None:
        """Register a buffer that nobody changes with the queue pair of now: payloads in there are not copied.

        None if that is refused, for the process may pin no more memory, say. The region ends with the queue
        pair.
        """
        try:
            return self.qp.register(buffer, constant=True)
        except McastError as error:
            logger.debug("%s: what is sent is copied: %s", self.name, error)
            return None

    @property
    def port_name(self) -> str:
        return f"{self.local_port.device.name}/{self.local_port.port.port_num}"

    @property
    def name(self) -> str:
        """Port and address, as an endpoint is called in the log."""
        return f"{self.port_name}, {self.local_port.address}"

    def check_address(self) -> McastError | None:
        """The port's addresses have changed: look whether the groups can be used on. If not, return why."""
        about = {"address": self.local_port.address, "port": self.port_name}
        try:
            found = self._find_port()
        except ValueError as absent:
            return mcast_error(E.EADDRNOTAVAIL, "port_events", Phase.EVENT, about, str(absent))
        except McastError as error:  # the groups may be well all the same
            logger.warning("%s: addresses have changed, and cannot be read: %s", self.name, error)
            return None
        before = self.local_port
        self.local_port = found
        if _where(found) != _where(before):
            detail = f"the address is {found.address} on {self.port_name} now"
            return mcast_error(E.ENETRESET, "port_events", Phase.EVENT, about, detail)
        ways = [
            group.destination for group in self.group_index.groups.values() if group.destination is not None
        ]
        if all(found.port.gids.get(to.sgid_index) == before.port.gids.get(to.sgid_index) for to in ways):
            return None
        detail = "the GID that messages were sent from is not where it was"
        return mcast_error(E.ENETRESET, "port_events", Phase.EVENT, about, detail)

    @property
    def is_closed(self) -> bool:
        """True if the endpoint was closed, or its backend, which closes the channel."""
        return self.closed or self.channel.closed

    def require_open(self, call: str, phase: Phase) -> None:
        """Refuse a call once the endpoint or its channel is closed."""
        if self.is_closed:
            raise Refused(Closed("Endpoint", call, phase))

    def close(self) -> None:
        """Leave every group and free all resources."""
        self.closed = True
        self.group_index.end()
        self.channel.close()

    @property
    def max_message_size(self) -> int:
        """Maximum payload in bytes: what one MTU of this port carries, or less if the user said so."""
        return self._room_in(self.local_port.port.active_mtu if self.qp.closed else self.qp.max_message_size)

    def max_message_to(self, qp: QueuePair, destination: Destination) -> int:
        """The largest payload in bytes to that destination, where the group's MTU may be smaller."""
        return self._room_in(qp.max_message_to(destination))

    @property
    def _receive_size(self) -> int | None:
        """The size in bytes of a receive; None: one MTU."""
        most = self.settings.max_message
        return None if most is None else max(most + self.settings.header_size, PROBE_SIZE)

    @property
    def max_receive_size(self) -> int:
        """Maximum size in bytes of a message that the queue pair receives, headers included."""
        mtu, size = self.qp.max_message_size, self._receive_size
        return mtu if size is None else min(mtu, size)

    def _room_in(self, mtu: int) -> int:
        """Return the payload bytes in a message of `mtu` bytes."""
        limit = mtu - self.settings.header_size
        return limit if self.settings.max_message is None else min(limit, self.settings.max_message)

    def counters(self) -> QpCounters:
        """The counters of all queue pairs so far, added up; `recv_free` is that of the present one."""
        past, qp = self._counted  # both at once, because another thread may destroy the queue pair meanwhile
        if qp is not None and (now := _counters_of(qp)) is not None:
            return _added(past, now)
        return self._counted[0]

    def _keep_counters(self, qp: QueuePair) -> None:
        """Add up what a queue pair has counted that is about to be destroyed."""
        past, _ = self._counted
        now = _counters_of(qp)  # None in a forked child, where no counter can be read
        self._counted = (past if now is None else _added(past, now)), None

    def port_counters(self) -> Mapping[str, int]:
        """The device's counters of the port; empty once the backend is closed."""
        try:
            return self.backend.port_counters(self.local_port.device.name, self.local_port.port.port_num)
        except McastError:  # Closed, or what became of a backend that was interrupted
            return {}

    def wake(self) -> None:
        """Cause an event, so that a thread that sleeps in a receive looks again."""
        cm_id: CmId | None = None
        try:
            cm_id = call_provider(self.channel.create_id)
            call_provider(
                cm_id.resolve_addr, WAKE_GROUPS[self.local_port.address.version], self.local_port.address
            )
        except Refused as refused:
            if cm_id is not None:
                self.destroy(cm_id)
            logger.debug("%s: the receiving thread could not be woken: %s", self.name, refused.error)

    # --- groups --------------------------------------------------------------------------------

    def enter(self, group: EndpointGroup) -> None:
        """Start to join a new group."""
        self.group_index.require_room(group.address, self.local_port.device)
        self._require_source(group)
        self.ask_to_join(group)
        self.group_index.enter(group)

    def _require_source(self, group: EndpointGroup) -> None:
        """Refuse an IPv4 group on RoCE that would be sent to from an IPv6 GID.

        The stack joins it all the same, and the first send puts the queue pair into ERR (K-JOIN-12,
        K-DATA-15), as does the first answer to a probe. The rejoin policy would join again for ever.
        """
        local_port, address = self.local_port, group.address.address
        is_roce = local_port.port.link_layer is LinkLayer.ETHERNET
        if not (is_roce and isinstance(address, IPv4Address) and isinstance(local_port.address, IPv6Address)):
            return
        others = [one for one in local_port.port.addresses if isinstance(one, IPv4Address)]
        todo = f"bind to {others[0]} instead" if others else "the port has none: give it an IPv4 address"
        detail = (
            f"{local_port.address} cannot send to an IPv4 group, because RoCE sends to it from an IPv4 "
            f"address; {todo}"
        )
        error = mcast_error(E.EADDRNOTAVAIL, "join", Phase.JOIN, {"group": group.address}, detail)
        error.link_layer = LinkLayer.ETHERNET
        raise Refused(error)

    def ask_to_join(self, group: EndpointGroup) -> None:
        """Start to join. The outcome is an event."""
        make = JoinAttrEx.send_only if group.send_only else JoinAttrEx.full_member
        call_provider(self.id.join_multicast_ex, make(group.address), group)

    def note_joined(self, group: EndpointGroup, destination: Destination) -> None:
        """Note that the group is joined, and that messages go there in the class of the settings."""
        settings = self.settings
        marked = destination.marked(settings.traffic_class, settings.service_level)
        self.group_index.note_joined(group, marked)

    def undo_join(self, group: EndpointGroup, destination: Destination) -> None:
        """Leave a group that has the MGID of another one, and keep the queue pair attached for that one."""
        self.leave_quietly(group)
        if not self.group_index.by_mgid[destination.gid].send_only:
            call_provider(self.qp.attach_mcast, destination.gid, destination.dlid)

    def leave(self, group: EndpointGroup) -> bool:
        """Leave the group; return whether it was one of the endpoint's."""
        self.leave_quietly(group)  # first: it refuses a handler's call amid another one of the provider
        known = self.group_index.leave(group)
        if self.group_index.ended and not self.channel.closed:
            self.group_index.update_ended()
        return known

    def leave_quietly(self, group: EndpointGroup) -> None:
        """Leave the group, if the stack still knows the membership; an error is only logged."""
        try:
            self.id.leave_multicast(group.address)
        except ReentrantCall as error:
            raise Refused(error) from None
        except McastError as error:
            logger.debug("%s: leaving %s: %s", self.name, group.address, error)
        self.group_index.detach(group)


def _counters_of(qp: QueuePair) -> QpCounters | None:
    try:
        return qp.counters
    except McastError:
        return None


def _where(local_port: LocalPort) -> tuple[str, int, LocalAddress]:
    return local_port.device.name, local_port.port.port_num, local_port.address


def _added(past: QpCounters, now: QpCounters) -> QpCounters:
    """Return the counters of two queue pairs, added up.

    `recv_free` is the second's, `recv_low_water` the lower one.
    """

    def plus(one: int | None, other: int | None) -> int | None:
        return None if one is None or other is None else one + other

    return QpCounters(
        past.sent + now.sent,
        past.received + now.received,
        plus(past.dropped_no_receive, now.dropped_no_receive),
        plus(past.dropped_too_long, now.dropped_too_long),
        plus(past.dropped_qkey, now.dropped_qkey),
        now.recv_free,
        min(past.recv_low_water, now.recv_low_water),
        past.recv_empty + now.recv_empty,
        past.unsent + now.unsent,
        plus(past.dropped_mtu, now.dropped_mtu),
        past.dropped_reset + now.dropped_reset,
        past.dropped_invalid + now.dropped_invalid,
    )
