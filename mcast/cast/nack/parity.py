"""Parity of a block: any as many pieces as the block has data pieces give the whole block.

ISA-L computes parity, by pyeclib. Lost pieces are solved for here, with as many equations as pieces are lost:
pyeclib inverts a matrix of the block's whole width for each pattern of losses, 80 ms for 128 pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

from mcast.cast.nack.messages import MOST_SPARE

_HEAD = 80
"""Bytes that pyeclib puts before each piece."""

_FIELD = 0x11D
"""The polynomial of ISA-L's field of 256 elements."""


def available() -> bool:
    """Whether parity can be computed here, because the extra `fec` is installed."""
    return find_spec("pyeclib") is not None


@lru_cache(maxsize=512)
def _code(pieces: int, parity: int) -> Any:
    from pyeclib.ec_iface import ECDriver

    return ECDriver(k=pieces, m=parity, ec_type="isa_l_rs_cauchy", chksum_type="none")


def parity_of(data: Sequence[bytes | memoryview], most: int = MOST_SPARE) -> list[bytes]:
    """The first parity pieces of a block: `most` at least.

    data   the data pieces, equally long, of whole words of 16 bytes
    """
    # A row of a Cauchy matrix is the same, however many there are; powers of two, for the sake of the cache.
    count, rows = len(data), min(MOST_SPARE, 1 << max(0, most - 1).bit_length())
    found: list[bytes] = _code(count, rows).encode(b"".join(data))
    return [piece[_HEAD:] for piece in found[count:]]


@lru_cache(maxsize=256)
def _factors(pieces: int) -> list[bytes]:
    """The row of each parity piece: its factors of the data pieces, as the library's own encoder has them."""
    size = -(-pieces // 16) * 16
    units = [bytes(at == number for at in range(size)) for number in range(pieces)]
    return [row[:pieces] for row in parity_of(units)]


@cache
def _times(factor: int) -> bytes:
    """A table that multiplies a byte."""
    found = [0]
    for _ in range(8):  # the products of the numbers with one bit more: the field's sum is an exclusive or
        found += [factor ^ known for known in found]
        factor = factor << 1 ^ (_FIELD if factor & 0x80 else 0)
    return bytes(found)


@cache
def _inverse(factor: int) -> int:
    return _times(factor).index(1)


def _sum(one: bytes, other: bytes) -> bytes:
    return (int.from_bytes(one) ^ int.from_bytes(other)).to_bytes(len(one))


def restored(
    pieces: int, data: Mapping[int, bytes | memoryview], parity: Mapping[int, bytes]
) -> Sequence[bytes | memoryview]:
    """The data pieces of a block, in order, from those that are there and enough parity pieces.

    Raises ValueError if there are fewer pieces than data pieces.
    """
    lost = [number for number in range(pieces) if number not in data]
    used = sorted(parity)[: len(lost)]
    if len(used) < len(lost):
        raise ValueError(f"{len(data) + len(used)} pieces are there, {pieces} are needed")
    if not lost:
        return [data[number] for number in range(pieces)]
    size = len(next(iter(parity.values())))
    nothing = bytes(size)
    known = parity_of([data.get(number, nothing) for number in range(pieces)], used[-1] + 1)
    rows = [[_factors(pieces)[row][number] for number in lost] for row in used]
    sums = [_sum(parity[row], known[row]) for row in used]
    found = dict(zip(lost, _solved(rows, sums), strict=True))
    return [data[number] if number in data else found[number] for number in range(pieces)]


def _solved(rows: list[list[int]], sums: list[bytes]) -> list[bytes]:
    """The unknowns of as many equations, whose every square part can be solved."""
    for at in range(len(rows)):
        turn = next(row for row in range(at, len(rows)) if rows[row][at])
        rows[at], rows[turn], sums[at], sums[turn] = rows[turn], rows[at], sums[turn], sums[at]
        table = _times(_inverse(rows[at][at]))
        rows[at] = [table[factor] for factor in rows[at]]
        sums[at] = sums[at].translate(table)
        for other in range(len(rows)):
            if other != at and (factor := rows[other][at]):
                table = _times(factor)
                rows[other] = [one ^ table[two] for one, two in zip(rows[other], rows[at], strict=True)]
                sums[other] = _sum(sums[other], sums[at].translate(table))
    return sums
