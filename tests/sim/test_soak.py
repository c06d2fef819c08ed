"""The soak of `make soak`: a short one runs, and what grows is found."""

from __future__ import annotations

import pytest

from ..soak import SAMPLES, Sample, judge, served, soak

MB = 1 << 20
FLAT = [Sample((50 * MB, 40), (60 * MB, 70))] * SAMPLES
IDLE = Sample((50 * MB, 10), (60 * MB, 20))


def test_what_stays_flat_is_well() -> None:
    assert judge(IDLE, FLAT, IDLE) == []


@pytest.mark.parametrize("end", Sample._fields)
def test_memory_that_is_let_go_again_is_no_growth(end: str) -> None:
    for number in (SAMPLES // 4, SAMPLES - 2):
        flat = list(FLAT)
        flat[number] = FLAT[number]._replace(**{end: (200 * MB, 40)})
        assert judge(IDLE, flat, IDLE) == []


@pytest.mark.parametrize("end", Sample._fields)
def test_memory_that_grows_is_found(end: str) -> None:
    grown = [one._replace(**{end: (50 * MB + number * MB, 40)}) for number, one in enumerate(FLAT)]
    (said,) = judge(IDLE, grown, IDLE)
    assert said.startswith(f"{end}: ")
    assert "bytes in memory at the end" in said


@pytest.mark.parametrize("end", Sample._fields)
def test_a_descriptor_more_is_found(end: str) -> None:
    size, count = getattr(IDLE, end)
    (said,) = judge(IDLE, FLAT, IDLE._replace(**{end: (size, count + 1)}))
    assert said == f"{end}: {count + 1} open after the run, {count} before"


@pytest.mark.long  # its programs are started again and again
def test_a_minute_of_everything_at_once() -> None:
    with served() as fabric:
        assert not soak(fabric, 1, 2)
