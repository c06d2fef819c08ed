"""Parity segments of a block, and the decoder: any k segments of a block give its k source segments.

The code is ISA-L's systematic Reed-Solomon code with a Cauchy matrix, encoded by pyeclib. Decoding is done
here, with one equation for each lost segment, because pyeclib inverts a k x k matrix for each pattern of
losses, which takes 80 ms for k = 128.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

from mcast.cast.protocol.packets import MAX_PARITY

_PYECLIB_HEADER = 80
"""Bytes that pyeclib puts before each segment."""

_MIN_PARITY = 4
"""Minimum number of parity segments to compute; fewer take as long."""

_FIELD = 0x11D
"""Polynomial of GF(2^8) in ISA-L."""


@lru_cache(maxsize=512)
def _code(segments: int, parity: int) -> Any:
    from pyeclib.ec_iface import ECDriver

    return ECDriver(k=segments, m=parity, ec_type="isa_l_rs_cauchy", chksum_type="none")


@cache
def available() -> bool:
    """Return True if parity can be computed: the extra `fec` is installed, and its pyeclib finds ISA-L."""
    if find_spec("pyeclib") is None:
        return False
    from pyeclib.ec_iface import ECDriverError

    try:
        _code(1, _MIN_PARITY)
    except ECDriverError:
        return False
    return True


def parity_segments(data: bytes | memoryview, segment: int, count: int = MAX_PARITY) -> list[bytes]:
    """Return the first `count` parity segments of a block, or more.

    data     the source segments, one after another; a short last one is padded with zeros
    segment  bytes of a segment, a multiple of 16
    """
    # A row of a Cauchy matrix does not depend on the number of rows; powers of two keep the cache small.
    k, rows = (
        -(-len(data) // segment),
        min(MAX_PARITY, max(_MIN_PARITY, 1 << max(0, count - 1).bit_length())),
    )
    encoded: list[bytes] = _code(k, rows).encode(bytes(data).ljust(k * segment, b"\0"))
    return [one[_PYECLIB_HEADER:] for one in encoded[k:]]


@lru_cache(maxsize=256)
def _factors(segments: int) -> list[bytes]:
    """Return the matrix row of each parity segment, from the library's encoding of unit vectors."""
    size = -(-segments // 16) * 16
    units = b"".join(bytes(at == number for at in range(size)) for number in range(segments))
    return [row[:segments] for row in parity_segments(units, size)]


@cache
def _multiples(factor: int) -> bytes:
    """Return the products of `factor` with 0..255 in the field, as a table for `bytes.translate`."""
    products = [0]
    for _ in range(8):  # double the table: addition in the field is exclusive or
        products += [factor ^ known for known in products]
        factor = factor << 1 ^ (_FIELD if factor & 0x80 else 0)
    return bytes(products)


@cache
def _inverse(factor: int) -> int:
    return _multiples(factor).index(1)


def _add(one: bytes, other: bytes) -> bytes:
    return (int.from_bytes(one) ^ int.from_bytes(other)).to_bytes(len(one))


def restore(
    block: bytes | memoryview, segment: int, lost: Sequence[int], parity: Mapping[int, bytes]
) -> list[bytes]:
    """Return the lost source segments of a block, in order.

    block    the block, with zeros in place of the lost segments
    segment  bytes of a segment
    lost     indexes of the lost source segments
    parity   index of a parity segment -> its bytes

    Raises ValueError if there are fewer parity segments than lost ones.
    """
    used = sorted(parity)[: len(lost)]
    segments = -(-len(block) // segment)
    if len(used) < len(lost):
        present = segments - len(lost) + len(used)
        raise ValueError(f"cannot decode a block of {segments} source segments from {present} segments")
    if not lost:
        return []
    known = parity_segments(block, segment, used[-1] + 1)
    rows = [[_factors(segments)[row][number] for number in lost] for row in used]
    return _solve(rows, [_add(parity[row], known[row]) for row in used])


def _solve(rows: list[list[int]], sums: list[bytes]) -> list[bytes]:
    """Solve linear equations over the field by Gauss-Jordan elimination.

    Each square submatrix of a Cauchy matrix is invertible, so a pivot always exists.
    """
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
