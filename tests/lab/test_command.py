"""The command `rdma-lab`: what it refuses, and how it ends; no guest is booted."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rdma_lab import LabMachine, LabResult, cli, kernels
from rdma_lab.cli import app
from rdma_lab.errors import GuestPanicError, LabError, LabTimeoutError, LabUnavailableError

COMMAND = [str(Path(sys.executable).with_name("rdma-lab"))]
WEEK = "give more than 0 and up to a week, in seconds or with us, ms, s, min or h"


def rdma_lab(*words: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=100)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("run", "rdma-lab run: Missing argument 'COMMAND': see `rdma-lab run --help`"),
        ("start", "rdma-lab: No such command 'start'"),
        ("run --timeout 8days -- true", f"Invalid value for '--timeout': 8days is not a time: {WEEK}"),
        ("run --timeout 169h -- true", f"Invalid value for '--timeout': 169h is not a time: {WEEK}"),
        ("break cable rxe2 --for 0", f"Invalid value for '--for': 0 is not a time: {WEEK}"),
        ("brake cable rxe2", "rdma-lab: No such command 'brake'. Did you mean 'break'?"),
        ("run --memory 1.5 -- true", "1.5 is not a size of memory: give MiB, or a number with M or G"),
        ("run --ports many -- true", "many is not a number: give a whole number, such as 4"),
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


@pytest.mark.parametrize(
    ("command", "usage"),
    [("run", "[OPTIONS] -- COMMAND..."), ("kernel", "[OPTIONS] VERSION"), ("break", "[OPTIONS] [FAULT...]")],
)
def test_help_shows_arguments_as_typed(command: str, usage: str) -> None:
    """No type of Python and no braces stand beside the name of an argument."""
    shown = rdma_lab(command, "--help").stdout
    assert shown.startswith(f"Usage: rdma-lab {command} {usage}\n")
    assert "<str>" not in shown
    assert "<list[" not in shown


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
        (KeyboardInterrupt(), 130, "rdma-lab: interrupted\n"),
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


def test_a_closed_stdout_is_one_sentence() -> None:
    """No pipe of a guest becomes its descriptor, and what is not printed is no success."""
    for words, said in (
        ("check", "rdma-lab: cannot write to stdout: Bad file descriptor\n"),
        ("run -- no-such-command", "no such command on this machine"),
    ):
        closed = ["sh", "-c", f"exec {shlex.join(COMMAND)} {words} <&- >&-"]
        done = subprocess.run(closed, stderr=subprocess.PIPE, text=True, timeout=100)
        assert done.returncode == (1 if words == "check" else 127)
        assert said in done.stderr
        assert "Traceback" not in done.stderr


def test_a_mistyped_command_is_guessed() -> None:
    done = rdma_lab("run", "--", "pythn3")
    assert done.returncode == 127
    assert done.stderr.endswith("; did you mean python3?\n")
    assert rdma_lab("run", "--", "no-such-command").stderr.endswith("; install it here, or give its path\n")


TIDIES = """
import sys, types, typer
from rdma_lab import cli
try:
    with cli._plain_errors(types.SimpleNamespace(parent=None, command_path="rdma-lab", params={})):
        try:
            print("begun", flush=True)
            sys.stdin.readline()
        finally:
            print("tidying", flush=True)
            sys.stdin.readline()
            print("tidied", flush=True)
except typer.Exit as done:
    sys.exit(done.exit_code)
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_more_signals_do_not_disturb_the_end(sent: signal.Signals) -> None:
    """Or a second Ctrl-C would leave the temporary folder of the guest."""
    with subprocess.Popen(
        [sys.executable, "-c", TIDIES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(sent)
        assert process.stdout.readline() == b"tidying\n"
        for more in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(more)
        out, err = process.communicate(b"\n", timeout=100)
    assert (process.returncode, out) == (128 + sent, b"tidied\n")
    assert b"Traceback" not in err


def test_times_and_sizes_take_units() -> None:
    times = {"5": 5, "0.5": 0.5, ".5s": 0.5, "250ms": 0.25, "2min": 120, "1h": 3600, "168H": 604_800}
    assert {text: cli._seconds(text) for text in times} == pytest.approx(times)
    sizes = {"1024": 1024, "512M": 512, "2G": 2048, "1.5GiB": 1536}
    assert {text: cli._memory(text) for text in sizes} == sizes


@pytest.mark.parametrize(
    ("ran", "status", "says"),
    [
        (LabTimeoutError("late"), 124, "rdma-lab: late\n"),
        (GuestPanicError("panicked"), 125, "rdma-lab: panicked\n"),
        (None, 7, ""),
    ],
)
def test_verbose_says_how_every_guest_ran(
    ran: LabError | None, status: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> LabResult:
        result = LabResult(7, "6.1.0-56-amd64", False, float("inf"), 2.0, resumed=True)
        if ran:
            ran.result = replace(result, exit_code=ran.exit_code)
            raise ran
        return replace(result, ready_after=1)

    monkeypatch.setattr(LabMachine, "run", run)
    monkeypatch.setattr(cli, "kvm_problem", lambda: "/dev/kvm: Permission denied")
    monkeypatch.setattr(Path, "exists", lambda _: True)
    ready = "never ready" if ran else "ready after 1.0 s"
    for kernel, named in (("6.1", ""), ("./mine", " of ./mine")):
        done = CliRunner().invoke(app, ["run", "-v", "--kernel", kernel, "--", "true"])
        assert done.stderr == (
            f"rdma-lab: Linux 6.1.0-56-amd64{named}, emulated, resumed, {ready}, 2.0 s in all, "
            f"exit code {status}\nrdma-lab: KVM is not used: /dev/kvm: Permission denied\n{says}"
        )
