"""Received batches, made without a network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mcast.api import Batch, CopiedBatch, Message
from mcast.wire.addresses import Gid

GROUP = Gid("ff0e::ffff:239.1.1.1")


def batch_of(*messages: tuple[bytes, str]) -> Batch:
    """Return a batch of these messages, each with the IPv4 address of its sender."""
    return CopiedBatch(
        [
            Message(memoryview(message), Gid(f"::ffff:{address}"), 7, GROUP, None, False)
            for message, address in messages
        ]
    )


class GappedBatch(CopiedBatch):
    """Messages that lie apart in memory: so many bytes before each of them."""

    def __init__(self, messages: Sequence[Message], gaps: Sequence[int]) -> None:
        super().__init__(messages)
        self._gaps = gaps

    @property
    def memory(self) -> memoryview:
        parts = [bytes(gap) + message.payload for gap, message in zip(self._gaps, self, strict=True)]
        return memoryview(b"".join(parts))

    @property
    def records(self) -> bytes:
        steps = [gap + size for gap, size in zip(self._gaps, self.lengths, strict=True)]
        ends = accumulate(steps)
        return self._records([end - size for end, size in zip(ends, self.lengths, strict=True)])
