"""Sending to a group: when, on which queue pair, with which headers, and what is counted.

Theory of operation. The driver (`blocking`, `awaiting`) calls `send`, `send_one` or `reply` itself, without
the endpoint's guard, while the group is joined and the send queue has room. Only if that fails it starts
`operation`, with the error. What an operation does next depends on the error:

    TimedOut   the send queue is full: post the rest once there is room, until the deadline
    Closed     the queue pair was replaced, or the endpoint closed: wait until the group is joined again, and
               post the rest on the new queue pair; an endpoint that is closed refuses
    QpError    the queue pair is in ERR: `on_qp_error` starts a recovery or refuses; the call fails
    any other  the call fails

`error.posted` counts the messages of this call that were posted. No message is posted twice, so a call that
is repeated goes on behind them. A group that is LOST is waited for; the rejoiner wakes the operation through
`Waiting`, the device's completions wake the post. Once all is posted from registered memory, `flush` waits
until the device has read it.

Ownership: posting changes nothing of the endpoint except the counts, under `_counting`. The provider
orders the posts of several threads. Deliberately not handled: messages that were posted and are lost
with a queue pair; they count as sent.
"""

from __future__ import annotations

import errno as E
from collections.abc import Callable, Iterable
from functools import partial
from operator import countOf
from typing import Any, NamedTuple, TypeVar

from typing_extensions import Buffer

from mcast.api import (
    Closed,
    Destination,
    HeaderBodyBatch,
    McastError,
    Message,
    Phase,
    QpError,
    QueuePair,
    Refused,
    TimedOut,
    fork_safe_lock,
    list_rows,
    mcast_error,
)
from mcast.arguments.buffers import flat_bytes
from mcast.endpoint.membership import EndpointGroup, GroupState
from mcast.endpoint.memberships import Memberships
from mcast.endpoint.resources import PortResources
from mcast.endpoint.waiting import Operation, Step, Waiting

P = TypeVar("P")
T = TypeVar("T")

Payloads = list[Buffer] | memoryview | HeaderBodyBatch
"""The messages of one batch."""

Post = Callable[[EndpointGroup, QueuePair, Destination, P, int | None, float | None], T]
"""The type of `Sending.send` and `Sending.send_one`.

Group, queue pair, destination, payload or payloads, immediate, seconds to wait for room.
"""


class PostRequest(NamedTuple):
    """Post of a step.

    `call(timeout)` posts, and raises TimedOut if the send queue stays full for that long.
    """

    qp: QueuePair
    call: Callable[[float | None], object]


class Sending:
    """Posts messages to groups, and counts them.

    Each send is an operation, and its first try is not: where the group is joined and the queue has room, the
    driver calls `send_one`, `send` or `reply` itself, and hands an error of that to the operation. Posting
    changes nothing of the endpoint but counts. A send that is interrupted may miss in them.

    on_qp_error  takes the error of a queue pair that went into ERR, and may refuse the call with it
    """

    def __init__(
        self,
        resources: PortResources,
        memberships: Memberships,
        waiting: Waiting,
        on_qp_error: Callable[[QpError], None],
    ) -> None:
        self._resources, self._memberships, self._waiting = resources, memberships, waiting
        self._on_qp_error = on_qp_error
        self._numbers = bool(resources.settings.sequence)
        self._rewrites = self._numbers or resources.settings.max_message is not None
        self._counting = fork_safe_lock()

    def operation(
        self,
        group: EndpointGroup,
        post: Post[Any, object],
        what: Any,
        imm: int | None,
        timeout: float | None,
        failed: tuple[QueuePair, McastError] | None = None,
    ) -> Operation[None]:
        """Post once the group is joined, and again what was not posted; no message is sent twice.

        post    `send_one`, `send` or `reply`; `what` is its payload or payloads
        failed  the queue pair and the error of a first try, which the driver has made
        """
        several = post == self.send
        return self._operation(
            group, post, several, what, imm, timeout, self._waiting.deadline(timeout), failed
        )

    def _operation(
        self,
        group: EndpointGroup,
        post: Post[Any, object],
        several: bool,
        what: Any,
        imm: int | None,
        timeout: float | None,
        deadline: float | None,
        failed: tuple[QueuePair, McastError] | None,
    ) -> Operation[None]:
        posted, count = 0, len(what) if several else 1
        while True:
            if failed is None:
                qp, destination = yield from self.route_to(group, timeout, deadline)
                call = partial(post, group, qp, destination, what, imm)
                try:
                    yield Step(deadline, post=PostRequest(qp, call))
                    return
                except McastError as error:
                    failed = qp, error
            (qp, why), failed = failed, None
            fresh, why.posted = why.posted, why.posted + posted
            posted += fresh
            if isinstance(why, QpError):
                self._on_qp_error(why)
                raise Refused(why)
            if not isinstance(why, TimedOut | Closed) or (
                isinstance(why, TimedOut) and self._waiting.expired(deadline)
            ):
                raise Refused(why)
            if posted == count:  # the device is still reading registered memory
                yield from self.flush(qp, deadline, posted)
                return
            if isinstance(why, Closed):  # the queue pair was replaced, or the endpoint closed
                self._memberships.require_joined(group, "send", Phase.SEND)
            what = what[fresh:] if several else what

    def flush(self, qp: QueuePair, deadline: float | None, posted: int = 0) -> Operation[None]:
        """Wait until the device has sent all posted messages; `posted` of them are the call's own."""
        try:
            yield Step(deadline, post=PostRequest(qp, qp.flush))
        except QpError as error:
            self._on_qp_error(error)
            raise Refused(error) from None
        except Closed:  # the queue pair was replaced, or its device is away: its posted messages are lost
            self._resources.require_open("flush", Phase.SEND)
        except McastError as error:
            error.posted += posted
            raise

    def route_to(
        self, group: EndpointGroup, timeout: float | None, deadline: float | None
    ) -> Operation[tuple[QueuePair, Destination]]:
        """The queue pair and the destination to send with, once the group is joined."""
        yield from self._waiting.until(lambda: group.state is not GroupState.LOST, deadline)
        self._memberships.require_joined(group, "send", Phase.SEND)
        if group.state is GroupState.LOST:
            detail = f"the membership was lost, and not restored within {timeout} s: {group.error}"
            raise Refused(mcast_error(E.ETIMEDOUT, "send", Phase.SEND, {"group": group.address}, detail))
        assert group.destination is not None
        return self._resources.qp, group.destination

    def send(
        self,
        group: EndpointGroup,
        qp: QueuePair,
        destination: Destination,
        payloads: Payloads,
        imm: int | None,
        timeout: float | None,
    ) -> int:
        """Post the messages, with sequence headers if the endpoint has them.

        The driver's lock is not needed.
        """
        count = len(payloads)
        try:
            if self._rewrites:
                size = self._send_rewritten(group, qp, destination, listed(payloads), imm, timeout)
            elif not isinstance(payloads, list):
                size = payloads.nbytes
                qp.send(destination, payloads, imm, timeout)
            else:
                plain = countOf(map(type, payloads), bytes) == count
                size = sum(map(len, payloads) if plain else map(_size, payloads, range(count)))  # type: ignore[arg-type]
                qp.send(destination, payloads, imm, timeout)
        except McastError as error:
            if error.posted:
                self._count_sent(group, error.posted, _size_of_first(error.posted, payloads))
            raise
        with self._counting:
            group.counts.sent += count
            group.counts.sent_bytes += size
            group.counts.sent_batches += 1
        return count

    def send_one(
        self,
        group: EndpointGroup,
        qp: QueuePair,
        destination: Destination,
        payload: Buffer,
        imm: int | None,
        timeout: float | None,
    ) -> None:
        """Post one message. No list is made if no header is added and the user has set no limit."""
        if self._rewrites:
            self.send(group, qp, destination, [payload], imm, timeout)
            return
        size = len(payload) if type(payload) is bytes else _size(payload)
        try:
            qp.send_one(destination, payload, imm, timeout)
        except McastError as error:
            if error.posted:
                self._count_sent(group, 1, size)
            raise
        counts = group.counts
        with self._counting:
            counts.sent += 1
            counts.sent_bytes += size
            counts.sent_batches += 1

    def reply(
        self,
        group: EndpointGroup,
        qp: QueuePair,
        destination: Destination,
        what: tuple[Message, Buffer],
        imm: int | None,
        timeout: float | None,
    ) -> None:
        """Answer a message, to its sender alone.

        `what` is the message and the payload.
        """
        message: object = what[0]  # `recv` gives None when its time is over
        payload = what[1]
        if self._numbers:
            raise ValueError("reply: the numbers of sequence=True are a group's: reply from another endpoint")
        if not isinstance(message, Message):
            why = ", as recv returns when its time is over" if message is None else ""
            raise TypeError(f"reply: the message is {message!r}{why}: give the Message to answer")
        if not destination.can_reply_to(message, self._resources.local_port.address.is_loopback):
            raise ValueError(f"reply: {message.source} QP {message.src_qp} cannot be answered")
        size = _size(payload)
        qp.require_fits(destination, [size], self._resources.max_message_to(qp, destination))
        qp.send_one(destination.reply_to(message), payload, imm, timeout)
        self._count_sent(group, 1, size)

    def _send_rewritten(
        self,
        group: EndpointGroup,
        qp: QueuePair,
        destination: Destination,
        payloads: list[Buffer],
        imm: int | None,
        timeout: float | None,
    ) -> int:
        """Send within the user's limit; return the payload bytes.

        With sequence headers if the endpoint has them.
        """
        flat = self.checked(qp, destination, payloads)
        if self._numbers:
            group.numbering.send(flat, lambda numbered: qp.send(destination, numbered, imm, timeout))
        else:
            qp.send(destination, flat, imm, timeout)
        return sum(map(len, flat))

    def checked(
        self, qp: QueuePair, destination: Destination, payloads: list[Buffer]
    ) -> list[bytes | memoryview]:
        """Return the payloads as flat bytes.

        Raises TypeError or MessageTooLarge for the first that cannot be sent, with its place in the list.
        """
        flat = [one if type(one) is bytes else flat_bytes(one, i) for i, one in enumerate(payloads)]
        qp.require_fits(destination, list(map(len, flat)), self._resources.max_message_to(qp, destination))
        return flat

    def _count_sent(self, group: EndpointGroup, count: int, size: int) -> None:
        with self._counting:
            group.counts.sent += count
            group.counts.sent_bytes += size
            group.counts.sent_batches += 1


def as_batch(payloads: Iterable[Buffer] | memoryview) -> Payloads:
    """Several payloads as a list, or as the rows that they are. Raises TypeError for a single payload."""
    if isinstance(payloads, list | HeaderBodyBatch) or (
        isinstance(payloads, memoryview) and payloads.ndim == 2
    ):
        return payloads
    if isinstance(payloads, bytes | bytearray | memoryview | str) or _is_bytes(payloads):
        kind = type(payloads).__name__
        raise TypeError(
            f"send_batch takes several payloads, this is one {kind}: use send, or put it in a list"
        )
    return list(payloads)


def _is_bytes(payloads: object) -> bool:
    """Return True for a row of single bytes, such as an mmap or an array: each byte would be a message."""
    try:
        view = memoryview(payloads)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return view.ndim == 1 and view.itemsize == 1


def listed(payloads: Payloads) -> list[Buffer]:
    """The payloads, one by one."""
    return payloads if isinstance(payloads, list) else [*list_rows(payloads)]


def _size_of_first(count: int, payloads: Payloads) -> int:
    """The bytes of so many of the payloads."""
    if isinstance(payloads, list):
        return sum(map(_size, payloads[:count]))
    return payloads.nbytes // len(payloads) * count


def _size(payload: Buffer, index: int | None = None) -> int:
    """Return the size of a payload in bytes. Raises TypeError for what is no buffer; a send looks closer."""
    if type(payload) is bytes:
        return len(payload)
    try:
        return memoryview(payload).nbytes
    except (TypeError, ValueError, BufferError):
        return flat_bytes(payload, index).nbytes  # it says why not
