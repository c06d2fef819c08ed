"""A client of a served fabric whose server is stopped, and forks of a client."""

from __future__ import annotations

import asyncio
import errno
import inspect
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from mcast import Endpoint, Membership, aio, open_backend, open_endpoint
from mcast.api import (
    CmEventType,
    CmId,
    Destination,
    EventChannel,
    McastError,
    Message,
    QpError,
    QpState,
    QueuePair,
    TimedOut,
)
from mcast.backends.sim import Fabric
from mcast.backends.sim.shared import connection, frames, rings
from mcast.backends.sim.shared.client import SharedBackend, SharedCmId
from mcast.backends.sim.shared.server import FabricServer, Serving

from ..waiting import Running, is_asleep, until
from .served import End, asked
from .test_shared_amid import Amid, at_each_line

SERVER = """
import signal, sys
from pathlib import Path
from mcast.backends.sim import Fabric
from mcast.backends.sim.shared.server import FabricServer
Path("/proc/self/comm").write_bytes(b"(\\xfc) R ")  # a name that is no text
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
            while b") T " not in Path(f"/proc/{server}/stat").read_bytes():
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
        until(lambda: b") T " in Path(f"/proc/{server.pid}/stat").read_bytes())
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
        until(lambda: b") S " in Path(f"/proc/{client.pid}/stat").read_bytes())
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


def descriptors_without_a_client(served: FabricServer, path: Path) -> int:
    """How many this process has once what is made once is there, and nobody is on the fabric."""
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


def test_a_fork_that_closes_what_is_open_keeps_no_thread_of_the_parent_awake(
    served: FabricServer, path: Path
) -> None:
    with open_backend("sim", socket=path) as backend, backend.event_channel() as channel:
        assert isinstance(backend, SharedBackend)
        running, sleep = Running(channel.get_event), backend.sleep
        until(lambda: sleep._asleep and is_asleep(running.threads[0]))
        assert in_a_fork(backend.close) == 0
        assert select.select([*sleep._asleep, *sleep._free], [], [], 0)[0] == []
    assert isinstance(running.results()[0], McastError)


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


@pytest.mark.parametrize("what", ["backend", "channel"])
def test_a_close_whose_wait_ctrl_c_ends_has_closed_all(
    served: FabricServer, path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    before = descriptors_without_a_client(served, path)
    backend = open_backend("sim", socket=path)
    assert isinstance(backend, SharedBackend)
    channel, other = backend.event_channel(), backend.event_channel()
    ids = [channel.create_id() for _ in range(2)]
    for cm_id in ids:
        cm_id.bind_addr("10.0.0.1")
        cm_id.create_qp()

    def wait_in_vain(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(backend._connection, "_sleep", wait_in_vain)
    with pytest.raises(KeyboardInterrupt):
        (backend if what == "backend" else channel).close()
    assert (channel.closed, *(cm_id.closed for cm_id in ids)) == (True, True, True)
    assert backend.closed == other.closed == (what == "backend")
    if what == "channel":
        backend.close()
    until(lambda: not served.clients and len(descriptors()) == before)


# --- a call's own time ----------------------------------------------------------------------------


@contextmanager
def stopped(server: subprocess.Popen[str]) -> Iterator[None]:
    """The server is stopped within the block."""
    server.send_signal(signal.SIGSTOP)
    try:
        until(lambda: b") T " in Path(f"/proc/{server.pid}/stat").read_bytes())
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


def test_a_call_with_a_timeout_does_not_give_up_a_server(
    server: subprocess.Popen[str], end: tuple[EventChannel, CmId, QueuePair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short the patience is, or long ago an earlier call has asked for the same."""
    channel, cm_id, _ = end
    assert isinstance(cm_id, SharedCmId)
    cm_id.join_multicast("239.1.1.1")
    until(lambda: channel.pending)
    with monkeypatch.context() as patch:
        patch.setattr(cm_id._connection, "_patience", 0.0)
        with stopped(server):
            assert channel.get_event(0.01) is None
            assert channel.get_event(0.01) is None
        event = channel.get_event(30)
    assert event is not None
    assert event.type is CmEventType.MULTICAST_JOIN


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


def test_sends_that_a_stopped_server_refuses_cost_no_room(
    server: subprocess.Popen[str], end: tuple[EventChannel, CmId, QueuePair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much of them there was: the next ones are posted without a question again."""
    channel, cm_id, qp = end
    to = joined(channel, cm_id)
    cm_id.leave_multicast("239.1.1.1")
    qp.send(to, [b"first"])
    refused = [bytes(1000)] * 90
    with stopped(server):
        with suppress(TimedOut):
            while True:
                qp.send(to, [b"x"], timeout=0)
        for _ in range(rings.SIZE // (1000 * len(refused)) + 1):
            with pytest.raises(TimedOut, check=lambda error: error.posted == 0):
                qp.send(to, refused, timeout=0)
    qp.flush(30)
    assert isinstance(cm_id, SharedCmId)
    found = asked(cm_id._backend, monkeypatch)
    qp.send(to, refused)
    assert found == []


def test_a_sender_notices_that_its_server_was_killed(
    server: subprocess.Popen[str], end: tuple[EventChannel, CmId, QueuePair]
) -> None:
    """Though nothing but its sends looks, and long before there is no room for more."""
    channel, cm_id, qp = end
    to = joined(channel, cm_id)
    for _ in range(3):
        qp.send_one(to, b"x")
    server.kill()
    server.wait()
    tries = list[None]()

    def fails() -> bool:
        tries.append(None)
        try:
            qp.send_one(to, b"x")
        except QpError:
            return True
        return False

    until(fails)
    assert len(tries) < 5


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


def test_what_is_begun_on_a_stopped_server_ends_in_an_event(
    server: subprocess.Popen[str], end: tuple[EventChannel, CmId, QueuePair], caplog: pytest.LogCaptureFixture
) -> None:
    """As it is where the server answers at once: done, or refused, which the answer said there."""
    channel, cm_id, qp = end
    other, third = channel.create_id(), channel.create_id()
    raw = "ff0e::1"  # which RoCE refuses
    with stopped(server):
        cm_id.join_multicast("239.1.1.1", "joined")
        cm_id.join_multicast(raw, "refused")
        other.resolve_addr("239.1.1.1", "10.0.0.1")
        third.resolve_addr("239.1.1.1", "10.9.9.9")
        assert channel.get_event(0.01) is None
    assert f"kill -CONT {server.pid}" in caplog.text
    found = [channel.get_event(30) for _ in range(4)]
    assert {(one.type, one.id, one.context) for one in found if one is not None} == {
        (CmEventType.MULTICAST_JOIN, cm_id, "joined"),
        (CmEventType.MULTICAST_ERROR, cm_id, "refused"),
        (CmEventType.ADDR_RESOLVED, other, None),
        (CmEventType.ADDR_ERROR, third, None),
    }
    assert channel.get_event(0) is None
    assert other.device == cm_id.device
    (error,) = [one for one in found if one is not None and one.context == "refused"]
    cm_id.leave_multicast(raw)
    with pytest.raises(McastError, check=lambda raised: raised.errno == error.errno):
        cm_id.join_multicast(raw)
    assert len(qp.attachments) == 1


def test_nothing_is_expected_of_an_id_that_was_destroyed(
    server: subprocess.Popen[str], end: tuple[EventChannel, CmId, QueuePair]
) -> None:
    channel, _, _ = end
    doomed, poller = channel.create_id(), select.poll()
    poller.register(channel.fileno(), select.POLLIN)
    with stopped(server):
        doomed.resolve_addr("239.1.1.1", "10.0.0.1")
        assert poller.poll(0)
    doomed.destroy()
    assert poller.poll(0) == []
    assert channel.get_event(0) is None


def test_a_refusal_is_heard_after_the_answer_to_what_was_asked_before(
    server: subprocess.Popen[str], end: tuple[EventChannel, CmId, QueuePair]
) -> None:
    channel, cm_id, _ = end
    cm_id.join_multicast("239.1.1.1")
    until(lambda: channel.pending)
    with stopped(server):
        assert channel.get_event(0) is None
        cm_id.join_multicast("ff0e::1", "refused")  # by RoCE
    found = [channel.get_event(30) for _ in range(2)]
    assert [one.type for one in found if one is not None] == [
        CmEventType.MULTICAST_JOIN,
        CmEventType.MULTICAST_ERROR,
    ]
    assert not channel.pending


def test_the_event_of_an_id_that_was_destroyed_meanwhile_is_nobody_s(
    server: subprocess.Popen[str], end: tuple[EventChannel, CmId, QueuePair]
) -> None:
    """The stopped server was asked for it before."""
    channel, cm_id, _ = end
    cm_id.join_multicast("239.1.1.1")
    until(lambda: channel.pending)
    with stopped(server):
        assert channel.get_event(0) is None
    cm_id.destroy()
    assert channel.get_event(0) is None
    assert not channel.pending


def test_a_resolution_that_was_begun_on_a_server_that_ends_has_failed(
    server: subprocess.Popen[str], end: tuple[EventChannel, CmId, QueuePair]
) -> None:
    channel, bound, _ = end
    other, third = channel.create_id(), channel.create_id()
    with stopped(server):
        other.resolve_addr("239.1.1.1", "10.9.9.9")
    event = channel.get_event(30)
    assert event is not None
    assert (event.type, event.id) == (CmEventType.ADDR_ERROR, other)
    with stopped(server):
        third.resolve_addr("239.1.1.1", "10.0.0.1")
        server.kill()
    found = [channel.get_event(30) for _ in range(2)]
    assert {(one.type, one.id, one.errno) for one in found if one is not None} == {
        (CmEventType.DEVICE_REMOVAL, bound, errno.ENODEV),
        (CmEventType.ADDR_ERROR, third, errno.ENODEV),
    }
    assert channel.get_event(0) is None


def test_nothing_is_expected_of_a_server_whose_end_was_seen_meanwhile(
    server: subprocess.Popen[str], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread, or a signal's handler, at whatever line of a call that begins something."""
    monkeypatch.setattr(connection, "LOOK_AGAIN", connection.MOMENT)

    def join(amid: Amid) -> None:
        with open_backend("sim", socket=path, host=0) as backend, backend.event_channel() as channel:
            assert isinstance(backend, SharedBackend)
            server_end = backend._connection._socket
            cm_id = channel.create_id()
            cm_id.bind_addr("10.0.0.1")

            def hang_up_and_look() -> None:
                server_end.shutdown(socket.SHUT_RDWR)
                assert channel.pending

            with stopped(server), suppress(McastError), amid(hang_up_and_look):
                cm_id.join_multicast("239.1.1.1")
            event = channel.get_event(30)
            assert event is not None
            assert backend._connection.lost == (event.type is CmEventType.DEVICE_REMOVAL)
            assert not channel.pending

    at_each_line("client", join)


def test_what_is_left_on_a_stopped_server_is_left(
    server: subprocess.Popen[str], end: tuple[EventChannel, CmId, QueuePair]
) -> None:
    """Also what was begun there, and though another thread is waiting for the server; that joins nothing."""
    channel, cm_id, qp = end
    joined(channel, cm_id)
    with stopped(server):
        cm_id.leave_multicast("239.1.1.1")
        cm_id.join_multicast("239.1.1.2")
        cm_id.leave_multicast("239.1.1.2")
        cm_id.join_multicast("239.1.1.3")
        counters = threading.Thread(target=lambda: qp.counters, daemon=True)
        counters.start()
        until(lambda: is_asleep(counters))
        cm_id.leave_multicast("239.1.1.3")
        with pytest.raises(TimedOut, match="is stopped"):
            cm_id.join_multicast("239.1.1.4")
    counters.join(60)
    assert channel.get_event(0) is None
    assert dict(qp.attachments) == {}
    for last in range(1, 5):
        cm_id.join_multicast(f"239.1.1.{last}")


BLOCKING: dict[str, Callable[[Endpoint, Membership], object]] = {
    "join": lambda endpoint, group: endpoint.join("239.9.9.9", timeout=0.01),
    "sender": lambda endpoint, group: endpoint.sender("239.9.9.8", timeout=0.01),
    "recv": lambda endpoint, group: (endpoint.recv(0.01), group.recv(0.01)),
    "recv_batch": lambda endpoint, group: (endpoint.recv_batch(timeout=0.01), group.recv_batch(timeout=0.01)),
    "batches": lambda endpoint, group: list(endpoint.batches(0.01)),
    "next_event": lambda endpoint, group: endpoint.next_event(0.01),
    "flush": lambda endpoint, group: endpoint.flush(0.01),
    "send": lambda endpoint, group: group.send(b"x", timeout=0.01),
    "send_batch": lambda endpoint, group: group.send_batch([b"x"] * 3, timeout=0.01),
    "reply": lambda endpoint, group: group.reply(heard_by(group), b"x", timeout=0.01),
    "ready": lambda endpoint, group: group.ready(timeout=0.01),
    "probe_loopback": lambda endpoint, group: group.probe_loopback(0.01),
}
"""The calls that wait, with times of their own."""

AWAITED: dict[str, Callable[[aio.Endpoint, aio.Membership], Awaitable[object]]] = {
    **BLOCKING,  # type: ignore[dict-item]  # the same names, which are awaited
    "recv": lambda endpoint, group: asyncio.gather(endpoint.recv(0.01), group.recv(0.01)),
    "recv_batch": lambda endpoint, group: asyncio.gather(
        endpoint.recv_batch(timeout=0.01), group.recv_batch(timeout=0.01)
    ),
    "batches": lambda endpoint, group: anext(endpoint.batches(0.01), None),
}


def heard_by(group: Membership) -> Message:
    """As if the group's own endpoint had sent it."""
    endpoint, at = group.endpoint, group.destination.sgid_index
    source = endpoint.port.gids[at]
    return Message(memoryview(b""), source, endpoint.qp_num, group.mgid, None, False, endpoint.port.lid)


def timed(*classes: type) -> set[str]:
    """The public calls with a timeout."""
    return {
        name
        for each in classes
        for name, call in inspect.getmembers(each, inspect.isfunction)
        if not name.startswith("_") and "timeout" in inspect.signature(call).parameters
    }


@pytest.mark.parametrize("awaits", [False, True], ids=["blocking", "awaiting"])
def test_each_call_ends_in_its_own_time_on_a_stopped_server(
    server: subprocess.Popen[str], path: Path, monkeypatch: pytest.MonkeyPatch, awaits: bool
) -> None:
    """And leaves no group that it began to join."""
    calls = AWAITED if awaits else BLOCKING
    assert set(calls) == (timed(aio.Endpoint, aio.Membership) if awaits else timed(Endpoint, Membership))

    async def await_each(server: subprocess.Popen[str]) -> None:
        async with aio.open_endpoint(backend, "10.0.0.1") as endpoint, endpoint.join("239.1.1.1") as group:
            with stopped(server):
                for name, call in AWAITED.items():
                    with suppress(TimedOut):
                        await call(endpoint, group)
                    ended.append(name)
            check(endpoint.groups)
            async with endpoint.join("239.9.9.9"):
                pass

    def check(groups: tuple[object, ...]) -> None:
        assert len(groups) == 1
        until(lambda: [str(one.mgid) for one in backend.groups().groups] == ["::ffff:239.1.1.1"])

    def block_each() -> None:
        with open_endpoint(backend, "10.0.0.1") as endpoint, endpoint.join("239.1.1.1") as group:
            with stopped(server):
                for name, call in BLOCKING.items():
                    with suppress(TimedOut):
                        call(endpoint, group)
                    ended.append(name)
            check(endpoint.groups)
            with endpoint.join("239.9.9.9"):
                pass

    ended: list[str] = []
    with open_backend("sim", socket=path) as backend:
        assert isinstance(backend, SharedBackend)
        monkeypatch.setattr(backend._connection, "_patience", 1e6)
        call = (lambda: asyncio.run(await_each(server))) if awaits else block_each
        running = Running(call)
        assert running.results() == [None], ended
    assert ended == list(calls)


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


def test_a_handler_that_takes_the_answer_to_a_call_ends_the_sleep_of_that_call(
    sender: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    came, ready = list[QpState](), list[bool]()
    asked_within, until_ready = threading.Event(), connection._Wait.until

    def until_ready_or_handled(wait: connection._Wait, fd: int, event: int) -> bool:
        if not asked_within.is_set():
            asked_within.set()
            signal.raise_signal(signal.SIGUSR1)
        going_on = until_ready(wait, fd, event)
        ready.append(bool(select.select([fd], [], [], 0)[0]))
        return going_on

    monkeypatch.setattr(connection, "LOOK_AGAIN", math.inf)  # else the call looks for its answer by itself
    monkeypatch.setattr(connection._Wait, "until", until_ready_or_handled)
    before = signal.signal(signal.SIGUSR1, lambda *_: came.append(sender.qp.state))
    try:
        assert sender.qp.state is QpState.RTS
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert came == [QpState.RTS]
    assert all(ready), "the call slept as long as it may"
