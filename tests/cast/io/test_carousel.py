"""A carousel between programs: receivers come when they like, and need no way back to the sender."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import threading
from collections.abc import Iterator
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mcast import cast
from mcast.backends.sim import Fabric
from mcast.backends.sim.faults import Delivery, Drop, Messages
from mcast.cast.io.files import StreamSink
from mcast.cast.io.sinks import ReceiveTarget
from mcast.cast.protocol.blocks import Digest, SourceBlock
from mcast.cast.protocol.packets import Data, Describe, Flush, Seal
from mcast.cast.protocol.receiver import MAX_PARTIAL_OBJECTS

from .alone import SEGMENT, SESSION, Alone, K
from .test_flow import takes
from .test_objects import BOUND, DATA, amember, body, member, others, roce

__all__ = ["roce"]

KEY = bytes(range(32))
RATE = 4e6
"""Bytes a second: a round of DATA takes some 60 ms."""


def run_carousel(fabric: Fabric, had: threading.Barrier, key: bytes | None = None) -> list[cast.Missed]:
    """Run a carousel until the barrier is passed and host 4 joins; return what host 4 missed."""
    stops = threading.Event()
    missed: list[cast.Missed] = []

    def sends() -> None:
        def watch(_: cast.Progress) -> None:
            if stops.is_set():
                raise KeyboardInterrupt

        with (
            member(fabric, 0) as group,
            pytest.raises(KeyboardInterrupt),
            cast.open_session(group, rate=RATE, key=key, progress=watch) as session,
        ):
            session.send(DATA, strategy=cast.carousel())

    def hears_the_end() -> None:
        def begins(_: cast.Offered) -> None:
            stops.set()

        with member(fabric, 4) as group:
            list(cast.receive(group, begins, missed=missed.append, one_session=True, key=key))

    with others(sends) as ends:
        had.wait(BOUND)
        with others(hears_the_end) as last:
            last[0].result(BOUND)
        ends[0].result(BOUND)
    return missed


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "closed"])
def test_late_and_mute_receivers_get_a_carousel(roce: Fabric, tmp_path: Path, key: bytes | None) -> None:
    """Receivers that join late, or cannot send, get the object in memory, in a file and through a pipe."""
    out, into = os.pipe()
    had = threading.Barrier(4)
    piped = bytearray()

    def gets(host: int, where: ReceiveTarget) -> list[cast.Received]:
        with member(roce, host) as group:
            found = list(cast.receive(group, where, one_session=True, key=key))
        had.wait(BOUND)
        return found

    def reads() -> None:
        while part := os.read(out, 4096):
            piped.extend(part)

    with (
        roce.rules.when(Messages(rate=0.01, source="roce0"), Drop()),
        roce.rules.when(Messages(source=["roce1", "roce2"]), Drop()),
        others(
            lambda: gets(1, None),
            lambda: gets(2, tmp_path / "copy"),
            lambda: gets(3, StreamSink(into, "pipe")),
            reads,
        ) as ends,
    ):
        run_carousel(roce, had, key)
        (in_memory,), (in_file,), (in_pipe,) = (ends[at].result(BOUND) for at in range(3))
        ends[3].result(BOUND)
    os.close(out)
    assert body(in_memory) == DATA
    assert in_file.path == tmp_path / "copy"
    assert (tmp_path / "copy").read_bytes() == bytes(piped) == DATA
    assert in_pipe.size == len(DATA)
    assert [one.name for one in tmp_path.iterdir()] == ["copy"]


def test_ctrl_c_ends_a_carousel(roce: Fabric) -> None:
    """Receivers with incomplete objects are notified."""

    def drop_segments(message: Delivery) -> Drop | None:
        """However late its thread runs, the receiver that joins last does not get the complete object."""
        return Drop() if message.target == "roce4" and message.size > SEGMENT else None

    with roce.rules.on_delivery(drop_segments):
        (missed,) = run_carousel(roce, threading.Barrier(1))
    assert missed.reason == "the sender has ended the session: interrupted"


def test_a_carousel_that_is_stopped_returns_its_report(roce: Fabric) -> None:
    seen: list[int] = []

    def watch(progress: cast.Progress) -> None:
        if seen and progress.done < seen[-1]:  # the second round
            session.stop()
        seen.append(progress.done)

    with member(roce, 0) as group, cast.open_session(group, rate=RATE, progress=watch) as session:
        report = session.send(DATA, strategy=cast.carousel())
        seen.clear()
        assert session.send(DATA, strategy=cast.carousel(cycles=1)).cycles == 1
        session.stop()
        before = session.send(DATA, strategy=cast.carousel())
    assert (report.strategy_met, report.cycles, report.digest) == (True, 1, bytes(Digest(DATA)))
    assert (before.strategy_met, before.cycles) == (False, 0), "a signal may come just before the call"


def test_an_object_that_is_stopped_is_lacked_by_name(roce: Fabric) -> None:
    missed: list[cast.Missed] = []

    def stops(_: cast.Offered) -> None:
        session.stop()  # from another thread

    with (
        others(lambda: takes(roce, 1, stops, missed.append)) as ends,
        member(roce, 0) as group,
        cast.open_session(group, rate=100_000) as session,
    ):
        session.wait_for_receivers(1, BOUND)
        report = session.send(Random(3).randbytes(3_000_000))
        session.close()
        ends[0].result(BOUND)
    assert [one.reason for one in report.receivers] == ["the sender has given the object up"]
    assert [one.reason for one in missed] == ["left behind: the sender does not wait for this receiver"]


def test_a_signal_ends_a_carousel(roce: Fabric) -> None:
    def interrupts(_: cast.Offered) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def receives() -> None:
        with member(roce, 1) as group:
            list(cast.receive(group, interrupts, missed=missed.append, one_session=True))

    missed: list[cast.Missed] = []
    with others(receives) as ends, member(roce, 0) as group:
        with pytest.raises(KeyboardInterrupt):
            cast.send(group, Random(3).randbytes(3_000_000), strategy=cast.carousel(), rate=100_000)
        ends[0].result(BOUND)
    assert [one.reason for one in missed] == ["the sender has ended the session: interrupted"]


def test_cancellation_ends_an_awaited_carousel(roce: Fabric) -> None:
    async def run() -> list[bytes]:
        async with asyncio.timeout(BOUND), amember(roce, 0) as group, amember(roce, 1) as other:
            sending = asyncio.create_task(cast.send(group, DATA, strategy=cast.carousel(), rate=RATE))
            found = [body(one) async for one in cast.receive(other, one_session=True)]
            assert not sending.done()
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            return found

    assert asyncio.run(run()) == [DATA]


def test_a_bound_ends_a_carousel_and_the_report_counts(roce: Fabric) -> None:
    with member(roce, 0) as group:
        with others(lambda: takes(roce, 1)) as ends, cast.open_session(group, rate=RATE) as session:
            session.wait_for_receivers(1, BOUND)
            report = session.send(io.BytesIO(b"--" + DATA), name="it", strategy=cast.carousel(cycles=3))
            (got,) = ends[0].result(BOUND)
        short = cast.send(group, DATA, strategy=cast.carousel(seconds=1e-9), rate=RATE)
    assert body(got) == b"--" + DATA
    assert got.digest == report.digest
    assert (report.strategy_met, report.cycles, report.receivers, report.size) == (True, 3, (), len(DATA) + 2)
    assert report.repairs >= 2 * report.segments
    assert (short.strategy_met, short.cycles) == (False, 0)


def test_an_ordinary_object_may_follow_in_the_session(roce: Fabric) -> None:
    def both() -> list[bytes]:
        with member(roce, 1) as group:
            found = cast.receive(group)
            return [body(next(found)), body(next(found))]

    with others(both) as ends, member(roce, 0) as group, cast.open_session(group, rate=RATE) as session:
        session.wait_for_receivers(1, BOUND)
        session.send(DATA, strategy=cast.carousel(cycles=2))
        report = session.send(b"answered")
        assert ends[0].result(BOUND) == [DATA, b"answered"]
    assert report.strategy_met
    assert [one.complete for one in report.receivers] == [True]


THINGS = {"large": DATA, "empty": b"", "other": DATA[::-1]} | {f"small {at}": DATA[:at] for at in range(60)}


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_each_object_of_a_carousel_arrives_once(roce: Fabric, tmp_path: Path) -> None:
    """More objects than a receiver keeps incomplete, from files and buffers, into files and memory."""
    for name in ("large", "other"):
        (tmp_path / name).write_bytes(THINGS[name])
    given = [
        cast.Object(tmp_path / name if name in ("large", "other") else data, name, name.encode())
        for name, data in THINGS.items()
    ]
    (tmp_path / "in").mkdir()
    seen: list[cast.Progress] = []
    fds = open_files()

    def takes_files() -> dict[str, bytes]:
        found = takes(roce, 1, lambda offered: tmp_path / "in" / offered.name)
        return {one.offered.name: one.path.read_bytes() for one in found if one.path is not None}

    def watch(progress: cast.Progress) -> None:
        seen.append(progress)
        if all(end.done() for end in ends):
            session.stop()

    with (
        roce.rules.when(Messages(rate=0.01, source="roce0"), Drop()),
        others(takes_files, lambda: takes(roce, 2)) as ends,
        member(roce, 0) as group,
        cast.open_session(group, rate=RATE, progress=watch) as session,
    ):
        reports = session.send_carousel(given)
        session.close()
        in_files, in_memory = (end.result(BOUND) for end in ends)
    assert in_files == THINGS
    assert sorted((one.offered.metadata.decode(), body(one)) for one in in_memory) == sorted(THINGS.items())
    assert sorted(one.name for one in (tmp_path / "in").iterdir()) == sorted(THINGS)
    assert [(one.name, one.size, one.strategy_met) for one in reports] == [
        (name, len(data), True) for name, data in THINGS.items()
    ]
    assert 1 <= reports[-1].cycles <= reports[0].cycles <= reports[-1].cycles + 1
    assert {bytes(one.digest) for one in in_memory} == {one.digest for one in reports}
    total = sum(map(len, THINGS.values()))
    assert {one.size for one in seen if one.name} == {total}
    assert max(one.done for one in seen) <= total
    assert open_files() == fds


def test_one_buffer_for_a_carousel_of_objects(roce: Fabric) -> None:
    """The program reads the buffer while the sender goes on; each object arrives in some cycle."""
    buffer, found = bytearray(5000), dict[str, bytes]()
    given = [cast.Object(bytes([at + 1]) * (2000 + at), str(at)) for at in range(3)]

    def receives() -> None:
        with member(roce, 1) as group:
            for one in cast.receive(group, buffer, one_session=True):
                found[one.offered.name] = bytes(buffer[: one.size])

    def watch(_: cast.Progress) -> None:
        if taking[0].done():
            session.stop()

    with others(receives) as taking, member(roce, 0) as group:
        with cast.open_session(group, rate=RATE, progress=watch) as session:
            session.send_carousel(given)
        taking[0].result(BOUND)
    assert found == {one.name: one.data for one in given}


def test_one_of_many_that_changes_is_named(roce: Fabric, tmp_path: Path) -> None:
    given = [cast.Object(tmp_path / name, name) for name in ("one", "other")]
    for one in given:
        (tmp_path / one.name).write_bytes(DATA)

    def watch(progress: cast.Progress) -> None:
        if progress.name == "other":
            (tmp_path / "one").write_bytes(DATA[::-1])

    with (
        member(roce, 0) as group,
        cast.open_session(group, rate=RATE, progress=watch) as session,
        pytest.raises(OSError, match="the object one has changed while it was sent"),
    ):
        session.send_carousel(given)


def test_unsuitable_carousels_are_refused(roce: Fabric) -> None:
    """The error says which objects or strategies a carousel does not accept."""
    with member(roce, 0) as group, cast.open_session(group, rate=RATE) as session:
        with pytest.raises(ValueError, match="give a strategy"):
            session.send_carousel([cast.Object(b"x")], cast.all_receivers())
        with pytest.raises(ValueError, match=r"^0 objects in a carousel: from 1 to 65,536$"):
            session.send_carousel([])
        with pytest.raises(ValueError, match="in each cycle"):
            session.send_carousel([cast.Object(b"x"), cast.Object(parts())])
        assert session.send_carousel([cast.Object(b"x")], cast.carousel(cycles=1))[0].strategy_met


def test_many_that_are_awaited_go_round_together(roce: Fabric) -> None:
    async def run() -> list[bytes]:
        given = [cast.Object(b"one"), cast.Object(b"two")]
        async with (
            asyncio.timeout(BOUND),
            amember(roce, 0) as group,
            amember(roce, 1) as other,
            cast.open_session(group, rate=RATE) as session,
        ):
            sending = asyncio.create_task(session.send_carousel(given))
            found = [body(one) async for one in cast.receive(other, one_session=True)]
            session.stop()
            assert [one.strategy_met for one in await sending] == [True, True]
            return found

    assert sorted(asyncio.run(run())) == [b"one", b"two"]


def test_displaced_objects_leave_no_file(tmp_path: Path) -> None:
    """Incomplete objects beyond the limit are dropped to receive others; a later cycle sends them again."""
    data = Random(5).randbytes(2 * SIZE)
    alone = Alone(lambda offered: tmp_path / str(offered.number), len(data), carousel=MAX_PARTIAL_OBJECTS + 2)
    for number in range(1, MAX_PARTIAL_OBJECTS + 2):
        alone.on_packets(
            Describe(SESSION, number, len(data), SEGMENT, K, 0, MAX_PARTIAL_OBJECTS + 2, number, "", b"")
        )
        if number == MAX_PARTIAL_OBJECTS - 1:
            one = SourceBlock(data[:SIZE], SEGMENT, K)
            alone.on_packets(Data(SESSION, number, 0, 0, one.segment(0)))
    remaining = {int(one.name.split(".")[1]) for one in tmp_path.iterdir()}
    assert remaining == {*range(MAX_PARTIAL_OBJECTS - 1), MAX_PARTIAL_OBJECTS + 1}
    incoming = alone.receiving.sessions[SESSION]
    assert incoming.others.keys() == incoming.core.others.keys() == remaining - {0}
    alone.receiving.close()
    assert list(tmp_path.iterdir()) == []


def parts() -> Iterator[bytes]:
    yield b"once"


class Once:
    """A file object that cannot seek."""

    def read(self, size: int) -> bytes:
        return b""


@pytest.mark.parametrize("once", [parts(), [b"a list"], Once()], ids=["iterator", "list", "pipe"])
def test_what_cannot_be_read_again_is_refused_in_words(roce: Fabric, once: Any) -> None:
    with member(roce, 0) as group:
        with pytest.raises(ValueError, match="in each cycle: give a buffer, a path, or a file"):
            cast.send(group, once, strategy=cast.carousel(), rate=RATE)
        with pytest.raises(ValueError, match="needs a rate"):
            cast.send(group, b"x", strategy=cast.carousel(), rate=inf)


def test_a_file_that_changes_ends_a_carousel(roce: Fabric, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(DATA)
    seen: list[int] = []

    def watch(progress: cast.Progress) -> None:
        if seen and progress.done < seen[-1]:  # the second round
            source.write_bytes(DATA[:150_000] + bytes(len(DATA) - 150_000))
        seen.append(progress.done)

    with (
        member(roce, 0) as group,
        cast.open_session(group, rate=RATE, progress=watch) as session,
        pytest.raises(OSError, match="the object has changed while it was sent"),
    ):
        session.send(source, strategy=cast.carousel(cycles=99))


SIZE = SEGMENT * K


def send_block(alone: Alone, data: bytes, block: int, indexes: range = range(K)) -> None:
    """Pass segments of a block, and its seal after the last one."""
    one = SourceBlock(data[block * SIZE : (block + 1) * SIZE], SEGMENT, K)
    for index in indexes[: one.info.segments]:
        alone.on_packets(Data(SESSION, 0, block, index, one.segment(index)))
    if indexes.stop >= one.info.segments:
        alone.on_packets(Seal(SESSION, 0, block, 0, 2, 0, 1000, (one.info,)))


def ends(alone: Alone, blocks: int, digest: bytes) -> Any:
    """Pass the digest of the object until the receiver has the object or has given it up."""
    try:
        for _ in range(10_000):  # a thread publishes the file
            alone.on_packets(Flush(SESSION, 0, blocks, blocks, 0, 3, 0, 1000, 0, digest, 0, 0))
            if alone.receiving.sessions[SESSION].delivery is None:
                return None
            threading.Event().wait(0.005)
    except StopIteration as done:
        return done.value
    raise AssertionError("the receiver waits for ever")


def test_blocks_are_written_out_of_order(tmp_path: Path) -> None:
    """Blocks of a carousel go to their offsets in the file as they arrive."""
    data = Random(5).randbytes(5 * SIZE + 100)
    alone = Alone(tmp_path / "copy", len(data), carousel=1)
    hidden = tmp_path / ".copy.part"
    for block in (3, 4, 5):
        send_block(alone, data, block)
    assert hidden.read_bytes() == bytes(3 * SIZE) + data[3 * SIZE :]
    for block in (1, 0, 2):
        send_block(alone, data, block)
    assert not (tmp_path / "copy").exists(), "the digest of the whole is not known"
    assert ends(alone, 6, bytes(Digest(data))).digest == bytes(Digest(data))
    assert (tmp_path / "copy").read_bytes() == data
    assert not hidden.exists()


def test_wrong_block_is_received_again(tmp_path: Path) -> None:
    """A block that differs from its digest is dropped."""
    data = Random(5).randbytes(2 * SIZE)
    alone = Alone(tmp_path / "copy", len(data), carousel=1)
    alone.on_packets(Data(SESSION, 0, 1, 0, bytes(SEGMENT)))
    send_block(alone, data, 1)
    assert (tmp_path / ".copy.part").read_bytes() == b""
    for block in (0, 1):
        send_block(alone, data, block)
    assert alone.blocks == 2
    assert sum(alone.receiving.sessions[SESSION].core.rejected.values()) == 1
    assert ends(alone, 2, bytes(Digest(data))).size == len(data)
    assert (tmp_path / "copy").read_bytes() == data


def test_object_with_wrong_digest_is_not_published(tmp_path: Path) -> None:
    """All blocks are right, but the digest of the object is that of another one."""
    data = Random(5).randbytes(2 * SIZE)
    alone = Alone(tmp_path / "copy", len(data), carousel=1)
    for block in (1, 0):
        send_block(alone, data, block)
    assert ends(alone, 2, bytes(Digest(b"another"))) is None
    assert list(tmp_path.iterdir()) == []


def test_all_stored_blocks_are_read_back(tmp_path: Path) -> None:
    """The digest of the object is checked after all blocks on the disk have been read, in several steps."""
    data = Random(5).randbytes(50 * SIZE)
    alone = Alone(tmp_path / "copy", len(data), carousel=1)
    digest = bytes(Digest(data))
    alone.on_packets(Flush(SESSION, 0, 50, 50, 0, 3, 0, 1000, 0, digest, 0, 0))
    for block in (*range(1, 50), 0):
        send_block(alone, data, block)
    assert ends(alone, 50, digest).size == len(data)
    assert (tmp_path / "copy").read_bytes() == data


def test_wrong_stored_block_drops_no_received_block(tmp_path: Path) -> None:
    """Blocks that arrived before a stored block was found to differ are kept."""
    left = tmp_path / ".copy.part"
    left.write_bytes(bytes(SIZE))
    left.chmod(0o1600)
    data = Random(5).randbytes(3 * SIZE)
    alone = Alone(tmp_path / "copy", len(data), carousel=1)
    core = alone.receiving.sessions[SESSION].core
    assert core.incoming is not None
    assert core.incoming.prefix.until == 1
    send_block(alone, data, 1)
    send_block(alone, data, 2, range(2))
    send_block(alone, data, 0)
    assert core.incoming.prefix.until == 0
    send_block(alone, data, 2, range(2, K))
    send_block(alone, data, 0)
    assert not core.rejected
    assert ends(alone, 3, bytes(Digest(data))).size == len(data)
    assert (tmp_path / "copy").read_bytes() == data


def test_one_session_ends_with_a_refused_carousel() -> None:
    """With one_session, a receiver that refuses a carousel does not wait for its end."""

    def refuses(_: cast.Offered) -> None:
        raise OSError("not this one")

    with pytest.raises(StopIteration) as done:
        Alone(refuses, 100, carousel=1, one_session=True).on_packets()
    assert done.value.value is None


def test_one_session_ends_with_a_failed_carousel(tmp_path: Path) -> None:
    """With one_session, a receiver that gives up a carousel ends, and keeps its part file."""
    data = Random(5).randbytes(3 * SIZE)
    alone = Alone(tmp_path / "copy", len(data), carousel=1, one_session=True)
    send_block(alone, data, 0)
    alone.receiving.sessions[SESSION].core.fail("in vain", 1.0)
    with pytest.raises(StopIteration) as done:
        alone.on_packets()
    assert done.value.value is None
    assert (tmp_path / ".copy.part").read_bytes() == data[:SIZE]


def test_impossible_segments_cost_no_memory(tmp_path: Path) -> None:
    """Segments that no block of the object can have change nothing."""
    data = Random(5).randbytes(8 * SIZE)
    alone = Alone(tmp_path / "copy", len(data), carousel=1)
    core = alone.receiving.sessions[SESSION].core
    for step in range(100):
        alone.on_packets(Data(SESSION, 0, step % 8, K, b"liar"))
        assert core.incoming is not None
        assert not core.incoming.dropped
    for block in range(8):
        one = SourceBlock(data[block * SIZE : (block + 1) * SIZE], SEGMENT, K)
        for index in range(K):
            alone.on_packets(Data(SESSION, 0, block, index, one.segment(index)))
            alone.on_packets(Data(SESSION, 0, (block + 3) % 8, K, b"liar"))
        alone.on_packets(Seal(SESSION, 0, block, 0, 2, 0, 1000, (one.info,)))
    assert not core.rejected
    assert alone.blocks == 8


@pytest.mark.parametrize("kind", ["path", "open"])
def test_an_empty_file_goes_round(roce: Fabric, tmp_path: Path, kind: str) -> None:
    (tmp_path / "empty").touch()
    with member(roce, 0) as group, (tmp_path / "empty").open("rb") as file:
        what = tmp_path / "empty" if kind == "path" else file
        report = cast.send(group, what, strategy=cast.carousel(cycles=2), rate=RATE)
        assert (report.strategy_met, report.size, report.cycles) == (True, 0, 2)
        with pytest.raises(ValueError, match="has a known size"):
            cast.send(group, Path("/proc/self/status"), strategy=cast.carousel(cycles=2), rate=RATE)


def test_a_disk_that_refuses_ends_the_object(tmp_path: Path) -> None:
    class Full(StreamSink):
        random_access = True

        def __init__(self) -> None:
            super().__init__(os.dup(1), "full")

        def write_at(self, at: int, segment: object) -> None:
            raise OSError(28, "No space left on device")

    alone = Alone(Full(), 100, carousel=1)
    one = SourceBlock(bytes(100), SEGMENT, K)
    alone.on_packets(Data(SESSION, 0, 0, 0, one.segment(0)))
    alone.on_packets(Seal(SESSION, 0, 0, 0, 2, 0, 1000, (one.info,)))
    incoming = alone.receiving.sessions[SESSION]
    assert incoming.delivery is None, "it was given up"
    assert not incoming.core.ack_pending, "and nobody is told"
