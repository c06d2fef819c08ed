"""`mcast bench` on real devices: in one process, and over the ranks of an MPI job on different ports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MCAST = str(Path(sys.executable).with_name("mcast"))
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "btl", "self,vader")


pytestmark = pytest.mark.long  # an emulated process needs seconds to import the command


def bench(*command: str) -> dict[str, Any]:
    line = [*command, MCAST, "bench", "--backend", "rdma", "--seconds", "0.3", "--size", "512", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert (found["backend"], found["size"], found["lost"]) == ("rdma", 512, 0)
    assert found["messages"] > 0
    assert 0 < found["latency_us"]["p50"] <= found["latency_us"]["p99"]
    return found


def test_in_one_process() -> None:
    assert bench()["processes"] == 1


def test_over_mpi_ranks() -> None:
    found = bench(*MPIRUN, "-n", "3")
    assert (found["processes"], found["receivers"]) == (3, 2)
