"""The pytest plugin of the suite: `pytest -p mcast.conformance.plugin --backend NAME`.

options   --backend NAME          repeatable; default sim-roce and sim-ib; unavailable: skipped, with the fix
          --require-backend NAME  repeatable; implies --backend; any skip of it is a failure
          --conformance-report FILE  the outcome of each clause and fact, as JSON
          --conformance-log FILE     each result as it comes (mcast.conformance.log)
marks     clause(*ids), fact(*ids)   what the test proves (mcast.conformance.clauses, .facts)
          needs(*members)            Capability and Feature members; all must be there
fixture   bed                        a fresh `mcast.api.Testbed` for each test and backend

A test that needs what a backend lacks is deselected there and counted as not-applicable, with the missing
members' words as the reason. A test that the backend's `Testbed.deviations` names, as `function` or, for one
set of parameters, `function[parameters]`, must fail, by an assertion or an OSError. After each test the
backend is closed and must have left nothing behind.
"""

from __future__ import annotations

import platform
from collections.abc import Generator, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import mcast
from mcast.api import (
    PORT_FEATURES,
    Capability,
    Feature,
    Status,
    Testbed,
    UnknownBackend,
    backend_status,
    provider,
)
from mcast.conformance.clauses import CLAUSES
from mcast.conformance.facts import FACTS
from mcast.conformance.log import ResultLog
from mcast.conformance.report import Outcome, SuiteReport, SuiteResult, build_report, to_json

pytest_plugins: list[str] = ["mcast.conformance.helpers"]

DEFAULT_BACKENDS = ("sim-roce", "sim-ib")
_KNOWN: dict[str, Mapping[str, object]] = {"clause": CLAUSES, "fact": FACTS}


class Profile(NamedTuple):
    """Properties of a backend that the plugin needs before its tests run; read once.

    broken is why its test bed does not open although the backend is available, or "".
    """

    status: Status
    present: frozenset[Capability | Feature]
    deviations: Mapping[str, str]
    broken: str = ""


class Suite:
    """One run: the backends under test, and the results as they come."""

    def __init__(self, backends: tuple[str, ...], required: frozenset[str]) -> None:
        self.backends = backends
        self.required = required
        self.results: list[SuiteResult] = []
        self.log: ResultLog | None = None
        self.unproven_deviations: list[tuple[str, str]] = []
        """(backend, name) of the deviations that name no test collected."""
        self._profiles: dict[str, Profile] = {}

    def add(self, result: SuiteResult) -> None:
        """Keep a result, and write it to the log."""
        self.results.append(result)
        if self.log:
            self.log.result(result)

    def profile(self, backend: str) -> Profile:
        """The backend's profile; opens its test bed the first time."""
        if backend not in self._profiles:
            self._profiles[backend] = _read_profile(backend)
        return self._profiles[backend]

    def report(self) -> SuiteReport:
        """The report of a run of the whole suite; there, a deviation that names no test is a failure."""
        stale = [
            SuiteResult(
                name, backend, (), Outcome.FAILED, "a deviation is declared, but there is no such test"
            )
            for backend, name in self.unproven_deviations
        ]
        statuses = {name: backend_status(name) for name in self.backends}
        missing = {name: unavailable(status) for name, status in statuses.items() if not status.available}
        return build_report([*self.results, *stale], self.backends, missing)


_SUITE = pytest.StashKey[Suite]()
_DEVIATION = pytest.StashKey[str]()


def suite_of(config: pytest.Config) -> Suite:
    """The suite's state in this pytest run."""
    return config.stash[_SUITE]


# --- options, marks, header ------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mcast", "conformance to the contract of mcast")
    group.addoption(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        help="test this backend (repeatable; default: sim-roce and sim-ib); skipped where it cannot run",
    )
    group.addoption(
        "--require-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="test this backend; a skip of it is a failure (repeatable)",
    )
    group.addoption(
        "--conformance-report", metavar="FILE", help="write what each clause and fact came to, as JSON"
    )
    group.addoption("--conformance-log", metavar="FILE", help="append each test's result as it comes")


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "clause(*ids): the clauses of the sources that the test proves",
        "fact(*ids): the measured facts that the test shows",
        "needs(*members): the Capability and Feature members without which the test does not apply",
    ):
        config.addinivalue_line("markers", line)
    required: list[str] = config.getoption("--require-backend")
    named: list[str] = [*config.getoption("--backend"), *required]
    backends = tuple(dict.fromkeys(named or DEFAULT_BACKENDS))
    try:
        for name in backends:
            backend_status(name)
    except UnknownBackend as error:
        raise pytest.UsageError(str(error)) from None
    suite = config.stash[_SUITE] = Suite(backends, frozenset(required))
    if path := config.getoption("--conformance-log"):
        suite.log = ResultLog(Path(path))
        config.add_cleanup(suite.log.close)


def pytest_report_header(config: pytest.Config) -> list[str]:
    packages = f"mcast {mcast.__version__}, pydantic {version('pydantic')}"
    lines = [f"{packages}; {platform.system()} {platform.release()} {platform.machine()}"]
    for name in suite_of(config).backends:
        status = backend_status(name)
        lines.append(f"backend {name}: {status.detail if status.available else unavailable(status)}")
    return lines


def unavailable(status: Status) -> str:
    """Why a backend cannot run, and how to repair that, in one line."""
    reason = status.reason.value if status.reason else "unavailable"
    return f"{reason}: {status.detail}" + (f"; {status.fix}" if status.fix else "")


# --- one test for each backend ---------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # First, so that the backend's name is the first part of the test's id.
    if "bed" in metafunc.fixturenames:
        metafunc.parametrize("bed", suite_of(metafunc.config).backends, indirect=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    suite = suite_of(config)
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        _check_marks(item)
        backend = _backend(item)
        lacking = _lacking(item, suite.profile(backend)) if backend else ""
        (dropped if lacking else kept).append(item)
        if lacking:
            suite.add(_result(item, Outcome.NOT_APPLICABLE, lacking))
        elif backend and (reason := _declared(item, suite.profile(backend).deviations)):
            item.stash[_DEVIATION] = reason
    names = {name for item in items for name in _names(item)}
    for backend in dict.fromkeys(filter(None, map(_backend, items))):
        unknown = [name for name in suite.profile(backend).deviations if name not in names]
        suite.unproven_deviations += [(backend, name) for name in unknown]
    items[:] = kept
    if suite.log:
        suite.log.plan(_test_of(item) for item in kept)
    if dropped:
        config.hook.pytest_deselected(items=dropped)


@pytest.fixture
def bed(request: pytest.FixtureRequest) -> Iterator[Testbed]:
    """A fabric of its own for this test, on the backend under test; the leak check comes afterwards."""
    name: str = request.param
    profile = suite_of(request.config).profile(name)
    if not profile.status.available:
        pytest.skip(f"backend {name!r} cannot run here: {unavailable(profile.status)}")
    if profile.broken:
        pytest.fail(f"the test bed of {name!r} does not open: {profile.broken}", pytrace=False)
    with provider(name).testbed() as opened:
        yield opened
        opened.backend.close()
        left = opened.observer.leftovers()
        assert left == (), f"left behind after the backend was closed: {'; '.join(left)}"


def _read_profile(backend: str) -> Profile:
    status = backend_status(backend)
    everything = frozenset[Capability | Feature]([*Capability, *Feature])
    if not status.available:
        return Profile(status, everything, {})
    try:
        with provider(backend).testbed() as opened:
            several = PORT_FEATURES[: len(opened.ports) - 1]
            present = opened.backend.capabilities | opened.features | {*several}
            deviations = dict(opened.deviations)
            opened.backend.close()
    except Exception as error:
        return Profile(status, everything, {}, f"{type(error).__name__}: {error}")
    return Profile(status, present, deviations)


def _check_marks(item: pytest.Item) -> None:
    """Refuse a mark that would silently mean nothing."""
    for mark, known in _KNOWN.items():
        for name in _marked(item, mark):
            if name not in known:
                raise pytest.UsageError(f"{item.nodeid}: there is no {mark} {name!r}")
    for member in _marked(item, "needs"):
        if not isinstance(member, Capability | Feature):
            raise pytest.UsageError(
                f"{item.nodeid}: needs() takes Capability and Feature members, not {member!r}"
            )


def _marked(item: pytest.Item, mark: str) -> Iterable[Any]:
    return (argument for found in item.iter_markers(mark) for argument in found.args)


def _backend(item: pytest.Item) -> str | None:
    """The backend that the test runs on; None for a test of the contract alone."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("bed") if callspec else None


def _lacking(item: pytest.Item, profile: Profile) -> str:
    """Return in words what the test needs and the backend lacks; "" if nothing."""
    needed = dict.fromkeys(_marked(item, "needs"))
    lacking = "; ".join(member.value for member in needed if member not in profile.present)
    return f"not here: {lacking}" if lacking else ""


def _names(item: pytest.Item) -> tuple[str, str]:
    """The names by which a deviation may call the test: the function, and with its own parameters."""
    function = getattr(item, "originalname", item.name)
    backend = _backend(item)
    if not backend:
        return function, item.name
    return function, item.name.replace(f"[{backend}-", "[", 1).replace(f"[{backend}]", "", 1)


def _declared(item: pytest.Item, deviations: Mapping[str, str]) -> str:
    """Why the test must fail on its backend, "" if it must pass."""
    return next((deviations[name] for name in reversed(_names(item)) if name in deviations), "")


# --- outcomes --------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    suite = suite_of(item.config)
    deviation = item.stash.get(_DEVIATION, "")
    if deviation and report.when == "call":
        _expect_failure(report, call, deviation)
    if report.skipped and not hasattr(report, "wasxfail") and _backend(item) in suite.required:
        report.outcome, report.longrepr = "failed", f"required, but {_reason(report)}"
    if report.when == "call" or not report.passed:
        suite.add(_result(item, _outcome(report), _reason(report)))
    return report


def _expect_failure(report: pytest.TestReport, call: pytest.CallInfo[None], reason: str) -> None:
    """A declared deviation: the test must fail. Failures of set-up and teardown are not excused."""
    if call.excinfo is None:
        report.outcome = "failed"
        report.longrepr = f"the documented deviation did not occur: {reason}"
    elif call.excinfo.errisinstance((AssertionError, OSError, pytest.fail.Exception)):
        report.outcome = "skipped"
        report.wasxfail = reason


def _outcome(report: pytest.TestReport) -> Outcome:
    if report.skipped:
        return Outcome.DEVIATION if hasattr(report, "wasxfail") else Outcome.SKIPPED
    return Outcome.PASSED if report.passed else Outcome.FAILED


def _reason(report: pytest.TestReport) -> str:
    """Why the outcome is as it is, in a line; "" for a pass."""
    if hasattr(report, "wasxfail"):
        return report.wasxfail
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else report.longreprtext
    where = "" if report.when == "call" else f"{report.when}: "
    return where + text.strip().partition("\n")[0]


def _result(item: pytest.Item, outcome: Outcome, reason: str) -> SuiteResult:
    proves = tuple(str(name) for mark in _KNOWN for name in dict.fromkeys(_marked(item, mark)))
    return SuiteResult(_test_of(item), _backend(item), proves, outcome, reason)


def _test_of(item: pytest.Item) -> str:
    """The name of the test without folders and backend: `test_join.py::test_of_a_join[full]`."""
    module = item.nodeid.rpartition("/")[2].partition("::")[0]
    return f"{module}::{_names(item)[1]}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    if path := session.config.getoption("--conformance-report"):
        Path(path).write_text(to_json(suite_of(session.config).report()), "utf-8")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts: dict[tuple[str, str], int] = {}
    for result in suite_of(config).results:
        if result.outcome is Outcome.NOT_APPLICABLE:
            key = (str(result.backend), result.reason)
            counts[key] = counts.get(key, 0) + 1
    if counts:
        terminalreporter.section("not applicable")
        for (backend, reason), count in sorted(counts.items()):
            terminalreporter.line(f"{backend}: {count} test{'s' * (count != 1)}, {reason}")
