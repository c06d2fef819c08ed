"""MTU, rate and packet lifetime: their codes in records of the SA, and how a request selects among them.

Source: IBA vol 1, 15.2.5.16 (PathRecord) and 15.2.5.17 (MCMemberRecord).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Generic, TypeVar

_N = TypeVar("_N", int, float)


class Quantity(Generic[_N]):
    """The meaning of a 6-bit field.

    unit   the unit of the values
    value  code -> value, from the smallest to the largest
    code   value -> code
    rank   for each of the 64 codes a number: the larger quantity has the larger number
    """

    __slots__ = ("code", "rank", "unit", "value")

    def __init__(self, unit: str, value: Mapping[int, _N]) -> None:
        self.unit: str = unit
        self.value: Mapping[int, _N] = value
        self.code: Mapping[_N, int] = {one: code for code, one in value.items()}
        codes = list(value)
        # If the codes ascend with their values, they are their own ranks, also those without a value (yet).
        in_order = codes == sorted(codes)
        self.rank: tuple[int, ...] = tuple(
            code if in_order else codes.index(code) + 1 if code in value else 0 for code in range(64)
        )

    def nearest(self, value: float) -> int:
        """The code of the nearest value. A link's name is a rounded rate: 103.125 Gbit/s is called 100."""
        return min(self.value, key=lambda code: abs(self.value[code] - value))

    def describe(self, code: int) -> str:
        """The value of a code in words, such as `2048 bytes`."""
        return f"{self.value[code]:g} {self.unit}" if code in self.value else f"code {code}"


MTU = Quantity("bytes", {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096})

RATE = Quantity[float](
    "Gbit/s",
    {
        2: 2.5,
        5: 5,
        3: 10,
        11: 14,
        6: 20,
        4: 30,
        15: 25,
        19: 28,
        7: 40,
        8: 60,
        20: 50,
        12: 56,
        9: 80,
        10: 120,
        16: 100,
        13: 112,
        14: 168,
        17: 200,
        18: 300,
        21: 400,
        22: 600,
        23: 800,
        24: 1200,
    },
)
"""Rates by their nominal values, in the order of the rates that are left for data.

A link of 30 Gbit/s with the old encoding has 24 left, one of 25 Gbit/s with the new encoding has more.
"""

PACKET_LIFE = Quantity("µs", {code: 4.096 * 2**code for code in range(64)})


class Selector(IntEnum):
    """Comparison that a request asks for, of its MTU, rate or packet lifetime."""

    GREATER = 0
    LESS = 1
    EXACTLY = 2
    LARGEST = 3


def is_selected(selector: int, has: int, wanted: int) -> bool:
    """Return True if a quantity of rank `has` meets a request for rank `wanted`. Any meets LARGEST."""
    return (has > wanted, has < wanted, has == wanted, True)[selector]
