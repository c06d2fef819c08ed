"""The queue pair: attachments, sending, receiving, registered memory."""

from __future__ import annotations

import errno as E
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from types import MappingProxyType
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar

from mcast.api import (
    Closed,
    Destination,
    DeviceBytes,
    Gid,
    Guard,
    HeaderBodyBatch,
    LinkLayer,
    McastError,
    Message,
    Phase,
    PortEvent,
    QpCounters,
    QpError,
    QpInit,
    QpState,
    QpType,
    QueuePair,
    Refused,
    Region,
    TimestampClock,
    WcStatus,
    mcast_error,
)
from mcast.backends.rdma import completions, memlock, slab
from mcast.backends.rdma.address_handles import AddressHandles
from mcast.backends.rdma.batch import Calls
from mcast.backends.rdma.error_collector import ErrorCollector
from mcast.backends.rdma.native import GONE, IMPOSSIBLE, Context, Native, NativeId, NativeQp
from mcast.backends.rdma.net.links import links
from mcast.backends.rdma.pds import ProtectionDomains
from mcast.backends.rdma.process import OwnedByProcess, Process
from mcast.backends.rdma.region import AnyRegion, DeviceAddresses, RdmaDeviceRegion, RdmaRegion

LINGER = 1.0
"""Maximum number of seconds that a close waits for posted sends, which take microseconds."""

_MTU_INTERVAL = 0.1
"""Seconds between two checks for a new MTU, while messages longer than the smallest MTU are sent."""

_UNBOUNDED = 0xFFFFFFFF
"""In place of a group's MTU where there is none."""

_ASKED_FOR = ("block_loopback", "comp_vector", "moderation", "timestamps")
"""The fields of QpInit that an error names if they were asked for."""

_STATES = frozenset(QpState)
_TO_RTS = (QpState.INIT, QpState.RTR, QpState.RTS)
_FROM_RESET: Mapping[QpState, tuple[QpState, ...]] = {
    QpState.RESET: (),
    QpState.INIT: _TO_RTS[:1],
    QpState.RTR: _TO_RTS[:2],
    QpState.RTS: _TO_RTS,
    QpState.SQD: (*_TO_RTS, QpState.SQD),
    QpState.ERR: (QpState.INIT, QpState.ERR),
}
"""The steps from RESET to a state."""

_REASONS = {
    1: "the completion queue overran (CQ_ERR)",
    2: "the device reported a fatal error of the QP (QP_FATAL)",
    3: "the device refused a request (QP_REQ_ERR)",
    4: "the device reported a violation of access rights (QP_ACCESS_ERR)",
    9: "the device failed (DEVICE_FATAL)",
    GONE: "the device is gone",
    IMPOSSIBLE: "the device's driver reported a completion that cannot be true: update driver and firmware, "
    "and report it to the vendor; reset() to go on",
}
"""ibv_event_type plus 1 -> its meaning."""


P = ParamSpec("P")
T = TypeVar("T")


class QpOwner(Protocol):
    """The part of the id that a queue pair uses."""

    native: Native
    process: Process
    pds: ProtectionDomains
    handle: NativeId
    awaits_qp: bool
    lock: Any
    tables: Any

    @property
    def link_layer(self) -> LinkLayer | None: ...
    def forget_qp(self, qp: RdmaQueuePair) -> None: ...
    def close(self) -> None: ...


class RdmaQueuePair(Calls, OwnedByProcess, QueuePair):
    """A queue pair. `Calls` does the plain cases in C, and this class does the rest.

    The guard is for state, attachments and regions. What only asks the device takes no lock in Python, nor
    do sends to known destinations and receives: in C each checks whether the queue pair is still open, and
    the close waits there until all have left.

    An object is held by its id, and holds nothing, before `make`. Whatever `make` has made when an exception
    ends it is freed by `_close`.
    """

    _handle: NativeQp

    def __init__(self, cm_id: QpOwner, init: QpInit) -> None:
        self._guard = Guard("queue pair")
        self.native: Native = cm_id.native
        self.process: Process = cm_id.process
        self._cm_id, self._init, self._type = cm_id, init, init.qp_type
        self._ref = 0
        """Of the queue pair in C; 0 before there is one."""
        self._memories: dict[int, memoryview | RdmaDeviceRegion] = {}
        self.attached: dict[Gid, int] = {}
        """MGID -> MLID of the attachments.

        Changed by joins too, because librdmacm attaches when a join event is read, and detaches at a leave.
        Changed under the channel's `tables`.
        """
        self.ever_attached: set[tuple[Gid, int]] = set()
        """Attachments that a close undoes if the device says that the queue pair is in use.

        librdmacm does not report whether a leave detached, and an exception may hide whether an attach was
        done.
        """
        self._regions: list[AnyRegion] = []
        self._receiving: AnyRegion | None = None
        """Where messages arrive, if that is memory of the user."""
        self._back: QpState | None = None
        """The state to come back to, where a change of the receive memory failed on its way through RESET."""
        self._mtu, self._mtu_until = ((-1, -1), 0), 0.0

    def make(self, events: int, context: Context) -> None:
        """Make the queue pair; `events` is the descriptor of the channel."""
        native, id, init = self.native.guarded, self._cm_id.handle, self._init
        self._port = native.id_port(id)
        self._context = context
        port = native.query_port(context, self._port)
        plan, size = slab.layout(init, port.active_mtu, port.max_mtu, bool(port.is_ethernet))
        device = native.id_device(id) or "the device"
        plan = completions.with_completion_queues(plan, init, device, native.comp_vectors(context))
        arguments: dict[str, object] = {"qp_type": init.qp_type.name}
        arguments |= {"send": init.max_send_wr, "recv": init.max_recv_wr}
        arguments |= {name: value for name in _ASKED_FOR if (value := getattr(init, name))}
        self._slab = slab.allocate(size, arguments)
        payloads = memoryview(self._slab)[plan.recv_offset : plan.send_offset]
        self._memories[0] = payloads
        self._recv_depth = plan.recv_depth
        why = partial(completions.refusal, device)
        sources = set[Gid]()
        self._ref = self._arm(events, self._memories, sources)
        self._pd = self._cm_id.pds.acquire(context, id, self)
        try:
            self._handle = native.create_qp(id, self._pd, plan, self._slab, self._ref, why, arguments)
        except Refused as refused:
            raise memlock.with_memlock_cause(refused, size) from None
        self._clock = completions.CLOCKS[native.clock(self._handle)]
        self._qp_num = native.qp_num(self._handle)
        self._handles = AddressHandles(self.native, context, self._handle, sources)

    # --- what it is ---

    @property
    def link_layer(self) -> LinkLayer | None:
        return self._cm_id.link_layer

    @property
    def qp_num(self) -> int:
        return self._qp_num

    @property
    def qp_type(self) -> QpType:
        return self._type

    @property
    def state(self) -> QpState:
        self._require_open("state", Phase.MODIFY)
        return self._state(self.native)

    def _state(self, native: Native) -> QpState:
        number = native.query_qp(self._handle)
        if number not in _STATES:
            detail = "the device reports a state that no queue pair has: reset() it"
            native.fail(mcast_error(E.EIO, "state", Phase.MODIFY, None, detail))
        return QpState(number)

    @property
    def max_message_size(self) -> int:
        self._require_open("max_message_size", Phase.SEND)
        now = monotonic()
        if now >= self._mtu_until:
            with self._cm_id.lock:  # without its id the device may be gone
                self._require_open("max_message_size", Phase.SEND)
                changes = self.native.port_changes(self._handle), links.changes()
                before, mtu = self._mtu
                if changes != before:  # asking the port takes longer than sending a message
                    mtu = self.native.query_port(self._context, self._port).active_mtu
                self._limit(
                    mtu, _MTU_INTERVAL
                )  # set first, because a send that finds the rest uses this limit
                self._mtu, self._mtu_until = (changes, mtu), now + _MTU_INTERVAL
        return self._mtu[1]

    @property
    def timestamp_clock(self) -> TimestampClock | None:
        return self._clock

    @property
    def attachments(self) -> Mapping[Gid, int]:
        return MappingProxyType(self.attached)

    @property
    def counters(self) -> QpCounters:
        self._require_open("counters", Phase.RECV)
        return self.native.counters(self._handle)

    # --- state and attachments ---

    def _modify(self, state: QpState) -> None:
        self._back = None
        self._step_to(state)

    def _step_to(self, state: QpState, keeps_failure: bool = False) -> None:
        self.native.guarded.modify_qp(self._handle, state, {"state": state.name}, keeps_failure)

    def _attach_mcast(self, gid: Gid, lid: int) -> None:
        self.ever_attached.add((gid, lid))
        self.native.guarded.attach(self._handle, gid, lid, {"gid": gid, "lid": f"{lid:#x}"})
        with self._cm_id.tables:
            self.attached[gid] = lid

    def _detach_mcast(self, gid: Gid, lid: int) -> None:
        self.native.guarded.detach(self._handle, gid, lid, {"gid": gid, "lid": f"{lid:#x}"})
        self._note_detached(gid, lid)

    def _note_detached(self, gid: Gid, lid: int) -> None:
        with self._cm_id.tables:
            if self.attached.get(gid) == lid:
                del self.attached[gid]

    def _change(self, call: str, phase: Phase, hook: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Carry out a change, then destroy the id if it was closed in the middle of the change."""
        try:
            return super()._change(call, phase, hook, *args, **kwargs)
        finally:
            if self._cm_id.awaits_qp:
                self._cm_id.close()

    def port_events(self) -> tuple[PortEvent, ...]:
        if not self._has_port_events():  # as nearly always
            return ()
        self._require_open("port_events", Phase.EVENT)
        return tuple(map(PortEvent, self.native.port_events(self._handle)))

    # --- sending ---

    def _send(
        self,
        destination: Destination,
        payloads: Sequence[bytes | memoryview | DeviceBytes],
        imm: int | None,
        timeout: float | None,
    ) -> None:
        self._require_ud()
        if not payloads:
            return
        listed = [self._place_of(one) if isinstance(one, DeviceBytes) else one for one in payloads]
        self._with_address_handle(
            destination, lambda at, qp, qkey: self._post(at, qp, qkey, listed, imm, timeout)
        )

    def _send_header_body(
        self, destination: Destination, batch: HeaderBodyBatch, imm: int | None, timeout: float | None
    ) -> None:
        self._require_ud()
        heads, bodies = batch.heads, batch.bodies
        self._with_address_handle(
            destination,
            lambda at, qp, qkey: self._post_header_body(at, qp, qkey, heads, bodies, imm, timeout),
        )

    def _require_ud(self) -> None:
        if self._type is not QpType.UD:
            raise mcast_error(E.EINVAL, "send", Phase.SEND, {"qp_type": self._type.name})

    def _with_address_handle(self, destination: Destination, post: Callable[[int, int, int], bool]) -> None:
        """Call it with the address handle's number, the QP number and the Q_Key, until the handle is one."""
        qp_num, qkey = destination.qp_num, destination.qkey
        while True:
            serial = self._handles.get(destination)
            self._aim(destination, serial, qp_num, qkey, destination.group_mtu or _UNBOUNDED)
            if post(serial, qp_num, qkey):
                return
            self._handles.forget(destination, serial)

    def _place_of(self, payload: DeviceBytes) -> tuple[int, int]:
        """Address and length for the device."""
        region = payload.region
        if not isinstance(region, RdmaDeviceRegion) or region not in self._regions:
            raise ValueError("this memory is not registered with this queue pair: call its register_dmabuf")
        return region.start + payload.offset, payload.nbytes

    def _fail(self, call: str, result: int, posted: int, count: int) -> NoReturn:
        """Called from C: raise what the result says; `posted` of the call's `count` messages were posted."""
        phase = Phase.RECV if call == "recv" else Phase.SEND
        error = self._error(call, phase, result, posted, count)
        error.posted = posted
        try:
            raise error
        finally:
            del error  # else the frame would keep the error, and the error the frames with the payloads

    def _error(self, call: str, phase: Phase, result: int, posted: int, count: int) -> McastError:
        if result == -E.EIO:
            return self._qp_error(call, phase)
        if result == -E.EBADF:
            return self._closed_error(call, phase)
        if result:
            refused = f"the device took {posted} of {count} messages, and refused the next" if posted else ""
            return mcast_error(-result, call, phase, {"qp_num": self._qp_num}, refused)
        if posted < count:
            detail = f"{posted} of {count} messages were posted in time: the send queue is full"
        elif count:
            detail = f"all {count} messages were posted; flush() waits until their memory is free again"
        else:
            detail = "the device has not yet taken all that was posted"
        return mcast_error(E.ETIMEDOUT, call, phase, {"qp_num": self._qp_num}, detail)

    def _closed_error(self, call: str, phase: Phase) -> McastError:
        try:
            self._require_open(call, phase)
        except McastError as error:
            return error
        return Closed(type(self).__name__, call, phase)

    def send_fileno(self) -> int:
        self._require_open("send_fileno", Phase.SEND)
        return self.native.send_fd(self._handle)

    # --- receiving ---

    def fileno(self) -> int:
        self._require_open("fileno", Phase.RECV)
        return self.native.recv_fd(self._handle)

    def _qp_error(self, call: str, phase: Phase) -> QpError:
        number, reason, unsent = self.native.failure(self._handle)
        # ERR without failed work, because the user asked for ERR: all that is posted is flushed
        status = WcStatus(number) or WcStatus.WR_FLUSH_ERR
        detail = f"the QP is in ERR: {_REASONS.get(reason, status.name)}"
        if unsent:
            detail += f"; {unsent} messages that had been posted were not sent"
        error = QpError(status, call, phase, {"qp_num": self._qp_num}, detail)
        error.unsent = unsent
        return error

    def _recv_one(self, timeout: float | None) -> Message | None:
        if self._receiving is not None and self._receiving.is_device:
            self._refuse_copy()
        return super()._recv_one(timeout)

    # --- registered memory ---

    def _register(
        self, buffer: memoryview, recv_slot: int | None, relaxed_ordering: bool, constant: bool
    ) -> Region:
        self._require_idle("register", recv_slot)
        region = RdmaRegion(self, buffer, constant)
        self._regions.append(region)
        given, size = {"bytes": buffer.nbytes}, buffer.nbytes
        try:
            self.native.guarded.register(self._pd, buffer, relaxed_ordering, region.ref, given)
        except Refused as refused:
            self._regions.remove(region)
            raise memlock.with_memlock_cause(refused, size) from None
        self._use(region, recv_slot, buffer)
        return region

    def _register_dmabuf(
        self, fd: int, nbytes: int, offset: int, recv_slot: int | None, relaxed_ordering: bool
    ) -> RdmaDeviceRegion:
        given = {"fd": fd, "nbytes": nbytes, "offset": offset}
        self._require_idle("register_dmabuf", recv_slot)
        addresses, writable = DeviceAddresses(self, nbytes, offset), recv_slot is not None
        region = RdmaDeviceRegion(self, addresses)
        self._regions.append(region)
        how = nbytes, offset, addresses.start, writable, relaxed_ordering, region.ref, given
        try:
            self.native.guarded.register_dmabuf(self._pd, fd, *how)
        except Refused:
            self._regions.remove(region)
            raise
        self._use(region, recv_slot, region)
        return region

    def _require_idle(self, call: str, recv_slot: int | None) -> None:
        """Where messages arrive can be changed only while there is none, and receives can be posted."""
        if recv_slot is not None and self._state(self.native.guarded) is QpState.ERR:
            raise Refused(self._qp_error(call, Phase.REGISTER))
        if recv_slot is not None and self.native.is_receiving(self._handle):
            detail = "messages are queued or leased: register receive memory before the QP joins"
            raise Refused(mcast_error(E.EBUSY, call, Phase.REGISTER, None, detail))

    def _use(self, region: AnyRegion, recv_slot: int | None, memory: memoryview | RdmaDeviceRegion) -> None:
        """Send from the region, and with `recv_slot` receive into it.

        `memory` is the memory that batches lease.
        """
        try:
            if recv_slot is not None:
                self._receiving = region  # from here on its close goes back to the QP's own memory
                count = min((region.end - region.start) // recv_slot, self._recv_depth)
                generation = self._receive_into(region, recv_slot, count)
                self._forget_user_memory()
                self._memories[generation] = memory
            self._tell_regions()
        except Refused as refused:
            try:
                region._close()
            except Refused:
                pass  # the queue pair's close ends it
            raise refused from refused.__cause__

    def forget_region(self, region: AnyRegion) -> bool:
        """End a region's registration; True when it has ended.

        If that fails, it is tried again by another close, at the latest at the queue pair's end. A broken
        queue pair may use the region until then.
        """
        if region not in self._regions or self._closed or not self.process.is_here:
            return True
        if self._guard.was_broken:
            return False
        self._tell_regions(without=region)
        # what is under way may still read it, unless it ends on the way through RESET
        if not self.native.drain(self._handle, LINGER) and region is not self._receiving:
            raise Refused(self._error("close", Phase.REGISTER, 0, 0, 0))
        if region is self._receiving:
            self._receive_into(None)
            self._receiving = None
            self._forget_user_memory()
        self.native.guarded.deregister(region.ref)
        self._regions.remove(region)
        return True

    def _tell_regions(self, without: AnyRegion | None = None) -> None:
        regions = [one for one in self._regions if one is not without]
        rows = [(one.start, one.end, one.lkey, one.is_device, one.is_constant) for one in regions]
        self.native.guarded.set_regions(self._handle, rows)

    def _forget_user_memory(self) -> None:
        for generation in [number for number in self._memories if number]:
            del self._memories[generation]

    def _receive_into(self, region: AnyRegion | None, slot: int = 0, count: int = 0) -> int:
        """Go through RESET, where nothing is posted, and back to the same state.

        What fails on the way is made good by the next call.
        """
        native = self.native.guarded
        state = self._state(native)
        if self._back is None:
            self._back = state if state in _FROM_RESET else QpState.RTS
        if state is QpState.SQD:
            self._step_to(QpState.ERR)  # as `reset` does
        self._step_to(QpState.RESET, keeps_failure=self._back is QpState.ERR)
        self._arrive(region is not None and region.is_device)
        if region is None:
            generation = native.receive_into(self._handle, None)
        else:
            mr = native.mr(region.ref)
            generation = native.receive_into(self._handle, mr, region.start, slot, count)
        for step in _FROM_RESET[self._back]:
            self._step_to(step)
        self._back = None
        return generation

    # --- the end ---

    def _close(self) -> None:
        """Detach, destroy the queue pair, free its resources. Views of received payloads stay valid.

        Every step is tried, whatever fails; closing again tries the failed steps. The calls of other threads
        end with Closed.
        """
        if self._freed:
            return
        self._closed = True
        if not self.process.is_here:
            return
        errors = ErrorCollector()
        if self._ref:
            errors.attempt(self._close_qp)
        for region in list(self._regions):
            if errors.attempt(self.native.guarded.deregister, region.ref):
                self._regions.remove(region)
        errors.attempt(self._cm_id.pds.release, self)
        errors.done()
        self._freed = True
        self._cm_id.forget_qp(self)

    def _close_qp(self) -> None:
        native = self.native.guarded
        handle = native.qp(self._ref)  # a null pointer, which C passes over, if it was not made
        for gid, lid in list(self.attached.items()):
            native.try_to_detach(handle, gid, lid)  # the device may be gone, and its attachments with it
            self._note_detached(gid, lid)
        try:
            native.close_qp(handle, LINGER)
        except Refused as refused:
            if getattr(refused.error, "errno", None) != E.EBUSY:
                raise
            for gid, lid in list(self.ever_attached):
                native.detach_late(handle, gid, lid)
            native.close_qp(handle, LINGER)
