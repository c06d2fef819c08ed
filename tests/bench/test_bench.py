"""`mcast bench`: what it reports, when it fails, what it refuses, and how it counts."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import count
from typing import Any

import pytest

from mcast import open_endpoint
from mcast.api import Backend, CmId, McastAddress, QpInit, QueuePair
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults import Drop, Messages
from mcast.backends.sim.trace.events import Send
from mcast.bench import client_server
from mcast.bench.intervals import Intervals
from mcast.bench.measure import measure, percentiles, result, window_for
from mcast.bench.mpi import _number

from ..commands import MCAST, Run

QUICK = ("bench", "--backend", "sim", "--seconds", "0.05")


@pytest.mark.parametrize(("backend", "receivers"), [("sim-roce", 1), ("sim-ib", 3)])
def test_json_has_what_programs_compare(here: Run, backend: str, receivers: int) -> None:
    done = here(*QUICK, "--backend", backend, "--receivers", str(receivers), "--size", "512", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["backend"], found["size"], found["receivers"]) == (backend, 512, receivers)
    assert (found["lost"], found["strangers"], found["processes"]) == (0, 0, 1)
    assert found["messages_per_s"] == pytest.approx(found["messages"] / found["seconds"])
    assert found["gbits_per_s"] == pytest.approx(found["messages_per_s"] * found["size"] * 8 / 1e9)
    assert found["deliveries_per_s"] == pytest.approx(receivers * found["messages_per_s"])
    latency = found["latency_us"]
    assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["max"]


def test_it_reads_well_in_80_columns(here: Run) -> None:
    done = here(*QUICK, "--receivers", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    for word in ("messages/s", "lost     0 of", "p50", "p99"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (("--min-rate", "1e12"), ["--min-rate is 1,000,000,000,000"]),
        (("--max-p99", "0"), ["--max-p99 is 0.0"]),
        (("--min-rate", "1e12", "--max-p99", "0"), ["--min-rate", "--max-p99"]),
    ],
    ids=["rate", "p99", "both"],
)
def test_a_missed_limit_is_status_1(here: Run, limits: tuple[str, ...], says: list[str]) -> None:
    done = here(*QUICK, *limits)
    assert done.returncode == 1
    assert "messages/s" in done.stdout, "the figures are shown all the same"
    assert done.stderr.count("\n") == 1
    for word in says:
        assert word in done.stderr


def test_a_kept_limit_is_status_0(here: Run) -> None:
    done = here(*QUICK, "--min-rate", "1", "--max-p99", "1e9")
    assert (done.returncode, done.stderr) == (0, "")


BAD_INPUT = {
    "more than one MTU": (("--size", "1025"), "--size is 1025: one MTU carries 1024 bytes"),
    "negative size": (("--size", "-1"), "'-1' is not a size"),
    "no receiver": (("--receivers", "0"), "'--receivers': 0: give a whole number from 1 to 256"),
    "no DSCP": (("--dscp", "64"), "'--dscp': 64: give a whole number from 0 to 63"),
    "two classes": (("--dscp", "1", "--traffic-class", "4"), "--dscp is a part of --traffic-class"),
    "no such priority": (
        ("--service-level", "8"),
        "roce0/1: --service-level is 8: allowed are 0..7 (Ethernet has eight priorities)",
    ),
    "negative time": (("--busy-poll", "-1"), "'-1' is not a time: give seconds"),
    "no time": (("--seconds", "0"), "0 is out of range: give 0.01 to 3,600 s"),
    "both ends": (("--server", "--client"), "--server and --client exclude each other"),
    "p99 of a client": (("--client", "--max-p99", "5"), "--max-p99 is for one command alone"),
    "rate of a server": (("--server", "--rate", "1G"), "--rate and --receivers are for --client"),
    "rate alone": (("--rate", "1G"), "--rate, --receive-depth, --bind and --device are for --client"),
    "client alone": (("--client",), "a fabric inside this process"),
    "no number": (("--min-rate", "fast"), "'--min-rate'"),
    "unicast": (("--group", "10.0.0.1"), "10.0.0.1 is a unicast address"),
    "unknown backend": (("--backend", "nope"), "'nope' is not a backend"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence_and_status_2(here: Run, case: str) -> None:
    arguments, says = BAD_INPUT[case]
    done = here(*QUICK, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--backend", "sim"), "a fabric inside this process"),
        (("--receivers", "2", "--backend", "rdma"), "leave out"),
    ],
    ids=["simulated", "receivers"],
)
def test_what_an_mpi_job_cannot_have(arguments: tuple[str, ...], says: str) -> None:
    environment = {**os.environ, "OMPI_COMM_WORLD_SIZE": "3"}
    done = subprocess.run(
        [MCAST, *QUICK, *arguments], env=environment, capture_output=True, text=True, timeout=500
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


def test_each_lost_message_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message that a receiver misses is counted."""
    monkeypatch.setattr("mcast.bench.receiver.RECEIVE_TIMEOUT", 0.01)
    group = McastAddress.of("239.1.1.1")
    fabric = Fabric.roce(ports=3, seed=1)
    with open_fabric(fabric) as backend, fabric.rules.when(Messages(target="roce1", nth=40), Drop()):
        found = measure(backend, group, 64, 2, 0.05)
    assert found.lost == 1
    assert found.deliveries_per_s < 2 * found.messages_per_s


def test_a_batch_is_sent_however_soon_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock comes a second later: the machine stands still meanwhile."""
    group = McastAddress.of("239.1.1.1")
    monkeypatch.setattr("mcast.bench.measure.perf_counter", count().__next__)
    with open_fabric(Fabric.roce(ports=2)) as backend:
        found = measure(backend, group, 64, 1, 0.05)
        assert (found.messages, found.lost) == (window_for(1), 0)
        monkeypatch.setattr(backend, "now", count().__next__)
        with open_endpoint(backend, "10.0.0.1") as endpoint:
            sent = client_server.send(endpoint, group, 64, 0.05, None, Intervals(None, lambda _: None))
    assert sent.messages > 0


@pytest.mark.parametrize("backend", ["sim-roce", "sim-ib"])
def test_messages_carry_what_the_options_say(
    here: Run, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    polled: set[float] = set()
    fabrics: list[Fabric] = []

    def create_qp(self: CmId, init: QpInit = QpInit()) -> QueuePair:  # noqa: B008
        polled.add(init.busy_poll)
        return make(self, init)

    def opened(name: str, **options: Any) -> Backend:
        fabrics.append({"sim-roce": Fabric.roce, "sim-ib": Fabric.infiniband}[name](trace=True, **options))
        return open_fabric(fabrics[-1])

    make = CmId.create_qp
    monkeypatch.setattr(CmId, "create_qp", create_qp)
    monkeypatch.setattr("mcast.cli.bench.open_backend", opened)
    options = ("--dscp", "26", "--service-level", "3", "--busy-poll", "0.5", "--backend", backend)
    assert here(*QUICK, *options).returncode == 0
    (fabric,) = fabrics
    assert fabric.trace is not None
    sent = {(event.traffic_class, event.sl) for _, event in fabric.trace if isinstance(event, Send)}
    assert (sent, polled) == ({(26 << 2, 3)}, {0.5})


@pytest.mark.parametrize("text", [b"", b"abc"])
def test_a_message_that_is_no_ping_has_no_number(text: bytes) -> None:
    with open_endpoint("sim", "10.0.0.1") as endpoint, endpoint.join("239.1.1.1") as group:
        group.send(text)
        assert _number(group.recv(1)) == _number(None) == 0
        group.send(bytes([0, 0, 0, 7]))
        assert _number(group.recv(1)) == 7


def test_percentiles_of_what_arrived() -> None:
    assert percentiles([]) is None
    assert percentiles([number * 1e-6 for number in range(100, 0, -1)]) == (51, 91, 100, 100)
    nothing = result("sim", 64, 1, 1, 0, 1.0, 0, 0, [])
    assert (nothing.messages_per_s, nothing.deliveries_per_s, nothing.latency_us) == (0, 0, None)


def test_what_is_in_flight_is_bounded() -> None:
    assert [window_for(receivers) for receivers in (1, 2, 3, 8, 512, 5000)] == [256, 256, 170, 64, 1, 1]
