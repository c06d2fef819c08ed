"""Numbers in text, with a unit or without: one grammar for commands, scenarios, strategies and options.

A number has ASCII digits, perhaps a point and an exponent of two digits: `7`, `2.5`, `.5`, `1e-3`. Python's
own `int` and `float` also read `1_000`, digits of other scripts, `nan` and `inf`, and exponents at which
arithmetic overflows; none of these is a number here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_WHOLE = "[0-9]{1,20}"
_FRACTION = r"(?:[0-9]{1,20}(?:\.[0-9]{1,20})?|\.[0-9]{1,20})(?:e[+-]?[0-9]{1,2})?"
_NO_UNIT: Mapping[str, float] = {"": 1}


def parse_int(text: str, base: int = 10) -> int | None:
    """Return the whole number that the text is; with base 16 perhaps after 0x. None for any other text."""
    if base == 16:
        found = re.fullmatch("(?:0x)?([0-9a-f]{1,16})", text.strip(), re.ASCII | re.IGNORECASE)
        return int(found[1], 16) if found else None
    return int(text) if re.fullmatch(_WHOLE, text := text.strip()) else None


def parse_number(text: str) -> float | None:
    """Return the number that the text is, perhaps with a fraction; None for any other text."""
    return parse_quantity(text, _NO_UNIT)


def parse_quantity(
    text: str, units: Mapping[str, float], *, whole: bool = False, ending: str = ""
) -> float | None:
    """Return the number in the text times what its unit stands for; None if the text is no such amount.

    `units` has upper case, and "" if a unit may be left out; the text may have either case. With `whole` the
    number has no fraction. `ending` is a regular expression of what may follow the unit.
    """
    number = _WHOLE if whole else _FRACTION
    found = re.fullmatch(f"({number})({'|'.join(units)}){ending}", text.strip(), re.ASCII | re.IGNORECASE)
    if found is None:
        return None
    factor = units[found[2].upper()]
    return (int(found[1]) if found[1].isdecimal() else float(found[1])) * factor
