"""The events of an endpoint that wait for `next_event`."""

from __future__ import annotations

import logging
from collections import Counter, deque

from mcast.endpoint.policy import Event, PortUp, Rejoined
from mcast.endpoint.station import Station
from mcast.endpoint.waiting import Operation, Waiting

logger: logging.Logger = logging.getLogger("mcast")

EVENTS_KEPT = 1024
"""How many events wait for `next_event`. A further one pushes out the oldest, which is counted."""


class EventQueue:
    """The events that nobody has fetched yet, and how many of each kind there were."""

    def __init__(self, station: Station, waiting: Waiting) -> None:
        self._station, self._waiting = station, waiting
        self.queued: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.told: Counter[type[Event]] = Counter()
        self.dropped: int = 0

    def tell(self, event: Event) -> None:
        """Queue the event, count and log it."""
        if len(self.queued) == EVENTS_KEPT:
            self.dropped += 1
        self.queued.append(event)
        self.told[type(event)] += 1
        self._waiting.news = True
        level = logging.INFO if isinstance(event, Rejoined | PortUp) else logging.WARNING
        logger.log(level, "%s: %s", self._station.name, event)

    def next_event(self, timeout: float | None) -> Operation[Event | None]:
        """The next event; None when `timeout` seconds have passed."""
        deadline = self._waiting.deadline(timeout)
        yield from self._waiting.until(lambda: bool(self.queued), deadline, at_least_once=True)
        return self.queued.popleft() if self.queued else None
