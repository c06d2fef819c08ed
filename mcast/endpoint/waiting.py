"""Operations: calls that take time, as generators that never wait themselves, and what carries them out.

An operation yields a `Step`: what to post, and until when to wait. It is resumed with what was received, if
anything, and checks again. An error of the step is thrown into it. `run_blocking` carries operations out by
blocking, `run_async` by awaiting; both take two functions of the object that the operation changes:

    advance(operation, box)  resume the operation, under the object's lock; `resume` does the work
    act(step, proceed)       post and wait, outside of the lock; return what `proceed` returns, to which it
                             gives what was received, or the error that a provider's call raised

What an operation is resumed with goes in a box that `resume` empties, and the frames of an error are dropped:
an error that is referred to by a frame of its own traceback would keep the caller's payload.

So an exception that comes out of `act`, or between the two, is an interrupt where the call waits. It is
thrown into the operation, which may clean up (a join leaves its group) and lets it pass. An operation that is
dropped instead gets GeneratorExit outside of the lock, and must change nothing then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

from mcast.api import Batch, McastError, ReentrantCall, Refused
from mcast.arguments.seconds import check_seconds
from mcast.errors.tree import Broken

P = TypeVar("P")
R = TypeVar("R")
T = TypeVar("T")

DEFAULT_BATCH = 64
"""Default maximum of messages that one receive call takes."""


class Step(NamedTuple):
    """Request of an operation: to post messages, or to wait for a change.

    until  when to stop waiting; None: never
    max    maximum number of messages to receive
    post   what to post before the wait; None: nothing
    """

    until: float | None
    max: int = DEFAULT_BATCH
    post: Any = None


class Done(Generic[T]):
    """The result of an operation that has ended."""

    __slots__ = ("result",)

    def __init__(self, result: T) -> None:
        self.result: T = result


Steps = Generator[Step, R, T]
Operation = Steps[Batch | None, T]
"""An operation of an endpoint."""

Box = list[Any]
"""Received batch, or a McastError, or an interrupt as a `BaseException` to be thrown."""

Advance = Callable[[Steps[R, T], Box], Step | Done[T]]
Proceed = Callable[[Any], Step | Done[T]]


def resume(operation: Steps[R, T], box: Box) -> Step | Done[T]:
    """Resume an operation with what is in the box; return its next step, or its result.

    An error that the operation lets pass is `Refused`, because the operation has left everything whole.
    """
    received = box.pop()
    try:
        if isinstance(received, BaseException):
            return operation.throw(received)
        return operation.send(received)
    except StopIteration as done:
        return Done(done.value)
    except Refused as refused:
        refused.error.__traceback__ = None
        raise
    except BaseException as raised:
        if raised is not received:
            raise
        raise Refused(raised.with_traceback(None)) from None
    finally:
        del received


def run_blocking(
    operation: Steps[R, T], advance: Advance[R, T], act: Callable[[Step, Proceed[T]], Step | Done[T]]
) -> T:
    """Carry out an operation by blocking."""
    proceed = _proceeds(operation, advance)
    try:
        step = proceed(None)
        while not isinstance(step, Done):
            step = act(step, proceed)
        return step.result
    except BaseException as error:
        _abandon(operation, advance, error)
        raise


async def run_async(
    operation: Steps[R, T],
    advance: Advance[R, T],
    act: Callable[[Step, Proceed[T]], Awaitable[Step | Done[T]]],
) -> T:
    """Carry out an operation by awaiting."""
    proceed = _proceeds(operation, advance)
    try:
        step = proceed(None)
        while not isinstance(step, Done):
            step = await act(step, proceed)
        return step.result
    except BaseException as error:
        _abandon(operation, advance, error)
        raise


def _proceeds(operation: Steps[R, T], advance: Advance[R, T]) -> Proceed[T]:
    box: Box = []

    def proceed(received: Any) -> Step | Done[T]:
        box.append(received)
        del received
        return advance(operation, box)

    return proceed


def _abandon(operation: Steps[R, T], advance: Advance[R, T], error: BaseException) -> None:
    """Let an operation clean up that was interrupted where it waits, unless it has ended."""
    if getattr(operation, "gi_frame", None) is None:
        return
    trace = error.__traceback__
    try:
        advance(operation, [error])
    except Broken:  # there is nothing left to clean up but by close, and the first error says why
        pass
    except BaseException as raised:
        if raised is not error:
            raise
    error.__traceback__ = trace


def call_provider(call: Callable[..., T], *args: Any) -> T:
    """Call the provider inside a change; its error is refused, and is no interrupt.

    So is its refusal of a call that a handler makes amid another one of the provider.
    """
    try:
        return call(*args)
    except (McastError, ReentrantCall) as error:
        raise Refused(error) from error.__cause__


def call_user(call: Callable[..., T], *args: Any) -> T:
    """Call what the program gave us inside a change, as a callback or a file: the change is whole meanwhile.

    An `Exception` is raised as it is, for those that handle it; all else is refused.
    """
    try:
        return call(*args)
    except Exception:
        raise
    except BaseException as error:
        raise Refused(error) from error.__cause__


class Waiting:
    """The clock of an endpoint's operations, and the ways in which they wait.

    now    gives monotonic seconds on the clock that the driver waits by
    route  puts away the messages that were received while an operation waited for something else
    """

    def __init__(self, now: Callable[[], float], route: Callable[[Batch], None]) -> None:
        self._route = route
        self.now: Callable[[], float] = now
        self.dirty = False
        """True if a call has changed what others wait for; the driver that wakes them clears it."""

    def deadline(self, timeout: float | None) -> float | None:
        """When the time is over; -inf for a timeout of 0, which needs no clock."""
        if timeout is None:
            return None
        seconds = check_seconds(timeout)
        return self.now() + seconds if seconds else -inf

    def expired(self, deadline: float | None) -> bool:
        return deadline is not None and (deadline == -inf or self.now() >= deadline)

    def left(self, until: float | None) -> float | None:
        """The seconds from now to that time; None where it never comes."""
        if until is None or until == inf:
            return None
        return 0.0 if until == -inf else max(0.0, until - self.now())

    def wait(self, until: float | None) -> Operation[None]:
        """Wait for a change.

        Messages that were received meanwhile are kept for the calls that ask for them.
        """
        batch = yield Step(until)
        if batch is not None:
            self._route(batch)

    def until(
        self, condition: Callable[[], bool], deadline: float | None, at_least_once: bool = False
    ) -> Operation[None]:
        """Wait until the condition holds, or the deadline has come."""
        while not condition():
            if not at_least_once and self.expired(deadline):
                return
            at_least_once = False
            yield from self.wait(deadline)
