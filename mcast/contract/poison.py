"""Poisoning: what is left of an object after an exception in the middle of a change.

Python may raise at nearly any bytecode: from a signal's handler in the main thread, and by
`PyThreadState_SetAsyncExc` in any thread. Nothing here prevents that. As in Rust's `Mutex`, an object that
was interrupted in the middle of a change is poisoned: it refuses every later call but `close` and `stats`.

States of a `Guard`, all read and written under its lock:

    amid == ""              the object is whole
    amid == "join", locked  a call is changing it
    amid == "join", free    that call was interrupted: the object is broken, for ever

Rules for code that uses a guard:

- Take the lock by `with`: no signal can come between the acquire and the block (CPython 3.11 to 3.13; in
  3.14 see gh-148874). `acquire()` then `try`, Condition and a Python `__enter__` all leak the lock to a
  signal; so does a generator over `with` for as long as the traceback lives (`@contextmanager`).
- Look at the flag, set it, change, and clear it by *reaching* the statement that clears it: never in
  `except` or `finally`, and never by a `return` on the way. `run` does that. A call for which a tenth of a
  microsecond counts writes the same lines itself, with the call of `run_deferred_closes` in its `finally`.
- A change that refuses returns or raises `Refused` with its error; only `run` raises the error itself, when
  the object is whole again. A public error that passes through a change is somebody else's, because a
  signal's handler can raise any: it poisons.
- Wait outside of the lock, on a descriptor or on what `Waiters.add` returned, for `MAX_SLEEP` seconds at most
  before looking at the flag again: whoever was to wake the waiting thread may have been interrupted.
- A handle or a descriptor is created into an object that owns it, and forgotten after it was freed.
- `close` goes by `close`: it runs on a broken object too, resumes where an earlier one was interrupted, and
  never makes a broken object whole. What it runs finds in `was_broken` whether the object was broken before.

The lock is an RLock, because a handler may run before the flag is set. A call that finds the flag set by
its own thread came from a handler, a finalizer or an argument's `__float__`, amid a call of the same
object: it raises RuntimeError, as the objects of CPython's io do. `close` there is carried out when the
outer call ends, however it ends. A change that meets such a refusal of an object below it, before anything is
changed, refuses it, too: else a call of an endpoint from a handler would break the endpoint, where it comes
amid a send.

A thread that is amid a change while another one forks leaves the child's copy of the object broken, and not
locked for ever.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar
from weakref import ref

from mcast.errors.cause import Phase
from mcast.errors.tree import Broken

logger: logging.Logger = logging.getLogger("mcast")

P = ParamSpec("P")
T = TypeVar("T")

MAX_SLEEP = 1.0
"""Maximum seconds that a waiting call sleeps before it looks at its object again."""


class Refused(Exception):
    """The way of an error of ours out of a change; no handler raises this type."""

    @property
    def error(self) -> BaseException:
        """The error that `run` raises."""
        error: BaseException = self.args[0]
        return error


class ReentrantCall(RuntimeError):
    """The refusal of a call that came amid another one of its thread, before it has changed anything."""


def fork_safe_lock() -> Any:
    """Return an RLock that is free in a fork if a thread held it which is not there."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


class Guard:
    """The lock of an object, and the change that is going on under it.

    what          name of the object in errors, such as "endpoint"
    fix           next step for a broken one: "close it and open another one"
    amid          name of the call that is changing the object, or was interrupted; "" while it is whole
    deferred      closes that were called in the middle of a call of the same thread
    after_change  called under the lock after each change, with the name of the call
    was_broken    True in a `close` of an object that was broken before
    """

    __slots__ = ("__weakref__", "after_change", "amid", "deferred", "fix", "lock", "was_broken", "what")

    def __init__(self, what: str, fix: str = "close it and open another one") -> None:
        self.what: str = what
        self.fix: str = fix
        self.lock: Any = fork_safe_lock()
        self.amid: str = ""
        self.deferred: list[Callable[[], object]] = []
        self.after_change: Callable[[str], None] | None = None
        self.was_broken: bool = False
        _guards.add(self)

    @property
    def broken(self) -> bool:
        """True if an earlier call was interrupted in the middle of a change."""
        if not self.amid or self.lock._is_owned():
            return False
        with self.lock:  # a thread that is amid a change now ends it first
            return bool(self.amid)

    def refuse(self, call: str, phase: Phase, reentered: bool | None = None) -> NoReturn:
        """Raise `ReentrantCall` for a call amid another one of this thread, `Broken` for a broken object.

        The caller holds the lock, and has found `amid` set.
        """
        if self._is_reentered() if reentered is None else reentered:
            raise ReentrantCall(
                f"{call}: this thread is in the middle of {self.amid or 'a call'} of the same {self.what}, "
                "and this call comes from a signal's handler, a finalizer or __float__, where only close and "
                "stats are allowed: let the handler set a flag, and make the call where a thread looks at it"
            )
        raise Broken(self.what, self.amid, self.fix, call, phase)

    def require_outermost(self, call: str, phase: Phase) -> None:
        """Raise `ReentrantCall` if this thread holds the lock more than once, and so must not sleep."""
        if self._is_reentered():
            self.refuse(call, phase, True)

    def run(self, call: str, phase: Phase, change: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Carry out a change under the lock; return its result, or raise the error of its `Refused`."""
        refused: Refused | None = None
        result: Any = None
        try:
            with self.lock:
                if self.amid:
                    self.refuse(call, phase)
                self.amid = call
                try:
                    result = change(*args, **kwargs)
                except Refused as error:
                    refused = error
                self.amid = ""
                if self.after_change is not None:
                    self.after_change(call)
        finally:
            if self.deferred:
                self.run_deferred_closes()
        if refused is not None:
            try:
                raise refused.error from refused.error.__cause__
            finally:
                del refused  # else the error would refer by its traceback to this frame, and so to itself
        return result  # type: ignore[no-any-return]

    def close(self, end: Callable[[], object]) -> None:
        """Carry out `end` under the lock, in whatever state the object is; amid a call of this thread, later.

        `end` frees what is left, and may be called again after it was interrupted.
        """
        if self.amid and self.lock._is_owned():
            self.deferred.append(end)
            return
        try:
            failed = self._close(end)
        finally:
            if self.deferred:
                self.run_deferred_closes()
        if failed is not None:
            try:
                raise failed from failed.__cause__
            finally:
                del failed

    def _close(self, end: Callable[[], object]) -> BaseException | None:
        """Return the error that `end` has refused with."""
        failed: BaseException | None = None
        with self.lock:
            before = self.amid
            self.was_broken = bool(before)
            self.amid = before or "close"
            try:
                end()
            except Refused as refused:
                failed = refused.error
            self.amid = before
            if self.after_change is not None:
                self.after_change("close")
        return failed

    def run_deferred_closes(self) -> None:
        """Carry out the closes that came amid a call, unless this thread is still in an outer one."""
        while self.deferred and not (self.amid and self.lock._is_owned()):
            end = self.deferred[0]
            if (failed := self._close(end)) is not None:  # the close itself has returned
                logger.warning("a close in the middle of another call failed: %s", failed)
            if end in self.deferred:  # another thread may have carried it out, too
                self.deferred.remove(end)

    def _is_reentered(self) -> bool:
        """Return True if this thread, which holds the lock, held it before; no method says how often."""
        return "count=1 " not in repr(self.lock)


class Waiters:
    """The threads that wait for a change of a guarded object; all methods are called under its lock."""

    def __init__(self) -> None:
        self._asleep: set[Any] = set()

    def add(self) -> Any:
        """Return a lock to wait on, outside of the guard's: `waiter.acquire(timeout=...)`."""
        waiter = threading.Lock()
        waiter.acquire()
        self._asleep.add(waiter)
        return waiter

    def discard(self, waiter: Any) -> None:
        """Forget a waiter that has stopped waiting."""
        self._asleep.discard(waiter)

    @staticmethod
    def sleep(waiter: Any, seconds: float | None) -> None:
        """Wait until `wake`, for `seconds` and for `MAX_SLEEP` at most; outside of the guard's lock."""
        waiter.acquire(timeout=MAX_SLEEP if seconds is None else max(0.0, min(seconds, MAX_SLEEP)))

    def wake(self) -> None:
        """Let every waiting thread look again."""
        while self._asleep:
            self._asleep.pop().release()


class SignalSafeWeakSet(Generic[T]):
    """The objects that were added, for as long as somebody else has them.

    As weakref.WeakSet, but no Python code runs when one goes: an exception in there would be dropped.
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


_guards: SignalSafeWeakSet[Guard] = SignalSafeWeakSet()
_locks: SignalSafeWeakSet[Any] = SignalSafeWeakSet()


def is_changing() -> bool:
    """Return True if this thread is in the middle of a change of an object that an exception would break.

    A program's own handler of a signal may ask this, and raise later instead.
    """
    return any(guard.amid and guard.lock._is_owned() for guard in _guards)


def _after_fork() -> None:
    """Free the locks that threads of the parent held; what they were changing stays broken."""
    for lock in _locks:
        if not lock._is_owned():
            lock._at_fork_reinit()


os.register_at_fork(after_in_child=_after_fork)
