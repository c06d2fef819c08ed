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
from mcast.cast.files import Nowhere
from mcast.cast.nack.members import MOST_OF_ADDRESS
from mcast.cast.nack.sender import ReceiverReport
from mcast.cast.nack.strategy import all_receivers
from mcast.cast.objects.bytes_out import Sendable
from mcast.cast.objects.calls import MEMORY
from mcast.cast.objects.receiving import ObjectsIn, Received
from mcast.cast.objects.sending import ObjectReport, ObjectsOut, Progress
from mcast.cast.objects.turns import BOUND, DEPTH, HEARD, Seat, Turns, seated, send_all
from mcast.endpoint.blocking import Membership, open_endpoint
from mcast.endpoint.ports import LocalPort, active
from mcast.endpoint.settings import DEFAULTS, Settings
from mcast.endpoint.waiting import Step
from mcast.wire.addresses import ZERO_GID
from mcast.wire.probe import Peer

_NAP = 0.01
"""The longest that all ends wait for one of them, in seconds."""

T = TypeVar("T")


class End(Generic[T]):
    """One end, which has its turns when it hears something, and when it wants to speak."""

    def __init__(self, group: Membership, seat: Seat, turns: Turns[T]) -> None:
        self.group: Membership = group
        self.seat: Seat = seat
        self.result: T | None = None
        """What the turns return; None until then."""
        self.over: bool = False
        endpoint = group.endpoint
        self.peer: Peer = Peer(
            endpoint.port.gids.get(group.destination.sgid_index, ZERO_GID), endpoint.qp_num
        )
        self._turns = turns
        self._turn: Step | None = None

    @property
    def idle(self) -> float:
        """How many seconds this end has nothing to say unless a message comes."""
        until = None if self._turn is None else self._turn.until
        return 0.0 if until is None else max(0.0, until - self.seat.now())

    def go(self, heeds: Container[Peer], limit: float = 0.0) -> bool:
        """Take in what those have said, and speak; wait for it at most `limit` seconds.

        False if there was nothing to do.
        """
        with self.group._endpoint.recv_batch(HEARD, limit) as batch:
            heard = [series for series in batch.series() if Peer(series.source, series.src_qp) in heeds]
            if not heard and self.idle:
                return len(batch) > 0
            try:
                self._turn = next(self._turns) if self._turn is None else self._turns.send(heard)
            except StopIteration as done:
                self.result, self.over = done.value, True
                return True
        for said in self._turn.post:
            send_all(self.group, said)
        return True


class SendingEnd(End[ObjectReport]):
    """The sender of one object to so many receivers, for which it waits `wait` seconds."""

    def __init__(
        self,
        group: Membership,
        seat: Seat,
        data: Sendable,
        receivers: int,
        wait: float,
        peer_timeout: float,
        progress: Callable[[Progress], object],
    ) -> None:
        self._sending = ObjectsOut(seat, MEMORY, inf, peer_timeout, None, progress)
        super().__init__(group, seat, self._sends(data, receivers, wait))

    def _sends(self, data: Sendable, receivers: int, wait: float) -> Turns[ObjectReport]:
        yield from self._sending.wait_for_receivers(receivers, wait)
        report = yield from self._sending.send(data, all_receivers(), "", b"")
        yield from self._sending.close("")
        return report

    def knows(self, other: ReceivingEnd) -> bool:
        """Whether the two have heard each other."""
        return self._sending.core.members.get(other.seat.number) is not None

    def account_of(self, other: ReceivingEnd) -> ReceiverReport | None:
        """What became of the object there, by the sender's report; None if the report does not say."""
        accounts = () if self.result is None else self.result.receivers
        return next((one for one in accounts if one.number == other.seat.number), None)


class ReceivingEnd(End[None]):
    """A receiver of one object, of which it keeps the digest alone."""

    def __init__(self, group: Membership, seat: Seat, peer_timeout: float) -> None:
        self.received: Received | None = None
        """The object, when it is whole."""
        receiving = ObjectsIn(
            seat, Nowhere(), lambda _: None, 0, MEMORY, peer_timeout, None, None, one_session=True
        )
        super().__init__(group, seat, self._takes(receiving))

    def _takes(self, receiving: ObjectsIn) -> Turns[None]:
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
        seats = [stack.enter_context(seated(member, "mcast.cast")) for member in members]
        sender = SendingEnd(members[0], seats[0], data, receivers, wait, peer_timeout, progress)
        takers = [ReceivingEnd(*both, peer_timeout) for both in zip(members[1:], seats[1:], strict=True)]
        yield sender, takers


@contextmanager
def _memberships(
    backend: Backend, group: McastAddress, receivers: int, settings: Settings
) -> Iterator[list[Membership]]:
    ports = active(backend, group)
    seats = ports[1:] or ports
    if receivers > (most := MOST_OF_ADDRESS * len(seats)):
        raise ValueError(f"{receivers} receivers are too many for the ports here: at most {most}")
    # Each hears what all others say at the beginning.
    deep = replace(settings, receive_depth=max(DEPTH, settings.receive_depth) + 4 * receivers)
    with ExitStack() as stack:

        def joined(place: LocalPort) -> Membership:
            endpoint = stack.enter_context(open_endpoint(backend, place.address, **vars(deep)))
            return endpoint.join(group, timeout=BOUND)

        yield [joined(place) for place in (ports[0], *islice(cycle(seats), receivers))]


def run(sender: SendingEnd, receivers: Sequence[ReceivingEnd], watch: Callable[[], None]) -> None:
    """Give each end its turns until all are over, and call `watch` after each round; `sender.result` has the
    report.

    Raises TimedOut if the ends do not find each other in time.
    """
    ends: list[End[Any]] = [sender, *receivers]
    heeds = {end.peer for end in ends}
    while busy := [end for end in ends if not end.over]:
        acted = [end.go(heeds) for end in busy]
        if not any(acted):
            busy[0].go(heeds, min(_NAP, *(end.idle for end in busy)))
        watch()
