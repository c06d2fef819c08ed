"""Ours beside C, Debian's pyverbs, and PyPI's where it works, in one guest, interleaved, as ratios.

python -m benchmarks.rdma.compare [--rounds 5] [--json FILE]     boots the lab and measures there
python -m benchmarks.rdma.compare --here ...                     measures on this host's Soft-RoCE ports

Each peer is a process that reads a command a line and answers with a line of JSON; all sleep while one
measures. A round asks every peer for the same thing, one right after the other, in an order that turns;
the ratio of a round is ours to the peer's of that round, and the figure is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "bench"
PORTS = 4
ADDRESSES = [f"10.77.0.{number}" for number in range(1, PORTS + 1)]
PYVERBS = {"pyverbs": "/usr/bin/python3"}
"""The name of a peer -> a Python that has its pyverbs: Debian's, and PyPI's if this one can import it."""
try:  # it binds to private symbols: 59.0 needs the libibverbs of rdma-core 59, no older and no newer one
    import pyverbs.cmid  # noqa: F401
except ImportError:
    pass
else:
    PYVERBS["pyverbs-pypi"] = sys.executable

Answer = dict[str, Any]


class Peer:
    """A program that measures on command."""

    def __init__(self, *command: str) -> None:
        self.name = " ".join(command)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> Answer:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended: {self.process.wait()}")
        found: Answer = json.loads(line)
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)


class Figure(NamedTuple):
    """One comparison. `ours` and `theirs` are commands; `rate`: more is better, else seconds.

    target  what the ratio is to reach, or not to exceed for times
    """

    name: str
    ours: str
    theirs: str
    target: float
    peer: str = "C"
    rate: bool = True
    value: str = ""
    two: bool = False


SIZES = (64, 512, 1024)
FIGURES = (
    *(Figure(f"batch/{size}", f"batch {size} 8000", f"batch {size} 8000", 0.95) for size in SIZES),
    *(
        Figure(f"registered/{size}", f"registered {size} 8000", f"batch {size} 8000", 0.95)
        for size in (512, 1024)
    ),
    *(Figure(f"two-processes/{size}", f"{size} 8000", f"{size} 8000", 0.95, two=True) for size in SIZES),
    Figure("mixed-sizes", "batch 0 6000", "batch 0 6000", 0.95),
    *(Figure(f"numpy-slab/{size}", f"arrays {size} 8000", f"batch {size} 8000", 0.97) for size in SIZES),
    *(Figure(f"numpy-own/{size}", f"own_arrays {size} 8000", f"batch {size} 8000", 0.97) for size in SIZES),
    *(Figure(f"asyncio/{size}", f"fd_batch {size} 6000", f"batch {size} 6000", 0.85) for size in SIZES),
    *(Figure(f"aio/{size}", f"aio_batch {size} 6000", f"batch {size} 6000", 0.85) for size in (64, 1024)),
    *(Figure(f"single/{size}", f"single {size} 2000", f"single {size} 2000", 0.7) for size in SIZES),
    *(
        Figure(f"single/{size}", f"single {size} 2000", f"single {size} 2000", 1.5, peer)
        for peer in PYVERBS
        for size in SIZES
    ),
    Figure("round-trip/64", "pingpong 64 1000", "pingpong 64 1000", 1.15, rate=False, value="p50"),
    *(
        Figure("round-trip/64", "pingpong 64 1000", "pingpong 64 1000", 1.0, peer, False, "p50")
        for peer in PYVERBS
    ),
    Figure("asyncio-round-trip/64", "fd_pingpong 64 1000", "pingpong 64 1000", 2.0, rate=False, value="p50"),
    Figure("aio-round-trip/64", "aio_pingpong 64 150", "pingpong 64 1000", 2.0, rate=False, value="p50"),
    Figure("join-leave", "join 0 200", "join 0 200", 0.9),
    Figure("1000-groups", "groups 0 1000", "groups 0 1000", 1.15, rate=False, value="seconds"),
    Figure("1-to-3-ports", "batch 64 4000 3 3", "batch 64 4000 3 3", 0.95),
    Figure("1-to-8-qps", "batch 64 3000 8 1", "batch 64 3000 8 1", 0.95),
)


def ask(peer: Peer, command: str) -> Answer:
    peer.tell(command)
    return peer.hear()


def ask_two(sender: Peer, receiver: Peer, numbers: str) -> Answer:
    """One process receives, the other sends; the sender's clock counts, both count losses."""
    receiver.tell(f"receive {numbers}")
    receiver.hear()
    found = ask(sender, f"send {numbers}")
    received = receiver.hear()
    return {**found, "lost": max(found["lost"], received["lost"])}


def value_of(figure: Figure, answer: Answer) -> float:
    return float(answer["count"] / answer["seconds"] if figure.rate else answer[figure.value])


@contextmanager
def peers() -> Iterator[dict[str, list[Peer]]]:
    commands = {
        "C": [str(BUILD / "reference")],
        "ours": [sys.executable, str(HERE / "ours.py")],
        **{name: [python, str(HERE / "peer_pyverbs.py")] for name, python in PYVERBS.items()},
    }
    with ExitStack() as stack:
        made: dict[str, list[Peer]] = {}
        for name, command in commands.items():
            made[name] = [Peer(*command, *ADDRESSES) for _ in range(1 if name in PYVERBS else 2)]
            for peer in made[name]:
                stack.callback(peer.close)
        yield made


class Row(NamedTuple):
    figure: Figure
    ours: list[Answer]
    theirs: list[Answer]

    @property
    def ratios(self) -> list[float]:
        both = zip(self.ours, self.theirs, strict=True)
        return [value_of(self.figure, a) / value_of(self.figure, b) for a, b in both]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def met(self) -> bool:
        lost = sum(answer["lost"] for answer in self.ours)
        kept = self.ratio >= self.figure.target if self.figure.rate else self.ratio <= self.figure.target
        return kept and not lost


def measure(rounds: int, only: str) -> list[Row]:
    rows = [Row(figure, [], []) for figure in FIGURES if only in figure.name]
    with peers() as made:
        for number in range(rounds):
            for row in rows:
                turns: list[tuple[list[Answer], list[Peer], str]] = [
                    (row.ours, made["ours"], row.figure.ours),
                    (row.theirs, made[row.figure.peer], row.figure.theirs),
                ]
                for answers, who, command in turns if number % 2 else reversed(turns):
                    answers.append(
                        ask_two(who[0], who[1], command) if row.figure.two else ask(who[0], command)
                    )
    return rows


def alone(made: Callable[[], Peer], rounds: int) -> Answer:
    """Figures without a peer: a slow receiver beside a fast one, CPU while idle, memory."""
    peer = made()
    ratios = []
    for _ in range(rounds):
        quick, beside = ask(peer, "batch 64 6000 2 2"), ask(peer, "slow 64 6000")
        ratios.append(quick["seconds"] / beside["seconds"])
    idle, memory = ask(peer, "idle 0 3"), ask(peer, "memory 0 8")
    peer.close()
    return {
        "slow_beside_fast": median(ratios),
        "idle_cpu_percent": 100 * idle["cpu"] / idle["seconds"],
        "idle_wake_ups_per_s": idle["switches"] / idle["seconds"],
        "memory_per_qp": memory["each"],
        "slab": memory["slab"],
    }


def whole_programs() -> Answer:
    """Seconds from start to end of a program that sends 10 000 messages of 512 bytes to another one."""
    group, count, size = "239.9.1.9", 10_000, 512
    mckey = ["mckey", "-m", group, "-C", str(count), "-S", str(size)]
    receiver = subprocess.Popen([*mckey, "-b", ADDRESSES[1]], stdout=subprocess.DEVNULL)
    time.sleep(2)
    start = time.monotonic()
    subprocess.run([*mckey, "-s", "-b", ADDRESSES[0]], stdout=subprocess.DEVNULL, check=True, timeout=60)
    theirs = time.monotonic() - start
    try:
        receiver.wait(5)
    except subprocess.TimeoutExpired:
        receiver.kill()
    ours = Peer(sys.executable, str(HERE / "ours.py"), *ADDRESSES)
    other = Peer(sys.executable, str(HERE / "ours.py"), *ADDRESSES)
    other.tell(f"receive {size} {count}")
    other.hear()
    ours.close()
    start = time.monotonic()
    ours = Peer(sys.executable, str(HERE / "ours.py"), *ADDRESSES)
    sent = ask(ours, f"send {size} {count}")
    ours.close()
    seconds = time.monotonic() - start
    other.close()
    return {
        "mckey_s": theirs,
        "of_which_mckey_sleeps_s": 3.0,
        "ours_s": seconds,
        "ours_sending_s": sent["seconds"],
    }


def shown(row: Row) -> str:
    figure = row.figure
    ours, theirs = (median(value_of(figure, answer) for answer in side) for side in (row.ours, row.theirs))
    scale, unit = (1, "/s") if figure.rate else (1e6, "us")
    bound = f"{'>=' if figure.rate else '<='} {figure.target:g}"
    spread = f"{min(row.ratios):.2f}..{max(row.ratios):.2f}"
    return (
        f"{figure.name:22} {ours * scale:>9,.0f} {theirs * scale:>9,.0f} {unit} {figure.peer:12} "
        f"{row.ratio:5.2f} {spread:12} {bound:8}{'' if row.met else '!'}"
    ).rstrip()


def report(rows: Sequence[Row], more: Answer) -> Answer:
    print(f"{'':22} {'ours':>9} {'peer':>9}    {'':12} ratio spread       target")
    for row in rows:
        print(shown(row))
    print()
    for name, value in more.items():
        print(f"{name:28} {value:,.2f}")
    return {
        "machine": machine(),
        "figures": [
            {
                "name": row.figure.name,
                "peer": row.figure.peer,
                "rate": row.figure.rate,
                "target": row.figure.target,
                "ratio": row.ratio,
                "ratios": row.ratios,
                "met": row.met,
                "ours": row.ours,
                "theirs": row.theirs,
            }
            for row in rows
        ],
        "alone": more,
    }


def machine() -> Answer:
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "?")
    load = Path("/proc/loadavg").read_text().split()[:3]
    return {
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "cpu": cpu,
        "python": sys.version.split()[0],
        "load": load,
    }


def _cpuinfo() -> list[str]:
    return Path("/proc/cpuinfo").read_text().splitlines()


def ratios_of(found: Answer) -> dict[str, float]:
    """Figures of the regression guard: `rdma/NAME/PEER` -> ratio."""
    return {f"rdma/{one['name']}/{one['peer']}": one["ratio"] for one in found["figures"]}


def build() -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-O2", "-Wall", "-Wextra", "-o", str(BUILD / "reference"), str(HERE / "reference.c")]
    subprocess.run([*command, "-lrdmacm", "-libverbs"], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare with C and pyverbs on Soft-RoCE.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="figures whose name contains this")
    parser.add_argument("--json", type=Path, default=BUILD / "rdma.json", help="where to write all of it")
    parser.add_argument("--here", action="store_true", help="measure on this host: in the lab, that is")
    given = parser.parse_args()
    if given.here:
        rows = measure(given.rounds, given.only)
        whole = not given.only
        more = (
            alone(lambda: Peer(sys.executable, str(HERE / "ours.py"), *ADDRESSES), given.rounds)
            if whole
            else {}
        )
        found = report(rows, {**more, **(whole_programs() if whole else {})})
        given.json.write_text(json.dumps(found))
        return 0
    build()
    path = given.json.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    inside = [
        sys.executable,
        "-m",
        "benchmarks.rdma.compare",
        "--here",
        "--rounds",
        str(given.rounds),
        "--json",
        str(path),
    ]
    inside += ["--only", given.only] if given.only else []
    lab = [sys.executable, "-m", "mcast", "lab", "run", "--ports", str(PORTS), "--share", str(path.parent)]
    done = subprocess.run([*lab, "--", *inside], cwd=ROOT)
    if done.returncode == 0 and not given.only:
        ratios = path.with_suffix(".ratios.json")
        ratios.write_text(json.dumps(ratios_of(json.loads(path.read_text())), indent=1) + "\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
