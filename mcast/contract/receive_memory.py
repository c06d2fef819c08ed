"""Registered memory where the provider registers none: the contract copies, in `send` and in `recv`."""

from __future__ import annotations

import errno as E
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pickle import PickleBuffer

from mcast.contract.batch import Batch, Leases, Message
from mcast.contract.region import Region
from mcast.errors.cause import Phase
from mcast.errors.tree import mcast_error


class CopiedRegion(Region):
    """Memory of the program that the device does not read or write.

    `on_close` ends its use by the queue pair.
    """

    def __init__(self, buffer: memoryview, on_close: Callable[[], None] = lambda: None) -> None:
        self._buffer, self._on_close = buffer, on_close

    @property
    def buffer(self) -> memoryview:
        """The memory."""
        self._require_open("buffer", Phase.REGISTER)
        return self._buffer

    def _close(self) -> None:
        self._on_close()
        self._closed = True


class ReceiveSlots:
    """Memory of the program in slots of `size` bytes. `receive` copies each message into a free one."""

    def __init__(self, memory: memoryview, size: int) -> None:
        self.memory: memoryview = memory
        self.size: int = size
        self._free = deque(range(memory.nbytes // size))
        self._count = len(self._free)
        self.leases: Leases = Leases(self.reclaim)

    @property
    def leased(self) -> bool:
        """True while a batch has a slot."""
        self.reclaim()
        return len(self._free) < self._count

    def reclaim(self) -> None:
        """Take back the slots of batches that have ended."""
        self.leases.reclaim()

    def free(self, slots: Iterable[int]) -> None:
        """Take slots back from a batch."""
        self._free.extend(slots)

    def receive(self, recv: Callable[[int], Batch], max: int) -> Batch:
        """Return what `recv` returns for as many messages as there are free slots, as views of the memory."""
        slots = self._take(max)
        try:
            with recv(len(slots)) as batch:
                found = [self._copy(slot, message) for slot, message in zip(slots, batch, strict=False)]
        except BaseException:
            self.free(slots)
            raise
        self.free(slots[len(found) :])
        return _SlotBatch(self, slots[: len(found)], found)

    def _take(self, max: int) -> list[int]:
        self.reclaim()
        slots: list[int] = []
        try:
            while len(slots) < max:
                slots.append(self._free.popleft())
        except IndexError:
            pass  # another thread may have taken the last one
        if not slots:
            detail = f"all {self._count} slots of the receive memory are leased: release a batch first"
            raise mcast_error(E.ENOBUFS, "recv", Phase.RECV, None, detail)
        return slots

    def _copy(self, slot: int, message: Message) -> Message:
        size, begin = len(message.payload), slot * self.size
        if size > self.size:  # the port's MTU has grown since the memory was registered
            detail = (
                f"a message of {size} bytes was lost: the slots of the receive memory have {self.size} bytes"
            )
            raise mcast_error(E.EMSGSIZE, "recv", Phase.RECV, {"recv_slot": self.size}, detail)
        self.memory[begin : begin + size] = message.payload
        return message._replace(payload=self.memory[begin : begin + size])


class _SlotBatch(Batch):
    """Messages in slots, which go back when the batch is released."""

    def __init__(self, owner: ReceiveSlots, slots: Sequence[int], messages: Sequence[Message]) -> None:
        super().__init__()
        self._owner, self._slots, self._messages = owner, slots, messages
        self._exporter = memoryview(owner.memory)  # counts the views that it gives, by way of a PickleBuffer
        free = partial(owner.free, slots)
        self._lease = owner.leases.add(self, len(slots), free, self._views, [self._exporter])

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def lengths(self) -> list[int]:
        return [len(message.payload) for message in self._messages]

    @property
    def memory(self) -> memoryview:
        with self._alone:
            self._require_lease()
            return self._keep(self._view())

    @property
    def records(self) -> bytes:
        return self._records(slot * self._owner.size for slot in self._slots)

    def _view(self) -> memoryview:
        return memoryview(PickleBuffer(self._exporter)).toreadonly()

    def _message(self, index: int) -> Message:
        message, begin = self._messages[index], self._slots[index] * self._owner.size
        return message._replace(payload=self._view()[begin : begin + len(message.payload)])

    def _release(self) -> None:
        self._exporter.release()  # BufferError if a view is left
        self._owner.leases.end(self._lease)
