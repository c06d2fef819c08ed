"""Receivers that are too slow for the strategy: which of them the sender leaves behind, and when.

A sender is never more than a window ahead of its slowest receiver, and slows down for its losses, so one slow
receiver slows down all others. The strategy `all` means that. `deadline` and `quorum` can be met without the
slow ones, which then have a budget of time to cost the others:

deadline  an eighth of its time. After that, a receiver is left behind if it would miss the deadline at its
          speed so far, not counting the time in which others held it up. When another is left behind, whose
          pace it had, no more than the budget of the time before counts
quorum    a quarter of the time that the object takes without them, and MIN_DELAY at least

Only a receiver that holds up others is slow. If all are slow, or too few would be left for the quorum, nobody
is left behind.

`Stragglers.check` runs while the sender is held up, by a full window, by awaited answers, or by losses. One
late answer does not make a receiver slow: it must be behind in two checks in a row, an interval apart. Nor
does a lost answer: before a receiver is left behind, the caller probes it with a FLUSH, up to _MAX_PROBES
times. The state of each receiver is in its `Member`; this class writes `behind_since`, `probes`, `probed_at`
and `held_up` alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from heapq import nlargest
from math import inf

from mcast.cast.protocol.backoff import MIN_ROUND_TRIP
from mcast.cast.protocol.members import Member
from mcast.cast.protocol.outgoing import OutgoingObject
from mcast.cast.protocol.strategy import Strategy

_DEADLINE_SHARE = 1 / 8
_QUORUM_SHARE = 1 / 4
MIN_DELAY = 0.1
"""Minimum budget of slow receivers in a quorum, in seconds."""
_CHECKS = 8
"""Checks during the budget."""
_ROUND_TRIPS = 32
"""Minimum round trips during the budget; a longer measured round trip is cut to that."""
_MIN_INTERVAL = 0.002
"""Minimum seconds between two checks, each of which looks at all receivers."""
_MAX_PROBES = 4
"""Maximum probes of a receiver, one in each check, before its last answer is taken for its state."""
_LOSS_VALID = 1.0
"""Seconds for which a receiver's report of losses is used."""


class Stragglers:
    """Watch over one object: time that slow receivers have cost the others, and receivers to leave behind."""

    def __init__(self, strategy: Strategy, begun: float) -> None:
        self._strategy, self._begun = strategy, begun
        promises = strategy.receivers is not None or strategy.seconds is not None
        self._watches = promises and not strategy.carousel
        self._delayed = 0.0
        self._checked_at = -inf
        self.to_probe: list[Member] = []
        """Receivers to probe now with a FLUSH."""
        self.at: float = inf
        """When to check again; inf while nothing holds the sender up."""

    @property
    def reason(self) -> str:
        """Reason for leaving a receiver behind, for reports."""
        promise = "deadline" if self._strategy.receivers is None else "quorum"
        return f"left behind: this receiver is too slow for the {promise}"

    def max_round_trip(self, now: float) -> float:
        """Return the maximum round trip, in seconds, that the sender announces; inf for no limit.

        Receivers back off for some round trips, so that of a slow receiver would delay all repairs.
        """
        return max(MIN_ROUND_TRIP, self._budget(now) / _ROUND_TRIPS) if self._watches else inf

    def _budget(self, now: float) -> float:
        if self._strategy.receivers is None:
            return (self._strategy.seconds or 0.0) * _DEADLINE_SHARE
        return max(MIN_DELAY, (now - self._begun - self._delayed) * _QUORUM_SHARE)

    def check(
        self,
        now: float,
        outgoing: OutgoingObject,
        complete: int,
        members: Iterable[Member],
        awaited: Collection[int],
        slowed: bool,
    ) -> list[Member]:
        """Return the receivers to leave behind now, and set `to_probe` and `at`.

        complete  number of receivers that have the object
        awaited   numbers of the receivers without whose answer the sender cannot send
        slowed    True if losses keep the sender's rate below its limit
        """
        self.to_probe = []
        held_up = (outgoing.full and not outgoing.all_sent) or bool(awaited) or slowed
        if not (self._watches and held_up):
            self.at = inf
            return []
        interval = max(_MIN_INTERVAL, self._budget(now) / _CHECKS)
        # The interval holds from one stall to the next, too: two late answers at once are no slow receiver.
        self.at = max(now, self._checked_at + interval)
        if now < self.at:
            return []
        passed = min(now - self._checked_at, interval * 2)  # do not count time in which nothing held it up
        self._checked_at, self.at = now, now + interval
        pending = [member for member in members if member.pending]
        slow = self._slow(now, outgoing, complete, pending, awaited, slowed)
        behind = []
        for member in pending:
            if member.number not in slow:
                member.behind_since, member.probes = inf, 0
            elif member.behind_since < now:
                behind.append(member)
            else:
                member.behind_since = now
        if not behind:
            return []
        self._delayed += passed
        for member in pending:
            if member.number not in slow:
                member.held_up += passed
        if self._delayed < self._budget(now):
            return []
        behind = [member for member in behind if self._would_miss(now, outgoing, member)]
        self.to_probe = [
            one
            for one in behind
            if one.probes < _MAX_PROBES and (one.last_heard <= one.probed_at or not one.probes)
        ]
        for member in self.to_probe:
            member.probes += 1
            member.probed_at = now
        probed = {member.number for member in self.to_probe}
        left = [member for member in behind if member.number not in probed]
        if left:
            for member in pending:
                if member.number not in slow:  # its pace was that of those who are left behind now
                    member.held_up = max(member.held_up, now - member.joined - self._budget(now))
        return left

    def _slow(
        self,
        now: float,
        outgoing: OutgoingObject,
        complete: int,
        pending: list[Member],
        awaited: Collection[int],
        slowed: bool,
    ) -> set[int]:
        """Return the numbers of the receivers that hold up others; empty if the promise needs one of them."""
        needed = 1 if self._strategy.receivers is None else self._strategy.receivers - complete
        if not 0 < needed < len(pending):
            return set()
        bases = [member.base for member in pending]
        level, lowest = nlargest(needed, bases)[-1], min(bases)
        full = outgoing.full and level + outgoing.window > outgoing.sent
        worst = max((one.loss for one in pending if slowed and now - one.loss_at < _LOSS_VALID), default=inf)

        def holds_up(member: Member) -> bool:
            if awaited:
                return member.number in awaited
            if member.base >= level:
                return False
            # A slow sender sends repairs late, so receivers may be behind through no fault of their own.
            share = 8 if slowed else 2
            lags = (member.base - lowest) * share <= level - lowest
            lossy = now - member.loss_at < _LOSS_VALID and 2 * member.loss >= worst
            return (full and lags) or (lossy and 2 * member.base <= lowest + level)

        slow = {member.number for member in pending if holds_up(member)}
        return slow if len(pending) - len(slow) >= needed else set()

    def _would_miss(self, now: float, outgoing: OutgoingObject, member: Member) -> bool:
        """Return True if a receiver would miss the deadline at its speed so far, or there is none."""
        if self._strategy.receivers is not None or outgoing.blocks is None:
            return True
        elapsed = now - member.joined - member.held_up
        left = self._begun + (self._strategy.seconds or 0.0) - now
        return elapsed >= self._budget(now) and member.base * left < (outgoing.blocks - member.base) * elapsed
