"""What needs real devices beside the suite, run by one guest: the application layer, the commands, peers.

A file of its own, so that its guest runs beside that of the suite.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .guest_run import PROJECT, TIMEOUT, bad, modules, run_tests

FOLDER = "tests/rdma/in_lab"
LAST = "test_endpoint"
"""It removes devices that others have used, which librdmacm does not always find again."""

pytestmark = pytest.mark.timeout(TIMEOUT + 60)


def test_whatever_needs_a_device_passes_on_real_ones(tmp_path: Path) -> None:
    names = [path.stem for path in (PROJECT / FOLDER).glob("test_*.py")]
    in_order = sorted(names, key=lambda name: (name == LAST, name))
    tests = run_tests(tmp_path, [], [f"{FOLDER}/{name}.py" for name in in_order])
    assert bad(tests) == {}
    assert modules(tests) == set(names)
