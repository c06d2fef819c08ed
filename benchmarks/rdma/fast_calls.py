"""Time that each fast call in C saves: beside the one implementation, on the scripted card (tests/card).

python -m benchmarks.rdma.fast_calls [--rounds 41]
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter as now
from typing import NamedTuple

from benchmarks.rdma.ours import BACK, CHUNK, DATA, DEPTHS, End, null_backend
from mcast.api import Batch, Destination, QueuePair
from tests.card.build import build as build_card
from tests.card.one_implementation import one_implementation
from tests.card.provider import loaded

ADDRESS = "10.0.0.1"
SIZE = 64
"""Bytes of a message."""
MESSAGES = DEPTHS.max_recv_wr
"""Number of messages that are sent, or wait to be received, in one measurement."""
EMPTY = 2000
"""Receives of nothing in one measurement."""

Work = Callable[[QueuePair, Destination], None]
PAYLOADS = [bytes(SIZE)] * CHUNK


class Use(NamedTuple):
    """Use of a call by an application.

    work   does it `times` times
    fills  whether it needs messages that wait
    """

    what: str
    work: Work
    times: int
    fills: bool = True


def exhaust(values: Iterable[object]) -> None:
    """Without a step of Python for each value."""
    deque(values, maxlen=0)


def send(count: int) -> Work:
    payloads = PAYLOADS[:count]

    def work(qp: QueuePair, to: Destination) -> None:
        for _ in range(MESSAGES // count):
            qp.send(to, payloads)

    return work


def send_one(qp: QueuePair, to: Destination) -> None:
    payload = PAYLOADS[0]
    for _ in range(MESSAGES):
        qp.send_one(to, payload)


def poll(qp: QueuePair, to: Destination) -> None:
    for _ in range(EMPTY):
        with qp.recv(CHUNK, 0):
            pass


def poll_one(qp: QueuePair, to: Destination) -> None:
    exhaust(map(qp.recv_one, repeat(0, EMPTY)))


def recv_one(qp: QueuePair, to: Destination) -> None:
    exhaust(map(qp.recv_one, repeat(0, MESSAGES)))


def batches(count: int, use: Callable[[Batch], object] = len) -> Work:
    """Batches in a `with`, as README shows them."""

    def work(qp: QueuePair, to: Destination) -> None:
        for _ in range(MESSAGES // count):
            with qp.recv(count, 0) as batch:
                use(batch)

    return work


def released(count: int) -> Work:
    def work(qp: QueuePair, to: Destination) -> None:
        for _ in range(MESSAGES // count):
            qp.recv(count, 0).release()

    return work


def of_each_size(make: Callable[[int], Work], fills: bool = True) -> tuple[Use, ...]:
    return tuple(Use(f"a batch of {count}", make(count), MESSAGES // count, fills) for count in (CHUNK, 1))


NOTHING = Use("nothing is there", poll, EMPTY, fills=False)
USES: dict[tuple[str, ...], tuple[Use, ...]] = {
    ("send",): of_each_size(send, fills=False),
    ("send_one",): (Use("a message", send_one, MESSAGES, fills=False),),
    ("recv",): (NOTHING, *of_each_size(batches)),
    ("recv_one",): (
        Use("nothing is there", poll_one, EMPTY, fills=False),
        Use("a message", recv_one, MESSAGES),
    ),
    ("__enter__", "__exit__"): (NOTHING, *of_each_size(batches)),
    ("release",): of_each_size(released),
    ("__iter__",): of_each_size(lambda count: batches(count, exhaust)),
}
"""Fast calls -> what is measured with them, and with the one implementation in their place."""


def seconds(use: Use, receiver: End, group: Destination, sender: End, unheard: Destination) -> float:
    """Of one time."""
    if use.fills:
        for _ in range(MESSAGES // CHUNK):
            receiver.qp.send(group, PAYLOADS)
        qp, to = receiver.qp, group
    else:
        qp, to = sender.qp, unheard
    start = now()
    use.work(qp, to)
    taken = now() - start
    assert receiver.qp.counters.recv_free == MESSAGES
    return taken / use.times


def measured(rounds: int) -> Iterator[tuple[tuple[str, ...], str, float, float]]:
    """The calls, what is done with them, and microseconds: by the one implementation, and by C.

    Of all rounds the quickest: what else runs on the host only adds to a time.
    """
    with TemporaryDirectory() as sysfs, loaded(build_card(), Path(sysfs)), null_backend([ADDRESS]) as backend:
        receiver, sender = End(backend, ADDRESS), End(backend, ADDRESS)
        group, unheard = receiver.join(DATA), sender.join(BACK, send_only=True)
        for names, uses in USES.items():
            for use in uses:
                slow, fast = inf, inf
                for _ in range(rounds):
                    fast = min(fast, seconds(use, receiver, group, sender, unheard))
                    with one_implementation(*names):
                        slow = min(slow, seconds(use, receiver, group, sender, unheard))
                yield names, use.what, slow * 1e6, fast * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    given = parser.parse_args()
    print(f"{'fast calls':24} {'what is done':20} {'one impl., us':>13} {'C, us':>8} {'ratio':>6}")
    for names, what, slow, fast in measured(given.rounds):
        print(f"{', '.join(names):24} {what:20} {slow:13.3f} {fast:8.3f} {slow / fast:6.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
