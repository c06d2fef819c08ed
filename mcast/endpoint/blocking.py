"""Endpoints whose calls block: an endpoint on one port, with its memberships and senders.

```python
with mcast.open_endpoint("rdma", bind="10.0.0.1") as endpoint:
    with endpoint.join("239.1.2.3") as group:
        group.send(b"hello")
        for batch in endpoint.batches(timeout=1.0):
            ...
```

All objects may be used from several threads at once. When several threads wait on one endpoint, one of them
receives for all. An endpoint has no thread of its own: it rejoins lost groups and answers probes inside the
calls that wait, send or close. Timeouts are seconds on the backend's clock; None waits without end, 0 does
not wait.

Ctrl-C, and whatever else a signal's handler or another thread raises, ends a call at once. A call that is
interrupted where it waits is not done, and the endpoint stays usable: a join leaves its group again. A call
that is interrupted in the middle of a change breaks the endpoint, or the simulated fabric: later calls raise
`Broken`, and `close` and `stats` still work. A program that waits is practically always interrupted where it
waits; one that sends or polls in a loop on the simulator mostly in the middle. A `close` that is interrupted
goes on when it is called again. The result of a finished call may be lost: a message that a receive had taken
(as with a socket), a membership, which is in `groups`; an endpoint that was being opened goes with its
backend.

A call that comes from a handler, a finalizer or an argument's `__float__` in the middle of another call of
the same endpoint raises RuntimeError. `close` there is carried out when that call ends, and `stats` shows
what is there.

Who does what: each change runs under the guard of the endpoint (`mcast.contract.poison`), in `Guard.run`,
and no call waits for a message there. The call that receives, and reads events, for all holds a lock of its
own, its claim; the others wait on `Waiters`, at most a second before they look again. Nobody has to reset
the claim: its holder leaves the `with`, however it ends. Posting to the queue pair needs no lock, because
posting to one that is replaced raises Closed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from math import inf
from threading import Lock, get_ident
from types import TracebackType
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from typing_extensions import Buffer

from mcast.api import (
    MAX_SLEEP,
    Backend,
    Batch,
    Closed,
    CmEvent,
    CopiedBatch,
    CqModeration,
    McastError,
    Message,
    Phase,
    QpError,
    QueuePair,
    Refused,
    SignalSafeWeakSet,
    Waiters,
)
from mcast.arguments.seconds import MAX_SECONDS, NUMBERS, check_seconds
from mcast.endpoint.base import EndpointBase, GroupLike, SenderBase
from mcast.endpoint.membership import EndpointGroup, GroupState
from mcast.endpoint.policy import Event, LoopbackPolicy, RejoinPolicy
from mcast.endpoint.receiving import log_isolation, require_count
from mcast.endpoint.sending import Post, PostRequest, as_batch
from mcast.endpoint.settings import OpenArguments, Settings
from mcast.endpoint.waiting import Box, Done, Operation, Proceed, Step, resume, run_blocking
from mcast.errors.tree import Broken
from mcast.wire.probe import Peer

__all__ = ["Endpoint", "Membership", "Sender", "open_endpoint"]

P = TypeVar("P")
T = TypeVar("T")

_JOINED = GroupState.JOINED

PROBE_POLL_INTERVAL = 0.01
"""Seconds from one look for probes to the next, in the sends of a program that does not receive."""

POLL_INTERVAL_CALLS = 64
"""After so many sends and successful receives in a row, a call asks for events although it need not wait."""

REENTRANT_CALL = (
    "recv: this thread is waiting in another call of the same endpoint, and this call comes from a signal's "
    "handler or a finalizer: let the handler set a flag, and make this call where a thread looks at the flag"
)
"""The text of the RuntimeError that refuses a call that would wait for its own thread."""


class Enterable:
    """An object that the end of a `with` ends, by the method that `_ended_by` names."""

    _ended_by: ClassVar[str]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._exit(error)
        finally:
            self._exit(True)  # goes on where an interrupt has cut the first one off

    def _exit(self, error: object) -> None:
        """End the object; what is broken must not replace the error that broke it."""
        try:
            getattr(self, self._ended_by)()
        except Broken:
            if error is None:
                raise


class _Receive(NamedTuple):
    """Wait of the thread that receives for all: on `qp`, or for events alone while there is none."""

    qp: QueuePair | None
    max: int
    timeout: float | None


class Endpoint(Enterable, EndpointBase["Membership | Sender"]):
    """One id and one UD queue pair on one port, and the groups that they are in.

    `open_endpoint` makes an endpoint.

    Close the endpoint, or use it in a `with`. An endpoint that is forgotten stays in its groups, without a
    warning, until its backend is closed or the process ends (K-LEAVE-13).
    """

    _ended_by = "close"
    _calls_since_poll = 0
    """Sends and receives since a call last asked for events."""
    _answered_at = 0.0
    """When a send last looked for probes."""

    def _prepare(self, settings: Settings) -> None:
        self._waiters = Waiters()
        self._claim = Lock()
        self._claimant = 0
        """The claim of the thread that receives for all while it is locked, and that thread."""
        self._reads = False
        """True while a thread takes an event outside of the lock; if it stays so, the event is lost."""
        _endpoints.add(self)

    # --- groups ---

    def join(self, group: GroupLike, *, timeout: float | None = 10.0, settle: float = 0.0) -> Membership:
        """Join a group as a full member, to send and receive.

        Returns when the group is joined and the queue pair attached.

        `timeout` is in seconds. `settle` waits so many seconds more, for fabrics that forward later than they
        answer; `Membership.ready` asks the members instead. Raises the McastError of the step that failed,
        with its likely causes. A join that fails, times out or is interrupted where it waits leaves nothing
        behind.
        """
        return self._join(group, False, timeout, settle, Membership)

    def sender(self, group: GroupLike, *, timeout: float | None = 10.0, settle: float = 0.0) -> Sender:
        """Join a group only to send: the endpoint receives nothing from it.

        Arguments and errors are those of `join`.
        """
        return self._join(group, True, timeout, settle, Sender)

    def _join(
        self,
        name: GroupLike,
        send_only: bool,
        timeout: float | None,
        settle: float,
        make: Callable[[Endpoint, EndpointGroup], M],
    ) -> M:
        enter = partial(self._entered, make)
        join = self._core.memberships.join(name, send_only, timeout, settle, enter)
        return self._run("join", Phase.JOIN, join)

    def _leave(self, group: EndpointGroup) -> None:
        self._guard.run("leave", Phase.LEAVE, self._do_leave, group)

    def _do_leave(self, group: EndpointGroup) -> None:
        receives = self._claim.locked()
        if not receives and group.state is _JOINED:
            self._core.answer(keep=True, leaves=True)
        self._core.memberships.leave(group)
        self._forget(group)
        self._waiters.wake()
        if receives and not self.closed:
            self._core.resources.wake()  # wake the receiving thread, which may wait for this very group

    # --- receiving ---

    def recv(self, timeout: float | None = None) -> Message | None:
        """The next message of any group, as a copy; None when `timeout` seconds have passed."""
        return self._recv(None, timeout)

    def recv_batch(self, max: int = 64, timeout: float | None = None) -> Batch:
        """Receive 1..max messages of all groups, leased; an empty batch when `timeout` seconds have passed.

        This is the fastest way to receive.
        """
        return self._recv_batch(None, max, timeout)

    def _recv_batch(self, group: EndpointGroup | None, max: int, timeout: float | None) -> Batch:
        if max.__class__ is not int or max < 1:
            require_count(max)
        receiving = self._core.receiving
        batch = self._taken(partial(receiving.take_batch, max), group, timeout)
        if batch is not None:
            return batch
        if timeout == 0 and not self._claim.locked():
            last = self._guard.run("recv", Phase.RECV, self._take_last, receiving.take_batch, max, group)
            return CopiedBatch() if last is None else last
        return self._run("recv", Phase.RECV, receiving.recv_batch(max, timeout, group))

    def batches(self, timeout: float | None = None, max: int = 64) -> Iterator[Batch]:
        """Receive leased batches, and release each one when the next is asked for.

        Ends when `timeout` seconds have passed without a message, and when the endpoint is closed.
        """
        while True:
            try:
                batch = self.recv_batch(max, timeout)
            except Closed:
                return
            with batch:
                if not len(batch):
                    return
                yield batch

    def next_event(self, timeout: float | None = 0.0) -> Event | None:
        """The next `mcast.endpoint.policy.Event`, such as Lost; None when `timeout` seconds have passed."""
        if timeout is not None:
            timeout = check_seconds(timeout)
        event = self._guard.run("next_event", Phase.EVENT, self._take_event)
        if event is not None or timeout == 0:
            return event
        return self._run("next_event", Phase.EVENT, self._core.events.next_event(timeout))

    def _take_event(self) -> Event | None:
        if not self._claim.locked():
            self._poll()
        events = self._core.events
        return events.pop() if events else None

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the device has sent all posted messages; TimedOut when `timeout` seconds have passed.

        Raises QpError if the device could not send one of them.
        """
        core = self._core
        deadline = core.waiting.deadline(timeout)
        self._guard.run("flush", Phase.SEND, core.resources.require_open, "flush", Phase.SEND)
        self._run("flush", Phase.SEND, core.sending.flush(core.resources.qp, deadline))

    def _recv(self, group: EndpointGroup | None, timeout: float | None) -> Message | None:
        receiving = self._core.receiving
        message = self._taken(receiving.take, group, timeout)
        if message is not None:
            return message
        if timeout == 0 and not self._claim.locked():
            return self._guard.run("recv", Phase.RECV, self._take_last, receiving.take, group)
        return self._run("recv", Phase.RECV, receiving.recv(group, timeout))

    def _taken(self, take: Callable[[P], T | None], what: P, timeout: float | None) -> T | None:
        """Return what `take(what)` finds at once.

        None if it finds nothing, or if another thread is receiving.

        A receive that finds something does not ask for events each time, because asking may take longer than
        receiving.
        """
        if timeout is not None and (timeout.__class__ not in NUMBERS or not 0.0 <= timeout <= MAX_SECONDS):
            check_seconds(
                timeout
            )  # what is no number of seconds is refused, although nothing may wait for them
        # As `Guard.run`, without two calls, in a receive that finds a message and costs as much as they do.
        guard = self._guard
        found: T | None = None
        refused: Refused | None = None
        try:
            with guard.lock:
                if guard.amid:
                    guard.refuse("recv", Phase.RECV)
                guard.amid = "recv"
                try:
                    if not self._claim.locked():
                        self._calls_since_poll += 1
                        if self._calls_since_poll > POLL_INTERVAL_CALLS:
                            self._poll()
                        found = take(what)
                except Refused as error:
                    refused = error
                guard.amid = ""
        finally:
            if guard.deferred:
                guard.run_deferred_closes()
        if refused is not None:
            try:
                raise refused.error from refused.error.__cause__
            finally:
                del refused  # which refers to the error, whose traceback refers to this frame
        return found

    def _take_last(self, take: Callable[..., T | None], *what: Any) -> T | None:
        """Handle events and take once more, for a receive with timeout 0."""
        if self._claim.locked():
            return None
        self._poll()
        found = take(*what)
        if found is None:
            log_isolation(self._core.resources)
        return found

    # --- the driver ---

    def _poll(self) -> bool:
        """Handle the events that have arrived, and do the steps that are due.

        Returns True if there was anything.
        """
        self._calls_since_poll = 0
        if self._reads and not self._claim.locked():
            self._reads = False
            self._core.recover_lost_event()
        happened = self._core.step()
        if happened:
            self._waiters.wake()
        return happened

    def _unless_busy(self, act: Callable[[], object]) -> None:
        """Call `act`, unless another thread is receiving."""
        if not self._claim.locked():
            self._guard.run("send", Phase.SEND, act)

    def _answer(self) -> None:
        """Answer the probes that wait, where the program sends and does not receive."""
        self._core.answer(keep=True)

    def _run(self, call: str, phase: Phase, operation: Operation[T]) -> T:
        """Carry out an operation by blocking."""
        run = self._guard.run

        def advance(operation: Operation[T], box: Box) -> Step | Done[T]:
            return run(call, phase, resume, operation, box)

        return run_blocking(operation, advance, partial(self._act, call, phase))

    def _act(self, call: str, phase: Phase, step: Step, proceed: Proceed[T]) -> Step | Done[T]:
        """Post, or wait until something happens, at most until `step.until`."""
        left = self._core.waiting.left(step.until)
        if step.post is not None:
            posting: PostRequest = step.post
            try:
                posting.call(left)
            except McastError as error:
                return proceed(error)
            return proceed(None)
        claim, how = Lock(), None
        try:
            with claim:
                how = self._guard.run(call, phase, self._plan, step, claim, left)
                if isinstance(how, _Receive):
                    # Before another thread may receive: what came later is not to overtake.
                    return proceed(self._receive(how))
        finally:
            if isinstance(how, _Receive):
                with self._guard.lock:
                    self._waiters.wake()
        if how is not None:
            how.acquire(timeout=MAX_SLEEP if left is None else min(left, MAX_SLEEP))
            with self._guard.lock:
                self._waiters.discard(how)
        return proceed(None)

    def _plan(self, step: Step, claim: Lock, left: float | None) -> Any:
        """Return how to wait.

        `_Receive` as the receiving thread, a lock while another one receives, None to retry.
        """
        if self._claim.locked():
            if self._claimant == get_ident():
                raise Refused(RuntimeError(REENTRANT_CALL))
            # Only the receiving thread reads events: if this one did, that one would sleep on.
            return self._waiters.add()
        if self._poll():
            return None
        core = self._core
        self._claim, self._claimant = claim, get_ident()
        due = core.rejoiner.due()
        if due != inf:
            soon = core.waiting.left(due)
            left = soon if left is None or soon is None else min(left, soon)
        if not core.resources.backend.virtual_time:  # where nobody could break the endpoint meanwhile
            left = MAX_SLEEP if left is None else min(left, MAX_SLEEP)
        return _Receive(core.rejoiner.usable_qp, step.max, left)

    def _receive(self, how: _Receive) -> Batch | None:
        """Wait for a message or an event, as the thread that has the claim."""
        if how.qp is None:
            self._reads = True
            event = self._core.resources.channel.get_event(how.timeout)
            self._guard.run("recv", Phase.RECV, self._on_event, event)
            return None
        failed: McastError
        try:
            return how.qp.recv(how.max, how.timeout, events=True)
        except (QpError, Closed) as error:
            failed = error
        self._guard.run("recv", Phase.RECV, self._on_error, failed)
        return None

    def _on_event(self, event: CmEvent | None) -> None:
        if event is not None:
            self._core.on_event(event)
        self._reads = False

    def _on_error(self, error: McastError) -> None:
        if isinstance(error, QpError):
            self._core.on_qp_error(error)
        else:
            self._core.resources.require_open("recv", Phase.RECV)

    # --- the end ---

    def close(self) -> None:
        """Leave every group and free all resources; calls that wait end with Closed. Idempotent.

        A call that has received messages by then still returns them; the next call raises Closed. May be
        called on a broken endpoint, and again after it was interrupted.
        """
        self._guard.close(self._end)

    def _end(self) -> None:
        try:
            if self._guard.amid == "close" and not self._claim.locked():  # else the endpoint is broken
                self._core.answer(keep=False)
        finally:
            try:
                self._free()  # wakes the receiving thread
            finally:
                self._waiters.wake()


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
    """Open an endpoint, which is to RDMA multicast what a bound UDP socket is to IP multicast.

    `bind` is a local IP address, as for a socket; it selects the port of an RDMA device that the endpoint is
    on. `Endpoint.join` does what the socket option IP_ADD_MEMBERSHIP does, but returns only when the fabric
    has agreed. From then on every member of the group gets each message of the others, whole or not at all. A
    message is at most one MTU, and may be lost. There are no UDP port numbers: a member hears every message
    of the group.

        with mcast.open_endpoint("sim", "10.0.0.1") as endpoint:
            with endpoint.join("239.1.2.3") as group:
                group.send(b"hello")
                message = group.recv(timeout=1.0)

    backend        a name, which the endpoint opens with the keyword arguments in `options`, and closes; or an
                   open backend, which stays open
    bind           the local IP address; without `bind` and `device` the endpoint takes the only active port
                   that has an address, and logs which it is
    device         the name of the device, instead of `bind`; `port_num`, from 1, is its port
    loopback       "on": the endpoint hears its own messages; "off" and "filter" keep them away
                   (LoopbackPolicy)
    rejoin         when to join again after a membership was lost (RejoinPolicy); None: never, calls raise
                   MembershipLost
    sequence       put a 24-byte header with a number into each message, and count gaps, duplicates and late
                   messages of each sender; an event (MessagesMissing) names what is missing. All members must
                   do so. None: deliver messages as they came, with the headers of those that have one, and
                   say nothing of that
    receive_depth  the length of the receive queue, in messages, and how many messages of a group wait for a
                   call that asks for them
    send_depth     the length of the send queue, in messages
    max_message    the largest payload in bytes, both for sending and receiving; None: what one MTU carries
    seed           the seed of random delays and stream ids; None: from the backend, or else from the
                   operating system
    traffic_class  of sent messages, 0..255, on RoCE `dscp << 2`; None: as the join says, which is 0 on RoCE
    service_level  of sent messages, 0..15, on RoCE the priority 0..7; None: as the join says
    busy_poll      how many seconds a waiting call polls before it sleeps; inf: it never sleeps
    comp_vector    the device's completion vector; None: each queue pair gets the next one
    moderation     wake a waiting call for several messages at once (CqModeration)
    timestamps     stamp each message when it arrives: `Message.timestamp`

    An endpoint whose opening is interrupted goes with its backend; docs/endpoints.md says what an exception
    at any other moment leaves. `mcast.api.QpInit` says more about the last four options. Raises ValueError,
    which names the choices, for an argument that cannot be; BackendError if the provider cannot run here;
    McastError if the stack refuses.
    """
    return Endpoint(OpenArguments(**locals()))


class Sender(Enterable, SenderBase):
    """A group that the program sends to."""

    _ended_by = "leave"
    _endpoint: Endpoint

    def __init__(self, endpoint: Endpoint, group: EndpointGroup) -> None:
        self._endpoint, self._group = endpoint, group

    def send(self, payload: Buffer, imm: int | None = None, timeout: float | None = None) -> None:
        """Send one message, as `send_batch` with a batch of one."""
        self._post(self._endpoint._core.sending.send_one, payload, imm, timeout)

    def send_batch(
        self, payloads: Iterable[Buffer] | memoryview, imm: int | None = None, timeout: float | None = None
    ) -> int:
        """Send each payload as one message, in order; return how many were sent. UD has no acknowledgement.

        A C-contiguous memoryview of two dimensions is a batch of its rows, and a `HeaderBodyBatch` one of
        messages in two parts: these take the least time.
        `imm` is a 32-bit immediate for every message. Waits, at most `timeout` seconds, while the send queue
        is full or a lost membership is being restored. Raises MessageTooLarge, TimedOut, QpError,
        MembershipLost or Closed; the error's `posted` is how many of the messages were sent.
        """
        batch = as_batch(payloads)
        self._post(self._endpoint._core.sending.send, batch, imm, timeout)
        return len(batch)

    def reply(
        self, message: Message, payload: Buffer, imm: int | None = None, timeout: float | None = None
    ) -> None:
        """Send one message to the sender of `message`, a message of this group, and to nobody else.

        The other endpoint receives the payload as a message of no group, from `Endpoint.recv`. The other
        arguments and errors are those of `send`. Raises ValueError if that sender cannot be answered, and on
        an endpoint with sequence=True. Soft-RoCE loses unicast within a network namespace (K-FABRIC-6).
        """
        self._post(self._endpoint._core.sending.reply, (message, payload), imm, timeout)

    def _post(self, post: Post[P, object], what: P, imm: int | None, timeout: float | None) -> None:
        """Call `post` if the group is joined, and leave all else to the operation.

        Events that have come are handled first, unless a thread that is receiving handles them.
        """
        endpoint, group = self._endpoint, self._group
        core, guard = endpoint._core, endpoint._guard
        if guard.amid:  # another thread is in the middle of a change, or the endpoint is broken
            guard.run("send", Phase.SEND, lambda: None)
        endpoint._calls_since_poll += 1  # port events are not in `is_idle`: only the queue pair has them
        if not endpoint._claim.locked():
            # The receive queue fills with own messages, too, so a look is due by time and by number; but
            # not while virtual time stands still, because then nobody else acts.
            pause = core.waiting.now() - endpoint._answered_at
            polls = endpoint._calls_since_poll > POLL_INTERVAL_CALLS or not core.is_idle()
            if polls:
                endpoint._unless_busy(endpoint._poll)
            if pause >= PROBE_POLL_INTERVAL or (polls and pause):
                endpoint._answered_at += pause
                endpoint._unless_busy(endpoint._answer)
        # No lock is needed, because posting to a queue pair that is replaced from here on raises Closed.
        qp, destination = core.resources.qp, group.destination
        failed: tuple[QueuePair, McastError] | None = None
        if group.state is _JOINED and destination is not None:
            try:
                post(group, qp, destination, what, imm, timeout)
                return
            except (QpError, Closed) as error:
                failed = qp, error
        send = core.sending.operation(group, post, what, imm, timeout, failed)
        failed = None  # it must not refer to this frame
        endpoint._run("send", Phase.SEND, send)

    def ready(self, members: int = 1, timeout: float | None = 10.0) -> dict[Peer, int]:
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
        return endpoint._run("ready", Phase.RECV, ready)

    def leave(self) -> None:
        """Leave the group. Idempotent. Messages that were received and not yet asked for are dropped."""
        self._endpoint._leave(self._group)


class Membership(Sender):
    """A group that the program sends to and receives from."""

    def recv(self, timeout: float | None = None) -> Message | None:
        """The next message of the group, as a copy; None when `timeout` seconds have passed."""
        return self._endpoint._recv(self._group, timeout)

    def recv_batch(self, max: int = 64, timeout: float | None = None) -> Batch:
        """Receive 1..max messages of the group; an empty batch when `timeout` seconds have passed.

        The messages are leased where all that have come are of this group, and copies where the endpoint
        hears other groups in between.
        """
        return self._endpoint._recv_batch(self._group, max, timeout)

    def probe_loopback(self, timeout: float = 0.5) -> bool:
        """Return True if the device returns the endpoint's own messages, found out by sending one.

        True as soon as the message comes back, False when `timeout` seconds have passed. With loopback="off"
        a device that has agreed not to return own messages, and returns none, ends the filter.
        """
        endpoint = self._endpoint
        probe = endpoint._core.probing.probe_loopback(self._group, timeout)
        return endpoint._run("probe_loopback", Phase.SEND, probe)

    def __iter__(self) -> Iterator[Message]:
        """Messages as they arrive; ends when the group is left or the endpoint closed."""
        while True:
            try:
                message = self.recv()
            except Closed:
                return
            if message is not None:
                yield message


M = TypeVar("M", bound=Sender)

_endpoints: SignalSafeWeakSet[Endpoint] = SignalSafeWeakSet()


def _after_fork() -> None:
    """End the claims of the parent's threads, which are not there to leave them."""
    for endpoint in _endpoints:
        if endpoint._claimant != get_ident():
            endpoint._claim = Lock()


os.register_at_fork(after_in_child=_after_fork)
