"""Parity of a block: any as many pieces as the block has data pieces give the whole block.

ISA-L computes parity, by pyeclib. Lost pieces are solved for here, with as many equations as pieces are lost:
pyeclib inverts a matrix of the block's whole width for each pattern of losses, 80 ms for 128 pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

from mcast.cast.protocol.packets import MAX_PARITY

_PYECLIB_HEADER = 80
"""Bytes that pyeclib puts before each piece."""

_MIN_PARITY = 4
"""Fewer parity pieces take as long."""

_FIELD = 0x11D
"""The polynomial of ISA-L's field of 256 elements."""


def available() -> bool:
    """Whether parity can be computed here, because the extra `fec` is installed."""
    return find_spec("pyeclib") is not None


@lru_cache(maxsize=512)
def _code(segments: int, parity: int) -> Any:
    from pyeclib.ec_iface import ECDriver

    return ECDriver(k=segments, m=parity, ec_type="isa_l_rs_cauchy", chksum_type="none")


def parity_segments(data: bytes | memoryview, segment: int, most: int = MAX_PARITY) -> list[bytes]:
    """The first parity pieces of a block: `most` at least.

    data   the data pieces, one after another; zeros are thought of behind a short last one
    piece  bytes of a piece, whole words of 16
    """
    # A row of a Cauchy matrix is the same, however many there are; powers of two, for the sake of the cache.
    count, rows = (
        -(-len(data) // segment),
        min(MAX_PARITY, max(_MIN_PARITY, 1 << max(0, most - 1).bit_length())),
    )
    found: list[bytes] = _code(count, rows).encode(bytes(data).ljust(count * segment, b"\0"))
    return [one[_PYECLIB_HEADER:] for one in found[count:]]


@lru_cache(maxsize=256)
def _factors(segments: int) -> list[bytes]:
    """The row of each parity piece: its factors of the data pieces, as the library's own encoder has them."""
    size = -(-segments // 16) * 16
    units = b"".join(bytes(at == number for at in range(size)) for number in range(segments))
    return [row[:segments] for row in parity_segments(units, size)]


@cache
def _multiples(factor: int) -> bytes:
    """A table that multiplies a byte."""
    found = [0]
    for _ in range(8):  # the products of the numbers with one bit more: the field's sum is an exclusive or
        found += [factor ^ known for known in found]
        factor = factor << 1 ^ (_FIELD if factor & 0x80 else 0)
    return bytes(found)


@cache
def _inverse(factor: int) -> int:
    return _multiples(factor).index(1)


def _add(one: bytes, other: bytes) -> bytes:
    return (int.from_bytes(one) ^ int.from_bytes(other)).to_bytes(len(one))


def restore(
    block: bytes | memoryview, segment: int, lost: Sequence[int], parity: Mapping[int, bytes]
) -> list[bytes]:
    """The lost data pieces of a block, in order, which has zeros in their places, from enough parity pieces.

    Raises ValueError if there are fewer parity pieces than lost ones.
    """
    used = sorted(parity)[: len(lost)]
    segments = -(-len(block) // segment)
    if len(used) < len(lost):
        raise ValueError(f"{segments - len(lost) + len(used)} pieces are there, {segments} are needed")
    if not lost:
        return []
    known = parity_segments(block, segment, used[-1] + 1)
    rows = [[_factors(segments)[row][number] for number in lost] for row in used]
    return _solve(rows, [_add(parity[row], known[row]) for row in used])


def _solve(rows: list[list[int]], sums: list[bytes]) -> list[bytes]:
    """The unknowns of as many equations, whose every square part can be solved."""
    for at in range(len(rows)):
        pivot = next(row for row in range(at, len(rows)) if rows[row][at])
        rows[at], rows[pivot], sums[at], sums[pivot] = rows[pivot], rows[at], sums[pivot], sums[at]
        table = _multiples(_inverse(rows[at][at]))
        rows[at] = [table[factor] for factor in rows[at]]
        sums[at] = sums[at].translate(table)
        for other in range(len(rows)):
            if other != at and (factor := rows[other][at]):
                table = _multiples(factor)
                rows[other] = [one ^ table[two] for one, two in zip(rows[other], rows[at], strict=True)]
                sums[other] = _add(sums[other], sums[at].translate(table))
    return sums
