"""The card itself keeps its promises: asked in C, and through the provider."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from .build import build_exercise

EXERCISES = re.findall(r"ONE\((\w+)\)[,;]", (Path(__file__).parent / "exercise.c").read_text())


@pytest.mark.parametrize("name", EXERCISES)
def test_in_c(name: str) -> None:
    done = subprocess.run([build_exercise(), name], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
