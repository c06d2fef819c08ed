"""The simulator's speed, beside a UDP multicast socket pair on loopback in the same run.

One operation is one message delivered to one receiver; for join and leave, one of both.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import pytest

from mcast import Backend, Destination, JoinAttrEx, QpInit, open_backend
from mcast.api import CmEvent, EventChannel, QueuePair

GROUP = "239.1.1.1"
BATCH = 256
FABRICS = ("sim-roce", "sim-ib")
FAN_OUT = 1000
PORTS = 20
"""Receiving ports: a device takes no more than 56 QPs to a group."""

SIZES = (64, 1024)


@pytest.fixture(params=FABRICS)
def fabric(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with open_backend(request.param, ports=1 + PORTS) as backend:
        yield backend


def joined(backend: Backend, receivers: int) -> tuple[QueuePair, Destination, list[QueuePair]]:
    """A sender on the first port, and receivers on the others."""
    channel = backend.event_channel()
    source, *others = (device.ports[0].addresses[0] for device in backend.devices())
    qps = []
    for place in islice(cycle(others), receivers):
        cm_id = channel.create_id()
        cm_id.bind_addr(place)
        qps.append(cm_id.create_qp(QpInit(max_recv_wr=BATCH)))
        cm_id.join_multicast(GROUP)
        event_of(channel)
    cm_id = channel.create_id()
    cm_id.bind_addr(source)
    sender = cm_id.create_qp()
    cm_id.join_multicast_ex(JoinAttrEx.send_only(GROUP))
    ud = event_of(channel).ud
    assert ud
    return sender, ud.destination, qps


def event_of(channel: EventChannel) -> CmEvent:
    event = channel.get_event(5)
    assert event
    return event.check()


def drain(qp: QueuePair, count: int) -> None:
    while count:
        with qp.recv(count, 1) as batch:
            assert len(batch)
            count -= len(batch)


@pytest.mark.parametrize("size", SIZES)
def test_udp(benchmark: Any, size: int) -> None:
    """One at a time through a socket pair: the kernel has no batch call that Python can reach."""
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with receiver, sender:
        loopback = socket.inet_aton("127.0.0.1")
        receiver.bind((GROUP, 0))
        receiver.settimeout(5)
        membership = struct.pack("4s4s", socket.inet_aton(GROUP), loopback)
        receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, loopback)
        target, payload = receiver.getsockname(), bytes(size)

        def one_by_one() -> None:
            for _ in range(BATCH):
                sender.sendto(payload, target)
                receiver.recv(2048)

        benchmark.extra_info["operations"] = BATCH
        benchmark(one_by_one)


@pytest.mark.parametrize("size", SIZES)
def test_batch(benchmark: Any, fabric: Backend, size: int) -> None:
    sender, destination, (receiver,) = joined(fabric, 1)
    payloads = [bytes(size)] * BATCH

    def batch() -> None:
        sender.send(destination, payloads)
        drain(receiver, BATCH)

    benchmark.extra_info["operations"] = BATCH
    benchmark(batch)


@pytest.mark.parametrize("size", SIZES)
def test_single(benchmark: Any, fabric: Backend, size: int) -> None:
    sender, destination, (receiver,) = joined(fabric, 1)
    payload = bytes(size)

    def one_by_one() -> None:
        for _ in range(BATCH):
            sender.send_one(destination, payload)
            drain(receiver, 1)

    benchmark.extra_info["operations"] = BATCH
    benchmark(one_by_one)


@pytest.mark.parametrize("size", SIZES)
def test_fan_out_1000(benchmark: Any, fabric: Backend, size: int) -> None:
    sender, destination, receivers = joined(fabric, FAN_OUT)
    payloads = [bytes(size)] * 16

    def fan_out() -> None:
        sender.send(destination, payloads)
        for receiver in receivers:
            drain(receiver, len(payloads))

    benchmark.extra_info["operations"] = FAN_OUT * len(payloads)
    benchmark(fan_out)


def test_join_and_leave(benchmark: Any, fabric: Backend) -> None:
    channel = fabric.event_channel()
    cm_id = channel.create_id()
    cm_id.bind_addr("10.0.0.1")
    cm_id.create_qp()

    def join_and_leave() -> None:
        cm_id.join_multicast(GROUP)
        event_of(channel)
        cm_id.leave_multicast(GROUP)

    benchmark.extra_info["operations"] = 1
    benchmark(join_and_leave)
