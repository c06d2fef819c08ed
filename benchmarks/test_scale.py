"""How far the simulator goes: build a fabric, join everybody, one message to each group, leave.

pytest benchmarks/test_scale.py                     # 10 000 ports, 1 000 groups of 100
python benchmarks/test_scale.py sim-ib 65000 1000 100
"""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from mcast.api import CmId, Destination, QpInit
from mcast.backends.sim import Fabric, open_fabric

MAKE = {"sim-roce": Fabric.roce, "sim-ib": Fabric.infiniband}


class Figures(NamedTuple):
    """CPU seconds of each step, and bytes of memory for a port and for a membership (0 if not measured)."""

    build: float
    join: float
    send: float
    leave: float
    port_bytes: float
    membership_bytes: float

    def describe(self, memberships: int) -> str:
        join, leave = (f"{seconds / memberships * 1e6:.1f}" for seconds in (self.join, self.leave))
        return (
            f"build {self.build:.2f} s, join {self.join:.2f} s ({join} us each), send {self.send:.2f} s, "
            f"leave {self.leave:.2f} s ({leave} us each); {self.port_bytes:,.0f} bytes a port, "
            f"{self.membership_bytes:,.0f} bytes a membership"
        )


class Crowd:
    """`groups` groups with `members` members each, spread evenly over the ports; a QP on every port."""

    def __init__(self, backend: str, ports: int, groups: int, members: int) -> None:
        self.groups = [f"239.{1 + g // 65536}.{g // 256 % 256}.{g % 256}" for g in range(groups)]
        self.fabric = MAKE[backend](ports=ports)
        self.backend = open_fabric(self.fabric)
        self.channel = self.backend.event_channel()
        self.ids = [self._id(port.interfaces[0].ipv4) for port in self.fabric.ports]
        step = max(ports // members, 1)
        self.members = [
            [self.ids[(g + m * step) % ports] for m in range(members)] for g in range(len(self.groups))
        ]
        self.destinations: list[Destination] = []

    def _id(self, address: Any) -> CmId:
        cm_id = self.channel.create_id()
        cm_id.bind_addr(address)
        cm_id.create_qp(QpInit(max_recv_wr=64))
        return cm_id

    def join(self) -> None:
        """Everybody joins, then reads what came of it."""
        found: dict[int, Destination] = {}
        for number, (group, ids) in enumerate(zip(self.groups, self.members, strict=True)):
            for cm_id in ids:
                cm_id.join_multicast(group, number)
        for _ in range(sum(map(len, self.members))):
            event = self.channel.get_event(60)
            assert event is not None
            assert event.check().ud is not None
            found[event.context] = event.ud.destination  # type: ignore[union-attr]
        self.destinations = [found[number] for number in range(len(self.groups))]

    def send(self) -> int:
        """The first member of each group sends one message; how many copies arrived."""
        for ids, destination in zip(self.members, self.destinations, strict=True):
            assert ids[0].qp is not None
            ids[0].qp.send_one(destination, b"one")
        return sum(cm_id.qp.counters.received for cm_id in self.ids if cm_id.qp is not None)

    def leave(self) -> None:
        """Everybody leaves, and the last of it has reached the SA."""
        for group, ids in zip(self.groups, self.members, strict=True):
            for cm_id in ids:
                cm_id.leave_multicast(group)
        self.fabric.clock.run_out()


def run(backend: str, ports: int, groups: int, members: int, memory: bool = False) -> Figures:
    """Build, join, send, leave; `memory` counts bytes, which makes it several times slower."""
    gc.collect()
    if memory:
        tracemalloc.start()
    times, held = [time.process_time()], [tracemalloc.get_traced_memory()[0] if memory else 0]

    def done() -> None:
        times.append(time.process_time())
        held.append(tracemalloc.get_traced_memory()[0] if memory else 0)

    crowd = Crowd(backend, ports, groups, members)
    done()
    crowd.join()
    done()
    assert crowd.send() == groups * members
    done()
    crowd.leave()
    done()
    assert not crowd.fabric.snooping
    assert crowd.fabric.sa is None or [group.well_known for group in crowd.fabric.sa.groups] == [True]
    if memory:
        tracemalloc.stop()
    build, join, send, leave = (later - earlier for earlier, later in pairwise(times))
    per_port, per_member = (held[1] - held[0]) / ports, (held[2] - held[1]) / (groups * members)
    return Figures(build, join, send, leave, per_port, per_member)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", MAKE)
def test_ten_thousand_ports(benchmark: Any, backend: str) -> None:
    figures = benchmark.pedantic(run, args=(backend, 10_000, 1_000, 100), rounds=1)
    benchmark.extra_info.update(figures._asdict())


if __name__ == "__main__":
    name, *sizes = sys.argv[1:]
    ports, groups, members = map(int, sizes)
    print(run(name, ports, groups, members).describe(groups * members))
    print(run(name, ports, groups, members, memory=True).describe(groups * members), "(while counting bytes)")
