"""The card itself keeps its promises: asked in C, and through the provider."""

from __future__ import annotations

import re
import subprocess
from enum import IntEnum, IntFlag
from pathlib import Path

import pytest

from .build import build_exercise
from .card import Blocking, Clock, Grh, Stage, enumerators

EXERCISES = re.findall(r"ONE\((\w+)\)[,;]", (Path(__file__).parent / "exercise.c").read_text())


@pytest.mark.parametrize("name", EXERCISES)
def test_in_c(name: str) -> None:
    done = subprocess.run([build_exercise(), name], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")


ENUMS: dict[str, type[IntEnum] | type[IntFlag]] = {
    "stage": Stage,
    "grh_form": Grh,
    "stamping_clock": Clock,
    "loopback_blocking": Blocking,
}


@pytest.mark.parametrize("name", ENUMS)
def test_what_a_script_says_is_what_the_card_knows(name: str) -> None:
    known = {member.partition("_")[2]: value for member, value in enumerators()[name].items()}
    assert known == {member.name: member.value for member in ENUMS[name]}
