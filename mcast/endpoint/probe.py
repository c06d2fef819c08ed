"""Probes: short messages by which members find out that the fabric delivers, never shown to a user.

One asks, over the group; whoever hears it echoes, to the group or (for who does not receive it) to the
asker alone. All probes have one length, so a batch without a message of it has none.
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
"""Bytes: 61, a length that few applications use for every message."""


class Kind(IntEnum):
    """What a probe wants or is."""

    ASK = 1
    """Echo to the group."""
    ASK_ALONE = 2
    """Echo to the asker's QP: it sends to the group, and does not receive from it."""
    ECHO = 3
    SELF = 4
    """No echo: whether the own device returns it."""


class Peer(NamedTuple):
    """Another member's queue pair."""

    gid: Gid
    qp_num: int


class Probe(NamedTuple):
    """One probe. `number` is the asker's own; an echo repeats it with the asker's name."""

    kind: Kind
    number: int
    asker: Peer

    def pack(self) -> bytes:
        """As it travels, PROBE_SIZE bytes."""
        return _LAYOUT.pack(_MAGIC, _VERSION, self.kind, 0, self.number, self.asker.gid, self.asker.qp_num)


def parse(payload: memoryview) -> Probe | None:
    """The probe, or None for what is none: another length, magic, version or kind."""
    if len(payload) != PROBE_SIZE:
        return None
    magic, version, kind, _, number, gid, qp_num = _LAYOUT.unpack(payload)
    if magic != _MAGIC or version != _VERSION or kind not in tuple(Kind):
        return None
    return Probe(Kind(kind), number, Peer(Gid(gid), qp_num))
