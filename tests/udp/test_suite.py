"""The conformance suite on `udp`: on a snooping bridge in a network namespace, and on loopback alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from .conftest import needs_namespaces

ROOT = Path(__file__).parents[2]
NO_CAPABILITIES = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")


def suite(report: Path, env: dict[str, str], prefix: Sequence[str] = ()) -> dict[str, object]:
    command = [*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
    command += ["tests/conformance", "--require-backend", "udp", "--conformance-report", str(report)]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "MCAST_"))}
    done = subprocess.run(command, cwd=ROOT, env=kept | env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    found: dict[str, object] = json.loads(report.read_text())
    return found


@needs_namespaces
def test_the_suite_passes_on_a_snooping_bridge(tmp_path: Path) -> None:
    found = suite(tmp_path / "report.json", {})
    assert "udp" in json.dumps(found)


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv: apt-get install util-linux")
def test_the_suite_passes_on_loopback_unprivileged(tmp_path: Path) -> None:
    """Without any capability no namespace can be made, so loopback is taken unasked."""
    found = suite(tmp_path / "report.json", {}, NO_CAPABILITIES)
    assert "udp" in json.dumps(found)
