"""The queue pair: attachments, sending, receiving, registered memory."""

from __future__ import annotations

import errno as E
import threading
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING

from mcast.api import (
    Batch,
    Destination,
    Gid,
    LinkLayer,
    McastError,
    Phase,
    QpCounters,
    QpError,
    QpInit,
    QpState,
    QpType,
    QueuePair,
    Region,
    WcStatus,
    mcast_error,
)
from mcast.backends.rdma import memlock, slab
from mcast.backends.rdma.address_handles import AddressHandles
from mcast.backends.rdma.batch import RdmaBatch
from mcast.backends.rdma.calls import Calls
from mcast.backends.rdma.deadline import SLICE, Deadline, held
from mcast.backends.rdma.native import Context, Native, Pd, Pointer
from mcast.backends.rdma.process import Shared
from mcast.backends.rdma.region import RdmaRegion

if TYPE_CHECKING:
    from mcast.backends.rdma.cm_id import RdmaCmId

_GRACE = 5.0
"""Seconds that a device may take to complete what it was given, beyond the caller's timeout."""

_MTU_LASTS = 0.1
"""Seconds; no event tells of a new MTU, and asking takes longer than sending a message."""

_STEPS = (QpState.INIT, QpState.RTR, QpState.RTS)


class RdmaQueuePair(Calls, Shared, QueuePair):
    """What `Calls` does in C when nothing is in the way, and all the rest here.

    Locks, always taken in this order: the channel's (attachments, close), `_receiving`, `_sending`. The calls
    in C take none of them, but closing waits for them.
    """

    def __init__(self, cm_id: RdmaCmId, init: QpInit, context: Context, pd: Pd) -> None:
        self.native: Native = cm_id.native
        self.process, self.lock = cm_id.process, cm_id.lock
        self._cm_id, self._context, self._pd, self._type = cm_id, context, pd, init.qp_type
        self._port = self.native.id_port(cm_id.handle)
        port = self.native.query_port(context, self._port)
        plan, size = slab.layout(init, port.active_mtu, port.max_mtu)
        self._slab = slab.allocate(size)
        arguments: dict[str, object] = {"qp_type": init.qp_type.name}
        arguments |= {"send": init.max_send_wr, "recv": init.max_recv_wr}
        if init.block_loopback:
            arguments["block_loopback"] = True
        with memlock.explained(size):
            self._handle = self.native.create_qp(cm_id.handle, pd, plan, self._slab, arguments)
        self._qp_num = self.native.qp_num(self._handle)
        self._recv_depth = plan.recv_depth
        payloads = memoryview(self._slab)[plan.recv_offset : plan.send_offset]
        self._memories = {0: payloads}
        self._attachments: dict[Gid, int] = {}
        self._regions: list[RdmaRegion] = []
        self._handles = AddressHandles(self.native, context, pd)
        self._handles_are_stale = False
        self._receiving, self._sending = threading.RLock(), threading.RLock()
        self._mtu, self._mtu_until = 0, 0.0
        address = self.native.address(self._handle)
        self._arm(address, cm_id.channel.fileno(), self._memories, self._handles.sources)

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
        with self._in_use("state", Phase.MODIFY):
            return QpState(self.native.query_qp(self._handle))

    @property
    def max_message_size(self) -> int:
        self._require_open("max_message_size", Phase.SEND)
        now = monotonic()
        if now >= self._mtu_until:
            with self._in_use("max_message_size", Phase.SEND):
                self._mtu = self.native.query_port(self._context, self._port).active_mtu
            self._mtu_until = now + _MTU_LASTS
            self._limit(self._mtu, _MTU_LASTS)
        return self._mtu

    @property
    def attachments(self) -> Mapping[Gid, int]:
        return MappingProxyType(self._attachments)

    @property
    def counters(self) -> QpCounters:
        with self._in_use("counters", Phase.RECV):
            sent, received, free, low, empty = self.native.counters(self._handle)
        return QpCounters(sent, received, None, None, None, free, low, empty)

    # --- state and attachments ---

    def _modify(self, state: QpState) -> None:
        with self._in_use("modify", Phase.MODIFY):
            self.native.modify_qp(self._handle, state, {"state": state.name})
        # A handle may name a source address that is gone, which may be why there is a reset at all.
        if state is QpState.RESET:
            self._handles_are_stale = True
            self._aim(None, 0, 0, 0)

    def _attach_mcast(self, gid: Gid, lid: int) -> None:
        with self._in_use("attach_mcast", Phase.ATTACH):
            self.native.attach(self._handle, gid, lid, {"gid": gid, "lid": f"{lid:#x}"})
            self.note_attached(gid, lid)

    def _detach_mcast(self, gid: Gid, lid: int) -> None:
        with self._in_use("detach_mcast", Phase.DETACH):
            self.native.detach(self._handle, gid, lid, {"gid": gid, "lid": f"{lid:#x}"})
            self.note_detached(gid, lid)

    def note_attached(self, gid: Gid, lid: int) -> None:
        """The QP is attached now; librdmacm itself does it when a join event is read."""
        self._attachments[gid] = lid

    def note_detached(self, gid: Gid, lid: int) -> None:
        """The QP is detached now; librdmacm itself does it in a leave."""
        if self._attachments.get(gid) == lid:
            del self._attachments[gid]

    # --- sending ---

    def _send(
        self,
        destination: Destination,
        payloads: Sequence[bytes | memoryview],
        imm: int | None,
        timeout: float | None,
    ) -> None:
        if self._type is not QpType.UD:
            raise mcast_error(E.EINVAL, "send", Phase.SEND, {"qp_type": self._type.name})
        if not payloads:
            return
        deadline = Deadline(timeout)
        with held(self._sending, deadline) as mine:
            if not mine:
                raise mcast_error(E.ETIMEDOUT, "send", Phase.SEND, None, "another thread is sending")
            self._require_open("send", Phase.SEND)
            if self._handles_are_stale:
                self._handles.clear()
                self._handles_are_stale = False
            handle = self._handles.get(destination)
            self._aim(destination, self.native.address(handle), destination.qp_num, destination.qkey)
            to = (handle, destination.qp_num, destination.qkey)
            lengths = array("I", map(len, payloads))
            if self._regions:
                addresses = array("L", map(self.native.address_of, payloads))
                lkeys = array("q", map(self._lkey_of, addresses, lengths))
                job, keep = self.native.send_job(*to, imm, lengths, None, addresses, lkeys)
            else:
                job, keep = self.native.send_job(*to, imm, lengths, b"".join(payloads), None, None)
            try:
                self._finish(job, len(payloads), deadline)
            except QpError:
                raise
            except BaseException:
                self._drain()
                raise
            finally:
                del keep

    def _lkey_of(self, address: int, length: int) -> int:
        """Of the region that the payload lies in; -1 for none."""
        for region in self._regions:
            if region.start <= address and address + length <= region.end:
                return region.lkey
        return -1

    def _drain(self) -> None:
        """What is under way may still read the payloads: wait for it."""
        if not self._closed:
            self.native.drain_sends(self._handle, int(_GRACE * 1e9))

    def _finish(self, job: Pointer, count: int, deadline: Deadline) -> None:
        """Until all is posted, at most to the deadline; then until the device has completed it."""
        while True:
            posted = job.posted == count
            result = self.native.send(self._handle, job, int(SLICE * 1e9) if posted else deadline.slice_ns())
            if result == 1:
                return
            if result == -E.EIO:
                raise self._qp_error("send", Phase.SEND)
            self._require_open("send", Phase.SEND)
            if deadline.over(_GRACE if job.posted == count else 0):
                detail = f"{job.posted} of {count} messages were posted in time"
                raise mcast_error(E.ETIMEDOUT, "send", Phase.SEND, None, detail)

    def _finish_send(self, end: int, timeout: float | None, result: int) -> None:
        """Called from C: what was posted up to `end` is not complete, as `result` says (0: not yet)."""
        deadline = Deadline(timeout)
        try:
            while result != 1:
                if result == -E.EIO:
                    raise self._qp_error("send", Phase.SEND)
                if result not in (0, -E.EINTR):
                    raise mcast_error(-result, "send", Phase.SEND)
                self._require_open("send", Phase.SEND)
                if deadline.over(_GRACE):
                    raise mcast_error(E.ETIMEDOUT, "send", Phase.SEND, None, "the device did not complete it")
                result = self.native.wait_sent(self._handle, end, int(SLICE * 1e9))
        except QpError:
            raise
        except BaseException:
            self._drain()
            raise

    # --- receiving ---

    def fileno(self) -> int:
        with self._in_use("fileno", Phase.RECV):
            return self.native.recv_fd(self._handle)

    def _recv(self, max: int, timeout: float | None, events: bool) -> Batch:
        deadline = Deadline(timeout)
        with held(self._receiving, deadline) as mine:
            while mine:
                self._require_open("recv", Phase.RECV)
                found = self._run(max, events, deadline.slice_ns())
                if isinstance(found, RdmaBatch):
                    return found
                if found == -E.EIO:
                    raise self._qp_error("recv", Phase.RECV)
                if deadline.over() or found == -E.EAGAIN:
                    break
                if found == 0 and not self._closed:
                    # With no receive posted nothing is flushed: only asking shows an ERR.
                    self.native.query_qp(self._handle)
                elif found not in (0, -E.EINTR):
                    raise mcast_error(-found, "recv", Phase.RECV)
        return self._no_messages()

    def _qp_error(self, call: str, phase: Phase) -> QpError:
        status = WcStatus(self.native.failure(self._handle))
        # ERR without any failed work: the user asked for it, and whatever is posted is flushed
        return QpError(status or WcStatus.WR_FLUSH_ERR, call, phase, {"qp_num": self._qp_num})

    # --- registered memory ---

    def _register(self, buffer: memoryview, recv_slot: int | None) -> Region:
        with self._in_use("register", Phase.REGISTER):
            if recv_slot is not None and self.native.is_receiving(self._handle):
                detail = "messages are queued or leased: register receive memory before the QP joins"
                raise mcast_error(E.EBUSY, "register", Phase.REGISTER, None, detail)
            with memlock.explained(buffer.nbytes):
                mr = self.native.register(self._pd, buffer, {"bytes": buffer.nbytes})
            region = RdmaRegion(self, buffer, mr, recv_slot is not None)
            self._regions.append(region)
            if recv_slot is not None:
                count = buffer.nbytes // recv_slot
                generation = self._receive_into(region, recv_slot, count)
                self._forget_user_memory()
                self._memories[generation] = buffer
            self._tell_regions()
        return region

    def forget_region(self, region: RdmaRegion) -> None:
        """End a region's registration, unless the QP has ended it already."""
        with self.lock:
            if region not in self._regions or not self.process.is_here:
                return
            self._regions.remove(region)
            self._tell_regions()
            with self._sending:
                if region.receives:
                    self._receive_into(None)
                    self._forget_user_memory()
                self.native.deregister(region.mr)

    def _tell_regions(self) -> None:
        self._set_regions([(region.start, region.end, region.lkey) for region in self._regions])

    def _forget_user_memory(self) -> None:
        for generation in [number for number in self._memories if number]:
            del self._memories[generation]

    def _receive_into(self, region: RdmaRegion | None, room: int = 0, count: int = 0) -> int:
        """Go through RESET, where nothing is posted, and back; a QP in ERR comes back to RTS."""
        state = self.state
        self._modify(QpState.RESET)
        if region is None:
            generation = self.native.receive_into(self._handle, None)
        else:
            generation = self.native.receive_into(self._handle, region.mr, region.start, room, count)
        back = state if state in (QpState.RESET, *_STEPS) else QpState.RTS
        for step in _STEPS:
            if step <= back:
                self._modify(step)
        return generation

    # --- the end ---

    def close(self) -> None:
        """Detach, destroy the QP, free what it used. Views of received payloads stay valid."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            if not self.process.is_here:
                return
            self._disarm()
            self.native.wake(self._handle)
            with self._receiving, self._sending:
                self._free()

    def _free(self) -> None:
        for gid, lid in self._attachments.items():
            with suppress(McastError):  # the device may be gone, and its attachments with it
                self.native.detach(self._handle, gid, lid)
        self._attachments.clear()
        self._handles.clear()
        try:
            self.native.destroy_qp(self._handle)
        finally:
            for region in self._regions:
                self.native.deregister(region.mr)
            self._regions.clear()
            self._cm_id.qp_is_gone(self._context)
