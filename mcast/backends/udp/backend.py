"""The contract over sockets: each call is a change under the backend's guard, and turns errnos into errors.

All objects of a backend share its guard, as those of a simulated fabric do. No call waits under it: system
calls there are made with MSG_DONTWAIT, and a call that has to wait sleeps on descriptors outside.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from itertools import starmap
from math import inf
from time import monotonic
from typing import Any, NoReturn

from mcast.api import (
    JOIN_MASK,
    MAX_SLEEP,
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
    EventChannel,
    Gid,
    GroupTable,
    Guard,
    HeaderBodyBatch,
    JoinFlag,
    McastAddress,
    McastError,
    Message,
    Phase,
    PortEvent,
    PortSpace,
    QpCounters,
    QpError,
    QpInit,
    QpState,
    QueuePair,
    Refused,
    Region,
    SignalSafeWeakSet,
    TimedOut,
    Waiters,
    WcStatus,
    mcast_error,
    require_comp_vector,
)
from mcast.backends.model import cm
from mcast.backends.model.objects import ModelCmId, ModelQueuePair, check, event_of
from mcast.backends.model.qp import Qp
from mcast.backends.model.region import HostRegion
from mcast.backends.net.groups import group_table
from mcast.backends.net.readiness import Readiness
from mcast.backends.udp import _native, sockets
from mcast.backends.udp.availability import why_refused
from mcast.backends.udp.datapath import DataPath
from mcast.backends.udp.network import UdpNetwork
from mcast.backends.udp.suspicions import suspicions
from mcast.backends.udp.watcher import Watcher
from mcast.wire.packets import ROCE_UDP_PORT

CAPABILITIES = frozenset({Capability.IGMP, Capability.CONNECTED_QP, Capability.GROUP_TABLE})
_UNUSABLE = frozenset(
    {errno.ENETUNREACH, errno.ENETDOWN, errno.ENODEV, errno.EADDRNOTAVAIL, errno.EINVAL, errno.EHOSTUNREACH}
)
"""Errnos of a send from a port whose link or address is gone, or to where no route leads."""
_JOIN_MASK, _FULL_MEMBER = int(JOIN_MASK), JoinFlag.FULLMEMBER
_AGAIN = errno.EAGAIN
_NO_LIMIT = (1 << 32) - 1
"""In place of a group's MTU where it has none."""


class UdpBackend(Backend):
    """The host's IPv4 interfaces."""

    _strict = True

    def __init__(self) -> None:
        self.name: str = "udp"
        self.capabilities: frozenset[Capability] = CAPABILITIES
        self._guard = Guard("udp backend", "close the backend and open another one")
        self.waiters: Waiters = Waiters()
        self._guard.after_change = lambda call: self.waiters.wake()
        self._channels: dict[UdpEventChannel, None] = {}
        self._pid = os.getpid()
        self._watcher = Watcher(self._on_readable)
        self.network: UdpNetwork = UdpNetwork()
        try:
            self.network.queue_pairs.on_new_source = self._open_roce
            self._watcher.add(self.network.hosts.netlink.fileno())
            self._watcher.start()
            _backends.add(self)
        except BaseException:
            self._close()
            raise

    def _open_roce(self, address: IPv4Address) -> None:
        """Take unicast to port 4791 of the address, for queue pairs of any process."""
        if address not in self.network.roce_sockets:
            roce_socket = self.network.roce_sockets[address] = sockets.open_roce(address)
            self._watcher.add(roce_socket.fileno())

    def _on_readable(self, readable: list[int]) -> None:
        """Do the thread's part."""
        self._guard.run("a report of the kernel", Phase.EVENT, self._hear, readable)

    def _hear(self, readable: list[int]) -> None:
        if self._closed:
            return
        self.network.poll_changes()
        for address, roce_socket in self.network.roce_sockets.items():
            if roce_socket.fileno() in readable:
                self.network.forward_unicast(roce_socket, address)

    def devices(self) -> tuple[DeviceInfo, ...]:
        return self._change("devices", Phase.OPEN, self._devices)

    def _devices(self) -> tuple[DeviceInfo, ...]:
        self.network.poll_changes()
        return tuple(port.info() for port in self.network.hosts.ports)

    def _port_counters(self, device: str, port_num: int) -> Mapping[str, int]:
        pairs = self.network.queue_pairs
        found = dict(pairs.counted.get(device, {}))
        for path in list(pairs.paths.values()):
            if path.port.name == device:
                path.check_overflow()
                for name, count in path.counts()[4].items():
                    found[name] = found.get(name, 0) + count
        return found | dict(self.network.forward_counts)

    def _suspicions(self, quiet: float) -> tuple[Cause, ...]:
        paths, now = list(self.network.queue_pairs.paths.values()), monotonic()
        if quiet and any(path.counts()[0] or now - path.opened < quiet for path in paths):
            return ()
        ports = sorted({(path.port.name, path.port.up) for path in paths})
        return next(filter(None, starmap(suspicions, ports)), ())

    def groups(self) -> GroupTable:
        return group_table(self._change("groups", Phase.OPEN, self._devices), lambda device, port: (device,))

    def event_channel(self) -> EventChannel:
        return self._change("event_channel", Phase.OPEN, self._event_channel)

    def _event_channel(self) -> EventChannel:
        try:
            channel = UdpEventChannel(self, self._channels)
        except OSError as error:
            raise _refused(error, "event_channel", Phase.OPEN) from error
        self._channels[channel] = None
        return channel

    def leave_to_parent(self) -> None:
        """Refuse all calls but close, in the child of a fork, which shares its parent's sockets and epolls.

        A close then ends no thread of the parent, and leaves none of its groups.
        """
        self._guard.amid = self._guard.amid or "a fork"
        self._guard.fix = (
            f"it belongs to process {self._pid}; open another one in this process (multiprocessing: start "
            "method 'spawn')"
        )
        self._watcher.leave_to_parent()
        for channel in self._channels:
            channel.readiness.close()
        for path in self.network.queue_pairs.paths.values():
            path.readiness.close()

    def _close(self) -> None:
        if self._freed:
            return
        self._closed = True
        for channel in list(self._channels):
            channel._close()
        self._watcher.close()
        self.network.close()
        self._freed = True


_backends: SignalSafeWeakSet[UdpBackend] = SignalSafeWeakSet()


def _after_fork() -> None:
    for backend in _backends:
        backend.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


class UdpEventChannel(EventChannel):
    """An event channel; its descriptor is readable while an event waits."""

    _strict = True

    def __init__(self, backend: UdpBackend, siblings: dict[UdpEventChannel, None]) -> None:
        self.backend: UdpBackend = backend
        self._siblings = siblings
        self._guard = backend._guard
        self.ids: dict[UdpCmId, None] = {}
        self.core: cm.CmChannel = cm.CmChannel()
        self.readiness: Readiness = Readiness(lambda: bool(self.core.queue) or self._closed)
        self.core.on_event = self.readiness.show

    def fileno(self) -> int:
        self._require_open("fileno", Phase.EVENT)
        return self.readiness.fd

    @property
    def pending(self) -> bool:
        self._require_open("pending", Phase.EVENT)
        return bool(self.core.queue)

    def _create_id(self, port_space: PortSpace) -> CmId:
        return UdpCmId(self, cm.CmaId(self.backend.network, frozenset(), self.core, port_space))

    def _get_event(self, timeout: float | None) -> CmEvent | None:
        end = inf if timeout is None else monotonic() + timeout
        while True:
            event = self._guard.run("get_event", Phase.EVENT, self._next)
            left = end - monotonic() if timeout != 0 else 0.0
            if event is not None or left <= 0:
                return event
            _native.wait(self.readiness.fd, -1, False, min(left, MAX_SLEEP))

    def _next(self) -> CmEvent | None:
        if self._closed:
            self._refuse_closed()
        if not self.core.queue:
            return None
        return event_of(self.core.get())

    def _refuse_closed(self) -> NoReturn:
        try:
            self._require_open("get_event", Phase.EVENT)
        except McastError as error:
            raise Refused(error) from None
        raise AssertionError

    def _close(self) -> None:
        if self._freed:
            return
        self._closed = True
        self.readiness.show()
        for cm_id in list(self.ids):
            cm_id._close()
        self.readiness.close()
        self._siblings.pop(self, None)
        self._freed = True


class UdpCmId(ModelCmId):
    """An id of a channel."""

    _strict = True

    def __init__(self, channel: UdpEventChannel, core: cm.CmaId) -> None:
        super().__init__(core, channel._guard, channel.ids)
        self.channel: UdpEventChannel = channel

    def _bind_addr(self, src: IPv4Address | IPv6Address) -> None:
        self.channel.backend.network.poll_changes()
        detail = ""
        if isinstance(src, IPv6Address):
            detail = "a RoCEv2 group is an IPv4 group here: bind to an IPv4 address of the interface"
        check(self.core.bind(src), "bind_addr", Phase.BIND, detail, src=src)

    def _resolve_addr(self, dst: McastAddress, src: IPv4Address | IPv6Address | None, timeout: float) -> None:
        self.channel.backend.network.poll_changes()
        try:
            failed = self.core.resolve(dst, src)
        except OSError as error:
            raise _refused(error, "resolve_addr", Phase.RESOLVE, dst=dst, src=src) from error
        check(failed, "resolve_addr", Phase.RESOLVE, dst=dst, src=src)

    def _create_qp(self, init: QpInit) -> QueuePair:
        name = self.device or "a UDP socket"
        try:
            require_comp_vector(init.comp_vector, 1, name)
            if init.timestamps:
                _cannot(name, "stamp completions with the time: do without timestamps", timestamps=True)
            if init.moderation is not None:
                _cannot(name, "moderate completions: do without", moderation=init.moderation)
        except McastError as error:
            raise Refused(error) from None
        self.channel.backend.network.poll_changes()  # else the new queue pair has events from before it
        pairs, source = self.channel.backend.network.queue_pairs, self.core.source
        pairs.source = source if isinstance(source, IPv4Address) else None
        try:
            failed = self.core.create_qp(init)
        except OSError as error:
            about = {"qp_type": init.qp_type.name, "source": source}
            raise _refused(error, "create_qp", Phase.CREATE_QP, **about) from error
        check(failed, "create_qp", Phase.CREATE_QP, qp_type=init.qp_type.name)
        assert self.core.qp is not None
        self._qp = UdpQueuePair(self, self.core.qp, pairs.paths[self.core.qp], init)
        return self._qp

    def _join_multicast(
        self,
        addr: McastAddress,
        context: object,
        call: str = "join_multicast",
        mask: int = _JOIN_MASK,
        flags: int = _FULL_MEMBER,
    ) -> None:
        self.channel.backend.network.poll_changes()
        failed, detail, at = 0, "", self.core.interface
        if at is not None and not at.port.multicast and self.core.port_space is not PortSpace.TCP:
            name = at.port.name
            failed, detail = errno.EOPNOTSUPP, f"{name} has no multicast: ip link set {name} multicast on"
        failed = failed or self.core.join(mask, flags, addr, context)
        if failed == errno.ENODEV and at is not None:
            detail = f"{at.port.name} is down: ip link set {at.port.name} up"
        check(failed, call, Phase.JOIN, detail, addr=addr, join_flags=flags)


_native.set_up(QueuePair, Message, Gid, QpState.RTS, CopiedBatch)


class UdpQueuePair(_native.Calls, ModelQueuePair):
    """The QP of an id. `Calls` does the plain cases in C (csrc/calls.c), and this class does the rest."""

    _strict = True
    _owner: UdpCmId

    def __init__(self, owner: UdpCmId, core: Qp, path: DataPath, init: QpInit) -> None:
        super().__init__(owner, core)
        self.path: DataPath = path
        self._busy_poll = init.busy_poll
        core.on_readable = path.readiness.show
        path.leases.on_release = self._on_release
        path.forget_aim = partial(self._aim, None)
        if not self._busy_poll:
            readiness = path.readiness
            self._arm(path.ring, self._guard, core, core.port, path, readiness, readiness.fd)

    @property
    def state(self) -> QpState:
        self._require_open("state", Phase.MODIFY)
        self._poll_sockets()  # a message may have come that puts the queue pair into ERR
        return self.core.state

    @property
    def counters(self) -> QpCounters:
        core, path = self.core, self.path
        self._poll_sockets()
        received, free, low, empty, fates = path.counts()
        return QpCounters(
            path.ring.sent,
            received,
            fates["no_receive"] + fates["overflow"],
            fates["too_long"],
            fates["qkey_violations"],
            free,
            low,
            empty,
            dropped_mtu=fates["oversized"],
            dropped_reset=core.dropped_reset,
        )

    def _poll_sockets(self) -> None:
        """Receive what has come, and count; on a broken backend, all stays as it was left."""
        guard, path = self._guard, self.path
        with guard.lock:
            if not guard.amid and not self._closed:
                guard.amid = "counters"
                path.pump()
                path.reclaim()
                path.check_overflow()
                guard.amid = ""

    def _on_release(self) -> None:
        """Post the receives of a batch that was released, unless this comes amid another call."""
        guard = self._guard
        with guard.lock:
            if not guard.amid and not self._closed:
                guard.amid = "release"
                self.path.reclaim()
                guard.amid = ""

    def _modify(self, state: QpState) -> None:
        check(self.path.modify(state), "modify", Phase.MODIFY, state=state.name)
        self.path.readiness.show()

    def port_events(self) -> tuple[PortEvent, ...]:
        return self._change("port_events", Phase.EVENT, self._port_events)

    def _port_events(self) -> tuple[PortEvent, ...]:
        core = self.core
        self._owner.channel.backend.network.poll_changes()
        found, core.port_events, core.port_changed = core.port_events, (), False
        self.path.readiness.show()
        return found

    # --- sending -------------------------------------------------------------------------

    def _send(
        self,
        destination: Destination,
        payloads: Sequence[bytes | memoryview | DeviceBytes],
        imm: int | None,
        timeout: float | None,
    ) -> None:
        batch: list[Any] = payloads if isinstance(payloads, list) else list(payloads)

        def post(to: tuple[object, ...], begin: int) -> tuple[int, int]:
            return self.path.ring.send(to, batch, begin)

        self._send_all(destination, post, len(batch), imm, timeout)

    def _send_rest(
        self, destination: Destination, payloads: list[Any], timeout: float | None, posted: int
    ) -> int:
        """Send what C has left of a list, which another thread may have changed meanwhile."""
        try:
            return posted + QueuePair.send(self, destination, payloads[posted:], None, timeout)
        except McastError as error:
            error.posted += posted
            raise

    def _send_rows(
        self, destination: Destination, rows: memoryview, imm: int | None, timeout: float | None
    ) -> None:
        count = len(rows)
        size, flat = rows.nbytes // count, rows.cast("B")

        def post(to: tuple[object, ...], begin: int) -> tuple[int, int]:
            return self.path.ring.send_rows(to, flat, size, b"", 0, count, begin)

        self._send_all(destination, post, count, imm, timeout)

    def _send_header_body(
        self, destination: Destination, batch: HeaderBodyBatch, imm: int | None, timeout: float | None
    ) -> None:
        count, heads, bodies = len(batch), batch.heads, batch.bodies
        head, body = heads.nbytes // count, bodies.nbytes // count
        flat_heads, flat_bodies = heads.cast("B"), bodies.cast("B")

        def post(to: tuple[object, ...], begin: int) -> tuple[int, int]:
            return self.path.ring.send_rows(to, flat_heads, head, flat_bodies, body, count, begin)

        self._send_all(destination, post, count, imm, timeout)

    def _send_all(
        self,
        to: Destination,
        post: Callable[[tuple[object, ...], int], tuple[int, int]],
        count: int,
        imm: int | None,
        timeout: float | None,
    ) -> None:
        """Post all messages; wait while the socket has no room for more, or the queue pair is in SQD."""
        end, posted = None, 0
        try:
            while True:
                posted, failed = self._guard.run("send", Phase.SEND, self._post, to, post, posted, imm, count)
                if not failed:
                    return
                now = monotonic()
                if end is None:
                    end = inf if timeout is None else now + timeout
                if now >= end:
                    about = {"gid": to.gid, "messages": count}
                    raise mcast_error(errno.ETIMEDOUT, "send", Phase.SEND, about)
                left = min(end - now, MAX_SLEEP)
                if self.core.state is not QpState.SQD:
                    _native.wait(self.path.own.fileno(), -1, True, left)
                elif waiter := self._sqd_waiter():
                    Waiters.sleep(waiter, left)
        except TimedOut as error:
            error.posted = posted
            raise

    def _post(
        self,
        to: Destination,
        post: Callable[[tuple[object, ...], int], tuple[int, int]],
        begin: int,
        imm: int | None,
        count: int,
    ) -> tuple[int, int]:
        """Post messages from `begin` on; return how many are posted, and the errno that hinders more."""
        core = self.core
        if self._closed:
            self._refuse_closed("send", Phase.SEND)
        if refused := core.address_handle(to):
            self._fail_send(refused, to, begin, count)
        if core.state is QpState.SQD:
            return begin, _AGAIN
        if core.state is not QpState.RTS:
            if core.error is None:
                self._fail_send(errno.EINVAL, to, begin, count)
            self._refuse(begin, to)
        source = core.source_of(to)
        if source is None or source != self.path.own_sockname[0] or to.gid.ipv4 is None:
            self._break(begin, to)
        dest = int.from_bytes(to.gid[12:])
        where = (
            self.path.own.fileno(),
            self.path.own_port,
            dest,
            ROCE_UDP_PORT,
            to.qp_num,
            to.qkey,
            to.traffic_class,
            to.hop_limit,
            imm,
        )
        posted, failed = post(where, begin)
        if not failed:
            self._aim(to, (*where[:-1], None), _NO_LIMIT if to.group_mtu is None else to.group_mtu)
        if failed in _UNUSABLE:
            self._break(posted, to)
        if failed and failed != _AGAIN:
            self._fail_send(failed, to, posted, count)
        return posted, failed

    def _sqd_waiter(self) -> Any:
        """Return a waiter that the next change wakes; None if the queue pair is not in SQD any more.

        Not a change itself, which would wake it.
        """
        with self._guard.lock:
            return self._owner.channel.backend.waiters.add() if self.core.state is QpState.SQD else None

    def _break(self, posted: int, to: Destination) -> NoReturn:
        """The port cannot send: as a device does, the queue pair goes into ERR (K-DATA-16)."""
        self.path.pump()
        if self.core.error is None:
            self.core.fail(WcStatus.LOC_QP_OP_ERR)
        self._refuse(posted, to)

    def _refuse(self, posted: int, to: Destination) -> NoReturn:
        assert self.core.error is not None
        error = QpError(self.core.error, "send", Phase.SEND, {"gid": to.gid})
        error.posted = posted
        raise Refused(error)

    def _fail_send(self, failed: int, to: Destination, posted: int, count: int) -> NoReturn:
        detail = ""
        if failed in (errno.EPERM, errno.EACCES):
            detail = "the kernel does not let this process send there: look at its firewall: nft list ruleset"
        error = mcast_error(failed, "send", Phase.SEND, {"gid": to.gid, "messages": count}, detail)
        error.posted = posted
        raise Refused(error)

    def send_fileno(self) -> int | None:
        self._require_open("send_fileno", Phase.SEND)
        return None

    # --- receiving -----------------------------------------------------------------------

    def _recv(self, max: int, timeout: float | None, events: bool) -> Batch:
        guard, path, other = self._guard, self.path, -1
        if events:
            other = self._owner.channel.readiness.fd
        batch, over = guard.run("recv", Phase.RECV, self._take, max, events, timeout == 0)
        if over:
            return batch
        now = monotonic()
        end = inf if timeout is None else now + timeout
        polls_until = now + self._busy_poll
        while not over:
            now = monotonic()
            if now >= polls_until:
                _native.wait(path.readiness.fd, other, False, min(end - now, MAX_SLEEP) if now < end else 0.0)
            batch, over = guard.run("recv", Phase.RECV, self._take, max, events, monotonic() >= end)
        return batch

    def _leased(self, records: bytes, slots: bytes) -> Batch:
        """Return messages that C has taken, as a batch."""
        return self.path.leased(records, slots)

    def _take(self, max: int, events: bool, last: bool) -> tuple[Batch, bool]:
        """Look for messages once; return a batch, and whether the call is over."""
        core, path = self.core, self.path
        if self._closed:
            self._refuse_closed("recv", Phase.RECV)
        batch = path.take(max)
        if batch is None:
            if core.error is not None:
                raise Refused(QpError(core.error, "recv", Phase.RECV))
            if events and (core.port_changed or self._owner.channel.core.queue):
                last = True
            if last:
                core.port_changed = False
        path.readiness.show()
        return (CopiedBatch(), last) if batch is None else (batch, True)

    def _refuse_closed(self, call: str, phase: Phase) -> NoReturn:
        try:
            self._require_open(call, phase)
        except McastError as error:
            raise Refused(error) from None
        raise AssertionError

    def fileno(self) -> int:
        return self._change("fileno", Phase.RECV, self._fileno)

    def _fileno(self) -> int:
        self.path.readiness.show()
        return self.path.readiness.fd

    # --- memory --------------------------------------------------------------------------

    def _register(
        self, buffer: memoryview, recv_slot: int | None, relaxed_ordering: bool, constant: bool
    ) -> Region:
        if recv_slot is None:
            return HostRegion(self._guard, buffer, lambda: None)
        core, path = self.core, self.path
        if core.error is not None:
            raise Refused(QpError(core.error, "register", Phase.REGISTER))
        path.pump()
        path.reclaim()
        if path.ring.free != path.depth:
            detail = "messages are queued or leased: register receive memory before the QP joins"
            check(errno.EBUSY, "register", Phase.REGISTER, detail, recv_slot=recv_slot)
        path.post(buffer, buffer.nbytes // recv_slot, recv_slot, recv_slot)
        memory = path.memory

        def end() -> None:
            if path.memory is memory and not self._closed:
                path.pump()
                path.drop_queue()
                path.post_default()
                path.readiness.show()

        return HostRegion(self._guard, buffer, end)

    def _close(self) -> None:
        if self._freed:
            return
        self._closed = True
        self._disarm()
        self.path.is_closed = True
        self.path.readiness.show()
        self._owner.forget_qp(self)
        self.core.on_readable = None
        self._freed = True


def _refused(error: OSError, call: str, phase: Phase, **arguments: object) -> Refused:
    """Return the refusal of a call that found no descriptor, or port 4791 in use."""
    return Refused(mcast_error(error.errno or errno.EIO, call, phase, arguments, why_refused(error)))


def _cannot(device: str, what: str, **arguments: object) -> NoReturn:
    raise mcast_error(errno.EOPNOTSUPP, "create_qp", Phase.CREATE_QP, arguments, f"{device} cannot {what}")
