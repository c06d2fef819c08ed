"""Registered memory: the host's own, and that of another device."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import NoReturn

from mcast.contract.closing import Closeable

NO_VIEW = (
    "these bytes are in the memory of another device, of which the CPU has no view: "
    "copy them to the host by that device's own means"
)


class Region(Closeable):
    """User memory registered with a QP (ibv_reg_mr). Close it when no call uses it any more.

    A payload that lies inside an open region is sent without a copy.
    """

    @property
    @abstractmethod
    def buffer(self) -> memoryview:
        """The registered memory, as bytes."""


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """`nbytes` bytes of a `DeviceRegion` from `offset` on: a payload to send, or where one has arrived."""

    region: DeviceRegion
    offset: int
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes

    def __bytes__(self) -> bytes:
        raise BufferError(NO_VIEW)


class DeviceRegion(Closeable):
    """Memory of another device, such as a GPU, registered with a QP by its DMA-BUF (ibv_reg_dmabuf_mr).

    The CPU has no view of it. What lies in it is sent by its place: `qp.send(to, [region.at(0, 512)])`; where
    a message was received into it, `Message.device` is the place. Close it when no call uses it any more; the
    descriptor may be closed at once.
    """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Its size in bytes."""

    def at(self, offset: int, nbytes: int) -> DeviceBytes:
        """A part of it, as a payload. ValueError if it is not all inside."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes from {offset} on are not inside a region of {self.nbytes}")
        return DeviceBytes(self, offset, nbytes)

    def no_view(self) -> NoReturn:
        """Raise the BufferError of who asks for its bytes."""
        raise BufferError(NO_VIEW)
