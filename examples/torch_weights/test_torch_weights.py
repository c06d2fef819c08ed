"""The program as a PyTorch job over UDP sockets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("torch_weights.py")


def test_each_rank_has_the_last_weights() -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}  # all ranks are on this host
    done = subprocess.run([*torchrun, PROGRAM, "udp"], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[6.0, 7.0, 8.0]\n"
    assert "not multicast" not in done.stderr
