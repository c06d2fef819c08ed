"""The program as an MPI job over UDP sockets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("mpi_weights.py")


def test_each_rank_has_the_last_weights() -> None:
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable)
    done = subprocess.run([*mpirun, PROGRAM, "udp"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[6.0, 7.0, 8.0]\n"
    assert "not multicast" not in done.stderr
