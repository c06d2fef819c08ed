"""What a message costs outside the kernel: ours and C on a card made of memory (tests/card), on this host.

python -m benchmarks.rdma.overhead [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=BUILD / "overhead.json")
    given = parser.parse_args()
    build()
    library = str(build_card())
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    for _ in range(given.rounds):
        null = {"MCAST_LIBRDMACM": library, "MCAST_LIBIBVERBS": library}
        lines = [line for line, _ in COMMANDS.values()]
        ours.append(
            microseconds([sys.executable, "-m", "benchmarks.rdma.ours", "--null", *ADDRESSES], null, lines)
        )
        lines = [line for _, line in COMMANDS.values()]
        theirs.append(microseconds([str(BUILD / "reference"), *ADDRESSES], {"LD_PRELOAD": library}, lines))
    found = {
        name: {"ours": median(our), "C": median(their)}
        for name, our, their in zip(COMMANDS, zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)
    }
    print(f"{'us for each':24} {'ours':>8} {'C':>8} {'Python':>8}")
    for name, one in found.items():
        print(f"{name:24} {one['ours']:8.3f} {one['C']:8.3f} {one['ours'] - one['C']:8.3f}")
    given.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
