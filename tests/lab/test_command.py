"""The command `rdma-lab`: what it refuses, and how it ends; no guest is booted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rdma_lab import cli, kernels
from rdma_lab.cli import app
from rdma_lab.errors import LabError, LabUnavailableError

COMMAND = [str(Path(sys.executable).with_name("rdma-lab"))]
WEEK = "give up to a week, in seconds or with us, ms, s, min or h"


def rdma_lab(*words: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=100)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("run", "rdma-lab run: Missing argument 'COMMAND': see `rdma-lab run --help`"),
        ("start", "rdma-lab: No such command 'start'"),
        ("run --timeout 8days -- true", f"Invalid value for '--timeout': 8days is no time: {WEEK}"),
        ("run --timeout 169h -- true", f"Invalid value for '--timeout': 169h is no time: {WEEK}"),
        ("run --memory 1.5 -- true", "1.5 is no memory of a guest: give MiB, or a number with M or G"),
        ("run --ports many -- true", "many is no number: give a whole one, like 4"),
        ("run --fabric ethernet -- true", "'ethernet' is not one of 'roce', 'infiniband'"),
    ],
)
def test_a_wrong_word_is_one_sentence(words: str, says: str) -> None:
    done = rdma_lab(*words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.startswith("rdma-lab")
    assert done.stderr.count("\n") == 1


def test_alone_it_shows_its_help() -> None:
    done = rdma_lab()
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: rdma-lab [OPTIONS] COMMAND")


def test_it_imports_nothing_of_mcast() -> None:
    """Not even where mcast is installed."""
    code = "import sys, rdma_lab.__main__, rdma_lab.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "rdma_lab.machine" in loaded.split()
    assert [name for name in loaded.split() if name.partition(".")[0] == "mcast"] == []


def test_a_reader_that_is_gone_ends_it() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = rdma_lab("check", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_full_disk_is_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        done = rdma_lab("check", stdout=full.fileno())
    assert (done.returncode, done.stderr) == (
        1,
        "rdma-lab: cannot write to stdout: No space left on device\n",
    )


@pytest.mark.parametrize(
    ("raised", "status", "says"),
    [
        (LabUnavailableError("no sources"), 125, "rdma-lab: no sources\n"),
        (LabError("no home"), 125, "rdma-lab: no home\n"),
        (KeyboardInterrupt(), 130, "rdma-lab: interrupted; the guest is stopped\n"),
    ],
)
def test_an_error_is_one_sentence(
    raised: BaseException, status: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: str) -> kernels.Kernel:
        raise raised

    monkeypatch.setattr(kernels, "fetch", fails)
    done = CliRunner().invoke(app, ["kernel", "6.12"])
    assert (done.exit_code, done.stderr) == (status, says)


def test_times_and_sizes_take_units() -> None:
    times = {"5": 5, "0.5": 0.5, ".5s": 0.5, "250ms": 0.25, "2min": 120, "1h": 3600, "168H": 604_800}
    assert {text: cli._seconds(text) for text in times} == pytest.approx(times)
    sizes = {"1024": 1024, "512M": 512, "2G": 2048, "1.5GiB": 1536}
    assert {text: cli._memory(text) for text in sizes} == sizes
