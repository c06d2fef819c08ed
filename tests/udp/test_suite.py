"""The conformance suite on `udp`: on a snooping bridge in a network namespace, and on loopback alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from ..own_network import needs_namespaces

ROOT = Path(__file__).parents[2]
NO_CAPABILITIES = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")
ONE_PORT = ("not-applicable", "not here: there is a second port")


@pytest.fixture
def own_network() -> None:
    """The test beds see to that themselves."""


def clauses(report: Path, *options: str, prefix: Sequence[str] = ()) -> Counter[tuple[str, str]]:
    """Run the suite, which must pass; count the clauses by outcome and reason."""
    command = [*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *options]
    command += [
        "tests/conformance",
        "--require-backend",
        "udp",
        "--conformance-report",
        str(report),
    ]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "MCAST_"))}
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    found = json.loads(report.read_text())["providers"]["udp"].values()
    return Counter((clause["outcome"], clause["reason"] or "") for clause in found)


@needs_namespaces
def test_the_suite_passes_on_a_snooping_bridge(tmp_path: Path, long: bool) -> None:
    options = [] if long else ["--sample", "--hypothesis-profile", "lab"]
    found = clauses(tmp_path / "report.json", *options, "tests/model")  # which takes three ports
    assert found["passed", ""] > 100
    assert not found[ONE_PORT]


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv: apt-get install util-linux")
def test_the_suite_passes_on_loopback_unprivileged(tmp_path: Path, long: bool) -> None:
    """Without any capability no namespace can be made, so loopback is taken unasked."""
    options = [] if long else ["--sample"]
    found = clauses(tmp_path / "report.json", *options, prefix=NO_CAPABILITIES)
    assert found["passed", ""] > 80
    assert found[ONE_PORT]
