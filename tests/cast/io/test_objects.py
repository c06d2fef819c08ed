"""Objects between programs on simulated fabrics: what is sent arrives whole and right, or is missed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, closing, contextmanager, suppress
from io import BytesIO
from math import inf, nan
from pathlib import Path
from random import Random
from typing import Any

import pytest
from blake3 import blake3

import mcast
from mcast import Membership, TimedOut, aio, cast
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults import Delivery, Drop, Duplicate, Messages, Reorder
from mcast.backends.sim.testbed import SimObserver
from mcast.cast.io import receiving
from mcast.cast.io.driver import SessionContext
from mcast.cast.io.receiving import MAX_SESSIONS_PER_ADDRESS, ReceivingSession
from mcast.cast.io.sending import SendingSession
from mcast.cast.io.sinks import ReceiveTarget
from mcast.cast.protocol import auth, fec
from mcast.cast.protocol.auth import KeyedAuthenticator
from mcast.cast.protocol.blocks import SourceBlock
from mcast.cast.protocol.packets import (
    ALL_MEMBERS,
    MAX_K,
    Admit,
    Bye,
    Data,
    Describe,
    Flush,
    Offer,
    Packet,
    Rejected,
    Seal,
    decode,
    encode,
    number_at,
    segment_size,
)
from mcast.endpoint.waiting import Step
from tests.cast.batches import batch_of

from .alone import SESSION, Alone, heard

GROUP = "239.1.2.3"
BOUND = 60.0
"""Seconds; the longest that anything may take, never a delay."""

DATA = Random(1).randbytes(200_000)


@pytest.fixture(params=[Fabric.roce, Fabric.infiniband], ids=["roce", "infiniband"])
def fabric(request: pytest.FixtureRequest) -> Iterator[Fabric]:
    made: Fabric = request.param(5, clock="wall")
    yield made
    assert SimObserver(made).leftovers() == ()


@pytest.fixture
def roce() -> Iterator[Fabric]:
    made = Fabric.roce(5, clock="wall")
    yield made
    assert SimObserver(made).leftovers() == ()


@contextmanager
def member(fabric: Fabric, host: int) -> Iterator[Membership]:
    with (
        open_fabric(fabric, host=host) as backend,
        mcast.open_endpoint(backend, receive_depth=8192) as endpoint,
        endpoint.join(GROUP) as group,
    ):
        yield group


@asynccontextmanager
async def amember(fabric: Fabric, host: int) -> AsyncIterator[aio.Membership]:
    with open_fabric(fabric, host=host) as backend:
        async with aio.open_endpoint(backend) as endpoint, endpoint.join(GROUP) as group:
            yield group


def gets(
    fabric: Fabric,
    host: int,
    count: int,
    into: ReceiveTarget = None,
    missed: Callable[..., object] | None = None,
    key: bytes | None = None,
    threads: int = 1,
) -> list[cast.Received]:
    """A receiver on that host, which leaves after so many objects.

    It fails at one that it misses, unless `missed` takes that.
    """
    found: list[cast.Received] = []
    with (
        member(fabric, host) as group,
        closing(cast.receive(group, into, missed=missed or unwanted, key=key, threads=threads)) as objects,
    ):
        while len(found) < count:
            found.append(next(objects))
    return found


def unwanted(missed: cast.Missed) -> None:
    """An object that would be waited for in vain."""
    raise AssertionError(f"missed: {missed.reason}")


def body(one: cast.Received) -> bytes:
    """The bytes of an object that went to memory."""
    assert one.data is not None
    return bytes(one.data)


@contextmanager
def others(*calls: Callable[[], object]) -> Iterator[list[Future[Any]]]:
    """Calls in threads of their own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        yield [pool.submit(call) for call in calls]


def test_objects_arrive_despite_loss(fabric: Fabric) -> None:
    infos = (DATA, b"", bytearray(b"x" * 5000))
    with (
        fabric.rules.when(Messages(rate=0.02), Drop()),
        fabric.rules.when(Messages(rate=0.02), Duplicate(2)),
        fabric.rules.when(Messages(rate=0.02), Reorder(3)),
        others(lambda: gets(fabric, 1, 3), lambda: gets(fabric, 2, 3)) as ends,
        member(fabric, 0) as group,
        cast.open_session(group) as session,
    ):
        session.wait_for_receivers(2, BOUND)
        reports = [session.send(one, name=f"n{len(one)}", metadata=b"meta") for one in infos]
        got = [end.result(BOUND) for end in ends]
    for found in got:
        assert [(body(one), one.offered.name) for one in found] == [(one, f"n{len(one)}") for one in infos]
        assert [one.digest for one in found] == [report.digest for report in reports]
        assert [one.digest for one in found] == [blake3(one).digest() for one in infos]
        assert {one.offered.metadata for one in found} == {b"meta"}
    for report in reports:
        assert report.strategy_met
        assert [account.complete for account in report.receivers] == [True, True]


def test_pieces_fit_the_smallest_mtu() -> None:
    """On RoCE a message that is larger than the MTU of a receiver's port is lost in silence."""
    fabric = Fabric.roce(3, mtu=[4096, 1024, 4096], clock="wall")
    sizes = set[int]()

    def note(delivery: Delivery) -> None:
        sizes.add(delivery.size)

    with (
        fabric.rules.on_delivery(note),
        others(lambda: gets(fabric, 1, 1), lambda: gets(fabric, 2, 1)) as receivers,
        member(fabric, 0) as group,
    ):
        report = cast.send(group, DATA, receivers=2)
        assert all(body(one) == DATA for end in receivers for one in end.result(BOUND))
    assert report.strategy_met
    assert 900 < max(sizes) <= 1024


def test_the_same_by_awaiting(fabric: Fabric) -> None:
    async def receives(host: int) -> list[bytes]:
        found = []
        async with amember(fabric, host) as group, aclosing(cast.receive(group)) as objects:
            async for one in objects:
                found.append(body(one))
                if len(found) == 2:
                    break
        return found

    async def sends() -> list[cast.ObjectReport]:
        async with amember(fabric, 0) as group, cast.open_session(group) as session:
            await session.wait_for_receivers(2, BOUND)
            return [await session.send(DATA), await session.send(b"second")]

    async def run() -> None:
        async with asyncio.timeout(BOUND):
            reports, *got = await asyncio.gather(sends(), receives(1), receives(2))
        assert got == [[DATA, b"second"]] * 2
        assert all(report.strategy_met and len(report.receivers) == 2 for report in reports)

    with fabric.rules.when(Messages(rate=0.02), Drop()):
        asyncio.run(run())


def test_objects_go_where_the_receiver_wants(roce: Fabric, tmp_path: Path) -> None:
    buffer, path = bytearray(300_000), tmp_path / "copy"
    too_small: list[cast.Missed] = []

    def chosen(offered: cast.Offered) -> Path | None:
        if offered.size == len(DATA):
            raise OSError("no room for this one")
        return tmp_path / "chosen"

    with (
        others(
            lambda: gets(roce, 1, 2, buffer),
            lambda: gets(roce, 2, 2, path),
            lambda: gets(roce, 3, 1, chosen, lambda _: None),
            lambda: gets(roce, 4, 1, bytearray(10), too_small.append),
        ) as ends,
        member(roce, 0) as group,
        cast.open_session(group) as session,
    ):
        source = tmp_path / "source"
        source.write_bytes(DATA)
        session.wait_for_receivers(4, BOUND)
        report = session.send(source)
        session.send(b"little")
        in_buffer, in_file, in_chosen, _ = (end.result(BOUND) for end in ends)
    assert [one.size for one in in_buffer] == [len(DATA), 6]
    assert [one.path for one in in_file] == [path, path]
    assert [one.offered.number for one in in_chosen] == [1]
    assert bytes(buffer[: len(DATA)]) == b"little" + DATA[6:]
    assert path.read_bytes() == b"little"
    assert (tmp_path / "chosen").read_bytes() == b"little"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["chosen", "copy", "source"]
    assert [one.reason for one in too_small] == ["the object is larger than the 10 bytes allowed here"]
    assert not report.strategy_met
    assert {one.address: one.reason for one in report.receivers} == {
        "10.0.0.2": "",
        "10.0.0.3": "",
        "10.0.0.4": "no room for this one",
        "10.0.0.5": "the object is larger than the 10 bytes allowed here",
    }


def test_killed_and_late_receivers(fabric: Fabric) -> None:
    """The report names a killed receiver, and a late one gets the complete object."""
    begun = threading.Event()

    def is_killed() -> None:
        with member(fabric, 1) as group:

            def dies(_: cast.Offered) -> None:
                endpoint = group.endpoint
                assert isinstance(endpoint, mcast.Endpoint)
                endpoint.close()
                begun.set()

            assert list(cast.receive(group, dies)) == []

    def comes_late() -> list[cast.Received]:
        assert begun.wait(BOUND)
        return gets(fabric, 3, 1)

    with (
        others(is_killed, lambda: gets(fabric, 2, 1), comes_late) as ends,
        member(fabric, 0) as group,
    ):
        report = cast.send(group, DATA, receivers=2, timeout=BOUND, peer_timeout=2.0)
        _, got, late = (end.result(BOUND) for end in ends)
    assert [body(one) for one in (*got, *late)] == [DATA, DATA]
    accounts = {one.reason: one.complete for one in report.receivers}
    assert accounts == {"was silent": False, "": True}
    assert (report.strategy_met, len(report.receivers)) == (False, 3)


def test_forged_segment_costs_one_repair(roce: Fabric) -> None:
    """The forger has the address of the sender. No wrong byte is handed out."""
    blocks = 4
    data = Random(2).randbytes(blocks * MAX_K * segment_size(1024))
    lied = threading.Event()

    def lies() -> None:
        with member(roce, 0) as group:
            for message in group:
                try:
                    packet = decode(message.payload)
                except Rejected:
                    continue
                if isinstance(packet, Describe):
                    last = Data(packet.session, 0, blocks - 1, 0, bytes(packet.segment))
                    group.send(encode(last))
                    lied.set()
                    return

    with (
        others(lies, lambda: gets(roce, 1, 1)) as ends,
        member(roce, 0) as group,
    ):
        report = cast.send(group, data, timeout=BOUND, rate=1e6)
        ends[0].result(BOUND)
        (got,) = ends[1].result(BOUND)
    assert lied.is_set()
    assert body(got) == data
    (account,) = report.receivers
    assert account.complete
    assert account.requested, "the block with the liar's piece differs from its digest, and comes again"


def test_object_with_forged_block_is_missed(roce: Fabric) -> None:
    """The forger has the sender's address, and there is no key: seal and segments are forged."""
    lied = threading.Event()
    size = 4 * MAX_K * segment_size(1024)

    def lies() -> None:
        with member(roce, 0) as group:
            for message in group:
                try:
                    packet = decode(message.payload)
                except Rejected:
                    continue
                if isinstance(packet, Describe):
                    made = SourceBlock(bytes(packet.segment * MAX_K), packet.segment, MAX_K)
                    said: list[Packet] = [
                        Data(packet.session, 0, 3, index, made.segment(index)) for index in range(MAX_K)
                    ]
                    said.append(Seal(packet.session, 0, 3, 0, 0, 1, 1000, (made.info,)))
                    group.send_batch([encode(one) for one in said])
                    lied.set()
                    return

    missed: list[cast.Missed] = []
    with (
        others(lies, lambda: gets(roce, 1, 1, missed=missed.append)) as ends,
        member(roce, 0) as group,
        cast.open_session(group, rate=1e6) as session,
    ):
        session.wait_for_receivers(1, BOUND)
        report = session.send(Random(2).randbytes(size))
        session.send(b"the next one is right")
        ends[0].result(BOUND)
        (got,) = ends[1].result(BOUND)
    assert lied.is_set()
    reason = "a block differed from its digest 8 times"
    assert [one.reason for one in missed] == [reason]
    assert [(one.complete, one.reason) for one in report.receivers] == [(False, reason)]
    assert body(got) == b"the next one is right"


KEY = bytes(range(32))


def test_closed_group_ignores_strangers_and_replays(roce: Fabric) -> None:
    """A stranger without the key, at the sender's address, forges a block, and replays all that it hears."""
    told: list[bytes] = []
    enough = threading.Event()

    def lies() -> None:
        with member(roce, 0) as group:
            for message in group:
                if message.from_self:
                    continue
                told.append(bytes(message.payload))
                group.send(told[-1])
                made = SourceBlock(bytes(2 * 976), 976, MAX_K)
                session = int.from_bytes(told[-1][8:16])
                seal = Seal(session, 0, 0, 0, 0, 1, 1000, (made.info,))
                group.send_batch([encode(Data(session, 0, 0, 0, made.segment(0))), encode(seal)])
                if len(told) > 200:
                    enough.set()
                    return

    missed: list[cast.Missed] = []
    with (
        others(lies, lambda: gets(roce, 1, 2, missed=missed.append, key=KEY)) as ends,
        member(roce, 0) as group,
        cast.open_session(group, rate=1e6, key=KEY) as session,
    ):
        session.wait_for_receivers(1, BOUND)
        report = session.send(DATA)
        assert enough.wait(BOUND)
        last = session.send(b"last")
        ends[0].result(BOUND)
        got = ends[1].result(BOUND)
    assert [body(one) for one in got] == [DATA, b"last"]
    assert missed == []
    assert report.strategy_met
    assert last.strategy_met
    assert sum(account.requested for account in report.receivers) == 0, "no block had to come twice"
    assert got[1].refused["replayed"] > 50
    assert got[1].refused["without the key of this group"] > 100
    assert last.refused["without the key of this group"] > 100


@pytest.mark.parametrize("key", [None, KEY])
def test_what_is_said_in_order_is_taken_at_once(roce: Fabric, key: bytes | None) -> None:
    """Each message has the key, the description comes before the pieces, and nothing is asked for."""
    with (
        others(lambda: gets(roce, 1, 1, key=key)) as ends,
        member(roce, 0) as group,
        cast.open_session(group, key=key) as session,
    ):
        session.wait_for_receivers(1, BOUND)
        report = session.send(DATA)
        (got,) = ends[0].result(BOUND)
    assert body(got) == DATA
    assert (report.refused, got.refused) == ({}, {})
    assert sum(account.requested for account in report.receivers) == 0


def test_missing_or_wrong_key_is_reported(roce: Fabric, caplog: pytest.LogCaptureFixture) -> None:
    """A receiver without the key, or with another one, cannot join; both ends say why."""
    rejected = "in 239.1.2.3: rejected a message from 10.0.0.1"
    wanted = {
        f"roce1/1, 10.0.0.2, {rejected}, of a closed group: this end has no key",
        f"roce2/1, 10.0.0.3, {rejected}, without the key of this group",
    }
    over = threading.Event()

    def tries(host: int, key: bytes | None) -> None:
        with member(roce, host) as group:
            while not over.is_set():
                assert list(cast.receive(group, key=key, timeout=0.2)) == []

    with (
        others(lambda: tries(1, None), lambda: tries(2, bytes(32))) as ends,
        member(roce, 0) as group,
        cast.open_session(group, key=KEY) as session,
    ):
        try:
            while not wanted <= {record.getMessage() for record in caplog.records}:
                with pytest.raises(TimedOut, match="0 of 1 receivers"):
                    session.wait_for_receivers(1, 0.2)
        finally:
            over.set()
        for one in ends:
            one.result(BOUND)
    with member(roce, 0) as group, pytest.raises(ValueError, match="a key of 3 bytes"):
        cast.send(group, b"", key=b"abc")


def test_keyed_session_outlives_many_receivers(roce: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "MAX_MEMBERS", 2)
    with member(roce, 0) as group, cast.open_session(group, key=KEY) as session:
        for update in range(5):
            with others(lambda: gets(roce, 1, 1, key=KEY)) as ends:
                session.wait_for_receivers(1, BOUND)
                assert session.send(b"%d" % update).strategy_met
                assert [body(one) for one in ends[0].result(BOUND)] == [b"%d" % update]
            while session.receivers:  # it has left, and its word may be on its way
                with suppress(TimedOut):
                    session.wait_for_receivers(2, 0.05)


def test_several_senders_are_told_apart(roce: Fabric) -> None:
    def sends(host: int) -> cast.ObjectReport:
        with member(roce, host) as group:
            return cast.send(group, DATA[host:], name=str(host), timeout=BOUND)

    with others(lambda: sends(0), lambda: sends(1), lambda: sends(2)) as ends:
        got = gets(roce, 3, 3)
        reports = [end.result(BOUND) for end in ends]
    assert {(one.offered.name, one.offered.address) for one in got} == {
        ("0", "10.0.0.1"),
        ("1", "10.0.0.2"),
        ("2", "10.0.0.3"),
    }
    assert all(body(one) == DATA[int(one.offered.name) :] for one in got)
    assert all(report.strategy_met for report in reports)


def test_ctrl_c_tells_the_receivers_and_leaves_no_file(roce: Fabric, tmp_path: Path) -> None:
    missed: list[cast.Missed] = []

    def interrupts(_: cast.Offered) -> Path:
        os.kill(os.getpid(), signal.SIGINT)
        return tmp_path / "copy"

    def receives() -> None:
        with member(roce, 1) as group, closing(cast.receive(group, interrupts, missed=note)) as objects:
            next(objects)

    def note(one: cast.Missed) -> None:
        missed.append(one)
        raise EOFError

    with others(receives) as ends, member(roce, 0) as group:
        with pytest.raises(KeyboardInterrupt):
            cast.send(group, Random(3).randbytes(3_000_000), timeout=BOUND, rate=100_000)
        assert isinstance(ends[0].exception(BOUND), EOFError)
        with pytest.raises(TimedOut, match="0 of 1 receivers are in"):
            cast.send(group, b"again", timeout=0)  # the membership is free again
    assert [one.reason for one in missed] == ["the sender has ended the session: interrupted"]
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_in_the_middle_of_a_step_tells_the_sender(
    roce: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receiver is not given up for silence if it could still say that it leaves."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def receives() -> None:
        with member(roce, 1) as group, closing(cast.receive(group)) as objects:
            next(objects)

    monkeypatch.setattr("mcast.cast.io.receiving.ReceivingSession._store", interrupted)
    with others(receives) as ends, member(roce, 0) as group:
        report = cast.send(group, DATA, timeout=BOUND, peer_timeout=BOUND / 2)
        assert isinstance(ends[0].exception(BOUND), KeyboardInterrupt)
    assert [(one.complete, one.reason) for one in report.receivers] == [(False, "interrupted")]


@pytest.mark.parametrize("stream", [False, True], ids=["size known", "a stream"])
def test_the_last_progress_of_an_object_is_all_of_it(roce: Fabric, stream: bool) -> None:
    seen: list[cast.Progress] = []

    def refuses(_: cast.Offered) -> Path:
        raise FileExistsError

    def fails() -> None:
        with member(roce, 2) as group:
            assert [*cast.receive(group, refuses, one_session=True, missed=lambda _: None)] == []

    with (
        others(lambda: gets(roce, 1, 1), fails) as ends,
        member(roce, 0) as group,
        cast.open_session(group, progress=seen.append) as session,
    ):
        session.wait_for_receivers(2, BOUND)
        session.send(BytesIO(DATA) if stream else DATA, name="it")
        assert body(ends[0].result(BOUND)[0]) == DATA
    named = [one.done for one in seen if one.name == "it"]
    assert (named, named[-1]) == (sorted(named), len(DATA))


def test_who_waits_in_vain_learns_of_receivers_that_have_left(roce: Fabric) -> None:
    def receives() -> None:
        with member(roce, 1) as group:
            assert [*cast.receive(group, timeout=2)] == []

    with others(receives) as ends, member(roce, 0) as group, cast.open_session(group) as session:
        assert session.wait_for_receivers(1, BOUND) == 1
        with suppress(TimedOut):  # its answers make the receiver's steps
            session.wait_for_receivers(2, 4)
        ends[0].result(BOUND)
        said = "0 of 1 receivers are in the session after 0.1 s, and 1 have left it: check that"
        with pytest.raises(TimedOut, match=said):
            session.wait_for_receivers(1, 0.1)


def test_a_session_takes_one_call_at_a_time(roce: Fabric) -> None:
    begun = threading.Event()

    def begins(offered: cast.Offered) -> None:
        begun.set()

    with (
        others(lambda: gets(roce, 1, 1, begins)) as ends,
        member(roce, 0) as group,
        cast.open_session(group, rate=200_000) as session,
    ):
        session.wait_for_receivers(1, BOUND)
        with others(lambda: session.send(DATA)) as sends:
            assert begun.wait(BOUND)
            for call in (lambda: session.send(b"too"), lambda: session.wait_for_receivers(1), session.close):
                with pytest.raises(RuntimeError, match="one call at a time"):
                    call()
            assert sends[0].result(BOUND).strategy_met
        assert body(ends[0].result(BOUND)[0]) == DATA


def test_next_object_arrives_after_a_cancelled_send(roce: Fabric) -> None:
    missed: list[cast.Missed] = []

    async def run() -> tuple[cast.ObjectReport, list[bytes]]:
        begun = asyncio.Event()

        async def receives() -> list[bytes]:
            async with amember(roce, 1) as group:
                async for one in cast.receive(group, lambda _: begun.set(), missed=missed.append):
                    return [body(one)]
            return []

        async with asyncio.timeout(BOUND), amember(roce, 0) as group:
            receiving = asyncio.create_task(receives())
            async with cast.open_session(group, rate=200_000) as session:
                await session.wait_for_receivers(1, BOUND)
                sending = asyncio.create_task(session.send(Random(3).randbytes(3_000_000)))
                await begun.wait()
                with pytest.raises(RuntimeError, match="one call at a time"):
                    await session.send(b"")
                sending.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await sending
                report = await session.send(b"the next")
                return report, await receiving

    report, got = asyncio.run(run())
    assert got == [b"the next"]
    assert report.strategy_met
    assert len(missed) == 1


def test_cancelled_receiver_notifies_the_sender(roce: Fabric, tmp_path: Path) -> None:
    """It leaves no file."""

    async def run() -> cast.ObjectReport:
        begun = asyncio.Event()

        def begins(_: cast.Offered) -> Path:
            begun.set()
            return tmp_path / "copy"

        async def receives() -> None:
            async with amember(roce, 1) as group:
                async for _ in cast.receive(group, begins):
                    pass

        async def sends() -> cast.ObjectReport:
            async with amember(roce, 0) as group:
                return await cast.send(group, Random(3).randbytes(3_000_000), rate=100_000)

        async with asyncio.timeout(BOUND):
            task, report = asyncio.create_task(receives()), asyncio.create_task(sends())
            await begun.wait()
            task.cancel()
            return await report

    report = asyncio.run(run())
    assert [(one.complete, one.reason) for one in report.receivers] == [(False, "interrupted")]
    assert not report.strategy_met
    assert list(tmp_path.iterdir()) == []


def test_too_few_receivers_are_notified(roce: Fabric) -> None:
    def hears_the_end() -> Bye:
        with member(roce, 1) as group:
            for message in group:
                packet = decode(message.payload)
                if isinstance(packet, Bye):
                    return packet
        raise AssertionError("the group was left before")

    with others(hears_the_end) as ends, member(roce, 0) as group:
        group.ready(timeout=BOUND)
        with pytest.raises(TimedOut, match="0 of 2 receivers are in"):
            cast.send(group, b"", receivers=2, timeout=0)
        assert ends[0].result(BOUND).member == ALL_MEMBERS

    async def awaits() -> None:
        async with amember(roce, 0) as group:
            with pytest.raises(TimedOut, match="0 of 2 receivers are in"):
                await cast.send(group, b"", receivers=2, timeout=0)

    asyncio.run(awaits())


def test_a_membership_has_one_end_at_a_time(roce: Fabric) -> None:
    with (
        member(roce, 0) as group,
        cast.open_session(group),
        pytest.raises(RuntimeError, match=r"^cast\.receive: .* is sending or receiving objects already"),
    ):
        next(cast.receive(group, timeout=0))

    async def awaits() -> None:
        async with amember(roce, 0) as group, cast.open_session(group):
            with pytest.raises(RuntimeError, match=r"^cast\.receive: .* objects already"):
                await anext(cast.receive(group, timeout=0))

    asyncio.run(awaits())
    with (
        open_fabric(roce, host=1) as backend,
        mcast.open_endpoint(backend) as endpoint,
        endpoint.sender(GROUP) as sender,
        pytest.raises(TypeError, match=r"use Endpoint\.join"),
    ):
        cast.send(sender, b"")  # type: ignore[call-overload]


def test_sessions_per_address_are_limited() -> None:
    """Invitations from one address leave room for those from others."""
    context = SessionContext(number_at("10.0.0.9", 1), "me", 1024, lambda: 1.0, "mine")
    receiving = ReceivingSession(context, None, None, 1000, 1000, 10.0, None, None)
    steps = receiving.next(None)
    next(steps)
    liar = [Offer(number_at("10.0.0.2", salt), 0, 1, 1, 1000, 0, "liar") for salt in range(1, 50)]
    honest = Offer(number_at("10.0.0.3", 1), 0, 1, 1, 1000, 0, "honest")
    steps.send(batch_of(*((encode(one), "10.0.0.2") for one in liar), (encode(honest), "10.0.0.3")))
    assert receiving.rejected == {
        "an invitation to one session too many": len(liar) - MAX_SESSIONS_PER_ADDRESS
    }
    assert len(receiving.sessions) == MAX_SESSIONS_PER_ADDRESS + 1
    assert honest.session in receiving.sessions
    nonces = {one.core.config.nonce for one in receiving.sessions.values()}
    assert len(nonces) == MAX_SESSIONS_PER_ADDRESS + 1, "each session has its own"
    assert len({SendingSession(context, 1000, 1.0, 1.0, None).core.nonce for _ in range(3)}) == 3


def _alone(now: Callable[[], float]) -> SessionContext:
    return SessionContext(number_at("10.0.0.9", 1), "me", 1024, now, "mine")


def test_a_session_that_has_said_all_waits_for_nobody() -> None:
    time = 0.0
    sending = SendingSession(_alone(lambda: time), 1000, 1e9, 10.0, None)
    steps = sending.close("")
    step: Step | None = next(steps)
    while step is not None:
        assert step.until is not None
        assert step.until < inf
        time = max(time, step.until)
        try:
            step = steps.send(heard())
        except StopIteration:
            step = None
    assert sending.core.finished


def _offer(salt: int) -> Offer:
    return Offer(number_at("10.0.0.3", salt), 0, 1, 1, 1000, 0, "sender")


def test_the_log_says_who_has_missed_an_object(caplog: pytest.LogCaptureFixture) -> None:
    """A program may have several endpoints and groups."""
    alone = Alone(None, 900)
    alone.on_packets(Bye(SESSION, ALL_MEMBERS, ""))
    assert caplog.messages == [
        "mine: the object 'thing' from 10.0.0.3 was missed: the sender has ended the session"
    ]


@pytest.mark.parametrize("chosen", [False, True])
def test_one_buffer_takes_one_object_at_a_time(chosen: bool, caplog: pytest.LogCaptureFixture) -> None:
    other, buffer = number_at("10.0.0.3", 2), bytearray(900)
    alone = Alone((lambda _: buffer) if chosen else buffer, 900)
    alone.on_packets(Offer(other, 0, 1, 1, 1000, 0, "other"))
    who = alone.receiving.sessions[other].core.config
    alone.on_packets(
        Admit(other, {who.number: (0, who.nonce)}),
        Describe(other, 0, 900, 976, 4, 0, 0, 0, "second", b""),
    )
    assert caplog.messages == [
        "mine: the object 'second' from 10.0.0.3 was missed: "
        "another object is being received into the same buffer"
    ]


def test_past_sessions_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A repeated invitation opens no ended session again. Beyond the limit the oldest is forgotten."""
    monkeypatch.setattr(receiving, "MAX_PAST_SESSIONS", 2)
    alone = Alone(None, 900)
    ended = [number_at("10.0.0.3", salt) for salt in range(2, 5)]
    for session in ended:
        alone.on_packets(Offer(session, 0, 1, 1, 1000, 0, "other"), Bye(session, ALL_MEMBERS, ""))
    alone.on_packets(*(Offer(session, 0, 1, 1, 1000, 0, "other") for session in ended))
    assert [session in alone.receiving.sessions for session in ended] == [True, False, False]


def test_a_host_pushes_out_its_own_past_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a stranger that ends sessions without number makes objects of others come twice."""
    monkeypatch.setattr(receiving, "MAX_PAST_SESSIONS", 4)
    alone = Alone(None, 900)
    other, many = number_at("10.0.0.3", 2), [number_at("10.0.0.4", salt) for salt in range(20)]
    alone.on_packets(Offer(other, 0, 1, 1, 1000, 0, "one"), Bye(other, ALL_MEMBERS, ""))
    for session in many:
        alone.on_packets(
            Offer(session, 0, 1, 1, 1000, 0, "one"), Bye(session, ALL_MEMBERS, ""), address="10.0.0.4"
        )
    assert [session for session, _ in alone.receiving._past] == [other, *many[-3:]]
    alone.on_packets(Offer(other, 0, 1, 1, 1000, 0, "one"))
    assert other not in alone.receiving.sessions


def test_past_session_is_known_by_its_nonce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A silent sender continues with what is remembered. Beyond the limit the oldest is forgotten."""
    monkeypatch.setattr(receiving, "MAX_PAST_SESSIONS", 2)
    time = 0.0
    end = ReceivingSession(
        _alone(lambda: time), None, lambda _: None, 1000, 1000, 10.0, bytes(range(32)), None
    )
    steps = end.next(None)
    next(steps)
    authenticator = KeyedAuthenticator(bytes(range(32)))
    offers = [_offer(salt)._replace(nonce=salt) for salt in range(1, 4)]

    def says(*packet: Offer) -> list[Any]:
        nonlocal time
        for one in packet:
            authenticator.begin(one.session, one.nonce)
            (message,) = map(bytes, authenticator.sign([encode(one)]))
            steps.send(batch_of((message, "10.0.0.3")))
        cores = [end.sessions[one.session].core for one in packet]
        time += 11.0
        steps.send(batch_of())
        assert not end.sessions
        return cores

    first = [says(one)[0] for one in offers]
    assert [session for session, _ in end._past] == [one.session for one in offers[1:]]
    assert end._authenticator._suspended.keys() == end._past.keys()  # type: ignore[attr-defined]
    nonce = first[2].config.nonce
    assert says(offers[2]) == [first[2]]
    assert first[2].config.nonce != nonce, "an admission of before the silence admits nobody"
    assert says(offers[0]) != [first[0]]
    assert says(offers[2]._replace(nonce=99)) != [first[2]]


def test_without_parity_the_report_says_so(roce: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    with member(roce, 0) as group:
        assert cast.send(group, DATA, receivers=0).parity
        monkeypatch.setattr(fec, "available", lambda: False)
        assert not cast.send(group, DATA, receivers=0).parity


def test_what_a_session_cannot_do_is_refused_in_words(roce: Fabric) -> None:
    with member(roce, 0) as group:
        with pytest.raises(ValueError, match=r"^rate is 0: give bytes per second, more than 0"):
            cast.open_session(group, rate=0)
        session = cast.open_session(group)
        session.close()
        with pytest.raises(ValueError, match=r"^this session is closed: open another one$"):
            session.send(b"")


@pytest.mark.parametrize(
    "call",
    [
        lambda group: cast.send(group, b"", receivers=0, timeout=nan),
        lambda group: cast.send(group, b"", receivers=0, peer_timeout=nan),
        lambda _: next(Alone(None, 900).receiving.next(timeout=nan)),
        lambda group: next(cast.receive(group, timeout=0.0, peer_timeout=nan), None),
    ],
)
def test_a_time_that_no_clock_reaches_is_refused(roce: Fabric, call: Callable[[Membership], object]) -> None:
    with member(roce, 0) as group, pytest.raises(ValueError, match="is nan: give a number of seconds"):
        call(group)


def test_pieces_that_no_message_brings_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Else a block of such pieces is paid for, for one byte that comes of it."""
    alone = Alone(None, 900)
    alone.on_packets(Describe(SESSION, 1, 900, 993, 4, 0, 0, 0, "long", b""))
    assert caplog.messages[-1] == (
        "mine: the object 'long' from 10.0.0.3 was missed: "
        "segments of 993 bytes: this receiver's maximum is 992"
    )
    assert alone.receiving.sessions[SESSION].delivery is None


def test_stop_is_noticed_at_a_low_rate() -> None:
    time = 0.0
    sending = SendingSession(_alone(lambda: time), 1000, 10.0, 10.0, None)
    steps = sending.send(bytes(10_000), cast.carousel(), "", b"")
    step = next(steps)
    for _ in range(20):
        assert step.until is not None
        assert step.until <= time + 0.1
        time += 0.1
        step = steps.send(heard())
    sending.stop()
    with pytest.raises(StopIteration):
        steps.send(heard())


def test_stalled_sender_is_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However often the program asks for the next object: otherwise the sender would stay for ever."""
    alone = Alone(None, 900)
    for _ in range(60):
        assert not caplog.messages
        alone.pauses(100.0)
        alone.now += 1.0
        alone.on_packets(Offer(SESSION, 0, 1, 1, 1000, 0, "sender"))
    assert caplog.messages == [
        "mine: the object 'thing' from 10.0.0.3 was missed: "
        "no segment arrived, only shorter messages, for 60 s"
    ]


def test_time_between_calls_is_no_silence() -> None:
    """Time in which a receiver does not receive does not count for the peer timeout."""
    time = 0.0
    receiving = ReceivingSession(_alone(lambda: time), None, None, 1000, 1000, 10.0, None, None)
    steps = receiving.next(0.1)
    next(steps)
    offer = _offer(1)
    steps.send(heard(offer))
    time = 100.0
    next(receiving.next(0.1))
    assert list(receiving.sessions) == [offer.session]
    time = 111.0
    next(receiving._step(inf))
    assert not receiving.sessions


def test_one_session_ends_when_its_sender_is_silent() -> None:
    time = 1.0
    receiving = ReceivingSession(
        _alone(lambda: time), None, lambda _: None, 1000, 1000, 10.0, None, None, one_session=True
    )
    steps = receiving.next(None)
    next(steps)
    steps.send(heard(_offer(1)))
    session = _offer(1).session
    who = receiving.sessions[session].core.config
    steps.send(
        heard(
            Admit(session, {who.number: (0, who.nonce)}),
            Describe(session, 0, 5000, 976, 1, 0, 0, 0, "first", b""),
        )
    )
    time = 12.0
    with pytest.raises(StopIteration) as ended:
        steps.send(heard())
    assert ended.value.value is None


def test_empty_object_with_wrong_digest_is_missed() -> None:
    """It delays nobody, although nothing else arrives from its sender, not even a BYE."""
    time = 1.0
    missed: list[cast.Missed] = []
    receiving = ReceivingSession(
        _alone(lambda: time), None, missed.append, 1000, 1000, 10.0, None, None, one_session=True
    )
    steps = receiving.next(None)
    next(steps)
    steps.send(heard(_offer(1)))
    session = _offer(1).session
    who = receiving.sessions[session].core.config
    said: list[Packet] = [
        Admit(session, {who.number: (0, who.nonce)}),
        Describe(session, 0, 0, 992, 1, 0, 0, 0, "empty", b""),
        Flush(session, 0, 0, 0, 0, 0, 1, 1000, 1, bytes(32), 0, 0),
    ]
    steps.send(heard(*said))
    assert [one.reason for one in missed] == ["the object differs from its digest"]
    time = 12.0
    with pytest.raises(StopIteration) as ended:
        steps.send(heard())
    assert ended.value.value is None


def test_next_object_waits_for_the_program() -> None:
    """Both objects may have the same buffer."""

    time = 1.0
    receiving = ReceivingSession(_alone(lambda: time), None, None, 1000, 1000, 10.0, None, None)
    steps = receiving.next(None)
    next(steps)
    steps.send(heard(_offer(1)))
    one = receiving.sessions[_offer(1).session]
    found = cast.Received(
        one.offered(Describe(1, 0, 0, 1000, 1, 0, 0, 0, "first", b"")), 0, b"", None, None, {}
    )
    one.complete.append(found)
    one.core._answer_timers.ack = 2.0
    steps.send(heard())
    steps.send(heard(_offer(2)))
    time = 3.0
    steps.send(heard())
    with pytest.raises(StopIteration) as ended:
        steps.send(heard())
    assert ended.value.value is found
    assert list(receiving.sessions) == [_offer(1).session]
    steps = receiving.next(None)
    assert next(steps).until == time
    steps.send(heard())
    assert list(receiving.sessions) == [_offer(1).session, _offer(2).session]
