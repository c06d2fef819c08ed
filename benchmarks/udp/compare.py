"""The speed of the provider `udp` beside its peers, natively, in turn in the same run, as ratios.

python -m benchmarks.udp.compare [--rounds 15] [--only batch] [--json FILE] [--keep FILE]

Every end is a process of its own, in a network namespace, and all sleep but those that measure. A round
asks each program for the same once, ours twice, in an order that turns. A ratio is of two measurements of
one round. Printed are the median of the rounds, the quartiles, and beside it those of ours to ours (A/A): a
difference that this shows, too, is none. Peers: reference.c, with UDP GSO and GRO ("offloads") and without
them ("mmsg"); Python's UDP multicast sockets; asyncio datagrams. It takes root, gcc and ISA-L (libisal2).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.ratios import write
from benchmarks.rdma.compare import BUILD, Answer, Peer, machine
from benchmarks.udp.hosts import LOOPBACK, address, hosts
from benchmarks.udp.peer import Credits

HERE = Path(__file__).parent
ROUNDS = 15
JUMBO = 9000

# --- what is measured --------------------------------------------------------------------------


def rate(found: Answer) -> float:
    """Messages a second."""
    return float(found["count"] / found["seconds"])


def per_cpu(found: Answer) -> float:
    """Messages that were delivered in a second of CPU of all ends."""
    return float(found["delivered"] / found["cpu"])


def seconds(found: Answer) -> float:
    """Of a round trip."""
    return float(found["seconds"])


def cpu_each(found: Answer) -> float:
    """Seconds of CPU of one operation."""
    return float(found["cpu"] / found["count"])


class Figure(NamedTuple):
    """One comparison.

    peer    the program beside ours, a key of PROGRAMS; "" where the value itself has the target
    value   what is compared
    target  what the ratio is to reach, or not to exceed where `value` is a time
    """

    name: str
    peer: str
    value: Callable[[Answer], float]
    target: float

    @property
    def is_time(self) -> bool:
        return self.value in (seconds, cpu_each)


class Work(NamedTuple):
    """What ends do together in one round: one that sends, and the others.

    commands   of the sender, and of each other one, without its place and the program's flag
    receivers  how many others there are
    on_one     True: all on one host's loopback; False: each on a host of its own
    """

    commands: tuple[str, str]
    receivers: int
    on_one: bool
    size: int
    messages: int
    figures: tuple[Figure, ...]


PROGRAMS = {"ours": ("ours", 0), "offloads": ("", 1), "mmsg": ("", 0), "sockets": ("sockets", 0)}
"""Name -> a kind of benchmarks.udp.peer, or "" for reference.c; and the flag at the end of its commands."""
SEND, TRIP = ("send", "receive"), ("ping", "echo")
WORKS = (
    Work(SEND, 1, False, 1024, 128_000, (
        Figure("batch/1024/offloads", "offloads", rate, 0.75), Figure("batch/1024/mmsg", "mmsg", rate, 4.0),
    )),
    Work(SEND, 1, False, 4096, 64_000, (
        Figure("batch/4096/offloads", "offloads", rate, 0.75), Figure("batch/4096/mmsg", "mmsg", rate, 2.0),
    )),
    Work(SEND, 3, False, 1024, 64_000, (Figure("1-to-3/1024/cpu", "offloads", per_cpu, 0.75),)),
    Work(SEND, 3, False, 4096, 32_000, (Figure("1-to-3/4096/cpu", "offloads", per_cpu, 0.75),)),
    Work(SEND, 1, True, 64, 16_000, (Figure("single/64", "sockets", rate, 1.0),)),
    Work(SEND, 1, True, 1024, 16_000, (Figure("single/1024", "sockets", rate, 1.0),)),
    Work(SEND, 8, True, 1024, 12_800, (
        Figure("1-to-8/1024/cpu", "sockets", per_cpu, 6.0), Figure("1-to-8/1024/rate", "sockets", rate, 0.0),
    )),
    Work(TRIP, 1, True, 64, 3_000, (Figure("round-trip/64", "sockets", seconds, 1.3),)),
    Work(TRIP, 1, True, 64, 1_500, (Figure("aio-round-trip/64", "sockets", seconds, 1.3),)),
    Work(("join", ""), 0, False, 0, 1_000, (Figure("join-leave/cpu", "", cpu_each, 100e-6),)),
)  # fmt: skip


def flag_of(program: str, work: Work) -> int:
    """Return the last number of the program's commands."""
    name = work.figures[0].name
    return int(name.startswith(("single", "aio"))) or PROGRAMS[program][1]


# --- the run ------------------------------------------------------------------------------------


class Bench:
    """The ends of one work, which stay for all rounds."""

    def __init__(self, work: Work, stack: ExitStack, directory: Path) -> None:
        self.work = work
        path = directory / "credits"
        path.write_bytes(bytes(Credits.BYTES))
        self.credits = Credits(path)
        places = 1 if work.on_one else 1 + work.receivers
        made = stack.enter_context(hosts(places, 1500 if work.size <= 1024 else JUMBO))
        self.ends: dict[str, list[Peer]] = {}
        kinds = {PROGRAMS[name][0] for name in self.programs()}
        for kind in sorted(kinds):
            ends = self.ends[kind] = []
            for number in range(1 + work.receivers):
                host = made[0 if work.on_one else number]
                at = LOOPBACK if work.on_one else address(number)
                start = (
                    [sys.executable, "-m", "benchmarks.udp.peer", kind]
                    if kind
                    else [str(BUILD / "udp-reference")]
                )
                ends.append(Peer(*host.command(*start, at, str(path))))
                stack.callback(ends[-1].close)

    def programs(self) -> list[str]:
        """Return the programs that take part: ours, and each peer."""
        return ["ours", *dict.fromkeys(figure.peer for figure in self.work.figures if figure.peer)]

    def run(self, program: str) -> Answer:
        """Let one program do the work once."""
        work, flag = self.work, flag_of(program, self.work)
        sender, *others = self.ends[PROGRAMS[program][0]]
        does, reacts = work.commands
        rest = f"{work.size} {work.messages} {flag}"
        self.credits.clear()
        for place, other in enumerate(others):
            other.tell(f"{reacts} {place} {rest}")
            other.hear()
        sender.tell(f"{does} {len(others)} {rest}")
        found, ended = sender.hear(), [other.hear() for other in others]
        found["sender_cpu"] = found["cpu"]
        found["cpu"] += sum(one.get("cpu", 0.0) for one in ended)
        found["delivered"] = sum(one["count"] for one in ended)
        found["lost"] = len(others) * work.messages - found["delivered"]
        found["drops"] = [one.get("drops", {}) for one in ended]
        return found


class Row(NamedTuple):
    """A figure, and what was measured: ours, ours again, and the peer's, one of each for a round."""

    figure: Figure
    ours: list[Answer]
    again: list[Answer]
    theirs: list[Answer]

    def values(self, answers: list[Answer]) -> list[float]:
        return [self.figure.value(answer) for answer in answers]

    def ratios(self, more: list[Answer], less: list[Answer]) -> list[float]:
        return [a / b for a, b in zip(self.values(more), self.values(less), strict=True)]

    @property
    def measured(self) -> list[float]:
        """What has the target: ratios, or the values themselves."""
        return self.ratios(self.ours, self.theirs) if self.figure.peer else self.values(self.ours)

    @property
    def is_met(self) -> bool:
        found = median(self.measured)
        return found <= self.figure.target if self.figure.is_time else found >= self.figure.target


def measure(work: Work, rounds: int) -> list[Row]:
    with TemporaryDirectory(prefix="mcast-") as directory, ExitStack() as stack:
        bench = Bench(work, stack, Path(directory))
        order = [*bench.programs(), "again"]
        answers: dict[str, list[Answer]] = {name: [] for name in order}
        for program in bench.programs():
            bench.run(program)
        for number in range(rounds):
            turn = number % len(order)
            for name in order[turn:] + order[:turn]:
                answers[name].append(bench.run("ours" if name == "again" else name))
    return [
        Row(figure, answers["ours"], answers["again"], answers.get(figure.peer, []))
        for figure in work.figures
    ]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third one."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


def spread(values: Sequence[float]) -> str:
    low, middle, high = quartiles(values)
    return f"{middle:5.2f} ({low:.2f} to {high:.2f})"


HEADING = f"{'ours to the peer':20} {'target':>8} {'median (quartiles)':22} {'A/A':22} lost"


def shown(row: Row) -> Iterator[str]:
    figure = row.figure
    scale = 1.0 if figure.peer else 1e6
    bound = f"{'<=' if figure.is_time else '>='} {figure.target * scale:g}" if figure.target else "-"
    lost = f"{sum(one['lost'] for one in row.ours)}/{sum(one['lost'] for one in row.theirs)}"
    ratio, same = spread([value * scale for value in row.measured]), spread(row.ratios(row.again, row.ours))
    missed = "" if row.is_met else "  missed"
    yield f"{figure.name:20} {bound:>8} {ratio:22} {same:22} {lost}{missed}"
    if drops := [drops for one in row.ours for drops in one["drops"] if drops]:
        yield f"{'':20} lost by ours, as it counts them: {drops}"
    if figure.peer:
        ours, theirs = median(row.values(row.ours)), median(row.values(row.theirs))
        unit = "us" if figure.is_time else "/s" if figure.value is rate else "/CPU s"
        by = 1e6 if figure.is_time else 1.0
        yield f"{'':20} {ours * by:,.0f} {unit}, {figure.peer} {theirs * by:,.0f} {unit}{cpu_of(row)}"


def cpu_of(row: Row) -> str:
    """Microseconds of CPU of a message: the sender's, and each receiver's."""
    if "delivered" not in row.ours[0] or row.figure.is_time:
        return ""

    def of(answers: list[Answer]) -> str:
        sender = median(one["sender_cpu"] / one["count"] for one in answers) * 1e6
        others = median((one["cpu"] - one["sender_cpu"]) / max(one["delivered"], 1) for one in answers) * 1e6
        return f"{sender:.2f}+{others:.2f}"

    return f"; CPU us {of(row.ours)}, {of(row.theirs)}"


def build() -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    command = [
        "gcc",
        "-O2",
        "-Wall",
        "-Wextra",
        "-o",
        str(BUILD / "udp-reference"),
        str(HERE / "reference.c"),
    ]
    subprocess.run([*command, "-ldl"], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", help="figures whose name contains this")
    parser.add_argument("--json", type=Path, default=BUILD / "udp.json", help="where to write all of it")
    parser.add_argument(
        "--keep", type=Path, help="write the ratios there, as benchmarks/ratios.py reads them"
    )
    given = parser.parse_args()
    build()
    print(HEADING)
    rows: list[Row] = []
    for work in WORKS:
        if any(given.only in figure.name for figure in work.figures):
            found = measure(work, given.rounds)
            rows += found
            for row in found:
                print("\n".join(shown(row)), flush=True)
    given.json.write_text(json.dumps({"machine": machine(), "figures": [as_json(row) for row in rows]}))
    if given.keep is not None:
        write(given.keep, {f"udp/{row.figure.name}": median(row.measured) for row in rows if row.figure.peer})
    return 0


def as_json(row: Row) -> Answer:
    figure = row.figure
    return {
        "name": figure.name,
        "peer": figure.peer,
        "target": figure.target,
        "is_time": figure.is_time,
        "met": row.is_met,
        "quartiles": quartiles(row.measured),
        "same_quartiles": quartiles(row.ratios(row.again, row.ours)),
        "ours": row.ours,
        "again": row.again,
        "theirs": row.theirs,
    }


if __name__ == "__main__":
    sys.exit(main())
