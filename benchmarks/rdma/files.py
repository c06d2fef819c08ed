"""A file to three receivers in the lab, beside uftp, udpcast and NORM on the same bridge.

python -m benchmarks.rdma.files [--size 256e6] [--loss 0,1] [--mtu 1500] [--rounds 3]    boots the lab
python -m benchmarks.rdma.files --here ...                                             in the lab, that is

Each is a whole program with its receivers: `mcast send` and `mcast recv` on Soft-RoCE, and uftp, udpcast
and NORM on UDP sockets. The peers are in network namespaces, each with a port of its own on the bridge
that Soft-RoCE is on. The receivers are there before the clock starts. The clock starts with the sender's
process and stops at its end, when all receivers have said that they have the file. Each copy is compared
with the file. A round has one transfer by each, one right after the other, in an order that turns.
`--loss` drops so many percent of the packets to each receiver, by itself, with netem. `--mtu` is that of
all links, and each program sends packets as long as that allows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from filecmp import cmp
from pathlib import Path
from shutil import rmtree
from statistics import median
from typing import Any, NamedTuple

from benchmarks.rdma.compare import ADDRESSES, BUILD, ROOT, machine

GROUP, RECEIVERS = "239.1.1.1", 3
JOINED, UFTP_JOINED, UDPCAST_BOUND, NORM_JOINED = "010101EF", "010404E6", ":2328 ", "090101EF"
"""GROUP, 230.4.4.1 and 239.1.1.9, as /proc/net/igmp prints them; port 9000, as /proc/net/udp does."""

ROOM = Path("/run/files")
GIVE_UP = 3600.0
"""Seconds for a transfer, which a guest without KVM may need."""

READY = 120.0
"""Seconds until receivers are there, or copies whole after their sender's end."""

MTU = 1500
UFTP_HEADERS, UDPCAST_HEADERS, NORM_HEADERS = 200, 44, 100
"""Bytes of the MTU that each leaves for headers, by its manual or by its default for Ethernet."""


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def host(number: int) -> str:
    """Of a peer; 0 is the sender's."""
    return f"host{number}"


def make_hosts(mtu: int) -> None:
    """A namespace for each process of the peers, with a port on the bridge; all links have that MTU."""
    for number in range(1, len(ADDRESSES) + 1):
        for link in (f"e{number}", f"p{number}"):
            run("ip", "link", "set", link, "mtu", str(mtu))
    for number in range(RECEIVERS + 1):
        name, inside, port = host(number), f"u{number}", f"q{number}"
        run("ip", "netns", "add", name)
        both = f"link add {inside} mtu {mtu} type veth peer name {port} mtu {mtu}"
        run("ip", *both.split())
        run("ip", "link", "set", inside, "netns", name)
        run("ip", "link", "set", port, "master", "br0", "up")
        for words in (
            f"addr add 10.77.1.{number + 1}/24 broadcast + dev {inside}",
            f"link set {inside} up",
            "link set lo up",
            f"route add 224.0.0.0/4 dev {inside}",
        ):
            run("ip", "-n", name, *words.split())


def lose(percent: float) -> None:
    """Drop so many of the packets that the bridge sends to each receiver, of whatever program."""
    for number in range(1, RECEIVERS + 1):
        for port in (f"p{number + 1}", f"q{number}"):
            subprocess.run(
                ["tc", "qdisc", "del", "dev", port, "root"], stderr=subprocess.DEVNULL, check=False
            )
            if percent:
                run("tc", "qdisc", "add", "dev", port, "root", "netem", "loss", f"{percent}%")


def until(holds: Callable[[], bool]) -> bool:
    """Return True if that came true in time."""
    end = time.monotonic() + READY
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def all_show(table: str, text: str) -> Callable[[], bool]:
    """Return True if the file of /proc/net has the text in each namespace of a receiver."""

    def found(number: int) -> bool:
        command = in_host(number, "cat", f"/proc/net/{table}")
        return text in subprocess.run(command, capture_output=True, text=True, check=True).stdout

    return lambda: all(map(found, range(1, RECEIVERS + 1)))


def in_host(number: int, *command: str) -> list[str]:
    return ["ip", "netns", "exec", host(number), *command]


class Program(NamedTuple):
    """`receive` of a number and a folder and `send` of a file, where links have that MTU, are commands;
    `is_ready` tells of receivers."""

    receive: Callable[[int, Path], Sequence[str]]
    send: Callable[[Path, int], Sequence[str]]
    is_ready: Callable[[], bool]


OURS = [sys.executable, "-m", "mcast"]
NORM = [sys.executable, "-m", "benchmarks.rdma.norm"]
PROGRAMS = {
    "mcast": Program(
        lambda n, into: [
            *OURS, "recv", GROUP, "--backend", "rdma", "--bind", ADDRESSES[n], "-o", f"{into}/",
        ],
        lambda file, _: [
            *OURS, "send", str(file), GROUP, "--backend", "rdma", "--bind", ADDRESSES[0],
            "--receivers", str(RECEIVERS),
        ],
        lambda: Path("/proc/net/igmp").read_text().count(JOINED) >= RECEIVERS,
    ),
    "uftp": Program(
        lambda n, into: in_host(
            n, "uftpd", "-d", "-I", f"u{n}", "-U", f"0x{n:08x}", "-D", str(into), "-B", "8388608", "-x", "1",
        ),
        lambda file, mtu: in_host(
            0, "uftp", "-I", "u0", "-R", "-1", "-b", str(mtu - UFTP_HEADERS), "-B", "8388608",
            "-x", "1", "-H", ",".join(f"0x{n:08x}" for n in range(1, RECEIVERS + 1)), str(file),
        ),
        all_show("igmp", UFTP_JOINED),
    ),
    "udpcast": Program(
        lambda n, into: in_host(
            n, "udp-receiver", "--nokbd", "--interface", f"u{n}", "--file", str(into / "file"),
        ),
        lambda file, mtu: in_host(
            0, "udp-sender", "--nokbd", "--no-progress", "--full-duplex", "--interface", "u0",
            "--min-receivers", str(RECEIVERS), "--blocksize", str(mtu - UDPCAST_HEADERS), "--file", str(file),
        ),
        all_show("udp", UDPCAST_BOUND),
    ),
    "norm": Program(
        lambda n, into: in_host(
            n, *NORM, "receive", str(into), "--interface", f"u{n}", "--node", str(n),
        ),
        lambda file, mtu: in_host(
            0, *NORM, "send", str(file), "--interface", "u0", "--receivers", str(RECEIVERS),
            "--segment", str(mtu - NORM_HEADERS),
        ),
        all_show("igmp", NORM_JOINED),
    ),
}  # fmt: skip


@contextmanager
def receivers(program: Program, folders: Sequence[Path], log: Path) -> Iterator[None]:
    with ExitStack() as stack, log.open("ab") as said:
        for number, folder in enumerate(folders, 1):
            folder.mkdir(parents=True)
            command = program.receive(number, folder)
            one = subprocess.Popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL)
            stack.callback(one.wait)
            stack.callback(one.terminate)
        if not until(program.is_ready):
            raise SystemExit(f"the receivers are not there:\n{log.read_text()[-2000:]}")
        yield


def transfer(name: str, file: Path, mtu: int) -> float | None:
    """Seconds, or None if a copy is not there or is another one."""
    program, log = PROGRAMS[name], ROOM / f"{name}.log"
    folders = [ROOM / name / str(number) for number in range(1, RECEIVERS + 1)]
    copies, size = [folder / file.name for folder in folders], file.stat().st_size

    def is_there(copy: Path) -> bool:
        return copy.exists() and copy.stat().st_size == size

    try:
        with receivers(program, folders, log), log.open("ab") as said:
            start = time.monotonic()
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    program.send(file, mtu),
                    stdout=said,
                    stderr=said,
                    stdin=subprocess.DEVNULL,
                    timeout=GIVE_UP,
                )
            seconds = time.monotonic() - start
            until(lambda: all(map(is_there, copies)))
        if all(is_there(copy) and cmp(copy, file, shallow=False) for copy in copies):
            return seconds
        print(log.read_text()[-2000:], file=sys.stderr)
        return None
    finally:
        rmtree(ROOM / name, ignore_errors=True)


def measure(
    size: int, losses: Sequence[float], rounds: int, names: Sequence[str], mtu: int
) -> dict[str, Any]:
    """loss -> program -> seconds of each round."""
    ROOM.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=90%", "files", str(ROOM))
    file = ROOM / "file"
    file.write_bytes(os.urandom(size))
    make_hosts(mtu)
    found: dict[str, Any] = {}
    for loss in losses:
        lose(loss)
        times: dict[str, list[float | None]] = {name: [] for name in names}
        for number in range(rounds):
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):
                times[name].append(transfer(name, file, mtu))
                print(f"loss {loss:g} %: {name:8} {times[name][-1]} s", file=sys.stderr, flush=True)
        found[f"{loss:g}"] = times
    return found


def report(found: dict[str, Any], size: int) -> None:
    print(f"{'loss':>6} {'program':8} {'seconds':>9} {'MB/s':>7} {'to ours':>8}")
    for loss, times in found.items():
        ours = times.get("mcast", [])
        for name, seconds in times.items():
            whole = [one for one in seconds if one is not None]
            if not whole:
                print(f"{loss:>4} % {name:8} no transfer was whole")
                continue
            pairs = [theirs / own for theirs, own in zip(seconds, ours, strict=False) if theirs and own]
            ratio = f"{median(pairs):8.2f}" if pairs else ""
            rate = size / median(whole) / 1e6
            print(f"{loss:>4} % {name:8} {median(whole):9.1f} {rate:7.2f} {ratio}".rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description="A file to three receivers, beside uftp, udpcast and NORM.")
    parser.add_argument("--size", type=lambda text: int(float(text)), default=256_000_000, help="bytes")
    parser.add_argument("--loss", default="0,1", help="percent, one or several")
    parser.add_argument("--mtu", type=int, default=MTU, help="of all links")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(PROGRAMS), help="programs")
    parser.add_argument("--json", type=Path, default=BUILD / "files.json")
    parser.add_argument("--here", action="store_true", help="measure on this host: in the lab, that is")
    given = parser.parse_args()
    if given.here:
        losses = [float(one) for one in given.loss.split(",")]
        found = measure(given.size, losses, given.rounds, given.only.split(","), given.mtu)
        report(found, given.size)
        about = {"machine": machine(), "size": given.size, "mtu": given.mtu}
        given.json.write_text(json.dumps({**about, "seconds": found}))
        return 0
    path = given.json.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    inside = [sys.executable, "-m", "benchmarks.rdma.files", "--here", "--json", str(path)]
    inside += [
        f"--size={given.size}",
        f"--loss={given.loss}",
        f"--mtu={given.mtu}",
        f"--rounds={given.rounds}",
        f"--only={given.only}",
    ]
    memory = 1024 + given.size * (RECEIVERS + 1) * 5 // 4 // 2**20
    lab = [
        sys.executable,
        "-m",
        "mcast",
        "lab",
        "run",
        "--ports",
        str(len(ADDRESSES)),
        "--memory",
        f"{memory}M",
    ]
    return subprocess.run([*lab, "--share", str(path.parent), "--", *inside], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
