"""A run's results in a file, each written when it comes, so that the results of a run that is stopped count.

Each line is a JSON value: first {"plan": [test, ...]}, the tests that are going to run; then [test, backend,
ids, outcome, reason] for each result (mcast.conformance.report). A file may have several runs in order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from mcast.conformance.report import SuiteResult, read_result, written_result


class ResultLog:
    """Appends to a log. Each line has reached the file system when the call that wrote it returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def plan(self, tests: Iterable[str]) -> None:
        self._write({"plan": [*tests]})

    def result(self, result: SuiteResult) -> None:
        self._write(written_result(result))

    def close(self) -> None:
        self._file.close()

    def _write(self, value: Any) -> None:
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


class Logged(NamedTuple):
    """The contents of a log: the results, and the planned tests without a result."""

    results: tuple[SuiteResult, ...]
    missing: tuple[str, ...]


def read_log(text: str) -> Logged:
    """The results of all runs of a log; a last line that was cut short is left out."""
    planned: dict[str, None] = {}
    results: list[SuiteResult] = []
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            value = json.loads(line)
            if isinstance(value, dict):
                planned |= dict.fromkeys(value["plan"])
            else:
                results.append(read_result(value))
    said = {result.test for result in results}
    return Logged(tuple(results), tuple(test for test in planned if test not in said))
