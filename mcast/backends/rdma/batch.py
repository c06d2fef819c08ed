"""Received messages: records that C filled in, payloads where the device put them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Set
from functools import lru_cache
from struct import Struct
from typing import Any

from mcast.api import Batch, Gid, Message
from mcast.backends.rdma.native import Pointer

RECORD = Struct("=QIIIIBBHI16s16s")
"""struct mcast_message of csrc/cdefs.h."""

_LENGTH_AT, _WORDS = 2, RECORD.size // 4


@lru_cache(maxsize=4096)
def _gid(raw: bytes) -> Gid:
    return Gid(raw)


class RdmaBatch(Batch):
    """Views of a QP's receive memory; `give_back` posts the receives again, in one chain.

    `in_use` is dead once no view of `payloads` is left: a slice that the user made of one outlives it.
    """

    def __init__(
        self,
        pointer: Pointer,
        records: memoryview,
        count: int,
        payloads: memoryview,
        in_use: weakref.ref[Any],
        sources: Set[Gid],
        give_back: Callable[[Pointer, int], None],
    ) -> None:
        super().__init__()
        self._pointer, self._records, self._count = pointer, records, count
        self._payloads, self._in_use, self._sources = payloads, in_use, sources
        self._give_back = give_back

    def __len__(self) -> int:
        return self._count

    @property
    def lengths(self) -> list[int]:
        words = self._records.cast("B").cast("I")
        return words[_LENGTH_AT : self._count * _WORDS : _WORDS].tolist()

    def _message(self, index: int) -> Message:
        record = RECORD.unpack_from(self._records, index * RECORD.size)
        offset, length, src_qp, imm, _slot, has_imm, own, src_lid, _generation, source, group = record
        sender = _gid(source)
        return Message(
            self._payloads[offset : offset + length],
            sender,
            src_qp,
            _gid(group),
            imm if has_imm else None,
            bool(own) and sender in self._sources,
            src_lid,
        )

    def _release(self) -> None:
        self._payloads.release()
        if self._in_use() is not None:
            raise BufferError("a slice of a payload of this batch is in use: drop it, or copy it first")
        if self._count:
            self._give_back(self._pointer, self._count)
