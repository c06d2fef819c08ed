"""The optional sequence header: it shows which messages of a source are missing, came again, or came late.

Every message begins with HEADER_SIZE bytes: magic, version, a stream id (which a sender draws anew with each
join) and a 64-bit number. Nothing in a header is trusted: one that makes no sense is refused, with the
reason.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from enum import Enum
from struct import Struct
from typing import NamedTuple

from mcast.endpoint.stats import SourceStats
from mcast.wire.addresses import Gid

_MAGIC = b"mSeq"
_VERSION = 1
_LAYOUT = Struct("!4sBBHQQ")

HEADER_SIZE = _LAYOUT.size
"""The size of the header in bytes, 24, which every message has less room for the payload."""

WINDOW = 1024
"""Window in message numbers within which a late message can be told from a duplicate."""

MAX_JUMP = 1 << 32
"""The largest plausible step forward. A sender that starts anew has a new stream id."""

RESTART_AFTER = 16
"""Number of implausible numbers in a row that are believed.

So no forged number silences a stream for long.
"""

MAX_SOURCES = 1024
"""Maximum number of senders of a group that are remembered.

The one that was silent longest is forgotten first.
"""

MAX_STREAMS = 16
"""Maximum number of remembered streams of a sender.

So invented streams push out only the sender's own.
"""

_NONE: tuple[range, ...] = ()
_MASK = (1 << WINDOW) - 1


class SequenceHeader(NamedTuple):
    """The contents of a header: stream id and message number."""

    stream: int
    number: int


class Arrival(NamedTuple):
    """A message that is delivered, by its header.

    missing  the numbers that it shows to be missing: usually none, and never more than two ranges
    """

    stream: int
    number: int
    missing: tuple[range, ...]


class Refusal(Enum):
    """Why a message is not delivered."""

    SHORT = "sequence header: too short"
    MAGIC = "sequence header: not one"
    VERSION = "sequence header: unknown version or flags"
    JUMP = "sequence header: implausible jump"
    DUPLICATE = "duplicate"
    OLD = "too late to tell from a duplicate"


def pack(stream: int, number: int) -> bytes:
    """The header of one message, HEADER_SIZE bytes."""
    return _LAYOUT.pack(_MAGIC, _VERSION, 0, 0, stream, number)


def parse(payload: memoryview) -> SequenceHeader | Refusal:
    """The header of a message, or the reason why it has none."""
    if len(payload) < HEADER_SIZE:
        return Refusal.SHORT
    magic, version, flags, reserved, stream, number = _LAYOUT.unpack_from(payload)
    if magic != _MAGIC:
        return Refusal.MAGIC
    if version != _VERSION or flags or reserved:
        return Refusal.VERSION
    return SequenceHeader(stream, number)


class Stream:
    """Receive state of one stream. Bit i of `_seen` stands for the number `_highest - i`."""

    __slots__ = ("_far", "_first", "_highest", "_run", "_seen", "duplicates", "gaps", "late", "received")

    def __init__(self, first: int) -> None:
        self._first = self._highest = self._far = first
        self._seen = 1
        self._run = 0
        """Count of numbers outside the window that followed each other; the last of them is `_far`."""
        self.received: int = 1
        self.gaps: int = 0
        self.late: int = 0
        self.duplicates: int = 0

    def take(self, number: int) -> Refusal | tuple[range, ...]:
        """Count a message; return why it is not delivered, or the numbers that it shows to be missing."""
        ahead = number - self._highest
        if not -WINDOW < ahead <= WINDOW:
            return self._take_far(number, ahead)
        if ahead > 0:
            missing = _NONE if ahead == 1 else (range(self._highest + 1, number),)
            self._advance(number, (self._seen << ahead | 1) & _MASK, ahead - 1)
            self.received += 1
            return missing
        if self._seen >> -ahead & 1:
            self.duplicates += 1
            return Refusal.DUPLICATE
        self._seen |= 1 << -ahead
        self.late += 1
        self.gaps -= number > self._first
        self.received += 1
        return _NONE

    def continue_at(self, number: int) -> tuple[Stream, tuple[range, ...]]:
        """Return the same stream from its sender's next queue pair, and the numbers lost in between."""
        stream = Stream(number)
        ahead = number - self._highest
        if not 0 < ahead <= MAX_JUMP:
            return stream, _NONE
        stream.gaps = ahead - 1
        stream._first = self._highest
        return stream, _without_empty(range(self._highest + 1, number))

    def _take_far(self, number: int, ahead: int) -> Refusal | tuple[range, ...]:
        """Judge a number outside the window.

        It may be forged, so the window moves only when others have followed it.

        A message whose step forward is plausible is delivered all the same.
        """
        step = number - self._far
        if self._run and step == 0:
            self.duplicates += 1
            return Refusal.DUPLICATE
        if self._run and -WINDOW < step < 0 < ahead and ahead - step <= MAX_JUMP:  # they changed places
            missing = _without_empty(range(self._highest + 1, number), range(number + 1, self._far))
            self._advance(self._far, 1 << -step | 1, ahead - step - 2)
            self.late += 1
            self.received += 1
            return missing
        self._far = number
        self._run = self._run + 1 if self._run and 0 < step < WINDOW else 1
        plausible = 0 < ahead <= MAX_JUMP
        missing = _NONE
        if plausible and self._run > 1:
            missing = _without_empty(
                range(self._highest + 1, number - step), range(number - step + 1, number)
            )
            self._advance(number, 1 << step | 1, ahead - 2)
        elif self._run >= RESTART_AFTER:
            self._first = number
            self._advance(number, 1, 0)
        elif not plausible:
            return Refusal.JUMP if ahead > 0 else Refusal.OLD
        self.received += 1
        return missing

    def _advance(self, number: int, seen: int, missing: int) -> None:
        self._highest, self._seen, self._run = number, seen, 0
        self.gaps += missing


def _without_empty(*ranges: range) -> tuple[range, ...]:
    return tuple(filter(None, ranges))


class Sources:
    """The streams of a group by sender. A sender is a GID and a queue pair number.

    The sender's device writes both into the headers of a message, and the payload cannot say otherwise. So a
    sender that lies about stream and number harms only its own streams. `forgotten` sums up the streams that
    are not remembered.
    """

    def __init__(self, limit: int = MAX_SOURCES) -> None:
        self._limit = limit
        self._senders: OrderedDict[tuple[Gid, int], OrderedDict[int, Stream]] = OrderedDict()
        self._last: dict[tuple[Gid, int], Stream] = {}
        """(GID, stream id) -> the stream with that id that began last, on whatever queue pair."""
        self.forgotten: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._senders.values()))

    def take(self, source: Gid, qp_num: int, payload: memoryview) -> Refusal | Arrival:
        """Count a message by its header; return what its header shows, or why it is not delivered."""
        header = parse(payload)
        if isinstance(header, Refusal):
            return header
        sender = (source, qp_num)
        streams = self._senders.get(sender)
        if streams is None:
            streams = self._senders[sender] = OrderedDict()
            if len(self._senders) > self._limit:
                (silent, _), ended = self._senders.popitem(last=False)
                for number, stream in ended.items():
                    self._forget(silent, number, stream)
        else:
            self._senders.move_to_end(sender)
        known = streams.get(header.stream)
        if known is not None:
            streams.move_to_end(header.stream)
            found = known.take(header.number)
            return found if isinstance(found, Refusal) else Arrival(*header, found)
        before = self._last.get((source, header.stream))
        if before is None:
            stream, missing = Stream(header.number), _NONE
        else:
            stream, missing = before.continue_at(header.number)
        streams[header.stream] = self._last[source, header.stream] = stream
        if len(streams) > MAX_STREAMS:
            self._forget(source, *streams.popitem(last=False))
        return Arrival(*header, missing)

    def _forget(self, source: Gid, number: int, stream: Stream) -> None:
        if self._last.get((source, number)) is stream:
            del self._last[source, number]
        self.forgotten.update(streams=1, gaps=stream.gaps, late=stream.late, duplicates=stream.duplicates)

    def _streams(self) -> Iterator[tuple[Gid, int, int, Stream]]:
        for (source, qp_num), streams in self._senders.items():
            for number, stream in streams.items():
                yield source, qp_num, number, stream

    def total(self, field: str) -> int:
        """`gaps`, `late` or `duplicates`, summed over all streams, the forgotten ones included."""
        counts: Iterator[int] = (getattr(stream, field) for *_, stream in self._streams())
        return self.forgotten[field] + sum(counts)

    def snapshot(self) -> tuple[SourceStats, ...]:
        return tuple(
            SourceStats(
                source=source,
                qp_num=qp_num,
                stream=number,
                received=stream.received,
                gaps=stream.gaps,
                late=stream.late,
                duplicates=stream.duplicates,
            )
            for source, qp_num, number, stream in self._streams()
        )
