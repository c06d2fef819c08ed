"""Statistics for Prometheus: a collector that reads snapshots when it is scraped (extra `prometheus`).

```python
from mcast.endpoint.prometheus import export
from prometheus_client import start_http_server

start_http_server(9000)
with mcast.open_endpoint("rdma", bind="10.0.0.1") as endpoint:
    export(endpoint)
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from mcast.endpoint.base import EndpointBase
from mcast.endpoint.stats import EndpointStats
from mcast.errors import install

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as _error:
    if _error.name != "prometheus_client":
        raise
    raise ModuleNotFoundError(
        f"mcast.endpoint.prometheus needs prometheus_client: {install.line('prometheus')}", name=_error.name
    ) from _error

__all__ = ["EndpointCollector", "export"]


class _Field(NamedTuple):
    """One number of a snapshot as a metric. `counts` is True for a number that only grows."""

    name: str
    text: str
    counts: bool = True


_ENDPOINT = {
    "sent": _Field("sent_messages", "Messages posted, probes included"),
    "sent_bytes": _Field("sent_bytes", "Payload bytes sent"),
    "sent_batches": _Field("sent_batches", "Send calls"),
    "received": _Field("received_messages", "Messages taken, probes included"),
    "received_bytes": _Field("received_bytes", "Payload bytes received"),
    "received_batches": _Field("received_batches", "Batches received"),
    "receive_depth": _Field("receive_queue_depth", "Receives of the queue pair", False),
    "receive_free": _Field("receive_queue_free", "Receives free now", False),
    "receive_low_water": _Field("receive_queue_low_water", "The fewest receives ever free", False),
    "receive_empty": _Field("receive_queue_empty", "Moments without a free receive"),
    "probes": _Field("probes", "Probes sent and answered"),
    "joins": _Field("joins", "Joins that succeeded"),
    "lost": _Field("memberships_lost", "Memberships lost"),
    "rejoins": _Field("memberships_restored", "Memberships restored"),
    "gave_up": _Field("memberships_given_up", "Memberships given up"),
    "events_dropped": _Field("events_dropped", "Events that nobody fetched in time"),
}
_GROUP = {
    "joined": _Field("group_joined", "Whether the group is joined now", False),
    "queued": _Field("group_queued_messages", "Messages that wait to be asked for", False),
    "sent": _Field("group_sent_messages", "Messages sent to the group"),
    "sent_bytes": _Field("group_sent_bytes", "Payload bytes sent to the group"),
    "received": _Field("group_received_messages", "Messages received from the group"),
    "received_bytes": _Field("group_received_bytes", "Payload bytes received from the group"),
    "gaps": _Field("group_missing_messages", "Messages missing by their sequence numbers", False),
    "late": _Field("group_late_messages", "Messages that came late"),
    "duplicates": _Field("group_duplicate_messages", "Messages that came again"),
}
_DROPPED = _Field("dropped_messages", "Messages lost or not delivered, by reason")
_PORT = _Field("port_counter", "Counters of the port, by the device's names", False)

_OWN = ("endpoint", "backend", "device", "port", "address")
"""The labels of every metric.

`endpoint` is the endpoint's number in its collector, because several may have one address.
"""


_Seen = list[tuple[tuple[str, ...], EndpointStats]]
"""The labels of each endpoint, and its snapshot."""


class EndpointCollector(Collector):
    """Metrics of some endpoints, whether their calls block or are awaited.

    A closed endpoint is no longer shown.
    """

    def __init__(self, *endpoints: EndpointBase[Any], prefix: str = "mcast") -> None:
        self._endpoints: dict[int, EndpointBase[Any]] = {}
        self._prefix, self._added = prefix, 0
        for endpoint in endpoints:
            self.add(endpoint)

    def add(self, endpoint: EndpointBase[Any]) -> None:
        """Show one more endpoint."""
        if not isinstance(endpoint, EndpointBase):
            raise TypeError(f"{endpoint!r} is no endpoint: give what open_endpoint returned")
        self._added += 1
        self._endpoints[self._added] = endpoint

    def collect(self) -> Iterable[Metric]:
        """The metrics as they stand now."""
        for number, one in [*self._endpoints.items()]:
            if one.closed:
                self._endpoints.pop(number, None)
        return self._metrics(
            [((str(number), *_labels(one)), one.stats()) for number, one in [*self._endpoints.items()]]
        )

    def describe(self) -> Iterable[Metric]:
        """The metrics of no endpoint: a registry refuses a second collector with the same names."""
        return self._metrics([])

    def _metrics(self, seen: _Seen) -> Iterator[Metric]:
        for name, field in _ENDPOINT.items():
            yield self._family(field, (), ((own, getattr(stats, name)) for own, stats in seen))
        for name, field in _GROUP.items():
            yield self._family(field, ("group",), _of_groups(seen, name))
        dropped = [((*own, reason), count) for own, stats in seen for reason, count in stats.dropped.items()]
        yield self._family(_DROPPED, ("reason",), dropped)
        ports = [((*own, name), count) for own, stats in seen for name, count in stats.port_counters.items()]
        yield self._family(_PORT, ("counter",), ports)

    def _family(
        self, field: _Field, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], float]]
    ) -> Metric:
        make: Callable[..., Any] = CounterMetricFamily if field.counts else GaugeMetricFamily
        family = make(f"{self._prefix}_{field.name}", field.text, labels=(*_OWN, *labels))
        for values, number in samples:
            family.add_metric(values, number)
        metric: Metric = family
        return metric


def export(endpoint: EndpointBase[Any], registry: CollectorRegistry = REGISTRY) -> EndpointCollector:
    """Show an endpoint in a registry, by default in the one that prometheus_client serves.

    Several endpoints of one registry share a collector: give each further endpoint to its `add`. Raises
    ValueError for a registry that has one.
    """
    collector = EndpointCollector(endpoint)
    try:
        registry.register(collector)
    except ValueError as error:
        raise ValueError(
            "this registry has a collector of endpoints: give the endpoint to `add` of what the first "
            f"`export` returned, or unregister that: {error}"
        ) from None
    return collector


def _labels(endpoint: EndpointBase[Any]) -> tuple[str, ...]:
    return (
        endpoint.backend.name,
        endpoint.device.name,
        str(endpoint.port.port_num),
        str(endpoint.address),
    )


def _of_groups(seen: _Seen, name: str) -> Iterator[tuple[tuple[str, ...], float]]:
    for own, stats in seen:
        for group in stats.groups:
            if (value := getattr(group, name)) is not None:
                yield (*own, group.group), float(value)
