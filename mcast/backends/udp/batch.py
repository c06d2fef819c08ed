"""Received messages: records that C filled in, payloads where it put them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from mmap import mmap
from pickle import PickleBuffer
from struct import Struct

from mcast.api import Batch, Gid, Leases, Message
from mcast.arguments.buffers import FREE_THREADED

_ROW = Struct("<QIII4xB7x16s16s8x")
"""RECORD_DTYPE: offset, length, src_qp, imm, has_imm, source, group."""
_Row = tuple[int, int, int, int, int, bytes, bytes]
_new = tuple.__new__
"""Makes a message of all its fields, in a third of the constructor's time."""


class UdpBatch(Batch):
    """Views of a queue pair's receive memory.

    All are made from one exporter, by way of a PickleBuffer, so that it counts them: while one is not
    released, the receives stay leased.
    """

    def __init__(
        self,
        records: bytes,
        memory: mmap | memoryview,
        own: tuple[Gid, int],
        leases: Leases,
        on_end: Callable[[], object],
    ) -> None:
        super().__init__()
        self._rows, self._own, self._leases = records, own, leases
        self._count = len(records) // _ROW.size
        self._exporter = memoryview(memory)
        self._lease = leases.add(self, self._count, on_end, self._views, [self._exporter])

    def __len__(self) -> int:
        return self._count

    @property
    def lengths(self) -> Sequence[int]:
        lengths: list[int] = memoryview(self._rows).cast("I")[2::18].tolist()
        return lengths

    @property
    def records(self) -> bytes:
        return self._rows

    @property
    def memory(self) -> memoryview:
        with self._alone:
            self._require_lease()
            return self._keep(self._view())

    def _view(self) -> memoryview:
        return memoryview(PickleBuffer(self._exporter)).toreadonly()

    def _message(self, index: int) -> Message:
        row = _ROW.unpack_from(self._rows, index * _ROW.size)
        return self._made(row, self._view()[row[0] : row[0] + row[1]], {})

    def _made(
        self, row: tuple[int, int, int, int, int, bytes, bytes], payload: memoryview, gids: dict[bytes, Gid]
    ) -> Message:
        _, _, src_qp, imm, has_imm, source, group = row
        sender = gids.get(source) or gids.setdefault(source, Gid(source))
        to = gids.get(group) or gids.setdefault(group, Gid(group))
        own = self._own == (sender, src_qp)
        fields = payload, sender, src_qp, to, imm if has_imm else None, own, 0, None, 0, None, None, None
        return _new(Message, fields)

    def __iter__(self) -> Iterator[Message]:
        if FREE_THREADED or not self._count:
            yield from super().__iter__()
            return
        self._require_lease()
        whole, gids = self._keep(self._view()), dict[bytes, Gid]()
        for row in _ROW.iter_unpack(self._rows):
            begin, length = row[:2]
            self._require_lease()
            yield self._made(row, self._keep(whole[begin : begin + length]), gids)

    def _release(self) -> None:
        self._exporter.release()  # BufferError if a view is left
        self._leases.end(self._lease)
