"""The seam for faults: ordered rules, asked for each delivery and for each SA request.

A rule returns a verdict or None; the first verdict counts, and without one the thing passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from mcast.backends.sim.mcmember import McMemberRecord
from mcast.backends.sim.sa import SaMethod, SaStatus


class Delivery(NamedTuple):
    """One message on its way to one QP. `number` counts the sender's messages; `now` is ns."""

    now: int
    group: bytes
    source: str
    target: str
    src_qp: int
    dst_qp: int
    number: int
    size: int


class SaRequest(NamedTuple):
    """One request of a port to the SA. `now` is ns."""

    now: int
    source: str
    method: SaMethod
    record: McMemberRecord


@dataclass(frozen=True, slots=True)
class Drop:
    """The message is lost; the SA stays silent."""


@dataclass(frozen=True, slots=True)
class Delay:
    """It comes `ns` later."""

    ns: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The SA answers with this status."""

    status: SaStatus


DeliveryRule = Callable[[Delivery], Drop | Delay | None]
SaRule = Callable[[SaRequest], Drop | Delay | Refuse | None]


@dataclass
class Rules:
    """The rules of a fabric, in the order in which they were installed."""

    deliveries: list[DeliveryRule] = field(default_factory=list)
    sa_requests: list[SaRule] = field(default_factory=list)

    def judge_delivery(self, delivery: Delivery) -> Drop | Delay | None:
        """The first rule's verdict, None if the message passes."""
        verdicts = (rule(delivery) for rule in self.deliveries)
        return next((verdict for verdict in verdicts if verdict is not None), None)

    def judge_sa_request(self, request: SaRequest) -> Drop | Delay | Refuse | None:
        """The first rule's verdict, None if the SA answers as it should."""
        verdicts = (rule(request) for rule in self.sa_requests)
        return next((verdict for verdict in verdicts if verdict is not None), None)

    @contextmanager
    def on_delivery(self, rule: DeliveryRule) -> Iterator[None]:
        """While open, `rule` is asked for each message to each QP."""
        self.deliveries.append(rule)
        try:
            yield
        finally:
            self.deliveries.remove(rule)

    @contextmanager
    def on_sa_request(self, rule: SaRule) -> Iterator[None]:
        """While open, `rule` is asked for each SA request."""
        self.sa_requests.append(rule)
        try:
            yield
        finally:
            self.sa_requests.remove(rule)
