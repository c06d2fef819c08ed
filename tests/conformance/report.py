"""Report of a run of the suite: from results of tests to a table of clause and provider."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from mcast.conformance.clauses import CLAUSES, DOCUMENTS
from mcast.conformance.facts import FACTS, TOPICS


class Outcome(Enum):
    """The outcome of a test, or of all tests of a clause, on a provider. Only tests can be SKIPPED."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not-applicable"
    DEVIATION = "deviation"
    SKIPPED = "skipped"


class SuiteResult(NamedTuple):
    """The result of one test on one backend (None: the test needs no backend, and counts for all)."""

    test: str
    backend: str | None
    proves: tuple[str, ...]
    outcome: Outcome
    reason: str


class Cell(NamedTuple):
    """The outcome of a clause or fact on a provider."""

    outcome: Outcome
    results: tuple[SuiteResult, ...]
    reason: str | None


class SuiteReport(NamedTuple):
    """The table: provider -> clause or fact -> cell.

    unavailable  backends that cannot run here -> the reason and the fix; they have no column
    loose        failures that belong to no clause or fact, and deviations that name no test
    hosts        provider -> Python and kernel with which it was tested; with `--lab` those of the guest
    """

    providers: Mapping[str, Mapping[str, Cell]]
    unavailable: Mapping[str, str]
    loose: tuple[SuiteResult, ...]
    hosts: Mapping[str, str]

    @property
    def results(self) -> tuple[SuiteResult, ...]:
        """Each test's result that the table was made from, once."""
        cells = (cell for column in self.providers.values() for cell in column.values())
        return tuple(dict.fromkeys([*(result for cell in cells for result in cell.results), *self.loose]))

    @property
    def passed(self) -> bool:
        """Something was tested, and nothing failed."""
        cells = [cell for column in self.providers.values() for cell in column.values()]
        return bool(cells) and not self.loose and all(cell.outcome is not Outcome.FAILED for cell in cells)


SECTIONS = tuple(
    (title, tuple(name for name in CLAUSES if CLAUSES[name].document == title)) for title in DOCUMENTS
) + tuple(
    (f"Measured: {title.lower()}", tuple(name for name in FACTS if FACTS[name].topic == title))
    for title in TOPICS
)
"""The rows of the table in order: (title, ids)."""

_WORST_FIRST = (Outcome.FAILED, Outcome.DEVIATION, Outcome.PASSED, Outcome.NOT_APPLICABLE)


def sentence_of(name: str) -> str:
    """The sentence of a clause or fact."""
    return CLAUSES[name].says if name in CLAUSES else FACTS[name].says


def this_host() -> str:
    """Python and kernel, as a report names them."""
    return f"Python {platform.python_version()}, {platform.system()} {platform.release()}"


def build_report(
    results: Sequence[SuiteResult],
    backends: Iterable[str],
    unavailable: Mapping[str, str],
    hosts: Mapping[str, str] | None = None,
) -> SuiteReport:
    """The table of these results; a clause or fact without a test is a failure. `hosts`: if not this one."""
    columns = {
        backend: {
            name: _cell(name, [r for r in results if name in r.proves and r.backend in (backend, None)])
            for name in (*CLAUSES, *FACTS)
        }
        for backend in backends
        if backend not in unavailable
    }
    loose = (r for r in results if r.outcome is Outcome.FAILED and not r.proves)
    where = {backend: this_host() for backend in columns} if hosts is None else dict(hosts)
    return SuiteReport(columns, dict(unavailable), tuple(loose), where)


def _cell(name: str, results: Sequence[SuiteResult]) -> Cell:
    if not results:
        beyond = FACTS[name].beyond if name in FACTS else ""
        return Cell(Outcome.NOT_APPLICABLE if beyond else Outcome.FAILED, (), beyond or "no test proves it")
    # A backend that can run has nothing to skip: a skip would hide a gap.
    found = {Outcome.FAILED if r.outcome is Outcome.SKIPPED else r.outcome for r in results}
    outcome = next(outcome for outcome in _WORST_FIRST if outcome in found)
    reasons = dict.fromkeys(r.reason for r in results if r.reason and r.outcome in (outcome, Outcome.SKIPPED))
    return Cell(outcome, tuple(results), "; ".join(reasons) or None)


def merge(reports: Iterable[SuiteReport]) -> SuiteReport:
    """One table from several runs on different backends."""
    parts = tuple(reports)
    results = dict.fromkeys(result for part in parts for result in part.results)
    missing = {name: reason for part in parts for name, reason in part.unavailable.items()}
    hosts = {name: host for part in parts for name, host in part.hosts.items()}
    return build_report(tuple(results), [name for part in parts for name in part.providers], missing, hosts)


def written_result(result: SuiteResult) -> list[Any]:
    """A result as a JSON list: [test, backend, ids, outcome, reason]."""
    return [result.test, result.backend, result.proves, result.outcome.value, result.reason]


def read_result(fields: Sequence[Any]) -> SuiteResult:
    """The result that `written_result` wrote."""
    test, backend, proves, outcome, reason = fields
    return SuiteResult(test, backend, tuple(proves), Outcome(outcome), reason)


def from_json(text: str) -> SuiteReport:
    """The report that `to_json` wrote."""
    read = json.loads(text)
    results = [read_result(fields) for fields in read["results"]]
    return build_report(results, read["providers"], read["unavailable"], read["hosts"])


def to_json(report: SuiteReport) -> str:
    """The table, and the results that it was made from.

    {"providers": {backend: {id: {"outcome", "tests", "reason"}}}, "unavailable": {backend: reason},
     "results": [[test, backend, ids, outcome, reason]], "hosts": {backend: Python and kernel}}
    """
    providers = {
        backend: {
            name: {
                "outcome": cell.outcome.value,
                "tests": list(dict.fromkeys(result.test for result in cell.results)),
                "reason": cell.reason,
            }
            for name, cell in column.items()
        }
        for backend, column in report.providers.items()
    }
    results = [written_result(result) for result in report.results]
    tables = {"providers": providers, "unavailable": dict(report.unavailable), "results": results}
    return json.dumps(tables | {"hosts": dict(report.hosts)}, indent=1) + "\n"


def counts(report: SuiteReport, backend: str, names: Iterable[str]) -> Counter[Outcome]:
    """Count the outcomes of these clauses or facts."""
    return Counter(report.providers[backend][name].outcome for name in names)
