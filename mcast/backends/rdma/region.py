"""User memory registered with a QP."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from mcast.api import Phase, Region
from mcast.backends.rdma.native import Mr
from mcast.backends.rdma.process import OwnedByProcess

if TYPE_CHECKING:
    from mcast.backends.rdma.qp import RdmaQueuePair


class RdmaRegion(OwnedByProcess, Region):
    """Knows where its bytes are; the QP knows what to do with them."""

    def __init__(self, qp: RdmaQueuePair, view: memoryview, mr: Mr) -> None:
        self.process = qp.process
        self.view, self.mr = view, mr
        self.start = qp.native.address_of(view)
        self.end = self.start + view.nbytes
        self.lkey = qp.native.lkey(mr)
        self._qp = qp

    @property
    def buffer(self) -> memoryview:
        self._require_open("buffer", Phase.REGISTER)
        return self.view

    def close(self) -> None:
        """Deregister it; the memory of a `recv_slot` gives way to the QP's own again."""
        if not self._closed:
            self._closed = True
            self._qp.forget_region(self)
            with suppress(BufferError):  # somebody uses the view; it ends with that use
                self.view.release()
