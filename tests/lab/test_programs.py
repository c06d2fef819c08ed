"""The field's own programs in the lab: verbs, rdma_cm, perftest, UCX, libfabric, Open MPI, infiniband-diags.

One guest for each fabric runs them all. Each is held to verbs, and the counters of the ports show that it
used them.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from rdma_lab import LabMachine
from rdma_lab.machine import FabricKind

from . import programs
from .guest_run import OUTPUT_TIMEOUT, PORTS
from .programs import BOTH, INFINIBAND, PROGRAMS, ROCE, Outcome, Program

pytestmark = pytest.mark.timeout(3600)  # against hangs of this process: the guest is bounded by its progress


def cases(fabric: FabricKind) -> list[object]:
    """The programs for that fabric; those that are not of the core are left to long runs."""
    return [
        pytest.param(program, id=program.identity, marks=() if fabric in program.core else pytest.mark.long)
        for program in PROGRAMS
        if fabric in program.fabrics
    ]


def ran(fabric: FabricKind, folder: Path, kernel: str | None, long: bool) -> dict[str, Outcome]:
    """Results of all programs, in one guest."""
    wanted = [one for one in PROGRAMS if fabric in one.fabrics]
    names = [one.name for one in wanted if long or fabric in one.core]
    output = io.BytesIO()
    lab = LabMachine(PORTS, kernel, share=[folder], fabric=fabric)
    command = [sys.executable, programs.__file__, fabric, *names]
    result = lab.run(command, output_timeout=OUTPUT_TIMEOUT, stdout=output)
    assert result.exit_code == 0
    outcomes = [Outcome(**json.loads(line)) for line in output.getvalue().splitlines()]
    for one in sorted(outcomes, key=lambda one: -one.seconds):
        print(f"{one.seconds:6.1f} s  {one.name}")
    return {one.name: one for one in outcomes}


@pytest.fixture(scope="module")
def on_roce(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config, long: bool
) -> dict[str, Outcome]:
    return ran("roce", tmp_path_factory.mktemp("roce"), pytestconfig.getoption("--lab-kernel"), long)


@pytest.fixture(scope="module")
def on_infiniband(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config, long: bool
) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("infiniband")
    return ran("infiniband", folder, pytestconfig.getoption("--lab-kernel"), long)


def check(program: Program, outcome: Outcome) -> None:
    """It succeeded, and its packets went by the ports of the fabric."""
    said = f"{program.client}\n{outcome.client_says}\n{program.server}\n{outcome.server_says}"
    assert outcome.client == 0, said
    if program.server and not program.stays:
        assert outcome.server == 0, said
    assert re.search(program.shows, outcome.client_says), said
    assert min(outcome.sent, outcome.received) >= program.packets, said


@pytest.mark.parametrize("program", cases("roce"))
def test_runs_on_roce(on_roce: dict[str, Outcome], program: Program) -> None:
    check(program, on_roce[program.name])


@pytest.mark.parametrize("program", cases("infiniband"))
def test_runs_on_infiniband(on_infiniband: dict[str, Outcome], program: Program) -> None:
    check(program, on_infiniband[program.name])


def test_two_ends_need_evidence() -> None:
    """A row with a server says how to know that it waits, and how many packets the ports carry."""
    for program in PROGRAMS:
        assert bool(program.server) == bool(program.ready)
        assert not program.server or program.packets > 0
        assert {*program.core} <= {*program.fabrics} <= {*BOTH}


def test_make_test_has_programs_of_each_fabric() -> None:
    for fabric in (*ROCE, *INFINIBAND):
        assert len([one for one in PROGRAMS if fabric in one.core]) >= 4


def test_packages_are_installed_by_make() -> None:
    """Each program's package is in packages.txt, and the program is here."""
    listed = (Path(__file__).parents[2] / "packages.txt").read_text().split("\n")
    installed = {line.split()[1] for line in listed if line.startswith("test ")}
    assert {program.package for program in PROGRAMS} <= installed
    for program in PROGRAMS:
        words = (word for word in program.command("roce") if "=" not in word and word != "env")
        assert shutil.which(next(words), path="/usr/bin:/usr/sbin:/bin:/sbin")
