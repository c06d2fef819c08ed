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
from mcast.cast.objects.bytes_in import ToWritable
from mcast.cast.objects.bytes_out import FromIterable, FromOpen
from mcast.interrupts import uninterrupted

from ..interleave import PATIENCE, Lines
from ..networks import network_of
from ..sim.served import crowded
from ..waiting import is_asleep

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
