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
from mcast.bench.parts import Intervals
from mcast.bench.receiver import KNOCKS, WINDOW, Receiver
from mcast.endpoint.ports import Place, active
from mcast.endpoint.settings import DEFAULTS, Settings

COPIES = 512
"""The most copies in flight to all receivers, because a host queues no more than 1000 for its software
devices."""

PINGS = 2000


class Latency(NamedTuple):
    """Percentiles and maximum, in microseconds, of messages sent one by one."""

    p50: float
    p90: float
    p99: float
    max: float


class BenchResult(NamedTuple):
    """`messages` were sent in `seconds`; `lost` counts each copy that a receiver missed.

    `strangers` counts the messages that the receivers got from others in the group; they count for nothing
    else.
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
        """Gbit/s of payload that were sent in batches; a receiver that lost nothing got as many."""
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
    """How many messages may be in flight to that many receivers."""
    return max(1, min(WINDOW, COPIES // receivers))


@contextmanager
def ends(
    backend: Backend,
    group: McastAddress,
    receivers: int,
    settings: Settings = DEFAULTS,
    places: Sequence[Place] = (),
) -> Iterator[tuple[QueuePair, Destination, list[Receiver]]]:
    """A sender on the first port and receivers on the others in turn, each of which has received a message of
    the sender. `places`: the ports; without them, all that are active.

    Raises TimeoutError, which names a receiver that gets nothing, and ValueError where there is no port.
    """
    places = places or active(backend, group)
    init = QpInit(max_recv_wr=2 * window_for(receivers))
    with backend.event_channel() as channel:
        seats = islice(cycle(places[1:] or places), receivers)
        members = [BenchEnd(channel, place, init, settings) for place in seats]
        join_all(members, group)
        sender = BenchEnd(channel, places[0], QpInit(max_recv_wr=1), settings)
        destination = sender.join(group, send_only=True)
        senders = [sender.sends_as(destination)]
        hearers = [Receiver(member, senders, backend.now) for member in members]
        wait_until_heard(sender, destination, hearers)
        yield sender.qp, destination, hearers


def wait_until_heard(sender: BenchEnd, destination: Destination, receivers: Sequence[Receiver]) -> None:
    """Send empty messages until every receiver has got one, because a switch may learn of a member only after
    a while."""
    deaf = list(receivers)
    for _ in range(KNOCKS):
        sender.qp.send_one(destination, b"", timeout=BOUND)
        deaf = [receiver for receiver in deaf if not receiver.hears()]
        if not deaf:
            for receiver in receivers:
                receiver.drain()
            return
    address = deaf[0].end.address
    raise TimeoutError(f"{address} joined and hears nothing of {sender.address} within {BOUND:g} s")


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
    parts: Intervals | None = None,
    places: Sequence[Place] = (),
) -> BenchResult:
    """Send for `seconds` seconds in batches, then one by one, to `receivers` receivers in this process.

    `parts` is told of the batches what was sent, and how many copies were lost. `places` as in `ends`.
    `size` is in bytes. The settings that have an effect are those that `BenchEnd` names. Raises
    MessageTooLarge if `size` is more than one MTU, and what `ends` raises.
    """
    with ends(backend, group, receivers, settings, places) as (sender, destination, hearers):
        payloads = [bytes(size)] * window_for(receivers)
        messages = lost = 0
        start = perf_counter()
        while not messages or perf_counter() < start + seconds:  # a machine that stands still sends, too
            send_window(sender, destination, payloads)
            messages += len(payloads)
            lost += sum([receiver.take(len(payloads)) for receiver in hearers])
            if parts is not None:
                parts.look(perf_counter() - start, messages, messages * size, lost)
        spent = perf_counter() - start
        latencies = list(one_by_one(sender, destination, hearers, size, seconds))
        lost += sum(heard is None for heard in latencies)
        strangers = sum(receiver.strangers for receiver in hearers)
        arrived = [heard for heard in latencies if heard is not None]
        return result(backend.name, size, receivers, 1, messages, spent, lost, strangers, arrived)


def one_by_one(
    sender: QueuePair, destination: Destination, receivers: Sequence[Receiver], size: int, seconds: float
) -> Iterator[float | None]:
    """Seconds from before the send until the last receiver has the message; None when one misses it."""
    payload = bytes(size)
    end = perf_counter() + seconds
    for _ in range(PINGS):
        start = perf_counter()
        sender.send_one(destination, payload)
        heard: list[Message | None] = [receiver.take_one() for receiver in receivers]
        spent = perf_counter() - start
        yield None if None in heard else spent
        if start > end:
            return
