"""The contract over a simulated fabric: each call takes the fabric's lock, and turns errnos into errors.

An object is closed with the lock held, and each call checks with the lock held whether its object is open, so
no call meets an object that is half closed.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from ipaddress import IPv4Address, IPv6Address
from types import MappingProxyType
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from mcast.api import (
    JOIN_MASK,
    Backend,
    Batch,
    Capability,
    Cause,
    CmEvent,
    CmId,
    CopiedBatch,
    Destination,
    DeviceBytes,
    DeviceInfo,
    DeviceRegion,
    EventChannel,
    GroupTable,
    JoinAttrEx,
    JoinFlag,
    LinkLayer,
    Message,
    Phase,
    PortEvent,
    PortSpace,
    QpCounters,
    QpError,
    QpInit,
    QpState,
    QpType,
    QueuePair,
    Region,
    TimestampClock,
    mcast_error,
    require_comp_vector,
)
from mcast.backends.model import cm
from mcast.backends.model.port import COMP_VECTORS, PORT_COUNTERS
from mcast.backends.model.qp import Qp
from mcast.backends.model.times import NS
from mcast.backends.sim.clock import Clock
from mcast.backends.sim.core.groups import group_table
from mcast.backends.sim.fabric import Fabric
from mcast.backends.sim.lease import DeviceSlots, MemorySlots, Packed, SimBatch, Slots, message_of
from mcast.backends.sim.readiness import Readiness
from mcast.backends.sim.region import SimDeviceRegion, SimRegion, bytes_of
from mcast.interrupts import Alive, uninterrupted
from mcast.wire.addresses import Gid, McastAddress

ASK_WHY_SECONDS = 0.25
"""How many seconds get_event waits for the SA to say why it refused a join.

The SA has just answered that join.
"""

_BOTH = {Capability.CONNECTED_QP, Capability.GROUP_TABLE}
ROCE_CAPABILITIES = frozenset(_BOTH | {Capability.IGMP})
INFINIBAND_CAPABILITIES = frozenset(
    _BOTH | {Capability.SA, Capability.MLID, Capability.IPV6_GROUP, Capability.RAW_MGID}
)


_SQD = QpState.SQD
_JOIN_MASK, _FULL_MEMBER = int(JOIN_MASK), JoinFlag.FULLMEMBER

P = ParamSpec("P")
R = TypeVar("R")


class _OnFabric(Protocol):
    _clock: Clock

    def _require_open(self, call: str, phase: Phase) -> None: ...


_T = TypeVar("_T", bound=_OnFabric)


def _call(
    name: str, phase: Phase
) -> Callable[[Callable[Concatenate[_T, P], R]], Callable[Concatenate[_T, P], R]]:
    """Run the method as one call into the fabric, of an object that is open.

    The fastest methods, for which a tenth of a microsecond counts, do the same without this decorator.
    """

    def locked(method: Callable[Concatenate[_T, P], R]) -> Callable[Concatenate[_T, P], R]:
        @wraps(method)
        def call(self: _T, /, *args: P.args, **kwargs: P.kwargs) -> R:
            with self._clock:
                self._require_open(name, phase)
                return method(self, *args, **kwargs)

        return call

    return locked


class SimBackend(Backend):
    """The backend of programs on some hosts of a fabric (by default on all), which see these hosts' devices
    as theirs.

    With `owns_fabric` closing the backend closes the fabric.
    """

    def __init__(
        self, fabric: Fabric, name: str, hosts: frozenset[int] | None = None, owns_fabric: bool = False
    ) -> None:
        self.fabric: Fabric = fabric
        self.name: str = name
        self.capabilities: frozenset[Capability] = (
            ROCE_CAPABILITIES if fabric.sa is None else INFINIBAND_CAPABILITIES
        )
        self._clock = fabric.clock
        self._hosts = hosts if hosts is not None else fabric.hosts
        self._owns_fabric = owns_fabric
        self._channels: dict[SimEventChannel, None] = {}
        if owns_fabric:
            _owners.add(self)
        if fabric.watch is not None:
            fabric.watch(self)

    def now(self) -> float:
        return self._clock.now / NS

    def new_seed(self) -> int:
        with self._clock:
            return self.fabric.parts.seeds.getrandbits(64)

    def solitude(self) -> str:
        others = sum(not one.closed for one in _owners) - 1
        if not self._owns_fabric or others < 1:
            return ""
        return (
            f"this is a fabric of its own, as {'another one' if others == 1 else f'{others} others'} in this "
            "process: open one backend by mcast.open_backend, and each endpoint with that and an address of "
            "its own; or run `mcast sim serve`, which programs of many processes share"
        )

    @_call("devices", Phase.OPEN)
    def devices(self) -> tuple[DeviceInfo, ...]:
        return self.fabric.parts.hosts.devices(self._hosts)

    @_call("port_counters", Phase.OPEN)
    def _port_counters(self, device: str, port_num: int) -> Mapping[str, int]:
        ports = (port for port in self.fabric.parts.topology.ports_of(self._hosts) if port.name == device)
        return {name: getattr(port, name) for port in ports for name in PORT_COUNTERS}

    @_call("event_channel", Phase.OPEN)
    def event_channel(self) -> EventChannel:
        channel = SimEventChannel(self.fabric, self._hosts, self._channels)
        self._channels[channel] = None
        return channel

    @_call("groups", Phase.OPEN)
    def groups(self) -> GroupTable:
        return group_table(self.fabric.parts, self._hosts)

    def _close(self) -> None:
        with uninterrupted():
            with self._clock:
                self._closed = True
                for channel in list(self._channels):
                    channel._close()
            if self._owns_fabric:
                self.fabric.close()


_owners: Alive[SimBackend] = Alive()
"""The backends of this process that have a fabric of their own."""


class SimEventChannel(EventChannel):
    """An event channel, whose descriptor is made when it is first asked for."""

    def __init__(self, fabric: Fabric, hosts: frozenset[int], siblings: dict[SimEventChannel, None]) -> None:
        self._hosts, self._siblings = hosts, siblings
        self.fabric: Fabric = fabric
        self._clock = fabric.clock
        self._whole = fabric.clock.call
        self.ids: dict[SimCmId, None] = {}
        self._core = cm.CmChannel()
        self._readiness: Readiness | None = None
        if fabric.watch is not None:
            fabric.watch(self)

    @property
    def pending(self) -> bool:
        if self._closed:
            self._require_open("pending", Phase.EVENT)
        return bool(self._core.queue)

    @property
    def unread(self) -> int:
        """How many events wait."""
        return len(self._core.queue)

    @_call("fileno", Phase.EVENT)
    def fileno(self) -> int:
        if self._readiness is None:
            self.show_by(Readiness(self._clock, lambda: bool(self._core.queue)))
        assert self._readiness is not None
        return self._readiness.fd

    def show_by(self, readiness: Readiness) -> None:
        """Show there whether an event waits."""
        self._readiness = readiness
        self._core.on_event = readiness.show

    def take(self) -> cm.QueuedEvent | None:
        """The next event, if there is one; what the SA says of a failure is left to the caller."""
        return self._core.get() if self._core.queue else None

    @_call("create_id", Phase.OPEN)
    def _create_id(self, port_space: PortSpace) -> CmId:
        cm_id = SimCmId(self, cm.CmaId(self.fabric.parts, self._hosts, self._core, port_space))
        self.ids[cm_id] = None
        return cm_id

    def _get_event(self, timeout: float | None) -> CmEvent | None:
        clock, queue, event = self._clock, self._core.queue, None
        if not queue:
            clock.wait(lambda: bool(queue) or self._closed, timeout, "get_event", Phase.EVENT)
            if self._closed:
                self._require_open("get_event", Phase.EVENT)
        if queue:
            event = self._core.get()
            found = self._found(event) if event.errno else ()
        if clock.watched:
            clock.settle()
        if event is None:
            return None
        membership = event.membership
        context = None if membership is None else membership.context
        return CmEvent(
            event.type, event.status, event.errno, context, event.id.owner, event.ud, event.detail, found
        )

    def _found(self, event: cm.QueuedEvent) -> tuple[Cause, ...]:
        """The causes that the SA gives for a join that it refused; () if it does not answer soon."""
        answers: list[tuple[Cause, ...]] = []
        if event.id.ask_why(event, answers.append):
            self._clock.wait(lambda: bool(answers), ASK_WHY_SECONDS, "get_event", Phase.EVENT)
        return answers[0] if answers else ()

    def _close(self) -> None:
        with self._clock:
            self._closed = True
            for cm_id in list(self.ids):
                cm_id._close()
            self._siblings.pop(self, None)
            if self._readiness is not None:
                self._readiness.close()
                self._readiness = None


class SimCmId(CmId):
    """An id of a channel."""

    def __init__(self, channel: SimEventChannel, core: cm.CmaId) -> None:
        super().__init__()
        self.core = core
        core.owner = self
        self._channel = channel
        self.fabric: Fabric = channel.fabric
        self._clock = channel.fabric.clock
        self._whole = self._clock.call
        self._qp: SimQueuePair | None = None
        if self.fabric.watch is not None:
            self.fabric.watch(self)

    @property
    def device(self) -> str | None:
        return None if self.core.interface is None else self.core.interface.port.name

    @property
    def link_layer(self) -> LinkLayer | None:
        return None if self.core.interface is None else self.core.interface.port.link_layer

    @property
    def qp(self) -> QueuePair | None:
        return self._qp

    @_call("bind_addr", Phase.BIND)
    def _bind_addr(self, src: IPv4Address | IPv6Address) -> None:
        _check(self.core.bind(src), "bind_addr", Phase.BIND, src=src)

    @_call("resolve_addr", Phase.RESOLVE)
    def _resolve_addr(self, dst: McastAddress, src: IPv4Address | IPv6Address | None, timeout: float) -> None:
        _check(self.core.resolve(dst, src), "resolve_addr", Phase.RESOLVE, dst=dst, src=src)

    @_call("create_qp", Phase.CREATE_QP)
    def _create_qp(self, init: QpInit) -> QueuePair:
        require_comp_vector(init.comp_vector, COMP_VECTORS, self.device or "a simulated device")
        _check(self.core.create_qp(init), "create_qp", Phase.CREATE_QP, qp_type=init.qp_type.name)
        assert self.core.qp is not None
        self._qp = SimQueuePair(self, self.core.qp)
        return self._qp

    def forget_qp(self, qp: SimQueuePair) -> None:
        """The QP is closed: detached from everything, and gone."""
        if self._qp is qp:
            self.core.destroy_qp()
            self._qp = None

    def _group_of(self, address: McastAddress) -> object:
        core = self.core
        known, pkey, group = core.known_group
        if known is not address or core.interface is None or core.interface.pkey != pkey:
            return core.group_of(address)
        return group

    def _join_multicast_ex(self, attr: JoinAttrEx, context: object) -> None:
        mask, flags = int(attr.comp_mask), attr.join_flags
        self._join_multicast(attr.addr, context, "join_multicast_ex", mask, flags)

    def _join_multicast(
        self,
        addr: McastAddress,
        context: object,
        call: str = "join_multicast",
        mask: int = _JOIN_MASK,
        flags: int = _FULL_MEMBER,
    ) -> None:
        failed = self.core.join(mask, flags, addr, context)
        if self._clock.watched:
            self._clock.settle()
        if failed:
            _check(failed, call, Phase.JOIN, addr=addr, join_flags=flags)

    def _leave_multicast(self, addr: McastAddress) -> None:
        failed = self.core.leave(addr)
        if self._clock.watched:
            self._clock.settle()
        if failed:
            _check(failed, "leave_multicast", Phase.LEAVE, addr=addr)

    def _destroy(self) -> None:
        with self._clock:
            self.core.destroy()
            self._channel.ids.pop(self, None)
            if self._qp is not None:
                self._qp._close()


class SimQueuePair(QueuePair):
    """The QP of an id."""

    def __init__(self, owner: SimCmId, core: Qp) -> None:
        self.core = core
        self._owner = owner
        self._fabric = owner.fabric
        self._clock = self._fabric.clock
        self._wire, self._queue_pairs = self._fabric.parts.wire, self._fabric.parts.queue_pairs
        self._slots: Slots | None = None
        self._own_receives = (core.depth, core.room)
        self._readiness: Readiness | None = None
        if self._fabric.watch is not None:
            self._fabric.watch(self)

    @property
    def link_layer(self) -> LinkLayer:
        return self.core.port.link_layer

    @property
    def qp_num(self) -> int:
        return self.core.number

    @property
    def qp_type(self) -> QpType:
        return self.core.type

    @property
    def state(self) -> QpState:
        self._require_open("state", Phase.MODIFY)
        return self.core.state

    @property
    def max_message_size(self) -> int:
        if self._closed:
            self._require_open("max_message_size", Phase.SEND)
        return self.core.port.mtu

    @property
    def timestamp_clock(self) -> TimestampClock | None:
        return TimestampClock.VIRTUAL if self.core.stamps else None

    @property
    def attachments(self) -> Mapping[Gid, int]:
        return MappingProxyType(self.core.attached.copy())

    @property
    def counters(self) -> QpCounters:
        return self.core.counters

    @_call("modify", Phase.MODIFY)
    def _modify(self, state: QpState) -> None:
        _check(self.core.modify(state), "modify", Phase.MODIFY, state=state.name)
        if self._readiness is not None:
            self._readiness.show()

    @_call("port_events", Phase.EVENT)
    def port_events(self) -> tuple[PortEvent, ...]:
        core = self.core
        found, core.port_events, core.news = core.port_events, (), False
        if self._readiness is not None:
            self._readiness.show()
        return found

    @property
    def may_have_messages(self) -> bool:
        return self.core.readable

    @property
    def has_port_events(self) -> bool:
        return bool(self.core.port_events)

    @_call("attach_mcast", Phase.ATTACH)
    def _attach_mcast(self, gid: Gid, lid: int) -> None:
        failed = self._queue_pairs.attach(self.core, gid, lid)
        _check(failed, "attach_mcast", Phase.ATTACH, gid=gid, lid=f"{lid:#x}")

    @_call("detach_mcast", Phase.DETACH)
    def _detach_mcast(self, gid: Gid, lid: int) -> None:
        failed = self._queue_pairs.detach(self.core, gid, lid)
        _check(failed, "detach_mcast", Phase.DETACH, gid=gid, lid=f"{lid:#x}")

    def _send(
        self,
        destination: Destination,
        payloads: Sequence[bytes | memoryview | DeviceBytes],
        imm: int | None,
        timeout: float | None,
        longest: int | None = None,
    ) -> None:
        owned: Sequence[bytes]
        if len(payloads) == 1 and type(one := payloads[0]) is bytes:  # without a comprehension's frame
            owned = (one,)
        elif isinstance(payloads, Packed):
            owned = payloads
        else:
            owned = [one if type(one) is bytes else bytes_of(one, self) for one in payloads]
        core, clock = self.core, self._clock
        with clock.mutex:
            ready = core.state is not _SQD or self._leaves_sqd(timeout)
            if self._closed:
                self._require_open("send", Phase.SEND)
            failed = self._wire.send(core, destination, owned, imm, longest) if ready else errno.ETIMEDOUT
            error = core.error
        if clock.watched:
            clock.settle()
        if failed:
            _check(failed, "send", Phase.SEND, gid=destination.gid, messages=len(owned))
        if error is not None:
            raise QpError(error, "send", Phase.SEND, {"gid": destination.gid})

    def _send_rows(
        self, destination: Destination, rows: memoryview, imm: int | None, timeout: float | None
    ) -> None:
        count = len(rows)
        size = rows.nbytes // count
        self._send(destination, Packed(bytes(rows), [size] * count), imm, timeout, size)

    def _leaves_sqd(self, timeout: float | None) -> bool:
        """In SQD a queue pair takes sends, and holds them until it is in RTS again."""
        core = self.core
        with uninterrupted():
            return self._clock.wait(
                lambda: core.state is not _SQD or self._closed, timeout, "send", Phase.SEND
            )

    def _recv(self, max: int, timeout: float | None, events: bool) -> Batch:
        core, clock = self.core, self._clock
        batch: Batch
        with clock.call:
            if self._closed:
                self._require_open("recv", Phase.RECV)
            slices = core.take(max)
            if not slices:
                self._wait_readable(timeout, events)
                slices = core.take(max)
                core.news = core.news and bool(slices)
            if self._readiness is not None:
                self._readiness.show()
            if slices:
                batch = SimBatch(slices, core.is_own, self._give_back_to(self._slots), self._slots)
                if self._fabric.watch is not None:
                    self._fabric.watch(batch, self)
            elif core.error is not None:
                raise QpError(core.error, "recv", Phase.RECV)
            else:
                batch = CopiedBatch()
        if clock.watched:
            clock.settle()
        return batch

    def _recv_one(self, timeout: float | None) -> Message | None:
        """Without a lease: payloads are immutable, and the receive is posted again at once."""
        if self._slots is not None:
            if isinstance(self._slots, DeviceSlots):
                self._refuse_copy()
            return super()._recv_one(timeout)
        core = self.core
        with self._clock.mutex:
            if self._closed:
                self._require_open("recv", Phase.RECV)
            found = core.take_one()
            if found is None:
                with uninterrupted():
                    self._wait_readable(timeout, events=False)
                    found = core.take_one()
                    core.news = core.news and found is not None
                    if self._readiness is not None:
                        self._readiness.show()
                if found is None and core.error is not None:
                    raise QpError(core.error, "recv", Phase.RECV)
        if self._clock.watched:
            self._clock.settle()
        if found is None:
            return None
        burst, place = found
        return message_of(burst, memoryview(burst.payloads[place]), core.is_own(burst.header))

    def _wait_readable(self, timeout: float | None, events: bool) -> None:
        core = self.core
        if core.readable:
            return
        pending = self._owner.core.channel.queue

        def is_over() -> bool:
            return core.readable or self._closed or (events and (bool(pending) or core.news))

        self._clock.wait(is_over, timeout, "recv", Phase.RECV)
        self._require_open("recv", Phase.RECV)

    @_call("fileno", Phase.RECV)
    def fileno(self) -> int:
        if self._readiness is None:
            self.show_by(Readiness(self._clock, lambda: self.core.readable or self.core.news))
        assert self._readiness is not None
        return self._readiness.fd

    def show_by(self, readiness: Readiness) -> None:
        """Show there whether messages wait, or an error, or news of the port."""
        self._readiness = readiness
        self.core.on_readable = readiness.show

    def _give_back(self, count: int) -> None:
        with self._clock.mutex:
            self.core.free += count

    def _give_back_to(self, slots: Slots | None) -> Callable[[int], None]:
        """Return what posts receives of that memory again; nothing once the memory is closed."""
        if slots is None:
            return self._give_back

        def give_back(count: int) -> None:
            with self._clock.mutex:
                if self._slots is slots:
                    self.core.free += count

        return give_back

    @_call("register", Phase.REGISTER)
    def _register(
        self, buffer: memoryview, recv_slot: int | None, relaxed_ordering: bool, constant: bool
    ) -> Region:
        if recv_slot is None:
            return SimRegion(self._clock, buffer, lambda: None)
        end = self._receive_into(MemorySlots(buffer, recv_slot), buffer.nbytes // recv_slot, recv_slot)
        return SimRegion(self._clock, buffer, end)

    @_call("register_dmabuf", Phase.REGISTER)
    def _register_dmabuf(
        self, fd: int, nbytes: int, offset: int, recv_slot: int | None, relaxed_ordering: bool
    ) -> DeviceRegion:
        region = SimDeviceRegion(self, self._clock, fd, nbytes, offset, recv_slot is not None)
        if recv_slot is not None:
            try:
                region.end = self._receive_into(
                    DeviceSlots(region, recv_slot), nbytes // recv_slot, recv_slot
                )
            except BaseException:
                region._close()
                raise
        return region

    def _receive_into(self, slots: Slots, count: int, size: int) -> Callable[[], None]:
        """Receive into these slots; return the function that ends this."""
        self.post(count, size)
        self._slots = slots

        def end() -> None:
            if self._slots is slots and not self._closed:
                self.post_own()
                self._slots = None

        return end

    def post(self, count: int, size: int) -> None:
        """Replace all receives by `count` receives of `size` bytes."""
        if self.core.error is not None:
            raise QpError(self.core.error, "register", Phase.REGISTER)
        _check(self.core.repost(count, size), "register", Phase.REGISTER, recv_slot=size)

    def post_own(self) -> None:
        """Post the receives that the queue pair was made with, and drop what is queued."""
        self.core.repost_own(*self._own_receives)
        if self._readiness is not None:
            self._readiness.show()

    def _close(self) -> None:
        with self._clock:
            self._closed = True
            self._owner.forget_qp(self)
            self.core.on_readable = None
            if self._readiness is not None:
                self._readiness.close()
                self._readiness = None


def _check(failed: int, call: str, phase: Phase, **arguments: object) -> None:
    if failed:
        raise mcast_error(failed, call, phase, arguments)
