"""Timers of the group: random back-off of NACKs (RFC 5401, section 3.2.2), spread of ACKs, round trip.

All times are in seconds; back-off is in units of the group's round trip, which the sender measures and
announces.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log
from random import Random

from mcast.cast.protocol.packets import RepairRequest
from mcast.cast.protocol.rate import SMALL_GROUP

_MAX_SUPPRESSED = 4
"""Maximum number of times in a row that NACKs of others suppress all requests while no new segment arrives.

Then the receiver sends its own: the others may be forged, or out of the sender's reach.
"""


class NackTimer:
    """Timer of one receiver's NACKs: a random back-off, then a hold-off while the repair is under way."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.due: float | None = None
        """When to send a NACK; None while nothing is missing."""
        self.suppressed: int = 0
        """Number of times in a row that NACKs of others suppressed all requests; the caller resets it."""
        self._hold_off = 0.0
        self._others: dict[int, tuple[RepairRequest, float]] = {}

    def start(self, now: float, round_trip: float, members: int) -> None:
        """Start the back-off because something is missing, unless it has started."""
        if self.due is None:
            self.due = max(now, self._hold_off) + backoff(
                self._random, backoff_round_trips(members) * round_trip, members
            )

    def on_nack(self, request: RepairRequest, now: float, round_trip: float, members: int) -> None:
        """Note a request of another receiver: it suppresses a like request until the repair is overdue."""
        before, until = self._others.get(request.block, (request, 0.0))
        if until > now:
            request = RepairRequest(
                request.block, max(request.need, before.need), request.missing | before.missing
            )
        self._others[request.block] = request, now + (backoff_round_trips(members) + 2) * round_trip

    def requests(
        self, requests: Iterable[RepairRequest], now: float, round_trip: float, members: int, count: int
    ) -> tuple[RepairRequest, ...]:
        """Return the requests to send now, and start the hold-off.

        requests  all that is missing
        members   receivers in the group
        count     maximum requests that fit into the NACK

        Requests that other receivers have sent are left out, at most _MAX_SUPPRESSED times in a row.
        """
        self._others = {block: other for block, other in self._others.items() if other[1] > now}
        chosen: list[RepairRequest] = []
        suppressed = False
        for request in requests:
            heard, _ = self._others.get(request.block, (None, 0.0))
            if heard is not None and self.suppressed < _MAX_SUPPRESSED and _covers(heard, request):
                suppressed = True
                continue
            chosen.append(request)
            if len(chosen) == count:
                break
        self.suppressed = self.suppressed + 1 if suppressed and not chosen else 0
        self.due = None
        self._hold_off = now + (backoff_round_trips(members) + 2) * round_trip
        return tuple(chosen)


def _covers(heard: RepairRequest, request: RepairRequest) -> bool:
    """Return True if the repair for `heard` repairs `request`, too: enough parity, or the same segments.

    A request without a missing segment is for the SEAL.
    """
    if not request.missing:
        return not heard.missing
    return 0 < request.need <= heard.need or not request.missing & ~heard.missing


_BACKOFF_ROUND_TRIPS = 4
"""Maximum back-off of a NACK in round trips: K of RFC 5401, section 3.2.2, for NACKs to the group."""

MIN_ROUND_TRIP = 0.001
"""Minimum round trip, in seconds, that timers use; an end written in Python needs as long to react."""

ACK_SPREAD = 20e-6
"""Seconds per member of the group over which the ACKs of all members are spread."""


def backoff_round_trips(members: int) -> int:
    """Return the maximum back-off in round trips.

    It is 1 in a small group, where a few redundant NACKs cost less than the wait.
    """
    return 1 if members <= SMALL_GROUP else _BACKOFF_ROUND_TRIPS


def backoff(random: Random, limit: float, members: int) -> float:
    """Return a random back-off from 0 to `limit` seconds, long for most members of a large group.

    The distribution is the truncated exponential one of RFC 5401, section 3.2.2: few members send before the
    others have received their NACKs.
    """
    rate = log(max(1, members)) + 1
    return limit / rate * log(1 + random.random() * (exp(rate) - 1))


def spread(random: Random, members: int) -> float:
    """Return the delay of an ACK that all members send, in seconds; 0 if there is only one member."""
    return random.random() * ACK_SPREAD * (members - 1)


class RoundTrip:
    """Maximum round trip of the group (GRTT of RFC 5401): rises with one measurement, falls slowly."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.seconds: float = MIN_ROUND_TRIP

    def measured(self, seconds: float) -> None:
        """Add a measurement, clamped to MIN_ROUND_TRIP and the limit: a receiver may report anything."""
        sample = min(max(seconds, MIN_ROUND_TRIP), self._limit)
        self.seconds = sample if sample > self.seconds else self.seconds * 0.95 + sample * 0.05
