"""The simulator's speed, beside a UDP multicast socket pair on loopback in the same run.

One operation is one message delivered to one receiver; for join and leave, one of both. A ratio is of the
operations in a second of CPU, ours to the peer's, the two in turn: the median of the rounds. UDP goes one by
one, for the kernel has no batch call that Python can reach; its receive has a timeout, as ours.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from statistics import median
from typing import Any

import pytest

from mcast import Backend, Destination, open_backend
from mcast.api import CmEvent, EventChannel, JoinAttrEx, QpInit, QueuePair

GROUP = "239.1.1.1"
BATCH = 256
FABRICS = ("sim-roce", "sim-ib")
FAN_OUT = 1000
PORTS = 20
"""Receiving ports: a device takes no more than 56 QPs to a group."""

SIZES = (64, 1024)
ROUNDS = 31


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


@contextmanager
def udp_pair(size: int) -> Iterator[Callable[[], None]]:
    """BATCH messages through a socket pair, one by one."""
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

        yield one_by_one


def seconds(work: Callable[[], None], times: int = 1) -> float:
    """Of CPU, the kernel's part too: neither side waits, and what else the machine does is left out."""
    start = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - start) / times


def measure(benchmark: Any, name: str, work: Callable[[], None], operations: int, size: int) -> None:
    """Benchmark `work`, then take its ratio to UDP round by round."""
    benchmark.extra_info["operations"] = operations
    benchmark(work)
    with udp_pair(size) as peer:
        times = math.ceil(seconds(peer) / seconds(work))  # as long as the peer
        rounds = [operations * seconds(peer) / (BATCH * seconds(work, times)) for _ in range(ROUNDS)]
    benchmark.extra_info["ratio"] = (f"sim/{name}", median(rounds), min(rounds), max(rounds))


@pytest.mark.parametrize("size", SIZES)
def test_udp(benchmark: Any, size: int) -> None:
    benchmark.extra_info["operations"] = BATCH
    with udp_pair(size) as one_by_one:
        benchmark(one_by_one)


@pytest.mark.parametrize("size", SIZES)
def test_batch(benchmark: Any, fabric: Backend, size: int) -> None:
    sender, destination, (receiver,) = joined(fabric, 1)
    payloads = [bytes(size)] * BATCH

    def batch() -> None:
        sender.send(destination, payloads)
        drain(receiver, BATCH)

    measure(benchmark, f"batch/{fabric.name}/{size}", batch, BATCH, size)


@pytest.mark.parametrize("size", SIZES)
def test_single(benchmark: Any, fabric: Backend, size: int) -> None:
    sender, destination, (receiver,) = joined(fabric, 1)
    payload = bytes(size)

    def one_by_one() -> None:
        for _ in range(BATCH):
            sender.send_one(destination, payload)
            receiver.recv_one(5)

    measure(benchmark, f"single/{fabric.name}/{size}", one_by_one, BATCH, size)
    assert receiver.recv_one(0) is None


@pytest.mark.parametrize("size", SIZES)
def test_fan_out_1000(benchmark: Any, fabric: Backend, size: int) -> None:
    sender, destination, receivers = joined(fabric, FAN_OUT)
    payloads = [bytes(size)] * 64

    def fan_out() -> None:
        sender.send(destination, payloads)
        for receiver in receivers:
            drain(receiver, len(payloads))

    measure(benchmark, f"fan-out-1000/{fabric.name}/{size}", fan_out, FAN_OUT * len(payloads), size)


@pytest.mark.parametrize("others", [0, 9])
def test_join_and_leave(benchmark: Any, fabric: Backend, others: int) -> None:
    """Of a group without members, which it creates and ends; and of one that others have joined."""
    joined(fabric, others) if others else None
    channel = fabric.event_channel()
    cm_id = channel.create_id()
    cm_id.bind_addr("10.0.0.21")
    cm_id.create_qp()

    def join_and_leave() -> None:
        cm_id.join_multicast(GROUP)
        event_of(channel)
        cm_id.leave_multicast(GROUP)

    benchmark.extra_info["operations"] = 1
    benchmark(join_and_leave)
