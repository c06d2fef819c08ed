"""Objects from and to a caller's own file objects, iterators and functions: all bytes, or its own error."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from mcast import cast
from mcast.backends.sim import Fabric
from mcast.backends.sim.testbed import SimObserver
from mcast.cast.io import sinks

from ...file_objects import BROKEN, NONSENSE, READERS, WRITERS, Plain, Wrapper
from .test_objects import BOUND, body, gets, member, others

DATA = bytes(byte for number in range(100_000) for byte in (number % 251, number % 251))


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    made = Fabric.roce(3, clock="wall")
    yield made
    assert SimObserver(made).leftovers() == ()


def receives(fabric: Fabric, file: Any) -> tuple[list[cast.Received], list[cast.Missed]]:
    """Receive the objects of one sender into a file object: those that are whole, and those that are not."""
    missed: list[cast.Missed] = []
    with (
        member(fabric, 1) as group,
        closing(cast.receive(group, file, one_session=True, missed=missed.append)) as got,
    ):
        return list(got), missed


@pytest.mark.parametrize("kind", WRITERS)
def test_a_writer_has_every_byte_of_the_object(fabric: Fabric, kind: str) -> None:
    file = WRITERS[kind]()
    with others(lambda: receives(fabric, file)) as ends, member(fabric, 0) as group:
        report = cast.send(group, DATA[:60_000], timeout=BOUND)
        whole, missed = ends[0].result(BOUND)
    assert file.took == DATA[:60_000]
    assert (len(whole), missed, report.receivers[0].complete) == (1, [], True)


def test_small_parts_leave_turns_to_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that said nothing until all is written would be given up."""
    monkeypatch.setattr(sinks, "_MAX_WRITE_TIME", -1.0)
    file = WRITERS["one byte at a time"]()
    sink = sinks.sink_at(file)
    sink.write(b"abcd")
    assert (file.took, sink.ready(), sink.commit()) == (b"a", False, False)
    assert (file.took, sink.ready(), sink.commit()) == (b"abc", True, True)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_writer_costs_its_receiver_the_object(fabric: Fabric, kind: str) -> None:
    """An OSError is what a disk says, and the object is missed; other errors are the program's own."""
    answer, error, reason = BROKEN[kind]
    with others(lambda: receives(fabric, Plain(answer))) as ends, member(fabric, 0) as group:
        report = cast.send(group, bytes(1000), timeout=BOUND)
        if issubclass(error, OSError):
            whole, (missed,) = ends[0].result(BOUND)
            assert (whole, missed.reason) == ([], reason)
        else:
            with pytest.raises(error, match=reason):
                ends[0].result(BOUND)
    assert not report.receivers[0].complete


@pytest.mark.parametrize("kind", READERS)
def test_every_byte_that_is_read_arrives(fabric: Fabric, kind: str) -> None:
    with others(lambda: gets(fabric, 1, 1)) as ends, member(fabric, 0) as group:
        report = cast.send(group, READERS[kind](DATA), timeout=BOUND)
        (got,) = ends[0].result(BOUND)
    assert body(got) == DATA
    assert report.receivers[0].complete


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_broken_reader_is_named_where_it_is_sent(fabric: Fabric, kind: str) -> None:
    given, reason = NONSENSE[kind]

    class Broken:
        def read(self, size: int) -> Any:
            return given

    with others(lambda: receives(fabric, None)) as ends, member(fabric, 0) as group:
        with pytest.raises(TypeError, match=rf"^Broken\.read {reason}$"):
            cast.send(group, Broken(), timeout=BOUND)
        assert ends[0].result(BOUND)[0] == []


def test_none_does_not_end_an_iterable(fabric: Fabric) -> None:
    """It would cut off the object, and both ends would call that whole."""
    parts: list[Any] = [b"first", None, b"last"]
    reason = r"^NoneType is not a buffer: the iterable must yield buffers$"
    with others(lambda: receives(fabric, None)) as ends, member(fabric, 0) as group:
        with pytest.raises(TypeError, match=reason):
            cast.send(group, iter(parts), timeout=BOUND)
        assert ends[0].result(BOUND)[0] == []


def test_a_subclass_on_a_pipe_writes_in_its_own_way(fabric: Fabric) -> None:
    """Nothing write_fd past it to the descriptor."""

    class Inverting(io.FileIO):
        def write(self, part: Any, /) -> int:
            return super().write(bytes(255 - byte for byte in part))

    class Wrapped(Wrapper):
        def write(self, part: bytes) -> object:
            return self._file.write(bytes(255 - byte for byte in part))

    def wrapped(fd: int, mode: str) -> Any:
        return Wrapped(os.fdopen(fd, mode))

    kinds: list[Any] = [Inverting, wrapped]
    for kind in kinds:
        read_fd, write_fd = os.pipe()
        with os.fdopen(read_fd, "rb") as reader:
            file = kind(write_fd, "wb")
            with others(partial(receives, fabric, file)) as ends, member(fabric, 0) as group:
                cast.send(group, DATA[:1000], timeout=BOUND)
                assert len(ends[0].result(BOUND)[0]) == 1
            file.close()
            assert reader.read() == bytes(255 - byte for byte in DATA[:1000])
