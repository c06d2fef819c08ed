"""What a run of the suite says: results of tests in, a table of clause and provider out."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Outcome(Enum):
    """What a test, or all tests of a clause, say about a provider. SKIPPED is said of tests alone."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not-applicable"
    DEVIATION = "deviation"
    SKIPPED = "skipped"


class Result(NamedTuple):
    """One test on one backend (None: it needs none, and says the same of all)."""

    test: str
    backend: str | None
    proves: tuple[str, ...]
    outcome: Outcome
    reason: str
