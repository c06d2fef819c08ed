"""The harsh tests of receivers run twice: with segments that are placed in C, and in Python."""

from __future__ import annotations

import pytest

from mcast.cast.io import placing

BOTH = {"test_carousel", "test_flow", "test_resume", "test_streams", "test_workers"}
"""Files whose tests run over both paths; those of `test_partitions` take turns."""


@pytest.fixture(autouse=True)
def placed_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Place segments as the test's parameter says, or in C where it is built."""
    if getattr(request, "param", "") == "Python":
        monkeypatch.setattr(placing, "PLACER", None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in BOTH:
        metafunc.parametrize("placed_in", ["C", "Python"], indirect=True)
