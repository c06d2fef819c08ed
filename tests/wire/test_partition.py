"""Which P_Keys match, and where a table has a partition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mcast.wire.partition import find_pkey, matching_pkeys

pkeys = st.one_of(st.sampled_from((0, 1, 2)), st.integers(0, 0x7FFF)).flatmap(
    lambda base: st.sampled_from((base, base + 0x8000))
)


@given(pkeys, pkeys)
def test_one_of_two_in_a_partition_is_a_full_member(one: int, other: int) -> None:
    same, full = one % 0x8000 == other % 0x8000 != 0, one >= 0x8000 or other >= 0x8000
    assert (one in matching_pkeys(other)) == (other in matching_pkeys(one)) == (same and full)


def test_full_pkey_is_preferred() -> None:
    """A full membership is found before a limited one."""
    table = (0, 0x0001, 0x7FFF, 0x8001, 0xFFFF, 0x8001)
    assert [find_pkey(table, pkey) for pkey in (0x0001, 0x8001, 0x7FFF, 0xFFFF, 0x8002)] == [3, 3, 4, 4, None]
    assert find_pkey(table[:3], 0x8001) == 1
