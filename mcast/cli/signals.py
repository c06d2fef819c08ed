"""Signals that end a command which has to clean up.

`interruptible` raises KeyboardInterrupt in the main thread, as Python does, but not in the middle of a
change: an exception there would break the endpoint or fabric (`mcast.contract.poison`), and the command could
not tell other hosts that it ends. Such a signal goes to a helper thread, which sends it again _AGAIN seconds
later, up to _TRIES times. The same happens to a signal that Python dropped, because it came in a finalizer. A
second signal ends the clean-up. `on_signal` raises nothing and calls a function, for commands that end in an
orderly way by a flag.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from signal import Signals
from types import FrameType
from typing import TYPE_CHECKING, Any

from mcast.cli.status import by_signal
from mcast.cli.terminal import Failure

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_AGAIN = 0.005
"""Seconds after which a signal that came at a bad moment is sent again."""

_TRIES = 400
"""Number of times that a signal may come amid a change before it breaks what is changed."""


def not_ignored(*signals: Signals) -> list[Signals]:
    """Return those of the signals that are not ignored.

    nohup(1) starts a command with SIGHUP ignored, a script's shell starts a job in the background with SIGINT
    ignored.
    """
    return [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def interruptible() -> Iterator[None]:
    """Make SIGINT, SIGTERM and SIGHUP end the block by KeyboardInterrupt.

    All that the block tidies up is tidied up; the command then says "interrupted". What is ignored stays
    ignored.

    A signal that comes in the middle of a change of an endpoint, say, would break it, and nobody could tell
    the other hosts any more; so it comes again a little later, for some seconds.
    """

    from mcast.api import is_changing
    from mcast.endpoint.waiting import call_user

    main, tries, ended = threading.get_ident(), 0, False
    received: list[int] = []
    later: SimpleQueue[int | None] = SimpleQueue()

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal tries
        tries += 1
        # `put` takes no lock that the thread may hold already, as the start of a thread does.
        at_once = received or tries >= _TRIES  # a second one ends what tidies up
        if not at_once and is_changing() and not _is_within(call_user, frame):
            later.put(number)
            return
        received.append(number)
        raise KeyboardInterrupt

    def dropped(unraisable: UnraisableHookArgs) -> None:
        # A signal may come while a weak reference's callback or a __del__ runs, which raise to nobody.
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            later.put(received.pop() if received else signal.SIGINT)
        else:
            hook(unraisable)

    def send_again() -> None:
        while (number := later.get()) is not None:
            time.sleep(_AGAIN)
            # An exception that is raised in `dropped` is dropped as well.
            while _is_within(dropped, sys._current_frames().get(main)):
                time.sleep(_AGAIN)
            if not (ended or received):  # what tidies up is not to be interrupted
                signal.pthread_kill(main, number)

    sender = threading.Thread(target=send_again, daemon=True)
    sender.start()
    signals = not_ignored(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in signals}
    hook, sys.unraisablehook = sys.unraisablehook, dropped
    try:
        yield
    except KeyboardInterrupt:
        raise Failure("interrupted", by_signal((received or [signal.SIGINT])[0])) from None
    finally:
        ended = True
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook
        later.put(None)
        sender.join()


@contextmanager
def on_signal(stop: Callable[[], None]) -> Iterator[list[int]]:
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
    signals = not_ignored(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in signals}
    for number in signals:
        signal.signal(number, ended)
    try:
        yield came
    finally:
        as_before()


def _is_within(function: Callable[..., Any], frame: FrameType | None) -> bool:
    """Return True if the frame belongs to a call of the function, or to one that it has made."""
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None
