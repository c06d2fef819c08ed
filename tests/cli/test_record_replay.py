"""`mcast record` and `mcast replay`: what was received becomes packets, and packets become messages again."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcast.api import Backend
from mcast.backends.sim import Fabric, open_fabric
from mcast.cli.record import recorder_of
from mcast.cli.replay import Contents, Recorded, _play, contents_of, messages_of, play
from mcast.cli.terminal import Failure
from mcast.endpoint.blocking import Endpoint, open_endpoint
from mcast.pcapng.writer import NS, Direction, Packet, Writer
from mcast.wire import packets
from mcast.wire.addresses import Gid

from ..commands import MCAST, Run
from ..sim.wireshark import Decoded, is_message

GROUP = "239.1.1.1"
MAKERS = [Fabric.roce, Fabric.infiniband]
IDS = ["RoCE", "InfiniBand"]


def sent(messages: list[Recorded]) -> list[tuple[bytes, int | None]]:
    return [(message.payload, message.imm) for message in messages]


def recorded(
    backend: Backend, send: Callable[[Endpoint, list[Gid]], None], groups: tuple[str, ...] = (GROUP,)
) -> bytes:
    """The file of a member of the groups on the second port, while `send` sends from the first."""
    file = io.BytesIO()
    with open_endpoint(backend, "10.0.0.2") as member, open_endpoint(backend, "10.0.0.1") as sender:
        mgids = [member.join(group).mgid for group in groups]
        recorder = recorder_of(member, file)
        send(sender, mgids)
        for number, batch in enumerate(member.batches(timeout=0.1)):
            recorder.take(batch, number)
    return file.getvalue()


def replayed(data: bytes, speed: float | None) -> Callable[[Endpoint, list[Gid]], None]:
    """Sends the messages of a file, to what they were recorded from."""

    def send(endpoint: Endpoint, mgids: list[Gid]) -> None:
        senders = {mgid: endpoint.sender(group) for mgid, group in zip(mgids, (GROUP,), strict=False)}
        for _ in play(endpoint, senders, messages_of(io.BytesIO(data)), speed):
            pass

    return send


def read(data: bytes) -> list[Recorded]:
    return list(messages_of(io.BytesIO(data)))


@pytest.mark.parametrize("make", MAKERS, ids=IDS)
@settings(max_examples=20)
@given(
    messages=st.lists(
        st.tuples(st.binary(max_size=200), st.none() | st.integers(0, 0xFFFFFFFF)), min_size=1, max_size=40
    )
)
def test_record_replay_record_is_the_same(
    make: Callable[..., Fabric], messages: list[tuple[bytes, int | None]]
) -> None:
    def send(endpoint: Endpoint, _: list[Gid]) -> None:
        sender = endpoint.sender(GROUP)
        for payload, imm in messages:
            sender.send(payload, imm)

    with open_fabric(make(ports=2)) as backend:
        first = recorded(backend, send)
        assert sent(read(first)) == messages
        second = recorded(backend, replayed(first, None))
        assert sent(read(second)) == messages


@pytest.mark.parametrize("make", MAKERS, ids=IDS)
def test_wireshark_reads_what_was_received(make: Callable[..., Fabric], tmp_path: Path) -> None:
    def send(endpoint: Endpoint, _: list[Gid]) -> None:
        endpoint.sender(GROUP).send_batch([b"one", b"three"], imm=7)

    with open_fabric(make(ports=2)) as backend:
        (tmp_path / "a.pcapng").write_bytes(recorded(backend, send))
    found = Decoded(tmp_path / "a.pcapng")
    rows = found.rows(
        is_message,
        "frame.interface_name",
        "infiniband.bth.opcode",
        "infiniband.bth.destqp",
        "infiniband.bth.psn",
        "infiniband.deth.q_key",
        "infiniband.payload",
        "data.data",
    )
    device = "ib1/1" if make == Fabric.infiniband else "roce1/1"
    assert [row["frame.interface_name"] for row in rows] == [device, device]
    assert [int(row["infiniband.bth.opcode"]) for row in rows] == [0x65, 0x65]
    assert {row["infiniband.bth.destqp"] for row in rows} == {"0xffffff"}
    assert [row["infiniband.bth.psn"] for row in rows] == ["0", "1"]
    assert {int(row["infiniband.deth.q_key"], 0) for row in rows} == {0x01234567}
    assert [int(row["data.data"].replace(":", "")[:6], 16) for row in rows] == [
        int.from_bytes(b"one"),
        int.from_bytes(b"thr"),
    ]
    assert not any("_ws.malformed" in packet for packet in found.decoded)


# --- time --------------------------------------------------------------------------------


def capture(times: list[float], sizes: list[int] | None = None) -> bytes:
    """Messages for the group from 10.0.0.9 at these seconds."""
    file = io.BytesIO()
    writer = Writer(file, Fabric.roce(ports=1).link_layer, ["port"])
    for number, t in enumerate(times):
        payload = bytes([number]) * (sizes[number] if sizes else 8)
        writer.write(Packet(round(t * NS), "port", Direction.OUT, frame(payload)))
    return file.getvalue()


def frame(payload: bytes) -> bytes:
    message = packets.Datagram(
        Gid("::ffff:10.0.0.9"),
        Gid(f"::ffff:{GROUP}"),
        9,
        0xFFFFFF,
        0x01234567,
        0xFFFF,
        0,
        payload,
    )
    return packets.roce(message, bytes(6), bytes(6))


@contextmanager
def timed(times: list[float], speed: float | None) -> Iterator[list[tuple[float, int]]]:
    """When, on the fabric's clock, how many messages had been sent."""
    with open_fabric(Fabric.roce(ports=2)) as backend, open_endpoint(backend, "10.0.0.1") as endpoint:
        sender = endpoint.sender(GROUP)
        messages = messages_of(io.BytesIO(capture(times)))
        start = backend.now()
        yield [
            (round(backend.now() - start, 4), count)
            for count in play(endpoint, {sender.mgid: sender}, messages, speed)
        ]


@pytest.mark.parametrize(
    ("speed", "seen"),
    [
        (1.0, [(0.0, 2), (1.5, 3), (600.0, 5)]),
        (2.0, [(0.0, 2), (0.75, 3), (300.0, 5)]),
        (0.5, [(0.0, 2), (3.0, 3), (1200.0, 5)]),
        (None, [(0.0, 5)]),
    ],
)
def test_the_gaps_of_the_recording_are_kept_or_scaled(
    speed: float | None, seen: list[tuple[float, int]]
) -> None:
    with timed([50.0, 50.0, 51.5, 650.0, 650.0], speed) as found:
        assert found == seen


def test_time_that_runs_back_does_not_wait() -> None:
    with timed([5.0, 3.0, 6.0], 1.0) as found:
        assert found == [(0.0, 2), (1.0, 3)]


def test_contents_are_known_before_anything_is_sent() -> None:
    contents = contents_of(io.BytesIO(capture([2.0, 1.0, 4.0], [3, 900, 1])))
    assert contents.groups == {Gid(f"::ffff:{GROUP}"): 3}
    assert (contents.messages, contents.largest, contents.span) == (3, 900, 3 * NS)


# --- the commands ------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["sim-roce", "sim-ib"])
def test_made_up_traffic_is_recorded(mcast: Run, tmp_path: Path, backend: str) -> None:
    arguments = (GROUP, "239.1.1.2", "-o", "a.pcapng", "--demo", "--backend", backend)
    done = mcast("record", *arguments, "--count", "100", "--json")
    outcome = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert (outcome["messages"], outcome["sources"], outcome["dropped"]) == (100, 1, {})
    contents = contents_of(io.BytesIO((tmp_path / "a.pcapng").read_bytes()))
    assert contents.messages == 100
    assert len(contents.groups) == 2
    assert outcome["bytes"] == 100 * contents.largest


def test_stdout_takes_the_packets_and_stderr_the_words(run: Run, mcast: Run, tmp_path: Path) -> None:
    done = run("sh", "-c", f"{MCAST} record {GROUP} -o - --demo --backend sim --count 3 >a.pcapng")
    assert done.stdout == ""
    assert done.stderr.startswith("record: 3 messages, ")
    assert contents_of(io.BytesIO((tmp_path / "a.pcapng").read_bytes())).messages == 3


def test_a_recording_is_not_lost_to_a_mistake(here: Run, tmp_path: Path) -> None:
    (tmp_path / "a.pcapng").write_bytes(b"precious")
    done = here("record", GROUP, "-o", "a.pcapng", "--demo", "--backend", "sim", "--bind", "10.9.9.9")
    assert (done.returncode, "no port has the address" in done.stderr) == (2, True)
    assert (tmp_path / "a.pcapng").read_bytes() == b"precious"


def test_too_few_messages_are_a_failure(here: Run) -> None:
    done = here(
        *("record", GROUP, "-o", "a.pcapng", "--demo", "--backend", "sim"),
        *("--count", "1000000", "--duration", "0.2"),
    )
    assert done.returncode == 1
    assert "of 1,000,000 messages came in " in done.stderr


@pytest.fixture
def acme(third_party: Callable[..., dict[str, str]]) -> dict[str, str]:
    """A simulated fabric under a name that is not known to be one."""
    return third_party()


REPLAY = ("replay", "a.pcapng", "--backend", "acme", "--bind", "10.0.0.1")


def test_a_file_is_replayed_to_another_group(here: Run, tmp_path: Path, acme: dict[str, str]) -> None:
    (tmp_path / "a.pcapng").write_bytes(capture([0.0, 100.0]))
    done = here(*REPLAY, "--group", "239.7.7.7", "--json", env=acme)
    outcome = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert outcome["groups"] == [{"recorded": f"::ffff:{GROUP}", "group": "239.7.7.7", "messages": 2}]
    assert outcome["sent"] == 2
    assert 100 <= outcome["seconds"] < 101, "virtual time"


def test_the_packets_of_a_simulated_run_are_replayed(here: Run, acme: dict[str, str]) -> None:
    assert here("sim", "run", "sm-failover-under-load", "--pcap", "a.pcapng").returncode == 0
    done = here(*REPLAY, "--max", env=acme)
    assert (done.returncode, done.stderr) == (0, "")
    first, *others = done.stdout.splitlines()
    assert first.startswith("replay: ")
    assert any("without a GRH, so not for a group" in line for line in others), "the SA's MADs"


def test_a_pcap_of_tcpdump_is_replayed(here: Run, tmp_path: Path, acme: dict[str, str]) -> None:
    data = frame(b"hello")
    head = struct.pack("<IHHIIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1)
    (tmp_path / "a.pcapng").write_bytes(head + struct.pack("<IIII", 1, 2, len(data), len(data)) + data)
    assert here(*REPLAY, env=acme).stdout.startswith(f"replay: 1 messages to {GROUP} in ")


BAD_FILES: dict[str, tuple[bytes | None, str]] = {
    "none": (None, "cannot read a.pcapng: No such file or directory"),
    "empty": (b"", "cannot read a.pcapng: at offset 0: the file is cut short"),
    "text": (b"hello, world", "cannot read a.pcapng: at offset 0: the file is neither pcapng nor pcap"),
    "cut short": (capture([0.0])[:-9], "a block is cut short"),
    "no message": (capture([]), "a.pcapng has no message to a group"),
    "too large": (capture([0.0], [4000]), "has 4,000 bytes, one MTU of roce0 carries 1,024"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_one_sentence_and_status_2(
    here: Run, tmp_path: Path, acme: dict[str, str], case: str
) -> None:
    data, says = BAD_FILES[case]
    if data is not None:
        (tmp_path / "a.pcapng").write_bytes(data)
    done = here(*REPLAY, env=acme)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert says in done.stderr


BAD_INPUT = {
    "no group": (("record", "-o", "a"), "Missing argument 'GROUP'"),
    "no file": (("record", GROUP), "Missing option '--output'"),
    "no such folder": (
        ("record", GROUP, "-o", "no/a", "--demo", "--backend", "sim"),
        "cannot write no/a: No such file",
    ),
    "a directory": (("record", GROUP, "-o", ".", "--demo", "--backend", "sim"), "cannot write .: Is a dir"),
    "nobody to hear": (("record", GROUP, "-o", "a", "--backend", "sim"), "add --demo for made-up messages"),
    "count": (("record", GROUP, "-o", "a", "--count", "0"), "greater than or equal to 1"),
    "nobody to send to": (("replay", "a", "--backend", "sim"), "where no other could receive"),
    "twice how fast": (("replay", "a", "--speed", "2", "--max"), "give one of them"),
    "speed": (("replay", "a", "--speed", "0"), "greater than or equal to 0.001"),
    "directory": (("replay", ".", "--backend", "acme"), ". is not a regular file"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence_and_status_2(here: Run, acme: dict[str, str], case: str) -> None:
    arguments, says = BAD_INPUT[case]
    done = here(*arguments, env=acme)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert says in done.stderr


@pytest.mark.parametrize(
    ("later", "says"),
    [
        (("239.1.1.1",), "1 of 2 messages were sent: the file has become shorter"),
        (
            ("239.1.1.1", "239.1.1.2"),
            "a message to ::ffff:239.1.1.2 was not there when the file was read first",
        ),
    ],
    ids=["shorter", "another group"],
)
def test_a_file_that_changes_between_two_readings_is_one_sentence(later: tuple[str, ...], says: str) -> None:
    contents = Contents({Gid("::ffff:239.1.1.1"): 2}, 1, 0, {})
    with open_endpoint("sim", "10.0.0.1") as endpoint:
        senders = {Gid("::ffff:239.1.1.1"): endpoint.sender(GROUP)}
        found = iter([Recorded(0, Gid(f"::ffff:{group}"), b"x", None) for group in later])
        with pytest.raises(Failure, match=says):
            _play(endpoint, senders, found, None, contents)
