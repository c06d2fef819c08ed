from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from typing_extensions import Buffer

class AnyLock(Protocol):
    def acquire(self) -> object: ...
    def release(self) -> object: ...

class Lock:
    """threading.RLock, for which a `with` takes half of the time, though not in CPython 3.14's main thread;
    `later` knows its holder.

    `level` is 0 for the locks of providers, 1 for those of objects that stand on providers, and None for a
    lock that puts nothing off, because it is held during a wait. With a `refusal` the owner cannot take the
    lock once more: that raises a RuntimeError with this sentence.
    """

    def __new__(cls, level: int | None = 0, refusal: str | None = ..., /) -> Self: ...
    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def _is_owned(self) -> bool: ...
    def _release_save(self) -> int: ...
    def _acquire_restore(self, saved: int, /) -> None: ...

class uninterrupted:  # noqa: N801
    """A context in which SIGINT waits for the end of the block. The block holds `lock` if there is one."""

    def __new__(cls, lock: AnyLock = ..., /) -> Self: ...
    def __enter__(self) -> None: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

class interruptible:  # noqa: N801
    """A context for the part of an `uninterrupted` block that waits: SIGINT is taken at once."""

    def __enter__(self) -> None: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

class Bell:
    """An object on which one thread sleeps until another thread rings it."""

    def ring(self) -> None:
        """Wake the thread that sleeps, or the next one that would."""

    def wait(self, timeout: float, /) -> None:
        """Sleep until the bell is rung, at most for `timeout` seconds; no signal is missed."""

class Enterable:
    """An object whose `with` gives the object itself, and ends it by the method that `_ended_by` names."""

    __slots__ = ()
    _ended_by: str
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def _drop(self) -> None:
        """End the object, as its destructor. Errors because the object is in use are dropped."""

def take_interrupt() -> None:
    """Take SIGINT now if one is held back. For a loop that does not wait, but may run without end."""

def is_held() -> bool:
    """Whether SIGINT is held back now."""

def copy_rows(
    to: Buffer, at: int, apart: int, of: Buffer, begin: int, step: int, size: int, count: int, /
) -> None:
    """Copy `count` rows of `size` bytes, which begin `step` bytes apart in `of`, from `begin` on.

    In `to`, which is another memory, they begin `apart` bytes apart, from `at` on. Raises ValueError where
    there are no such rows.
    """

def later(action: Callable[[], object], level: int = 0, /) -> bool:
    """Call `action()` once this thread holds no lock of `level` or below; return False if it holds none
    now."""

def is_within() -> bool:
    """Whether this thread holds a provider's lock, so that the asking call came between two lines of another
    call."""

def do_what_was_put_off() -> None:
    """Call the actions that were put off now, because the call that holds the lock is waiting, and its object
    is in order."""
