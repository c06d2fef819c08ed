"""A client of a served fabric whose server is stopped or full, and forks of a client."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mcast import BackendUnavailable, open_backend, open_endpoint
from mcast.api import CmEventType, McastError
from mcast.backends.sim import Fabric
from mcast.backends.sim.served import server as served_server
from mcast.backends.sim.served.client import ServedBackend
from mcast.backends.sim.served.server import FabricServer, Serving
from mcast.endpoint.policy import RejoinPolicy

from ..waiting import Running, is_asleep, until
from .served import crowded, end

SERVER = """
import signal, sys
from pathlib import Path
from mcast.backends.sim import Fabric
from mcast.backends.sim.served.server import FabricServer
Path("/proc/self/comm").write_bytes(b"(\\xfc) R ")  # a name that is no text
server = FabricServer(Fabric.roce(ports=3, clock="wall"), Path(sys.argv[1]))
signal.signal(signal.SIGTERM, lambda *_: server.stop())
print("serving", flush=True)
server.run()
server.close()
"""
TIMEOUT = 0.3
"""Seconds that a call waits for the stopped server."""
SOON = 20 * TIMEOUT
"""Seconds in which a call that waits once has surely ended on a busy machine."""


@pytest.fixture
def server(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A server in a process of its own."""
    command = [sys.executable, "-c", SERVER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), "it did not begin"
            yield process
        finally:
            process.kill()


@contextmanager
def stopped(server: subprocess.Popen[str]) -> Iterator[None]:
    """Inside the `with` the server is stopped."""
    server.send_signal(signal.SIGSTOP)
    try:
        until(lambda: b") T " in Path(f"/proc/{server.pid}/stat").read_bytes())
        yield
    finally:
        server.send_signal(signal.SIGCONT)


def check_seconds(call: Callable[[], object]) -> float:
    """Return the seconds that the call takes; it may raise McastError or BackendUnavailable."""
    begun = time.monotonic()
    try:
        call()
    except (McastError, BackendUnavailable):
        pass
    return time.monotonic() - begun


# --- a stopped server -------------------------------------------------------------------------


def test_the_timeout_is_five_seconds(server: subprocess.Popen[str], path: Path) -> None:
    with open_backend("sim", socket=path) as backend, open_backend("sim", socket=path, timeout=2) as other:
        assert isinstance(backend, ServedBackend)
        assert isinstance(other, ServedBackend)
        assert (backend.connection().timeout, other.connection().timeout) == (5.0, 2.0)


def test_a_stopped_server_is_named_and_may_go_on(server: subprocess.Popen[str], path: Path) -> None:
    """A call that it does not answer in time loses the devices, which come back with it."""
    with open_backend("sim", socket=path, timeout=TIMEOUT) as backend, backend.event_channel() as channel:
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        with stopped(server):
            with pytest.raises(
                McastError, match=rf"process {server.pid}, is stopped: resume it by `kill -CONT"
            ):
                backend.groups()
            event = channel.get_event(0)
            assert event is not None
            assert (event.type, event.id) == (CmEventType.DEVICE_REMOVAL, cm_id)
            assert channel.get_event(0) is None
            with pytest.raises(BackendUnavailable, match=rf"process {server.pid}, is stopped: .*kill -CONT"):
                open_backend("sim", socket=path, timeout=TIMEOUT)
        until(backend.devices)
        assert str(backend.devices()[0].ports[0].addresses[0]) == "10.0.0.1"


@pytest.mark.parametrize("call", ["stats", "close", "leave", "join", "send", "flush", "recv", "ready"])
def test_no_call_outlasts_its_timeout(server: subprocess.Popen[str], path: Path, call: str) -> None:
    """On an endpoint whose server is stopped; nor does what follows, which finds the connection lost."""
    rejoin = RejoinPolicy(first=60.0, maximum=60.0)
    options = {"socket": path, "timeout": TIMEOUT}
    with open_endpoint("sim", options=options, rejoin=rejoin) as endpoint:
        group = endpoint.join("239.1.1.1")
        calls: dict[str, Callable[[], object]] = {
            "stats": endpoint.stats,
            "close": endpoint.close,
            "leave": group.leave,
            "join": lambda: endpoint.join("239.1.1.2", timeout=TIMEOUT),
            "send": lambda: group.send(b"x", timeout=TIMEOUT),
            "flush": lambda: endpoint.flush(TIMEOUT),
            "recv": lambda: endpoint.recv(TIMEOUT),
            "ready": lambda: group.ready(timeout=TIMEOUT),
        }
        with stopped(server):
            assert check_seconds(calls[call]) < SOON
            assert check_seconds(endpoint.stats) < SOON
            assert check_seconds(endpoint.close) < SOON


def test_a_call_of_another_thread_waits_no_longer(server: subprocess.Popen[str], path: Path) -> None:
    """Though the first one has the connection meanwhile."""
    with open_backend("sim", socket=path, timeout=TIMEOUT) as backend, stopped(server):
        running = Running(*[lambda: check_seconds(backend.groups)] * 4)
        assert max(found for found in running.results() if isinstance(found, float)) < SOON


def test_messages_wait_for_a_server_that_goes_on(server: subprocess.Popen[str], path: Path) -> None:
    """A receive without a message asks the server nothing, and so loses nothing."""
    with end(path) as here, end(path, sends=True) as there:
        with stopped(server):
            assert len(here.qp.recv(timeout=0.05)) == 0
        there.send(b"after")
        assert here.take(1) == [b"after"]


# --- a full server ----------------------------------------------------------------------------


def test_a_full_server_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_server, "MAX_CLIENTS", 2)
    with Serving(FabricServer(Fabric.roce(ports=3, clock="wall"), path)) as server:
        with open_backend("sim", socket=path), open_backend("sim", socket=path, host="all"):
            with pytest.raises(BackendUnavailable, match="the server is full: 2 clients") as refused:
                open_backend("sim", socket=path)
            assert str(refused.value).endswith("end a program that is attached, or serve another fabric")
        until(lambda: not server.clients)
        with open_backend("sim", socket=path) as backend:
            assert len(backend.devices()) == 1


def test_a_server_without_descriptors_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers with its reserve descriptor."""
    with Serving(FabricServer(Fabric.roce(ports=3, clock="wall"), path)) as server:
        accept, calls = socket.socket.accept, list[None]()

        def fails_once(self: socket.socket) -> object:
            calls.append(None)
            if len(calls) == 1:
                raise OSError(24, os.strerror(24))
            return accept(self)

        monkeypatch.setattr(socket.socket, "accept", fails_once)
        with pytest.raises(BackendUnavailable, match="the server is full: Too many open files"):
            open_backend("sim", socket=path)
        with open_backend("sim", socket=path):
            assert len(server.clients) == 1


def test_a_server_that_accepts_nobody_says_so(path: Path) -> None:
    with crowded(path), pytest.raises(BackendUnavailable, match="does not accept connections") as refused:
        open_backend("sim", socket=path, timeout=TIMEOUT)
    assert "no fabric is served" not in str(refused.value)


# --- forks and descriptors --------------------------------------------------------------------


@pytest.fixture
def served(path: Path) -> Iterator[FabricServer]:
    with Serving(FabricServer(Fabric.roce(ports=3, clock="wall"), path)) as server:
        yield server


def descriptors() -> list[int]:
    """Those of this process, without the one that it looks with."""
    found = [int(one.name) for one in Path("/proc/self/fd").iterdir()]
    return [number for number in found if Path(f"/proc/self/fd/{number}").exists()]


def descriptors_without_a_client(served: FabricServer, path: Path) -> int:
    """Number in this process after a first use, with nobody on the fabric."""
    with open_backend("sim", socket=path):
        pass
    until(lambda: not served.clients)
    return len(descriptors())


def in_a_fork(action: Callable[[], object]) -> int:
    """The status of a child that does that; it dies of SIGALRM should it hang."""
    pid = os.fork()
    if not pid:
        status = 9
        try:
            signal.alarm(60)
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_fork_closes_without_harm(served: FabricServer, path: Path) -> None:
    """A fork can close what is open and harms nobody.

    Whatever lock another thread held when the process forked.
    """
    with open_backend("sim", socket=path) as backend, backend.event_channel() as channel:
        assert isinstance(backend, ServedBackend)
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        qp = cm_id.create_qp()
        held, over = threading.Event(), threading.Event()

        def hold() -> None:
            with backend.lock, backend.connection().lock:
                held.set()
                over.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(60)

        def end_all() -> None:
            with pytest.raises(McastError, match="its fork"):
                channel.get_event(0)
            with pytest.raises(McastError, match="its fork"):
                qp.recv(timeout=0)
            with pytest.raises(McastError, match="its fork"):
                backend.event_channel()
            cm_id.destroy()
            backend.close()

        assert in_a_fork(end_all) == 0
        over.set()
        thread.join()
        cm_id.join_multicast("239.1.1.1")
        event = channel.get_event(30)
        assert event is not None
        assert event.ud is not None
        qp.send(event.ud.destination, [b"still here"])
        with qp.recv(timeout=30) as batch:
            assert [bytes(message.payload) for message in batch] == [b"still here"]


def test_a_fork_leaves_the_parent_s_news_alone(path: Path) -> None:
    """The removal that a client is told of once its server has ended."""
    with Serving(FabricServer(Fabric.roce(ports=3, clock="wall"), path)):
        backend = open_backend("sim", socket=path)
        channel = backend.event_channel()
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
    with backend:
        until(lambda: channel.pending)
        assert in_a_fork(cm_id.destroy) == 0
        event = channel.get_event(0)
        assert event is not None
        assert event.type is CmEventType.DEVICE_REMOVAL


def test_a_fork_that_closes_wakes_nobody(served: FabricServer, path: Path) -> None:
    """A thread of the parent that waits for an event goes on waiting, and gets it."""
    with open_backend("sim", socket=path) as backend, backend.event_channel() as channel:
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        running = Running(channel.get_event)
        until(lambda: is_asleep(running.threads[0]))
        assert in_a_fork(backend.close) == 0
        assert not channel.pending
        cm_id.join_multicast("239.1.1.1")
        (event,) = running.results()
        assert getattr(event, "type", None) is CmEventType.MULTICAST_JOIN


def test_exec_inherits_no_descriptor(served: FabricServer, path: Path) -> None:
    """An executed program has none of the descriptors."""
    before = descriptors()
    with open_backend("sim", socket=path) as backend, backend.event_channel() as channel:
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        with cm_id.create_qp() as qp:
            found = set(descriptors()) - set(before)
            assert qp.fileno() in found
            assert not any(map(os.get_inheritable, found))


def test_channel_closes_descriptors_of_a_dead_server(path: Path) -> None:
    """The descriptors of a server that has ended are closed with the channel."""
    before = len(descriptors())
    with Serving(FabricServer(Fabric.roce(ports=3, clock="wall"), path)):
        backend = open_backend("sim", socket=path)
        channel = backend.event_channel()
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        qp = cm_id.create_qp()
    until(lambda: channel.pending)
    channel.close()
    assert qp.closed
    cm_id.destroy()
    backend.close()
    assert len(descriptors()) == before


def test_sleeping_thread_leaves_nothing_at_close(served: FabricServer, path: Path) -> None:
    """A thread that sleeps while the backend is closed leaves nothing."""
    before = descriptors_without_a_client(served, path)
    backend = open_backend("sim", socket=path)
    channel = backend.event_channel()
    ended: list[object] = []

    def wait() -> None:
        try:
            channel.get_event()
        except McastError as error:
            ended.append(type(error).__name__)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: is_asleep(thread))
    backend.close()
    thread.join(60)
    assert ended == ["Closed"]
    until(lambda: not served.clients and len(descriptors()) == before)
