"""The parts of a measurement: what one end counted in each interval, and how fast that was.

No I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class IntervalResult(NamedTuple):
    """An interval of a measurement, in seconds since its first message.

    bytes  bytes of payload
    lost   messages, or copies of them, that did not arrive; None at an end that cannot know
    """

    begins: float
    ends: float
    messages: int
    bytes: int
    lost: int | None

    @property
    def messages_per_s(self) -> float:
        return self.messages / (self.ends - self.begins) if self.ends > self.begins else 0.0

    @property
    def gbits_per_s(self) -> float:
        """Gbit/s of payload."""
        return self.bytes * 8e-9 / (self.ends - self.begins) if self.ends > self.begins else 0.0

    def as_dict(self) -> dict[str, float | None]:
        """The fields and both rates, for JSON."""
        return {**self._asdict(), "messages_per_s": self.messages_per_s, "gbits_per_s": self.gbits_per_s}


class Intervals:
    """Cuts what is counted into parts of `interval` seconds (None: no parts), and tells each one."""

    def __init__(self, interval: float | None, report: Callable[[IntervalResult], None]) -> None:
        self._interval, self._report = interval, report
        self._before = IntervalResult(0.0, 0.0, 0, 0, 0)
        """Counters at the end of the last interval."""

    def due(self, spent: float) -> bool:
        """Return True if an interval is over, `spent` seconds after the start."""
        return self._interval is not None and spent >= self._before.ends + self._interval

    def update(self, spent: float, messages: int, size: int, lost: int | None) -> None:
        """Tell the part that is over, if one is, from what was counted in `spent` seconds since the start."""
        if self.due(spent):
            before, self._before = self._before, IntervalResult(0.0, spent, messages, size, lost)
            missed = None if lost is None else lost - (before.lost or 0)
            self._report(
                IntervalResult(before.ends, spent, messages - before.messages, size - before.bytes, missed)
            )
