"""A pytest plugin beside pytest-run-parallel: which tests may run in threads at once, beside themselves.

python -m pytest -p tests.parallel --parallel-threads 4 --iterations 2 TESTS

All threads are given the same objects by a test's fixtures. So a test with fixtures runs in one thread,
unless they are values, or `shared` and what is made of it, which any number of threads may use.
"""

from __future__ import annotations

import pytest

MAIN_THREAD = ("tests/interrupts/",)
"""Where a test sends signals, which Python takes in its main thread alone."""
OF_THE_PROCESS = frozenset(
    {
        "test_a_membership_takes_less_than_a_kibibyte",
        "test_override_replaces_a_name_while_open",
        "test_the_switch_lets_the_contract_serve",
        "test_the_unbroken_rules_pass",
        "test_what_a_sleep_is_on_is_closed",
    }
)
"""Tests that change or count something of the whole process."""
VALUES = frozenset({"request", "tmp_path", "long", "pytestconfig", "no_change_that_cannot_be"})


def reason(test: pytest.Function) -> str:
    """Why the test runs in one thread; "" if it may run in several."""
    if test.nodeid.startswith(MAIN_THREAD):
        return "sends signals"
    if test.originalname in OF_THE_PROCESS:
        return "is about the whole process"
    names = set(test.fixturenames) - VALUES
    for mark in test.iter_markers("parametrize"):
        if not mark.kwargs.get("indirect"):
            given = mark.args[0]
            names -= {name.strip() for name in (given.split(",") if isinstance(given, str) else given)}
    return f"has {', '.join(sorted(names))}" if names and "shared" not in names else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and (why := reason(item)):
            item.add_marker(pytest.mark.thread_unsafe(reason=why))
            item.add_marker(pytest.mark.iterations(1))
