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

_FEW = 4
"""Fewer parity pieces take as long."""

_FIELD = 0x11D
"""The polynomial of ISA-L's field of 256 elements."""


def available() -> bool:
    """Whether parity can be computed here, because the extra `fec` is installed."""
    return find_spec("pyeclib") is not None


@lru_cache(maxsize=512)
def _code(pieces: int, parity: int) -> Any:
    from pyeclib.ec_iface import ECDriver

    return ECDriver(k=pieces, m=parity, ec_type="isa_l_rs_cauchy", chksum_type="none")


def parity_of(data: bytes | memoryview, piece: int, most: int = MOST_SPARE) -> list[bytes]:
    """The first parity pieces of a block: `most` at least.

    data   the data pieces, one after another; zeros are thought of behind a short last one
    piece  bytes of a piece, whole words of 16
    """
    # A row of a Cauchy matrix is the same, however many there are; powers of two, for the sake of the cache.
    count, rows = -(-len(data) // piece), min(MOST_SPARE, max(_FEW, 1 << max(0, most - 1).bit_length()))
    found: list[bytes] = _code(count, rows).encode(bytes(data).ljust(count * piece, b"\0"))
    return [one[_HEAD:] for one in found[count:]]


@lru_cache(maxsize=256)
def _factors(pieces: int) -> list[bytes]:
    """The row of each parity piece: its factors of the data pieces, as the library's own encoder has them."""
    size = -(-pieces // 16) * 16
    units = b"".join(bytes(at == number for at in range(size)) for number in range(pieces))
    return [row[:pieces] for row in parity_of(units, size)]


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
    block: bytes | memoryview, piece: int, lost: Sequence[int], parity: Mapping[int, bytes]
) -> list[bytes]:
    """The lost data pieces of a block, in order, which has zeros in their places, from enough parity pieces.

    Raises ValueError if there are fewer parity pieces than lost ones.
    """
    used = sorted(parity)[: len(lost)]
    pieces = -(-len(block) // piece)
    if len(used) < len(lost):
        raise ValueError(f"{pieces - len(lost) + len(used)} pieces are there, {pieces} are needed")
    if not lost:
        return []
    known = parity_of(block, piece, used[-1] + 1)
    rows = [[_factors(pieces)[row][number] for number in lost] for row in used]
    return _solved(rows, [_sum(parity[row], known[row]) for row in used])


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
