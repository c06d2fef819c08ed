"""State machine of a membership, as one table; and the groups of an endpoint, with their counters.

    JOINING -> JOINED -> LOST -> JOINED ...   with a rejoin policy; LOST -> FAILED when it gives up
    JOINING -> FAILED                         when the join is refused
    JOINED -> FAILED                          without a policy
    any state -> LEFT                         by leave or close

A change (`Change`) leads to the next state and to actions (`Action`), which are values: `recovery.Rejoiner`
carries them out, `core.EndpointCore` and the rejoiner cause the changes. A change without a row changes
nothing: `IGNORED` says why, for an event that is late, for example. A group belongs to its endpoint, and
changes only under the endpoint's guard. This file wakes nobody: the driver lets waiting calls check again
after it has handled events, or when `Waiting.dirty` is set.

Deliberately not handled here: when to try again, and on which port, which is `recovery`'s, and messages that
are lost while a group is LOST.
"""

from __future__ import annotations

import errno as E
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from mcast.api import AlreadyJoined, Destination, DeviceInfo, McastError, Phase, Refused, mcast_error
from mcast.endpoint import sequence
from mcast.endpoint.numbering import Numbering
from mcast.endpoint.receive_buffer import GroupQueue
from mcast.endpoint.stats import GroupStats
from mcast.wire.addresses import Gid, McastAddress

logger: logging.Logger = logging.getLogger("mcast")


class GroupState(Enum):
    """The states of a membership."""

    JOINING = "joining"
    JOINED = "joined"
    LOST = "lost, to be joined again"
    FAILED = "lost for good"
    LEFT = "left"


class Change(Enum):
    """Inputs of the membership's state machine."""

    CONFIRMED = "the event of the join says joined"
    REFUSED = "the event of the join is an error"
    COLLISION = "joined, but another membership has the same MGID"
    QP_FAILED = "the queue pair went into ERR"
    ID_LOST = "the device or the address went away"
    QP_RESTORED = "the queue pair was reset"
    GIVEN_UP = "the policy ends the attempts"
    LEAVE = "leave, or close"


class Action(Enum):
    """Outputs of the membership's state machine, carried out by `recovery.Rejoiner`."""

    RECORD_DESTINATION = "note where to send"
    REPORT_LOST = "tell `Lost`"
    REPORT_REJOINED = "tell `Rejoined`"
    REPORT_GAVE_UP = "tell `GaveUp`"
    SCHEDULE_JOIN = "plan to join again"
    AWAIT_QP_RESET = "wait for the queue pair"
    SCHEDULE_RETRY = "plan the next attempt"
    UNDO_JOIN = "leave, and keep the other attached"
    WAKE_RECEIVERS = "wake the calls that receive"


class Transition(NamedTuple):
    """The state that a change leads to, and the actions to do, in order."""

    state: GroupState
    actions: tuple[Action, ...] = ()


Transitions = Mapping[tuple[GroupState, Change], Transition]

TRANSITIONS: dict[tuple[GroupState, Change], Transition] = {
    (GroupState.JOINING, Change.CONFIRMED): Transition(GroupState.JOINED, (Action.RECORD_DESTINATION,)),
    (GroupState.JOINING, Change.REFUSED): Transition(GroupState.FAILED, (Action.WAKE_RECEIVERS,)),
    (GroupState.JOINING, Change.COLLISION): Transition(
        GroupState.FAILED, (Action.UNDO_JOIN, Action.WAKE_RECEIVERS)
    ),
    (GroupState.JOINING, Change.ID_LOST): Transition(GroupState.FAILED, (Action.WAKE_RECEIVERS,)),
    (GroupState.JOINED, Change.REFUSED): Transition(
        GroupState.LOST, (Action.REPORT_LOST, Action.SCHEDULE_JOIN)
    ),
    (GroupState.JOINED, Change.ID_LOST): Transition(
        GroupState.LOST, (Action.REPORT_LOST, Action.SCHEDULE_JOIN)
    ),
    (GroupState.JOINED, Change.QP_FAILED): Transition(
        GroupState.LOST, (Action.REPORT_LOST, Action.AWAIT_QP_RESET)
    ),
    (GroupState.LOST, Change.CONFIRMED): Transition(
        GroupState.JOINED, (Action.RECORD_DESTINATION, Action.REPORT_REJOINED)
    ),
    (GroupState.LOST, Change.QP_RESTORED): Transition(GroupState.JOINED, (Action.REPORT_REJOINED,)),
    (GroupState.LOST, Change.REFUSED): Transition(GroupState.LOST, (Action.SCHEDULE_RETRY,)),
    (GroupState.LOST, Change.COLLISION): Transition(
        GroupState.FAILED, (Action.UNDO_JOIN, Action.WAKE_RECEIVERS)
    ),
    (GroupState.LOST, Change.GIVEN_UP): Transition(
        GroupState.FAILED, (Action.REPORT_GAVE_UP, Action.WAKE_RECEIVERS)
    ),
    (GroupState.JOINING, Change.LEAVE): Transition(GroupState.LEFT),
    (GroupState.JOINED, Change.LEAVE): Transition(GroupState.LEFT),
    (GroupState.LOST, Change.LEAVE): Transition(GroupState.LEFT),
    (GroupState.FAILED, Change.LEAVE): Transition(GroupState.LEFT),
}
"""The life of a membership that has a rejoin policy."""

TRANSITIONS_WITHOUT_POLICY: Transitions = TRANSITIONS | {
    (GroupState.JOINED, change): Transition(GroupState.FAILED, (Action.REPORT_LOST, Action.WAKE_RECEIVERS))
    for change in (Change.REFUSED, Change.ID_LOST)
}
"""The life of a membership without a rejoin policy: a lost membership stays lost."""


IGNORED: Mapping[tuple[GroupState, Change], str] = {
    (GroupState.JOINING, Change.QP_FAILED): "the join goes on, and its event says how it ends",
    (GroupState.LOST, Change.QP_FAILED): "the membership is lost already",
    (GroupState.LOST, Change.ID_LOST): "the membership is lost already",
    **{
        (GroupState.FAILED, change): "the membership has ended"
        for change in Change
        if change is not Change.LEAVE
    },
    **{(GroupState.LEFT, change): "the membership has ended" for change in Change},
}
"""State and change without a row -> why the change means nothing then. Any other one cannot be."""


class Recovery:
    """The attempts to restore what was lost at `since`.

    `due` is when the next attempt comes, inf while one is under way.

    `needs_join` is False for a group whose queue pair alone was lost: resetting the queue pair restores the
    group.
    """

    def __init__(self, since: float, due: float, needs_join: bool = True) -> None:
        self.since: float = since
        self.due: float = due
        self.needs_join: bool = needs_join
        self.attempts = 0


@dataclass(slots=True)
class GroupCounts:
    """Counters that the group keeps itself; `GroupStats` explains each."""

    sent: int = 0
    sent_bytes: int = 0
    sent_batches: int = 0
    received: int = 0
    received_bytes: int = 0
    joins: int = 0
    rejoins: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return all counts by name; `asdict` takes twenty times as long."""
        return {name: getattr(self, name) for name in self.__slots__}


SEQUENCE_COUNTS = ("gaps", "late", "duplicates")
"""Counters of a group's sources."""


class EndpointGroup:
    """One group of an endpoint, from join to leave."""

    def __init__(
        self, address: McastAddress, send_only: bool, depth: int, stream: int, numbered: bool = True
    ) -> None:
        self.numbered: bool = numbered
        self.address: McastAddress = address
        self.send_only: bool = send_only
        self.state: GroupState = GroupState.JOINING
        self.destination: Destination | None = None
        self.error: McastError | None = None
        self.reported = False
        """True if a call that receives for all groups has raised the loss."""
        self.recovery: Recovery | None = None
        self.queue: GroupQueue = GroupQueue(depth)
        self.sources: sequence.Sources = sequence.Sources()
        self.numbering: Numbering = Numbering(stream)
        self.counts: GroupCounts = GroupCounts()
        self.dropped: Counter[str] = Counter()

    def transition(self, change: Change, transitions: Transitions = TRANSITIONS) -> tuple[Action, ...]:
        """Change the membership's state as the table says; return the actions to do."""
        transition = transitions.get((self.state, change))
        if transition is None:
            if (self.state, change) not in IGNORED:
                logger.warning(
                    "%s is %s, and %r is impossible then: ignored; please report it",
                    self.address,
                    self.state.value,
                    change.value,
                )
            return ()
        self.state = transition.state
        return transition.actions

    def _sequence_counts(self) -> dict[str, Any]:
        return {field: self.sources.total(field) if self.numbered else None for field in SEQUENCE_COUNTS}

    def snapshot(self) -> GroupStats:
        """Return the counters of this membership."""
        return GroupStats(
            group=str(self.address),
            mgid=None if self.destination is None else self.destination.gid,
            joined=self.state is GroupState.JOINED,
            queued=len(self.queue),
            dropped=dict(self.dropped),
            sources=self.sources.snapshot(),
            forgotten_sources=self.sources.forgotten["streams"],
            **self._sequence_counts(),
            **self.counts.as_dict(),
        )


class GroupIndex:
    """The groups of an endpoint by address, and by MGID once they are joined."""

    def __init__(self) -> None:
        self.groups: dict[McastAddress, EndpointGroup] = {}
        self.by_mgid: dict[Gid, EndpointGroup] = {}
        self.only_group: EndpointGroup | None = None
        """The group of every message, if there is just one."""
        self.members: int = 0
        """Number of groups that the endpoint receives from."""
        self.ended: bool = False
        """True if a membership has failed or the endpoint is closed.

        Calls that receive must raise that.
        """

    def require_room(self, address: McastAddress, device: DeviceInfo) -> None:
        """Refuse a group that the device cannot join beside the others."""
        if len(self.groups) >= device.max_mcast_grp and address not in self.groups:
            detail = f"{device.name} allows {device.max_mcast_grp} groups (max_mcast_grp): leave one first"
            about = {"group": address, "device": device.name}
            raise Refused(mcast_error(E.ENOMEM, "join", Phase.JOIN, about, detail))

    def require_unknown(self, address: McastAddress) -> None:
        """Refuse a group whose membership is lost.

        The stack has forgotten it, but the next attempt to restore it, or its leave, would end the other one.
        """
        known = next((one for one in self.groups if one.address == address.address), None)
        if known is not None:
            raise Refused(AlreadyJoined("join", known))

    def enter(self, group: EndpointGroup) -> None:
        """Add a group that the endpoint has asked to join."""
        self.groups[group.address] = group
        self.members += not group.send_only

    def note_joined(self, group: EndpointGroup, destination: Destination) -> None:
        """Note that the group is joined: from now on messages of its MGID are its own."""
        group.destination = destination
        self.by_mgid[destination.gid] = group
        self._note_groups()
        group.counts.joins += 1

    def collision(self, group: EndpointGroup, destination: Destination) -> McastError | None:
        """Return why the group cannot be joined beside the others.

        Another address of the endpoint has the same MGID.

        The messages of the two could not be told apart, and leaving one would leave both.
        """
        known = self.by_mgid.get(destination.gid)
        if known is None or known is group:
            return None
        detail = f"{group.address} and {known.address} have the MGID {destination.gid}: join one of them"
        return mcast_error(E.EADDRINUSE, "join", Phase.JOIN, {"group": group.address}, detail)

    def leave(self, group: EndpointGroup) -> bool:
        """End the membership; return whether it was one of the endpoint's."""
        group.transition(Change.LEAVE)
        known = self.groups.get(group.address) is group
        if known:
            del self.groups[group.address]
            self.members -= not group.send_only
        return known

    def update_ended(self) -> None:
        """A group that is gone may have been left: note whether there is another."""
        self.ended = any(one.state is GroupState.FAILED for one in self.groups.values())

    def detach(self, group: EndpointGroup) -> None:
        """Note that messages of the group's MGID are its own no longer."""
        if group.destination is not None and self.by_mgid.get(group.destination.gid) is group:
            del self.by_mgid[group.destination.gid]
            self._note_groups()

    def end(self) -> None:
        """Leave every group, for the endpoint is closed."""
        self.ended = True
        for group in self.groups.values():
            group.transition(Change.LEAVE)

    def _note_groups(self) -> None:
        self.only_group = next(iter(self.by_mgid.values())) if len(self.by_mgid) == 1 else None
