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
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address
from types import TracebackType
from typing import Self, TypeVar

from typing_extensions import Buffer

from mcast.addresses import Gid, McastAddress, Mgid
from mcast.api import (
    Backend,
    Batch,
    Closed,
    CmEvent,
    Destination,
    DeviceInfo,
    Message,
    Phase,
    PortInfo,
    QpError,
    QueuePair,
)
from mcast.ports import Address, choose
from mcast.registry import open_backend
from mcast.session import (
    EndpointStats,
    Event,
    Group,
    GroupState,
    GroupStats,
    LoopbackPolicy,
    LoopbackReport,
    Operation,
    Peer,
    RejoinPolicy,
    Session,
    Settings,
    Wait,
)

__all__ = ["Endpoint", "Membership", "Sender", "open_endpoint"]

T = TypeVar("T")
GroupName = McastAddress | IPv4Address | IPv6Address | Mgid | str


def open_endpoint(
    backend: str | Backend,
    bind: IPv4Address | IPv6Address | str | None = None,
    *,
    device: str | None = None,
    port_num: int = 1,
    loopback: LoopbackPolicy | str = "on",
    rejoin: RejoinPolicy | None = RejoinPolicy(),  # noqa: B008  (frozen)
    sequence: bool = False,
    receive_depth: int = 512,
    send_depth: int = 128,
    max_message: int | None = None,
    seed: int | None = None,
    options: Mapping[str, object] | None = None,
) -> Endpoint:
    """Open an endpoint on the port that has the address `bind`, or on a device's port.

    backend        a name, which the endpoint opens with `options` and closes; or an opened backend
    bind, device   one of them; neither only where a single active port has an address, which is then logged
    loopback       what becomes of own messages: "on", "off" or "filter" (LoopbackPolicy)
    rejoin         what to do when a membership is lost; None: calls raise MembershipLost
    sequence       number the messages, and count gaps, duplicates and late ones by source
    receive_depth  receives of the queue pair, and messages kept for a group that nobody asks for
    max_message    the largest payload in bytes, both ways; None: what one MTU carries
    seed           of jitter and stream ids; None: from the system

    Raises ValueError that names the choices; BackendError; McastError.
    """
    settings = Settings(
        LoopbackPolicy(loopback), rejoin, sequence, receive_depth, send_depth, max_message, seed
    )
    owned = open_backend(backend, **(options or {})) if isinstance(backend, str) else None
    opened = owned or backend
    assert isinstance(opened, Backend)
    try:
        return Endpoint(Session(opened, choose(opened, bind, device, port_num), settings, opened.now), owned)
    except BaseException:
        if owned is not None:
            owned.close()
        raise


class Endpoint:
    """One id and one UD queue pair on one port, and the groups that they are in. Made by `open_endpoint`."""

    def __init__(self, session: Session, owned: Backend | None) -> None:
        self._session, self._owned = session, owned
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pumping = False
        self._members: dict[McastAddress, Membership | Sender] = {}

    # --- what it is ---

    @property
    def backend(self) -> Backend:
        return self._session.backend

    @property
    def device(self) -> DeviceInfo:
        """The device, as it was when the endpoint was opened."""
        return self._session.place.device

    @property
    def port(self) -> PortInfo:
        """The port, as it was when the endpoint was opened."""
        return self._session.place.port

    @property
    def address(self) -> Address:
        """The local address that the endpoint is bound to."""
        return self._session.place.address

    @property
    def qp_num(self) -> int:
        """The number of the queue pair; another one after the device was lost."""
        return self._session.qp.qp_num

    @property
    def max_message_size(self) -> int:
        """The largest payload in bytes."""
        return self._session.max_message_size

    @property
    def groups(self) -> tuple[Membership | Sender, ...]:
        """What was joined and not left, in order of joining."""
        return tuple(self._members.values())

    @property
    def closed(self) -> bool:
        return self._session.closed

    # --- groups ---

    def join(self, group: GroupName, *, timeout: float | None = 10.0, settle: float = 0.0) -> Membership:
        """Join as a full member: send and receive. Returns once joined and attached.

        `settle` waits so many seconds more, for fabrics that are slow to deliver; `Membership.ready` asks.
        Raises the McastError of what went wrong, with its likely causes; nothing is left behind then, nor
        after a timeout or Ctrl-C.
        """
        return self._join(group, False, timeout, settle, Membership)

    def sender(self, group: GroupName, *, timeout: float | None = 10.0, settle: float = 0.0) -> Sender:
        """Join to send only: nothing is received. Otherwise as `join`."""
        return self._join(group, True, timeout, settle, Sender)

    def _join(
        self,
        name: GroupName,
        send_only: bool,
        timeout: float | None,
        settle: float,
        make: Callable[[Endpoint, Group], M],
    ) -> M:
        group = self._run(self._session.join(name, send_only, timeout, settle))
        member = self._members[group.address] = make(self, group)
        return member

    def _leave(self, group: Group) -> None:
        with self._lock:
            self._session.leave(group)
            self._members.pop(group.address, None)
            self._changed.notify_all()

    # --- receiving ---

    def recv(self, timeout: float | None = None) -> Message | None:
        """The next message of any group, a copy; None when `timeout` s have passed."""
        return self._run(self._session.recv(None, timeout))

    def recv_batch(self, max: int = 64, timeout: float | None = None) -> Batch:
        """1..max messages of all groups, leased; empty when `timeout` s have passed. The fast path."""
        return self._run(self._session.recv_batch(max, timeout))

    def batches(self, timeout: float | None = None, max: int = 64) -> Iterator[Batch]:
        """Leased batches, each released when the next is asked for; ends after `timeout` s without one."""
        while True:
            with self.recv_batch(max, timeout) as batch:
                if not len(batch):
                    return
                yield batch

    def next_event(self, timeout: float | None = 0.0) -> Event | None:
        """The next of Lost, Rejoined, GaveUp, ReceiveQueueLow; None when `timeout` s have passed."""
        return self._run(self._session.next_event(timeout))

    def stats(self) -> EndpointStats:
        """Everything counted so far, as a frozen snapshot."""
        with self._lock:
            return self._session.snapshot()

    # --- the driver ---

    def _run(self, operation: Operation[T]) -> T:
        """Carry an operation out by blocking."""
        with self._lock:
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
            finally:
                operation.close()

    def _pump(self, wait: Wait) -> Batch | None:
        """Let something happen, at most until `wait.until`; what was received, if this call received."""
        session = self._session
        if session.step():
            self._changed.notify_all()
            return None
        now = session.now()
        if self._pumping:
            self._changed.wait(None if wait.until is None else max(0.0, wait.until - now))
            return None
        ends = [one for one in (wait.until, session.due()) if one is not None]
        timeout = max(0.0, min(ends) - now) if ends else None
        if timeout == float("inf"):
            timeout = None
        return self._sleep(session.usable_qp, wait.max, timeout)

    def _sleep(self, qp: QueuePair | None, max: int, timeout: float | None) -> Batch | None:
        """Wait for a message or an event, without the lock: the others follow this thread."""
        self._pumping = True
        self._lock.release()
        batch: Batch | None = None
        event: CmEvent | None = None
        try:
            if qp is None:
                event = self._session.channel.get_event(timeout)
            else:
                batch = qp.recv(max, timeout, events=True)
        except QpError as error:
            failed: QpError | None = error
        except Closed:
            failed = None
            self._session.require_open("recv", Phase.RECV)
        else:
            failed = None
        finally:
            self._lock.acquire()
            self._pumping = False
            self._changed.notify_all()
        if event is not None:
            self._session.on_event(event)
        if failed is not None:
            self._session.on_qp_error(failed)
        return batch

    # --- the end ---

    def close(self) -> None:
        """Leave every group and free everything; wakes whoever waits. Idempotent."""
        with self._lock:
            self._session.close()
            self._members.clear()
            self._changed.notify_all()
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Sender:
    """A group that one sends to."""

    def __init__(self, endpoint: Endpoint, group: Group) -> None:
        self._endpoint, self._group = endpoint, group

    @property
    def group(self) -> McastAddress:
        """The address that was joined."""
        return self._group.address

    @property
    def destination(self) -> Destination:
        """Where messages to the group go, as the last join said."""
        assert self._group.destination is not None
        return self._group.destination

    @property
    def mgid(self) -> Gid:
        return self.destination.gid

    @property
    def mlid(self) -> int:
        """The group's MLID on InfiniBand, 0 on Ethernet."""
        return self.destination.dlid

    @property
    def joined(self) -> bool:
        """False while the membership is lost, and once it was left."""
        return self._group.state is GroupState.JOINED

    def send(self, payload: Buffer, imm: int | None = None, timeout: float | None = None) -> None:
        """Send one message: `send_batch` with a batch of one."""
        self.send_batch([payload], imm, timeout)

    def send_batch(
        self, payloads: Iterable[Buffer], imm: int | None = None, timeout: float | None = None
    ) -> int:
        """Send each payload as one message, in order; return how many. UD gives no receipt.

        Waits, up to `timeout`, while the send queue is full or a lost membership is being restored.
        """
        endpoint, group = self._endpoint, self._group
        session = endpoint._session
        listed = session.prepare(group, payloads)
        while True:
            qp, destination = endpoint._run(session.route_to(group, timeout))
            try:
                count = qp.send(destination, listed, imm, timeout)
                break
            except Closed:
                session.require_joined(group, "send", Phase.SEND)
            except QpError as error:
                with endpoint._lock:
                    session.on_qp_error(error)
                raise
        with endpoint._lock:
            session.note_sent(group, listed, sum(memoryview(one).nbytes for one in listed))
        return count

    def ready(self, members: int = 1, timeout: float | None = 10.0) -> frozenset[Peer]:
        """Wait until the fabric delivers: until `members` other members have answered a probe."""
        return self._endpoint._run(self._endpoint._session.ready(self._group, members, timeout))

    def leave(self) -> None:
        """Leave the group. Idempotent."""
        self._endpoint._leave(self._group)

    def stats(self) -> GroupStats:
        """What was counted for this group, as a frozen snapshot."""
        with self._endpoint._lock:
            return self._group.snapshot()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


class Membership(Sender):
    """A group that one sends to and receives from."""

    def recv(self, timeout: float | None = None) -> Message | None:
        """The group's next message, a copy; None when `timeout` s have passed."""
        return self._endpoint._run(self._endpoint._session.recv(self._group, timeout))

    def __iter__(self) -> Iterator[Message]:
        while True:
            message = self.recv()
            if message is not None:
                yield message


M = TypeVar("M", bound=Sender)
_ = LoopbackReport
