"""Receivers that are too slow for the strategy: which are left behind, and when.

A sender goes no further ahead of a receiver than that one can hold, and slows down for what is lost there. So
one slow receiver slows down all others. Where the strategy waits for all, it is meant to. `deadline` and
`quorum` promise something that does not need the slow ones, and then they may cost the others so much:

deadline  an eighth of its time. After that, each of them is left behind that would miss the deadline at the
          speed that it has had so far, while others did not hold it up. Those that would not are waited for
quorum    0.1 s and a quarter of the time that the object takes without them

Only what holds up others counts: where all are slow, or too few would be left for the quorum, nobody is left
behind. While the sender is held up, it looks every so often who is behind. One answer that comes a little
later than others makes nobody slow: a receiver is behind when it is so at two looks in a row. Nor does one
that was lost: before a receiver is left behind, it is asked how far it is.
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
"""Seconds that slow receivers may cost a quorum, however fast the others are."""
_CHECKS = 8
"""So many looks in the time that slow receivers may cost."""
_ROUND_TRIPS = 32
"""So many round trips in that time."""
_MIN_INTERVAL = 0.002
"""Seconds from one look to the next, at least: each is at all receivers."""
_MAX_PROBES = 4
"""A receiver that does not answer so many questions, one at each look, is as far as it was."""
_LOSS_VALID = 1.0
"""Seconds for which a report of too many losses says something of its receiver."""


class Stragglers:
    """Watch over one object: how long slow receivers have held up others, and who is left behind for that."""

    def __init__(self, strategy: Strategy, begun: float) -> None:
        self._strategy, self._begun = strategy, begun
        promises = strategy.receivers is not None or strategy.seconds is not None
        self._watches = promises and not strategy.carousel
        self._delayed = 0.0
        self._checked_at = -inf
        self.to_probe: list[Member] = []
        """Whom to ask now how far they are."""
        self.at: float = inf
        """When to look again; inf while nothing holds the sender up."""

    @property
    def reason(self) -> str:
        """Why a receiver was left behind."""
        of = "deadline" if self._strategy.receivers is None else "quorum"
        return f"left behind: this receiver is too slow for the {of}"

    def max_round_trip(self, now: float) -> float:
        """Seconds of the longest round trip that others wait for; inf where slow receivers may cost any time.

        Receivers wait some round trips before they ask for what they lack.
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
        whole: int,
        members: Iterable[Member],
        awaited: Collection[int],
        slowed: bool,
    ) -> list[Member]:
        """Return the receivers to leave behind now.

        whole    how many receivers have the object
        awaited  numbers of those whose answer the sender waits for before it sends on
        slowed   True if the sender is slower than it could be because messages were lost
        """
        self.to_probe = []
        held_up = (outgoing.full and not outgoing.all_sent) or bool(awaited) or slowed
        if not (self._watches and held_up):
            self.at = inf
            return []
        if now < self.at < inf:
            return []
        interval = max(_MIN_INTERVAL, self._budget(now) / _CHECKS)
        passed = min(now - self._checked_at, interval * 2)  # more has passed where nothing held the sender up
        self._checked_at, self.at = now, now + interval
        owing = [member for member in members if member.pending]
        slow = self._slow(now, outgoing, whole, owing, awaited, slowed)
        found = []
        for member in owing:
            if member.number not in slow:
                member.behind_since, member.probes = inf, 0
            elif member.behind_since < now:
                found.append(member)
            else:
                member.behind_since = now
        if not found:
            return []
        self._delayed += passed
        for member in owing:
            if member.number not in slow:
                member.held_up += passed
        if self._delayed < self._budget(now):
            return []
        found = [member for member in found if self._would_miss(now, outgoing, member)]
        self.to_probe = [
            one
            for one in found
            if one.probes < _MAX_PROBES and (one.last_heard <= one.probed_at or not one.probes)
        ]
        for member in self.to_probe:
            member.probes += 1
            member.probed_at = now
        asked = {member.number for member in self.to_probe}
        return [member for member in found if member.number not in asked]

    def _slow(
        self,
        now: float,
        outgoing: OutgoingObject,
        whole: int,
        owing: list[Member],
        awaited: Collection[int],
        slowed: bool,
    ) -> set[int]:
        """Numbers of the receivers that hold up others; empty if the promise needs one of them."""
        needed = 1 if self._strategy.receivers is None else self._strategy.receivers - whole
        if not 0 < needed < len(owing):
            return set()
        bases = [member.base for member in owing]
        level, lowest = nlargest(needed, bases)[-1], min(bases)
        full = outgoing.full and level + outgoing.window > outgoing.sent
        worst = max((one.loss for one in owing if slowed and now - one.loss_at < _LOSS_VALID), default=inf)

        def holds_up(member: Member) -> bool:
            if awaited:
                return member.number in awaited
            if member.base >= level:
                return False
            # Where the sender is slow, repairs are late: what others lack then is no fault of theirs.
            share = 8 if slowed else 2
            lags = (member.base - lowest) * share <= level - lowest
            lossy = now - member.loss_at < _LOSS_VALID and 2 * member.loss >= worst
            return (full and lags) or (lossy and 2 * member.base <= lowest + level)

        slow = {member.number for member in owing if holds_up(member)}
        return slow if len(owing) - len(slow) >= needed else set()

    def _would_miss(self, now: float, outgoing: OutgoingObject, member: Member) -> bool:
        """Return True if a receiver would miss the deadline at its speed so far, or there is none."""
        if self._strategy.receivers is not None or outgoing.blocks is None:
            return True
        took = now - member.joined - member.held_up
        left = self._begun + (self._strategy.seconds or 0.0) - now
        return took >= self._budget(now) and member.base * left < (outgoing.blocks - member.base) * took
