"""Each target on the inputs in the repository, and on some more of their kind; and `make fuzz` in small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from .inputs import inputs
from .targets import HERE, MAX_INPUT, TARGETS, seeds
from .unguided import rounds

ROOT = HERE.parents[1]
CORPUS = [
    pytest.param(name, file, id=f"{name}-{file.name}")
    for name in TARGETS
    for file in sorted((HERE / "corpus" / name).iterdir())
]


@pytest.mark.parametrize(("name", "file"), CORPUS)
def test_a_target_holds_on_its_corpus(name: str, file: Path) -> None:
    TARGETS[name](file.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_holds_on_inputs_at_random(name: str, long: bool) -> None:
    @settings(
        max_examples=200 if long else 100,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs(seeds(name), MAX_INPUT))
    def try_some(data: bytes) -> None:
        TARGETS[name](data)

    try_some()


def test_every_corpus_is_small_and_has_a_target() -> None:
    folders = {
        folder.name: sum(file.stat().st_size for file in folder.iterdir())
        for folder in (HERE / "corpus").iterdir()
    }
    assert set(folders) == set(TARGETS)
    assert max(folders.values()) < 64 * 1024


def test_what_fails_is_kept_as_a_file(tmp_path: Path) -> None:
    def target(data: bytes) -> None:
        assert len(data) < 30

    with pytest.raises(AssertionError):
        rounds("cast_object", target, float("inf"), tmp_path)
    (kept,) = tmp_path.iterdir()
    assert len(kept.read_bytes()) >= 30


def test_a_target_that_is_none_is_named() -> None:
    command = [sys.executable, "-m", "tests.fuzz.run", "no_target"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 2
    assert "no_target is no target; there are cast_object, " in done.stderr
