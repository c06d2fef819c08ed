"""`mcast sim tap`: the packets of a served fabric while it runs, for one reader, fast or slow."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO, FileIO
from pathlib import Path

import pytest

from mcast import Endpoint
from mcast.api import LinkLayer, McastError
from mcast.backends.model.times import NS
from mcast.backends.sim import Fabric
from mcast.backends.sim.served import tap
from mcast.backends.sim.served.attach import attach
from mcast.backends.sim.served.client import ServedBackend
from mcast.backends.sim.served.server import FabricServer
from mcast.backends.sim.served.tap import write_pcapng
from mcast.backends.sim.trace.events import IgmpReport, MessagesLost, SaAsked, Send
from mcast.pcapng.reader import read_frames

from ..commands import MCAST, Run
from ..interleave import interrupted_everywhere
from ..waiting import descriptors, until
from .wireshark import Decoded, is_message, nanoseconds

pytestmark = pytest.mark.usefixtures("named")

GROUP = "239.1.1.1"


@pytest.fixture(params=["roce", "infiniband"])
def fabric(request: pytest.FixtureRequest) -> Fabric:
    make = Fabric.roce if request.param == "roce" else Fabric.infiniband
    return make(ports=3, clock="wall")


def exchange(onlooker: ServedBackend, pair: tuple[Endpoint, Endpoint], *payloads: bytes) -> None:
    with pair[0].join(GROUP) as here, pair[1].join(GROUP) as there:
        for payload in payloads:
            here.send(payload)
            assert there.recv(10) is not None
        onlooker.control(["drop", "10.0.0.2"])
        here.send(b"lostlost")
        pair[0].flush()  # the fault must not end while the message is on its way to the server
        onlooker.control(["undo"])


def test_what_happens_comes_while_the_fabric_runs(
    onlooker: ServedBackend, pair: tuple[Endpoint, Endpoint]
) -> None:
    with onlooker.tap() as tapped:
        exchange(onlooker, pair, b"one", b"two")
        seen = []
        for piece in tapped:
            assert piece.missed == 0
            seen += [event for _, event in piece.entries]
            if any(isinstance(event, MessagesLost) for event in seen):
                break
        sent = [bytes(one) for event in seen if isinstance(event, Send) for one in event.payloads]
        assert sent[-3:] == [b"one", b"two", b"lostlost"]
        assert any(isinstance(event, IgmpReport | SaAsked) for event in seen)


def test_wireshark_reads_a_tap(
    onlooker: ServedBackend, pair: tuple[Endpoint, Endpoint], tmp_path: Path
) -> None:
    """Wireshark reads it and a lost message says where it was lost."""
    path = tmp_path / "live.pcapng"
    with onlooker.tap() as tapped, path.open("wb") as file:
        exchange(onlooker, pair, b"first", b"second")
        layer = onlooker.fabric.link_layer
        for _ in write_pcapng(tapped, file, layer, onlooker.epoch):
            if b"lost at" in path.read_bytes():  # each piece is in the file when the reader has it
                break
    decoded = Decoded(path)
    messages = decoded.rows(is_message, "frame.comment", "frame.time_epoch")
    assert [row["frame.comment"].startswith("lost at ") for row in messages][-3:] == [False, False, True]
    assert [path.read_bytes().count(payload) for payload in (b"first", b"second", b"lostlost")] == [1, 1, 1]
    assert min(nanoseconds(row["frame.time_epoch"]) for row in messages) > 1.5e9 * NS


def test_slow_reader_loses_packets(
    onlooker: ServedBackend, pair: tuple[Endpoint, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that does not read loses packets and holds nobody up."""
    monkeypatch.setattr(tap, "MAX_QUEUED_BYTES", 20_000)
    monkeypatch.setattr(tap, "PIPE_BYTES", 4096)
    with onlooker.tap() as tapped, pair[0].sender(GROUP) as sender:
        for _ in range(10):
            sender.send_batch([bytes(500)] * 10)
        messages = missed = 0
        for piece in tapped:
            messages += sum(len(event.payloads) for _, event in piece.entries if isinstance(event, Send))
            missed += piece.missed
            if missed:
                break
            sender.send(b"and on")  # the next packet for which there is room says what was lost
        assert messages > 0
        assert tapped.close() >= missed > 0


def told(*lines: str) -> tap.TapReader:
    """A tap that has been told these lines, then of a report, and no more."""
    ours, theirs = os.pipe()
    fabric = Fabric.roce(ports=2, trace=True)
    assert fabric.trace is not None
    report = '{"t":7,"what":"igmp-report","port":"roce0","source":"10.0.0.1","group":"::ffff:239.1.1.1"}'
    os.write(theirs, "".join(f"{line}\n" for line in (*lines, report)).encode())
    os.close(theirs)
    return tap.TapReader(str(fabric.trace), FileIO(ours), lambda: 5)


def test_a_packet_after_lost_ones_says_so() -> None:
    file = BytesIO()
    with told('{"missed":5}') as tapped:
        assert list(write_pcapng(tapped, file, LinkLayer.ETHERNET, 0)) == [1]
        assert tapped.close() == 5
    assert b"5 packets before this one were lost" in file.getvalue()


def test_nothing_of_a_tap_is_left_however_it_ends(server: FabricServer) -> None:
    parts = server.fabric.core

    def is_quiet() -> bool:
        return not parts.log.listeners and not parts.wire.is_traced and not parts.log.is_enabled

    with attach("sim", host="all") as backend:
        opened = descriptors()
        tapped = backend.tap()
        assert parts.wire.is_traced
        with pytest.raises(McastError, match="already has a tap of the fabric"):
            backend.tap()
        tapped.close()
        assert is_quiet()
        until(lambda: descriptors() <= opened)
        left = backend.tap()
    until(is_quiet)  # the program has ended
    assert list(left) == []
    left.close()


def test_a_tap_is_closed_or_can_be_closed_again(server: FabricServer) -> None:
    """Ctrl-C leaves none on the server, where a process may have one."""
    with attach("sim", host="all") as backend:
        opened = [backend.tap()]

        def check(returned: bool) -> None:
            opened.pop().close()
            opened.append(backend.tap())

        interrupted_everywhere(lambda: opened[0].close(), check, "backends/sim/served/tap.py", every=1)
        opened[0].close()


def test_the_command_writes_a_file_and_says_how_much(
    server: FabricServer, here: Run, tmp_path: Path, pair: tuple[Endpoint, Endpoint]
) -> None:
    def talk() -> None:
        until(lambda: server.fabric.core.log.listeners)
        with pair[0].sender(GROUP) as sender:
            sender.send_batch([b"hello"] * 20)

    talking = threading.Thread(target=talk)
    talking.start()
    done = here("sim", "tap", "-w", "live.pcapng", "-C", 10)
    talking.join()
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "tap: 10 packets written, 0 lost because the reader was slow\n"
    assert (tmp_path / "live.pcapng").read_bytes().count(b"hello") >= 8
    done = here("sim", "tap", "-w", "nowhere/live.pcapng")
    assert (done.returncode, done.stderr) == (
        2,
        "mcast: cannot write nowhere/live.pcapng: No such file or directory\n",
    )


@contextmanager
def tapping(server: FabricServer) -> Iterator[subprocess.Popen[bytes]]:
    """`mcast sim tap -w -`, which has begun."""
    command = [str(MCAST), "sim", "tap", "-w", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            until(lambda: server.fabric.core.log.listeners)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("server", ["roce"], indirect=True)
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_all_that_has_come(
    server: FabricServer, pair: tuple[Endpoint, Endpoint], end: signal.Signals
) -> None:
    with pair[0].sender(GROUP) as sender, tapping(server) as process:
        sender.send(b"hello")
        assert process.stdout is not None
        assert process.stderr is not None
        read = b""
        while b"hello" not in read:
            read += os.read(process.stdout.fileno(), 1 << 16)
        process.send_signal(end)
        file = BytesIO(read + process.stdout.read())
        assert process.wait() == 0
        written = len(list(read_frames(file)))
        assert process.stderr.read().decode() == (
            f"tap: {written} packets written, 0 lost because the reader was slow\n"
        )


@pytest.mark.parametrize("server", ["roce"], indirect=True)
@pytest.mark.parametrize("talks", [False, True])
def test_it_ends_with_its_reader(server: FabricServer, pair: tuple[Endpoint, Endpoint], talks: bool) -> None:
    """At once, and not with the next packet, which may never come."""
    with pair[0].sender(GROUP) as sender, tapping(server) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(4), "the beginning of the file"
        process.stdout.close()
        if talks:
            sender.send(b"hello")
        assert process.wait() == 0
        assert process.stderr.read().endswith(b" packets written, 0 lost because the reader was slow\n")
    until(lambda: not server.fabric.core.log.listeners)
