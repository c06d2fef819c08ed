"""The field's programs in a fresh Debian with rdma-lab alone, which is installed as its README says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from . import programs
from .fresh import CLONE, SECONDS, in_fresh_debian, needs_root
from .programs import PROGRAMS, Outcome, Program
from .test_programs import check

README = Path(__file__).parents[2] / "lab" / "README.md"
MPI = "/opt/mpi"
"""A virtual environment for mpi4py, apart from the lab's."""
PORTS, OUTPUT_TIMEOUT = 4, 150

pytestmark = [needs_root, pytest.mark.long, pytest.mark.timeout(SECONDS + 60)]


def script() -> str:
    """Install as the README says, remove the rest of this project, and run the programs on both fabrics."""
    install = re.search(r"## Install\n\n.*?\n\n```sh[^\n]*\n(.*?)```", README.read_text("utf-8"), re.S)
    assert install is not None
    packages = sorted({program.package for program in PROGRAMS})
    lines = [
        "export DEBIAN_FRONTEND=noninteractive",
        "apt-get update -q && apt-get install -qy --no-install-recommends python3-venv",
        install[1],
        "venv/bin/rdma-lab check --json >check.json || true",
        '$(venv/bin/python -c \'import json; print(json.load(open("check.json"))["fix"])\')',
        "venv/bin/rdma-lab check",
        f"apt-get install -qy --no-install-recommends {shlex.join(packages)}",
        f"python3 -m venv {MPI} && {MPI}/bin/pip install -q mpi4py",
        f"cp tests/lab/programs.py /opt && mv venv /opt/lab && cd / && rm -r {CLONE}",
        "if /opt/lab/bin/python -c 'import mcast' 2>/dev/null; then exit 1; fi",
    ]
    for fabric in programs.BOTH:
        names = [program.name for program in PROGRAMS if fabric in program.fabrics]
        lines.append(f"echo fabric {fabric}")
        lines.append(
            f"/opt/lab/bin/python -m rdma_lab run --ports {PORTS} --output-timeout {OUTPUT_TIMEOUT} "
            f"--fabric {fabric} -- {MPI}/bin/python /opt/programs.py {fabric} {shlex.join(names)}"
        )
    return "\n".join(lines)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Outcome]]:
    """Result of each program, by fabric and name."""
    _, *parts = re.split(r"^fabric (\w+)$", in_fresh_debian(script()), flags=re.M)
    found: dict[str, dict[str, Outcome]] = {}
    for fabric, text in zip(parts[::2], parts[1::2], strict=True):
        lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"name": ')]
        found[fabric] = {line["name"]: Outcome(**line) for line in lines}
    return found


def cases() -> list[object]:
    return [
        pytest.param(fabric, program, id=f"{fabric}-{program.identity}")
        for program in PROGRAMS
        for fabric in program.fabrics
    ]


@pytest.mark.parametrize(("fabric", "program"), cases())
def test_program_runs(outcomes: dict[str, dict[str, Outcome]], fabric: str, program: Program) -> None:
    check(program, outcomes[fabric][program.name])
