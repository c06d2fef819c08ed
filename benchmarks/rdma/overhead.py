"""Cost of a message outside the kernel: ours and C on the scripted card (tests/card), on this host.

python -m benchmarks.rdma.overhead [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from itertools import chain, count
from pathlib import Path
from statistics import median

from benchmarks.rdma.compare import BUILD, ROOT, build
from tests.card.build import build as build_card

COMMANDS = {
    "batch/64": ("batch 64 1000000", "batch 64 1000000"),
    "batch/1024": ("batch 1024 1000000", "batch 1024 1000000"),
    "registered/1024": ("registered 1024 1000000", "batch 1024 1000000"),
    "numpy-slab/64": ("arrays 64 1000000", "batch 64 1000000"),
    "numpy-slab/1024": ("arrays 1024 1000000", "batch 1024 1000000"),
    "numpy-own/64": ("own_arrays 64 1000000", "batch 64 1000000"),
    "numpy-own/1024": ("own_arrays 1024 1000000", "batch 1024 1000000"),
    "asyncio/64": ("fd_batch 64 500000", "batch 64 1000000"),
    "aio/64": ("aio_batch 64 128000", "batch 64 1000000"),
    "single/64": ("single 64 200000", "single 64 200000"),
    "round-trip/64": ("pingpong 64 100000", "pingpong 64 100000"),
    "asyncio-round-trip/64": ("fd_pingpong 64 50000", "pingpong 64 100000"),
    "aio-round-trip/64": ("aio_pingpong 64 5000", "pingpong 64 100000"),
    "join-leave": ("join 0 5000", "join 0 100000"),
    "1000-groups": ("groups 0 1000", "groups 0 1000"),
}
"""Name -> our command, and C's."""

LATE = {"2 us": 2_000, "20 us": 20_000, "2 ms": 2_000_000}
"""Delay until a send is seen to be complete, in nanoseconds."""

CALLS = {"send_one": 1, "batch of 32": 32}
"""A call -> how many messages it sends."""

LATE_TITLES = ("ours", "ours waiting", "C", "C waiting", "ours/C", "gain")
"""Microseconds a message; ours to C's without waiting, and ours with waiting to ours without."""

ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")


def microseconds(command: list[str], environment: dict[str, str], lines: list[str]) -> list[float]:
    """Of one operation, for each line."""
    said = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        input="\n".join(lines),
        text=True,
        stdout=-1,
        check=True,
    )
    found = [json.loads(line) for line in said.stdout.splitlines()]
    assert not any(one["lost"] for one in found)
    return [one["seconds"] / one["count"] * 1e6 for one in found]


def late_lines() -> dict[str, list[str]]:
    """Return figure -> the lines for sends that wait for room, and for the completion of each call."""
    found = {}
    for late, nanoseconds in LATE.items():
        calls = 2000 + 200_000_000 // (nanoseconds + 2_000)  # fewer where each takes longer
        for call, chunk in CALLS.items():
            rest = f"{nanoseconds} {chunk}"
            waited = min(calls, 400_000_000 // nanoseconds)
            found[f"{call}, {late} late"] = [
                f"late 64 {calls * chunk} {rest}",
                f"late_waited 64 {waited * chunk} {rest}",
            ]
    return found


def late_row(rounds: list[tuple[float, ...]]) -> dict[str, float]:
    """Medians over the rounds, each with four times: ours and C's, without waiting and with it."""
    values = [median(column) for column in zip(*rounds, strict=True)]
    values.append(median(ours / c for ours, _, c, _ in rounds))
    values.append(median(waiting / ours for ours, waiting, _, _ in rounds))
    return dict(zip(LATE_TITLES, values, strict=True))


def show_late(found: dict[str, dict[str, float]]) -> None:
    """Print the gain of not waiting for completions, and the distance from C that does the same."""
    print(f"\n{'us for each message':24} " + " ".join(f"{title:>12}" for title in LATE_TITLES))
    for name, one in found.items():
        print(f"{name:24} " + " ".join(f"{value:12.3f}" for value in one.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=BUILD / "overhead.json")
    given = parser.parse_args()
    build()
    library = str(build_card())
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    late = late_lines()
    late_both = list(chain.from_iterable(late.values()))
    for _ in range(given.rounds):
        null = {"MCAST_LIBRDMACM": library, "MCAST_LIBIBVERBS": library}
        lines = [line for line, _ in COMMANDS.values()] + late_both
        ours.append(
            microseconds([sys.executable, "-m", "benchmarks.rdma.ours", "--null", *ADDRESSES], null, lines)
        )
        lines = [line for _, line in COMMANDS.values()] + late_both
        theirs.append(microseconds([str(BUILD / "reference"), *ADDRESSES], {"LD_PRELOAD": library}, lines))
    rounds = list(zip(ours, theirs, strict=True))
    found = {
        name: {"ours": median(our[place] for our, _ in rounds), "C": median(c[place] for _, c in rounds)}
        for place, name in enumerate(COMMANDS)
    }
    late_found = {
        name: late_row([(*our[place : place + 2], *their[place : place + 2]) for our, their in rounds])
        for name, place in zip(late, count(len(COMMANDS), 2), strict=False)
    }
    print(f"{'us for each':24} {'ours':>8} {'C':>8} {'Python':>8}")
    for name, one in found.items():
        print(f"{name:24} {one['ours']:8.3f} {one['C']:8.3f} {one['ours'] - one['C']:8.3f}")
    show_late(late_found)
    given.json.write_text(json.dumps(found | late_found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
