"""How a signal ends a command that has something to tidy up."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from mcast.cli.terminal import Failure

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_AGAIN = 0.01
"""Seconds until a signal is sent again whose interrupt Python has dropped."""


@contextmanager
def ends_cleanly() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, with what it has to tidy up; one word says so."""

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    def dropped(unraisable: UnraisableHookArgs) -> None:
        # A signal may come while a weak reference's callback or a __del__ runs, which raise to nobody.
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            timer = threading.Timer(_AGAIN, signal.pthread_kill, (main, (received or [signal.SIGINT])[0]))
            timers.append(timer)
            timer.start()
        else:
            hook(unraisable)

    main = threading.get_ident()
    received: list[int] = []
    timers: list[threading.Timer] = []
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    hook, sys.unraisablehook = sys.unraisablehook, dropped
    try:
        yield
    except KeyboardInterrupt:
        raise Failure("interrupted", 128 + (received or [signal.SIGINT])[0]) from None
    finally:
        for timer in timers:
            timer.cancel()
            timer.join()
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
