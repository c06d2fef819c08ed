"""The real provider on a real kernel: one guest runs the suite, the model, all that needs a device, the demo.

The guest's results are read here clause by clause, and set beside the simulator's.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from mcast.conformance.clauses import CLAUSES
from mcast.conformance.facts import FACTS
from mcast.conformance.report import Cell, Outcome, SuiteReport, build_report

from .guest_run import PORTS, PROJECT, TEST_SECONDS, TEST_SECONDS_LONG, GuestRun, failed, modules, run_tests

RXE = {f"rxe{number}" for number in range(1, PORTS + 1)}
FOLDER = "tests/rdma/in_lab"
APART = ("test_endpoint", "test_doctor")
"""Modules with a process of their own: one removes devices that were used, which librdmacm does not always
find again in that process; the other breaks the host on purpose."""
ITSELF = "tests/conformance/test_spine.py"
"""Tests of the suite itself, which no kernel can change."""
HOUR = 3600

pytestmark = pytest.mark.timeout(HOUR)  # against hangs of this process: the guest is bounded by its progress


class Found(NamedTuple):
    """The run, its table of clauses and facts, and what the main job printed."""

    run: GuestRun
    report: SuiteReport
    demo: dict[str, Any]


def _modules(long: bool) -> set[str]:
    """The modules in FOLDER; without those that only a long run has, unless it is one."""
    files = (PROJECT / FOLDER).glob("test_*.py")
    return {path.stem for path in files if long or "pytestmark = pytest.mark.long" not in path.read_text()}


def _groups(long: bool) -> list[list[str]]:
    """Tests that run in one process each."""
    together = [f"{FOLDER}/{name}.py" for name in sorted(_modules(long) - {*APART})]
    profile = "lab" if long else "lab-short"
    first = ["--hypothesis-profile", profile, "--ignore", ITSELF, "tests/conformance", "tests/model"]
    first += together
    groups = [first, *([f"{FOLDER}/{name}.py"] for name in APART)]
    return [["--long" if long else "--sample", *group] for group in groups]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config, long: bool) -> Found:
    """All of it in one guest."""
    shared = tmp_path_factory.mktemp("guest")
    words = ["demo", "--backend", "rdma", "--receivers", "3", "--size", "1M", "--json"]
    kernel, test_seconds = pytestconfig.getoption("--lab-kernel"), TEST_SECONDS_LONG if long else TEST_SECONDS
    run = run_tests(shared, _groups(long), words, kernel, test_seconds=test_seconds)
    output = shared / "job.out"
    demo = output.read_text() if output.exists() else ""
    report = build_report(run.results, ["rdma"], {})
    return Found(run, report, json.loads(demo) if demo else {})


@pytest.fixture(scope="module")
def simulated() -> SuiteReport:
    """Report of the suite on the simulated RoCE fabric."""
    from mcast.cli.conformance import run_suite

    return run_suite([], ["sim-roce"])


def test_every_test_of_the_guest_has_a_result(found: Found, long: bool) -> None:
    if found.run.gap:
        pytest.fail(found.run.gap, pytrace=False)
    suite = {
        path.stem for path in (PROJECT / "tests/conformance").glob("test_*.py") if path != PROJECT / ITSELF
    }
    assert modules(found.run.results) == {"test_model"} | suite | _modules(long)


def test_clauses_and_facts_hold_on_the_kernel(found: Found) -> None:
    """Every clause and fact holds on the real kernel."""
    cells = found.report.providers["rdma"]
    wrong = {name: cells[name].reason for name in cells if cells[name].outcome is Outcome.FAILED}
    if found.run.gap:  # told by the test above
        wrong = {name: why for name, why in wrong.items() if failed(cells[name].results)}
    assert wrong == {}


def test_whatever_proves_no_clause_passed_too(found: Found) -> None:
    assert failed(result for result in found.run.results if not result.proves) == {}


def test_the_main_job_works_on_real_devices(found: Found) -> None:
    if found.run.stopped:
        pytest.skip("the guest was stopped before")
    assert found.demo, "the demo printed nothing"
    receivers = found.demo["receivers"]
    assert len({receiver["device"] for receiver in receivers} & RXE) == 3
    assert [receiver["verified"] for receiver in receivers] == [True] * 3
    assert {receiver["blake3"] for receiver in receivers} == {found.demo["blake3"]}


def test_simulator_equals_the_kernel(found: Found, simulated: SuiteReport) -> None:
    """The simulator equals the kernel or the report says why not."""
    differing: dict[str, str] = {}
    for name in (*CLAUSES, *FACTS):
        real, sim = found.report.providers["rdma"][name], simulated.providers["sim-roce"][name]
        if sim.outcome is Outcome.FAILED:
            differing[name] = f"the simulator fails: {sim.reason}"
        elif _shown(real) != _shown(sim) and not (real.reason or sim.reason):
            differing[name] = (
                f"kernel: {real.outcome.value}, simulator: {sim.outcome.value}, without a reason"
            )
    assert differing == {}


def _shown(cell: Cell) -> bool:
    return cell.outcome is Outcome.PASSED
