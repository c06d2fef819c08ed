"""One served fabric and its clients: hosts, ends of processes and of the server, and strangers' bytes."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random

import pytest

from mcast import BackendUnavailable, open_backend, open_endpoint
from mcast.api import Backend, McastError, provider
from mcast.backends.sim import Fabric
from mcast.backends.sim.shared import frames
from mcast.backends.sim.shared.server import FabricServer, Serving
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
            with pytest.raises(BackendUnavailable, match=r"all 3 hosts of the fabric are taken.*--ports"):
                opened(path)
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
        guests = looking.guests()
    assert [(guest.pid, guest.hosts) for guest in guests] == [(os.getpid(), "0"), (os.getpid(), "all")]


def test_nothing_served_is_one_sentence(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCAST_SIM", str(path))
    with pytest.raises(BackendUnavailable, match=r"no fabric is served at .*mcast sim serve"):
        open_backend("sim")
    monkeypatch.setenv("MCAST_SIM", "")
    with open_backend("sim") as backend:
        assert len(backend.devices()) == 4


def test_the_kind_of_fabric_may_be_asked_for(server: FabricServer, path: Path) -> None:
    right, wrong = ("sim-shared", "sim-shared-ib")[:: 1 if server.fabric.sa is None else -1]
    with open_backend(right, socket=path):
        pass
    with pytest.raises(BackendUnavailable, match="speaks"):
        open_backend(wrong, socket=path)


def test_two_endpoints_on_fabrics_of_their_own_are_told_so(caplog: pytest.LogCaptureFixture) -> None:
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
        assert "nothing came: this is a fabric of its own" in record.getMessage()


# --- the socket -------------------------------------------------------------------------------


def test_the_socket_is_the_user_s_alone_and_goes_with_the_server(fabric: Fabric, path: Path) -> None:
    with Serving(FabricServer(fabric, path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(OSError, match="served there already"):
            FabricServer(fabric, path)
    assert not path.exists()


def test_a_killed_server_s_socket_is_replaced_and_a_file_is_not(fabric: Fabric, path: Path) -> None:
    left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.bind(str(path))
    left.close()
    with Serving(FabricServer(fabric, path)), opened(path):
        pass
    path.write_text("mine")
    with pytest.raises(OSError, match="stays"):
        FabricServer(fabric, path)
    assert path.read_text() == "mine"


# --- ends of processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_process_that_ends_leaves_as_the_kernel_makes_it_leave(
    server: FabricServer, path: Path, number: signal.Signals
) -> None:
    observer = SimObserver(server.fabric)
    with member(path) as process:
        assert observer.leftovers() != ()
        process.send_signal(number)
        process.wait()
        until(lambda: observer.leftovers() == () and not server.clients)


def test_a_stopped_process_loses_its_messages_and_holds_nobody_up(server: FabricServer, path: Path) -> None:
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

        def all_are_back() -> bool:
            with server.fabric.clock:
                assert stopped.refill is not None
                stopped.refill()  # as the next message would
            return stopped.free == stopped.depth

        until(all_are_back)


def test_a_client_that_does_not_read_its_answers_is_ended(server: FabricServer, path: Path) -> None:
    with opened(path) as other, raw(path) as client:
        client.setblocking(False)
        request = frames.pack(b'{"op":"devices"}')
        client.send(frames.pack(frames.AttachTo().model_dump_json().encode()))

        def is_ended() -> bool:
            with suppress(OSError):  # BlockingIOError, while the server has enough to do
                client.send(request)
            return len(server.clients) == 1

        until(is_ended)
        assert addresses(other) == ["10.0.0.1"]


# --- the server's end -----------------------------------------------------------------------------


def test_the_end_of_the_server_is_a_removal_that_endpoints_recover_from(path: Path) -> None:
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


def test_a_host_is_kept_as_long_as_its_process_is_there(path: Path) -> None:
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
            with pytest.raises(McastError, match="served no more"):
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


# --- strangers ------------------------------------------------------------------------------------


@contextmanager
def raw(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(path))
        yield client


def honest() -> list[bytes]:
    """Frames of one session, in an order in which each may be right, with the numbers that it is given."""
    to = json.dumps('{"gid":"::ffff:239.1.1.1"}')
    texts = [
        '{"op":"attach","host":2}',
        '{"op":"open_channel"}',
        '{"op":"create_id","channel":1,"port_space":273}',
        '{"op":"bind","id":2,"src":"10.0.0.3"}',
        '{"op":"create_qp","id":2,"init":{}}',
        '{"op":"join","id":2,"call":"join_multicast","mask":3,"flags":0,"context":1,'
        '"addr":{"kind":"ipv4","text":"239.1.1.7"}}',
        '{"op":"get_event","channel":1}',
        '{"op":"attach_mcast","qp":3,"gid":"ff0e::1","lid":49153}',
        '{"op":"recv","qp":3,"max":64,"lease":true}',
        '{"op":"give_back","qp":3,"count":1}',
        '{"op":"repost","qp":3,"receives":[16,64]}',
        '{"op":"modify","qp":3,"state":3}',
        '{"op":"look","qp":3}',
        '{"op":"groups"}',
        '{"op":"leave","id":2,"addr":{"kind":"ipv4","text":"239.1.1.7"}}',
        '{"op":"close_qp","qp":3}',
        '{"op":"close_channel","channel":1}',
    ]
    send = f'{{"op":"send","qp":3,"to":{to},"lengths":[3,0]}}'
    frame = [frames.pack(text.encode()) for text in texts]
    frame.insert(8, frames.pack(send.encode(), b"abc"))
    return frame


def mutated(random: Random, frame: bytes) -> bytes:
    """The frame with some bytes changed, added, or gone."""
    made = bytearray(frame)
    for _ in range(random.choice((0, 0, 0, 1, 1, 2, 8))):
        at = random.randrange(len(made) + 1)
        kind = random.randrange(5)
        if kind == 0:
            made[at:at] = random.randbytes(random.choice((1, 4, 300)))
        elif kind == 1:
            del made[at : at + random.choice((1, 3, 50))]
        elif kind == 2:
            made[at : at + 1] = random.choice((b"9", b"-", b'"', b"}", b"\xff", b"1e999", b"[" * 500))
        elif kind == 3 and made:
            made[at % len(made)] ^= 1 << random.randrange(8)
        else:
            made[at:at] = made[: random.randrange(40)]
    return bytes(made[: frames.MOST_FRAME + 10])


def test_frames_of_strangers_harm_only_themselves(server: FabricServer, path: Path, long: bool) -> None:
    """A million of them with --long. The other client goes on, and of the stranger nothing is left."""
    random, count, observer = Random(14), 0, SimObserver(server.fabric)
    with (
        open_endpoint("sim", options={"socket": path}) as one,
        open_endpoint("sim", options={"socket": path}) as other,
        one.join(GROUP) as here,
        other.join(GROUP) as there,
    ):
        before = observer.leftovers()
        while count < (500_000 if long else 1_000):  # on each of two fabrics
            with raw(path) as client:
                for frame in honest():
                    sent = frame if random.random() < 0.7 else mutated(random, frame)
                    try:
                        client.send(sent or b"\0")
                        client.recv(1, socket.MSG_DONTWAIT)
                    except BlockingIOError:
                        pass
                    except OSError:
                        break
                    count += 1
            if count % 100 < 20:
                there.send(b"still here")
                message = here.recv(10)
                assert message is not None
        until(lambda: len(server.clients) == 2)
        assert sorted(observer.leftovers()) == sorted(before)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\0",
        frames.pack(b"[]"),
        frames.pack(b'{"op":"devices"}'),
        frames.pack(b"[" * 60_000),
        frames.PREFIX.pack(1 << 31, 0, 0) + b"{}",
        frames.pack(b'{"op":"attach","version":%d}' % (1 << 70)),
        bytes(frames.MOST_FRAME + 1),
    ],
    ids=["empty", "short", "list", "unattached", "deep", "length", "number", "long"],
)
def test_what_is_no_request_ends_its_session(server: FabricServer, path: Path, frame: bytes) -> None:
    with opened(path) as other:
        with raw(path) as client:
            client.send(frame)
            client.settimeout(30)
            try:
                assert client.recv(1000) == b""
            except ConnectionResetError:  # it had not read what came
                pass
        assert addresses(other) == ["10.0.0.1"]


def test_what_one_process_may_have_is_bounded(server: FabricServer, path: Path) -> None:
    from mcast.api import OutOfResources, QpInit

    with opened(path) as backend, backend.event_channel() as channel:
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        with pytest.raises(OutOfResources, match="256 MiB"):
            cm_id.create_qp(QpInit(max_recv_wr=1 << 20))
        cm_id.create_qp(QpInit(max_recv_wr=1 << 10))


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


def test_a_process_of_another_network_namespace_is_a_host_like_any_other(
    server: FabricServer, path: Path
) -> None:
    """As a container is that shares a volume: the socket has a path, and a path belongs to no network."""
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
