"""scripts/fresh-debian: what reaches the root file system, and what is left when it ends."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from ..waiting import until

SCRIPT = Path(__file__).parents[2] / "scripts" / "fresh-debian"
Program = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("fresh_debian", str(SCRIPT))
    spec = importlib.util.spec_from_loader("fresh_debian", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Put a shell script in front of a program of the same name."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def program(name: str, text: str) -> Path:
        file = folder / name
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
        return file

    return program


def test_the_mirrors_are_the_hosts(script: ModuleType, program: Program) -> None:
    program("apt-get", "printf 'Debian http://here/debian/\\nDebian-Security http://here/security/\\n'")
    assert script.sources("trixie") == [
        "deb http://here/debian/ trixie main",
        "deb http://here/debian/ trixie-updates main",
        "deb http://here/security/ trixie-security main",
    ]
    assert script.sources("unstable") == ["deb http://here/debian/ unstable main"]


def test_another_system_has_no_mirror(script: ModuleType, program: Program) -> None:
    program("apt-get", "echo Ubuntu http://here/ubuntu/")
    assert script.sources("trixie") == []


def test_the_environment_is_a_fresh_one(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("PIP_INDEX_URL", "https://index/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "file:///srv/wheels https://more/simple")
    monkeypatch.setenv("MCAST_SIM", "somewhere")
    found = script.environment()
    assert found["https_proxy"] == "http://proxy:3128"
    assert found["PIP_INDEX_URL"] == "https://index/simple"
    assert found["PIP_EXTRA_INDEX_URL"] == "https://more/simple"  # a folder of this host is not there
    assert found["HOME"] == "/root"
    assert "MCAST_SIM" not in found


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the script refuses anyone but root")


@needs_root
def test_a_failed_debian_leaves_no_folder(tmp_path: Path, program: Program) -> None:
    program("mmdebstrap", "exit 25")
    folder = tmp_path / "folder"
    folder.mkdir()
    env = os.environ | {"FRESH_FOLDER": str(folder)}
    done = subprocess.run([sys.executable, SCRIPT, "trixie"], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "fresh-debian: mmdebstrap failed with status 25\n"
    assert list(folder.iterdir()) == []


@needs_root
def test_a_sigterm_ends_all_and_leaves_nothing(tmp_path: Path, program: Program) -> None:
    inside = tmp_path / "inside"
    program(
        "mmdebstrap",
        'for word; do case $word in */root) mkdir -p "$word/usr/local/share/ca-certificates" ;; esac; done',
    )
    program("git", "exit 0")
    program("unshare", f"echo $$ >{inside}.new; mv {inside}.new {inside}; exec sleep 600")
    folder = tmp_path / "folder"
    folder.mkdir()
    env = os.environ | {"FRESH_FOLDER": str(folder)}
    command = [sys.executable, str(SCRIPT), "trixie", "test"]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as process:
        until(lambda: inside.exists() or process.poll() is not None)
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 143
    pid = int(inside.read_text())
    assert list(folder.iterdir()) == []
    assert not Path(f"/proc/{pid}").exists()


def test_a_signal_waits_until_its_process_is_known(
    script: ModuleType,
) -> None:
    done: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: done.append("signal"))
    try:
        with script.put_off(signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("process")
        assert done == ["process", "signal"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_command_takes_the_place_of_make(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Debian has neither Python nor make, as the containers of Debian have neither."""
    runs: list[object] = []

    def run(*given: object) -> int:
        runs.append(given)
        return 0

    monkeypatch.setattr(script, "run", run)
    monkeypatch.setattr(script.os, "geteuid", lambda: 0)
    monkeypatch.setattr(script.shutil, "which", lambda _: "/usr/bin/mmdebstrap")
    monkeypatch.setattr(script.signal, "signal", lambda *_: None)
    for words in (["bookworm"], ["trixie", "lint"], ["bookworm", "--", "ls", "-l"]):
        script.main(words)
    with_make = ("ca-certificates", "python3", "make")
    assert runs == [
        ("bookworm", with_make, ["make", "demo", "test"]),
        ("trixie", with_make, ["make", "lint"]),
        ("bookworm", ("ca-certificates",), ["ls", "-l"]),
    ]


def test_without_a_release_it_says_how(program: Program) -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "")
    assert "usage: scripts/fresh-debian bookworm|trixie" in done.stdout
