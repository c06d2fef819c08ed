"""The real provider on a real kernel: one guest runs the suite, the provider's own tests and the model.

The guest's report is read here clause by clause, and set beside the simulator's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

import mcast
from mcast.conformance.clauses import CLAUSES
from mcast.conformance.facts import FACTS
from mcast.conformance.report import Cell, Outcome, Report, from_json
from mcast.lab import LabMachine

PROJECT = Path(mcast.__file__).parents[1]
PORTS = 4
RXE = {f"rxe{number}" for number in range(1, PORTS + 1)}
GUEST_TIMEOUT = 780.0

pytestmark = pytest.mark.timeout(GUEST_TIMEOUT + 60)


class Run(NamedTuple):
    """What the guest brought back: the clauses, each test as (name, "passed" or what it said), the demo."""

    report: Report
    tests: dict[str, str]
    demo: dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """In one guest: every test that needs a device, in one process; then the demo."""
    shared = tmp_path_factory.mktemp("guest")
    report, junit, demo = shared / "report.json", shared / "junit.xml", shared / "demo.json"
    options = f"-q --tb=short -p no:cacheprovider --hypothesis-profile lab --junitxml {junit}"
    suite = f"--require-backend rdma --conformance-report {report}"
    folders = "tests/conformance tests/rdma/in_lab tests/model"
    tests = f"{sys.executable} -m pytest {options} {suite} {folders}"
    main_job = f"{sys.executable} -m mcast demo --backend rdma --receivers 3 --size 1M --json"
    script = f"{tests}; {main_job} >{demo}"
    LabMachine(PORTS, share=[shared]).run(["sh", "-c", script], cwd=PROJECT, timeout=GUEST_TIMEOUT)
    return Run(from_json(report.read_text()), _read(junit), json.loads(demo.read_text()))


def _read(junit: Path) -> dict[str, str]:
    cases = ElementTree.parse(junit).getroot().iter("testcase")
    return {f"{case.get('classname')}::{case.get('name')}": _said(case) for case in cases}


def _said(case: ElementTree.Element) -> str:
    bad = [
        child
        for child in case
        if child.tag in ("failure", "error", "skipped") and child.get("type") != "pytest.xfail"
    ]
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
    assert {name: said for name, said in run.tests.items() if said != "passed"} == {}
    ran = {name.split("::")[0].rpartition(".")[2] for name in run.tests}
    assert {"test_model", "test_leaks", "test_mckey", "test_spine"} <= ran


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
