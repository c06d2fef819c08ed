"""`ready`: the sizes of messages that reach the members, and what it leaves to those that only send."""

from __future__ import annotations

import asyncio
import logging
import select
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from mcast import Endpoint, Membership, Peer, aio, open_endpoint
from mcast.api import Backend, Batch, Closed, QpState
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.backend import SimQueuePair
from mcast.backends.sim.faults import Delivery, Drop
from mcast.backends.sim.testbed import SimObserver
from mcast.endpoint.blocking import POLL_INTERVAL_CALLS, PROBE_POLL_INTERVAL
from mcast.wire.probe import LONG_SIZES

from ..networks import KINDS, UDP, network_of
from ..waiting import until

GROUP = "239.1.2.3"
BOUND = 30.0
"""Seconds; the longest that anything may take, never a delay."""
END = b"end"


@pytest.fixture(params=[*KINDS, UDP])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Of each kind of network, simulated, and of cards made of memory."""
    network = network_of(request, clock="wall")
    with network.open() as opened:
        yield opened
    assert network.leftovers() == ()
    network.close()


@contextmanager
def answering(asker: Endpoint, *members: Membership) -> Iterator[list[list[bytes]]]:
    """Inside the `with` the members receive, each in a thread; the lists are what they have received."""
    heard: list[list[bytes]] = [[] for _ in members]

    def receive(member: Membership, into: list[bytes]) -> None:
        while (message := member.recv(BOUND)) is not None and message.payload != END:
            into.append(bytes(message.payload))

    with ThreadPoolExecutor() as pool:
        receiving = [pool.submit(receive, *one) for one in zip(members, heard, strict=True)]
        try:
            yield heard
        finally:
            with open_endpoint(asker.backend, str(asker.address)) as last:
                last.sender(GROUP).send(END)
            for one in receiving:
                one.result(BOUND)


def by_qp(sizes: dict[Peer, int]) -> dict[int, int]:
    return {peer.qp_num: size for peer, size in sizes.items()}


@pytest.mark.parametrize("send_only", [False, True], ids=["member", "sender"])
@pytest.mark.parametrize("options", [{}, {"sequence": True}], ids=["plain", "numbered"])
def test_a_full_message_passes(
    backend: Backend, options: dict[str, Any], send_only: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with open_endpoint(backend, "10.0.0.1", **options) as one, open_endpoint(backend, "10.0.0.2") as other:
        group = one.sender(GROUP) if send_only else one.join(GROUP)
        with answering(other, other.join(GROUP)) as heard:
            sizes = group.ready(timeout=BOUND)
        assert by_qp(sizes) == {other.qp_num: group.max_message_size}
        assert heard == [[]]
        assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_a_switch_may_carry_less(make: Callable[..., Fabric], caplog: pytest.LogCaptureFixture) -> None:
    """Each member has the largest size that passed to it, and a warning names those that get less."""
    fabric = make(clock="wall", mtu=4096)

    def carries(delivery: Delivery) -> Drop | None:
        return Drop() if delivery.target == fabric.ports[2].name and delivery.size > 1024 else None

    with (
        open_fabric(fabric) as backend,
        open_endpoint(backend, "10.0.0.1") as one,
        open_endpoint(backend, "10.0.0.2") as full,
        open_endpoint(backend, "10.0.0.3") as less,
        fabric.rules.on_delivery(carries),
    ):
        group = one.join(GROUP)
        with answering(full, full.join(GROUP), less.join(GROUP)) as heard:
            sizes = group.ready(members=2, timeout=BOUND)
            assert by_qp(sizes) == {full.qp_num: 4096, less.qp_num: 1024}
            group.send(bytes(1024))
        assert heard == [[bytes(1024)]] * 2
        (warning,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        assert f"QP {less.qp_num} takes 1024" in warning


def test_a_port_may_take_less(caplog: pytest.LogCaptureFixture) -> None:
    """A receiver's port with a smaller MTU says so, and nothing larger is sent to find out."""
    fabric = Fabric.roce(clock="wall", ports=2, mtu=[4096, 1024])
    with (
        open_fabric(fabric) as backend,
        open_endpoint(backend, "10.0.0.1") as one,
        open_endpoint(backend, "10.0.0.2") as other,
    ):
        group = one.sender(GROUP)
        with answering(other, other.join(GROUP)):
            assert by_qp(group.ready(timeout=BOUND)) == {other.qp_num: 1024}
        assert other.stats().dropped["larger than the MTU"] == 0
    assert "may have 4096 bytes, and not all members get such messages" in caplog.text


def test_small_receives_are_left_whole(caplog: pytest.LogCaptureFixture) -> None:
    """A probe that is larger than a member's receives could put its queue pair into ERR: none is sent."""
    with (
        open_fabric(Fabric.infiniband(clock="wall")) as backend,
        open_endpoint(backend, "10.0.0.1") as one,
        open_endpoint(backend, "10.0.0.2", max_message=100) as other,
    ):
        group = one.join(GROUP)
        with answering(one, other.join(GROUP)):
            assert by_qp(group.ready(timeout=BOUND)) == {other.qp_num: 100}
        assert other._core.resources.qp.state is QpState.RTS
        assert other.stats().dropped["larger than a receive"] == 0
    assert "takes 100" in caplog.text


@pytest.mark.parametrize(("limit", "known"), [(20, 20), (61, 61), (256, 256), (1000, 512), (1024, 1024)])
def test_a_limit_of_all_is_no_fault(limit: int, known: int, caplog: pytest.LogCaptureFixture) -> None:
    """Where all members have a smaller `max_message`, no probe is larger, and nothing is wrong."""
    with (
        open_fabric(Fabric.roce(clock="wall", mtu=4096)) as backend,
        open_endpoint(backend, "10.0.0.1", max_message=limit) as one,
        open_endpoint(backend, "10.0.0.2", max_message=limit) as other,
    ):
        group = one.join(GROUP)
        with answering(other, other.join(GROUP)):
            assert by_qp(group.ready(timeout=BOUND)) == {other.qp_num: known}
        assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


def test_messages_as_long_as_probes_are_delivered(backend: Backend) -> None:
    with open_endpoint(backend, "10.0.0.1") as one, open_endpoint(backend, "10.0.0.2") as other:
        out, group = one.sender(GROUP), other.join(GROUP)
        sent = [bytes(size) for size in LONG_SIZES if size <= out.max_message_size]
        out.send_batch(sent)
        with group.recv_batch(timeout=BOUND) as batch:
            heard = [bytes(message.payload) for message in batch]
        while len(heard) < len(sent):
            message = group.recv(BOUND)
            assert message is not None
            heard.append(bytes(message.payload))
        assert heard == sent


def test_an_answer_that_is_cut_short_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    """A member that answers once, and then does nothing, is there, and its size is not known."""
    fabric = Fabric.roce(clock="wall", mtu=4096)
    with (
        open_fabric(fabric) as backend,
        open_endpoint(backend, "10.0.0.1") as one,
        open_endpoint(backend, "10.0.0.2") as other,
        fabric.rules.on_delivery(lambda delivery: Drop() if delivery.size in LONG_SIZES else None),
    ):
        group = one.join(GROUP)
        with answering(other, other.join(GROUP)):
            assert by_qp(group.ready(timeout=BOUND)) == {other.qp_num: 256}
        assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


# --- members that only send ----------------------------------------------------------------------------


@contextmanager
def sending(member: Membership, pause: float) -> Iterator[None]:
    """Inside the `with` a thread sends to the group, and never receives."""
    ends = threading.Event()

    def send() -> None:
        while not ends.is_set():
            member.send(b"news")
            if pause:
                ends.wait(pause)

    with ThreadPoolExecutor() as pool:
        sender = pool.submit(send)
        try:
            yield
        finally:
            ends.set()
        sender.result(BOUND)


@pytest.mark.parametrize("pause", [0.0, 0.05], ids=["fast", "seldom"])
@pytest.mark.parametrize("options", [{}, {"loopback": "filter"}], ids=["hears itself", "filters"])
def test_who_only_sends_is_found(backend: Backend, options: dict[str, Any], pause: float) -> None:
    with (
        open_endpoint(backend, "10.0.0.1", receive_depth=4096) as one,
        open_endpoint(backend, "10.0.0.2", **options) as other,
    ):
        group = one.sender(GROUP)
        with sending(other.join(GROUP), pause):
            assert by_qp(group.ready(timeout=BOUND)) == {other.qp_num: group.max_message_size}


@pytest.mark.parametrize("end", ["close", "leave"])
def test_who_only_sends_answers_at_the_end(backend: Backend, end: str) -> None:
    """`close` and `leave` answer the probes that wait, and nothing of the endpoint is left."""
    with open_endpoint(backend, "10.0.0.1") as one, ThreadPoolExecutor() as pool:
        group = one.sender(GROUP)
        with open_endpoint(backend, "10.0.0.2") as other:
            qp_num, member = other.qp_num, other.join(GROUP)
            assert member.recv(timeout=0) is None  # which arms the descriptor
            asking = pool.submit(group.ready, timeout=BOUND)
            until(lambda: waits_at(other) and one.stats().probes)
            if end == "leave":
                member.leave()
            else:
                other.close()
            assert {peer.qp_num for peer in asking.result(BOUND)} == {qp_num}


def waits_at(endpoint: Endpoint | aio.Endpoint) -> bool:
    """Return True if a message waits at the endpoint's queue pair."""
    return bool(select.select([endpoint._core.resources.qp.fileno()], [], [], 0)[0])


def test_what_arrives_meanwhile_is_kept(backend: Backend) -> None:
    """A member that sends for a while, and receives later, gets all messages, in order."""
    with (
        open_endpoint(backend, "10.0.0.1") as one,
        open_endpoint(backend, "10.0.0.2", loopback="filter") as other,
    ):
        out, member = one.sender(GROUP), other.join(GROUP)
        sent = [bytes([number]) for number in range(100)]
        for message in sent:
            out.send(message)
            other._answered_at = -1.0  # a look for probes in each send
            member.send(b"news")
        heard = [member.recv(BOUND) for _ in sent]
        assert [bytes(message.payload) for message in heard if message is not None] == sent
        assert set(member.stats().dropped) <= {"own message"}


def test_nothing_is_received_where_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A send on a simulated fabric looks for messages without a call, and no virtual time passes."""
    calls: list[object] = []
    recv = SimQueuePair._recv

    def counted(*args: Any) -> Batch:
        calls.append(args)
        return recv(*args)

    monkeypatch.setattr(SimQueuePair, "_recv", counted)
    fabric = Fabric.roce()
    with (
        open_fabric(fabric) as backend,
        open_endpoint(backend, "10.0.0.1") as one,
        fabric.rules.on_delivery(lambda _: Drop()),
    ):
        group, start = one.join(GROUP), backend.now()
        calls.clear()
        for _ in range(1000):
            one._answered_at = -1.0
            group.send(b"news")
        assert calls == []
        assert backend.now() == start


def test_sends_look_for_probes_at_intervals(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most sends do nothing for probes."""
    looks: list[bool] = []
    with open_endpoint(backend, "10.0.0.1") as one:
        group = one.join(GROUP)
        monkeypatch.setattr(one._core, "answer", lambda keep: looks.append(keep))
        start = backend.now()
        for _ in range(1000):
            group.send(b"news")
        assert (
            1 <= len(looks) <= 2 + 1000 / POLL_INTERVAL_CALLS + (backend.now() - start) / PROBE_POLL_INTERVAL
        )


def test_a_task_that_only_sends_is_found(backend: Backend) -> None:
    async def main() -> None:
        async with (
            aio.open_endpoint(backend, "10.0.0.1") as one,
            aio.open_endpoint(backend, "10.0.0.2") as other,
        ):
            group, member = await one.sender(GROUP), await other.join(GROUP)

            async def send() -> None:
                while True:
                    await member.send(b"news")
                    await asyncio.sleep(0.01)

            task = asyncio.create_task(send())
            assert by_qp(await group.ready(timeout=BOUND)) == {other.qp_num: group.max_message_size}
            task.cancel()
            await asyncio.wait([task])
            while await other.recv(timeout=0) is not None:  # the last arms the descriptor
                pass
            asking = asyncio.create_task(group.ready(timeout=BOUND))
            while not waits_at(other):
                await asyncio.sleep(0)
            qp_num = other.qp_num
            await other.close()
            assert {peer.qp_num for peer in await asking} == {qp_num}

    asyncio.run(main())


# --- nothing is left ------------------------------------------------------------------------------------


def test_a_close_ends_ready(backend: Backend) -> None:
    """Nothing of the question is left, and nothing is sent any more."""
    with ThreadPoolExecutor() as pool, open_endpoint(backend, "10.0.0.1") as one:
        group, prober = one.join(GROUP), one._core.probing.prober
        asking = pool.submit(group.ready, timeout=None)
        until(lambda: prober.posted > 2)
        one.close()
        with pytest.raises(Closed):
            asking.result(BOUND)
        posted = prober.posted
        assert prober.pending == {}
    assert prober.posted == posted


@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_a_close_ends_long_probes(make: Callable[..., Fabric], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcast.endpoint.probes.LONG_PROBE_TIMEOUT", BOUND)
    fabric = make(clock="wall")
    with (
        open_fabric(fabric) as backend,
        open_endpoint(backend, "10.0.0.1") as one,
        open_endpoint(backend, "10.0.0.2") as other,
        fabric.rules.on_delivery(lambda delivery: Drop() if delivery.size in LONG_SIZES else None),
        ThreadPoolExecutor() as pool,
    ):
        group, prober = one.join(GROUP), one._core.probing.prober
        with answering(other, other.join(GROUP)):
            asking = pool.submit(group.ready, timeout=None)
            until(lambda: prober.posted > 4)
            one.close()
            with pytest.raises(Closed):
                asking.result(BOUND)
        assert prober.pending == {}
    assert SimObserver(fabric).leftovers() == ()


def test_a_cancelled_ready_leaves_nothing(backend: Backend) -> None:
    async def main() -> None:
        async with aio.open_endpoint(backend, "10.0.0.1") as one:
            group = await one.join(GROUP)
            prober = one._core.probing.prober
            asking = asyncio.create_task(group.ready(timeout=None))
            while prober.posted < 2:
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            assert asking.cancelled()
            assert prober.pending == {}
            assert one._waiters == {}
            posted = prober.posted
            assert await group.recv(timeout=0.05) is None
            assert prober.posted == posted

    asyncio.run(main())
