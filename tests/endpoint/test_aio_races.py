"""Two tasks, one awaited endpoint, each pair of calls: the first stops at each await, the second runs then.

The first one stops when it begins to wait, or when what it waits for has come. All objects belong to one
loop, so nothing else can come between: a call from another loop, or another thread, is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

import pytest

from mcast import aio
from mcast.api import AlreadyJoined, Batch, Closed, McastError, Message

from ..calls import GROUP, NOTHING, ON_AN_ENDPOINT, OTHER, Outcomes
from ..interleave import EVERY
from ..networks import KINDS, Network
from ..waiting import Running
from .steps import PUBLIC, Steps

BOUND = 60.0
"""Seconds; the longest that anything may take, never a delay."""
MAX_IDLE_TURNS = 3
"""Turns of the loop in which a task does nothing, after which it counts as waiting."""
SOON = 0.001

Calls = dict[str, Callable[[], Coroutine[Any, Any, object]]]

ON_AN_AWAITED_ENDPOINT: Outcomes = {
    name: outcomes for name, outcomes in ON_AN_ENDPOINT.items() if name not in ("stats", "close_backend")
} | {
    "join": (aio.Membership, AlreadyJoined, Closed),
    "sender": (aio.Sender, AlreadyJoined, Closed),
    "open_endpoint": (aio.Endpoint, Closed),
    "async_for": (list, Closed),
    "reply": (NOTHING, Closed),
    "close_backend": (NOTHING,),
}
"""Possible outcomes of each call."""


class Stopping(Steps):
    """At the `at`-th time `meanwhile` comes before the call goes on; with `late` that is when what it waits
    for has come."""

    def __init__(
        self, call: Awaitable[Any], at: int, late: bool, meanwhile: Callable[[], Generator[Any, Any, None]]
    ) -> None:
        super().__init__(call)
        self._at, self._late, self._meanwhile = at, late, meanwhile

    def suspend(self, what: Any) -> Generator[Any, Any, None]:
        stops = self.suspended == self._at
        if stops and not self._late:
            yield from self._meanwhile()
        yield what
        if stops and self._late:
            yield from self._meanwhile()


async def outcome(call: Awaitable[object]) -> object:
    try:
        return await call
    except McastError as error:
        return error


async def interleaved(
    first: Callable[[], Awaitable[object]], second: Callable[[], Awaitable[object]], at: int, late: bool
) -> tuple[object, object, bool]:
    """The outcomes of both; whether the first was suspended so often comes third."""
    other: list[asyncio.Task[object]] = []

    def meanwhile() -> Generator[Any, Any, None]:
        steps = Steps(second())
        other.append(task := asyncio.ensure_future(outcome(steps)))
        idle, seen = 0, -1
        while not task.done() and idle < MAX_IDLE_TURNS:
            idle, seen = (idle + 1, seen) if seen == steps.suspended else (0, steps.suspended)
            yield

    found = await outcome(Stopping(first(), at, late, meanwhile))
    return found, await (other[0] if other else outcome(second())), bool(other)


class Objects:
    """A new endpoint, in one group, and its calls."""

    def __init__(self, network: Network) -> None:
        self.backend = network.open()
        self.endpoint = aio.open_endpoint(self.backend, "10.0.0.1")
        self._opened = [self.endpoint]

    async def calls(self) -> Calls:
        endpoint = self.endpoint
        group = await endpoint.join(OTHER)
        await group.send(b"x")
        there, at = endpoint.port, group.destination.sgid_index
        heard = Message(memoryview(b""), there.gids[at], endpoint.qp_num, group.mgid, None, False, there.lid)
        endpoint._slice_ends = 0.0  # so that each call gives up its turn first

        async def batches() -> object:
            return [len(batch) async for batch in endpoint.batches(timeout=SOON)]

        async def messages() -> object:
            with suppress(TimeoutError):  # it has no time of its own
                async with asyncio.timeout(SOON), aclosing(aiter(group)) as found:  # type: ignore[type-var]
                    return [bytes(message.payload) async for message in found]
            return []

        async def join(way: Callable[[str], Awaitable[object]]) -> object:
            return await way(GROUP)

        async def open_another() -> object:
            self._opened.append(aio.open_endpoint(self.backend, "10.0.0.2"))
            return self._opened[-1]

        async def close_backend() -> None:
            self.backend.close()

        return {
            "join": partial(join, endpoint.join),
            "sender": partial(join, endpoint.sender),
            "leave": group.leave,
            "send": lambda: group.send(b"x"),
            "send_batch": lambda: group.send_batch([b"x"]),
            "reply": lambda: group.reply(heard, b"x"),
            "recv": lambda: endpoint.recv(SOON),
            "recv_of_group": lambda: group.recv(SOON),
            "recv_batch": lambda: endpoint.recv_batch(timeout=SOON),
            "recv_batch_of_group": lambda: group.recv_batch(timeout=SOON),
            "batches": batches,
            "async_for": messages,
            "open_endpoint": open_another,
            "next_event": lambda: endpoint.next_event(SOON),
            "ready": lambda: group.ready(timeout=SOON),
            "probe_loopback": lambda: group.probe_loopback(SOON),
            "flush": lambda: endpoint.flush(0),
            "close": endpoint.close,
            "close_backend": close_backend,
        }

    async def close(self) -> None:
        """Nobody waits, no lock is held; then everything is closed."""
        for endpoint in self._opened:
            assert not endpoint._waiters
            assert not endpoint._senders
            assert not endpoint._guard.amid
            assert not (endpoint.closed and endpoint.groups)
            await endpoint.close()
        self.backend.close()


async def race(network: Network, first: str) -> None:
    objects = Objects(network)
    calls = await objects.calls()
    await objects.close()
    assert set(calls) == set(ON_AN_AWAITED_ENDPOINT)
    left = network.leftovers()
    for number, second in enumerate(calls):
        for late in (False, True):
            at, stopped = 1 + (number + late) % EVERY % 3, True
            while stopped:
                objects = Objects(network)
                calls = await objects.calls()
                one, other, stopped = await interleaved(calls[first], calls[second], at, late)
                for name, found in (first, one), (second, other):
                    if isinstance(found, Batch):
                        found.release()
                    assert isinstance(found, ON_AN_AWAITED_ENDPOINT[name]), (first, second, at, late, found)
                await objects.close()
                assert network.leftovers() == left, (first, second, at, late)
                at += EVERY


@pytest.mark.parametrize("network", KINDS if EVERY == 1 else ["infiniband", "card-roce"], indirect=True)
@pytest.mark.parametrize("first", ON_AN_AWAITED_ENDPOINT)
def test_two_calls_on_an_awaited_endpoint(network: Network, first: str) -> None:
    failed: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
        async with asyncio.timeout(BOUND * (10 if EVERY == 1 else 1)):
            await race(network, first)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert failed == []


def test_the_tables_have_each_call() -> None:
    """Of endpoints and memberships; `async for` and `open_endpoint` are no methods with a name."""
    assert {name.removesuffix("_of_group") for name in ON_AN_AWAITED_ENDPOINT} - {
        "async_for",
        "open_endpoint",
        "close_backend",
    } == PUBLIC


@pytest.mark.parametrize(
    "name", [name for name in ON_AN_AWAITED_ENDPOINT if name not in ("open_endpoint", "close_backend")]
)
def test_a_call_from_another_thread_s_loop_is_refused(network: Network, name: str) -> None:
    """It changes nothing, and the endpoint can be used on."""

    async def main() -> None:
        objects = Objects(network)
        calls = await objects.calls()

        async def refused() -> None:
            with pytest.raises(RuntimeError, match="run_coroutine_threadsafe"):
                await calls[name]()

        assert await asyncio.to_thread(lambda: Running(lambda: asyncio.run(refused())).results()) == [None]
        (group,) = objects.endpoint.groups
        assert group.joined
        message = await objects.endpoint.recv(BOUND)
        assert message is not None
        assert bytes(message.payload) == b"x"
        await objects.close()

    asyncio.run(main())
