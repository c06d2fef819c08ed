"""Files and pipes at both ends, receivers that take what one sender sends, and what is kept at the end."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typing_extensions import Buffer

from mcast import Membership, TimedOut, aio, cast
from mcast.api import McastError, Phase, mcast_error
from mcast.backends.sim import Fabric
from mcast.cast.io.driver import SessionSteps, error_text
from mcast.cast.io.files import NullSink, Sink, Source, StreamSink
from mcast.cast.io.sending import SendingSession
from mcast.cast.io.sinks import ReceiveTarget
from mcast.cast.protocol.packets import MAX_K, segment_size
from mcast.cast.protocol.strategy import deadline

from .test_objects import BOUND, DATA, amember, body, member, others
from .world import End, Receiving, World

BLOCK = MAX_K * segment_size(1024)


def takes(
    fabric: Fabric,
    host: int,
    into: ReceiveTarget = None,
    missed: Callable[[cast.Missed], object] = lambda _: None,
    memory: int = 32 << 20,
) -> list[cast.Received]:
    """Receive the objects of one sender on that host."""
    with member(fabric, host) as group:
        return list(cast.receive(group, into, missed=missed, one_session=True, memory=memory))


def late(posted: int) -> McastError:
    error = mcast_error(errno.ETIMEDOUT, "send", Phase.SEND)
    error.posted = posted
    return error


def test_slow_link_is_no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may take longer than the timeout of a send, if each send posts some messages in its time."""
    fabric = Fabric.roce(2, clock="wall")
    sends, sends_awaited = Membership.send_batch, aio.Membership.send_batch

    def slow(group: Any, batch: Any, timeout: float) -> None:
        sends(group, batch[:3])
        if len(batch) > 2:
            raise late(len(batch[:3]))

    async def slow_awaited(group: Any, batch: Any, timeout: float) -> None:
        await sends_awaited(group, batch[:3])
        if len(batch) > 2:
            raise late(len(batch[:3]))

    async def awaited() -> cast.ObjectReport:
        async with amember(fabric, 0) as group:
            return await cast.send(group, DATA, receivers=1, timeout=BOUND)

    monkeypatch.setattr(Membership, "send_batch", slow)
    monkeypatch.setattr(aio.Membership, "send_batch", slow_awaited)
    with others(lambda: takes(fabric, 1)) as taking:
        with member(fabric, 0) as group:
            assert cast.send(group, DATA, receivers=1, timeout=BOUND).strategy_met
        assert [body(one) for one in taking[0].result(BOUND)] == [DATA]
    with others(lambda: takes(fabric, 1)) as taking:
        assert asyncio.run(awaited()).strategy_met
        assert [body(one) for one in taking[0].result(BOUND)] == [DATA]


def test_a_wire_that_takes_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(group: Any, batch: Any, timeout: float) -> None:
        raise late(0)

    fabric = Fabric.roce(1, clock="wall")
    with member(fabric, 0) as group, monkeypatch.context() as patch:
        patch.setattr(Membership, "send_batch", stuck)
        with pytest.raises(TimedOut):
            cast.send(group, DATA)


def test_a_slow_reader_of_a_pipe_slows_the_sender_down() -> None:
    fabric = Fabric.roce(2, clock="wall")
    data = Random(1).randbytes(12 * BLOCK)
    out, into = os.pipe()
    read = bytearray()
    ahead: list[int] = []

    def reads() -> None:
        while part := os.read(out, 4096):
            read.extend(part)

    def watch(progress: cast.Progress) -> None:
        ahead.append(progress.done - len(read))

    with (
        others(lambda: takes(fabric, 1, StreamSink(into, "pipe"), memory=1), reads) as both,
        member(fabric, 0) as group,
        cast.open_session(group, progress=watch) as session,
    ):
        session.wait_for_receivers(1, BOUND)
        report = session.send(data)
        session.close()
        both[1].result(BOUND)
    os.close(out)
    assert report.strategy_met
    assert bytes(read) == data
    assert max(ahead) <= 65536 + 4096, "what is done has been written to the pipe"


class Moody(Sink):
    """Is ready every other time, for so many bytes."""

    name, max_write = "moody", 1000

    def __init__(self) -> None:
        self.taken = bytearray()
        self._looks = 0
        self._may_write = False

    def ready(self) -> bool:
        self._looks += 1
        self._may_write = self._looks % 2 == 0
        return self._may_write

    def write(self, segment: Buffer) -> None:
        assert self._may_write
        assert memoryview(segment).nbytes <= self.max_write
        self._may_write = False
        self.taken += memoryview(segment)


def test_sink_is_written_when_ready() -> None:
    """One write has no more bytes than the sink accepts."""
    fabric, sink, data = Fabric.roce(2, clock="wall"), Moody(), Random(2).randbytes(20_000)
    with others(lambda: takes(fabric, 1, sink)) as taking, member(fabric, 0) as group:
        assert cast.send(group, data, receivers=1, timeout=BOUND).strategy_met
        taking[0].result(BOUND)
    assert bytes(sink.taken) == data


def test_a_pipe_is_sent_as_its_bytes_come(tmp_path: Path) -> None:
    fabric = Fabric.roce(2, clock="wall")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    arrived = threading.Event()

    class Notes(NullSink):
        def write(self, segment: object) -> None:
            arrived.set()

    def writes() -> None:
        with fifo.open("wb", buffering=0) as pipe:
            pipe.write(DATA[:100])
            assert arrived.wait(BOUND)
            pipe.write(DATA[100:])

    with (
        others(lambda: takes(fabric, 1, Notes()), writes) as both,
        member(fabric, 0) as group,
    ):
        report = cast.send(group, Source(str(fifo)), timeout=BOUND)
        (got,) = both[0].result(BOUND)
    assert (got.size, got.offered.size, got.digest) == (len(DATA), None, report.digest)


@pytest.mark.parametrize("change", ["grows", "shrinks"])
def test_a_file_that_changes_while_it_is_sent(tmp_path: Path, change: str) -> None:
    fabric = Fabric.roce(2, clock="wall")
    path = tmp_path / "file"
    path.write_bytes(DATA)

    class Changing(Source):
        def read(self, size: int) -> bytes | None:
            if change == "grows":
                with path.open("ab") as file:
                    file.write(bytes(1000))
            else:
                os.truncate(path, 100_000)
            return super().read(size)

    missed: list[cast.Missed] = []
    with (
        others(lambda: takes(fabric, 1, tmp_path / "copy", missed.append)) as ends,
        member(fabric, 0) as group,
    ):
        if change == "grows":
            assert cast.send(group, Changing(str(path)), timeout=BOUND).strategy_met
        else:
            with pytest.raises(OSError, match="the object became 100000 bytes shorter while it was sent"):
                cast.send(group, Changing(str(path)), timeout=BOUND)
        got = ends[0].result(BOUND)
    if change == "grows":
        assert [one.path for one in got] == [tmp_path / "copy"]
        assert (tmp_path / "copy").read_bytes() == DATA
    else:
        assert [one.reason for one in missed] == [
            "the sender has ended the session: the object became 100000 bytes shorter while it was sent"
        ]
        assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_one_session_refuses_another_sender() -> None:
    """With one_session the other sender learns the reason, and does not wait."""
    fabric = Fabric.roce(3, clock="wall")
    begun = threading.Event()

    def takes_one() -> list[bytes]:
        with member(fabric, 1) as group:
            objects = cast.receive(group, one_session=True, progress=lambda *_: begun.set())
            return [body(one) for one in objects]

    def second() -> cast.ObjectReport:
        with member(fabric, 2) as group, cast.open_session(group, peer_timeout=BOUND) as session:
            session.wait_for_receivers(1, BOUND)
            first_may_begin.set()
            assert begun.wait(BOUND)
            return session.send(b"second")

    first_may_begin = threading.Event()
    with others(takes_one, second) as ends:
        assert first_may_begin.wait(BOUND)
        with member(fabric, 0) as group, cast.open_session(group) as session:
            session.wait_for_receivers(1, BOUND)
            assert session.addresses.keys() == {"10.0.0.2"}
            assert session.send(DATA).strategy_met
            report = ends[1].result(BOUND)
            assert session.send(b"more").strategy_met
        assert ends[0].result(BOUND) == [DATA, b"more"]
    assert [one.reason for one in report.receivers] == ["this receiver receives from another sender"]
    assert not report.strategy_met


def test_late_receiver_waits_for_the_next_sender() -> None:
    fabric = Fabric.roce(3, clock="wall")
    gone = threading.Event()
    missed: list[cast.Missed] = []
    late = threading.Event()

    def note(one: cast.Missed) -> None:
        missed.append(one)
        late.set()

    def comes_late() -> list[cast.Received]:
        assert gone.wait(BOUND)
        return takes(fabric, 2, missed=note)

    def watch(progress: cast.Progress) -> None:
        if progress.done:
            gone.set()

    class Pausing(Source):
        """The last block waits for the late one."""

        def read(self, size: int) -> bytes | None:
            now = self.left if late.is_set() else self.left - BLOCK
            return super().read(min(size, now)) if now else None

        @property
        def left(self) -> int:
            return self._remaining or 0

    path = Path(f"/proc/self/fd/{os.memfd_create('object')}")
    path.write_bytes(bytes(8 * BLOCK))
    with others(lambda: takes(fabric, 1, memory=1), comes_late) as ends:
        with member(fabric, 0) as group, cast.open_session(group, progress=watch) as session:
            session.wait_for_receivers(1, BOUND)
            first = session.send(Pausing(str(path)))
        with member(fabric, 0) as group:
            second = cast.send(group, b"next", timeout=BOUND)
        assert [one.size for one in ends[0].result(BOUND)] == [8 * BLOCK]
        assert [body(one) for one in ends[1].result(BOUND)] == [b"next"]
    os.close(int(path.name))
    assert [one.late for one in missed] == [True]
    assert [one.address for one in first.receivers] == ["10.0.0.2"]
    assert (first.strategy_met, second.strategy_met) == (True, True)


def test_complete_object_survives_the_session_end() -> None:
    """All blocks have arrived when the sender ends its session."""
    fabric = Fabric.roce(2, clock="wall")
    ended = threading.Event()

    class SlowDisk(NullSink):
        def commit(self) -> bool:
            return ended.is_set()

    def watch(progress: cast.Progress) -> None:
        if progress.done == len(DATA):  # the receiver has all of it, and is storing it
            raise EOFError

    def sends(group: Membership) -> None:
        with cast.open_session(group, progress=watch) as session:
            session.wait_for_receivers(1, BOUND)
            session.send(DATA)

    with others(lambda: takes(fabric, 1, SlowDisk())) as ends, member(fabric, 0) as group:
        with pytest.raises(EOFError):
            sends(group)
        ended.set()
        got = ends[0].result(BOUND)
    assert [one.size for one in got] == [len(DATA)]


def test_waiting_ends_with_the_admission() -> None:
    """Not with the next invitation, a tenth of a second later."""
    world = World()
    end = End(world, "10.0.0.1")
    Receiving(world, "10.0.0.2")
    session = SendingSession(end.context, 1 << 20, 2e6, 10.0, None)
    ended = 0.0

    def waits() -> SessionSteps[None]:
        nonlocal ended
        yield from session.wait_for_receivers(1, None)
        ended = world.now

    end.start(waits())
    world.run(1.0)
    assert 0 < ended < 0.09


def test_a_stopped_session_waits_idle() -> None:
    """Also while a receiver lacks the published version, which `stop` keeps from being sent again."""
    world = World()
    end = End(world, "10.0.0.1")

    def refuses(_: cast.Offered) -> None:
        raise OSError("not now")

    Receiving(world, "10.0.0.2", into=refuses)
    session = SendingSession(end.context, 1 << 20, 2e6, 10.0, None)
    steps = 0

    def waits() -> SessionSteps[None]:
        nonlocal steps
        yield from session.wait_for_receivers(1, None)
        yield from session.publish(b"it", 1, deadline(1.0), "", b"")
        session.stop()
        waiting = session.wait_for_receivers(None, 10.0)
        step = next(waiting)
        with suppress(StopIteration):
            while True:
                steps += 1
                step = waiting.send((yield step))

    end.start(waits())
    world.run(20.0)
    assert 50 < steps < 300, "an invitation in a tenth of a second"


@pytest.mark.parametrize("how", ["fails", "stops", "meets a deadline"])
def test_a_session_that_waits_is_idle(how: str) -> None:
    """After an object that an error or `stop` has ended, which ends at its receiver, too."""
    world = World()
    end, receiver = End(world, "10.0.0.1"), Receiving(world, "10.0.0.2")
    session = SendingSession(end.context, 1 << 20, 2e6, 10.0, None)
    steps = 0

    def source() -> Iterator[bytes]:
        yield bytes(100)
        if how == "fails":
            raise OSError("no more")
        while True:
            yield bytes(100_000)

    def waits() -> SessionSteps[None]:
        nonlocal steps
        yield from session.wait_for_receivers(1, None)
        if how == "stops":
            world.at(world.now + 0.5, session.stop)
        with suppress(OSError):
            yield from session.send(source(), deadline(1.0), "it", b"")
        waiting = session.wait_for_receivers(None, 10.0)
        step = next(waiting)
        while True:
            steps += 1
            try:
                step = waiting.send((yield step))
            except StopIteration:
                return

    end.start(waits())
    world.run(20.0)
    assert 50 < steps < 300, "an invitation in a tenth of a second"
    assert receiver.missed.keys() == {"it"}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (OSError(28, "No space left on device", "/secret/path"), "No space left on device"),
        (OSError("the library's own words"), "the library's own words"),
        (FileExistsError("/secret/path"), "internal error"),
        (RuntimeError("/secret/path"), "internal error"),
    ],
)
def test_the_group_learns_no_path(error: BaseException, said: str) -> None:
    assert error_text(error) == said


def test_error_text_is_that_of_the_cause() -> None:
    """The group gets the text of the cause of an error, without its path."""
    error = RuntimeError("/secret/path")
    error.__cause__ = OSError(5, "Input/output error", "/secret/path")
    assert error_text(error) == "Input/output error"


def test_failing_sink_is_reported_and_closed() -> None:
    fabric = Fabric.roce(2, clock="wall")
    closed: list[bool] = []

    class Full(Sink):
        name = "full"

        def write(self, segment: object) -> None:
            raise OSError(28, "No space left on device", "/secret/path")

        def close(self) -> None:
            closed.append(True)

    with others(lambda: takes(fabric, 1, Full())) as ends, member(fabric, 0) as group:
        report = cast.send(group, DATA, timeout=BOUND)
        assert ends[0].result(BOUND) == []
    assert [(one.complete, one.reason) for one in report.receivers] == [(False, "No space left on device")]
    assert (report.strategy_met, closed) == (False, [True])
