"""The calls of programs: `send`, `receive` and `open_session`, by blocking and by awaiting.

A session has no thread and no task: it speaks and hears inside its calls.
"""

from __future__ import annotations

from _thread import LockType
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Coroutine,
    Generator,
    Sequence,
)
from contextlib import ExitStack, suppress
from math import inf
from threading import Lock
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack, overload

from pydantic import BaseModel

from mcast.api import Closed, Guard, Handle, McastError
from mcast.cast.io.driver import (
    ExclusiveUse,
    SessionContext,
    SessionSteps,
    drive_awaiting,
    drive_blocking,
    error_text,
    exclusive,
    open_context,
)
from mcast.cast.io.receiving import Missed, Received, ReceivingSession
from mcast.cast.io.sending import Object, ObjectReport, Progress, SendingSession
from mcast.cast.io.sinks import Offered, ReceiveTarget
from mcast.cast.io.sources import Sendable
from mcast.cast.protocol.strategy import Strategy, all_receivers, carousel
from mcast.endpoint import awaiting, blocking

T = TypeVar("T")

DEFAULT_MEMORY = 32 << 20
"""About how many bytes of one object are under way, at each end."""
DEFAULT_MAX_SIZE = 1 << 30
"""The largest object that `receive` takes into new memory, in bytes, where the caller does not say."""
DEFAULT_PEER_TIMEOUT = 10.0
"""So many seconds the other end may be silent, where the caller does not say."""


class _ObjectSession(Handle):
    """The part of a session that never waits."""

    def __init__(
        self,
        group: blocking.Sender | awaiting.Sender,
        memory: int,
        rate: float,
        peer_timeout: float,
        key: bytes | None,
        progress: Callable[[Progress], object] | None,
        call: str,
    ) -> None:
        self._closed = False
        self._guard = Guard("session")
        self._claim = Lock()
        """The claim of the call that is running, which holds it."""
        self._exclusive = ExclusiveUse()
        try:
            context = open_context(group, call, self._exclusive)
            self._now = context.now
            self._sending = SendingSession(context, memory, rate, peer_timeout, key, progress)
        except BaseException:
            self._exclusive.active = False
            raise

    @property
    def receivers(self) -> int:
        """How many receivers take part now."""
        return self._sending.core.members.active

    @property
    def addresses(self) -> dict[str, list[str]]:
        """The address of each receiver that takes part now -> the names that the receivers there give
        themselves."""
        found: dict[str, list[str]] = {}
        for member in self._sending.receivers:
            found.setdefault(member.address, []).append(member.name)
        return found

    def stop(self) -> None:
        """End the object that is on its way as it stands, or the next one if there is none.

        `send` returns the report: a carousel's says how often it went round; those that lack the object are
        told, and named. May be called by another thread, and in the handler of a signal.
        """
        self._sending.stop()

    def _begin(self, claim: LockType) -> None:
        """Refuse a second call meanwhile: each would hear what the other waits for.

        The call holds the claim in a `with`, which nothing can keep it from leaving.
        """
        with self._guard.lock:
            if self._claim.locked():
                raise RuntimeError("another call of this session is running: make one call at a time")
            self._claim = claim

    def _send_carousel(
        self, objects: Sequence[Object], strategy: Strategy
    ) -> SessionSteps[tuple[ObjectReport, ...]]:
        self._require_open()
        if not strategy.carousel:
            raise ValueError("send_carousel goes round and round: give a strategy of cast.carousel()")
        return self._sending.send_all(objects, strategy)

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("this session is closed: open another one")

    def _end(self, reason: str) -> SessionSteps[None] | None:
        """What tells the receivers, once; None where there is nothing more to tell, or nobody knows what."""
        before, self._closed = self._closed, True
        return None if before or self._guard.broken else self._sending.close(reason)


class ObjectSession(_ObjectSession):
    """A sender of objects to those that receive in the group; `open_session` explains the arguments.

    Close the session, or use it in a `with`: the receivers are told. While no call of the session runs,
    nothing is said: receivers wait for `peer_timeout` seconds, and find the session again when it goes on. A
    second call while one is running, from another thread, raises RuntimeError.
    """

    _group: blocking.Membership

    def __init__(self, group: blocking.Membership, *options: Any) -> None:
        self._group = group
        super().__init__(group, *options)

    def wait_for_receivers(self, receivers: int | None = None, timeout: float | None = None) -> int:
        """Wait until so many receivers take part; return how many do.

        receivers  None: let in those that come within `timeout` seconds, and return also if nobody has
        timeout    after so many seconds raise TimedOut, which says how many there are, if `receivers` are
                   wanted; None: wait for them without end

        Receivers are let in during the calls of a session alone. Between two objects, such as updates every
        few seconds, `wait_for_receivers(timeout=...)` is the pause that lets them in. Raises ValueError
        without both.
        """
        return self._wait_for_receivers(receivers, timeout, "session.wait_for_receivers")

    def _wait_for_receivers(self, receivers: int | None, timeout: float | None, call: str) -> int:
        with (claim := Lock()):
            self._begin(claim)
            self._require_open()
            return self._carry_out(self._sending.wait_for_receivers(receivers, timeout, call))

    def send(
        self,
        data: Sendable,
        *,
        name: str = "",
        metadata: bytes | BaseModel = b"",
        strategy: Strategy = all_receivers(),  # noqa: B008  (immutable)
    ) -> ObjectReport:
        """Send one object to all that take part. Arguments and errors are those of `mcast.cast.send`."""
        if isinstance(data, AsyncIterable):
            raise TypeError(
                f"{type(data).__name__} is awaited: send it to a group of an endpoint of mcast.aio"
            )
        with (claim := Lock()):
            self._begin(claim)
            self._require_open()
            return self._carry_out(self._sending.send(data, strategy, name, metadata))

    def _carry_out(self, steps: SessionSteps[T]) -> T:
        return drive_blocking(self._group, self._now, self._guard, steps)

    def send_carousel(
        self,
        objects: Sequence[Object],
        strategy: Strategy = carousel(),  # noqa: B008  (immutable)
    ) -> tuple[ObjectReport, ...]:
        """Send several objects round and round, one after another, as `send` does with one and `carousel()`.

        objects   1 to 65,536 of them; a path is open in its turn alone
        strategy  `carousel()`, perhaps with a bound, which counts rounds of all objects

        A receiver that comes at any time gets each once. There is a report for each object. Raises ValueError
        for other strategies, and as `mcast.cast.send` does for a carousel.
        """
        with (claim := Lock()):
            self._begin(claim)
            return self._carry_out(self._send_carousel(objects, strategy))

    def close(self, reason: str = "") -> None:
        """End the session, and tell the receivers, and why. Idempotent.

        A session that is broken tells nobody, and frees its membership.
        """
        with (claim := Lock()):
            self._begin(claim)
            try:
                steps = self._end(reason)
                if steps is not None:
                    self._carry_out(steps)
            finally:
                self._exclusive.active = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with suppress(McastError) if error else ExitStack():
                self.close(error_text(error) if error else "")
        finally:
            self._exclusive.active = False  # also if an interrupt has cut the close off


class AsyncObjectSession(_ObjectSession):
    """As `ObjectSession`, with calls that are awaited."""

    _group: awaiting.Membership

    def __init__(self, group: awaiting.Membership, *options: Any) -> None:
        self._group = group
        super().__init__(group, *options)

    async def wait_for_receivers(self, receivers: int | None = None, timeout: float | None = None) -> int:
        """As `ObjectSession.gather`."""
        return await self._wait_for_receivers(receivers, timeout, "session.wait_for_receivers")

    async def _wait_for_receivers(self, receivers: int | None, timeout: float | None, call: str) -> int:
        with (claim := Lock()):
            self._begin(claim)
            self._require_open()
            return await self._carry_out(self._sending.wait_for_receivers(receivers, timeout, call))

    async def send(
        self,
        data: Sendable,
        *,
        name: str = "",
        metadata: bytes | BaseModel = b"",
        strategy: Strategy = all_receivers(),  # noqa: B008  (immutable)
    ) -> ObjectReport:
        """As `ObjectSession.send`. One call at a time."""
        with (claim := Lock()):
            self._begin(claim)
            self._require_open()
            return await self._carry_out(self._sending.send(data, strategy, name, metadata))

    async def _carry_out(self, steps: SessionSteps[T]) -> T:
        return await drive_awaiting(self._group, self._now, self._guard, steps)

    async def send_carousel(
        self,
        objects: Sequence[Object],
        strategy: Strategy = carousel(),  # noqa: B008  (immutable)
    ) -> tuple[ObjectReport, ...]:
        """As `ObjectSession.send_carousel`."""
        with (claim := Lock()):
            self._begin(claim)
            return await self._carry_out(self._send_carousel(objects, strategy))

    async def close(self, reason: str = "") -> None:
        """As `ObjectSession.close`."""
        with (claim := Lock()):
            self._begin(claim)
            try:
                steps = self._end(reason)
                if steps is not None:
                    await self._carry_out(steps)
            finally:
                self._exclusive.active = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with suppress(McastError) if error else ExitStack():
                await self.close(error_text(error) if error else "")
        finally:
            self._exclusive.active = False


class _SessionOptions(TypedDict, total=False):
    memory: int
    rate: float
    peer_timeout: float
    key: bytes | None
    progress: Callable[[Progress], object] | None


@overload
def open_session(group: blocking.Membership, **options: Unpack[_SessionOptions]) -> ObjectSession: ...
@overload
def open_session(group: awaiting.Membership, **options: Unpack[_SessionOptions]) -> AsyncObjectSession: ...
def open_session(
    group: blocking.Membership | awaiting.Membership,
    *,
    memory: int = DEFAULT_MEMORY,
    rate: float = inf,
    peer_timeout: float = DEFAULT_PEER_TIMEOUT,
    key: bytes | None = None,
    progress: Callable[[Progress], object] | None = None,
) -> ObjectSession | AsyncObjectSession:
    """Open a session, which sends any number of objects to those that receive in the group.

    group    the membership; of an endpoint of `mcast.aio`, the session's calls are awaited
    memory   about how many bytes the sender keeps for repairs, and so how far it goes ahead of the slowest
    rate     the most bytes a second, on the sender's link
    peer_timeout  give up a receiver that does not answer requests for this many seconds
    key      closes the group to those that do not have it: the bytes of a key file, at least 16 random ones
    progress  is called inside the session's calls with how far the sender is, whenever that changes

    Raises TypeError for what is no membership, RuntimeError if it sends or receives objects already, and
    ValueError for a rate or a key that cannot be.
    """
    options = memory, rate, peer_timeout, key, progress, "cast.open_session"
    if isinstance(group, awaiting.Membership):
        return AsyncObjectSession(group, *options)
    return ObjectSession(group, *options)


class _SendOptions(TypedDict, total=False):
    receivers: int | None
    timeout: float | None
    name: str
    metadata: bytes | BaseModel
    strategy: Strategy
    rate: float
    peer_timeout: float
    key: bytes | None


@overload
def send(group: blocking.Membership, data: Sendable, **options: Unpack[_SendOptions]) -> ObjectReport: ...
@overload
def send(
    group: awaiting.Membership, data: Sendable, **options: Unpack[_SendOptions]
) -> Coroutine[Any, Any, ObjectReport]: ...
def send(
    group: blocking.Membership | awaiting.Membership,
    data: Sendable,
    *,
    receivers: int | None = None,
    timeout: float | None = None,
    name: str = "",
    metadata: bytes | BaseModel = b"",
    strategy: Strategy = all_receivers(),  # noqa: B008  (immutable)
    rate: float = inf,
    peer_timeout: float = DEFAULT_PEER_TIMEOUT,
    key: bytes | None = None,
) -> ObjectReport | Coroutine[Any, Any, ObjectReport]:
    """Send one object to receivers, whole; return what became of it at each of them.

    group      the membership; of an endpoint of `mcast.aio`, the call is awaited
    data       bytes, an array, a CPU tensor, a path, an open binary file or pipe, an iterable of buffers: see
               `Sendable`. Do not change the bytes before the call returns. While an iterator, or a file that
               is no pipe, works on its next bytes, nothing is said
    receivers  the object begins when so many take part; those that come later may still get it. None: one,
               or none for a carousel
    timeout    how many seconds to wait for them; None: without end
    name, metadata  go with the object: at most 64 and 512 bytes; a pydantic model goes as JSON
    strategy   what to wait for: all_receivers(), quorum(k), deadline(seconds), best_effort(); or nothing:
               carousel(cycles=..., seconds=...) sends `data` round and round, of which it needs the bytes
               again and again, to receivers that come at any time and say nothing. It needs a `rate`;
               `ObjectSession.send_carousel` sends several objects so
    rate, peer_timeout, key  as in `open_session`, which is for several objects

    A receiver that did not get the object raises nothing: see `kept` and `receivers` of the report. Raises
    TimedOut if too few receivers come; OSError for a file that cannot be read, or changes in a carousel;
    ValueError for metadata that is too long, and for a carousel without a rate, or of what cannot be read
    twice; what `Membership.send` raises. A call that Ctrl-C or cancellation ends tells the receivers,
    which drop what they have, unless it was in the middle of a turn; what came for a path stays hidden there
    for the next `receive`.
    """
    session_options = DEFAULT_MEMORY, rate, peer_timeout, key, None, "cast.send"
    if receivers is None:
        receivers = 0 if strategy.carousel else 1
    options: dict[str, Any] = {"name": name, "metadata": metadata, "strategy": strategy}
    if isinstance(group, awaiting.Membership):
        return _send_awaiting(group, data, receivers, timeout, session_options, options)
    opened = ObjectSession(group, *session_options)
    try:
        with opened as session:
            session._wait_for_receivers(receivers, timeout, "cast.send")
            return session.send(data, **options)
    finally:
        opened._exclusive.active = False  # also if an interrupt came before the first line of `__exit__`


async def _send_awaiting(
    group: awaiting.Membership,
    data: Sendable,
    receivers: int,
    timeout: float | None,
    session_options: tuple[Any, ...],
    options: dict[str, Any],
) -> ObjectReport:
    async with AsyncObjectSession(group, *session_options) as session:
        await session._wait_for_receivers(receivers, timeout, "cast.send")
        return await session.send(data, **options)


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
) -> Generator[Received, None, None] | AsyncGenerator[Received, None]:
    """Receive objects, of all senders in the group; each is whole and right when it comes out.

    group    the membership; of an endpoint of `mcast.aio`, use `async for`
    into     where objects go: None for new memory; a writable buffer or CPU tensor, which each object
             overwrites; the path of a file, which each object replaces when it is on the disk, or of a pipe
             or device, which is written to; what has `write`, such as a pipe, and gets each part when that
             is right, before the whole is: `write` may take a part of what it gets; or a function that says
             one of these for each `Offered`, and may raise OSError to refuse it
    timeout  end when nothing has been under way for so many seconds; None: go on until the group is left
    missed   is called for each object that did not become whole here; without it a warning is logged
    max_size  the largest object that goes into new memory, in bytes
    memory   about how many bytes of each sender's object are under way here, at most. Of objects that go
             round together up to 32 may be there in part, and for one place of your own one alone
    peer_timeout  leave a sender that has sent nothing for this many seconds; objects of it that are not
             complete are missed
    model    the pydantic model that each object's metadata must be; others are refused, and say why. Use
             `Offered.read`
    key      of a closed group: the bytes of a key file; messages without the key count, and change nothing
    one_session  receive from one sender, the first that begins an object, and end with its session, or when
             all objects of a carousel are here; `timeout` counts until it begins. Other senders are told
    progress  is called with each object that is under way, and how many bytes of it are right and written
    name     what reports call this receiver, 1 to 64 bytes; None: the names of the host and its device

    Each object of a sender's session comes out or is missed, once, also if the sender falls silent meanwhile
    and is heard again. What was missed does not come later: give a longer `peer_timeout` where the network
    may be cut for longer. The last 1,024 sessions that were left are remembered, for as long as this call
    goes on.

    Between two objects nothing is heard or said: a program that takes longer than the sender's `peer_timeout`
    over an object does that in another thread or task. The end of the loop, or of `contextlib.closing` and
    `aclosing` around it, tells the senders that this receiver leaves. What a buffer of one's own holds is
    undefined until the object comes out. Raises TypeError for a buffer that cannot be written, and what
    `Membership.recv` raises.
    """
    options = (into, missed, max_size, memory, peer_timeout, key, model, one_session, progress, name)
    if isinstance(group, awaiting.Membership):
        return _receive_awaiting(group, timeout, *options)
    return _receive_blocking(group, timeout, *options)


class _Reception:
    """What a receiver does until it leaves, in turns."""

    def __init__(self, context: SessionContext, timeout: float | None, options: tuple[Any, ...]) -> None:
        self.guard: Guard = Guard("receiver", "receive anew")
        self._receiving = ReceivingSession(context, *options)
        self._timeout, self._why = timeout, ""

    def next(self) -> SessionSteps[Received | None]:
        """The next object; None when there will be no more."""
        try:
            return (yield from self._receiving.next(self._timeout))
        except Closed:
            return None
        except BaseException as error:
            self._why = error_text(error)
            raise

    def end(self) -> SessionSteps[None]:
        """Tell the senders that this receiver leaves."""
        with suppress(McastError):
            yield from self._receiving.leave(self._why)

    def close(self) -> None:
        """Drop what is not whole."""
        self._receiving.close()


def _receive_blocking(
    group: blocking.Membership, timeout: float | None, *options: Any
) -> Generator[Received, None, None]:
    hold = ExclusiveUse()
    try:
        context = open_context(group, "cast.receive", hold)
        reception = _Reception(context, timeout, options)
        try:
            while (
                found := drive_blocking(group, context.now, reception.guard, reception.next())
            ) is not None:
                yield found
        finally:
            try:
                if not reception.guard.broken:
                    drive_blocking(group, context.now, reception.guard, reception.end())
            finally:
                reception.close()
    finally:
        hold.active = False


async def _receive_awaiting(
    group: awaiting.Membership, timeout: float | None, *options: Any
) -> AsyncGenerator[Received, None]:
    with exclusive(group, "cast.receive") as context:
        reception = _Reception(context, timeout, options)
        try:
            while (
                found := await drive_awaiting(group, context.now, reception.guard, reception.next())
            ) is not None:
                yield found
        finally:
            try:
                if not reception.guard.broken:
                    await drive_awaiting(group, context.now, reception.guard, reception.end())
            finally:
                reception.close()
