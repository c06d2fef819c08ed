"""How fast a group is: the rate of batches, losses, and the latency of single messages.

`measure` has a sender and its receivers in this process, each with a queue pair of its own. `mcast.bench.mpi`
has them in the processes of an MPI job. Neither ever has more messages in flight than a receiver has room
for, so on a healthy fabric nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from time import perf_counter
from typing import NamedTuple

from mcast.api import Backend, Destination, McastAddress, Message, QpInit, QueuePair, TimedOut
from mcast.bench.end import BOUND, BenchEnd, join_all
from mcast.endpoint.ports import active
from mcast.endpoint.settings import DEFAULTS, Settings

WINDOW = 256
"""How many messages are sent before the receivers are emptied; they have room for twice as many."""

COPIES = 512
"""The most copies in flight to all receivers, because a host queues no more than 1000 for its software
devices."""

CHUNK = 64
PINGS = 2000
GRACE = 1.0
"""How many seconds a receiver waits for a message before it counts as lost."""

KNOCK = 0.2
KNOCKS = round(BOUND / KNOCK)


class Latency(NamedTuple):
    """Percentiles and maximum, in microseconds, of messages sent one by one."""

    p50: float
    p90: float
    p99: float
    max: float


class BenchResult(NamedTuple):
    """`messages` were sent in `seconds`; `lost` counts each copy that a receiver missed."""

    backend: str
    size: int
    receivers: int
    processes: int
    messages: int
    seconds: float
    messages_per_s: float
    deliveries_per_s: float
    lost: int
    latency_us: Latency | None

    def as_dict(self) -> dict[str, object]:
        latency = None if self.latency_us is None else self.latency_us._asdict()
        return {**self._asdict(), "latency_us": latency}


def result(
    backend: str,
    size: int,
    receivers: int,
    processes: int,
    messages: int,
    seconds: float,
    lost: int,
    latencies: Sequence[float],
) -> BenchResult:
    """The result of what was counted; `latencies` are in seconds."""
    rate = messages / seconds if seconds > 0 else 0.0
    delivered = rate * receivers * (1 - lost / (messages * receivers)) if messages else 0.0
    return BenchResult(
        backend, size, receivers, processes, messages, seconds, rate, delivered, lost, percentiles(latencies)
    )


def percentiles(latencies: Sequence[float]) -> Latency | None:
    """The percentiles of latencies in seconds; None when no message arrived."""
    if not latencies:
        return None
    ordered = sorted(latencies)
    at = (ordered[len(ordered) * percent // 100] for percent in (50, 90, 99))
    return Latency(*(round(seconds * 1e6, 3) for seconds in (*at, ordered[-1])))


def window_for(receivers: int) -> int:
    """How many messages may be in flight to that many receivers."""
    return max(1, min(WINDOW, COPIES // receivers))


@contextmanager
def ends(
    backend: Backend, group: McastAddress, receivers: int, settings: Settings = DEFAULTS
) -> Iterator[tuple[BenchEnd, Destination, list[BenchEnd]]]:
    """A sender on the first port and receivers on the others in turn, each of which has received a message of
    the sender.

    Raises TimeoutError, which names a receiver that gets nothing, and ValueError where there is no port.
    """
    ports = [place.address for place in active(backend, group)]
    init = QpInit(max_recv_wr=2 * window_for(receivers))
    with backend.event_channel() as channel:
        seats = islice(cycle(ports[1:] or ports), receivers)
        members = [BenchEnd(channel, address, init, settings) for address in seats]
        join_all(members, group)
        sender = BenchEnd(channel, ports[0], QpInit(max_recv_wr=1), settings)
        destination = sender.join(group, send_only=True)
        wait_until_heard(sender, destination, members)
        yield sender, destination, members


def wait_until_heard(sender: BenchEnd, destination: Destination, members: Sequence[BenchEnd]) -> None:
    """Send empty messages until every receiver has got one, because a switch may learn of a member only after
    a while."""
    deaf = list(members)
    for _ in range(KNOCKS):
        sender.qp.send_one(destination, b"", timeout=BOUND)
        deaf = [member for member in deaf if not hears(member.qp)]
        if not deaf:
            for member in members:
                drain(member.qp)
            return
    raise TimeoutError(f"{deaf[0].address} joined and hears nothing of {sender.address} within {BOUND:g} s")


def hears(qp: QueuePair) -> bool:
    with qp.recv(CHUNK, KNOCK) as batch:
        return len(batch) > 0


def drain(qp: QueuePair) -> None:
    """Drop all messages that wait."""
    waiting = 1
    while waiting:
        with qp.recv(CHUNK, 0) as batch:
            waiting = len(batch)


def take(qp: QueuePair, count: int) -> int:
    """Receive `count` messages; return how many did not come in time."""
    while count:
        with qp.recv(count, GRACE) as batch:
            if not len(batch):
                return count
            count -= len(batch)
    return 0


def send_window(qp: QueuePair, destination: Destination, payloads: list[bytes]) -> None:
    try:
        qp.send(destination, payloads, timeout=BOUND)
    except TimedOut:
        raise TimeoutError(f"the device does not complete {len(payloads)} sends within {BOUND:g} s") from None


def measure(
    backend: Backend,
    group: McastAddress,
    size: int,
    receivers: int,
    seconds: float,
    settings: Settings = DEFAULTS,
) -> BenchResult:
    """Send for `seconds` seconds in batches, then one by one, to `receivers` receivers in this process.

    `size` is in bytes. The settings that have an effect are those that `BenchEnd` names. Raises
    MessageTooLarge if `size` is more than one MTU, and what `ends` raises.
    """
    with ends(backend, group, receivers, settings) as (sender, destination, members):
        payloads = [bytes(size)] * window_for(receivers)
        messages = lost = 0
        start = perf_counter()
        while perf_counter() < start + seconds:
            send_window(sender.qp, destination, payloads)
            messages += len(payloads)
            lost += sum([take(member.qp, len(payloads)) for member in members])
        spent = perf_counter() - start
        latencies = list(one_by_one(sender.qp, destination, [member.qp for member in members], size, seconds))
        lost += sum(heard is None for heard in latencies)
        arrived = [heard for heard in latencies if heard is not None]
        return result(backend.name, size, receivers, 1, messages, spent, lost, arrived)


def one_by_one(
    sender: QueuePair, destination: Destination, receivers: Sequence[QueuePair], size: int, seconds: float
) -> Iterator[float | None]:
    """Seconds from before the send until the last receiver has the message; None when one misses it."""
    payload = bytes(size)
    end = perf_counter() + seconds
    for _ in range(PINGS):
        start = perf_counter()
        sender.send_one(destination, payload)
        heard: list[Message | None] = [receiver.recv_one(GRACE) for receiver in receivers]
        spent = perf_counter() - start
        yield None if None in heard else spent
        if start > end:
            return
