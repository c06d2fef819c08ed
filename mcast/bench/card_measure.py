"""Measurements of a card report besides the clauses, on the ports of a provider's test bed.

Each measurement stands alone: one that cannot be made says why, and the others go on. Messages carry a mark
of this run, because anybody may send to a group.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import IPv4Address
from time import perf_counter
from typing import NamedTuple, TypeVar

from mcast.api import (
    CmId,
    Destination,
    EventChannel,
    JoinAttrEx,
    McastAddress,
    McastError,
    QpInit,
    QueuePair,
    Testbed,
)
from mcast.bench.card_report import (
    Flood,
    Flooding,
    JoinLeave,
    Loopback,
    Measurement,
    Rate,
    RateOfSize,
    spread,
)
from mcast.bench.measure import measure
from mcast.endpoint.ports import LocalPort

DELIVERY_TIMEOUT = 30.0
"""Seconds that a join may take, or the fabric to deliver a group."""
QUIET = 0.5
"""Seconds without a message after which no more is expected."""
MESSAGES = 50
"""Messages that a measurement of delivery sends; a receive queue holds more."""
JOINS = 100
"""Joins that are timed, as far as JOIN_SECONDS allow."""
JOIN_SECONDS = 20.0
RUNS = 5
"""Runs of each size of message, of RUN_SECONDS each in batches, and again one by one."""
RUN_SECONDS = 0.3
SIZES = (64, 1024)
"""Bytes of payload; the largest that the port carries is measured, too."""

_groups = itertools.count(1)
_MARK = os.urandom(8)
_STEP = 0.02

M = TypeVar("M", bound=Measurement)


class Measurements(NamedTuple):
    """Everything that is measured."""

    loopback: Loopback
    join_leave: JoinLeave
    flooding: Flooding
    rate: Rate


def measure_card(bed: Testbed) -> Measurements:
    """Measure on the ports of the bed; this takes some 10 s, and several times that on an emulated host."""
    return Measurements(
        _made(Loopback, lambda: _loopback(bed)),
        _made(JoinLeave, lambda: _join_leave(bed)),
        _made(Flooding, lambda: _flooding(bed)),
        _made(Rate, lambda: _rate(bed)),
    )


def _made(kind: type[M], make: Callable[[], M]) -> M:
    try:
        return make()
    except (McastError, OSError, ValueError) as error:  # TimeoutError is an OSError
        return kind(outcome="failed", reason=f"{type(error).__name__}: {error}".partition("\n")[0])


class _End:
    """A queue pair on a port of the bed."""

    def __init__(self, bed: Testbed, channel: EventChannel, port: IPv4Address, block: bool = False) -> None:
        self.bed, self.channel, self.port = bed, channel, port
        self.id: CmId = channel.create_id()
        self.id.bind_addr(port)
        init = QpInit(max_recv_wr=2 * MESSAGES, block_loopback=block)
        self.qp: QueuePair = self.id.create_qp(init)

    def join(self, group: McastAddress, send_only: bool = False) -> Destination:
        """Join, and wait until the fabric delivers here, or takes messages from here."""
        make = JoinAttrEx.send_only if send_only else JoinAttrEx.full_member
        self.id.join_multicast_ex(make(group))
        event = self.channel.get_event(DELIVERY_TIMEOUT)
        if event is None:
            raise TimeoutError(f"a join has no outcome within {DELIVERY_TIMEOUT:g} s")
        ud = event.check().ud
        assert ud is not None
        gid, observer = ud.destination.gid, self.bed.observer
        ready = observer.forwards_from if send_only else observer.delivers_to
        for _ in range(int(DELIVERY_TIMEOUT / _STEP)):
            if ready(self.port, gid):
                return ud.destination
            self.channel.get_event(_STEP)
        raise TimeoutError(f"the fabric does not carry a group {DELIVERY_TIMEOUT:g} s after it was joined")

    def send(self, to: Destination) -> None:
        """Send MESSAGES numbered messages, in batches that no queue of a host is too short for."""
        payloads = [_MARK + number.to_bytes(4) for number in range(MESSAGES)]
        for start in range(0, MESSAGES, 10):
            self.qp.send(to, payloads[start : start + 10], timeout=DELIVERY_TIMEOUT)
        self.qp.flush(DELIVERY_TIMEOUT)

    def count(self) -> int:
        """Return how many messages of this run come, until none has come for QUIET seconds."""
        found = 0
        while True:
            with self.qp.recv(MESSAGES, QUIET) as batch:
                if not len(batch):
                    return found
                found += sum(bytes(message.payload[: len(_MARK)]) == _MARK for message in batch)


@contextmanager
def _ends(bed: Testbed) -> Iterator[Callable[..., _End]]:
    """Make ends with a channel of their own each, which are freed at the end."""
    with ExitStack() as stack:

        def make(port: IPv4Address, block: bool = False) -> _End:
            return _End(bed, stack.enter_context(bed.backend.event_channel()), port, block)

        yield make


def _new_group() -> McastAddress:
    """A group that the suite does not use."""
    return McastAddress.of(IPv4Address("239.65.0.0") + next(_groups))


def _loopback(bed: Testbed) -> Loopback:
    """Send from a queue pair that asks for blocking, beside one on the same port that does not."""
    with _ends(bed) as make:
        try:
            own = make(bed.ports[0], block=True)
        except McastError as error:
            return Loopback(outcome="measured", block="refused", reason=str(error).partition("\n")[0])
        neighbour, group = make(bed.ports[0]), _new_group()
        neighbour.join(group)
        own.send(own.join(group))
        back, beside = own.count(), neighbour.count()
    found = Loopback(
        outcome="measured",
        block="ignored" if back else "honoured",
        sent=MESSAGES,
        own=back,
        neighbour=beside,
    )
    if back or beside:
        return found
    reason = "neither queue pair of the port got a message, so nothing follows from that"
    return found.model_copy(update={"outcome": "failed", "block": None, "reason": reason})


def _join_leave(bed: Testbed) -> JoinLeave:
    joins, leaves, refused, why = list[float](), list[float](), 0, ""
    with _ends(bed) as make:
        end, stop = make(bed.ports[0]), perf_counter() + JOIN_SECONDS
        for _ in range(JOINS):
            group, start = _new_group(), perf_counter()
            end.id.join_multicast_ex(JoinAttrEx.full_member(group))
            event = end.channel.get_event(DELIVERY_TIMEOUT)
            spent = perf_counter() - start
            try:
                if event is None:
                    raise TimeoutError(f"a join has no outcome within {DELIVERY_TIMEOUT:g} s")
                event.check()
                joins.append(spent * 1e6)
            except (McastError, TimeoutError) as error:
                refused, why = refused + 1, why or str(error).partition("\n")[0]
            start = perf_counter()
            end.id.leave_multicast(group)
            leaves.append((perf_counter() - start) * 1e6)
            if perf_counter() > stop:
                break
    if not joins:
        return JoinLeave(outcome="failed", reason=why, refused=refused)
    return JoinLeave(
        outcome="measured", reason=why, join=spread(joins, "us"), leave=spread(leaves, "us"), refused=refused
    )


def _flooding(bed: Testbed) -> Flooding:
    """Attach a queue pair of the second port to a group that its port has not joined.

    The control comes last: as a member the same port has to hear the sender, or the rest shows nothing.
    """
    if len(bed.ports) < 2:
        return Flooding(outcome="not-applicable", reason="there is one port, and this needs two")
    here, other, third = bed.ports[0], bed.ports[1], bed.ports[2 % len(bed.ports)]
    without = _flood(bed, here, other, None)
    with_member = _flood(bed, here, other, third)
    with _ends(bed) as make:
        sender, member, group = make(here), make(other), _new_group()
        member.join(group)
        sender.send(sender.join(group, send_only=True))
        heard = member.count()
    found = Flooding(
        outcome="measured",
        flooded=bool(without.non_member or with_member.non_member),
        with_member=with_member,
        without_member=without,
        member_sent=MESSAGES,
        member=heard,
    )
    if heard:
        return found
    reason = "the second port gets nothing as a member either, so nothing follows from the rest"
    return found.model_copy(update={"outcome": "failed", "flooded": None, "reason": reason})


def _flood(bed: Testbed, here: IPv4Address, other: IPv4Address, member: IPv4Address | None) -> Flood:
    """Count what a queue pair of `other` gets that is attached without a join."""
    with _ends(bed) as make:
        sender, outsider, group = make(here), make(other), _new_group()
        if member is not None:
            make(member).join(group)
        to = sender.join(group, send_only=True)
        outsider.qp.attach_mcast(to.gid, to.dlid)
        sender.send(to)
        heard = outsider.count()
        outsider.qp.detach_mcast(to.gid, to.dlid)
    return Flood(sent=MESSAGES, non_member=heard)


def _rate(bed: Testbed) -> Rate:
    local_ports = [_local_port(bed, port) for port in bed.ports[:2]]
    largest = local_ports[0].port.active_mtu
    smallest = min(local_port.port.active_mtu for local_port in local_ports)
    sizes = sorted({*(size for size in SIZES if size <= smallest), min(largest, smallest)})
    return Rate(
        outcome="measured",
        receiver="second port" if len(local_ports) > 1 else "same port",
        sizes=tuple(_rate_of(bed, local_ports, size) for size in sizes),
    )


def _rate_of(bed: Testbed, local_ports: list[LocalPort], size: int) -> RateOfSize:
    runs = [
        measure(bed.backend, _new_group(), size, 1, RUN_SECONDS, local_ports=local_ports) for _ in range(RUNS)
    ]
    latencies = [run.latency_us.p50 for run in runs if run.latency_us is not None]
    if not latencies:
        raise TimeoutError(f"no message of {size} bytes arrives one by one")
    return RateOfSize(
        size=size,
        messages_per_s=spread([run.messages_per_s for run in runs], "1/s"),
        latency=spread(latencies, "us"),
        sent=sum(run.messages for run in runs),
        lost=sum(run.lost for run in runs),
    )


def _local_port(bed: Testbed, port: IPv4Address) -> LocalPort:
    """The port of the bed with that address."""
    return next(
        LocalPort(device, info, port)
        for device in bed.backend.devices()
        for info in device.ports
        if port in info.addresses
    )
