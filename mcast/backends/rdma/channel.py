"""The event channel: events in, values out."""

from __future__ import annotations

import errno as E
import itertools
from collections.abc import Callable
from functools import lru_cache, partial

from mcast.api import (
    CmEvent,
    CmEventType,
    CmId,
    Destination,
    EventChannel,
    Gid,
    Phase,
    PortSpace,
    UdParam,
)
from mcast.backends.rdma.calls import wait_event
from mcast.backends.rdma.cm_id import RdmaCmId, RdmaJoin
from mcast.backends.rdma.deadline import Deadline
from mcast.backends.rdma.ending import Ending
from mcast.backends.rdma.native import EVENT, Native, NativeEvent, Ud
from mcast.backends.rdma.pds import ProtectionDomains
from mcast.backends.rdma.process import Process, Shared
from mcast.interrupts import Lock, interruptible, uninterrupted
from mcast.wire.addresses import GID_BYTES, ZERO_GID

_REFUSED = (E.EINVAL, -E.EINVAL)
"""Errno and status of a MULTICAST_ERROR by which an SA, and not a failed attach, ended the join."""

_KINDS = {int(kind): kind for kind in CmEventType}

_MULTICAST_JOIN = int(CmEventType.MULTICAST_JOIN)
_DEVICE_REMOVAL = int(CmEventType.DEVICE_REMOVAL)

_event_of: Callable[[tuple[object, ...]], CmEvent] = partial(tuple.__new__, CmEvent)
"""Makes an event of all its fields, without the frame of CmEvent itself."""


@lru_cache(maxsize=4096)
def _ud_param(raw: bytes) -> UdParam:
    """The values in an event's bytes, kept because a group that is joined again has the same."""
    destination = _path(raw[:-GID_BYTES]).model_copy(update={"gid": Gid(raw[-GID_BYTES:])})
    return UdParam(destination.qp_num, destination.qkey, destination)


@lru_cache(maxsize=64)
def _path(raw: bytes) -> Destination:
    """All but the MGID, kept because the groups of an Ethernet port have the same: a copy of a checked value
    takes half the time of a new one."""
    fields = Ud.unpack(raw + ZERO_GID)._asdict()
    gid, is_global = Gid(fields.pop("dgid")), bool(fields.pop("is_global"))
    return Destination(gid=gid, is_global=is_global, **fields)


class RdmaChannel(Shared, EventChannel):
    """The lock is held while an event is taken and noted, a membership changed, or an object destroyed.

    No call made with the lock held waits for another thread: events are acknowledged in the call that takes
    them, and a call that waits for an event waits without the lock.
    """

    def __init__(
        self, native: Native, process: Process, pds: ProtectionDomains, on_removal: Callable[[], None]
    ) -> None:
        self._on_removal = on_removal
        self.native: Native = native
        self.process: Process = process
        self.pds: ProtectionDomains = pds
        self.lock: Lock = Lock()
        self.locked: uninterrupted = uninterrupted(self.lock)
        self._handle = native.open_channel()
        self._address = native.address(self._handle)
        self._room, self._room_bytes = native.room_for_event()
        self.tokens: itertools.count[int] = itertools.count(1)
        self._ids: dict[int, RdmaCmId] = {}
        self.joins: dict[int, RdmaJoin] = {}
        """By the token that their events carry."""

    def fileno(self) -> int:
        with self._in_use("fileno", Phase.EVENT):
            return self.native.channel_fd(self._handle)

    @property
    def pending(self) -> bool:
        with self.lock:  # as `_in_use`, in a third of the time
            if self._closed or not self.process.is_here:
                self._require_open("pending", Phase.EVENT)
            return self.native.has_event(self._handle)

    def _create_id(self, port_space: PortSpace) -> CmId:
        with self._in_use("create_id", Phase.OPEN):
            token = next(self.tokens)
            handle = self.native.create_id(self._handle, token, port_space)
            cm_id = RdmaCmId(self, token, handle, port_space)
            self._ids[token] = cm_id
            return cm_id

    def forget_id(self, cm_id: RdmaCmId) -> None:
        """The id is destroyed."""
        self._ids.pop(cm_id.token, None)

    def _get_event(self, timeout: float | None) -> CmEvent | None:
        found = self._take()  # without a clock, which may cost as much as the call
        if found is not None or timeout == 0:
            return found
        deadline = Deadline(timeout)
        waits = True
        while found is None and waits:
            # On the descriptor, for a close wakes no one else (K-DEVICE-7). Of several threads that see it
            # readable one gets the event, and the others sleep again.
            with interruptible():
                waits = wait_event(self._address, deadline.left()) is not False
            found = self._take()
        return found

    def _take(self) -> CmEvent | None:
        """Take the event that waits, if there is one."""
        with self.lock:
            if self._closed or not self.process.is_here:
                self._require_open("get_event", Phase.EVENT)
            taken = self.native.take_event(self._handle, self._room)
            if taken <= 0:
                self.native.check_take(taken)
                return None
            event: NativeEvent = EVENT.unpack(self._room_bytes)
            booked = self._book(event)
        if booked.errno:
            return self._explained(booked, event)
        ud = booked.ud
        if ud is None or not ud.destination.dlid or booked.id is None:  # an MLID is InfiniBand's alone
            return booked
        bounded: CmEvent = booked.id.bounded(
            booked, ud
        )  # without the lock, as above, because the SA may be asked
        return bounded

    def _book(self, event: NativeEvent) -> CmEvent:
        """Note what librdmacm did when the event was read, and make the event's value."""
        number, status, errno, id_token, join_token, raw = event
        cm_id, join = self._ids.get(id_token), self.joins.get(join_token)
        if number == _DEVICE_REMOVAL:
            self._on_removal()
            if cm_id is not None:
                cm_id.device_is_gone = True
            errno = E.ENODEV  # librdmacm gives a status to no removal
        ud = _ud_param(raw) if number == _MULTICAST_JOIN else None
        if ud is not None and join is not None and join.receives:
            group = ud.destination
            join.attachment = group.gid, group.dlid
            if cm_id is not None:
                cm_id.note_attached(group.gid, group.dlid)
        kind, context = _KINDS.get(number, CmEventType.UNKNOWN), None if join is None else join.context
        return _event_of((kind, status, errno, context, cm_id, ud, "", ()))

    def _explained(self, booked: CmEvent, event: NativeEvent) -> CmEvent:
        """The event, with the reason of a failed join: of the SA, or of a driver without multicast.

        The SA is asked without the lock.
        """
        if booked.errno == E.EOPNOTSUPP and booked.id is not None:
            return booked._replace(detail=booked.id.why_not_attached())
        if (booked.errno, booked.status) != _REFUSED or booked.id is None:
            return booked
        _, _, _, _, join_token, _ = event
        join = self.joins.get(join_token)
        found = () if join is None else booked.id.why_refused(join)
        return booked._replace(found=found)

    def _close(self) -> None:
        """Destroy the ids, end the calls that wait for an event, close the channel.

        What failed is tried again.
        """
        with self.locked:
            self._closed = True
            if not self.process.is_here:
                return
            ending = Ending()
            for cm_id in list(self._ids.values()):
                ending.attempt(cm_id._close)
            self.native.close_channel(
                self._handle, not all(cm_id.is_destroyed for cm_id in self._ids.values())
            )
            ending.done()
