"""The event channel: events in, values out."""

from __future__ import annotations

import errno as E
import itertools
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from mcast.api import (
    CmEvent,
    CmEventType,
    CmId,
    Destination,
    EventChannel,
    Gid,
    Guard,
    Phase,
    PortSpace,
    Refused,
    UdParam,
)
from mcast.backends.rdma.calls import wait_event
from mcast.backends.rdma.cm_id import RdmaCmId, RdmaJoin
from mcast.backends.rdma.deadline import Deadline
from mcast.backends.rdma.error_collector import ErrorCollector
from mcast.backends.rdma.native import EVENT, Native, NativeChannel, NativeEvent, Ud
from mcast.backends.rdma.pds import ProtectionDomains
from mcast.backends.rdma.process import OwnedByProcess, Process
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
    """Path record of a group, except the MGID.

    Cached because the groups of an Ethernet port have the same: a copy of a checked value takes half the time
    of a new one.
    """
    fields = Ud.unpack(raw + ZERO_GID)._asdict()
    gid, is_global = Gid(fields.pop("dgid")), bool(fields.pop("is_global"))
    return Destination(gid=gid, is_global=is_global, **fields)


class RdmaChannel(OwnedByProcess, EventChannel):
    """The event channel. It is held by its backend, and holds nothing, before `make`.

    Locks are taken in this order: of the backend, a channel, an id, its queue pair; then `tables`, under
    which an event is taken and noted and a membership ends, so that each sees the other whole. No call made
    with a lock held waits for another thread, but for a close, which waits until all have left the queue
    pair in C: events are acknowledged in the call that takes them, and a call that waits for an event waits
    without a lock, on the descriptor.

    A fetched event stays in `_raw_event` until its effects are noted. If an exception prevents that, the next
    call returns the event. The reason for a refused join is asked for afterwards; an exception meanwhile
    loses the event.
    """

    handle: NativeChannel
    descriptor: int

    def __init__(
        self,
        native: Native,
        process: Process,
        pds: ProtectionDomains,
        on_removal: Callable[[], None],
        on_closed: Callable[[RdmaChannel], None],
    ) -> None:
        self._guard = Guard("event channel")
        self._on_removal, self._on_closed = on_removal, on_closed
        self.native: Native = native
        self.process: Process = process
        self.pds: ProtectionDomains = pds
        self.tables: Any = threading.RLock()
        self._ref = native.channel_ref()
        self._raw_event, self._event_bytes = native.event_buffer()
        self.tokens: itertools.count[int] = itertools.count(1)
        self._ids: dict[int, RdmaCmId] = {}
        self.joins: dict[int, RdmaJoin] = {}
        """By the token that their events carry."""

    def make(self) -> None:
        """Open the channel."""
        self.native.guarded.open_channel(self._ref)
        self.handle = self.native.channel(self._ref)
        self._address = self.native.address(self.handle)
        self.descriptor = self.native.channel_fd(self.handle)

    def fileno(self) -> int:
        with self._guard.lock:
            self._require_whole("fileno", Phase.EVENT)
            return self.descriptor

    @property
    def pending(self) -> bool:
        with self._guard.lock:
            if self._closed or not self.process.is_here:
                self._require_open("pending", Phase.EVENT)
            return bool(self._raw_event.is_taken) or self.native.has_event(self.handle)

    def _create_id(self, port_space: PortSpace) -> CmId:
        cm_id = RdmaCmId(self, next(self.tokens), port_space)
        self._ids[cm_id.token] = cm_id
        try:
            cm_id.make()
        except Refused:
            del self._ids[cm_id.token]
            raise
        return cm_id

    def forget_join(self, token: int) -> None:
        """The membership has ended, and with it an event that was taken and not returned; under `tables`."""
        self.joins.pop(token, None)
        raw = self._raw_event
        if raw.is_taken and raw.join_token == token:
            self.native.forget_event(raw)

    def forget_id(self, cm_id: RdmaCmId) -> None:
        """The id is destroyed, and the channel with the last one, if it was to be closed."""
        self._ids.pop(cm_id.token, None)
        with self.tables:
            if self._raw_event.is_taken and self._raw_event.id_token == cm_id.token:
                self.native.forget_event(self._raw_event)
        if self._closed:
            self._end()

    def _get_event(self, timeout: float | None) -> CmEvent | None:
        found = self._take()  # without a clock, which may cost as much as the call
        if found is not None or timeout == 0:
            return found
        deadline = Deadline(timeout)
        waits = True
        while found is None and waits:
            # On the descriptor, for a close wakes no one else (K-DEVICE-7). Of several threads that see it
            # readable one gets the event, and the others sleep again.
            waits = wait_event(self._address, deadline.left()) is not False
            found = self._take()
        return found

    def _take(self) -> CmEvent | None:
        """Take the event that waits, if there is one."""
        with self._guard.lock:
            if self._closed or not self.process.is_here:
                self._require_open("get_event", Phase.EVENT)
            if self._guard.amid:
                self._guard.refuse("get_event", Phase.EVENT)
            with self.tables:
                taken = self.native.take_event(self.handle, self._raw_event)
                if taken <= 0:
                    self.native.check_take(taken)
                    return None
                event: NativeEvent = EVENT.unpack(self._event_bytes)
                made = self._convert(event)
                self._raw_event.is_taken = 0  # as forget_event, in a third of the time
        if made.errno:
            return self._with_causes(made, event)
        ud = made.ud
        if ud is None or not ud.destination.dlid or made.id is None:  # an MLID is InfiniBand's alone
            return made
        bounded: CmEvent = made.id.with_group_mtu(
            made, ud
        )  # without the lock, as above, because the SA may be asked
        return bounded

    def _convert(self, event: NativeEvent) -> CmEvent:
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

    def _with_causes(self, made: CmEvent, event: NativeEvent) -> CmEvent:
        """The event, with the reason of a failed join: of the SA, or of a driver without multicast.

        The SA is asked without the lock.
        """
        if made.errno == E.EOPNOTSUPP and made.id is not None:
            return made._replace(detail=made.id.why_not_attached())
        if (made.errno, made.status) != _REFUSED or made.id is None:
            return made
        _, _, _, _, join_token, _ = event
        join = self.joins.get(join_token)
        found = () if join is None else made.id.why_refused(join)
        return made._replace(found=found)

    def _close(self) -> None:
        """Destroy the ids, end the calls that wait for an event, close the channel.

        What failed is tried again.
        """
        if self._freed:
            return
        self._closed = True
        if not self.process.is_here:
            return
        errors = ErrorCollector()
        for cm_id in list(self._ids.values()):
            errors.attempt(cm_id._guard.close, cm_id._close)
        self._end()
        errors.done()

    def _end(self) -> None:
        """Close the channel, unless an id needs it."""
        with self.tables:
            needed = any(not cm_id.is_destroyed for cm_id in self._ids.values())
            self.native.close_channel(self.native.channel(self._ref), needed)
            if not self._ids:
                self._freed = True
                self._on_closed(self)
