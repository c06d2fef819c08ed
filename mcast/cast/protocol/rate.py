"""Congestion control of a sender: a rate that follows losses, and a window that follows slow receivers.

`Rate` is a token bucket. Nothing holds the sender back until receivers report losses above TOLERABLE_LOSS;
the rate then falls below what arrived, and rises again while the sender uses it. `Window` bounds the messages
that receivers have not taken from their receive queues yet. It works in groups of at most SMALL_GROUP
receivers that announce the length of their queue: a FLUSH asks all of them, and each ACK repeats the stamp of
the last packet that its receiver has taken.

`ObjectSender` owns one of each, and asks both how many messages it may send. In larger groups the rate alone
works, because the ACKs would be too many. A carousel has no feedback, and sends at its limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from math import inf

TOLERABLE_LOSS = 0.05
"""Fraction of lost messages up to which the rate does not fall, because parity repairs it cheaply."""

MAX_BURST = 512
"""Maximum messages that are sent in one step."""

SMALL_GROUP = 16
"""Maximum receivers of a group in which all answer each FLUSH and NACKs need little back-off.

More receivers would send too many ACKs and redundant NACKs.
"""

_MIN_QUEUE = 32
"""Minimum window in messages, however short the announced queue of a receiver is."""

_ABSENT_TIMEOUT, _PAUSES = 0.5, 12
"""Seconds, and pauses between FLUSHes, after which the window ignores a receiver that does not answer."""

_MIN_PACE = 100.0
_DECREASE, _INCREASE = 0.9, 1.1
_ROUND_TRIPS = 4
_USED = 4
"""The rate rises only while the sender uses at least one in _USED of it."""
_MAX_PACED_BURST = 128
"""Maximum messages of a burst that is paced, as the receivers' queues may be short."""
_PACING_INTERVAL = 0.01
"""Seconds between the bursts of a paced sender."""
_ROUNDED = 1e-6
"""Tolerance in tokens: waiting for less would not advance a clock of floats, and the sender would spin."""


class Rate:
    """Token bucket of one sender. `pace` is in messages a second; inf while nothing holds the sender back."""

    def __init__(self, limit: float = inf) -> None:
        self.limit = limit
        self.pace: float = limit
        self._tokens, self._filled = 0.0, -inf
        self._since, self._sent, self._rate = -inf, 0, _MIN_PACE
        self._loss = 0.0

    @property
    def slowed(self) -> bool:
        """True while losses keep the pace below the limit."""
        return self.pace < self.limit

    def restart(self) -> None:
        """Return to the limit, because the receivers that reported losses are no receivers any more."""
        self.pace, self._loss = self.limit, 0.0

    def allowed(self, now: float) -> int:
        """Return the number of messages that may be sent now."""
        if self.pace == inf:
            return MAX_BURST
        if self._filled == -inf:
            self._filled = now
        self._tokens = min(2 * self._burst, self._tokens + (now - self._filled) * self.pace)
        self._filled = now
        return max(0, int(self._tokens + _ROUNDED))

    def next(self, now: float) -> float:
        """Return when the next burst may be sent; each burst costs all ends processor time."""
        enough = self.pace == inf or self._tokens + _ROUNDED >= self._burst
        return now if enough else now + (self._burst - self._tokens) / self.pace

    @property
    def _burst(self) -> float:
        """Messages of a burst; a late step may send twice as many."""
        return min(_MAX_PACED_BURST, max(1.0, self.pace * _PACING_INTERVAL))

    def spent(self, messages: int) -> None:
        """Count messages that were sent."""
        self._sent += messages
        if self.pace != inf:
            self._tokens -= messages

    def lost(self, fraction: float) -> None:
        """Note that a receiver has reported that fraction of recent messages lost."""
        self._loss = max(self._loss, fraction)

    def adapt(self, now: float, round_trip: float) -> None:
        """Lower or raise the pace, once in _ROUND_TRIPS round trips."""
        if self._since == -inf:
            self._since = now
        passed = now - self._since
        if passed < _ROUND_TRIPS * round_trip:
            return
        rate = self._sent / passed
        if self._sent:  # remember a higher rate: the losses are older than this interval, which may be idle
            self._rate = max(rate, self._rate * _DECREASE)
        if self._loss > TOLERABLE_LOSS:
            slower = max(_MIN_PACE, min(self.pace, self._rate) * (1 - self._loss) * _DECREASE)
            self.pace = min(self.limit, slower)
        elif rate * _USED > self.pace:
            self.pace = min(self.limit, self.pace * _INCREASE)
        self._since, self._sent, self._loss = now, 0, 0.0


class Window:
    """Send window in messages: three quarters of the shortest receive queue in a small group.

    No receive queue overflows then, however late its program receives. Each FLUSH has a stamp; an answer with
    that stamp or a later one acknowledges all messages before the FLUSH, received or lost.
    """

    def __init__(self) -> None:
        self._limit = inf
        self._sent = self._taken = self._flushed = 0
        self._unanswered = deque[tuple[int, int, set[int]]]()
        """For each FLUSH: its stamp, messages sent before it, numbers of the members yet to answer."""
        self._absent = set[int]()
        self._since = self._repeat_at = inf

    def set_queue(self, queue: int) -> None:
        """Set the messages that the shortest receive queue holds; 0 removes the limit."""
        self._limit = max(_MIN_QUEUE, queue * 3 // 4) if queue else inf
        if not queue:
            self._unanswered.clear()
            self._taken = self._flushed = self._sent
            self._since = self._repeat_at = inf

    @property
    def credit(self) -> float:
        """Number of messages that may be sent now."""
        return max(0, self._limit - (self._sent - self._taken))

    @property
    def due(self) -> float:
        """When to repeat a FLUSH; inf unless the sender waits for answers."""
        return self._repeat_at

    @property
    def awaited(self) -> Collection[int]:
        """Numbers of the members without whose answer the sender cannot send."""
        return self._unanswered[0][2] if self._unanswered and not self.credit else ()

    @property
    def flush_due(self) -> bool:
        """True if half a window was sent since the last FLUSH."""
        return self._sent - self._flushed >= self._limit / 2

    def spent(self, messages: int) -> None:
        """Count messages that were sent."""
        self._sent += messages

    def flushed(self, stamp: int, numbers: Collection[int]) -> None:
        """Note a FLUSH to the members of these numbers."""
        self._flushed = self._sent
        self._unanswered.append((stamp, self._sent, set(numbers) - self._absent))
        self._advance()

    def answered(self, number: int, stamp: float) -> None:
        """Note that a member has received that stamp; inf if no answer of it is expected any more."""
        if not self._unanswered and not self._absent:  # fast path of a large group
            return
        self._absent.discard(number)
        for flush_stamp, _, awaited in self._unanswered:
            if flush_stamp > stamp:
                break
            awaited.discard(number)
        self._advance()

    def to_flush(self, now: float, pause: float) -> set[int]:
        """Return the members to which the FLUSH is repeated now, once in `pause` seconds.

        Members that do not answer for too long become absent: the window ignores them until they answer.
        """
        if self.credit or not self._unanswered:
            self._since = self._repeat_at = inf
            return set()
        if self._since == inf:
            self._since, self._repeat_at = now, now + pause
        if now < self._repeat_at:
            return set()
        awaited = self._unanswered[0][2]
        if now - self._since >= max(_ABSENT_TIMEOUT, _PAUSES * pause):
            self._absent |= awaited
            for _, _, others in self._unanswered:
                others -= self._absent
            self._advance()
            return set()
        self._repeat_at = now + pause
        return awaited

    def _advance(self) -> None:
        while self._unanswered and not self._unanswered[0][2]:
            self._taken = self._unanswered.popleft()[1]
            self._since = self._repeat_at = inf
