"""What a signal's handler or a finalizer asks for, at every line of each call of the same thread.

The call ends in a documented outcome, what was to end has ended once the call has, and nothing is left. A
long run tries everything at every line, else a sample of lines has one thing each.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import pytest

from mcast import open_endpoint
from mcast.api import AddressNotAvailable, Backend, Closed, McastError, QueuePair
from mcast.backends.rdma.backend import RdmaBackend
from mcast.backends.sim.backend import SimBackend
from mcast.interrupts import WITHIN, Lock, is_held, later

from ..calls import (
    GROUP,
    ON_AN_ENDPOINT,
    ON_AN_ID,
    Calls,
    Outcomes,
    calls_on_an_endpoint,
    calls_on_an_id,
    may_matter,
)
from ..interleave import BOUND, EVERY, PATIENCE, Reentered, tried
from ..networks import Network, network_of

SAMPLE = 1 if EVERY == 1 else 23
"""Every how many lines something comes."""
CLOCKS = {"roce": "virtual", "infiniband": "wall"}
Prepare = Callable[[], tuple[Calls, Callable[[], None]]]


@pytest.fixture(params=["roce", "infiniband", "card-roce", "card-infiniband"])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """Time is virtual on one of the simulated fabrics: there a call that waits holds the fabric's lock."""
    made = network_of(request, clock=CLOCKS.get(request.param, "wall"))
    yield made
    assert made.leftovers() == ()
    made.close()


@pytest.fixture
def unraised(monkeypatch: pytest.MonkeyPatch) -> list[type[BaseException] | None]:
    """Errors that nobody could be given."""
    found: list[type[BaseException] | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda given: found.append(given.exc_type))
    return found


Unraised = list[type[BaseException] | None]


def outcome_of(call: Callable[[], object]) -> object:
    try:
        return call()
    except (McastError, RuntimeError) as error:
        return error.with_traceback(None)  # which would hold what the frames in between hold


def is_done(end: Callable[[], object]) -> bool:
    """Whether the ending is done; it is done again, which is harmless."""
    thing = getattr(end, "__self__", None)
    done = True if thing is None else not thing.joined if hasattr(thing, "joined") else thing.closed
    with suppress(AddressNotAvailable, Closed):
        end()
    return bool(done)


def reentered(
    prepare: Prepare, first: str, second: str, at: int, allowed: Outcomes, part: str = ""
) -> tuple[bool, bool]:
    """Whether `second` came at that line of `first`, in files of that part of mcast; whether it was refused
    there."""
    calls, close = prepare()
    came: list[object] = []
    here = f"{second} at line {at} of {first}"
    with Reentered(at, lambda: came.append(outcome_of(calls[second])), bool(at % 2), part):
        found = outcome_of(calls[first])
    refused = any(str(one) == WITHIN for one in came)
    assert isinstance(found, allowed[first]), (here, repr(found))
    assert refused or all(isinstance(one, allowed[second]) for one in came), (here, repr(came))
    assert not later(list, 1), f"{here}: a lock is held"
    assert not is_held()
    assert not came or second not in ENDINGS or is_done(calls[second]), f"{here}: not done"
    reached = bool(came)
    came.clear()
    del found
    close()
    return reached, refused


def reentered_everywhere(
    network: Network,
    prepare: Prepare,
    first: str,
    seconds: list[str],
    allowed: Outcomes,
    unraised: Unraised,
) -> None:
    _, close = prepare()
    close()
    left = network.leftovers()
    mattering = [second for second in seconds if may_matter(first, second)]
    # The many lines that open an endpoint on a card have one thing each in a long run, too.
    every = SAMPLE == 1 and first != "open_endpoint"
    for at in tried(SAMPLE):
        for second in seconds if every else [mattering[at % len(mattering)]]:
            reached, refused = reentered(prepare, first, second, at, allowed)
            here = (first, second, at, unraised)
            assert network.leftovers() == left, here
            assert set(unraised) <= ({AddressNotAvailable, Closed} if second == "leave" else set()), here
            assert not (refused and second in ENDINGS), here
            unraised.clear()
        if not reached:
            break


ENDINGS = {"leave", "destroy", "close_qp", "close_region", "close", "close_backend"}


@pytest.mark.parametrize("others", [False, True], ids=["ending", "other"])
@pytest.mark.parametrize("name", ON_AN_ID)
def test_a_call_on_an_id(network: Network, unraised: Unraised, name: str, others: bool) -> None:
    def prepare() -> tuple[Calls, Callable[[], None]]:
        backend = network.open()
        calls, _ = calls_on_an_id(backend)
        return calls | {"close_backend": backend.close}, backend.close

    allowed = ON_AN_ID | {"close_backend": (type(None),)}
    seconds = [second for second in allowed if (second in ENDINGS) != others]
    reentered_everywhere(network, prepare, name, seconds, allowed, unraised)


@pytest.mark.parametrize("others", [False, True], ids=["ending", "other"])
@pytest.mark.parametrize("name", ON_AN_ENDPOINT)
def test_a_call_on_an_endpoint(network: Network, unraised: Unraised, name: str, others: bool) -> None:
    prepare = partial(calls_on_an_endpoint, network)
    seconds = [second for second in ON_AN_ENDPOINT if (second in ENDINGS) != others]
    reentered_everywhere(network, prepare, name, seconds, ON_AN_ENDPOINT, unraised)


@pytest.mark.parametrize("network", ["roce", "infiniband"], indirect=True)
@pytest.mark.parametrize("first", ["attach", "detach", "leave", "close_qp"])
def test_a_message_comes_between_two_lines_of_the_attach_table(
    network: Network, unraised: Unraised, first: str
) -> None:
    """Who is in the table is looked up elsewhere, too: the order of the steps matters, at each line."""
    at, reached = 1, True
    while reached:
        with network.open() as backend:
            prepare = partial(calls_on_an_id, backend)
            reached, _ = reentered(prepare, first, "send", at, ON_AN_ID, "backends/model/queue_pairs.py")
        assert not unraised
        at += 1
    assert at > 5


@pytest.fixture(params=["roce", "card-infiniband"])
def real_time(request: pytest.FixtureRequest) -> Network:
    return network_of(request, clock="wall")


@pytest.mark.parametrize(
    ("wait", "end"),
    [
        ("recv", "close"),
        ("recv", "close_backend"),
        ("recv_batch", "close"),
        ("recv_of_group", "leave"),
        ("recv_of_group", "close"),
        ("next_event", "close"),
    ],
)
def test_a_call_that_waits_ends_whatever_line_its_end_comes_at(
    real_time: Network, wait: str, end: str
) -> None:
    """Were the end put off for longer than until the wait, nothing would ever end the wait."""
    network = real_time
    for at in tried(SAMPLE):
        backend = network.open()
        endpoint = open_endpoint(backend, "10.0.0.1")
        group = endpoint.join(GROUP)
        waits: Calls = {
            "recv": lambda endpoint=endpoint: endpoint.recv(BOUND),  # type: ignore[misc]
            "recv_batch": lambda endpoint=endpoint: endpoint.recv_batch(timeout=BOUND),  # type: ignore[misc]
            "recv_of_group": lambda group=group: group.recv(BOUND),  # type: ignore[misc]
            "next_event": lambda endpoint=endpoint: endpoint.next_event(BOUND),  # type: ignore[misc]
        }
        ends = {"close": endpoint.close, "close_backend": backend.close, "leave": group.leave}
        reached = ended_at(at, waits[wait], ends[end])
        endpoint.close()
        backend.close()
        if not reached:
            break
    assert network.leftovers() == ()
    network.close()


def ended_at(at: int, wait: Callable[[], object], end: Callable[[], object]) -> bool:
    """Whether the call had so many lines before it waited; the end came there, else from another thread."""
    came: list[None] = []
    over = threading.Event()

    def end_in_vain() -> None:
        begun = -1
        while not (came or over.wait(PATIENCE)):
            if begun == lines.begun > 0:
                end()
                return
            begun = lines.begun

    def comes() -> None:
        came.append(None)
        end()

    lines = Reentered(at, comes, signalled=bool(at % 2))
    other = threading.Thread(target=end_in_vain)
    with lines:
        other.start()
        found = outcome_of(wait)
    over.set()
    other.join(BOUND)
    assert isinstance(found, Closed), (at, repr(found))
    return bool(came)


CHANGES = [
    "join",
    "create_qp",
    "attach",
    "detach",
    "reset",
    "register",
    "get_event",
    "create_id",
    "bind_addr",
    "resolve_addr",
]


@pytest.mark.parametrize("name", [*sorted(ENDINGS - {"close_backend"}), *CHANGES])
def test_while_its_provider_is_at_work(network: Network, name: str) -> None:
    """At a line that holds the provider's lock what ends something waits, and what changes it is refused."""
    with network.open() as backend:
        calls, close = calls_on_an_id(backend)
        before = network.leftovers()
        with lock_of(backend):
            found = outcome_of(calls[name])
            assert network.leftovers() == before
        if name in CHANGES:
            assert str(found) == WITHIN
        else:
            assert found is None
            assert is_done(calls[name])
            assert name == "close_region" or len(network.leftovers()) < len(before)
        close()


def lock_of(backend: Backend) -> Lock:
    """What the provider holds while a channel of the backend changes."""
    if isinstance(backend, SimBackend):
        return backend._clock.mutex
    assert isinstance(backend, RdmaBackend)
    return backend._channels[0].lock


@pytest.mark.parametrize("network", ["card-roce"], indirect=True)
def test_the_limit_of_messages_is_told_whatever_comes_while_the_port_is_asked(network: Network) -> None:
    at, reached = 1, [0]
    with network.open() as backend, backend.event_channel() as channel:
        while reached:
            reached.clear()
            cm_id = channel.create_id()
            cm_id.bind_addr("10.0.0.1")
            qp = cm_id.create_qp()

            def ask(qp: QueuePair = qp) -> None:
                reached.append(qp.max_message_size)

            with Reentered(at, ask, False, "backends/rdma/qp"):
                found = qp.max_message_size
            assert {found, *reached} == {qp.max_message_size} != {0}, at
            cm_id.close()
            at += 1
    assert at > 5
