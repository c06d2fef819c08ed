"""Charts of docs/speed.md: the ratios of the last release, and transfers in virtual time.

python -m benchmarks.charts    # writes docs/assets/speed-*.svg; reads benchmarks/ratios.json
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "mcast"  # the same input gives the same file
import matplotlib.pyplot as plt  # noqa: E402

from benchmarks.ratios import stored  # noqa: E402
from mcast.testing.transfer import SimulatedTransfer, TransferSetup  # noqa: E402

ASSETS = Path(__file__).parents[1] / "docs" / "assets"
INK = "#757575"
"""Text and axes: 4.5 to 1 on white; site.css inverts the charts on a dark page."""
OURS, PEER = "#0b7bc1", "#c25400"

WIDTH = 4.4
"""Inches: text of 10 points is still 11 pixels high where a chart fills a screen of 400 pixels."""

BESIDE_C = {
    "batches, 64 bytes": "batch/64",
    "batches, 1024 bytes": "batch/1024",
    "two processes, 1024 bytes": "two-processes/1024",
    "registered memory, 1024 bytes": "registered/1024",
    "numpy, 1024 bytes": "numpy-own/1024",
    "asyncio on the descriptor": "asyncio/1024",
    "mcast.aio": "aio/1024",
    "one by one, 64 bytes": "single/64",
    "join and leave": "join-leave",
}
"""Label of a bar -> figure of benchmarks/rdma/compare.py, a rate beside C."""

BESIDE_SOCKETS = {
    "one by one, 64 bytes": "single/sim-roce/64",
    "one by one, 1024 bytes": "single/sim-roce/1024",
    "batches of 256, 64 bytes": "batch/sim-roce/64",
    "batches of 256, 1024 bytes": "batch/sim-roce/1024",
    "1 to 1000, 1024 bytes": "fan-out-1000/sim-roce/1024",
}
"""Label of a bar -> figure of benchmarks/test_sim.py, a rate beside UDP sockets."""

RECEIVERS = (1, 3, 10, 30, 100, 300, 1000)
LOSS, SIZE = 0.01, 16 << 20


def plain(axes: Any) -> None:
    """Draw in grey on no background, without a frame."""
    axes.tick_params(colors=INK)
    for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
        text.set_color(INK)
    for side, spine in axes.spines.items():
        spine.set_color(INK)
        spine.set_visible(side in ("left", "bottom"))


def save(figure: Any, name: str) -> None:
    figure.tight_layout(pad=0.3)
    figure.savefig(ASSETS / f"speed-{name}.svg", metadata={"Date": None}, transparent=True)


def bars(name: str, ratios: Mapping[str, float], peer: str, log: bool = False) -> None:
    """Draw one bar for each ratio, and a line at the peer's 1."""
    figure, axes = plt.subplots(figsize=(WIDTH, 0.7 + 0.28 * len(ratios)))
    axes.barh(range(len(ratios)), list(ratios.values()), color=OURS, height=0.6, log=log)
    for row, ratio in enumerate(ratios.values()):
        number = f" {ratio:.2f}" if ratio < 10 else f" {ratio:.0f}"
        axes.text(max(ratio, 1), row, number, va="center", color=INK)
    axes.axvline(1, color=PEER)
    right = max(1, *ratios.values())
    axes.set(yticks=range(len(ratios)), yticklabels=ratios, xlabel=f"rate, {peer} = 1")
    axes.set_xlim(0.5 if log else 0, right * (3 if log else 1.2))
    if log:
        axes.set_xticks([1, 10, 100], ["1", "10", "100"])
    axes.invert_yaxis()
    plain(axes)
    save(figure, name)


def transmissions(parity: bool) -> list[float]:
    """Return the transmissions of a segment for each number of receivers."""
    return [
        SimulatedTransfer(TransferSetup(count, LOSS, SIZE, parity=parity)).run().transmissions_per_segment
        for count in RECEIVERS
    ]


def receivers() -> None:
    """Draw how often a segment is sent to 1 to 1000 receivers."""
    figure, axes = plt.subplots(figsize=(WIDTH, 2.8))
    axes.plot(RECEIVERS, transmissions(True), "o-", color=OURS, label="with parity")
    axes.plot(RECEIVERS, transmissions(False), "o--", color=PEER, label="without parity")
    axes.set(
        xlabel="receivers, each loses 1 %", xscale="log", ylabel="transmissions of a segment", ylim=(0, None)
    )
    axes.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
    plain(axes)
    axes.legend(frameon=False, labelcolor=INK, loc="lower right")
    save(figure, "receivers")


def main() -> None:
    _, kept = stored()
    bars("rdma", {label: kept[f"rdma/{name}/C"] for label, name in BESIDE_C.items()}, "C")
    bars(
        "sim", {label: kept[f"sim/{name}"] for label, name in BESIDE_SOCKETS.items()}, "UDP sockets", log=True
    )
    receivers()


if __name__ == "__main__":
    main()
