"""The conformance suite in the lab: runs there, and its report is brought back."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from mcast.cli.lab import LabError, LabMachine
from mcast.cli.terminal import Failure
from mcast.conformance.report import SuiteReport, from_json

OUTPUT_TIMEOUT = 300.0
"""Seconds without output after which the suite counts as hung. Each test that ends writes a line."""


class SuiteInLab(NamedTuple):
    """Result of a run; `card_report` is the text of the file, "" if none was asked for."""

    suite: SuiteReport
    card_report: str


def run_in_lab(
    backends: Sequence[str],
    fabric: Literal["roce", "infiniband"],
    card_report: Sequence[str] | None = None,
) -> SuiteInLab:
    """Run `mcast conformance` in a guest with that fabric. Every backend must be able to run there.

    The run's own output is written when it comes. `card_report` asks for a card report,
    with these options of the command. Raises Failure if the guest does not bring a report back.
    """
    with tempfile.TemporaryDirectory(prefix="mcast-lab-") as folder:
        shared, report, card = Path(folder), Path(folder) / "report.json", Path(folder) / "card.json"
        required = [word for name in backends for word in ("--require-backend", name)]
        command = [sys.executable, "-m", "mcast", "conformance", *required, "--report", str(report)]
        if card_report is not None:
            command += ["--card-report", str(card), *card_report]
        try:
            lab = LabMachine(fabric=fabric, share=[shared])
            result = lab.run(command, output_timeout=OUTPUT_TIMEOUT)
        except LabError as error:
            raise Failure(str(error), error.exit_code) from None
        if not report.exists() or (card_report is not None and not card.exists()):
            raise Failure(
                f"the suite ended in the lab without a report (status {result.exit_code}); see above",
                LabError.exit_code,
            )
        return SuiteInLab(
            from_json(report.read_text("utf-8")), card.read_text("utf-8") if card_report is not None else ""
        )
