"""What can be closed, and what belongs to a port."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from mcast.errors.cause import Phase
from mcast.errors.tree import Closed, McastError
from mcast.interrupts import Enterable, uninterrupted
from mcast.wire.kinds import LinkLayer


class Closeable(Enterable, ABC):
    """Closes once, at the latest at the end of a `with`."""

    _closed = False
    _ended_by = "close"
    _whole = uninterrupted()
    """What a change stands in where a microsecond counts; a provider may add its lock to it."""

    @property
    def closed(self) -> bool:
        """True after close or destroy; every other call then raises `Closed`."""
        return self._closed

    def _require_open(self, call: str, phase: Phase) -> None:
        """Where a tenth of a microsecond counts, callers look at `_closed` first."""
        if self._closed:
            raise Closed(type(self).__name__, call, phase)

    @abstractmethod
    def close(self) -> None: ...


class OnPort(Closeable):
    """Belongs to a port of a device, once it is bound to one."""

    @property
    def link_layer(self) -> LinkLayer | None:
        """What its port speaks; None where there is no port yet, or the provider does not say."""
        return None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of the block know the link layer, and with it which causes are possible.

        Where a microsecond counts, in joins and leaves, callers catch and tell it themselves.
        """
        try:
            yield
        except McastError as error:
            error.link_layer = self.link_layer
            raise
