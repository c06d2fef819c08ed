"""Cancellation at each await of each public coroutine of `mcast.aio`.

The call is done or not done, nothing is left, and all goes on working.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import pytest

from mcast import aio
from mcast.api import Backend, Message

from ..card.card import Stage
from ..interleave import EVERY
from ..networks import KINDS, CardNetwork, Network
from .steps import PUBLIC, Steps

GROUP, OTHER = "239.1.2.3", "239.4.5.6"
BOUND = 60.0
"""Seconds; the longest that anything may take, never a delay."""


class CancelledAt(Steps):
    """At its `at`-th suspension the task is cancelled.

    With `late` that is when what the task waits for has come, but the task has not run since.
    """

    def __init__(self, call: Awaitable[Any], at: int, late: bool) -> None:
        super().__init__(call)
        self._at, self._late = at, late

    def suspend(self, what: Any) -> Generator[Any, Any, None]:
        if self.suspended == self._at:
            task = asyncio.current_task()
            assert task is not None
            if what is None or not self._late:
                asyncio.get_running_loop().call_soon(task.cancel)
            else:
                what.add_done_callback(lambda _: task.cancel())
        yield what


class Ends:
    """Two endpoints that are members of a group; `here` is cancelled."""

    def __init__(self, network: Network, backend: Backend, here: aio.Endpoint, there: aio.Endpoint) -> None:
        self.network, self.backend, self.here, self.there = network, backend, here, there
        self.members: list[aio.Membership] = []
        self.heard: list[bytes] = []
        self.sent = 0

    async def tell(self, count: int) -> None:
        """Send to `here`."""
        await self.members[1].send_batch([b"%d" % number for number in range(self.sent, self.sent + count)])
        self.sent += count

    def note(self, message: Message | None) -> None:
        if message is not None:
            self.heard.append(bytes(message.payload))

    async def check(self) -> None:
        """Nobody waits, nothing is leased or asked, each message was heard once, and both ends hear each
        other."""
        here, (mine, theirs) = self.here, self.members
        assert not here._waiters
        assert not here._senders
        assert not here._core.probing.prober.pending
        await self.tell(1)
        while len(self.heard) < self.sent:
            message = await mine.recv(BOUND)
            assert message is not None, (self.heard, self.sent)
            self.note(message)
        assert self.heard == [b"%d" % number for number in range(self.sent)]
        stats = here.stats()
        assert stats.receive_free == stats.receive_depth
        count = mine.stats().sent
        await mine.send(b"the last")
        found: list[bytes] = []
        while not found or found[-1] != b"the last":
            message = await theirs.recv(BOUND)
            assert message is not None
            found.append(bytes(message.payload))
        assert len(found) == count - self.counted + 1  # what was sent is what was counted
        self.counted = count + 1

    counted = 0


@asynccontextmanager
async def ends(network: Network) -> AsyncIterator[Ends]:
    if isinstance(network, CardNetwork):
        network.card.delay(Stage.SEND, 200)  # so that sends wait for room, and a flush for the device
    with network.open() as backend:
        async with (
            aio.open_endpoint(backend, "10.0.0.1", send_depth=16, loopback="off") as here,
            aio.open_endpoint(backend, "10.0.0.2", loopback="off") as there,
        ):
            made = Ends(network, backend, here, there)
            made.members = [await here.join(GROUP), await there.join(GROUP)]
            yield made


Call = Callable[[Ends], Coroutine[Any, Any, Any]]


async def receive(on: Ends) -> None:
    on.note(await on.here.recv(BOUND))


async def receive_of_group(on: Ends) -> None:
    on.note(await on.members[0].recv(BOUND))


async def receive_batch(on: Ends) -> None:
    with await on.here.recv_batch(timeout=BOUND) as batch:
        for message in batch:
            on.note(message)


async def receive_batch_of_group(on: Ends) -> None:
    with await on.members[0].recv_batch(timeout=BOUND) as batch:
        for message in batch:
            on.note(message)


async def batches(on: Ends) -> None:
    async for batch in on.here.batches(0.001):
        for message in batch:
            on.note(message)


async def iterate(on: Ends) -> None:
    async with aclosing(aiter(on.members[0])) as messages:  # type: ignore[type-var]
        async for message in messages:
            on.note(message)
            if len(on.heard) == on.sent:
                return


async def ready(on: Ends) -> None:
    answering = asyncio.ensure_future(on.there.recv(BOUND))
    try:
        await on.members[0].ready()
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)


async def reply(on: Ends) -> None:
    there, at = on.there.port, on.members[0].destination.sgid_index
    to = Message(memoryview(b""), there.gids[at], on.there.qp_num, on.members[0].mgid, None, False, there.lid)
    mine = on.members[0]
    before = mine.stats().sent
    try:
        await mine.reply(to, b"an answer", timeout=BOUND)
    finally:
        on.counted += mine.stats().sent - before  # it is no message of the group to those who hear it


async def join(on: Ends) -> None:
    group = await on.here.join(OTHER)
    assert group.joined
    await group.leave()


async def block(on: Ends) -> None:
    async with on.here.join(OTHER) as group:
        await group.send(b"x")


async def sender(on: Ends) -> None:
    group = await on.here.sender(OTHER)
    assert group.joined
    await group.leave()


async def leave(on: Ends) -> None:
    group = await on.here.join(OTHER)
    try:
        await group.leave()
    finally:
        assert group.joined == (group in on.here.groups)
    assert not group.joined


async def close(on: Ends) -> None:
    endpoint = aio.open_endpoint(on.backend, "10.0.0.3")
    try:
        await endpoint.join(OTHER)
        await endpoint.close()
        assert endpoint.closed
    finally:
        assert not (endpoint.closed and endpoint.groups)
        await endpoint.close()  # once more, if it was cancelled


async def settle(on: Ends) -> None:
    await (await on.here.sender(OTHER, settle=0.001)).leave()


async def another(on: Ends) -> None:
    async with aio.open_endpoint(on.backend, "10.0.0.3") as endpoint, endpoint.join(GROUP):
        pass


async def flush(on: Ends) -> None:
    await on.members[0].send(b"x")
    await on.here.flush(BOUND)


async def next_event(on: Ends) -> None:
    await on.here.next_event(0.001)


RECEIVING: dict[str, Call] = {
    "recv": receive,
    "recv of a group": receive_of_group,
    "recv_batch": receive_batch,
    "recv_batch of a group": receive_batch_of_group,
    "batches": batches,
    "async for": iterate,
}
CALLS: dict[str, Call] = {
    "join": join,
    "async with join": block,
    "sender": sender,
    "leave": leave,
    "close": close,
    "settle": settle,
    "open_endpoint": another,
    "send": lambda on: on.members[0].send(b"x", timeout=BOUND),
    "send_batch": lambda on: on.members[0].send_batch([b"x"] * 40, timeout=BOUND),
    "ready": ready,
    "probe_loopback": lambda on: on.members[0].probe_loopback(0.001),
    "next_event": next_event,
    "reply": reply,
    "flush": flush,
}
AT_ONCE = {"join", "sender", "leave", "close", "open_endpoint", "probe_loopback", "flush"}
"""Calls that need not wait on each network."""


def left_of(network: Network) -> list[str]:
    """Return the objects of the endpoints that are left; address handles are kept for the next message."""
    return sorted(one for one in network.leftovers() if "address handle" not in one)


async def cancelled_everywhere(on: Ends, call: Call, messages: int, late: bool) -> int:
    """The call, cancelled at its first await, its second, and so on, until it has no more; how many there
    were."""
    at, reached = 0, True
    while reached:
        at += 1
        left = left_of(on.network)
        on.here._slice_ends = 0.0  # so that it gives up its turn first
        waits = CancelledAt(call(on), at, late)

        async def run(waits: CancelledAt = waits) -> None:
            await waits

        task = asyncio.ensure_future(run())
        while messages and not task.done() and waits.suspended < min(at, 2):
            await asyncio.sleep(0)
        await on.tell(messages)
        with suppress(asyncio.CancelledError):
            await task
        reached = waits.suspended >= at
        assert task.cancelled() == reached, at
        for group in on.here.groups[1:]:
            assert not reached or group.joined  # it was joined when the call was cancelled
            await group.leave()
        assert left_of(on.network) == left, at
        await on.check()
    return at - 1


@pytest.mark.parametrize("network", KINDS if EVERY == 1 else ["infiniband", "card-roce"], indirect=True)
@pytest.mark.parametrize("late", [False, True], ids=["waiting", "when it has come"])
@pytest.mark.parametrize("name", [*CALLS, *RECEIVING])
def test_cancelled_call_is_done_or_not_done(network: Network, name: str, late: bool) -> None:
    """A call that is cancelled at any await is done or not done."""

    async def main() -> None:
        async with asyncio.timeout(BOUND), ends(network) as on:
            call = (CALLS | RECEIVING)[name]
            awaits = await cancelled_everywhere(on, call, 3 if name in RECEIVING else 0, late)
            assert awaits or name in AT_ONCE
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert network.leftovers() == ()


def test_tables_have_each_call_to_cancel() -> None:
    """The tables have each call that may be cancelled."""
    assert set(CALLS | RECEIVING) >= PUBLIC
