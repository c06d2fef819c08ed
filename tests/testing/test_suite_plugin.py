"""The pytest plugin: what becomes of a test that fails, deviates, does not apply, skips or leaks."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..commands import Run

Install = Callable[..., dict[str, str]]
Pytest = Callable[..., "tuple[int, str]"]

TESTS = """
import pytest
from mcast.api import Capability

@pytest.mark.clause("JEX-1")
def test_passes(bed):
    assert bed.backend.devices()

@pytest.mark.needs(Capability.SA)
def test_needs_an_sa(bed):
    raise SystemExit("never run")

def test_deviates(bed):
    assert False, "as declared"

@pytest.mark.parametrize("case", ["good", "bad"])
def test_deviates_in_one_case(bed, case):
    assert case == "good"

def test_deviation_is_gone(bed):
    pass

def test_deviation_breaks_otherwise(bed):
    raise TypeError("not as declared")

def test_skips(bed):
    pytest.skip("no time")
"""

DEVIATIONS = {
    "test_deviates": "D1",
    "test_deviates_in_one_case[bad]": "D2",
    "test_deviation_is_gone": "D3",
    "test_deviation_breaks_otherwise": "D4",
}


@pytest.fixture
def suite(run: Run, tmp_path: Path) -> Pytest:
    """Run pytest with the plugin on a file of tests; the answer is its status and output."""

    def call(tests: str, *options: str, env: dict[str, str] | None = None) -> tuple[int, str]:
        (tmp_path / "test_it.py").write_text(tests)
        plugin = ("-c", "/dev/null", "--rootdir", tmp_path, "-p", "mcast.conformance.plugin", "-rA")
        # Of other plugins none is looked for: that takes as long as all the rest.
        alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | (env or {})
        done = run(sys.executable, "-m", "pytest", *plugin, *options, "test_it.py", env=alone)
        return done.returncode, done.stdout + done.stderr

    return call


def outcomes(output: str) -> dict[str, str]:
    return {name: word for word, name in re.findall(r"^([A-Z]+) test_it\.py::(\S+)", output, re.M)}


def test_each_outcome(suite: Pytest, third_party: Install) -> None:
    status, output = suite(TESTS, "--backend", "acme", env=third_party(deviations=DEVIATIONS))
    assert status == 1
    assert outcomes(output) == {
        "test_passes[acme]": "PASSED",
        "test_deviates[acme]": "XFAIL",
        "test_deviates_in_one_case[acme-good]": "PASSED",
        "test_deviates_in_one_case[acme-bad]": "XFAIL",
        "test_deviation_is_gone[acme]": "FAILED",
        "test_deviation_breaks_otherwise[acme]": "FAILED",
    }
    assert "the documented deviation did not occur: D3" in output
    assert "TypeError: not as declared" in output
    assert "acme: 1 test, not here: a subnet administrator keeps the groups" in output
    assert "2 failed, 2 passed, 1 skipped, 1 deselected, 2 xfailed" in output


def test_a_required_backend_may_not_skip(suite: Pytest, third_party: Install) -> None:
    status, output = suite(TESTS, "--require-backend", "acme", "-k", "skips", env=third_party())
    assert status == 1
    assert outcomes(output) == {"test_skips[acme]": "FAILED"}
    assert "required, but no time" in output


def test_a_leak_is_an_error_of_its_test(suite: Pytest, third_party: Install) -> None:
    env = third_party(deviations={"test_deviates": "D1"}, leak="QP 7 on acme0")
    status, output = suite(TESTS, "--backend", "acme", "-k", "passes or test_deviates[", env=env)
    assert status == 1
    assert output.count("left behind after the backend was closed: QP 7 on acme0") >= 2
    assert outcomes(output)["test_deviates[acme]"] == "ERROR"  # a deviation excuses no leak


UNAVAILABLE = """
from mcast.api import Status, UnavailableReason
from mcast.backends.sim import ROCE
status = Status(False, "the card is gone", UnavailableReason.NO_DEVICE, "put it back")
PROVIDER = ROCE._replace(status=lambda: status)
"""
WHY = "no device: the card is gone; put it back"


def test_unavailable_backend_is_skipped(suite: Pytest, third_party: Install) -> None:
    """An unavailable backend is skipped with its fix."""
    env = third_party(source=UNAVAILABLE)
    status, output = suite(TESTS, "--backend", "acme", "-k", "passes", env=env)
    assert status == 0
    assert f"backend acme: {WHY}" in output
    assert f"backend 'acme' cannot run here: {WHY}" in output
    assert "1 skipped" in output


def test_an_unavailable_required_backend_fails(suite: Pytest, third_party: Install) -> None:
    env = third_party(source=UNAVAILABLE)
    status, output = suite(TESTS, "--require-backend", "acme", "-k", "passes", env=env)
    assert status == 1
    assert f"required, but backend 'acme' cannot run here: {WHY}" in output


def test_a_test_bed_that_does_not_open_is_a_failure(suite: Pytest, third_party: Install) -> None:
    source = "from mcast.backends.sim import ROCE\nPROVIDER = ROCE._replace(testbed=lambda: 1 / 0)\n"
    status, output = suite(TESTS, "--backend", "acme", env=third_party(source=source))
    assert status == 1
    assert "the test bed of 'acme' does not open: ZeroDivisionError" in output
    assert "8 errors" in output


def test_by_default_both_simulated_fabrics_are_tested(suite: Pytest) -> None:
    status, output = suite(TESTS, "-k", "passes")
    assert status == 0
    assert outcomes(output) == {"test_passes[sim-roce]": "PASSED", "test_passes[sim-ib]": "PASSED"}
    assert re.search(r"^mcast \S+, pydantic \S+; Linux", output, re.M)
    assert "backend sim-ib: simulated InfiniBand fabric" in output


@pytest.mark.parametrize(
    ("tests", "options", "says"),
    [
        (TESTS, ("--backend", "nope"), "backend 'nope': no backend of that name"),
        (
            "import pytest\n@pytest.mark.clause('JEX-none')\ndef test_x(bed): pass",
            (),
            "there is no clause 'JEX-none'",
        ),
        (
            "import pytest\n@pytest.mark.fact('K-none')\ndef test_x(bed): pass",
            (),
            "there is no fact 'K-none'",
        ),
        ("import pytest\n@pytest.mark.needs('SA')\ndef test_x(bed): pass", (), "Feature members, not 'SA'"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(
    suite: Pytest, tests: str, options: tuple[str, ...], says: str
) -> None:
    status, output = suite(tests, *options)
    assert status == 4
    assert says in output
    assert "Traceback" not in output
