"""When an end speaks: the random back-off of requests, and times in units of the group's round trip."""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log
from random import Random

from mcast.cast.protocol.packets import RepairRequest
from mcast.cast.protocol.rate import SMALL_GROUP

_MAX_SUPPRESSED = 4
"""So often in a row all of a request is left to others, while nothing new comes. It is said then: whom others
have heard may be a stranger, or one that the sender does not hear."""


class NackTimer:
    """The timer of one receiver's requests: back-off, then a pause in which the repair is on its way."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.due: float | None = None
        """When to ask; None while nothing is missing."""
        self.suppressed: int = 0
        """How often in a row others have asked for all that is missing. None of it has come since."""
        self._pause = 0.0
        self._others: dict[int, tuple[RepairRequest, float]] = {}

    def start(self, now: float, round_trip: float, members: int) -> None:
        """Something is missing: begin to wait, if this has not begun."""
        if self.due is None:
            self.due = max(now, self._pause) + backoff(
                self._random, backoff_round_trips(members) * round_trip, members
            )

    def on_nack(self, request: RepairRequest, now: float, round_trip: float, members: int) -> None:
        """Another has asked for this; a repair may come until some round trips later."""
        before, until = self._others.get(request.block, (request, 0.0))
        if until > now:
            request = RepairRequest(
                request.block, max(request.need, before.need), request.missing | before.missing
            )
        self._others[request.block] = request, now + (backoff_round_trips(members) + 2) * round_trip

    def requests(
        self, requests: Iterable[RepairRequest], now: float, round_trip: float, members: int, most: int
    ) -> tuple[RepairRequest, ...]:
        """What to ask for now: at most so many blocks, without those that others have asked for, unless
        that was in vain."""
        self._others = {block: kept for block, kept in self._others.items() if kept[1] > now}
        asked: list[RepairRequest] = []
        left = 0
        for request in requests:
            heard, _ = self._others.get(request.block, (None, 0.0))
            if heard is not None and self.suppressed < _MAX_SUPPRESSED and _covers(heard, request):
                left += 1
                continue
            asked.append(request)
            if len(asked) == most:
                break
        self.suppressed = self.suppressed + 1 if left and not asked else 0
        self.due = None
        self._pause = now + (backoff_round_trips(members) + 2) * round_trip
        return tuple(asked)


def _covers(heard: RepairRequest, request: RepairRequest) -> bool:
    """Whether the answer to one request answers the other: as many pieces of parity, or all that are named.

    A request for no piece asks for the seal.
    """
    if not request.missing:
        return not heard.missing
    return 0 < request.need <= heard.need or not request.missing & ~heard.missing


_BACKOFF_ROUND_TRIPS = 4
"""A request waits at most so many round trips (RFC 5401, section 3.2.2, K for a sender that all hear)."""

MIN_ROUND_TRIP = 0.001
"""The shortest round trip that is reckoned with, in seconds: an end in Python needs that to take turns."""

ACK_SPREAD = 20e-6
"""Seconds for each member of the group over which all members' answers are spread."""


def backoff_round_trips(members: int) -> int:
    """How many round trips a request waits at most: one where the group is so small that it costs little if
    no request is left unsaid."""
    return 1 if members <= SMALL_GROUP else _BACKOFF_ROUND_TRIPS


def backoff(random: Random, longest: float, members: int) -> float:
    """Seconds from 0 to `longest`, so distributed that few of the members speak before the others hear them.

    The distribution is the truncated exponential one of RFC 5401, section 3.2.2.
    """
    steep = log(max(1, members)) + 1
    return longest / steep * log(1 + random.random() * (exp(steep) - 1))


def spread(random: Random, members: int) -> float:
    """Seconds to wait before an answer that each member gives; none where nobody else does."""
    return random.random() * ACK_SPREAD * (members - 1)


class RoundTrip:
    """The longest round trip of the group, as its sender measures it: rises at once, falls slowly."""

    def __init__(self, most: float) -> None:
        self._most = most
        self.seconds: float = MIN_ROUND_TRIP

    def measured(self, seconds: float) -> None:
        """Take in one measurement; what is impossible, or longer than is believed, counts as the bound."""
        found = min(max(seconds, MIN_ROUND_TRIP), self._most)
        self.seconds = found if found > self.seconds else self.seconds * 0.95 + found * 0.05
