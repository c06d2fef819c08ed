"""How fast a sender sends: as fast as it can, as a limit allows, and as what arrives."""

from __future__ import annotations

from math import inf

TOLERATED = 0.05
"""Such a part of the messages may be lost without being taken for too much: parity repairs it cheaply."""

BURST = 256
"""The most messages that are sent at once."""

FEW = 16
"""In a group of at most so many, receivers can answer once for each half of a receive queue."""

_SLOWEST = 100.0
_EASED, _GROWTH = 0.9, 1.1
_TRIPS = 4
_USED = 4
"""A pace does not rise while the sender uses less than one part of it in so many."""
_ROUNDED = 1e-6
"""Of a message: to wait for less would not move the clock, and the sender would turn for ever."""


def window(room: int, queue: int, width: int, members: int) -> int:
    """How many blocks of so many pieces may be under way to a receiver, which can hold `room`.

    In a small group no more than three quarters of its receive queue, where it has said how many messages
    that holds: nothing is lost there then, however late its program comes to the queue.
    """
    if not queue or members > FEW:
        return room
    return min(room, max(1, queue * 3 // (4 * width)))


class Rate:
    """The pace of one sender, in messages a second; inf while nothing holds the sender back."""

    def __init__(self, limit: float = inf) -> None:
        self.limit = limit
        self.pace: float = limit
        self._tokens, self._filled = 0.0, -inf
        self._since, self._sent, self._rate = -inf, 0, _SLOWEST
        self._loss = 0.0

    def allowed(self, now: float) -> int:
        """How many messages may be sent now."""
        if self.pace == inf:
            return BURST
        if self._filled == -inf:
            self._filled = now
        # A turn that comes late may catch up with ten milliseconds.
        most = min(BURST, max(1.0, self.pace / 100))
        self._tokens = min(most, self._tokens + (now - self._filled) * self.pace)
        self._filled = now
        return max(0, int(self._tokens + _ROUNDED))

    def next(self, now: float) -> float:
        """When the next message may be sent."""
        return (
            now if self.pace == inf or self._tokens + _ROUNDED >= 1 else now + (1 - self._tokens) / self.pace
        )

    def spent(self, messages: int) -> None:
        """So many messages have been sent."""
        self._sent += messages
        if self.pace != inf:
            self._tokens -= messages

    def lost(self, part: float) -> None:
        """A receiver has lost that part of what was sent lately."""
        self._loss = max(self._loss, part)

    def judge(self, now: float, round_trip: float) -> None:
        """Once in some round trips: yield to losses, or speed up again."""
        if self._since == -inf:
            self._since = now
        passed = now - self._since
        if passed < _TRIPS * round_trip:
            return
        rate = self._sent / passed
        if self._sent:  # a loss is seldom of the last moment, in which there may have been little to send
            self._rate = max(rate, self._rate * _EASED)
        if self._loss > TOLERATED:
            slower = max(_SLOWEST, min(self.pace, self._rate) * (1 - self._loss) * _EASED)
            self.pace = min(self.limit, slower)
        elif rate * _USED > self.pace:
            self.pace = min(self.limit, self.pace * _GROWTH)
        self._since, self._sent, self._loss = now, 0, 0.0
