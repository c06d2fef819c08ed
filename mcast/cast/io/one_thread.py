"""Transfer of one object between a sender and receivers on one host, in one thread (`mcast demo`).

Each end has a membership and a session. `run` resumes the sessions in turn and waits only while none of them
has anything to do. An end accepts messages of the other ends only: strangers in the group change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import cycle, islice
from math import inf
from typing import Any, Generic, TypeVar

from mcast.api import Backend, Batch, CopiedBatch, McastAddress
from mcast.cast.io.driver import (
    DEFAULT_MEMORY,
    DEFAULT_RECEIVE_DEPTH,
    IO_TIMEOUT,
    MAX_RX_BATCH,
    SessionContext,
    SessionSteps,
    exclusive,
    send_all,
)
from mcast.cast.io.files import NullSink
from mcast.cast.io.receiving import Received, ReceivingSession
from mcast.cast.io.sending import ObjectReport, Progress, SendingSession
from mcast.cast.io.sources import Sendable
from mcast.cast.protocol.members import MAX_MEMBERS_PER_ADDRESS
from mcast.cast.protocol.sender import ReceiverReport
from mcast.cast.protocol.strategy import all_receivers
from mcast.endpoint.blocking import Membership, open_endpoint
from mcast.endpoint.ports import LocalPort, active
from mcast.endpoint.settings import DEFAULTS, Settings
from mcast.endpoint.waiting import Step
from mcast.wire.addresses import ZERO_GID
from mcast.wire.probe import Peer

_MAX_WAIT = 0.01
"""Maximum time to wait for messages of one end while the others wait, too, in seconds."""

T = TypeVar("T")


class End(Generic[T]):
    """One end of a transfer: a session that is resumed when a message arrives or its timer expires."""

    def __init__(self, group: Membership, context: SessionContext, steps: SessionSteps[T]) -> None:
        self.group: Membership = group
        self.context: SessionContext = context
        self.result: T | None = None
        """Result of the session; None until it is finished."""
        self.finished: bool = False
        endpoint = group.endpoint
        self.peer: Peer = Peer(
            endpoint.port.gids.get(group.destination.sgid_index, ZERO_GID), endpoint.qp_num
        )
        self._steps = steps
        self._step: Step | None = None

    @property
    def idle(self) -> float:
        """Seconds until this end's timer expires."""
        until = None if self._step is None else self._step.until
        return 0.0 if until is None else max(0.0, until - self.context.now())

    def step(self, peers: Container[Peer], timeout: float = 0.0) -> bool:
        """Process messages of these peers, and send; wait at most `timeout` seconds for messages.

        Returns False if there was nothing to do.
        """
        with (
            self.group._endpoint.recv_batch(MAX_RX_BATCH, timeout) as batch,
            _sent_by(peers, batch) as received,
        ):
            if not received and self.idle:
                return len(batch) > 0
            try:
                self._step = next(self._steps) if self._step is None else self._steps.send(received)
            except StopIteration as done:
                self.result, self.finished = done.value, True
                return True
        for messages in self._step.post:
            send_all(self.group, messages)
        return True


def _sent_by(peers: Container[Peer], batch: Batch) -> Batch:
    """The messages of these peers; the batch itself if it has no other."""
    if all(Peer(series.source, series.src_qp) in peers for series in batch.series()):
        return batch
    return CopiedBatch([one for one in batch if Peer(one.source, one.src_qp) in peers])


class SendingEnd(End[ObjectReport]):
    """Sender of one object to `receivers` receivers, for which it waits `wait` seconds."""

    def __init__(
        self,
        group: Membership,
        context: SessionContext,
        data: Sendable,
        receivers: int,
        wait: float,
        peer_timeout: float,
        progress: Callable[[Progress], object],
    ) -> None:
        self._sending = SendingSession(context, DEFAULT_MEMORY, inf, peer_timeout, None, progress)
        super().__init__(group, context, self._send(data, receivers, wait))

    def _send(self, data: Sendable, receivers: int, wait: float) -> SessionSteps[ObjectReport]:
        yield from self._sending.wait_for_receivers(receivers, wait)
        report = yield from self._sending.send(data, all_receivers(), "", b"")
        yield from self._sending.close("")
        return report

    def has_member(self, receiver: ReceivingEnd) -> bool:
        """Return True if the receiver has joined the sender's session."""
        return self._sending.core.members.get(receiver.context.number) is not None

    def report_of(self, receiver: ReceivingEnd) -> ReceiverReport | None:
        """Return the receiver's part of the sender's report; None if the report does not list it."""
        reports = () if self.result is None else self.result.receivers
        return next((report for report in reports if report.number == receiver.context.number), None)


class ReceivingEnd(End[None]):
    """Receiver of one object that stores its digest, not its bytes."""

    def __init__(self, group: Membership, context: SessionContext, peer_timeout: float) -> None:
        self.received: Received | None = None
        """The object; None until it is complete."""
        receiving = ReceivingSession(
            context, NullSink(), lambda _: None, 0, DEFAULT_MEMORY, peer_timeout, None, None, one_session=True
        )
        super().__init__(group, context, self._receive(receiving))

    def _receive(self, receiving: ReceivingSession) -> SessionSteps[None]:
        while (received := (yield from receiving.next(None))) is not None:
            self.received = received


@contextmanager
def ends(
    backend: Backend,
    group: McastAddress,
    receivers: int,
    data: Sendable,
    wait: float,
    peer_timeout: float,
    settings: Settings = DEFAULTS,
    progress: Callable[[Progress], object] = lambda _: None,
) -> Iterator[tuple[SendingEnd, list[ReceivingEnd]]]:
    """Open a sender on the first active port, and receivers on the other ports in turn.

    group         address that all ends join
    receivers     number of receivers
    data          the object
    wait          time for all receivers to join the session, in seconds
    peer_timeout  time after which a silent end is given up, in seconds
    progress      called when the sender has made progress

    Raises ValueError if there are too few ports, or a port does not support the settings.
    """
    with ExitStack() as stack:
        members = stack.enter_context(_memberships(backend, group, receivers, settings))
        contexts = [stack.enter_context(exclusive(member, "mcast.cast")) for member in members]
        sender = SendingEnd(members[0], contexts[0], data, receivers, wait, peer_timeout, progress)
        yield (
            sender,
            [ReceivingEnd(*both, peer_timeout) for both in zip(members[1:], contexts[1:], strict=True)],
        )


@contextmanager
def _memberships(
    backend: Backend, group: McastAddress, receivers: int, settings: Settings
) -> Iterator[list[Membership]]:
    ports = active(backend, group)
    receiver_ports = ports[1:] or ports
    if receivers > (limit := MAX_MEMBERS_PER_ADDRESS * len(receiver_ports)):
        raise ValueError(f"{receivers} receivers are too many for the ports here: at most {limit}")
    # At the beginning all receivers join at once, and each receives the messages of all others.
    deep = replace(settings, receive_depth=max(DEFAULT_RECEIVE_DEPTH, settings.receive_depth) + 4 * receivers)
    with ExitStack() as stack:

        def join(port: LocalPort) -> Membership:
            endpoint = stack.enter_context(open_endpoint(backend, port.address, **vars(deep)))
            return endpoint.join(group, timeout=IO_TIMEOUT)

        yield [join(port) for port in (ports[0], *islice(cycle(receiver_ports), receivers))]


def run(sender: SendingEnd, receivers: Sequence[ReceivingEnd], watch: Callable[[], None]) -> None:
    """Run all ends until they are finished; the report is in `sender.result`.

    watch  called after each round of steps

    Raises TimedOut if the receivers do not join the session in time.
    """
    ends: list[End[Any]] = [sender, *receivers]
    peers = {end.peer for end in ends}
    while unfinished := [end for end in ends if not end.finished]:
        acted = [end.step(peers) for end in unfinished]
        if not any(acted):
            unfinished[0].step(peers, min(_MAX_WAIT, *(end.idle for end in unfinished)))
        watch()
