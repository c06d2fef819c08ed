"""The types of arguments: one rule for all calls, applied before a call has any effect.

A whole number is an `int`, or any object with `__index__`, as numpy's integers and IntEnum members are.
`bool` is none, because a flag in the place of a number is a mistake; nor are floats and text. A flag is a
`bool` alone. What is of a wrong type raises TypeError, what is out of range ValueError.
"""

from __future__ import annotations

from operator import index
from typing import Any, TypeVar

T = TypeVar("T")

_MAX_SHOWN = 60
"""Maximum number of characters of a refused argument in the error's text."""


def check_int(given: object, name: str, minimum: int | None, maximum: int | None, why: str) -> int:
    """Return the whole number; `why` says in the error what the argument is, and which values it has."""
    number = as_int(given)
    if number is None:
        raise TypeError(f"{name} is {short_repr(given)}: give a whole number; {why}")
    if (minimum is not None and number < minimum) or (maximum is not None and number > maximum):
        raise ValueError(f"{name} is {short_repr(number)}: {why}")
    return number


def as_int(given: object) -> int | None:
    """Return the whole number that the object is, None if it is none."""
    if type(given) is int:
        return given
    # As `isinstance(given, SupportsIndex)`, which takes 4 us in Python 3.11.
    if isinstance(given, bool) or not hasattr(type(given), "__index__"):
        return None
    number: Any = given
    try:
        return index(number)
    except TypeError:  # an array of several numbers, say
        return None


def check_bool(given: object, name: str) -> bool:
    """Return the flag."""
    if given is True or given is False:
        return given
    raise TypeError(f"{name} is {short_repr(given)}: give True or False")


def check_type(given: object, kind: type[T], name: str, what: str) -> T:
    """Return the object, which must be of that class; `what` says in the error what to give instead."""
    if isinstance(given, kind):
        return given
    raise TypeError(f"{name} is {short_repr(given)}: give {what}")


def short_repr(given: object) -> str:
    """The argument as an error shows it: short, and also if its own `repr` fails."""
    try:
        text = repr(given)
    except Exception:  # a number of thousands of digits, or an object of a program
        text = f"a {type(given).__name__} that cannot be shown"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
