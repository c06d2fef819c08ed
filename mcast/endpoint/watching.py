"""Samples, at regular times, of what an endpoint receives.

How much of which group and source, and what is lost.

Each endpoint that is watched has sequence=None, which delivers messages with the headers that some have.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from mcast.api import Batch, Message
from mcast.endpoint.blocking import Endpoint
from mcast.endpoint.numbering import HeaderReader
from mcast.endpoint.policy import Event, MessagesMissing
from mcast.endpoint.sequence import MAX_SOURCES
from mcast.endpoint.stats import EndpointStats
from mcast.wire.addresses import Gid, McastAddress

MAX_GAPS = 16
"""Maximum number of gaps that one look at all groups shows, the last ones."""


class Rates(NamedTuple):
    """Totals since the start, and rates since the last sample.

    bytes  bytes of payload, without sequence headers
    """

    messages: int
    bytes: int
    messages_per_second: float
    bytes_per_second: float


class SequenceCounts(NamedTuple):
    """Counters of sequence headers, as in `SourceStats`.

    gaps        numbered messages that are missing; None where messages have no numbers
    late        messages that arrived after a later one
    duplicates  messages that arrived again
    """

    gaps: int | None = None
    late: int | None = None
    duplicates: int | None = None


class SourceRates(NamedTuple):
    """Rates of one sending queue pair in a group.

    source  IPv4 address or GID
    qp_num  number of the queue pair
    """

    source: str
    qp_num: int
    rates: Rates
    sequence: SequenceCounts

    def as_dict(self) -> dict[str, object]:
        named = {"source": self.source, "qp_num": self.qp_num}
        return named | self.rates._asdict() | self.sequence._asdict()


class GroupRates(NamedTuple):
    """Rates of one group and its sources; the oldest sources beyond MAX_SOURCES are forgotten.

    forgotten_sources  number of sources that are no longer shown, because there are too many
    """

    group: str
    rates: Rates
    sequence: SequenceCounts
    sources: tuple[SourceRates, ...]
    forgotten_sources: int

    def as_dict(self) -> dict[str, object]:
        lists = {
            "sources": [source.as_dict() for source in self.sources],
            "forgotten_sources": self.forgotten_sources,
        }
        return {"group": self.group} | self.rates._asdict() | self.sequence._asdict() | lists


class Counts:
    """Messages and bytes, in all and since the last look."""

    def __init__(self) -> None:
        self.messages: int = 0
        self.bytes: int = 0
        self._before = (0, 0)

    def add(self, size: int) -> None:
        self.messages += 1
        self.bytes += size

    def sample(self, seconds: float) -> Rates:
        """Totals, and rates over the `seconds` since the last look."""
        messages, size = self._before
        self._before = (self.messages, self.bytes)
        per_second = (self.messages - messages) / seconds, (self.bytes - size) / seconds
        return Rates(self.messages, self.bytes, *per_second)


class GroupMeter:
    """Meter of one group. Sequence headers are read where messages have them."""

    def __init__(self, group: McastAddress) -> None:
        self._headers = HeaderReader(group)
        self.counts: Counts = Counts()
        self._by_source: OrderedDict[tuple[Gid, int], Counts] = OrderedDict()
        self._forgotten = 0

    def add(self, message: Message) -> Iterator[MessagesMissing]:
        """Count the message; return the gaps that it shows."""
        message, gaps = self._headers.read(message)
        self.counts.add(message.payload.nbytes)
        self._of_source((message.source, message.src_qp)).add(message.payload.nbytes)
        return gaps

    def _of_source(self, key: tuple[Gid, int]) -> Counts:
        """The counts of one source.

        A new source beyond MAX_SOURCES replaces the one that was silent for longest.
        """
        known = self._by_source.get(key)
        if known is not None:
            self._by_source.move_to_end(key)
            return known
        if len(self._by_source) >= MAX_SOURCES:
            self._by_source.popitem(last=False)
            self._forgotten += 1
        made = self._by_source[key] = Counts()
        return made

    def sample(self, seconds: float) -> GroupRates:
        """The rates of the group over the `seconds` since the last look, and those of each source."""
        by_source: dict[tuple[Gid, int], Counter[str]] = {}
        for one in self._headers.sources.snapshot():
            counts = by_source.setdefault((one.source, one.qp_num), Counter())
            counts.update({name: getattr(one, name) for name in SEQUENCE})
        totals = {name: self._headers.sources.total(name) for name in SEQUENCE if by_source}
        sources = tuple(
            SourceRates(
                str(source.ipv4 or source),
                qp_num,
                counts.sample(seconds),
                SequenceCounts(**by_source.get((source, qp_num), Counter())),
            )
            for (source, qp_num), counts in self._by_source.items()
        )
        rates = self.counts.sample(seconds)
        return GroupRates(str(self._headers.group), rates, SequenceCounts(**totals), sources, self._forgotten)


SEQUENCE = SequenceCounts._fields


class Meter:
    """Meter of an endpoint, by group and source."""

    def __init__(self, groups: Mapping[Gid, McastAddress]) -> None:
        self._groups = {mgid: GroupMeter(group) for mgid, group in groups.items()}
        self._gaps: deque[MessagesMissing] = deque(maxlen=MAX_GAPS)

    def take(self, batch: Batch) -> None:
        for message in batch:
            meter = self._groups.get(message.group)
            if meter is not None:
                self._gaps.extend(meter.add(message))

    def gaps(self) -> tuple[MessagesMissing, ...]:
        """Return the last gaps that were found since the last call."""
        found = tuple(self._gaps)
        self._gaps.clear()
        return found

    def sample(self, seconds: float) -> tuple[GroupRates, ...]:
        """The rates of each group over the `seconds` since the last look."""
        return tuple(meter.sample(seconds) for meter in self._groups.values())


_BATCH = 256


class Sample(NamedTuple):
    """Sample of the last `seconds` seconds.

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
        """Number of numbered messages that are missing in all groups."""
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


def samples(endpoint: Endpoint, interval: float, count: int | None = None) -> Iterator[Sample]:
    """Yield a sample at the end of each `interval` seconds, `count` in all.

    Of the groups that the endpoint has joined.

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
        groups = meter.sample(now - last)
        yield Sample(time.time(), now - last, groups, endpoint.stats(), (*_events(endpoint), *meter.gaps()))
        last = now


def _events(endpoint: Endpoint) -> Iterator[Event]:
    while (event := endpoint.next_event(0.0)) is not None:
        yield event
