"""Registered memory: memory of the host, and memory of another device."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import NoReturn

from mcast.arguments.checks import check_int, short_repr
from mcast.contract.closing import Closeable

NO_VIEW = (
    "these bytes are in the memory of another device, of which the CPU has no view: "
    "copy them to the host by that device's own means"
)


class Region(Closeable):
    """Memory of the program that is registered with a queue pair (ibv_reg_mr).

    A payload that lies inside an open region is sent without being copied. Close the region when no call uses
    it any more. That waits until the device has sent what lies there, or raises TimedOut after a second: the
    memory stays registered then, until another close or the queue pair's end.
    """

    @property
    @abstractmethod
    def buffer(self) -> memoryview:
        """The registered memory, as a view of bytes."""


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """A part of a `DeviceRegion`: `nbytes` bytes from `offset` on.

    A payload to send, or where a message has arrived.
    """

    region: DeviceRegion
    offset: int
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes

    def __bytes__(self) -> bytes:
        raise BufferError(NO_VIEW)


class DeviceRegion(Closeable):
    """Memory of another device, such as a GPU, registered with a queue pair.

    By its DMA-BUF (ibv_reg_dmabuf_mr).

    The CPU has no view of this memory. A payload in it is sent by its place, `qp.send(to, [region.at(0,
    512)])`; if a message was received into it, `Message.device` is the place. Close the region when no call
    uses it any more; the DMA-BUF's descriptor may be closed right after registering.
    """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The size of the region in bytes."""

    def at(self, offset: int, nbytes: int) -> DeviceBytes:
        """The `nbytes` bytes from `offset` on, as a payload.

        ValueError if they are not all inside the region.
        """
        offset = check_int(offset, "offset", None, None, "it is a place in the region, from 0 on")
        nbytes = check_int(nbytes, "nbytes", None, None, "it is a number of bytes, from 0 on")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(
                f"{short_repr(nbytes)} bytes from {short_repr(offset)} on are not inside a region of "
                f"{self.nbytes}"
            )
        return DeviceBytes(self, offset, nbytes)

    def no_view(self) -> NoReturn:
        """Raise the BufferError for a program that asks for these bytes on the CPU."""
        raise BufferError(NO_VIEW)
