"""The conformance suite on InfiniBand: the real librdmacm, kernel and OpenSM, on the lab's HCAs and switch.

Its column is set beside the simulator's.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from mcast.conformance.clauses import CLAUSES
from mcast.conformance.facts import FACTS
from mcast.conformance.report import Outcome, SuiteReport, build_report

from .guest_run import GuestRun, failed, run_tests

ITSELF = "tests/conformance/test_spine.py"
"""What the suite says of itself, which no kernel can change."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),  # against hangs of this process: the guest is bounded by its progress
]


class Found(NamedTuple):
    run: GuestRun
    report: SuiteReport


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Found:
    """The suite in one guest."""
    shared = tmp_path_factory.mktemp("infiniband_suite")
    tests = ["--ignore", ITSELF, "tests/conformance"]
    run = run_tests(shared, [tests], kernel=pytestconfig.getoption("--lab-kernel"), fabric="infiniband")
    return Found(run, build_report(run.results, ["rdma"], {}))


def test_every_test_has_a_result_and_passes(found: Found) -> None:
    if found.run.gap:
        pytest.fail(found.run.gap, pytrace=False)
    assert failed(found.run.results) == {}


def test_the_simulator_equals_it_or_the_report_says_why_not(found: Found) -> None:
    from mcast.cli.conformance import run_suite

    simulated = run_suite([], ["sim-ib"])
    differing: dict[str, str] = {}
    for name in (*CLAUSES, *FACTS):
        real, sim = found.report.providers["rdma"][name], simulated.providers["sim-ib"][name]
        both = {one.outcome is Outcome.PASSED for one in (real, sim)}
        if len(both) > 1 and not (real.reason or sim.reason):
            differing[name] = f"OpenSM and kernel: {real.outcome.value}, simulator: {sim.outcome.value}"
    assert differing == {}
