"""Incidents of SM, cable and port on the kernel, with a real OpenSM: the tests that the simulator passes."""

from __future__ import annotations

import pytest

from .guest_run import failed, run_tests

INCIDENTS = "tests/incidents"

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),  # against hangs of this process: the guest is bounded by its progress
]


def test_the_kernel_shows_what_the_simulator_shows(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> None:
    shared = tmp_path_factory.mktemp("incidents")
    kernel = pytestconfig.getoption("--lab-kernel")
    run = run_tests(shared, [[INCIDENTS]], kernel=kernel, fabric="infiniband", switches=3)
    assert run.gap == ""
    assert failed(run.results) == {}
    assert len(run.results) == 9
