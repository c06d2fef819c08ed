"""Sources and destinations: streams, pipes, tensors; and typed metadata."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gzip
import io
import mmap
import os
import socket
import sys
import threading
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import closing
from http.client import HTTPResponse
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

import mcast
from mcast import cast, open_backend
from mcast.api import Region
from mcast.backends.sim import Fabric
from mcast.backends.sim.testbed import SimObserver
from mcast.cast.io import sources
from mcast.cast.io.sinks import BufferSink, NewMemorySink, sink_at
from mcast.cast.io.sources import ByteSource, MemorySource, Sendable, Tensor, source_of
from mcast.cast.protocol.packets import Data, Seal

from ...waiting import until
from .alone import SEGMENT, SESSION, Alone, K, cut
from .test_objects import BOUND, amember, body, gets, member, others

DATA = Random(4).randbytes(300_000)


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    made = Fabric.roce(3, clock="wall")
    yield made
    assert SimObserver(made).leftovers() == ()


class OfDevice:
    """A tensor of another library: its memory can be had by `__dlpack__` alone."""

    def __init__(self, array: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self._array, self._device = array, device

    def __dlpack__(self, **how: Any) -> Any:
        return self._array.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


class Step(BaseModel):
    """Metadata of a trainer's weights."""

    number: int
    loss: float


def all_of(source: ByteSource, most: int = 1000) -> bytes:
    found = []
    while (part := source.read(most)) != b"":
        if part is not None:
            assert len(part) <= most
            found.append(part)
    source.close()
    return b"".join(found)


def test_streams_of_all_kinds(fabric: Fabric, tmp_path: Path) -> None:
    """From files, pipes and iterators into pipes and files."""
    (tmp_path / "file").write_bytes(b"not this" + DATA)
    out, into = os.pipe()
    read_fd, write_fd = os.pipe()
    copied: list[bytes] = []

    def writes() -> None:
        with os.fdopen(into, "wb") as file:
            file.write(DATA[:1000])
            file.flush()
            file.write(DATA[1000:])

    def reads() -> None:
        with os.fdopen(read_fd, "rb") as file:
            copied.append(file.read())

    def pipes() -> list[cast.Received]:
        with os.fdopen(write_fd, "wb") as file:
            return gets(fabric, 2, 4, file)

    memory = io.BytesIO()
    with (
        others(writes, reads, pipes, lambda: gets(fabric, 1, 4, memory)) as ends,
        member(fabric, 0) as group,
        cast.open_session(group) as session,
        (tmp_path / "file").open("rb") as file,
        os.fdopen(out, "rb") as pipe,
    ):
        session.wait_for_receivers(2, BOUND)
        assert file.read(8) == b"not this"
        parts = (DATA[at : at + 70_001] for at in range(0, len(DATA), 70_001))
        infos: tuple[Sendable, ...] = (file, pipe, parts, [b"", bytearray(b"x"), np.arange(3, dtype="u1")])
        reports = [session.send(one) for one in infos]
        *_, piped, other = (end.result(BOUND) for end in ends)
        assert not file.closed
    sizes = [len(DATA), None, None, None]
    assert [one.offered.size for one in other] == [one.offered.size for one in piped] == sizes
    assert [one.size for one in reports] == [len(DATA)] * 3 + [4]
    assert all(report.strategy_met for report in reports)
    assert memory.getvalue() == copied[0] == DATA * 3 + b"x\x00\x01\x02"
    assert [(one.data, one.path) for one in other] == [(None, None)] * 4


def test_a_tensor_is_sent_and_filled_in_its_own_memory(fabric: Fabric) -> None:
    weights = np.random.default_rng(5).random((100, 50))
    copy = np.zeros((100, 50))
    with others(lambda: gets(fabric, 1, 1, OfDevice(copy))) as ends, member(fabric, 0) as group:
        assert cast.send(group, OfDevice(weights), timeout=BOUND).strategy_met
        (got,) = ends[0].result(BOUND)
    assert (copy == weights).all()
    assert got.size == weights.nbytes


def test_a_large_buffer_is_lent_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no part once it is done, or write_fd round again."""
    monkeypatch.setattr(sources, "MAX_REGISTERED", 1000)
    monkeypatch.setattr(sources, "MIN_REGISTERED", 300)
    lent: list[tuple[int, int]] = []
    with open_backend("sim") as backend, mcast.open_endpoint(backend, "10.0.0.1") as endpoint:
        resources, parts = endpoint._core.resources, list[Region]()

        def lend(part: memoryview) -> Region | None:
            lent.append((DATA.index(part), len(part)))
            region = resources.lend(part)
            assert region is not None
            parts.append(region)
            return region

        def still() -> list[int]:
            return [index for index, part in enumerate(parts) if not part.closed]

        with closing(MemorySource(memoryview(DATA)[:2400])) as source:
            source.lend = lend
            for most, here in ((400, [0]), (400, [0]), (400, [0]), (800, [1]), (400, [1])):
                assert source.read(most)
                assert still() == here
            assert not source.read(400)
            assert still() == []
            assert source.rewind()
            assert source.read(400) == DATA[:400]
            assert still() == [2]
        assert still() == []
    assert lent == [(0, 1000), (1200, 1000), (0, 1000)]


def test_metadata_that_does_not_fit_is_refused(fabric: Fabric) -> None:
    """The receiver names the pydantic model of the metadata."""
    missed: list[cast.Missed] = []

    def receives() -> list[cast.Received]:
        with (
            member(fabric, 1) as group,
            closing(cast.receive(group, model=Step, missed=missed.append)) as objects,
        ):
            return [next(objects)]

    with others(receives) as ends, member(fabric, 0) as group, cast.open_session(group) as session:
        session.wait_for_receivers(1, BOUND)
        bad = session.send(DATA, metadata=b'{"number":"many","loss":1}')
        good = session.send(b"weights", metadata=Step(number=7, loss=0.5))
        with pytest.raises(ValueError, match="600 bytes of metadata: at most 512"):
            session.send(b"", metadata=bytes(600))
        (got,) = ends[0].result(BOUND)
    assert body(got) == b"weights"
    assert got.offered.read(Step) == Step(number=7, loss=0.5)
    with pytest.raises(ValueError, match=r"^the metadata is no Step: the text is not JSON: "):
        got.offered._replace(metadata=b"{").read(Step)
    (one,) = missed
    assert one.reason.startswith("the metadata is no Step: number is 'many': give a whole number")
    assert (bad.strategy_met, good.strategy_met) == (False, True)
    assert bad.receivers[0].reason.startswith("the metadata is no Step: number is ")


def test_an_iterator_that_fails_ends_its_object_alone(fabric: Fabric) -> None:
    missed: list[cast.Missed] = []

    def parts() -> Iterator[bytes]:
        yield DATA
        raise ZeroDivisionError

    with (
        others(lambda: gets(fabric, 1, 1, missed=missed.append)) as ends,
        member(fabric, 0) as group,
        cast.open_session(group) as session,
    ):
        session.wait_for_receivers(1, BOUND)
        with pytest.raises(ZeroDivisionError):
            session.send(parts(), name="fails")
        assert session.send(b"whole").strategy_met
        (got,) = ends[0].result(BOUND)
    assert body(got) == b"whole"
    assert [one.offered.name for one in missed] in (["fails"], [])


def test_broken_pipe_costs_the_object(fabric: Fabric) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    missed = threading.Event()

    def receives() -> None:
        with member(fabric, 1) as group, os.fdopen(write_fd, "wb", buffering=0) as file:
            list(cast.receive(group, file, missed=lambda _: missed.set(), timeout=1.0))

    with others(receives) as ends, member(fabric, 0) as group:
        report = cast.send(group, DATA, timeout=BOUND)
        ends[0].result(BOUND)
    assert [one.reason for one in report.receivers] == ["Broken pipe"]
    assert missed.is_set()


def test_a_pipe_with_a_slow_reader_is_not_waited_for() -> None:
    read_fd, write_fd = os.pipe()
    with os.fdopen(read_fd, "rb", buffering=0) as reader, os.fdopen(write_fd, "wb") as file:
        file.write(b"first ")
        sink = sink_at(file)
        sink.write(DATA)
        assert not sink.ready()
        assert not sink.commit()
        copied = reader.read(6)
        assert copied == b"first "
        copied = b""

        def drained() -> bool:
            nonlocal copied
            copied += reader.read(1 << 16) or b""
            return sink.commit()

        until(drained)
        while len(copied) < len(DATA):
            copied += reader.read(1 << 16) or b""
    assert copied == DATA


def test_file_object_is_flushed() -> None:
    """The bytes that a file object buffers are written before the object is handed out."""
    raw = io.BytesIO()
    with io.BufferedWriter(raw) as file:
        sink = sink_at(file)
        sink.write(b"kept back")
        assert raw.getvalue() == b""
        assert sink.commit()
        assert raw.getvalue() == b"kept back"


class Narrow(io.RawIOBase):
    """A file without a buffer, which takes few bytes at once, and no more than its disk has room for."""

    def __init__(self, window: int) -> None:
        self.took, self._room = b"", window

    def writable(self) -> bool:
        return True

    def write(self, part: Any) -> int | None:
        if len(self.took) == self._room:
            return None
        new = bytes(part[: min(7, self._room - len(self.took))])
        self.took += new
        return len(new)


def test_partial_writes_are_completed() -> None:
    """A file without a buffer may accept a part of each write."""
    file = Narrow(len(DATA))
    sink = sink_at(file)
    sink.write(DATA[:1000])
    assert file.took == DATA[:1000]
    full = sink_at(Narrow(999))
    full.write(DATA[:1000])
    assert not full.ready()
    assert not full.commit()


def test_a_buffer_is_filled_to_its_end_and_no_further() -> None:
    target = bytearray(3)
    sink = sink_at(target)
    sink.write(b"ab")
    sink.write(b"c")
    with pytest.raises(OSError, match="the object is larger than the 3 bytes allowed here"):
        sink.write(b"d")
    assert target == b"abc"
    with pytest.raises(OSError, match=os.strerror(errno.ENOMEM)) as caught:
        NewMemorySink(1 << 62)
    assert caught.value.errno == errno.ENOMEM


def resident() -> int:
    """Bytes of memory that this process has touched."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_what_is_only_described_takes_no_memory() -> None:
    before = resident()
    sink = NewMemorySink(1 << 28)
    assert resident() - before < 1 << 26
    segment = sink.buffer_at((1 << 28) - 5, 5)
    assert segment is not None
    segment[:] = b"bytes"
    del segment
    assert sink.take()[-5:] == b"bytes"


def test_file_object_may_change_its_bytes() -> None:
    """The pipe gets what the file object writes, such as compressed bytes."""
    read_fd, write_fd = os.pipe()
    with os.fdopen(read_fd, "rb") as reader, os.fdopen(write_fd, "wb") as pipe:
        with gzip.GzipFile(fileobj=pipe, mode="wb") as file:
            sink = sink_at(file)
            sink.write(DATA[:10_000])
            assert sink.commit()
        pipe.close()
        assert gzip.decompress(reader.read()) == DATA[:10_000]


def test_bytes_read_ahead_are_sent() -> None:
    """A file object has bytes in its buffer while its socket has none."""
    here, there = socket.socketpair()
    with here, there, HTTPResponse(here) as answer:
        there.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody")
        answer.begin()
        assert source_of(answer).read(9) == b"body"  # of a connection that stays open


def test_slow_pipe_slows_the_transfer() -> None:
    read_fd, write_fd = os.pipe()
    with os.fdopen(read_fd, "rb"), os.fdopen(write_fd, "wb", buffering=0) as file:
        fits = fcntl.fcntl(file, fcntl.F_GETPIPE_SZ) // (SEGMENT * K)
        alone = Alone(file, 4 * fits * SEGMENT * K)
        for number, block in enumerate(cut(bytes((4 * fits - 1) * SEGMENT * K))):
            for index in range(K):
                alone.on_packets(Data(SESSION, 0, number, index, block.segment(index)))
            alone.on_packets(Seal(SESSION, 0, number, 0, 0, 1, 1000, (block.info,)))
        assert fits // 2 < alone.blocks <= fits + 1


def test_rest_of_a_file_and_an_idle_pipe(tmp_path: Path) -> None:
    """A file is sent from its position, and a pipe without bytes does not block."""
    path = tmp_path / "file"
    path.write_bytes(DATA)
    with path.open("rb") as file:
        file.seek(250_000)
        source = source_of(file)
        with path.open("ab") as more:
            more.write(b"later")
        assert (source.size, all_of(source)) == (50_000, DATA[250_000:])
    assert all_of(source_of(io.BytesIO(DATA))) == DATA
    with path.open("r+b") as mutable, mmap.mmap(mutable.fileno(), 0) as mapped:
        assert all_of(source_of(mapped)) == DATA + b"later"
        assert isinstance(sink_at(mapped), BufferSink)
    read_fd, write_fd = os.pipe()
    with os.fdopen(read_fd, "rb") as pipe, os.fdopen(write_fd, "wb", buffering=0) as writer:
        source = source_of(pipe)
        assert (source.size, source.read(9)) == (None, None)
        writer.write(b"now")
        assert source.read(9) == b"now"
        assert source.read(9) is None
        writer.close()
        assert source.read(9) == b""


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ("a text", "a path as pathlib.Path"),
        (io.StringIO("text"), "open the file in binary mode"),
        (
            7,
            "^int cannot be sent: give a buffer, a tensor, a path, an open binary file or "
            "an iterable of buffers$",
        ),
        (OfDevice(np.zeros(3), (2, 0)), "copy the tensor to the CPU first"),
    ],
)
def test_what_cannot_be_sent_is_refused_in_words(info: Sendable, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        source_of(info)


def test_non_contiguous_data_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also elements that are no buffers, and tensors that numpy cannot read."""

    class Odd(OfDevice):
        def __dlpack__(self, **how: Any) -> Any:
            raise BufferError("an odd type")

    with pytest.raises(
        TypeError, match=r"^this ndarray has items that lie apart in memory: give a contiguous copy$"
    ):
        source_of(np.zeros((2, 2))[:, 1])
    with pytest.raises(TypeError, match=r"^int is not a buffer: the iterable must yield buffers$"):
        source_of([7]).read(1)  # type: ignore[list-item]
    odd = Odd(np.zeros(3))
    with pytest.raises(
        TypeError, match=r"^Odd: an odd type; view a tensor of a type that numpy does not have as bytes$"
    ):
        source_of(odd)
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(
        TypeError, match=r"^Odd has __dlpack__, which needs numpy to be read: python -m pip install numpy$"
    ):
        source_of(odd)


def test_memory_that_cannot_be_written_is_refused() -> None:
    fixed = np.zeros(3)
    fixed.setflags(write=False)
    targets: list[bytes | Tensor] = [b"fixed", fixed]
    for target in targets:
        with pytest.raises(TypeError, match="is read-only"):
            sink_at(target)
    with pytest.raises(TypeError, match="int cannot be received into"):
        sink_at(1)  # type: ignore[arg-type]


async def sends(fabric: Fabric, parts: AsyncIterable[bytes]) -> cast.ObjectReport:
    async with amember(fabric, 0) as group:
        return await cast.send(group, parts)


def test_async_iterable_is_read_on_demand(fabric: Fabric) -> None:
    """It is asked for more as receivers accept what it has given."""

    async def parts() -> AsyncIterator[bytes]:
        for at in range(0, len(DATA), 777):
            await asyncio.sleep(0)
            yield DATA[at : at + 777]
        yield b""
        yield bytes(3 << 20)

    assert not source_of(parts()).rewind()
    with others(lambda: gets(fabric, 1, 1)) as ends:
        report = asyncio.run(sends(fabric, parts()))
        (got,) = ends[0].result(BOUND)
    assert report.strategy_met
    assert body(got) == DATA + bytes(3 << 20)
    with member(fabric, 0) as group, pytest.raises(TypeError, match=r"mcast\.aio"):
        cast.send(group, parts(), receivers=0)


@pytest.mark.parametrize("cancelled", [False, True])
def test_async_iterable_ends_with_the_call(fabric: Fabric, cancelled: bool) -> None:
    """It fails, or waits when the call ends."""
    ended: list[str] = []
    calls: list[asyncio.Task[cast.ObjectReport]] = []
    heard = threading.Event()

    async def parts() -> AsyncIterator[bytes]:
        try:
            yield DATA
            while not heard.is_set():  # a receiver misses nothing of an object that ends before
                await asyncio.sleep(0.001)
                yield b""
            if cancelled:
                calls[0].cancel()
                await asyncio.Event().wait()
            raise LookupError("no more")
        finally:
            ended.append("ended")

    async def main() -> None:
        calls.append(asyncio.create_task(sends(fabric, parts())))
        with pytest.raises(asyncio.CancelledError if cancelled else LookupError):
            await calls[0]
        await asyncio.sleep(0)
        assert ended == ["ended"]

    missed: list[cast.Missed] = []
    with others(lambda: list(takes_until_quiet(fabric, missed, heard))) as ends:
        asyncio.run(main())
        assert ends[0].result(BOUND) == []
    assert [one.reason for one in missed] == [
        f"the sender has ended the session: {'interrupted' if cancelled else 'internal error'}"
    ]


def takes_until_quiet(
    fabric: Fabric, missed: list[cast.Missed], heard: threading.Event
) -> Iterator[cast.Received]:
    with member(fabric, 1) as group:
        yield from cast.receive(
            group, missed=missed.append, one_session=True, progress=lambda offered, size: heard.set()
        )
