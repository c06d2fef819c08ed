"""Time as the models know it: whole nanoseconds, and a clock that is an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from mcast.arguments.seconds import check_seconds

NS = 1_000_000_000


class Scheduler(Protocol):
    """The clock that is passed in."""

    @property
    def now(self) -> int:
        """Nanoseconds since the clock began."""

    def call_later(self, delay: int, action: Callable[[], None]) -> None:
        """Run `action` `delay` ns from now."""


class AtOnce:
    """A clock that stands still: an action that is due later runs now."""

    now = 0

    def call_later(self, delay: int, action: Callable[[], None]) -> None:
        action()


def to_ns(seconds: float, what: str) -> int:
    """Seconds that a user gave, in ns, not below 0."""
    return round(check_seconds(seconds, what) * NS)
