"""The real provider on a real kernel: one guest runs the suite, the provider's own tests and the model.

The guest's report is read here clause by clause, and set beside the simulator's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

import mcast
from mcast.conformance.clauses import CLAUSES
from mcast.conformance.facts import FACTS
from mcast.conformance.report import Cell, Outcome, Report, from_json
from mcast.lab import LabMachine

PROJECT = Path(mcast.__file__).parents[1]
PORTS = 4
GUEST_TIMEOUT = 780.0

pytestmark = pytest.mark.timeout(GUEST_TIMEOUT + 60)


class Run(NamedTuple):
    """What the guest brought back: the clauses, and each test as (name, "passed" or what it said)."""

    report: Report
    tests: dict[str, str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Every test that needs a device, in one process of one guest."""
    shared = tmp_path_factory.mktemp("guest")
    report, junit = shared / "report.json", shared / "junit.xml"
    options = f"-q --tb=short -p no:cacheprovider --hypothesis-profile lab --junitxml {junit}"
    suite = f"--require-backend rdma --conformance-report {report}"
    folders = "tests/conformance tests/rdma/in_lab tests/model"
    command = [sys.executable, "-m", "pytest", *options.split(), *suite.split(), *folders.split()]
    LabMachine(PORTS, share=[shared]).run(command, cwd=PROJECT, timeout=GUEST_TIMEOUT)
    return Run(from_json(report.read_text()), _read(junit))


def _read(junit: Path) -> dict[str, str]:
    cases = ElementTree.parse(junit).getroot().iter("testcase")
    return {f"{case.get('classname')}::{case.get('name')}": _said(case) for case in cases}


def _said(case: ElementTree.Element) -> str:
    bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
    return "; ".join(f"{child.tag}: {child.get('message')}" for child in bad) or "passed"


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
    deviations = [r.test for r in run.report.results if r.outcome is Outcome.DEVIATION]
    bad = {
        name: said
        for name, said in run.tests.items()
        if said != "passed" and not any(name.endswith(test.partition("::")[2]) for test in deviations)
    }
    assert bad == {}
    ran = {name.split("::")[0].rpartition(".")[2] for name in run.tests}
    assert {"test_model", "test_leaks", "test_mckey", "test_spine"} <= ran


@pytest.mark.parametrize("name", [*CLAUSES, *FACTS])
def test_the_simulator_equals_the_kernel_or_the_report_says_why_not(
    run: Run, simulated: Report, name: str
) -> None:
    real, sim = run.report.providers["rdma"][name], simulated.providers["sim-roce"][name]
    assert sim.outcome is not Outcome.FAILED, sim.reason
    assert _shown(real) == _shown(sim) or (real.reason or sim.reason), name


def _shown(cell: Cell) -> bool:
    return cell.outcome is Outcome.PASSED
