"""An object that a program iterates over while it arrives: verified bytes, in order, few of them waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from random import Random

import pytest

from mcast import cast
from mcast.backends.sim import Fabric
from mcast.backends.sim.testbed import SimObserver
from mcast.cast.protocol.blocks import Digest, SourceBlock
from mcast.cast.protocol.packets import Data, Flush, Offer, Seal

from .alone import SEGMENT, SESSION, Alone, K, cut
from .test_objects import BOUND, amember, member, others

SIZE = SEGMENT * K
DATA = Random(6).randbytes(1_000_000)


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    made = Fabric.roce(2, clock="wall")
    yield made
    assert SimObserver(made).leftovers() == ()


def send_block(alone: Alone, data: bytes, number: int, right: bool = True, carousel: bool = True) -> None:
    """Pass a block; its digest is that of all bytes up to its end, unless the object is a carousel."""
    block = SourceBlock(data[number * SIZE : (number + 1) * SIZE], SEGMENT, K)
    if not carousel:
        block = cut(data)[number]
    for index in range(block.info.segments):
        segment = bytes(block.segment(index))
        alone.on_packets(Data(SESSION, 0, number, index, segment if right else segment[::-1]))
    alone.on_packets(Seal(SESSION, 0, number, 0, 0, 1, 1000, (block.info,)))


def test_early_block_is_verified_in_order() -> None:
    """The digest of a block covers all blocks before it, so an early block waits."""
    data, into = DATA[: 3 * SIZE], bytearray(3 * SIZE)
    alone = Alone(into, len(data))
    send_block(alone, data, 2, carousel=False)
    send_block(alone, data, 1)  # what its seal says is right of the block alone, and not of the object
    assert alone.blocks == 0
    send_block(alone, data, 0, carousel=False)
    assert alone.blocks == 1
    assert alone.receiving.sessions[SESSION].core.rejected == {"a block that differs from its digest": 1}


def test_only_verified_chunks_are_yielded() -> None:
    """A block that differs is not yielded, and the number of waiting bytes is limited."""
    data, chunks = DATA[: 4 * SIZE], cast.Chunks(ahead=SIZE + 1)
    alone = Alone(chunks, len(data), carousel=True)
    send_block(alone, data, 0, right=False)
    send_block(alone, data, 1)
    assert alone.blocks == 0
    for number in (0, 2, 3):
        send_block(alone, data, number)
    assert alone.blocks == 2, "the others wait for the program"
    assert [next(chunks), next(chunks)] == [data[:SIZE], data[SIZE : 2 * SIZE]]
    alone.on_packets()
    assert alone.blocks == 4
    digest = bytes(Digest(data))
    with pytest.raises(StopIteration) as done:
        alone.on_packets(Flush(SESSION, 0, 4, 4, 0, 1, 1, 1000, 1, digest, 0, 0))
    assert done.value.value.digest == digest
    assert b"".join(chunks) == data[2 * SIZE :]
    assert list(chunks) == []


def test_early_close_abandons_the_object(caplog: pytest.LogCaptureFixture) -> None:
    chunks = cast.Chunks(ahead=0)
    alone = Alone(chunks, 3 * SIZE)
    for number in (0, 1):
        send_block(alone, DATA, number, carousel=False)
    assert alone.blocks == 1
    assert next(chunks) == DATA[:SIZE]
    assert not caplog.records
    chunks.close()
    alone.on_packets()
    assert [one.message.rpartition(": ")[2] for one in caplog.records] == [
        "the program has stopped before the end"
    ]
    with pytest.raises(EOFError):
        next(chunks)


def test_program_that_consumes_nothing_misses_object(caplog: pytest.LogCaptureFixture) -> None:
    """A program that consumes nothing for a minute misses the object, with this reason."""
    alone = Alone(cast.Chunks(ahead=1), 3 * SIZE)
    for number in (0, 1):
        send_block(alone, DATA, number, carousel=False)
    for _ in range(60):
        assert not caplog.records
        alone.now += 1.0
        alone.on_packets(Offer(SESSION, 0, 1, 1, 1000, 0, "sender"))
    assert [one.message.rpartition(": ")[2] for one in caplog.records] == [
        "the program or disk here took nothing for 60 s"
    ]


def test_several_tasks_share_the_parts() -> None:
    async def run() -> None:
        chunks = cast.Chunks()
        async with asyncio.timeout(BOUND):
            waiting = [asyncio.ensure_future(anext(chunks)) for _ in range(4)]
            await asyncio.sleep(0)
            chunks.write(b"a")
            chunks.write(b"b")
            chunks.close()
            found = set(await asyncio.gather(*waiting, return_exceptions=True))
        assert found >= {b"a", b"b"}
        assert sum(isinstance(one, EOFError) for one in found) == 2

    asyncio.run(run())


def test_closed_event_loop_does_not_stop_the_sink() -> None:
    """The event loop of a waiting iterator has been closed."""
    chunks = cast.Chunks()
    asking = chunks.__anext__()

    async def begins() -> None:
        asking.send(None)

    asyncio.run(begins())
    chunks.write(b"a")
    asking.close()
    assert next(chunks) == b"a"


def test_a_task_takes_what_another_receives(fabric: Fabric) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for at in range(0, len(DATA), 70_000):
            yield DATA[at : at + 70_000]

    async def receives(chunks: cast.Chunks) -> list[cast.Received]:
        async with amember(fabric, 1) as group:
            with closing(chunks):
                return [one async for one in cast.receive(group, chunks, one_session=True)]

    async def run() -> None:
        chunks = cast.Chunks(ahead=1)
        async with asyncio.timeout(BOUND), amember(fabric, 0) as group, asyncio.TaskGroup() as tasks:
            receiving = tasks.create_task(receives(chunks))
            sending = tasks.create_task(cast.send(group, parts()))
            found = [chunk async for chunk in chunks]
            (one,) = await receiving
            assert (await sending).strategy_met
        assert len(found) > 1
        assert b"".join(found) == DATA
        assert (one.size, one.data, one.offered.size) == (len(DATA), None, None)

    asyncio.run(run())


def test_a_thread_is_told_that_the_rest_does_not_come(fabric: Fabric) -> None:
    chunks = cast.Chunks()
    missed: list[cast.Missed] = []

    def receives() -> list[cast.Received]:
        with member(fabric, 1) as group, closing(chunks):
            return list(cast.receive(group, chunks, one_session=True, missed=missed.append))

    def cut() -> Iterator[bytes]:
        yield DATA[:600_000]
        raise EOFError("the tape is torn")

    found = bytearray()

    def takes() -> None:
        for chunk in chunks:
            found.extend(chunk)

    with others(receives, takes) as ends, member(fabric, 0) as group:
        with pytest.raises(EOFError, match="the tape is torn"):
            cast.send(group, cut(), timeout=BOUND)
        assert ends[0].result(BOUND) == []
        with pytest.raises(EOFError, match="the object is incomplete"):
            ends[1].result(BOUND)
    assert len(missed) == 1
    assert DATA.startswith(found)


def test_where_no_object_comes_the_iteration_ends(fabric: Fabric) -> None:
    chunks = cast.Chunks()
    with member(fabric, 1) as group, closing(chunks):
        assert list(cast.receive(group, chunks, timeout=0)) == []
    for _ in range(2):
        with pytest.raises(EOFError):
            next(chunks)
    with pytest.raises(OSError, match="one object only"):
        chunks.open()
