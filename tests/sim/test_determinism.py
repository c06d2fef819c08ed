"""The same seed gives the same trace, to the byte: in one process, and across processes and hash seeds."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from random import Random

import pytest

from mcast.api import McastError
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults import Delay, Delivery, Drop


def run(kind: str, seed: int) -> str:
    """Random joins, leaves, sends and faults on six ports; the trace."""
    make = {"roce": Fabric.roce, "ib": Fabric.infiniband}[kind]
    fabric = make(ports=6, switches=3, seed=seed, trace=True)
    draw = Random(seed)

    def lossy(_: Delivery) -> Drop | Delay | None:
        return fabric.random.choice((Drop(), Delay(fabric.random.randrange(1, 1_000)), None))

    with open_fabric(fabric) as backend, backend.event_channel() as channel, fabric.rules.on_delivery(lossy):
        ids = []
        for device in backend.devices():
            cm_id = channel.create_id()
            cm_id.bind_addr(device.ports[0].addresses[0])
            cm_id.create_qp()
            ids.append(cm_id)
        destinations = {}
        for _ in range(150):
            cm_id, group = draw.choice(ids), f"239.0.0.{draw.randrange(1, 5)}"
            try:
                draw.choice((cm_id.join_multicast, cm_id.leave_multicast))(group)
            except McastError:
                pass
            if (event := channel.get_event(0.001)) is not None and event.ud is not None:
                destinations[event.id] = event.ud.destination
            for sender, destination in destinations.items():
                if draw.random() < 0.2:
                    sender.qp.send(destination, [b"x" * draw.randrange(64)] * 3)
    return str(fabric.trace)


def digest(kind: str, seed: int) -> str:
    return hashlib.sha256(run(kind, seed).encode()).hexdigest()


@pytest.mark.parametrize("kind", ["roce", "ib"])
def test_the_same_seed_gives_the_same_trace(kind: str) -> None:
    first = run(kind, 7)
    assert first.count("\n") > 300
    assert run(kind, 7) == first
    assert run(kind, 8) != first


@pytest.mark.parametrize("kind", ["roce", "ib"])
def test_the_trace_does_not_depend_on_the_process_or_its_hash_seed(kind: str) -> None:
    def elsewhere(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, __file__, kind, "7"]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    assert {elsewhere("1"), elsewhere("2")} == {digest(kind, 7)}


if __name__ == "__main__":
    print(digest(sys.argv[1], int(sys.argv[2])), end="")
