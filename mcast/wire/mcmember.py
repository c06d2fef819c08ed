"""MCMemberRecord as bytes on the wire, and the numbers that go with it (IBA vol 1, 15.2.5.17).

GIDs are 16 bytes; MTU, rate and packet lifetime are 6-bit codes, which `mcast.wire.units` explains.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum, IntFlag
from functools import cache, partial
from operator import itemgetter
from typing import NamedTuple

from mcast.wire.addresses import ZERO_GID

MLID_FIRST, MLID_LAST = 0xC000, 0xFFFE
RECORD_SIZE = 52


class SaMethod(IntEnum):
    """The methods of the SA for MCMemberRecord, as the MAD's method has them."""

    GET = 0x01
    SET = 0x02
    GET_TABLE = 0x12
    DELETE = 0x15


class SaStatus(IntEnum):
    """The status in the MAD of an answer.

    Codes of the SA's class in the high byte, common ones in the low byte.
    """

    OK = 0x0000
    UNSUP_METHOD_ATTR = 0x000C
    NO_RESOURCES = 0x0100
    REQ_INVALID = 0x0200
    NO_RECORDS = 0x0300
    TOO_MANY_RECORDS = 0x0400
    INVALID_GID = 0x0500
    INSUF_COMPS = 0x0600


class McMask(IntFlag):
    """The bits of MCMemberRecord's component mask, where the wire has them."""

    MGID = 1 << 0
    PORT_GID = 1 << 1
    QKEY = 1 << 2
    MLID = 1 << 3
    MTU_SELECTOR = 1 << 4
    MTU = 1 << 5
    TCLASS = 1 << 6
    PKEY = 1 << 7
    RATE_SELECTOR = 1 << 8
    RATE = 1 << 9
    LIFE_SELECTOR = 1 << 10
    PACKET_LIFE = 1 << 11
    SL = 1 << 12
    FLOW_LABEL = 1 << 13
    HOP_LIMIT = 1 << 14
    SCOPE = 1 << 15
    JOIN_STATE = 1 << 16
    PROXY_JOIN = 1 << 17

    JOIN = MGID | PORT_GID | JOIN_STATE
    """The fields that every Set and Delete must have."""
    CREATE = JOIN | QKEY | PKEY | SL | FLOW_LABEL | TCLASS
    """The fields that a Set must have to create the group (o15-0.2.3)."""
    COMPARED = QKEY | TCLASS | SL | FLOW_LABEL | HOP_LIMIT
    """The fields that must equal the group's, if the Set of a member has them (o15-0.2.4).

    P_Keys have to match.
    """


class JoinState(IntFlag):
    """The bits of JoinState: the kinds of membership. Only FULL and SEND_ONLY_FULL keep a group alive."""

    FULL = 1
    NON = 2
    SEND_ONLY_NON = 4
    SEND_ONLY_FULL = 8


RECEIVING = JoinState.FULL | JoinState.NON
"""The kinds of membership that get the group's messages: a member of either kind is no send-only member."""

JOIN_STATES = tuple(JoinState(bits) for bits in range(16))
"""Every combination of the bits. Making one anew would take ten times as long as looking it up."""


class McMemberRecord(NamedTuple):
    """MCMemberRecord: every field of its 52 bytes. Field number i belongs to bit i of the mask."""

    mgid: bytes = ZERO_GID
    port_gid: bytes = ZERO_GID
    qkey: int = 0
    mlid: int = 0
    mtu_selector: int = 0
    mtu: int = 0
    tclass: int = 0
    pkey: int = 0
    rate_selector: int = 0
    rate: int = 0
    life_selector: int = 0
    packet_life: int = 0
    sl: int = 0
    flow_label: int = 0
    hop_limit: int = 0
    scope: int = 0
    join_state: int = 0
    proxy_join: bool = False

    def pack(self) -> bytes:
        """The record as the 52 bytes of the wire.

        Raises ValueError, which names the field, if one does not fit.
        """
        for name, width in _WIDTHS:
            if not 0 <= getattr(self, name) < 1 << width:
                raise ValueError(f"{name}={getattr(self, name)!r} does not fit in {width} bits")
        for name in ("mgid", "port_gid"):
            if len(getattr(self, name)) != 16:
                raise ValueError(f"{name} has {len(getattr(self, name))} bytes, a GID has 16")
        return _WIRE.pack(
            self.mgid,
            self.port_gid,
            self.qkey,
            self.mlid,
            self.mtu_selector << 6 | self.mtu,
            self.tclass,
            self.pkey,
            self.rate_selector << 6 | self.rate,
            self.life_selector << 6 | self.packet_life,
            self.sl << 28 | self.flow_label << 8 | self.hop_limit,
            self.scope << 4 | self.join_state,
            self.proxy_join << 7,
        )

    @classmethod
    def unpack(cls, wire: bytes) -> McMemberRecord:
        """The record in 52 bytes, without the reserved bits. Raises ValueError for another length."""
        if len(wire) != RECORD_SIZE:
            raise ValueError(f"an MCMemberRecord has {RECORD_SIZE} bytes, not {len(wire)}")
        mgid, port_gid, qkey, mlid, mtu, tclass, pkey, rate, life, sl_flow_hop, state, proxy = _WIRE.unpack(
            wire
        )
        return cls(
            mgid,
            port_gid,
            qkey,
            mlid,
            mtu >> 6,
            mtu & 63,
            tclass,
            pkey,
            rate >> 6,
            rate & 63,
            life >> 6,
            life & 63,
            sl_flow_hop >> 28,
            sl_flow_hop >> 8 & 0xFFFFF,
            sl_flow_hop & 255,
            state >> 4,
            JOIN_STATES[state & 15],
            bool(proxy & 0x80),
        )


make_record: Callable[[tuple[bytes | int, ...]], McMemberRecord] = partial(tuple.__new__, McMemberRecord)
"""Make a record from all 18 fields, in a third of the constructor's time."""


@cache
def field_getter(mask: int) -> Callable[[McMemberRecord], object]:
    """A function that picks the masked fields, at least one, from a record: equal picks mean equal fields."""
    return itemgetter(*(at for at in range(len(McMemberRecord._fields)) if mask >> at & 1))


_WIRE = struct.Struct(">16s16sIHBBHBBIBB2x")
_WIDTHS = (
    ("qkey", 32),
    ("mlid", 16),
    ("mtu_selector", 2),
    ("mtu", 6),
    ("tclass", 8),
    ("pkey", 16),
    ("rate_selector", 2),
    ("rate", 6),
    ("life_selector", 2),
    ("packet_life", 6),
    ("sl", 4),
    ("flow_label", 20),
    ("hop_limit", 8),
    ("scope", 4),
    ("join_state", 4),
    ("proxy_join", 1),
)
