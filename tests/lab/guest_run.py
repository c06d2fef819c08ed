"""Runs tests in a guest, bounded by their progress. What was reported counts; what is missing is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mcast
from mcast.conformance.log import read_log
from mcast.conformance.report import Outcome, SuiteResult
from rdma_lab import LabError, LabMachine
from rdma_lab.machine import FabricKind

PROJECT = Path(mcast.__file__).parents[1]
PORTS = 4
OUTPUT_TIMEOUT = 150.0
"""Seconds without a word after which a guest is taken to hang. Its slowest test needs a tenth of that."""
TEST_SECONDS, TEST_SECONDS_LONG = 120, 1200
"""Seconds of one test that are a hang. Those of a long run start processes; the others end within 12 s."""
FORKING = Path(__file__).with_name("forking.py")
PYTEST = (
    *("-q", "--tb=short", "--require-backend", "rdma"),
    *("-o", "faulthandler_timeout=100"),  # where each thread is, whatever it hangs in
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # of what forking.py has imported
    *("-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "no:anyio"),
    *("-p", "no:xdist", "-p", "no:xdist.looponfail"),
)
"""Without plugins that are of no use there and slow to load."""


class GuestRun(NamedTuple):
    """Results of a guest.

    `stopped` is why it was stopped before its end, or ""; `missing` names the tests without a result.
    """

    results: tuple[SuiteResult, ...]
    missing: tuple[str, ...]
    stopped: str

    @property
    def gap(self) -> str:
        """Reason why this run is not complete, in one sentence; "" if it is."""
        if not self.missing and not self.stopped:
            return ""
        names = ", ".join(self.missing[:3]) + (", ..." if len(self.missing) > 3 else "")
        lacking = f"{len(self.missing)} tests have no result" + (f": {names}" if names else "")
        last = self.results[-1].test if self.results else "none"
        return f"{self.stopped or 'the guest ended early'}; {lacking}; the last test with a result: {last}"


def run_tests(
    shared: Path,
    groups: Sequence[Sequence[str]],
    job: Sequence[str] = (),
    kernel: str | None = None,
    fabric: FabricKind = "roce",
    ports: int = PORTS,
    switches: int = 1,
    test_seconds: int = TEST_SECONDS,
) -> GuestRun:
    """Run each group, a list of pytest's arguments, in a process of its own; then `mcast` with `job`.

    The guest writes only in `shared`; what the job prints is there as `job.out`.
    """
    options = (*PYTEST, "--timeout", str(test_seconds))
    log = shared / "log.jsonl"
    log.touch()
    steps: list[Any] = [["pytest", *options, "--conformance-log", str(log), *group] for group in groups]
    steps += [["mcast", str(shared / "job.out"), *job]] if job else []
    _compile({word for group in groups for word in group if word.startswith("tests/")})
    command = [sys.executable, str(FORKING), json.dumps(steps)]
    stopped = ""
    try:
        lab = LabMachine(ports, kernel, share=[shared], fabric=fabric, switches=switches)
        lab.run(command, cwd=PROJECT, output_timeout=OUTPUT_TIMEOUT - TEST_SECONDS + test_seconds)
    except LabError as error:
        print(error)  # with what the guest's console said, for the report of the test that fails
        stopped = error.message
    logged = read_log(log.read_text("utf-8"))
    return GuestRun(logged.results, logged.missing, stopped)


def _compile(paths: Iterable[str]) -> None:
    """Have pytest write the bytecode of these tests: what a guest compiles takes long and is lost."""
    command = [sys.executable, "-m", "pytest", *PYTEST, "--collect-only", "-qq", *sorted(paths)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, cwd=PROJECT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def failed(results: Iterable[SuiteResult]) -> dict[str, str]:
    """The tests that failed, or did not run, each with what it said."""
    wrong = (Outcome.FAILED, Outcome.SKIPPED)
    return {result.test: result.reason for result in results if result.outcome in wrong}


def modules(results: Iterable[SuiteResult]) -> set[str]:
    """The modules that have run."""
    return {result.test.partition(".py::")[0] for result in results}
