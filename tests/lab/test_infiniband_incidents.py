"""Behaviour of the kernel with a real OpenSM: rows of docs/facts/sa.md, and what an incident does.

The incidents are those of the tests that the simulator passes, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .guest_run import TEST_SECONDS_LONG, failed, run_tests

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(7200),  # against hangs of this process: the guest is bounded by its progress
]


@pytest.mark.parametrize(
    ("tests", "switches", "at_least"),
    [("tests/incidents", 3, 10), ("tests/rdma/in_lab/infiniband", 1, 40)],
    ids=["incidents", "rows"],
)
def test_the_kernel_does_what_is_said_of_it(
    tmp_path: Path, pytestconfig: pytest.Config, tests: str, switches: int, at_least: int
) -> None:
    kernel = pytestconfig.getoption("--lab-kernel")
    run = run_tests(
        tmp_path,
        [[tests]],
        kernel=kernel,
        fabric="infiniband",
        switches=switches,
        test_seconds=TEST_SECONDS_LONG,
    )
    assert run.gap == ""
    assert failed(run.results) == {}
    assert len(run.results) >= at_least
