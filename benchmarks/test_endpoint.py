"""The endpoints' speed: the blocking one beside the contract that it stands on, asyncio's beside a bare loop.

One operation is one message sent and received on a simulated fabric, or a round trip between two tasks. A
ratio is of the operations in a second of CPU, ours to the peer's in the same run, the two in turn: the median
of the rounds.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Coroutine, Iterator
from itertools import repeat
from statistics import median
from typing import Any, NamedTuple

import pytest

from benchmarks.test_sim import drain, joined, seconds
from mcast import Backend, Endpoint, Membership, Sender, aio, open_backend, open_endpoint

GROUP, BACK = "239.2.2.1", "239.2.2.2"
BATCH = 256
TRIPS = 200
ROUNDS = 31
LASTS = 0.005
"""Seconds of CPU that each side takes in a round, at least."""
SIZES = (64, 1024)


@pytest.fixture
def fabric() -> Iterator[Backend]:
    with open_backend("sim-roce", ports=2) as backend:
        yield backend


class Way(NamedTuple):
    """From a sender to a member of its group."""

    out: Sender
    endpoint: Endpoint
    member: Membership


@pytest.fixture
def way(fabric: Backend) -> Iterator[Way]:
    with open_endpoint(fabric, "10.0.0.1") as one, open_endpoint(fabric, "10.0.0.2") as other:
        yield Way(one.sender(GROUP), other, other.join(GROUP))


def compare(
    benchmark: Any, name: str, ours: Callable[[], None], peer: Callable[[], None], operations: int
) -> None:
    """Benchmark ours, then take its ratio to the peer's round by round."""
    benchmark.extra_info["operations"] = operations
    benchmark(ours)
    times = math.ceil(LASTS / seconds(ours, 4))
    rounds = [seconds(peer, times) / seconds(ours, times) for _ in repeat(None, ROUNDS)]
    benchmark.extra_info["ratio"] = (f"endpoint/{name}", median(rounds), min(rounds), max(rounds))


@pytest.mark.parametrize("size", SIZES)
def test_single_to_contract(benchmark: Any, fabric: Backend, way: Way, size: int) -> None:
    sender, destination, (receiver,) = joined(fabric, 1)
    payload = bytes(size)

    def endpoint() -> None:
        for _ in range(BATCH):
            way.out.send(payload)
            way.member.recv(5)

    def contract() -> None:
        for _ in range(BATCH):
            sender.send_one(destination, payload)
            receiver.recv_one(5)

    compare(benchmark, f"single/{size}", endpoint, contract, BATCH)
    assert way.member.stats().received == way.out.stats().sent > 0


@pytest.mark.parametrize("size", SIZES)
def test_batch_to_contract(benchmark: Any, fabric: Backend, way: Way, size: int) -> None:
    sender, destination, (receiver,) = joined(fabric, 1)
    payloads = [bytes(size)] * BATCH

    def endpoint() -> None:
        way.out.send_batch(payloads)
        with way.endpoint.recv_batch(BATCH, 1) as batch:
            assert len(batch) == BATCH

    def contract() -> None:
        sender.send(destination, payloads)
        drain(receiver, BATCH)

    compare(benchmark, f"batch/{size}", endpoint, contract, BATCH)
    assert way.member.stats().received_bytes == way.out.stats().sent_bytes > 0


def test_round_trip_to_bare_asyncio(benchmark: Any, fabric: Backend) -> None:
    """The peer: eventfds instead of queue pairs, and a future that the descriptor's callback resolves."""
    with asyncio.Runner() as runner:
        near, far = runner.run(opened(fabric))
        there, back = runner.run(joined_both_ways(near, far))
        ends = runner.run(bare_ends())

        def trips(one_way: Callable[[int], Coroutine[Any, Any, None]]) -> None:
            runner.run(one_way(TRIPS))

        async def ours(count: int) -> None:
            await asyncio.gather(ping(count, there[0], back[1]), pong(count, there[1], back[0]))

        async def bare(count: int) -> None:
            one, other = ends
            await asyncio.gather(ping(count, other, one), pong(count, other, one))

        compare(benchmark, "aio-round-trip/bare", lambda: trips(ours), lambda: trips(bare), TRIPS)
        runner.run(far.close())
        runner.run(near.close())
        for end in ends:
            end.close()


async def ping(count: int, out: Any, into: Any) -> None:
    for _ in range(count):
        await out.send(b"x")
        await into.recv()


async def pong(count: int, into: Any, out: Any) -> None:
    for _ in range(count):
        await into.recv()
        await out.send(b"x")


async def opened(fabric: Backend) -> tuple[aio.Endpoint, aio.Endpoint]:
    return aio.open_endpoint(fabric, "10.0.0.1"), aio.open_endpoint(fabric, "10.0.0.2")


async def joined_both_ways(
    near: aio.Endpoint, far: aio.Endpoint
) -> tuple[tuple[aio.Sender, aio.Membership], tuple[aio.Sender, aio.Membership]]:
    """From near to far, and back."""
    into_far, into_near = await far.join(GROUP), await near.join(BACK)
    return (await near.sender(GROUP), into_far), (await far.sender(BACK), into_near)


class BareEnd:
    """An eventfd in a loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._change = self._loop.create_future()
        self._loop.add_reader(self._fd, self._on_readable)

    def _on_readable(self) -> None:
        os.eventfd_read(self._fd)
        self._change.set_result(None)

    async def send(self, payload: bytes) -> None:
        os.eventfd_write(self._fd, 1)

    async def recv(self) -> None:
        await self._change
        self._change = self._loop.create_future()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


async def bare_ends() -> tuple[BareEnd, BareEnd]:
    return BareEnd(), BareEnd()
