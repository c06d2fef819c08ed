"""Received messages become packets, and packets become messages again."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcast.api import Backend, Closed, TimestampClock
from mcast.backends.sim import Fabric, open_fabric
from mcast.capture.recorder import make_recorder, record
from mcast.capture.replay import RecordedMessage, read_messages, replay, summarize
from mcast.endpoint.blocking import Endpoint, open_endpoint
from mcast.pcapng.writer import NS
from mcast.wire.addresses import Gid

from ..file_objects import WRITERS
from ..sim.wireshark import Decoded, is_message
from ..waiting import Running, is_asleep, until
from .captures import GROUP, capture

MAKERS = [Fabric.roce, Fabric.infiniband]
IDS = ["RoCE", "InfiniBand"]


def sent(messages: list[RecordedMessage]) -> list[tuple[bytes, int | None]]:
    return [(message.payload, message.imm) for message in messages]


def recorded(
    backend: Backend, send: Callable[[Endpoint, list[Gid]], None], groups: tuple[str, ...] = (GROUP,)
) -> bytes:
    """The file of a member of the groups on the second port, while `send` sends from the first."""
    file = io.BytesIO()
    with open_endpoint(backend, "10.0.0.2") as member, open_endpoint(backend, "10.0.0.1") as sender:
        mgids = [member.join(group).mgid for group in groups]
        recorder = make_recorder(member, file)
        send(sender, mgids)
        for number, batch in enumerate(member.batches(timeout=0.1)):
            recorder.take(batch, number)
    return file.getvalue()


def replayed(data: bytes, speed: float | None) -> Callable[[Endpoint, list[Gid]], None]:
    """Sends the messages of a file, to what they were recorded from."""

    def send(endpoint: Endpoint, mgids: list[Gid]) -> None:
        senders = {mgid: endpoint.sender(group) for mgid, group in zip(mgids, (GROUP,), strict=False)}
        for _ in replay(endpoint, senders, read_messages(io.BytesIO(data)), speed):
            pass

    return send


def read(data: bytes) -> list[RecordedMessage]:
    return list(read_messages(io.BytesIO(data)))


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


@contextmanager
def timed(times: list[float], speed: float | None) -> Iterator[list[tuple[float, int]]]:
    """When, on the fabric's clock, how many messages had been sent."""
    with open_fabric(Fabric.roce(ports=2)) as backend, open_endpoint(backend, "10.0.0.1") as endpoint:
        sender = endpoint.sender(GROUP)
        messages = read_messages(io.BytesIO(capture(times)))
        start = backend.now()
        yield [
            (round(backend.now() - start, 4), count)
            for count in replay(endpoint, {sender.mgid: sender}, messages, speed)
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


def test_a_gap_as_long_as_one_likes_is_waited_for() -> None:
    fabric = Fabric.roce(ports=1, clock="wall")
    with open_fabric(fabric) as backend, open_endpoint(backend, "10.0.0.1") as endpoint:
        sender = endpoint.sender(GROUP)
        messages = read_messages(io.BytesIO(capture([0.0, 1e10])))
        playing = replay(endpoint, {sender.mgid: sender}, messages, 1.0)
        assert next(playing) == 1
        waiting = Running(lambda: next(playing))
        until(lambda: is_asleep(waiting.threads[0]))
        endpoint.close()
        assert [type(found) for found in waiting.results()] == [Closed]
    fabric.close()


def test_contents_are_known_before_anything_is_sent() -> None:
    contents = summarize(io.BytesIO(capture([2.0, 1.0, 4.0], [3, 900, 1])))
    assert contents.groups == {Gid(f"::ffff:{GROUP}"): 3}
    assert (contents.messages, contents.largest, contents.span) == (3, 900, 3 * NS)


# --- the end of a recording ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "duration", "messages", "seconds"), [(3, None, 3, 0.0), (None, 2.5, 5, 2.5), (9, 0.25, 5, 0.25)]
)
def test_recording_is_complete_after_each_wait(
    tmp_path: Path, count: int | None, duration: float | None, messages: int, seconds: float
) -> None:
    """A recording ends by count or time and is whole after each wait."""
    path = tmp_path / "a.pcapng"
    with (
        path.open("wb") as file,
        open_fabric(Fabric.roce(ports=2)) as backend,
        open_endpoint(backend, "10.0.0.2") as member,
        open_endpoint(backend, "10.0.0.1") as sender,
    ):
        member.join(GROUP)
        sender.sender(GROUP).send_batch([b"x"] * 5)
        recorder, start = make_recorder(member, file), backend.now()
        for _ in record(member, recorder, file, count, duration):
            assert len(read(path.read_bytes())) == recorder.messages
        assert backend.now() - start == pytest.approx(seconds, abs=0.01)
    assert len(read(path.read_bytes())) == recorder.messages == messages


@pytest.mark.parametrize("kind", ["short writes", "None for all", "a temporary file without a buffer"])
def test_a_recording_goes_to_whatever_has_write(kind: str) -> None:
    file = WRITERS[kind]()
    with (
        open_fabric(Fabric.roce(ports=2)) as backend,
        open_endpoint(backend, "10.0.0.2") as member,
        open_endpoint(backend, "10.0.0.1") as sender,
    ):
        member.join(GROUP)
        sender.sender(GROUP).send_batch([bytes(1000)] * 5)
        for _ in record(member, make_recorder(member, file), file, 5, None):
            pass
    assert [one.payload for one in read(file.took)] == [bytes(1000)] * 5


@pytest.mark.parametrize("clock", [TimestampClock.VIRTUAL, TimestampClock.REALTIME])
def test_packets_have_the_times_that_the_device_noted(
    clock: TimestampClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, began = io.BytesIO(), time.time_ns()
    with (
        open_fabric(Fabric.roce(ports=2)) as backend,
        open_endpoint(backend, "10.0.0.2", timestamps=True) as member,
        open_endpoint(backend, "10.0.0.1") as sender,
    ):
        monkeypatch.setattr(Endpoint, "timestamp_clock", clock)
        member.join(GROUP)
        recorder, since, group = make_recorder(member, file), backend.now(), sender.sender(GROUP)
        for gap in (0, 3):
            sender.recv_batch(1, gap).release()  # nothing comes, and so the time passes
            group.send(b"x")
        with member.recv_batch(2, 0) as batch:
            stamps = [message.timestamp or 0 for message in batch]
            recorder.take(batch, 77)
    first, second = [message.t for message in read(file.getvalue())]
    assert second - first == stamps[1] - stamps[0] >= 3 * NS
    if clock is TimestampClock.REALTIME:
        assert first == stamps[0]
    else:
        assert first >= began + stamps[0] - int(since * NS)


def test_times_of_a_devices_own_clock_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        open_fabric(Fabric.roce(ports=1)) as backend,
        open_endpoint(backend, "10.0.0.1", timestamps=True) as member,
    ):
        monkeypatch.setattr(Endpoint, "timestamp_clock", TimestampClock.DEVICE)
        with pytest.raises(ValueError, match="roce0 has timestamps of its own clock"):
            make_recorder(member, io.BytesIO())
