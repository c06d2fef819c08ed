"""Programs at both ends of a group: rates, transfers that are killed or interrupted, ranks of an MPI job."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from signal import SIGINT, SIGKILL

import pytest

from mcast import cast, open_endpoint
from mcast.backends.net import hostnet

from ..commands import MCAST, QUOTED, Run
from ..waiting import until
from .test_processes import GROUP, LO, UDP


def test_bench_measures_between_two_programs(here: Run) -> None:
    words = ("bench", "--server", "--json", *UDP, *LO)
    with subprocess.Popen([MCAST, *words], stdout=subprocess.PIPE, text=True) as other, ExitStack() as stack:
        stack.callback(other.kill)
        until(hostnet.igmp_memberships)
        options = ("--seconds", 0.5, "--size", "512", "--interval", "100ms", "--rate", "20Mbit/s")
        done = here("bench", "--client", *options, "--json", *UDP, *LO)
        assert done.returncode == 0, done.stderr
        sent = json.loads(done.stdout)
        assert other.stdout is not None
        came = json.loads(other.stdout.read())
    assert (sent["role"], came["role"], came["address"]) == ("client", "server", "127.0.0.1")
    assert [one["address"] for one in sent["receivers"]] == ["127.0.0.1"]
    assert 0 < sent["messages"] == came["messages"] + came["lost"]
    assert came["bytes"] == 512 * came["messages"]
    assert sent["gbits_per_s"] < 0.05  # 20 Mbit/s, and what a last batch is above that
    assert sent["lost"] is None
    assert {"begins", "ends", "gbits_per_s"} <= sent["intervals"][0].keys()


def test_killed_receiver_resumes(tmp_path: Path) -> None:
    """A receiver that was killed goes on from what it has."""
    data, copy = Random(1).randbytes(6_000_000), tmp_path / "copy"
    receiving = [str(word) for word in (MCAST, "recv", GROUP, "-o", copy, *UDP, *LO)]

    def until_killed(receiver: subprocess.Popen[bytes]) -> Iterator[bytes]:
        yield data[:5_000_000]
        part = tmp_path / ".copy.part"
        until(lambda: part.exists() and part.stat().st_size > 1_000_000)
        receiver.kill()
        yield data[5_000_000:]

    with open_endpoint("udp", "127.0.0.1") as endpoint, endpoint.join(GROUP) as group, ExitStack() as stack:
        for goes_on in (False, True):
            receiver = stack.enter_context(subprocess.Popen(receiving))
            stack.callback(receiver.kill)
            with cast.open_session(group, memory=1 << 19, peer_timeout=60.0 if goes_on else 5.0) as session:
                session.wait_for_receivers(1, timeout=200)
                report = session.send(data if goes_on else until_killed(receiver))
            assert receiver.wait() == (0 if goes_on else -SIGKILL)
            assert report.strategy_met == goes_on
    assert copy.read_bytes() == data
    assert [path.name for path in tmp_path.iterdir() if "copy" in path.name] == ["copy"]


@pytest.mark.parametrize("stdout", ["", " >&-"], ids=["open", "closed"])
@pytest.mark.parametrize("role", ["send", "recv"])
def test_ctrl_c_is_one_sentence_at_both_ends(tmp_path: Path, role: str, stdout: str) -> None:
    """Ctrl-C in a transfer is one sentence at both ends.

    Of the command and of its other end; what has come stays under its documented name.
    """
    data, folder, part = Random(1).randbytes(6_000_000), tmp_path / "in", tmp_path / "in" / ".copy.part"
    (tmp_path / "data").write_bytes(data)
    folder.mkdir()
    words = {"send": "send data 239.1.1.1 --rate 20M", "recv": "recv 239.1.1.1 -o in/copy"}[role]
    command = ["sh", "-c", f"exec {QUOTED} {words} --backend udp -b 127.0.0.1{stdout}"]

    def has_come() -> bool:
        return part.exists() and part.stat().st_blocks * 512 > 500_000

    def until_interrupted() -> Iterator[bytes]:
        yield data[:5_000_000]
        until(has_come)
        process.send_signal(SIGINT)
        process.wait(60)
        yield data[5_000_000:]

    def on_progress(offered: cast.Offered, done: int) -> None:
        if done > 500_000:
            process.send_signal(SIGINT)

    with (
        open_endpoint("udp", "127.0.0.1") as endpoint,
        endpoint.join(GROUP) as group,
        subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process,
    ):
        missed: list[cast.Missed] = []
        try:
            if role == "recv":
                with cast.open_session(group, memory=1 << 19, peer_timeout=60.0) as session:
                    session.wait_for_receivers(1, timeout=200)
                    report = session.send(until_interrupted())
                    assert [one.reason for one in report.receivers] == ["interrupted"]
            else:
                objects = cast.receive(
                    group,
                    folder / "copy",
                    timeout=200,
                    missed=missed.append,
                    one_session=True,
                    peer_timeout=60.0,
                    progress=on_progress,
                )
                assert list(objects) == []
                assert ["interrupted" in one.reason for one in missed] == [True]
            _, said = process.communicate()
        finally:
            process.kill()
    assert process.returncode == 128 + SIGINT
    assert said == "mcast: interrupted\n"
    assert list(folder.iterdir()) == [part]


def test_a_client_without_servers_says_what_to_start(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcast.bench.client_server.MAX_HELLOS", 1)
    done = here("bench", "--client", "--receivers", 2, *UDP, *LO)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        "mcast: 0 of 2 receivers answered in 239.1.1.1: start `mcast bench --server` on them" in done.stderr
    )


def test_client_refuses_a_message_too_long(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client refuses what no message holds before it waits."""
    monkeypatch.setattr("mcast.bench.client_server.MAX_HELLOS", 1)
    done = here("bench", "--client", "--receivers", 2, "--size", 5000, *UDP, *LO)
    assert (done.returncode, done.stdout) == (2, "")
    assert "mcast: --size is 5000: one MTU carries 4072 bytes, and a message is one MTU" in done.stderr


@pytest.mark.long  # eight processes import the command
def test_eight_ranks_of_mpi_measure_together(run: Run) -> None:
    if shutil.which("mpirun") is None:
        pytest.fail("this test starts ranks with mpirun: apt-get install openmpi-bin", pytrace=False)
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", 8)
    done = run(*mpirun, MCAST, "bench", "--seconds", 0.3, "--json", *UDP)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["processes"], found["receivers"], found["lost"]) == (8, 7, 0)
