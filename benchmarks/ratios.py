"""Ratios of our figures to a peer's in the same run: written by a run, compared with the last release's.

python benchmarks/ratios.py RUN.json [RUN.json ...]           # what moved since the last release
python benchmarks/ratios.py RUN.json ... --keep 0.2.0         # keep the medians as that release's

A run is a JSON object, name -> ratio, such as "sim/single/64": 1.4. Runs of one kind may be given several
times: the median of each name counts. A name says what is compared; whether more is better is its own affair.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median

STORE = Path(__file__).with_name("ratios.json")
"""{"release": "0.1.0", "ratios": {name: ratio}} of the last release."""

TOLERANCE = 0.1
"""A ratio that moved by less is within what three runs of one version differ by."""

Ratios = Mapping[str, float]


def write(path: Path, ratios: Ratios) -> None:
    """Write a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: round(ratio, 3) for name, ratio in ratios.items()}, indent=2) + "\n")


def read(paths: Iterable[Path]) -> dict[str, float]:
    """The median of each ratio over the runs."""
    found: dict[str, list[float]] = defaultdict(list)
    for path in paths:
        for name, ratio in json.loads(path.read_text()).items():
            found[name].append(ratio)
    return {name: median(values) for name, values in found.items()}


def stored(store: Path = STORE) -> tuple[str, dict[str, float]]:
    """The last release and its ratios; ("", {}) before the first."""
    if not store.exists():
        return "", {}
    last = json.loads(store.read_text())
    return last["release"], last["ratios"]


def keep(release: str, ratios: Ratios, store: Path = STORE) -> None:
    """Keep these ratios as the release's, and those of the last release that were not measured."""
    merged = {**stored(store)[1], **{name: round(ratio, 3) for name, ratio in ratios.items()}}
    store.write_text(
        json.dumps({"release": release, "ratios": dict(sorted(merged.items()))}, indent=2) + "\n"
    )


def moved(now: Ratios, before: Ratios) -> Iterator[str]:
    """A line for each ratio that is new or moved by more than `TOLERANCE`."""
    for name, ratio in now.items():
        was = before.get(name)
        if was is None:
            yield f"{name:44} {'new':>8} -> {ratio:8.2f}"
        elif abs(ratio / was - 1) > TOLERANCE:
            yield f"{name:44} {was:8.2f} -> {ratio:8.2f}  {ratio / was - 1:+.0%}"


def comparison(now: Ratios, store: Path = STORE) -> list[str]:
    """Return the changes since the last release, or one line saying that nothing did."""
    release, before = stored(store)
    since = f"release {release}" if release else "nothing stored yet"
    lines = list(moved(now, before))
    return [f"{len(lines)} of {len(now)} ratios moved by more than {TOLERANCE:.0%} since {since}", *lines]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare ratios with those of the last release.")
    parser.add_argument("run", nargs="+", type=Path, help="JSON: name -> ratio")
    parser.add_argument("--keep", metavar="RELEASE", help="keep them as this release's")
    given = parser.parse_args(arguments)
    ratios = read(given.run)
    print("\n".join(comparison(ratios)))
    if given.keep:
        keep(given.keep, ratios)
    return 0


if __name__ == "__main__":
    sys.exit(main())
