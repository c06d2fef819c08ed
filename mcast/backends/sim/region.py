"""Memory of other devices that is registered with a simulated queue pair."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable

from mcast.api import DeviceBytes, DeviceRegion, Guard, Phase, Refused, mcast_error


class SimDeviceRegion(DeviceRegion):
    """The memory of a device that does not exist: a memfd or udmabuf, whose descriptor is mapped.

    `owner` is the queue pair that the memory is registered with.
    """

    _strict = True

    def __init__(
        self,
        owner: object,
        guard: Guard,
        fd: int,
        nbytes: int,
        offset: int,
        receives: bool,
    ) -> None:
        self._guard, self._nbytes, self._offset = guard, nbytes, offset
        self.owner: object = owner
        self.end: Callable[[], None] = lambda: None
        """Takes it out of use as receive memory."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if receives else 0)
        try:
            self._memory = mmap.mmap(fd, offset + nbytes, flags=mmap.MAP_SHARED, prot=access)
        except (OSError, ValueError) as error:
            detail = f"the simulator maps a DMA-BUF, and {fd} cannot be mapped ({error}): give it a memfd"
            about = {"fd": fd, "nbytes": nbytes, "offset": offset}
            found = (isinstance(error, OSError) and error.errno) or errno.EINVAL
            refusal = mcast_error(found, "register_dmabuf", Phase.REGISTER, about, detail)
            raise Refused(refusal) from None

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def read(self, part: DeviceBytes) -> bytes:
        """The bytes that the device would send from there."""
        begin = self._offset + part.offset
        return self._memory[begin : begin + part.nbytes]

    def write(self, offset: int, payload: bytes) -> None:
        """Store a message that arrives there, as the device would."""
        begin = self._offset + offset
        self._memory[begin : begin + len(payload)] = payload

    def _close(self) -> None:
        if not self._freed:
            if not self._guard.was_broken:
                self.end()
            self._closed = True
            self._memory.close()
            self._freed = True


def bytes_of(payload: bytes | memoryview | DeviceBytes, owner: object) -> bytes:
    """Return the bytes that the QP `owner` sends. Raises ValueError for memory not registered with it."""
    if not isinstance(payload, DeviceBytes):
        return bytes(payload)
    region = payload.region
    if not isinstance(region, SimDeviceRegion) or region.owner is not owner:
        raise ValueError("this memory is not registered with this queue pair: call its register_dmabuf")
    return region.read(payload)
