"""Drivers of sending and receiving sessions: run their steps by blocking or by awaiting.

Theory of operation. A session (`SendingSession`, `ReceivingSession`) is a state machine in generators and
never waits itself. Each step yields a `Step`: batches to send, and the time by which it must be resumed. The
driver sends the batches, receives until that time, and resumes the generator with the received messages.
Between two calls of the program nothing is sent or received.

- Exclusive use: a membership serves one session at a time, because two would take messages from each other.
  `open_context` marks the membership as in use; the caller clears the mark when its session ends. The
  membership refers to the mark weakly, so a session that is dropped without a close does not block it.
- Memory: the received messages are leased from the receive queue for one step. A session that needs them
  later copies them (`copied`).
- Locks: each step runs under the session's `Guard`; sending and waiting happen outside of it.
- Exceptions: one that a step raises, from the protocol or from the caller's file, iterator or function, ends
  the object, and the session stays usable. An interrupt (Ctrl-C, cancellation) while the driver sends or
  waits is thrown into the generator, which lets it pass: the session stays usable, too. An interrupt inside
  of a step leaves the state machine undefined: the guard marks the session as broken, and its calls raise
  `Broken` from then on.

`one_thread` has another driver, which resumes several sessions in turn.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EMSGSIZE
from functools import lru_cache, partial
from math import inf
from random import SystemRandom
from threading import RLock
from typing import TYPE_CHECKING, TypeVar
from weakref import ref

from typing_extensions import Buffer

from mcast.api import Batch, Guard, GuardError, McastError, Phase, Refused, Series, TimedOut
from mcast.cast.io.sources import Lend, lend_nothing
from mcast.cast.protocol.blocks import keep_freed_memory
from mcast.cast.protocol.packets import MAX_TEXT, number_at
from mcast.cast.protocol.rate import MAX_BURST
from mcast.endpoint import blocking
from mcast.endpoint.base import SenderBase
from mcast.endpoint.waiting import Box, Done, Proceed, Step, Steps, resume, run_async, run_blocking
from mcast.wire.addresses import Gid

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from mcast.endpoint import awaiting

T = TypeVar("T")

IO_TIMEOUT = 10.0
"""Timeout of a join, and of a send that makes no progress, in seconds."""

DEFAULT_RECEIVE_DEPTH = 1024
"""Default depth of the receive queue in messages: more than a sender sends in one step."""

DEFAULT_MEMORY = 32 << 20
"""Default of the memory for blocks in transfer, at each end, in bytes (approximate)."""

DEFAULT_PEER_TIMEOUT = 10.0
"""Default time after which a silent peer is given up, in seconds."""

MIN_MAX_MESSAGE = 1024
"""Minimum message size that a group must allow, in bytes."""

MAX_RX_BATCH = MAX_BURST + 16
"""Maximum number of messages received in one step, so that a flood of them does not stop the sending.

It is a burst and the packets behind it, which would take one more step. Their memory is not free for others
meanwhile: half of the default receive queue.
"""


SessionSteps = Steps[Batch, T]
"""Steps of a session: each posts batches, as `send_batch` takes them, and is resumed with a received batch.

The driver sends a batch before it asks for the next one. The received batch is leased until the step ends.
"""


@dataclass(frozen=True, eq=False)
class SessionContext:
    """Local member of a session.

    number       number of this member in the session's protocol
    name         name of this member in reports of others
    max_message  maximum message size, in bytes
    now          clock, in seconds
    log_name     endpoint and group, for log messages
    queue        depth of the receive queue in messages; 0 if unknown
    lend         registers a buffer with the device, to be sent without a copy
    address      of this member, as others see it; `number` is of this address
    """

    number: int
    name: str
    max_message: int
    now: Callable[[], float]
    log_name: str
    queue: int = 0
    lend: Lend = lend_nothing
    address: str = ""

    def new_number(self) -> int:
        """Return a new random number of this member."""
        return _number_at(self.address)


def _number_at(address: str) -> int:
    return number_at(address, SystemRandom().randrange(1, 1 << 32))


_EXCLUSIVE_LOCK = RLock()


@lru_cache(maxsize=4096)  # called for each message, and most messages come from a few members
def address_text(gid: Gid) -> str:
    """Return a member's address as text: IPv4 if the GID is mapped."""
    return str(gid.ipv4 or gid)


def error_text(error: BaseException) -> str:
    """Return the text of an error to send to the group, without a path or an address of this host."""
    if isinstance(error, Refused):
        error = error.error
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    if type(error) is OSError:  # raised by this library: the text has no path
        return str(error)
    if error.__cause__ is not None:
        return error_text(error.__cause__)
    return "internal error" if isinstance(error, Exception) else "interrupted"


class ExclusiveUse:
    """Mark of a membership in exclusive use; `active` until the session that owns the mark ends."""

    __slots__ = ("__weakref__", "active")

    def __init__(self) -> None:
        self.active: bool = False


@contextmanager
def exclusive(group: SenderBase, call: str) -> Iterator[SessionContext]:
    """Use the membership exclusively for the block. Raises the errors of `open_context`."""
    use = ExclusiveUse()
    try:
        yield open_context(group, call, use)
    finally:
        use.active = False


def open_context(group: SenderBase, call: str, use: ExclusiveUse) -> SessionContext:
    """Mark the membership as in use, and return the context of a session.

    call  name of the call, for errors
    use   mark to activate; the caller deactivates it, also if it never sees this function return

    Raises TypeError if `group` is not a membership, GuardError if its messages are too small, and
    RuntimeError if another session uses it.
    """
    if not (isinstance(group, blocking.Membership) or is_awaiting(group)):
        raise TypeError(
            f"{call}: {type(group).__name__} is not a membership and cannot receive: use Endpoint.join"
        )
    try:
        max_message = group.max_message_size
    except McastError as error:
        _of_call(error, call)
        raise
    if max_message < MIN_MAX_MESSAGE:
        raise GuardError(
            EMSGSIZE,
            call,
            Phase.SEND,
            {"group": str(group.group)},
            f"messages to this group have at most {max_message} bytes, and objects need {MIN_MAX_MESSAGE}: "
            "take a port with a larger MTU, such as an Ethernet interface of 1500 bytes",
        )
    endpoint = group.endpoint
    source = endpoint.port.gids.get(group.destination.sgid_index, Gid(endpoint.address))
    address = address_text(source)
    device = f" {endpoint.device.name}"  # kept complete: a long host name is cut instead
    name = socket.gethostname()[: max(0, MAX_TEXT - len(device))] + device
    keep_freed_memory()
    resources = endpoint._core.resources
    log_name = f"{resources.name}, in {group.group}"
    depth = resources.settings.receive_depth
    context = SessionContext(
        _number_at(address),
        name,
        max_message,
        endpoint.now,
        log_name,
        depth,
        resources.lend,
        address,
    )
    with _EXCLUSIVE_LOCK:
        other = None if group._hold is None else group._hold()
        if other is not None and other.active:
            raise RuntimeError(
                f"{call}: this membership is sending or receiving objects already, and the two calls would "
                "take messages from each other: end the first one, or join from another endpoint"
            )
        group._hold = ref(use)
        use.active = True
    return context


def from_others(received: Batch | Iterable[Series]) -> Iterator[tuple[Series, str]]:
    """Yield the messages that other members sent, each series with its source address."""
    series = received.series() if isinstance(received, Batch) else received
    return ((one, address_text(one.source)) for one in series if not one.from_self)


def payloads_of(received: Iterable[tuple[Series, str]]) -> Iterator[tuple[bytes, str]]:
    """Yield a copy of each message with its source address."""
    return ((bytes(payload), address) for series, address in received for payload in series.payloads())


def copied(series: Series) -> Series:
    """Return the messages in memory of their own, valid after the step."""
    return series._replace(memory=memoryview(bytes(series.memory)))


def is_awaiting(group: object) -> TypeIs[awaiting.Membership]:
    """Return True if the calls of the membership are awaited."""
    if isinstance(group, blocking.Membership):  # the other kind need not be loaded
        return False
    from mcast.endpoint import awaiting

    return isinstance(group, awaiting.Membership)


def drive_blocking(
    group: blocking.Membership, now: Callable[[], float], guard: Guard, steps: SessionSteps[T], call: str
) -> T:
    """Run the steps of a session to their result by blocking.

    guard  lock of the session: each step runs under it
    call   name of the caller's call, for errors of the membership
    """
    return run_blocking(steps, partial(_advance, guard), partial(_act, group, now, call))


def _advance(guard: Guard, steps: SessionSteps[T], box: Box) -> Step | Done[T]:
    """Resume the session with what was received, and end the lease of that memory."""
    received = box[0]
    if not isinstance(received, Batch):
        del received  # an error: no frame may refer to it, see `mcast.endpoint.waiting`
        return guard.run("a protocol step", Phase.RECV, _resume, steps, box)
    with received:
        return guard.run("a protocol step", Phase.RECV, _resume, steps, box)


def _resume(steps: SessionSteps[T], box: Box) -> Step | Done[T]:
    """Resume the session; wrap an `Exception` in `Refused`, which leaves the guard unbroken.

    An `Exception` was raised by this library, or by the caller's file, iterator or function, at a place where
    the session can continue. Other exceptions come from a signal handler or another thread at any place.
    """
    try:
        return resume(steps, box)
    except Refused:
        raise
    except Exception as error:
        raise Refused(error) from None


def _act(
    group: blocking.Membership, now: Callable[[], float], call: str, step: Step, proceed: Proceed[T]
) -> Step | Done[T]:
    try:
        for batch in step.post:
            send_all(group, batch)
        received = group.recv_batch(step.max, _remaining(step, now))
    except McastError as error:
        return proceed(_of_call(error, call))
    return proceed(received)


def _of_call(error: McastError, call: str) -> McastError:
    """Name the caller's call in an error: the caller has not called `send` or `recv`."""
    error.call = call
    return error


def _remaining(step: Step, now: Callable[[], float]) -> float | None:
    return None if step.until is None or step.until == inf else max(0.0, step.until - now())


def send_all(group: blocking.Membership, batch: Sequence[Buffer] | memoryview) -> None:
    """Send the batch. Raises TimedOut only after `IO_TIMEOUT` without progress: a slow link is no error."""
    while len(batch):
        try:
            group.send_batch(batch, timeout=IO_TIMEOUT)
            return
        except TimedOut as error:
            batch = _unsent(batch, error)


def _unsent(batch: Sequence[Buffer] | memoryview, error: TimedOut) -> Sequence[Buffer] | memoryview:
    """Return the messages that were not posted in time. Raises the error if none was posted."""
    if not error.posted:
        raise error
    return batch[error.posted :]


async def drive_awaiting(
    group: awaiting.Membership, now: Callable[[], float], guard: Guard, steps: SessionSteps[T], call: str
) -> T:
    """Run the steps of a session to their result by awaiting; see `drive_blocking`."""
    return await run_async(steps, partial(_advance, guard), partial(_await, group, now, call))


async def _await(
    group: awaiting.Membership, now: Callable[[], float], call: str, step: Step, proceed: Proceed[T]
) -> Step | Done[T]:
    try:
        for batch in step.post:
            while len(batch):
                try:
                    await group.send_batch(batch, timeout=IO_TIMEOUT)
                    break
                except TimedOut as error:
                    batch = _unsent(batch, error)
        received = await group.recv_batch(step.max, _remaining(step, now))
    except McastError as error:
        return proceed(_of_call(error, call))
    return proceed(received)
