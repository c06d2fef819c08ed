"""What needs real devices beside the suite, run by one guest: the application layer, the commands, peers.

A file of its own, so that its guest runs beside that of the suite.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .guest_run import PROJECT, TIMEOUT, bad, modules, run_tests

FOLDER = "tests/rdma/in_lab"
ALONE, LAST = "test_doctor", "test_endpoint"
"""One breaks the host on purpose, and has a guest of its own. The other removes devices that were used, which
librdmacm does not always find again."""

pytestmark = pytest.mark.timeout(TIMEOUT + 60)


def _modules() -> list[list[str]]:
    """What runs in one guest, in order."""
    names = {path.stem for path in (PROJECT / FOLDER).glob("test_*.py")}
    return [sorted(names - {ALONE}, key=lambda name: (name == LAST, name)), [ALONE]]


@pytest.mark.parametrize("names", _modules(), ids=["provider", "doctor"])
def test_whatever_needs_a_device_passes_on_real_ones(tmp_path: Path, names: list[str]) -> None:
    tests = run_tests(tmp_path, [], [f"{FOLDER}/{name}.py" for name in names])
    assert bad(tests) == {}
    assert modules(tests) == set(names)
