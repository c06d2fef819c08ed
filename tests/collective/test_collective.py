"""Collectives among the ranks of an MPI job: one job makes all checks, because starting one takes seconds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..commands import Run

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("own_network")


def started(run: Run, ranks: int, *module: object) -> subprocess.CompletedProcess[str]:
    """Run a module as an MPI job of so many ranks, on `udp`."""
    if shutil.which("mpirun") is None:
        pytest.fail("this test starts ranks with mpirun: apt-get install openmpi-bin", pytrace=False)
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", ranks)
    done = run(*mpirun, sys.executable, "-m", *module, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.long)])
def test_all_checks_pass_on_each_rank_of_a_job(run: Run, ranks: int) -> None:
    done = started(run, ranks, "tests.collective.job")
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} is done" for rank in range(ranks)]


LONG_STOPS = [pytest.param("anywhere", 20, seed, marks=pytest.mark.long) for seed in range(1, 21)]


@pytest.mark.parametrize(("where", "seconds", "seed"), [("receiver", 15, 0), ("root", 5, 0), *LONG_STOPS])
def test_a_rank_that_stands_still_holds_nobody(run: Run, where: str, seconds: int, seed: int) -> None:
    """Every call of every rank returns or raises within its bound, and every process ends."""
    done = started(run, 4, "tests.collective.standing_still", where, seconds, seed)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(one["rank"] for one in said) == [0, 1, 2, 3]
    for one in said:
        assert one["longest"] <= one["bound"], said
        assert one["raised"] or where == "anywhere", said
        named = re.findall(r"rank (\d+)", one["raised"])
        assert all(int(rank) < 4 for rank in named), one
        assert re.match(r"$|RankFailed: |TimeoutError: not all ranks", one["raised"]), one
