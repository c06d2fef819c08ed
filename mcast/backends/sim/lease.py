"""Batches over the simulator's receive queue, and receive memory that the user owns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from mcast.api import Batch, Gid, Message
from mcast.backends.sim.qp import Burst, Header

Slices = list[tuple[Burst, int, int]]


class SimBatch(Batch):
    """Slices of bursts. `give_back(count)` posts the leased receives again."""

    def __init__(
        self,
        slices: Slices,
        is_own: Callable[[Header], bool],
        give_back: Callable[[int], None],
        slots: Slots | None = None,
    ) -> None:
        super().__init__()
        self._slices = slices
        self._count = sum(stop - start for _, start, stop in slices)
        self._is_own = is_own
        self._give_back = give_back
        self._slots = slots
        self._filled = None if slots is None else [slots.fill(payload) for payload in self._payloads()]

    def __len__(self) -> int:
        return self._count

    @property
    def lengths(self) -> list[int]:
        lengths: list[int] = []
        for burst, start, stop in self._slices:
            lengths += map(len, burst.payloads[start:stop])
        return lengths

    @property
    def groups(self) -> list[Gid]:
        return [burst.header.group for burst, start, stop in self._slices for _ in range(start, stop)]

    @property
    def memory(self) -> memoryview:
        return super().memory if self._slots is None else self._keep(self._slots.memory.toreadonly())

    @property
    def records(self) -> bytes:
        if self._slots is None or self._filled is None:
            return super().records
        size = self._slots.size
        return self._records(slot * size for slot, _ in self._filled)

    def _payloads(self) -> Iterator[bytes]:
        return (payload for burst, start, stop in self._slices for payload in burst.payloads[start:stop])

    def _message(self, index: int) -> Message:
        burst, place = self._find(index)
        if self._slots is None or self._filled is None:
            payload = memoryview(burst.payloads[place])
        else:
            payload = self._slots.view(*self._filled[index])
        return message_of(burst, payload, self._is_own(burst.header))

    def _find(self, index: int) -> tuple[Burst, int]:
        """The burst of a message, and its place there."""
        for burst, start, stop in self._slices:
            if index < stop - start:
                return burst, start + index
            index -= stop - start
        raise IndexError(index)

    def __iter__(self) -> Iterator[Message]:
        if self._released or self._slots is not None:
            yield from super().__iter__()
            return
        for burst, start, stop in self._slices:
            own = self._is_own(burst.header)
            for payload in islice(burst.payloads, start, stop):
                view = memoryview(payload)
                self._views.append(view)
                yield message_of(burst, view, own)

    def _release(self) -> None:
        if self._slots is not None and self._filled is not None:
            self._slots.free(index for index, _ in self._filled)
        self._give_back(self._count)


def message_of(burst: Burst, payload: memoryview, own: bool) -> Message:
    """A message of the burst, as its receiver sees it."""
    source, src_qp, group, _, _, _, slid = burst.header
    return Message(payload, source, src_qp, group, burst.imm, own, slid)


class Slots:
    """User memory cut into receive slots of `size` bytes; a slot is free, or holds one leased message."""

    def __init__(self, memory: memoryview, size: int) -> None:
        self.memory, self.size = memory, size
        self.count = memory.nbytes // size
        self._free = deque(range(self.count))

    def fill(self, payload: bytes) -> tuple[int, int]:
        """Put a payload into the next free slot; (slot, length)."""
        slot = self._free.popleft()
        offset = slot * self.size
        self.memory[offset : offset + len(payload)] = payload
        return slot, len(payload)

    def view(self, slot: int, length: int) -> memoryview:
        return self.memory[slot * self.size : slot * self.size + length].toreadonly()

    def free(self, slots: Iterator[int]) -> None:
        self._free.extend(slots)
