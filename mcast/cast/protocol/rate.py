"""How fast a sender sends: as fast as it can, as a limit allows, as what arrives, and as it is taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from math import inf

TOLERABLE_LOSS = 0.05
"""Such a part of the messages may be lost without being taken for too much: parity repairs it cheaply."""

MAX_BURST = 256
"""The most messages that are sent at once."""

SMALL_GROUP = 16
"""Receivers are asked what they have taken where they are at most so many, and need not wait to see whether
another asks for the same: the answers and requests of more would be too many."""

_MIN_QUEUE = 32
"""A queue that is said to be shorter holds nobody up."""

_ABSENT_TIMEOUT, _PAUSES = 0.5, 12
"""Seconds and pauses after which a receiver that does not say what it has taken is not waited for."""

_MIN_PACE = 100.0
_DECREASE, _INCREASE = 0.9, 1.1
_ROUND_TRIPS = 4
_USED = 4
"""A pace does not rise while the sender uses less than one part of it in so many."""
_PACING_INTERVAL = 0.01
"""A paced sender has a turn once in so many seconds."""
_ROUNDED = 1e-6
"""Of a message: to wait for less would not move the clock, and the sender would turn for ever."""


class Rate:
    """The pace of one sender, in messages a second; inf while nothing holds the sender back."""

    def __init__(self, limit: float = inf) -> None:
        self.limit = limit
        self.pace: float = limit
        self._tokens, self._filled = 0.0, -inf
        self._since, self._sent, self._rate = -inf, 0, _MIN_PACE
        self._loss = 0.0

    @property
    def slowed(self) -> bool:
        """Whether losses have made the sender slower than it may be."""
        return self.pace < self.limit

    def restart(self) -> None:
        """Forget the losses: those who reported them are no receivers any more."""
        self.pace, self._loss = self.limit, 0.0

    def allowed(self, now: float) -> int:
        """How many messages may be sent now."""
        if self.pace == inf:
            return MAX_BURST
        if self._filled == -inf:
            self._filled = now
        self._tokens = min(2 * self._burst, self._tokens + (now - self._filled) * self.pace)
        self._filled = now
        return max(0, int(self._tokens + _ROUNDED))

    def next(self, now: float) -> float:
        """When the next messages may be sent: those of a turn, because each turn costs all ends time."""
        enough = self.pace == inf or self._tokens + _ROUNDED >= self._burst
        return now if enough else now + (self._burst - self._tokens) / self.pace

    @property
    def _burst(self) -> float:
        """How many messages are sent together; a turn that comes late may catch up with as many."""
        return min(MAX_BURST / 2, max(1.0, self.pace * _PACING_INTERVAL))

    def spent(self, messages: int) -> None:
        """So many messages have been sent."""
        self._sent += messages
        if self.pace != inf:
            self._tokens -= messages

    def lost(self, fraction: float) -> None:
        """A receiver has lost that part of what was sent lately."""
        self._loss = max(self._loss, fraction)

    def adapt(self, now: float, round_trip: float) -> None:
        """Once in some round trips: yield to losses, or speed up again."""
        if self._since == -inf:
            self._since = now
        passed = now - self._since
        if passed < _ROUND_TRIPS * round_trip:
            return
        rate = self._sent / passed
        if self._sent:  # a loss is seldom of the last moment, in which there may have been little to send
            self._rate = max(rate, self._rate * _DECREASE)
        if self._loss > TOLERABLE_LOSS:
            slower = max(_MIN_PACE, min(self.pace, self._rate) * (1 - self._loss) * _DECREASE)
            self.pace = min(self.limit, slower)
        elif rate * _USED > self.pace:
            self.pace = min(self.limit, self.pace * _INCREASE)
        self._since, self._sent, self._loss = now, 0, 0.0


class Window:
    """How far a sender is ahead of what few receivers have taken, in messages: at most three quarters of the
    shortest receive queue, so that nothing is lost there, however late its program comes to the queue.

    Each question has a stamp. An answer repeats the last stamp that its receiver has heard, and so says that
    it has taken, or lost, all that was sent until then.
    """

    def __init__(self) -> None:
        self._limit = inf
        self._sent = self._taken = self._flushed = 0
        self._unanswered = deque[tuple[int, int, set[int]]]()
        """Of each question: its stamp, what was sent until then, the numbers of those that owe an answer."""
        self._absent = set[int]()
        self._since = self._ask_at = inf

    def set_queue(self, queue: int) -> None:
        """The shortest receive queue holds so many messages; 0 if that is not known, or many would have to be
        asked: then the sender may send on."""
        self._limit = max(_MIN_QUEUE, queue * 3 // 4) if queue else inf
        if not queue:
            self._unanswered.clear()
            self._taken = self._flushed = self._sent
            self._since = self._ask_at = inf

    @property
    def credit(self) -> float:
        """How many messages may be sent now."""
        return max(0, self._limit - (self._sent - self._taken))

    @property
    def due(self) -> float:
        """When to ask again; inf unless answers are waited for."""
        return self._ask_at

    @property
    def awaited(self) -> Collection[int]:
        """Numbers of those for whose answer the sender waits before it sends on."""
        return self._unanswered[0][2] if self._unanswered and not self.credit else ()

    @property
    def flush_due(self) -> bool:
        """Whether it is time for the next question."""
        return self._sent - self._flushed >= self._limit / 2

    def spent(self, messages: int) -> None:
        """So many messages have been sent."""
        self._sent += messages

    def flushed(self, stamp: int, numbers: Collection[int]) -> None:
        """The receivers of these numbers were asked, after all that has been sent."""
        self._flushed = self._sent
        self._unanswered.append((stamp, self._sent, set(numbers) - self._absent))
        self._advance()

    def answered(self, number: int, stamp: float) -> None:
        """A receiver has heard that stamp; inf: nothing is to be heard of it any more."""
        if not self._unanswered and not self._absent:  # as in a large group
            return
        self._absent.discard(number)
        for asked, _, awaited in self._unanswered:
            if asked > stamp:
                break
            awaited.discard(number)
        self._advance()

    def to_ask(self, now: float, pause: float) -> set[int]:
        """Who is to be asked again now: those for which the sender waits, once in each pause. It does not
        wait for those that have been asked too long."""
        if self.credit or not self._unanswered:
            self._since = self._ask_at = inf
            return set()
        if self._since == inf:
            self._since, self._ask_at = now, now + pause
        if now < self._ask_at:
            return set()
        awaited = self._unanswered[0][2]
        if now - self._since >= max(_ABSENT_TIMEOUT, _PAUSES * pause):
            self._absent |= awaited
            for _, _, others in self._unanswered:
                others -= self._absent
            self._advance()
            return set()
        self._ask_at = now + pause
        return awaited

    def _advance(self) -> None:
        while self._unanswered and not self._unanswered[0][2]:
            self._taken = self._unanswered.popleft()[1]
            self._since = self._ask_at = inf
