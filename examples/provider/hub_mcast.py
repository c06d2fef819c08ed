"""A provider of one's own: RoCE ports on a hub in this process's memory.

A host here is a port with an address, and the hub hands each message to every queue pair that is attached to
its group, on a port that is a member. All objects of a hub share one guard: a call changes the hub under it,
and waits outside. What the provider does not do: connected queue pairs, IGMP, port events, time stamps.
"""

from __future__ import annotations

import errno
import os
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from ipaddress import IPv4Address, IPv6Address
from itertools import accumulate, count
from math import inf
from pickle import PickleBuffer
from time import monotonic
from typing import Any, TypeVar

from mcast.api import (
    JOIN_MASK,
    MULTICAST_QPN,
    RDMA_UDP_QKEY,
    Backend,
    Batch,
    Closed,
    CmEvent,
    CmEventType,
    CmId,
    CopiedBatch,
    Destination,
    DeviceBytes,
    DeviceInfo,
    EventChannel,
    Gid,
    Guard,
    JoinAttrEx,
    JoinFlag,
    Leases,
    LinkLayer,
    McastAddress,
    McastError,
    Message,
    Phase,
    PortInfo,
    PortSpace,
    PortState,
    Provider,
    QpCounters,
    QpError,
    QpInit,
    QpState,
    QpType,
    QueuePair,
    Refused,
    Status,
    Testbed,
    UdParam,
    Waiters,
    WcStatus,
    mcast_error,
    require_comp_vector,
)

MTU = 4096
"""Bytes of the largest message."""
MAX_DEPTH, MAX_GROUPS, MAX_QPS_PER_GROUP = 1 << 14, 4096, 64
"""Maximum number of messages in a queue, of groups of a port, and of queue pairs in one group of a port."""
ENOTSUPP = 524
"""The kernel's errno of an IPv6 group on RoCEv2, which the module errno lacks."""
T = TypeVar("T")
STEPS = {
    QpState.RESET: {QpState.INIT},
    QpState.INIT: {QpState.INIT, QpState.RTR},
    QpState.RTR: {QpState.RTS},
    QpState.RTS: {QpState.RTS, QpState.SQD},
    QpState.SQD: {QpState.SQD, QpState.RTS},
}
RECEIVES = {QpState.RTR, QpState.RTS, QpState.SQD}


@dataclass(eq=False)
class Port:
    """A device with one port. `members` counts the full memberships of its ids, for each group."""

    name: str
    address: IPv4Address
    members: Counter[Gid] = field(default_factory=Counter)
    attached: dict[Gid, list[HubQueuePair]] = field(default_factory=dict)
    qkey_violations: int = 0

    @property
    def gid(self) -> Gid:
        return Gid(self.address)


class Flag:
    """A descriptor that is readable while the flag is up."""

    def __init__(self) -> None:
        self.fd: int = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_up = False

    def show(self, up: bool) -> None:
        if self.fd >= 0 and up is not self._is_up:
            self._is_up = up
            os.eventfd_write(self.fd, 1) if up else os.eventfd_read(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def fail(number: int, call: str, phase: Phase, detail: str = "", **arguments: object) -> None:
    """Refuse a call with an errno; 0 is success."""
    if number:
        raise Refused(mcast_error(number, call, phase, arguments, detail))


class HubBackend(Backend):
    """A hub with some ports; the first has the address 10.9.0.1."""

    name = "hub"
    capabilities = frozenset()

    def __init__(self, ports: int = 3) -> None:
        self._guard = Guard("hub", "close the backend and open another one")
        self.waiters = Waiters()
        first = IPv4Address("10.9.0.1")
        self.ports = tuple(Port(f"hub{number}", first + number) for number in range(ports))
        self.queue_pairs: dict[int, HubQueuePair] = {}
        self.channels: list[HubChannel] = []
        self.numbers = count(16)

    def devices(self) -> tuple[DeviceInfo, ...]:
        self._require_open("devices", Phase.OPEN)
        return tuple(map(self._device, self.ports))

    def _device(self, port: Port) -> DeviceInfo:
        info = PortInfo(
            port_num=1,
            state=PortState.ACTIVE,
            link_layer=LinkLayer.ETHERNET,
            active_mtu=MTU,
            rate=10.0,
            lid=0,
            gids={0: port.gid},
            addresses=(port.address,),
        )
        return DeviceInfo(
            name=port.name,
            node_guid=int(port.address),
            max_mcast_grp=MAX_GROUPS,
            max_mcast_qp_attach=MAX_QPS_PER_GROUP,
            max_qp_wr=MAX_DEPTH,
            ports=(info,),
        )

    def _port_counters(self, device: str, port_num: int) -> Mapping[str, int]:
        port = next((port for port in self.ports if port.name == device), None)
        return {} if port is None else {"qkey_violations": port.qkey_violations}

    def event_channel(self) -> EventChannel:
        return self._change("event_channel", Phase.OPEN, HubChannel, self)

    def deliver(self, source: HubQueuePair, to: Destination, payload: bytes, imm: int | None) -> None:
        """Hand a message to the queue pairs of its group, or to the one that it names."""
        if to.gid.is_multicast:
            members = (port for port in self.ports if port.members[to.gid])
            for target in [one for port in members for one in port.attached.get(to.gid, ())]:
                target.take(source, to, payload, imm)
        elif (found := self.queue_pairs.get(to.qp_num)) is not None and found.port.gid == to.gid:
            found.take(source, to, payload, imm)

    def wait(self, call: str, phase: Phase, timeout: float | None, look: Callable[[], T | None]) -> T | None:
        """Call `look` under the guard until it returns something, or the time is over."""
        end = inf if timeout is None else monotonic() + timeout

        def attempt() -> tuple[T | None, object]:
            found = look()
            return found, None if found is not None or monotonic() >= end else self.waiters.add()

        while True:
            found, waiter = self._guard.run(call, phase, attempt)
            if waiter is None:
                return found
            self.waiters.sleep(waiter, end - monotonic())

    def _close(self) -> None:
        self._closed = True
        for channel in list(self.channels):
            channel._close()


class HubChannel(EventChannel):
    """A queue of events."""

    def __init__(self, backend: HubBackend) -> None:
        self.backend, self._guard = backend, backend._guard
        self.events: deque[Event] = deque()
        self.ids: list[HubId] = []
        self.flag = Flag()
        backend.channels.append(self)

    def fileno(self) -> int:
        self._require_open("fileno", Phase.EVENT)
        return self.flag.fd

    @property
    def pending(self) -> bool:
        self._require_open("pending", Phase.EVENT)
        return bool(self.events)

    def put(self, event: Event) -> None:
        self.events.append(event)
        self.flag.show(True)
        self.backend.waiters.wake()

    def drop(self, fits: Callable[[Event], bool]) -> None:
        """Take unread events back."""
        self.events = deque(event for event in self.events if not fits(event))
        self.flag.show(bool(self.events))

    def _create_id(self, port_space: PortSpace) -> CmId:
        return HubId(self, port_space)

    def _get_event(self, timeout: float | None) -> CmEvent | None:
        return self.backend.wait("get_event", Phase.EVENT, timeout, self._next)

    def _next(self) -> CmEvent | None:
        if self._closed:
            raise Refused(Closed("HubChannel", "get_event", Phase.EVENT))
        if not self.events:
            return None
        event = self.events.popleft()
        self.flag.show(bool(self.events))
        return event.fetched()

    def _close(self) -> None:
        self._closed = True
        for cm_id in list(self.ids):
            cm_id._close()
        self.backend.waiters.wake()
        self.flag.close()
        if self in self.backend.channels:
            self.backend.channels.remove(self)


class IdState(Enum):
    """State of an id; groups are joined in BOUND and RESOLVED."""

    IDLE = 0
    QUERY = 1
    BOUND = 2
    RESOLVED = 3


@dataclass(eq=False)
class Join:
    """A join of an id, from the call to its leave. `is_fetched` once a full member's event was fetched."""

    gid: Gid
    context: object
    receives: bool
    is_fetched: bool = False


@dataclass(eq=False)
class Event:
    """An event that was not fetched yet."""

    type: CmEventType
    id: HubId
    join: Join | None = None

    def fetched(self) -> CmEvent:
        """Return the event. That it is fetched resolves the id, or attaches its queue pair."""
        join = self.join
        if join is None:
            self.id.state = IdState.RESOLVED
            return CmEvent(self.type, 0, 0, None, self.id, None)
        qp, join.is_fetched = self.id._qp, join.receives
        if join.receives and qp is not None and (failed := qp.attach(join.gid)):
            return CmEvent(CmEventType.MULTICAST_ERROR, -1, failed, join.context, self.id, None)
        ud = UdParam(MULTICAST_QPN, RDMA_UDP_QKEY, Destination(gid=join.gid))
        return CmEvent(self.type, 0, 0, join.context, self.id, ud)


class HubId(CmId):
    """An id. A join is complete at once: a hub has nobody to ask."""

    def __init__(self, channel: HubChannel, port_space: PortSpace) -> None:
        super().__init__()
        self.channel, self._space, self._guard = channel, port_space, channel._guard
        self.state: IdState = IdState.IDLE
        self.port: Port | None = None
        self.joins: dict[McastAddress, Join] = {}
        self._qp: HubQueuePair | None = None
        channel.ids.append(self)

    @property
    def device(self) -> str | None:
        return None if self.port is None else self.port.name

    @property
    def link_layer(self) -> LinkLayer | None:
        return None if self.port is None else LinkLayer.ETHERNET

    @property
    def qp(self) -> QueuePair | None:
        return self._qp

    def _bind_addr(self, src: IPv4Address | IPv6Address) -> None:
        fail(self._bind(src), "bind_addr", Phase.BIND, src=src)

    def _bind(self, src: IPv4Address | IPv6Address) -> int:
        """Bind to a port; the wildcard and loopback leave the id without one."""
        port = next((one for one in self.channel.backend.ports if one.address == src), None)
        if self.state is not IdState.IDLE:
            return errno.EINVAL
        if port is None and not (src.is_unspecified or src.is_loopback):
            return errno.EADDRNOTAVAIL
        if port is not None and self._space is PortSpace.IPOIB:
            return errno.EINVAL
        self.port, self.state = port, IdState.BOUND
        return 0

    def _resolve_addr(self, dst: McastAddress, src: IPv4Address | IPv6Address | None, timeout: float) -> None:
        failed = self._bind(src) if self.state is IdState.IDLE and src is not None else 0
        if not failed and self.state not in (IdState.IDLE, IdState.BOUND):
            failed = errno.EINVAL
        if not failed and self.port is None:
            failed = errno.ENETUNREACH
        detail = "a hub has no routes: give src" if failed == errno.ENETUNREACH else ""
        fail(failed, "resolve_addr", Phase.RESOLVE, detail, dst=dst, src=src)
        self.state = IdState.QUERY
        self.channel.put(Event(CmEventType.ADDR_RESOLVED, self))

    def _create_qp(self, init: QpInit) -> QueuePair:
        call, phase, about = "create_qp", Phase.CREATE_QP, {"qp_type": init.qp_type.name}
        if self._space is PortSpace.TCP:
            fail(errno.EOPNOTSUPP, call, phase, "a hub has no connected queue pairs", **about)
        wrong = self.port is None or self._qp is not None or init.qp_type is not QpType.UD
        fail(errno.EINVAL if wrong else 0, call, phase, **about)
        assert self.port is not None
        if max(init.max_recv_wr, init.max_send_wr) > MAX_DEPTH:
            fail(errno.EINVAL, call, phase, f"a queue has at most {MAX_DEPTH} messages", **about)
        if init.timestamps:
            words = f"{self.port.name} cannot stamp completions with the time: do without timestamps"
            fail(errno.EOPNOTSUPP, call, phase, words, **about)
        if init.moderation is not None:
            words = f"{self.port.name} cannot moderate completions: do without"
            fail(errno.EOPNOTSUPP, call, phase, words, **about)
        try:
            require_comp_vector(init.comp_vector, 1, self.port.name)
        except McastError as error:
            raise Refused(error) from None
        self._qp = HubQueuePair(self, self.port, init)
        return self._qp

    def _join_multicast(self, addr: McastAddress, context: object) -> None:
        self._join("join_multicast", int(JOIN_MASK), int(JoinFlag.FULLMEMBER), addr, context)

    def _join_multicast_ex(self, attr: JoinAttrEx, context: object) -> None:
        self._join("join_multicast_ex", int(attr.comp_mask), int(attr.join_flags), attr.addr, context)

    def _join(self, call: str, mask: int, flags: int, addr: McastAddress, context: object) -> None:
        fail(self._refuses(mask, flags, addr), call, Phase.JOIN, addr=addr, join_flags=flags)
        assert isinstance(addr.address, IPv4Address)
        assert self.port is not None
        join = self.joins[addr] = Join(Gid(addr.address), context, flags == JoinFlag.FULLMEMBER)
        self.port.members[join.gid] += join.receives
        self.channel.put(Event(CmEventType.MULTICAST_JOIN, self, join))

    def _refuses(self, mask: int, flags: int, addr: McastAddress) -> int:
        """Check the request in the order of librdmacm and the kernel; return an errno."""
        if mask & ~int(JOIN_MASK):
            return errno.EOPNOTSUPP
        if mask != JOIN_MASK or flags not in list(JoinFlag) or not _is_known(addr):
            return errno.EINVAL
        if self.port is None or self.state not in (IdState.BOUND, IdState.RESOLVED):
            return errno.EINVAL
        if not addr.key or self._space is not PortSpace.UDP:
            return errno.EINVAL
        return 0 if isinstance(addr.address, IPv4Address) else ENOTSUPP

    def _leave_multicast(self, addr: McastAddress) -> None:
        join = self.joins.pop(addr, None)
        if join is None:
            failed = errno.EADDRNOTAVAIL if _is_known(addr) else errno.EINVAL
            fail(failed, "leave_multicast", Phase.LEAVE, addr=addr)
        else:
            self._end(join)

    def _end(self, join: Join) -> None:
        assert self.port is not None
        self.channel.drop(lambda event: event.join is join)
        if join.is_fetched and self._qp is not None:
            self._qp.detach(join.gid)
        self.port.members[join.gid] -= join.receives

    def _destroy(self) -> None:
        while self.joins:
            self._end(self.joins.popitem()[1])
        self.channel.drop(lambda event: event.id is self)
        if self._qp is not None:
            self._qp._close()
        if self in self.channel.ids:
            self.channel.ids.remove(self)


def _is_known(addr: object) -> bool:
    """Return True for an address of a family that the kernel knows; callers may make others."""
    return isinstance(addr, McastAddress) and isinstance(addr.address, IPv4Address | IPv6Address | Gid)


class HubBatch(Batch):
    """Messages whose receives are leased: all views go through `_memory`, which counts those in use."""

    def __init__(self, messages: Sequence[Message], leases: Leases) -> None:
        super().__init__()
        self._messages, self._leases = messages, leases
        self._offsets = list(accumulate(self.lengths, initial=0))
        self._memory = memoryview(b"".join(message.payload for message in messages))
        self._lease = leases.add(self, len(messages), None, self._views, [self._memory])

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def lengths(self) -> Sequence[int]:
        return [len(message.payload) for message in self._messages]

    @property
    def memory(self) -> memoryview:
        with self._alone:
            self._require_lease()
            return self._keep(memoryview(PickleBuffer(self._memory)))

    def _message(self, index: int) -> Message:
        begin, end = self._offsets[index : index + 2]
        return self._messages[index]._replace(payload=memoryview(PickleBuffer(self._memory))[begin:end])

    def _release(self) -> None:
        self._memory.release()
        self._leases.end(self._lease)


class HubQueuePair(QueuePair):
    """A UD queue pair. A message takes a receive from its arrival until its batch is released."""

    def __init__(self, owner: HubId, port: Port, init: QpInit) -> None:
        self._owner, self._hub, self.port, self._guard = owner, owner.channel.backend, port, owner._guard
        self._number, self._state = next(self._hub.numbers), QpState.RTS
        self._error: WcStatus | None = None
        self._attached: dict[Gid, int] = {}
        self._messages: deque[Message] = deque()
        self._leases = Leases()
        self._flag, self._blocks_own = Flag(), init.block_loopback
        self._depth = self._free = self._low_water = init.max_recv_wr
        self._room = MTU if init.max_recv_size is None else init.max_recv_size
        self._counts: Counter[str] = Counter()
        self._hub.queue_pairs[self._number] = self

    @property
    def link_layer(self) -> LinkLayer:
        return LinkLayer.ETHERNET

    @property
    def qp_num(self) -> int:
        return self._number

    @property
    def qp_type(self) -> QpType:
        return QpType.UD

    @property
    def state(self) -> QpState:
        self._require_open("state", Phase.MODIFY)
        return self._state

    @property
    def max_message_size(self) -> int:
        self._require_open("max_message_size", Phase.SEND)
        return MTU

    @property
    def attachments(self) -> Mapping[Gid, int]:
        return dict(self._attached)

    @property
    def counters(self) -> QpCounters:
        counts = self._counts
        with self._guard.lock:
            self._free += self._leases.reclaim()
        return QpCounters(
            sent=counts["sent"],
            received=counts["received"],
            dropped_no_receive=counts["no_receive"],
            dropped_too_long=counts["too_long"],
            dropped_qkey=counts["qkey"],
            recv_free=self._free,
            recv_low_water=self._low_water,
            recv_empty=counts["empty"],
            dropped_reset=counts["reset"],
        )

    def fileno(self) -> int:
        self._require_open("fileno", Phase.RECV)
        return self._flag.fd

    # --- states and groups ---------------------------------------------------------------

    def _modify(self, state: QpState) -> None:
        if state not in (QpState.RESET, QpState.ERR) and state not in STEPS.get(self._state, ()):
            fail(errno.EINVAL, "modify", Phase.MODIFY, state=state.name)
        if state is QpState.RESET:
            self._counts["reset"] += len(self._messages)
            self._free += len(self._messages)
            self._messages.clear()
            self._error = None
        elif state is QpState.ERR and self._error is None:
            self._error = WcStatus.WR_FLUSH_ERR
        self._state = state
        self._show()

    def _show(self) -> None:
        """Make the descriptor readable or not, and let those who wait look again."""
        self._flag.show(bool(self._messages) or self._error is not None)
        self._hub.waiters.wake()

    def _attach_mcast(self, gid: Gid, lid: int) -> None:
        fail(self.attach(gid, lid), "attach_mcast", Phase.ATTACH, gid=gid, lid=lid)

    def attach(self, gid: Gid, lid: int = 0) -> int:
        if not gid.is_multicast:
            return errno.EINVAL
        if gid not in self._attached:
            queue_pairs = self.port.attached.get(gid, [])
            if len(queue_pairs) >= MAX_QPS_PER_GROUP or (
                not queue_pairs and len(self.port.attached) >= MAX_GROUPS
            ):
                return errno.ENOMEM
            self.port.attached[gid] = [*queue_pairs, self]
            self._attached[gid] = lid
        return 0

    def _detach_mcast(self, gid: Gid, lid: int) -> None:
        if self._attached.get(gid) != lid:
            fail(errno.EINVAL, "detach_mcast", Phase.DETACH, gid=gid, lid=lid)
        self.detach(gid)

    def detach(self, gid: Gid) -> None:
        if self._attached.pop(gid, None) is not None:
            others = [one for one in self.port.attached.pop(gid) if one is not self]
            if others:
                self.port.attached[gid] = others

    # --- messages ------------------------------------------------------------------------

    def _send(
        self,
        destination: Destination,
        payloads: Sequence[bytes | memoryview | DeviceBytes],
        imm: int | None,
        timeout: float | None,
    ) -> None:
        def post() -> bool | None:
            about: dict[str, Any] = {"gid": destination.gid}
            if self._closed:
                raise Refused(Closed("HubQueuePair", "send", Phase.SEND))
            if destination.port_num != 1 or not destination.is_global:
                fail(errno.EINVAL, "send", Phase.SEND, **about)
            if destination.sgid_index != 0:
                fail(errno.ENODATA, "send", Phase.SEND, **about)
            if self._error is not None:
                raise Refused(QpError(self._error, "send", Phase.SEND, about))
            if self._state is QpState.SQD:
                return None
            fail(0 if self._state is QpState.RTS else errno.EINVAL, "send", Phase.SEND, **about)
            for payload in payloads:
                self._hub.deliver(self, destination, bytes(payload), imm)
            self._counts["sent"] += len(payloads)
            return True

        if self._hub.wait("send", Phase.SEND, timeout, post) is None:
            raise mcast_error(errno.ETIMEDOUT, "send", Phase.SEND, {"gid": destination.gid})

    def take(self, source: HubQueuePair, to: Destination, payload: bytes, imm: int | None) -> None:
        """Receive a message, or drop it and count why."""
        counts = self._counts
        self._free += self._leases.reclaim()
        if self._state not in RECEIVES or (source is self and self._blocks_own):
            return
        if to.qkey != RDMA_UDP_QKEY:
            counts["qkey"] += 1
            self.port.qkey_violations += 1
        elif not self._free:
            counts["no_receive"] += 1
        elif len(payload) > self._room:
            counts["too_long"] += 1
            self._state, self._error = QpState.ERR, WcStatus.LOC_QP_OP_ERR
        else:
            view = memoryview(payload)
            self._messages.append(Message(view, source.port.gid, source.qp_num, to.gid, imm, source is self))
            self._free -= 1
            self._low_water = min(self._low_water, self._free)
            counts["received"] += 1
            counts["empty"] += not self._free
        self._show()

    def _recv(self, max: int, timeout: float | None, events: bool) -> Batch:
        def look() -> Batch | None:
            if self._closed:
                raise Refused(Closed("HubQueuePair", "recv", Phase.RECV))
            if not self._messages and self._error is not None:
                raise Refused(QpError(self._error, "recv", Phase.RECV))
            if self._messages or (events and self._owner.channel.events):
                found = [self._messages.popleft() for _ in range(min(max, len(self._messages)))]
                self._show()
                return HubBatch(found, self._leases)
            return None

        return self._hub.wait("recv", Phase.RECV, timeout, look) or CopiedBatch()

    def _close(self) -> None:
        self._closed = True
        for gid in list(self._attached):
            self.detach(gid)
        self._hub.queue_pairs.pop(self._number, None)
        self._hub.waiters.wake()
        self._flag.close()
        if self._owner._qp is self:
            self._owner._qp = None


def _testbed() -> AbstractContextManager[Testbed]:
    from hub_testbed import testbed

    return testbed()


SUMMARY = "RoCE ports on a hub in memory"
PROVIDER = Provider("hub", SUMMARY, lambda: Status(True, SUMMARY), HubBackend, _testbed)
