"""One group of an endpoint: its state, its recovery, its queue and its counts. No rule, no I/O."""

from __future__ import annotations

import threading
from collections import Counter
from enum import Enum

from mcast.api import Destination, McastError
from mcast.endpoint import sequence
from mcast.endpoint.inbox import Inbox
from mcast.endpoint.stats import GroupStats
from mcast.wire.addresses import McastAddress


class GroupState(Enum):
    """Where a membership stands."""

    JOINING = "joining"
    JOINED = "joined"
    LOST = "lost, to be joined again"
    GONE = "lost for good"
    LEFT = "left"


class Recovery:
    """Attempts to get something back, lost at `since`; the next is `due`, inf while one is under way.

    A group whose QP alone was lost needs no join.
    """

    def __init__(self, since: float, due: float, needs_join: bool = True) -> None:
        self.since, self.due, self.needs_join = since, due, needs_join
        self.attempts = 0


class Group:
    """One group of an endpoint, from join to leave."""

    def __init__(self, address: McastAddress, send_only: bool, depth: int, stream: int) -> None:
        self.address, self.send_only = address, send_only
        self.state = GroupState.JOINING
        self.destination: Destination | None = None
        self.error: McastError | None = None
        self.told = False
        """Whether a call that serves all groups has raised the loss."""
        self.recovery: Recovery | None = None
        self.inbox = Inbox(depth)
        self.sources = sequence.Sources()
        self.stream, self.next_number = stream, 0
        self.sending = threading.Lock()
        """Held from numbering to posting, so that numbers go out in order."""
        self.sent = self.sent_bytes = self.sent_batches = 0
        self.received = self.received_bytes = 0
        self.joins = self.rejoins = 0
        self.dropped: Counter[str] = Counter()

    def snapshot(self) -> GroupStats:
        return GroupStats(
            group=str(self.address),
            mgid=None if self.destination is None else self.destination.gid,
            joined=self.state is GroupState.JOINED,
            queued=len(self.inbox),
            dropped=dict(self.dropped),
            sources=self.sources.snapshot(),
            forgotten_sources=self.sources.forgotten["streams"],
            **{field: self.sources.total(field) for field in SEQUENCE_COUNTS},
            **{field: getattr(self, field) for field in GROUP_COUNTS},
        )


GROUP_COUNTS = (
    "sent",
    "sent_bytes",
    "sent_batches",
    "received",
    "received_bytes",
    "joins",
    "rejoins",
)
"""What is counted by a group itself: its attributes, and those of its snapshot."""

SEQUENCE_COUNTS = ("gaps", "late", "duplicates")
"""What is counted by the sources of a group."""
