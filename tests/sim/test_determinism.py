"""Equal seeds give equal traces, to the byte: in one process, and across processes and hash seeds."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from random import Random

import pytest

from mcast.api import McastError
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults import Delay, Delivery, Drop
from mcast.backends.sim.trace import pcapng, timeline
from mcast.backends.sim.trace.events import Trace


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


def elsewhere(kind: str, seed: int, hash_seed: str) -> str:
    """The trace of the same run in a process of its own."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, __file__, kind, str(seed)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def require_same(kind: str, seed: int, first: str, second: str) -> None:
    """Fails at the first line that differs, with the seed and the line that replays the run."""
    for number, lines in enumerate(zip_longest(first.splitlines(), second.splitlines()), 1):
        if lines[0] != lines[1]:
            replay = shlex.join([sys.executable, __file__, kind, str(seed)])
            pytest.fail(
                f"seed {seed} gave two traces, which differ from line {number} on:\n"
                f"  {lines[0]}\n  {lines[1]}\nreplay: {replay}",
                pytrace=False,
            )


@pytest.mark.parametrize("seed", [7, 8, 2026])
@pytest.mark.parametrize("kind", ["roce", "ib"])
def test_the_same_seed_gives_the_same_trace(kind: str, seed: int) -> None:
    first = run(kind, seed)
    assert first.count("\n") > 300
    require_same(kind, seed, first, run(kind, seed))
    assert run(kind, seed + 1) != first


@pytest.mark.parametrize("kind", ["roce", "ib"])
def test_trace_is_independent_of_the_process(kind: str) -> None:
    """The trace does not depend on the process or its hash seed."""
    here = run(kind, 7)
    for hash_seed in ("1", "2"):
        require_same(kind, 7, here, elsewhere(kind, 7, hash_seed))


def test_difference_names_the_seed() -> None:
    """A difference names the seed and the line that replays it."""
    trace = run("ib", 7)
    lines = trace.splitlines()
    for changed in ("\n".join([*lines[:20], "other", *lines[21:]]), "\n".join(lines[:20])):
        with pytest.raises(pytest.fail.Exception) as raised:
            require_same("ib", 7, trace, changed)
        text = str(raised.value)
        assert "seed 7" in text
        assert "from line 21 on" in text
        assert lines[20] in text
        replay = shlex.split(text.rpartition("replay: ")[2])
        assert subprocess.run(replay, check=True, capture_output=True, text=True).stdout == trace


def test_same_trace_gives_same_page_and_packets() -> None:
    """Equal traces give equal pages and packets."""

    def exported(trace: Trace) -> tuple[str, bytes]:
        file = io.BytesIO()
        pcapng.write(trace, file)
        return timeline.page(trace, "a run"), file.getvalue()

    here, there = (Trace.load(text) for text in (run("ib", 7), elsewhere("ib", 7, "3")))
    assert exported(here) == exported(there)


@pytest.mark.parametrize("name", ["sm-failover-under-load", "lossy-link"])
def test_scenario_is_equal_in_every_process(name: str, tmp_path: Path) -> None:
    """A ready made scenario is the same in every process."""
    traces = []
    for hash_seed in ("1", "2"):
        file = tmp_path / hash_seed
        play = "import sys; from mcast.cli import main; main()"
        command = [sys.executable, "-c", play, "sim", "run", name, "--trace", str(file)]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        subprocess.run(command, env=environment, check=True, capture_output=True)
        traces.append(file.read_text())
    assert traces[0].count("\n") > 1_000
    assert traces[0] == traces[1], f"replay: mcast sim run {name} --trace FILE"


if __name__ == "__main__":
    print(run(sys.argv[1], int(sys.argv[2])), end="")
