"""Clients of a served fabric that take what they can get: descriptors, memory, the place of the socket."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

from mcast import open_backend
from mcast.api import BackendUnavailable, McastError, OutOfResources
from mcast.backends.sim import Fabric
from mcast.backends.sim.shared import door, frames, session
from mcast.backends.sim.shared.attach import attach
from mcast.backends.sim.shared.server import MOST_UNREAD, FabricServer
from mcast.backends.sim.testbed import SimObserver

from ..waiting import descriptors, is_asleep, until
from .served import crowded


class Raw:
    """A client that says what it likes."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(30)
        self.socket.connect(str(path))
        assert self.ask(op="attach")

    def send(self, **request: object) -> None:
        self.socket.send(frames.pack(json.dumps(request).encode()))

    def ask(self, **request: object) -> bytes:
        """The answer; its descriptors are closed."""
        self.send(**request)
        answer, descriptors, _, _ = socket.recv_fds(self.socket, frames.MOST_FRAME, 8)
        for descriptor in descriptors:
            os.close(descriptor)
        return answer


@contextmanager
def raw(path: Path) -> Iterator[Raw]:
    client = Raw(path)
    with client.socket:
        yield client


@contextmanager
def most_descriptors(number: int) -> Iterator[None]:
    """This process, and so the server in it, may have so many more than it has now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(one.name) for one in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while True:
            try:
                stack.callback(os.close, os.dup(0))
            except OSError:
                break
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + number, hard))
        yield


def test_descriptors_that_nobody_asked_for_are_closed(server: FabricServer, path: Path) -> None:
    with raw(path) as client:
        before = descriptors()
        request = frames.pack(b'{"op":"devices"}')
        for _ in range(20):
            socket.send_fds(client.socket, [request], [0] * 200)
            assert client.socket.recv(frames.MOST_FRAME)
        until(lambda: descriptors() <= before)


def test_a_server_without_a_descriptor_says_so_and_makes_nothing(server: FabricServer, path: Path) -> None:
    observer = SimObserver(server.fabric)
    with open_backend("sim", socket=path) as backend, backend.event_channel() as channel:
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        found = list[McastError]()
        with most_descriptors(4):
            taken = [os.dup(0) for _ in range(4)]
            os.close(taken.pop())  # a pair of sockets wants two
            try:
                cm_id.create_qp()
            except McastError as error:
                found.append(error)
            for one in taken:
                os.close(one)
        (refused,) = found
        assert refused.errno == errno.EMFILE
        assert "the server has no descriptor left" in str(refused)
        assert observer.leftovers() == ()
        with cm_id.create_qp():
            assert len(backend.devices()) == 1


@pytest.mark.parametrize("what", ["channel", "queue pair", "tap", "answer"])
def test_what_lacks_a_descriptor_is_refused_and_leaves_nothing(
    server: FabricServer, path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """In the server or in the client, which are one process here: each time they get one further."""
    with attach("sim", socket=path) as backend, backend.event_channel() as channel:
        cm_id, (client,) = channel.create_id(), server.clients.values()
        cm_id.bind_addr("10.0.0.1")
        if what == "answer":
            monkeypatch.setattr(frames, "MOST_FRAME", 200)

        def make() -> None:
            match what:
                case "channel":
                    backend.event_channel().close()
                case "queue pair":
                    cm_id.create_qp().close()
                case "tap":
                    backend.tap().close()
                case _:
                    assert len(backend.devices()) == 1

        def there() -> list[object]:
            backend.new_seed()  # the server has done what it did after the last answer
            session = client.session
            assert session is not None
            return [len(session._channels), len(session._qps), session._tap]

        make()
        before, opened, why = there(), descriptors(), list[McastError]()
        for number in count():
            with most_descriptors(number):
                try:
                    make()
                    break
                except McastError as error:
                    why.append(error)
            assert there() == before
            until(lambda: descriptors() <= opened)
        assert {error.errno for error in why} == {errno.EMFILE}
        lacking = {error.detail.partition(" has no descriptor")[0] for error in why}
        # Of an answer the server's descriptor may be free again before the client wants one.
        assert lacking | ({"this process"} if what == "answer" else set()) == {"the server", "this process"}
        assert there() == before
        until(lambda: descriptors() <= opened)


def test_an_answer_without_its_file_is_refused(
    server: FabricServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel drops the file, as it does where the client may open no more."""
    monkeypatch.setattr(frames, "MOST_FRAME", 200)
    with open_backend("sim", socket=path) as backend:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "CMSG_SPACE", lambda size: 0)
            with pytest.raises(McastError, match="this process has no descriptor left") as refused:
                backend.devices()
        assert refused.value.errno == errno.EMFILE
        assert len(backend.devices()) == 1


def test_a_client_that_is_short_of_descriptors_attaches_or_leaves_none(
    server: FabricServer, path: Path
) -> None:
    with open_backend("sim", socket=path):
        pass
    until(lambda: not server.clients)
    before = descriptors()
    for number in range(12):
        with most_descriptors(number), suppress(BackendUnavailable):
            open_backend("sim", socket=path).close()
        until(lambda: not server.clients and descriptors() <= before)


def test_who_comes_while_no_descriptor_is_left_is_turned_away(
    server: FabricServer, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the newcomer would wake the server for ever."""
    with open_backend("sim", socket=path) as backend, ExitStack() as stack:
        late = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        late.settimeout(30)
        with most_descriptors(0):
            late.connect(str(path))
            assert late.recv(1) == b""
            assert len(backend.devices()) == 1
        with open_backend("sim", socket=path):
            assert len(backend.devices()) == 1
    assert len(caplog.records) == 1


def test_one_client_has_half_of_the_descriptors(server: FabricServer, path: Path) -> None:
    with raw(path) as greedy, open_backend("sim", socket=path) as other, most_descriptors(1000):
        refused = 0
        while not refused:
            refused = frames.unpack(memoryview(greedy.ask(op="open_channel")))[0] == frames.REFUSED
        with other.event_channel() as channel:
            cm_id = channel.create_id()
            cm_id.bind_addr("10.0.0.2")
            cm_id.create_qp()


def test_a_client_that_leaves_descriptors_unread_is_ended(server: FabricServer, path: Path) -> None:
    """The kernel counts them as the server's, and refuses to pass more than it may have open."""
    with raw(path) as client, open_backend("sim", socket=path) as other:
        for _ in range(3 * MOST_UNREAD):
            client.ask(op="open_channel")
        for _ in range(2 * MOST_UNREAD):
            with suppress(OSError):  # it was ended
                client.send(op="open_channel")
        until(lambda: len(server.clients) == 1)
        assert len(other.devices()) == 1


def test_the_groups_and_destinations_of_a_client_are_bounded(
    server: FabricServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all of its ids, and again after it has left some."""
    monkeypatch.setattr(session, "MOST_GROUPS", 4)
    monkeypatch.setattr(session, "MOST_DESTINATIONS", 4)
    with open_backend("sim", socket=path) as backend, backend.event_channel() as channel:
        ids = [channel.create_id() for _ in range(2)]
        for cm_id in ids:
            cm_id.bind_addr("10.0.0.1")
        for number in range(4):
            ids[number % 2].join_multicast(f"239.1.1.{number}")
        with pytest.raises(OutOfResources, match="4 groups at most"):
            ids[0].join_multicast("239.1.1.9")
        ids[1].leave_multicast("239.1.1.1")
        ids[0].join_multicast("239.1.1.9")
        ids[1].destroy()
        ids[0].join_multicast("239.1.1.10")
        event = channel.get_event(30)
        assert event is not None
        assert event.ud is not None
        to, qp = event.ud.destination, ids[0].create_qp()
        for number in range(4):
            qp.send(to.model_copy(update={"gid": type(to.gid)(f"::ffff:239.9.9.{number}")}), [b"x"])
        with pytest.raises(OutOfResources, match="4 destinations"):
            qp.send(to.model_copy(update={"gid": type(to.gid)("::ffff:239.9.9.9")}), [b"x"])


# --- the socket's place -----------------------------------------------------------------------


def test_of_two_servers_that_find_a_dead_socket_one_serves(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.bind(str(path))
    left.close()
    found, order = list[object](), count()
    second_came, first_serves = threading.Event(), threading.Event()
    unlink = Path.unlink

    def unlink_in_order(self: Path, missing_ok: bool = False) -> None:
        """The second one to have found the socket dead goes on once the first one serves."""
        if next(order):
            second_came.set()
            first_serves.wait(60)
        else:
            second_came.wait(0.2)  # in vain, if one waits for the other
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_in_order)

    def serve() -> None:
        try:
            found.append(door.Door(path, None))
            first_serves.set()
        except OSError as error:
            found.append(error.errno)

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    monkeypatch.undo()
    assert found.count(errno.EADDRINUSE) == 1
    (made,) = (one for one in found if isinstance(one, door.Door))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(path))
    made.close()
    assert not path.exists()


def test_a_server_that_is_too_busy_to_accept_is_not_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as busy, ExitStack() as stack:
        busy.bind(str(path))
        busy.listen(0)
        first = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        first.connect(str(path))
        with pytest.raises(OSError, match="served there already"):
            door.Door(path, None)
        assert path.is_socket()


def test_whoever_sees_the_socket_reaches_the_server(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a client that comes after the socket is made, and before the server listens."""
    listen, connect, refused = socket.socket.listen, socket.socket.connect, threading.Event()
    waits = threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        early = threading.Thread(target=door.reach, args=(client, path, 60))

        def listens_late(listener: socket.socket, backlog: int) -> None:
            early.start()
            assert refused.wait(60)
            assert waits.wait(60)
            listen(listener, backlog)

        def connects(one: socket.socket, address: str) -> None:
            try:
                connect(one, address)
            except ConnectionRefusedError:
                refused.set()
                raise

        monkeypatch.setattr(socket.socket, "listen", listens_late)
        monkeypatch.setattr(socket.socket, "connect", connects)
        monkeypatch.setattr("time.sleep", lambda _: waits.set())
        made = door.Door(path, None)
        early.join(60)
        assert client.getpeername() == str(path)
        made.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
        killed.bind(str(path))
        with pytest.raises(ConnectionRefusedError):
            door.reach(client := socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), path, 60)
        client.close()


def test_a_newcomer_that_waits_is_not_let_in_by_a_signal(path: Path) -> None:
    main, came = threading.main_thread(), threading.Event()

    def send_a_signal_and_make_room(server: socket.socket) -> None:
        assert main.ident is not None
        until(lambda: is_asleep(main))
        signal.pthread_kill(main.ident, signal.SIGUSR1)
        came.wait(60)
        server.accept()[0].close()

    before = signal.signal(signal.SIGUSR1, lambda *_: came.set())
    try:
        with crowded(path) as server, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as newcomer:
            other = threading.Thread(target=send_a_signal_and_make_room, args=[server])
            other.start()
            door.reach(newcomer, path, 60)
            assert newcomer.getpeername() == str(path)
            other.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_file_that_appears_where_a_socket_is_about_to_be_made_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fchmod = os.fchmod

    def late(fd: int, mode: int) -> None:
        path.write_text("mine")
        fchmod(fd, mode)

    monkeypatch.setattr(os, "fchmod", late)
    with pytest.raises(FileExistsError, match=r"just appeared, and stays: .*fabric"):
        door.Door(path, None)
    assert path.read_text() == "mine"


def test_a_server_that_cannot_serve_leaves_nothing(path: Path) -> None:
    path.write_text("mine")
    before = descriptors()
    for _ in range(3):
        with pytest.raises(OSError, match="stays"):
            FabricServer(Fabric.roce(ports=1), path)
    path.unlink()
    with pytest.raises((OSError, OverflowError)):
        door.Door(path, 1 << 40)
    for number in count():
        with most_descriptors(number), suppress(OSError):
            FabricServer(Fabric.roce(ports=1), path).close()
            break
        assert list(path.parent.iterdir()) == []
        until(lambda: descriptors() <= before)
    assert number > 3
    assert list(path.parent.iterdir()) == []
    until(lambda: descriptors() <= before)


def test_a_stranger_with_too_many_groups_is_refused_and_ends_nothing(
    server: FabricServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_backend("sim", socket=path) as other:

        def fails(self: door.Door, connection: socket.socket) -> bool:
            raise OSError(errno.ERANGE, "more groups than there is room for")

        with monkeypatch.context() as patch, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            patch.setattr(door.Door, "_may", fails)
            client.settimeout(30)
            client.connect(str(path))
            assert client.recv(1) == b""
        assert len(other.devices()) == 1
