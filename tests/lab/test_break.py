"""`rdma-lab break` and `rdma-lab tap` on a guest that runs, one of each fabric.

The evidence is the guest's own: sysfs, ibv_asyncwatch, ibv_ud_pingpong; and tshark for captures.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rdma_lab import LabTimeoutError, control, faults

RDMA_LAB = [sys.executable, "-m", "rdma_lab"]
BOUND = 120.0
"""Seconds after which something is taken to hang; the host may be busy."""
MESSAGES = Path(__file__).with_name("messages.sh")
OPTIONS = {"roce": (), "infiniband": ("--fabric", "infiniband", "--ports", "2")}
DEVICE = {"roce": "rxe", "infiniband": "softib"}

pytestmark = [pytest.mark.timeout(1800), pytest.mark.long]  # some minutes for each fabric, emulated


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {BOUND:.0f} s"
        time.sleep(0.1)


@dataclass
class Running:
    """A guest that another process runs."""

    fabric: str
    name: str
    runner: subprocess.Popen[bytes]

    def device(self, number: int) -> str:
        return f"{DEVICE[self.fabric]}{number}"

    def lab(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Return the output of `rdma-lab` with these words."""
        done = subprocess.run(
            [*RDMA_LAB, *words, "--guest", self.name], capture_output=True, text=True, timeout=BOUND
        )
        assert done.returncode == status, done.stderr
        return done

    def inside(self, script: str) -> str:
        with control.connect(self.name) as guest:
            return guest.run(script)

    def row(self, name: str) -> list[str]:
        """The row of the list with that name."""
        lines = [line.split() for line in self.lab("break").stdout.splitlines()]
        return next(line for line in lines if line[0] == name)

    def state(self, device: str) -> str:
        return self.inside(f"cat /sys/class/infiniband/{device}/ports/1/state").strip()

    def deliver(self, seconds: int = 30, count: int = 5) -> bool:
        """Return True if all messages between the first two devices arrive."""
        devices = (self.device(1), self.device(2))
        words = shlex.join(["sh", str(MESSAGES), *devices, str(seconds), str(count)])
        return "arrived" in self.inside(
            f"{words} >/tmp/messages.out 2>&1 && echo arrived || cat /tmp/messages.out"
        )


@pytest.fixture(scope="module", params=["roce", "infiniband"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("run")
    home.chmod(0o700)
    log = home / "log"
    with pytest.MonkeyPatch.context() as patch, log.open("wb") as output:
        patch.setenv("XDG_RUNTIME_DIR", str(home))
        command = [*RDMA_LAB, "run", *OPTIONS[request.param], "--", "sleep", "3600"]
        runner = subprocess.Popen(command, stdout=output, stderr=output)
        try:

            def names() -> list[str]:
                assert runner.poll() is None, log.read_text()
                return [path.name for path in (home / "rdma-lab").glob("[a-z]*-*")]

            until(lambda: bool(names()), "a guest is ready")
            (name,) = names()
            yield Running(request.param, name, runner)
        finally:
            runner.terminate()
            runner.wait(BOUND)
        assert list((home / "rdma-lab").iterdir()) == []  # an orderly end removes the socket


def test_list_shows_what_can_be_broken(running: Running) -> None:
    for number in (1, 2):
        row = running.row(running.device(number))
        assert (row[1], row[-3:]) == ("in", ["ACTIVE", "present", "0"])
    assert ("sm" in running.lab("break").stdout) == (running.fabric == "infiniband")


def test_cable_out_takes_the_port_down(running: Running) -> None:
    """A program that waits for events is told of both changes; every other port stays active."""
    device = running.device(2)
    watch = f"stdbuf -oL ibv_asyncwatch -d {device} >/tmp/watch 2>&1 & echo $! >/tmp/watch.pid"
    running.inside(f"{watch}; until [ -s /tmp/watch ]; do sleep 0.1; done")
    running.lab("break", "cable", device)
    until(lambda: running.state(device) == "1: DOWN", "the port goes down")
    assert running.state(running.device(1)) == "4: ACTIVE"
    assert running.row(device)[1] == "out"
    running.lab("break", "cable", device, "--undo")
    until(lambda: running.state(device) == "4: ACTIVE", "the port comes up")
    until(lambda: "PORT_ACTIVE" in running.inside("cat /tmp/watch"), "the event arrives")
    said = running.inside("kill $(cat /tmp/watch.pid); cat /tmp/watch")
    assert said.index("PORT_ERR") < said.index("PORT_ACTIVE")


def test_port_down_and_up(running: Running) -> None:
    device = running.device(2)
    running.lab("break", "port", device)
    assert running.row(device)[-3] == "disabled"
    running.lab("break", "--undo")
    until(lambda: running.state(device) == "4: ACTIVE", "the port comes up")


def test_loss_of_all_lets_nothing_arrive(running: Running) -> None:
    until(lambda: running.deliver(seconds=10), "messages arrive")  # the first are lost until ARP is done
    running.lab("break", "loss", "1", running.device(2))
    assert running.row(running.device(2))[-1] == "100%"
    assert not running.deliver(seconds=5)
    running.lab("break", "loss", "--undo")
    assert running.row(running.device(2))[-1] == "0"
    until(running.deliver, "messages arrive again")


def test_device_goes_and_comes_back(running: Running) -> None:
    device = running.device(2)
    running.lab("break", "device", device)
    assert device not in running.inside("ls /sys/class/infiniband")
    assert running.row(device)[-2] == "absent"
    running.lab("break", "--undo")
    until(lambda: running.state(device) == "4: ACTIVE", "the device is active again")
    until(running.deliver, "messages arrive again")


def test_for_undoes_the_fault(running: Running) -> None:
    device = running.device(2)
    shown = running.lab("break", "cable", device, "--for", "1").stdout
    assert " out " in next(line for line in shown.splitlines() if line.startswith(device))
    until(lambda: running.row(device)[1] == "in", "the cable is in again")
    until(lambda: running.state(device) == "4: ACTIVE", "the port comes up")


def test_killed_client_leaves_no_fault(running: Running) -> None:
    device = running.device(2)
    command = [*RDMA_LAB, "break", "cable", device, "--for", "1h", "--guest", running.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout
        assert client.stdout.readline()
        assert running.row(device)[1] == "out"
        client.kill()
    until(lambda: running.row(device)[1] == "in", "the cable is in again")
    until(lambda: running.state(device) == "4: ACTIVE", "the port comes up")


def managers(running: Running) -> tuple[faults.Manager, ...]:
    with control.connect(running.name) as guest:
        return faults.status(guest).managers or ()


def test_subnet_manager_incidents(running: Running) -> None:
    if running.fabric == "roce":
        refused = running.lab("break", "sm", "restart", status=2)
        assert "RoCE has no subnet manager" in refused.stderr
        return
    before = running.inside("pidof opensm")
    running.lab("break", "sm", "restart")
    assert running.inside("pidof opensm") != before
    assert managers(running) == (("softib1", "MASTER"),)
    running.lab("break", "sm", "failover")
    assert managers(running) == (("softib2", "MASTER"),)
    assert "SMINFO_MASTER" in running.inside("sminfo -C softib1")
    running.lab("break", "sm", "stop")
    assert managers(running) == ()
    running.lab("break", "--undo")
    assert managers(running) == (("softib1", "MASTER"),)
    until(running.deliver, "messages arrive again")


def test_refusals_name_what_there_is(running: Running) -> None:
    for words, said in (
        (("cable", "eth7"), f"no cable eth7 in this guest: there are {running.device(1)}, "),
        (("device",), "device: which one? There are "),
        (("plug",), "no fault plug: there are cable, port, device, loss, sm"),
        (("loss", "7"), "loss 7: give the part of the messages to lose"),
        (("sm", "restart", "--for", "1"), "--for undoes a fault later"),
    ):
        assert said in running.lab("break", *words, status=2).stderr


def tapping(running: Running, *words: str) -> subprocess.Popen[bytes]:
    """A tap that captures."""
    command = [*RDMA_LAB, "tap", "--guest", running.name, *words]
    tap = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert tap.stderr
    line = tap.stderr.readline()
    assert b"capturing the fabric" in line, line
    return tap


def decoded(path: Path) -> list[str]:
    """A line of tshark for each message of ibv_ud_pingpong, SEND Only of 1 KiB; the file must be whole."""
    shown = ("tshark", "-r", str(path), "-Y", "infiniband.bth.opcode == 100 && frame.len > 1000")
    done = subprocess.run(shown, capture_output=True, text=True, timeout=BOUND)
    assert done.returncode == 0, done.stderr
    assert "cut short" not in done.stderr
    return done.stdout.splitlines()


def test_tap_sees_every_message(running: Running, tmp_path: Path) -> None:
    """Five messages each way, each seen where it leaves and where it arrives; Ctrl-C ends with a summary."""
    file = tmp_path / "fabric.pcapng"
    tap = tapping(running, "-w", str(file))
    until(running.deliver, "messages arrive")
    tap.send_signal(signal.SIGINT)
    _, summary = tap.communicate(timeout=BOUND)
    assert tap.returncode == 0
    assert b"packets captured, none lost" in summary
    assert len(decoded(file)) >= 20


def test_tap_ends_after_a_count(running: Running) -> None:
    tap = tapping(running, "-c", "7")
    until(running.deliver, "messages arrive")
    data, summary = tap.communicate(timeout=BOUND)
    assert tap.returncode == 0
    assert b"7 packets captured" in summary
    assert data[:4] == b"\x0a\x0d\x0d\x0a"


def test_second_tap_is_refused(running: Running) -> None:
    tap = tapping(running)
    assert "another process taps this guest" in running.lab("tap", status=125).stderr
    tap.kill()
    tap.communicate(timeout=BOUND)
    again = tapping(running, "-c", "1")  # what the killed one left behind is not in its way
    until(running.deliver, "messages arrive")
    assert b"1 packet captured" in again.communicate(timeout=BOUND)[1]


def test_slow_reader_stops_nothing(running: Running) -> None:
    """Nobody reads the capture: messages arrive all the same. What found no room is counted, if any."""
    tap = tapping(running)
    for _ in range(3):
        assert running.deliver(count=400, seconds=38)
    tap.send_signal(signal.SIGINT)
    data, summary = tap.communicate(timeout=BOUND)
    assert tap.returncode == 0
    assert data[:4] == b"\x0a\x0d\x0d\x0a"
    lost = b"lost, because the reader was slow" in summary
    assert lost == (running.fabric == "infiniband"), summary  # RoCE has room for more in the kernel


def test_reader_that_goes_stops_nothing(running: Running) -> None:
    tap = tapping(running)
    assert tap.stdout
    tap.stdout.close()
    until(lambda: running.deliver() and tap.poll() is not None, "the tap ends")
    assert tap.returncode == 128 + signal.SIGPIPE
    tap.communicate(timeout=BOUND)
    assert running.deliver()


def test_stopped_qemu_is_a_bounded_error(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer that comes after all, when QEMU goes on, is not taken for the next one's."""
    monkeypatch.setattr(control, "ANSWER_TIMEOUT", 2.0)
    qemu = int(running.name.rpartition("-")[2])
    os.kill(qemu, signal.SIGSTOP)
    try:
        with control.connect(running.name) as guest, pytest.raises(LabTimeoutError, match="does not answer"):
            guest.run("echo late")
    finally:
        os.kill(qemu, signal.SIGCONT)
    monkeypatch.setattr(control, "ANSWER_TIMEOUT", BOUND)
    assert running.inside("echo next") == "next\n"


def test_killed_runner_leaves_a_stale_socket(running: Running) -> None:
    """The last test of a guest: the next client removes the socket, and says that there is no guest."""
    running.runner.kill()
    running.runner.wait(BOUND)
    socket = control.runtime_dir() / running.name
    assert socket.exists()
    refused = subprocess.run([*RDMA_LAB, "break"], capture_output=True, text=True, timeout=BOUND)
    assert refused.returncode == 125
    assert "no guest of yours is running and ready: start one" in refused.stderr
    assert not socket.exists()
