"""A sender and its receivers on the ports of one host, in one thread: each has its turns.

They ignore the messages of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import cycle, islice
from math import inf
from typing import Any, Generic, TypeVar

from mcast.api import Backend, McastAddress
from mcast.cast.io.driver import (
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
from mcast.cast.io.session import DEFAULT_MEMORY
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
"""The longest that all ends wait for one of them, in seconds."""

T = TypeVar("T")


class End(Generic[T]):
    """One end, which has its turns when it hears something, and when it wants to speak."""

    def __init__(self, group: Membership, context: SessionContext, steps: SessionSteps[T]) -> None:
        self.group: Membership = group
        self.context: SessionContext = context
        self.result: T | None = None
        """What the turns return; None until then."""
        self.finished: bool = False
        endpoint = group.endpoint
        self.peer: Peer = Peer(
            endpoint.port.gids.get(group.destination.sgid_index, ZERO_GID), endpoint.qp_num
        )
        self._steps = steps
        self._step: Step | None = None

    @property
    def idle(self) -> float:
        """How many seconds this end has nothing to say unless a message comes."""
        until = None if self._step is None else self._step.until
        return 0.0 if until is None else max(0.0, until - self.context.now())

    def step(self, heeds: Container[Peer], limit: float = 0.0) -> bool:
        """Take in what those have said, and speak; wait for it at most `limit` seconds.

        False if there was nothing to do.
        """
        with self.group._endpoint.recv_batch(MAX_RX_BATCH, limit) as batch:
            heard = [series for series in batch.series() if Peer(series.source, series.src_qp) in heeds]
            if not heard and self.idle:
                return len(batch) > 0
            try:
                self._step = next(self._steps) if self._step is None else self._steps.send(heard)
            except StopIteration as done:
                self.result, self.finished = done.value, True
                return True
        for said in self._step.post:
            send_all(self.group, said)
        return True


class SendingEnd(End[ObjectReport]):
    """The sender of one object to so many receivers, for which it waits `wait` seconds."""

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
        super().__init__(group, context, self._sends(data, receivers, wait))

    def _sends(self, data: Sendable, receivers: int, wait: float) -> SessionSteps[ObjectReport]:
        yield from self._sending.wait_for_receivers(receivers, wait)
        report = yield from self._sending.send(data, all_receivers(), "", b"")
        yield from self._sending.close("")
        return report

    def knows(self, other: ReceivingEnd) -> bool:
        """Whether the two have heard each other."""
        return self._sending.core.members.get(other.context.number) is not None

    def report_of(self, other: ReceivingEnd) -> ReceiverReport | None:
        """What became of the object there, by the sender's report; None if the report does not say."""
        reports = () if self.result is None else self.result.receivers
        return next((one for one in reports if one.number == other.context.number), None)


class ReceivingEnd(End[None]):
    """A receiver of one object, of which it keeps the digest alone."""

    def __init__(self, group: Membership, context: SessionContext, peer_timeout: float) -> None:
        self.received: Received | None = None
        """The object, when it is whole."""
        receiving = ReceivingSession(
            context, NullSink(), lambda _: None, 0, DEFAULT_MEMORY, peer_timeout, None, None, one_session=True
        )
        super().__init__(group, context, self._takes(receiving))

    def _takes(self, receiving: ReceivingSession) -> SessionSteps[None]:
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
    """A sender on the first active port, and receivers on the others in turn, all members of the group.

    group    the address that all ends join
    receivers  how many receivers to make
    data     the object
    wait     how many seconds the ends may take to find each other
    silence  how many seconds an end may be silent before it is given up
    progress  is called when the sender has come further

    Raises ValueError if there are too few ports, or one cannot serve the settings.
    """
    with ExitStack() as stack:
        members = stack.enter_context(_memberships(backend, group, receivers, settings))
        contexts = [stack.enter_context(exclusive(member, "mcast.cast")) for member in members]
        sender = SendingEnd(members[0], contexts[0], data, receivers, wait, peer_timeout, progress)
        takers = [ReceivingEnd(*both, peer_timeout) for both in zip(members[1:], contexts[1:], strict=True)]
        yield sender, takers


@contextmanager
def _memberships(
    backend: Backend, group: McastAddress, receivers: int, settings: Settings
) -> Iterator[list[Membership]]:
    ports = active(backend, group)
    contexts = ports[1:] or ports
    if receivers > (most := MAX_MEMBERS_PER_ADDRESS * len(contexts)):
        raise ValueError(f"{receivers} receivers are too many for the ports here: at most {most}")
    # Each hears what all others say at the beginning.
    deep = replace(settings, receive_depth=max(DEFAULT_RECEIVE_DEPTH, settings.receive_depth) + 4 * receivers)
    with ExitStack() as stack:

        def joined(place: LocalPort) -> Membership:
            endpoint = stack.enter_context(open_endpoint(backend, place.address, **vars(deep)))
            return endpoint.join(group, timeout=IO_TIMEOUT)

        yield [joined(place) for place in (ports[0], *islice(cycle(contexts), receivers))]


def run(sender: SendingEnd, receivers: Sequence[ReceivingEnd], watch: Callable[[], None]) -> None:
    """Give each end its turns until all are over, and call `watch` after each round; `sender.result` has the
    report.

    Raises TimedOut if the ends do not find each other in time.
    """
    ends: list[End[Any]] = [sender, *receivers]
    heeds = {end.peer for end in ends}
    while busy := [end for end in ends if not end.finished]:
        acted = [end.step(heeds) for end in busy]
        if not any(acted):
            busy[0].step(heeds, min(_MAX_WAIT, *(end.idle for end in busy)))
        watch()
