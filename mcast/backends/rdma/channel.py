"""The event channel: events in, values out."""

from __future__ import annotations

import errno as E
import itertools
import os
import threading
from collections.abc import Callable
from functools import lru_cache

from mcast.api import (
    CmEvent,
    CmEventType,
    CmId,
    Destination,
    EventChannel,
    Gid,
    McastAddress,
    Phase,
    PortSpace,
    UdParam,
)
from mcast.backends.rdma.cm_id import Join, RdmaCmId
from mcast.backends.rdma.deadline import Deadline, held
from mcast.backends.rdma.native import Event, Native
from mcast.backends.rdma.pds import ProtectionDomains
from mcast.backends.rdma.process import Process, Shared

_REFUSED = (E.EINVAL, -E.EINVAL)
"""Errno and status of a MULTICAST_ERROR by which an SA, and not a failed attach, ended the join."""


_AT_QKEY = Event._fields.index("qkey")


@lru_cache(maxsize=1024)
def _ud_param(
    qp_num: int,
    qkey: int,
    flow_label: int,
    dlid: int,
    sl: int,
    port_num: int,
    is_global: int,
    sgid_index: int,
    hop_limit: int,
    traffic_class: int,
    dgid: bytes,
) -> UdParam:
    """Values of values: a group that is joined again has the same."""
    destination = Destination(
        gid=Gid(dgid),
        qp_num=qp_num,
        qkey=qkey,
        dlid=dlid,
        sl=sl,
        port_num=port_num,
        sgid_index=sgid_index,
        hop_limit=hop_limit,
        traffic_class=traffic_class,
        flow_label=flow_label,
        is_global=bool(is_global),
    )
    return UdParam(qp_num=qp_num, qkey=qkey, destination=destination)


class RdmaChannel(Shared, EventChannel):
    """`lock` is held while an event is taken and booked, a membership changed, an object ended.

    No call made with it held blocks on another thread: events are acked in the call that takes them.
    """

    def __init__(
        self, native: Native, process: Process, pds: ProtectionDomains, on_removal: Callable[[], None]
    ) -> None:
        self.native, self.process, self.pds, self._on_removal = native, process, pds, on_removal
        self.lock = threading.RLock()
        self._waiting = threading.RLock()
        self._handle = native.open_channel()
        self._room = native.room_for_event()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._tokens = itertools.count(1)
        self._ids: dict[int, RdmaCmId] = {}
        self._joins: dict[int, Join] = {}

    def fileno(self) -> int:
        with self._in_use("fileno", Phase.EVENT):
            return self.native.channel_fd(self._handle)

    @property
    def pending(self) -> bool:
        with self._in_use("pending", Phase.EVENT):
            return self.native.wait_event(self._handle, self._wake, 0)

    def _create_id(self, port_space: PortSpace) -> CmId:
        with self._in_use("create_id", Phase.OPEN):
            token = next(self._tokens)
            handle = self.native.create_id(self._handle, token, port_space)
            cm_id = RdmaCmId(self, token, handle, port_space)
            self._ids[token] = cm_id
            return cm_id

    def forget_id(self, cm_id: RdmaCmId) -> None:
        """The id is about to be destroyed."""
        self._ids.pop(cm_id.token, None)

    def new_join(self, address: McastAddress, receives: bool, context: object) -> Join:
        """A join whose event will carry its token."""
        join = Join(next(self._tokens), address, receives, context)
        self._joins[join.token] = join
        return join

    def forget_join(self, join: Join) -> None:
        """No event of it can come any more."""
        self._joins.pop(join.token, None)

    def _get_event(self, timeout: float | None) -> CmEvent | None:
        found = self._take()  # without a clock, which may cost as much as the call
        if found is not None or timeout == 0:
            return found
        deadline = Deadline(timeout)
        with held(self._waiting, deadline) as mine:
            while mine:
                found = self._take()
                if found is not None or deadline.over():
                    return found
                self.native.wait_event(self._handle, self._wake, deadline.slice_ns())
        return None

    def _take(self) -> CmEvent | None:
        """The event that waits, if one does."""
        with self.lock:
            self._require_open("get_event", Phase.EVENT)
            event = self.native.take_event(self._handle, self._room)
            booked = None if event is None else self._book(event)
        return None if booked is None else self._explained(booked, event)

    def _book(self, event: Event) -> CmEvent:
        """Note what librdmacm did when the event was read; make the value."""
        kind = CmEventType(event.type)
        cm_id = self._ids.get(event.id_token)
        join = self._joins.get(event.join_token)
        if kind is CmEventType.DEVICE_REMOVAL:
            self._on_removal()
            if cm_id is not None:
                cm_id.device_is_gone = True
        return CmEvent(
            type=kind,
            status=event.status,
            errno=event.errno,
            context=None if join is None else join.context,
            id=cm_id,
            ud=self._joined(event, cm_id, join) if kind is CmEventType.MULTICAST_JOIN else None,
        )

    def _explained(self, booked: CmEvent, event: Event | None) -> CmEvent:
        """The event, with what the SA says of a join that it refused. The SA is asked without the lock."""
        if event is None or (booked.errno, booked.status) != _REFUSED or booked.id is None:
            return booked
        join = self._joins.get(event.join_token)
        found = () if join is None else booked.id.why_refused(join)
        return booked._replace(found=found)

    def _joined(self, event: Event, cm_id: RdmaCmId | None, join: Join | None) -> UdParam:
        ud = _ud_param(event.qp_num, *event[_AT_QKEY:])
        group = ud.destination
        if join is not None and join.receives:
            join.attachment = group.gid, group.dlid
            if cm_id is not None and cm_id.qp is not None:
                cm_id.qp.note_attached(*join.attachment)
        return ud

    def close(self) -> None:
        """Destroy the ids, wake who waits for an event, close the channel."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
        if not self.process.is_here:
            return
        os.eventfd_write(self._wake, 1)
        for cm_id in list(self._ids.values()):
            cm_id.destroy()
        with self._waiting, self.lock:
            self.native.close_channel(self._handle)
            os.close(self._wake)
