"""The contract over the sockets of a served fabric: each call is a request, and what waits polls descriptors.

The socket of an event channel has a byte while an event waits, and that of a queue pair while it has
messages, an error or unread events of its port. A waiting thread polls these, for at most a second at a time,
without holding a lock; then it sends the request.

The server's end is the removal of every device: ids report it, queue pairs are dead. `ServedBackend.devices`
attaches anew, to the same host, once the fabric is served again. A connection that an exception has broken
(see `connection`) is like a server that has ended.

This process owns the contract's objects and the numbers of their counterparts in the server, which owns all
else. A call that waits wakes when a descriptor is readable, when a second has passed, or when the backend is
closed. Deliberately not handled: what was in flight when the server ended. Messages and unread events are
lost, and each id gets a removal instead.
"""

from __future__ import annotations

import errno as E
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from ipaddress import IPv4Address, IPv6Address
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mcast.api import (
    JOIN_MASK,
    Backend,
    Batch,
    Broken,
    Capability,
    ClientProcess,
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
    JoinAttrEx,
    JoinFlag,
    Leases,
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
    ReentrantCall,
    Region,
    TimestampClock,
    WcStatus,
    mcast_error,
)
from mcast.backends.model.qp import Burst, Header
from mcast.backends.model.region import HostRegion
from mcast.backends.model.times import NS
from mcast.backends.sim.lease import (
    DeviceSlots,
    MemorySlots,
    PackedPayloads,
    SimBatch,
    Slices,
    Slots,
    message_of,
)
from mcast.backends.sim.region import SimDeviceRegion, bytes_of
from mcast.backends.sim.served import frames
from mcast.backends.sim.served.connection import (
    DEFAULT_TIMEOUT,
    ENDED,
    Connection,
    Reply,
    ServerGone,
    UnknownObject,
)
from mcast.backends.sim.served.listener import reserve_host
from mcast.backends.sim.served.tap import TapReader
from mcast.wire.addresses import Gid, McastAddress
from mcast.wire.mapping import infiniband_group, ipoib_broadcast_mgid
from mcast.wire.partition import FULL_MEMBER

_JOIN_MASK, _FULL_MEMBER = int(JOIN_MASK), int(JoinFlag.FULLMEMBER)
_ATTACH_AGAIN = 1.0
"""Seconds that an attempt to attach again waits for an answer: there will be another attempt."""
_SLEEP = 1.0
"""Maximum seconds of one sleep of a call that waits.

A descriptor that another thread closes just before the sleep wakes nobody.
"""
_SLEEP_UNSERVED = 0.02
"""Maximum sleep in seconds once the server has ended, or in SQD, where only another thread can act."""


def _sleep(fds: Sequence[int], left: float | None, longest: float = _SLEEP) -> None:
    """Sleep until one of these is readable, or `left` seconds; maybe less."""
    poller = select.poll()
    for fd in fds:
        if fd >= 0:  # else it was closed meanwhile
            poller.register(fd, select.POLLIN)
    poller.poll(max(0.0, longest if left is None else min(left, longest)) * 1000)


def _is_readable(connected: socket.SocketType) -> bool | None:
    """Return True if a byte lies in the socket; None at the end of the stream."""
    try:
        return bool(connected.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)) or None
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno is None:  # of a signal's handler
            raise
        return None


class _Remote(Closeable):
    """An object of which the server has a part: requests about it, and what their failures mean here."""

    _backend: ServedBackend
    _connection: Connection

    def _reply(
        self,
        name: str,
        *arguments: Any,
        call: str = "",
        about: dict[str, object] | None = None,
        tail: bytes = b"",
    ) -> Reply:
        connection, phase = self._connection, frames.OPERATIONS[name].phase
        try:
            return connection.ask(name, arguments, call, about, tail)
        except ServerGone:
            self._require_open(call or name, phase)
            self._backend.lost(connection)
            if connection.is_broken:
                what, fix = "connection to the fabric's server", "close the backend and open another one"
                raise Broken(what, "a request", fix, call or name, phase) from None
            errno = E.ENXIO if phase in (Phase.JOIN, Phase.LEAVE) else E.ENODEV
            raise mcast_error(errno, call or name, phase, None, connection.why) from None
        except UnknownObject:
            raise Closed(type(self).__name__, call or name, phase) from None

    def _ask(self, name: str, *arguments: Any, call: str = "", **about: object) -> Any:
        return self._reply(name, *arguments, call=call, about=about).value

    def _ask_or(self, otherwise: Any, name: str, *arguments: Any) -> Any:
        """Return the answer, or `otherwise` once the server has ended."""
        try:
            return self._ask(name, *arguments)
        except McastError:
            if self._closed or not self._connection.lost:
                raise
            return otherwise

    def _open_socket(self, name: str, *arguments: Any, **about: object) -> tuple[Any, socket.SocketType]:
        """Return the answer, and the socket that came with it.

        The kernel drops the socket where this process may open no more descriptors.
        """
        reply = self._reply(name, *arguments, about=about)
        if reply.file is None:
            self._end_there(getattr(reply.value, "number", reply.value))
            detail = f"this process has no file descriptor left (ulimit -n): {os.strerror(E.EMFILE)}"
            raise mcast_error(E.EMFILE, name, frames.OPERATIONS[name].phase, None, detail)
        connected: socket.SocketType = reply.file
        connected.setblocking(False)
        return reply.value, connected

    def _end_there(self, number: int) -> None:
        """End the server's part, as far as the server is there; amid a request of this thread, after that."""
        if self._connection.in_request:
            self._connection.tell("close", (number,))
            return
        with suppress(McastError):
            self._ask("close", number)

    def _wake(self, connected: socket.SocketType) -> None:
        """Wake whoever sleeps on the socket, and close it; in a fork, only close it."""
        if os.getpid() == self._connection.pid:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        connected.close()


class ServedBackend(_Remote, Backend):
    """A process on one host of a served fabric, or on all of them. Raises OSError where none is served."""

    def __init__(
        self, path: Path, host: object = "free", bind: object = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        self._backend = self
        self.path: Path = path
        self.lock: threading.RLock = threading.RLock()
        """Of the connection, and of what is open."""
        self._channels: dict[ServedEventChannel, None] = {}
        self._connection = connection = Connection(path, host, bind, timeout)
        self.fabric: frames.Attached = connection.fabric
        self.name: str = self.fabric.backend
        self.capabilities: frozenset[Capability] = frozenset(self.fabric.capabilities)
        hosts = self.fabric.hosts
        self._host: int | str = "all" if hosts == "all" else int(hosts)
        self._reservation = None if isinstance(self._host, str) else reserve_host(path, self._host)
        """Reservation of the host for this process while the fabric is not served."""

    def now(self) -> float:
        return (time.monotonic_ns() - self.fabric.made) / NS

    @property
    def epoch(self) -> int:
        """When the fabric was made, in ns since 1970 as the system's clock has them now."""
        return self.fabric.made + time.time_ns() - time.monotonic_ns()

    def new_seed(self) -> int:
        return int(self._ask_open("new_seed"))

    def devices(self) -> tuple[DeviceInfo, ...]:
        self._require_open("devices", Phase.OPEN)
        self._connection.require_process("devices", Phase.OPEN)
        try:
            self.connection()
        except OSError as error:
            if error.errno is None:  # of a signal's handler, and not because nobody serves it
                raise
        return tuple(self._ask_or((), "devices"))

    def client_processes(self) -> tuple[ClientProcess, ...]:
        return tuple(self._ask_or((), "guests"))

    def control(self, words: Sequence[str]) -> tuple[str, ...]:
        """Do to the fabric what the words of `mcast sim ctl` say. Raises McastError (EINVAL) for others."""
        return tuple(self._ask_open("ctl", list(words)))

    def tap(self) -> TapReader:
        """Return what happens on the fabric from now on, on all its ports. Raises McastError (EBUSY)."""
        introduction: str = self._ask_open("introduction")
        file = self._reply("tap").file
        if file is None:
            self._ask("untap")
            raise mcast_error(
                E.EMFILE, "tap", Phase.OPEN, None, "this process has no file descriptor left (ulimit -n)"
            )
        tapped = TapReader(introduction, file, lambda: int(self._ask_open("untap")))
        self._connection.release_file(file)
        return tapped

    def _port_counters(self, device: str, port_num: int) -> Mapping[str, int]:
        with suppress(McastError, ReentrantCall):  # the latter in a signal's handler amid a request
            found: dict[str, int] = self._ask_open("port_counters", device, port_num)
            return found
        self._require_open("port_counters", Phase.OPEN)
        return {}

    def groups(self) -> GroupTable:
        found: GroupTable = self._ask_open("groups")
        return found

    def event_channel(self) -> EventChannel:
        self._connection.require_process("event_channel", Phase.OPEN)
        with self.lock:  # a close in another thread comes before or after
            self._require_open("event_channel", Phase.OPEN)
            channel = ServedEventChannel(self)
            self._channels[channel] = None
            try:
                channel.attach("event_channel")
            except McastError:
                channel._close()
                raise
        return channel

    def _ask_open(self, name: str, *arguments: Any) -> Any:
        self._require_open(name, frames.OPERATIONS[name].phase)
        return self._ask(name, *arguments)

    @property
    def guard(self) -> AbstractContextManager[object]:
        """The lock; in a fork none, because a thread that is not there may have it."""
        return self.lock if os.getpid() == self._connection.pid else nullcontext()

    def _close(self) -> None:
        if self._connection.closed:
            return
        with self.guard:
            self._closed = True
            channels = list(self._channels)
        for channel in channels:
            channel._close()
        with suppress(McastError, ServerGone, ReentrantCall):  # what it does is done when this returns
            self._connection.ask("bye", (), "close")
        if self._reservation is not None:
            self._reservation.close()
        self._connection.close()

    # --- the server's end, and its return --------------------------------------------------------

    def connection(self) -> Connection:
        """Return the connection to the server, made anew if need be. Raises OSError, McastError."""
        with self.lock:
            before = self._connection
            if before.lost and not self._closed:
                self.lost(before)
                fresh = Connection(self.path, self._host, None, min(before.timeout, _ATTACH_AGAIN))
                fresh.timeout = before.timeout
                if fresh.fabric.link_layer is not self.fabric.link_layer:
                    fresh.close()
                    raise mcast_error(E.ENODEV, "devices", Phase.OPEN, None, "another fabric is served there")
                self._connection = fresh
                before.close()
            return self._connection

    def lost(self, connection: Connection) -> None:
        """Every id of that connection has lost its device."""
        if os.getpid() == connection.pid:
            connection.mark_lost(connection.why)
            with self.lock:
                for channel in list(self._channels):
                    channel.mark_lost(connection)

    def forget(self, channel: ServedEventChannel) -> None:
        """The channel is closed."""
        self._channels.pop(channel, None)


class ServedEventChannel(_Remote, EventChannel):
    """Event channel over the server's socket.

    Its descriptor is an epoll, so that it stays the same when the fabric is served again. A socket at its end
    stays there while events of this process are left.
    """

    def __init__(self, backend: ServedBackend) -> None:
        self._backend, self._connection = backend, backend._connection
        self.ids: dict[tuple[Connection, int], ServedCmId] = {}
        self._local: deque[CmEvent] = deque()
        """Events that no server reports: devices that were removed with it."""
        self._number: int | None = None
        """Number of the channel at the server; None when it has ended."""
        self._socket: socket.SocketType | None = None
        self._epoll = select.epoll()

    def attach(self, call: str) -> tuple[Connection, int]:
        """Return the connection, and the number of the server's channel for this one. Called in the lock."""
        try:
            connection = self._backend.connection()
        except McastError:
            raise
        except OSError:
            raise mcast_error(E.ENODEV, call, Phase.OPEN, None, ENDED) from None
        if self._number is None:
            self._drop_socket()
            self._connection = connection
            self._number, self._socket = self._open_socket("event_channel")
            connection.release_file(self._socket)
            self._epoll.register(self._socket, select.EPOLLIN)
        return connection, self._number

    def fileno(self) -> int:
        self._require_open("fileno", Phase.EVENT)
        return self._epoll.fileno()

    def descriptor(self) -> int:
        """Return what a wait sleeps on; -1 once the channel is closed."""
        return -1 if self._epoll.closed else self._epoll.fileno()

    @property
    def pending(self) -> bool:
        if self._closed:
            self._require_open("pending", Phase.EVENT)
        connected, connection = self._socket, self._connection
        if self._local or connected is None or self._number is None:
            return bool(self._local)
        if (found := _is_readable(connected)) is None and not self._closed:
            self._backend.lost(connection)
            return bool(self._local)
        return bool(found)

    def _create_id(self, port_space: PortSpace) -> CmId:
        self._connection.require_process("create_id", Phase.OPEN)
        with self._backend.lock:
            self._require_open("create_id", Phase.OPEN)
            connection, channel = self.attach("create_id")
            number: int = self._ask("create_id", channel, port_space)
            made = self.ids[connection, number] = ServedCmId(self, connection, number, port_space)
        return made

    def _get_event(self, timeout: float | None) -> CmEvent | None:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._closed:
                self._require_open("get_event", Phase.EVENT)
            self._connection.require_process("get_event", Phase.EVENT)
            if self.pending and (event := self._next()) is not None:
                return event
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return None
            _sleep([self.descriptor()], left)

    def _next(self) -> CmEvent | None:
        with self._backend.lock:
            if self._local:
                event = self._local.popleft()
                self._settle()
                return event
            connection, number = self._connection, self._number
        if number is None:
            return None  # another thread has seen the server's end
        found: frames.FetchedEvent | None = self._ask_or(None, "get_event", number)
        owner = None if found is None else self.ids.get((connection, found.id))
        if found is None or owner is None:
            return None  # its id was destroyed before the answer came
        owner.forget_attached()
        context = None if found.context is None else owner.contexts.get(found.context)
        return CmEvent(
            found.type, found.status, found.errno, context, owner, found.ud, found.detail, found.found
        )

    def mark_lost(self, connection: Connection) -> None:
        """The server has ended: as if each device had been removed. Called in the lock."""
        if self._closed or self._number is None or connection is not self._connection:
            return
        for (one, _), cm_id in self.ids.items():
            if one is connection and cm_id.device is not None:
                why = connection.why
                self._local.append(CmEvent(CmEventType.DEVICE_REMOVAL, 0, E.ENODEV, None, cm_id, None, why))
        self._number = None
        self._settle()

    def _settle(self) -> None:
        """Leave a socket at its end in the epoll only while there are events. Called in the lock."""
        if self._number is None and not self._local:
            self._drop_socket()

    def _drop_socket(self) -> None:
        connected, self._socket = self._socket, None
        if connected is not None:
            is_fork = os.getpid() != self._connection.pid  # which has the parent's epoll
            if not is_fork and not self._epoll.closed:
                self._epoll.unregister(connected)
            connected.close()

    def forget(self, cm_id: ServedCmId) -> None:
        """The id is destroyed, and its events with it."""
        with self._backend.guard:
            self.ids.pop((cm_id._connection, cm_id.number), None)
            if any(event.id is cm_id for event in self._local):
                self._local = deque(event for event in self._local if event.id is not cm_id)
                self._settle()

    def _close(self) -> None:
        if self._epoll.closed:
            return
        with self._backend.guard:
            self._closed = True
            number, connected = self._number, self._socket
        for cm_id in list(self.ids.values()):
            cm_id._close()
            cm_id.end()
        if number is not None:
            self._end_there(number)
        if connected is not None:
            self._wake(connected)
        self._epoll.close()
        self._backend.forget(self)


class ServedCmId(_Remote, CmId):
    """An id of a channel, which the server knows by its number."""

    def __init__(
        self, channel: ServedEventChannel, connection: Connection, number: int, port_space: PortSpace
    ) -> None:
        super().__init__()
        self.channel: ServedEventChannel = channel
        self._backend, self._connection = channel._backend, connection
        self.number: int = number
        self.port_space: PortSpace = port_space
        self._place = frames.IdBinding()
        self._qp: ServedQueuePair | None = None
        self.contexts: dict[int, object] = {}
        """Number of a join -> the context that it was given."""
        self._numbers = count(1)
        self._number_of: dict[McastAddress, int] = {}

    @property
    def device(self) -> str | None:
        return self._place.device

    @property
    def link_layer(self) -> LinkLayer | None:
        return self._place.link_layer

    @property
    def qp(self) -> QueuePair | None:
        return self._qp

    def _bind_addr(self, src: IPv4Address | IPv6Address) -> None:
        self._stand(self._ask("bind_addr", self.number, src, src=src), "bind_addr", Phase.BIND)

    def _resolve_addr(self, dst: McastAddress, src: IPv4Address | IPv6Address | None, timeout: float) -> None:
        place = self._ask("resolve_addr", self.number, dst, src, dst=dst, src=src)
        self._stand(place, "resolve_addr", Phase.RESOLVE)

    def _stand(self, place: frames.IdBinding, call: str, phase: Phase) -> None:
        """The id is bound; if the server has ended meanwhile, no event would report its removal."""
        with self._backend.lock:
            if self._connection.lost:
                self._require_open(call, phase)
                raise mcast_error(E.ENODEV, call, phase, None, self._connection.why)
            self._place = place

    def _create_qp(self, init: QpInit) -> QueuePair:
        about: dict[str, object] = {"qp_type": init.qp_type.name}
        if init.comp_vector is not None:
            about["comp_vector"] = init.comp_vector
        # How it polls concerns nobody here, and JSON has no infinity.
        sent = init.model_copy(update={"busy_poll": 0.0})
        made, connected = self._open_socket("create_qp", self.number, sent, **about)
        with self._backend.lock:
            if self._closed:  # by another thread, and its queue pair with it
                connected.close()
                self._connection.release_file(connected)
                raise Closed(type(self).__name__, "create_qp", Phase.CREATE_QP)
            self._qp = ServedQueuePair(self, made, connected, init.qp_type)
            self._connection.release_file(connected)
            return self._qp

    def forget_attached(self) -> None:
        """An event or a leave may have changed what the queue pair is attached with."""
        if (qp := self._qp) is not None:
            qp.attached = None

    def forget_qp(self, qp: ServedQueuePair) -> None:
        """The queue pair is closed."""
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
        given: object = addr  # an attr made by model_construct may have any value there
        sent = given if isinstance(given, McastAddress) else None
        self.contexts[number] = context  # first: the event may be fetched before this call returns
        try:
            self._ask(
                "join", self.number, call, mask, flags, sent, number, call=call, addr=addr, join_flags=flags
            )
        except McastError:
            self.contexts.pop(number, None)  # a close may have emptied it
            raise
        self._number_of[addr] = number

    def _leave_multicast(self, addr: McastAddress) -> None:
        self._ask("leave_multicast", self.number, addr, addr=addr)
        self.forget_attached()
        self.contexts.pop(self._number_of.pop(addr, 0), None)

    def _destroy(self) -> None:
        self.end()

    def end(self) -> None:
        """Free all, or what a call that was interrupted has left."""
        if self.channel.ids.get((self._connection, self.number)) is self:
            with self._backend.guard:  # in which another thread may just make it
                qp = self._qp
            if qp is not None:
                qp._close()
            self._end_there(self.number)
            self.channel.forget(self)


class ServedQueuePair(_Remote, QueuePair):
    """The queue pair of an id; its descriptor is readable also once the server has ended."""

    def __init__(
        self, owner: ServedCmId, made: frames.CreatedQp, connected: socket.SocketType, qp_type: QpType
    ) -> None:
        self._owner, self._made, self._type = owner, made, qp_type
        self._backend, self._connection, self._number = owner._backend, owner._connection, made.number
        self._socket = connected
        self._receiving: threading.RLock = threading.RLock()
        """Of receives; nobody waits in it."""
        self._got = 0
        """Answers to receives that were read: the server repeats the last one if its number is missing."""
        self._is_asking = False
        """True amid a receive, and after one whose answer was not read."""
        self._own: set[Header] = set()
        """Headers of this queue pair's own messages."""
        self._port_changed = False
        self._slots: Slots | None = None
        self._leases = Leases(self._give_ended)
        self.attached: dict[Gid, int] | None = None
        """Attachments as far as they are known here: only this process changes them."""
        self._last = QpState.RTS, QpCounters(0, 0, 0, 0, 0, made.depth, made.depth, dropped_mtu=0)

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
        return QpState.ERR if self._is_dead() else self._query()[0]

    @property
    def attachments(self) -> Mapping[Gid, int]:
        found = self.attached
        if found is None:
            found = self.attached = dict(self._ask("attachments", self._number))
        return MappingProxyType(found.copy())

    @property
    def counters(self) -> QpCounters:
        self._give_ended()
        return self._query()[1]

    def _query(self) -> tuple[QpState, QpCounters]:
        """Return state and counters, as they were last seen once the queue pair or the server has ended."""
        if not self._closed and not self._connection.lost:
            with suppress(McastError, ReentrantCall):  # the latter in a signal's handler amid a request
                self._last = self._ask("query_qp", self._number)
        return self._last

    def _modify(self, state: QpState) -> None:
        self._ask("modify", self._number, state, state=state.name)

    def port_events(self) -> tuple[PortEvent, ...]:
        self._require_open("port_events", Phase.EVENT)
        self._port_changed = False
        return tuple(self._ask_or((), "port_events", self._number))

    @property
    def has_port_events(self) -> bool:
        return self._port_changed

    def _attach_mcast(self, gid: Gid, lid: int) -> None:
        self._ask("attach_mcast", self._number, gid, lid, gid=gid, lid=f"{lid:#x}")
        if (known := self.attached) is not None:
            known[gid] = lid

    def _detach_mcast(self, gid: Gid, lid: int) -> None:
        self._ask("detach_mcast", self._number, gid, lid, gid=gid, lid=f"{lid:#x}")
        if (known := self.attached) is not None:
            known.pop(gid, None)

    # --- sending -----------------------------------------------------------------------------

    def _send(
        self,
        destination: Destination,
        payloads: Sequence[bytes | memoryview | DeviceBytes],
        imm: int | None,
        timeout: float | None,
    ) -> None:
        owned = [one if type(one) is bytes else bytes_of(one, self) for one in payloads]
        self._send_bytes(destination, b"".join(owned), list(map(len, owned)), imm, timeout)

    def _send_rows(
        self, destination: Destination, rows: memoryview, imm: int | None, timeout: float | None
    ) -> None:
        count = len(rows)
        self._send_bytes(destination, bytes(rows), [rows.nbytes // count] * count, imm, timeout)

    def _send_bytes(
        self, to: Destination, data: bytes, lengths: list[int], imm: int | None, timeout: float | None
    ) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        about: dict[str, object] = {"gid": to.gid}
        while not self._is_dead():
            try:
                self._reply("send", self._number, frames.text_of(to), lengths, imm, about=about, tail=data)
                return
            except McastError as error:
                left = None if end is None else end - time.monotonic()
                if self._is_dead() and not self._closed:
                    break
                if error.errno != E.ETIMEDOUT or (left is not None and left <= 0):
                    raise
            _sleep([], left, _SLEEP_UNSERVED)  # in SQD, until another thread takes it to RTS
            self._require_open("send", Phase.SEND)
        raise QpError(WcStatus.LOC_QP_OP_ERR, "send", Phase.SEND, about, self._connection.why)

    def _is_dead(self) -> bool:
        """Return True once the server has ended."""
        return self._connection.lost

    # --- receiving ---------------------------------------------------------------------------

    def _recv(self, max: int, timeout: float | None, events: bool) -> Batch:
        self._give_ended()
        leases, slots = self._leases, self._slots
        if not (slices := self._receive(max, timeout, events)):
            return CopiedBatch()
        return SimBatch(slices, self._own.__contains__, leases, slots)

    def _recv_one(self, timeout: float | None) -> Message | None:
        """Without a lease: the payload is this process's own."""
        if self._slots is not None:
            if isinstance(self._slots, DeviceSlots):
                self._refuse_copy()
            return super()._recv_one(timeout)
        if not (slices := self._receive(1, timeout, events=False)):
            return None
        self._give_back(None, 1)
        ((burst, at, _),) = slices
        return message_of(burst, memoryview(burst.payloads[at]), burst.header in self._own)

    def _receive(self, limit: int, timeout: float | None, events: bool) -> Slices:
        """Return the next messages; none once time is over, or for what else `events` asks for."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self._require_open("recv", Phase.RECV)
            self._connection.require_process("recv", Phase.RECV)
            readable = _is_readable(self._socket)
            if (readable or self._is_asking) and (slices := self._fetch(limit)):
                return slices
            if readable is None and not self._closed:
                self._backend.lost(self._connection)
            left = None if end is None else end - time.monotonic()
            if (left is not None and left <= 0) or (
                events and (self._port_changed or self._owner.channel.pending)
            ):
                return []
            also = [self._owner.channel.descriptor()] if events else []
            if self._connection.lost:
                _sleep(also, left, _SLEEP_UNSERVED)
            else:
                self._connection.flush()
                _sleep([self._socket.fileno(), *also], left)

    def _fetch(self, limit: int) -> Slices:
        with self._receiving:
            self._is_asking = True
            try:
                reply = self._reply("recv", self._number, limit, self._got)
            except McastError:
                self._require_open("recv", Phase.RECV)
                if self._connection.lost:
                    return []
                raise
            self._got += 1
            self._is_asking = False
        received: frames.Received = reply.value
        self._port_changed = received.port_changed
        slices: Slices = []
        begin = 0
        for one in received.bursts:
            header = frames.header_of(one.source, one.group, one.src_qp, one.slid)
            if one.own:
                self._own.add(header)
            payloads = PackedPayloads(reply.tail, one.lengths, begin)
            begin += sum(one.lengths)
            slices.append((Burst(payloads, 0, header, one.imm, 0, one.at), 0, len(one.lengths)))
        return slices

    def fileno(self) -> int:
        self._require_open("fileno", Phase.RECV)
        return self._socket.fileno()

    def _give_ended(self) -> None:
        """Give back the receives of batches that have ended."""
        if count := self._leases.reclaim():
            self._give_back(self._slots, count)

    def _give_back(self, slots: Slots | None, number: int) -> None:
        if self._slots is slots and not self._closed:  # else the receives of that memory were posted anew
            self._connection.tell("give_back", (self._number, number))

    # --- memory ------------------------------------------------------------------------------

    def _register(
        self, buffer: memoryview, recv_slot: int | None, relaxed_ordering: bool, constant: bool
    ) -> Region:
        if recv_slot is None:
            return HostRegion(self._guard, buffer, lambda: None)
        end = self._receive_into(MemorySlots(buffer, recv_slot), buffer.nbytes // recv_slot)
        return HostRegion(self._guard, buffer, end)

    def _register_dmabuf(
        self, fd: int, nbytes: int, offset: int, recv_slot: int | None, relaxed_ordering: bool
    ) -> DeviceRegion:
        region = SimDeviceRegion(self, self._guard, fd, nbytes, offset, recv_slot is not None)
        if recv_slot is not None:
            try:
                region.end = self._receive_into(DeviceSlots(region, recv_slot), nbytes // recv_slot)
            except BaseException:
                region._close()
                raise
        return region

    def _receive_into(self, slots: Slots, depth: int) -> Callable[[], None]:
        """Receive into these slots; return the function that ends this."""
        self._ask("register", self._number, (depth, slots.size), recv_slot=slots.size)
        self._slots, self._leases = slots, Leases(self._give_ended)

        def end() -> None:
            if self._slots is slots and not self._closed:
                # First, because another thread may release a batch of it meanwhile
                self._slots, self._leases = None, Leases(self._give_ended)
                with suppress(McastError):
                    self._ask("register", self._number, None)

        return end

    # --- the end -----------------------------------------------------------------------------

    def _close(self) -> None:
        if self._socket.fileno() < 0:
            return
        if not self._closed:
            self._query()
            self._closed = True
        self._end_there(self._number)
        self._wake(self._socket)
        self._owner.forget_qp(self)
