"""The place of a served fabric's socket: who may have it, and what is left of it."""

from __future__ import annotations

import errno
import os
import socket
import threading
from pathlib import Path

import pytest

from mcast.backends.sim import Fabric
from mcast.backends.sim.served.listener import Listener, connect
from mcast.backends.sim.served.server import FabricServer
from mcast.backends.sim.testbed import SimObserver


def reaches(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        connect(client, path, 60)
        return True


def test_of_two_servers_one_serves(path: Path) -> None:
    """Though both find the socket of a server that was killed."""
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    found: list[object] = []

    def serve() -> None:
        try:
            found.append(Listener(path, None))
        except OSError as error:
            found.append(error.errno)

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found.count(errno.EADDRINUSE) == 3
    (made,) = (one for one in found if isinstance(one, Listener))
    assert reaches(path)
    made.close()
    assert list(path.parent.iterdir()) == []


def test_a_busy_server_is_not_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as first:
        busy.bind(str(path))
        busy.listen(0)
        first.connect(str(path))
        with pytest.raises(OSError, match="served there already"):
            Listener(path, None)
        assert path.is_socket()


def test_whoever_sees_the_socket_reaches_the_server(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket appears in its place when it listens."""
    listen, there = socket.socket.listen, list[bool]()

    def looks_before(listener: socket.socket, backlog: int) -> None:
        there.append(path.exists())
        listen(listener, backlog)

    monkeypatch.setattr(socket.socket, "listen", looks_before)
    made = Listener(path, None)
    assert there == [False]
    assert reaches(path)
    made.close()


def test_a_file_that_appears_meanwhile_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def late(made: Path, place: Path) -> None:
        path.write_text("mine")
        link(made, place)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(FileExistsError, match=r"just appeared there, and is not removed: .*fabric"):
        Listener(path, None)
    assert path.read_text() == "mine"


def test_a_server_that_cannot_serve_leaves_nothing(path: Path) -> None:
    path.write_text("mine")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(OSError, match="is not removed"):
            FabricServer(Fabric.roce(ports=1), path)
    path.unlink()
    with pytest.raises((OSError, OverflowError)):
        Listener(path, 1 << 40)
    assert list(path.parent.iterdir()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_server_that_does_not_run_stops_no_time(path: Path) -> None:
    """Its loop does the steps of the fabric only while it runs; before that, the clock's thread does."""
    fabric, done = Fabric.roce(ports=1, clock="wall"), list[int]()
    server = FabricServer(fabric, path)
    with fabric.clock:
        fabric.clock.call_later(0, lambda: done.append(1))
    assert SimObserver(fabric).leftovers() == ()
    assert done == [1]
    server.close()
    fabric.close()
