"""Tests that run in a guest, and what it says of each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import mcast
from mcast.lab import LabMachine

PROJECT = Path(mcast.__file__).parents[1]
PORTS = 4
TIMEOUT = 780.0
"""Seconds that a guest may take for its tests, emulated and beside other work."""


def run_tests(
    shared: Path, options: Sequence[str], folders: Sequence[str], after: str = "true"
) -> dict[str, str]:
    """Each test as `module::name` -> "passed", or what it said; a deviation that is declared has passed.

    `shared` is where the guest's files come back; `after` is a shell line that is run there next.
    """
    junit = shared / "junit.xml"
    common = [
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "--require-backend",
        "rdma",
        "--junitxml",
        str(junit),
    ]
    tests = " ".join([sys.executable, "-m", "pytest", *common, *options, *folders])
    machine = LabMachine(PORTS, share=[shared])
    machine.run(["sh", "-c", f"{tests}; {after}"], cwd=PROJECT, timeout=TIMEOUT)
    cases = ElementTree.parse(junit).getroot().iter("testcase")
    return {f"{case.get('classname')}::{case.get('name')}": _said(case) for case in cases}


def bad(tests: dict[str, str]) -> dict[str, str]:
    """The tests that did not pass."""
    return {name: said for name, said in tests.items() if said != "passed"}


def modules(tests: dict[str, str]) -> set[str]:
    """The modules that have run."""
    return {name.split("::")[0].rpartition(".")[2] for name in tests}


def _said(case: ElementTree.Element) -> str:
    wrong = [
        child
        for child in case
        if child.tag in ("failure", "error", "skipped") and child.get("type") != "pytest.xfail"
    ]
    return "; ".join(f"{child.tag}: {child.get('message')}" for child in wrong) or "passed"
