"""MTU, rate and packet lifetime: their codes in records of the SA, and how a request chooses among them.

Source: IBA vol 1, 15.2.5.16 (PathRecord) and 15.2.5.17 (MCMemberRecord).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Generic, TypeVar

_N = TypeVar("_N", int, float)


class Quantity(Generic[_N]):
    """What a field of 6 bits stands for.

    unit   of the values
    value  code -> value, from the least to the most
    code   value -> code
    rank   of each of the 64 codes: of two, the larger quantity has the larger one
    """

    __slots__ = ("code", "rank", "unit", "value")

    def __init__(self, unit: str, value: Mapping[int, _N]) -> None:
        self.unit = unit
        self.value: Mapping[int, _N] = value
        self.code: Mapping[_N, int] = {one: code for code, one in value.items()}
        codes = list(value)
        # Codes that ascend are compared as they are, even those that stand for nothing (yet).
        in_order = codes == sorted(codes)
        self.rank = tuple(
            code if in_order else codes.index(code) + 1 if code in value else 0 for code in range(64)
        )

    def nearest(self, value: float) -> int:
        """The code of the nearest value: links are named after it, 103.125 Gbit/s is 100."""
        return min(self.value, key=lambda code: abs(self.value[code] - value))

    def said(self, code: int) -> str:
        """The code in words, `2048 bytes`."""
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
"""The nominal rates, in the order of what is left for data: of 30 Gbit/s of the old encoding 24, of 25 of the
new one more.
"""

PACKET_LIFE = Quantity("µs", {code: 4.096 * 2**code for code in range(64)})


class Selector(IntEnum):
    """How MTU, rate and packet lifetime of a request are meant."""

    GREATER = 0
    LESS = 1
    EXACTLY = 2
    LARGEST = 3


def is_selected(selector: int, has: int, wanted: int) -> bool:
    """Whether what has one rank is what a request for the other `wanted`; LARGEST takes whatever there is."""
    return (has > wanted, has < wanted, has == wanted, True)[selector]
