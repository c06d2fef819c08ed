"""Times that a program gives, and times in words: checked in one place for all providers and endpoints."""

from __future__ import annotations

from math import fsum, inf, nan

from mcast.arguments.amounts import parse_quantity
from mcast.arguments.checks import short_repr

MAX_SECONDS = float(((1 << 63) - 1) // 1_000_000_000)
"""The most seconds that a thread can wait, some 292 years. A longer wait is cut to this."""

NUMBERS = frozenset({float, int})
"""The types of nearly all timeouts."""

_NO_TIMES = ("b", "c", "V")
"""Kinds of numpy's flags, complex numbers and records, each of which has `__float__`."""

UNITS = {"US": 1e-6, "MS": 1e-3, "S": 1.0, "MIN": 60.0, "H": 3600.0}
"""Unit of a time in words -> seconds."""

_NO_UNIT_TOO = {**UNITS, "": 1.0}


def parse_seconds(text: str, unit: bool = True) -> float | None:
    """Return the seconds that a number with a unit says, such as 5ms or 1.5h; None for any other text.

    Without `unit` a number alone is one of seconds.
    """
    return parse_quantity(text, UNITS if unit else _NO_UNIT_TOO)


def check_seconds(given: float, name: str = "timeout") -> float:
    """Return the seconds that were given, within 0..`MAX_SECONDS`: what is negative does not wait.

    Any number will do, infinity too. Raises ValueError for NaN, because no clock would ever reach it, and
    TypeError for what is no number, as text and bool are not; both name the argument. The fastest calls look
    themselves first whether they have a `NUMBERS` number within these limits.
    """
    if given.__class__ in NUMBERS and 0.0 <= given <= MAX_SECONDS:
        return given
    try:
        if isinstance(given, bool) or getattr(getattr(given, "dtype", None), "kind", "") in _NO_TIMES:
            raise TypeError("a bool is not a time")
        seconds = fsum((given,))  # takes whatever has `__float__`, but no text as `float` does
    except TypeError as error:
        raise TypeError(f"{name} is {short_repr(given)}: give a number of seconds") from error
    except OverflowError:
        seconds = inf if given > 0 else 0.0
    except ValueError:  # a signaling NaN
        seconds = nan
    if seconds != seconds:
        raise ValueError(f"{name} is {short_repr(given)}: give a number of seconds")
    return min(max(seconds, 0.0), MAX_SECONDS)
