from types import TracebackType
from typing import Protocol, Self

class AnyLock(Protocol):
    def acquire(self) -> object: ...
    def release(self) -> object: ...

class Lock:
    """threading.RLock, of which a `with` takes half of the time."""

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
    """`with` it: SIGINT waits for the end of the block, which holds `lock` if there is one."""

    def __new__(cls, lock: AnyLock = ..., /) -> Self: ...
    def __enter__(self) -> None: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

class interruptible:  # noqa: N801
    """`with` it, around what waits inside an `uninterrupted` block: SIGINT is taken at once."""

    def __enter__(self) -> None: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

class Bell:
    """What one thread sleeps on, and another wakes it by."""

    def ring(self) -> None:
        """Wake who waits, or will."""

    def wait(self, timeout: float, /) -> None:
        """Sleep until it is rung, or so many seconds; no signal is missed."""

class Enterable:
    """`with` gives the object itself, and ends it by the method that `_ended_by` names."""

    __slots__ = ()
    _ended_by: str
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def _drop(self) -> None:
        """End it, as a destructor: its errors about what is in use are nobody's."""

def take_interrupt() -> None:
    """Take SIGINT now if one is held back: for a loop that does not wait, but may go on without end."""

def is_held() -> bool:
    """Whether SIGINT is held back now."""
