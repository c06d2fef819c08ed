"""Helpers of the tests: an application on one port, polling, and the proof that nothing more arrives.

No test sleeps. Only calls that wait move the time, so that it may be virtual. A marker message, sent after
the message that must not arrive, proves its absence, because the fabric keeps the order of one sender.
"""

from __future__ import annotations

import itertools
import select
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import pytest

from mcast.api import (
    CmEvent,
    CmEventType,
    CmId,
    Destination,
    EventChannel,
    JoinAttrEx,
    JoinFlag,
    PortInfo,
    PortSpace,
    QpInit,
    QueuePair,
    Testbed,
    UdParam,
)
from mcast.wire.addresses import Gid, McastAddress

BOUND = 60.0
"""The longest that anything may take, in seconds. A bound, never a delay."""

clause: pytest.MarkDecorator = pytest.mark.clause
fact: pytest.MarkDecorator = pytest.mark.fact
needs: pytest.MarkDecorator = pytest.mark.needs

_STEP = 0.02
_numbers = itertools.count(1)


def new_group(port: int = 0) -> McastAddress:
    """An IPv4 group that no test of this run has used: tables of a real fabric forget slowly."""
    number = next(_numbers)
    return McastAddress(address=IPv4Address("239.64.0.0") + number, port=port)


def raw_address(address: object, port: int = 0) -> McastAddress:
    """An address put past validation."""
    return McastAddress.model_construct(address=address, port=port)


def raw_join(address: object, mask: int = 3, flags: int = 0) -> JoinAttrEx:
    """A join put past validation."""
    return JoinAttrEx.model_construct(comp_mask=mask, join_flags=flags, addr=address)


def eventually(bed: Testbed, condition: Callable[[], object], within: float = BOUND) -> None:
    """Wait until the condition holds; fail if it does not within `within` seconds."""
    with bed.backend.event_channel() as idle:
        for _ in range(int(within / _STEP)):
            if condition():
                return
            idle.get_event(_STEP)
    assert condition(), f"not within {within} s"


def readable(channel: EventChannel) -> bool:
    """Return True if poll(2) calls the channel's descriptor readable now."""
    poller = select.poll()
    poller.register(channel.fileno(), select.POLLIN)
    return bool(poller.poll(0))


def port_at(bed: Testbed, index: int) -> IPv4Address:
    """The port with that index; one of the first again where the bed has fewer."""
    return bed.ports[index % len(bed.ports)]


def port_info(bed: Testbed, port: IPv4Address) -> PortInfo:
    """The port that has the address, as devices() describes it."""
    (found,) = (info for device in bed.backend.devices() for info in device.ports if port in info.addresses)
    return found


def other_lid(lid: int) -> int:
    """A LID that differs from this one, and may be attached with on any link layer."""
    return 0xC0FE if lid != 0xC0FE else 0xC0FD


class Application:
    """An application on one port: a channel, an id bound to the port, and a QP unless `init` is None."""

    def __init__(
        self,
        bed: Testbed,
        port: int | IPv4Address | IPv6Address = 0,
        init: QpInit | None = QpInit(),  # noqa: B008  (frozen)
        channel: EventChannel | None = None,
        space: PortSpace = PortSpace.UDP,
    ) -> None:
        self.bed = bed
        self.space = space
        self.port: Any = port_at(bed, port) if isinstance(port, int) else port
        self.channel: EventChannel = channel or bed.backend.event_channel()
        self.id: CmId = self.channel.create_id(space)
        self.id.bind_addr(self.port)
        if init is not None:
            self.id.create_qp(init)

    @property
    def qp(self) -> QueuePair:
        """The QP of the id."""
        assert self.id.qp is not None
        return self.id.qp

    def close(self) -> None:
        """Destroy the id and close its channel."""
        self.id.destroy()
        self.channel.close()

    def event(self, kind: CmEventType = CmEventType.MULTICAST_JOIN, status: int = 0) -> CmEvent:
        """The next event, which must be of that kind and status, and this id's."""
        event = self.channel.get_event(BOUND)
        assert event is not None, "no event"
        assert (event.type, event.status) == (kind, status)
        assert event.id is self.id
        return event

    def join(self, group: McastAddress, send_only: bool = False, context: object = None) -> Destination:
        """Join, fetch the event, and wait until the fabric delivers here; return where to send to."""
        flag = JoinFlag.SENDONLY_FULLMEMBER if send_only else JoinFlag.FULLMEMBER
        self.id.join_multicast_ex(JoinAttrEx(join_flags=flag, addr=group), context)
        destination = ud_of(self.event()).destination
        if send_only:
            eventually(self.bed, lambda: self.bed.observer.forwards_from(self.port, destination.gid))
        else:
            self.wait_delivery(destination.gid)  # the same tables take from there
        return destination

    def wait_delivery(self, group: Gid) -> None:
        """Wait until the fabric's own tables deliver the group to this port."""
        eventually(self.bed, lambda: self.bed.observer.delivers_to(self.port, group))

    def send(self, destination: Destination, *payloads: bytes) -> None:
        """Send the payloads as one batch."""
        assert self.qp.send(destination, payloads, timeout=BOUND) == len(payloads)
        self.qp.flush(BOUND)  # raises the error of a message that the device could not send

    def receive(self, count: int) -> list[bytes]:
        """The payloads of the next `count` messages; fewer if they do not come."""
        payloads: list[bytes] = []
        while len(payloads) < count:
            with self.qp.recv(count - len(payloads), BOUND) as batch:
                payloads += [bytes(message.payload) for message in batch]
                if not len(batch):
                    break
        return payloads

    def receive_until_marker(self, by: Application) -> list[bytes]:
        """The payloads that reach this queue pair before a marker that `by` sends now over a group of its
        own."""
        fence, marker = new_group(), b"marker %d" % next(_numbers)
        here, there = (Application(self.bed, one.port, None, space=one.space) for one in (self, by))
        group, outward = here.join(fence), there.join(fence)
        self.qp.attach_mcast(group.gid, group.dlid)
        by.send(outward, marker)
        payloads: list[bytes] = []
        while marker not in payloads:
            before = len(payloads)
            payloads += self.receive(1)
            assert len(payloads) > before, f"the marker did not arrive; {payloads} did"
        self.qp.detach_mcast(group.gid, group.dlid)
        here.close()
        there.close()
        return payloads[:-1]


def ud_of(event: CmEvent) -> UdParam:
    """The parameters of a join event that reports success."""
    assert event.ud is not None
    return event.ud


def numbered(count: int, prefix: str = "message") -> Sequence[bytes]:
    """`count` different payloads."""
    return tuple(f"{prefix} {number}".encode() for number in range(count))
