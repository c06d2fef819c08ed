"""The messages of a capture file, and sending them again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import BinaryIO, NamedTuple

from mcast.api import MULTICAST_QPN
from mcast.endpoint.blocking import Endpoint, Sender
from mcast.pcapng.dissect import Skipped, datagram
from mcast.pcapng.reader import read_frames
from mcast.wire.addresses import Gid

_BOUND = 10.0
"""The longest that a send may take, in seconds."""

_BATCH = 64


class Changed(Exception):
    """The file has other messages than when it was first read."""


class Recorded(NamedTuple):
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


class Contents(NamedTuple):
    """What a capture file contains.

    groups   MGID -> how many messages were sent to it
    largest  the size of the largest payload, in bytes
    span     nanoseconds from the first message to the last
    skipped  reason -> how many packets are no message to a group
    """

    groups: Mapping[Gid, int]
    largest: int
    span: int
    skipped: Mapping[str, int]

    @property
    def messages(self) -> int:
        """How many messages the file has in all."""
        return sum(self.groups.values())


def messages_of(file: BinaryIO, skipped: Counter[str] | None = None) -> Iterator[Recorded]:
    """The messages to groups in a capture file, in the file's order; `skipped` counts the other packets by
    reason.

    Raises CaptureError where the file is damaged, after the messages before that place.
    """
    for frame in read_frames(file):
        try:
            found = datagram(frame)
            if found.dest_qp != MULTICAST_QPN or not found.dest.is_multicast:
                raise Skipped("for one queue pair, not for a group")
        except Skipped as why:
            if skipped is not None:
                skipped[str(why)] += 1
        else:
            yield Recorded(frame.t, found.dest, found.payload, found.imm)


def contents_of(file: BinaryIO) -> Contents:
    """Read a whole capture file without sending anything. Raises CaptureError where the file is damaged."""
    groups, skipped = Counter[Gid](), Counter[str]()
    largest = 0
    first = last = None
    for message in messages_of(file, skipped):
        groups[message.group] += 1
        largest = max(largest, len(message.payload))
        first = message.t if first is None else min(first, message.t)
        last = message.t if last is None else max(last, message.t)
    return Contents(groups, largest, (last or 0) - (first or 0), skipped)


def play(
    endpoint: Endpoint, senders: Mapping[Gid, Sender], messages: Iterator[Recorded], speed: float | None
) -> Iterator[int]:
    """Send each message again, over the sender of its group, and wait between messages as long as the
    recording did.

    endpoint  the endpoint of the senders
    senders   MGID -> what sends to it
    messages  the messages, from `messages_of`
    speed     divides the times of the recording; None: send without waiting

    Yields how many messages have been sent, after each batch; messages that are due together form one batch.
    Raises Changed for a message of a group that has no sender, and the errors of `Sender.send_batch`.
    """
    clock, sent = endpoint.backend.now, 0
    batch: list[Recorded] = []
    start: float | None = None
    first = 0

    def due(message: Recorded) -> float:
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


def _send(senders: Mapping[Gid, Sender], batch: list[Recorded]) -> int:
    payloads = [message.payload for message in batch]
    sender = senders.get(batch[0].group)
    if sender is None:
        raise Changed(
            f"the file has changed since it was first read: there was no message to {batch[0].group} then"
        )
    return sender.send_batch(payloads, batch[0].imm, _BOUND)
