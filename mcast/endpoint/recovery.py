"""Recovery by the rejoin policy: what follows when a membership, the queue pair or the device is lost.

Nothing here waits: `due` says when `recover` has something to do.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from math import inf
from random import Random

from mcast.api import Destination, McastError, QpError, QueuePair, Refused
from mcast.endpoint.membership import LIFE, LIFE_WITHOUT_POLICY, Action, Change, EndpointGroup, Recovery
from mcast.endpoint.policy import Event, GaveUp, Lost, Rejoined
from mcast.endpoint.station import Station
from mcast.endpoint.waiting import asked


class Restorer:
    """Restores what a station has lost.

    `now` gives monotonic seconds; `tell` takes the events for the user.
    """

    def __init__(
        self, station: Station, random: Random, now: Callable[[], float], tell: Callable[[Event], None]
    ) -> None:
        self._station, self._random, self._now, self._tell = station, random, now, tell
        self._policy = station.settings.rejoin
        self.recovery: Recovery | None = None
        """The recovery of the id and its queue pair, or of the queue pair alone; None while both are well."""
        self.reopen: bool = False
        """Whether recovery needs a new id."""
        self.busy: bool = False
        """Whether something may be in recovery; `due` clears it when nothing is."""

    def due(self) -> float:
        """When `recover` has something to do; inf: not before an event comes."""
        if not self.busy:
            return inf
        recoveries = [self.recovery, *(group.recovery for group in self._station.roster.groups.values())]
        dues = [one.due for one in recoveries if one is not None]
        self.busy = bool(dues)
        return min(dues, default=inf)

    @property
    def has_ended(self) -> bool:
        """Whether the id and its queue pair are lost for good: without a policy, or when it has given up."""
        return self.recovery is not None and self.recovery.due == inf

    @property
    def usable_qp(self) -> QueuePair | None:
        """The queue pair, None while it is in ERR or its device is away."""
        return self._station.qp if self.recovery is None else None

    # --- the life of a membership ----------------------------------------------------------------

    def on_joined(self, group: EndpointGroup, destination: Destination) -> None:
        """Handle the event of a join: the group is joined, unless another group of the endpoint has its
        MGID."""
        error = self._station.roster.collision(group, destination)
        if error is None:
            self.happens(group, Change.CONFIRMED, destination=destination)
        else:
            self.happens(group, Change.COLLIDES, error, destination)

    def happens(
        self,
        group: EndpointGroup,
        change: Change,
        error: McastError | None = None,
        destination: Destination | None = None,
    ) -> None:
        """Take one step in the life of a membership, and do the actions of that step."""
        actions = group.happens(change, LIFE if self._policy is not None else LIFE_WITHOUT_POLICY)
        if actions and error is not None:
            group.error = copy(error)  # without the frames of the call that has raised it
        for action in actions:
            self._do(action, group, destination)

    def _do(self, action: Action, group: EndpointGroup, destination: Destination | None) -> None:
        error, recovery, address = group.error, group.recovery, group.address
        match action:
            case Action.NOTE:
                assert destination is not None
                self._station.note_joined(group, destination)
            case Action.UNDO_JOIN:
                assert destination is not None
                self._station.undo_join(group, destination)
            case Action.TELL_LOST:
                assert error is not None
                group.told = False
                self._tell(Lost(address, error))
            case Action.PLAN_JOIN | Action.PLAN_RESET:
                group.recovery = self._first_attempt(needs_join=action is Action.PLAN_JOIN)
            case Action.TRY_AGAIN:
                assert recovery is not None
                if not self._plan_next(recovery):
                    self.happens(group, Change.GIVEN_UP)
            case Action.TELL_REJOINED:
                assert recovery is not None
                group.recovery, group.error = None, None
                group.counts.rejoins += 1
                self._tell(Rejoined(address, self._now() - recovery.since, recovery.attempts))
            case Action.TELL_GAVE_UP:
                assert error is not None
                assert recovery is not None
                self._tell(GaveUp(address, error, recovery.attempts))
            case Action.END:
                group.told, group.recovery = False, None
                self._station.roster.ended = True

    def _first_attempt(self, needs_join: bool = True) -> Recovery:
        self.busy = True
        now = self._now()
        due = inf if self._policy is None else now + self._policy.delay(1, self._random)
        return Recovery(now, due, needs_join)

    # --- loss ----------------------------------------------------------------------------------

    def lose_all(self, error: McastError, reopen: bool) -> None:
        """Note that the queue pair cannot be used any more; with `reopen`, that the id and every membership
        are lost, too."""
        change = Change.ID_GONE if reopen else Change.QP_FAILED
        for group in self._station.roster.groups.values():
            self.happens(group, change, error)
            if group.recovery is not None and not group.recovery.needs_join:
                group.recovery.due = inf  # `_restore_qp` goes on when the queue pair is back
        if reopen:
            self._need_reopening()
        if self.recovery is None:
            self.recovery = self._first_attempt()

    def on_qp_error(self, error: QpError) -> None:
        """The queue pair went into ERR: with a policy it will be reset, without one the caller gets the
        error."""
        if self._policy is None:
            raise Refused(error)
        if self.recovery is None:
            self.lose_all(error, reopen=False)

    def _need_reopening(self) -> None:
        """Note that recovery needs a new id, and that every membership has to be joined again on it."""
        self.reopen = True
        for group in self._station.roster.groups.values():
            if group.recovery is not None:
                group.recovery.due, group.recovery.needs_join = inf, True

    # --- recovery ------------------------------------------------------------------------------

    def recover(self) -> None:
        """Do the attempts that are due."""
        now = self._now()
        if self.recovery is not None and self.recovery.due <= now:
            self._restore_qp(self.recovery)
        for group in self._station.roster.groups.values():
            if group.recovery is not None and group.recovery.due <= now:
                self._rejoin(group, group.recovery)

    def _restore_qp(self, recovery: Recovery) -> None:
        """Reset the queue pair; or make a new id and queue pair on the same address, and join every group
        there."""
        groups = self._station.roster.groups.values()
        recovery.attempts += 1
        try:
            if self.reopen:
                self._station.replace_id()
            else:
                asked(self._station.qp.reset)
        except Refused as refused:
            error = _mcast_error_of(refused)
            self.lose_all(error, reopen=True)  # a queue pair that cannot be reset is replaced
            if not self._plan_next(recovery):
                for group in groups:
                    if group.recovery is not None:
                        group.recovery.attempts = recovery.attempts
                        self.happens(group, Change.GIVEN_UP, error)
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
                self.happens(group, Change.QP_BACK)

    def _rejoin(self, group: EndpointGroup, recovery: Recovery) -> None:
        recovery.attempts += 1
        recovery.due = inf  # the outcome is an event
        self._station.leave_quietly(group)
        try:
            self._station.ask_to_join(group)
        except Refused as refused:
            self.happens(group, Change.REFUSED, _mcast_error_of(refused))

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
