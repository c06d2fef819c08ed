"""Real signals at random moments leave no lock, no lease and no membership behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ..interleave import BOUND, EVERY

ROOT = Path(__file__).parents[2]
SIGNALS = 5000 if EVERY == 1 else 150


@pytest.mark.parametrize("place", ["sim-roce", "sim-ib", "card-roce"])
def test_signals_at_random_leave_nothing_behind(place: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.endpoint.storm", place, str(SIGNALS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
