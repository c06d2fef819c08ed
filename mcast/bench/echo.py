"""Pings of a group: which member answered how often and how fast, and what an answering member received.

No I/O.

A ping is a probe (`mcast.wire.probe`) that asks for an answer, in a probe's own length or padded to a
longer one; its answer is an echo of the same length. Every endpoint of mcast that has joined to
receive answers pings of a probe's own length, `mcast ping --answer` answers pings of any length. mckey
answers nothing: it sends messages without content, and its receiver counts messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from math import sqrt
from typing import NamedTuple

from mcast.wire.addresses import ZERO_GID, Gid
from mcast.wire.probe import PROBE_SIZE, Kind, Peer, Probe, parse

_NUMBERS = 1 << 32

MAX_SOURCES = 10_000
"""Maximum number of queue pairs that are counted apart.

All others share one row, so that invented ones fill no memory.
"""

ALL_OTHERS = Peer(ZERO_GID, 0)
"""The row of the queue pairs beyond MAX_SOURCES."""


def _row(table: Collection[Peer], source: Peer) -> Peer:
    return source if source in table or len(table) < MAX_SOURCES else ALL_OTHERS


def padded(probe: Probe, size: int) -> bytes:
    """The probe as a message of `size` bytes, at least PROBE_SIZE."""
    return probe.pack(size)


def parsed(payload: memoryview) -> Probe | None:
    """The probe at the beginning of a message, padded or not; None if there is none."""
    return parse(payload[:PROBE_SIZE])


class Times(NamedTuple):
    """Round-trip times.

    mdev  standard deviation, as in ping(8)
    """

    min: float
    avg: float
    max: float
    mdev: float


class AnsweringMember:
    """A member that has answered."""

    def __init__(self) -> None:
        self.answers: int = 0
        self.doubles = 0
        self._trips: list[float] = []

    def answered(self, trip: float) -> None:
        """Count an answer that came `trip` seconds after its ping."""
        self.answers += 1
        self._trips.append(trip)

    @property
    def times(self) -> Times:
        """The times of all answers, in seconds. There must be at least one answer."""
        trips = self._trips
        avg = sum(trips) / len(trips)
        return Times(min(trips), avg, max(trips), sqrt(sum((trip - avg) ** 2 for trip in trips) / len(trips)))


class Pinger:
    """Counts pings and their answers on some queue pairs.

    gids       the GIDs that these queue pairs send from
    qps        the numbers of these queue pairs
    first      the number of the first ping, so that answers to pings of an earlier program are not counted
    send_only  True if the queue pairs do not receive from the group, and want answers sent to them alone
    """

    def __init__(self, gids: Collection[Gid], qps: Collection[int], first: int, send_only: bool) -> None:
        self.members: dict[Peer, AnsweringMember] = {}
        self.sent: int = 0
        self.others: Counter[Peer] = Counter()
        self._gids, self._qps, self._first = gids, qps, first
        self._kind = Kind.UNICAST_REQUEST if send_only else Kind.REQUEST
        self._sent_at: dict[tuple[int, int], float] = {}
        self._seen: set[tuple[int, int, Peer]] = set()

    def ask(self, seq: int, qp_num: int, gid: Gid, now: float) -> Probe:
        """The ping `seq` (from 1) of a queue pair, which is about to be sent."""
        self.sent += 1
        self._sent_at[seq, qp_num] = now
        return Probe(self._kind, (self._first + seq) % _NUMBERS, Peer(gid, qp_num))

    def on_message(self, payload: memoryview, source: Peer, now: float) -> tuple[int, float] | None:
        """Take a received message.

        For the first answer of a member to a ping: the ping's `seq`, and the round trip in seconds.
        """
        probe = parsed(payload)
        if probe is None:
            self.others[_row(self.others, source)] += 1
            return None
        seq = (probe.number - self._first) % _NUMBERS
        qp_num = probe.requester.qp_num
        sent_at = self._sent_at.get((seq, qp_num))
        if probe.kind is not Kind.REPLY or probe.requester.gid not in self._gids or sent_at is None:
            return None  # an answer to another program's ping
        source = _row(self.members, source)
        member = self.members.setdefault(source, AnsweringMember())
        if (seq, qp_num, source) in self._seen:
            member.doubles += 1
            return None
        self._seen.add((seq, qp_num, source))
        member.answered(now - sent_at)
        return seq, now - sent_at

    def answered_by_all(self, seq: int) -> bool:
        """Return True if every member that ever answered has answered this ping, on every queue pair."""
        return bool(self.members) and all(
            (seq, qp_num, member) in self._seen for qp_num in self._qps for member in self.members
        )

    def loss(self, member: AnsweringMember) -> float:
        """The share of pings that the member has not answered, 0..1."""
        return 1 - member.answers / self.sent if self.sent else 0.0


class ReceivedFrom:
    """Counters of the messages that an answering member received from one queue pair."""

    def __init__(self) -> None:
        self.pings = self.unanswered = self.messages = 0
        self.smallest: int = 1 << 16
        self.largest: int = 0


class Answerer:
    """Answers pings, and counts all messages by their sender."""

    def __init__(self) -> None:
        self.heard: dict[Peer, ReceivedFrom] = {}
        self.count: int = 0

    def on_message(self, payload: memoryview, source: Peer) -> tuple[Probe, bool] | None:
        """Take a received message. For a ping: its echo, and whether that goes to the asker alone."""
        probe = parsed(payload)
        if probe is not None and probe.kind not in (Kind.REQUEST, Kind.UNICAST_REQUEST):
            return None  # another member's answer, or the probe of a device's loopback
        heard = self.heard.setdefault(_row(self.heard, source), ReceivedFrom())
        self.count += 1
        heard.smallest = min(heard.smallest, len(payload))
        heard.largest = max(heard.largest, len(payload))
        if probe is None:
            heard.messages += 1
            return None
        heard.pings += 1
        return Probe(Kind.REPLY, probe.number, source), probe.kind is Kind.UNICAST_REQUEST

    def failed(self, source: Peer) -> None:
        """Count that the echo to a ping of this source could not be sent."""
        self.heard[_row(self.heard, source)].unanswered += 1
