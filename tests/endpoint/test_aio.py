"""The awaitable endpoint: the same as the blocking one, without a thread, never blocking the loop."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from functools import partial
from math import nan
from typing import Any

import pytest

from mcast import GaveUp, Lost, Rejoined, RejoinPolicy, aio
from mcast.api import (
    Backend,
    Closed,
    EventChannel,
    HeaderBodyBatch,
    McastError,
    MembershipLost,
    Message,
    MessageTooLarge,
    QpError,
    QueuePair,
    TimedOut,
)
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults import Drop, Refuse, Requests
from mcast.backends.sim.testbed import SimObserver
from mcast.endpoint import awaiting
from mcast.wire.mcmember import SaMethod, SaStatus

from ..networks import KINDS, network_of

GROUP, OTHER = "239.1.2.3", "239.4.5.6"
BOUND = 20.0
"""Seconds; the longest that anything may take, never a delay."""


@pytest.fixture(params=[Fabric.roce, Fabric.infiniband], ids=["roce", "infiniband"])
def fabric(request: pytest.FixtureRequest) -> Iterator[Fabric]:
    made: Fabric = request.param()
    yield made
    assert SimObserver(made).leftovers() == ()


Network = Callable[[], Backend]


@pytest.fixture(params=KINDS)
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """Opens a backend on a network of each kind, simulated, and of cards made of memory."""
    made = network_of(request)
    yield made.open
    assert made.leftovers() == ()


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine with a bound; what it leaves behind is an error, as is one in the loop's callbacks."""

    async def bounded() -> None:
        failed: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
        async with asyncio.timeout(BOUND):
            await main()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert failed == []

    asyncio.run(bounded(), debug=True)
    gc.collect()


@asynccontextmanager
async def pair(network: Fabric | Network, **options: Any) -> AsyncIterator[tuple[aio.Endpoint, aio.Endpoint]]:
    """Endpoints on ports 0 and 1."""
    with open_fabric(network) if isinstance(network, Fabric) else network() as backend:
        async with (
            aio.open_endpoint(backend, "10.0.0.1") as one,
            aio.open_endpoint(backend, "10.0.0.2", **options) as other,
        ):
            yield one, other


async def turns(count: int = 10) -> None:
    """Let the other tasks go on."""
    for _ in range(count):
        await asyncio.sleep(0)


def rejoined(endpoint: aio.Endpoint, times: int) -> bool:
    return endpoint.stats().rejoins == times


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def text(message: Message | None) -> bytes:
    """The payload; there must be a message."""
    assert message is not None
    return bytes(message.payload)


async def texts(group: aio.Membership) -> list[bytes]:
    """The payloads of all messages, until the iteration ends."""
    return [bytes(message.payload) async for message in group]


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Rounds:
    """While it is entered, counts how often the loop comes around."""

    count = 0

    async def _run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)

    async def __aenter__(self) -> Rounds:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel(self._task)


# --- the everyday path ---------------------------------------------------------------------------


def test_messages_are_iterated_and_sent(network: Network) -> None:
    async def main() -> None:
        async with pair(network) as (one, other), one.sender(GROUP) as out:
            async with other.join(GROUP) as group:
                await out.send(b"hello", imm=3)
                assert await out.send_batch([b"x", b"y"]) == 2
                found = []
                async for message in group:
                    found.append(bytes(message.payload))
                    if len(found) == 3:
                        break
                assert found == [b"hello", b"x", b"y"]
                assert other.groups == (group,)
            assert not other.groups

    run(main)


def test_a_reply_reaches_who_asked(network: Network) -> None:
    async def main() -> None:
        async with pair(network) as (one, other), one.sender(GROUP) as out, other.join(GROUP) as group:
            await out.send(b"who?")
            heard = await group.recv(BOUND)
            assert heard is not None
            await group.reply(heard, b"me")
            answer = await one.recv(BOUND)
            assert answer is not None
            assert bytes(answer.payload) == b"me"

    run(main)


def test_a_join_may_be_awaited(network: Network) -> None:
    async def main() -> None:
        async with pair(network) as (one, _):
            group = await one.join(GROUP, settle=0.01)
            assert group.joined
            async with await one.join(OTHER) as other:
                assert isinstance(other, aio.Membership)
            assert one.groups == (group,)
            await group.leave()
            await group.leave()
            with pytest.raises(Closed):
                await group.send(b"")

    run(main)


def test_batches_are_leased_and_end(network: Network) -> None:
    async def main() -> None:
        async with pair(network) as (one, other):
            await other.join(GROUP)
            out = await one.sender(GROUP)
            await out.send_batch([b"%d" % number for number in range(200)])
            found, held = [], []
            async for batch in other.batches(timeout=0.01):
                held.append(batch)
                found += [bytes(message.payload) for message in batch]
            assert found == [b"%d" % number for number in range(200)]
            assert all(batch.released for batch in held)
            assert len(await other.recv_batch(timeout=0)) == 0
            assert await other.recv(timeout=0) is None
            assert await other.next_event() is None

    run(main)


def test_tasks_wait_for_different_groups(network: Network) -> None:
    async def main() -> None:
        async with pair(network) as (one, other):
            groups = [await other.join(f"239.3.3.{number}") for number in range(5)]
            outs = [await one.sender(f"239.3.3.{number}") for number in range(5)]
            tasks = [asyncio.create_task(group.recv()) for group in groups]
            await turns()
            for number in (3, 1, 4, 0, 2):
                await outs[number].send(b"%d" % number)
            messages = await asyncio.gather(*tasks)
            assert [bytes(message.payload) for message in messages if message] == [
                b"%d" % number for number in range(5)
            ]

    run(main)


@pytest.mark.parametrize("wrong", [b"y" * 5000, "text"], ids=["too large", "no bytes"])
@pytest.mark.parametrize("options", [{}, {"sequence": True}], ids=["plain", "numbered"])
def test_a_wrong_batch_is_refused_whole(options: dict[str, Any], wrong: Any) -> None:
    """A long batch is posted in parts, and checked before the first: nothing is sent, and the error has the
    message's place in the batch."""

    async def main() -> None:
        async with pair(Fabric.roce(clock="wall"), **options) as (one, other):
            out, group = await one.sender(GROUP), await other.join(GROUP)
            batch: list[Any] = [b"x"] * 200
            batch[100] = wrong
            with pytest.raises((MessageTooLarge, TypeError), match="message 100") as refused:
                await out.send_batch(batch)
            assert getattr(refused.value, "posted", 0) == 0
            assert await group.recv(timeout=0) is None
            assert out.stats().sent == 0
            del batch[100]
            assert await out.send_batch(batch) == 199
            assert out.stats().sent == 199

    run(main)


def test_task_that_reads_for_another_wakes_it(network: Network) -> None:
    """A task is woken by another that has read its message."""

    async def main() -> None:
        async with pair(network) as (one, other):
            group, read = await other.join(GROUP), await other.join(OTHER)
            out = await one.sender(GROUP)
            waiting = asyncio.create_task(group.recv())
            await turns()
            other._slice_ends = one._slice_ends = float("inf")  # no turn of the loop until both are done
            await out.send(b"yours")
            assert await read.recv(timeout=0) is None
            assert text(await asyncio.wait_for(waiting, BOUND / 4)) == b"yours"

    run(main)


def test_ready_between_tasks(network: Network) -> None:
    async def main() -> None:
        async with pair(network) as (one, other):
            out, group = await one.sender(GROUP), await other.join(GROUP)
            hearing = asyncio.create_task(group.recv())
            assert {peer.qp_num for peer in await out.ready(timeout=BOUND)} == {other.qp_num}
            await out.send(b"heard")
            assert text(await hearing) == b"heard"
            with pytest.raises(TimedOut, match="0 of 1 members"):
                await group.ready(timeout=0.02)
            assert await group.probe_loopback(timeout=BOUND) is True

    run(main)


def test_what_is_wrong_is_raised(network: Network) -> None:
    async def main() -> None:
        async with pair(network) as (one, _):
            out = await one.sender(GROUP)
            with pytest.raises(MessageTooLarge):
                await out.send(bytes(one.max_message_size + 1))
            with pytest.raises(ValueError):
                await one.join("10.0.0.1")
            assert len(one.groups) == 1

    run(main)


def test_a_loop_does_not_spin(network: Network) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match=r"busy_poll is 0\.5: a loop that looks .* runs no other task"):
            async with pair(network, busy_poll=0.5):
                pass
        async with (
            pair(network, comp_vector=1, timestamps=True) as (one, other),
            one.sender(GROUP) as out,
            other.join(GROUP) as group,
        ):
            await out.send(b"x")
            message = await group.recv(BOUND)
            assert message is not None
            assert message.timestamp is not None

    run(main)


def test_it_is_opened_inside_a_loop() -> None:
    with pytest.raises(RuntimeError, match=r"mcast\.aio needs the running event loop of asyncio"):
        aio.open_endpoint("sim", "10.0.0.1")


# --- cancelling ------------------------------------------------------------------------------------


def test_a_cancelled_or_timed_out_join_leaves_nothing() -> None:
    fabric = Fabric.infiniband(clock="wall")

    async def main() -> None:
        async with pair(fabric) as (one, _):
            with fabric.rules.when(Requests(method=SaMethod.SET), Drop()):
                task = asyncio.ensure_future(one.join(GROUP))
                await until(lambda: one._core.resources.group_index.groups)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert one._core.resources.group_index.groups == {}
                with pytest.raises(TimedOut):
                    await one.join(GROUP, timeout=0.02)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(one.join(GROUP), 0.02)
                assert one.groups == ()
                assert not SimObserver(fabric).port_memberships(fabric.ports[0].interfaces[0].ipv4)  # type: ignore[arg-type]
            assert not one._waiters
        assert fabric.qps == ()

    run(main)
    fabric.close()


def test_a_refused_join_is_an_error_and_leaves_nothing() -> None:
    fabric = Fabric.infiniband()

    async def main() -> None:
        async with pair(fabric) as (one, _):
            with (
                fabric.rules.when(Requests(method=SaMethod.SET), Refuse(SaStatus.NO_RESOURCES)),
                pytest.raises(McastError) as caught,
            ):
                await one.join(GROUP)
            assert caught.value.causes
            assert (await one.join(GROUP)).joined

    run(main)


def test_a_cancelled_receive_loses_no_message(network: Network) -> None:
    async def main() -> None:
        async with pair(network) as (one, other):
            out, group = await one.sender(GROUP), await other.join(GROUP)
            for number in range(50):
                task = asyncio.create_task(group.recv())
                await turns(number % 5)
                sent = asyncio.create_task(out.send(b"%d" % number))
                await turns(number % 3)
                task.cancel()
                await sent
                result = (await asyncio.gather(task, return_exceptions=True))[0]
                message = result if isinstance(result, Message) else await group.recv(timeout=1)
                assert message is not None
                assert bytes(message.payload) == b"%d" % number
            assert not other._waiters

    run(main)


def test_cancelled_call_passes_its_message_on(network: Network) -> None:
    """A message for a call that is cancelled goes to the next."""

    async def main() -> None:
        async with pair(network) as (one, other):
            out, group = await one.sender(GROUP), await other.join(GROUP)
            task = asyncio.create_task(group.recv())
            await until(lambda: other._waiters)
            one._slice_ends = float("inf")
            await out.send(b"kept")
            other._on_readable()  # as the loop calls it
            task.cancel()  # before the task has its turn
            with pytest.raises(asyncio.CancelledError):
                await task
            assert text(await group.recv(timeout=0)) == b"kept"
            assert not other._waiters

    run(main)


def test_task_gets_each_batch_without_extra_polls(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task is handed each batch and nothing is looked for in vain.

    A batch leaves the descriptor readable, because only an empty receive makes it unreadable.
    """
    looked: list[object] = []
    hand_over = aio.Endpoint._hand_over

    def counted(self: aio.Endpoint, *args: Any) -> None:
        looked.append(self)
        hand_over(self, *args)

    monkeypatch.setattr(aio.Endpoint, "_hand_over", counted)

    async def main() -> None:
        async with pair(network) as (one, other):
            out, _ = await one.sender(GROUP), await other.join(GROUP)
            looked.clear()
            sent = [b"%d" % number for number in range(10)]

            got: list[bytes] = []

            async def receive() -> None:
                while len(got) < len(sent):
                    got.extend(bytes(message.payload) for message in await other.recv_batch())

            receiving = asyncio.create_task(receive())
            for number, payload in enumerate(sent):
                await until(lambda number=number: len(got) == number and other._waiters)  # type: ignore[misc]
                await out.send(payload)
            await receiving
            assert got == sent
            assert (
                len(looked) < 15
            )  # one more where a turn of the task is over; 19 if each were looked for in vain

    run(main)


def test_cancelled_call_passes_its_batch_on_first(network: Network) -> None:
    """A batch for a call that is cancelled goes to the next before all others."""

    async def main() -> None:
        async with pair(network) as (one, other):
            out, group = await one.sender(GROUP), await other.join(GROUP)
            task = asyncio.create_task(other.recv_batch(max=2))
            await until(lambda: other._waiters)
            one._slice_ends = float("inf")
            await out.send_batch([b"1", b"2", b"3"])
            other._on_readable()  # as the loop calls it
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert [text(await group.recv(timeout=0)) for _ in range(3)] == [b"1", b"2", b"3"]
            stats = other.stats()
            assert (stats.received, stats.received_bytes, group.stats().received) == (3, 3, 3)
            assert stats.receive_free == stats.receive_depth
            assert await group.recv(timeout=0) is None

    run(main)


def test_cancelled_batch_keeps_its_order(network: Network) -> None:
    """A batch for a call that is cancelled keeps its order over all groups."""

    async def main() -> None:
        async with pair(network) as (one, other):
            outs = [await one.sender(name) for name in (GROUP, OTHER)]
            for name in (GROUP, OTHER):
                await other.join(name)
            task = asyncio.create_task(other.recv_batch())
            await until(lambda: other._waiters)
            one._slice_ends = float("inf")
            sent = [b"%d" % number for number in range(6)]
            for number, payload in enumerate(sent):
                await outs[number % 2].send(payload)
            other._on_readable()  # as the loop calls it
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert [text(await other.recv(timeout=0)) for _ in sent] == sent

    run(main)


def test_a_send_that_is_cancelled_has_sent_nothing(network: Network) -> None:
    async def main() -> None:
        async with pair(network) as (one, _):
            out = await one.sender(GROUP)
            one._slice_ends = 0.0
            task = asyncio.create_task(out.send(b"x"))
            await asyncio.sleep(0)  # it gives up its turn
            assert not task.done()
            await cancel(task)
            assert task.cancelled()
            assert out.stats().sent == one.stats().sent == 0

    run(main)


def test_a_timeout_that_is_no_number_is_refused(network: Network) -> None:
    """Refused even if the call would not have waited; nothing is sent, received or joined."""

    async def main() -> None:
        async with pair(network) as (one, other):
            group = await one.join(GROUP)
            await (await other.sender(GROUP)).send(b"x")
            heard = Message(memoryview(b""), one.port.gids[0], 1, group.mgid, None, False, one.port.lid)

            async def batches(timeout: Any) -> None:
                async for _ in one.batches(timeout):
                    pass

            calls: dict[str, Callable[[Any], Awaitable[object]]] = {
                "join": lambda timeout: one.join(OTHER, timeout=timeout),
                "settle": lambda timeout: one.join(OTHER, settle=timeout),
                "recv": one.recv,
                "recv_of_group": group.recv,
                "recv_batch": lambda timeout: one.recv_batch(timeout=timeout),
                "batches": batches,
                "next_event": one.next_event,
                "ready": lambda timeout: group.ready(timeout=timeout),
                "probe_loopback": group.probe_loopback,
                "send": lambda timeout: group.send(b"x", timeout=timeout),
                "send_batch": lambda timeout: group.send_batch([b"x"] * 100, timeout=timeout),
                "reply": lambda timeout: group.reply(heard, b"x", timeout=timeout),
                "flush": one.flush,
            }
            for name, call in calls.items():
                with pytest.raises(ValueError, match="is nan: give a number of seconds"):
                    await call(nan)
                with pytest.raises(TypeError, match="is 'soon': give a number of seconds"):
                    await call("soon")
                assert one.groups == (group,), name
                assert one.stats().sent == 0, name
            assert text(await one.recv(BOUND)) == b"x"

    run(main)


# --- waiting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("short_first", [True, False])
def test_each_timeout_ends_in_its_own_time(network: Network, short_first: bool) -> None:
    """A later one never waits for an earlier, nor the other way round."""

    async def main() -> None:
        async with pair(network) as (_, other):
            group = await other.join(GROUP)
            loop, end = asyncio.get_running_loop(), asyncio.get_running_loop().time() + 0.02
            timeouts = [0.02, 100 * BOUND]
            tasks = [
                asyncio.create_task(group.recv(timeout=timeout))
                for timeout in (timeouts if short_first else reversed(timeouts))
            ]
            short, long = tasks if short_first else reversed(tasks)
            assert await short is None
            assert loop.time() >= end
            assert not long.done()
            await cancel(long)

    run(main)


def test_task_sleeps_only_on_an_empty_queue_pair(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task sleeps only when the queue pair was found empty.

    Only then does its descriptor tell of the next message.
    """
    emptied = False

    def watch(name: str) -> None:
        original = getattr(QueuePair, name)

        def watched(self: QueuePair, *args: Any) -> Any:
            nonlocal emptied
            found = original(self, *args)
            emptied = not found
            return found

        monkeypatch.setattr(QueuePair, name, watched)

    async def main() -> None:
        async with pair(fabric, loopback="filter") as (one, other):
            out, group = await one.sender(GROUP), await other.join(GROUP)
            watch("recv")
            watch("recv_one")
            sleep = other._sleep

            async def checked(waiter: awaiting.Waiter) -> Any:
                assert emptied
                return await sleep(waiter)

            monkeypatch.setattr(other, "_sleep", checked)
            for receive in (group.recv, other.recv, other.recv_batch):
                await group.send_batch([b"own"] * 200)
                task = asyncio.create_task(receive())
                await turns()
                await out.send(b"heard")
                found: Any = await task
                assert text(found if isinstance(found, Message) else found[0]) == b"heard"
            assert group.stats().dropped == {"own message": 600}

    run(main)


def test_error_after_a_message_keeps_the_message(fabric: Fabric) -> None:
    """An error behind a message does not cost the message."""

    async def main() -> None:
        async with pair(fabric, rejoin=None) as (one, other):
            out, group = await one.sender(GROUP), await other.join(GROUP)
            task = asyncio.create_task(group.recv())
            await until(lambda: other._waiters)
            one._slice_ends = float("inf")
            await out.send(b"before")
            (qp,) = (qp for qp in fabric.qps if qp.number == other.qp_num)
            fabric.fail_qp(qp)
            assert text(await task) == b"before"
            with pytest.raises(QpError):
                await group.recv()

    run(main)


# --- closing -----------------------------------------------------------------------------------------


def test_close_ends_what_waits(network: Network) -> None:
    async def main() -> None:
        async with pair(network) as (one, _):
            group = await one.join(GROUP)

            async def batches() -> list[int]:
                return [len(batch) async for batch in one.batches()]

            waiting = [
                asyncio.create_task(call) for call in (group.recv(), one.next_event(None), group.ready())
            ]
            iterating = [asyncio.create_task(texts(group)), asyncio.create_task(batches())]
            await turns()
            await one.close()
            await one.close()
            for task in waiting:
                with pytest.raises(Closed):
                    await task
            assert await asyncio.gather(*iterating) == [[], []]
            assert one.closed

    run(main)


def test_close_ends_waits_without_a_device(fabric: Fabric) -> None:
    """Close ends what waits while the device is away.

    There is no queue pair then whose end would wake it.
    """

    async def main() -> None:
        async with pair(fabric) as (one, _):
            group = await one.join(GROUP)
            waiting = [asyncio.create_task(call) for call in (group.recv(), one.recv_batch())]
            await turns()
            fabric.remove_device(fabric.ports[0])
            await until(lambda: one._core.resources.id.closed)  # it was given up, and there is no other yet
            await until(lambda: one._waiters)
            await one.close()
            for task in waiting:
                with pytest.raises(Closed):
                    await task

    run(main)


def test_join_awaited_after_close_joins_nothing(network: Network) -> None:
    """A join that is awaited after the close joins nothing."""

    async def main() -> None:
        async with pair(network) as (one, _):
            joining = one.join(GROUP)
            await one.close()
            with pytest.raises(Closed, match="Endpoint"):
                async with joining:
                    pass
            assert one.groups == ()
            assert one.stats().groups == ()

    run(main)


def test_close_after_the_loop_schedules_nothing(fabric: Fabric) -> None:
    """Closing after the loop has ended plans nothing in it."""
    with open_fabric(fabric) as backend:

        async def opened() -> aio.Endpoint:
            endpoint = aio.open_endpoint(backend, "10.0.0.1")
            await endpoint.join(GROUP)
            fabric.remove_device(fabric.ports[0])
            await until(lambda: len(endpoint._core.events) > 0)  # an attempt to rejoin is due soon
            return endpoint

        endpoint = asyncio.run(opened())
        asyncio.run(endpoint.close())
        assert endpoint.closed


async def waiting_on(backend: Backend) -> tuple[aio.Endpoint, asyncio.Task[Message | None]]:
    """An endpoint, and a task that waits for a message there."""
    endpoint = aio.open_endpoint(backend, "10.0.0.1")
    task = asyncio.create_task(endpoint.recv())
    while not endpoint._waiters:
        await asyncio.sleep(0)
    return endpoint, task


def test_close_after_the_loop_closes_once(fabric: Fabric) -> None:
    """Closing after the loop has ended wakes nobody and closes nothing twice."""
    with open_fabric(fabric) as backend:
        loop = asyncio.new_event_loop()
        endpoint, task = loop.run_until_complete(waiting_on(backend))
        loop.close()
        number = endpoint._channel_fd
        asyncio.run(endpoint.close())
        assert endpoint.closed
        another = os.open(os.devnull, os.O_RDONLY)
        os.dup2(another, number)  # the number belongs to another file by now
        asyncio.run(endpoint.close())
        for mine in {another, number}:
            os.close(mine)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        coroutine = task.get_coro()
        assert coroutine is not None
        coroutine.close()


@pytest.mark.parametrize("call", ["recv", "recv_batch"])
def test_task_returns_what_it_got_before_a_close(network: Network, call: str) -> None:
    """A task returns the message that it got before a close."""

    async def main() -> None:
        async with pair(network) as (one, other):
            out, _ = await one.sender(GROUP), await other.join(GROUP)
            receive = getattr(other, call)
            task = asyncio.create_task(receive())
            await until(lambda: other._waiters)
            one._slice_ends = float("inf")
            await out.send(b"received")
            other._on_readable()  # as the loop calls it
            await other.close()  # before the task has its turn
            found = await task
            message = found if isinstance(found, Message) else found[0]
            assert text(message) == b"received"
            assert other.stats().received_bytes == len(b"received")
            with pytest.raises(Closed):
                await receive()

    run(main)


def test_leaving_ends_the_iteration_of_that_group(network: Network) -> None:
    async def main() -> None:
        async with pair(network) as (one, _):
            group = await one.join(GROUP)

            task = asyncio.create_task(texts(group))
            await turns()
            await group.leave()
            assert await task == []

    run(main)


def test_an_owned_backend_is_closed() -> None:
    async def main() -> None:
        async with aio.open_endpoint("sim", "10.0.0.1", options={"ports": 1}) as endpoint:
            await endpoint.join(GROUP)
        assert endpoint.backend.closed

    run(main)


# --- losing and restoring, in the background -----------------------------------------------------------


def test_a_membership_comes_back_with_no_task_waiting(fabric: Fabric) -> None:
    async def main() -> None:
        async with pair(fabric) as (one, other):
            out, group = await one.sender(GROUP), await other.join(GROUP)
            assert await other.recv(timeout=0) is None
            for fault in (fabric.bond_failover, fabric.remove_device):
                fault(fabric.ports[1])
                fabric.restore_device(fabric.ports[1])
                await until(lambda: len(other._core.events) == 2)  # no call, so nothing but the loop acts
                assert [type(await other.next_event()) for _ in range(2)] == [Lost, Rejoined]
                await out.send(b"heard")
                assert await group.recv(timeout=1) is not None

    run(main)


def test_a_waiting_task_survives_a_new_queue_pair(fabric: Fabric) -> None:
    async def main() -> None:
        async with pair(fabric) as (one, other):
            out, group = await one.sender(GROUP), await other.join(GROUP)
            for number in range(5):
                task = asyncio.create_task(group.recv())
                await turns()
                fabric.bond_failover(fabric.ports[1])
                await until(partial(rejoined, other, number + 1))
                await out.send(b"%d" % number)
                assert text(await task) == b"%d" % number

    run(main)


def test_the_sm_fails_over_under_a_receiver() -> None:
    fabric = Fabric.infiniband(clock="wall")

    async def main() -> None:
        async with pair(fabric, rejoin=RejoinPolicy(first=0.01, maximum=0.02)) as (one, other):
            out, group = await one.sender(GROUP), await other.join(GROUP)
            task = asyncio.create_task(group.recv())
            fabric.restart_sm(0.05)
            await until(lambda: out.stats().rejoins and group.stats().rejoins)
            await out.send(b"heard")
            assert await task is not None

    run(main)
    fabric.close()


def test_giving_up_ends_what_waits(fabric: Fabric) -> None:
    async def main() -> None:
        async with pair(fabric, rejoin=RejoinPolicy(first=0.005, give_up_after=0.02)) as (_, other):
            group, second = await other.join(GROUP), await other.join(OTHER)
            task = asyncio.create_task(group.recv())
            await turns()
            fabric.remove_device(fabric.ports[1])
            with pytest.raises(MembershipLost):
                await task
            assert isinstance(await other.next_event(), Lost)
            assert isinstance(await other.next_event(), Lost)
            assert isinstance(await other.next_event(), GaveUp)
            await second.leave()
            with pytest.raises(MembershipLost):  # of the last one every call tells
                await other.recv(timeout=0)
            await group.leave()
            assert await other.recv(timeout=0) is None

    run(main)


def test_a_failed_queue_pair_is_reset(fabric: Fabric) -> None:
    async def main() -> None:
        async with pair(fabric) as (one, other):
            out, group = await one.sender(GROUP), await other.join(GROUP)
            task = asyncio.create_task(group.recv())
            await turns()
            (qp,) = (qp for qp in fabric.qps if qp.number == other.qp_num)
            fabric.fail_qp(qp)
            assert [type(await other.next_event(BOUND)) for _ in range(2)] == [Lost, Rejoined]
            await out.send(b"heard")
            assert await task is not None

    run(main)


# --- never blocking --------------------------------------------------------------------------------------


def never_blocks(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> list[str]:
    """Record each call that could block: a wait of the contract with a timeout other than 0, or a sleep."""
    seen: list[str] = []

    def watch(kind: type, name: str, place: int) -> None:
        original = getattr(kind, name)

        def watched(self: object, *args: Any, **kwargs: Any) -> Any:
            timeout = kwargs.get("timeout", args[place] if len(args) > place else None)
            if timeout != 0:
                seen.append(f"{name}({args}, {kwargs})")
            return original(self, *args, **kwargs)

        monkeypatch.setattr(kind, name, watched)

    watch(EventChannel, "get_event", 0)
    watch(QueuePair, "recv", 1)
    watch(QueuePair, "recv_one", 0)
    watch(QueuePair, "send", 3)
    watch(QueuePair, "send_one", 3)
    for module, name in ((time, "sleep"), (select, "select")):
        monkeypatch.setattr(module, name, lambda *args, name=name: seen.append(name))
    return seen


def test_no_call_blocks_and_there_is_no_thread(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threading.active_count()

    async def main() -> None:
        async with pair(fabric) as (one, other):
            seen = never_blocks(monkeypatch, one.backend)
            out, group = await one.sender(GROUP), await other.join(GROUP)
            hearing = asyncio.create_task(group.recv())
            await out.ready()
            await out.send(b"x", timeout=1)
            await out.send_batch([b"x"] * 300, timeout=1)
            assert await hearing is not None
            assert await group.recv(timeout=0.01) is not None
            async for _ in other.batches(timeout=0.01):
                pass
            fabric.bond_failover(fabric.ports[1])
            await other.next_event(1)
            await other.next_event(1)
            await group.leave()
            assert threading.active_count() == threads
            assert seen == []

    run(main)


@pytest.mark.parametrize("parts", [1, 2])
def test_rows_are_payloads(network: Network, parts: int) -> None:
    """More of them than are posted at a time."""
    rows = [number.to_bytes(2) for number in range(300)]

    async def main() -> None:
        async with pair(network, receive_depth=512) as (one, other):
            out, group = await one.sender(GROUP), await other.join(GROUP)
            batch: memoryview | HeaderBodyBatch = memoryview(b"".join(rows)).cast("B", (300, 2))
            if parts == 2:
                ends = (bytes(row[place] for row in rows) for place in (0, 1))
                batch = HeaderBodyBatch(*(memoryview(one).cast("B", (300, 1)) for one in ends))
            assert await out.send_batch(batch, timeout=BOUND) == 300
            assert out.stats().sent_bytes == 600
            assert [bytes(one.payload) for one in [await group.recv(BOUND) for _ in rows] if one] == rows

    run(main)


def test_a_flood_leaves_the_loop_to_others(network: Network) -> None:
    async def main() -> None:
        async with pair(network, receive_depth=4096) as (one, other):
            out = await one.sender(GROUP)
            await other.join(GROUP)

            async def flood() -> None:
                while True:
                    await out.send_batch([b"x"] * 64)

            async def drain() -> None:
                async for _ in other.batches():
                    pass

            tasks = [asyncio.create_task(job()) for job in (flood, drain)]
            async with Rounds() as rounds:
                await until(lambda: rounds.count > 20 and other.stats().received > 1000)
            await cancel(*tasks)

    run(main)


def test_full_queue_starves_neither_loop_nor_events(
    network: Network,
) -> None:
    """A queue that is never empty starves neither the loop nor events."""

    async def main() -> None:
        async with pair(network) as (one, other):
            out, group = await one.sender(GROUP), await other.join(GROUP)

            def send() -> None:
                """Without giving up the turn."""
                one._core.sending.send(out._group, one._core.resources.qp, out.destination, [b"x"], None, 0)

            joining = asyncio.ensure_future(other.join(OTHER))
            send()
            end = time.monotonic() + BOUND
            async with Rounds() as rounds:
                async for _ in group:
                    send()
                    if (rounds.count > 3 and joining.done()) or time.monotonic() > end:
                        break
            assert rounds.count > 3
            assert joining.done()

    run(main)


def test_nothing_between_two_slices_is_missed(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is slept over that happens between turns.

    A task gives up its turn before it sleeps, and another one does what it waits for.
    """
    monkeypatch.setattr(awaiting, "TIME_SLICE", 0.0)

    async def main() -> None:
        async with pair(network) as (one, other):
            out, group, read = await one.sender(GROUP), await other.join(GROUP), await other.join(OTHER)
            reading = asyncio.create_task(read.recv(timeout=0))
            waiting = asyncio.create_task(group.recv())
            await asyncio.sleep(0)  # both give up their first turn now
            one._slice_ends = float("inf")
            await out.send(b"yours")  # in one go
            await reading  # which reads it before the other has its turn
            message = await asyncio.wait_for(waiting, BOUND / 4)
            assert message is not None

    run(main)


def test_a_failing_queue_pair_does_not_spin_the_loop(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        policy = RejoinPolicy(first=0.2, jitter=0)
        async with pair(fabric, rejoin=policy) as (_, other):
            group = await other.join(GROUP)
            waiting = [asyncio.create_task(group.recv()) for _ in range(3)]
            await turns()
            (qp,) = (qp for qp in fabric.qps if qp.number == other.qp_num)
            fabric.fail_qp(qp)
            polls, poll = 0, other._poll

            def counted() -> bool:
                nonlocal polls
                polls += 1
                return poll()

            monkeypatch.setattr(other, "_poll", counted)
            await until(partial(rejoined, other, 1))
            assert polls < 50
            await cancel(*waiting)

    run(main)


def test_slice_ends_between_batches_and_chunks(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn ends between batches and between chunks."""
    monkeypatch.setattr(awaiting, "TIME_SLICE", 0.0)

    async def main() -> None:
        async with pair(network, receive_depth=1024) as (one, other):
            out = await one.sender(GROUP)
            await other.join(GROUP)
            async with Rounds() as rounds:
                await turns()
                before = rounds.count
                await out.send_batch([b"x"] * 640)
                assert rounds.count - before >= 9  # ten chunks
                before = rounds.count
                for _ in range(10):
                    with await other.recv_batch() as batch:
                        assert len(batch) == 64
                assert rounds.count - before >= 9

    run(main)


def test_an_idle_loop_sleeps(network: Network) -> None:
    """A descriptor that stays readable would spin the loop."""

    async def main() -> None:
        async with pair(network) as (one, other):
            out, group = await one.sender(GROUP), await other.join(GROUP)
            await out.send_batch([b"x"] * 3)
            assert await group.recv() is not None
            waiting = [asyncio.create_task(call) for call in (other.next_event(None), one.next_event(None))]
            await out.send(b"unread")  # nobody waits for messages of the group, but it is read all the same
            await turns()
            loop = asyncio.get_running_loop()
            selects = 0
            selector = loop._selector  # type: ignore[attr-defined]
            original = selector.select

            def counted(timeout: float | None = None) -> Any:
                nonlocal selects
                selects += 1
                return original(timeout)

            selector.select = counted
            await asyncio.sleep(0.05)
            assert selects < 10
            await cancel(*waiting)
            await out.send(b"unread")  # while nobody waits for anything
            await asyncio.sleep(0.05)
            assert selects < 20

    run(main)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "in_a_thread"])
@pytest.mark.parametrize("closes", ["backend", "channel"])
def test_closing_the_backend_wakes_waiters(fabric: Fabric, elsewhere: bool, closes: str) -> None:
    """Who waits wakes when the backend is closed under the endpoint."""

    async def main() -> None:
        backend = open_fabric(fabric)
        endpoint = aio.open_endpoint(backend, "10.0.0.1")
        group = await endpoint.join(GROUP)
        waits: list[Awaitable[object]] = [
            endpoint.recv(),
            endpoint.recv_batch(),
            group.recv(),
            endpoint.next_event(None),
            group.ready(timeout=None),
        ]
        tasks = [asyncio.ensure_future(one) for one in waits]
        await turns()
        thing = backend if closes == "backend" else endpoint._core.resources.channel
        await (asyncio.to_thread(thing.close) if elsewhere else no_wait(thing.close))
        for task in tasks:
            with pytest.raises(Closed):
                await task
        with pytest.raises(Closed):
            await endpoint.recv(timeout=0)
        with pytest.raises(Closed):
            await group.send(b"x")
        await endpoint.close()
        backend.close()

    run(main)


async def no_wait(call: Callable[[], None]) -> None:
    call()


def test_call_in_another_loop_is_refused(fabric: Fabric) -> None:
    """A call in another loop of the same thread is refused."""

    async def opens() -> aio.Endpoint:
        return aio.open_endpoint(backend, "10.0.0.1")

    with open_fabric(fabric) as backend, closing(asyncio.new_event_loop()) as loop:
        endpoint = loop.run_until_complete(opens())
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            asyncio.run(endpoint.recv(0))
        loop.run_until_complete(endpoint.close())


def test_call_in_the_loops_former_thread_is_refused(fabric: Fabric) -> None:
    """A call is refused in the thread that ran the loop before another one.

    The thread that opened the endpoint has handed its loop over, and runs one of its own.
    """

    async def opens() -> aio.Endpoint:
        return aio.open_endpoint(backend, "10.0.0.1")

    with open_fabric(fabric) as backend, closing(asyncio.new_event_loop()) as loop:
        endpoint = loop.run_until_complete(opens())
        running = threading.Thread(target=loop.run_forever)
        running.start()
        try:
            call = asyncio.run_coroutine_threadsafe(endpoint.recv(0), loop)
            assert call.result(BOUND) is None
            with pytest.raises(RuntimeError, match="belongs to another event loop"):
                asyncio.run(endpoint.recv(0))
        finally:
            loop.call_soon_threadsafe(loop.stop)
            running.join(BOUND)
        loop.run_until_complete(endpoint.close())


class ReticentLoop(asyncio.SelectorEventLoop):
    """A loop that does not say which thread runs it, as uvloop's does not."""

    @property
    def _thread_id(self) -> int | None:
        if sys._getframe(1).f_globals["__name__"] == awaiting.__name__:
            raise AttributeError
        return self._runs_in

    @_thread_id.setter
    def _thread_id(self, runs_in: int | None) -> None:
        self._runs_in = runs_in


@pytest.mark.parametrize("make", [asyncio.new_event_loop, ReticentLoop])
def test_loop_moved_to_a_thread_frees_a_queue_pair(
    fabric: Fabric, make: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """A loop that another thread goes on with lets go of a queue pair.

    The thread that opened the endpoint closes its backend, while a task waits in the other thread.
    """

    async def runs() -> None:
        began.set()
        await asyncio.wait([task], timeout=BOUND)

    began, forgot = threading.Event(), set[int]()
    with open_fabric(fabric) as backend, closing(make()) as loop:
        endpoint, task = loop.run_until_complete(waiting_on(backend))
        forget = endpoint._forget_qp

        def forget_qp() -> None:
            forgot.add(threading.get_ident())
            forget()

        endpoint._forget_qp = forget_qp  # type: ignore[method-assign]
        running = threading.Thread(target=loop.run_until_complete, args=(runs(),))
        running.start()
        assert began.wait(BOUND)
        backend.close()
        running.join(BOUND)
        assert forgot == {running.ident}
        with pytest.raises(Closed):
            task.result()
        loop.run_until_complete(endpoint.close())


def test_closed_backend_leaves_other_descriptors(fabric: Fabric) -> None:
    """An endpoint whose backend was closed leaves the descriptors of others alone."""

    async def main() -> None:
        backend = open_fabric(fabric)
        ended = aio.open_endpoint(backend, "10.0.0.1")
        task = asyncio.create_task((await ended.join(GROUP)).recv())
        await turns()
        backend.close()
        with open_fabric(fabric) as other:  # gets the descriptors that have become free
            async with aio.open_endpoint(other, "10.0.0.2") as healthy, healthy.join(GROUP) as group:
                waiting = asyncio.create_task(group.recv())
                await turns()
                await ended.close()
                await group.send(b"heard")
                assert text(await waiting) == b"heard"
        with pytest.raises(Closed):
            await task

    run(main)


def test_a_backend_may_be_closed_after_the_loop(fabric: Fabric) -> None:
    backend = open_fabric(fabric)
    opened: list[aio.Endpoint] = []

    async def main() -> None:
        opened.append(aio.open_endpoint(backend, "10.0.0.1"))
        await (await opened[0].join(GROUP)).recv(timeout=0.001)

    run(main)
    backend.close()
    assert opened[0].closed
