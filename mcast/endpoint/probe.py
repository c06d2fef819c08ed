"""Probes: short messages by which members find out whether the fabric delivers. No probe is shown to a user.

A member asks by sending a probe to the group. Every member that receives the probe echoes it, to the group,
or to the asker alone if the asker does not receive from the group. All probes have one length, so a batch
without a message of that length contains no probe.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from mcast.wire.addresses import Gid

_MAGIC = b"\xd9mcast\x9a\x07"
_VERSION = 1
_LAYOUT = Struct("!8sBBHI16sI25x")

PROBE_SIZE = _LAYOUT.size
"""The size of a probe in bytes: 61, a length that few applications use for every message."""


class Kind(IntEnum):
    """What a probe asks for, or that it is an answer."""

    ASK = 1
    """Echo to the group."""
    ASK_ALONE = 2
    """Echo to the asker's queue pair alone, because the asker does not receive from the group."""
    ECHO = 3
    SELF = 4
    """Echo nothing: the asker finds out whether its own device returns the probe."""


class Peer(NamedTuple):
    """The queue pair of another member: the `gid` of its port, and its number, `qp_num`."""

    gid: Gid
    qp_num: int


class Probe(NamedTuple):
    """One probe. The asker chooses `number`; an echo repeats the number and the asker."""

    kind: Kind
    number: int
    asker: Peer

    def pack(self) -> bytes:
        """The probe as bytes, PROBE_SIZE of them."""
        return _LAYOUT.pack(_MAGIC, _VERSION, self.kind, 0, self.number, self.asker.gid, self.asker.qp_num)


def parse(payload: memoryview) -> Probe | None:
    """The probe in a payload, or None if length, magic, version or kind are not those of a probe."""
    if len(payload) != PROBE_SIZE:
        return None
    magic, version, kind, _, number, gid, qp_num = _LAYOUT.unpack(payload)
    if magic != _MAGIC or version != _VERSION or kind not in tuple(Kind):
        return None
    return Probe(Kind(kind), number, Peer(Gid(gid), qp_num))
