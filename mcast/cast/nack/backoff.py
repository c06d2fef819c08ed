"""When an end speaks: the random back-off of requests, and times in units of the group's round trip."""

from __future__ import annotations

from math import exp, log
from random import Random

from mcast.cast.nack.rate import FEW

_PATIENCE = 4
"""A request waits at most so many round trips (RFC 5401, section 3.2.2, K for a sender that all hear)."""

LEAST_ROUND_TRIP = 0.001
"""The shortest round trip that is reckoned with, in seconds: an end in Python needs that to take turns."""

SPREAD = 20e-6
"""Seconds for each member of the group over which all members' answers are spread."""


def patience(members: int) -> int:
    """How many round trips a request waits at most: one where the group is so small that it costs little if
    no request is left unsaid."""
    return 1 if members <= FEW else _PATIENCE


def backoff(random: Random, longest: float, members: int) -> float:
    """Seconds from 0 to `longest`, so distributed that few of the members speak before the others hear them.

    The distribution is the truncated exponential one of RFC 5401, section 3.2.2.
    """
    steep = log(max(1, members)) + 1
    return longest / steep * log(1 + random.random() * (exp(steep) - 1))


def spread(random: Random, members: int) -> float:
    """Seconds to wait before an answer that each member gives; none where nobody else does."""
    return random.random() * SPREAD * (members - 1)


class RoundTrip:
    """The longest round trip of the group, as its sender measures it: rises at once, falls slowly."""

    def __init__(self, most: float) -> None:
        self._most = most
        self.seconds: float = LEAST_ROUND_TRIP

    def measured(self, seconds: float) -> None:
        """Take in one measurement; what is impossible, or longer than is believed, counts as the bound."""
        found = min(max(seconds, LEAST_ROUND_TRIP), self._most)
        self.seconds = found if found > self.seconds else self.seconds * 0.95 + found * 0.05
