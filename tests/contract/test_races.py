"""Two threads, one object, each pair of calls: the first stops at each of its lines, the second runs then.

The first stops in the files of `STOPS`. The simulator's cores are left out: they run under the fabric's lock,
so the second call would wait at the lock, wherever the first one stands. Every 13th line is tried, of each
pair another one; on InfiniBand what differs there, on the card no endpoints, on a served fabric and on
sockets every 39th line. In a long run it is all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mcast import open_endpoint
from mcast.api import AlreadyJoined, Message, TimedOut

from ..calls import (
    GROUP,
    NOTHING,
    ON_AN_ENDPOINT,
    ON_AN_ID,
    OTHER,
    Calls,
    Outcomes,
    calls_on_an_endpoint,
    calls_on_an_id,
    may_matter,
)
from ..interleave import BOUND, EVERY, ROOT, interleaved
from ..networks import KINDS, SHARED, UDP, Network, SharedNetwork, UdpNetwork

STOPS = {f"contract/{name}.py" for name in ("backend", "cm_id", "closing", "queue_pair", "region")}
STOPS |= {"backends/udp/backend.py", "backends/udp/datapath.py", "backends/udp/network.py"}
STOPS |= {"backends/sim/backend.py"} | {f"backends/sim/served/{name}.py" for name in ("client", "connection")}
STOPS |= {
    f"backends/rdma/{name}.py" for name in ("channel", "cm_id", "qp", "region", "pds", "address_handles")
}
ENDPOINT_STOPS = {f"endpoint/{name}.py" for name in ("blocking", "core", "resources", "base")}


def race(
    network: Network,
    prepare: Callable[[], tuple[Calls, Callable[[], None]]],
    first: str,
    allowed: Outcomes,
    stops: set[str],
) -> None:
    """`first` against each call that is in order beside it, at each line; each time with new objects.

    Whatever comes of the calls is one of the outcomes that are `allowed`, and nothing is left.
    """
    _, close = prepare()
    close()
    left = network.leftovers()  # a device that is open stays so
    shared, seldom = isinstance(network, SharedNetwork), isinstance(network, SharedNetwork | UdpNetwork)
    if shared and "flush" in allowed:  # it hears nothing while another call is in the midst of asking
        allowed = {**allowed, "flush": (*allowed["flush"], TimedOut)}
    assert all(Path(ROOT, name).is_file() for name in stops)
    for number, second in enumerate(allowed):
        if network.is_infiniband and EVERY > 1 and not {first, second} <= SA_MATTERS:
            continue
        if not may_matter(first, second):
            continue
        every = 1 if shared and first == second == "close" else EVERY * (3 if seldom and EVERY > 1 else 1)
        at, stopped = 1 + number % every, True
        while stopped:
            calls, close = prepare()
            one, other, stopped = interleaved(calls[first], calls[second], at, stops.__contains__)
            close()
            assert isinstance(one, allowed[first]), (first, second, at, repr(one))
            assert isinstance(other, allowed[second]), (first, second, at, repr(other))
            assert network.leftovers() == left, (first, second, at)
            if (first, second) == ("join", "join"):
                assert AlreadyJoined in {type(one), type(other)}
            at += every


SA_MATTERS = {"join", "leave", "get_event", "destroy", "close"}
"""Calls in which a Subnet Administrator takes part."""

# --- ids, their channels, queue pairs and regions --------------------------------------------------


@pytest.mark.parametrize(
    "network", (*KINDS, *SHARED, UDP) if EVERY == 1 else (*KINDS, SHARED[0], UDP), indirect=True
)
@pytest.mark.parametrize("first", ON_AN_ID)
def test_two_calls_on_an_id(network: Network, first: str) -> None:
    backend = network.open()
    race(network, partial(calls_on_an_id, backend), first, ON_AN_ID, STOPS)
    backend.close()


# --- endpoints and their memberships ---------------------------------------------------------------


@pytest.mark.parametrize("network", (*KINDS, UDP) if EVERY == 1 else (*KINDS[:2], UDP), indirect=True)
@pytest.mark.parametrize("first", ON_AN_ENDPOINT)
def test_two_calls_on_an_endpoint(network: Network, first: str) -> None:
    race(network, partial(calls_on_an_endpoint, network), first, ON_AN_ENDPOINT, ENDPOINT_STOPS)


# --- batches -----------------------------------------------------------------------------------------

ON_A_BATCH: Outcomes = {
    "release": (NOTHING, BufferError),
    "message": (Message, ValueError, BufferError),
    "all": (list, ValueError, BufferError),
    "memory": (bytes, ValueError, BufferError),
    "records": (bytes, ValueError, BufferError),
}
BATCH_STOPS = {"contract/batch.py", "endpoint/receive_buffer.py", "backends/sim/lease.py"}
SENT = [b"one", b"two"]


@pytest.mark.parametrize("lease", ["queue_pair", "chosen", "copied"])
@pytest.mark.parametrize("first", ON_A_BATCH)
def test_two_calls_on_a_batch(network: Network, first: str, lease: str) -> None:
    """A view is of the batch's own messages, or there is none; ended by two threads, the lease ends once."""
    backend, numbered = network.open(), lease == "chosen"
    receiver = open_endpoint(backend, "10.0.0.1", sequence=numbered)
    sender = open_endpoint(backend, "10.0.0.2", sequence=numbered)
    groups = [receiver.join(name) for name in (GROUP, OTHER)]
    out, other = (sender.sender(name) for name in (GROUP, OTHER))

    def prepare() -> tuple[Calls, Callable[[], None]]:
        out.send_batch(SENT)
        if lease == "copied":  # kept while another group's was asked for
            other.send(b"x")
            assert groups[1].recv(BOUND) is not None
        batch = receiver.recv_batch(timeout=BOUND)
        list(batch)  # whose views end with the lease

        def message() -> Message:
            found = batch[1]
            assert bytes(found.payload) == SENT[1]
            return found

        def payloads() -> list[bytes]:
            found = [bytes(message.payload) for message in batch]
            assert found == SENT
            return found

        def close() -> None:
            batch.release()
            stats = receiver.stats()
            assert stats.receive_free == stats.receive_depth

        return {
            "release": batch.release,
            "message": message,
            "all": payloads,
            "memory": lambda: bytes(batch.memory),
            "records": lambda: batch.records,
        }, close

    race(network, prepare, first, ON_A_BATCH, BATCH_STOPS)
    backend.close()


def test_stats_are_consistent_beside_a_join(network: Network) -> None:
    """The stats of an endpoint are consistent while another thread joins."""
    with network.open() as backend:
        at, stopped = 1, True
        while stopped:
            with open_endpoint(backend, "10.0.0.1") as endpoint:
                endpoint.join(OTHER)
                shown, _, stopped = interleaved(
                    endpoint.__repr__, partial(endpoint.join, GROUP), at, {"wire/addresses.py"}.__contains__
                )
            assert isinstance(shown, str), repr(shown)
            at += 1
