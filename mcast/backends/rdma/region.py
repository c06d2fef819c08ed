"""Memory registered with a queue pair: the user's own, and that of other devices."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Protocol

from mcast.api import DeviceRegion, Phase, Region
from mcast.backends.rdma.native import Mr, Native
from mcast.backends.rdma.process import OwnedByProcess, Process


class RegionOwner(Protocol):
    """What a region has of its QP."""

    native: Native
    process: Process

    def forget_region(self, region: AnyRegion) -> None: ...


class RdmaRegion(OwnedByProcess, Region):
    """Knows where its bytes are; the QP knows what to do with them."""

    is_device = False

    def __init__(self, qp: RegionOwner, view: memoryview, mr: Mr) -> None:
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
        """Deregister it; the memory of a `recv_slot` gives way to the QP's. What failed is tried again."""
        self._closed = True
        self._qp.forget_region(self)
        with suppress(BufferError):  # somebody uses the view; it ends with that use
            self.view.release()


class Addresses:
    """Addresses of this process that nothing lies at: what a device calls other memory by.

    So they are told from those of any buffer. They begin in a page where the offset does, as the man page of
    ibv_reg_dmabuf_mr wants it.
    """

    def __init__(self, qp: RegionOwner, nbytes: int, offset: int) -> None:
        within = offset % mmap.PAGESIZE
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._reserved = mmap.mmap(-1, within + nbytes, flags=private, prot=0)
        self.start = qp.native.address_of(self._reserved) + within
        self.end = self.start + nbytes


class RdmaDeviceRegion(OwnedByProcess, DeviceRegion):
    """The same of memory that the CPU has no view of."""

    is_device = True

    def __init__(self, qp: RegionOwner, addresses: Addresses, mr: Mr) -> None:
        self.process, self.mr, self._qp = qp.process, mr, qp
        self.start, self.end, self._addresses = addresses.start, addresses.end, addresses
        self.lkey = qp.native.lkey(mr)

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def close(self) -> None:
        self._closed = True
        self._qp.forget_region(self)


AnyRegion = RdmaRegion | RdmaDeviceRegion
