"""When Ctrl-C may end a call: where the call waits, and nowhere else.

Python lets a signal's handler raise between any two bytecodes of the main thread: between a change and the
note of it, too. Inside `with uninterrupted():` SIGINT waits for the end of the block; what waits inside the
block stands in `with interruptible():`, where SIGINT is taken at once. So an interrupted call is done or
not done. A second SIGINT is taken at once everywhere, so that what hangs can be ended.

The handler is exchanged for the time of the block. Other threads get no signals, and pay nothing.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from importlib import import_module
from signal import SIGINT
from threading import get_ident
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from weakref import ref

T = TypeVar("T")
Handler = Callable[[int, FrameType | None], Any]

# The functions of `signal` make enum members of all they take and give, which takes twenty times as long.
_signal: Any = import_module("_signal")
_exchange: Callable[[int, Handler], object] = _signal.signal
_handler: Callable[[int], object] = _signal.getsignal


class _Main:
    """The main thread: whether SIGINT is held back there, the handler that it waits for, whether one came."""

    def __init__(self) -> None:
        self.ident: int | None = threading.main_thread().ident
        self.holds = self.came = False
        self.handler: Handler = signal.default_int_handler

    def hold(self) -> bool:
        """Hold SIGINT back from here on; False where that is so already, or nothing could be raised."""
        if self.holds or get_ident() != self.ident:
            return False
        handler = _handler(SIGINT)
        if not callable(handler):
            return False
        self.handler, self.came = handler, False
        _exchange(SIGINT, _note)
        self.holds = True
        return True

    def let_go(self) -> None:
        """Take SIGINT again, and what has come meanwhile."""
        self.holds = False  # from here on nothing is noted, but taken
        if self.came:
            self.take()
        _exchange(SIGINT, self.handler)  # the last line: a signal that comes later is another call's

    def take(self) -> None:
        self.holds = self.came = False
        _exchange(SIGINT, self.handler)
        self.handler(SIGINT, None)


def _note(number: int, frame: FrameType | None) -> None:
    """The handler while SIGINT is held back."""
    if _main.came or not _main.holds:
        _main.take()
    _main.came = True


def _forget_main() -> None:
    """In a fork the thread that has forked is the main one, and holds nothing if it was another before."""
    if get_ident() != _main.ident:
        if _main.holds:
            _exchange(SIGINT, _main.handler)
        _main.ident, _main.holds = get_ident(), False


_main = _Main()
os.register_at_fork(after_in_child=_forget_main)


class uninterrupted:  # noqa: N801
    """`with` it: SIGINT waits for the end of the block."""

    __slots__ = ("_holds",)

    def __enter__(self) -> None:
        self._holds = _main.hold()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._holds:
            _main.let_go()


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


class interruptible:  # noqa: N801
    """`with` it, around what waits inside an `uninterrupted` block: SIGINT is taken at once."""

    __slots__ = ("_lifts",)

    def __enter__(self) -> None:
        self._lifts = _main.holds and get_ident() == _main.ident
        if self._lifts:
            try:
                _main.let_go()
            except BaseException:
                _main.hold()
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lifts:
            _main.hold()


def take_interrupt() -> None:
    """Take SIGINT now if one is held back: for a loop that does not wait, but may go on without end."""
    if _main.came and _main.holds:
        with interruptible():
            pass


class Sleepers:
    """The threads that wait for a change under `lock`: a condition variable that SIGINT cannot break.

    One of `threading` lets go of its lock outside of the `try` that takes it again.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock: Any = lock
        self._asleep: list[threading.Lock] = []

    def sleep(self, timeout: float | None) -> None:
        """Let go of the lock until `wake`, at most for `timeout` s."""
        bell = threading.Lock()
        bell.acquire()
        with uninterrupted():
            self._asleep.append(bell)
            depth = self._lock._release_save()
            try:
                with interruptible():
                    bell.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX))
            finally:
                self._lock._acquire_restore(depth)
                if bell in self._asleep:
                    self._asleep.remove(bell)

    def wake(self) -> None:
        """Wake all who sleep."""
        asleep, self._asleep = self._asleep, []
        for bell in asleep:
            bell.release()


class _Itself(property):
    def __call__(self, thing: object) -> object:
        return thing  # as ExitStack does it


class Enterable:
    """`with` gives the object itself, by C all the way (a weak reference, called, gives what it refers to).

    So Python takes no signal between the call that has made the object and the block that will end it.
    """

    __slots__ = ()

    if TYPE_CHECKING:

        def __enter__(self) -> Self: ...

    else:
        __enter__ = _Itself(ref)
