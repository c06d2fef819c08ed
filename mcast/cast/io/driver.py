"""The turns of an end of the protocol, and how they are carried out: by blocking, and by awaiting.

An end never waits. It yields what it has to say and until when it has nothing more to say, and gets what was
heard meanwhile.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from math import inf
from secrets import randbelow
from threading import RLock
from typing import TypeVar
from weakref import ref

from typing_extensions import Buffer

from mcast.api import Batch, Guard, McastError, Phase, Refused, Series, TimedOut
from mcast.cast.io.sources import Lend, lend_nothing
from mcast.cast.protocol.blocks import keep_freed_memory
from mcast.cast.protocol.packets import MAX_TEXT, number_at
from mcast.cast.protocol.rate import MAX_BURST
from mcast.endpoint import awaiting, blocking
from mcast.endpoint.base import SenderBase
from mcast.endpoint.waiting import Box, Done, Proceed, Step, Steps, resume, run_async, run_blocking
from mcast.wire.addresses import Gid

T = TypeVar("T")

IO_TIMEOUT = 10.0
"""The longest that a join may take, and that a send may post nothing, in seconds."""

DEFAULT_RECEIVE_DEPTH = 1024
"""The receive queue of an end, in messages, where the caller can say: more than a sender sends in a turn."""

MIN_MAX_MESSAGE = 1024
"""The fewest bytes that a message of the group must be able to have."""

MAX_RX_BATCH = 2 * MAX_BURST
"""The most messages that are taken in one turn, so that a flood of them does not keep an end from sending."""


SessionSteps = Steps[Iterable[Series], T]
"""What an end does, a turn in each step: it posts batches, as `send_batch` takes them, of which each is sent
before the next is made, and says by when it wants its next turn. What comes in is leased: its memory ends
with the turn, and no part of it may be kept."""


@dataclass(frozen=True, eq=False)
class SessionContext:
    """Where an end sits: its number, its name, the longest message it can send and take, its clock.

    whose  the endpoint and the group, as the log calls them
    queue  how many messages its receive queue holds; 0: that is not known
    lend   registers a buffer that stays as it is, which is sent without a copy then
    """

    number: int
    name: str
    max_message: int
    now: Callable[[], float]
    log_name: str
    queue: int = 0
    lend: Lend = lend_nothing


_CLAIMING = RLock()


@lru_cache(maxsize=4096)  # asked again and again, and most messages come from a few ends
def address_text(gid: Gid) -> str:
    """The address of an end, as text."""
    return str(gid.ipv4 or gid)


def error_text(error: BaseException) -> str:
    """What the group learns of an error: no path and no address of this host."""
    if isinstance(error, Refused):
        error = error.error
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    if type(error) is OSError:  # the library's own, in its own words
        return str(error)
    if error.__cause__ is not None:
        return error_text(error.__cause__)
    return "internal error" if isinstance(error, Exception) else "interrupted"


class ExclusiveUse:
    """Tells, by `taken`, whether an end has a membership to itself. Who makes it sets it back in the end."""

    __slots__ = ("__weakref__", "active")

    def __init__(self) -> None:
        self.active: bool = False


@contextmanager
def exclusive(group: SenderBase, call: str) -> Iterator[SessionContext]:
    """A seat in the group, which no other end has meanwhile; errors are those of `open_context`."""
    hold = ExclusiveUse()
    try:
        yield open_context(group, call, hold)
    finally:
        hold.active = False


def open_context(group: SenderBase, call: str, hold: ExclusiveUse) -> SessionContext:
    """Return a seat in the group, which no other end has while the hold lives and is taken.

    Raises TypeError for what is no membership, RuntimeError if another end has the seat.
    """
    if not isinstance(group, blocking.Membership | awaiting.Membership):
        raise TypeError(
            f"{call}: {type(group).__name__} is no membership that can hear the others: use Endpoint.join"
        )
    if group.max_message_size < MIN_MAX_MESSAGE:
        raise ValueError(
            f"{call}: messages to this group have at most {group.max_message_size} bytes, and objects need "
            f"{MIN_MAX_MESSAGE}: is there a port with a smaller MTU?"
        )
    endpoint = group.endpoint
    source = endpoint.port.gids.get(group.destination.sgid_index, Gid(endpoint.address))
    number = number_at(address_text(source), 1 + randbelow((1 << 32) - 1))
    device = f" {endpoint.device.name}"  # which a long name of the host shall not cut off
    name = socket.gethostname()[: max(0, MAX_TEXT - len(device))] + device
    keep_freed_memory()
    resources = endpoint._core.resources
    whose = f"{resources.name}, in {group.group}"
    depth = resources.settings.receive_depth
    context = SessionContext(number, name, group.max_message_size, endpoint.now, whose, depth, resources.lend)
    with _CLAIMING:
        other = None if group._hold is None else group._hold()
        if other is not None and other.active:
            raise RuntimeError(
                f"{call}: this membership is sending or receiving objects already, and one of the two would "
                "miss what the other hears: end that first, or join from another endpoint"
            )
        group._hold = ref(hold)
        hold.active = True
    return context


def from_others(heard: Iterable[Series]) -> Iterator[tuple[Series, str]]:
    """The messages of others, and their addresses."""
    return ((one, address_text(one.source)) for one in heard if not one.from_self)


def payloads_of(heard: Iterable[tuple[Series, str]]) -> Iterator[tuple[bytes, str]]:
    """The bytes of each message, and its address."""
    return ((bytes(payload), address) for series, address in heard for payload in series.payloads())


def copied(series: Series) -> Series:
    """The messages in memory of their own, which no turn ends."""
    return series._replace(memory=memoryview(bytes(series.memory)))


def drive_blocking(
    group: blocking.Membership, now: Callable[[], float], guard: Guard, steps: SessionSteps[T]
) -> T:
    """Carry out the turns by blocking.

    Each is a change under the guard of the end. An exception that comes while something is sent or waited for
    leaves the end whole; one that comes in the middle of a turn breaks it.
    """
    return run_blocking(steps, partial(_advance, guard), partial(_act, group, now))


def _advance(guard: Guard, steps: SessionSteps[T], box: Box) -> Step | Done[T]:
    """Have the end take its turn, with what was heard, of which the lease ends then."""
    heard = box[0]
    if not isinstance(heard, Batch):
        del heard
        return guard.run("a turn", Phase.RECV, _resume, steps, box)
    with heard:
        box[0] = heard.series()
        return guard.run("a turn", Phase.RECV, _resume, steps, box)


def _resume(steps: SessionSteps[T], box: Box) -> Step | Done[T]:
    """Resume the turns. An `Exception` is one of ours, or of the caller's files, iterators and functions,
    which a turn calls: it ends the object, and the end goes on. All others come from a signal's handler or
    another thread."""
    try:
        return resume(steps, box)
    except Refused:
        raise
    except Exception as error:
        raise Refused(error) from None


def _act(
    group: blocking.Membership, now: Callable[[], float], step: Step, proceed: Proceed[T]
) -> Step | Done[T]:
    try:
        for batch in step.post:
            send_all(group, batch)
        heard = group.recv_batch(step.max, _left(step, now))
    except McastError as error:
        return proceed(error)
    return proceed(heard)


def _left(step: Step, now: Callable[[], float]) -> float | None:
    return None if step.until is None or step.until == inf else max(0.0, step.until - now())


def send_all(group: blocking.Membership, batch: Sequence[Buffer] | memoryview) -> None:
    """Send the batch, over a wire that may be slow."""
    while len(batch):
        try:
            group.send_batch(batch, timeout=IO_TIMEOUT)
            return
        except TimedOut as late:
            batch = _unsent(batch, late)


def _unsent(batch: Sequence[Buffer] | memoryview, late: TimedOut) -> Sequence[Buffer] | memoryview:
    """What was not posted in time. Raises the error if nothing was."""
    if not late.posted:
        raise late
    return batch[late.posted :]


async def drive_awaiting(
    group: awaiting.Membership, now: Callable[[], float], guard: Guard, steps: SessionSteps[T]
) -> T:
    """Carry out the turns by awaiting."""
    return await run_async(steps, partial(_advance, guard), partial(_await, group, now))


async def _await(
    group: awaiting.Membership, now: Callable[[], float], step: Step, proceed: Proceed[T]
) -> Step | Done[T]:
    try:
        for batch in step.post:
            while len(batch):
                try:
                    await group.send_batch(batch, timeout=IO_TIMEOUT)
                    break
                except TimedOut as late:
                    batch = _unsent(batch, late)
        heard = await group.recv_batch(step.max, _left(step, now))
    except McastError as error:
        return proceed(error)
    return proceed(heard)
