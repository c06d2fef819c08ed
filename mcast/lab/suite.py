"""The conformance suite in the lab: runs there, and its report is brought back."""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from mcast.conformance.report import SuiteReport, from_json
from mcast.lab.errors import LabError
from mcast.lab.machine import LabMachine

SILENCE = 300.0
"""How many seconds without output mean that the suite hangs. Each test that ends writes a line."""


def run_in_lab(
    backends: Sequence[str],
    machine: LabMachine | None = None,
    *,
    silence: float = SILENCE,
    output: BinaryIO | None = None,
) -> SuiteReport:
    """Run `mcast conformance` in a guest. Every backend must be able to run there.

    The run's own output is written to `output` (standard output) when it comes. Raises LabError if the guest
    does not bring a report back.
    """
    with tempfile.TemporaryDirectory(prefix="mcast-lab-") as folder:
        shared, report = Path(folder), Path(folder) / "report.json"
        required = [word for name in backends for word in ("--require-backend", name)]
        command = [sys.executable, "-m", "mcast", "conformance", *required, "--report", str(report)]
        lab = replace(machine or LabMachine(), share=[shared])
        result = lab.run(command, silence=silence, stdout=output, stderr=output)
        if not report.exists():
            raise LabError(
                f"the suite ended in the lab without a report (status {result.exit_code}); see above"
            )
        return from_json(report.read_text("utf-8"))
