"""Time stamps of messages: the fabric's own time when a message arrives, not when it is asked for."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest

from mcast import open_endpoint
from mcast.api import RECORD_DTYPE, QpInit, TimestampClock
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults import Delay, Messages

GROUP = "239.1.2.3"
NS = 1_000_000_000


@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
@pytest.mark.parametrize("traced", [False, True])
def test_a_stamp_is_the_virtual_time_of_arrival(make: Callable[..., Fabric], traced: bool) -> None:
    with (
        open_fabric(make(trace=traced)) as backend,
        open_endpoint(backend, "10.0.0.1") as sender,
        open_endpoint(backend, "10.0.0.2", timestamps=True) as receiver,
    ):
        assert sender.timestamp_clock is None
        assert receiver.timestamp_clock is TimestampClock.VIRTUAL
        out, group = sender.sender(GROUP), receiver.join(GROUP)
        first = backend.now()
        out.send(b"early")
        assert sender.recv(2.0) is None
        second = backend.now()
        assert second - first >= 2
        out.send_batch([b"late", b"with it"])
        assert sender.recv(1.0) is None
        stamps = [message.timestamp for _ in range(3) if (message := group.recv(0)) is not None]
        assert stamps == [round(first * NS), round(second * NS), round(second * NS)]


def test_a_delayed_message_is_stamped_when_it_comes() -> None:
    fabric = Fabric.roce()
    with open_fabric(fabric) as backend, backend.event_channel() as channel:
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        qp = cm_id.create_qp(QpInit(timestamps=True))
        cm_id.join_multicast(GROUP)
        event = channel.get_event(5)
        assert event is not None
        assert event.ud is not None
        expected = round(backend.now() * NS) + NS // 4
        with fabric.rules.when(Messages(), Delay(NS // 4)):
            qp.send(event.ud.destination, [b"one", b"two"])
        with qp.recv(2, 1) as batch:
            columns = numpy.frombuffer(batch.records, RECORD_DTYPE)
            assert columns["timestamp"].tolist() == [expected] * len(batch)
            assert [message.timestamp for message in batch] == [expected] * len(batch)
