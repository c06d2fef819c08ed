"""The summary of a benchmark run: each figure as a rate, its ratio to its peer, and what moved."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))
from benchmarks import ratios  # noqa: E402

RUN = ROOT / "build" / "bench" / "sim.ratios.json"


@pytest.hookimpl(trylast=True)  # below the table of pytest-benchmark
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: Any) -> None:
    session = getattr(config, "_benchmarksession", None)
    benches = [bench for bench in (session.benchmarks if session else ()) if bench.stats]
    rates = [bench for bench in benches if "operations" in bench.extra_info]
    grown = [bench for bench in benches if "growth" in bench.extra_info]
    if rates:
        terminalreporter.section(
            "operations a second in the fastest round; ratio to the peer: median, spread"
        )
    for bench in rates:
        rate = bench.extra_info["operations"] / bench.stats.min
        _, *ratio = bench.extra_info.get("ratio", ("", 0.0, 0.0, 0.0))
        shown = "{:8.2f} x  {:.2f}..{:.2f}".format(*ratio) if ratio[0] else ""
        terminalreporter.line(f"{bench.name:32} {rate:14,.0f} /s {shown}")
    if grown:
        terminalreporter.section("from 1 000 to 100 000 memberships")
    for bench in grown:
        for name, value in bench.extra_info["growth"].items():
            terminalreporter.line(f"{bench.name:32} {name:28} {value:10,.3f}")
    found = dict(bench.extra_info["ratio"][:2] for bench in rates if "ratio" in bench.extra_info)
    if found:
        ratios.write(RUN, found)
        terminalreporter.section("since the last release")
        for line in ratios.comparison(found):
            terminalreporter.line(line)
