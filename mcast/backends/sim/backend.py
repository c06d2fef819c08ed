"""The contract over a simulated fabric.

Each call is a change under the fabric's guard, and turns errnos into errors.

All objects of a fabric share its guard. An object is closed under it, and each call checks under it whether
its object is open, so no call meets an object that is half closed. On a fabric that an interrupted change has
broken, a close frees queue pairs and descriptors; memberships end with the backend, which drops all tables.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from mcast.api import (
    Backend,
    Batch,
    Capability,
    Closeable,
    CmEvent,
    CmId,
    CopiedBatch,
    Destination,
    DeviceBytes,
    DeviceInfo,
    DeviceRegion,
    EventChannel,
    GroupTable,
    McastError,
    Message,
    Phase,
    PortEvent,
    PortSpace,
    QpError,
    QpInit,
    QpState,
    QueuePair,
    Refused,
    Region,
    SignalSafeWeakSet,
    TimestampClock,
    WcStatus,
    mcast_error,
    require_comp_vector,
)
from mcast.backends.model import cm
from mcast.backends.model.objects import ModelCmId, ModelQueuePair, check, event_of
from mcast.backends.model.port import COMP_VECTORS, PORT_COUNTERS
from mcast.backends.model.qp import Burst, Qp
from mcast.backends.model.region import HostRegion
from mcast.backends.model.times import NS
from mcast.backends.net.readiness import Readiness
from mcast.backends.sim.clock import VirtualClock
from mcast.backends.sim.core.groups import group_table
from mcast.backends.sim.fabric import Fabric
from mcast.backends.sim.lease import DeviceSlots, MemorySlots, PackedPayloads, SimBatch, Slots, message_of
from mcast.backends.sim.region import SimDeviceRegion, bytes_of
from mcast.wire.addresses import McastAddress

ASK_WHY_SECONDS = 0.25
"""Maximum number of seconds that get_event waits for the reason of a refused join.

The SA has just answered that join, so it is there.
"""

_BOTH = {Capability.CONNECTED_QP, Capability.GROUP_TABLE}
ROCE_CAPABILITIES = frozenset(_BOTH | {Capability.IGMP})
INFINIBAND_CAPABILITIES = frozenset(
    _BOTH | {Capability.SA, Capability.MLID, Capability.IPV6_GROUP, Capability.RAW_MGID}
)


_SQD = QpState.SQD
_ETIMEDOUT = errno.ETIMEDOUT

P = ParamSpec("P")
R = TypeVar("R")
_T = TypeVar("_T", bound=Closeable)


def _call(
    name: str, phase: Phase
) -> Callable[[Callable[Concatenate[_T, P], R]], Callable[Concatenate[_T, P], R]]:
    """Run the method as one change of the fabric, of an object that is open."""

    def guarded(method: Callable[Concatenate[_T, P], R]) -> Callable[Concatenate[_T, P], R]:
        @wraps(method)
        def call(self: _T, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return self._change(name, phase, method, self, *args, **kwargs)

        return call

    return guarded


class SimBackend(Backend):
    """The backend of programs on some hosts of a fabric, by default on all.

    They see these hosts' devices as theirs.

    With `owns_fabric` closing the backend closes the fabric.
    """

    _strict = True

    def __init__(
        self, fabric: Fabric, name: str, hosts: frozenset[int] | None = None, owns_fabric: bool = False
    ) -> None:
        self.fabric: Fabric = fabric
        self.name: str = name
        self.capabilities: frozenset[Capability] = (
            ROCE_CAPABILITIES if fabric.sa is None else INFINIBAND_CAPABILITIES
        )
        self._clock, self._guard = fabric.clock, fabric.clock.guard
        self.virtual_time: bool = isinstance(fabric.clock, VirtualClock)
        self._hosts = hosts if hosts is not None else fabric.hosts
        self._owns_fabric = owns_fabric
        self._channels: dict[SimEventChannel, None] = {}
        if owns_fabric:
            _owners.add(self)
        if fabric.watch is not None:
            fabric.watch(self)

    def now(self) -> float:
        clock = self._clock  # each send of an endpoint asks, which a property would make slower
        return (clock.virtual_now if self.virtual_time else clock.now) / NS

    def new_seed(self) -> int:
        return self.fabric.core.seeds.getrandbits(64)

    def why_isolated(self) -> str:
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
        return self.fabric.core.hosts.devices(self._hosts)

    def _port_counters(self, device: str, port_num: int) -> Mapping[str, int]:
        """Read them without the guard: `stats` asks, which works amid a call and on a broken fabric."""
        ports = (port for port in self.fabric.core.topology.ports_of(self._hosts) if port.name == device)
        return {name: getattr(port, name) for port in ports for name in PORT_COUNTERS}

    @_call("event_channel", Phase.OPEN)
    def event_channel(self) -> EventChannel:
        channel = SimEventChannel(self.fabric, self._hosts, self._channels)
        self._channels[channel] = None
        return channel

    @_call("groups", Phase.OPEN)
    def groups(self) -> GroupTable:
        return group_table(self.fabric.core, self._hosts)

    def _close(self) -> None:
        if self._freed:
            return
        self._closed = True
        for channel in list(self._channels):
            channel._close()
        if self._guard.was_broken:
            self.fabric.abort()
        if self._owns_fabric:
            self._clock.close()
        self._freed = True


_owners: SignalSafeWeakSet[SimBackend] = SignalSafeWeakSet()
"""The backends of this process that have a fabric of their own."""


class SimEventChannel(EventChannel):
    """An event channel, whose descriptor is made when it is first asked for."""

    _strict = True

    def __init__(self, fabric: Fabric, hosts: frozenset[int], siblings: dict[SimEventChannel, None]) -> None:
        self._hosts, self._siblings = hosts, siblings
        self.fabric: Fabric = fabric
        self._clock, self._guard = fabric.clock, fabric.clock.guard
        self.ids: dict[SimCmId, None] = {}
        self._closed = False  # as that of a queue pair
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
        """Number of events in the queue."""
        return len(self._core.queue)

    @_call("fileno", Phase.EVENT)
    def fileno(self) -> int:
        if self._readiness is None:
            self._clock.descriptor_requested()
            self.attach_readiness(Readiness(lambda: bool(self._core.queue)))
        assert self._readiness is not None
        return self._readiness.fd

    def attach_readiness(self, readiness: Readiness) -> None:
        """Show there whether an event waits."""
        self._readiness = readiness
        self._core.on_event = readiness.show
        readiness.show()

    def take(self) -> cm.QueuedEvent | None:
        """The next event, if there is one; what the SA says of a failure is left to the caller."""
        return self._core.get() if self._core.queue else None

    def _create_id(self, port_space: PortSpace) -> CmId:
        return SimCmId(self, cm.CmaId(self.fabric.core, self._hosts, self._core, port_space))

    def _get_event(self, timeout: float | None) -> CmEvent | None:
        clock, queue = self._clock, self._core.queue
        event = self._next_event() if queue else None
        if event is None:
            end = clock.end_of(timeout)
            while event is None:
                over = clock.wait_until(lambda: bool(queue) or self._closed, end, "get_event", Phase.EVENT)
                event = self._next_event()
                if event is None and not over:
                    return None
        if event.errno and event in queue:  # and the SA says why it failed
            self._clock.wait(lambda: bool(event.answers), ASK_WHY_SECONDS, "get_event", Phase.EVENT)
            return self._get_event(timeout)
        return event_of(event, event.answers[0] if event.answers else ())

    def _next_event(self) -> cm.QueuedEvent | None:
        """Take the next event, if there is one.

        The one of a failed join stays once, until the SA has said why: an interrupt of that wait loses no
        event.
        """
        guard, core = self._clock.guard, self._core
        event = None
        try:
            with guard.lock:
                if guard.amid:
                    guard.refuse("get_event", Phase.EVENT)
                if self._closed:
                    self._require_open("get_event", Phase.EVENT)
                if core.queue:
                    guard.amid = "get_event"
                    first = event = next(iter(core.queue))
                    if not first.errno or first.answers is not None or not self._asks_why(first):
                        event = core.get()
                    guard.amid = ""
                    if guard.after_change is not None:
                        guard.after_change("get_event")
        finally:
            if guard.deferred:
                guard.run_deferred_closes()
        return event

    def _asks_why(self, event: cm.QueuedEvent) -> bool:
        event.answers = []
        return event.id.query_refusal(event, event.answers.append)

    def _close(self) -> None:
        if self._freed:
            return
        self._closed = True
        for cm_id in list(self.ids):
            cm_id._close()
        if self._readiness is not None:
            self._readiness.close()
        self._siblings.pop(self, None)
        self._freed = True


class SimCmId(ModelCmId):
    """An id of a channel."""

    _strict = True

    def __init__(self, channel: SimEventChannel, core: cm.CmaId) -> None:
        super().__init__(core, channel.fabric.clock.guard, channel.ids)
        self.fabric: Fabric = channel.fabric
        if self.fabric.watch is not None:
            self.fabric.watch(self)

    def _create_qp(self, init: QpInit) -> QueuePair:
        try:
            require_comp_vector(init.comp_vector, COMP_VECTORS, self.device or "a simulated device")
        except McastError as error:
            raise Refused(error) from None
        check(self.core.create_qp(init), "create_qp", Phase.CREATE_QP, qp_type=init.qp_type.name)
        assert self.core.qp is not None
        self._qp = SimQueuePair(self, self.core.qp)
        return self._qp

    def _group_of(self, address: McastAddress) -> object:
        core = self.core
        known, pkey, group = core.known_group
        if known is not address or core.interface is None or core.interface.pkey != pkey:
            return core.group_of(address)
        return group


class SimQueuePair(ModelQueuePair):
    """The QP of an id."""

    _strict = True
    _owner: SimCmId

    def __init__(self, owner: SimCmId, core: Qp) -> None:
        super().__init__(owner, core)
        self._fabric = owner.fabric
        self._clock = self._fabric.clock
        self._wire = self._fabric.core.wire
        self._receive_slots = None
        self._slots: Slots | None = None
        self._own_receives = (core.depth, core.room)
        self._readiness: Readiness | None = None
        if self._fabric.watch is not None:
            self._fabric.watch(self)

    @property
    def timestamp_clock(self) -> TimestampClock | None:
        return TimestampClock.VIRTUAL if self.core.stamps else None

    def _modify(self, state: QpState) -> None:
        super()._modify(state)
        if self._readiness is not None:
            self._readiness.show()

    @_call("port_events", Phase.EVENT)
    def port_events(self) -> tuple[PortEvent, ...]:
        core = self.core
        found, core.port_events, core.port_changed = core.port_events, (), False
        if self._readiness is not None:
            self._readiness.show()
        return found

    @property
    def may_have_messages(self) -> bool:
        return self.core.readable

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
        elif isinstance(payloads, PackedPayloads):
            owned = payloads
        else:
            owned = [one if type(one) is bytes else bytes_of(one, self) for one in payloads]
        core, guard, failed = self.core, self._clock.guard, _ETIMEDOUT
        error: WcStatus | None = None
        if core.state is not _SQD or self._leaves_sqd(timeout):
            try:
                with guard.lock:
                    if guard.amid:
                        guard.refuse("send", Phase.SEND)
                    if self._closed:
                        self._require_open("send", Phase.SEND)
                    guard.amid = "send"
                    failed = self._wire.send(core, destination, owned, imm, longest)
                    error = core.error
                    guard.amid = ""
                    if guard.after_change is not None:
                        guard.after_change("send")
            finally:
                if guard.deferred:
                    guard.run_deferred_closes()
            if failed and core.state is _SQD:  # another thread has taken it there meanwhile
                self._send(destination, owned, imm, timeout, longest)
                return
        if failed:
            raise mcast_error(failed, "send", Phase.SEND, {"gid": destination.gid, "messages": len(owned)})
        if error is not None:
            raise QpError(error, "send", Phase.SEND, {"gid": destination.gid})

    def _send_rows(
        self, destination: Destination, rows: memoryview, imm: int | None, timeout: float | None
    ) -> None:
        count = len(rows)
        size = rows.nbytes // count
        self._send(destination, PackedPayloads(bytes(rows), [size] * count), imm, timeout, size)

    def _leaves_sqd(self, timeout: float | None) -> bool:
        """In SQD a queue pair takes sends, and holds them until it is in RTS again."""
        core = self.core
        return self._clock.wait(lambda: core.state is not _SQD or self._closed, timeout, "send", Phase.SEND)

    def _recv(self, max: int, timeout: float | None, events: bool) -> Batch:
        core, guard = self.core, self._clock.guard
        batch: Batch | None = None
        if core.queue:
            try:
                with guard.lock:
                    if guard.amid:
                        guard.refuse("recv", Phase.RECV)
                    if self._closed:
                        self._require_open("recv", Phase.RECV)
                    guard.amid = "recv"
                    batch = self._take(max)
                    guard.amid = ""
                    if guard.after_change is not None:
                        guard.after_change("recv")
            finally:
                if guard.deferred:
                    guard.run_deferred_closes()
        if batch is None and (batch := self._receive(self._take, max, timeout, events)) is None:
            return CopiedBatch()
        return batch

    def _take(self, max: int) -> Batch | None:
        """Take messages that are there, with the guard held."""
        core = self.core
        slices = core.lease(max)
        if self._readiness is not None:
            self._readiness.show()
        if not slices:
            return None
        batch = SimBatch(slices, core.is_own, core.leases, self._slots)
        if self._fabric.watch is not None:
            self._fabric.watch(batch, self)
        return batch

    def _recv_one(self, timeout: float | None) -> Message | None:
        """Without a lease: payloads are immutable, and the receive is posted again at once."""
        if self._slots is not None:
            if isinstance(self._slots, DeviceSlots):
                self._refuse_copy()
            return super()._recv_one(timeout)
        core, guard = self.core, self._clock.guard
        found = None
        if core.queue:
            try:
                with guard.lock:
                    if guard.amid:
                        guard.refuse("recv", Phase.RECV)
                    if self._closed:
                        self._require_open("recv", Phase.RECV)
                    guard.amid = "recv"
                    found = core.pop_one()
                    if self._readiness is not None:
                        self._readiness.show()
                    guard.amid = ""
                    if guard.after_change is not None:
                        guard.after_change("recv")
            finally:
                if guard.deferred:
                    guard.run_deferred_closes()
        if found is None and (found := self._receive(self._take_one, 1, timeout, False)) is None:
            return None
        burst, place = found
        header = burst.header
        own = header.src_qp == core.number and core.is_own(header)
        return message_of(burst, memoryview(burst.payloads[place]), own)

    def _take_one(self, max: int) -> tuple[Burst, int] | None:
        found = self.core.pop_one()
        if self._readiness is not None:
            self._readiness.show()
        return found

    def _receive(
        self, take: Callable[[int], R | None], max: int, timeout: float | None, events: bool
    ) -> R | None:
        """Return what `take` finds, waiting for it; None after the timeout, or for an event."""
        core, clock = self.core, self._clock
        queue, pending = core.queue, self._owner.core.channel.queue

        def is_over() -> bool:
            if queue or core.error is not None or self._closed:
                return True
            return events and (bool(pending) or core.port_changed)

        end = clock.end_of(timeout)
        while True:
            late = not clock.wait_until(is_over, end, "recv", Phase.RECV)
            if (
                late
                and self._readiness is None
                and not core.port_changed
                and clock.guard.after_change is None
            ):
                return None  # nothing came, and there is nothing to arm for what will
            found, over = self._taken(take, max, late, events)
            if found is not None or over:
                return found

    def _taken(
        self, take: Callable[[int], R | None], max: int, late: bool, events: bool
    ) -> tuple[R | None, bool]:
        """Look for messages once; return what was found, and whether there is nothing more to wait for."""
        core, guard = self.core, self._clock.guard
        found: R | None = None
        error, over = None, late
        try:
            with guard.lock:
                if guard.amid:
                    guard.refuse("recv", Phase.RECV)
                if self._closed:
                    self._require_open("recv", Phase.RECV)
                guard.amid = "recv"
                found = take(max)
                if found is None:
                    error = core.error
                    over = late or (events and (core.port_changed or bool(self._owner.core.channel.queue)))
                    if over:
                        core.port_changed = False
                        if self._readiness is not None:
                            self._readiness.show()
                guard.amid = ""
                if guard.after_change is not None:
                    guard.after_change("recv")
        finally:
            if guard.deferred:
                guard.run_deferred_closes()
        if error is not None:
            raise QpError(error, "recv", Phase.RECV)
        return found, over

    @_call("fileno", Phase.RECV)
    def fileno(self) -> int:
        if self._readiness is None:
            self._clock.descriptor_requested()
            self.attach_readiness(Readiness(lambda: self.core.readable or self.core.port_changed))
        assert self._readiness is not None
        return self._readiness.fd

    def attach_readiness(self, readiness: Readiness) -> None:
        """Show there whether messages wait, or an error, or news of the port."""
        self._readiness = readiness
        self.core.on_readable = readiness.show
        readiness.show()

    def _register(
        self, buffer: memoryview, recv_slot: int | None, relaxed_ordering: bool, constant: bool
    ) -> Region:
        if recv_slot is None:
            return HostRegion(self._guard, buffer, lambda: None)
        end = self._receive_into(MemorySlots(buffer, recv_slot), buffer.nbytes // recv_slot, recv_slot)
        return HostRegion(self._guard, buffer, end)

    def _register_dmabuf(
        self, fd: int, nbytes: int, offset: int, recv_slot: int | None, relaxed_ordering: bool
    ) -> DeviceRegion:
        region = SimDeviceRegion(self, self._guard, fd, nbytes, offset, recv_slot is not None)
        if recv_slot is not None:
            region.end = self._receive_into(DeviceSlots(region, recv_slot), nbytes // recv_slot, recv_slot)
        return region

    def _receive_into(self, slots: Slots, count: int, size: int) -> Callable[[], None]:
        """Receive into these slots; return the function that ends this."""
        self.post(count, size)
        self._slots = slots

        def end() -> None:
            if self._slots is slots and not self._closed:
                self.post_default()
                self._slots = None

        return end

    def post(self, count: int, size: int) -> None:
        """Replace all receives by `count` receives of `size` bytes."""
        if self.core.error is not None:
            raise Refused(QpError(self.core.error, "register", Phase.REGISTER))
        check(self.core.repost(count, size), "register", Phase.REGISTER, recv_slot=size)

    def post_default(self) -> None:
        """Post the receives that the queue pair was made with, and drop what is queued."""
        self.core.repost_default(*self._own_receives)
        if self._readiness is not None:
            self._readiness.show()

    def _close(self) -> None:
        if self._freed:
            return
        self._closed = True
        self._owner.forget_qp(self)
        self.core.on_readable = None
        if self._readiness is not None:
            self._readiness.close()
        self._freed = True
