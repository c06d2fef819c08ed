"""Collectives among the ranks of torchrun on `udp`, in a network of its own: `make test-torch`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ...commands import Run
from ...house.test_docs import fences

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.usefixtures("own_network")


def torchrun(run: Run, ranks: int, *module: object) -> subprocess.CompletedProcess[str]:
    """Run a program or `-m` a module as a job of so many ranks, which find each other by loopback."""
    start = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    path = [str(ROOT), *filter(None, sys.path)]
    env = {"PYTHONPATH": ":".join(path), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return run(*start, *module, env=env)


@pytest.mark.parametrize("ranks", [4, 8])
def test_ranks_get_what_gloo_brings(run: Run, ranks: int) -> None:
    """Tensors of every dtype; the bytes leave the root once."""
    done = torchrun(run, ranks, "-m", "tests.collective.torch.job")
    assert done.returncode == 0, done.stdout + done.stderr
    said = sorted(done.stdout.splitlines())
    assert said[:-1] == [f"rank {rank} is done" for rank in range(ranks)]
    assert all(1 < float(ratio) <= 1.03 for ratio in said[-1].split()[1:]), said[-1]


@pytest.mark.parametrize(
    ("ranks", "victim", "where"),
    [
        (4, 0, "transfer"),
        (4, 2, "transfer"),
        (4, 2, "agreement"),
        (4, 2, "gloo"),
        (8, 0, "transfer"),
        (8, 5, "transfer"),
        (8, 5, "gloo"),
    ],
)
def test_a_killed_rank_ends_the_call_on_all(run: Run, ranks: int, victim: int, where: str) -> None:
    done = torchrun(run, ranks, "-m", "tests.collective.torch.killed", victim, where)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(one["rank"] for one in said) == sorted({*range(ranks)} - {victim}), done.stderr
    for one in said:
        assert one["took"] <= one["bound"], one
        assert re.match("RankFailed: |TimeoutError: |ConnectionError: ", one["raised"]), one


def test_torch_is_not_imported_for_others(run: Run) -> None:
    program = "import sys, mcast.collective.calls as calls; assert not calls.is_group(3)"
    program += "; assert calls.shown(b'1') == b'1'; assert 'torch' not in sys.modules"
    done = run(sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr


def test_the_program_of_the_page_runs(run: Run, tmp_path: Path) -> None:
    (program,) = (fence for fence in fences(ROOT / "docs/patterns.md") if fence.title == "torch_ranks.py")
    checked = 'assert not ranks.reason and sums.tolist() == [1048576.0] * 4\nprint("a rank is done")\n'
    (tmp_path / program.title).write_text(program.text + checked)
    done = torchrun(run, 4, program.title)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["a rank is done"] * 4
