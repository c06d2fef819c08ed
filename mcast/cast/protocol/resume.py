"""What an earlier run of a receiver has left on its disk: blocks that count when they were compared.

A receiver takes nobody's word for these, not even its own: each is compared with the digest in its SEAL.
"""

from __future__ import annotations

from collections.abc import Iterator

from mcast.cast.protocol.packets import MAX_SEALS, BlockInfo, RepairRequest

_MAX_AHEAD = 1024
"""The seals of so many blocks are kept."""


class StoredPrefix:
    """The blocks before `until`, compared one after another; those before `base` are right."""

    def __init__(self, until: int = 0) -> None:
        self.base: int = 0
        self.until: int = until
        self._sent = 0
        self._offered = -1
        self._infos: dict[int, BlockInfo] = {}

    @property
    def active(self) -> bool:
        """Whether a block has yet to be compared."""
        return self.base < self.until

    def add_info(self, block: int, info: BlockInfo) -> None:
        """Take in what a block is."""
        if self.base <= block < min(self.until, self.base + _MAX_AHEAD):
            self._infos.setdefault(block, info)

    def sent(self, blocks: int) -> None:
        """The sender has sent so many blocks, or has passed them over."""
        self._sent = max(self._sent, min(blocks, self.until))

    def next(self) -> BlockInfo | None:
        """What the block to compare now is, once; None if that is not known yet."""
        if self._offered == self.base or self.base not in self._infos:
            return None
        self._offered = self.base
        return self._infos[self.base]

    def accept(self) -> None:
        """The block is as its seal says."""
        del self._infos[self.base]
        self.base += 1

    def end(self, until: int) -> None:
        """No more than the blocks before that one are there."""
        self.until = max(self.base, until)
        self._sent = min(self._sent, self.until)
        # The driver may be comparing the first of them.
        self._infos = {block: info for block, info in self._infos.items() if block < self.until}

    def lacks_info(self, block: int) -> bool:
        """Whether the seal of the block is missing."""
        return self.base <= block < self.until and block not in self._infos

    def requests(self) -> Iterator[RepairRequest]:
        """The seals that are missing of what has been sent: each brings those of the blocks before it."""
        at, end = self.base, min(self._sent, self.base + _MAX_AHEAD)
        while at < end:
            if at in self._infos:
                at += 1
            else:
                last = min(at + MAX_SEALS, end) - 1
                yield RepairRequest(last, 0, 0)
                at = last + 1
