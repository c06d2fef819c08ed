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
from mcast.cast.nack.header import TEXT, number_at
from mcast.cast.nack.payload import keep_freed_memory
from mcast.cast.nack.rate import BURST
from mcast.cast.objects.bytes_out import Lend, lend_nothing
from mcast.endpoint import awaiting, blocking
from mcast.endpoint.base import SenderBase
from mcast.endpoint.waiting import Box, Done, Proceed, Step, Steps, resume, run_async, run_blocking
from mcast.wire.addresses import Gid

T = TypeVar("T")

BOUND = 10.0
"""The longest that a join may take, and that a send may post nothing, in seconds."""

DEPTH = 1024
"""The receive queue of an end, in messages, where the caller can say: more than a sender sends in a turn."""

LEAST = 1024
"""The fewest bytes that a message of the group must be able to have."""

HEARD = 2 * BURST
"""The most messages that are taken in one turn, so that a flood of them does not keep an end from sending."""


Turns = Steps[Iterable[Series], T]
"""What an end does, a turn in each step: it posts batches, as `send_batch` takes them, of which each is sent
before the next is made, and says by when it wants its next turn. What comes in is leased: its memory ends
with the turn, and no part of it may be kept."""


@dataclass(frozen=True, eq=False)
class Seat:
    """Where an end sits: its number, its name, the longest message it can send and take, its clock.

    whose  the endpoint and the group, as the log calls them
    queue  how many messages its receive queue holds; 0: that is not known
    lend   registers a buffer that stays as it is, which is sent without a copy then
    """

    number: int
    name: str
    largest: int
    now: Callable[[], float]
    whose: str
    queue: int = 0
    lend: Lend = lend_nothing


_TAKING = RLock()


@lru_cache(maxsize=4096)  # asked again and again, and most messages come from a few ends
def in_words(gid: Gid) -> str:
    """The address of an end, as text."""
    return str(gid.ipv4 or gid)


def told_of(error: BaseException) -> str:
    """What the group learns of an error: no path and no address of this host."""
    if isinstance(error, Refused):
        error = error.error
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    if type(error) is OSError:  # the library's own, in its own words
        return str(error)
    if error.__cause__ is not None:
        return told_of(error.__cause__)
    return "internal error" if isinstance(error, Exception) else "interrupted"


class Hold:
    """Tells, by `taken`, whether an end has a membership to itself. Who makes it sets it back in the end."""

    __slots__ = ("__weakref__", "taken")

    def __init__(self) -> None:
        self.taken: bool = False


@contextmanager
def seated(group: SenderBase, call: str) -> Iterator[Seat]:
    """A seat in the group, which no other end has meanwhile; errors are those of `take_seat`."""
    hold = Hold()
    try:
        yield take_seat(group, call, hold)
    finally:
        hold.taken = False


def take_seat(group: SenderBase, call: str, hold: Hold) -> Seat:
    """Return a seat in the group, which no other end has while the hold lives and is taken.

    Raises TypeError for what is no membership, RuntimeError if another end has the seat.
    """
    if not isinstance(group, blocking.Membership | awaiting.Membership):
        raise TypeError(
            f"{call}: {type(group).__name__} is no membership that can hear the others: use Endpoint.join"
        )
    if group.max_message_size < LEAST:
        raise ValueError(
            f"{call}: messages to this group have at most {group.max_message_size} bytes, and objects need "
            f"{LEAST}: is there a port with a smaller MTU?"
        )
    endpoint = group.endpoint
    source = endpoint.port.gids.get(group.destination.sgid_index, Gid(endpoint.address))
    number = number_at(in_words(source), 1 + randbelow((1 << 32) - 1))
    device = f" {endpoint.device.name}"  # which a long name of the host shall not cut off
    name = socket.gethostname()[: max(0, TEXT - len(device))] + device
    keep_freed_memory()
    resources = endpoint._core.resources
    whose = f"{resources.name}, in {group.group}"
    depth = resources.settings.receive_depth
    seat = Seat(number, name, group.max_message_size, endpoint.now, whose, depth, resources.lend)
    with _TAKING:
        other = None if group._hold is None else group._hold()
        if other is not None and other.taken:
            raise RuntimeError(
                f"{call}: this membership is sending or receiving objects already, and one of the two would "
                "miss what the other hears: end that first, or join from another endpoint"
            )
        group._hold = ref(hold)
        hold.taken = True
    return seat


def others(heard: Iterable[Series]) -> Iterator[tuple[Series, str]]:
    """The messages of others, and their addresses."""
    return ((one, in_words(one.source)) for one in heard if not one.from_self)


def messages_of(heard: Iterable[tuple[Series, str]]) -> Iterator[tuple[bytes, str]]:
    """The bytes of each message, and its address."""
    return ((bytes(payload), address) for series, address in heard for payload in series.payloads())


def kept(series: Series) -> Series:
    """The messages in memory of their own, which no turn ends."""
    return series._replace(memory=memoryview(bytes(series.memory)))


def blocked(group: blocking.Membership, now: Callable[[], float], guard: Guard, turns: Turns[T]) -> T:
    """Carry out the turns by blocking.

    Each is a change under the guard of the end. An exception that comes while something is sent or waited for
    leaves the end whole; one that comes in the middle of a turn breaks it.
    """
    return run_blocking(turns, partial(_advance, guard), partial(_act, group, now))


def _advance(guard: Guard, turns: Turns[T], box: Box) -> Step | Done[T]:
    """Have the end take its turn, with what was heard, of which the lease ends then."""
    heard = box[0]
    if not isinstance(heard, Batch):
        del heard
        return guard.run("a turn", Phase.RECV, _turn, turns, box)
    with heard:
        box[0] = heard.series()
        return guard.run("a turn", Phase.RECV, _turn, turns, box)


def _turn(turns: Turns[T], box: Box) -> Step | Done[T]:
    """Resume the turns. An `Exception` is one of ours, or of the caller's files, iterators and functions,
    which a turn calls: it ends the object, and the end goes on. All others come from a signal's handler or
    another thread."""
    try:
        return resume(turns, box)
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
            group.send_batch(batch, timeout=BOUND)
            return
        except TimedOut as late:
            batch = _rest(batch, late)


def _rest(batch: Sequence[Buffer] | memoryview, late: TimedOut) -> Sequence[Buffer] | memoryview:
    """What was not posted in time. Raises the error if nothing was."""
    if not late.posted:
        raise late
    return batch[late.posted :]


async def awaited(group: awaiting.Membership, now: Callable[[], float], guard: Guard, turns: Turns[T]) -> T:
    """Carry out the turns by awaiting."""
    return await run_async(turns, partial(_advance, guard), partial(_await, group, now))


async def _await(
    group: awaiting.Membership, now: Callable[[], float], step: Step, proceed: Proceed[T]
) -> Step | Done[T]:
    try:
        for batch in step.post:
            while len(batch):
                try:
                    await group.send_batch(batch, timeout=BOUND)
                    break
                except TimedOut as late:
                    batch = _rest(batch, late)
        heard = await group.recv_batch(step.max, _left(step, now))
    except McastError as error:
        return proceed(error)
    return proceed(heard)
