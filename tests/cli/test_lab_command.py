"""`mcast lab` is the command `rdma-lab`; without that package one sentence says what installs it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.core import TyperGroup

from mcast.cli import load
from mcast.cli.status import ExitStatus
from rdma_lab.cli import app

WITHOUT = "import sys; sys.modules['rdma_lab'] = None; from mcast.cli import main; main()"
"""The command where rdma-lab is not installed."""


def without_the_lab(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT, *words], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "words", ["lab check", "lab run -- true", "lab --help", "conformance --backend rdma --lab"]
)
def test_without_the_package_it_says_what_to_install(words: str) -> None:
    done = without_the_lab(*words.split())
    assert done.returncode == ExitStatus.LAB
    assert (
        done.stderr
        == "mcast: the lab is a package of its own, rdma-lab, and not here: pip install 'rdma-mcast[lab]'\n"
    )


def test_other_commands_need_no_lab() -> None:
    done = without_the_lab("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "  lab " in done.stdout


def test_it_has_the_commands_of_rdma_lab() -> None:
    mounted = load("lab")
    assert isinstance(mounted, TyperGroup)
    own = [one.callback for one in app.registered_commands]
    assert [one.callback.__wrapped__ for one in mounted.commands.values()] == own  # type: ignore[union-attr]
    assert {"run", "shell", "check", "kernel", "break", "tap"} <= {*mounted.commands}
