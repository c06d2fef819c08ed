"""Batches over the simulator's receive queue, and receive memory that the user owns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, groupby, pairwise
from pickle import PickleBuffer
from typing import overload

from typing_extensions import Buffer

from mcast.api import Batch, Gid, Leases, Message, Series
from mcast.arguments.buffers import FREE_THREADED
from mcast.backends.model.qp import Burst, Header
from mcast.backends.sim.region import SimDeviceRegion

Slices = list[tuple[Burst, int, int]]


class PackedPayloads(Sequence[bytes]):
    """Payloads that lie one after another in `memory`, which is this process's own. Each look makes a copy.

    A slice lies in the same memory.
    """

    __slots__ = ("_starts", "begin", "lengths", "memory")

    def __init__(self, memory: bytes, lengths: Sequence[int], begin: int = 0) -> None:
        self.memory: bytes = memory
        self.lengths: Sequence[int] = lengths
        self.begin: int = begin
        self._starts: list[int] | None = None

    def start(self, index: int) -> int:
        """Where payload `index` begins in the memory; of the number of payloads, where all end."""
        if not index:
            return self.begin
        if self._starts is None:
            self._starts = list(accumulate(self.lengths, initial=self.begin))
        return self._starts[index]

    def part(self, start: int, stop: int) -> memoryview:
        """The memory of payloads start..stop."""
        return memoryview(self.memory)[self.start(start) : self.start(stop)]

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> PackedPayloads: ...
    def __getitem__(self, index: int | slice) -> bytes | PackedPayloads:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self.lengths))
            if step != 1:
                raise ValueError("messages come one after the other")
            return PackedPayloads(self.memory, self.lengths[start:stop], self.start(start))
        begin = self.start(range(len(self.lengths))[index])
        return self.memory[begin : begin + self.lengths[index]]

    def __iter__(self) -> Iterator[bytes]:
        ends = accumulate(self.lengths, initial=self.begin)
        return (self.memory[begin:end] for begin, end in pairwise(ends))


class SimBatch(Batch):
    """Slices of bursts.

    All views are made from exporters, by way of a PickleBuffer, so that each exporter counts its own. While a
    view of one, or one made from such a view, is not released, the receives stay leased.
    """

    _starts: Sequence[int] | None = None
    _exporter: memoryview | None = None
    """Of `memory`, once that was wanted."""
    _whole: memoryview | None = None

    def __init__(
        self,
        slices: Slices,
        is_own: Callable[[Header], bool],
        leases: Leases,
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
        self._slots = slots
        self._filled = [] if slots is None else [slots.fill(payload) for payload in self._payloads()]
        self._exporters: list[memoryview] = []
        on_end = None if slots is None else partial(slots.free, self._filled)
        self._leases = leases
        self._lease = leases.add(self, self._count, on_end, self._views, self._exporters)

    def __len__(self) -> int:
        return self._count

    @property
    def lengths(self) -> list[int]:
        lengths: list[int] = []
        for burst, start, stop in self._slices:
            lengths += _lengths(burst.payloads, start, stop)
        return lengths

    @property
    def groups(self) -> list[Gid]:
        return [burst.header.group for burst, start, stop in self._slices for _ in range(start, stop)]

    def _count_from(self, source: Gid, src_qp: int) -> int:
        sender = source, src_qp
        return sum(stop - start for burst, start, stop in self._slices if burst.header[:2] == sender)

    @property
    def memory(self) -> memoryview:
        with self._alone:
            self._require_lease()
            return self._keep(self._all()[:])

    @property
    def records(self) -> bytes:
        offsets, rows = iter(self._offsets()), list[bytes]()
        for burst, start, stop in self._slices:
            lengths = _lengths(burst.payloads, start, stop)
            places = [(next(offsets), length) for length in lengths]
            rows.append(self._records_of(message_of(burst, _NO_BYTES, False), places))
        return b"".join(rows)

    def _payloads(self) -> Iterator[bytes]:
        return (payload for burst, start, stop in self._slices for payload in burst.payloads[start:stop])

    def _offsets(self) -> Iterator[int]:
        """Where each payload begins in `memory`."""
        if self._slots is None:
            return accumulate(self.lengths, initial=0)
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
            exporter = self._exporter = self._exporter_of(self._joined())
        return _view_of(exporter)

    def _joined(self) -> Buffer:
        """The payloads one after another, or the memory of the slots."""
        if isinstance(self._slots, MemorySlots):
            return self._slots.memory
        if len(self._slices) == 1:
            return _memory_of(*self._slices[0])
        return b"".join([_memory_of(*one) for one in self._slices])

    def _exporter_of(self, memory: Buffer) -> memoryview:
        exporter = memoryview(memory)
        self._exporters.append(exporter)
        return exporter

    def series(self) -> Iterator[Series]:
        if self._slots is not None:
            yield from super().series()
            return
        self._require_lease()
        for burst, start, stop in self._slices:
            with self._alone:
                part = self._keep(self._export_part(burst, start, stop))
            source, src_qp, *_ = burst.header
            own, at = self._is_own(burst.header), 0
            for size, alike in groupby(_lengths(burst.payloads, start, stop)):
                count = len([*alike])
                end = at + count * size
                with self._alone:
                    view = self._keep(part[at:end])
                yield Series(view, size, size, count, source, src_qp, own)
                at = end

    def _export_part(self, burst: Burst, start: int, stop: int) -> memoryview:
        return _view_of(self._exporter_of(_memory_of(burst, start, stop)))

    def _message(self, index: int) -> Message:
        at = index
        for burst, start, stop in self._slices:
            if at < stop - start:
                at += start
                own = self._is_own(burst.header)
                if self._slots is None and self._whole is None:  # all of it would be copied for one message
                    return message_of(burst, self._export_part(burst, at, at + 1), own)
                if self._starts is None:
                    self._starts = list(self._offsets())
                offset = self._starts[index]
                (size,) = _lengths(burst.payloads, at, at + 1)
                if isinstance(self._slots, DeviceSlots):
                    message = message_of(burst, memoryview(b""), own)
                    return message._replace(device=self._slots.region.at(offset, size))
                return message_of(burst, self._all()[offset : offset + size], own)
            at -= stop - start
        raise IndexError(index)

    def __iter__(self) -> Iterator[Message]:
        if FREE_THREADED or self._slots is not None or not self._count:
            yield from super().__iter__()
            return
        whole, keep, end = self._all(), self._views.append, 0
        self._require_lease()  # now, for another thread may have ended it just before
        for burst, start, stop in self._slices:
            own = self._is_own(burst.header)
            for length in _lengths(burst.payloads, start, stop):
                begin, end = end, end + length
                view = whole[begin:end]
                keep(view)
                yield message_of(burst, view, own)

    def _release(self) -> None:
        whole = self._whole
        self._whole = self._exporter = None  # else what fails below would leave an exporter that has ended
        if whole is not None:
            whole.release()
        for exporter in self._exporters:
            exporter.release()  # BufferError if a view is left
        self._leases.end(self._lease)


def _lengths(payloads: Sequence[bytes], start: int, stop: int) -> Iterable[int]:
    if isinstance(payloads, PackedPayloads):
        return payloads.lengths[start:stop]
    return map(len, payloads[start:stop])


def _memory_of(burst: Burst, start: int, stop: int) -> Buffer:
    """The payloads start..stop one after another."""
    payloads = burst.payloads
    return (
        payloads.part(start, stop) if isinstance(payloads, PackedPayloads) else b"".join(payloads[start:stop])
    )


def _view_of(exporter: memoryview) -> memoryview:
    """A view of bytes, read-only, which the exporter counts."""
    view = memoryview(PickleBuffer(exporter)).toreadonly()
    return view if view.format == "B" else view.cast("B")


_NO_BYTES = memoryview(b"")
_new = tuple.__new__
"""Makes a message of all its fields, in a third of the constructor's time."""


def message_of(burst: Burst, payload: memoryview, own: bool) -> Message:
    """A message of the burst, as its receiver sees it."""
    source, src_qp, group, _, _, _, slid = burst.header
    fields = payload, source, src_qp, group, burst.imm, own, slid, None, 0, None, burst.at, None
    return _new(Message, fields)


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
