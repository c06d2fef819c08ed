"""Collectives among the ranks of an MPI job: one job makes all checks, because starting one takes seconds."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from mcast.backends.sim import Fabric
from mcast.backends.sim.shared.server import FabricServer, Serving
from mcast.backends.sim.testbed import SimObserver

from ..commands import Run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.long)])
def test_all_checks_pass_on_each_rank_of_a_job(run: Run, tmp_path: Path, ranks: int) -> None:
    if shutil.which("mpirun") is None:
        pytest.fail("this test starts ranks with mpirun: apt-get install openmpi-bin", pytrace=False)
    path = tmp_path / "fabric.sock"
    fabric = Fabric.roce(ports=ranks, clock="wall")
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", ranks)
    with Serving(FabricServer(fabric, path)):
        env = {"MCAST_SIM": str(path), "PYTHONPATH": str(ROOT)}
        done = run(*mpirun, sys.executable, "-m", "tests.collective.job", env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} is done" for rank in range(ranks)]
    assert SimObserver(fabric).leftovers() == ()
