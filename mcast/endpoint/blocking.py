"""What applications use: an endpoint on one port, its memberships and senders; calls block.

```python
with mcast.open_endpoint("rdma", bind="10.0.0.1") as endpoint:
    with endpoint.join("239.1.2.3") as group:
        group.send(b"hello")
        for batch in endpoint.batches(timeout=1.0):
            ...
```

All objects may be used from several threads at once; of several threads that wait on one endpoint, one
receives for all. An endpoint acts by itself (rejoins, answers probes) inside the calls that wait or send.
Timeouts are seconds on the backend's clock; None waits without end, 0 polls.

A call that Ctrl-C ends is done or not done: a join leaves no membership, and `leave` and `close` may be
called again. A message that an interrupted receive had taken from the device is lost, as with a socket.
The handler of another signal may find a call between any two lines: let it set a flag that a thread looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Any, TypeVar

from typing_extensions import Buffer

from mcast.api import Batch, Closed, CmEvent, Message, Phase, QpError, QueuePair
from mcast.endpoint.core import Operation, Post, Wait, as_list
from mcast.endpoint.membership import EndpointGroup, GroupState
from mcast.endpoint.policy import Event
from mcast.endpoint.probe import Peer
from mcast.endpoint.view import EndpointView, GroupLike, MemberView, with_arguments_of
from mcast.interrupts import Enterable, interruptible, made_or_undone, uninterrupted

__all__ = ["Endpoint", "Membership", "Sender", "open_endpoint"]

P = TypeVar("P")
T = TypeVar("T")

_JOINED = GroupState.JOINED

LOOK_EVERY = 64
"""Sends, and receives that found something, after each other, until events are asked for all the same."""


class Endpoint(Enterable, EndpointView["Membership | Sender"]):
    """One id and one UD queue pair on one port, and the groups that they are in.

    Close it, or enter it with `with`: one that is forgotten stays in its groups, without a warning, until its
    backend is closed or the process ends (K-LEAVE-13).
    """

    _ended_by = "close"
    _pumping = False
    """Whether a thread receives for all."""
    _unlooked = 0
    """Sends and receives since events were asked for."""

    # --- groups ---

    def join(self, group: GroupLike, *, timeout: float | None = 10.0, settle: float = 0.0) -> Membership:
        """Join as a full member: send and receive. Returns once joined and attached.

        `settle` waits so many seconds more, for fabrics that are slow to deliver; `Membership.ready` asks.
        Raises the McastError of what went wrong, with its likely causes; nothing is left behind then, nor
        after a timeout or Ctrl-C.
        """
        return self._join(group, False, timeout, settle, Membership)

    def sender(self, group: GroupLike, *, timeout: float | None = 10.0, settle: float = 0.0) -> Sender:
        """Join to send only: nothing is received. Otherwise as `join`."""
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
            member = make(self, self._run(self._session.join(name, send_only, timeout, settle)))
            self._enter(member)
            return member

        return made_or_undone(joined, Sender.leave)

    def _leave(self, group: EndpointGroup) -> None:
        with uninterrupted(), self._lock:
            self._session.leave(group)
            self._forget(group)
            self._sleepers.wake()
            if self._pumping and not self.closed:
                self._session.station.nudge()  # the receiving thread may wait for this very group

    # --- receiving ---

    def recv(self, timeout: float | None = None) -> Message | None:
        """The next message of any group, a copy; None when `timeout` s have passed."""
        return self._recv(None, timeout)

    def recv_batch(self, max: int = 64, timeout: float | None = None) -> Batch:
        """1..max messages of all groups, leased; empty when `timeout` s have passed. The fast path."""
        session = self._session
        batch = self._taken(session.take_batch, max)
        return batch if batch is not None else self._run(session.recv_batch(max, timeout), self._put_back)

    def batches(self, timeout: float | None = None, max: int = 64) -> Iterator[Batch]:
        """Leased batches, each released when the next is asked for; ends after `timeout` s without one.

        It ends as well when the endpoint is closed.
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
        """The next `mcast.endpoint.policy.Event`, such as Lost; None when `timeout` s have passed."""
        session = self._session

        def found() -> Event | None:
            with self._lock:
                if not self._pumping:
                    self._look()
                if session.events:
                    return session.events.popleft()
            return None if timeout == 0 else self._run(session.next_event(timeout))

        def put_back(event: Event | None) -> None:
            if event is not None:
                session.events.appendleft(event)

        return made_or_undone(found, put_back)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the device has sent all that was posted, up to `timeout`: then TimedOut.

        Raises the QpError of a message that the device could not send.
        """
        session = self._session
        session.require_open("flush", Phase.SEND)
        try:
            session.station.qp.flush(timeout)
        except QpError as error:
            with self._lock:
                session.on_qp_error(error)
            raise
        except Closed:  # the QP was replaced, or its device is away, and what was posted is gone with it
            session.require_open("flush", Phase.SEND)

    def _recv(self, group: EndpointGroup | None, timeout: float | None) -> Message | None:
        session = self._session
        message = self._taken(session.take, group)
        return message if message is not None else self._run(session.recv(group, timeout), self._put_back)

    def _put_back(self, found: Message | Batch | None) -> None:
        """For the next who asks: the call that it was received for was interrupted."""
        if found:
            with self._lock:
                self._session.put_back(found)
                self._sleepers.wake()

    def _taken(self, take: Callable[[P], T | None], what: P) -> T | None:
        """What `take(what)` finds at once; None if it is nothing, or if another thread receives.

        A receive that finds something does not ask for events each time: that may take longer than itself.
        """
        with self._lock:
            if self._pumping:
                return None
            self._unlooked += 1
            if self._unlooked > LOOK_EVERY:
                self._look()
            try:
                return take(what)
            except BaseException:
                self._session.recount()
                raise

    # --- the driver ---

    def _look(self) -> bool:
        """Take in what has happened, do what is due; whether there was anything."""
        self._unlooked = 0
        with uninterrupted():
            happened = self._session.step()
            if happened:
                self._sleepers.wake()
            return happened

    def _run(self, operation: Operation[T], undo: Callable[[T], None] = lambda _: None) -> T:
        """Carry an operation out by blocking; `undo` what it gave if nobody gets that."""

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
        """Let something happen, at most until `wait.until`; what was received, if this call received."""
        session = self._session
        if self._pumping:
            # Only who receives reads events: had another read one, nothing would wake the sleeper.
            self._sleepers.sleep(None if wait.until is None else max(0.0, wait.until - session.now()))
            return None
        if self._look():
            return None
        end = min(inf if wait.until is None else wait.until, session.restorer.due())
        left = end if abs(end) == inf else end - session.now()
        return self._sleep(session.usable_qp, wait.max, None if left == inf else max(0.0, left))

    def _sleep(self, qp: QueuePair | None, max: int, timeout: float | None) -> Batch | None:
        """Wait for a message or an event, without the lock: other threads follow this one."""
        session = self._session
        batch: Batch | None = None
        event: CmEvent | None = None
        failed: QpError | None = None
        self._pumping = True
        self._lock.release()
        try:
            if qp is None:
                event = session.channel.get_event(timeout)
            else:
                with interruptible():
                    batch = qp.recv(max, timeout, events=True)
        except QpError as error:
            failed = error
        except Closed:
            session.require_open("recv", Phase.RECV)
        finally:
            self._lock.acquire()
            self._pumping = False
            self._sleepers.wake()
        if event is not None:
            session.on_event(event)
        if failed is not None:
            session.on_qp_error(failed)
        return batch

    # --- the end ---

    def close(self) -> None:
        """Leave every group and free everything; wakes whoever waits. Idempotent.

        What a call has received by then it still returns; the next one raises Closed.
        """
        self._close_all()  # wakes who receives, and so its followers


@with_arguments_of(Endpoint)
def open_endpoint(*args: Any, **options: Any) -> Endpoint:
    """Open an endpoint, which is to RDMA multicast what a bound UDP socket is to IP multicast.

    `bind` is a local address, as for a socket; it says which port of which RDMA device the endpoint is on.
    `Endpoint.join` does what the socket option IP_ADD_MEMBERSHIP does, and returns once the fabric agrees.
    Then every member of the group gets each message of the others, whole or not at all. A message is at most
    one MTU, and may be lost. There are no port numbers: whoever is in the group hears all of it.

        with mcast.open_endpoint("sim", "10.0.0.1") as endpoint:
            with endpoint.join("239.1.2.3") as group:
                group.send(b"hello")
                message = group.recv(timeout=1.0)

    backend        a name, which the endpoint opens with `options` and closes; or an opened backend
    bind, device   one of them; neither only where a single active port has an address: it is logged then
    loopback       what becomes of own messages: "on", "off" or "filter" (LoopbackPolicy)
    rejoin         what to do when a membership is lost; None: calls raise MembershipLost
    sequence       number the messages, and count gaps, duplicates and late ones by source
    receive_depth  receives of the queue pair, and messages kept for a group that nobody asks for
    max_message    the largest payload in bytes, both ways; None: what one MTU carries
    seed           of jitter and stream ids; None: a simulated fabric's, else from the system
    traffic_class  of what is sent, 0..255: `dscp << 2` on RoCE; None: what the join says, 0 there
    service_level  of what is sent; on RoCE the priority, 0..7; None: what the join says
    busy_poll      seconds that a call looks for messages before it sleeps; inf: it never sleeps
    comp_vector    the device's completion vector; None: in turn
    moderation     wake a sleeper for several messages at once (CqModeration)
    timestamps     stamp each message as it arrives: `Message.timestamp`

    The last four are those of `mcast.api.QpInit`, which says more.
    Raises ValueError that names the choices; BackendError; McastError.
    """
    return Endpoint(*args, **options)


class Sender(Enterable, MemberView):
    """A group that one sends to."""

    _ended_by = "leave"
    _endpoint: Endpoint

    def __init__(self, endpoint: Endpoint, group: EndpointGroup) -> None:
        self._endpoint, self._group = endpoint, group

    def send(self, payload: Buffer, imm: int | None = None, timeout: float | None = None) -> None:
        """Send one message: `send_batch` with a batch of one."""
        self._post(self._endpoint._session.send_one, payload, imm, timeout)

    def send_batch(
        self, payloads: Iterable[Buffer], imm: int | None = None, timeout: float | None = None
    ) -> int:
        """Send each payload as one message, in order; return how many. UD gives no receipt.

        Waits, up to `timeout`, while the send queue is full or a lost membership is being restored.
        """
        return self._post(self._endpoint._session.send, as_list(payloads), imm, timeout)

    def _post(self, post: Post[P, T], what: P, imm: int | None, timeout: float | None) -> T:
        """`post` it, once the group is joined; again if the queue pair is replaced meanwhile.

        What has happened is taken in first, unless a thread that receives does so.
        """
        endpoint, group = self._endpoint, self._group
        session = endpoint._session
        while True:
            endpoint._unlooked += 1  # the port tells its queue pair alone
            if not endpoint._pumping and (endpoint._unlooked > LOOK_EVERY or not session.is_quiet()):
                with endpoint._lock:
                    if not endpoint._pumping:
                        endpoint._look()
            # No lock: were the QP replaced from here on, this one would be closed, and the post refused.
            qp = session.station.qp
            joined, destination = group.state is _JOINED, group.destination
            if not joined or destination is None:
                qp, destination = endpoint._run(session.route_to(group, timeout))
            try:
                return post(group, qp, destination, what, imm, timeout)
            except Closed as error:  # the QP was replaced meanwhile, or all is closed
                session.require_joined(group, "send", Phase.SEND)
                if error.posted:  # none is posted twice
                    raise
            except QpError as error:
                with endpoint._lock:
                    session.on_qp_error(error)
                raise

    def ready(self, members: int = 1, timeout: float | None = 10.0) -> frozenset[Peer]:
        """Wait until the fabric delivers: until `members` other members have answered a probe.

        They answer inside their own calls that wait. Raises TimedOut that says who has answered.
        """
        return self._endpoint._run(self._endpoint._session.ready(self._group, members, timeout))

    def leave(self) -> None:
        """Leave the group. Idempotent. What was received and not asked for is forgotten."""
        self._endpoint._leave(self._group)


class Membership(Sender):
    """A group that one sends to and receives from."""

    def recv(self, timeout: float | None = None) -> Message | None:
        """The group's next message, a copy; None when `timeout` s have passed."""
        return self._endpoint._recv(self._group, timeout)

    def probe_loopback(self, timeout: float = 0.5) -> bool:
        """Whether the device returns one's own messages: asked by sending one, whatever it has promised.

        With loopback="off" this ends a filter that the device makes superfluous.
        """
        return self._endpoint._run(self._endpoint._session.probe_loopback(self._group, timeout))

    def __iter__(self) -> Iterator[Message]:
        """Messages as they come; ends when the group is left or the endpoint closed."""
        while True:
            try:
                message = self.recv()
            except Closed:
                return
            if message is not None:
                yield message


M = TypeVar("M", bound=Sender)
