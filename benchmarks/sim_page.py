"""The tables and the plots of docs/performance-simulator.md.

pytest benchmarks/test_sim.py --benchmark-timer=time.process_time --benchmark-json=sim1.json
pytest benchmarks/test_scale.py --benchmark-json=scale1.json
python -m benchmarks.sim_page sim*.json scale*.json    # docs/assets/simulator-*.svg; prints the tables
"""

from __future__ import annotations

import cProfile
import json
import pstats
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "mcast"  # the same input gives the same file
import matplotlib.pyplot as plt  # noqa: E402

from benchmarks.test_sim import BATCH, FAN_OUT, GROUP, PORTS, drain, event_of, joined  # noqa: E402
from mcast import Backend, open_backend  # noqa: E402

ASSETS = Path(__file__).parents[1] / "docs" / "assets"
INK = "#808080"
"""Text and axes: a grey that can be read on white and on black."""

COLOURS = ("#2f8ac4", "#d55e00", "#009e73", "#b9860b", "#b0609a", "#808080", "#5f6fd0")

Bench = dict[str, Any]


def benches(runs: list[dict[str, Any]]) -> dict[str, list[Bench]]:
    """Name of a benchmark -> what each run found."""
    found: dict[str, list[Bench]] = defaultdict(list)
    for run in runs:
        for bench in run["benchmarks"]:
            found[bench["name"]].append(bench)
    return found


def rates(found: dict[str, list[Bench]]) -> Iterator[str]:
    """Markdown: operations in a second of CPU, the median round of each run, and the middle half of all."""
    yield "| benchmark | run 1 | run 2 | run 3 | middle half of the rounds | to UDP | spread |"
    yield "|---|---|---|---|---|---|---|"
    for name, runs in found.items():
        if "operations" not in runs[0]["extra_info"]:
            continue
        each = [(one["extra_info"]["operations"], one["stats"]) for one in runs]
        medians = " | ".join(f"{count / stats['median']:,.0f}" for count, stats in each)
        low, high = (
            pick(count / stats[quarter] for count, stats in each)
            for pick, quarter in ((min, "q3"), (max, "q1"))
        )
        shown = "| |"
        if "ratio" in runs[0]["extra_info"]:
            ratios = [one["extra_info"]["ratio"] for one in runs]
            medium = ", ".join(f"{ratio[1]:.2f}" for ratio in ratios)
            shown = f"{medium} | {min(r[2] for r in ratios):.2f} to {max(r[3] for r in ratios):.2f} |"
        yield f"| {name} | {medians} | {low:,.0f} to {high:,.0f} | {shown}"


def growth(found: dict[str, list[Bench]]) -> Iterator[str]:
    """Markdown: what grows, in each run."""
    yield "| benchmark | what | run 1 | run 2 | run 3 |"
    yield "|---|---|---|---|---|"
    for name, runs in found.items():
        each = [one["extra_info"]["growth"] for one in runs if "growth" in one["extra_info"]]
        for what in each[0] if each else ():
            yield f"| {name} | {what} | {' | '.join(f'{one[what]:,.3g}' for one in each)} |"


# --- where the time goes -----------------------------------------------------------------

PARTS = {
    "cm_id.py": "the contract",
    "closing.py": "the contract",
    "queue_pair.py": "the contract",
    "addresses.py": "the contract",
    "backend.py": "lock, hand-over, time",
    "clock.py": "lock, hand-over, time",
    "cm.py": "ids and events",
    "sa.py": "the SA",
    "mcmember.py": "the SA",
    "sa_client.py": "the port's SA client",
    "sa_exchange.py": "the port's SA client",
    "delivery.py": "routes, tables, attach",
    "forwarding.py": "routes, tables, attach",
    "hosts.py": "routes, tables, attach",
    "igmp.py": "routes, tables, attach",
    "port.py": "routes, tables, attach",
    "queue_pairs.py": "routes, tables, attach",
    "receivers.py": "routes, tables, attach",
    "subnet.py": "routes, tables, attach",
    "switching.py": "routes, tables, attach",
    "topology.py": "routes, tables, attach",
    "qp.py": "queue pairs, batches",
    "lease.py": "queue pairs, batches",
    "batch.py": "queue pairs, batches",
}
"""File -> the part of the package that it is."""


def joining(backend: Backend) -> Callable[[], None]:
    """A join with its event, and a leave, of a group without members."""
    channel = backend.event_channel()
    cm_id = channel.create_id()
    cm_id.bind_addr("10.0.0.1")
    cm_id.create_qp()

    def join_and_leave() -> None:
        cm_id.join_multicast(GROUP)
        event_of(channel)
        cm_id.leave_multicast(GROUP)

    return join_and_leave


def paths() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the paths that are profiled: name, and one round."""
    with open_backend("sim-roce", ports=1 + PORTS) as backend:
        sender, to, (receiver,) = joined(backend, 1)
        payloads = [bytes(1024)] * BATCH

        def pair() -> None:
            sender.send_one(to, payloads[0])
            receiver.recv_one(5)

        def batch() -> None:
            sender.send(to, payloads)
            drain(receiver, BATCH)

        yield "send_one, recv_one", pair
        yield f"a batch of {BATCH}", batch
    with open_backend("sim-roce", ports=1 + PORTS) as backend:
        source, where, receivers = joined(backend, FAN_OUT)
        copies = [bytes(1024)] * 64

        def fan_out() -> None:
            source.send(where, copies)
            for one in receivers:
                drain(one, len(copies))

        yield f"64 to {FAN_OUT:,}", fan_out
    for fabric in ("sim-roce", "sim-ib"):
        with open_backend(fabric, ports=2) as backend:
            yield f"join, leave: {fabric}", joining(backend)


def _profile(work: Callable[[], object], rounds: int) -> pstats.Stats:
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(rounds):
        work()
    profile.disable()
    return pstats.Stats(profile)


def profiled(work: Callable[[], object], rounds: int) -> tuple[dict[str, float], list[str], float]:
    """Share of each part, the functions that take most, and Python calls in a round.

    Of nine profiles the fastest, which other work has disturbed least. What is written in C counts as its
    caller's; the loop of the benchmark itself is left out.
    """
    profiles = [_profile(work, rounds) for _ in range(9)]
    fastest = min(profiles, key=lambda one: one.total_tt)  # type: ignore[attr-defined]
    stats: dict[tuple[str, int, str], Any] = fastest.stats  # type: ignore[attr-defined]
    own: defaultdict[tuple[str, str], float] = defaultdict(float)
    for at, (_, _, seconds, _, callers) in stats.items():
        if Path(at[0]).name in PARTS:
            own[Path(at[0]).name, at[2]] += seconds
        else:  # C, or what dataclasses and named tuples write
            for caller, (_, _, part, _) in callers.items():
                if Path(caller[0]).name in PARTS:
                    own[Path(caller[0]).name, caller[2]] += part
    total = sum(own.values())
    shares: defaultdict[str, float] = defaultdict(float)
    for (name, _), seconds in own.items():
        shares[PARTS[name]] += seconds / total
    most = sorted(own.items(), key=lambda item: -item[1])[:6]
    shown = [f"`{Path(name).stem}.{function}` {part / total:.0%}" for (name, function), part in most]
    calls = sum(value[1] for at, value in stats.items() if at[0] != "~")
    return shares, shown, calls / rounds


def save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(ASSETS / f"simulator-{name}.svg", metadata={"Date": None}, transparent=True)


def plain(axes: Any) -> None:
    """Grey ink on no ground, and no frame."""
    axes.tick_params(colors=INK)
    for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
        text.set_color(INK)
    for side, spine in axes.spines.items():
        spine.set_color(INK)
        spine.set_visible(side in ("left", "bottom"))


def plot_shares(found: dict[str, dict[str, float]]) -> None:
    figure, axes = plt.subplots(figsize=(8, 3.6))
    parts = list(dict.fromkeys(PARTS.values()))
    colours = dict(zip(parts, COLOURS, strict=True))
    for row, shares in enumerate(found.values()):
        left = 0.0
        for part in parts:
            width = 100 * shares.get(part, 0)
            axes.barh(row, width, left=left, color=colours[part], label=None if row else part)
            if width >= 7:
                axes.text(left + width / 2, row, f"{width:.0f}", ha="center", va="center", color="white")
            left += width
    axes.set(yticks=range(len(found)), yticklabels=found, xlabel="percent of the time", xlim=(0, 100))
    axes.invert_yaxis()
    plain(axes)
    axes.legend(frameon=False, fontsize="small", labelcolor=INK, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, "shares")


def plot_growth(found: dict[str, list[Bench]]) -> None:
    figure, axes = plt.subplots(figsize=(8, 4))
    for fabric, colour in zip(("sim-roce", "sim-ib"), COLOURS, strict=False):
        runs = [one["extra_info"]["cpu"] for one in found[f"test_growth[{fabric}]"]]
        for of, label, alpha in ((fabric, fabric, 1.0), ("floor", f"the floor of {fabric}", 0.55)):
            sizes = sorted(map(int, runs[0][of]))
            costs = {size: [run[of][str(size)] for run in runs] for size in sizes}  # in all, the collector's
            whole = [median(all_ for all_, _ in costs[size]) / size * 1e6 for size in sizes]
            without = [median(all_ - part for all_, part in costs[size]) / size * 1e6 for size in sizes]
            axes.plot(sizes, whole, "o-", color=colour, alpha=alpha, label=label)
            axes.plot(sizes, without, "o--", color=colour, alpha=alpha, label="  without the collector")
    axes.set(xlabel="memberships", xscale="log", ylabel="µs of CPU for each, join to leave", ylim=(0, None))
    plain(axes)
    axes.legend(frameon=False, fontsize="small", labelcolor=INK, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, "growth")


def main() -> int:
    found = benches([json.loads(Path(name).read_text()) for name in sys.argv[1:]])
    if not found:
        print(__doc__)
        return 2
    print(*rates(found), "", *growth(found), "", sep="\n")
    shares = {}
    print("| path | Python calls | the functions that take most |\n|---|---|---|")
    for name, work in paths():
        shares[name], most, calls = profiled(work, 20 if name.startswith("64") else 2000)
        print(f"| {name} | {calls:,.0f} | {', '.join(most)} |")
    plot_shares(shares)
    plot_growth(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
