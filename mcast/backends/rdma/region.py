"""Memory registered with a queue pair: the program's own, and that of other devices."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Protocol

from mcast.api import DeviceRegion, Guard, Phase, Region
from mcast.backends.rdma.native import HandleRef, Native
from mcast.backends.rdma.process import OwnedByProcess, Process


class RegionOwner(Protocol):
    """The part of the queue pair that a region uses; both have the same guard."""

    native: Native
    process: Process
    _guard: Guard

    def forget_region(self, region: AnyRegion) -> bool: ...


class RdmaRegion(OwnedByProcess, Region):
    """A registered part of memory. The region knows where its bytes are, the queue pair how to use them.

    `place` is that of its memory region.
    """

    is_device = False

    def __init__(self, qp: RegionOwner, view: memoryview, constant: bool) -> None:
        self._guard = qp._guard
        self.is_constant: bool = constant
        self.process: Process = qp.process
        self.view: memoryview = view
        self.ref: HandleRef = qp.native.mr_ref()
        self.start: int = qp.native.address_of(view)
        self.end: int = self.start + view.nbytes
        self._qp = qp

    @property
    def lkey(self) -> int:
        """The key by which the device finds the memory."""
        return self._qp.native.lkey(self._qp.native.mr(self.ref))

    @property
    def buffer(self) -> memoryview:
        self._require_open("buffer", Phase.REGISTER)
        return self.view

    def _close(self) -> None:
        """Deregister.

        The queue pair's own memory replaces that of a `recv_slot`. What failed is tried again.
        """
        self._closed = True
        if self._qp.forget_region(self):
            with suppress(BufferError):  # somebody uses the view; it ends with that use
                self.view.release()


class DeviceAddresses:
    """Addresses of this process at which there is no memory, by which a device names other memory.

    So they differ from the address of any buffer. They begin in a page where the offset does, as the man page
    of ibv_reg_dmabuf_mr demands.
    """

    def __init__(self, qp: RegionOwner, nbytes: int, offset: int) -> None:
        within = offset % mmap.PAGESIZE
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._reserved = mmap.mmap(-1, within + nbytes, flags=private, prot=0)
        self.start: int = qp.native.address_of(self._reserved) + within
        self.end: int = self.start + nbytes


class RdmaDeviceRegion(OwnedByProcess, DeviceRegion):
    """Registered memory that the CPU has no view of."""

    is_device = True
    is_constant = False

    def __init__(self, qp: RegionOwner, addresses: DeviceAddresses) -> None:
        self._guard = qp._guard
        self._qp = qp
        self.process: Process = qp.process
        self.ref: HandleRef = qp.native.mr_ref()
        self._addresses = addresses
        self.start: int = addresses.start
        self.end: int = addresses.end

    @property
    def lkey(self) -> int:
        """The key by which the device finds the memory."""
        return self._qp.native.lkey(self._qp.native.mr(self.ref))

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def _close(self) -> None:
        self._closed = True
        self._qp.forget_region(self)


AnyRegion = RdmaRegion | RdmaDeviceRegion
