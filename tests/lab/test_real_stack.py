"""The real provider on a real kernel: one guest runs the suite, the model and the main job.

The guest's report is read here clause by clause, and set beside the simulator's.
"""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import pytest

from mcast.conformance.clauses import CLAUSES
from mcast.conformance.facts import FACTS
from mcast.conformance.report import Cell, Outcome, Report, from_json

from .guest_run import PORTS, TIMEOUT, bad, modules, run_tests

RXE = {f"rxe{number}" for number in range(1, PORTS + 1)}

pytestmark = pytest.mark.timeout(TIMEOUT + 60)


class Run(NamedTuple):
    """What the guest brought back: the clauses, each test as (name, "passed" or what it said), the demo."""

    report: Report
    tests: dict[str, str]
    demo: dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """In one guest: the suite and the model in one process; then the demo."""
    shared = tmp_path_factory.mktemp("guest")
    report, demo = shared / "report.json", shared / "demo.json"
    options = ["--hypothesis-profile", "lab", "--conformance-report", str(report)]
    main_job = f"{sys.executable} -m mcast demo --backend rdma --receivers 3 --size 1M --json >{demo}"
    tests = run_tests(shared, options, ["tests/conformance", "tests/model"], main_job)
    return Run(from_json(report.read_text()), tests, json.loads(demo.read_text()))


@pytest.fixture(scope="module")
def simulated() -> Report:
    """The same suite on the simulated RoCE fabric."""
    from mcast.cli.conformance import run_suite

    return run_suite([], ["sim-roce"])


@pytest.mark.parametrize("name", [*CLAUSES, *FACTS])
def test_clause_and_fact_hold_on_the_real_kernel(run: Run, name: str) -> None:
    cell = run.report.providers["rdma"][name]
    assert cell.outcome is not Outcome.FAILED, cell.reason


def test_whatever_ran_in_the_guest_passed_or_deviates_as_declared(run: Run) -> None:
    assert bad(run.tests) == {}
    assert {"test_model", "test_spine"} <= modules(run.tests)


def test_the_main_job_works_on_real_devices(run: Run) -> None:
    assert len({receiver["device"] for receiver in run.demo["receivers"]} & RXE) == 3
    assert [receiver["verified"] for receiver in run.demo["receivers"]] == [True] * 3
    assert {receiver["sha256"] for receiver in run.demo["receivers"]} == {run.demo["sha256"]}


@pytest.mark.parametrize("name", [*CLAUSES, *FACTS])
def test_the_simulator_equals_the_kernel_or_the_report_says_why_not(
    run: Run, simulated: Report, name: str
) -> None:
    real, sim = run.report.providers["rdma"][name], simulated.providers["sim-roce"][name]
    assert sim.outcome is not Outcome.FAILED, sim.reason
    assert _shown(real) == _shown(sim) or (real.reason or sim.reason), name


def _shown(cell: Cell) -> bool:
    return cell.outcome is Outcome.PASSED
