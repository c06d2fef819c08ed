"""Endpoints for asyncio: the classes of `mcast.endpoint.blocking`, with calls that are awaited.

```python
async with mcast.aio.open_endpoint("rdma", bind="10.0.0.1") as endpoint:
    async with endpoint.join("239.1.2.3") as group:
        await group.send(b"hello")
        async for message in group:
            ...
```

There is no thread: the loop sleeps on the descriptors of the event channel and of the queue pair. Lost
memberships are restored in the background while the loop runs; calls that wait, send or close answer probes.
All objects belong to the loop that they were opened in: a call in another loop, or from another thread,
raises RuntimeError and does nothing. Tasks of that loop may share all objects. Timeouts are seconds on that
loop's clock, even over a simulated fabric whose own time is virtual. A call that is cancelled leaves nothing
behind.

Ctrl-C cancels the main task of `asyncio.run`, as everywhere. What another signal's handler raises may break
the endpoint or a simulated fabric, as `mcast.endpoint.blocking` says: then calls raise `Broken`, `close` and
`stats` work, and no task waits for ever.

A send returns when the messages are posted, at once while the send queue has room. On InfiniBand a join may
block the loop for up to 0.25 s, while it asks the SA for the group's MTU or for the reason of a refusal.
`stats` may be called from any thread.

Theory of operation. The loop's thread alone changes an endpoint, and runs each change under the endpoint's
guard. A task that has to wait adds a `Waiter` and sleeps on its future. These wake it:

    queue pair   `_on_readable` receives for the first waiter whose future is not done. Its descriptor is
                 watched while a task sleeps and the queue pair is usable: that of one in ERR stays readable
    channel      `_on_change` handles events; it is watched from the first call to `close`
    timer        `_on_timer` ends waits whose time is over, and does attempts to rejoin. It is set to the
                 earliest of them, and to MAX_SLEEP seconds at most, because a broken endpoint wakes nobody
    send queue   `_on_sendable` lets senders try again
    other tasks  `_wake` lets all waiters check again, after a change that sets `Waiting.dirty`

A task that does not sleep gives way after TIME_SLICE seconds. A queue pair arms its descriptor only when a
receive finds it empty, so a task sleeps only after such a receive. Messages that were received for a task
that is cancelled go back to the front of the buffer. Not handled: a task that starves because others always
find work within their slice.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Mapping
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from math import inf
from threading import get_ident
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar

from typing_extensions import Buffer

from mcast.api import (
    MAX_SLEEP,
    Backend,
    Batch,
    Closed,
    CopiedBatch,
    CqModeration,
    McastError,
    Message,
    Phase,
    QpError,
    QueuePair,
    TimedOut,
)
from mcast.arguments.seconds import MAX_SECONDS, NUMBERS, check_seconds
from mcast.endpoint.base import EndpointBase, GroupLike, SenderBase
from mcast.endpoint.membership import EndpointGroup, GroupState
from mcast.endpoint.policy import Event, LoopbackPolicy, RejoinPolicy
from mcast.endpoint.receiving import Receiving, require_count
from mcast.endpoint.sending import Post, PostRequest, as_batch
from mcast.endpoint.settings import OpenArguments, Settings
from mcast.endpoint.waiting import Box, Done, Operation, Proceed, Step, resume, run_async
from mcast.errors.tree import Broken
from mcast.wire.probe import Peer

if TYPE_CHECKING:
    import asyncio  # elsewhere where it is used: who blocks loads this file, too, and asyncio takes long

__all__ = ["Endpoint", "Membership", "Sender", "open_endpoint"]

P = TypeVar("P")
T = TypeVar("T")
W = TypeVar("W")

_JOINED = GroupState.JOINED

TIME_SLICE = 0.005
"""Seconds that one task may run before it lets the loop run the others."""

MAX_POSTED = 64
"""Maximum number of messages that one call to the provider posts.

Fewer if the send queue holds fewer, so that none waits for room.
"""

NO_LOOP = (
    "mcast.aio needs the running event loop of asyncio, and there is none: call it in a coroutine that "
    "asyncio runs, or anyio on asyncio; on trio, use mcast.open_endpoint in threads (trio.to_thread.run_sync)"
)
"""The text of the RuntimeError where no loop of asyncio runs."""

OTHER_LOOP = (
    "this endpoint belongs to another event loop, the one in which it was opened: open an endpoint in this "
    "loop, or hand the call over with asyncio.run_coroutine_threadsafe(call, loop)"
)
"""The text of the RuntimeError that refuses a call in another loop."""

RETRY_INTERVAL = 0.001
"""Seconds until a send that found no room is tried again, where the provider has no descriptor for sends."""


class Waiter(NamedTuple):
    """Wake-up condition of a task.

    Until `take(what)` finds something, or the loop's time is `until` (inf: never).
    """

    take: Callable[[Any], Any]
    what: Any
    until: float


class AsyncEnterable:
    """Asynchronous context manager, ended by the method that `_ended_by` names."""

    _ended_by: ClassVar[str]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await getattr(self, self._ended_by)()
        except Broken:  # which must not replace the error that broke the endpoint
            if error is None:
                raise


class Endpoint(AsyncEnterable, EndpointBase["Membership | Sender"]):
    """One id and one UD queue pair on one port, and the groups that they are in.

    `open_endpoint` makes an endpoint.

    Close the endpoint, or use it in an `async with`. An endpoint that is forgotten stays in its groups,
    without a warning, until its backend is closed or the process ends (K-LEAVE-13).
    """

    _ended_by = "close"

    def _prepare(self, settings: Settings) -> None:
        if settings.busy_poll:
            raise ValueError(
                f"busy_poll is {settings.busy_poll}: a loop that looks for messages instead of sleeping runs "
                "no other task; leave busy_poll at 0, or use mcast.open_endpoint in a thread"
            )
        loop = _running()
        if loop is None:
            raise RuntimeError(NO_LOOP)
        self._loop = loop
        self._thread = get_ident()
        self._clock = self._loop.time
        self._waiters: dict[asyncio.Future[Any], Waiter] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._channel_fd = self._qp_fd = self._send_fd = -1
        self._senders: set[asyncio.Future[None]] = set()
        self._watching = False
        self._has_handed = False
        self._slice_ends = 0.0

    # --- groups ---

    def join(
        self, group: GroupLike, *, timeout: float | None = 10.0, settle: float = 0.0
    ) -> JoinContext[Membership]:
        """Join a group as a full member, to send and receive.

        `await` the result, or use it in an `async with`.

        Gives the membership when the group is joined and the queue pair attached. `timeout` is in seconds.
        `settle` waits so many seconds more, for fabrics that forward later than they answer;
        `Membership.ready` asks the members instead. Raises the McastError of the step that failed, with its
        likely causes. A join that fails, times out or is cancelled leaves nothing behind.
        """
        return JoinContext(self._join(group, False, timeout, settle, Membership))

    def sender(
        self, group: GroupLike, *, timeout: float | None = 10.0, settle: float = 0.0
    ) -> JoinContext[Sender]:
        """Join a group only to send: the endpoint receives nothing from it.

        Arguments and errors are those of `join`.
        """
        return JoinContext(self._join(group, True, timeout, settle, Sender))

    async def _join(
        self,
        name: GroupLike,
        send_only: bool,
        timeout: float | None,
        settle: float,
        make: Callable[[Endpoint, EndpointGroup], M],
    ) -> M:
        self._require_loop()
        enter = partial(self._entered, make)
        join = self._core.memberships.join(name, send_only, timeout, settle, enter)
        return await self._run("join", Phase.JOIN, join)

    def _require_loop(self) -> None:
        """Refuse a call in another loop than the endpoint's: it would wait for what that one cannot give.

        asyncio's own loops know the thread that runs them. To ask asyncio for the loop of a thread is a
        system call in Python 3.11.
        """
        if getattr(self._loop, "_thread_id", None) == get_ident():
            return
        if (loop := _running()) is not self._loop:
            raise RuntimeError(NO_LOOP if loop is None else OTHER_LOOP)

    def _leave(self, group: EndpointGroup) -> None:
        self._require_loop()
        if group.state is _JOINED:
            self._answer(leaves=True)
        self._guard.run("leave", Phase.LEAVE, self._do_leave, group)
        self._wake()

    def _do_leave(self, group: EndpointGroup) -> None:
        self._core.memberships.leave(group)
        self._forget(group)

    # --- receiving ---

    async def recv(self, timeout: float | None = None) -> Message | None:
        """The next message of any group, as a copy; None when `timeout` seconds have passed."""
        return await self._taken(self._core.receiving.take, None, timeout)

    async def recv_batch(self, max: int = 64, timeout: float | None = None) -> Batch:
        """Receive 1..max messages of all groups, leased; an empty batch when `timeout` seconds have passed.

        This is the fastest way to receive.
        """
        return await self._recv_batch(None, max, timeout)

    async def _recv_batch(self, group: EndpointGroup | None, max: int, timeout: float | None) -> Batch:
        if max.__class__ is not int or max < 1:
            require_count(max)
        batch = await self._taken(partial(self._core.receiving.take_batch, max), group, timeout)
        return CopiedBatch() if batch is None else batch

    async def batches(self, timeout: float | None = None, max: int = 64) -> AsyncIterator[Batch]:
        """Receive leased batches, and release each one when the next is asked for.

        Ends when `timeout` seconds have passed without a message, and when the endpoint is closed.
        """
        if max.__class__ is not int or max < 1:
            require_count(max)
        while True:
            try:
                batch = await self._taken(self._core.receiving.take_batch, max, timeout)
            except Closed:
                return
            if batch is None:
                return
            with batch:
                yield batch

    async def next_event(self, timeout: float | None = 0.0) -> Event | None:
        """The next `mcast.endpoint.policy.Event`, such as Lost; None when `timeout` seconds have passed."""
        if timeout is not None:
            timeout = check_seconds(timeout)
        self._require_loop()
        self._poll()
        event = self._guard.run("next_event", Phase.EVENT, self._take_event)
        if event is not None or timeout == 0:
            return event
        return await self._run("next_event", Phase.EVENT, self._core.events.next_event(timeout))

    def _take_event(self) -> Event | None:
        events = self._core.events
        return events.pop() if events else None

    async def _taken(self, take: Callable[[W], T | None], what: W, timeout: float | None) -> T | None:
        """Return what `take(what)` finds, now or after a change; None when `timeout` seconds have passed.

        While a task has its turn it asks only the queue pair; the loop reports events and steps that are due.
        """
        if timeout is not None and (timeout.__class__ not in NUMBERS or not 0.0 <= timeout <= MAX_SECONDS):
            timeout = check_seconds(timeout)
        core, end = self._core, None
        self._require_loop()
        while True:
            if monotonic() >= self._slice_ends:
                await self._yield_to_loop()
            if self._qp_fd < 0 and not self._core.resources.closed:
                self._poll()
            found = self._guard.run("recv", Phase.RECV, take, what)
            if dirty := core.waiting.dirty:
                self._wake()  # messages of other tasks may have come with this one
            if found is not None or (timeout == 0 and not dirty):
                return found
            if timeout is not None:
                now = self._loop.time()
                if end is None:
                    end = now + timeout
                elif now >= end:
                    return None
            if dirty:
                continue  # more may wait, and only a queue pair that was found empty arms its descriptor
            handed: T | None = await self._sleep(Waiter(take, what, inf if end is None else end))
            if handed is not None:
                return handed

    # --- the driver ---

    async def _run(self, call: str, phase: Phase, operation: Operation[T]) -> T:
        """Carry out an operation by awaiting."""
        self._require_loop()
        run = self._guard.run

        def advance(operation: Operation[T], box: Box) -> Step | Done[T]:
            return run(call, phase, resume, operation, box)

        return await run_async(operation, advance, self._act)

    async def _act(self, step: Step, proceed: Proceed[T]) -> Step | Done[T]:
        """Post, or wait until something happens, at most until `step.until`."""
        until = inf if step.until is None else step.until
        if step.post is not None:
            return proceed(await self._posted(step.post, until))
        if self._poll():
            return proceed(None)
        if over := monotonic() >= self._slice_ends:
            await self._yield_to_loop()
        self._guard.run("recv", Phase.RECV, self._core.receiving.drain)
        if self._core.waiting.dirty:
            self._wake()
        elif not over:  # after another task's turn the operation has to look again before it sleeps
            await self._sleep(Waiter(_drain, self._core.receiving, until))
        return proceed(None)

    async def _posted(self, posting: PostRequest, until: float) -> McastError | None:
        """Post as soon as there is room for a part, at most until `until`.

        Returns the error of the last try.
        """
        while True:
            try:
                posting.call(0.0)
                return None
            except TimedOut as error:
                if error.posted or not self._loop.time() < until:
                    return error
            except McastError as error:
                return error
            with suppress(Closed):  # the queue pair was replaced, as the next try says
                await self._sendable(posting.qp, until)

    async def _yield_to_loop(self) -> None:
        """Let the other tasks run."""
        from asyncio import sleep

        await sleep(0)
        self._slice_ends = monotonic() + TIME_SLICE

    def _poll(self) -> bool:
        """Handle the events that have arrived, and do the steps that are due.

        Returns True if there was anything.
        """
        core = self._core
        happened = self._guard.run("step", Phase.EVENT, core.step)
        self._watch()
        self._wake_at(core.rejoiner.due())
        if happened or core.waiting.dirty:
            self._wake()
        return happened

    def _answer(self, leaves: bool = False) -> None:
        """Answer the probes that wait; while a task waits, the loop receives them for it."""
        if not self._waiters:
            self._guard.run("send", Phase.SEND, self._core.answer, True, leaves)
            if self._core.waiting.dirty:
                self._wake()

    def _watch(self) -> None:
        """Let the loop watch the event channel, and duplicate the queue pair's descriptor for `_sleep`."""
        core = self._core
        # Duplicates, because a closed descriptor's number may by then belong to another file.
        if self._channel_fd < 0:
            self._channel_fd = os.dup(core.resources.channel.fileno())
            self._loop.add_reader(self._channel_fd, self._on_change)
            core.resources.on_id_destroyed = self._on_id_destroyed
        if self._qp_fd < 0 and (qp := core.rejoiner.usable_qp) is not None:
            self._qp_fd = os.dup(qp.fileno())

    def _on_change(self) -> None:
        """Handle an event or a step that is due. The calls that wait meet its errors themselves."""
        try:
            self._poll()
        except (Closed, Broken):
            self._wake()

    def _wake_at(self, at: float) -> None:
        """See to it that `_on_timer` is called at `at` or before.

        Most waits end sooner, so an earlier alarm stays. It comes after MAX_SLEEP seconds at the latest.
        """
        if at < self._timer_at:
            at = min(at, self._loop.time() + MAX_SLEEP)
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_at = self._loop.call_at(at, self._on_timer), at

    def _on_timer(self) -> None:
        """Do the steps that are due, wake the tasks whose time is over, and plan the next alarm."""
        self._timer, self._timer_at = None, inf
        try:
            self._on_change()
            now = self._loop.time()
            for future, waiter in self._waiters.items():
                if waiter.until <= now:
                    _finish(future)
                else:
                    self._wake_at(min(waiter.until, now + MAX_SLEEP))
        except BaseException:  # a signal's handler has raised
            self._loop.call_soon(self._on_timer)
            raise

    async def _sleep(self, waiter: Waiter) -> Any:
        """Wait until something changes, at most until `waiter.until`.

        Returns what another call received for this task.
        """
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiters[future] = waiter
        if waiter.until < self._timer_at:
            self._wake_at(waiter.until)
        elif self._timer is None:
            self._wake_at(self._loop.time() + MAX_SLEEP)
        if self._core.rejoiner.recovery is not None:
            self._unwatch()  # the descriptor of a queue pair in ERR stays readable
        elif not self._watching and self._qp_fd >= 0:
            self._loop.add_reader(self._qp_fd, self._on_readable)
            self._watching = True
        try:
            if self._core.resources.qp.has_port_events:  # and the descriptor need not be readable any more
                self._on_change()
            return await future
        except BaseException:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._keep(future.result())
            raise
        finally:
            del self._waiters[future]
            self._slice_ends = monotonic() + TIME_SLICE

    def _keep(self, found: Message | Batch | None) -> None:
        """Keep the messages of a receive that was cancelled, for the next call that receives."""
        if found is not None:
            with suppress(Broken):
                self._guard.run("recv", Phase.RECV, self._core.receiving.put_back, found)
            self._wake()

    def _on_readable(self) -> None:
        """Receive for a waiting task.

        Waking it alone would not do: the readable descriptor would call this again first.
        """
        if self._has_handed:
            self._has_handed = False
            return
        for future, waiter in self._waiters.items():
            if not future.done():
                self._hand_over(future, waiter)
                return
        if not self._waiters:
            self._unwatch()

    def _hand_over(self, future: asyncio.Future[Any], waiter: Waiter) -> None:
        """Give a task what it waits for, if that has arrived.

        After a message the queue pair is asked once more. If it is empty, its descriptor is armed for the
        next message and no longer readable because of this one, which would call `_on_readable` in vain until
        the task has its turn.

        After a batch it is not asked, because the task gets a whole batch then. The loop looks before the
        task has its turn, and calls `_on_readable` after it: that call passes, and if by then more has come,
        the loop calls again.
        """
        found = None
        try:
            found = self._guard.run("recv", Phase.RECV, self._take_for, future, waiter)
        except McastError as error:
            if not future.done():  # if it is done, the next call meets the error again
                future.set_exception(error)
        if found is None:
            self._on_change()  # the descriptor may be readable because of a port event
        if self._core.waiting.dirty:
            self._wake()

    def _take_for(self, future: asyncio.Future[Any], waiter: Waiter) -> object:
        found = waiter.take(waiter.what)
        if found is not None:
            future.set_result(found)
        if type(found) is Message:
            self._core.receiving.drain(1)
        else:
            self._has_handed = found is not None
        return found

    def _wake(self) -> None:
        """Let every waiting task look again, and see to it that steps that are due are done."""
        self._core.waiting.dirty = False
        self._wake_at(self._core.rejoiner.due())
        for future in self._waiters:
            _finish(future)

    def _unwatch(self) -> None:
        if self._watching:
            self._watching = False
            if not self._loop.is_closed():
                self._loop.remove_reader(self._qp_fd)

    def _on_id_destroyed(self) -> None:
        """The queue pair was closed, by any thread: because it is replaced, or with its backend."""
        # another thread may run the loop by now, or nobody
        here = _running() is self._loop or (not self._loop.is_running() and get_ident() == self._thread)
        if here:
            self._forget_qp()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake if here else self._let_go)

    def _let_go(self) -> None:
        self._forget_qp()
        self._wake()

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until the device has sent all posted messages; TimedOut when `timeout` seconds have passed.

        Raises QpError if the device could not send one of them.
        """
        self._require_loop()
        core = self._core
        deadline = core.waiting.deadline(timeout)
        self._guard.run("flush", Phase.SEND, core.resources.require_open, "flush", Phase.SEND)
        await self._post("flush", core.sending.flush(core.resources.qp, deadline))

    async def _post(self, call: str, operation: Operation[None]) -> None:
        """Carry out an operation that sends."""
        try:
            await self._run(call, Phase.SEND, operation)
        except QpError:
            self._on_change()
            raise

    async def _sendable(self, qp: QueuePair, until: float) -> None:
        """Sleep until another try to send may get further, at most until `until`."""
        if self._send_fd < 0:
            fd = qp.send_fileno()
            if fd is None:
                from asyncio import sleep

                await sleep(RETRY_INTERVAL)
            else:
                self._send_fd = os.dup(fd)  # the next try arms it
            return
        future: asyncio.Future[None] = self._loop.create_future()
        alarm = None if until == inf else self._loop.call_at(until, _finish, future)
        if not self._senders:
            self._loop.add_reader(self._send_fd, self._on_sendable)
        self._senders.add(future)
        try:
            await future
        finally:
            if alarm is not None:
                alarm.cancel()
            self._senders.discard(future)
            if not self._senders and self._send_fd >= 0:
                self._loop.remove_reader(self._send_fd)

    def _on_sendable(self) -> None:
        """Let all tasks try again. A task that finds no room arms the descriptor anew."""
        self._loop.remove_reader(self._send_fd)
        senders, self._senders = self._senders, set()
        for future in senders:
            _finish(future)

    def _forget_qp(self) -> None:
        self._unwatch()
        # Forgotten first: one that is closed twice may be another file's by then.
        fd, self._qp_fd = self._qp_fd, -1
        if fd >= 0:
            os.close(fd)
        if self._send_fd >= 0 and not self._loop.is_closed():
            self._on_sendable()
        fd, self._send_fd = self._send_fd, -1
        if fd >= 0:
            os.close(fd)

    # --- the end ---

    async def close(self) -> None:
        """Leave every group and free all resources; calls that wait end with Closed. Idempotent.

        A task that was handed messages before this, and runs only after it, still returns them, because they
        were received and counted. Its next call raises Closed, as every other call does.
        """
        if not self._loop.is_closed():
            self._require_loop()
        self._timer_at = -inf  # nothing is due any more
        if self._channel_fd >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(self._channel_fd)
        fd, self._channel_fd = self._channel_fd, -1
        if fd >= 0:
            os.close(fd)
        if self._timer is not None:
            self._timer.cancel()
        self._forget_qp()
        if not self._loop.is_closed():  # in a closed one no task runs again
            self._wake()
        self._guard.close(self._end)

    def _end(self) -> None:
        try:
            if self._guard.amid == "close":  # else the endpoint is broken
                self._core.answer(keep=False)
        finally:
            self._free()


def open_endpoint(
    backend: str | Backend,
    bind: IPv4Address | IPv6Address | str | None = None,
    *,
    device: str | None = None,
    port_num: int = 1,
    loopback: LoopbackPolicy | Literal["on", "off", "filter"] = "on",
    rejoin: RejoinPolicy | None = RejoinPolicy(),  # noqa: B008  (frozen)
    sequence: bool | None = False,
    receive_depth: int = 512,
    send_depth: int = 128,
    max_message: int | None = None,
    seed: int | None = None,
    traffic_class: int | None = None,
    service_level: int | None = None,
    busy_poll: float = 0.0,
    comp_vector: int | None = None,
    moderation: CqModeration | None = None,
    timestamps: bool = False,
    options: Mapping[str, object] | None = None,
) -> Endpoint:
    """Open an endpoint whose calls are awaited. Arguments and errors are those of `mcast.open_endpoint`.

    Call it inside a coroutine, because the endpoint belongs to the running event loop. `busy_poll` must be 0.
    """
    return Endpoint(OpenArguments(**locals()))


class Sender(AsyncEnterable, SenderBase):
    """A group that the program sends to."""

    _ended_by = "leave"
    _endpoint: Endpoint

    def __init__(self, endpoint: Endpoint, group: EndpointGroup) -> None:
        self._endpoint, self._group = endpoint, group
        self._chunk = min(MAX_POSTED, endpoint._core.resources.settings.send_depth)

    async def send(self, payload: Buffer, imm: int | None = None, timeout: float | None = None) -> None:
        """Send one message, as `send_batch` with a batch of one."""
        await self._post(self._endpoint._core.sending.send_one, payload, imm, timeout)

    async def send_batch(
        self, payloads: Iterable[Buffer] | memoryview, imm: int | None = None, timeout: float | None = None
    ) -> int:
        """Send each payload as one message, in order; return how many were sent. UD has no acknowledgement.

        A C-contiguous memoryview of two dimensions is a batch of its rows, and a `HeaderBodyBatch` one of
        messages in two parts: these take the least time.
        `imm` is a 32-bit immediate for every message. Waits, at most `timeout` seconds, while the send queue
        is full or a lost membership is being restored. Raises MessageTooLarge, TimedOut, QpError,
        MembershipLost or Closed; the error's `posted` is how many of the messages were sent.
        """
        batch, endpoint, chunk = as_batch(payloads), self._endpoint, self._chunk
        count, send = len(batch), endpoint._core.sending.send
        if count <= chunk:
            await self._post(send, batch, imm, timeout)
            return count
        waiting, sending = endpoint._core.waiting, endpoint._core.sending
        deadline = waiting.deadline(timeout)
        endpoint._require_loop()
        if isinstance(batch, list):  # each part would be checked by itself, when others are on their way
            route = sending.route_to(self._group, timeout, deadline)
            batch = [*sending.checked(*await endpoint._run("send", Phase.SEND, route), batch)]
        for start in range(0, count, chunk):
            try:
                await self._post(send, batch[start : start + chunk], imm, waiting.left(deadline))
            except McastError as error:
                error.posted += start
                raise
        return count

    async def reply(
        self, message: Message, payload: Buffer, imm: int | None = None, timeout: float | None = None
    ) -> None:
        """Send one message to the sender of `message`, a message of this group, and to nobody else.

        The other endpoint receives the payload as a message of no group, from `Endpoint.recv`. The other
        arguments and errors are those of `send`. Raises ValueError if that sender cannot be answered, and on
        an endpoint with sequence=True. Soft-RoCE loses unicast within a network namespace (K-FABRIC-6).
        """
        await self._post(self._endpoint._core.sending.reply, (message, payload), imm, timeout)

    async def _post(self, post: Post[P, object], what: P, imm: int | None, timeout: float | None) -> None:
        """Call `post` if the group is joined, and leave all else to the operation.

        A task that has had its turn waits first, because a cancelled send must not be sent.
        """
        endpoint, group = self._endpoint, self._group
        sending = endpoint._core.sending
        endpoint._require_loop()
        if endpoint._guard.amid:  # the endpoint is broken
            endpoint._guard.run("send", Phase.SEND, lambda: None)
        if monotonic() >= endpoint._slice_ends:
            await endpoint._yield_to_loop()
            endpoint._poll()  # the loop does not watch for port events while nobody receives
            endpoint._answer()
        if timeout is not None:
            timeout = check_seconds(timeout)
        qp, destination = endpoint._core.resources.qp, group.destination
        failed: tuple[QueuePair, McastError] | None = None
        if group.state is _JOINED and destination is not None:
            try:
                post(group, qp, destination, what, imm, 0)
                return
            except (QpError, Closed, TimedOut) as error:
                failed = qp, error
        send = sending.operation(group, post, what, imm, timeout, failed)
        failed = None  # it must not refer to this frame
        await endpoint._post("send", send)

    async def ready(self, members: int = 1, timeout: float | None = 10.0) -> dict[Peer, int]:
        """Wait until the fabric delivers to `members` other members: until so many have answered a probe.

        Return the members that have answered, and the largest payload in bytes that is known to reach each:
        a longer probe asks for that, and shorter ones do where it is not answered, which takes half a second
        or more. A member of this library answers inside its calls that wait or receive, and in `send`,
        `leave` and `close` if it only sends. A program that only has a `sender` receives nothing of the
        group, and does not answer. Raises TimedOut after `timeout` seconds; the error names those that have
        answered, too.
        """
        endpoint = self._endpoint
        ready = endpoint._core.probing.ready(self._group, members, timeout)
        return await endpoint._run("ready", Phase.RECV, ready)

    async def leave(self) -> None:
        """Leave the group. Idempotent. Messages that were received and not yet asked for are dropped."""
        self._endpoint._leave(self._group)


class Membership(Sender):
    """A group that the program sends to and receives from."""

    async def recv(self, timeout: float | None = None) -> Message | None:
        """The next message of the group, as a copy; None when `timeout` seconds have passed."""
        endpoint = self._endpoint
        return await endpoint._taken(endpoint._core.receiving.take, self._group, timeout)

    async def recv_batch(self, max: int = 64, timeout: float | None = None) -> Batch:
        """Receive 1..max messages of the group; an empty batch when `timeout` seconds have passed.

        The messages are leased where all that have come are of this group, and copies where the endpoint
        hears other groups in between.
        """
        return await self._endpoint._recv_batch(self._group, max, timeout)

    async def probe_loopback(self, timeout: float = 0.5) -> bool:
        """Return True if the device returns the endpoint's own messages, found out by sending one.

        True as soon as the message comes back, False when `timeout` seconds have passed. With loopback="off"
        a device that has agreed not to return own messages, and returns none, ends the filter.
        """
        endpoint = self._endpoint
        probe = endpoint._core.probing.probe_loopback(self._group, timeout)
        return await endpoint._run("probe_loopback", Phase.SEND, probe)

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages as they arrive; ends when the group is left or the endpoint closed."""
        while True:
            try:
                message = await self.recv()
            except Closed:
                return
            if message is not None:
                yield message


M = TypeVar("M", bound=Sender)


class JoinContext(Generic[M]):
    """A join under way.

    `await` it for the membership, or use it in an `async with`, which leaves the group at the end.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, M]) -> None:
        self._coroutine = coroutine
        self._member: M | None = None

    def __await__(self) -> Generator[Any, None, M]:
        return self._coroutine.__await__()

    async def __aenter__(self) -> M:
        self._member = await self._coroutine
        return self._member

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._member is not None
        await self._member.__aexit__(kind, error, trace)


def _running() -> asyncio.AbstractEventLoop | None:
    """The loop that this thread runs."""
    from asyncio import get_running_loop

    try:
        return get_running_loop()
    except RuntimeError:
        return None


def _finish(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_result(None)


def _drain(receiving: Receiving) -> None:
    receiving.drain()
