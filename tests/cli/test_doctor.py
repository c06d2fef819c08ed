"""`mcast doctor`: what it prints and answers, on any machine; what it finds is proven in tests/rdma."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from mcast.errors.cause import Cause
from mcast.errors.rows import ROWS

from ..commands import Run

PROVIDER = """
from mcast.api import Finding, Level
from mcast.backends.sim import ROCE

FINDINGS = {findings}
PROVIDER = ROCE._replace(name="acme", checks=lambda listen: tuple(FINDINGS))
"""
OK = "Finding('cable', '', Level.OK, 'plugged in')"
WARNING = "Finding('cable', 'acme0/1', Level.WARNING, 'it is long', 'buy a shorter one')"
PROBLEM = "Finding('cable', 'acme1/1', Level.PROBLEM, 'it is cut', 'mend it')"
SAYS = {
    OK: ("ok", "cable", "plugged in"),
    WARNING: ("warning", "acme0/1", "it is long", "buy a shorter one"),
    PROBLEM: ("problem", "acme1/1", "it is cut", "mend it"),
}


@pytest.mark.parametrize(
    ("findings", "status", "summary"),
    [
        ([OK], 0, "no problems, no warnings, 1 check"),
        ([OK, WARNING], 0, "no problems, 1 warning, 2 checks"),
        ([PROBLEM, WARNING, PROBLEM], 1, "2 problems, 1 warning, 3 checks"),
    ],
)
def test_status_and_last_line_count_problems(
    here: Run,
    third_party: Callable[..., dict[str, str]],
    findings: list[str],
    status: int,
    summary: str,
) -> None:
    """The status and the last line count what is wrong."""
    env = third_party(source=PROVIDER.format(findings=f"[{', '.join(findings)}]"))
    done = here("doctor", "--backend", "acme", env=env)
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout.splitlines()[-1] == summary
    for finding in findings:
        assert all(word in done.stdout for word in SAYS[finding])


def test_json_has_every_finding(here: Run, third_party: Callable[..., dict[str, str]]) -> None:
    env = third_party(source=PROVIDER.format(findings=f"[{OK}, {PROBLEM}]"))
    done = here("doctor", "--backend", "acme", "--json", env=env)
    found = json.loads(done.stdout)
    assert (done.returncode, found["problems"], found["warnings"]) == (1, 1, 0)
    assert found["providers"]["acme"][1] == {
        "check": "cable",
        "subject": "acme1/1",
        "level": "problem",
        "seen": "it is cut",
        "fix": "mend it",
    }


def test_provider_without_checks_is_asked_for_status(here: Run) -> None:
    """A provider without checks is asked whether it runs."""
    done = here("doctor", "--backend", "sim-ib", "--backend", "sim", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert list(found["providers"]) == ["sim-ib", "sim"]
    assert {one["level"] for findings in found["providers"].values() for one in findings} == {"ok"}


def test_a_broken_provider_is_a_problem_with_its_fix(
    here: Run, third_party: Callable[..., dict[str, str]]
) -> None:
    env = third_party(source="raise RuntimeError('out of order')")
    done = here("doctor", "--json", env=env)
    (finding,) = json.loads(done.stdout)["providers"]["acme"]
    assert done.returncode == 1
    assert (finding["level"], finding["seen"]) == ("problem", "RuntimeError: out of order")
    assert "mcast.backends" in finding["fix"]


def everything(mcast: Run, **env: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    done = mcast("doctor", "--json", env=env)
    answer: dict[str, Any] = json.loads(done.stdout)
    return done, answer


def test_every_machine_gets_a_sensible_answer(mcast: Run) -> None:
    done, found = everything(mcast)
    assert done.stderr == ""
    assert done.returncode == (1 if found["problems"] else 0)
    assert set(found["providers"]) >= {"sim", "sim-ib", "rdma"}
    assert "sim-roce" not in found["providers"]  # which is sim by its full name
    for findings in found["providers"].values():
        for one in findings:
            assert one["seen"]
            assert bool(one["fix"]) == (one["level"] != "ok")


def test_missing_libraries_are_the_only_finding(mcast: Run) -> None:
    """Without its libraries the real provider says so and no more."""
    _, found = everything(mcast, MCAST_LIBRDMACM="/nowhere.so")
    wrong = [one for one in found["providers"]["rdma"] if one["level"] != "ok"]
    assert [one["check"] for one in wrong] == ["libraries"]
    assert wrong[0]["fix"]


def test_the_output_fits_80_columns_and_has_no_escapes(here: Run) -> None:
    done = here("doctor")
    assert "\x1b" not in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if " fix  " not in line)


def test_an_unknown_backend_is_one_sentence(here: Run) -> None:
    done = here("doctor", "--backend", "nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "'nope' is not a backend: choose one of sim" in done.stderr


def test_a_fix_is_in_one_line_to_paste(here: Run, third_party: Callable[..., dict[str, str]]) -> None:
    env = third_party(source="raise RuntimeError('out of order')")
    done = here("doctor", "--backend", "acme", env=env | {"COLUMNS": "60"})
    (finding,) = json.loads(here("doctor", "--backend", "acme", "--json", env=env).stdout)["providers"][
        "acme"
    ]
    assert f"fix  {finding['fix']}\n" in done.stdout
    assert len(finding["fix"]) > 60
    assert f"fix        {finding['fix']}\n" in here("info", env=env | {"COLUMNS": "60"}).stdout


@pytest.mark.parametrize(
    "words",
    [
        "EADDRNOTAVAIL --json",
        "eaddrnotavail --json",
        "99 --json",
        "-99 --json",
        "--json -99",
        "--json -- -99",
    ],
)
def test_an_errno_is_explained_by_the_table_of_causes(here: Run, words: str) -> None:
    done = here("doctor", *words.split())
    reported = json.loads(done.stdout)["causes"]
    expected = {row.cause for row in ROWS if row.errno == 99}
    assert {Cause(one["why"], one["check"], one["next_step"]) for one in reported} == expected
    assert {one["errno"] for one in reported} == {"EADDRNOTAVAIL"}
    assert [one["phase"] for one in reported] == [
        "bind",
        "resolve",
        "join",
        "join",
        "leave",
        "leave",
        "event",
    ]


def test_status_is_explained_by_its_rows(here: Run) -> None:
    """A status is explained by the rows that go with it alone."""
    (reported,) = json.loads(here("doctor", "NO_RESOURCES", "--json").stdout)["causes"]
    assert reported["why"] == "the SA refused: no MLID is left for another group"


def test_explanation_fits_the_terminal(here: Run) -> None:
    """An explanation fits the terminal and leaves nothing out."""
    done = here("doctor", "EINVAL")
    text = " ".join(done.stdout.split())
    for row in ROWS:
        if row.errno == 22:
            assert row.cause.why in text
            assert row.cause.next_step in text
            assert row.cause.check in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if not line.startswith("  check"))


def test_explanation_on_a_narrow_terminal(here: Run) -> None:
    """An explanation is given however narrow the terminal is."""
    done = here("doctor", "EADDRNOTAVAIL", env={"COLUMNS": "5"})
    assert (done.returncode, done.stderr) == (0, "")
    assert all(row.cause.check in done.stdout for row in ROWS if row.errno == 99)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["EWHAT"], "nothing is known of 'EWHAT'"),
        ([""], "nothing is known of ''"),
        (["EINVAL", "--backend", "sim"], "without checking this host"),
    ],
)
def test_what_cannot_be_explained_is_refused(here: Run, words: list[str], sentence: str) -> None:
    done = here("doctor", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
