"""Programs of this host that start others: what ends the call ends all of them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rdma_lab import children

from ..waiting import until

pytestmark = pytest.mark.timeout(60)

CALL = """
import os, signal, subprocess, sys, time
from rdma_lab import children

class Popen(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        while len(sys.argv) > 1 and not os.path.exists("sent"):
            time.sleep(0.001)

subprocess.Popen = Popen
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
children.run(["sh", "-c", "sleep 600 & echo $! >pid.new; mv pid.new pid; wait"])
"""


def test_output_and_status_come_back() -> None:
    done = children.run(["sh", "-c", r"printf 'out \377'; echo err >&2; exit 3"])
    assert (done.returncode, done.stdout, done.stderr) == (3, "out \ufffd", "err\n")


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 7), (signal.SIGINT, -signal.SIGINT)])
def test_a_signal_ends_the_children_of_children(sent: int, status: int, early: bool, tmp_path: Path) -> None:
    """Also if it comes early: they have started, and Popen has not returned."""
    pid = tmp_path / "pid"
    command = [sys.executable, "-c", CALL, *["early"] * early]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        while not pid.exists():
            assert process.poll() is None
        process.send_signal(sent)
        (tmp_path / "sent").touch()
        assert process.wait() == status
    left = int(pid.read_text())
    until(lambda: not is_alive(left))  # it was killed, and a busy machine takes a moment


def is_alive(pid: int) -> bool:
    """Return True unless the process has ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False
