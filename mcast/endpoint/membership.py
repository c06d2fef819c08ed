"""The life of a membership, one table of states and changes; and the group that lives it, with its counts.

A change leads to the next state and to actions, which are values: `recovery.Restorer` carries them out. A
change without a row changes nothing, such as what comes late for a membership that is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from mcast.api import Destination, McastError
from mcast.endpoint import sequence
from mcast.endpoint.inbox import Inbox
from mcast.endpoint.stats import GroupStats
from mcast.interrupts import Lock
from mcast.wire.addresses import McastAddress


class GroupState(Enum):
    """Where a membership stands."""

    JOINING = "joining"
    JOINED = "joined"
    LOST = "lost, to be joined again"
    GONE = "lost for good"
    LEFT = "left"


class Change(Enum):
    """What happens to a membership."""

    CONFIRMED = "the join's event: it is joined"
    REFUSED = "the join's event: an error"
    COLLIDES = "it is joined, and its MGID is another membership's"
    QP_FAILED = "the queue pair went into ERR"
    ID_GONE = "the device or the address went away"
    QP_BACK = "the queue pair was reset"
    GIVEN_UP = "the policy ends the attempts"
    LEAVE = "leave, or close"


class Action(Enum):
    """What a change asks for."""

    NOTE = "note where to send"
    TELL_LOST = "tell `Lost`"
    TELL_REJOINED = "tell `Rejoined`"
    TELL_GAVE_UP = "tell `GaveUp`"
    PLAN_JOIN = "plan to join again"
    PLAN_RESET = "wait for the queue pair"
    TRY_AGAIN = "plan the next attempt"
    UNDO_JOIN = "leave for the other's sake"
    END = "tell who receives"


class Step(NamedTuple):
    """Where a change leads to, and what is to be done, in order."""

    state: GroupState
    actions: tuple[Action, ...] = ()


Life = Mapping[tuple[GroupState, Change], Step]

LIFE: dict[tuple[GroupState, Change], Step] = {
    (GroupState.JOINING, Change.CONFIRMED): Step(GroupState.JOINED, (Action.NOTE,)),
    (GroupState.JOINING, Change.REFUSED): Step(GroupState.GONE, (Action.END,)),
    (GroupState.JOINING, Change.COLLIDES): Step(GroupState.GONE, (Action.UNDO_JOIN, Action.END)),
    (GroupState.JOINING, Change.ID_GONE): Step(GroupState.GONE, (Action.END,)),
    (GroupState.JOINED, Change.REFUSED): Step(GroupState.LOST, (Action.TELL_LOST, Action.PLAN_JOIN)),
    (GroupState.JOINED, Change.ID_GONE): Step(GroupState.LOST, (Action.TELL_LOST, Action.PLAN_JOIN)),
    (GroupState.JOINED, Change.QP_FAILED): Step(GroupState.LOST, (Action.TELL_LOST, Action.PLAN_RESET)),
    (GroupState.LOST, Change.CONFIRMED): Step(GroupState.JOINED, (Action.NOTE, Action.TELL_REJOINED)),
    (GroupState.LOST, Change.QP_BACK): Step(GroupState.JOINED, (Action.TELL_REJOINED,)),
    (GroupState.LOST, Change.REFUSED): Step(GroupState.LOST, (Action.TRY_AGAIN,)),
    (GroupState.LOST, Change.COLLIDES): Step(GroupState.GONE, (Action.UNDO_JOIN, Action.END)),
    (GroupState.LOST, Change.GIVEN_UP): Step(GroupState.GONE, (Action.TELL_GAVE_UP, Action.END)),
    (GroupState.JOINING, Change.LEAVE): Step(GroupState.LEFT),
    (GroupState.JOINED, Change.LEAVE): Step(GroupState.LEFT),
    (GroupState.LOST, Change.LEAVE): Step(GroupState.LEFT),
    (GroupState.GONE, Change.LEAVE): Step(GroupState.LEFT),
}
"""With a rejoin policy."""

LIFE_WITHOUT_POLICY: Life = LIFE | {
    (GroupState.JOINED, change): Step(GroupState.GONE, (Action.TELL_LOST, Action.END))
    for change in (Change.REFUSED, Change.ID_GONE)
}
"""What is lost stays lost."""


class Recovery:
    """Attempts to get something back, lost at `since`; the next is `due`, inf while one is under way.

    A group whose QP alone was lost needs no join.
    """

    def __init__(self, since: float, due: float, needs_join: bool = True) -> None:
        self.since, self.due, self.needs_join = since, due, needs_join
        self.attempts = 0


class EndpointGroup:
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
        self.sending = Lock()
        """Held from numbering to posting, so that numbers go out in order."""
        self.sent = self.sent_bytes = self.sent_batches = 0
        self.received = self.received_bytes = 0
        self.joins = self.rejoins = 0
        self.dropped: Counter[str] = Counter()

    def happens(self, change: Change, life: Life = LIFE) -> tuple[Action, ...]:
        """Take the membership one step on; what is to be done."""
        self.state, actions = life.get((self.state, change), Step(self.state))
        return actions

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
