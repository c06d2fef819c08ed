"""What needs real devices beside the suite, run by one guest: the application layer, the commands, peers.

A file of its own, so that its guest runs beside that of the suite.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .guest_run import PROJECT, TIMEOUT, bad, modules, run_tests

FOLDER = "tests/rdma/in_lab"
FIRST, LAST = "test_doctor", "test_endpoint"
"""These remove devices. librdmacm holds the last one that goes, if it has used it, and after others have
come back it does not always find them: the first has used none, the last is followed by nobody."""

pytestmark = pytest.mark.timeout(TIMEOUT + 60)


def test_whatever_needs_a_device_passes_on_real_ones(tmp_path: Path) -> None:
    names = [path.stem for path in (PROJECT / FOLDER).glob("test_*.py")]
    in_order = sorted(names, key=lambda name: (name != FIRST, name == LAST, name))
    tests = run_tests(tmp_path, [], [f"{FOLDER}/{name}.py" for name in in_order])
    assert bad(tests) == {}
    assert modules(tests) == set(names)
