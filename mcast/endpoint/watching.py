"""Looks, at regular times, at what an endpoint receives: how much of which group and source, and what is
lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from mcast.endpoint.blocking import Endpoint
from mcast.endpoint.meter import GroupRates, Meter
from mcast.endpoint.policy import Event
from mcast.endpoint.stats import EndpointStats

_BATCH = 256


class Look(NamedTuple):
    """What was received in the last `seconds` seconds.

    time     when, in seconds since 1970
    groups   the rates of each group and its sources
    stats    what the endpoint has counted since it was opened
    events   the endpoint's events since the last look, and the last gaps in the numbers of messages
    """

    time: float
    seconds: float
    groups: tuple[GroupRates, ...]
    stats: EndpointStats
    events: tuple[Event, ...]

    @property
    def gaps(self) -> int:
        """How many numbered messages are missing in all groups."""
        return sum(group.sequence.gaps or 0 for group in self.groups)

    @property
    def dropped(self) -> dict[str, int]:
        """Reason -> how many messages were lost or not delivered for that reason, where there were any."""
        return {why: lost for why, lost in self.stats.dropped.items() if lost}

    def as_dict(self) -> dict[str, object]:
        """The look as JSON shows it."""
        stats = self.stats
        return {
            "time": self.time,
            "seconds": self.seconds,
            "groups": [group.as_dict() for group in self.groups],
            "receive_queue": {
                "depth": stats.receive_depth,
                "free": stats.receive_free,
                "low_water": stats.receive_low_water,
                "empty": stats.receive_empty,
            },
            "dropped": self.dropped,
            "port_counters": dict(stats.port_counters),
            "events": list(map(str, self.events)),
        }


def looks(endpoint: Endpoint, interval: float, count: int | None = None) -> Iterator[Look]:
    """A look at the end of each `interval` seconds, `count` looks in all, at the groups that the endpoint has
    joined.

    Takes the messages and the events of the endpoint, so no other call should receive them.
    """
    meter = Meter({member.mgid: member.group for member in endpoint.groups})
    clock = endpoint.backend.now
    last = clock()
    number = 0
    while count is None or number < count:
        number += 1
        now = last
        while now < last + interval:
            with endpoint.recv_batch(_BATCH, max(0.0, last + interval - clock())) as batch:
                meter.take(batch)  # also what has come while the machine stood still
            now = clock()
        groups = meter.look(now - last)
        yield Look(time.time(), now - last, groups, endpoint.stats(), (*_events(endpoint), *meter.gaps()))
        last = now


def _events(endpoint: Endpoint) -> Iterator[Event]:
    while (event := endpoint.next_event(0.0)) is not None:
        yield event
