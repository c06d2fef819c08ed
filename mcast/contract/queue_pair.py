"""The queue pair: sends and receives messages in batches, and is attached to groups."""

from __future__ import annotations

import errno as E
import operator
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from typing_extensions import Buffer

from mcast.arguments.buffers import flat_bytes, writable_bytes
from mcast.arguments.checks import check_bool, check_int, check_type
from mcast.arguments.rows import HeaderBodyBatch, flat_rows, list_rows
from mcast.arguments.seconds import MAX_SECONDS, NUMBERS, check_seconds
from mcast.contract.batch import Batch, Message
from mcast.contract.closing import OnPort
from mcast.contract.enums import PortEvent, QpState, QpType, TimestampClock
from mcast.contract.poison import Refused
from mcast.contract.receive_memory import CopiedRegion, ReceiveSlots
from mcast.contract.region import DeviceBytes, DeviceRegion, Region
from mcast.contract.values import Destination, QpCounters
from mcast.errors.cause import Phase
from mcast.errors.tree import MessageTooLarge, QpError, SecondMlid, WcStatus, mcast_error
from mcast.wire.addresses import Gid


class QueuePair(OnPort):
    """ibv_qp of a CmId: sends and receives UD messages in batches, and is attached to groups.

    Closing it is ibv_destroy_qp, after detaching it from every group.

    Messages pass through two hooks of the provider: `_send` posts a list of payloads, `_recv` returns a
    batch. Rows, messages of two parts, single messages and registered memory reach these two by default; a
    provider overrides `_send_rows`, `_send_header_body`, `_recv_one` and `_register` where that saves time.
    """

    _depth = 0
    """Number of receives (`QpInit.max_recv_wr`)."""
    _receive_slots: ReceiveSlots | None = None
    """Where `recv` copies messages, of a provider that cannot receive there."""

    @property
    @abstractmethod
    def qp_num(self) -> int:
        """The queue pair's number, 24 bits."""

    @property
    @abstractmethod
    def qp_type(self) -> QpType:
        """The transport; UD unless `create_qp` was asked for another one."""

    @property
    @abstractmethod
    def state(self) -> QpState:
        """The state that the device reports now: a queue pair can fall into ERR by itself."""

    @property
    @abstractmethod
    def max_message_size(self) -> int:
        """Maximum payload in bytes: the present MTU of the port (guard G-MTU).

        The MTUs of the receivers' ports and of the switches are not known. On RoCE a message that one of them
        cannot take is lost there in silence (docs/pitfalls.md, 5). On InfiniBand the group has an MTU, too:
        see `max_message_to`.
        """

    def max_message_to(self, destination: Destination) -> int:
        """Maximum payload in bytes to that destination: the port's MTU, or the group's where that is smaller.

        On RoCE a group has no MTU, and those of the receivers' ports are not known.
        """
        if type(destination) is not Destination:
            check_type(destination, Destination, "destination", _DESTINATION)
        limit, group = self.max_message_size, destination.group_mtu
        return limit if group is None or group > limit else group

    def require_fits(self, destination: Destination, sizes: Sequence[int], limit: int | None = None) -> None:
        """Raise MessageTooLarge for the first payload of more than `limit` bytes (guard G-MTU).

        None: `max_message_to`. The error says whether the port or the group limits.
        """
        if limit is None:
            limit = self.max_message_to(destination)
        if not sizes or max(sizes) <= limit:
            return
        index, size = next((index, size) for index, size in enumerate(sizes) if size > limit)
        if self.max_message_to(destination) == self.max_message_size:
            raise MessageTooLarge(size, limit, index)
        source = destination.mtu_source
        said = "" if source is None else source.value
        raise MessageTooLarge(size, limit, index, destination.group_mtu, said)

    @property
    def timestamp_clock(self) -> TimestampClock | None:
        """The clock of `Message.timestamp`; None where messages have no time stamp."""
        return None

    @property
    @abstractmethod
    def attachments(self) -> Mapping[Gid, int]:
        """MGID -> MLID of each group that the queue pair is attached to, by `attach_mcast` or by a join."""

    @property
    @abstractmethod
    def counters(self) -> QpCounters:
        """Return the counters of the queue pair since it was made."""

    @abstractmethod
    def fileno(self) -> int:
        """A real file descriptor for poll, select and asyncio. A `recv` that returned an empty batch arms it.

        An armed descriptor becomes readable when a recv would return a message or raise QpError, or when
        `port_events` has something new. It stays readable until a recv returns an empty batch again.
        """

    def port_events(self) -> tuple[PortEvent, ...]:
        """ibv_get_async_event: the port's events since the last call, in order; only the last 64 are kept.

        A queue pair gets the events that happen while it exists. A waiting `recv` with `events=True` returns
        once for what is new. A provider whose ports report no events need not override this method.
        """
        self._require_open("port_events", Phase.EVENT)
        return ()

    @property
    def may_have_messages(self) -> bool:
        """False if a `recv` would find nothing now; True where only a `recv` can tell.

        Asking takes no time, and never raises.
        """
        return True

    @property
    def has_port_events(self) -> bool:
        """True if `port_events` has events that a `recv` saw before it returned an empty batch.

        Events that no `recv` has seen yet keep the descriptor of `fileno` readable. So a loop that has
        received nothing reads this before it sleeps on the descriptor. Reading it takes no time, and never
        raises.
        """
        return False

    def modify(self, state: QpState) -> None:
        """ibv_modify_qp: change the state.

        RESET drops the messages that nobody has received, and counts them (`QpCounters.dropped_reset`). INIT
        posts the receives again. EINVAL for a step that the state machine lacks.
        """
        check_type(state, QpState, "state", "a QpState, such as QpState.RTS")
        self._change("modify", Phase.MODIFY, self._modify, state)

    def reset(self) -> None:
        """Bring the queue pair from any state to RTS again.

        Its attachments are kept and its receives posted.
        """
        if self.state is QpState.SQD:
            self.modify(QpState.ERR)  # Soft-RoCE refuses every other step until the send queue has drained
        for state in (QpState.RESET, QpState.INIT, QpState.RTR, QpState.RTS):
            self.modify(state)

    def attach_mcast(self, gid: Gid | str, lid: int) -> None:
        """ibv_attach_mcast: take the messages of this MGID and MLID (AT-1).

        Attaching again does nothing (AT-4).

        Errors: EINVAL (the queue pair is not UD, AT-3; `gid` is not a multicast GID; on InfiniBand the MLID
        is outside 0xC000..0xFFFE), ENOMEM (max_mcast_qp_attach or max_mcast_grp is reached, DT-7), ENOSYS
        (the device has no multicast, DT-8), `SecondMlid` (guard G-MLID). Nothing arrives unless the port is a
        member of the group, too (AT-5).
        """
        gid = Gid(gid)
        lid = check_int(lid, "lid", 0, 0xFFFF, "a LID has 16 bits; take it from the join event's destination")
        self._change("attach_mcast", Phase.ATTACH, self._attach, gid, lid)

    def _attach(self, gid: Gid, lid: int) -> None:
        attached = self.attachments.get(gid, lid)
        if attached != lid:
            raise Refused(SecondMlid(gid, lid, attached))
        self._attach_mcast(gid, lid)

    def detach_mcast(self, gid: Gid | str, lid: int) -> None:
        """ibv_detach_mcast, with the MGID and MLID of the attach (DT-3), in any state (DT-5).

        Detaching concerns this device (DT-2), this queue pair (DT-1) and this group (DT-4) alone; one detach
        undoes any number of attaches (DT-9). Errors: EINVAL (not a multicast GID, not UD, not attached with
        this pair, DT-6).
        """
        gid = Gid(gid)
        lid = check_int(lid, "lid", 0, 0xFFFF, "a LID has 16 bits; take it from the join event's destination")
        self._change("detach_mcast", Phase.DETACH, self._detach_mcast, gid, lid)

    def send(
        self,
        destination: Destination,
        batch: Iterable[Buffer | DeviceBytes] | memoryview,
        imm: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Send each buffer of `batch` as one message, in order; return the number of messages, always all.

        A payload is a buffer of contiguous memory without Python objects in it, whose bytes are sent in the
        order of memory, or a part of a `DeviceRegion` of this queue pair; TypeError for anything else. A
        C-contiguous memoryview of two dimensions is a batch of its rows. No Python object is made for each
        row, nor for each message of a `HeaderBodyBatch`, whose bodies a device reads in place if they lie in
        registered memory. `imm` is a 32-bit immediate for every message.

        The call posts the messages, and does not wait until the device has sent them (`flush` does). It
        waits, at most `timeout` seconds, only while the send queue is full, and until the device has read
        payloads that lie in registered memory, unless that is `constant`. So every other buffer may be
        reused when the call returns.

        Success means that messages are posted: UD has no acknowledgement. Errors: MessageTooLarge (guard
        G-MTU), EINVAL (the queue pair is not in RTS; the destination is not one of this device), ENODATA (the
        GID table has no such sgid_index), TimedOut, QpError (this send, or an earlier one, has put the queue
        pair into ERR; `unsent` messages were lost). The error's `posted` is the number of this call's
        messages that were posted.
        """
        if self._closed:
            self._require_open("send", Phase.SEND)
        if timeout is not None and (timeout.__class__ not in NUMBERS or not 0.0 <= timeout <= MAX_SECONDS):
            timeout = check_seconds(timeout)
        rows = isinstance(batch, memoryview) and batch.ndim == 2
        if isinstance(batch, _ONE_PAYLOAD) and not rows:
            raise TypeError(f"send takes a batch of buffers, not one {type(batch).__name__}: use send_one")
        if type(destination) is not Destination:
            check_type(destination, Destination, "destination", _DESTINATION)
        if imm is not None:
            imm = check_int(imm, "imm", 0, 0xFFFFFFFF, "an immediate is 32 bits, 0..0xFFFFFFFF")
        if type(batch) is HeaderBodyBatch and not batch:
            batch = batch.bodies
        if isinstance(batch, memoryview):
            return self._check_rows(destination, batch, imm, timeout)
        if type(batch) is HeaderBodyBatch:
            self.require_fits(destination, [batch.nbytes // len(batch)])
            self._send_header_body(destination, batch, imm, timeout)
            return len(batch)
        payloads: list[Any] = list(batch)  # a copy: another thread may change the list after the checks
        if set(map(type, payloads)) <= _BYTES:
            sizes = list(map(len, payloads))
        else:
            payloads = list(map(_as_payload, payloads, range(len(payloads))))
            sizes = list(map(operator.attrgetter("nbytes"), payloads))
        self.require_fits(destination, sizes)
        self._send(destination, payloads, imm, timeout)
        return len(payloads)

    def _check_rows(
        self, destination: Destination, rows: memoryview, imm: int | None, timeout: float | None
    ) -> int:
        flat = flat_rows(rows)
        count = len(rows)
        if not flat.nbytes:
            self._send(destination, [b""] * count, imm, timeout)
            return count
        size = flat.nbytes // count
        self.require_fits(destination, [size])
        self._send_rows(destination, flat.cast("B", (count, size)), imm, timeout)
        return count

    def send_one(
        self,
        destination: Destination,
        payload: Buffer | DeviceBytes,
        imm: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Send one message, as `send` with a batch of one."""
        if timeout is not None and (timeout.__class__ not in NUMBERS or not 0.0 <= timeout <= MAX_SECONDS):
            timeout = check_seconds(timeout)
        plain = imm is None and not self._closed and type(destination) is Destination
        if (
            plain
            and type(payload) is bytes
            and (size := len(payload)) <= self.max_message_size
            and ((limit := destination.group_mtu) is None or size <= limit)
        ):
            self._send(destination, [payload], None, timeout)  # no check of `send` could fail here
        else:
            self.send(destination, [payload], imm, timeout)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the device has sent all posted messages; TimedOut when `timeout` seconds have passed.

        Raises QpError if the device could not send one of them.
        """
        self._require_open("flush", Phase.SEND)
        if timeout is not None:
            timeout = check_seconds(timeout)
        self._flush(timeout)

    def send_fileno(self) -> int | None:
        """A descriptor like that of `fileno`, for sending: a `send` or `flush` that raised TimedOut arms it.

        An armed descriptor becomes readable when another try may get further. None where no send waits for a
        device.
        """
        self._require_open("send_fileno", Phase.SEND)
        return None

    def recv(self, max: int = 64, timeout: float | None = None, events: bool = False) -> Batch:
        """Receive 1..max messages, in order.

        An empty batch when `timeout` seconds have passed without a message.

        The call returns as soon as there is a message. With `events` it also returns, with an empty batch,
        when an event waits on the id's channel or when the port has reported something (`port_events`); so
        one call waits for all three. Raises QpError when the queue pair is in ERR and every message received
        before that was returned, and `Closed` when the queue pair is closed, even while the call waits.
        """
        if self._closed:
            self._require_open("recv", Phase.RECV)
        if type(max) is not int or not 1 <= max <= _MAX_BATCH:
            max = min(check_int(max, "max", 1, None, "recv returns 1 or more messages"), _MAX_BATCH)
        if timeout is not None and (timeout.__class__ not in NUMBERS or not 0.0 <= timeout <= MAX_SECONDS):
            timeout = check_seconds(timeout)
        given: object = events
        if given is not False and given is not True:
            check_bool(given, "events")
        if self._receive_slots is None:
            return self._recv(max, timeout, events)
        return self._receive_slots.receive(partial(self._recv, timeout=timeout, events=events), max)

    def recv_one(self, timeout: float | None = None) -> Message | None:
        """Receive one message as a copy, or None when `timeout` seconds have passed.

        Errors: EOPNOTSUPP where messages arrive in another device's memory, which the CPU cannot copy: use
        `recv`.
        """
        if self._closed:
            self._require_open("recv", Phase.RECV)
        if timeout is not None and (timeout.__class__ not in NUMBERS or not 0.0 <= timeout <= MAX_SECONDS):
            timeout = check_seconds(timeout)
        return self._recv_one(timeout)

    def register(
        self,
        buffer: Buffer,
        recv_slot: int | None = None,
        *,
        relaxed_ordering: bool = False,
        constant: bool = False,
    ) -> Region:
        """Register a buffer: payloads that lie inside it are sent without being copied.

        It is one that `send` takes as a payload, and not empty.

        With `recv_slot`, a size in bytes, the buffer becomes the queue pair's receive memory, divided into
        slots of that size, one message in each; the payloads of received batches are views of the buffer. The
        buffer must be writable for that, and no message may be queued or leased (EBUSY, guard G-RECV), so
        register before joining; in ERR (QpError) `reset` comes first.

        Closing the region ends this, in any state, which stays as it is: from ERR a `reset` alone leads back.
        Messages that wait in the buffer are dropped, and counted in `QpCounters.dropped_reset`; receive them
        before you close the region if you want them. Batches that are leased stay readable, and the provider
        writes nothing more to the buffer. On the real stack the queue pair passes through RESET:
        what arrives at that moment is lost, and sends that are under way may be (`QpCounters.unsent`).

        `relaxed_ordering` lets the device write to the buffer in any order, which some hosts need for the
        full rate (IBV_ACCESS_RELAXED_ORDERING). A received message is complete when recv returns it; before
        that the buffer may show any part of it. Devices, drivers and libraries without relaxed ordering
        ignore the flag.

        `constant` promises that nobody changes the buffer before the region is closed, which waits until the
        device has sent what lies there. So no send waits for the device to read its payload.
        """
        check_bool(relaxed_ordering, "relaxed_ordering")
        check_bool(constant, "constant")
        if recv_slot is not None:
            recv_slot = check_int(recv_slot, "recv_slot", 1, None, _SLOT)
        self._require_open("register", Phase.REGISTER)
        view = flat_bytes(buffer) if recv_slot is None else writable_bytes(buffer)
        if not view.nbytes:
            raise ValueError("this buffer is empty: there is nothing to register")
        if recv_slot is not None and recv_slot > view.nbytes:
            raise ValueError(
                f"recv_slot is {recv_slot}: it needs at least one slot, this buffer has {view.nbytes} bytes"
            )
        if recv_slot is not None and constant:
            raise ValueError("constant=True contradicts recv_slot: received messages change the buffer")
        how = view, recv_slot, relaxed_ordering, constant
        return self._change("register", Phase.REGISTER, self._register, *how)

    def register_dmabuf(
        self,
        fd: int,
        nbytes: int,
        offset: int = 0,
        recv_slot: int | None = None,
        *,
        relaxed_ordering: bool = False,
    ) -> DeviceRegion:
        """Register `nbytes` bytes of another device's memory, from `offset` on.

        `fd` is the DMA-BUF of that memory.

        Payloads in this memory are sent without being copied, and never inline. `recv_slot` and
        `relaxed_ordering` are those of `register`; a message received into the memory has an empty `payload`,
        and `device` says where its bytes are. Errors: EOPNOTSUPP (the device or its driver cannot), ENOSYS
        (rdma-core is older than 34), EBADF or EINVAL (`fd` is no DMA-BUF), EBUSY as in `register`.
        """
        check_bool(relaxed_ordering, "relaxed_ordering")
        fd = check_int(fd, "fd", 0, (1 << 31) - 1, "it is the descriptor of a DMA-BUF")
        nbytes = check_int(nbytes, "nbytes", 1, _MAX_REGION, "a region has at least one byte")
        offset = check_int(
            offset, "offset", 0, _MAX_REGION - nbytes, "it is a place in the memory, from 0 on"
        )
        if recv_slot is not None:
            why = f"it needs at least one slot, the memory has {nbytes} bytes"
            recv_slot = check_int(recv_slot, "recv_slot", 1, nbytes, why)
        how = fd, nbytes, offset, recv_slot, relaxed_ordering
        return self._change("register_dmabuf", Phase.REGISTER, self._register_dmabuf, *how)

    @abstractmethod
    def _modify(self, state: QpState) -> None: ...

    @abstractmethod
    def _attach_mcast(self, gid: Gid, lid: int) -> None: ...

    @abstractmethod
    def _detach_mcast(self, gid: Gid, lid: int) -> None: ...

    @abstractmethod
    def _send(
        self,
        destination: Destination,
        payloads: Sequence[bytes | memoryview | DeviceBytes],
        imm: int | None,
        timeout: float | None,
    ) -> None:
        """Post the payloads in order, each as one message: the send hook.

        The contract has checked arguments and sizes, and every buffer is flat. When the hook returns, all
        are posted, and the buffers may be reused. The error of a call that fails says in `posted` how many
        were posted before.
        """

    def _send_rows(
        self, destination: Destination, rows: memoryview, imm: int | None, timeout: float | None
    ) -> None:
        """Post the rows of a two-dimensional view of bytes, none of which is empty, like `_send`."""
        self._send(destination, list_rows(rows), imm, timeout)

    def _send_header_body(
        self, destination: Destination, batch: HeaderBodyBatch, imm: int | None, timeout: float | None
    ) -> None:
        """Post messages of two parts, like `_send`."""
        self._send_rows(destination, batch.joined(), imm, timeout)

    def _flush(self, timeout: float | None) -> None:
        """Wait for the device.

        By default there is nothing to wait for: `_send` returns when the messages are sent.
        """

    @abstractmethod
    def _recv(self, max: int, timeout: float | None, events: bool) -> Batch:
        """Return 1..max messages as soon as there is one, or an empty batch: the receive hook.

        `recv` says when it ends. A provider that leases no buffers returns a `CopiedBatch`.
        """

    def _recv_one(self, timeout: float | None) -> Message | None:
        with self._recv(1, timeout, False) as batch:
            if not len(batch):
                return None
            message = batch[0]
            return message._replace(payload=memoryview(bytes(message.payload)))

    def _refuse_copy(self) -> NoReturn:
        """Raise EOPNOTSUPP from `recv_one` of a queue pair that receives into another device's memory."""
        detail = "messages arrive in another device's memory, and cannot be copied out of it: use recv"
        raise mcast_error(E.EOPNOTSUPP, "recv_one", Phase.RECV, None, detail)

    def _register(
        self, buffer: memoryview, recv_slot: int | None, relaxed_ordering: bool, constant: bool
    ) -> Region:
        """Register the buffer.

        By default nothing is registered: `_send` gets payloads of the region like any others, and `recv`
        copies messages from the provider's own receives, which `counters.recv_free` counts, to the slots. So
        a slot has room for the largest message (EINVAL), and closing the region drops no message.
        """
        if recv_slot is None:
            return CopiedRegion(buffer)
        self._require_no_messages(recv_slot)
        slots = self._receive_slots = ReceiveSlots(buffer, recv_slot)
        return CopiedRegion(buffer, partial(self._leave_slots, slots))

    def _require_no_messages(self, recv_slot: int) -> None:
        """Guard G-RECV by the counters: each receive that is not free has a message, or is leased."""
        state, slots, largest = self.state, self._receive_slots, self.max_message_size
        if state is QpState.ERR:
            raise QpError(WcStatus.WR_FLUSH_ERR, "register", Phase.REGISTER)
        is_taken = state is not QpState.RESET and self.counters.recv_free < self._depth
        if is_taken or (slots is not None and slots.leased):
            detail = "messages are queued or leased: register receive memory before the QP joins"
            raise mcast_error(E.EBUSY, "register", Phase.REGISTER, None, detail)
        if recv_slot < largest:
            detail = f"this provider copies each message into a slot: give it room for the largest, {largest}"
            raise mcast_error(E.EINVAL, "register", Phase.REGISTER, {"recv_slot": recv_slot}, detail)

    def _leave_slots(self, slots: ReceiveSlots) -> None:
        if self._receive_slots is slots:
            self._receive_slots = None

    def _register_dmabuf(
        self, fd: int, nbytes: int, offset: int, recv_slot: int | None, relaxed_ordering: bool
    ) -> DeviceRegion:
        detail = "this provider takes no DMA-BUF: send from the host's memory"
        raise Refused(mcast_error(E.EOPNOTSUPP, "register_dmabuf", Phase.REGISTER, None, detail))


def require_comp_vector(vector: int | None, there: int, device: str) -> None:
    """Raise EINVAL if the device lacks the completion vector with number `vector`.

    `there`: the number of its completion vectors.
    """
    if vector is not None and vector >= there:
        has = f"{there} completion vectors, 0..{there - 1}" if there > 1 else "one completion vector, 0"
        detail = f"{device} has {has}: choose one of these, or None to use them in rotation"
        raise mcast_error(E.EINVAL, "create_qp", Phase.CREATE_QP, {"comp_vector": vector}, detail)


_BYTES = frozenset({bytes})
_ONE_PAYLOAD = (bytes, bytearray, memoryview, str, DeviceBytes)
_MAX_BATCH = (1 << 31) - 1
"""Messages; asking for more is asking for all that are there."""
_MAX_REGION = (1 << 63) - 1
_SLOT = "it is the size of a receive slot in bytes, at least 1"


def _as_payload(payload: Buffer | DeviceBytes, index: int) -> memoryview | DeviceBytes:
    if isinstance(payload, DeviceBytes):
        payload.region._require_open("send", Phase.SEND)
        return payload
    return flat_bytes(payload, index)


_DESTINATION = "the Destination of a join event, or one that its reply_to or marked has made"
