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

A call that Ctrl-C ends is done or not done: an interrupted join leaves no membership, and an interrupted
`leave` or `close` may be called again. A message that an interrupted receive had taken from the device may be
lost, as with a socket.

The handler of any other signal may come between two lines of a call of its own thread, as may a finalizer
or an argument's `__float__`. Each of them may call `close`, `leave`, `send` and `stats`. A `close` or `leave`
that comes while the call holds a lock is carried out once that call waits or ends, and an error of it goes to
`sys.unraisablehook`. Any other call there is done, or refused with RuntimeError. The handler must not raise:
that may break the call that it comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from math import inf
from threading import get_ident
from typing import Literal, TypeVar

from typing_extensions import Buffer

from mcast.api import Backend, Batch, Closed, CmEvent, CqModeration, Message, Phase, QpError, QueuePair
from mcast.arguments.seconds import LONGEST, PLAIN, seconds_of
from mcast.endpoint.membership import EndpointGroup, GroupState
from mcast.endpoint.policy import Event, LoopbackPolicy, RejoinPolicy
from mcast.endpoint.sending import Post, as_batch
from mcast.endpoint.settings import Opening
from mcast.endpoint.view import EndpointView, GroupLike, MemberView
from mcast.endpoint.waiting import Operation, Wait
from mcast.interrupts import (
    WITHIN,
    Enterable,
    interruptible,
    is_within,
    later,
    made_or_undone,
    uninterrupted,
)
from mcast.wire.probe import Peer

__all__ = ["Endpoint", "Membership", "Sender", "open_endpoint"]

P = TypeVar("P")
T = TypeVar("T")

_JOINED = GroupState.JOINED

ANSWER_INTERVAL = 0.01
"""Seconds from one look for probes to the next, in the sends of a program that does not receive."""

LOOK_EVERY = 64
"""After so many sends and successful receives in a row, a call asks for events although it need not wait."""


class Endpoint(Enterable, EndpointView["Membership | Sender"]):
    """One id and one UD queue pair on one port, and the groups that they are in.

    `open_endpoint` makes an endpoint.

    Close the endpoint, or use it in a `with`. An endpoint that is forgotten stays in its groups, without a
    warning, until its backend is closed or the process ends (K-LEAVE-13).
    """

    _ended_by = "close"
    _unlooked = 0
    """Sends and receives since a call last asked for events."""
    _answered_at = 0.0
    """When a send last looked for probes."""

    # --- groups ---

    def join(self, group: GroupLike, *, timeout: float | None = 10.0, settle: float = 0.0) -> Membership:
        """Join a group as a full member, to send and receive; return when the group is joined and the queue
        pair attached.

        `timeout` is in seconds. `settle` waits so many seconds more, for fabrics that forward later than they
        answer; `Membership.ready` asks the members instead. Raises the McastError of the step that failed,
        with its likely causes. A join that fails, times out or is ended by Ctrl-C leaves nothing behind.
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
        def joined() -> M:
            member = make(self, self._run(self._session.memberships.join(name, send_only, timeout, settle)))
            self._enter(member)
            return member

        return made_or_undone(joined, Sender.leave)

    def _leave(self, group: EndpointGroup) -> None:
        with uninterrupted(), self._lock:
            if not self._pumping and group.state is _JOINED:
                self._session.answer(keep=True, leaves=True)
            self._session.memberships.leave(group)
            self._forget(group)
            self._sleepers.wake()
            if self._pumping and not self.closed:
                self._session.station.nudge()  # wake the receiving thread, which may wait for this very group

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
        receiving = self._session.receiving
        batch = self._taken(partial(receiving.take_batch, max), group, timeout)
        return (
            batch
            if batch is not None
            else self._run(receiving.recv_batch(max, timeout, group), self._put_back)
        )

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
            timeout = seconds_of(timeout)
        session = self._session

        def found() -> Event | None:
            with self._lock:
                if not self._pumping:
                    self._look()
                if session.events:
                    return session.events.pop()
            return None if timeout == 0 else self._run(session.events.next_event(timeout))

        def put_back(event: Event | None) -> None:
            if event is not None:
                session.events.put_back(event)

        return made_or_undone(found, put_back)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the device has sent all posted messages; TimedOut when `timeout` seconds have passed.

        Raises QpError if the device could not send one of them.
        """
        session = self._session
        session.station.require_open("flush", Phase.SEND)
        try:
            session.station.qp.flush(timeout)
        except QpError as error:
            self._note_qp_error(error)
            raise
        except Closed:  # the queue pair was replaced, or its device is away: its posted messages are lost
            session.station.require_open("flush", Phase.SEND)

    def _recv(self, group: EndpointGroup | None, timeout: float | None) -> Message | None:
        session = self._session
        message = self._taken(session.receiving.take, group, timeout)
        return (
            message
            if message is not None
            else self._run(session.receiving.recv(group, timeout), self._put_back)
        )

    def _put_back(self, found: Message | Batch | None) -> None:
        """Keep the messages of a receive that was interrupted, for the next call that receives."""
        if found:
            with self._lock:
                self._session.receiving.put_back(found)
                self._sleepers.wake()

    def _taken(self, take: Callable[[P], T | None], what: P, timeout: float | None) -> T | None:
        """What `take(what)` finds at once; None if it finds nothing, or if another thread is receiving.

        A receive that finds something does not ask for events each time, because asking may take longer than
        receiving.
        """
        if timeout is not None and (timeout.__class__ not in PLAIN or not 0.0 <= timeout <= LONGEST):
            seconds_of(timeout)  # what is no number of seconds is refused, although nothing may wait for them
        with self._lock:
            if self._pumping:
                return None
            self._unlooked += 1
            if self._unlooked > LOOK_EVERY:
                self._look()
            try:
                return take(what)
            except BaseException:
                self._session.receiving.kept.recount()
                raise

    # --- the driver ---

    def _look(self) -> bool:
        """Handle the events that have come, and do the steps that are due; return whether there was
        anything."""
        self._unlooked = 0
        with uninterrupted():
            happened = self._session.step()
            if happened:
                self._sleepers.wake()
            return happened

    def _unless_busy(self, act: Callable[[], object]) -> None:
        """Call `act`, unless another thread is receiving, or this call came between lines of another one."""
        if not (self._lock._is_owned() or is_within()):
            with self._lock:
                if not self._pumping:
                    act()

    def _answer(self) -> None:
        """Answer the probes that wait, where the program sends and does not receive."""
        with uninterrupted():
            self._session.answer(keep=True)

    def _note_qp_error(self, error: QpError) -> None:
        """Have the queue pair restored, or raise the error; a call that holds the lock does so itself."""
        if not self._lock._is_owned():
            with self._lock:
                self._session.on_qp_error(error)

    def _run(self, operation: Operation[T], undo: Callable[[T], None] = lambda _: None) -> T:
        """Carry out an operation by blocking.

        `undo` takes its result back if Ctrl-C keeps the caller from getting it.
        """

        def result() -> T:
            with self._lock:
                return self._carry_out(operation)

        return made_or_undone(result, undo)

    def _carry_out(self, operation: Operation[T]) -> T:
        try:
            wait = next(operation)
            while True:
                try:
                    batch = self._pump(wait)
                except BaseException as error:
                    wait = operation.throw(error)
                else:
                    wait = operation.send(batch)
        except StopIteration as done:
            result: T = done.value
            return result

    def _pump(self, wait: Wait) -> Batch | None:
        """Wait until something happens, at most until `wait.until`; return what this thread received."""
        session = self._session
        if self._pumping:
            if self._pumping == get_ident():
                raise RuntimeError(WITHIN)
            # Only the receiving thread reads events: if this one did, that one would sleep on.
            self._sleepers.sleep(None if wait.until is None else max(0.0, wait.until - session.waiting.now()))
            return None
        if self._look():
            return None
        end = min(inf if wait.until is None else wait.until, session.restorer.due())
        left = end if abs(end) == inf else end - session.waiting.now()
        return self._sleep(session.restorer.usable_qp, wait.max, None if left == inf else max(0.0, left))

    def _sleep(self, qp: QueuePair | None, max: int, timeout: float | None) -> Batch | None:
        """Wait for a message or an event, without holding the lock, so that other threads can join the
        wait."""
        session = self._session
        batch: Batch | None = None
        event: CmEvent | None = None
        failed: QpError | None = None
        self._pumping = get_ident()
        self._lock.release()
        try:
            if qp is None:
                event = session.station.channel.get_event(timeout)
            else:
                with interruptible():
                    batch = qp.recv(max, timeout, events=True)
        except QpError as error:
            failed = error
        except Closed:
            session.station.require_open("recv", Phase.RECV)
        finally:
            self._lock.acquire()
            self._pumping = 0
            self._sleepers.wake()
        if event is not None:
            session.on_event(event)
        if failed is not None:
            session.on_qp_error(failed)
        return batch

    # --- the end ---

    def close(self) -> None:
        """Leave every group and free all resources; calls that wait end with Closed. Idempotent.

        A call that has received messages by then still returns them; the next call raises Closed.
        """
        if not later(self._close_all, 1):
            self._close_all()  # wakes the receiving thread, which wakes the others


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

    `mcast.api.QpInit` says more about the last four. Raises ValueError, which names the choices, for an
    argument that cannot be; BackendError if the provider cannot run here; McastError if the stack refuses.
    """
    return Endpoint(Opening(**locals()))


class Sender(Enterable, MemberView):
    """A group that the program sends to."""

    _ended_by = "leave"
    _endpoint: Endpoint

    def __init__(self, endpoint: Endpoint, group: EndpointGroup) -> None:
        self._endpoint, self._group = endpoint, group

    def send(self, payload: Buffer, imm: int | None = None, timeout: float | None = None) -> None:
        """Send one message, as `send_batch` with a batch of one."""
        self._post(self._endpoint._session.sending.send_one, payload, imm, timeout)

    def send_batch(
        self, payloads: Iterable[Buffer] | memoryview, imm: int | None = None, timeout: float | None = None
    ) -> int:
        """Send each payload as one message, in order; return how many were sent. UD has no acknowledgement.

        A C-contiguous memoryview of two dimensions is a batch of its rows, and a `Headed` one of messages in
        two parts: these take the least time.
        `imm` is a 32-bit immediate for every message. Waits, at most `timeout` seconds, while the send queue
        is full or a lost membership is being restored. Raises MessageTooLarge, TimedOut, QpError,
        MembershipLost or Closed; the error's `posted` is how many of the messages were sent.
        """
        return self._post(self._endpoint._session.sending.send, as_batch(payloads), imm, timeout)

    def reply(
        self, message: Message, payload: Buffer, imm: int | None = None, timeout: float | None = None
    ) -> None:
        """Send one message to the sender of `message`, a message of this group, and to nobody else.

        The other endpoint receives the payload as a message of no group, from `Endpoint.recv`. The other
        arguments and errors are those of `send`. Raises ValueError if that sender cannot be answered, and on
        an endpoint with sequence=True. Soft-RoCE loses unicast within a network namespace (K-FABRIC-6).
        """
        self._post(self._endpoint._session.sending.reply, (message, payload), imm, timeout)

    def _post(self, post: Post[P, T], what: P, imm: int | None, timeout: float | None) -> T:
        """Call `post` once the group is joined; call it again if the queue pair is replaced meanwhile.

        Events that have come are handled first, unless a thread that is receiving handles them.
        """
        endpoint, group = self._endpoint, self._group
        session = endpoint._session
        while True:
            endpoint._unlooked += 1  # port events are not in `is_quiet`: only the queue pair has them
            if not endpoint._pumping:
                # The receive queue fills with own messages, too, so a look is due by time and by number; but
                # not while virtual time stands still, because then nobody else acts.
                pause = session.waiting.now() - endpoint._answered_at
                looks = endpoint._unlooked > LOOK_EVERY or not session.is_quiet()
                if looks:
                    endpoint._unless_busy(endpoint._look)
                if pause >= ANSWER_INTERVAL or (looks and pause):
                    endpoint._answered_at += pause
                    endpoint._unless_busy(endpoint._answer)
            # No lock is needed, because posting to a queue pair that is replaced from here on raises Closed.
            qp = session.station.qp
            joined, destination = group.state is _JOINED, group.destination
            if not joined or destination is None:
                qp, destination = endpoint._run(session.sending.route_to(group, timeout))
            try:
                return post(group, qp, destination, what, imm, timeout)
            except Closed as error:  # the queue pair was replaced meanwhile, or the endpoint closed
                session.memberships.require_joined(group, "send", Phase.SEND)
                if error.posted:  # posting again would send these messages twice
                    raise
            except QpError as error:
                endpoint._note_qp_error(error)
                raise

    def ready(self, members: int = 1, timeout: float | None = 10.0) -> dict[Peer, int]:
        """Wait until the fabric delivers to `members` other members: until so many have answered a probe.

        Return the members that have answered, and the largest payload in bytes that is known to reach each:
        a longer probe asks for that, and shorter ones do where it is not answered, which takes half a second
        or more. A member of this library answers inside its calls that wait or receive, and in `send`,
        `leave` and `close` if it only sends. A program that only has a `sender` receives nothing of the
        group, and does not answer. Raises TimedOut after `timeout` seconds; the error names those that have
        answered, too.
        """
        return self._endpoint._run(self._endpoint._session.questions.ready(self._group, members, timeout))

    def leave(self) -> None:
        """Leave the group. Idempotent. Messages that were received and not yet asked for are dropped."""
        leave = partial(self._endpoint._leave, self._group)
        if not later(leave, 1):
            leave()


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
        """Whether the device returns the endpoint's own messages; found out by sending one, whatever the
        device claims.

        True as soon as the message comes back, False when `timeout` seconds have passed. With loopback="off"
        a device that has agreed not to return own messages, and returns none, ends the filter.
        """
        return self._endpoint._run(self._endpoint._session.questions.probe_loopback(self._group, timeout))

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
