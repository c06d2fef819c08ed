"""How a signal ends a command that has something to tidy up."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import Signals
from types import FrameType
from typing import TYPE_CHECKING, Any

from mcast.cli.status import by_signal
from mcast.cli.terminal import Failure

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_AGAIN = 0.01
"""How many seconds after Python has dropped a signal's interrupt the signal is sent again."""


class _Ignored:
    """The handler of a SIGINT that is ignored, but where another signal has come that ends the block."""

    def __init__(self, received: list[int]) -> None:
        self._received = received

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            raise KeyboardInterrupt


def heeded(*signals: Signals) -> list[Signals]:
    """Those of the signals that are not ignored. nohup(1) starts a command with SIGHUP ignored, a script's
    shell starts a job in the background with SIGINT ignored."""
    handlers = {number: signal.getsignal(number) for number in signals}
    return [
        number
        for number, handler in handlers.items()
        if handler is not signal.SIG_IGN and not isinstance(handler, _Ignored)
    ]


@contextmanager
def ends_cleanly() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the block as Ctrl-C does, with all that it tidies up; the command then says
    "interrupted". What is ignored stays ignored.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.raise_signal(signal.SIGINT)

    def dropped(unraisable: UnraisableHookArgs) -> None:
        # A signal may come while a weak reference's callback or a __del__ runs, which raise to nobody.
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            timer = threading.Timer(_AGAIN, again, [(received or [signal.SIGINT])[0]])
            timers.append(timer)
            timer.start()
        else:
            hook(unraisable)

    def again(number: int) -> None:
        while _runs(main, dropped):  # an exception that is raised there is dropped as well
            time.sleep(_AGAIN)
        signal.pthread_kill(main, number)

    main = threading.get_ident()
    received: list[int] = []
    timers: list[threading.Timer] = []
    before = {number: signal.signal(number, stop) for number in heeded(signal.SIGTERM, signal.SIGHUP)}
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, _Ignored(received))
    hook, sys.unraisablehook = sys.unraisablehook, dropped
    try:
        yield
    except KeyboardInterrupt:
        raise Failure("interrupted", by_signal((received or [signal.SIGINT])[0])) from None
    finally:
        for timer in timers:
            timer.cancel()
            timer.join()
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ended_by(stop: Callable[[], None]) -> Iterator[list[int]]:
    """Make SIGINT, SIGTERM or SIGHUP call `stop`, and raise nothing; `stop` must be safe in a handler.

    The block gets a list, in which the signal is when it has come. What is ignored stays ignored.

    Whatever the signal interrupts goes on to its end, and lets go of its locks. A second signal is taken as
    before the block.
    """

    def ended(number: int, frame: FrameType | None) -> None:
        as_before()
        came.append(number)
        stop()

    def as_before() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    came: list[int] = []
    signals = heeded(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in signals}
    for number in signals:
        signal.signal(number, ended)
    try:
        yield came
    finally:
        as_before()


def _runs(thread: int, function: Callable[..., Any]) -> bool:
    """Whether the thread is inside the function."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None
