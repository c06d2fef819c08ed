"""Time as the core knows it: whole nanoseconds, and a clock that is an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

NS = 1_000_000_000
LONGEST = ((1 << 63) - 1) // NS
"""The most seconds that a thread can wait, some 292 years. A longer wait is cut to this."""


class Timeline(Protocol):
    """What the core needs of a fabric's clock."""

    @property
    def now(self) -> int:
        """Nanoseconds since the fabric was made."""

    def call_later(self, delay: int, action: Callable[[], None]) -> None:
        """Run `action` `delay` ns from now."""


def ns_of(seconds: float, what: str = "timeout") -> int:
    """Seconds that a user gave, in ns, not below 0. Raises ValueError if they are no number."""
    if seconds != seconds:
        raise ValueError(f"{what} is {seconds}: give a number of seconds")
    return round(min(max(seconds, 0), LONGEST) * NS)
