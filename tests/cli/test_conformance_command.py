"""`mcast conformance`: the report's forms, its status, and that anybody's provider can be put to it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import mcast.conformance
from mcast.api import override_provider
from mcast.backends.sim import ROCE
from mcast.bench import card_measure
from mcast.bench.card_report import CardReport
from mcast.cli import conformance
from mcast.conformance.clauses import CLAUSES
from mcast.conformance.facts import FACTS
from mcast.conformance.report import (
    Outcome,
    SuiteReport,
    SuiteResult,
    build_report,
    from_json,
    merge,
    to_json,
)

from ..commands import Run

Install = Callable[..., dict[str, str]]


def test_a_third_party_runs_the_suite_by_one_command(
    mcast: Run, third_party: Install, tmp_path: Path
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "conftest.py").write_text("raise RuntimeError('not mine')\n")
    env = third_party() | {"PYTEST_ADDOPTS": "-k nothing", "PYTEST_PLUGINS": "no_such_plugin"}
    before = set(tmp_path.iterdir())
    done = mcast(
        "conformance", "--require-backend", "acme", "--report", "r.json", "--html", "r.html", env=env
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "conformance: acme conforms"
    assert {path.name for path in set(tmp_path.iterdir()) - before} == {"r.json", "r.html"}

    report = json.loads((tmp_path / "r.json").read_text())
    assert list(report["providers"]) == ["acme"]
    column = report["providers"]["acme"]
    assert set(column) == {*CLAUSES, *FACTS}
    assert {cell["outcome"] for cell in column.values()} == {"passed", "not-applicable"}
    for name, cell in column.items():
        assert set(cell) == {"outcome", "tests", "reason"}
        assert bool(cell["reason"]) == (cell["outcome"] == "not-applicable"), name
        assert cell["tests"] or name in FACTS
    assert "acme" not in " ".join(column["JEX-1"]["tests"])

    page = (tmp_path / "r.html").read_text()
    assert page.count("<details ") == len(CLAUSES) + len(FACTS)
    assert "a provider of somebody else" in page
    for outside in ("http://", "https://", "src=", "<link"):
        assert outside not in page


def test_leaks_and_deviations_are_reported(
    here: Run, third_party: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leak a deviation and a stale deviation are told.

    By a part of the suite.
    """
    (suite,) = mcast.conformance.__path__
    part = tmp_path / "part"
    part.mkdir()
    shutil.copy(f"{suite}/test_leave.py", part)
    monkeypatch.setattr(mcast.conformance, "__path__", [str(part)])
    env = third_party(deviations={"test_no_such_test": "it was renamed"}, leak="QP 7")
    done = here("conformance", "--backend", "acme", env=env)
    assert done.returncode == 1
    assert "left behind after the backend was closed: QP 7" in done.stdout
    assert "test_no_such_test: a deviation is declared, but there is no such test" in done.stdout
    assert "Traceback" not in done.stderr


def test_unavailable_backend_does_not_conform(mcast: Run, here: Run, third_party: Install) -> None:
    """A backend that cannot run is not called conforming."""
    source = (
        "from mcast.api import Status, UnavailableReason\nfrom mcast.backends.sim import ROCE\n"
        "status = Status(False, 'the card is gone', UnavailableReason.NO_DEVICE, 'put it back')\n"
        "PROVIDER = ROCE._replace(status=lambda: status)\n"
    )
    env = third_party(source=source)
    done = mcast("conformance", "--backend", "acme", "--report", "r.json", env=env)
    assert done.returncode == 1
    assert "acme not tested: no device: the card is gone; put it back" in done.stdout
    assert done.stdout.splitlines()[-1] == "conformance: nothing was tested"
    done = here("conformance", "--require-backend", "acme", "--report", "r2.json", env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "mcast: acme is required and cannot run here: the card is gone; put it back\n"


def test_without_pytest_there_is_one_sentence(run: Run) -> None:
    hide = "import sys; sys.modules['pytest'] = None; from mcast.cli import main; main()"
    done = run(sys.executable, "-c", hide, "conformance")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "mcast: the suite needs pytest: pip install 'rdma-mcast[conformance]'\n"


# --- the table -------------------------------------------------------------


def proof(
    outcome: Outcome, reason: str = "", backend: str | None = "one", test: str = "t.py::t"
) -> SuiteResult:
    return SuiteResult(test, backend, ("JEX-1",), outcome, reason)


P, F, N, D, S = Outcome.PASSED, Outcome.FAILED, Outcome.NOT_APPLICABLE, Outcome.DEVIATION, Outcome.SKIPPED


@pytest.mark.parametrize(
    ("results", "outcome", "reason"),
    [
        ([], F, "no test proves it"),
        ([proof(P)], P, None),
        ([proof(P), proof(N, "no SA")], P, None),
        ([proof(N, "no SA"), proof(N, "no SA")], N, "no SA"),
        ([proof(P), proof(D, "as measured"), proof(N, "no SA")], D, "as measured"),
        ([proof(P), proof(F, "1 != 2"), proof(D, "as measured")], F, "1 != 2"),
        ([proof(P), proof(S, "no time")], F, "no time"),
        ([proof(P, backend=None)], P, None),
        ([proof(P, backend="another")], F, "no test proves it"),
    ],
)
def test_a_cell_says_the_worst_of_its_tests(
    results: list[SuiteResult], outcome: Outcome, reason: str | None
) -> None:
    cell = build_report(results, ["one"], {}).providers["one"]["JEX-1"]
    assert (cell.outcome, cell.reason) == (outcome, reason)


def test_a_failure_outside_the_clauses_is_no_pass() -> None:
    everything = (*CLAUSES, *FACTS)
    good = SuiteResult("t.py::all", "one", everything, P, "")
    assert build_report([good], ["one"], {}).passed
    assert not build_report([good, SuiteResult("t.py::other", None, (), F, "1 != 2")], ["one"], {}).passed


def test_json_is_as_promised() -> None:
    report = json.loads(to_json(build_report([proof(P), proof(P)], ["one", "two"], {"two": "no device"})))
    assert report["providers"]["one"]["JEX-1"] == {"outcome": "passed", "tests": ["t.py::t"], "reason": None}
    assert "two" not in report["providers"]
    assert report["unavailable"] == {"two": "no device"}


def test_a_report_survives_json_and_merging() -> None:
    one = build_report([proof(P), SuiteResult("t.py::loose", None, (), F, "1 != 2")], ["one"], {})
    two = build_report(
        [proof(D, "as measured", backend="two")],
        ["two", "three"],
        {"three": "no device"},
        {"two": "Linux 6.12"},
    )
    assert from_json(to_json(one)) == one
    both = merge([one, from_json(to_json(two))])
    assert (both.providers["one"], both.providers["two"]) == (one.providers["one"], two.providers["two"])
    assert (both.unavailable, both.loose) == (two.unavailable, one.loose)
    assert both.hosts == {**one.hosts, "two": "Linux 6.12"}


def test_a_fabric_is_the_lab_s(mcast: Run) -> None:
    done = mcast("conformance", "--fabric", "infiniband")
    assert done.returncode == 2
    assert "--fabric chooses the fabric of the lab: add --lab" in done.stderr


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> SuiteReport:
    """A run of the suite that is over at once, and short measurements."""
    result = SuiteResult("t.py::all", "sim-roce", (*CLAUSES, *FACTS), P, "")
    made = build_report([result], ["sim-roce"], {})
    monkeypatch.setattr(conformance, "run_suite", lambda backends, required: made)
    for name, value in {"RUNS": 2, "RUN_SECONDS": 0.01, "JOINS": 5}.items():
        monkeypatch.setattr(card_measure, name, value)
    return made


def test_a_card_report_is_written(here: Run, short: SuiteReport, tmp_path: Path) -> None:
    """To a file, and to stdout, where nothing else is then."""
    path = tmp_path / "card.json"
    done = here("conformance", "--backend", "sim-roce", "--card-report", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    said = "card report: pass, written to"
    assert done.stdout.splitlines()[-1] == f"{said} {path}, without names or addresses of this host"
    report = CardReport.model_validate_json(path.read_text())
    assert (report.provider, report.verdict, report.host) == ("sim-roce", "pass", None)

    done = here("conformance", "--backend", "sim-roce", "--card-report", "-", "--with-names")
    report = CardReport.model_validate_json(done.stdout)
    assert report.host is not None
    assert done.stderr.splitlines()[-1] == f"{said[:-2]}to stdout, with names and addresses"


def test_what_was_not_measured_is_said(
    here: Run, short: SuiteReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(bed: object) -> None:
        raise TimeoutError("no message arrives")

    monkeypatch.setattr(card_measure, "_rate", fail)
    done = here("conformance", "--backend", "sim-roce", "--card-report", str(tmp_path / "c.json"))
    assert done.returncode == 0
    assert done.stdout.splitlines()[-2] == "rate failed: TimeoutError: no message arrives"


def test_a_test_bed_that_fails_is_one_sentence(
    here: Run, short: SuiteReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The findings of the suite are written all the same."""

    def fail() -> None:
        raise RuntimeError("no port is left")

    with override_provider("sim-roce", ROCE._replace(testbed=fail)):  # type: ignore[arg-type]
        done = here("conformance", "--backend", "sim-roce", "--card-report", "c.json", "--report", "r.json")
    assert done.returncode == 1
    assert done.stderr == "mcast: no card report: the test bed of sim-roce fails: no port is left\n"
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("--card-report", "x.json", "--backend", "sim-roce", "--require-backend", "sim-ib"),
            "give one --backend, not sim-roce, sim-ib",
        ),
        (("--with-names",), "--with-names is for the card report: add --card-report FILE"),
        (("--backend", "sim-roce", "--card-report", "-", "--json"), "only one output can go to stdout"),
        (("--backend", "sim-roce", "--card-report", "/no/such/folder/x"), "cannot write /no/such/folder/x"),
    ],
)
def test_a_card_report_that_cannot_be(
    here: Run, tmp_path: Path, words: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = here("conformance", *words)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("given", "tested"), [(None, ["rdma"]), ("sim-ib", ["sim-ib"])])
def test_lab_runs_rdma_by_default(
    given: str | None, tested: list[str], here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host needs no device: the lab has them."""
    asked: list[list[str]] = []

    def run(backends: list[str], *_: object) -> SuiteReport:
        asked.append(backends)
        return build_report([], [], {})

    monkeypatch.setattr(conformance, "_run_with_lab", run)
    if given:
        monkeypatch.setenv("MCAST_BACKEND", given)
    here("conformance", "--lab")
    assert asked == [tested]
