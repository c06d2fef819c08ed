"""The measurements of ours.py, under pytest-benchmark: JSON for `pytest-benchmark compare`.

It needs two RDMA ports; `make bench` runs it in the lab. A round's time is what ours.py took, without its ids
and queue pairs; an operation is a message, a round trip, or a join with its event and its leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address
from typing import Any

import pytest

from benchmarks.rdma.ours import Peer
from mcast import open_backend

COMMANDS = {
    "batch/64": ("batch", 64, 8000),
    "batch/1024": ("batch", 1024, 8000),
    "numpy-slab/1024": ("arrays", 1024, 8000),
    "numpy-own/1024": ("own_arrays", 1024, 8000),
    "single/64": ("single", 64, 2000),
    "round-trip/64": ("pingpong", 64, 1000),
    "join-leave": ("join", 0, 200),
}
"""Name -> a command of ours.py, its size in bytes, and how many operations."""

ROUNDS = 5

_seconds: list[float] = []


def seconds_measured() -> float:
    """The clock of a round: what ours.py has measured so far."""
    return sum(_seconds)


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with open_backend("rdma") as backend:
        places = [address for device in backend.devices() for address in device.ports[0].addresses]
        yield Peer(backend, [str(place) for place in places if isinstance(place, IPv4Address)])


@pytest.mark.benchmark(timer=seconds_measured)
@pytest.mark.parametrize("name", COMMANDS)
def test_ours(benchmark: Any, peer: Peer, name: str) -> None:
    what, size, count = COMMANDS[name]
    lost = []

    def measured() -> None:
        found = getattr(peer, what)(size, count)
        _seconds.append(found["seconds"])
        lost.append(found["lost"])

    benchmark.pedantic(measured, rounds=ROUNDS, warmup_rounds=1)
    benchmark.extra_info["operations"] = count
    assert not any(lost)
