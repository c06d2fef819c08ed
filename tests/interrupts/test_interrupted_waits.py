"""Ctrl-C in a wait that has no end of its own: one ends it, whether the provider waits in Python or in C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mcast import open_backend, open_endpoint
from mcast.api import Backend
from mcast.backends.sim import Fabric
from mcast.backends.sim.shared import connection
from mcast.backends.sim.shared.server import FabricServer, Serving
from mcast.cast.objects.bytes_in import ToWritable
from mcast.cast.objects.bytes_out import FromIterable, FromOpen
from mcast.interrupts import uninterrupted

from ..interleave import PATIENCE, Lines
from ..networks import network_of
from ..sim.served import End, crowded, end
from ..waiting import Running, is_asleep, until

LONGEST = 60.0
"""Seconds after which a wait counts as one that Ctrl-C does not end."""


@pytest.fixture(params=["roce", "card-roce", "shared-roce"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with closing(network_of(request, clock="wall")) as network:
        with network.open() as backend:
            yield backend
        assert network.leftovers() == ()


def check_is_ended(wait: Callable[[], object], close: Callable[[], None]) -> None:
    """Where it is not, `close` ends it."""
    over, main, hangs = threading.Event(), threading.main_thread(), list[bool]()

    def interrupt() -> None:
        begun = -1
        while not over.wait(PATIENCE) and not (begun == lines.begun and is_asleep(main)):
            begun = lines.begun
        if not over.is_set():
            assert main.ident is not None
            signal.pthread_kill(main.ident, signal.SIGINT)
            hangs.append(not over.wait(LONGEST))
            if any(hangs):
                close()

    def wait_and_be_interrupted() -> None:
        try:
            with lines:
                other.start()
                wait()
        finally:
            over.set()

    lines, other = Lines(), threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        wait_and_be_interrupted()
    other.join()
    assert hangs == [False]


def test_of_an_endpoint(backend: Backend) -> None:
    with open_endpoint(backend, "10.0.0.1") as endpoint:
        check_is_ended(endpoint.recv, endpoint.close)


def test_of_a_queue_pair(backend: Backend) -> None:
    with backend.event_channel() as channel, channel.create_id() as cm_id:
        cm_id.bind_addr("10.0.0.1")
        check_is_ended(cm_id.create_qp().recv, cm_id.destroy)


def test_of_a_channel(backend: Backend) -> None:
    with backend.event_channel() as channel:
        check_is_ended(channel.get_event, channel.close)


class Idle:
    """Bytes that do not come, and are not taken, before somebody says so."""

    def __init__(self) -> None:
        self.ends = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        self.ends.wait()
        yield b"late"

    def read(self, most: int) -> bytes:
        self.ends.wait()
        return b"late"

    def write(self, part: bytes) -> None:
        self.ends.wait()


@pytest.mark.parametrize(
    "wait",
    [
        lambda idle: FromIterable(idle).read(9),
        lambda idle: FromOpen(idle).read(9),
        lambda idle: ToWritable(idle).write(b"part"),
    ],
    ids=["iterable", "read", "write"],
)
def test_of_a_program_for_its_own_bytes(wait: Callable[[Idle], object]) -> None:
    def waits() -> None:
        with uninterrupted():  # as each call of a session is
            wait(idle)

    idle = Idle()
    check_is_ended(waits, idle.ends.set)


def test_of_an_attach_while_many_others_wait(tmp_path: Path) -> None:
    path = tmp_path / "fabric.sock"
    with crowded(path) as server:
        check_is_ended(lambda: open_backend("sim", socket=path), server.close)


BEHIND: dict[str, Callable[[End], object]] = {
    "a request": lambda end: end.backend.groups(),
    "a send": lambda end: end.qp.send(end.to, [b"x"], imm=1),
    "a send of one": lambda end: end.qp.send_one(end.to, b"x"),
    "a receive": lambda end: end.qp.recv(),
}


@pytest.mark.parametrize("name", BEHIND)
def test_behind_another_thread_that_waits_for_a_silent_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """With what the call needs, too: the connection, and the messages that have come."""
    monkeypatch.setattr(connection, "LOOK_AGAIN", 0.01)
    path, fabric = tmp_path / "fabric.sock", Fabric.roce(ports=2, clock="wall")
    silent, over = threading.Event(), threading.Event()

    def silence_the_server() -> None:
        with fabric.clock:
            silent.set()
            over.wait()

    with Serving(FabricServer(fabric, path)), end(path) as here, end(path, sends=True) as there:
        here.send(b"so that it posts from now on")
        here.take(1)
        there.send(b"which the server has")
        silencing = threading.Thread(target=silence_the_server)
        silencing.start()
        assert silent.wait(LONGEST)
        taking = Running(lambda: here.take(1))
        try:
            until(lambda: here.client._connection._depth)
            check_is_ended(lambda: BEHIND[name](here), over.set)
        finally:
            over.set()
            silencing.join()
        assert taking.results() == [[b"which the server has"]]
