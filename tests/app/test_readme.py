"""README.md: what it shows runs, and what it names exists."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from mcast import backend_names

from .conftest import Run

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)


def test_there_is_an_example_of_15_lines() -> None:
    assert SNIPPETS
    assert len([line for line in SNIPPETS[0].splitlines() if line]) <= 15


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_each_snippet_runs_and_prints_what_it_says(run: Run, snippet: str) -> None:
    done = run(sys.executable, "-W", "error", "-c", snippet)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == re.findall(r"print\(.*\)  # (.*)$", snippet, re.M)


def test_each_make_target_named_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:^|`)make (\w+)", README, re.M))
    assert {"demo", "test"} <= named <= targets


def test_the_provider_table_names_every_built_in_backend() -> None:
    table = README.partition("## Providers")[2].partition("##")[0]
    assert (
        set(backend_names()) >= {"sim", "sim-roce", "sim-ib", "rdma"} <= set(re.findall(r"`([\w-]+)`", table))
    )
