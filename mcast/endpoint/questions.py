"""What an endpoint asks its group: whether members are there, and whether the device returns own messages."""

from __future__ import annotations

from typing import SupportsIndex

from mcast.api import Phase
from mcast.endpoint.membership import EndpointGroup
from mcast.endpoint.memberships import Memberships
from mcast.endpoint.policy import LoopbackPolicy, LoopbackReport
from mcast.endpoint.probing import PEERS_MAX, Prober, unanswered
from mcast.endpoint.sorting import Sorter
from mcast.endpoint.station import Station
from mcast.endpoint.waiting import Operation, Waiting
from mcast.wire.probe import Kind, Peer

ASK_FIRST, ASK_MAX = 0.02, 1.0
"""Seconds between two probes of `ready`: the first pause, which is doubled up to the last."""


class Questions:
    """Asks by probes, and waits for the answers."""

    def __init__(
        self, station: Station, memberships: Memberships, waiting: Waiting, prober: Prober, sorter: Sorter
    ) -> None:
        self._station, self._memberships, self._waiting = station, memberships, waiting
        self._sorter = sorter
        self.prober: Prober = prober

    def probe_loopback(self, group: EndpointGroup, timeout: float) -> Operation[bool]:
        """Whether the device returns the endpoint's own message within `timeout` seconds; ends a filter that
        is not needed."""
        self._memberships.require_joined(group, "probe_loopback", Phase.SEND)
        deadline = self._waiting.deadline(timeout)
        with self.prober.quest() as (number, quest):
            self.prober.ask(group, Kind.SELF, number)
            yield from self._waiting.until(lambda: quest.heard_self, deadline)
        if self._station.blocking_loopback:
            self._sorter.filter_own(quest.heard_self)
        return quest.heard_self

    def ready(self, group: EndpointGroup, members: int, timeout: float | None) -> Operation[frozenset[Peer]]:
        """Ask until `members` other members have answered. Raises TimedOut, which names those that have."""
        if not isinstance(members, SupportsIndex):
            raise TypeError(f"members is {members!r}: give an int, how many other members shall answer")
        if members > PEERS_MAX:
            raise ValueError(f"members is {members}: at most {PEERS_MAX} answers are remembered")
        self._memberships.require_joined(group, "ready", Phase.SEND)
        deadline = self._waiting.deadline(timeout)
        pause, ask_at = ASK_FIRST, self._waiting.now()
        with self.prober.quest() as (number, quest):
            while len(quest.peers) < members:
                now = self._waiting.now()
                if self._waiting.is_over(deadline):
                    solitude = self._station.backend.solitude()
                    raise unanswered(group, quest, members, timeout, solitude)
                if now >= ask_at:
                    self._memberships.require_joined(group, "ready", Phase.SEND)
                    self.prober.ask(group, Kind.ASK_ALONE if group.send_only else Kind.ASK, number)
                    ask_at, pause = now + pause, min(pause * 2, ASK_MAX)
                    continue
                yield from self._waiting.wait(ask_at if deadline is None else min(ask_at, deadline))
        return frozenset(quest.peers)

    def loopback_report(self) -> LoopbackReport:
        """How the endpoint's own messages are kept away now."""
        policy = LoopbackPolicy(self._station.settings.loopback)
        return LoopbackReport(policy, self._station.blocking_loopback, self._sorter.filtering)
