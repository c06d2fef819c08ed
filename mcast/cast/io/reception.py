"""Public call of a receiver: `receive`, blocking and awaiting. `session` describes what the calls have alike.

A module of its own, because a process that receives loads no sender.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import suppress
from typing import Any, TypedDict, Unpack, overload

from pydantic import BaseModel

from mcast.api import Closed, Guard, McastError
from mcast.cast.io.driver import (
    DEFAULT_MEMORY,
    DEFAULT_PEER_TIMEOUT,
    ExclusiveUse,
    SessionContext,
    SessionSteps,
    drive_awaiting,
    drive_blocking,
    error_text,
    exclusive,
    is_awaiting,
    open_context,
)
from mcast.cast.io.receiving import Missed, Received, ReceivingSession
from mcast.cast.io.sinks import Offered, ReceiveTarget
from mcast.cast.io.workers import DEFAULT_THREADS
from mcast.endpoint import awaiting, blocking

DEFAULT_MAX_SIZE = 1 << 30
"""Default maximum size of an object that `receive` puts into new memory, in bytes."""


class _ReceiveOptions(TypedDict, total=False):
    timeout: float | None
    missed: Callable[[Missed], object] | None
    max_size: int
    memory: int
    peer_timeout: float
    key: bytes | None
    model: type[BaseModel] | None
    one_session: bool
    progress: Callable[[Offered, int], object] | None
    name: str | None
    threads: int
    latest: bool


@overload
def receive(
    group: blocking.Membership, into: ReceiveTarget = ..., **options: Unpack[_ReceiveOptions]
) -> Generator[Received, None, None]: ...
@overload
def receive(
    group: awaiting.Membership, into: ReceiveTarget = ..., **options: Unpack[_ReceiveOptions]
) -> AsyncGenerator[Received, None]: ...
def receive(
    group: blocking.Membership | awaiting.Membership,
    into: ReceiveTarget = None,
    *,
    timeout: float | None = None,
    missed: Callable[[Missed], object] | None = None,
    max_size: int = DEFAULT_MAX_SIZE,
    memory: int = DEFAULT_MEMORY,
    peer_timeout: float = DEFAULT_PEER_TIMEOUT,
    key: bytes | None = None,
    model: type[BaseModel] | None = None,
    one_session: bool = False,
    progress: Callable[[Offered, int], object] | None = None,
    name: str | None = None,
    threads: int = DEFAULT_THREADS,
    latest: bool = False,
) -> Generator[Received, None, None] | AsyncGenerator[Received, None]:
    """Receive objects from all senders in a group; yield each when it is complete and verified.

    group         membership of an endpoint; with one of `mcast.aio`, use `async for`
    into          destination of the objects: None for new memory; a writable buffer or CPU tensor, which each
                  object overwrites; the path of a file, which each object replaces when it is on the disk, or
                  of a pipe or device, which is written to; an object with `write`, such as a pipe, which gets
                  each verified part before the object is complete, and may accept fewer bytes than it is
                  given; or a function that returns one of these for each `Offered`, and may raise OSError to
                  refuse it
    timeout       end when no object has been in transfer for this many seconds; None: receive until the
                  membership is left
    missed        called for each object that this receiver did not get; without it a warning is logged
    max_size      maximum size of an object in new memory, in bytes
    memory        approximate maximum of bytes in transfer for each sender's object. Of a carousel of several
                  objects up to 32 may be incomplete at a time, and one if they share a destination
    peer_timeout  leave a sender that has sent nothing for this many seconds; its incomplete objects are
                  missed
    model         pydantic model of each object's metadata; others are refused with the reason. Parse the
                  metadata by `Offered.read`
    key           key of a closed group: the bytes of a key file. Messages without the key are counted and
                  ignored
    one_session   receive from one sender only, the first that begins an object, and end with its session, or
                  when all objects of a carousel have arrived; `timeout` counts until it begins. Objects of
                  other senders are refused
    progress      called with each object in transfer, and the number of its bytes that are verified and
                  written
    name          name of this receiver in reports, 1 to 64 bytes; None: the names of the host and its device
    threads       number of threads, 0 to 64, that restore and verify blocks while the caller's thread
                  receives; they start with the first large object, and one works for each object in transfer.
                  0: the caller's thread does that, which is the default on one processor; otherwise 1
    latest        receive published versions alone, and only the newest one of each sender's session: a
                  version in transfer is dropped when a newer one begins. Each is applied as a whole: the
                  caller's buffer has the old version or the new one, also after an error. A receiver that the
                  sender has given up joins again, and gets the newest version. Other objects are refused, and
                  dropped versions are logged at level DEBUG unless `missed` is given

    Each object of a sender's session is yielded or missed exactly once, also if the sender falls silent and
    continues later. A missed object is not received later: give a longer `peer_timeout` if the network may be
    interrupted for longer. This call remembers the last 1,024 sessions that it has left.

    Nothing is sent or received between two objects: if the program works on an object for longer than the
    sender's `peer_timeout`, do that in another thread or task. When the loop ends, or `contextlib.closing` or
    `aclosing` around it, the senders are notified that this receiver leaves. Without `latest` the contents of
    the caller's buffer are undefined until its object is yielded. Raises TypeError for a buffer that cannot
    be written, and for a stream with `latest`; ValueError for a name, a key, a timeout or a number of threads
    that is not valid; and the errors of `Membership.recv`.
    """
    selection = one_session, progress, name, threads, latest
    options = into, missed, max_size, memory, peer_timeout, key, model, *selection
    if is_awaiting(group):
        return _receive_awaiting(group, timeout, *options)
    return _receive_blocking(group, timeout, *options)


class _Reception:
    """Steps of a `receive` call, and the reason that the senders get when it ends."""

    def __init__(self, context: SessionContext, timeout: float | None, options: tuple[Any, ...]) -> None:
        self.guard: Guard = Guard("receiver", "receive anew")
        self._receiving = ReceivingSession(context, *options)
        self._timeout, self._reason = timeout, ""

    def next(self) -> SessionSteps[Received | None]:
        """Return the next object; None if there will be no more."""
        try:
            return (yield from self._receiving.next(self._timeout))
        except Closed:
            return None
        except BaseException as error:
            self._reason = error_text(error)
            raise

    def end(self) -> SessionSteps[None]:
        """Notify the senders that this receiver leaves; after an interrupted step, if that is possible."""
        with suppress(Exception if self.guard.broken else McastError):
            yield from self._receiving.leave(self._reason)

    def close(self) -> None:
        """Drop incomplete objects."""
        self._receiving.close()


def _receive_blocking(
    group: blocking.Membership, timeout: float | None, *options: Any
) -> Generator[Received, None, None]:
    use = ExclusiveUse()
    try:
        context = open_context(group, "cast.receive", use)
        reception = _Reception(context, timeout, options)
        try:
            while (
                received := drive_blocking(
                    group, context.now, reception.guard, reception.next(), "cast.receive"
                )
            ) is not None:
                yield received
        finally:
            try:
                drive_blocking(group, context.now, Guard("receiver"), reception.end(), "cast.receive")
            finally:
                reception.close()
    finally:
        use.active = False


async def _receive_awaiting(
    group: awaiting.Membership, timeout: float | None, *options: Any
) -> AsyncGenerator[Received, None]:
    with exclusive(group, "cast.receive") as context:
        reception = _Reception(context, timeout, options)
        try:
            while (
                received := await drive_awaiting(
                    group, context.now, reception.guard, reception.next(), "cast.receive"
                )
            ) is not None:
                yield received
        finally:
            try:
                await drive_awaiting(group, context.now, Guard("receiver"), reception.end(), "cast.receive")
            finally:
                reception.close()
