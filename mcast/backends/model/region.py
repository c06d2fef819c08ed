"""Memory of the program that is registered with a queue pair in software."""

from __future__ import annotations

from collections.abc import Callable

from mcast.api import Guard, Phase, Region


class HostRegion(Region):
    """Memory of the program. `end` stops its use as receive memory."""

    _strict = True

    def __init__(self, guard: Guard, buffer: memoryview, end: Callable[[], None]) -> None:
        self._guard, self._buffer, self._end = guard, buffer, end

    @property
    def buffer(self) -> memoryview:
        self._require_open("buffer", Phase.REGISTER)
        return self._buffer

    def _close(self) -> None:
        if not self._freed:
            if not self._guard.was_broken:
                self._end()
            self._closed = self._freed = True
