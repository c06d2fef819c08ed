"""One served fabric and its clients: hosts, ends of processes and of the server, and strangers' bytes."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from mcast import BackendUnavailable, open_backend, open_endpoint
from mcast.api import Backend, McastError, PortSpace, QpInit, provider
from mcast.backends.sim import Fabric
from mcast.backends.sim.served import frames
from mcast.backends.sim.served.attach import default_socket, make_socket_dir
from mcast.backends.sim.served.server import FabricServer, Serving
from mcast.backends.sim.testbed import SimObserver
from mcast.endpoint.policy import Lost, Rejoined, RejoinPolicy

from ..commands import Run
from ..waiting import until

GROUP = "239.1.1.1"

MEMBER = """
import sys, mcast
with mcast.open_endpoint("sim", options={"socket": sys.argv[1]}) as endpoint:
    with endpoint.join("239.1.1.1"), endpoint.join("239.1.1.2"):
        print(endpoint.address, flush=True)
        while endpoint.recv() is not None:
            pass
"""
"""A program that is in two groups until it is ended."""


@pytest.fixture(params=["roce", "infiniband"])
def fabric(request: pytest.FixtureRequest) -> Fabric:
    make = Fabric.roce if request.param == "roce" else Fabric.infiniband
    return make(ports=3, clock="wall")


@contextmanager
def member(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in the groups; it is dead at the end."""
    command = [sys.executable, "-c", MEMBER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), "the member did not join"
            yield process
        finally:
            process.kill()


def opened(path: Path, **options: object) -> Backend:
    return open_backend("sim", socket=path, **options)


def addresses(backend: Backend) -> list[str]:
    return [str(device.ports[0].addresses[0]) for device in backend.devices()]


# --- hosts ------------------------------------------------------------------------------------


def test_each_process_is_the_next_free_host(server: FabricServer, path: Path) -> None:
    with opened(path) as first, opened(path):
        assert addresses(first) == ["10.0.0.1"]
        with opened(path) as third:
            assert addresses(third) == ["10.0.0.3"]
            with pytest.raises(BackendUnavailable, match="all 3 hosts of the fabric are taken") as refused:
                opened(path)
            assert str(refused.value).count("--ports") == 1
        until(lambda: len(server.clients) == 2)
        with opened(path) as again:
            assert addresses(again) == ["10.0.0.3"]


def test_a_host_may_be_asked_for_by_number_or_address(server: FabricServer, path: Path) -> None:
    with opened(path, host=1) as second, opened(path, bind="10.0.0.3") as third:
        assert (addresses(second), addresses(third)) == (["10.0.0.2"], ["10.0.0.3"])
        with opened(path, host=1) as same, opened(path, host="all") as everything:
            assert addresses(same) == ["10.0.0.2"]
            assert len(addresses(everything)) == 3
            with open_endpoint(same), open_endpoint(second):
                pass
    for wrong in ({"host": 3}, {"bind": "10.0.0.9"}):
        with pytest.raises(BackendUnavailable, match=r"hosts 0\.\.2|no port of this fabric has 10\.0\.0\.9"):
            opened(path, **wrong)
    with pytest.raises(ValueError, match="leave out ports"):
        opened(path, ports=4)


def test_an_endpoint_s_address_chooses_the_host(
    server: FabricServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCAST_SIM", str(path))
    with open_endpoint("sim", "10.0.0.2") as endpoint, open_endpoint("sim") as other:
        assert (str(endpoint.address), str(other.address)) == ("10.0.0.2", "10.0.0.1")
        with endpoint.join(GROUP) as group, other.join(GROUP) as there:
            there.send(b"over there")
            message = group.recv(10)
            assert message is not None
            assert bytes(message.payload) == b"over there"


def test_who_is_attached_is_known(server: FabricServer, path: Path) -> None:
    with opened(path), opened(path, host="all") as looking:
        guests = looking.client_processes()
    assert [(guest.pid, guest.hosts) for guest in guests] == [(os.getpid(), "0"), (os.getpid(), "all")]


def test_nothing_served_is_one_sentence(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCAST_SIM", str(path))
    with pytest.raises(BackendUnavailable, match=r"no fabric is served at .*mcast sim serve"):
        open_backend("sim")
    monkeypatch.setenv("MCAST_SIM", "")
    with open_backend("sim") as backend:
        assert len(backend.devices()) == 4


def test_a_socket_alone_changes_no_program(
    fabric: Fabric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fabric is served at the user's own place: `sim` makes its own all the same, unless it is named."""
    monkeypatch.delenv("MCAST_SIM", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = make_socket_dir(default_socket())
    assert path == tmp_path / "mcast" / "sim.sock"
    shared = "sim-shared" if fabric.sa is None else "sim-shared-ib"
    with Serving(FabricServer(fabric, path)) as server:
        assert provider("sim").shared() == ""
        with open_backend("sim") as own, open_endpoint("sim", "10.0.0.4"):  # the served one has three ports
            assert len(own.devices()) == 4
            assert not server.clients
        for attaching in ({"host": 1}, {"bind": "10.0.0.2"}, {"timeout": 1.0}):
            with pytest.raises(ValueError, match="name the served one by MCAST_SIM=PATH or socket="):
                open_backend("sim", **attaching)
        for name, options in ((shared, {}), ("sim", {"socket": path})):
            with open_backend(name, **options) as attached:
                assert addresses(attached) == ["10.0.0.1"]
            until(lambda: not server.clients)
        monkeypatch.setenv("MCAST_SIM", str(path))
        assert provider("sim").shared() == f"the fabric served at {path}"
        with open_backend("sim") as attached, open_backend("sim", ports=2) as own:
            assert (addresses(attached), len(own.devices())) == (["10.0.0.1"], 2)


def test_the_kind_of_fabric_may_be_asked_for(server: FabricServer, path: Path) -> None:
    right, wrong = ("sim-shared", "sim-shared-ib")[:: 1 if server.fabric.sa is None else -1]
    with open_backend(right, socket=path):
        pass
    with pytest.raises(BackendUnavailable, match=r"the fabric at \S+ is "):
        open_backend(wrong, socket=path)


def test_separate_fabrics_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Two endpoints on fabrics of their own are told so."""
    with open_endpoint("sim-roce", "10.0.0.1") as one, one.join(GROUP) as group:
        assert one.recv(0.1) is None
        assert not caplog.records
        with open_endpoint("sim-roce", "10.0.0.2") as other, other.join(GROUP):
            with pytest.raises(TimeoutError, match=r"0 of 1 members.*mcast\.open_backend.*sim serve"):
                group.ready(timeout=0.2)
            assert one.recv(0.1) is None
            assert one.recv(0.1) is None
            with one.recv_batch(8, 0.1) as batch:
                assert not len(batch)
        (record,) = caplog.records
        assert "no message arrived: this is a fabric of its own" in record.getMessage()


# --- the socket -------------------------------------------------------------------------------


def test_socket_is_private_and_removed(fabric: Fabric, path: Path) -> None:
    """The socket is the user's alone and goes with the server."""
    with Serving(FabricServer(fabric, path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(OSError, match="served there already"):
            FabricServer(fabric, path)
    assert not path.exists()


def test_stale_socket_is_replaced(fabric: Fabric, path: Path) -> None:
    """A killed server's socket is replaced and a file is not."""
    left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left.bind(str(path))
    left.close()
    with Serving(FabricServer(fabric, path)), opened(path):
        pass
    path.write_text("mine")
    with pytest.raises(OSError, match="is not removed"):
        FabricServer(fabric, path)
    assert path.read_text() == "mine"


# --- ends of processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ended_process_leaves_its_groups(server: FabricServer, path: Path, number: signal.Signals) -> None:
    """A process that ends leaves as the kernel makes it leave."""
    observer = SimObserver(server.fabric)
    with member(path) as process:
        assert observer.leftovers() != ()
        process.send_signal(number)
        process.wait()
        until(lambda: observer.leftovers() == () and not server.clients)


def test_stopped_process_delays_nobody(server: FabricServer, path: Path) -> None:
    """A stopped process loses its messages and holds nobody up."""
    with (
        member(path) as process,
        open_endpoint("sim", options={"socket": path}) as sender,
        open_endpoint("sim", options={"socket": path}) as receiver,
    ):
        process.send_signal(signal.SIGSTOP)
        (stopped,) = (qp for qp in server.fabric.qps if str(qp.port.addresses[0]) == "10.0.0.1")
        with sender.sender(GROUP) as out, receiver.join(GROUP):
            for _ in range(20):
                out.send_batch([bytes(100)] * 64)
                got = 0
                while got < 64:
                    with receiver.recv_batch(64, 10) as batch:
                        assert len(batch)
                        got += len(batch)
        assert stopped.received + stopped.no_receive == 20 * 64
        assert stopped.no_receive >= 20 * 64 - 512
        process.send_signal(signal.SIGCONT)
        until(lambda: stopped.free == stopped.depth)


def test_answers_that_nobody_reads_are_bounded(server: FabricServer, path: Path) -> None:
    """A client that does not read its answers is not read either, and the others go on."""
    with opened(path) as other, raw(path) as client:
        client.send(frames.encode_request("attach", 1, (frames.VERSION, "all", None)))
        client.setblocking(False)
        request, sent = frames.encode_request("devices", 2, ()), 0

        def is_full() -> bool:
            nonlocal sent
            try:
                client.send(request)
                sent += 1
            except BlockingIOError:
                return True
            return False

        until(is_full)
        assert addresses(other) == ["10.0.0.1"]
        (unread,) = (one for one in server.clients.values() if one.sees_all)
        assert unread.has_unread
        client.setblocking(True)
        reader, answers = frames.FrameReader(client.recv, frames.MAX_ANSWER), 0
        while answers < sent:
            assert reader.read() is not None
            answers += 1


# --- the server's end -----------------------------------------------------------------------------


def test_endpoints_recover_from_a_server_restart(path: Path) -> None:
    """The end of the server is a removal that endpoints recover from."""
    with ExitStack() as stack:
        with Serving(FabricServer(Fabric.roce(ports=2, clock="wall"), path)):
            rejoin = RejoinPolicy(first=0.01, maximum=0.05)
            one, other = (
                stack.enter_context(open_endpoint("sim", options={"socket": path}, rejoin=rejoin))
                for _ in range(2)
            )
            here, there = one.join(GROUP), other.join(GROUP)
            there.send(b"before")
            assert here.recv(10) is not None
        assert isinstance(one.next_event(10), Lost)
        assert isinstance(other.next_event(10), Lost)
        assert one.backend.devices() == ()
        assert here.recv(0.1) is None
        with Serving(FabricServer(Fabric.roce(ports=2, clock="wall"), path)):
            assert isinstance(one.next_event(10), Rejoined)
            assert isinstance(other.next_event(10), Rejoined)
            assert [str(one.address), str(other.address)] == ["10.0.0.1", "10.0.0.2"]
            there.send(b"after")
            message = here.recv(10)
            assert message is not None
            assert bytes(message.payload) == b"after"
            stack.pop_all().close()


RETURNS = """
import sys
from contextlib import ExitStack
import mcast
from mcast.endpoint.policy import RejoinPolicy
socket, groups = sys.argv[1], sys.argv[2:]
rejoin = RejoinPolicy(first=0.01, maximum=0.05)
with ExitStack() as stack:
    endpoints = [
        stack.enter_context(mcast.open_endpoint("sim", options={"socket": socket}, rejoin=rejoin))
        for _ in range(4)
    ]
    before = [str(endpoint.address) for endpoint in endpoints]
    for endpoint in endpoints:
        for group in groups:
            endpoint.join(group)
    print("joined", flush=True)
    for endpoint in endpoints:
        heard = set()
        while len(heard) < len(groups):
            heard.add(bytes(endpoint.recv().payload))
    assert before == [str(endpoint.address) for endpoint in endpoints]
    print(*before, flush=True)
"""
"""A process with four endpoints, which hears each group in each of them after the server's return."""


def test_all_clients_return_to_their_hosts_and_groups(path: Path) -> None:
    """Though a newcomer comes first."""
    groups = [f"239.1.1.{number}" for number in range(1, 4)]
    with ExitStack() as stack:
        with Serving(FabricServer(Fabric.roce(ports=9, clock="wall"), path)):
            clients = [
                stack.enter_context(
                    subprocess.Popen(
                        [sys.executable, "-c", RETURNS, str(path), *groups], stdout=subprocess.PIPE, text=True
                    )
                )
                for _ in range(2)
            ]
            for client in clients:
                stack.callback(client.kill)
                assert client.stdout is not None
                assert client.stdout.readline() == "joined\n"
        with (
            Serving(FabricServer(Fabric.roce(ports=9, clock="wall"), path)),
            open_endpoint("sim", options={"socket": path}) as newcomer,
        ):
            assert str(newcomer.address) == "10.0.0.9"
            senders = [stack.enter_context(newcomer.sender(group)) for group in groups]

            def have_ended() -> bool:
                for group, sender in zip(groups, senders, strict=True):
                    sender.send(group.encode())
                return all(client.poll() is not None for client in clients)

            until(have_ended)
            said = [client.stdout.read() for client in clients if client.stdout is not None]
            assert sorted(" ".join(said).split()) == [f"10.0.0.{number}" for number in range(1, 9)]
            stack.pop_all().close()


def test_host_is_reserved_for_its_process(path: Path) -> None:
    """A host is kept as long as its process is there."""
    with ExitStack() as stack:
        with Serving(FabricServer(Fabric.roce(ports=3, clock="wall"), path)):
            _, second, third = (stack.enter_context(opened(path)) for _ in range(3))
        second.close()
        with Serving(FabricServer(Fabric.roce(ports=3, clock="wall"), path)):
            with opened(path) as newcomer:
                assert addresses(newcomer) == ["10.0.0.2"]
                with pytest.raises(BackendUnavailable, match="are taken"):
                    opened(path)
            until(third.devices)
            assert addresses(third) == ["10.0.0.3"]
            stack.close()


def test_what_is_used_after_the_server_s_end_says_so(fabric: Fabric, path: Path) -> None:
    with ExitStack() as stack:
        with Serving(FabricServer(fabric, path)):
            backend = stack.enter_context(opened(path))
            channel = stack.enter_context(backend.event_channel())
            cm_id = channel.create_id()
            cm_id.bind_addr("10.0.0.1")
            qp = cm_id.create_qp()
        event = channel.get_event(10)
        assert event is not None
        assert (event.type.name, event.errno, event.id) == ("DEVICE_REMOVAL", errno.ENODEV, cm_id)
        assert channel.get_event(0) is None
        for call in (
            lambda: cm_id.join_multicast(GROUP),
            lambda: cm_id.leave_multicast(GROUP),
            channel.create_id,
            backend.groups,
        ):
            with pytest.raises(McastError, match="server of the fabric has ended"):
                call()
        assert len(qp.recv(timeout=0)) == 0
        cm_id.destroy()


def test_a_fork_is_refused(server: FabricServer, path: Path) -> None:
    with opened(path) as backend:
        pid = os.fork()
        if not pid:
            try:
                backend.groups()
            except McastError as error:
                os._exit(7 if error.errno == errno.EBADF and "its fork" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert addresses(backend) == ["10.0.0.1"]


# --- malformed frames -------------------------------------------------------------------------


@contextmanager
def raw(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.settimeout(30)
        yield client


@pytest.mark.parametrize(
    "frame",
    [
        bytes(frames.FRAME_HEADER.size),
        frames.encode(frames.ANSWER, 1, b""),
        frames.encode(frames.REQUEST, 1, b""),
        frames.encode(frames.REQUEST, 1, b"nothing []"),
        frames.encode_request("devices", 1, ()),
        frames.encode_request("devices", 1, ())[:-1] + b"}",
        frames.encode(frames.REQUEST, 1, b"attach " + b"[" * 60_000),
        frames.encode(frames.REQUEST, 1, b'attach [1, "free", null, 4]'),
        frames.FRAME_HEADER.pack(frames.REQUEST, 1, frames.MAX_REQUEST, 1),
    ],
    ids=["head", "kind", "empty", "operation", "unattached", "text", "deep", "arguments", "long"],
)
def test_a_malformed_frame_ends_its_client(fabric: Fabric, path: Path, frame: bytes) -> None:
    """With one line in the log; the others go on."""
    said: list[str] = []
    with Serving(FabricServer(fabric, path, say=said.append)), opened(path) as other:
        with raw(path) as client:
            client.send(frame)
            with suppress(ConnectionResetError):  # it had not read what came
                assert client.recv(1000) == b""
        assert addresses(other) == ["10.0.0.1"]
    assert [line.split(":")[0] for line in said] == ["attached", "ended"]
    assert "a malformed frame" in said[1]


def test_payloads_that_do_not_fit_end_their_client(server: FabricServer, path: Path) -> None:
    with opened(path) as other, raw(path) as client:
        send = frames.encode_request("send", 7, (3, "{}", [3, 0], None), b"ab")
        for frame in (
            frames.encode_request("attach", 1, (frames.VERSION, 2, None)),
            frames.encode_request("event_channel", 2, ()),
            frames.encode_request("create_id", 3, (1, PortSpace.UDP)),
            frames.encode_request("bind_addr", 4, (2, IPv4Address("10.0.0.3"))),
            frames.encode_request("create_qp", 5, (2, QpInit(busy_poll=0.0))),
            send,
        ):
            client.send(frame)
        while client.recv(1000):
            pass
        until(lambda: len(server.clients) == 1)
        assert addresses(other) == ["10.0.0.1"]
        assert server.fabric.qps == ()


def test_a_half_frame_holds_nobody_up(server: FabricServer, path: Path) -> None:
    with raw(path) as client:
        client.send(frames.encode_request("attach", 1, (frames.VERSION, "free", None))[:-3])
        with opened(path) as other:
            assert addresses(other) == ["10.0.0.1"]


# --- the suite ------------------------------------------------------------------------------------


def test_the_suite_holds_on_a_served_fabric(mcast: Run, tmp_path: Path, long: bool) -> None:
    """By the command. What is not applicable there is what is not on the fabric in one process.

    On Ethernet with --long: it is the fabric that differs, and that is the same in one process.
    """
    names = ["sim-shared", "sim-shared-ib"] if long else ["sim-shared-ib"]
    words = [word for name in names for word in ("--require-backend", name)]
    done = mcast("conformance", *words, "--report", "report.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", ".join(f"{name} conforms" for name in names) in done.stdout
    for shared, alone in (("sim-shared", "sim-roce"), ("sim-shared-ib", "sim-ib")):
        with provider(shared).testbed() as here, provider(alone).testbed() as there:
            assert here.features == there.features
            assert here.backend.capabilities == there.backend.capabilities
            assert here.deviations == there.deviations == {}


ELSEWHERE = """
import os, sys, mcast
with mcast.open_endpoint("sim", "10.0.0.2", options={"socket": sys.argv[1]}) as endpoint:
    with endpoint.join("239.1.1.1") as group:
        print(os.readlink("/proc/self/ns/net"), flush=True)
        message = endpoint.recv()
        assert bytes(message.payload) == b"from here"
        group.send(b"from elsewhere")
"""


def test_process_in_another_netns_is_a_host(server: FabricServer, path: Path) -> None:
    """A process of another network namespace is a host like any other.

    As a container is that shares a volume: the socket has a path, and a path belongs to no network.
    """
    command = ["unshare", "-rn", sys.executable, "-c", ELSEWHERE, str(path)]
    with (
        open_endpoint("sim", "10.0.0.1", options={"socket": path}) as endpoint,
        endpoint.join("239.1.1.1") as group,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as there,
    ):
        assert there.stdout is not None
        assert there.stdout.readline().strip() not in ("", str(Path("/proc/self/ns/net").readlink()))
        group.send(b"from here")
        received = [endpoint.recv(30) for _ in range(2)]
        assert [bytes(one.payload) for one in received if one is not None] == [
            b"from here",
            b"from elsewhere",
        ]
        assert there.wait() == 0
