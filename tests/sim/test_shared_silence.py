"""A client of a served fabric whose server is stopped, and forks of a client."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mcast import open_backend
from mcast.api import CmEventType, CmId, Destination, EventChannel, McastError, QueuePair, TimedOut
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


# --- a call's own time ----------------------------------------------------------------------------


@contextmanager
def stopped(server: subprocess.Popen[str]) -> Iterator[None]:
    """The server is stopped within the block."""
    server.send_signal(signal.SIGSTOP)
    try:
        until(lambda: ") T " in Path(f"/proc/{server.pid}/stat").read_text())
        yield
    finally:
        server.send_signal(signal.SIGCONT)


@pytest.fixture
def end(
    server: subprocess.Popen[str], path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[EventChannel, CmId, QueuePair]]:
    """Of a client that never gives a silent server up: what waits for the server's answer hangs."""
    with open_backend("sim", socket=path) as backend, backend.event_channel() as channel:
        assert isinstance(backend, SharedBackend)
        monkeypatch.setattr(backend._connection, "_patience", 1e6)
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        yield channel, cm_id, cm_id.create_qp()


def joined(channel: EventChannel, cm_id: CmId) -> Destination:
    cm_id.join_multicast("239.1.1.1")
    event = channel.get_event(30)
    assert event is not None
    assert event.ud is not None
    return event.ud.destination


def test_an_event_that_a_stopped_server_was_asked_for_is_the_next_call_s(
    server: subprocess.Popen[str], end: tuple[EventChannel, CmId, QueuePair]
) -> None:
    channel, cm_id, _ = end
    cm_id.join_multicast("239.1.1.1")
    until(lambda: channel.pending)
    with stopped(server):
        assert channel.get_event(0) is None
        assert channel.get_event(0.01) is None
        assert select.select([channel], [], [], 0)[0], "an event is on its way"
    event = channel.get_event(30)
    assert event is not None
    assert event.type is CmEventType.MULTICAST_JOIN
    assert not channel.pending
    assert channel.get_event(0) is None


@pytest.mark.parametrize("posted", [False, True])
def test_a_message_that_a_stopped_server_was_asked_for_is_the_next_call_s(
    server: subprocess.Popen[str], end: tuple[EventChannel, CmId, QueuePair], posted: bool
) -> None:
    """The server has the first one of a sender; the next ones lie in a ring, which the server gives."""
    channel, cm_id, qp = end
    to = joined(channel, cm_id)
    if posted:
        qp.send(to, [b"first"])
        assert qp.recv_one(30) is not None
    qp.send(to, [b"asked for"])
    qp.flush()
    with stopped(server):
        for _ in range(2):
            assert qp.recv_one(0.01) is None
        assert select.select([qp], [], [], 0)[0], "a message is on its way"
    message = qp.recv_one(30)
    assert message is not None
    assert bytes(message.payload) == b"asked for"
    assert qp.recv_one(0) is None


def test_what_comes_late_and_nobody_wants_is_given_back(
    server: subprocess.Popen[str], end: tuple[EventChannel, CmId, QueuePair]
) -> None:
    """The descriptor of a ring, for a queue pair that is closed."""
    channel, cm_id, qp = end
    to = joined(channel, cm_id)
    qp.send(to, [b"first"])
    qp.send(to, [b"in the ring"])
    assert qp.recv_one(30) is not None
    before = len(descriptors())
    with stopped(server):
        assert qp.recv_one(0.01) is None
    cm_id.destroy()
    assert len(descriptors()) == before - 3, "its own, and one more for each answer"


def test_flush_is_not_answered_by_what_was_asked_before(
    server: subprocess.Popen[str], end: tuple[EventChannel, CmId, QueuePair]
) -> None:
    channel, cm_id, qp = end
    to = joined(channel, cm_id)
    qp.send(to, [b"first"])
    assert qp.recv_one(30) is not None
    with stopped(server), pytest.raises(TimedOut):
        qp.flush(0.01)
    assert qp.counters.recv_free == 512  # and that answer is here
    with stopped(server):
        qp.send(to, [b"second"])
        with pytest.raises(TimedOut):
            qp.flush(0.01)


def test_sends_to_a_stopped_server_end_in_time(
    server: subprocess.Popen[str], end: tuple[EventChannel, CmId, QueuePair]
) -> None:
    """What was posted goes out when the server goes on, and what was refused does not."""
    channel, cm_id, qp = end
    to, posted = joined(channel, cm_id), [b"asked for"]

    def post(times: float = 1) -> None:
        while times:
            posted.append(b"%d" % len(posted))
            qp.send(to, posted[-1:], timeout=0.01)
            times -= 1

    with stopped(server):
        qp.send(to, posted, timeout=0.01)
    qp.flush()
    post()  # and now there is no question to the next ones
    with stopped(server):
        with pytest.raises(TimedOut, check=lambda error: error.posted == 0):
            post(math.inf)
        with pytest.raises(TimedOut):
            qp.flush(0.01)
    qp.flush(30)
    wanted, found = posted[:-1][:512], list[bytes]()
    while len(found) < len(wanted):
        with qp.recv(timeout=30) as batch:
            assert len(batch)
            found += [bytes(message.payload) for message in batch]
    assert found == wanted
    if len(posted) <= 512:
        assert len(qp.recv(timeout=0)) == 0


def test_a_call_does_not_wait_for_another_thread_s(
    server: subprocess.Popen[str], end: tuple[EventChannel, CmId, QueuePair]
) -> None:
    """Which waits for the stopped server without a timeout."""
    channel, cm_id, qp = end
    cm_id.join_multicast("239.1.1.1")
    until(lambda: channel.pending)
    with stopped(server):
        counters = threading.Thread(target=lambda: qp.counters, daemon=True)
        counters.start()
        until(lambda: is_asleep(counters))
        assert channel.get_event(0.01) is None
        assert len(qp.recv(timeout=0.01)) == 0
        assert counters.is_alive()
    counters.join(60)
    event = channel.get_event(30)
    assert event is not None
    assert event.type is CmEventType.MULTICAST_JOIN


def test_a_bell_that_has_rung_is_silent_for_whoever_sleeps_next() -> None:
    """However often it was rung, and though no sleep has heard it."""
    sleep, poller = connection.Sleep(), select.poll()
    bell = sleep._take()
    poller.register(bell, select.POLLIN)
    for _ in range(2):
        sleep.wake()
        sleep.wake()
        assert poller.poll(0)
        sleep._give(bell)
        assert poller.poll(0) == []
        assert sleep._take() == bell
    sleep._give(bell)
    sleep.close()
