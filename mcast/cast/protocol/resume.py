"""Resumption of an object that an earlier run of the receiver has stored in part.

Stored blocks are not trusted: each is compared with the digest in its SEAL, in order. The driver reads and
compares; this file decides which block is next, and which SEALs to request.
"""

from __future__ import annotations

from collections.abc import Iterator

from mcast.cast.protocol.packets import MAX_SEALS, BlockInfo, RepairRequest

_MAX_AHEAD = 1024
"""Maximum blocks after the first unverified one whose SEALs are stored."""


class StoredPrefix:
    """Stored blocks 0..until-1, which are verified in order; those before `base` are verified."""

    def __init__(self, until: int = 0) -> None:
        self.base: int = 0
        self.until: int = until
        self._sent = 0
        self._offered = -1
        self._infos: dict[int, BlockInfo] = {}

    @property
    def active(self) -> bool:
        """True while a stored block is not verified yet."""
        return self.base < self.until

    def add_info(self, block: int, info: BlockInfo) -> None:
        """Add the length and digest of a block."""
        if self.base <= block < min(self.until, self.base + _MAX_AHEAD):
            self._infos.setdefault(block, info)

    def sent(self, blocks: int) -> None:
        """Note that the sender has sent or skipped the blocks before `blocks`."""
        self._sent = max(self._sent, min(blocks, self.until))

    def next(self) -> BlockInfo | None:
        """Return length and digest of the next block to verify, once; None if they are not known yet."""
        if self._offered == self.base or self.base not in self._infos:
            return None
        self._offered = self.base
        return self._infos[self.base]

    def accept(self) -> None:
        """Count the next block as verified."""
        del self._infos[self.base]
        self.base += 1

    def end(self, until: int) -> None:
        """Trust only the stored blocks before `until`; those that are verified stay so."""
        self.until = max(self.base, until)
        self._sent = min(self._sent, self.until)
        # Keep the earlier ones: the driver may be verifying one, whose entry `accept` removes.
        self._infos = {block: info for block, info in self._infos.items() if block < self.until}

    def misses_info(self, block: int) -> bool:
        """Return True if the SEAL of a stored block is missing."""
        return self.base <= block < self.until and block not in self._infos

    def requests(self) -> Iterator[RepairRequest]:
        """Yield requests for the missing SEALs of blocks that were sent, MAX_SEALS blocks in each."""
        at, end = self.base, min(self._sent, self.base + _MAX_AHEAD)
        while at < end:
            if at in self._infos:
                at += 1
            else:
                last = min(at + MAX_SEALS, end) - 1
                yield RepairRequest(last, 0, 0)
                at = last + 1
