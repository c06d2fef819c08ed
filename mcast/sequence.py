"""The optional sequence header: which messages of a source are missing, came again, or came late.

Every message begins with HEADER_SIZE bytes: magic, version, a stream id (a sender's, drawn anew with each
join) and a 64-bit number. Nothing in it is trusted: what makes no sense is refused, with the reason.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from enum import Enum
from operator import attrgetter
from struct import Struct
from typing import NamedTuple

from mcast.addresses import Gid
from mcast.stats import SourceStats

_MAGIC = b"mSeq"
_VERSION = 1
_LAYOUT = Struct("!4sBBHQQ")

HEADER_SIZE = _LAYOUT.size
"""Bytes that the header takes from every message: 24."""

WINDOW = 1024
"""How many numbers back a late message is told from a duplicate."""

JUMP_MAX = 1 << 32
"""The largest plausible step forward; a sender that starts anew has a new stream id."""

SOURCES_MAX = 1024
"""Streams that are remembered of a group; the one not heard of for longest is forgotten first."""

_MASK = (1 << WINDOW) - 1


class Number(NamedTuple):
    """What a header says."""

    stream: int
    number: int


class Refusal(Enum):
    """Why a message is not delivered."""

    SHORT = "sequence header: too short"
    MAGIC = "sequence header: not one"
    VERSION = "sequence header: unknown version or flags"
    JUMP = "sequence header: implausible jump"
    DUPLICATE = "duplicate"
    OLD = "too late to tell from a duplicate"


def pack(stream: int, number: int) -> bytes:
    """The header of one message."""
    return _LAYOUT.pack(_MAGIC, _VERSION, 0, 0, stream, number)


def parse(payload: memoryview) -> Number | Refusal:
    """The header of a message, or why it has none."""
    if len(payload) < HEADER_SIZE:
        return Refusal.SHORT
    magic, version, flags, reserved, stream, number = _LAYOUT.unpack_from(payload)
    if magic != _MAGIC:
        return Refusal.MAGIC
    if version != _VERSION or flags or reserved:
        return Refusal.VERSION
    return Number(stream, number)


class Stream:
    """What has come of one stream. Bit i of `_seen` stands for the number `_highest - i`."""

    __slots__ = ("_first", "_highest", "_seen", "duplicates", "gaps", "late", "qp_num", "received")

    def __init__(self, first: int, qp_num: int = 0) -> None:
        self.qp_num = qp_num
        self._first = self._highest = first
        self._seen = 1
        self.received = 1
        self.gaps = self.late = self.duplicates = 0

    def take(self, number: int) -> Refusal | None:
        """Count a message; why it is not delivered, if it is not."""
        ahead = number - self._highest
        if ahead > JUMP_MAX:
            return Refusal.JUMP
        if ahead > 0:
            self._seen = (self._seen << ahead | 1) & _MASK if ahead < WINDOW else 1
            self._highest = number
            self.gaps += ahead - 1
        elif -ahead >= WINDOW:
            return Refusal.OLD
        elif self._seen >> -ahead & 1:
            self.duplicates += 1
            return Refusal.DUPLICATE
        else:
            self._seen |= 1 << -ahead
            self.late += 1
            self.gaps -= number > self._first
        self.received += 1
        return None


class Sources:
    """The streams of a group, by source GID and stream id; `forgotten` sums up those let go.

    A stream goes on when its sender gets another queue pair, so what was lost meanwhile is a gap.
    """

    def __init__(self, limit: int = SOURCES_MAX) -> None:
        self._limit = limit
        self._streams: OrderedDict[tuple[Gid, int], Stream] = OrderedDict()
        self.forgotten: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._streams)

    def take(self, source: Gid, qp_num: int, payload: memoryview) -> Refusal | None:
        """Count a message by its header; why it is not delivered, if it is not."""
        header = parse(payload)
        if isinstance(header, Refusal):
            return header
        key = (source, header.stream)
        stream = self._streams.get(key)
        if stream is not None:
            self._streams.move_to_end(key)
            stream.qp_num = qp_num
            return stream.take(header.number)
        self._streams[key] = Stream(header.number, qp_num)
        if len(self._streams) > self._limit:
            _, oldest = self._streams.popitem(last=False)
            self.forgotten.update(streams=1, gaps=oldest.gaps, late=oldest.late, duplicates=oldest.duplicates)
        return None

    def total(self, field: str) -> int:
        """`gaps`, `late` or `duplicates` of all streams, the forgotten ones included."""
        counts: Iterable[int] = map(attrgetter(field), self._streams.values())
        return self.forgotten[field] + sum(counts)

    def snapshot(self) -> tuple[SourceStats, ...]:
        return tuple(
            SourceStats(
                source=source,
                qp_num=stream.qp_num,
                stream=number,
                received=stream.received,
                gaps=stream.gaps,
                late=stream.late,
                duplicates=stream.duplicates,
            )
            for (source, number), stream in self._streams.items()
        )
