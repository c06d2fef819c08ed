"""The public calls on one object, and what each of them may end in while something else befalls it."""

from __future__ import annotations

from collections.abc import Callable

from mcast import Endpoint, open_endpoint
from mcast.api import (
    AddressNotAvailable,
    AlreadyJoined,
    Backend,
    Batch,
    Closed,
    CmEvent,
    CmId,
    InvalidArgument,
    McastError,
    Message,
    QueuePair,
    Region,
    TimedOut,
)
from mcast.endpoint.blocking import Sender
from mcast.endpoint.stats import EndpointStats

from .interleave import EVERY
from .networks import Network

GROUP, OTHER = "239.1.2.3", "239.4.5.6"
NOTHING = type(None)

Calls = dict[str, Callable[[], object]]
Outcomes = dict[str, tuple[type, ...]]

ON_AN_ID: Outcomes = {
    "join": (NOTHING, AlreadyJoined, Closed),
    "leave": (NOTHING, AddressNotAvailable, Closed),
    "create_qp": (QueuePair, InvalidArgument, Closed),
    "send": (int, InvalidArgument, Closed),
    "send_one": (NOTHING, InvalidArgument, Closed),
    "recv": (Batch, Closed),
    "recv_one": (Message, NOTHING, Closed),
    "flush": (NOTHING, Closed),
    "attach": (NOTHING, Closed),
    "detach": (NOTHING, InvalidArgument, Closed),
    "reset": (NOTHING, InvalidArgument, Closed),
    "register": (Region, McastError, Closed),
    "close_region": (NOTHING,),
    "port_events": (tuple, Closed),
    "get_event": (CmEvent, NOTHING, Closed),
    "create_id": (CmId, Closed),
    "bind_addr": (NOTHING, InvalidArgument, Closed),
    "resolve_addr": (NOTHING, InvalidArgument, Closed),
    "destroy": (NOTHING,),
    "close_qp": (NOTHING,),
    "close": (NOTHING,),
}
"""Possible outcomes of each call."""

NEIGHBOURS = {
    "bind_addr": {"bind_addr", "resolve_addr", "get_event", "create_id", "close", "close_backend"},
    "resolve_addr": {"bind_addr", "resolve_addr", "get_event", "create_id", "close", "close_backend"},
    "open_endpoint": {"open_endpoint", "close", "close_backend"},
    "batches": {"batches", "recv_batch", "leave", "close", "close_backend"},
    "recv_batch_of_group": {"recv_batch_of_group", "recv_batch", "leave", "close", "close_backend"},
}
"""Calls that concern another id or endpoint, or go through other calls of these tables -> the calls that
matter to them."""


def may_matter(first: str, second: str) -> bool:
    """Return True if a short run tries the two together; a long one tries all."""
    return EVERY == 1 or (
        second in NEIGHBOURS.get(first, {second}) and first in NEIGHBOURS.get(second, {first})
    )


def calls_on_an_id(backend: Backend) -> tuple[Calls, Callable[[], None]]:
    """The calls of a new channel, and what closes it."""
    channel = backend.event_channel()
    cm_id = channel.create_id()
    cm_id.bind_addr("10.0.0.1")
    other_id = channel.create_id()
    qp = cm_id.create_qp()
    cm_id.join_multicast(OTHER)
    event = channel.get_event()
    assert event is not None
    assert event.ud is not None
    to = event.ud.destination
    region = qp.register(bytearray(64))

    def create_qp() -> QueuePair:
        qp.close()
        return cm_id.create_qp()

    return {
        "join": lambda: cm_id.join_multicast(GROUP),
        "leave": lambda: cm_id.leave_multicast(OTHER),
        "create_qp": create_qp,
        "send": lambda: qp.send(to, [b"x"]),
        "send_one": lambda: qp.send_one(to, b"x"),
        "recv": lambda: qp.recv(timeout=0),
        "recv_one": lambda: qp.recv_one(0),
        "flush": lambda: qp.flush(0),
        "attach": lambda: qp.attach_mcast(to.gid, to.dlid),
        "detach": lambda: qp.detach_mcast(to.gid, to.dlid),
        "reset": qp.reset,
        "register": lambda: qp.register(bytearray(4096), recv_slot=256),
        "close_region": region.close,
        "port_events": qp.port_events,
        "get_event": lambda: channel.get_event(0),
        "create_id": channel.create_id,
        "bind_addr": lambda: other_id.bind_addr("10.0.0.2"),
        "resolve_addr": lambda: other_id.resolve_addr(GROUP, "10.0.0.2"),
        "destroy": cm_id.destroy,
        "close_qp": qp.close,
        "close": channel.close,
    }, channel.close


ON_AN_ENDPOINT: Outcomes = {
    "join": (Sender, AlreadyJoined, Closed),
    "sender": (Sender, AlreadyJoined, Closed),
    "leave": (NOTHING,),
    "send": (NOTHING, Closed),
    "send_batch": (int, Closed),
    "recv": (Message, NOTHING, Closed),
    "recv_of_group": (Message, NOTHING, Closed),
    "recv_batch": (Batch, Closed),
    "recv_batch_of_group": (Batch, Closed),
    "batches": (list,),
    "open_endpoint": (Endpoint, Closed),
    "next_event": (NOTHING, Closed),
    "ready": (frozenset, TimedOut, Closed),
    "probe_loopback": (bool, Closed),
    "flush": (NOTHING, Closed),
    "stats": (EndpointStats,),
    "close": (NOTHING,),
    "close_backend": (NOTHING,),
}


def calls_on_an_endpoint(network: Network) -> tuple[Calls, Callable[[], None]]:
    """The calls of a new endpoint, and what closes it."""
    backend = network.open()
    endpoint = open_endpoint(backend, "10.0.0.1")
    group = endpoint.join(OTHER)
    group.send(b"x")
    opened: list[Endpoint] = []

    def open_another() -> Endpoint:
        opened.append(open_endpoint(backend, "10.0.0.2"))
        return opened[-1]

    def close() -> None:
        assert not (endpoint.closed and endpoint.groups)
        for one in opened:
            one.close()
        endpoint.close()
        backend.close()

    return {
        "join": lambda: endpoint.join(GROUP),
        "sender": lambda: endpoint.sender(GROUP),
        "leave": group.leave,
        "send": lambda: group.send(b"x"),
        "send_batch": lambda: group.send_batch([b"x"]),
        "recv": lambda: endpoint.recv(0.001),
        "recv_of_group": lambda: group.recv(0.001),
        "recv_batch": lambda: endpoint.recv_batch(timeout=0.001),
        "recv_batch_of_group": lambda: group.recv_batch(timeout=0.001),
        "batches": lambda: [len(batch) for batch in endpoint.batches(timeout=0.001)],
        "open_endpoint": open_another,
        "next_event": lambda: endpoint.next_event(0.001),
        "ready": lambda: group.ready(timeout=0.001),
        "probe_loopback": lambda: group.probe_loopback(0.001),
        "flush": lambda: endpoint.flush(0),
        "stats": endpoint.stats,
        "close": endpoint.close,
        "close_backend": backend.close,
    }, close
