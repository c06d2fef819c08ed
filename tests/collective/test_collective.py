"""Collectives among the ranks of an MPI job: one job makes all checks, because starting one takes seconds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mcast.backends.sim import Fabric
from mcast.backends.sim.served.server import FabricServer, Serving
from mcast.backends.sim.testbed import SimObserver

from ..commands import Run

ROOT = Path(__file__).parents[2]


def started(
    run: Run, tmp_path: Path, fabric: Fabric, ranks: int, *module: object
) -> subprocess.CompletedProcess[str]:
    """Run a module as an MPI job of so many ranks, on a served fabric."""
    if shutil.which("mpirun") is None:
        pytest.fail("this test starts ranks with mpirun: apt-get install openmpi-bin", pytrace=False)
    path = tmp_path / "fabric.sock"
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", ranks)
    with Serving(FabricServer(fabric, path)):
        env = {"MCAST_SIM": str(path), "PYTHONPATH": str(ROOT)}
        done = run(*mpirun, sys.executable, "-m", *module, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.long)])
def test_all_checks_pass_on_each_rank_of_a_job(run: Run, tmp_path: Path, ranks: int) -> None:
    fabric = Fabric.roce(ports=ranks, clock="wall")
    done = started(run, tmp_path, fabric, ranks, "tests.collective.job")
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} is done" for rank in range(ranks)]
    assert SimObserver(fabric).leftovers() == ()


LONG_STOPS = [pytest.param("anywhere", 20, seed, marks=pytest.mark.long) for seed in range(1, 21)]


@pytest.mark.parametrize(("where", "seconds", "seed"), [("receiver", 15, 0), ("root", 5, 0), *LONG_STOPS])
def test_a_rank_that_stands_still_holds_nobody(
    run: Run, tmp_path: Path, where: str, seconds: int, seed: int
) -> None:
    """Every call of every rank returns or raises within its bound, and every process ends."""
    fabric = Fabric.roce(ports=4, clock="wall")
    done = started(run, tmp_path, fabric, 4, "tests.collective.standing_still", where, seconds, seed)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(one["rank"] for one in said) == [0, 1, 2, 3]
    for one in said:
        assert one["longest"] <= one["bound"], said
        assert one["raised"] or where == "anywhere", said
        named = re.findall(r"rank (\d+)", one["raised"])
        assert all(int(rank) < 4 for rank in named), one
        assert re.match(r"$|RankFailed: |TimeoutError: not all ranks", one["raised"]), one
    assert SimObserver(fabric).leftovers() == ()
