"""Reading the log of a guest that did not finish."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mcast.conformance.log import ResultLog, read_log
from mcast.conformance.report import Outcome, SuiteResult

from .guest_run import FORKING, GuestRun

ONE = SuiteResult("test_join.py::test_one", "rdma", ("JEX-1",), Outcome.PASSED, "")
TWO = SuiteResult("test_leave.py::test_two[full]", "rdma", (), Outcome.FAILED, "assert 1 == 2")


def written(path: Path, *results: SuiteResult) -> str:
    log = ResultLog(path)
    log.plan(["test_join.py::test_one", "test_leave.py::test_two[full]", "test_leave.py::test_three"])
    for result in results:
        log.result(result)
    log.close()
    return path.read_text("utf-8")


def test_unreported_tests_are_missing(tmp_path: Path) -> None:
    """Reported tests count, and others are missing."""
    text = written(tmp_path / "log", ONE, TWO)
    assert read_log(text) == ((ONE, TWO), ("test_leave.py::test_three",))
    assert read_log(text[:-5]) == ((ONE,), ("test_leave.py::test_two[full]", "test_leave.py::test_three"))


def test_a_later_run_goes_on_with_the_log(tmp_path: Path) -> None:
    written(tmp_path / "log", ONE)
    assert read_log(written(tmp_path / "log", TWO)) == ((ONE, TWO), ("test_leave.py::test_three",))


def test_one_sentence_tells_of_the_gap() -> None:
    whole = GuestRun((ONE, TWO), (), "")
    assert whole.gap == ""
    stopped = whole._replace(missing=tuple(f"test_x.py::test_{n}" for n in range(200)), stopped="it hangs")
    assert stopped.gap == (
        "it hangs; 200 tests have no result: test_x.py::test_0, test_x.py::test_1, test_x.py::test_2, ...; "
        "the last test with a result: test_leave.py::test_two[full]"
    )
    assert "the guest ended early; 1 tests" in whole._replace(missing=("test_x.py::test_0",)).gap


def test_failed_step_does_not_stop_the_next(tmp_path: Path) -> None:
    """A step that fails is told and the next one runs."""
    shown = tmp_path / "shown"
    steps = [
        ["mcast", str(tmp_path / "refused"), "no-such-command"],
        ["mcast"],
        ["mcast", str(shown), "--version"],
    ]
    command = [sys.executable, str(FORKING), json.dumps([*steps, ["pytest", "--version"]])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2  # of the first that failed: a wrong command line
    assert "TypeError: run_mcast() missing 1 required positional argument" in done.stderr
    assert shown.read_text().startswith("mcast ")
    assert done.stdout.endswith(f"step: pytest --version\npytest {pytest.__version__}\n")
