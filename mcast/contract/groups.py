"""Which groups exist, and who is in them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from mcast.wire.addresses import Gid


class GroupSource(Enum):
    """Where a membership is written down; one that is missing in the switch's table gets no messages."""

    HOST = "the host's own list"
    SWITCH = "the switch's snooping table"
    SA = "the SA's table"


class GroupMember(NamedTuple):
    """A port that is in a group.

    port       as `device/port` if it is one of `Backend.devices`, else as the table names it
    seen_in    the tables that have it
    send_only  the table says that it does not receive
    """

    port: str
    seen_in: frozenset[GroupSource]
    send_only: bool = False


class GroupInfo(NamedTuple):
    """A group that exists, and the members of it that can be seen. `mlid` is 0 on Ethernet."""

    mgid: Gid
    members: tuple[GroupMember, ...]
    mlid: int = 0


class GroupTable(NamedTuple):
    """Groups by MGID, and in a sentence each what they leave out, and why."""

    groups: tuple[GroupInfo, ...]
    unseen: tuple[str, ...]
