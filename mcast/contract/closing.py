"""Base classes of the contract's objects: those that can be closed, and those that belong to a port."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from mcast.errors.cause import Phase
from mcast.errors.tree import Closed, McastError
from mcast.interrupts import Enterable, uninterrupted
from mcast.wire.kinds import LinkLayer


class Closeable(Enterable, ABC):
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

    @abstractmethod
    def close(self) -> None:
        """Free all that the object holds. Idempotent."""


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
