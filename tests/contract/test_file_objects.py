"""File objects of callers: no byte is lost or written twice, and a broken object is named."""

from __future__ import annotations

import fcntl
import os
import threading
from typing import Any

import pytest

from mcast.arguments.file_objects import FileWriter, read_exactly, read_some

from ..file_objects import BROKEN, NONSENSE, READERS, WRITERS, Plain, Raw

DATA = bytes(byte for number in range(20_000) for byte in (number % 251, number % 251))


@pytest.mark.parametrize("kind", WRITERS)
def test_no_byte_is_lost_or_doubled(kind: str) -> None:
    file = WRITERS[kind]()
    writer, left = FileWriter(file), memoryview(DATA)
    while left:
        left = left[writer.write_some(left) :]
    assert file.took == DATA


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_writer_is_named(kind: str) -> None:
    answer, error, words = BROKEN[kind]
    with pytest.raises(error, match=words):
        FileWriter(Plain(answer)).write_all(bytes(1000))


def test_what_takes_nothing_for_ever_is_named() -> None:
    for file in (Raw(0), Plain(lambda _, part: 0)):
        with pytest.raises(BlockingIOError, match=r"write takes nothing, and 40,000 bytes are left"):
            FileWriter(file).write_all(DATA)


def test_a_full_pipe_that_does_not_block_is_waited_for() -> None:
    came, goes = os.pipe()
    os.set_blocking(goes, False)
    fcntl.fcntl(goes, fcntl.F_SETPIPE_SZ, 4096)
    found = bytearray()

    def read() -> None:
        while more := os.read(came, 1000):
            found.extend(more)

    reader = threading.Thread(target=read)
    reader.start()
    for buffering in (0, 8192):
        with os.fdopen(os.dup(goes), "wb", buffering=buffering) as file:
            writer = FileWriter(file)
            writer.write_all(DATA)
            while not writer.flush():
                pass
    os.close(goes)
    reader.join()
    os.close(came)
    assert found == DATA + DATA


def test_an_object_without_a_flush_has_none() -> None:
    assert FileWriter(Plain(lambda _, part: None)).flush()


@pytest.mark.parametrize("kind", READERS)
def test_all_that_is_read_is_taken(kind: str) -> None:
    file, found = READERS[kind](DATA), b""
    while (more := read_some(file, 1024)) != b"":
        found += more or b""
    assert found == DATA


@pytest.mark.parametrize("kind", [one for one in READERS if "every other" not in one])
def test_so_many_bytes_are_read_and_the_rest_is_kept(kind: str) -> None:
    file, ahead, found = READERS[kind](DATA), b"", []
    while True:
        part, ahead = read_exactly(file, 777, ahead)
        found.append(part)
        if len(part) < 777:
            break
    assert b"".join(found) == DATA
    assert {len(part) for part in found[:-1]} == {777}


def test_a_pipe_that_does_not_block_is_waited_for() -> None:
    came, goes = os.pipe()
    os.set_blocking(came, False)

    def write() -> None:
        os.write(goes, b"first")
        os.write(goes, b" last")
        os.close(goes)

    writer = threading.Thread(target=write)
    with os.fdopen(came, "rb", buffering=0) as file:
        writer.start()
        assert read_exactly(file, 8) == (b"first la", b"")
        assert read_exactly(file, 8) == (b"st", b"")
    writer.join()


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_broken_reader_is_named(kind: str) -> None:
    given, words = NONSENSE[kind]

    class Broken:
        def read(self, size: int) -> Any:
            return given

    with pytest.raises(TypeError, match=rf"^Broken\.read {words}$"):
        read_some(Broken(), 10)
