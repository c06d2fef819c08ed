"""The trace of a fabric, written with the time of its clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from mcast.backends.sim.core.times import Timeline
from mcast.backends.sim.trace.events import Trace, TraceEvent

P = ParamSpec("P")


class Log:
    """Writes into the trace, if there is one. Code on a message's path checks `trace` first."""

    def __init__(self, clock: Timeline, trace: Trace | None) -> None:
        self.trace = trace
        self._clock = clock

    def note(self, kind: Callable[P, TraceEvent], *args: P.args, **fields: P.kwargs) -> None:
        """Record an event in the trace, if there is one."""
        if self.trace is not None:
            self.trace.add(self._clock.now, kind(*args, **fields))
