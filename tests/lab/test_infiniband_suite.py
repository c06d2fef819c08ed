"""The conformance suite and the model on InfiniBand: the real librdmacm, kernel and OpenSM, on softib.

The suite's column is set beside the simulator's. Besides: the commands, the demo; and the suite's test beds
where a host has few ports.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mcast.conformance.clauses import CLAUSES
from mcast.conformance.facts import FACTS
from mcast.conformance.report import Cell, Outcome, SuiteReport, build_report
from rdma_lab.machine import FabricKind

from .guest_run import PORTS, TEST_SECONDS_LONG, GuestRun, failed, run_tests

ITSELF = "tests/conformance/test_spine.py"
"""Tests of the suite itself, which no kernel can change."""
SUITE = ("--ignore", ITSELF, "tests/conformance", "tests/model")
COMMANDS = (
    *("--long", "-k", "not dumpcap"),  # which captures from an Ethernet interface
    *(f"tests/rdma/in_lab/test_{name}.py" for name in ("card_report", "commands", "ping", "send_recv")),
)
SAMPLE = [
    f"tests/conformance/{name}.py" for name in ("test_attach", "test_detach", "test_join", "test_leave")
]

pytestmark = pytest.mark.timeout(7200)  # against hangs of this process: the guest is bounded by its progress


class Found(NamedTuple):
    run: GuestRun
    report: SuiteReport
    demo: dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config, long: bool) -> Found:
    """All of it in one guest; of a short run the suite and the model alone."""
    shared = tmp_path_factory.mktemp("infiniband_suite")
    kernel = pytestconfig.getoption("--lab-kernel")
    if long:
        groups = [("--hypothesis-profile", "lab", *SUITE), COMMANDS]
        words = ["demo", "--backend", "rdma", "--receivers", "3", "--size", "1M", "--json"]
        run = run_tests(shared, groups, words, kernel, fabric="infiniband", test_seconds=TEST_SECONDS_LONG)
    else:
        groups = [("--sample", "--hypothesis-profile", "lab-short", *SUITE)]
        run = run_tests(shared, groups, kernel=kernel, fabric="infiniband")
    output = shared / "job.out"
    demo = output.read_text() if output.exists() else ""
    return Found(run, build_report(run.results, ["rdma"], {}), json.loads(demo) if demo else {})


def test_every_test_has_a_result_and_passes(found: Found) -> None:
    if found.run.gap:
        pytest.fail(found.run.gap, pytrace=False)
    assert failed(found.run.results) == {}


@pytest.mark.long
def test_a_file_is_sent_to_receivers_on_every_port(found: Found) -> None:
    receivers = found.demo["receivers"]
    assert len({one["device"] for one in receivers} & {f"softib{n}" for n in range(1, PORTS + 1)}) == 3
    assert [one["verified"] for one in receivers] == [True] * 3


def test_simulator_equals_infiniband(found: Found) -> None:
    """The simulator equals it or the report says why not."""
    from mcast.cli.conformance import run_suite

    simulated = run_suite([], ["sim-ib"])

    def shown(cell: Cell) -> bool:
        return cell.outcome is Outcome.PASSED

    differing: dict[str, str] = {}
    for name in (*CLAUSES, *FACTS):
        real, sim = found.report.providers["rdma"][name], simulated.providers["sim-ib"][name]
        if shown(real) != shown(sim) and not (real.reason or sim.reason):
            differing[name] = f"OpenSM and kernel: {real.outcome.value}, simulator: {sim.outcome.value}"
    assert differing == {}


@pytest.mark.long
@pytest.mark.parametrize(
    ("fabric", "ports"), [("infiniband", 1), ("roce", 1), ("roce", 2)], ids=lambda value: str(value)
)
def test_a_host_with_few_ports_runs_what_they_can_show(
    tmp_path: Path, pytestconfig: pytest.Config, fabric: FabricKind, ports: int
) -> None:
    """On Soft-RoCE the bridge's tables are not looked at then: it could be anybody's switch."""
    kernel = pytestconfig.getoption("--lab-kernel")
    run = run_tests(tmp_path, [SAMPLE], kernel=kernel, fabric=fabric, ports=ports)
    if run.gap:
        pytest.fail(run.gap, pytrace=False)
    assert failed(run.results) == {}
    assert sum(one.outcome is Outcome.PASSED for one in run.results) > 30
    reasons = {one.reason for one in run.results if one.outcome is Outcome.NOT_APPLICABLE}
    assert ("not here: there is a second port" in reasons) == (ports == 1)
    assert "not here: there is a third port" in reasons
