"""A card report of the devices of the lab: the same test on Soft-RoCE and on InfiniBand."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import pytest

from mcast import open_backend
from mcast.bench import card_measure
from mcast.bench.card import make_card_report
from mcast.conformance.clauses import CLAUSES
from mcast.conformance.facts import FACTS
from mcast.conformance.report import Outcome, SuiteResult, build_report

MACS = [path.read_text().strip() for path in Path("/sys/class/net").glob("*/address")]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_measure, "RUNS", 2)
    monkeypatch.setattr(card_measure, "RUN_SECONDS", 0.05)
    monkeypatch.setattr(card_measure, "JOINS", 10)


def test_a_report_of_the_lab_s_devices() -> None:
    """It measures everything, says what the devices are, and has no value of this guest, also in a reason."""
    with open_backend("rdma") as backend:
        devices = backend.devices()
    own = {one.name for one in devices} | {f"{one.node_guid:016x}" for one in devices}
    own |= {str(a) for one in devices for port in one.ports for a in (*port.addresses, *port.gids.values())}
    own |= {os.uname().nodename, platform.node(), *MACS} - {"localhost", "(none)", "00:00:00:00:00:00"}
    failed = SuiteResult("t.py::t", "rdma", ("K-JOIN-1",), Outcome.FAILED, f"{sorted(own)} of {Path.cwd()}")
    passed = SuiteResult("t.py::all", "rdma", (*CLAUSES, *FACTS), Outcome.PASSED, "")
    report = make_card_report(build_report([passed, failed], ["rdma"], {}), "rdma", 1.0)

    assert (report.verdict, report.why) == ("differs", ("K-JOIN-1",))
    for measured in (report.loopback, report.join_leave, report.flooding, report.rate):
        assert measured.outcome == "measured", measured.reason
    assert (report.flooding.flooded, report.flooding.member) == (False, card_measure.MESSAGES)
    assert report.loopback.block in ("honoured", "refused")
    assert report.join_leave.refused == 0
    assert report.join_leave.join is not None
    assert report.join_leave.join.count == 10
    assert all(one.messages_per_s.median > 0 for one in report.rate.sizes)
    assert re.fullmatch(r"\d+\.\d+", report.versions.libraries["rdma-core"])
    assert {one.driver for one in report.devices} <= {"rdma_rxe", ""}  # sysfs names none for softib
    assert {one.ports[0].used for one in report.devices} == {*range(report.bed.ports)}

    text = report.model_dump_json()
    words = re.split(r"[^\w.:/-]", text)
    assert not {value for value in own if value in words or (len(value) > 6 and value in text)}
    assert str(Path.cwd()) not in text
