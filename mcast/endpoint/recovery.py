"""Recovery by the rejoin policy, after a membership, the queue pair or the device was lost.

Three things are lost, and restored, apart from each other:

    a membership     each group has a `Recovery` of its own, which joins again on the same id
    the queue pair   one `Recovery` of the endpoint resets it; its groups wait with `due` inf, and need no
                     join
    the id           (`reopen`) the same recovery makes a new id and queue pair on the port that has the
                     address now; every group then joins anew. A queue pair that cannot be reset is replaced
                     in the same way

Nothing here waits: `due` says when `recover` has something to do, and the driver wakes for that. While an
attempt is under way its `due` is inf, and the event of the join decides. The policy counts attempts from the
loss.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from math import inf
from random import Random

from mcast.api import Destination, McastError, QpError, QueuePair, Refused
from mcast.endpoint.membership import (
    TRANSITIONS,
    TRANSITIONS_WITHOUT_POLICY,
    Action,
    Change,
    EndpointGroup,
    Recovery,
)
from mcast.endpoint.policy import Event, GaveUp, Lost, Rejoined
from mcast.endpoint.resources import PortResources
from mcast.endpoint.waiting import call_provider


class Rejoiner:
    """Restores what a station has lost.

    `now` gives monotonic seconds; `report` takes the events for the user.
    """

    def __init__(
        self,
        resources: PortResources,
        random: Random,
        now: Callable[[], float],
        report: Callable[[Event], None],
    ) -> None:
        self._resources, self._random, self._now, self._report = resources, random, now, report
        self._policy = resources.settings.rejoin
        self.recovery: Recovery | None = None
        """The recovery of the id and its queue pair, or of the queue pair alone; None while both are well."""
        self.reopen: bool = False
        """True if recovery needs a new id."""
        self.busy: bool = False
        """True if something may be in recovery; `due` clears it when nothing is."""

    def due(self) -> float:
        """When `recover` has something to do; inf: not before an event comes."""
        if not self.busy:
            return inf
        recoveries = [
            self.recovery,
            *(group.recovery for group in self._resources.group_index.groups.values()),
        ]
        dues = [one.due for one in recoveries if one is not None]
        self.busy = bool(dues)
        return min(dues, default=inf)

    @property
    def has_ended(self) -> bool:
        """Return True if the id and its queue pair are lost for good.

        Without a policy, or when the policy has given up.
        """
        return self.recovery is not None and self.recovery.due == inf

    @property
    def usable_qp(self) -> QueuePair | None:
        """The queue pair, None while it is in ERR or its device is away."""
        return self._resources.qp if self.recovery is None else None

    # --- the life of a membership ----------------------------------------------------------------

    def on_joined(self, group: EndpointGroup, destination: Destination) -> None:
        """Handle the event of a join.

        The group is joined, unless another group of the endpoint has its MGID.
        """
        error = self._resources.group_index.collision(group, destination)
        if error is None:
            self.transition(group, Change.CONFIRMED, destination=destination)
        else:
            self.transition(group, Change.COLLISION, error, destination)

    def transition(
        self,
        group: EndpointGroup,
        change: Change,
        error: McastError | None = None,
        destination: Destination | None = None,
    ) -> None:
        """Take one step in the life of a membership, and do the actions of that step."""
        actions = group.transition(
            change, TRANSITIONS if self._policy is not None else TRANSITIONS_WITHOUT_POLICY
        )
        if actions and error is not None:
            group.error = copy(error)  # without the frames of the call that has raised it
        for action in actions:
            self._do(action, group, destination)

    def _do(self, action: Action, group: EndpointGroup, destination: Destination | None) -> None:
        error, recovery, address = group.error, group.recovery, group.address
        match action:
            case Action.RECORD_DESTINATION:
                assert destination is not None
                self._resources.note_joined(group, destination)
            case Action.UNDO_JOIN:
                assert destination is not None
                self._resources.undo_join(group, destination)
            case Action.REPORT_LOST:
                assert error is not None
                group.reported = False
                self._report(Lost(address, error))
            case Action.SCHEDULE_JOIN | Action.AWAIT_QP_RESET:
                group.recovery = self._first_attempt(needs_join=action is Action.SCHEDULE_JOIN)
            case Action.SCHEDULE_RETRY:
                assert recovery is not None
                if not self._plan_next(recovery):
                    self.transition(group, Change.GIVEN_UP)
            case Action.REPORT_REJOINED:
                assert recovery is not None
                group.recovery, group.error = None, None
                group.counts.rejoins += 1
                self._report(Rejoined(address, self._now() - recovery.since, recovery.attempts))
            case Action.REPORT_GAVE_UP:
                assert error is not None
                assert recovery is not None
                self._report(GaveUp(address, error, recovery.attempts))
            case Action.WAKE_RECEIVERS:
                group.reported, group.recovery = False, None
                self._resources.group_index.ended = True

    def _first_attempt(self, needs_join: bool = True) -> Recovery:
        self.busy = True
        now = self._now()
        due = inf if self._policy is None else now + self._policy.delay(1, self._random)
        return Recovery(now, due, needs_join)

    # --- loss ----------------------------------------------------------------------------------

    def lose_all(self, error: McastError, reopen: bool) -> None:
        """Note that the queue pair cannot be used any more.

        With `reopen`, the id and every membership are lost, too.
        """
        change = Change.ID_LOST if reopen else Change.QP_FAILED
        for group in self._resources.group_index.groups.values():
            self.transition(group, change, error)
            if group.recovery is not None and not group.recovery.needs_join:
                group.recovery.due = inf  # `_restore_qp` goes on when the queue pair is back
        if reopen:
            self._need_reopening()
        if self.recovery is None:
            self.recovery = self._first_attempt()

    def on_qp_error(self, error: QpError) -> None:
        """Handle a queue pair that went into ERR.

        With a policy it will be reset, without one the caller gets the error.
        """
        if self._policy is None:
            raise Refused(error)
        if self.recovery is None:
            self.lose_all(error, reopen=False)

    def _need_reopening(self) -> None:
        """Note that recovery needs a new id, and that every membership has to be joined again on it."""
        self.reopen = True
        for group in self._resources.group_index.groups.values():
            if group.recovery is not None:
                group.recovery.due, group.recovery.needs_join = inf, True

    # --- recovery ------------------------------------------------------------------------------

    def recover(self) -> None:
        """Do the attempts that are due."""
        now = self._now()
        if self.recovery is not None and self.recovery.due <= now:
            self._restore_qp(self.recovery)
        for group in self._resources.group_index.groups.values():
            if group.recovery is not None and group.recovery.due <= now:
                self._rejoin(group, group.recovery)

    def _restore_qp(self, recovery: Recovery) -> None:
        """Reset the queue pair, or replace it.

        A new id and queue pair are made on the same address, and every group is joined there.
        """
        groups = self._resources.group_index.groups.values()
        recovery.attempts += 1
        try:
            if self.reopen:
                self._resources.replace_id()
            else:
                call_provider(self._resources.qp.reset)
        except Refused as refused:
            error = _mcast_error_of(refused)
            self.lose_all(error, reopen=True)  # a queue pair that cannot be reset is replaced
            if not self._plan_next(recovery):
                for group in groups:
                    if group.recovery is not None:
                        group.recovery.attempts = recovery.attempts
                        self.transition(group, Change.GIVEN_UP, error)
            return
        self.recovery = None
        self.reopen = False
        for group in groups:
            if group.recovery is None or group.recovery.due < inf:
                continue
            group.recovery.attempts = recovery.attempts
            if group.recovery.needs_join:
                group.recovery.attempts -= 1  # the same attempt goes on
                self._rejoin(group, group.recovery)
            else:
                self.transition(group, Change.QP_RESTORED)

    def _rejoin(self, group: EndpointGroup, recovery: Recovery) -> None:
        recovery.attempts += 1
        recovery.due = inf  # the outcome is an event
        self._resources.leave_quietly(group)
        try:
            self._resources.ask_to_join(group)
        except Refused as refused:
            self.transition(group, Change.REFUSED, _mcast_error_of(refused))

    def _plan_next(self, recovery: Recovery) -> bool:
        """Set when the next attempt is due; return False if the policy allows no further attempt."""
        policy, now = self._policy, self._now()
        assert policy is not None
        if policy.give_up_after is not None and now - recovery.since >= policy.give_up_after:
            recovery.due = inf
            return False
        recovery.due = now + policy.delay(recovery.attempts + 1, self._random)
        return True


def _mcast_error_of(refused: Refused) -> McastError:
    assert isinstance(refused.error, McastError)
    return refused.error
