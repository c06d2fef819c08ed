"""Batches over the simulator's receive queue, and receive memory that the user owns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice
from pickle import PickleBuffer

from mcast.api import Batch, Gid, Message
from mcast.backends.sim.core.qp import Burst, Header
from mcast.backends.sim.region import SimDeviceRegion
from mcast.contract.batch import FREE_THREADED

Slices = list[tuple[Burst, int, int]]


class SimBatch(Batch):
    """Slices of bursts. `give_back(count)` posts the leased receives again.

    All views are made from one exporter, by way of a PickleBuffer, so that the exporter counts them. While a
    view of it, or one made from such a view, is not released, the receives stay leased.
    """

    _starts: Sequence[int] | None = None
    _exporter: memoryview | None = None
    _whole: memoryview | None = None

    def __init__(
        self,
        slices: Slices,
        is_own: Callable[[Header], bool],
        give_back: Callable[[int], None],
        slots: Slots | None = None,
    ) -> None:
        super().__init__()
        self._slices = slices
        if len(slices) == 1:
            ((_, start, stop),) = slices
            self._count = stop - start
        else:
            self._count = sum(stop - start for _, start, stop in slices)
        self._is_own = is_own
        self._give_back = give_back
        self._slots = slots
        self._filled = [] if slots is None else [slots.fill(payload) for payload in self._payloads()]
        self._leases = [self._count]  # the thread that takes it ends the lease

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

    def count_from(self, source: Gid, src_qp: int) -> int:
        sender = source, src_qp
        return sum(stop - start for burst, start, stop in self._slices if burst.header[:2] == sender)

    @property
    def memory(self) -> memoryview:
        with self._alone:
            self._require_lease()
            return self._keep(self._all()[:])

    @property
    def records(self) -> bytes:
        return self._records(self._offsets())

    def _payloads(self) -> Iterator[bytes]:
        return (payload for burst, start, stop in self._slices for payload in burst.payloads[start:stop])

    def _offsets(self) -> Iterator[int]:
        """Where each payload begins in `memory`."""
        if self._slots is None:
            return accumulate(map(len, self._payloads()), initial=0)
        return (slot * self._slots.size for slot in self._filled)

    def _all(self) -> memoryview:
        """A view of `memory`."""
        whole = self._whole
        if whole is None:
            whole = self._export()
            if not FREE_THREADED:
                self._whole = whole
        return whole

    def _export(self) -> memoryview:
        if isinstance(self._slots, DeviceSlots):
            self._slots.region.no_view()
        exporter = self._exporter
        if exporter is None:
            slots = self._slots
            memory = slots.memory if isinstance(slots, MemorySlots) else b"".join(self._payloads())
            exporter = self._exporter = memoryview(memory)
        view = memoryview(PickleBuffer(exporter)).toreadonly()
        return view if view.format == "B" else view.cast("B")

    def _message(self, index: int) -> Message:
        if self._starts is None:
            self._starts = list(self._offsets())
        offset = self._starts[index]
        for burst, start, stop in self._slices:
            if index < stop - start:
                size = len(burst.payloads[start + index])
                own = self._is_own(burst.header)
                if isinstance(self._slots, DeviceSlots):
                    message = message_of(burst, memoryview(b""), own)
                    return message._replace(device=self._slots.region.at(offset, size))
                return message_of(burst, self._all()[offset : offset + size], own)
            index -= stop - start
        raise IndexError(index)

    def __iter__(self) -> Iterator[Message]:
        if FREE_THREADED or self._slots is not None or not self._count:
            yield from super().__iter__()
            return
        whole, keep, end = self._all(), self._views.append, 0
        self._require_lease()  # now, for another thread may have ended it just before
        for burst, start, stop in self._slices:
            own = self._is_own(burst.header)
            for payload in islice(burst.payloads, start, stop):
                begin, end = end, end + len(payload)
                view = whole[begin:end]
                keep(view)
                yield message_of(burst, view, own)

    def _release(self) -> None:
        whole = self._whole
        if whole is not None:
            self._whole = None
            whole.release()
        exporter = self._exporter
        if exporter is not None:
            exporter.release()  # BufferError if a view is left
        try:
            count = self._leases.pop()
        except IndexError:
            return  # another thread has ended it
        if self._slots is not None:
            self._slots.free(self._filled)
        self._give_back(count)


_make_message: Callable[[tuple[object, ...]], Message] = partial(tuple.__new__, Message)
"""A message of all its fields, in a third of the constructor's time."""


def message_of(burst: Burst, payload: memoryview, own: bool) -> Message:
    """A message of the burst, as its receiver sees it."""
    source, src_qp, group, _, _, _, slid = burst.header
    return _make_message((payload, source, src_qp, group, burst.imm, own, slid, None, 0, None, burst.at))


class Slots(ABC):
    """User memory divided into receive slots of `size` bytes. A slot is free, or holds one leased message."""

    def __init__(self, nbytes: int, size: int) -> None:
        self.size = size
        self._free = deque(range(nbytes // size))

    def fill(self, payload: bytes) -> int:
        """Put a payload into the next free slot; return the number of the slot."""
        slot = self._free.popleft()
        self._write(slot * self.size, payload)
        return slot

    def free(self, slots: Iterable[int]) -> None:
        self._free.extend(slots)

    @abstractmethod
    def _write(self, offset: int, payload: bytes) -> None: ...


class MemorySlots(Slots):
    """In the host's memory."""

    def __init__(self, memory: memoryview, size: int) -> None:
        super().__init__(memory.nbytes, size)
        self.memory = memory

    def _write(self, offset: int, payload: bytes) -> None:
        self.memory[offset : offset + len(payload)] = payload


class DeviceSlots(Slots):
    """In another device's memory, of which batches have no view."""

    def __init__(self, region: SimDeviceRegion, size: int) -> None:
        super().__init__(region.nbytes, size)
        self.region = region

    def _write(self, offset: int, payload: bytes) -> None:
        self.region.write(offset, payload)
