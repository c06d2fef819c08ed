"""Exceptions that a signal's handler raises in the calls of a served fabric's client, at random moments."""

from __future__ import annotations

import select
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest

from mcast import open_backend, open_endpoint
from mcast.api import Broken, Closed, McastError, TimedOut
from mcast.backends.sim.served.client import ServedBackend, ServedCmId
from mcast.backends.sim.served.connection import Connection
from mcast.backends.sim.served.server import FabricServer
from mcast.backends.sim.testbed import SimObserver

from ..interrupts.sweep import sweep
from ..waiting import Running, descriptors, until
from .served import End, end

LONGEST = 0.003
"""Seconds until the signal."""
AGAIN = 1.0
OTHER = "239.1.1.2"


def interrupt(call: Callable[[], object], seconds: float) -> None:
    """Do the call again and again, until a signal's handler raises SystemExit."""

    def handler(*_: object) -> None:
        raise SystemExit(3)

    def for_ever() -> None:
        # Python drops what a handler raises in a finalizer: then the signal comes again.
        signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
        while True:
            call()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(SystemExit):
            for_ever()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def calls_of(one: End, cm_id: ServedCmId) -> dict[str, Callable[[], object]]:
    def join_and_leave() -> None:
        cm_id.join_multicast(OTHER)
        cm_id.leave_multicast(OTHER)

    return {
        "send": lambda: one.send(b"x"),
        "join": join_and_leave,
        "recv": lambda: one.qp.recv(timeout=30),
        "get_event": lambda: cm_id.channel.get_event(30),
        "counters": lambda: one.qp.counters,
    }


def works(one: End) -> bool:
    """Return True if a message is sent and received; False if the call says that the connection is broken."""
    try:
        with one.qp.recv(512, 0):
            pass
        one.send(b"after")
        while one.take(1) != [b"after"]:
            pass
    except McastError as error:
        if not isinstance(error, Broken) and "interrupted in the middle of a request" not in str(error):
            raise
        return False
    return True


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a handler in a finalizer
@pytest.mark.parametrize("name", ["send", "join", "recv", "get_event", "counters"])
def test_interrupted_call_is_usable_or_broken(
    server: FabricServer, path: Path, name: str, long: bool
) -> None:
    """An interrupted call leaves all usable or broken.

    Where it waits for a message or an event, always usable; amid a request, the connection may be broken,
    which is like the server's end. Other threads go on, and `close` leaves nothing.
    """
    random, broken = Random(name), 0
    before = descriptors()
    for _ in range(400 if long else 40):
        with end(path) as one:
            backend = one.backend
            assert isinstance(backend, ServedBackend)
            call = calls_of(one, one.client._owner)[name]
            interrupt(call, random.uniform(1e-4, LONGEST))
            if not works(one):
                broken += 1
                assert name not in ("recv", "get_event")
                until(backend.devices)
            (groups,) = Running(backend.groups).results()
            assert not isinstance(groups, BaseException)
    until(lambda: not server.clients)
    assert SimObserver(server.fabric).leftovers() == ()
    until(lambda: descriptors() <= before)
    print(f"{name}: {broken} broken")


def after_sending(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Do that in the next request, once it is sent and before its answer is read."""
    step = Connection._step

    def once(connection: Connection, request: bytes, reads: bool) -> object:
        step(connection, request, reads=False)
        monkeypatch.setattr(Connection, "_step", step)
        action()
        return None

    monkeypatch.setattr(Connection, "_step", once)


def leave() -> None:
    raise SystemExit(3)


def test_an_interrupted_receive_loses_no_message(
    receiver: End, sender: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server repeats an answer that was not read, and no receive stays taken."""
    for number in range(3):
        sender.send(b"%d" % number)
        until(lambda: select.select([receiver.qp], [], [], 0)[0])
        after_sending(monkeypatch, leave)
        with pytest.raises(SystemExit):
            receiver.qp.recv(timeout=30)
        assert receiver.take(1) == [b"%d" % number]
    until(lambda: receiver.qp.counters.recv_free == 512)


def test_an_answer_that_nobody_waits_for_is_skipped(
    server: FabricServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the descriptor that came with it is closed."""
    before = descriptors()
    with open_backend("sim", socket=path) as backend:
        for _ in range(3):
            after_sending(monkeypatch, leave)
            with pytest.raises(SystemExit):
                backend.event_channel()
            assert len(backend.devices()) == 1
    until(lambda: not server.clients)
    assert descriptors() <= before


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of a tap whose result is lost
@pytest.mark.parametrize("name", ["event_channel", "create_qp", "tap"])
def test_an_interrupted_call_keeps_no_descriptor(server: FabricServer, path: Path, name: str) -> None:
    """At lines of the call: the descriptor that came with an answer goes with the backend."""
    before = descriptors()

    def bound() -> ServedCmId:
        backend = open_backend("sim", socket=path)
        cm_id = backend.event_channel().create_id()
        cm_id.bind_addr(backend.devices()[0].ports[0].addresses[0])
        assert isinstance(cm_id, ServedCmId)
        return cm_id

    def tap(cm_id: ServedCmId) -> None:
        cm_id.channel._backend.tap().close()

    def close(cm_id: ServedCmId, error: BaseException | None) -> None:
        cm_id.channel._backend.close()
        if error is not None:
            error.__traceback__ = error.__context__ = None
        until(lambda: descriptors() <= before)  # the server's, too, which it closes a little later

    calls: dict[str, Callable[[ServedCmId], object]] = {
        "event_channel": lambda cm_id: cm_id.channel._backend.event_channel(),
        "create_qp": lambda cm_id: cm_id.create_qp(),
        "tap": tap,
    }
    sweep(bound, calls[name], close)


def test_a_handler_amid_a_request_may_close(receiver: End, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else; the call that it has come into says that all is closed."""
    backend = receiver.backend

    def handler() -> None:
        with pytest.raises(RuntimeError, match="in the middle of another call"):
            backend.groups()
        backend.close()

    after_sending(monkeypatch, handler)
    with pytest.raises(Closed):
        backend.groups()
    assert receiver.qp.closed


@pytest.mark.parametrize("call", ["join", "leave", "recv", "next_event", "ready"])
def test_handler_amid_a_request_breaks_nothing(
    server: FabricServer, path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler's call is refused; `stats` shows what is there."""
    with open_endpoint("sim", options={"socket": path}) as endpoint, endpoint.join(OTHER) as group:
        calls: dict[str, Callable[[], object]] = {
            "join": partial(endpoint.join, "239.1.1.3"),
            "leave": group.leave,
            "recv": partial(endpoint.recv, 0.001),
            "next_event": partial(endpoint.next_event, 0.001),
            "ready": partial(group.ready, timeout=0.001),
        }
        errors: list[str] = []

        def handler() -> None:
            endpoint.stats()
            try:
                calls[call]()
            except (RuntimeError, TimedOut) as error:
                errors.append(str(error))

        group.send(b"first")
        after_sending(monkeypatch, handler)
        group.send(b"second")
        assert len(errors) == 1 or call in ("recv", "next_event")
        assert endpoint.groups == (group,)
        group.send(b"third")
        for payload in (b"first", b"second", b"third"):
            message = group.recv(30)
            assert message is not None
            assert bytes(message.payload) == payload
