"""A file to three hosts beside uftp and udpcast, natively, in turn in the same run, as ratios.

python -m benchmarks.udp.files [--size 256] [--mtu 1500,9000] [--loss 0,1] [--rounds 15] [--json FILE]

Each is a whole program with its receivers, all by UDP sockets, each in a network namespace on one bridge.
The receivers wait before the clock starts. It starts with the sender's process, and stops at its end,
when all receivers have said that they have the file; the CPU time is that of all ends, from their start to
their end. Each copy is compared with the file: a transfer that leaves another one is told, and has no time.
A round has one transfer by each program, ours twice, in an order that turns. Printed are the medians of the
ratios of a round, with the quartiles, and beside it those of ours to ours (A/A). Loss is by nftables at each
receiver's ingress; a packet of UDP GSO is lost as a whole there. It takes root, nft, uftp and udpcast.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from filecmp import cmp
from pathlib import Path
from shutil import rmtree
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.rdma.compare import BUILD, machine
from benchmarks.rdma.files import JOINED, UDPCAST_BOUND, UFTP_JOINED, until
from benchmarks.udp.hosts import Namespace, address, hosts

GROUP, RECEIVERS = "239.1.1.1", 3
GIVE_UP = 120.0
"""Seconds for a transfer: udpcast hangs now and then."""

BUFFER = str(100 * 2**20)
"""Bytes of the socket buffers of uftp: its fastest sane options ask for as much."""

UFTP_BLOCK = {1500: 1400, 9000: 8800}
UDPCAST_HEADERS = 44
"""Bytes of the MTU that it leaves for headers, by its default for Ethernet."""


class Program(NamedTuple):
    """`receive` of a number and a folder, and `send` of a file where links have that MTU, are commands.

    The receivers are there when a file of /proc/net, `table`, shows `mark` in the namespace of each.
    """

    receive: Callable[[int, Path], Sequence[str]]
    send: Callable[[Path, int], Sequence[str]]
    table: str
    mark: str


OURS = [sys.executable, "-m", "mcast"]
NUMBERS = [f"0x{n:08x}" for n in range(1, RECEIVERS + 1)]
PROGRAMS = {
    "mcast": Program(
        lambda n, into: [*OURS, "recv", GROUP, "--backend", "udp", "-b", address(n), "-o", f"{into}/"],
        lambda file, _: [
            *OURS, "send", str(file), GROUP, "--backend", "udp", "-b", address(0), "-n", str(RECEIVERS),
        ],
        "igmp", JOINED,
    ),
    "uftp": Program(
        lambda n, into: [
            "uftpd", "-d", "-q", "-I", "eth0", "-U", f"0x{n:08x}", "-D", str(into), "-B", BUFFER,
        ],
        lambda file, mtu: [
            "uftp", "-q", "-I", "eth0", "-R", "-1", "-B", BUFFER, "-r", "0.01:0.001:0.1", "-s", "10",
            "-b", str(UFTP_BLOCK[mtu]), "-H", ",".join(NUMBERS), str(file),
        ],
        "igmp", UFTP_JOINED,
    ),
    "udpcast": Program(
        lambda n, into: [
            "udp-receiver", "--nokbd", "--interface", "eth0", "--file", str(into / "file"),
        ],
        lambda file, mtu: [
            "udp-sender", "--nokbd", "--no-progress", "--full-duplex", "--nopointopoint",
            "--interface", "eth0", "--min-receivers", str(RECEIVERS),
            "--blocksize", str(mtu - UDPCAST_HEADERS), "--file", str(file),
        ],
        "udp", UDPCAST_BOUND,
    ),
}  # fmt: skip


class Cost(NamedTuple):
    """Seconds; seconds of CPU of all ends."""

    seconds: float
    cpu: float


def lose(found: Sequence[Namespace], percent: float) -> None:
    """Drop so many of the packets that reach each receiver."""
    rule = f"numgen random mod 1000 < {percent * 10:.0f} udp dport != 0 drop"
    table = "add table netdev lossy; delete table netdev lossy;"
    if percent:
        chain = '{ type filter hook ingress device "eth0" priority 0; }'
        table += f"add table netdev lossy; add chain netdev lossy in {chain}; add rule netdev lossy in {rule}"
    for one in found[1:]:
        one.run("nft", table)


def shows(host: Namespace, table: str, mark: str) -> bool:
    command = host.command("cat", f"/proc/net/{table}")
    return mark in subprocess.run(command, capture_output=True, text=True, check=True).stdout


@contextmanager
def receivers(
    program: Program, found: Sequence[Namespace], folders: Sequence[Path], log: Path
) -> Iterator[None]:
    ends: list[int] = []
    with ExitStack() as stack, log.open("ab") as said:
        for number, folder in enumerate(folders, 1):
            folder.mkdir(parents=True)
            command = found[number].command(*program.receive(number, folder))
            one = subprocess.Popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL)
            stack.callback(one.wait)
            stack.callback(one.terminate)
            ends.append(one.pid)
        if not until(lambda: all(shows(one, program.table, program.mark) for one in found[1:])):
            raise SystemExit(f"the receivers are not there:\n{log.read_text()[-2000:]}")
        until(lambda: not any(map(works, ends)))
        yield


def works(pid: int) -> bool:
    """Return True if the process uses the processor within a moment, as one does that is still starting."""
    schedule = Path(f"/proc/{pid}/schedstat")
    before = schedule.read_text().split()[0]
    time.sleep(0.2)
    return schedule.read_text().split()[0] != before


def transfer(name: str, file: Path, mtu: int, found: Sequence[Namespace], room: Path) -> Cost | None:
    """What it has cost, or None if a copy is not there or is another one."""
    program, log = PROGRAMS[name], room / f"{name}.log"
    folders = [room / name / str(number) for number in range(1, RECEIVERS + 1)]
    copies, size = [folder / file.name for folder in folders], file.stat().st_size
    before = used()

    def is_there(copy: Path) -> bool:
        return copy.exists() and copy.stat().st_size == size

    try:
        with receivers(program, found, folders, log), log.open("ab") as said:
            start = time.monotonic()
            command = found[0].command(*program.send(file, mtu))
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL, timeout=GIVE_UP)
            seconds = time.monotonic() - start
            until(lambda: all(map(is_there, copies)) or seconds > GIVE_UP)
        cost = Cost(seconds, used() - before)
        if all(is_there(copy) and cmp(copy, file, shallow=False) for copy in copies):
            return cost
        print(log.read_text()[-2000:], file=sys.stderr)
        return None
    finally:
        rmtree(room / name, ignore_errors=True)


def used() -> float:
    """Seconds of CPU of the processes that have ended."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


Rounds = list[dict[str, Cost | None]]


def measure(
    size: int, mtu: int, losses: Sequence[float], rounds: int, names: Sequence[str]
) -> dict[str, Rounds]:
    """loss -> rounds; a round has the cost by program, and "again", that of ours once more."""
    found: dict[str, Rounds] = {}
    turns = ["mcast", *(name for name in names if name != "mcast"), "again"]
    with TemporaryDirectory(prefix="mcast-", dir="/dev/shm") as folder, hosts(RECEIVERS + 1, mtu) as where:
        file = Path(folder, "file")
        file.write_bytes(os.urandom(size))
        for loss in losses:
            lose(where, loss)
            made = found[f"{loss:g}"] = []
            for number in range(rounds):
                at = number % len(turns)
                costs: dict[str, Cost | None] = {}
                for name in (*turns[at:], *turns[:at]):
                    program = "mcast" if name == "again" else name
                    cost = costs[name] = transfer(program, file, mtu, where, Path(folder))
                    said = "not whole" if cost is None else f"{cost.seconds:.2f} s, CPU {cost.cpu:.2f} s"
                    print(f"MTU {mtu}, loss {loss:g} %: {name:8} {said}", file=sys.stderr, flush=True)
                made.append(costs)
    return found


def ratios(rounds: Rounds, name: str, of: Callable[[Cost], float]) -> str:
    """Return the median of the ratios of ours to that program's, with the quartiles."""
    both = [(one["mcast"], one[name]) for one in rounds]
    found = [of(ours) / of(theirs) for ours, theirs in both if ours and theirs]
    if len(found) < 2:
        return "-"
    low, middle, high = quantiles(found, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def report(mtu: int, found: dict[str, Rounds]) -> None:
    for loss, rounds in found.items():
        print(f"\nMTU {mtu}, loss {loss} %: ours to theirs, median of {len(rounds)} rounds (quartiles)")
        print(f"{'':8} {'seconds':>8} {'CPU':>6} {'whole':>6}  {'time':18} {'CPU':18}")
        for name in rounds[0]:
            costs = [cost for one in rounds if (cost := one[name])]
            if not costs:
                print(f"{name:8} no transfer was whole")
                continue
            seconds, cpu = (median(column) for column in zip(*costs, strict=True))
            compared = [ratios(rounds, name, of) for of in (lambda one: one.seconds, lambda one: one.cpu)]
            whole = f"{len(costs)}/{len(rounds)}"
            beside = "" if name == "mcast" else "  {:18} {:18}".format(*compared).rstrip()
            print(f"{name:8} {seconds:8.2f} {cpu:6.2f} {whole:>6}{beside}")


def numbers(text: str) -> list[float]:
    return [float(one) for one in text.split(",")]


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    words.add_argument("--size", type=int, default=256, help="MiB")
    words.add_argument("--mtu", type=numbers, default=[1500, 9000], help="of all links, one or several")
    words.add_argument("--loss", type=numbers, default=[0, 1], help="percent, one or several")
    words.add_argument("--rounds", type=int, default=15)
    words.add_argument("--only", default="uftp,udpcast", help="peers")
    words.add_argument("--json", type=Path, default=BUILD / "udp-files.json")
    asked = words.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it each of our processes would compile itself
    found: dict[str, Any] = {}
    for mtu in map(int, asked.mtu):
        found[str(mtu)] = measure(asked.size << 20, mtu, asked.loss, asked.rounds, asked.only.split(","))
        report(mtu, found[str(mtu)])
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps({"machine": machine(), "MiB": asked.size, "cost": found}))


if __name__ == "__main__":
    main()
