"""When Ctrl-C may end a call: where the call waits, and nowhere else.

Python lets a signal's handler raise between any two bytecodes of the main thread, even between a change and
the note of that change. Inside `with uninterrupted():` SIGINT waits for the end of the block. Inside `with
interruptible():`, around the part of such a block that waits, SIGINT is taken at once. So an interrupted call
is done or not done. A second SIGINT is taken at once everywhere, so that a call that hangs can be ended.

`signal.getsignal` returns what it always did, because a handler in C stands in front of Python's. Without the
C module, Python's handler is exchanged for the time of a block. Other threads get no signals, and lose no
time.

The module has `copy_rows`, too, because this is the one extension that is built wherever there is a compiler.

Handlers of other signals, finalizers and the `__float__` of an argument run between two lines all the same.
There the thread may hold a `Lock`, and be half-way through a change. A call that ends something uses
`later`, which puts the end off until the thread holds no such lock, or waits (`do_what_was_put_off`). Any
other call that changes something uses `is_within`, or takes a lock with a refusal, and is refused with
`WITHIN`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar
from weakref import ref

if TYPE_CHECKING:
    from mcast.interrupts._interrupts import (
        Bell,
        Enterable,
        Lock,
        copy_rows,
        do_what_was_put_off,
        interruptible,
        is_held,
        is_within,
        later,
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
    copy_rows = _by.copy_rows
    later, is_within, do_what_was_put_off = _by.later, _by.is_within, _by.do_what_was_put_off

__all__ = [
    "WITHIN",
    "Alive",
    "Bell",
    "Enterable",
    "Lock",
    "Sleepers",
    "copy_rows",
    "do_what_was_put_off",
    "interruptible",
    "is_held",
    "is_within",
    "later",
    "made_or_undone",
    "take_interrupt",
    "uninterrupted",
]

T = TypeVar("T")

WITHIN = (
    "this call came between two lines of another call of the same thread, from a signal's handler, a "
    "finalizer or __float__: there only close, leave, stats, and a queue pair's send and recv are allowed; "
    "let the handler set a flag instead, and make this call where a thread looks at the flag"
)
"""The text of the RuntimeError that refuses any other call there."""


def made_or_undone(make: Callable[[], T], undo: Callable[[T], object]) -> T:
    """Return what `make()` gives.

    SIGINT does not end `make` half-way; if SIGINT came meanwhile, `undo` is called with it.
    """
    made: list[T] = []
    try:
        with uninterrupted():
            made.append(make())
    except BaseException:
        for one in made:
            undo(one)
        raise
    return made[0]  # no call: from here to the caller's assignment Python takes no signal


class Alive(Generic[T]):
    """The objects that were added, for as long as somebody else has them.

    As weakref.WeakSet, but no Python code runs when one goes: Ctrl-C in there would be dropped.
    """

    def __init__(self) -> None:
        self._refs: set[ref[T]] = set()

    def add(self, one: T) -> None:
        """Know the object from now on."""
        self._refs.add(ref(one, self._refs.discard))

    def __contains__(self, one: T) -> bool:
        return ref(one) in self._refs

    def __iter__(self) -> Iterator[T]:
        return iter([one for known in self._refs.copy() if (one := known()) is not None])


class Sleepers:
    """The threads that wait for a change under `lock`: a condition variable that SIGINT cannot break.

    The one of `threading` releases its lock outside of the `try` that takes the lock again.
    """

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._asleep: list[Bell] = []

    def sleep(self, timeout: float | None) -> None:
        """Release the lock until `wake` is called, at most for `timeout` seconds."""
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
                with suppress(ValueError):  # `wake` has taken the bell, also in a signal's handler just now
                    self._asleep.remove(bell)

    def wake(self) -> None:
        """Wake all threads that sleep."""
        if self._asleep:
            asleep, self._asleep = self._asleep, []
            for bell in asleep:
                bell.ring()
