"""The contract over the socket of a served fabric: each call is a request, and what waits polls descriptors.

The server's end is the removal of every device: ids tell of it, queue pairs are dead. `SharedBackend.devices`
attaches anew, to the same host, once the fabric is served again.
"""

from __future__ import annotations

import errno as E
import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from ipaddress import IPv4Address, IPv6Address
from itertools import accumulate, count
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from mcast.api import (
    JOIN_MASK,
    Backend,
    Batch,
    Capability,
    Closeable,
    Closed,
    CmEvent,
    CmEventType,
    CmId,
    CopiedBatch,
    Destination,
    DeviceBytes,
    DeviceInfo,
    DeviceRegion,
    EventChannel,
    GroupTable,
    Guest,
    Headed,
    JoinAttrEx,
    JoinFlag,
    LinkLayer,
    McastError,
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
    WcStatus,
    mcast_error,
)
from mcast.backends.model.qp import PORT_EVENTS_KEPT, Header
from mcast.backends.model.times import NS
from mcast.backends.sim.lease import DeviceSlots, MemorySlots, SimBatch, Slices, Slots, message_of
from mcast.backends.sim.region import SimDeviceRegion, SimRegion, bytes_of
from mcast.backends.sim.shared import frames, rings
from mcast.backends.sim.shared.connection import (
    ENDED,
    LOOK_AGAIN,
    Beacon,
    Connection,
    Gone,
    Late,
    Reply,
    Sleep,
    Then,
    Unknown,
    drop,
    parse,
)
from mcast.backends.sim.shared.door import keep_host
from mcast.backends.sim.shared.incoming import Incoming, ServerEnded
from mcast.backends.sim.shared.outgoing import SharedOutgoing
from mcast.backends.sim.shared.tap import Tapped
from mcast.backends.sim.shared.watch import needs_descriptors
from mcast.interrupts import Alive, Lock, is_within, later, made_or_undone, uninterrupted
from mcast.wire.addresses import Gid, McastAddress
from mcast.wire.mapping import infiniband_group, ipoib_broadcast_mgid
from mcast.wire.partition import FULL_MEMBER

T = TypeVar("T")
Owned = list[bytes] | memoryview | Headed
"""The messages of one send."""

logger: logging.Logger = logging.getLogger("mcast")

_JOIN_MASK, _FULL_MEMBER = int(JOIN_MASK), int(JoinFlag.FULLMEMBER)
_PATIENCE_ANEW = 5.0
"""Seconds that an attempt to attach again waits for an answer: there will be another attempt."""

_backends: Alive[SharedBackend] = Alive()
"""Those of this process, for its forks."""


class SharedBackend(Backend):
    """A process on one host of a served fabric, or on all of them. Raises OSError where none is served.

    For a server that does not answer, a call with a timeout waits that long, and a call that begins a join or
    a resolution, or leaves, for a second. Every other call, here and of the channels, ids and queue pairs,
    waits for a minute: then the connection ends, as if the server had. Ctrl-C may end that wait, and with it
    the connection, once a second has passed.
    """

    def __init__(self, path: Path, attach: frames.AttachTo) -> None:
        self.path = path
        self.sleep: Sleep = Sleep()
        self.lock: Lock = Lock()
        self._channels: dict[SharedEventChannel, None] = {}
        self._connection = connection = Connection(path, attach)
        self.fabric: frames.AttachedTo = connection.fabric
        self.name: str = self.fabric.backend
        self.capabilities: frozenset[Capability] = frozenset(self.fabric.capabilities)
        again = self.fabric.hosts
        self._again = frames.AttachTo(host="all" if again == "all" else int(again))
        self._kept = None if self._again.host == "all" else keep_host(path, int(again))
        """What keeps the host for this process while the fabric is not served."""
        self._made = self.fabric.made
        _backends.add(self)

    def now(self) -> float:
        return (time.monotonic_ns() - self._made) / NS

    @property
    def epoch(self) -> int:
        """When the fabric was made, in ns since 1970 as the system's clock has them now."""
        return self._made + time.time_ns() - time.monotonic_ns()

    def new_seed(self) -> int:
        seed: int = self._ask(frames.AskFor(op="seed"), "new_seed")
        return seed

    def devices(self) -> tuple[DeviceInfo, ...]:
        self._require_open("devices", Phase.OPEN)
        try:
            self.connection()
            found: tuple[DeviceInfo, ...] = self._ask(frames.AskFor(op="devices"), "devices")
        except (OSError, McastError):  # nobody serves it
            self._require_open("devices", Phase.OPEN)
            self._connection.require_process("devices", Phase.OPEN)
            if not self._connection.lost:
                raise
            return ()
        return found

    def guests(self) -> tuple[Guest, ...]:
        try:
            found: tuple[Guest, ...] = self._ask(frames.AskFor(op="guests"), "guests")
        except McastError:
            if not self._connection.lost:
                raise
            return ()
        return found

    def control(self, words: Sequence[str]) -> tuple[str, ...]:
        """Do to the fabric what the words of `mcast sim ctl` say. Raises McastError (EINVAL) for others."""
        if len(words) > 32 or any(len(word) > 256 for word in words):
            raise mcast_error(E.EINVAL, "ctl", Phase.OPEN, None, "at most 32 words of 256 characters")
        found: tuple[str, ...] = self._ask(frames.Command(words=list(words)), "ctl")
        return found

    def tap(self) -> Tapped:
        """What happens on the fabric from now on, on all its ports. Raises McastError (EBUSY, ENOMEM)."""
        return made_or_undone(self._make_tap, Tapped.close)

    def _make_tap(self) -> Tapped:
        introduction: str = self._ask(frames.AskFor(op="introduction"), "tap")
        try:
            reply = self._connection.ask(frames.AskFor(op="tap"), "tap", Phase.OPEN)
        except Gone:
            self.lost(self._connection)
            raise mcast_error(E.ENODEV, "tap", Phase.OPEN, None, ENDED) from None
        with ExitStack() as undone, needs_descriptors("this process", "tap", Phase.OPEN):
            undone.callback(self._untap)
            descriptor = _given(reply)
            undone.pop_all()
        return Tapped(introduction, descriptor, self._untap)

    def _untap(self) -> int:
        lost: int = self._ask(frames.AskFor(op="untap"), "untap")
        return lost

    def _port_counters(self, device: str, port_num: int) -> Mapping[str, int]:
        with suppress(McastError):
            request = frames.PortCounters(device=device[:64], port_num=port_num)
            found: dict[str, int] = self._ask(request, "port_counters")
            return found
        self._require_open("port_counters", Phase.OPEN)
        return {}

    def groups(self) -> GroupTable:
        found: GroupTable = self._ask(frames.AskFor(op="groups"), "groups")
        return found

    def event_channel(self) -> EventChannel:
        self._connection.require_process("event_channel", Phase.OPEN)
        return made_or_undone(self._make_channel, EventChannel.close)

    def _make_channel(self) -> SharedEventChannel:
        with self.lock:  # a close beside it comes before or after
            self._require_open("event_channel", Phase.OPEN)
            channel = SharedEventChannel(self)
            self._channels[channel] = None
        return channel

    def _close(self) -> None:
        with uninterrupted():
            with self.lock:
                if self._closed:
                    return
                self._closed = True
            with ExitStack() as rest:  # is done as well if Ctrl-C ends the wait for a silent server
                rest.callback(self._free)
                for channel in list(self._channels):
                    rest.callback(channel._close)

    def _free(self) -> None:
        if self._kept is not None:
            self._kept.close()
        self._connection.close()
        self.sleep.wake()
        self.sleep.close()

    def _ask(self, request: frames.AnyRequest, call: str) -> Any:
        self._require_open(call, Phase.OPEN)
        try:
            return self._connection.ask(request, call, Phase.OPEN).value
        except Gone:
            self._require_open(call, Phase.OPEN)
            self.lost(self._connection)
            raise mcast_error(E.ENODEV, call, Phase.OPEN, None, self._connection.why) from None

    # --- the server's end, and its return --------------------------------------------------------

    def connection(self) -> Connection:
        """The one to the server, made anew if need be. Raises OSError, McastError."""
        with uninterrupted(self.lock):
            if self._connection.lost and not self._closed:
                self.lost(self._connection)
                fresh = Connection(self.path, self._again, _PATIENCE_ANEW)
                if fresh.fabric.link_layer is not self.fabric.link_layer:
                    fresh.close()
                    raise mcast_error(E.ENODEV, "devices", Phase.OPEN, None, "another fabric is served there")
                self._connection.close()
                self._connection = fresh
            return self._connection

    def lost(self, connection: Connection) -> None:
        """Every id of that connection has lost its device."""
        if os.getpid() != connection.pid:
            return
        with uninterrupted(self.lock):
            connection.lose()
            for channel in list(self._channels):
                channel.lose(connection)
        self.sleep.wake()

    def after_fork(self) -> None:
        """In a child."""
        self._connection.after_fork()
        self.sleep.after_fork()

    def forget(self, channel: SharedEventChannel) -> None:
        """The channel is closed."""
        with self.lock:
            self._channels.pop(channel, None)


def _after_fork() -> None:
    for backend in _backends:
        backend.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _given(reply: Reply) -> int:
    """The descriptor that came with the answer: the kernel drops it where this process may have no more."""
    if reply.descriptor is None:
        raise OSError(E.EMFILE, os.strerror(E.EMFILE))
    return reply.descriptor


class _Remote(Closeable):
    """What the server has a part of: requests about it, and what their failures mean here."""

    _backend: SharedBackend
    _connection: Connection

    def _ask(self, request: frames.AnyRequest, call: str, phase: Phase, **arguments: object) -> Any:
        return self._reply(lambda: self._connection.ask(request, call, phase, arguments), call, phase).value

    def _reply(self, ask: Callable[[], Reply], call: str, phase: Phase) -> Reply:
        try:
            return ask()
        except Gone:
            self._require_open(call, phase)
            self._backend.lost(self._connection)
            raise mcast_error(self._gone(call), call, phase, None, self._connection.why) from None
        except Unknown:  # another thread has closed it meanwhile
            raise Closed(type(self).__name__, call, phase) from None

    def _gone(self, call: str) -> int:
        return E.ENXIO if call.startswith(("join", "leave")) else E.ENODEV


class SharedEventChannel(_Remote, EventChannel):
    """The channel's descriptor is an epoll over the server's flag and end, and events of this process."""

    def __init__(self, backend: SharedBackend) -> None:
        self._backend = backend
        self._ids: dict[int, SharedCmId] = {}
        """Those that the server knows, by their numbers."""
        self._orphans: dict[SharedCmId, None] = {}
        """Those that it knew before it ended."""
        self._local: deque[CmEvent] = deque()
        """Events that no server tells: devices that went with it."""
        self._is_asked = False
        """Whether the server was asked for an event, and has not answered in the time of that call."""
        self._expected: dict[SharedCmId, int] = {}
        """Ids of which the server was asked for what has an event as its outcome, and has not answered -> the
        frames that were sent by then."""
        self._number: int | None = None
        self._flag = -1
        with ExitStack() as undone:
            with needs_descriptors("this process", "event_channel", Phase.OPEN):
                self._bell = Beacon(lambda: bool(self._local or self._is_asked or self._expected))
                undone.callback(self._bell.close)
                self._epoll = select.epoll()
                undone.callback(self._epoll.close)
                self._epoll.register(self._bell, select.EPOLLIN)
            self._bell.listen()
            try:
                self._attach(backend.connection())
            except OSError as error:
                if isinstance(error, McastError):
                    raise
                raise mcast_error(E.ENODEV, "event_channel", Phase.OPEN, None, ENDED) from None
            undone.pop_all()

    def _attach(self, connection: Connection) -> int:
        """The number of a channel of the server's for this one."""
        self._connection = connection
        request = frames.AskFor(op="open_channel")
        reply = self._reply(
            lambda: connection.ask(request, "event_channel", Phase.OPEN), "event_channel", Phase.OPEN
        )
        number: int = reply.value
        with ExitStack() as undone, needs_descriptors("this process", "event_channel", Phase.OPEN):
            undone.callback(self._end_there, number)
            flag = _given(reply)
            undone.callback(os.close, flag)
            self._epoll.register(flag, select.EPOLLIN)
            self._epoll.register(connection.fd, 0)
            undone.pop_all()
        self._number, self._flag = number, flag
        return number

    def fileno(self) -> int:
        self._require_open("fileno", Phase.EVENT)
        return self._epoll.fileno()

    def descriptor(self) -> int:
        """What a wait sleeps on; -1 once the channel is closed, which the wait's next look will see."""
        try:
            return self._epoll.fileno()
        except ValueError:
            return -1

    @property
    def pending(self) -> bool:
        if self._closed:
            self._require_open("pending", Phase.EVENT)
        return bool(self._local) or self._looks()

    def _looks(self) -> bool:
        """Whether the server shows an event; its end is noted."""
        try:
            found = self._epoll.poll(0)
        except ValueError:
            self._require_open("pending", Phase.EVENT)
            raise
        if any(fd == self._connection.fd for fd, _ in found):
            self._backend.lost(self._connection)
            return bool(self._local)
        return bool(found)

    def _create_id(self, port_space: PortSpace) -> CmId:
        with self._backend.lock:
            self._require_open("create_id", Phase.OPEN)
            self._connection.require_process("create_id", Phase.OPEN)
            try:
                connection, channel = self._backend.connection(), self._number
                if connection is not self._connection or channel is None:
                    channel = self._attach(connection)
            except OSError as error:
                if isinstance(error, McastError):
                    raise
                raise mcast_error(E.ENODEV, "create_id", Phase.OPEN, None, ENDED) from None
            request = frames.CreateId(channel=channel, port_space=port_space)
            number = self._ask(request, "create_id", Phase.OPEN)
            made = self._ids[number] = SharedCmId(self, connection, number, port_space)
            return made

    def _get_event(self, timeout: float | None) -> CmEvent | None:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._closed:
                self._require_open("get_event", Phase.EVENT)
            self._connection.require_process("get_event", Phase.EVENT)
            if self.pending and (event := self._next(end)) is not None:
                return event
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return None
            self._backend.sleep.until([self.descriptor()], left)

    def _next(self, end: float | None) -> CmEvent | None:
        if self._local:
            with self._backend.lock:
                if self._local:
                    event = self._local.popleft()
                    self._bell.show()
                    return event
        number, connection = self._number, self._connection
        if number is None:
            return None  # another thread has seen the server's end
        request = frames.OnChannel(op="get_event", channel=number)
        ask = partial(connection.ask, request, "get_event", Phase.EVENT, end=end, owner=number)
        try:
            heard: frames.HeardEvent | None = self._reply(ask, "get_event", Phase.EVENT).value
        except Late:
            self._is_asked = True
            self._bell.show()
            return None
        except McastError:
            self._require_open("get_event", Phase.EVENT)
            if self._connection.lost:
                return None
            raise
        if self._is_asked or self._expected:
            self._is_asked = False
            for cm_id, sent in list(self._expected.items()):
                if connection.has_answered(sent):  # not so if this answer is to what was asked before
                    self._expected.pop(cm_id, None)
            self._bell.show()
        owner = None if heard is None else self._ids.get(heard.id)
        if heard is None or owner is None:
            return None  # there is none, or its id was destroyed before the answer came
        owner.look_anew()
        context = None if heard.context is None else owner.contexts.get(heard.context)
        return CmEvent(
            heard.type, heard.status, heard.errno, context, owner, heard.ud, heard.detail, heard.found
        )

    def expect_answer(self, cm_id: SharedCmId) -> None:
        """Have the next call ask for the event of what the id has begun."""
        self._expected[cm_id] = self._connection.sent
        if self._number is None:
            self._expected.clear()  # a signal's handler has seen the server's end, which no answer follows
        self._bell.show()

    def hear_refusal(self, cm_id: SharedCmId, kind: CmEventType, text: bytes, context: object) -> None:
        """An answer that came late refuses what was begun. May be called in the connection's lock."""
        refusal: frames.RefusedCall = parse("refused", text)
        error = refusal.errno
        self._local.append(CmEvent(kind, -error, error, context, cm_id, None, refusal.detail))
        self._bell.show()

    def lose(self, connection: Connection) -> None:
        """The server has ended: as if each device had been removed."""
        if self._closed or connection is not self._connection or self._number is None:
            return
        self._number = None
        self._epoll.unregister(self._flag)
        self._epoll.unregister(connection.fd)
        os.close(self._flag)
        self._flag = -1
        for cm_id in self._ids.values():
            if cm_id.device is not None:
                removal = CmEvent(CmEventType.DEVICE_REMOVAL, 0, E.ENODEV, None, cm_id, None)
                self._local.append(removal)
            elif not connection.has_answered(self._expected.get(cm_id, 0)):  # a resolution, which ends so
                why, error = connection.why, E.ENODEV
                self._local.append(CmEvent(CmEventType.ADDR_ERROR, -error, error, None, cm_id, None, why))
        self._orphans |= dict.fromkeys(self._ids.values())
        self._ids = {}
        self._is_asked = False
        self._expected.clear()
        self._bell.show()

    def forget(self, cm_id: SharedCmId) -> None:
        """The id is destroyed: its events are gone."""
        with self._backend.lock:
            if self._ids.get(cm_id.number) is cm_id:
                self._ids.pop(cm_id.number, None)  # a signal's handler may just have seen the server's end
            self._orphans.pop(cm_id, None)
            self._expected.pop(cm_id, None)
            if self._closed or os.getpid() != self._connection.pid:
                return
            for _ in range(len(self._local)):  # to which a late answer may be added meanwhile
                if (event := self._local.popleft()).id is not cm_id:
                    self._local.append(event)
            self._bell.show()

    def _close(self) -> None:
        with uninterrupted():
            with self._backend.lock:
                if self._closed:
                    return
                self._closed = True
            self._backend.forget(self)
            with ExitStack() as rest:  # is done as well if Ctrl-C ends the wait for a silent server
                rest.callback(self._free)
                rest.callback(self._end)
                for cm_id in [*self._ids.values(), *self._orphans]:
                    rest.callback(cm_id._close)

    def _end(self) -> None:
        self._backend.sleep.wake()
        if (number := self._number) is not None:
            self._end_there(number)
            self._connection.forget(number)

    def _end_there(self, number: int) -> None:
        with suppress(McastError):
            self._ask(frames.OnChannel(op="close_channel", channel=number), "close", Phase.CLOSE)

    def _free(self) -> None:
        with self._backend.lock:
            if self._flag >= 0:
                os.close(self._flag)
                self._flag = -1
            self._number = None
            self._epoll.close()
            self._bell.close()


class SharedCmId(_Remote, CmId):
    """An id of a channel, known to the server by its number."""

    def __init__(
        self, channel: SharedEventChannel, connection: Connection, number: int, port_space: PortSpace
    ) -> None:
        super().__init__()
        self._channel, self._connection = channel, connection
        self.number: int = number
        self.port_space: PortSpace = port_space
        self._backend = channel._backend
        self._place = frames.IdPlace()
        self._qp: SharedQueuePair | None = None
        self.contexts: dict[int, object] = {}
        """Number of a join -> the context that it was given."""
        self._numbers = count(1)
        self._number_of: dict[McastAddress, int] = {}
        """0: the join was refused by an event, because the server's answer came late."""

    @property
    def device(self) -> str | None:
        return self._place.device

    @property
    def link_layer(self) -> LinkLayer | None:
        return self._place.link_layer

    @property
    def qp(self) -> QueuePair | None:
        return self._qp

    @property
    def channel(self) -> SharedEventChannel:
        return self._channel

    def _bind_addr(self, src: IPv4Address | IPv6Address) -> None:
        request = frames.BindId(id=self.number, src=src)
        self._stand(self._ask(request, "bind_addr", Phase.BIND, src=src), "bind_addr", Phase.BIND)

    def _resolve_addr(self, dst: McastAddress, src: IPv4Address | IPv6Address | None, timeout: float) -> None:
        request = frames.Resolve(id=self.number, dst=frames.RawAddress.of(dst), src=src)
        call, phase = "resolve_addr", Phase.RESOLVE

        def then(kind: int, text: bytes) -> None:
            if kind != frames.REFUSED:
                self._place = parse("resolve", text)
            else:
                self._channel.hear_refusal(self, CmEventType.ADDR_ERROR, text, None)

        if (reply := self._begin(request, call, phase, {"dst": dst, "src": src}, then)) is not None:
            self._stand(reply.value, call, phase)

    def _begin(
        self,
        request: frames.AnyRequest,
        call: str,
        phase: Phase,
        arguments: dict[str, object],
        then: Then,
    ) -> Reply | None:
        """Ask for what has an event as its outcome; None of a silent server, whose answer `then` takes.

        A call that begins something waits for no event, so it does not wait for a server that is stopped.
        """
        ask = self._connection.ask
        try:
            return self._reply(
                lambda: ask(request, call, phase, arguments, end=time.monotonic(), then=then), call, phase
            )
        except Late as late:
            why = self._connection.silence(LOOK_AGAIN)
            if not late.sent:
                raise mcast_error(E.ETIMEDOUT, call, phase, arguments, why) from None
            logger.warning("%s waits: %s", call, why)
            with self._while_served(call, phase):
                self._channel.expect_answer(self)
            return None

    def _stand(self, place: frames.IdPlace, call: str, phase: Phase) -> None:
        """The id is bound."""
        with self._while_served(call, phase):
            self._place = place

    @contextmanager
    def _while_served(self, call: str, phase: Phase) -> Iterator[None]:
        """If the server has ended meanwhile, no event would tell what becomes of the call: raise that."""
        with self._backend.lock:
            if self._connection.lost:
                self._require_open(call, phase)
                raise mcast_error(self._gone(call), call, phase, None, self._connection.why)
            yield

    def _create_qp(self, init: QpInit) -> QueuePair:
        # How it polls concerns nobody here, and JSON has no infinity.
        request = frames.CreateQp(id=self.number, init=init.model_copy(update={"busy_poll": 0.0}))
        arguments: dict[str, object] = {"qp_type": init.qp_type.name}
        if init.comp_vector is not None:
            arguments["comp_vector"] = init.comp_vector
        ask = partial(self._connection.ask, request, "create_qp", Phase.CREATE_QP, arguments)
        reply = self._reply(ask, "create_qp", Phase.CREATE_QP)
        number: int = reply.value.number
        with ExitStack() as undone, needs_descriptors("this process", "create_qp", Phase.CREATE_QP):
            undone.callback(self._end_there, number)
            fd = _given(reply)
            undone.callback(os.close, fd)
            with self._backend.lock:
                if self._closed:  # by another thread, and its queue pair with it
                    raise Closed(type(self).__name__, "create_qp", Phase.CREATE_QP)
                made = self._qp = SharedQueuePair(self, reply.value, fd, init.qp_type)
            undone.pop_all()
        return made

    def _end_there(self, qp: int) -> None:
        with suppress(McastError):
            self._ask(frames.OnQp(op="close_qp", qp=qp), "close", Phase.CLOSE)

    def look_anew(self) -> None:
        """What the QP is attached with may have changed."""
        if (qp := self._qp) is not None:
            qp.forget_attachments()

    def forget_qp(self, qp: SharedQueuePair) -> None:
        """The QP is closed."""
        if self._qp is qp:
            self._qp = None

    def _group_of(self, address: McastAddress) -> object:
        place = self._place
        if place.link_layer is not LinkLayer.INFINIBAND or place.pkey is None:
            return address.key
        return infiniband_group(address, self.port_space, ipoib_broadcast_mgid(place.pkey | FULL_MEMBER))

    def _join_multicast_ex(self, attr: JoinAttrEx, context: object) -> None:
        mask, flags = int(attr.comp_mask), int(attr.join_flags)
        self._join_multicast(attr.addr, context, "join_multicast_ex", mask, flags)

    def _join_multicast(
        self,
        addr: McastAddress,
        context: object,
        call: str = "join_multicast",
        mask: int = _JOIN_MASK,
        flags: int = _FULL_MEMBER,
    ) -> None:
        number = next(self._numbers)
        given: object = addr  # a model_construct may have anything
        raw = frames.RawAddress.of(given) if isinstance(given, McastAddress) else None
        request = frames.JoinGroup(
            id=self.number,
            call="join_multicast" if call == "join_multicast" else "join_multicast_ex",
            mask=mask & 0xFFFFFFFF,
            flags=flags & 0xFFFFFFFF,
            addr=raw,
            context=number,
        )

        def then(kind: int, text: bytes) -> None:
            if kind == frames.REFUSED and number in self.contexts:  # else the group was left meanwhile
                self._number_of[addr] = 0
                del self.contexts[number]
                self._channel.hear_refusal(self, CmEventType.MULTICAST_ERROR, text, context)

        self.contexts[number] = context
        try:
            self._begin(request, call, Phase.JOIN, {"addr": addr, "join_flags": flags}, then)
        except BaseException:
            self.contexts.pop(number, None)
            raise
        self._number_of.setdefault(addr, number)

    def _leave_multicast(self, addr: McastAddress) -> None:
        if self._number_of.get(addr) != 0:  # else the server has never known it
            request = frames.LeaveGroup(id=self.number, addr=frames.RawAddress.of(addr))
            ask = partial(self._connection.ask, request, "leave_multicast", Phase.LEAVE, {"addr": addr})
            try:
                self._reply(lambda: ask(end=time.monotonic(), then=drop), "leave_multicast", Phase.LEAVE)
            except Late as late:  # the server leaves when it goes on, before it hears anything else
                if not late.sent:
                    self._connection.tell_later(request)
        self.look_anew()
        self.contexts.pop(self._number_of.pop(addr, 0), None)

    def _destroy(self) -> None:
        if (qp := self._qp) is not None:
            qp.ends()
        try:
            with suppress(McastError):
                self._ask(frames.OnId(op="destroy", id=self.number), "destroy", Phase.DESTROY)
        finally:
            self._channel.forget(self)
            self._backend.sleep.wake()


class SharedQueuePair(_Remote, QueuePair):
    """The QP of an id; its descriptor is readable while messages wait, and once the server has ended."""

    def __init__(self, owner: SharedCmId, made: frames.MadeQp, fd: int, qp_type: QpType) -> None:
        self._owner, self._made, self._type = owner, made, qp_type
        self._backend, self._connection = owner._backend, owner._connection
        self._incoming = Incoming(self._connection, made.number, made.word, fd)
        self._outgoing = SharedOutgoing(self._connection, made.number)
        self._port_events: tuple[PortEvent, ...] = ()
        self._slots: Slots | None = None
        self._dropped = 0
        self._failed: WcStatus | None = None
        """What a send without a device did."""
        self._last = frames.QpLook(
            QpState.RTS, QpCounters(0, 0, 0, 0, 0, made.depth, made.depth, dropped_mtu=0)
        )
        self._attached: dict[Gid, int] | None = None
        """What it is attached with, as far as that is known here: only this process changes it."""

    @property
    def link_layer(self) -> LinkLayer | None:
        return self._owner.link_layer

    @property
    def qp_num(self) -> int:
        return self._made.qp_num

    @property
    def qp_type(self) -> QpType:
        return self._type

    @property
    def max_message_size(self) -> int:
        if self._closed:
            self._require_open("max_message_size", Phase.SEND)
        return self._made.mtu

    @property
    def timestamp_clock(self) -> TimestampClock | None:
        return TimestampClock.VIRTUAL if self._made.stamps else None

    @property
    def state(self) -> QpState:
        self._require_open("state", Phase.MODIFY)
        return QpState.ERR if self._failed is not None else self._look().state

    @property
    def attachments(self) -> Mapping[Gid, int]:
        found = self._attached
        if found is None:
            found = self._attached = dict(self._ask(self._on("attachments"), "attachments", Phase.ATTACH))
        return MappingProxyType(found.copy())

    @property
    def counters(self) -> QpCounters:
        found = self._look().counters
        return found._replace(dropped_reset=found.dropped_reset + self._dropped)

    def _look(self) -> frames.QpLook:
        """As the server sees it; as it was last seen, once the QP or the server is gone."""
        if not self._closed and not self._connection.lost:
            with suppress(McastError):
                self._last = self._ask(self._on("look"), "look", Phase.EVENT)
        return self._last

    def _on(self, op: Any) -> frames.OnQp:
        return frames.OnQp(op=op, qp=self._made.number)

    def _modify(self, state: QpState) -> None:
        request = frames.ModifyQp(qp=self._made.number, state=state)
        self._ask(request, "modify", Phase.MODIFY, state=state.name)
        if state is QpState.RESET:
            self._drop()
        self._backend.sleep.wake()

    def _drop(self) -> None:
        """Drop what has come and was not received: the server has dropped what it had."""
        dropped = self._incoming.drop()
        self._dropped += dropped
        self._give_back(dropped)

    def port_events(self) -> tuple[PortEvent, ...]:
        self._require_open("port_events", Phase.EVENT)
        if not self._connection.lost:
            now = time.monotonic()  # it does not wait
            with uninterrupted(), suppress(McastError, Late):  # what it has told is heard
                if self._looks("port_events", Phase.EVENT, now):
                    self._ask_news("port_events", Phase.EVENT, now)
            self._require_open("port_events", Phase.EVENT)
        found, self._port_events = self._port_events, ()
        return found

    @property
    def has_port_events(self) -> bool:
        return bool(self._port_events)

    def _hear(self, events: tuple[PortEvent, ...]) -> None:
        self._port_events = (*self._port_events, *events)[-PORT_EVENTS_KEPT:]

    def _looks(self, call: str, phase: Phase, end: float | None) -> bool:
        """Whether the server has something to tell."""
        return self._guarded(partial(self._incoming.look, end), call, phase)

    def _ask_news(self, call: str, phase: Phase, end: float | None) -> WcStatus | None:
        """Hear what the port tells; the status of a QP in ERR."""
        number, request = self._made.number, self._on("port_events")
        ask = partial(self._connection.ask, request, call, phase, end=end, owner=number)
        try:
            news: frames.QpNews = self._reply(ask, call, phase).value
        except Late:
            self._incoming.look_again()
            raise
        self._hear(news.events)
        return news.failed

    def _attach_mcast(self, gid: Gid, lid: int) -> None:
        request = frames.AttachQp(op="attach_mcast", qp=self._made.number, gid=gid, lid=lid)
        self._ask(request, "attach_mcast", Phase.ATTACH, gid=gid, lid=f"{lid:#x}")
        if (known := self._attached) is not None:
            known[gid] = lid

    def _detach_mcast(self, gid: Gid, lid: int) -> None:
        request = frames.AttachQp(op="detach_mcast", qp=self._made.number, gid=gid, lid=lid)
        self._ask(request, "detach_mcast", Phase.DETACH, gid=gid, lid=f"{lid:#x}")
        if (known := self._attached) is not None:
            known.pop(gid, None)

    def forget_attachments(self) -> None:
        """An event or a leave has changed them, maybe."""
        self._attached = None

    # --- sending -----------------------------------------------------------------------------

    def _send(
        self,
        destination: Destination,
        payloads: Sequence[bytes | memoryview | DeviceBytes],
        imm: int | None,
        timeout: float | None,
    ) -> None:
        owned = [one if type(one) is bytes else bytes_of(one, self) for one in payloads]
        if imm is None and len(owned) == 1:
            self._send_one(destination, owned[0], timeout)
        else:
            self._send_parts(destination, owned, imm, timeout)

    def _send_parts(
        self,
        destination: Destination,
        owned: Owned,
        imm: int | None,
        timeout: float | None,
    ) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        about: dict[str, object] = {"gid": destination.gid}
        if not isinstance(owned, list):
            lengths = [owned.nbytes // len(owned)] * len(owned)
        else:
            lengths = list(map(len, owned))
        posted = 0
        while True:
            stop = _stop(lengths, posted, rings.MOST_POSTED)
            try:
                if self._failed is not None:
                    raise QpError(self._failed, "send", Phase.SEND, about)
                if not self._post_part(
                    destination, owned[posted:stop], lengths[posted:stop], imm, end, about
                ):
                    stop = _stop(lengths[:stop], posted, frames.MOST_PAYLOAD)
                    part, sizes = owned[posted:stop], lengths[posted:stop]
                    self._ask_to_send(destination, part, sizes, imm, end, about)
            except McastError as error:
                error.posted = posted
                raise
            posted = stop
            if posted == len(owned):
                return

    def _send_rows(
        self, destination: Destination, rows: memoryview, imm: int | None, timeout: float | None
    ) -> None:
        self._send_parts(destination, rows, imm, timeout)

    def _send_headed(
        self, destination: Destination, batch: Headed, imm: int | None, timeout: float | None
    ) -> None:
        self._send_parts(destination, batch, imm, timeout)

    def _send_one(self, destination: Destination, payload: bytes, timeout: float | None) -> None:
        if not self._is_posted(destination, payload, timeout):
            self._send_parts(destination, [payload], None, timeout)

    def _is_posted(self, destination: Destination, payload: bytes, timeout: float | None) -> bool:
        """Send a message by the pipe, if that is the way for it now."""
        if timeout is not None or self._failed is not None:
            return False
        try:
            return self._outgoing.post_one(destination, payload)
        except Gone:  # which the request says in its own way
            return False

    def _post_part(
        self,
        destination: Destination,
        part: Owned,
        lengths: list[int],
        imm: int | None,
        end: float | None,
        about: dict[str, object],
    ) -> bool:
        """Send without a question; False if that must be asked for."""
        try:
            return self._outgoing.post(destination, part, lengths, imm, end)
        except Late:
            raise mcast_error(E.ETIMEDOUT, "send", Phase.SEND, about) from None
        except Gone:  # which the request says in its own way
            return False

    def _ask_to_send(
        self,
        destination: Destination,
        part: Owned,
        lengths: list[int],
        imm: int | None,
        end: float | None,
        about: dict[str, object],
    ) -> None:
        text = b'{"op":"send","qp":%d,"to":%b,"lengths":[%b],"imm":%b}' % (
            self._made.number,
            _as_json(destination),
            ",".join(map(str, lengths)).encode(),
            b"null" if imm is None else b"%d" % imm,
        )
        payload = bytes(part) if isinstance(part, memoryview) else b"".join(part)  # of a Headed, too
        where = "send", Phase.SEND, about
        while True:
            try:
                with uninterrupted():  # a descriptor may come with the answer
                    reply = self._connection.ask_raw("send", text, *where, payload, end=end)
                    self._outgoing.note(destination, reply.value, reply.descriptor)
                return
            except Gone:
                self._require_open("send", Phase.SEND)
                self._backend.lost(self._connection)
                self._failed = WcStatus.LOC_QP_OP_ERR
                raise QpError(self._failed, "send", Phase.SEND, about, self._connection.why) from None
            except Late as late:
                if late.sent:
                    return  # it is on its way, as what was posted is
                raise mcast_error(E.ETIMEDOUT, "send", Phase.SEND, about) from None
            except Unknown:
                raise Closed(type(self).__name__, "send", Phase.SEND) from None
            except McastError as error:
                left = None if end is None else end - time.monotonic()
                if error.errno != E.ETIMEDOUT or (left is not None and left <= 0):
                    raise
                with uninterrupted():  # in SQD, until another thread takes it to RTS
                    self._backend.sleep.until([], left)

    def _flush(self, timeout: float | None) -> None:
        """The answer comes after everything that was posted before."""
        end = None if timeout is None else time.monotonic() + timeout
        try:
            with uninterrupted():  # what comes with the answer is heard
                if self._connection.is_late(self._made.number, self._on("port_events")):
                    self._ask_news("flush", Phase.SEND, end)  # an answer to what was asked before
                failed = self._ask_news("flush", Phase.SEND, end)
        except Late:
            raise mcast_error(E.ETIMEDOUT, "flush", Phase.SEND) from None
        if failed is not None:
            raise QpError(failed, "flush", Phase.SEND)

    # --- receiving ---------------------------------------------------------------------------

    def _recv(self, max: int, timeout: float | None, events: bool) -> Batch:
        with uninterrupted():
            slices, own = self._receive(max, timeout, events)
            return (
                SimBatch(slices, own.__contains__, partial(self._give_back_to, self._slots), self._slots)
                if slices
                else CopiedBatch()
            )

    def _recv_one(self, timeout: float | None) -> Message | None:
        """Without a lease: the payload is this process's own."""
        if self._slots is not None:
            if isinstance(self._slots, DeviceSlots):
                self._refuse_copy()
            return super()._recv_one(timeout)
        incoming, connection = self._incoming, self._connection
        with uninterrupted():
            if self._failed is None and not connection.lost and not connection.forked:
                if incoming.comes_singly and (timeout is None or timeout > 0):
                    end = None if timeout is None else time.monotonic() + timeout
                    sleep = self._backend.sleep
                    incoming.look_and_sleep(sleep.waits, partial(sleep.until, seconds=timeout))
                    timeout = None if end is None else max(end - time.monotonic(), 0.0)
                if (message := incoming.take_one()) is not None:
                    return message
            slices, own_headers = self._receive(1, timeout, events=False)
            if not slices:
                return None
            ((burst, place, _),) = slices
            self._give_back(1)
            return message_of(burst, memoryview(burst.payloads[place]), burst.header in own_headers)

    def _receive(self, max: int, timeout: float | None, events: bool) -> tuple[Slices, set[Header]]:
        """The next messages, and which of their headers are this QP's own; none once time is over."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self._require_open("recv", Phase.RECV)
            self._connection.require_process("recv", Phase.RECV)
            if self._failed is not None:
                raise QpError(self._failed, "recv", Phase.RECV)
            alive = not self._connection.lost
            if alive:
                found = self._take(max, end)
                if found[0] or (events and self._port_events):
                    return found
            if events and self._owner.channel.pending:
                return [], set()
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return [], set()
            also = [self._owner.channel.descriptor()] if events else []
            if alive and not self._connection.lost:
                self._incoming.sleep(partial(self._sleep, also, left))
            else:
                self._backend.sleep.until(also, left)

    def _sleep(self, also: list[int], left: float | None, awaited: list[int]) -> None:
        self._backend.sleep.until([*awaited, *also], left)

    def _take(self, max: int, end: float | None) -> tuple[Slices, set[Header]]:
        try:
            found = self._guarded(partial(self._incoming.take, max, end), "recv", Phase.RECV)
            failed = None
            if not found[0] and self._incoming.has_news and self._looks("recv", Phase.RECV, end):
                failed = self._ask_news("recv", Phase.RECV, end)
        except Late:
            return [], set()
        except McastError:
            if self._connection.lost:
                return [], set()
            raise
        if failed is not None:
            raise QpError(failed, "recv", Phase.RECV)
        return found

    def _guarded(self, call_it: Callable[[], T], call: str, phase: Phase) -> T:
        """What a call to the messages here gives; the server's end is noted."""
        self._connection.require_process(call, phase)
        try:
            return call_it()
        except Unknown:
            raise Closed(type(self).__name__, call, phase) from None
        except ServerEnded:
            self._require_open(call, phase)
            self._ask(self._on("look"), call, phase)  # says which of both has ended
            raise Closed(type(self).__name__, call, phase) from None
        except Gone:
            self._require_open(call, phase)
            self._backend.lost(self._connection)
            raise mcast_error(E.ENODEV, call, phase, None, self._connection.why) from None

    def fileno(self) -> int:
        self._require_open("fileno", Phase.RECV)
        return self._incoming.descriptor()

    def _give_back(self, count: int) -> None:
        if is_within() and later(partial(self._give_back, count)):
            return  # a finalizer's: a thread that has the lock of what is received may wait for this request
        if not self._closed and not self._incoming.give_back(count):
            self._connection.tell(frames.GiveBack(qp=self._made.number, count=count))

    def _give_back_to(self, slots: Slots | None, count: int) -> None:
        if self._slots is slots:  # else that memory is closed, and the server has forgotten its receives
            self._give_back(count)

    # --- memory ------------------------------------------------------------------------------

    def _register(
        self, buffer: memoryview, recv_slot: int | None, relaxed_ordering: bool, constant: bool
    ) -> Region:
        whole = uninterrupted()
        if recv_slot is None:
            return SimRegion(whole, buffer, lambda: None)
        end = self._receive_into(MemorySlots(buffer, recv_slot), buffer.nbytes // recv_slot)
        return SimRegion(whole, buffer, end)

    def _register_dmabuf(
        self, fd: int, nbytes: int, offset: int, recv_slot: int | None, relaxed_ordering: bool
    ) -> DeviceRegion:
        region = SimDeviceRegion(self, uninterrupted(), fd, nbytes, offset, recv_slot is not None)
        if recv_slot is not None:
            try:
                region.end = self._receive_into(DeviceSlots(region, recv_slot), nbytes // recv_slot)
            except BaseException:
                region._close()
                raise
        return region

    def _receive_into(self, slots: Slots, depth: int) -> Callable[[], None]:
        """Receive into these; what ends that."""
        self._use(slots, (depth, slots.size))

        def end() -> None:
            if self._slots is slots and not self._closed:
                self._slots = None  # first, because another thread may release a batch of it meanwhile
                try:
                    self._use(None, None)
                except BaseException:
                    self._slots = slots
                    raise
                self._drop()

        return end

    def _use(self, slots: Slots | None, receives: tuple[int, int] | None) -> None:
        request = frames.Repost(qp=self._made.number, receives=receives)
        self._ask(request, "register", Phase.REGISTER, recv_slot=receives and receives[1])
        self._slots = slots

    # --- the end -----------------------------------------------------------------------------

    def _close(self) -> None:
        with uninterrupted():
            if not self._closed:
                self._look()
                with suppress(McastError):
                    self._ask(self._on("close_qp"), "close", Phase.CLOSE)
                self.ends()

    def ends(self) -> None:
        """The QP is closed, or its id is about to end it."""
        with self._backend.lock:
            if not self._closed:
                self._closed = True
                self._owner.forget_qp(self)
                self._backend.sleep.wake()
                self._connection.forget(self._made.number)
                self._incoming.close()


@lru_cache(maxsize=1024)
def _as_json(destination: Destination) -> bytes:
    """The destination as a string of JSON, which holds its own JSON."""
    return frames.TEXT.dump_json(destination.model_dump_json())


def _stop(lengths: list[int], start: int, most: int) -> int:
    """Where the messages from `start` on end that have so many bytes together, and fit in a frame; one at
    least."""
    stop = min(len(lengths), start + frames.MOST_MESSAGES)
    if sum(lengths[start:stop]) <= most:
        return stop
    ends = accumulate(lengths[start:stop])
    return start + max(1, sum(end <= most for end in ends))
