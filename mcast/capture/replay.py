"""The messages of a capture file, and sending them again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import BinaryIO, NamedTuple

from mcast.api import MULTICAST_QPN
from mcast.endpoint.blocking import Endpoint, Sender
from mcast.pcapng.dissect import SkipPacket, capture_point, datagram
from mcast.pcapng.reader import Frame, count_skipped, read_frames
from mcast.wire.addresses import Gid
from mcast.wire.packets import Datagram

__all__ = ["CaptureSummary", "FileChanged", "RecordedMessage", "read_messages", "replay", "summarize"]

_SEND_TIMEOUT = 10.0
"""The longest that a send may take, in seconds."""

_BATCH = 64

COPY_REASON = "a copy of a message, from another interface"
"""Why a packet is left out that `tcpdump -i any` has captured again on its way through the host."""

_COPY_WINDOW_NS = 1_000_000_000
"""Nanoseconds after a message in which its copies are recognised.

Later its 24-bit sequence number may be another message's.
"""

_MAX_SIGHTINGS = 1 << 17
"""Maximum number of messages, and of interfaces that have shown them, that are remembered for copies."""


class FileChanged(Exception):
    """The file has other messages than when it was first read."""


class RecordedMessage(NamedTuple):
    """A message of a capture file.

    t        when the message was captured, in nanoseconds since 1970
    group    the MGID that it was sent to
    payload  its bytes
    imm      the 32-bit immediate, or None
    """

    t: int
    group: Gid
    payload: bytes
    imm: int | None


class CaptureSummary(NamedTuple):
    """Summary of a capture file.

    groups   MGID -> how many messages were sent to it
    largest  the size of the largest payload, in bytes
    span     nanoseconds from the first message to the last
    skipped  reason -> how many packets and blocks of the file are left out
    pause    the longest time between two messages, in nanoseconds
    """

    groups: Mapping[Gid, int]
    largest: int
    span: int
    skipped: Mapping[str, int]
    pause: int = 0

    @property
    def messages(self) -> int:
        """Total number of messages."""
        return sum(self.groups.values())


class _CopyFilter:
    """The messages that were read last, to know their copies.

    A packet that passes through a host, as over a bridge, is captured on each of its interfaces. Such packets
    have one sender, sequence number and payload. A network may also bring a packet twice: then an interface
    has it twice, and it counts twice.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[object, _Sightings] = OrderedDict()
        self._remembered = 0

    def is_copy(self, frame: Frame, message: Datagram) -> bool:
        """Return True if another interface has shown the message as often as this one."""
        key = (message.source, message.src_qp, message.dest, message.psn, message.imm, hash(message.payload))
        place = capture_point(frame)
        shown = self._last.pop(key, None)
        if shown is None or abs(frame.t - shown.t) > _COPY_WINDOW_NS:
            self._remembered -= 0 if shown is None else len(shown.times)
            shown = _Sightings()
        before = shown.most
        self._remembered += place not in shown.times
        shown.add(place, frame.t)
        self._last[key] = shown
        while self._remembered > _MAX_SIGHTINGS:
            self._remembered -= len(self._last.popitem(last=False)[1].times)
        return before > 0 if place is None else shown.times[place] <= before


class _Sightings:
    """Number of times that each interface captured a message, their maximum, and the time of the last one."""

    __slots__ = ("most", "t", "times")

    def __init__(self) -> None:
        self.times = Counter[object]()
        self.most = self.t = 0

    def add(self, place: object, t: int) -> None:
        self.times[place] += 1
        self.most, self.t = max(self.most, self.times[place]), t


def read_messages(
    file: BinaryIO, skipped: Counter[str] | None = None, keep_copies: bool = False
) -> Iterator[RecordedMessage]:
    """Yield the messages to groups in a capture file, in the file's order.

    skipped      counts by reason what else the file has; with it look whether the file is whole
    keep_copies  True: give a message as often as interfaces of the capturing host have shown it

    Raises CaptureError where the file is damaged, after the messages before that place.
    """
    left_out, seen = Counter[str]() if skipped is None else skipped, _CopyFilter()
    for frame in read_frames(file, left_out):
        try:
            found = datagram(frame)
            if found.dest_qp != MULTICAST_QPN or not found.dest.is_multicast:
                raise SkipPacket("for one queue pair, not for a group")
            if not keep_copies and seen.is_copy(frame, found):
                raise SkipPacket(COPY_REASON)
        except SkipPacket as why:
            count_skipped(left_out, str(why))
        else:
            yield RecordedMessage(frame.t, found.dest, found.payload, found.imm)


def summarize(file: BinaryIO, keep_copies: bool = False) -> CaptureSummary:
    """Read a whole capture file without sending anything; `keep_copies` as for `read_messages`.

    Raises CaptureError where the file is damaged. If it only ends in the middle of a packet, `skipped` says
    so.
    """
    groups, skipped = Counter[Gid](), Counter[str]()
    largest = pause = 0
    first = last = None
    for message in read_messages(file, skipped, keep_copies):
        groups[message.group] += 1
        largest = max(largest, len(message.payload))
        pause = max(pause, message.t - (message.t if last is None else last))
        first = message.t if first is None else min(first, message.t)
        last = message.t if last is None else max(last, message.t)
    return CaptureSummary(groups, largest, (last or 0) - (first or 0), skipped, pause)


def replay(
    endpoint: Endpoint,
    senders: Mapping[Gid, Sender],
    messages: Iterator[RecordedMessage],
    speed: float | None,
) -> Iterator[int]:
    """Send each message again, over the sender of its group.

    Wait between messages as long as the recording did.

    endpoint  the endpoint of the senders
    senders   MGID -> what sends to it
    messages  the messages, from `read_messages`
    speed     divides the times of the recording; None: send without waiting

    Yields how many messages have been sent, after each batch; messages that are due together form one batch.
    Raises Changed for a message of a group that has no sender, and the errors of `Sender.send_batch`.
    """
    clock, sent = endpoint.backend.now, 0
    batch: list[RecordedMessage] = []
    start: float | None = None
    first = 0

    def due(message: RecordedMessage) -> float:
        assert start is not None
        return start if speed is None else start + (message.t - first) / 1e9 / speed

    for message in messages:
        if start is None:
            start, first = clock(), message.t
        late = due(message) <= clock()
        alike = bool(batch) and (batch[0].group, batch[0].imm) == (message.group, message.imm)
        if batch and not (late and alike and len(batch) < _BATCH):
            sent += _send(senders, batch)
            yield sent
            batch = []
        while (left := due(message) - clock()) > 0:
            endpoint.next_event(left)  # meanwhile the endpoint answers probes and joins again
        batch.append(message)
    if batch:
        yield sent + _send(senders, batch)


def _send(senders: Mapping[Gid, Sender], batch: list[RecordedMessage]) -> int:
    payloads = [message.payload for message in batch]
    sender = senders.get(batch[0].group)
    if sender is None:
        raise FileChanged(
            f"the file has changed since it was first read: there was no message to {batch[0].group} then"
        )
    return sender.send_batch(payloads, batch[0].imm, _SEND_TIMEOUT)
