"""A provider of one's own: RoCE ports on a hub in this process's memory.

A host here is a port with an address, and the hub hands each message to every queue pair that is attached to
its group, on a port that is a member. The connection manager and the queue pairs are those of
`mcast.backends.model`; this file has the network below them, waits, and carries messages. All objects of a
hub share one guard: a call changes the hub under it, and waits outside.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from ipaddress import IPv4Address
from itertools import accumulate, count
from math import inf
from pickle import PickleBuffer
from time import monotonic
from typing import Any, NoReturn, TypeVar

from mcast.api import (
    Backend,
    Batch,
    Closed,
    CmEvent,
    CmId,
    CopiedBatch,
    Destination,
    DeviceBytes,
    DeviceInfo,
    EventChannel,
    Gid,
    Guard,
    Leases,
    LinkLayer,
    Message,
    Phase,
    PortSpace,
    Provider,
    QpError,
    QpInit,
    QpState,
    QueuePair,
    Refused,
    Status,
    Testbed,
    Waiters,
    WcStatus,
    mcast_error,
    require_comp_vector,
)
from mcast.backends.model import (
    AtOnce,
    Burst,
    CmaId,
    CmChannel,
    Header,
    Interface,
    Limits,
    ModelCmId,
    ModelQueuePair,
    NoLog,
    Port,
    Qp,
    QueuePairs,
    check,
    event_of,
)

LIMITS = Limits(groups=4096, qps_per_group=64, queue_depth=1 << 14)
T = TypeVar("T")


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


class Network:
    """What the connection manager needs of the hub: interfaces, memberships of ports, and queue pairs."""

    refuses_block_loopback = False
    sa_capabilities = 0

    def __init__(self, ports: int) -> None:
        self.addresses = tuple(IPv4Address("10.9.0.1") + n for n in range(ports))
        self.ports = [
            Port(n, f"hub{n}", LinkLayer.ETHERNET, n + 1, 0, 4096, 10.0, LIMITS, address, None)
            for n, address in enumerate(self.addresses)
        ]
        self.members: list[Counter[Gid]] = [Counter() for _ in self.ports]
        self.clock, self.log, self.id_numbers = AtOnce(), NoLog(), count(1)
        self.hosts = self.igmp = self
        self.queue_pairs = QueuePairs(self.ports)

    def interface(self, hosts: frozenset[int], address: object) -> Interface | None:
        """Return the interface with that address."""
        return next((port.interfaces[0] for port in self.ports if address in port.addresses), None)

    def route(self, hosts: frozenset[int], address: object) -> Interface | None:
        """Return None: a hub has no routes, so a program has to name its source address."""
        return None

    def join(self, port: Port, group: Gid) -> int:
        """Count a full member on the port. A hub has nobody to announce it to."""
        self.members[port.index][group] += 1
        return 0

    def leave(self, port: Port, group: Gid) -> None:
        """Undo `join`."""
        self.members[port.index][group] -= 1

    def sa_client(self, port: Port) -> NoReturn:
        raise NotImplementedError("an Ethernet port has no SA")

    def targets(self, to: Destination) -> list[Qp]:
        """Return the queue pairs that get a message: those of a group, or the one that it names."""
        if to.gid.is_multicast:
            members = [port for port in self.ports if self.members[port.index][to.gid]]
            return [qp for port in members for qp in self.queue_pairs.attached(port).get(to.gid, ())]
        found = self.queue_pairs.find(to.qp_num)
        return [found] if found is not None and to.gid in found.port.gids.values() else []


class HubBackend(Backend):
    """A hub with some ports; the first has the address 10.9.0.1."""

    name = "hub"
    capabilities = frozenset()

    def __init__(self, ports: int = 3) -> None:
        self._guard = Guard("hub", "close the backend and open another one")
        self.waiters = Waiters()
        self.network = Network(ports)
        self.channels: dict[HubChannel, None] = {}

    def devices(self) -> tuple[DeviceInfo, ...]:
        self._require_open("devices", Phase.OPEN)
        return tuple(port.info() for port in self.network.ports)

    def _port_counters(self, device: str, port_num: int) -> Mapping[str, int]:
        found = [port for port in self.network.ports if port.name == device]
        return {"qkey_violations": found[0].qkey_violations} if found else {}

    def event_channel(self) -> EventChannel:
        return self._change("event_channel", Phase.OPEN, HubChannel, self)

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
        for members in self.network.members:  # left by a change that was interrupted
            members.clear()


class HubChannel(EventChannel):
    """A queue of events."""

    def __init__(self, backend: HubBackend) -> None:
        self.backend, self._guard = backend, backend._guard
        self.ids: dict[HubId, None] = {}
        self.core = CmChannel()
        self.flag = Flag()
        self.core.on_event = self._show
        backend.channels[self] = None

    def _show(self) -> None:
        self.flag.show(bool(self.core.queue))
        self.backend.waiters.wake()

    def fileno(self) -> int:
        self._require_open("fileno", Phase.EVENT)
        return self.flag.fd

    @property
    def pending(self) -> bool:
        self._require_open("pending", Phase.EVENT)
        return bool(self.core.queue)

    def _create_id(self, port_space: PortSpace) -> CmId:
        return HubId(self, CmaId(self.backend.network, frozenset(), self.core, port_space))

    def _get_event(self, timeout: float | None) -> CmEvent | None:
        return self.backend.wait("get_event", Phase.EVENT, timeout, self._next)

    def _next(self) -> CmEvent | None:
        if self._closed:
            raise Refused(Closed("HubChannel", "get_event", Phase.EVENT))
        return event_of(self.core.get()) if self.core.queue else None

    def _close(self) -> None:
        self._closed = True
        for cm_id in list(self.ids):
            cm_id._close()
        self.backend.waiters.wake()
        self.flag.close()
        self.backend.channels.pop(self, None)


class HubId(ModelCmId):
    """An id. A join is complete at once: a hub has nobody to ask."""

    def __init__(self, channel: HubChannel, core: CmaId) -> None:
        super().__init__(core, channel._guard, channel.ids)
        self.channel = channel

    def _create_qp(self, init: QpInit) -> QueuePair:
        call, phase, about = "create_qp", Phase.CREATE_QP, {"qp_type": init.qp_type.name}
        if self.core.port_space is PortSpace.TCP:
            check(errno.EOPNOTSUPP, call, phase, "a hub has no connected queue pairs", **about)
        if init.timestamps:
            words = f"{self.device} cannot stamp completions with the time: do without timestamps"
            check(errno.EOPNOTSUPP, call, phase, words, **about)
        if init.moderation is not None:
            check(
                errno.EOPNOTSUPP,
                call,
                phase,
                f"{self.device} cannot moderate completions: do without",
                **about,
            )
        require_comp_vector(init.comp_vector, 4, self.device or "a hub")
        check(self.core.create_qp(init), call, phase, **about)
        assert self.core.qp is not None
        self._qp = HubQueuePair(self, self.core.qp)
        return self._qp


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


class HubQueuePair(ModelQueuePair):
    """A UD queue pair. A message takes a receive from its arrival until its batch is released."""

    def __init__(self, owner: HubId, core: Qp) -> None:
        super().__init__(owner, core)
        self._channel, self._hub = owner.channel, owner.channel.backend
        self._flag = Flag()
        core.on_readable = self._show

    def _show(self) -> None:
        self._flag.show(self.core.readable)
        self._hub.waiters.wake()

    def fileno(self) -> int:
        self._require_open("fileno", Phase.RECV)
        return self._flag.fd

    def _modify(self, state: QpState) -> None:
        super()._modify(state)
        self._show()

    def _send(
        self,
        destination: Destination,
        payloads: Sequence[bytes | memoryview | DeviceBytes],
        imm: int | None,
        timeout: float | None,
    ) -> None:
        core = self.core
        about: dict[str, Any] = {"gid": destination.gid}

        def post() -> bool | None:
            if self._closed:
                raise Refused(Closed("HubQueuePair", "send", Phase.SEND))
            check(core.address_handle(destination), "send", Phase.SEND, **about)
            if core.state is QpState.SQD:  # holds sends back until it is in RTS again
                return None
            source = core.source_of(destination)
            if source is None and core.error is None:
                core.fail(WcStatus.LOC_QP_OP_ERR)
            if core.error is not None:
                raise Refused(QpError(core.error, "send", Phase.SEND, about))
            check(0 if core.state is QpState.RTS else errno.EINVAL, "send", Phase.SEND, **about)
            assert source is not None
            header = Header(source, core.number, destination.gid, 0, destination.qkey, core.pkey, 0)
            copies = [bytes(payload) for payload in payloads]
            burst = Burst(copies, max(map(len, copies), default=0), header, imm, 0)
            for target in self._hub.network.targets(destination):
                if not (target is core and core.blocks_loopback):
                    target.deliver(burst, 0, len(copies))
            core.sent += len(copies)
            return True

        if self._hub.wait("send", Phase.SEND, timeout, post) is None:
            raise mcast_error(errno.ETIMEDOUT, "send", Phase.SEND, about)

    def _recv(self, max: int, timeout: float | None, events: bool) -> Batch:
        core = self.core

        def look() -> Batch | None:
            if self._closed:
                raise Refused(Closed("HubQueuePair", "recv", Phase.RECV))
            found = [
                Message(memoryview(one), to.source, to.src_qp, to.group, burst.imm, core.is_own(to))
                for burst, start, stop in core.lease(max)
                for to in (burst.header,)
                for one in burst.payloads[start:stop]
            ]
            self._flag.show(self.core.readable)
            if not found and core.error is not None:
                raise Refused(QpError(core.error, "recv", Phase.RECV))
            return HubBatch(found, core.leases) if found or (events and self._channel.core.queue) else None

        return self._hub.wait("recv", Phase.RECV, timeout, look) or CopiedBatch()

    def _close(self) -> None:
        self._closed = True
        self._owner.forget_qp(self)
        self.core.on_readable = None
        self._hub.waiters.wake()
        self._flag.close()


def _testbed() -> AbstractContextManager[Testbed]:
    from hub_testbed import testbed

    return testbed()


SUMMARY = "RoCE ports on a hub in memory"
PROVIDER = Provider("hub", SUMMARY, lambda: Status(True, SUMMARY), HubBackend, _testbed)
