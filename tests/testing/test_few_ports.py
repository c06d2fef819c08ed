"""The suite where there are fewer ports than in the lab: what wants another is told so, all else passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mcast.conformance
from mcast.conformance.log import read_log
from mcast.conformance.report import Outcome

from .test_suite_plugin import Install

PROVIDER = """
from contextlib import contextmanager
from mcast.backends.sim import INFINIBAND as IB

@contextmanager
def few():
    with IB.testbed() as bed:
        bed.ports = bed.ports[:{ports}]
        yield bed

PROVIDER = IB._replace(testbed=few)
"""
SUITE = Path(*mcast.conformance.__path__)
SAMPLE = ("test_attach.py", "test_detach.py", "test_join.py", "test_leave.py")


@pytest.mark.parametrize(
    ("ports", "lacking"),
    [
        (1, {"there is a second port", "there is a third port"}),
        pytest.param(2, {"there is a third port"}, marks=pytest.mark.long),
    ],
)
def test_one_port_is_enough_for_most(
    third_party: Install, tmp_path: Path, ports: int, lacking: set[str]
) -> None:
    log = tmp_path / "log.jsonl"
    files = [str(SUITE / name) for name in SAMPLE]
    options = ["-c", os.devnull, "--rootdir", str(SUITE), "--noconftest", "--import-mode=importlib", "-q"]
    plugins = ["-p", "mcast.conformance.plugin", "-p", "no:cacheprovider", "--backend", "acme"]
    command = [sys.executable, "-m", "pytest", *options, *plugins, "--conformance-log", str(log), *files]
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    env = os.environ | alone | third_party(source=PROVIDER.format(ports=ports))
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout
    results = read_log(log.read_text()).results
    wanted = {one.reason for one in results if one.outcome is Outcome.NOT_APPLICABLE}
    assert {f"not here: {words}" for words in lacking} <= wanted
    assert sum(one.outcome is Outcome.PASSED for one in results) > 50
