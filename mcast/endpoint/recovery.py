"""Loss and recovery: what the loss of a membership, of the QP or of the device leads to, by the policy.

It never waits: `due` says when `recover` has something to do.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import Random

from mcast.api import McastError, QpError
from mcast.endpoint.group import Group, GroupState, Recovery
from mcast.endpoint.policy import Event, GaveUp, Lost, Rejoined
from mcast.endpoint.station import Station


class Restorer:
    """Restores what a station has lost. `now`: monotonic seconds; `tell` takes what the user may know."""

    def __init__(
        self, station: Station, random: Random, now: Callable[[], float], tell: Callable[[Event], None]
    ) -> None:
        self._station, self._random, self._now, self._tell = station, random, now, tell
        self._policy = station.settings.rejoin
        self.recovery: Recovery | None = None
        """Of the id and QP, or of the QP alone; while it is set the QP is not used."""
        self.reopen = False
        """Whether only a new id will do."""
        self.busy = False
        """Whether something may be in recovery; `due` finds out."""

    def due(self) -> float:
        """When `recover` has something to do; inf: when an event comes."""
        if not self.busy:
            return inf
        recoveries = [self.recovery, *(group.recovery for group in self._station.groups.values())]
        dues = [one.due for one in recoveries if one is not None]
        self.busy = bool(dues)
        return min(dues, default=inf)

    # --- loss ----------------------------------------------------------------------------------

    def lose(self, group: Group, error: McastError, needs_join: bool = True) -> None:
        """A membership is gone: tell, and plan to get it back."""
        self.busy = True
        group.error, group.told = error, False
        self._tell(Lost(group.address, error))
        if self._policy is None:
            self._station.end(group, error)
        else:
            now = self._now()
            group.state = GroupState.LOST
            group.recovery = Recovery(now, now + self._policy.delay(1, self._random), needs_join)

    def lose_all(self, error: McastError, reopen: bool) -> None:
        """The QP is of no use any more; with `reopen` the id and every membership neither."""
        self.busy = True
        for group in self._station.groups.values():
            if group.state is GroupState.JOINED:
                self.lose(group, error, needs_join=reopen)
            elif group.state is GroupState.JOINING and reopen:
                self._station.end(group, error)
            if group.recovery is not None and not group.recovery.needs_join:
                group.recovery.due = inf  # once the QP is back
        if reopen:
            self._need_reopening()
        if self.recovery is None:
            now, policy = self._now(), self._policy
            due = inf if policy is None else now + policy.delay(1, self._random)
            self.recovery = Recovery(now, due)

    def on_qp_error(self, error: QpError) -> None:
        """The QP went into ERR: with a policy it is reset, else the error is the caller's."""
        if self._policy is None:
            raise error
        if self.recovery is None:
            self.lose_all(error, reopen=False)

    def _need_reopening(self) -> None:
        """Only a new id will do, and every membership is joined there anew."""
        self.reopen = True
        for group in self._station.groups.values():
            if group.recovery is not None:
                group.recovery.due, group.recovery.needs_join = inf, True

    # --- recovery ------------------------------------------------------------------------------

    def recover(self) -> None:
        """Do the attempts that are due."""
        now = self._now()
        if self.recovery is not None and self.recovery.due <= now:
            self._restore_qp(self.recovery)
        for group in self._station.groups.values():
            if group.recovery is not None and group.recovery.due <= now:
                self._rejoin(group, group.recovery)

    def on_rejoined(self, group: Group) -> None:
        """A membership is back."""
        recovery = group.recovery
        assert recovery is not None
        group.recovery, group.error = None, None
        group.rejoins += 1
        self._tell(Rejoined(group.address, self._now() - recovery.since, recovery.attempts))

    def on_failure(self, group: Group, error: McastError) -> None:
        """An attempt failed: plan the next, or give up."""
        group.error = error
        if group.recovery is not None and not self._plan_next(group.recovery):
            self._give_up(group, error, group.recovery.attempts)

    def _restore_qp(self, recovery: Recovery) -> None:
        """Reset the QP; or a new id and a new QP on the same address, and every group joined there."""
        groups = self._station.groups.values()
        recovery.attempts += 1
        try:
            if self.reopen:
                self._station.replace_id()
            else:
                self._station.qp.reset()
        except McastError as error:
            self._need_reopening()  # what cannot be reset is replaced
            if not self._plan_next(recovery):
                for group in groups:
                    if group.recovery is not None:
                        self._give_up(group, error, recovery.attempts)
            return
        self.reopen, self.recovery = False, None
        for group in groups:
            if group.recovery is None or group.recovery.due < inf:
                continue
            group.recovery.attempts = recovery.attempts
            if group.recovery.needs_join:
                group.recovery.attempts -= 1  # the same attempt goes on
                self._rejoin(group, group.recovery)
            else:
                self.on_rejoined(group)
                group.state = GroupState.JOINED

    def _rejoin(self, group: Group, recovery: Recovery) -> None:
        recovery.attempts += 1
        recovery.due = inf  # the outcome is an event
        self._station.leave_quietly(group)
        try:
            self._station.ask_to_join(group)
        except McastError as error:
            self.on_failure(group, error)

    def _plan_next(self, recovery: Recovery) -> bool:
        """Say when the next attempt is due; False if there shall be none."""
        policy, now = self._policy, self._now()
        assert policy is not None
        if policy.give_up_after is not None and now - recovery.since >= policy.give_up_after:
            recovery.due = inf
            return False
        recovery.due = now + policy.delay(recovery.attempts + 1, self._random)
        return True

    def _give_up(self, group: Group, error: McastError, attempts: int) -> None:
        self._station.end(group, error)
        self._tell(GaveUp(group.address, error, attempts))
