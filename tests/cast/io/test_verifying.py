"""Blocks that threads of a receiver verify: order, errors, ends."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from typing_extensions import Buffer

from mcast import cast
from mcast.backends.sim import Fabric
from mcast.backends.sim.testbed import SimObserver
from mcast.cast.io import workers
from mcast.cast.io.files import Sink
from mcast.cast.io.placing import PLACER
from mcast.cast.protocol.blocks import Digest
from mcast.cast.protocol.packets import ALL_MEMBERS, Bye, Data, Flush, Seal

from .alone import SEGMENT, SESSION, Alone, K, cut, heard
from .test_objects import BOUND, DATA, member, others
from .test_workers import names

OBJECT = bytes(range(256)) * 61  # four blocks of `Alone`


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    made = Fabric.roce(2, clock="wall")
    yield made
    gc.collect()
    assert SimObserver(made).leftovers() == ()
    assert "mcast.cast" not in names()


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have threads verify blocks of any size."""
    monkeypatch.setattr(workers, "MIN_TASK", 0)


def sends(fabric: Fabric, data: bytes = DATA) -> cast.ObjectReport:
    with member(fabric, 0) as group:
        return cast.send(group, data, timeout=BOUND, peer_timeout=1.0)


def test_a_block_is_written_when_it_is_verified(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    verified, written = list[int](), list[int]()
    threads = set[str]()
    whole = Digest.update_if

    def update_if(digest: Digest, data: Buffer, expected: bytes) -> bool:
        found = whole(digest, data, expected)
        threads.add(threading.current_thread().name)
        verified.append(memoryview(data).nbytes)
        return found

    class Recorder(Sink):
        def write(self, data: Buffer) -> None:
            written.append(memoryview(data).nbytes)
            assert sum(written) <= sum(verified)

    monkeypatch.setattr(Digest, "update_if", update_if)
    with others(lambda: sends(fabric)) as ends, member(fabric, 1) as group:
        (got,) = cast.receive(group, Recorder(), one_session=True, threads=1)
        assert ends[0].result(BOUND).digest == got.digest
    assert sum(written) == got.size == len(DATA)
    assert threads == {"mcast.cast"}


def test_an_error_of_a_thread_reaches_the_caller(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(digest: Digest, data: Buffer, expected: bytes) -> bool:
        raise MemoryError("no memory for the digest")

    monkeypatch.setattr(Digest, "update_if", fails)
    with (
        others(lambda: sends(fabric)),
        member(fabric, 1) as group,
        closing(cast.receive(group, threads=1)) as objects,
        pytest.raises(MemoryError, match="for the digest"),
    ):
        next(objects)


def test_an_interrupt_leaves_no_thread(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the receiver waits for a digest. The caller's buffer is free then."""
    interrupted, target = threading.Event(), bytearray(DATA)

    def handler(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def waits(digest: Digest, data: Buffer, expected: bytes) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return interrupted.wait(BOUND)

    monkeypatch.setattr(Digest, "update_if", waits)
    before = signal.signal(signal.SIGINT, handler)
    try:
        with others(lambda: sends(fabric)), member(fabric, 1) as group:
            objects = cast.receive(group, target, threads=1)
            with pytest.raises(KeyboardInterrupt):
                next(objects)
            del objects
    finally:
        signal.signal(signal.SIGINT, before)
    assert interrupted.is_set()
    assert "mcast.cast" not in names()
    gc.collect()
    target += b"free"


def receiver(into: Path | None = None) -> Alone:
    """A receiver whose thread has begun to verify the object."""
    alone = Alone(into, len(OBJECT), threads=1)
    for number, block in enumerate(blocks := cut(OBJECT)):
        segments = [
            Data(SESSION, 0, number, esi, bytes(block.segment(esi))) for esi in range(block.info.segments)
        ]
        alone.on_packets(*segments)
    infos = tuple(one.info for one in blocks[::-1])
    alone.on_packets(Seal(SESSION, 0, len(blocks) - 1, 0, 2, 1, 1000, infos))
    return alone


def test_a_step_waits_for_the_thread() -> None:
    """Only where no message has arrived: the last blocks are not left to the next message or timer."""
    alone = receiver()
    digest = bytes(Digest(OBJECT))
    found = alone.on_batch(heard(Flush(SESSION, 0, 4, 4, 0, 2, 1, 1000, 1, digest, 0, 0)))
    for _ in range(9):
        if found is None:
            found = alone.on_batch(heard())
    assert found is not None
    assert (bytes(found.data or b""), found.digest) == (OBJECT, digest)
    alone.receiving.close()
    assert "mcast.cast" not in names()


def test_close_waits_for_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It uses memory of the object."""
    ends, free = list[bool](), threading.Event()

    def waits(digest: Digest, data: Buffer, expected: bytes) -> bool:
        free.wait(BOUND)
        ends.append(True)
        return True

    monkeypatch.setattr(Digest, "update_if", waits)
    alone = receiver()
    threading.Timer(0.05, free.set).start()
    alone.receiving.close()
    assert ends
    assert "mcast.cast" not in names()


def test_a_fork_closes() -> None:
    """It has no thread, so nothing may wait for one."""
    alone = receiver()
    if not (child := os.fork()):
        signal.alarm(20)
        alone.receiving.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    alone.receiving.close()


def test_impossible_numbers_are_refused(fabric: Fabric) -> None:
    with member(fabric, 1) as group, pytest.raises(ValueError, match="threads is -1: give 0 to 64"):
        next(cast.receive(group, threads=-1))


def test_a_part_file_has_what_a_thread_verifies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The sender ends its session meanwhile; a later run resumes."""
    free, whole = threading.Event(), Digest.update_if

    def waits(digest: Digest, data: Buffer, expected: bytes) -> bool:
        free.wait(BOUND)
        return whole(digest, data, expected)

    monkeypatch.setattr(Digest, "update_if", waits)
    alone = receiver(tmp_path / "copy")
    threading.Timer(0.05, free.set).start()
    alone.on_packets(Bye(SESSION, ALL_MEMBERS, ""))
    alone.receiving.close()
    assert (tmp_path / ".copy.part").read_bytes() == OBJECT


def test_a_seal_amid_a_block_is_heeded() -> None:
    """The block is compared, and dropped, at the segment that completes it, before the one behind that."""
    memory, missing = bytearray(2 * SEGMENT * K), list[int]()
    for in_c in {PLACER is not None, False}:
        alone, (block, _) = Alone(memory, len(memory), parity=2, in_c=in_c), cut(bytes(memory))
        segments = [Data(SESSION, 0, 0, esi, block.segment(esi)) for esi in (4, 5, 0, 3, 1)]
        seal = Seal(SESSION, 0, 0, 0, 2, 1, 1000, (block.info._replace(digest=bytes(32)),))
        alone.on_batch(heard(*segments[:3], seal, *segments[3:]))
        incoming = alone.receiving.sessions[SESSION].core.incoming
        assert incoming is not None
        missing += [request.missing for request in incoming.requests()]
    assert set(missing) == {0b1101}
