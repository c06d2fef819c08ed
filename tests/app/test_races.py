"""Two threads, one object, each pair of calls: the first stops at each of its lines, the second runs then.

The first stops in the files of `STOPS`. The simulator's cores are left out: they run under the fabric's lock,
so the second call would wait at the lock, wherever the first one stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest

from mcast import open_endpoint
from mcast.api import (
    AddressNotAvailable,
    AlreadyJoined,
    Batch,
    Closed,
    CmEvent,
    InvalidArgument,
    Message,
    QueuePair,
    TimedOut,
)
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.testbed import SimObserver
from mcast.endpoint import Sender
from mcast.stats import EndpointStats

from .interleave import interleaved

GROUP, OTHER = "239.1.2.3", "239.4.5.6"
NOTHING = type(None)
STOPS = {"api.py", "backends/sim/backend.py"}
ENDPOINT_STOPS = {"endpoint.py", "session.py", "station.py", "view.py"}


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    made = Fabric.roce(clock="wall")
    yield made
    made.close()


def outcomes(
    fabric: Fabric,
    prepare: Callable[[], tuple[dict[str, Callable[[], object]], Callable[[], None]]],
    first: str,
    second: str,
    stops: set[str],
) -> Iterator[tuple[object, object]]:
    """Of every interleaving; each time with new objects, all of which are gone afterwards."""
    at, stopped = 0, True
    while stopped:
        at += 1
        calls, close = prepare()
        one, other, stopped = interleaved(calls[first], calls[second], at, stops.__contains__)
        close()
        assert SimObserver(fabric).leftovers() == (), (first, second, at)
        yield one, other


# --- ids and queue pairs ---------------------------------------------------------------------------

ON_AN_ID: dict[str, tuple[type, ...]] = {
    "join": (NOTHING, AlreadyJoined, Closed),
    "leave": (NOTHING, AddressNotAvailable, Closed),
    "create_qp": (QueuePair, InvalidArgument, Closed),
    "send": (int, Closed),
    "recv": (Batch, Closed),
    "attach": (NOTHING, Closed),
    "get_event": (CmEvent, NOTHING, Closed),
    "destroy": (NOTHING,),
    "close_qp": (NOTHING,),
    "close_channel": (NOTHING,),
}
"""What each call may end in."""


@pytest.mark.parametrize(("first", "second"), list(product(ON_AN_ID, repeat=2)))
def test_two_calls_on_an_id(fabric: Fabric, first: str, second: str) -> None:
    backend = open_fabric(fabric)

    def prepare() -> tuple[dict[str, Callable[[], object]], Callable[[], None]]:
        channel = backend.event_channel()
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        qp = cm_id.create_qp()
        cm_id.join_multicast(OTHER)
        event = channel.get_event()
        assert event is not None
        assert event.ud is not None
        to = event.ud.destination

        def create_qp() -> QueuePair:
            qp.close()
            return cm_id.create_qp()

        calls: dict[str, Callable[[], object]] = {
            "join": lambda: cm_id.join_multicast(GROUP),
            "leave": lambda: cm_id.leave_multicast(OTHER),
            "create_qp": create_qp,
            "send": lambda: qp.send(to, [b"x"]),
            "recv": lambda: qp.recv(timeout=0),
            "attach": lambda: qp.attach_mcast(to.gid, to.dlid),
            "get_event": lambda: channel.get_event(0),
            "destroy": cm_id.destroy,
            "close_qp": qp.close,
            "close_channel": channel.close,
        }
        return calls, channel.close

    for one, other in outcomes(fabric, prepare, first, second, STOPS):
        assert isinstance(one, ON_AN_ID[first]), repr(one)
        assert isinstance(other, ON_AN_ID[second]), repr(other)
        if (first, second) == ("join", "join"):
            assert {type(one), type(other)} == {NOTHING, AlreadyJoined}
    backend.close()


# --- endpoints -------------------------------------------------------------------------------------

ON_AN_ENDPOINT: dict[str, tuple[type, ...]] = {
    "join": (Sender, AlreadyJoined, Closed),
    "leave": (NOTHING,),
    "send": (NOTHING, Closed),
    "recv": (Message, NOTHING, Closed),
    "recv_batch": (Batch, Closed),
    "ready": (frozenset, TimedOut, Closed),
    "stats": (EndpointStats,),
    "close": (NOTHING,),
}
CUT = {"recv_batch", "ready"}
"""Calls that are interleaved with `close` and `leave` alone, for time."""
PAIRS = [
    (first, second)
    for first, second in product(ON_AN_ENDPOINT, repeat=2)
    if not {first, second} & CUT or {first, second} & {"close", "leave"}
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_two_calls_on_an_endpoint(fabric: Fabric, first: str, second: str) -> None:
    backend = open_fabric(fabric)

    def prepare() -> tuple[dict[str, Callable[[], object]], Callable[[], None]]:
        endpoint = open_endpoint(backend, "10.0.0.1")
        group = endpoint.join(OTHER)
        group.send(b"x")
        calls: dict[str, Callable[[], object]] = {
            "join": lambda: endpoint.join(GROUP),
            "leave": group.leave,
            "send": lambda: group.send(b"x"),
            "recv": lambda: endpoint.recv(0.001),
            "recv_batch": lambda: endpoint.recv_batch(timeout=0.001),
            "ready": lambda: group.ready(timeout=0.001),
            "stats": endpoint.stats,
            "close": endpoint.close,
        }
        return calls, endpoint.close

    for one, other in outcomes(fabric, prepare, first, second, ENDPOINT_STOPS):
        assert isinstance(one, ON_AN_ENDPOINT[first]), repr(one)
        assert isinstance(other, ON_AN_ENDPOINT[second]), repr(other)
        if (first, second) == ("join", "join"):
            assert AlreadyJoined in {type(one), type(other)}
    backend.close()
