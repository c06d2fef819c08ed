"""The examples: their own tests pass, in a pytest of their own, and they use what users may use."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SUITES = sorted(path.parent for path in EXAMPLES.glob("*/pytest.ini"))
PUBLIC = {
    "mcast",
    "mcast.aio",
    "mcast.cast",
    "mcast.collective",
    "mcast.testing.plugin",
    "mcast.backends.sim.faults",
}


@pytest.mark.parametrize("suite", SUITES, ids=lambda path: path.name)
def test_the_suite_of_an_example_passes(suite: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=suite,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed in", done.stdout, re.M), done.stdout


def test_there_are_examples() -> None:
    assert [path.name for path in SUITES] == ["pricefeed"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.name)
def test_an_example_uses_what_users_may_use(path: Path) -> None:
    used = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            used.add(str(node.module))
    assert {name for name in used if name.partition(".")[0] == "mcast"} <= PUBLIC
