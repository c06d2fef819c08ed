"""`mcast send` and `mcast recv` as programs of their own, each on its own device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from subprocess import DEVNULL, PIPE
from time import monotonic, sleep

import pytest

from mcast.api import Testbed

from .conftest import source_of

BOUND = 1000.0
GROUP = "239.77.2.1"
DATA = Random(5).randbytes(400_000)
MCAST = [sys.executable, "-m", "mcast"]

pytestmark = pytest.mark.long  # an emulated process needs seconds to import the command


def start(*words: object, stdin: int = DEVNULL, stdout: int = DEVNULL) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*MCAST, *map(str, words)], stdin=stdin, stdout=stdout, stderr=PIPE)


def complaints(stderr: bytes) -> list[bytes]:
    """The lines of stderr but those about progress, which a slow command prints."""
    progress = (b"listening", b"waiting", b"sending", b"receiving")
    return [line for line in stderr.splitlines() if not line.startswith(progress)]


def end(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.kill()
        process.wait(BOUND)
        for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
            pipe.close()


def test_stdin_reaches_a_file_and_a_pipe(lab_bed: Testbed, tmp_path: Path) -> None:
    source, one, other, *_ = lab_bed.ports
    filing = start("recv", GROUP, "-o", tmp_path / "copy", "-b", one)
    piping = start("recv", GROUP, "-o", "-", "-b", other, stdout=PIPE)
    sending = start("send", "-", GROUP, "-b", source, "-n", 2, stdin=PIPE, stdout=PIPE)
    with ThreadPoolExecutor(1) as reader:
        try:
            piped = reader.submit(piping.communicate, timeout=BOUND)  # one that does not read holds all back
            said, complained = sending.communicate(DATA, timeout=BOUND)
            assert (sending.returncode, complaints(complained)) == (0, [])
            assert b"2/2 receivers verified" in said
            received, complained = piped.result()
            assert (received, complaints(complained)) == (DATA, [])
            assert filing.wait(BOUND) == piping.returncode == 0
        finally:
            end(sending, filing, piping)
    assert (tmp_path / "copy").read_bytes() == DATA
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_killed_receiver_is_named(lab_bed: Testbed, tmp_path: Path) -> None:
    """A receiver that is killed is named and one that is interrupted leaves what it has."""
    source, one, other, third, *_ = lab_bed.ports
    (tmp_path / "there").mkdir()
    killed = start("recv", GROUP, "-o", tmp_path / "killed", "-b", one)
    interrupted = start("recv", GROUP, "-o", tmp_path / "there" / "interrupted", "-b", other)
    patient = start("recv", GROUP, "-o", tmp_path / "copy", "-b", third)
    sending = start("send", "-", GROUP, "-b", source, "-n", 3, "--peer-timeout", 2, stdin=PIPE, stdout=PIPE)
    try:
        assert sending.stdin is not None
        sending.stdin.write(DATA)  # a part of it: the sender waits for more
        sending.stdin.flush()
        wait_for(lambda: part(tmp_path) > 0)
        killed.kill()
        interrupted.terminate()
        assert interrupted.wait(BOUND) == 128 + 15
        said, complained = sending.communicate(DATA, timeout=BOUND)
        unmet = b"mcast: the strategy all was not met: 1 of 3 receivers has all"
        assert (sending.returncode, complaints(complained)) == (1, [unmet])
        assert patient.wait(BOUND) == 0
    finally:
        end(sending, killed, interrupted, patient)
    lines = [line.rstrip() for line in said.decode().splitlines()]
    for port, fate in ((one, "was silent"), (other, "interrupted")):
        assert [line for line in lines if source_of(lab_bed, port) in line][-1].endswith(fate), lines
    assert lines[-1].startswith("send: 1/3 receivers verified")
    assert (tmp_path / "copy").read_bytes() == DATA * 2
    # Whole blocks alone stay, and the kill may have come before the first.
    assert {path.name for path in (tmp_path / "there").iterdir()} <= {".interrupted.part"}
    assert not (tmp_path / "killed").exists()


def part(folder: Path) -> int:
    """Bytes of the file that the receiver to be killed has written."""
    return max((path.stat().st_size for path in folder.glob(".killed.*")), default=0)


def wait_for(condition: Callable[[], bool]) -> None:
    limit = monotonic() + BOUND
    while not condition():
        assert monotonic() < limit
        sleep(0.05)
