"""The summary of a benchmark run: each figure as a rate, and its ratio to UDP sockets in the same run."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.hookimpl(trylast=True)  # below the table of pytest-benchmark
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: Any) -> None:
    session = getattr(config, "_benchmarksession", None)
    figures = {
        bench.name: bench.extra_info["operations"] / bench.stats.min
        for bench in (session.benchmarks if session else ())
        if bench.stats and "operations" in bench.extra_info
    }
    if not figures:
        return
    terminalreporter.section("operations a second in the fastest round, and the ratio to UDP")
    for name, rate in figures.items():
        size = name.partition("[")[2].rstrip("]").rpartition("-")[2]
        udp = figures.get(f"test_udp[{size}]")
        ratio = f"{rate / udp:8.2f} x" if udp and "join" not in name else ""
        terminalreporter.line(f"{name:32} {rate:14,.0f} /s {ratio}")
