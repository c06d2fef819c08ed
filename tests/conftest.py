"""Options of the whole test suite."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from .card.build import build
from .card.card import Card
from .card.provider import loaded
from .commands import here, mcast, run, third_party  # noqa: F401  (fixtures)
from .own_network import own_network  # noqa: F401  (a fixture)
from .surroundings import become_known
from .wheels import clone, wheel  # noqa: F401  (fixtures)

ROOT = Path(__file__).parents[1]
LONGEST = (
    "tests/lab/test_guest.py",
    "tests/lab/test_infiniband_suite.py",
    "tests/oracle/test_against_opensm.py",
    "tests/contract/test_races.py",
    "tests/card/test_sanitized.py",
    "tests/house/test_docs.py",
)
"""The files that take longest, in this order."""
LONGEST_IF_LONG = (
    "tests/lab/test_guest.py",
    "tests/interrupts/test_sim_calls.py",
    "tests/lab/test_infiniband.py",
    "tests/oracle/test_against_opensm.py",
    "tests/contract/test_races.py",
    "tests/lab/test_infiniband_suite.py",
)
"""Those of a long run."""
LONG_SECONDS = 7200
"""Of a test in a long run that are a hang: an exception at each line takes minutes on a good machine."""

_FAILED_SETUPS = pytest.StashKey[dict[int, tuple[BaseException, pytest.Item]]]()
"""The exceptions of failed setups, by identity, each with the test that met it first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    oracle = parser.getgroup("oracle", "comparison with OpenSM (tests/oracle)")
    oracle.addoption(
        "--oracle-requests", type=int, default=20_000, metavar="N", help="compare at least N requests"
    )
    parser.addoption("--long", action="store_true", help="run what takes minutes as well (make test-all)")
    parser.addoption("--lab-kernel", metavar="VERSION", help="the kernel of the guest that runs the suite")
    parser.addoption(
        "--sample",
        action="store_true",
        help="of the suite, leave out tests that differ in parameters alone",
    )
    oracle.addoption("--oracle-seed", type=int, default=0, metavar="SEED", help="draw from this seed on")


# A slow machine is no failure.
settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow], stateful_step_count=40
)
settings.load_profile("unhurried")
# For a guest without hardware virtualisation, where each step takes long (`--hypothesis-profile lab`). What
# fails there is shown as it was drawn: the search for less is silent, and longer than a test may take.
for name, examples, steps in (("lab", 4, 40), ("lab-short", 2, 20)):
    settings.register_profile(
        name,
        settings.get_profile("unhurried"),
        max_examples=examples,
        stateful_step_count=steps,
        phases=[Phase.reuse, Phase.generate],
    )
# For `make mutants`: the same each time, and what fails there needs not be made small.
settings.register_profile(
    "mutants",
    settings.get_profile("unhurried"),
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)


@pytest.fixture(scope="session")
def long(pytestconfig: pytest.Config) -> bool:
    """Return True if a test may take minutes."""
    return bool(pytestconfig.getoption("--long"))


def pytest_configure(config: pytest.Config) -> None:
    become_known()
    if config.getoption("--long"):
        os.environ["MCAST_TESTS"] = "long"  # for modules that are no tests, and for processes
    config.addinivalue_line("markers", "long: takes minutes, and runs with --long alone (make test-all)")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Of tests without bytecode, as on a fresh clone, each worker makes a share; else each would make all."""
    if worker := getattr(session.config, "workerinput", None):
        tops = [ROOT / name.partition("::")[0] for name in session.config.args]
        paths = sorted({path for top in tops for path in (top.rglob("test_*.py") if top.is_dir() else [top])})
        for path in paths[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
            with suppress(Exception, pytest.skip.Exception):  # of which the collection tells
                importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest tests first: workers do the rest beside them, and none waits at the end."""
    if not config.getoption("--long"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    else:
        for item in items:
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(LONG_SECONDS))
    if config.getoption("--sample"):
        kept = sample(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    longest = LONGEST_IF_LONG if config.getoption("--long") else LONGEST
    order = {path: place for place, path in enumerate(longest)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(order)))


def sample(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """All but tests of the suite that differ from one before in parameters alone: neither in what they prove
    nor in what they need."""
    seen: set[object] = set()
    kept = []
    for item in items:
        function, _, _ = item.nodeid.partition("[")
        proved = {one for name in ("clause", "fact") for mark in item.iter_markers(name) for one in mark.args}
        needed = frozenset(one for mark in item.iter_markers("needs") for one in mark.args)
        new = {(function, needed), *proved} - seen
        seen |= new
        if new or not item.nodeid.startswith("tests/conformance/"):
            kept.append(item)
    return kept


def pytest_collection_finish() -> None:
    """Thousands of tests stay to the end: no garbage collection looks through them again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Nor does what a file's tests have left: those of other files that collect often would pay for it."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A fixture that several tests share fails once: pytest hands each of them the same exception."""
    report = yield
    if report.when == "setup" and report.failed and call.excinfo is not None:
        error, known = call.excinfo.value, item.config.stash.setdefault(_FAILED_SETUPS, {})
        _, first = known.setdefault(id(error), (error, item))
        if first is not item:
            path, line, _ = item.location
            report.outcome = "skipped"
            report.longrepr = (path, line or 0, f"Skipped: what it needs failed for {first.nodeid}")
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the time of each folder: first test's start to last one's end, and its tests' own time."""
    phases = chain.from_iterable(terminalreporter.stats.values())
    reports = [report for report in phases if isinstance(report, pytest.TestReport)]
    stages: dict[str, list[pytest.TestReport]] = {}
    for report in reports:
        stages.setdefault("/".join(report.nodeid.split("/")[:2]).partition("::")[0], []).append(report)
    if len(stages) > 1:
        terminalreporter.section("stages: wall time and the tests' own, seconds")
        for name, ours in sorted(stages.items()):
            wall = max(report.stop for report in ours) - min(report.start for report in ours)
            own = sum(report.duration for report in ours)
            tests = len({report.nodeid for report in ours})
            terminalreporter.line(f"{name:20} {tests:5} tests {wall:8.1f} {own:8.1f}")


@pytest.fixture
def card(tmp_path: Path) -> Iterator[Card]:
    """A card without devices, loaded in place of the real libraries.

    Whatever was done wrong with it, or is left of it at the end, fails the test.
    """
    with loaded(build(), tmp_path) as card:
        yield card
        reports, leftovers = card.reports(), [one for one in card.leftovers() if not one.excused]
        card.reset()
        assert reports == ()
        assert leftovers == []
