from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

class AnyLock(Protocol):
    def acquire(self) -> object: ...
    def release(self) -> object: ...

class Lock:
    """threading.RLock, for which a `with` takes half of the time. `later` knows who holds one.

    `level` is 0 for a provider's locks, 1 for those of what stands on providers, None for one that puts
    nothing off, because it is held over a wait. With a `refusal` the owner cannot take it once more: that is
    a RuntimeError with this sentence.
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

def later(action: Callable[[], object], level: int = 0, /) -> bool:
    """Have `action()` called once this thread holds no lock of `level` or below; False if it holds none."""

def is_within() -> bool:
    """Whether this thread holds a provider's lock: a call that asks came between two lines of another one."""

def do_what_was_put_off() -> None:
    """Call it now: what holds the lock waits, and everything is in order meanwhile."""
