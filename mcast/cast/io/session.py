"""Public calls of a sender: `send` and `open_session`, blocking and awaiting; `reception` has `receive`.

Theory of operation. A call opens a `SendingSession` (`receive`: a `ReceivingSession`), and has `driver` run
its steps.
A session sends and receives only inside its calls; its threads (`workers`) compute, and do nothing else.

- Exclusive use: from its first line to its close a session has the membership to itself (`ExclusiveUse`). All
  paths end that in a `finally`, also if an interrupt arrives between two lines; `send` does so twice, because
  an interrupt may arrive before `__exit__` begins.
- One call at a time: each public call holds a lock, the claim, in a `with`. Another call meanwhile is refused
  and not queued, because each would receive what the other waits for. `stop` needs no claim.
- Exceptions: an interrupt while a call waits leaves the session usable, and `with` closes it with the error's
  text as the reason. An interrupt inside of a step breaks the guard; then `close` sends nothing, and the
  receivers notice the silence.
- The blocking and the awaiting classes differ in how they run steps (`_carry_out`); `_ObjectSession` has the
  rest.
"""

from __future__ import annotations

from _thread import LockType
from collections.abc import (
    AsyncIterable,
    Callable,
    Coroutine,
    Sequence,
)
from contextlib import ExitStack, suppress
from math import inf
from threading import Lock
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack, overload

from pydantic import BaseModel

from mcast.api import Guard, Handle, McastError
from mcast.cast.io.driver import (
    DEFAULT_MEMORY,
    DEFAULT_PEER_TIMEOUT,
    ExclusiveUse,
    SessionSteps,
    drive_awaiting,
    drive_blocking,
    error_text,
    is_awaiting,
    open_context,
)
from mcast.cast.io.sending import Object, ObjectReport, Progress, ReceiverVersion, SendingSession
from mcast.cast.io.sources import Sendable
from mcast.cast.io.workers import DEFAULT_THREADS
from mcast.cast.protocol.strategy import Strategy, all_receivers, carousel
from mcast.endpoint import awaiting, blocking

T = TypeVar("T")


class _ObjectSession(Handle):
    """Common part of the blocking and the awaiting session: everything that never waits."""

    def __init__(
        self,
        group: blocking.Sender | awaiting.Sender,
        memory: int,
        rate: float,
        peer_timeout: float,
        key: bytes | None,
        progress: Callable[[Progress], object] | None,
        threads: int,
        call: str,
    ) -> None:
        self._closed = False
        self._call = call
        self._guard = Guard("session")
        self._claim = Lock()
        """Lock that the running call holds."""
        self._exclusive = ExclusiveUse()
        try:
            context = open_context(group, call, self._exclusive)
            self._now = context.now
            self._sending = SendingSession(context, memory, rate, peer_timeout, key, progress, threads)
        except BaseException:
            self._exclusive.active = False
            raise

    @property
    def receivers(self) -> int:
        """Number of receivers in the session now."""
        return self._sending.core.members.active

    @property
    def addresses(self) -> dict[str, list[str]]:
        """Address -> names of the receivers that are in the session now."""
        names: dict[str, list[str]] = {}
        for member in self._sending.receivers:
            names.setdefault(member.address, []).append(member.name)
        return names

    @property
    def versions(self) -> tuple[ReceiverVersion, ...]:
        """Version that each receiver in the session has, of what `publish` has sent."""
        return self._sending.versions

    def stop(self) -> None:
        """End the current object now, or the next one if there is none.

        `send` returns the report as usual: it names the receivers that do not have the object, and the number
        of cycles of a carousel. Those receivers report the object as missed. May be called from another
        thread and in a signal handler.
        """
        self._sending.stop()

    def _name(self, call: str) -> str:
        """Return the name of a call of this session in errors: that of the call that the caller made."""
        return self._call if self._call == "cast.send" else f"session.{call}"

    def _begin(self, claim: LockType) -> None:
        """Raise RuntimeError if another call of this session is running; otherwise register this one.

        claim  lock of this call, held in a `with`, so that it is free whenever the call has ended
        """
        with self._guard.lock:
            if self._claim.locked():
                raise RuntimeError("another call of this session is running: make one call at a time")
            self._claim = claim

    def _send_carousel(
        self, objects: Sequence[Object], strategy: Strategy
    ) -> SessionSteps[tuple[ObjectReport, ...]]:
        if not strategy.carousel:
            raise ValueError("send_carousel sends in cycles: give a strategy of cast.carousel()")
        return self._sending.send_all(objects, strategy)

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("this session is closed: open another one")

    def _end(self, reason: str) -> SessionSteps[None] | None:
        """Return the steps that end the session; None if it is closed already, or broken."""
        was_closed, self._closed = self._closed, True
        return None if was_closed or self._guard.broken else self._sending.close(reason)

    def _free(self) -> None:
        """End the exclusive use of the membership, and free what the session has, also if it is broken."""
        self._exclusive.active = False
        self._sending.free()


class ObjectSession(_ObjectSession):
    """Session that sends objects to the receivers in a group; see `open_session` for the arguments.

    Close the session, or use it in a `with`, to notify the receivers of its end. Nothing is sent while no
    call of the session runs: after `peer_timeout` seconds of silence receivers leave, and they rejoin when
    the session continues. A second call while one is running, from another thread, raises RuntimeError.
    """

    _group: blocking.Membership

    def __init__(self, group: blocking.Membership, *options: Any) -> None:
        self._group = group
        super().__init__(group, *options)

    def _drive(self, steps: SessionSteps[T], call: str) -> T:
        return drive_blocking(self._group, self._now, self._guard, steps, call)

    def _carry_out(self, steps: SessionSteps[T], call: str) -> T:
        """Run the steps of a call, unless another one is running."""
        with (claim := Lock()):
            self._begin(claim)
            self._require_open()
            return self._drive(steps, call)

    def wait_for_receivers(self, receivers: int | None = None, timeout: float | None = None) -> int:
        """Wait until this number of receivers has joined; return the number of receivers in the session.

        receivers  None: admit all that join within `timeout` seconds, and return even if none has
        timeout    time in seconds, after which TimedOut is raised if there are fewer than `receivers`; None:
                   wait without limit

        Receivers can join only while a call of the session runs. Between two objects, such as updates every
        few seconds, use `wait_for_receivers(timeout=...)` as the pause: in it, receivers that lack the
        version of the last `publish` get it. Raises ValueError if both arguments are None.
        """
        call = self._name("wait_for_receivers")
        steps = self._sending.wait_for_receivers(receivers, timeout, call)
        return self._carry_out(steps, call)

    def send(
        self,
        data: Sendable,
        *,
        name: str = "",
        metadata: bytes | BaseModel = b"",
        strategy: Strategy = all_receivers(),  # noqa: B008  (immutable)
    ) -> ObjectReport:
        """Send one object to all receivers. Arguments and errors are those of `mcast.cast.send`."""
        if isinstance(data, AsyncIterable):
            raise TypeError(
                f"{type(data).__name__} is an async iterable: send it with a membership of mcast.aio"
            )
        steps = self._sending.send(data, strategy, name, metadata)
        return self._carry_out(steps, self._name("send"))

    def publish(
        self,
        data: Sendable,
        *,
        version: int,
        name: str = "",
        metadata: bytes | BaseModel = b"",
        strategy: Strategy = all_receivers(),  # noqa: B008  (immutable)
    ) -> ObjectReport:
        """Send the newest version of an object, and keep it for receivers that join or return later.

        data            a buffer or CPU tensor, of which the session keeps a copy, so that the caller may
                        change it after the call; or the path of a regular file, which must keep its bytes
                        until the next version
        version         number of the version, from 0 to 2**63-1, higher than all before in this session;
                        receivers have it as `Offered.version`
        name, metadata  see `mcast.cast.send`
        strategy        condition that ends the call, as for `send`; not a carousel

        Receivers that lack the version after this call get it within `wait_for_receivers`, each at most once.
        `versions`, and `ReceiverReport.version`, say which version a receiver has. Raises TypeError for data
        that cannot be read again later, and for a version that is no int; ValueError for a version that is
        not newer, and for a carousel; and the errors of `send`. `wait_for_receivers` raises OSError if the
        file has changed.
        """
        steps = self._sending.publish(data, version, strategy, name, metadata)
        return self._carry_out(steps, self._name("publish"))

    def send_carousel(
        self,
        objects: Sequence[Object],
        strategy: Strategy = carousel(),  # noqa: B008  (immutable)
    ) -> tuple[ObjectReport, ...]:
        """Send several objects in cycles; return the report of each.

        objects   1 to 65,536 objects; a path is open only while its object is sent
        strategy  `carousel()`, with or without a limit; one cycle sends all objects

        A receiver may join at any time, and gets each object once. Raises ValueError for other strategies,
        and where `mcast.cast.send` raises it for a carousel.
        """
        steps = self._send_carousel(objects, strategy)
        return self._carry_out(steps, self._name("send_carousel"))

    def close(self, reason: str = "") -> None:
        """End the session, and send the receivers the reason. Idempotent.

        A broken session sends nothing, and frees its membership.
        """
        with (claim := Lock()):
            self._begin(claim)
            try:
                steps = self._end(reason)
                if steps is not None:
                    self._drive(steps, self._name("close"))
            finally:
                self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with suppress(McastError) if error else ExitStack():
                self.close(error_text(error) if error else "")
        finally:
            self._free()  # also if an interrupt has ended `close` early


class AsyncObjectSession(_ObjectSession):
    """`ObjectSession` with calls that are awaited."""

    _group: awaiting.Membership

    def __init__(self, group: awaiting.Membership, *options: Any) -> None:
        self._group = group
        super().__init__(group, *options)

    async def _drive(self, steps: SessionSteps[T], call: str) -> T:
        return await drive_awaiting(self._group, self._now, self._guard, steps, call)

    async def _carry_out(self, steps: SessionSteps[T], call: str) -> T:
        """Run the steps of a call, unless another one is running."""
        with (claim := Lock()):
            self._begin(claim)
            self._require_open()
            return await self._drive(steps, call)

    async def wait_for_receivers(self, receivers: int | None = None, timeout: float | None = None) -> int:
        """Wait for receivers; see `ObjectSession.wait_for_receivers`."""
        call = self._name("wait_for_receivers")
        steps = self._sending.wait_for_receivers(receivers, timeout, call)
        return await self._carry_out(steps, call)

    async def send(
        self,
        data: Sendable,
        *,
        name: str = "",
        metadata: bytes | BaseModel = b"",
        strategy: Strategy = all_receivers(),  # noqa: B008  (immutable)
    ) -> ObjectReport:
        """Send one object to all receivers; see `ObjectSession.send`."""
        steps = self._sending.send(data, strategy, name, metadata)
        return await self._carry_out(steps, self._name("send"))

    async def publish(
        self,
        data: Sendable,
        *,
        version: int,
        name: str = "",
        metadata: bytes | BaseModel = b"",
        strategy: Strategy = all_receivers(),  # noqa: B008  (immutable)
    ) -> ObjectReport:
        """Send the newest version of an object; see `ObjectSession.publish`."""
        steps = self._sending.publish(data, version, strategy, name, metadata)
        return await self._carry_out(steps, self._name("publish"))

    async def send_carousel(
        self,
        objects: Sequence[Object],
        strategy: Strategy = carousel(),  # noqa: B008  (immutable)
    ) -> tuple[ObjectReport, ...]:
        """Send several objects in cycles; see `ObjectSession.send_carousel`."""
        steps = self._send_carousel(objects, strategy)
        return await self._carry_out(steps, self._name("send_carousel"))

    async def close(self, reason: str = "") -> None:
        """End the session; see `ObjectSession.close`."""
        with (claim := Lock()):
            self._begin(claim)
            try:
                steps = self._end(reason)
                if steps is not None:
                    await self._drive(steps, self._name("close"))
            finally:
                self._free()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with suppress(McastError) if error else ExitStack():
                await self.close(error_text(error) if error else "")
        finally:
            self._free()


class _SessionOptions(TypedDict, total=False):
    memory: int
    rate: float
    peer_timeout: float
    key: bytes | None
    progress: Callable[[Progress], object] | None
    threads: int


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
    threads: int = DEFAULT_THREADS,
) -> ObjectSession | AsyncObjectSession:
    """Open a session that sends any number of objects to the receivers in a group.

    group         membership of an endpoint; with one of `mcast.aio`, the session's calls are awaited
    memory        approximate number of bytes that the sender keeps for repairs: it is at most this far ahead
                  of the slowest receiver
    rate          maximum rate in bytes per second, repairs included, headers of the link and of IP not
    peer_timeout  give up a receiver that does not answer requests for this many seconds
    key           key of a closed group: the bytes of a key file, at least 16 random ones. Members without it
                  can neither send objects nor join the session
    progress      called within the session's calls whenever the progress has changed
    threads       number of threads, 0 to 64, that compute digests, parity and a closed group's tags while the
                  caller's thread sends; they start with the first large object. 0: the caller's thread
                  computes them, which is the default on one processor; otherwise 1

    Raises TypeError if `group` is not a membership, RuntimeError if the membership sends or receives objects
    already, and ValueError for a rate, a key or a number of threads that is not valid.
    """
    options = memory, rate, peer_timeout, key, progress, threads, "cast.open_session"
    if is_awaiting(group):
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
    threads: int


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
    threads: int = DEFAULT_THREADS,
) -> ObjectReport | Coroutine[Any, Any, ObjectReport]:
    """Send one object reliably to the receivers in a group; return its report.

    group           membership of an endpoint; with one of `mcast.aio`, the call is awaited
    data            bytes, an array, a CPU tensor, a path, an open binary file or pipe, an iterable of
                    buffers: see `Sendable`. Do not change the bytes before the call returns. Nothing is sent
                    while an iterator, or a file that is not a pipe, blocks
    receivers       number of receivers to wait for before the object begins; others may join later. None: 1,
                    or 0 for a carousel
    timeout         time to wait for them, in seconds; None: without limit
    name, metadata  announced with the object: at most 64 and 512 bytes; a pydantic model is sent as JSON
    strategy        condition that ends the call: all_receivers(), quorum(k), deadline(seconds),
                    best_effort(). carousel(cycles=..., seconds=...) sends `data` in cycles to receivers that
                    may join at any time and do not answer. It reads the bytes in each cycle, and needs a
                    `rate`; `ObjectSession.send_carousel` sends several objects
    rate, peer_timeout, key, threads
                    see `open_session`, which is for several objects

    A receiver that did not get the object is no error: see `strategy_met` and `receivers` of the report.
    Raises TimedOut if too few receivers join; OSError for a file that cannot be read, or has changed between
    two cycles; ValueError for metadata that is too long, and for a carousel without a rate or of data that
    cannot be read twice; and the errors of `Membership.send`. If Ctrl-C or cancellation ends the call, the
    receivers are notified and discard the object, unless the interrupt came inside of a step; a receiver that
    writes to a path keeps what it has in a hidden file, from which the next `receive` resumes.
    """
    session_options = DEFAULT_MEMORY, rate, peer_timeout, key, None, threads, "cast.send"
    if receivers is None:
        receivers = 0 if strategy.carousel else 1
    options: dict[str, Any] = {"name": name, "metadata": metadata, "strategy": strategy}
    if is_awaiting(group):
        return _send_awaiting(group, data, receivers, timeout, session_options, options)
    opened = ObjectSession(group, *session_options)
    try:
        with opened as session:
            session.wait_for_receivers(receivers, timeout)
            return session.send(data, **options)
    finally:
        opened._free()  # also if an interrupt arrived before the first line of `__exit__`


async def _send_awaiting(
    group: awaiting.Membership,
    data: Sendable,
    receivers: int,
    timeout: float | None,
    session_options: tuple[Any, ...],
    options: dict[str, Any],
) -> ObjectReport:
    async with AsyncObjectSession(group, *session_options) as session:
        await session.wait_for_receivers(receivers, timeout)
        return await session.send(data, **options)
