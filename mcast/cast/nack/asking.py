"""When a receiver asks for what it lacks: after a random time, unless others have asked for as much."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from mcast.cast.nack.backoff import backoff, patience
from mcast.cast.nack.messages import Want

_UNSAID = 4
"""So often in a row all of a request is left to others, while nothing new comes. It is said then: whom others
have heard may be a stranger, or one that the sender does not hear."""


class Asking:
    """The timer of one receiver's requests: back-off, then a pause in which the repair is on its way."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.due: float | None = None
        """When to ask; None while nothing is missing."""
        self.unsaid: int = 0
        """How often in a row others have asked for all that is missing. None of it has come since."""
        self._pause = 0.0
        self._heard: dict[int, tuple[Want, float]] = {}

    def wake(self, now: float, round_trip: float, members: int) -> None:
        """Something is missing: begin to wait, if this has not begun."""
        if self.due is None:
            self.due = max(now, self._pause) + backoff(self._random, patience(members) * round_trip, members)

    def heard(self, want: Want, now: float, round_trip: float, members: int) -> None:
        """Another has asked for this; a repair may come until some round trips later."""
        before, until = self._heard.get(want.block, (want, 0.0))
        if until > now:
            want = Want(want.block, max(want.need, before.need), want.missing | before.missing)
        self._heard[want.block] = want, now + (patience(members) + 2) * round_trip

    def ask(
        self, wants: Iterable[Want], now: float, round_trip: float, members: int, most: int
    ) -> tuple[Want, ...]:
        """What to ask for now: at most so many blocks, without those that others have asked for, unless
        that was in vain."""
        self._heard = {block: kept for block, kept in self._heard.items() if kept[1] > now}
        asked: list[Want] = []
        left = 0
        for want in wants:
            heard, _ = self._heard.get(want.block, (None, 0.0))
            if heard is not None and self.unsaid < _UNSAID and _covers(heard, want):
                left += 1
                continue
            asked.append(want)
            if len(asked) == most:
                break
        self.unsaid = self.unsaid + 1 if left and not asked else 0
        self.due = None
        self._pause = now + (patience(members) + 2) * round_trip
        return tuple(asked)


def _covers(heard: Want, want: Want) -> bool:
    """Whether the answer to one request answers the other: as many pieces of parity, or all that are named.

    A request for no piece asks for the seal.
    """
    if not want.missing:
        return not heard.missing
    return 0 < want.need <= heard.need or not want.missing & ~heard.missing
