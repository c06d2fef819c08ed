"""The queue pair: it sends and receives messages in batches, and attaches to groups."""

from __future__ import annotations

import errno as E
import operator
import threading
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from typing_extensions import Buffer

from mcast.contract.batch import Batch, Message
from mcast.contract.closing import OnPort
from mcast.contract.enums import PortEvent, QpState, QpType, TimestampClock
from mcast.contract.region import DeviceBytes, DeviceRegion, Region
from mcast.contract.values import Destination, QpCounters
from mcast.errors.cause import Phase
from mcast.errors.tree import MessageTooLarge, SecondMlid, mcast_error
from mcast.interrupts import made_or_undone, uninterrupted
from mcast.wire.addresses import Gid


class QueuePair(OnPort):
    """ibv_qp of a CmId. Sends and receives UD messages in batches; attaches to groups."""

    @property
    @abstractmethod
    def qp_num(self) -> int:
        """24-bit QP number."""

    @property
    @abstractmethod
    def qp_type(self) -> QpType: ...

    @property
    @abstractmethod
    def state(self) -> QpState:
        """The state now, asked of the device: a QP can fall into ERR by itself."""

    @property
    @abstractmethod
    def max_message_size(self) -> int:
        """The largest payload in bytes: the MTU of the port now (guard G-MTU)."""

    def max_message_to(self, destination: Destination) -> int:
        """The largest payload in bytes for that destination: one MTU of the port, or of the group if less."""
        limit, group = self.max_message_size, destination.group_mtu
        return limit if group is None or group > limit else group

    def too_large(self, destination: Destination, sizes: Sequence[int], limit: int) -> MessageTooLarge:
        """The error of guard G-MTU for the first message beyond `limit`: it says whose MTU is in the way."""
        index, size = next((index, size) for index, size in enumerate(sizes) if size > limit)
        if self.max_message_to(destination) == self.max_message_size:
            return MessageTooLarge(size, limit, index)
        source = destination.mtu_source
        said = "" if source is None else source.value
        return MessageTooLarge(size, limit, index, destination.group_mtu, said)

    @property
    def timestamp_clock(self) -> TimestampClock | None:
        """The clock of `Message.timestamp`; None where messages have none."""
        return None

    @property
    @abstractmethod
    def attachments(self) -> Mapping[Gid, int]:
        """The (MGID, MLID) pairs the QP is attached with, by the user or by a join."""

    @property
    @abstractmethod
    def counters(self) -> QpCounters: ...

    @abstractmethod
    def close(self) -> None:
        """ibv_destroy_qp, after detaching it from every group. Idempotent."""

    @abstractmethod
    def fileno(self) -> int:
        """A real file descriptor for poll, select and asyncio: a `recv` that returned empty arms it.

        From then on it is readable once a recv would give a message or a QpError, or `port_events` something
        new, until a recv is empty again.
        """

    def port_events(self) -> tuple[PortEvent, ...]:
        """ibv_get_async_event: what the port has told of since the last call, in order, the last 64 at most.

        Each QP is told of what happens while it lives. `recv` with `events` ends for what is new, once.
        A provider whose ports tell nothing has nothing to add here.
        """
        self._require_open("port_events", Phase.EVENT)
        return ()

    def modify(self, state: QpState) -> None:
        """ibv_modify_qp. INIT posts the receives again. A step the state machine lacks: EINVAL."""
        with uninterrupted(), self._explained():
            self._require_open("modify", Phase.MODIFY)
            self._modify(state)

    def reset(self) -> None:
        """From any state back to RTS, with attachments kept and receives posted."""
        if self.state is QpState.SQD:
            self.modify(QpState.ERR)  # Soft-RoCE refuses every other step until the send queue has drained
        for state in (QpState.RESET, QpState.INIT, QpState.RTR, QpState.RTS):
            self.modify(state)

    def attach_mcast(self, gid: Gid | str, lid: int) -> None:
        """ibv_attach_mcast: deliver messages for this MGID and MLID here (AT-1); a duplicate is no-op (AT-4).

        Errors: EINVAL (not UD, AT-3; not a multicast GID; on InfiniBand MLID outside 0xC000..0xFFFE),
        ENOMEM (max_mcast_qp_attach or max_mcast_grp, DT-7), ENOSYS (no multicast, DT-8), `SecondMlid`.
        Nothing arrives unless the port is a member of the group as well (AT-5).
        """
        gid = Gid(gid)
        _check_lid(lid)
        with uninterrupted(), self._explained(), self._attaching:
            self._require_open("attach_mcast", Phase.ATTACH)
            attached = self.attachments.get(gid, lid)
            if attached != lid:
                raise SecondMlid(gid, lid, attached)
            self._attach_mcast(gid, lid)

    def detach_mcast(self, gid: Gid | str, lid: int) -> None:
        """ibv_detach_mcast, with the attributes of the attach (DT-3), in any state (DT-5).

        Acts on this device alone (DT-2), on this QP (DT-1), on this group (DT-4); once is enough (DT-9).
        EINVAL: not a multicast GID, not UD, not attached with this pair (DT-6).
        """
        gid = Gid(gid)
        _check_lid(lid)
        with uninterrupted(), self._explained(), self._attaching:
            self._require_open("detach_mcast", Phase.DETACH)
            self._detach_mcast(gid, lid)

    @property
    def _attaching(self) -> threading.RLock:
        """Held from the look to the act of guard G-MLID; made by the first who asks."""
        lock: threading.RLock = vars(self).setdefault("_attaching_lock", threading.RLock())
        return lock

    def send(
        self,
        destination: Destination,
        batch: Iterable[Buffer | DeviceBytes],
        imm: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Send each buffer of `batch` as one message, in order; return how many, which is all of them.

        Any C-contiguous buffer works, and a part of a `DeviceRegion` of this QP; all may be reused when the
        call returns. The call posts the messages
        and does not wait until the device has sent them: `flush` does. It waits, up to `timeout`, while the
        send queue is full, and until the device has read what lies in registered memory. `imm` is a 32-bit
        immediate for every message. Errors: MessageTooLarge (G-MTU), EINVAL (QP not in RTS; destination not
        of this device), ENODATA (the GID table has no such sgid_index), TimedOut, QpError (the QP is in ERR:
        this send put it there, or an earlier one, and `unsent` messages were lost). The error's `posted`
        says how many messages of this call were posted. UD gives no receipt: success says sent, not received.
        """
        self._require_open("send", Phase.SEND)
        if isinstance(batch, bytes | bytearray | memoryview | str | DeviceBytes):
            raise TypeError(f"send takes a batch of buffers, not one {type(batch).__name__}: use send_one")
        if imm is not None and not 0 <= operator.index(imm) <= 0xFFFFFFFF:
            raise ValueError(f"imm is {imm}: an immediate is 32 bits, 0..0xFFFFFFFF")
        payloads: list[Any] = batch if isinstance(batch, list) else list(batch)
        if set(map(type, payloads)) <= _BYTES:
            sizes = list(map(len, payloads))
        else:
            payloads = list(map(_as_payload, payloads, range(len(payloads))))
            sizes = list(map(operator.attrgetter("nbytes"), payloads))
        limit = self.max_message_to(destination)
        if sizes and max(sizes) > limit:
            raise self.too_large(destination, sizes, limit)
        self._send(destination, payloads, imm, timeout)
        return len(payloads)

    def send_one(
        self,
        destination: Destination,
        payload: Buffer | DeviceBytes,
        imm: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Send one message: `send` with a batch of one."""
        plain = imm is None and not self._closed
        if plain and type(payload) is bytes and len(payload) <= self.max_message_to(destination):
            self._send(destination, [payload], None, timeout)  # `send` would refuse none of it
        else:
            self.send(destination, [payload], imm, timeout)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the device has sent all that was posted, up to `timeout`: then TimedOut.

        Raises the QpError of a message that the device could not send.
        """
        self._require_open("flush", Phase.SEND)
        self._flush(timeout)

    def send_fileno(self) -> int | None:
        """As `fileno`, for sends: a `send` or `flush` that raised TimedOut arms it.

        From then on it is readable once another try may come further. None: no send waits for a device here.
        """
        self._require_open("send_fileno", Phase.SEND)
        return None

    def recv(self, max: int = 64, timeout: float | None = None, events: bool = False) -> Batch:
        """Receive 1..max messages, in order; an empty batch when `timeout` s have passed without one.

        Returns as soon as there is one; with `events` also, empty, when an event waits on the id's channel,
        or once the port has told of something (`port_events`): one call sleeps on all three. QpError once
        the messages received before the failure are read. Closing the QP ends the wait with `Closed`.
        """
        self._require_open("recv", Phase.RECV)
        if type(max) is not int:
            max = operator.index(max)
        if max < 1:
            raise ValueError(f"max is {max}: recv returns 1 or more messages")
        return self._recv(max, timeout, events)

    def recv_one(self, timeout: float | None = None) -> Message | None:
        """Receive one message with a payload of its own (a copy), or None when `timeout` s have passed.

        EOPNOTSUPP where messages arrive in another device's memory: they stay there while a batch is leased.
        """
        if self._closed:
            self._require_open("recv", Phase.RECV)
        return self._recv_one(timeout)

    def register(
        self, buffer: Buffer, recv_slot: int | None = None, *, relaxed_ordering: bool = False
    ) -> Region:
        """Register a buffer: what is sent from inside it is not copied.

        With `recv_slot`, a size in bytes, the buffer becomes the QP's receive memory, one message a slot,
        and the payloads of received batches are views of it. The buffer must be writable for that, and
        no message may be queued or leased (EBUSY): do it before the QP joins. Closing the region ends it.

        `relaxed_ordering` lets the device write to it in any order, which some hosts need for the full rate
        (IBV_ACCESS_RELAXED_ORDERING). A message that was received is there as a whole all the same; who looks
        at the memory before that sees anything. What cannot do it does without: device, driver, or library.
        """
        self._require_open("register", Phase.REGISTER)
        view = _as_bytes(buffer, 0)
        if recv_slot is not None and (view.readonly or not 1 <= recv_slot <= view.nbytes):
            raise ValueError(
                f"recv_slot is {recv_slot}: it needs a writable buffer of at least one slot, "
                f"this one has {view.nbytes} bytes{' and is read-only' if view.readonly else ''}"
            )
        make = partial(self._register, view, recv_slot, relaxed_ordering)
        return made_or_undone(make, Region.close)

    def register_dmabuf(
        self,
        fd: int,
        nbytes: int,
        offset: int = 0,
        recv_slot: int | None = None,
        *,
        relaxed_ordering: bool = False,
    ) -> DeviceRegion:
        """Register `nbytes` bytes, from `offset` on, of another device's memory: `fd` is its DMA-BUF.

        What is sent from it is not copied, and never inline. `recv_slot` and `relaxed_ordering` are those of
        `register`; a received message has an empty `payload` then, and `device` says where its bytes are.
        Errors: EOPNOTSUPP (the device or its driver cannot), ENOSYS (rdma-core is older than 34), EBADF or
        EINVAL (no DMA-BUF), EBUSY as in `register`.
        """
        self._require_open("register_dmabuf", Phase.REGISTER)
        if fd < 0 or nbytes < 1 or offset < 0:
            raise ValueError(
                f"fd, nbytes, offset are {fd}, {nbytes}, {offset}: a descriptor, at least one byte, from 0 on"
            )
        if recv_slot is not None and not 1 <= recv_slot <= nbytes:
            raise ValueError(
                f"recv_slot is {recv_slot}: it needs at least one slot, the memory has {nbytes} bytes"
            )
        make = partial(self._register_dmabuf, fd, nbytes, offset, recv_slot, relaxed_ordering)
        return made_or_undone(make, DeviceRegion.close)

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
    ) -> None: ...

    def _flush(self, timeout: float | None) -> None:
        """Nothing is under way where a send is complete when it returns."""

    @abstractmethod
    def _recv(self, max: int, timeout: float | None, events: bool) -> Batch: ...

    def _recv_one(self, timeout: float | None) -> Message | None:
        with self._recv(1, timeout, False) as batch:
            if not len(batch):
                return None
            message = batch[0]
            return message._replace(payload=memoryview(bytes(message.payload)))

    def _refuse_copy(self) -> NoReturn:
        """For `recv_one` of a QP that receives into another device's memory."""
        detail = "messages arrive in another device's memory, and cannot be copied out of it: use recv"
        raise mcast_error(E.EOPNOTSUPP, "recv_one", Phase.RECV, None, detail)

    @abstractmethod
    def _register(self, buffer: memoryview, recv_slot: int | None, relaxed_ordering: bool) -> Region: ...

    def _register_dmabuf(
        self, fd: int, nbytes: int, offset: int, recv_slot: int | None, relaxed_ordering: bool
    ) -> DeviceRegion:
        detail = "this provider takes no DMA-BUF: send from the host's memory"
        raise mcast_error(E.EOPNOTSUPP, "register_dmabuf", Phase.REGISTER, None, detail)


def require_comp_vector(vector: int | None, there: int, device: str) -> None:
    """Refuse a completion vector that a device with `there` of them does not have: EINVAL."""
    if vector is not None and vector >= there:
        has = f"{there} completion vectors, 0..{there - 1}" if there > 1 else "one completion vector, 0"
        detail = f"{device} has {has}: choose one of these, or None to take them in turn"
        raise mcast_error(E.EINVAL, "create_qp", Phase.CREATE_QP, {"comp_vector": vector}, detail)


_BYTES = frozenset({bytes})


def _as_bytes(buffer: Buffer, index: int) -> memoryview:
    """The buffer as a flat view of bytes; TypeError says which message is not a buffer."""
    try:
        return memoryview(buffer).cast("B")
    except TypeError as error:
        raise TypeError(
            f"message {index} is a {type(buffer).__name__}: a payload is a C-contiguous buffer ({error})"
        ) from None


def _as_payload(payload: Buffer | DeviceBytes, index: int) -> memoryview | DeviceBytes:
    if isinstance(payload, DeviceBytes):
        payload.region._require_open("send", Phase.SEND)
        return payload
    return _as_bytes(payload, index)


def _check_lid(lid: int) -> None:
    if not 0 <= lid <= 0xFFFF:
        raise ValueError(f"lid is {lid:#x}: a LID has 16 bits; take it from the join event's destination")
