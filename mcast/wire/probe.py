"""Probes: messages by which members find out whether the fabric delivers. No probe is shown to a user.

A member asks by sending a probe to the group. Every member that receives the probe echoes it, to the group,
or to the asker alone if the asker does not receive from the group. A question is short, or nearly as long as
a message of a usual MTU, to find out whether such messages pass; an echo is short. All these lengths are
unusual, so a batch without a message of one of them contains no probe, and needs no closer look.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from mcast.wire.addresses import Gid
from mcast.wire.units import MTU

_MAGIC = b"\xd9mcast\x9a\x07"
_VERSION = 2
_MARKER = _MAGIC + bytes([_VERSION])
_LAYOUT = Struct("!8sBBHI16sIH23x")

PROBE_SIZE = _LAYOUT.size
"""The size of a short probe in bytes: 61, a length that few applications use for every message."""

LONG_PROBE_MARGIN = 3
"""Bytes by which a long probe is shorter than an MTU.

Many applications fill a whole MTU, and few nearly fill it.
"""

LONG_SIZES = tuple(sorted(size - LONG_PROBE_MARGIN for size in MTU.code))
"""The sizes of long probes in bytes, from the smallest on."""

PROBE_SIZES = frozenset({PROBE_SIZE, *LONG_SIZES})
"""The lengths of messages that may be probes."""


class Kind(IntEnum):
    """Type of a probe: a request, or a reply."""

    REQUEST = 1
    """Echo to the group."""
    UNICAST_REQUEST = 2
    """Echo to the asker's queue pair alone, because the asker does not receive from the group."""
    REPLY = 3
    LOOPBACK = 4
    """Echo nothing: the asker finds out whether its own device returns the probe."""


class Peer(NamedTuple):
    """The queue pair of another member: the `gid` of its port, and its number, `qp_num`."""

    gid: Gid
    qp_num: int


class Probe(NamedTuple):
    """One probe. The asker chooses `number`; an echo repeats the number and the asker.

    size  of an echo: the size in bytes of the question that it answers
    room  of an echo: the largest message in bytes that the answering queue pair takes; 0: not said
    """

    kind: Kind
    number: int
    requester: Peer
    size: int = 0
    room: int = 0

    def pack(self, size: int = PROBE_SIZE) -> bytes:
        """Return the probe as `size` bytes, at least PROBE_SIZE."""
        kind, number, (gid, qp_num), asked, room = self
        return _LAYOUT.pack(_MAGIC, _VERSION, kind, asked, number, gid, qp_num, room).ljust(size, b"\0")


def is_probe(payload: bytes) -> bool:
    """Return True if the payload has a length and the marker of a probe."""
    return len(payload) in PROBE_SIZES and payload.startswith(_MARKER)


def parse(payload: memoryview) -> Probe | None:
    """Return the probe in a payload, or None if length, magic, version or kind are not those of a probe."""
    if len(payload) not in PROBE_SIZES:
        return None
    magic, version, kind, size, number, gid, qp_num, room = _LAYOUT.unpack_from(payload)
    if magic != _MAGIC or version != _VERSION or kind not in tuple(Kind):
        return None
    return Probe(Kind(kind), number, Peer(Gid(gid), qp_num), size, room)
