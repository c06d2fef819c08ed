"""Scale of the simulator: build a fabric, join everybody, one message to each group, leave.

pytest benchmarks/test_scale.py                     # 1 000 to 100 000 memberships in groups of 100
python benchmarks/test_scale.py sim-ib 65000 1000 100
"""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mcast.api import CmEvent, CmId, QpInit
from mcast.backends.sim import Fabric, open_fabric

MAKE = {"sim-roce": Fabric.roce, "sim-ib": Fabric.infiniband}

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
"""Memberships, in groups of 100; a port has 10 of them."""


class Figures(NamedTuple):
    """CPU seconds of each step, and bytes of memory for a port and for a membership.

    `collector` of the seconds from join to leave went to Python's cyclic garbage collector, which looks at
    all that there is, again and again while it grows.
    """

    build: float
    join: float
    send: float
    leave: float
    collector: float
    port_bytes: float
    membership_bytes: float

    def seconds(self) -> float:
        """From join to leave."""
        return self.join + self.send + self.leave

    def describe(self, memberships: int, of: str) -> str:
        join, leave = (f"{seconds / memberships * 1e6:.1f}" for seconds in (self.join, self.leave))
        return (
            f"build {self.build:.2f} s, join {self.join:.2f} s ({join} us each), send {self.send:.2f} s, "
            f"leave {self.leave:.2f} s ({leave} us each); {self.port_bytes:,.0f} bytes of {of} a port, "
            f"{self.membership_bytes:,.0f} a membership"
        )


class Collector:
    """Adds up the CPU seconds of Python's cyclic garbage collector while open."""

    def __enter__(self) -> Collector:
        self.seconds = self._start = 0.0
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, _: object) -> None:
        now = time.process_time()
        if phase == "stop":
            self.seconds += now - self._start
        self._start = now


class Crowd:
    """`groups` groups with `members` members each, spread evenly over the ports; a QP on every port.

    Keeps all that the contract gives for a membership: its join event, with the destination in it.
    """

    def __init__(self, backend: str, ports: int, groups: int, members: int) -> None:
        self.groups = [f"239.{1 + g // 65536}.{g // 256 % 256}.{g % 256}" for g in range(groups)]
        self.fabric = MAKE[backend](ports=ports)
        self.backend = open_fabric(self.fabric)
        self.channel = self.backend.event_channel()
        self.init = QpInit(max_recv_wr=max(64, 2 * groups * members // ports))
        self.ids = [self._id(port.interfaces[0].ipv4) for port in self.fabric.ports]
        step = max(ports // members, 1)
        self.members = [
            [self.ids[(g + m * step) % ports] for m in range(members)] for g in range(len(self.groups))
        ]
        self.events: list[CmEvent] = []

    def _id(self, address: Any) -> CmId:
        cm_id = self.channel.create_id()
        cm_id.bind_addr(address)
        cm_id.create_qp(self.init)
        return cm_id

    def join(self) -> None:
        """Group by group, everybody joins, then reads what came of it."""
        for group, ids in zip(self.groups, self.members, strict=True):
            for cm_id in ids:
                cm_id.join_multicast(group)
            self.events += [self.joined() for _ in ids]

    def joined(self) -> CmEvent:
        event = self.channel.get_event(60)
        assert event is not None
        return event.check()

    def send(self) -> int:
        """The first member of each group sends one message; how many copies arrived."""
        for ids, event in zip(self.members, self.events[:: len(self.members[0])], strict=True):
            assert ids[0].qp is not None
            assert event.ud is not None
            ids[0].qp.send_one(event.ud.destination, b"one")
        return sum(cm_id.qp.counters.received for cm_id in self.ids if cm_id.qp is not None)

    def leave(self) -> None:
        """Everybody leaves, and the last of it has reached the SA."""
        for group, ids in zip(self.groups, self.members, strict=True):
            for cm_id in ids:
                cm_id.leave_multicast(group)
        self.fabric.clock.run_until_idle()


def traced() -> int:
    """Bytes of Python's objects."""
    return tracemalloc.get_traced_memory()[0]


def resident() -> int:
    """Bytes of the process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(backend: str, ports: int, groups: int, members: int, memory: Callable[[], int] = resident) -> Figures:
    """Build, join, send, leave; counting Python's objects makes it several times slower."""
    gc.collect()
    if memory is traced:
        tracemalloc.start()
    times, held = [time.process_time()], [memory()]

    def done() -> None:
        times.append(time.process_time())
        held.append(memory())

    crowd = Crowd(backend, ports, groups, members)
    done()
    with Collector() as collector:
        crowd.join()
        done()
        assert crowd.send() == groups * members
        done()
        crowd.leave()
        done()
    assert not crowd.fabric.core.igmp.snooping
    assert crowd.fabric.sa is None or [group.well_known for group in crowd.fabric.sa.groups] == [True]
    if memory is traced:
        tracemalloc.stop()
    build, join, send, leave = (later - earlier for earlier, later in pairwise(times))
    per_port, per_member = (held[1] - held[0]) / ports, (held[2] - held[1]) / (groups * members)
    return Figures(build, join, send, leave, collector.seconds, per_port, per_member)


def measured(backend: str, memberships: int, memory: str) -> Figures:
    """Return the figures of a run in a process of its own; `memory` is a key of `MEMORY`."""
    sizes = (memberships // 10, memberships // 100, 100)
    command = [sys.executable, __file__, backend, *map(str, sizes), f"--json={memory}"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Figures(**json.loads(found))


MEMORY = {"resident": resident, "traced": traced}
"""Name of a way to measure memory -> the function that does."""


def time_exponents(found: dict[int, Figures]) -> tuple[float, float]:
    """With Python's cyclic garbage collector, and without its time."""
    return (
        exponent({size: got.seconds() for size, got in found.items()}),
        exponent({size: got.seconds() - got.collector for size, got in found.items()}),
    )


def exponent(costs: dict[int, float]) -> float:
    """The slope of log cost over log size, by least squares: 1 is linear."""
    xs, ys = [math.log(size) for size in costs], [math.log(cost) for cost in costs.values()]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread


@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", MAKE)
def test_growth(benchmark: Any, backend: str) -> None:
    """From 1 000 to 100 000 memberships; tests/sim/test_scale.py counts calls, which no cache changes."""

    def fastest(size: int) -> Figures:
        return min((measured(backend, size, "resident") for _ in range(3)), key=Figures.seconds)

    ours = benchmark.pedantic(lambda: {size: fastest(size) for size in SIZES}, rounds=1)
    objects = {size: measured(backend, size, "traced").membership_bytes for size in SIZES[::2]}
    largest = ours[SIZES[-1]]
    with_collector, without = time_exponents(ours)
    found = {
        "time exponent": with_collector,
        "without the collector": without,
        "memory exponent": exponent({size: size * each for size, each in objects.items()}),
        "bytes a membership": objects[SIZES[-1]],
        "resident bytes a membership": largest.membership_bytes,
        "us to join": largest.join / SIZES[-1] * 1e6,
        "us to leave": largest.leave / SIZES[-1] * 1e6,
    }
    benchmark.extra_info["growth"] = {name: round(value, 3) for name, value in found.items()}
    assert found["bytes a membership"] <= 1024
    assert found["memory exponent"] <= 1.05


if __name__ == "__main__":
    name, *sizes = sys.argv[1:4] + sys.argv[4:5]
    ports, groups, members = map(int, sizes)
    if sys.argv[5:]:
        memory = MEMORY[sys.argv[5].removeprefix("--json=")]
        print(json.dumps(run(name, ports, groups, members, memory)._asdict()))
    else:
        for of, memory in MEMORY.items():
            print(run(name, ports, groups, members, memory).describe(groups * members, of))
