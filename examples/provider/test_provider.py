"""The installed provider: the conformance suite, and a program that opens it by its name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mcast


def test_the_hub_conforms(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = (sys.executable, "-m", "mcast", "conformance", "--require-backend", "hub", "--report", report)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "conformance: hub conforms"
    clauses = json.loads(report.read_text())["providers"]["hub"]
    passed = {name for name, clause in clauses.items() if clause["outcome"] == "passed"}
    assert {name.partition("-")[0] for name in passed} >= {"JEX", "JM", "LV", "AT", "DT"}


def test_a_program_opens_it_by_name() -> None:
    with (
        mcast.open_backend("hub", ports=2) as backend,
        mcast.open_endpoint(backend, "10.9.0.1", sequence=True) as one,
        mcast.open_endpoint(backend, "10.9.0.2", sequence=True) as other,
        other.join("239.1.2.3") as group,
    ):
        one.sender("239.1.2.3").send_batch([b"first", b"second"])
        received = [message for _ in range(2) if (message := group.recv(timeout=5))]
        assert [(one.number, bytes(one.payload)) for one in received] == [(0, b"first"), (1, b"second")]
        assert group.recv(timeout=0) is None


def test_it_is_listed_with_the_others() -> None:
    assert "hub" in mcast.backend_names()
    assert mcast.backend_status("hub").available
