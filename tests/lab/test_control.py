"""Clients and the control server of a running guest, without a guest; and the words of `break` and `tap`."""

from __future__ import annotations

import base64
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

import pytest
from typer.testing import CliRunner

from rdma_lab import LabError, LabTimeoutError, LabUnavailableError, cli, control, faults
from rdma_lab.cli import app
from rdma_lab.control import About, ControlServer, connect
from rdma_lab.errors import FaultError, GuestStoppedError
from rdma_lab.tap import Stream, Tally, Tap

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory whose path is longer than a socket's address may be."""
    home = tmp_path / ("long" * 30)
    home.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    monkeypatch.setattr(control, "HELLO_TIMEOUT", 0.3)
    return home / "rdma-lab"


@contextmanager
def guest(name: str = "roce-7", command: str = "sleep 9") -> Iterator[socket.socket]:
    """A runner's control server; yields the guest's end of its line."""
    line, end = socket.socketpair()
    reading, writing = os.pipe()
    with line, end, os.fdopen(reading, "rb"), os.fdopen(writing, "wb"):
        end.settimeout(30)
        with ControlServer(About(name, name.partition("-")[0], 2, 1, "6.1", command), line, reading):
            yield end


def request(end: socket.socket) -> tuple[bytes, str]:
    """The number and the script of the next line that the guest gets."""
    with end.makefile("rb", buffering=0) as lines:
        number, _, script = lines.readline().rstrip(b"\n").partition(b" ")
    return number, script.decode()


def answer(end: socket.socket, number: bytes, output: str, status: int = 0) -> None:
    end.sendall(number + b" " + base64.b64encode(f"{output}\n{status}\n".encode()) + b"\n")


def test_no_guest_is_one_sentence() -> None:
    with pytest.raises(LabUnavailableError, match="no guest of yours is running and ready: start one"):
        connect()


def test_in_the_guest_one_is_sent_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMA_LAB", "1")
    with pytest.raises(LabUnavailableError, match=r"this is the guest, .* from outside"):
        connect()


def test_answers_reach_their_clients() -> None:
    """In whatever order they come; the answer to a client that has gone is dropped."""
    with guest() as end, connect() as one, connect() as other:
        with connect() as gone:
            gone.send("gone")
            forgotten, _ = request(end)
        one.send("one")
        first, script = request(end)
        other.send("other")
        assert script == "one"
        second, _ = request(end)
        for number, said in ((forgotten, "no"), (second, "2"), (first, "1")):
            answer(end, number, said)
        assert (one.receive()["output"], other.receive()["output"]) == ("1", "2")


def test_failed_script_raises_its_last_line() -> None:
    with guest() as end, connect() as client:
        client.send("false")
        answer(end, request(end)[0], "more\nno such port", 1)
        with pytest.raises(LabError, match=r"^no such port$"):
            client.output(client.receive())


def test_two_guests_want_a_name() -> None:
    with guest("roce-7", "ibstat"), guest("infiniband-8", "sleep 9"):
        wanted = r"2 guests are running: choose one with --guest: infiniband-8 \(sleep 9\), roce-7 \(ibstat\)"
        with pytest.raises(LabUnavailableError, match=wanted):
            connect()
        with connect("infiniband-8") as chosen:
            assert chosen.about.fabric == "infiniband"
        with pytest.raises(LabUnavailableError, match="no guest roce-9 is running: there are infiniband-8"):
            connect("roce-9")


def test_stale_sockets_are_removed(runtime: Path) -> None:
    with guest():
        stale = runtime / "roce-3"
        dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with dead, control._short(stale) as address:
            dead.bind(address)
        with connect() as found:
            assert found.about.name == "roce-7"
        assert not stale.exists()


def test_socket_goes_with_its_guest(runtime: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(guest())
        assert [path.name for path in runtime.iterdir()] == ["roce-7"]
        assert (runtime / "roce-7").stat().st_mode & 0o777 == 0o600
    assert list(runtime.iterdir()) == []


def test_end_of_the_guest_ends_the_client() -> None:
    with ExitStack() as stack:
        stack.enter_context(guest())
        client = connect()
        stack.close()
        with client, pytest.raises(GuestStoppedError, match="roce-7 has ended"):
            client.run("true")


def test_qemu_that_has_ended_ends_its_clients(runtime: Path) -> None:
    """Before the runner's main thread knows of it: those that wait, and those that come."""
    with guest() as end, connect() as waiting, connect() as breaking:
        breaking.send("break", after="undo")
        waiting.send("show")
        end.close()
        for client in (waiting, breaking):
            with pytest.raises(GuestStoppedError, match="roce-7 has ended"):
                client.receive()
        with connect() as late, pytest.raises(GuestStoppedError, match="roce-7 has ended"):
            late.run("show")


def test_stopped_runner_is_a_bounded_error(runtime: Path) -> None:
    """A runner that is stopped still listens, and never greets."""
    runtime.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        with control._short(runtime / "roce-5") as address:
            listener.bind(address)
        listener.listen()
        with pytest.raises(LabTimeoutError, match=r"roce-5 does not answer within 0\.3 s"):
            connect()


def test_after_runs_when_the_client_has_gone() -> None:
    with guest() as end:
        with connect() as client:
            client.send("break", after="undo")
            assert request(end)[1] == "break"
        assert request(end)[1] == "undo"


def test_guest_that_reads_nothing_is_noticed() -> None:
    with guest(), connect() as client:
        for _ in range(20):  # more than the line and the runner hold
            client.send("x" * 60_000)
        with pytest.raises(LabError, match="no longer takes requests"):
            client.receive()


def test_odd_client_harms_nobody() -> None:
    with guest() as end, connect() as client:
        for message in (b"[1]", b"no JSON", b"{}"):
            with connect() as odd:
                odd.sock.send(message)
                with pytest.raises(GuestStoppedError):  # its connection is closed
                    odd.receive()
        client.send("true")
        answer(end, request(end)[0], "fine")
        assert client.receive()["output"] == "fine"


def test_directory_of_others_is_not_used(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    runtime.chmod(0o777)
    with pytest.raises(LabUnavailableError, match="not a directory that only you can write to"):
        connect()


SHOWN = """\
port switch0/2 out 1 - switch2/3
port softib10 in ACTIVE present switch1/1
port softib2 in disabled present switch2/1
port softib3 - - absent
loss switch1/1 3/10
sm softib2 MASTER
"""


def test_table_sorts_ports_and_shows_all_loss() -> None:
    shown = faults.FabricStatus.parse(SHOWN, "infiniband")
    assert shown.table().splitlines() == [
        "NAME       CABLE            PORT      DEVICE   LOSS",
        "softib2    in (switch2/1)   disabled  present  0",
        "softib3    -                -         absent   0",
        "softib10   in (switch1/1)   ACTIVE    present  0",
        "switch0/2  out (switch2/3)  DOWN      -        0",
        "switch1/1                                      30%",
        "sm         OpenSM on softib2 (master)",
    ]


def test_undo_of_everything_names_what_is_broken() -> None:
    shown = faults.FabricStatus.parse(SHOWN.replace("sm softib2 MASTER\n", ""), "infiniband")
    assert faults.changes([], shown, undo=True) == [
        ["device", "softib3", "present"],
        ["cable", "switch0/2", "in"],
        ["port", "softib2", "up"],
        ["port", "switch2/1", "up"],
        ["loss", "switch1/1", "0/1", "0"],
        ["sm", "start"],
    ]


def test_each_change_has_its_opposite() -> None:
    shown = faults.FabricStatus.parse(SHOWN, "infiniband")
    for words, whole in (
        (["cable", "softib2/1"], [["cable", "softib2", "in"]]),
        (["port", "switch1/1"], [["port", "switch1/1", "up"]]),
        (["device", "softib2", "softib3"], [["device", "softib2", "present"]]),
        (["loss", "0.25"], [["loss", "softib2", "0/1", "0"], ["loss", "softib10", "0/1", "0"]]),
        (["sm", "stop"], [["sm", "start"]]),
    ):
        assert [faults.opposite(change) for change in faults.changes(words, shown)] == whole


def test_undo_of_what_is_whole_changes_nothing() -> None:
    """Also in the words that broke it; tc(8) would refuse to undo a loss that is not there."""
    shown = faults.FabricStatus.parse(SHOWN, "infiniband")
    for words, change in (
        (["loss", "softib2"], []),
        (["loss", "10%", "softib2"], []),
        (["loss", "30%", "switch1/1"], [["loss", "switch1/1", "0/1", "0"]]),
        (["loss", "0.3"], [["loss", "switch1/1", "0/1", "0"]]),
        (["device", "softib2"], []),
        (["sm", "stop"], [["sm", "start"]]),
    ):
        assert faults.changes(words, shown, undo=True) == change
    whole = faults.FabricStatus.parse("port rxe1 in ACTIVE present\n", "roce")
    assert faults.changes(["loss"], whole, undo=True) == []
    assert faults.changes([], whole, undo=True) == []


@pytest.mark.parametrize(
    ("words", "undo", "said"),
    [
        (["cabel", "softib2"], False, "there are cable, port, device, loss, sm; did you mean cable?"),
        (["cable", "softib22"], False, "switch1/1, switch2/3; did you mean softib2?"),
        (["cable", "nonsense"], False, "switch1/1, switch2/3"),
        (["sm", "fail-over"], False, "give one of stop, restart, failover; did you mean failover?"),
        (["sm", "softib2"], True, "give one of stop, restart, failover"),
    ],
)
def test_mistyped_fault_is_guessed(words: list[str], undo: bool, said: str) -> None:
    shown = faults.FabricStatus.parse(SHOWN, "infiniband")
    with pytest.raises(FaultError) as refused:
        faults.changes(words, shown, undo=undo)
    assert str(refused.value).endswith(said)


@pytest.mark.parametrize(
    ("text", "part"), [("0.1", Fraction(1, 10)), ("10%", Fraction(1, 10)), ("1/3", Fraction(1, 3)), ("1", 1)]
)
def test_loss_is_read_as_a_fraction(text: str, part: Fraction) -> None:
    assert faults.probability(text) == part


@pytest.mark.parametrize("text", ["0", "1.1", "-1", "nan", "1/0", "x", "%", "1e-9"])
def test_other_loss_is_refused(text: str) -> None:
    with pytest.raises(FaultError, match="give the part of the messages to lose"):
        faults.probability(text)


def block(kind: int, body: bytes) -> bytes:
    length = struct.pack("<I", len(body) + 12)
    return struct.pack("<I", kind) + length + body + length


def packet(interface: int, data: bytes, dropped: int = 0) -> bytes:
    options = struct.pack("<HHQHH", 4, 8, dropped, 0, 0) if dropped else b""
    head = struct.pack("<IIIII", interface, 0, 0, len(data), len(data))
    return block(6, head + data + bytes(-len(data) % 4) + options)


def statistics(interface: int, dropped: int) -> bytes:
    return block(5, struct.pack("<III", interface, 0, 0) + struct.pack("<HHQHH", 5, 8, dropped, 0, 0))


def test_stream_is_what_is_between_the_marks() -> None:
    """However the bytes come, and whatever an earlier capture has left."""
    mark = b"0123456789abcdef" * 2
    blocks = [packet(0, b"x" * size) for size in (1, 50, 2000)]
    whole = b"left over" + mark + b"".join(blocks) + mark + b"later"
    for size in (1, 7, 64, len(whole)):
        stream = Stream(mark)
        parts = (whole[at : at + size] for at in range(0, len(whole), size))
        assert [one for part in parts for one in stream.feed(part)] == blocks
        assert stream.ended


def test_damaged_stream_is_an_error() -> None:
    stream = Stream(b"m" * 32)
    with pytest.raises(LabError, match="damaged"):
        list(stream.feed(b"m" * 32 + bytes(64)))


def test_lost_packets_are_counted_once() -> None:
    """Those before a packet, and those of the statistics, are the same ones."""
    tally = Tally()
    for one in (packet(0, b"a"), packet(0, b"b", 3), packet(1, b"c", 2), packet(0, b"d", 1)):
        assert tally.count(one)
    assert (tally.packets, tally.lost) == (4, 6)
    assert tally.count(statistics(0, 4))
    assert tally.lost == 6
    assert tally.count(statistics(0, 9))
    assert tally.lost == 11


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A guest that another process taps."""
    with guest() as end, connect() as other:
        other.send("capture", tap=True)
        request(end)
        yield


@pytest.mark.usefixtures("refusing")
def test_refused_tap_leaves_the_file_alone(tmp_path: Path) -> None:
    """It may be the one that the first tap writes."""
    file = tmp_path / "fabric.pcapng"
    file.write_bytes(b"a capture")
    done = CliRunner().invoke(app, ["tap", "-w", str(file)])
    assert (done.exit_code, file.read_bytes()) == (125, b"a capture")
    assert "another process taps this guest: end that first" in done.stderr


def test_full_disk_of_a_tap_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the file; nothing was wrong with stdout."""

    class FakeTap(Tap):
        def __init__(self, _: control.Guest) -> None:
            pass

        def copy(self, to: BinaryIO, tally: Tally, signalled: int) -> None:
            to.write(b"a block")

    monkeypatch.setattr(cli, "Tap", FakeTap)
    with guest():
        done = CliRunner().invoke(app, ["tap", "-w", "/dev/full"])
    assert done.exit_code == 1
    assert "/dev/full cannot be written: No space left on device\n" in done.stderr


def test_limit_leaves_further_packets_out() -> None:
    tally = Tally(limit=1)
    assert [tally.count(packet(0, b"a")) for _ in range(3)] == [True, False, False]
    assert tally.packets == 1
