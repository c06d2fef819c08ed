"""Requests of hosts to the SA, read from the tap of the lab's InfiniBand fabric."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from mcast.pcapng.reader import read_frames
from mcast.wire import mad
from mcast.wire.mcmember import RECORD_SIZE, McMemberRecord, SaMethod

SLID, MAD_AT = slice(22, 24), 16 + 8 + 12 + 8
"""In a tapped packet without a GRH: the sender's LID, and what follows ERF header, LRH, BTH and DETH."""


class Asked(NamedTuple):
    """A Set or a Delete. A request that is repeated as it was has the same transaction."""

    lid: int
    transaction: bytes
    method: SaMethod
    mask: int
    record: McMemberRecord


def asked_of_the_sa(file: BinaryIO) -> Iterator[Asked]:
    """Each packet twice, where it leaves and where it arrives, if both are tapped."""
    for frame in read_frames(file):
        asked = frame.data[MAD_AT:]
        of_members = asked[1:2] == bytes([mad.SA_CLASS]) and asked[16:18] == mad.MC_MEMBER_RECORD.to_bytes(2)
        if of_members and asked[3] in (SaMethod.SET, SaMethod.DELETE):
            yield Asked(
                int.from_bytes(frame.data[SLID]),
                asked[8:16],
                SaMethod(asked[3]),
                int.from_bytes(asked[mad.DATA_AT - 8 : mad.DATA_AT]),
                McMemberRecord.unpack(asked[mad.DATA_AT :][:RECORD_SIZE]),
            )
