"""When Ctrl-C may end a call: where the call waits, and nowhere else.

Python lets a signal's handler raise between any two bytecodes of the main thread: between a change and the
note of it, too. Inside `with uninterrupted():` SIGINT waits for the end of the block; what waits inside the
block stands in `with interruptible():`, where SIGINT is taken at once. So an interrupted call is done or
not done. A second SIGINT is taken at once everywhere, so that what hangs can be ended.

`signal.getsignal` gives what it always gave: a handler in C stands in front of Python's own. Where no C
compiler was, Python's handler is exchanged for the time of a block. Other threads get no signals, and pay
nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from mcast.interrupts._interrupts import (
        Bell,
        Enterable,
        Lock,
        interruptible,
        is_held,
        take_interrupt,
        uninterrupted,
    )
else:
    try:
        from mcast.interrupts import _interrupts as _by
    except ImportError:
        from mcast.interrupts import by_exchange as _by

    Bell, Enterable, Lock = _by.Bell, _by.Enterable, _by.Lock
    interruptible, uninterrupted = _by.interruptible, _by.uninterrupted
    is_held, take_interrupt = _by.is_held, _by.take_interrupt

__all__ = [
    "Bell",
    "Enterable",
    "Lock",
    "Sleepers",
    "interruptible",
    "is_held",
    "made_or_undone",
    "take_interrupt",
    "uninterrupted",
]

T = TypeVar("T")


def made_or_undone(make: Callable[[], T], undo: Callable[[T], object]) -> T:
    """What `make()` gives, which SIGINT does not end half-way; if SIGINT came meanwhile, that is undone."""
    made: list[T] = []
    try:
        with uninterrupted():
            made.append(make())
    except BaseException:
        for one in made:
            undo(one)
        raise
    return made[0]  # no call: from here to the caller's assignment Python takes no signal


class Sleepers:
    """The threads that wait for a change under `lock`: a condition variable that SIGINT cannot break.

    One of `threading` lets go of its lock outside of the `try` that takes it again.
    """

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._asleep: list[Bell] = []

    def sleep(self, timeout: float | None) -> None:
        """Let go of the lock until `wake`, at most for `timeout` s."""
        bell = Bell()
        seconds = threading.TIMEOUT_MAX if timeout is None else min(timeout, threading.TIMEOUT_MAX)
        with uninterrupted():
            self._asleep.append(bell)
            depth = self._lock._release_save()
            try:
                with interruptible():
                    bell.wait(seconds)
            finally:
                self._lock._acquire_restore(depth)
                if bell in self._asleep:
                    self._asleep.remove(bell)

    def wake(self) -> None:
        """Wake all who sleep."""
        if self._asleep:
            asleep, self._asleep = self._asleep, []
            for bell in asleep:
                bell.ring()
