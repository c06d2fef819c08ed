"""The ends of a measurement: ids on ports, each with a queue pair, and how they join a group together."""

from __future__ import annotations

from collections.abc import Sequence

from mcast.api import (
    CmId,
    Destination,
    EventChannel,
    JoinAttrEx,
    McastAddress,
    PortSpace,
    QpInit,
    QueuePair,
)
from mcast.endpoint.ports import LocalPort
from mcast.endpoint.settings import DEFAULTS, Settings
from mcast.wire.addresses import LocalAddress
from mcast.wire.probe import Peer

BENCH_TIMEOUT = 10.0
"""The longest that a join or a send may take, or the first message, in seconds."""


class BenchEnd:
    """An id on a port, with a queue pair. Closing the channel frees both.

    Of an endpoint's `settings` those have an effect here that a queue pair or its messages have: `busy_poll`,
    `comp_vector`, `moderation`, `traffic_class` and `service_level`.
    """

    def __init__(
        self,
        channel: EventChannel,
        local_port: LocalPort,
        init: QpInit,
        settings: Settings = DEFAULTS,
        space: PortSpace = PortSpace.UDP,
    ) -> None:
        self.channel: EventChannel = channel
        self.local_port: LocalPort = local_port
        self.settings: Settings = settings
        self.address: LocalAddress = local_port.address
        self.id: CmId = channel.create_id(space)
        self.id.bind_addr(local_port.address)
        own = {name: getattr(settings, name) for name in ("busy_poll", "comp_vector", "moderation")}
        self.qp: QueuePair = self.id.create_qp(init.model_copy(update=own))

    def join(self, group: McastAddress, send_only: bool = False) -> Destination:
        """Join and wait for the outcome; return the destination to send to. Raises what `join_all` raises."""
        return join_all([self], group, send_only)[0]

    def sends_as(self, destination: Destination) -> Peer:
        """Return the source that receivers see in messages from here to the destination."""
        return Peer(self.local_port.source(destination), self.qp.qp_num)


def join_all(ends: Sequence[BenchEnd], group: McastAddress, send_only: bool = False) -> list[Destination]:
    """Let all ends join the group, and wait for the outcomes; return the destination that each end sends to.

    All ends must have the same channel. Raises the McastError of a join that failed, and TimeoutError if a
    join has no outcome within BOUND seconds.
    """
    make = JoinAttrEx.send_only if send_only else JoinAttrEx.full_member
    for end in ends:
        end.id.join_multicast_ex(make(group), end)
    joined: dict[BenchEnd, Destination] = {}
    for _ in ends:
        event = ends[0].channel.get_event(BENCH_TIMEOUT)
        if event is None:
            late = next(end.address for end in ends if end not in joined)
            said = f"{late} has not joined {group} within {BENCH_TIMEOUT:g} s"
            raise TimeoutError(f"{said}: on InfiniBand, is a subnet manager running?")
        ud = event.check().ud
        assert ud is not None
        end = event.context
        to = ud.destination
        joined[end] = to.marked(end.settings.traffic_class, end.settings.service_level)
    return [joined[end] for end in ends]
