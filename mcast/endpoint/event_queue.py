"""The events of an endpoint that wait for `next_event`.

A sender can cause one `MessagesMissing` with each of its messages. So these have a queue of their own, in
which each source has a limited share: they push out no other event, and fill no log.
"""

from __future__ import annotations

import logging
from collections import Counter, deque

from mcast.endpoint.policy import Event, MessagesMissing
from mcast.endpoint.station import Station
from mcast.endpoint.waiting import Operation, Waiting
from mcast.wire.addresses import Gid

logger: logging.Logger = logging.getLogger("mcast")

MAX_EVENTS = 1024
"""Maximum number of events that wait for `next_event`. A further one pushes out the oldest, which is
counted."""

MAX_MISSING = 1024
"""Maximum number of `MessagesMissing` that wait beside them. A further one pushes out the oldest, too."""

MAX_MISSING_OF_SOURCE = 128
"""Maximum number of `MessagesMissing` of one GID that wait. A further one is counted, and not queued."""


class EventQueue:
    """The events that nobody has fetched yet, and how many of each kind there were."""

    def __init__(self, station: Station, waiting: Waiting) -> None:
        self._station, self._waiting = station, waiting
        self._queued: deque[tuple[int, Event]] = deque()
        self._missing: deque[tuple[int, MessagesMissing]] = deque()
        """Each event with its number in the order of all."""
        self._missing_of: Counter[Gid] = Counter()
        self._last = self._put_backs = 0
        self.told: Counter[type[Event]] = Counter()
        self.dropped: int = 0

    def __len__(self) -> int:
        return len(self._queued) + len(self._missing)

    def tell(self, event: Event) -> None:
        """Queue the event, count and log it."""
        self.told[type(event)] += 1
        self._last += 1
        self._waiting.news = True
        if isinstance(event, MessagesMissing):
            self._tell_missing(event)
            return
        if len(self._queued) >= MAX_EVENTS:
            self._queued.popleft()
            self.dropped += 1
        self._queued.append((self._last, event))
        logger.warning("%s: %s", self._station.name, event)

    def _tell_missing(self, event: MessagesMissing) -> None:
        count = self.told[MessagesMissing]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th ..., which are few however many there are
            so_far = "" if count == 1 else f" ({count} such gaps so far)"
            logger.warning("%s: %s%s", self._station.name, event, so_far)
        if self._missing_of[event.source] >= MAX_MISSING_OF_SOURCE:
            self.dropped += 1
            return
        if len(self._missing) >= MAX_MISSING:
            self._pop_missing()
            self.dropped += 1
        self._missing.append((self._last, event))
        self._missing_of[event.source] += 1

    def pop(self) -> Event:
        """Take the oldest event. There must be one."""
        if not self._missing or (self._queued and self._queued[0][0] < self._missing[0][0]):
            return self._queued.popleft()[1]
        return self._pop_missing()

    def _pop_missing(self) -> MessagesMissing:
        event = self._missing.popleft()[1]
        self._missing_of[event.source] -= 1
        if not self._missing_of[event.source]:
            del self._missing_of[event.source]
        return event

    def put_back(self, event: Event) -> None:
        """Put an event that was taken in front of the others."""
        self._put_backs -= 1
        if isinstance(event, MessagesMissing):
            self._missing.appendleft((self._put_backs, event))
            self._missing_of[event.source] += 1
        else:
            self._queued.appendleft((self._put_backs, event))

    def next_event(self, timeout: float | None) -> Operation[Event | None]:
        """The next event; None when `timeout` seconds have passed."""
        deadline = self._waiting.deadline(timeout)
        yield from self._waiting.until(lambda: len(self) > 0, deadline, at_least_once=True)
        return self.pop() if self else None
