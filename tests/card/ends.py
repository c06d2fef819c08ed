"""An id with its queue pair, as most tests on the card need one."""

from __future__ import annotations

from mcast.api import Backend, CmId, Destination, EventChannel, QpInit, QueuePair

GROUP, OTHER = "239.1.2.3", "239.4.5.6"
BOUND = 30.0
"""Seconds; the longest that anything may take, never a delay."""


class End:
    """A channel, an id that is bound to a port, a queue pair."""

    def __init__(self, backend: Backend, address: str = "10.0.0.1", **init: object) -> None:
        self.channel: EventChannel = backend.event_channel()
        self.id: CmId = self.channel.create_id()
        self.id.bind_addr(address)
        depths = {"max_send_wr": 16, "max_recv_wr": 16}
        self.qp: QueuePair = self.id.create_qp(QpInit.model_validate(depths | init))

    def join(self, group: str = GROUP) -> Destination:
        """Join the group, and say where it is."""
        self.id.join_multicast(group)
        event = self.channel.get_event(BOUND)
        assert event is not None
        ud = event.check().ud
        assert ud is not None
        return ud.destination
