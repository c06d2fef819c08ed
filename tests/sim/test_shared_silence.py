"""A client of a served fabric whose server is stopped, and forks of a client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mcast import open_backend
from mcast.api import CmEventType, McastError
from mcast.backends.sim import Fabric
from mcast.backends.sim.shared import connection, frames
from mcast.backends.sim.shared.client import SharedBackend
from mcast.backends.sim.shared.server import FabricServer, Serving

from ..waiting import is_asleep, until

SERVER = """
import signal, sys
from pathlib import Path
from mcast.backends.sim import Fabric
from mcast.backends.sim.shared.server import FabricServer
server = FabricServer(Fabric.roce(ports=3, clock="wall"), Path(sys.argv[1]))
signal.signal(signal.SIGTERM, lambda *_: server.stop())
print("serving", flush=True)
server.run()
server.close()
"""

ASKS = """
import os, signal, sys, time, mcast
from pathlib import Path
server = int(sys.argv[2])
with mcast.open_backend("sim", socket=sys.argv[1]) as backend, backend.event_channel() as channel:
    with channel.create_id() as cm_id:
        cm_id.bind_addr("10.0.0.1")
        with cm_id.create_qp() as qp:
            os.kill(server, signal.SIGSTOP)
            while ") T " not in Path(f"/proc/{server}/stat").read_text():
                time.sleep(0.001)
            try:
                print("asking", flush=True)
                backend.groups()
            except KeyboardInterrupt:
                print("interrupted", flush=True)
print("closed", flush=True)
"""


@contextmanager
def program(text: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process that has said its first word; it is dead at the end."""
    command = [sys.executable, "-c", text, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), "it did not begin"
            yield process
        finally:
            process.kill()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fabric.sock"


@pytest.fixture
def server(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A server in a process of its own."""
    with program(SERVER, path) as server:
        yield server


def test_a_stopped_server_is_named_and_may_go_on(
    server: subprocess.Popen[str], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_backend("sim", socket=path) as backend, backend.event_channel() as channel:
        assert isinstance(backend, SharedBackend)
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        server.send_signal(signal.SIGSTOP)
        until(lambda: ") T " in Path(f"/proc/{server.pid}/stat").read_text())
        monkeypatch.setattr(backend._connection, "_patience", 0.01)
        with pytest.raises(
            McastError, match=rf"process {server.pid}, is stopped: let it go on by `kill -CONT"
        ):
            backend.groups()
        event = channel.get_event(0)
        assert event is not None
        assert (event.type, event.id) == (CmEventType.DEVICE_REMOVAL, cm_id)
        with pytest.raises(TimeoutError, match="is stopped"):
            connection.Connection(path, frames.AttachTo(), 0.01)
        server.send_signal(signal.SIGCONT)
        until(backend.devices)
        assert str(backend.devices()[0].ports[0].addresses[0]) == "10.0.0.1"


def test_ctrl_c_ends_a_call_that_a_stopped_server_does_not_answer(
    server: subprocess.Popen[str], path: Path
) -> None:
    """And what was open closes without asking the server any more."""
    with program(ASKS, path, server.pid) as client:
        until(lambda: ") S " in Path(f"/proc/{client.pid}/stat").read_text())
        client.send_signal(signal.SIGINT)
        assert client.stdout is not None
        assert client.stdout.read() == "interrupted\nclosed\n"
        assert client.wait() == 0


@pytest.fixture
def served(path: Path) -> Iterator[FabricServer]:
    with Serving(FabricServer(Fabric.roce(ports=3, clock="wall"), path)) as server:
        yield server


def descriptors() -> list[int]:
    """Those of this process, without the one that it looks with."""
    found = [int(one.name) for one in Path("/proc/self/fd").iterdir()]
    return [number for number in found if Path(f"/proc/self/fd/{number}").exists()]


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


def test_a_fork_can_close_what_is_open_and_harms_nobody(served: FabricServer, path: Path) -> None:
    """Whatever lock another thread held when the process forked."""
    with open_backend("sim", socket=path) as backend, backend.event_channel() as channel:
        assert isinstance(backend, SharedBackend)
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        qp = cm_id.create_qp()
        held, over = threading.Event(), threading.Event()

        def hold() -> None:
            with backend.lock, backend._connection._whole:
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


def test_an_executed_program_has_none_of_the_descriptors(served: FabricServer, path: Path) -> None:
    before = descriptors()
    with open_backend("sim", socket=path) as backend, backend.event_channel() as channel:
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        with cm_id.create_qp() as qp:
            found = set(descriptors()) - set(before)
            assert qp.fileno() in found
            assert not any(map(os.get_inheritable, found))


def test_the_descriptors_of_a_server_that_has_ended_are_closed_with_the_channel(path: Path) -> None:
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


def test_a_thread_that_sleeps_while_the_backend_is_closed_leaves_nothing(
    served: FabricServer, path: Path
) -> None:
    with open_backend("sim", socket=path):  # what is made once is there
        pass
    until(lambda: not served.clients)
    before = len(descriptors())
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
