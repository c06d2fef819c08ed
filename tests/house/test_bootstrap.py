"""scripts/bootstrap: it installs what is missing where it may, and says the line where it may not."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from ..commands import Run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A project of its own with three packages, one of them here; and a PATH without apt-get and sudo."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "bootstrap", tmp_path / "scripts")
    (tmp_path / "packages.txt").write_text(
        "# group package there if\ndemo here true\ndemo for-demo false\ntest for-test test -e made\n"
    )
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("sh", "dirname", "mktemp", "rm", "tail", "cat"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    script(tools / "id", "echo 1000")
    return tmp_path


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def bootstrap(run: Run, host: Path, group: str) -> tuple[int, str]:
    # The script adds sbin directories to PATH; a host without apt-get has it in none of them.
    env = {"PATH": str(host / "bin"), "PYTHON": sys.executable}
    done = run(host / "bin" / "sh", host / "scripts" / "bootstrap", group, env=env)
    return done.returncode, done.stdout + done.stderr


def test_nothing_missing_is_silent(run: Run, host: Path) -> None:
    (host / "packages.txt").write_text("demo here true\ntest absent false\n")
    assert bootstrap(run, host, "demo") == (0, "")


def test_without_apt_it_names_the_packages(run: Run, host: Path) -> None:
    status, output = bootstrap(run, host, "test")
    assert status == 1
    assert "by their Debian names: for-demo for-test" in output


def test_without_the_right_it_says_the_line(run: Run, host: Path) -> None:
    script(host / "bin" / "apt-get", "exit 99")
    status, output = bootstrap(run, host, "demo")
    assert status == 1
    assert "sudo apt-get update && sudo apt-get install -y --no-install-recommends for-demo\n" in output


@pytest.mark.parametrize("right", ["root", "sudo"])
def test_with_the_right_it_installs(run: Run, host: Path, right: str) -> None:
    script(host / "bin" / "apt-get", f'echo "$@" >> "{host}/called"')
    if right == "root":
        script(host / "bin" / "id", "echo 0")
    else:
        script(host / "bin" / "sudo", '[ "$1" = -n ] && shift; exec "$@"')
        (host / "bin" / "true").symlink_to(str(shutil.which("true")))
    status, output = bootstrap(run, host, "test")
    assert (status, output) == (0, "bootstrap: installing for-demo for-test\n")
    called = (host / "called").read_text().splitlines()
    assert called == ["update", "install -y --no-install-recommends for-demo for-test"]


def test_a_failing_apt_is_shown_with_the_line(run: Run, host: Path) -> None:
    script(host / "bin" / "id", "echo 0")
    script(host / "bin" / "apt-get", "echo E: no network; exit 100")
    status, output = bootstrap(run, host, "demo")
    assert status == 1
    assert "E: no network" in output
    assert "type this, then run make again" in output


def test_an_old_python_is_refused(run: Run, host: Path) -> None:
    script(host / "bin" / "old", "exit 1")
    env = {"PATH": str(host / "bin"), "PYTHON": str(host / "bin" / "old")}
    done = run(host / "bin" / "sh", host / "scripts" / "bootstrap", "demo", env=env)
    assert done.returncode == 1
    assert "is older than 3.11 or cannot run" in done.stderr


def test_every_line_of_the_list_is_whole() -> None:
    lines = [line.split(maxsplit=2) for line in (ROOT / "packages.txt").read_text().splitlines()]
    lines = [line for line in lines if line and line[0] != "#"]
    assert len(lines) > 10
    assert all(len(line) == 3 and line[0] in ("demo", "test", "bench", "fresh") for line in lines)
    assert os.access(ROOT / "scripts" / "bootstrap", os.X_OK)
