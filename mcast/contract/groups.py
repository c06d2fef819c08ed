"""The groups that exist, and their members."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from mcast.wire.addresses import Gid


class GroupSource(Enum):
    """A table that records memberships. A member that is missing in the switch's table gets no messages."""

    HOST = "the host's own list"
    SWITCH = "the switch's snooping table"
    SA = "the SA's table"


NO_IGMP_TABLE = "send-only members: they send no IGMP report, so no table has them"
"""Sentence of `GroupTable.unseen` for each table of an Ethernet port."""


class GroupMember(NamedTuple):
    """A port that is in a group.

    port       `device/port` if it is a port of `Backend.devices`, otherwise the name that the table gives it
    seen_in    the tables that record the membership
    send_only  True if the table says that the port only sends to the group
    """

    port: str
    seen_in: frozenset[GroupSource]
    send_only: bool = False


class GroupInfo(NamedTuple):
    """A group that exists.

    Its `mgid`, those of its `members` that can be seen, and its `mlid`, which is 0 on Ethernet.
    """

    mgid: Gid
    members: tuple[GroupMember, ...]
    mlid: int = 0


class GroupTable(NamedTuple):
    """The groups that a backend can see: `groups`, ordered by MGID, and `unseen`, its blind spots.

    Each sentence of `unseen` says what the table cannot show, and why.
    """

    groups: tuple[GroupInfo, ...]
    unseen: tuple[str, ...]
