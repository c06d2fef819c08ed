"""Commands in a real guest, and that no guest outlives its caller.

Without QEMU these fail, with the line that installs it.
"""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rdma_lab import GuestPanicError, LabMachine, LabResult, LabTimeoutError, kernels

from .test_machine import Answering

COMMAND = [sys.executable, "-c", "from rdma_lab.__main__ import main; main()"]

VISIT = r"""
import json, os, pathlib, socket, subprocess, sys, time

def out(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

def joined(group, address):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    request = socket.inet_aton(group) + socket.inet_aton(address)
    s.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, request)
    return s

def packets(port):
    return int(pathlib.Path(f"/sys/class/net/{port}/statistics/tx_packets").read_text())

bridge = pathlib.Path("/sys/class/net/br0/bridge")
print("first", flush=True)
heard = pathlib.Path(sys.argv[1], "heard")
while not heard.exists():  # which the host makes when it has read that: output comes while the command runs
    time.sleep(0.1)
member = joined("239.1.2.3", "10.77.0.2")
for _ in range(50):
    mdb = json.loads(out("bridge", "-j", "mdb", "show"))[0]["mdb"]
    if any(entry["grp"] == "239.1.2.3" for entry in mdb):
        break
    time.sleep(0.1)
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("10.77.0.1"))
before = {port: packets(port) for port in ("p2", "p3")}
for _ in range(100):
    sender.sendto(b"x", ("239.1.2.3", 9))
time.sleep(0.2)
found = {
    "rdma": json.loads(out("rdma", "-j", "link")),
    "addresses": json.loads(out("ip", "-j", "addr")),
    "bridge": json.loads(out("ip", "-j", "-d", "link", "show", "br0"))[0]["linkinfo"]["info_data"],
    "response_interval": int(bridge.joinpath("multicast_query_response_interval").read_text()),
    "mdb": mdb,
    "igmp": pathlib.Path("/proc/net/igmp").read_text(),
    "forwarded": {port: packets(port) - count for port, count in before.items()},
    "cwd": os.getcwd(),
    "lab": os.environ.get("RDMA_LAB"),
    "seed": os.environ.get("MCAST_SEED"),
    "uverbs": sorted(os.listdir("/dev/infiniband")),
    "cpus": os.cpu_count(),
    "cmdline": pathlib.Path("/proc/cmdline").read_text().split(),
    "stdin": sys.stdin.read(),
    "accept_local": pathlib.Path("/proc/sys/net/ipv4/conf/e1/accept_local").read_text().strip(),
}
shared, private = sys.argv[1:]
pathlib.Path(shared, "found.json").write_text(json.dumps(found))
pathlib.Path(private, "lost").write_text("written in the guest")
assert pathlib.Path(private, "lost").exists()
print("last", flush=True)
print("a complaint", file=sys.stderr, flush=True)
pathlib.Path("/dev/stderr").write_text("another\n")
sys.exit(3)
"""


@dataclass(frozen=True)
class Visit:
    result: LabResult
    found: dict[str, Any]
    out: bytes
    err: str
    cwd: Path
    private: Path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache that has no guest yet; the kernel's image, which takes seconds to unpack, is there."""
    home = tmp_path_factory.mktemp("cache")
    image = kernels.boot_image(kernels.find())
    folder = home / "rdma-lab"
    folder.mkdir(parents=True)
    (folder / image.name).symlink_to(image)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        yield folder


@pytest.fixture(scope="module")
def visit(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Visit:
    """One boot with everything to look at."""
    shared, private = (tmp_path_factory.mktemp(name) for name in ("shared", "private"))
    out, err = Answering(b"first", shared / "heard"), io.BytesIO()
    result = LabMachine(ports=3, share=[shared]).run(
        ["python3", "-c", VISIT, str(shared), str(private)],
        output_timeout=300,
        stdout=out,
        stderr=err,
        cwd=private,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "MCAST_SEED": "7"},
    )
    found = json.loads((shared / "found.json").read_text())
    return Visit(result, found, out.getvalue(), err.getvalue().decode(), private, private)


def test_exit_code_and_output_come_through(visit: Visit) -> None:
    assert visit.result.exit_code == 3
    assert visit.out == b"first\nlast\n"
    assert visit.err == "a complaint\nanother\n"


def test_every_port_has_its_device(visit: Visit) -> None:
    links = {link["ifname"]: (link["netdev"], link["state"]) for link in visit.found["rdma"]}
    assert links == {f"rxe{i}": (f"e{i}", "ACTIVE") for i in (1, 2, 3)}
    assert visit.found["uverbs"] == ["rdma_cm", "uverbs0", "uverbs1", "uverbs2"]


def test_every_port_has_its_addresses(visit: Visit) -> None:
    addresses = {
        link["ifname"]: [f"{info['local']}/{info['prefixlen']}" for info in link["addr_info"]]
        for link in visit.found["addresses"]
    }
    for i in (1, 2, 3):
        assert {f"10.77.0.{i}/24", f"fd77::{i}/64"} <= set(addresses[f"e{i}"])
    assert visit.found["accept_local"] == "1"


def test_the_bridge_snoops_and_queries(visit: Visit) -> None:
    assert visit.found["bridge"]["mcast_snooping"] == 1
    assert visit.found["bridge"]["mcast_querier"] == 1
    assert visit.found["response_interval"] == 1000, "the default again, in 1/100 s"


def test_membership_reaches_the_bridge(visit: Visit) -> None:
    """A membership is in the bridge and steers packets."""
    members = [entry["port"] for entry in visit.found["mdb"] if entry["grp"] == "239.1.2.3"]
    assert members == ["p2"]
    assert "030201EF" in visit.found["igmp"]
    assert visit.found["forwarded"]["p2"] >= 100
    assert visit.found["forwarded"]["p3"] < 20, "not flooded, from the first packet on"


def test_the_command_has_its_directory_and_environment(visit: Visit) -> None:
    assert (visit.found["cwd"], visit.found["seed"], visit.found["lab"]) == (str(visit.cwd), "7", "1")
    assert visit.found["stdin"] == ""
    assert visit.found["cpus"] == 2


def test_emulated_guest_boots_under_load(visit: Visit) -> None:
    """An emulated guest boots beside whatever else runs here."""
    assert ("no_timer_check" in visit.found["cmdline"]) is not visit.result.kvm


def test_only_what_is_shared_is_written_here(visit: Visit) -> None:
    assert list(visit.private.iterdir()) == []


AGAIN = """
cat /proc/sys/kernel/random/uuid
date +%s
rdma link
head -c 400000 /dev/zero | tr '\\0' x
"""


class SlowReader(io.BytesIO):
    """A pager, say: the guest has ended long before all is read."""

    def write(self, data: Any) -> int:
        time.sleep(0.5)
        return super().write(data)


class Again(NamedTuple):
    """A further run of the machine of the visit: its result, what it wrote, and when it began and ended."""

    result: LabResult
    said: list[str]
    began: float
    ended: float


@pytest.fixture(scope="module")
def again(visit: Visit, tmp_path_factory: pytest.TempPathFactory) -> Again:
    out, began = SlowReader(), time.time()
    machine = LabMachine(ports=3, share=[tmp_path_factory.mktemp("another")])
    result = machine.run(["sh", "-c", AGAIN], output_timeout=300, stdout=out)
    return Again(result, out.getvalue().decode().splitlines(), began, time.time())


def test_second_guest_is_resumed(visit: Visit, again: Again, cache: Path) -> None:
    """The first guest is booted and the next resumed where it stood."""
    assert (visit.result.resumed, again.result.resumed, again.result.exit_code) == (False, True, 0)
    links = [line.split()[1] for line in again.said if line.startswith("link ")]
    assert links == ["rxe1/1", "rxe2/1", "rxe3/1"]
    assert len(list((cache / "guests").iterdir())) == 1


def test_a_slow_reader_gets_all_of_the_output(again: Again) -> None:
    assert again.said[-1] == "x" * 400_000


def test_a_resumed_guest_knows_the_time(again: Again) -> None:
    assert int(again.began) <= int(again.said[1]) <= again.ended, "not that at which it was kept"


WITHOUT_HOSTS = """
mount -t tmpfs tmpfs "$0" && mkdir "$0/upper" "$0/work" &&
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$0/upper,workdir=$0/work" /etc &&
rm -f /etc/hosts && exec "$@"
"""
"""Runs a command in a mount namespace that has no /etc/hosts, by way of the directory $0."""


def test_localhost_is_known_where_hosts_is_missing(again: Again, tmp_path: Path) -> None:
    """A new root file system has no /etc/hosts; without a line for its host, fi_pingpong finds no address."""
    lab = [sys.executable, "-m", "rdma_lab", "run", "--ports", "3", "--output-timeout", "300", "--"]
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", WITHOUT_HOSTS, str(tmp_path), *lab]
    script = "hostname; getent ahostsv4 $(hostname)"
    done = subprocess.run([*command, "sh", "-c", script], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    name, address, *_ = done.stdout.split()
    assert (name, address) == ("localhost", "127.0.0.1")


def test_a_panic_is_reported_with_the_console(again: Again, tmp_path: Path) -> None:
    out, console = io.BytesIO(), tmp_path / "console.txt"
    script = "cat /proc/sys/kernel/random/uuid; echo first >/dev/kmsg; echo c >/proc/sysrq-trigger"
    with pytest.raises(GuestPanicError, match="panicked: sysrq triggered crash") as raised:
        LabMachine(ports=3, share=[tmp_path]).run(
            ["sh", "-c", script], output_timeout=300, stdout=out, console=console
        )
    assert "Kernel panic" in raised.value.console[0]
    assert any("sysrq_handle_crash" in line for line in raised.value.console), "who called"
    printed = console.read_text().splitlines()
    assert any(line.endswith("] first") for line in printed)
    assert printed[-1] == raised.value.console[-1]
    # This guest and the one above came from one file.
    assert out.getvalue().decode().split() != again.said[:1], "but they draw other random numbers"


def ended_after(seconds: int) -> LabTimeoutError:
    with pytest.raises(LabTimeoutError, match=f"not ready in {seconds} s") as raised:
        LabMachine(boot_timeout=seconds, anew=True).run(["true"])
    return raised.value


def test_late_boot_is_ended_with_the_console() -> None:
    """A boot that takes too long is ended with the console."""
    seconds = 2
    while not ended_after(seconds).console:  # a slow emulator writes its first line later
        seconds *= 2


def test_a_command_that_takes_too_long_is_ended(again: Again, tmp_path: Path) -> None:
    """In the guest that is kept: another would be booted."""
    with pytest.raises(LabTimeoutError, match="not done in 1 s"):
        LabMachine(ports=3, share=[tmp_path]).run(["sleep", "1000"], timeout=1)


def qemus(mark: Path) -> list[int]:
    """The processes of machines whose job directory is under `mark`."""

    def command(pid: str) -> str:
        try:
            return Path("/proc", pid, "cmdline").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return ""

    pids = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [
        int(pid) for pid in pids if "qemu-system" in (line := command(pid)) and f"{mark}/rdma-lab-" in line
    ]


def until(holds: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`mcast lab run` with a guest that is just starting."""
    process = subprocess.Popen(
        [*COMMAND, "run", "--", "sleep", "1000"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert until(lambda: bool(qemus(tmp_path)) or process.poll() is not None, 300)
        assert process.poll() is None, process.communicate()[1]
        yield process
    finally:
        process.kill()
        process.communicate()
        for pid in qemus(tmp_path):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_the_guest(
    running: subprocess.Popen[str], tmp_path: Path, sent: int, status: int
) -> None:
    running.send_signal(sent)
    _, err = running.communicate(timeout=100)
    assert running.returncode == status
    assert "Traceback" not in err
    assert qemus(tmp_path) == []
    assert list(tmp_path.iterdir()) == [], "the job directory is gone"


def test_a_killed_caller_takes_the_guest_with_it(running: subprocess.Popen[str], tmp_path: Path) -> None:
    running.kill()
    assert until(lambda: qemus(tmp_path) == [], 100)


def test_a_shell_has_a_terminal_and_its_exit_code() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["SHELL"] = "/bin/sh"
        os.execv(COMMAND[0], [*COMMAND, "shell"])
    said = b""
    typed = False
    end = time.monotonic() + 500
    try:
        while time.monotonic() < end:
            try:
                said += os.read(terminal, 4096)
            except OSError:  # the other end is closed
                break
            if not typed and b"# " in said:
                os.write(terminal, b"tty; rdma link; exit 6\n")
                typed = True
    finally:
        if time.monotonic() >= end:
            os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
    assert b"/dev/ttyS0" in said, said
    assert b"rxe1/1 state ACTIVE" in said
    assert os.waitstatus_to_exitcode(status) == 6
