"""Exceptions at any moment of an endpoint's calls: nobody hangs, nothing is left, and what is broken says
so."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest

from mcast import Endpoint, Message, open_backend, open_endpoint
from mcast.api import Backend, Broken, Closed, Phase, TimedOut

from ..interrupts.sweep import BOUND, Kind, states, sweep, works
from ..networks import KINDS, UDP, Network, SimNetwork, UdpNetwork, network_of
from ..waiting import until

GROUP, OTHER = "239.1.2.3", "239.4.5.6"
SOON = 0.01
DEFAULT_BATCH = [b"1", b"2", b"3"]


class World:
    """Two endpoints on two ports; `here` is interrupted."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.backend: Backend = self.network.open()
        self.here = open_endpoint(self.backend, "10.0.0.1")
        self.there = open_endpoint(self.backend, "10.0.0.2")
        self.other = self.there.join(GROUP)
        self.member = self.here.join(GROUP)
        self.found: list[Endpoint] = []

    def prepare(self, name: str) -> World:
        """Bring about what the call needs."""
        if name.endswith("of a message"):
            self.other.send_batch(DEFAULT_BATCH)
        return self


def recv(world: World) -> None:
    world.here.recv(SOON)


def ready(world: World) -> None:
    with suppress(TimedOut):
        world.member.ready(timeout=0.03)


def reply(world: World) -> None:
    there, at = world.there, world.member.destination.sgid_index
    source = there.port.gids[at]
    heard = Message(memoryview(b""), source, there.qp_num, world.member.mgid, None, False, there.port.lid)
    world.member.reply(heard, b"x", timeout=SOON)


def opens(world: World) -> None:
    world.found.append(open_endpoint(world.backend, "10.0.0.1"))


CALLS: dict[str, Callable[[World], object]] = {
    "join": lambda world: world.here.join(OTHER),
    "sender": lambda world: world.here.sender(OTHER),
    "recv": recv,
    "recv of a message": recv,
    "recv_batch": lambda world: world.member.recv_batch(timeout=SOON).release(),
    "recv_batch of a message": lambda world: world.here.recv_batch(timeout=SOON).release(),
    "send": lambda world: world.member.send(b"x", timeout=SOON),
    "send_batch": lambda world: world.member.send_batch(DEFAULT_BATCH, timeout=SOON),
    "reply": reply,
    "ready": ready,
    "probe_loopback": lambda world: world.member.probe_loopback(SOON),
    "next_event": lambda world: world.here.next_event(SOON),
    "flush": lambda world: world.here.flush(SOON),
    "stats": lambda world: world.here.stats(),
    "leave": lambda world: world.member.leave(),
    "close": lambda world: world.here.close(),
    "open_endpoint": opens,
}


def use(world: World) -> str:
    """Use both endpoints, as another thread; return what is usable."""
    here, there = world.here, world.there
    if here.closed:
        with pytest.raises((Closed, Broken)):
            here.recv(0)
        return "closed"
    fabric = works(there.stats, lambda: there.recv(0), lambda: world.other.send(b"there"))
    own = works(here.stats, lambda: here.recv(0), lambda: here.next_event(0))
    if own and world.member.joined:
        own = works(lambda: world.member.send(b"here"))
    if not own or not fabric:
        assert not own or not works(lambda: here.join("239.9.9.9"))
        return "endpoint broken" if fabric else "fabric broken"
    for group in here.groups:
        group.leave()
    with here.join(GROUP, timeout=1.0) as member:
        member.send(b"usable")
    while here.recv(0):
        pass
    gc.collect(0)
    stats = here.stats()  # frames of the traceback may still refer to one batch
    assert stats.receive_free >= stats.receive_depth - 64
    assert not here._core.probing.prober.pending
    return "usable"


def end(world: World) -> None:
    for endpoint in (*world.found, world.here, world.there):
        endpoint.close()
        assert endpoint.closed
        assert endpoint.groups == ()
        endpoint.stats()
    world.backend.close()
    if not isinstance(world.network, SimNetwork):
        assert world.network.leftovers() == ()
        return
    fabric: Any = world.network.fabric
    if not fabric.clock.guard.broken:
        assert world.network.leftovers() == ()
    fabric.close()  # drops what a broken fabric has kept
    assert fabric.qps == ()
    assert not any(port.ids or port.igmp or fabric.core.queue_pairs.attached(port) for port in fabric.ports)


def after(world: World, error: BaseException | None) -> str:
    try:
        return use(world)
    finally:
        end(world)


@pytest.fixture(params=[*KINDS, UDP])
def another(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Network]]:
    """Yield what gives a network for each line: a fabric may be broken, cards and interfaces are not."""
    if request.param in ("roce", "infiniband"):
        yield lambda: network_of(request)
        return
    network = network_of(request)
    if isinstance(network, UdpNetwork):
        monkeypatch.setattr("mcast.backends.udp.backend.MAX_SLEEP", SOON)
    world = World(network)
    world.here.recv(SOON)
    use(world)
    end(world)  # what a process opens once is there
    yield lambda: network
    network.close()


# Python itself closes a socket that an interrupt has taken from who opened it, and warns.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
@pytest.mark.parametrize("call", CALLS)
def test_interrupted_call(
    another: Callable[[], Network], monkeypatch: pytest.MonkeyPatch, call: str, kind: Kind
) -> None:
    """The endpoint works, or it and perhaps the fabric are broken; `close` closes, and nothing is left."""
    monkeypatch.setattr("mcast.endpoint.blocking.MAX_SLEEP", SOON)
    outcomes = sweep(lambda: World(another()).prepare(call), CALLS[call], after, kind)
    print(call, kind.name, dict(states(outcomes)))
    assert outcomes


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # as above
@pytest.mark.parametrize(
    ("name", "bind", "options"), [("sim-roce", "10.0.0.1", {"clock": "wall"}), ("udp", "127.0.0.1", {})]
)
def test_interrupted_backend_of_its_own(
    own_network: None, monkeypatch: pytest.MonkeyPatch, name: str, bind: str, options: dict[str, str]
) -> None:
    """An endpoint that opens its backend closes it, too, unless the backend was never its own."""
    monkeypatch.setattr("mcast.endpoint.blocking.MAX_SLEEP", SOON)

    def opens_and_closes(opened: list[Endpoint]) -> None:
        opened.append(open_endpoint(name, bind, options=options))
        opened[0].join(GROUP)
        opened[0].close()

    def closes(opened: list[Endpoint], error: BaseException | None) -> None:
        for endpoint in opened:
            endpoint.close()
            assert endpoint.closed
            assert endpoint.backend.closed
        gc.collect()

    sweep(list[Endpoint], opens_and_closes, closes, Kind.CTRL_C)


class Interrupt(BaseException):
    """Exception of a signal's handler."""


def raise_interrupt(*_: object) -> None:
    raise Interrupt


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with open_backend("sim-roce", clock="wall") as backend, open_endpoint(backend, "10.0.0.1") as opened:
        yield opened


@contextmanager
def alarm(handler: Callable[..., object], seconds: float = 0.05) -> Iterator[None]:
    """Have the handler called soon."""
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_interrupted_wait_leaves_it_usable(endpoint: Endpoint) -> None:
    with endpoint.join(GROUP) as group:
        for wait in (endpoint.recv, group.recv, group.recv_batch, partial(endpoint.next_event, None)):
            with alarm(raise_interrupt), pytest.raises(Interrupt):
                wait()
        group.send(b"x")
        assert group.recv(1.0) is not None


def test_interrupted_receiver_hands_on(endpoint: Endpoint) -> None:
    """The thread that receives for all is interrupted; another one that waits receives then."""
    with endpoint.join(GROUP) as group, ThreadPoolExecutor() as pool:
        waits: list[Future[Message | None]] = []

        def later(*_: object) -> None:
            waits.append(pool.submit(group.recv, BOUND))
            until(lambda: bool(endpoint._waiters._asleep))
            raise Interrupt

        with alarm(later), pytest.raises(Interrupt):
            group.recv()
        group.send(b"x")
        assert waits[0].result(BOUND) is not None


def test_broken_endpoint_wakes_those_that_wait(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits without end finds out that another one was interrupted."""
    monkeypatch.setattr("mcast.endpoint.blocking.MAX_SLEEP", SOON)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(endpoint.recv) for _ in range(2)]
        until(lambda: bool(endpoint._waiters._asleep))
        with pytest.raises(Interrupt):
            endpoint._guard.run("join", Phase.JOIN, raise_interrupt)
        for one in waiting:
            with pytest.raises(Broken, match="the endpoint was interrupted in the middle of join"):
                one.result(BOUND)
    for call in (endpoint.recv, endpoint.flush, partial(endpoint.join, GROUP), endpoint.next_event):
        with pytest.raises(Broken):
            call()
    assert endpoint.stats().received == 0
    endpoint.close()
    assert endpoint.closed


def test_send_on_a_broken_endpoint_is_refused(endpoint: Endpoint) -> None:
    group = endpoint.join(GROUP)
    with pytest.raises(Interrupt):
        endpoint._guard.run("join", Phase.JOIN, raise_interrupt)
    for call in (partial(group.send, b"x"), partial(group.send_batch, [b"x"]), group.leave, group.ready):
        with pytest.raises(Broken):
            call()
    assert group.stats().sent == 0


def test_handler_within_a_wait(endpoint: Endpoint) -> None:
    """It may send, and close; a call that would wait for its own thread is refused."""
    group = endpoint.join(GROUP)
    said: list[str] = []

    def handler(*_: object) -> None:
        group.send(b"of the handler")
        for call in (endpoint.recv, partial(endpoint.join, OTHER)):
            with pytest.raises(RuntimeError, match="this thread is waiting in another call"):
                call()
        said.append("refused")

    with alarm(handler):
        message = group.recv(BOUND)
    assert message is not None
    assert bytes(message.payload) == b"of the handler"
    assert said == ["refused"]
    assert endpoint.groups == (group,)
    with alarm(lambda *_: endpoint.close()), pytest.raises(Closed):
        group.recv(BOUND)
    assert endpoint.closed


def test_close_within_a_change_comes_after_it(endpoint: Endpoint) -> None:
    """A handler closes the endpoint in the middle of a join, which is done first."""
    joined: list[bool] = []

    def within() -> None:
        endpoint.close()
        joined.append(endpoint.closed)
        with pytest.raises(RuntimeError, match="recv: this thread is in the middle of join"):
            endpoint.recv(0)
        assert endpoint.stats().joins == 0

    endpoint._guard.run("join", Phase.JOIN, within)
    assert joined == [False]
    assert endpoint.closed
    with pytest.raises(Closed):
        endpoint.recv(0)


def test_block_does_not_replace_the_interrupt(endpoint: Endpoint) -> None:
    """A `with` of an endpoint that was broken in its block ends with what broke it."""
    with pytest.raises(Interrupt), endpoint, endpoint.join(GROUP):
        endpoint._guard.run("join", Phase.JOIN, raise_interrupt)
    assert endpoint.closed


@pytest.mark.parametrize("call", ["join", "leave", "recv", "recv_batch", "next_event", "send", "ready"])
def test_handler_amid_a_send_breaks_nothing(endpoint: Endpoint, call: str) -> None:
    """A send posts outside of the endpoint's lock: what a handler calls there the fabric refuses."""
    group = endpoint.join(GROUP)
    calls: dict[str, Callable[[], object]] = {
        "join": partial(endpoint.join, OTHER),
        "leave": group.leave,
        "recv": partial(endpoint.recv, 0),
        "recv_batch": partial(endpoint.recv_batch, timeout=SOON),
        "next_event": partial(endpoint.next_event, SOON),
        "send": partial(group.send, b"x"),
        "ready": group.ready,
    }
    fabric: Any = endpoint.backend

    def within() -> None:
        with pytest.raises(RuntimeError, match="this thread is in the middle of send"):
            calls[call]()

    fabric._guard.run("send", Phase.SEND, within)
    assert endpoint.groups == (group,)
    group.send(b"after")
    message = group.recv(BOUND)
    assert message is not None
    assert bytes(message.payload) == b"after"
