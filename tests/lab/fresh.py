"""Runs a script in a Debian of its own, which holds nothing but certificates and a clone of this project."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

FRESH = Path(__file__).parents[2] / "scripts" / "fresh-debian"
CLONE = "/root/mcast"
"""The clone in the root file system that `fresh-debian` makes; the script starts there."""
SECONDS = 3000
"""Against hangs: packages come by the network, and the guest is emulated."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="scripts/fresh-debian refuses anyone but root")


def in_fresh_debian(text: str) -> str:
    """Return what a script prints in a fresh Debian 12."""
    done = subprocess.run(
        [str(FRESH), "bookworm", "--", "bash", "-euc", text],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout
