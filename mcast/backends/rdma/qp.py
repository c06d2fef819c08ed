"""The queue pair: attachments, sending, receiving, registered memory."""

from __future__ import annotations

import errno as E
import threading
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING

from mcast.api import (
    Batch,
    Destination,
    Gid,
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
from mcast.backends.rdma import slab
from mcast.backends.rdma.address_handles import AddressHandles
from mcast.backends.rdma.batch import RECORD, RdmaBatch
from mcast.backends.rdma.deadline import SLICE, Deadline, held
from mcast.backends.rdma.native import NO_FD, Context, Native, Pd, Pointer
from mcast.backends.rdma.process import Shared
from mcast.backends.rdma.region import RdmaRegion

if TYPE_CHECKING:
    from mcast.backends.rdma.cm_id import RdmaCmId

_GRACE = 5.0
"""Seconds that a device may take to complete what it was given, beyond the caller's timeout."""

_MTU_LASTS = 0.1
"""Seconds; no event tells of a new MTU, and asking takes longer than sending a message."""

_GENERATION_AT = 8
"""Index of the generation in a record."""

_STEPS = (QpState.INIT, QpState.RTR, QpState.RTS)


class RdmaQueuePair(Shared, QueuePair):
    """Locks, always taken in this order: the channel's (attachments, close), `_receiving`, `_sending`.

    Releasing a batch takes none of them, so it never waits for a receiver that sleeps.
    """

    def __init__(self, cm_id: RdmaCmId, init: QpInit, context: Context, pd: Pd) -> None:
        self.native: Native = cm_id.native
        self.process, self.lock = cm_id.process, cm_id.lock
        self._cm_id, self._context, self._pd, self._type = cm_id, context, pd, init.qp_type
        self._port = self.native.id_port(cm_id.handle)
        port = self.native.query_port(context, self._port)
        plan, size = slab.layout(init, port.active_mtu, port.max_mtu)
        self._slab = slab.allocate(size)
        arguments = {"qp_type": init.qp_type.name, "send": init.max_send_wr, "recv": init.max_recv_wr}
        self._handle = self.native.create_qp(cm_id.handle, pd, plan, self._slab, arguments)
        self._qp_num = self.native.qp_num(self._handle)
        self._recv_depth = plan.recv_depth
        payloads = memoryview(self._slab)[plan.recv_offset : plan.send_offset]
        self._memories: dict[int, Pointer] = {0: self.native.window(payloads)}
        self._attachments: dict[Gid, int] = {}
        self._regions: list[RdmaRegion] = []
        self._handles = AddressHandles(self.native, context, pd)
        self._handles_are_stale = False
        self._receiving, self._sending = threading.RLock(), threading.RLock()
        self._giving_back = threading.RLock()
        self._mtu, self._mtu_until = 0, 0.0

    # --- what it is ---

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
        return self._mtu

    @property
    def attachments(self) -> Mapping[Gid, int]:
        return MappingProxyType(self._attachments)

    @property
    def counters(self) -> QpCounters:
        with self._in_use("counters", Phase.RECV):
            sent, received, free, low = self.native.counters(self._handle)
        return QpCounters(sent, received, None, None, None, free, low)

    # --- state and attachments ---

    def _modify(self, state: QpState) -> None:
        with self._in_use("modify", Phase.MODIFY):
            self.native.modify_qp(self._handle, state, {"state": state.name})
        # A handle may name a source address that is gone, which may be why there is a reset at all.
        self._handles_are_stale |= state is QpState.RESET

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
            job, keep = self._job(destination, payloads, imm)
            try:
                self._finish(job, len(payloads), deadline)
            except QpError:
                raise
            except BaseException:
                if not self._closed:  # what is under way may still read the payloads
                    self.native.drain_sends(self._handle, int(_GRACE * 1e9))
                raise
            finally:
                del keep

    def _job(
        self, destination: Destination, payloads: Sequence[bytes | memoryview], imm: int | None
    ) -> tuple[Pointer, object]:
        to = (self._handles.get(destination), destination.qp_num, destination.qkey)
        lengths = array("I", map(len, payloads))
        if not self._regions:
            return self.native.send_job(*to, imm, lengths, b"".join(payloads), None, None)
        regions = sorted(self._regions, key=lambda region: region.start)
        starts = [region.start for region in regions]
        addresses = array("L", map(self.native.address_of, payloads))
        lkeys = array("q", (-1,)) * len(payloads)
        for index, (address, length) in enumerate(zip(addresses, lengths, strict=True)):
            at = bisect_right(starts, address) - 1
            if at >= 0 and address + length <= regions[at].end:
                lkeys[index] = regions[at].lkey
        return self.native.send_job(*to, imm, lengths, None, addresses, lkeys)

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

    # --- receiving ---

    def _recv(self, max: int, timeout: float | None, events: bool) -> Batch:
        deadline = Deadline(timeout)
        room = min(max, self._recv_depth)
        pointer = self.native.messages(room)
        channel = self._cm_id.channel.fileno() if events else NO_FD
        with held(self._receiving, deadline) as mine:
            while mine:
                self._require_open("recv", Phase.RECV)
                count = self.native.run(self._handle, pointer, room, channel, deadline.slice_ns())
                if count > 0:
                    return self._batch(pointer, count)
                if count == -E.EIO:
                    raise self._qp_error("recv", Phase.RECV)
                if deadline.over() or count == -E.EAGAIN:
                    break
                if count == 0 and not self._closed:
                    # With no receive posted nothing is flushed: only asking shows an ERR.
                    self.native.query_qp(self._handle)
        return self._batch(pointer, 0)

    def _batch(self, pointer: Pointer, count: int) -> Batch:
        records = self.native.bytes_of(pointer)
        generation = RECORD.unpack_from(records)[_GENERATION_AT] if count else 0
        payloads, in_use = self.native.payloads(self._memories[generation])

        def give_back(pointer: Pointer, count: int) -> None:
            with self._giving_back:
                if not self._closed and self.process.is_here:
                    self.native.release(self._handle, generation, pointer, count)

        return RdmaBatch(pointer, records, count, payloads, in_use, self._handles.sources, give_back)

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
            mr = self.native.register(self._pd, buffer, {"bytes": buffer.nbytes})
            region = RdmaRegion(self, buffer, mr, recv_slot is not None)
            self._regions.append(region)
            if recv_slot is not None:
                count = buffer.nbytes // recv_slot
                generation = self._receive_into(region, recv_slot, count)
                self._memories = {0: self._memories[0], generation: self.native.window(buffer)}
        return region

    def forget_region(self, region: RdmaRegion) -> None:
        """End a region's registration, unless the QP has ended it already."""
        with self.lock:
            if region not in self._regions or not self.process.is_here:
                return
            self._regions.remove(region)
            with self._sending:
                if region.receives:
                    self._receive_into(None)
                    self._memories = {0: self._memories[0]}
                self.native.deregister(region.mr)

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
            self.native.wake(self._handle)
            with self._receiving, self._sending, self._giving_back:
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
