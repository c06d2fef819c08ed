"""`make bench` says what moved since the last release."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ratios() -> Any:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "ratios.py")))


def test_the_median_of_the_runs_is_kept_and_compared(ratios: Any, tmp_path: Path) -> None:
    runs, store = [tmp_path / f"{n}.json" for n in range(3)], tmp_path / "ratios.json"
    for path, ratio in zip(runs, (1.0, 9.0, 1.2), strict=True):
        ratios.write(path, {"rate": ratio, "time": 2.0})
    assert ratios.stored(store) == ("", {})
    ratios.keep("0.1.0", ratios.read(runs), store)
    assert ratios.stored(store) == ("0.1.0", {"rate": 1.2, "time": 2.0})
    ratios.keep("0.2.0", {"rate": 1.5}, store)
    assert ratios.stored(store) == ("0.2.0", {"rate": 1.5, "time": 2.0})


@pytest.mark.parametrize(
    ("now", "line"), [(1.09, ""), (0.91, ""), (1.2, "+20%"), (0.5, "-50%")], ids=["up", "down", "far", "half"]
)
def test_only_what_moved_is_said(ratios: Any, now: float, line: str) -> None:
    said = list(ratios.moved({"rate": now}, {"rate": 1.0}))
    assert len(said) == bool(line)
    assert not line or line in said[0]


def test_a_first_ratio_is_new(ratios: Any, tmp_path: Path) -> None:
    first, *lines = ratios.comparison({"rate": 1.0}, tmp_path / "none.json")
    assert "1 of 1" in first
    assert "nothing stored yet" in first
    assert "new" in lines[0]
