"""The receiving end of a measurement: it takes the messages of the measurement's senders, and nobody else's.

Anybody may send to a group. A stranger's message must neither stand in for one that was lost, nor be timed in
its place; so it is counted apart. Who the senders are is not learnt from messages, which a stranger can send
as well, but told by the process that made their queue pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mcast.api import Message, QueuePair
from mcast.bench.end import BENCH_TIMEOUT, BenchEnd
from mcast.wire.probe import Peer

WINDOW = 256
"""Number of messages sent before the receivers are emptied; they have room for twice as many."""

CHUNK = 64
RECEIVE_TIMEOUT = 1.0
"""Seconds that a receiver waits for a message before it counts as lost."""

HELLO_INTERVAL = 0.2
MAX_HELLOS = round(BENCH_TIMEOUT / HELLO_INTERVAL)


class Receiver:
    """An end that receives from `senders`; `now` is the clock by which its timeouts run.

    `strangers` counts the messages of everybody else.
    """

    def __init__(self, end: BenchEnd, senders: Sequence[Peer], now: Callable[[], float]) -> None:
        self._senders, self._now = senders, now
        self.end: BenchEnd = end
        self.qp: QueuePair = end.qp
        self.strangers: int = 0

    def take(self, count: int, grace: float | None = None) -> int:
        """Receive `count` messages; return how many did not come.

        They have not come when none has within `grace` seconds (None: GRACE), or within as many seconds after
        the first message of a stranger.
        """
        grace = RECEIVE_TIMEOUT if grace is None else grace
        left, end = grace, None
        while left > 0:
            with self.qp.recv(count, left) as batch:
                got = len(batch)
                own = sum([batch.count_from(*sender) for sender in self._senders])
            count -= own
            self.strangers += got - own
            if not (count and got):
                break
            now = self._now()
            end = now + grace if own or end is None else end
            left = end - now
        return count

    def take_one(self, payload: bytes | None = None) -> Message | None:
        """Receive the next message, or the next that is `payload`.

        None if it does not arrive within GRACE seconds, or within GRACE seconds after the first message that
        is not it.
        """
        message, end = self.qp.recv_one(RECEIVE_TIMEOUT), None
        while message is not None:
            known = message[1:3] in self._senders
            if known and (payload is None or message.payload == payload):
                return message
            self.strangers += not known
            now = self._now()
            end = now + RECEIVE_TIMEOUT if end is None else end
            message = self.qp.recv_one(end - now) if now < end else None
        return None

    def receives_one(self) -> bool:
        """Return True if a message comes within HELLO_INTERVAL seconds."""
        return not self.take(1, HELLO_INTERVAL)

    def drain(self) -> None:
        """Drop all messages that wait; not those that come meanwhile, which may never end."""
        for _ in range(2 * WINDOW // CHUNK):
            with self.qp.recv(CHUNK, 0) as batch:
                if not len(batch):
                    return
                self.strangers += len(batch) - sum([batch.count_from(*sender) for sender in self._senders])
