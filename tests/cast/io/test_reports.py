"""Reports of a sender, names of calls in errors, and receivers that join between two objects."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from blake3 import blake3

import mcast
from mcast import aio, cast
from mcast.api import TimedOut
from mcast.backends.sim import Fabric, open_fabric

GROUP = "239.1.1.1"
BOUND = 60.0
"""Seconds; the longest that anything may take, never a delay."""
DATA = bytes(range(256)) * 40_000


@pytest.fixture
def roce() -> Fabric:
    return Fabric.roce(ports=4, mtu=4096, clock="wall")


def receiver(roce: Fabric, host: int, offers: list[cast.Offered], **options: object) -> list[cast.Missed]:
    """Take all that one sender sends; what was offered and missed."""
    missed: list[cast.Missed] = []

    def into(offered: cast.Offered) -> None:
        offers.append(offered)

    with (
        open_fabric(roce, host=host) as backend,
        mcast.open_endpoint(backend) as endpoint,
        endpoint.join(GROUP) as group,
    ):
        for _ in cast.receive(group, into, missed=missed.append, one_session=True, **options):  # type: ignore[call-overload]
            pass
    return missed


def stream() -> Iterator[bytes]:
    for at in range(0, len(DATA), 1 << 16):
        yield DATA[at : at + (1 << 16)]


@pytest.mark.parametrize("of", [lambda: DATA, stream], ids=["bytes", "stream"])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_a_report_says_what_receivers_were_told(roce: Fabric, of: Callable[[], bytes], cut: bool) -> None:
    """And, beside it, how much was offered, which is less where a deadline cut the object short."""
    offers: list[cast.Offered] = []
    rate = 4e6 if cut else float("inf")
    with (
        ThreadPoolExecutor(1) as pool,
        open_fabric(roce, host=0) as backend,
        mcast.open_endpoint(backend) as endpoint,
        endpoint.join(GROUP) as group,
        cast.open_session(group, memory=1 << 20, rate=rate) as session,
    ):
        done = pool.submit(receiver, roce, 1, offers)
        session.wait_for_receivers(1, BOUND)
        report = session.send(of(), strategy=cast.deadline(0.2 if cut else BOUND))
        session.close()
        missed = done.result(BOUND)
    (offered,) = offers
    assert len(missed) == cut
    assert offered.size == (len(DATA) if of() is DATA else None)
    if cut:
        assert 0 < report.offered < len(DATA)
        assert (report.size, report.digest) == (offered.size, None)
    else:
        assert (report.size, report.offered) == (len(DATA), len(DATA))
        assert report.digest == blake3(DATA).digest()


def test_errors_name_the_call_that_was_made(roce: Fabric) -> None:
    """`wait_for_receivers` of a session, `send`, and what finds the membership taken."""
    with (
        open_fabric(roce, host=0) as backend,
        mcast.open_endpoint(backend) as endpoint,
        endpoint.join(GROUP) as group,
    ):
        with cast.open_session(group) as session:
            with pytest.raises(TimedOut, match=r"^session\.wait_for_receivers"):
                session.wait_for_receivers(1, timeout=0.01)
            with pytest.raises(ValueError, match=r"^session\.wait_for_receivers: give the number"):
                session.wait_for_receivers()
            with pytest.raises(RuntimeError, match=r"^cast\.open_session"):
                cast.open_session(group)
            with pytest.raises(RuntimeError, match=r"^cast\.send"):
                cast.send(group, b"")
        with pytest.raises(TimedOut, match=r"^cast\.send"):
            cast.send(group, b"", timeout=0.01)


def test_gather_lets_in_those_who_come_meanwhile(roce: Fabric) -> None:
    """It returns how many there are, also if nobody came. A receiver has the name that it gives itself."""
    with (
        ThreadPoolExecutor(2) as pool,
        open_fabric(roce, host=0) as backend,
        mcast.open_endpoint(backend) as endpoint,
        endpoint.join(GROUP) as group,
        cast.open_session(group) as session,
    ):
        assert session.wait_for_receivers(timeout=0.01) == 0
        ends = [pool.submit(receiver, roce, host, [], name=f"replica {host}") for host in (1, 2)]
        while session.wait_for_receivers(timeout=0.05) < 2:
            assert not any(end.done() for end in ends)
        assert session.wait_for_receivers(2) == 2
        report = session.send(b"update")
        session.close()
        assert [end.result(BOUND) for end in ends] == [[], []]
    assert sorted(one.name for one in report.receivers) == ["replica 1", "replica 2"]


@pytest.mark.parametrize("name", ["", "x" * 65])
def test_a_name_that_cannot_be_is_refused(roce: Fabric, name: str) -> None:
    with pytest.raises(ValueError, match="a receiver's name has 1 to 64 bytes"):
        receiver(roce, 1, [], name=name)


def test_gather_without_a_number_can_be_awaited(roce: Fabric) -> None:
    async def main() -> int:
        async with (
            aio.open_endpoint(backend) as endpoint,
            endpoint.join(GROUP) as group,
            cast.open_session(group) as session,
        ):
            return await session.wait_for_receivers(timeout=0.01)

    with open_fabric(roce, host=0) as backend:
        assert asyncio.run(main()) == 0


class Slow:
    """A place that takes a block in 0.5 s, as a disk or a busy program does."""

    def write(self, block: bytes) -> None:
        threading.Event().wait(0.5)


@pytest.mark.parametrize("promise", ["deadline", "quorum"])
def test_a_slow_program_holds_nobody_up(roce: Fabric, promise: str) -> None:
    """Alone it would take 10 s and more, and the sender keeps no more than a part of the object for it."""
    strategy = cast.deadline(8.0) if promise == "deadline" else cast.quorum(1)
    missed: list[cast.Missed] = []

    def slow() -> None:
        with (
            open_fabric(roce, host=2) as backend,
            mcast.open_endpoint(backend) as endpoint,
            endpoint.join(GROUP) as group,
        ):
            for _ in cast.receive(
                group, Slow(), missed=missed.append, one_session=True, name="slow", peer_timeout=2.0
            ):
                pass

    with (
        ThreadPoolExecutor(2) as pool,
        open_fabric(roce, host=0) as backend,
        mcast.open_endpoint(backend) as endpoint,
        endpoint.join(GROUP) as group,
        cast.open_session(group, memory=300_000) as session,
    ):
        fast, late = pool.submit(receiver, roce, 1, [], name="fast"), pool.submit(slow)
        session.wait_for_receivers(2, BOUND)
        report = session.send(DATA, strategy=strategy)
        session.close()
        fast.result(BOUND)
        late.result(BOUND)
    found = {one.name: (one.complete, one.reason) for one in report.receivers}
    assert found["fast"] == (True, "")
    assert not found["slow"][0]
    assert found["slow"][1].startswith(f"left behind: this receiver is too slow for the {promise}") or (
        promise == "quorum"  # the fast one had it before the slow one had held it up for long
    )
    (lacked,) = missed
    assert lacked.reason.startswith(("left behind", "the sender")), lacked.reason  # has ended, or was silent
