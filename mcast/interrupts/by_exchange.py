"""`mcast.interrupts` without its C module: SIGINT's handler is exchanged for the time of a block.

The exchange is two system calls, and the Python code of a block takes ten times as long as in C. Besides, in
C alone a sleep misses no signal that comes just before it, and an object is closed even if a signal comes in
its `__exit__` or, on CPython 3.14, just before its block.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from signal import SIGINT
from threading import get_ident
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import ref

from typing_extensions import Buffer

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
        self.depth = self.forks = self.forker = 0
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
    _main.forks += 1
    _main.forker = get_ident()
    if get_ident() != _main.ident:
        if _main.holds:
            _exchange(SIGINT, _main.handler)
        _main.ident, _main.depth, _main.holds = get_ident(), 0, False


_main = _Main()
os.register_at_fork(after_in_child=_forget_main)


def _hold() -> None:
    if get_ident() == _main.ident:
        if not _main.depth:
            _main.hold()
        _main.depth += 1


def _let_go() -> None:
    if get_ident() == _main.ident and _main.depth:  # 0: a signal met the `__exit__` of an `interruptible`
        _main.depth -= 1
        if not _main.depth:
            _main.let_go()


class uninterrupted:  # noqa: N801
    """A context in which SIGINT waits for the end of the block. The block holds `lock` if there is one."""

    __slots__ = ("_lock",)

    def __init__(self, lock: AnyLock | None = None, /) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        _hold()
        if self._lock is not None:
            self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if self._lock is not None:
            self._lock.release()
        _let_go()


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


class _Held(threading.local):
    """For this thread, by level: how many locks it holds, and the actions that wait until it holds none."""

    def __init__(self) -> None:
        self.locks = [0, 0]
        self.put_off: tuple[list[Callable[[], object]], ...] = ([], [])

    def is_busy(self, level: int) -> bool:
        return any(self.locks[: level + 1])

    def catch_up(self) -> None:
        for level, actions in enumerate(self.put_off):
            while actions and not self.is_busy(level):
                _do(actions.pop(0))


def _do(action: Callable[[], object]) -> None:
    """A signal's handler may have raised in the midst of the action: then the action is called once more."""
    try:
        action()
    except BaseException as error:
        with suppress(BaseException):
            action()
        if isinstance(error, KeyboardInterrupt):
            raise
        _ToNobody(error)


class _ToNobody:
    """Reports an error that no caller can be given: Python passes what this destructor raises to
    `sys.unraisablehook`."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __del__(self) -> None:
        raise self._error


_held = _Held()


class Lock:
    """threading.RLock, whose holder `later` knows, unless the level is None."""

    __slots__ = ("_forks", "_level", "_lock", "_refusal", "_taker")

    def __init__(self, level: int | None = 0, refusal: str | None = None, /) -> None:
        if level is not None and not 0 <= level < len(_held.locks):
            raise ValueError(f"level {level}: there are 0, 1 and None")
        self._lock: Any = threading.RLock()
        self._level, self._refusal = level, refusal
        self._forks, self._taker = _main.forks, 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._forks != _main.forks:
            self._forks = _main.forks
            if self._taker != _main.forker:  # a thread of the parent, which would not release it here
                self._lock._at_fork_reinit()
        if self._refusal is not None and self._is_owned():
            raise RuntimeError(self._refusal)
        taken: bool = self._lock.acquire(blocking, timeout)
        if taken:
            self._taker = get_ident()
            self._count(1)
        return taken

    def release(self) -> None:
        self._lock.release()
        self._count(-1)

    def __enter__(self) -> None:
        _hold()
        try:
            self.acquire()
        except BaseException:
            _let_go()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.release()
        _let_go()

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())

    def _release_save(self) -> Any:
        saved = self._lock._release_save()
        self._count(-saved[0])
        return saved

    def _acquire_restore(self, saved: Any, /) -> None:
        self._lock._acquire_restore(saved)
        self._taker = get_ident()
        self._count(saved[0])

    def _count(self, more: int) -> None:
        if self._level is not None:
            _held.locks[self._level] += more
            if more < 0:
                _held.catch_up()


def later(action: Callable[[], object], level: int = 0, /) -> bool:
    """Call `action()` once this thread holds no lock of `level` or below; return False if it holds none
    now."""
    if not 0 <= level < len(_held.locks):
        raise ValueError(f"level {level}: there are 0 and 1")
    if not _held.is_busy(level):
        return False
    _held.put_off[level].append(action)
    return True


def is_within() -> bool:
    """Whether this thread holds a provider's lock."""
    return _held.is_busy(0)


def do_what_was_put_off() -> None:
    """Call the actions that were put off now, because the call that holds the lock is waiting, and its object
    is in order."""
    if any(_held.put_off):
        before, _held.locks[0] = _held.locks[0], 0
        try:
            _held.catch_up()
        finally:
            _held.locks[0] = before


def copy_rows(
    to: Buffer, at: int, apart: int, of: Buffer, begin: int, step: int, size: int, count: int, /
) -> None:
    """Copy rows of bytes that begin at equal distances, one by one."""
    target, source = memoryview(to).cast("B"), memoryview(of).cast("B")
    for memory, first, distance in ((target, at, apart), (source, begin, step)):
        end = first + (count - 1) * distance + size if count else first
        if min(first, size, count) < 0 or distance < size or end > len(memory):
            raise ValueError("there are no such rows")
    for _ in range(count):
        target[at : at + size] = source[begin : begin + size]
        at, begin = at + apart, begin + step


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
