"""The plots of docs/performance.md and its table, from the JSON of one or more runs of compare.

python -m benchmarks.rdma.plot RUN.json [RUN.json ...]    writes docs/assets/performance-*.svg, prints a table
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "mcast"  # the same input gives the same file
import matplotlib.pyplot as plt  # noqa: E402

ASSETS = Path(__file__).parents[2] / "docs" / "assets"
COLOURS = {"C": "#555555", "mcast": "#0072b2", "pyverbs": "#d55e00", "mcast, asyncio": "#009e73"}

Run = dict[str, Any]


def answers(runs: list[Run], name: str, side: str, peer: str = "C") -> list[dict[str, Any]]:
    """Return the answers of one side to a figure, in all rounds of all runs."""
    chosen = (one for run in runs for one in run["figures"] if (one["name"], one["peer"]) == (name, peer))
    return [answer for one in chosen for answer in one[side]]


def rate(found: list[dict[str, Any]]) -> float:
    return float(median(answer["count"] / answer["seconds"] for answer in found))


def save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(ASSETS / f"performance-{name}.svg", metadata={"Date": None})


def rate_by_size(runs: list[Run]) -> None:
    sizes = (64, 512, 1024)
    figure, axes = plt.subplots(figsize=(7, 4))
    lines = (
        ("C", "batch", "theirs", "C", "-"),
        ("mcast", "batch", "ours", "C", "-"),
        ("mcast, asyncio", "asyncio", "ours", "C", "-"),
        ("C", "single", "theirs", "C", "--"),
        ("mcast", "single", "ours", "C", "--"),
        ("pyverbs", "single", "theirs", "pyverbs", "--"),
    )
    for who, what, side, peer, style in lines:
        rates = [rate(answers(runs, f"{what}/{size}", side, peer)) / 1000 for size in sizes]
        label = f"{who}, {'one by one' if what == 'single' else 'batches'}"
        axes.plot(sizes, rates, style, marker="o", label=label, color=COLOURS[who])
    axes.set(xlabel="bytes in a message", ylabel="1 000 messages/s", xticks=sizes, ylim=(0, None))
    axes.set_title("One sender, one receiver, one process (emulated guest)")
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, "rate")


def latency(runs: list[Run]) -> None:
    figure, axes = plt.subplots(figsize=(7, 4))
    lines = (
        ("C", "round-trip/64", "theirs", "C"),
        ("mcast", "round-trip/64", "ours", "C"),
        ("mcast, asyncio", "asyncio-round-trip/64", "ours", "C"),
        ("pyverbs", "round-trip/64", "theirs", "pyverbs"),
    )
    for who, what, side, peer in lines:
        found = [answer["all"] for answer in answers(runs, what, side, peer)]
        points = [median(at) * 1e6 for at in zip(*found, strict=True)]
        axes.plot(points, range(len(points)), label=who, color=COLOURS[who])
    axes.set(xlabel="microseconds, there and back, 64 bytes", ylabel="percent of the messages", xscale="log")
    axes.set_title("Round trip in one process (emulated guest)")
    axes.legend(frameon=False, fontsize="small")
    save(figure, "latency")


def members(runs: list[Run]) -> None:
    figure, axes = plt.subplots(figsize=(7, 4))
    points = (("batch/64", 1), ("1-to-3-ports", 3), ("1-to-8-qps", 8))
    for who, side in (("C", "theirs"), ("mcast", "ours")):
        each = [1e6 / (rate(answers(runs, name, side)) * count) for name, count in points]
        axes.plot([count for _, count in points], each, marker="o", label=who, color=COLOURS[who])
    axes.set(xlabel="receivers (3: on a bridge, 8: on one device)", ylabel="microseconds a delivery")
    axes.set(xticks=[count for _, count in points], ylim=(0, None))
    axes.set_title("Cost of a delivery by members, 64 bytes (emulated guest)")
    axes.legend(frameon=False, fontsize="small")
    save(figure, "members")


def table(runs: list[Run]) -> Iterator[str]:
    """Markdown: each figure's ratio in each run, with the spread of all rounds."""
    columns = [f"run {number}" for number in range(1, len(runs) + 1)]
    yield f"| figure | peer | target | {' | '.join(columns)} | spread |"
    yield "|---|---|---|" + "---|" * (len(runs) + 1)
    for index, one in enumerate(runs[0]["figures"]):
        same = [run["figures"][index] for run in runs]
        target = f"{'≥' if one['rate'] else '≤'} {one['target']:g}"
        rounds = [ratio for figure in same for ratio in figure["ratios"]]
        ratios = " | ".join(f"{figure['ratio']:.2f}" for figure in same)
        spread = f"{min(rounds):.2f} to {max(rounds):.2f}"
        yield f"| {one['name']} | {one['peer']} | {target} | {ratios} | {spread} |"


def main() -> int:
    runs = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    if not runs:
        print(__doc__)
        return 2
    ASSETS.mkdir(parents=True, exist_ok=True)
    rate_by_size(runs)
    latency(runs)
    members(runs)
    print("\n".join(table(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
