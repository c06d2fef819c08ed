"""Exceptions that a signal's handler raises in the calls of a served fabric's client, at random moments."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from mcast.api import Broken, CmId, McastError
from mcast.backends.sim.served.client import ServedBackend
from mcast.backends.sim.served.server import FabricServer
from mcast.backends.sim.testbed import SimObserver

from ..waiting import Running, descriptors, until
from .served import End, end

LONGEST = 0.003
"""Seconds until the signal."""
OTHER = "239.1.1.2"


def interrupt(call: Callable[[], object], seconds: float) -> None:
    """Do the call again and again, until a signal's handler raises SystemExit."""

    def handler(*_: object) -> None:
        raise SystemExit(3)

    def for_ever() -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while True:
            call()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(SystemExit):
            for_ever()
    finally:
        signal.signal(signal.SIGALRM, before)


def calls_of(one: End, cm_id: CmId) -> dict[str, Callable[[], object]]:
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


@pytest.mark.parametrize("name", ["send", "join", "recv", "get_event", "counters"])
def test_an_interrupted_call_leaves_all_usable_or_broken(
    server: FabricServer, path: Path, name: str, long: bool
) -> None:
    """Where it waits for a message or an event, always usable; amid a request, the connection may be broken,
    which is like the server's end. Other threads go on, and `close` leaves nothing."""
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
