"""P_Keys: 15 bits are the number of a partition of an InfiniBand fabric, the highest bit marks a full member.

Source: IBA vol 1, 10.9. The number 0 is no partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

FULL_MEMBER, PARTITION = 0x8000, 0x7FFF
DEFAULT_PKEY = 0xFFFF
"""The P_Key of a full member of the partition that every fabric has."""


@lru_cache(maxsize=4096)
def matching_pkeys(pkey: int) -> tuple[int, ...]:
    """The P_Keys that match this one: two limited members may not talk to each other (10.9.3, SA-PKEY-2)."""
    if not pkey & PARTITION:
        return ()
    return (pkey, pkey & PARTITION) if pkey & FULL_MEMBER else (pkey | FULL_MEMBER,)


def find_pkey(table: Sequence[int], pkey: int) -> int | None:
    """Return the index of a partition in a P_Key table.

    That of a full member's entry if there is one, otherwise of a limited one's.

    None if the table lacks the partition. Source: `ib_find_cached_pkey` in drivers/infiniband/core/cache.c of
    Linux.
    """
    places = [index for index, entry in enumerate(table) if not (entry ^ pkey) & PARTITION]
    return min(places, key=lambda index: (not table[index] & FULL_MEMBER, index), default=None)
