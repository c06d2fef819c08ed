"""Interval lines of `mcast bench`: when a part is over, and what it counts."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from mcast.bench.intervals import IntervalResult, Intervals

from ..commands import Run


def test_a_part_is_told_when_its_interval_is_over() -> None:
    results: list[IntervalResult] = []
    parts = Intervals(1.0, results.append)
    for spent, messages, lost in (0.5, 10, 0), (1.25, 30, 3), (2.0, 40, 3), (2.5, 50, 4):
        parts.update(spent, messages, messages * 100, lost)
    assert results == [IntervalResult(0.0, 1.25, 30, 3000, 3), IntervalResult(1.25, 2.5, 20, 2000, 1)]
    assert results[0].messages_per_s == 24.0
    assert results[0].gbits_per_s == pytest.approx(30 * 100 * 8 / 1.25 / 1e9)


def test_no_interval_has_no_parts() -> None:
    results: list[IntervalResult] = []
    Intervals(None, results.append).update(1e9, 1, 1, None)
    assert results == []


def test_interval_lines_add_up_in_one_process(here: Run) -> None:
    found = json.loads(
        here("bench", "--backend", "sim", "--seconds", "0.2", "--interval", "1ms", "--json").stdout
    )
    parts = found["intervals"]
    assert all(one["ends"] == other["begins"] for one, other in pairwise(parts))
    assert 0 < sum(one["messages"] for one in parts) <= found["messages"]
    assert (
        "messages/s"
        in here("bench", "--backend", "sim", "--seconds", "0.02", "-i", "1ms").stdout.splitlines()[0]
    )
