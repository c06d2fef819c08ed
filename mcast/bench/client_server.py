"""A measurement between programs on hosts of their own: one sends, and each receiver counts for itself.

Nothing but a wanted rate holds the sender back. What a receiver is too slow for is lost, and the receiver
knows the number of lost messages by their sequence headers.
"""

from __future__ import annotations

from itertools import chain
from time import sleep

from mcast.api import Backend, McastAddress
from mcast.bench.end import BENCH_TIMEOUT
from mcast.bench.intervals import IntervalResult, Intervals
from mcast.bench.ping import PingedMember, joined, ping_all
from mcast.bench.receiver import HELLO_INTERVAL, MAX_HELLOS
from mcast.endpoint.blocking import Endpoint
from mcast.endpoint.ports import LocalPort
from mcast.endpoint.settings import DEFAULTS, Settings
from mcast.wire.probe import PROBE_SIZE

END_MESSAGE = b"mcast bench: that was all"
"""The payload that ends a measurement."""

_END_REPEATS, _PAUSE = 10, 0.02
"""Number of end messages, and the seconds between two, because a message may be lost."""

_BATCH = 64
_PINGS, _GAP = 50, 0.01
"""Number of pings of each receiver, and the seconds between two."""

IDLE_TIMEOUT = 5.0
"""Seconds without a message that end a measurement whose end messages were lost."""


def receivers_of(
    backend: Backend, local_port: LocalPort, group: McastAddress, wanted: int, settings: Settings = DEFAULTS
) -> tuple[PingedMember, ...]:
    """Wait until so many members of the group answer, and return them with their round trips.

    Raises TimeoutError, which says how many answered, after BOUND seconds.
    """
    with joined(backend, local_port, group, 1, send_only=True, settings=settings) as pairs:
        count = 0
        for _ in range(MAX_HELLOS):
            count = len(ping_all(pairs, 2, PROBE_SIZE, HELLO_INTERVAL, HELLO_INTERVAL).members)
            if count >= wanted:
                return ping_all(pairs, _PINGS, PROBE_SIZE, _GAP, HELLO_INTERVAL).members
    raise TimeoutError(
        f"{count} of {wanted} receivers answered in {group}: start `mcast bench --server` on them"
    )


def send(
    endpoint: Endpoint,
    group: McastAddress,
    size: int,
    seconds: float,
    rate: float | None,
    intervals: Intervals,
) -> IntervalResult:
    """Send messages of `size` bytes for so many seconds, at `rate` bits a second or as fast as it goes.

    Returns what was sent. Raises MessageTooLarge if `size` and the sequence header are more than one MTU.
    """
    now, payloads, sent = endpoint.backend.now, [bytes(size)] * _BATCH, 0
    with endpoint.sender(group, timeout=BENCH_TIMEOUT) as sender:
        start = now()
        while (spent := now() - start) < seconds or not sent:
            due = sent * size * 8 / rate if rate else 0.0
            if due > spent:
                sleep(min(due, seconds) - spent)
                continue
            sent += sender.send_batch(payloads, timeout=BENCH_TIMEOUT)
            intervals.update(now() - start, sent, sent * size, None)
        total = IntervalResult(0.0, now() - start, sent, sent * size, None)
        for _ in range(_END_REPEATS):
            sender.send(END_MESSAGE, timeout=BENCH_TIMEOUT)
            sleep(_PAUSE)
    return total


def receive(endpoint: Endpoint, group: McastAddress, intervals: Intervals) -> IntervalResult:
    """Receive what the next `send` sends to the group, and return what came; the endpoint must be a member.

    Ends with the sender, or after SILENCE. Time begins with the first message.
    """
    now, messages, size, over, last = endpoint.backend.now, 0, 0, False, 0.0
    first = endpoint.recv_batch(_BATCH)
    start = now()
    for batch in chain([first], endpoint.batches(IDLE_TIMEOUT, _BATCH)):
        with batch:
            for message in batch:
                over = over or message.payload == END_MESSAGE
                if not over:
                    messages += 1
                    size += len(message.payload)
        if over:
            break
        last = now() - start
        if intervals.due(last):
            intervals.update(last, messages, size, endpoint.stats().gaps)
    return IntervalResult(0.0, last, messages, size, endpoint.stats().gaps)
