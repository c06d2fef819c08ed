"""Several processes, on one host and on two: files, answers, and the errors of a host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from mcast import Endpoint, cast, open_endpoint
from mcast.api import BackendUnavailable, McastError, QpInit, UnavailableReason, backend_status, open_backend
from mcast.backends.udp import sockets
from mcast.conformance.helpers import BOUND
from mcast.wire.packets import ROCE_UDP_PORT

from ..commands import MCAST
from ..own_network import needs_namespaces
from ..waiting import until
from .conftest import Host
from .oracle import sealed
from .test_filter import QKEY, message

GROUP = "239.1.1.1"
UDP = ("--backend", "udp")
LO = ("-b", "127.0.0.1")
DATA = os.urandom(300_000)

ECHO = """
import sys
from mcast import open_endpoint

with open_endpoint("udp", bind=sys.argv[1]) as endpoint, endpoint.join("239.1.1.1") as group:
    with endpoint.join("239.1.1.2"):
        pass
    print("ready", flush=True)
    while (message := group.recv(60)) is not None and message.payload:
        group.reply(message, b"%s to %s" % (sys.argv[2].encode(), bytes(message.payload)))
"""
"""Answers each message by unicast, until an empty one."""


@contextmanager
def echo(name: str, address: str = "127.0.0.1") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", ECHO, address, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        try:
            assert started.stdout.readline() == "ready\n"
            yield started
        finally:
            started.kill()


@pytest.mark.parametrize("options", [(), LO], ids=["any port", "loopback"])
def test_two_commands_exchange_a_file(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "film").write_bytes(DATA)
    receiving = subprocess.Popen(
        [MCAST, "recv", GROUP, "-o", "copy", *UDP, *options], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    send: list[str | Path] = [MCAST, "send", "film", GROUP, *UDP, *options]
    sent = subprocess.run(send, cwd=tmp_path, capture_output=True, text=True, timeout=BOUND)
    out, _ = receiving.communicate(timeout=BOUND)
    assert sent.returncode == receiving.returncode == 0, (sent.stdout, sent.stderr, out)
    assert (tmp_path / "copy").read_bytes() == DATA


@needs_namespaces
def test_two_hosts_exchange_a_file(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    """Each without any capability, and without a word on which port."""
    (tmp_path / "film").write_bytes(DATA)
    plain = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")
    first, second = hosts
    receiving = subprocess.Popen(
        [*second.prefix, *plain, MCAST, "recv", GROUP, "-o", "copy", *UDP], cwd=tmp_path
    )
    send: list[str | Path] = [*first.prefix, *plain, MCAST, "send", "film", GROUP, *UDP]
    sent = subprocess.run(send, cwd=tmp_path, capture_output=True, text=True, timeout=BOUND)
    assert receiving.wait(BOUND) == 0
    assert sent.returncode == 0, sent.stdout + sent.stderr
    assert (tmp_path / "copy").read_bytes() == DATA


def test_answers_reach_the_process_that_asked() -> None:
    """Two processes answer by unicast; each answer comes to this process's queue pair alone."""
    with ExitStack() as held:
        echoes = [held.enter_context(echo(name)) for name in ("one", "two")]
        with open_endpoint("udp", bind="127.0.0.1") as endpoint, endpoint.sender(GROUP) as sender:
            for number in range(5):
                sender.send(b"%d" % number)
                found = sorted(answers(endpoint, 2))
                assert found == [b"one to %d" % number, b"two to %d" % number]
            sender.send(b"")
        for one in echoes:
            assert one.wait(BOUND) == 0


def answers(endpoint: Endpoint, count: int) -> list[bytes]:
    found = [endpoint.recv(BOUND) for _ in range(count)]
    return [bytes(message.payload) for message in found if message is not None]


def test_unicast_to_4791_is_forwarded() -> None:
    """Answer as a card, which knows no other port; its socket may be another process's."""
    with open_backend("udp") as backend, backend.event_channel() as channel, channel.create_id() as id_:
        id_.bind_addr("127.0.0.1")
        qp = id_.create_qp()
        with echo("stranger") as stranger, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as card:
            card.setsockopt(socket.IPPROTO_IP, 10, 2)
            card.bind(("127.0.0.1", 0))
            here, port = qp_address(card)
            data = sealed(message(b"by 4791", 5, qp.qp_num, QKEY), here, port, here)
            card.sendto(data, ("127.0.0.1", ROCE_UDP_PORT))
            found = qp.recv_one(BOUND)
            assert found is not None
            assert (bytes(found.payload), found.imm, found.src_qp) == (b"by 4791", 5, 7)
            assert backend.port_counters("lo").get("forwarded", 0) == 0, "the stranger's door was opened last"
            with open_endpoint("udp", bind="127.0.0.1") as endpoint, endpoint.sender(GROUP) as sender:
                sender.send(b"")
            assert stranger.wait(BOUND) == 0


def qp_address(card: socket.socket) -> tuple[IPv4Address, int]:
    host, port = card.getsockname()
    return IPv4Address(host), port


def test_more_groups_than_a_socket_may_join() -> None:
    """igmp_max_memberships is 20: the 21st takes another socket, and is no error."""
    names = [f"239.2.0.{number}" for number in range(1, 64)]
    with open_endpoint("udp", bind="127.0.0.1") as endpoint, ExitStack() as held:
        groups = [held.enter_context(endpoint.join(name)) for name in names]
        for number, group in enumerate(groups):
            group.send(b"%d" % number)
        for number, group in enumerate(groups):
            found = group.recv(BOUND)
            assert found is not None
            assert bytes(found.payload) == b"%d" % number


def test_objects_pass_between_two_processes() -> None:
    program = (
        "import sys\n"
        "from mcast import cast, open_endpoint\n"
        "with open_endpoint('udp', bind='127.0.0.1') as endpoint, endpoint.join('239.1.1.9') as group:\n"
        "    found = next(cast.receive(group, timeout=60))\n"
        "    print(len(bytes(found.data)), flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as other:
        try:
            with open_endpoint("udp", bind="127.0.0.1") as endpoint, endpoint.join("239.1.1.9") as group:
                cast.send(group, DATA, receivers=1)
            out, _ = other.communicate(timeout=BOUND)
        finally:
            other.kill()
    assert out == f"{len(DATA)}\n"


TAKES = """
import sys, time
from mcast import cast, open_endpoint

class Disk:
    def write(self, block):
        time.sleep(float(sys.argv[2]))

name, missed = sys.argv[1], []
with open_endpoint("udp", bind="127.0.0.1") as endpoint, endpoint.join("239.1.1.9") as group:
    options = {"name": name, "memory": 1 << 20, "one_session": True, "peer_timeout": 3.0}
    for _ in cast.receive(group, Disk(), missed=missed.append, **options):
        print("whole", flush=True)
print(*[one.reason for one in missed], flush=True)
"""
"""Receives objects into a disk that takes some seconds for each block."""


def test_a_slow_process_breaks_no_deadline() -> None:
    """Its disk alone would take 10 s; the others have the object in a fraction of the deadline."""
    seconds = {"fast 1": "0", "fast 2": "0", "slow": "0.5"}
    with ExitStack() as held:
        started = [
            held.enter_context(
                subprocess.Popen([sys.executable, "-c", TAKES, *one], stdout=subprocess.PIPE, text=True)
            )
            for one in seconds.items()
        ]
        for process in started:
            held.callback(process.kill)
        with (
            open_endpoint("udp", bind="127.0.0.1") as endpoint,
            endpoint.join("239.1.1.9") as group,
            cast.open_session(group) as session,
        ):
            session.wait_for_receivers(3, BOUND)
            report = session.send(DATA * 34, strategy=cast.deadline(6.0))
        said = [process.communicate(timeout=BOUND)[0] for process in started]
    reasons = {one.name: one.reason for one in report.receivers}
    assert (report.strategy_met, reasons["fast 1"], reasons["fast 2"]) == (True, "", "")
    assert max(one.seconds for one in report.receivers if one.complete) < 5.0
    assert reasons["slow"] == "left behind: this receiver is too slow for the deadline"
    assert said[:2] == ["whole\n\n"] * 2
    assert said[2] == "left behind: this receiver is too slow for the sender's strategy\n"


def test_a_group_is_ready_when_another_process_answers() -> None:
    with echo("other") as other:
        with open_endpoint("udp", bind="127.0.0.1") as endpoint, endpoint.join(GROUP) as group:
            assert len(group.ready(members=1, timeout=BOUND)) == 1
            group.send(b"")
        assert other.wait(BOUND) == 0


# --- errors that say why -------------------------------------------------------


@needs_namespaces
def test_a_port_that_is_taken_names_rdma(hosts: tuple[Host, Host]) -> None:
    """Bind the port as the kernel does for Soft-RoCE: without SO_REUSEADDR."""
    program = (
        "import socket\n"
        "taken = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "taken.bind(('', 4791))\n"
        "import mcast\n"
        "from mcast.api import backend_status\n"
        "print(backend_status('udp'))\n"
        "try:\n"
        "    mcast.open_backend('udp')\n"
        "except Exception as error:\n"
        "    print(error)\n"
    )
    out = hosts[0].run(sys.executable, "-c", program)
    assert out.count("UDP port 4791 is in use") == 2
    assert out.count("use the provider `rdma`") == 2
    assert "PORT_IN_USE" in out


@needs_namespaces
def test_a_host_without_an_address_says_so() -> None:
    host = Host()
    try:
        host.run("ip", "link", "set", "lo", "down")
        done = host.run(sys.executable, "-c", "import mcast.api as a; print(a.backend_status('udp'))")
        assert "NO_ADDRESS" in done
        assert "ip link set lo up" in done
    finally:
        host.close()


def test_ipv6_group_is_refused_as_by_the_kernel() -> None:
    """An IPv6 group is refused as the kernel refuses it."""
    with open_endpoint("udp", bind="127.0.0.1") as endpoint:
        with pytest.raises(McastError) as caught:
            endpoint.join("ff0e::1")
        assert caught.value.errno == 524
        assert "IPv4 group" in str(caught.value)


@pytest.mark.parametrize("given", [True, False], ids=["as deep as asked for", "limited"])
def test_the_first_overflow_says_what_to_type(
    given: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_room = sockets.make_room
    monkeypatch.setattr(sockets, "make_room", lambda *words: make_room(*words) and given)
    with open_backend("udp") as backend, backend.event_channel() as channel:
        receiver, sender = channel.create_id(), channel.create_id()
        for id_ in (receiver, sender):
            id_.bind_addr("127.0.0.1")
        small = receiver.create_qp(QpInit(max_recv_wr=1, max_recv_size=64))
        sender.create_qp()
        receiver.join_multicast(GROUP)
        event = channel.get_event(BOUND)
        assert event is not None
        assert event.ud is not None
        assert sender.qp is not None
        assert not caplog.records, "nothing before the first overflow"
        for _ in range(64):
            sender.qp.send(event.ud.destination, [b"x"] * 64)
        counters = small.counters
        assert counters.received == 1
        assert counters.dropped_no_receive == 64 * 64 - 1
        assert backend.port_counters("lo")["overflow"] > 0
    (record,) = [one for one in caplog.records if "was full" in one.message]
    fix = "room for 1 messages: give a larger receive_depth" if given else "sysctl -w net.core.rmem_max="
    assert fix in record.message


def test_without_the_extension_a_command_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcast.backends.udp._native", None)
    status = backend_status("udp")
    assert (status.available, status.reason) == (False, UnavailableReason.NOT_BUILT)
    assert "pip install" in status.fix
    with pytest.raises(BackendUnavailable):
        open_backend("udp")


@pytest.mark.parametrize("clone", [True, False])
def test_a_clone_without_the_extension_is_named(
    clone: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Building again does not help where Python imports the clone in place of what is installed."""
    if clone:
        tmp_path.joinpath("setup.py").touch()
    monkeypatch.setattr("mcast.backends.net.extension.ROOT", tmp_path)
    monkeypatch.setitem(sys.modules, "mcast.backends.udp._native", None)
    assert (f"work outside of {tmp_path}" in backend_status("udp").fix) is clone


def test_no_thread_and_no_descriptor_is_left() -> None:
    before = {one.name for one in threading.enumerate()}
    folder = Path("/proc/self/fd")
    with open_endpoint("udp", bind="127.0.0.1") as endpoint, endpoint.join(GROUP):
        pass
    descriptors = len(list(folder.iterdir()))
    for _ in range(3):
        with open_endpoint("udp", bind="127.0.0.1") as endpoint, endpoint.join(GROUP):
            pass
    until(lambda: {one.name for one in threading.enumerate()} <= before)
    until(lambda: len(list(folder.iterdir())) <= descriptors)
