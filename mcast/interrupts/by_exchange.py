"""`mcast.interrupts` where its C module was not built: SIGINT's handler is exchanged for the time of a block.

The exchange is two system calls, and what one block does takes ten times as long as in C. Beside that, only
in C does a sleep miss no signal that comes just before it, and an object end whose `__exit__` a signal meets.
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
from typing import TYPE_CHECKING, Any, Self
from weakref import ref

if TYPE_CHECKING:
    from mcast.interrupts._interrupts import AnyLock

Handler = Callable[[int, FrameType | None], Any]

# The functions of `signal` make enum members of all they take and give, which takes twenty times as long.
_signal: Any = import_module("_signal")
_exchange: Callable[[int, Handler], object] = _signal.signal
_handler: Callable[[int], object] = _signal.getsignal


class _Main:
    """The main thread: in how many blocks it is, whether SIGINT is held back, and whether one came."""

    def __init__(self) -> None:
        self.ident: int | None = threading.main_thread().ident
        self.depth = 0
        self.holds = self.came = False
        self.handler: Handler = signal.default_int_handler

    def hold(self) -> None:
        """Hold SIGINT back from here on, unless nothing could be raised."""
        handler = _handler(SIGINT)
        if callable(handler):
            self.handler, self.came = handler, False
            _exchange(SIGINT, _note)
            self.holds = True

    def let_go(self) -> None:
        """Take SIGINT again, and what has come meanwhile."""
        if self.holds:
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
    """In a forked child the thread that forked is the main one.

    It holds nothing if it was another thread before.
    """
    if get_ident() != _main.ident:
        if _main.holds:
            _exchange(SIGINT, _main.handler)
        _main.ident, _main.depth, _main.holds = get_ident(), 0, False


_main = _Main()
os.register_at_fork(after_in_child=_forget_main)


class uninterrupted:  # noqa: N801
    """A context in which SIGINT waits for the end of the block. The block holds `lock` if there is one."""

    __slots__ = ("_lock",)

    def __init__(self, lock: AnyLock | None = None, /) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if get_ident() == _main.ident:
            if not _main.depth:
                _main.hold()
            _main.depth += 1
        if self._lock is not None:
            self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if self._lock is not None:
            self._lock.release()
        if get_ident() == _main.ident and _main.depth:  # 0: a signal met the `__exit__` of an `interruptible`
            _main.depth -= 1
            if not _main.depth:
                _main.let_go()


class interruptible:  # noqa: N801
    """A context for the part of an `uninterrupted` block that waits: SIGINT is taken at once."""

    __slots__ = ("_depth",)

    def __enter__(self) -> None:
        self._depth = _main.depth if get_ident() == _main.ident else 0
        if self._depth:
            _main.depth = 0
            try:
                _main.let_go()
            except BaseException:
                _main.hold()
                _main.depth = self._depth
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if self._depth:
            try:
                _main.hold()
            finally:
                _main.depth = self._depth


def take_interrupt() -> None:
    """Take SIGINT now if one is held back. For a loop that does not wait, but may run without end."""
    if _main.came and is_held():
        with interruptible():
            pass


def is_held() -> bool:
    """Whether SIGINT is held back now."""
    return _main.holds and get_ident() == _main.ident


Lock = threading.RLock


class Bell:
    """An object on which one thread sleeps until another thread rings it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake the thread that sleeps, or the next one that would."""
        self._lock.release()

    def wait(self, timeout: float, /) -> None:
        """Sleep until the bell is rung, at most for `timeout` seconds."""
        self._lock.acquire(timeout=timeout)


class _Itself(property):
    def __call__(self, thing: object) -> object:
        return thing  # as ExitStack does it


class Enterable:
    """An object whose `with` gives the object itself, and ends it by the method that `_ended_by` names.

    C code alone gives the object: calling a weak reference returns the object that it refers to.
    """

    __slots__ = ()
    _ended_by: str

    if TYPE_CHECKING:

        def __enter__(self) -> Self: ...

    else:
        __enter__ = _Itself(ref)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        try:
            getattr(self, self._ended_by)()
        finally:
            getattr(self, self._ended_by)()  # Ctrl-C may have come before the first one began

    def _drop(self) -> None:
        """End the object, as its destructor. Errors because the object is in use are dropped."""
        try:
            getattr(self, self._ended_by)()
        except (BufferError, AttributeError):
            pass
