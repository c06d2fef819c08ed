"""The trace of a fabric, written with the time of its clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from mcast.backends.model.times import Scheduler
from mcast.backends.sim.trace.events import Trace, TraceEvent

P = ParamSpec("P")


Listener = Callable[[int, TraceEvent], None]


class Log:
    """Writes events to the trace, if there is one, and to listeners.

    Code on a message's path checks `is_enabled` first, which is False while there is neither.
    """

    def __init__(self, clock: Scheduler, trace: Trace | None) -> None:
        self.trace = trace
        self.listeners: tuple[Listener, ...] = ()
        self.is_enabled: bool = trace is not None
        self._clock = clock

    def listen(self, listener: Listener) -> None:
        """Tell `listener` what happens from now on, with the time in ns."""
        self.listeners += (listener,)
        self.is_enabled = True

    def unlisten(self, listener: Listener) -> None:
        """Undo `listen`."""
        self.listeners = tuple(one for one in self.listeners if one != listener)
        self.is_enabled = self.trace is not None or bool(self.listeners)

    def note(self, kind: Callable[P, TraceEvent], *args: P.args, **fields: P.kwargs) -> None:
        """Record an event, if anybody asks."""
        if self.is_enabled:
            self.write(kind(*args, **fields))

    def write(self, event: TraceEvent) -> None:
        """Record an event that is made already."""
        now = self._clock.now
        if self.trace is not None:
            self.trace.add(now, event)
        for listener in self.listeners:
            listener(now, event)
