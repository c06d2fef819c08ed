"""Base classes of the contract's objects: those that can be closed, and those that belong to a port."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, NoReturn

from mcast.errors.cause import Phase
from mcast.errors.tree import Closed, McastError
from mcast.interrupts import WITHIN, Enterable, is_within, later, uninterrupted
from mcast.wire.kinds import LinkLayer


class Handle:
    """An object that stands for something open in this process, and can be neither pickled nor copied."""

    __slots__ = ()
    _instead: ClassVar[str] = "pass its address or name, and open another one there"
    """Next step for a program that wanted to pickle or copy the object."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied: it holds resources of this process; "
            f"{self._instead}"
        )


class Closeable(Handle, Enterable, ABC):
    """An object that is closed once, at the latest at the end of a `with`."""

    _closed = False
    _ended_by = "close"
    _whole = uninterrupted()
    """The context in which the short calls change the object.

    A provider may replace it by one that takes its lock as well.
    """

    @property
    def closed(self) -> bool:
        """True after close or destroy; every other call then raises `Closed`."""
        return self._closed

    def _require_open(self, call: str, phase: Phase) -> None:
        """Raise `Closed` for `call` if the object is closed.

        The fastest calls look at `_closed` themselves before.
        """
        if self._closed:
            raise Closed(type(self).__name__, call, phase)

    def _require_alone(self) -> None:
        """Refuse a call that changes something, and has come between two lines of another one of this thread.

        The fastest calls ask `is_within` themselves before.
        """
        if is_within():
            raise RuntimeError(WITHIN)

    def close(self) -> None:
        """Close the object and all that was made from it; calls that wait there raise `Closed`. Idempotent.

        May be called from any thread, and from a signal's handler, a finalizer or an argument's `__float__`.
        If one of these has come between two lines of another call of the same thread, the object is closed
        once that call waits or ends, and an error of the closing goes to `sys.unraisablehook`.
        """
        if not later(self._close):
            self._close()

    @abstractmethod
    def _close(self) -> None:
        """Close the object: this thread holds no lock of the provider, or the provider itself calls."""


class OnPort(Closeable):
    """An object that belongs to a port of a device, from when it is bound to one."""

    @property
    def link_layer(self) -> LinkLayer | None:
        """The link layer of the object's port; None without a port, or where the provider does not say."""
        return None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Tell each McastError of the block the port's link layer, which narrows down the error's causes.

        Joins and leaves, where a microsecond counts, catch the error and set `link_layer` themselves.
        """
        try:
            yield
        except McastError as error:
            error.link_layer = self.link_layer
            raise
