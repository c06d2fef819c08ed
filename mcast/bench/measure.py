"""Speed of a group: the rate of batches, losses, and the latency of single messages.

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
from mcast.bench.end import BENCH_TIMEOUT, BenchEnd, join_all
from mcast.bench.intervals import Intervals
from mcast.bench.receiver import MAX_HELLOS, WINDOW, Receiver
from mcast.endpoint.ports import LocalPort, active
from mcast.endpoint.settings import DEFAULTS, Settings

MAX_COPIES = 512
"""Maximum number of copies in flight to all receivers.

A host queues no more than 1000 for its software devices.
"""

MAX_PINGS = 2000


class Latency(NamedTuple):
    """Percentiles and maximum, in microseconds, of messages sent one by one."""

    p50: float
    p90: float
    p99: float
    max: float


class BenchResult(NamedTuple):
    """Result of a measurement.

    backend           name of the provider
    size              bytes of a message
    processes         number of processes: 1, or the ranks
    messages          messages sent in batches
    seconds           time in which they were sent
    deliveries_per_s  copies that all receivers got, per second
    lost              copies that a receiver missed
    strangers         messages of other senders in the group, which count for nothing else
    latency_us        latency of messages sent one by one, in microseconds; None if none arrived
    """

    backend: str
    size: int
    receivers: int
    processes: int
    messages: int
    seconds: float
    messages_per_s: float
    deliveries_per_s: float
    lost: int
    strangers: int
    latency_us: Latency | None

    @property
    def gbits_per_s(self) -> float:
        """Gbit/s of payload that were sent; a receiver that lost nothing got as many."""
        return self.messages_per_s * self.size * 8 / 1e9

    def as_dict(self) -> dict[str, object]:
        latency = None if self.latency_us is None else self.latency_us._asdict()
        return {**self._asdict(), "gbits_per_s": self.gbits_per_s, "latency_us": latency}


def result(
    backend: str,
    size: int,
    receivers: int,
    processes: int,
    messages: int,
    seconds: float,
    lost: int,
    strangers: int,
    latencies: Sequence[float],
) -> BenchResult:
    """The result of what was counted; `latencies` are in seconds."""
    rate = messages / seconds if seconds > 0 else 0.0
    delivered = rate * receivers * (1 - lost / (messages * receivers)) if messages else 0.0
    return BenchResult(
        backend,
        size,
        receivers,
        processes,
        messages,
        seconds,
        rate,
        delivered,
        lost,
        strangers,
        percentiles(latencies),
    )


def percentiles(latencies: Sequence[float]) -> Latency | None:
    """The percentiles of latencies in seconds; None when no message arrived."""
    if not latencies:
        return None
    ordered = sorted(latencies)
    at = (ordered[len(ordered) * percent // 100] for percent in (50, 90, 99))
    return Latency(*(round(seconds * 1e6, 3) for seconds in (*at, ordered[-1])))


def window_for(receivers: int) -> int:
    """Return the number of messages that may be in flight to that many receivers."""
    return max(1, min(WINDOW, MAX_COPIES // receivers))


@contextmanager
def ends(
    backend: Backend,
    group: McastAddress,
    receivers: int,
    settings: Settings = DEFAULTS,
    local_ports: Sequence[LocalPort] = (),
) -> Iterator[tuple[QueuePair, Destination, list[Receiver]]]:
    """Open a sender on the first port and receivers on the others in turn.

    Each receiver has received a message of the sender. `local_ports`: the ports; without them, all that are
    active.

    Raises TimeoutError, which names a receiver that gets nothing, and ValueError where there is no port.
    """
    local_ports = local_ports or active(backend, group)
    init = QpInit(max_recv_wr=2 * window_for(receivers))
    with backend.event_channel() as channel:
        ports = islice(cycle(local_ports[1:] or local_ports), receivers)
        members = [BenchEnd(channel, local_port, init, settings) for local_port in ports]
        join_all(members, group)
        sender = BenchEnd(channel, local_ports[0], QpInit(max_recv_wr=1), settings)
        destination = sender.join(group, send_only=True)
        senders = [sender.sends_as(destination)]
        receiving = [Receiver(member, senders, backend.now) for member in members]
        wait_until_received(sender, destination, receiving)
        yield sender.qp, destination, receiving


def wait_until_received(sender: BenchEnd, destination: Destination, receivers: Sequence[Receiver]) -> None:
    """Send empty messages until every receiver has got one.

    A switch may learn of a member only after a while.
    """
    waiting = list(receivers)
    for _ in range(MAX_HELLOS):
        sender.qp.send_one(destination, b"", timeout=BENCH_TIMEOUT)
        waiting = [receiver for receiver in waiting if not receiver.receives_one()]
        if not waiting:
            for receiver in receivers:
                receiver.drain()
            return
    address = waiting[0].end.address
    raise TimeoutError(
        f"{address} joined, but receives nothing from {sender.address} within {BENCH_TIMEOUT:g} s"
    )


def send_window(qp: QueuePair, destination: Destination, payloads: list[bytes]) -> None:
    try:
        qp.send(destination, payloads, timeout=BENCH_TIMEOUT)
    except TimedOut:
        raise TimeoutError(
            f"the device does not complete {len(payloads)} sends within {BENCH_TIMEOUT:g} s"
        ) from None


def measure(
    backend: Backend,
    group: McastAddress,
    size: int,
    receivers: int,
    seconds: float,
    settings: Settings = DEFAULTS,
    intervals: Intervals | None = None,
    local_ports: Sequence[LocalPort] = (),
) -> BenchResult:
    """Send for `seconds` seconds in batches, then one by one, to `receivers` receivers in this process.

    `intervals` counts the messages that were sent in batches, and the copies that were lost. `local_ports` as
    in `ends`.
    `size` is in bytes. The settings that have an effect are those that `BenchEnd` names. Raises
    MessageTooLarge if `size` is more than one MTU, and what `ends` raises.
    """
    with ends(backend, group, receivers, settings, local_ports) as (sender, destination, receiving):
        payloads = [bytes(size)] * window_for(receivers)
        messages = lost = 0
        start = perf_counter()
        while not messages or perf_counter() < start + seconds:  # a machine that stands still sends, too
            send_window(sender, destination, payloads)
            messages += len(payloads)
            lost += sum([receiver.take(len(payloads)) for receiver in receiving])
            if intervals is not None:
                intervals.update(perf_counter() - start, messages, messages * size, lost)
        spent = perf_counter() - start
        latencies = list(one_by_one(sender, destination, receiving, size, seconds))
        lost += sum(heard is None for heard in latencies)
        strangers = sum(receiver.strangers for receiver in receiving)
        arrived = [heard for heard in latencies if heard is not None]
        return result(backend.name, size, receivers, 1, messages, spent, lost, strangers, arrived)


def one_by_one(
    sender: QueuePair, destination: Destination, receivers: Sequence[Receiver], size: int, seconds: float
) -> Iterator[float | None]:
    """Seconds from before the send until the last receiver has the message; None when one misses it."""
    payload = bytes(size)
    end = perf_counter() + seconds
    for _ in range(MAX_PINGS):
        start = perf_counter()
        sender.send_one(destination, payload)
        heard: list[Message | None] = [receiver.take_one() for receiver in receivers]
        spent = perf_counter() - start
        yield None if None in heard else spent
        if start > end:
            return
