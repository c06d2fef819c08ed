"""Pings over the queue pairs of one port in a group: asking and answering."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from random import SystemRandom
from typing import NamedTuple

from mcast.api import (
    Backend,
    Batch,
    Closed,
    Destination,
    InvalidArgument,
    McastError,
    Message,
    NotSupported,
    PortSpace,
    QpError,
    QpInit,
    QueuePair,
)
from mcast.bench.echo import Answerer, AnsweringMember, Pinger, Times, padded
from mcast.bench.end import BENCH_TIMEOUT, BenchEnd, join_all
from mcast.endpoint.ports import LocalPort
from mcast.endpoint.settings import DEFAULTS, Settings
from mcast.wire.addresses import Gid, McastAddress
from mcast.wire.probe import Peer

_SLICE = 0.002
"""Seconds in which each of several queue pairs is polled in its turn."""


class PingPort(NamedTuple):
    """Port and queue pairs that pings are sent from, or answered on.

    backend  name of the provider
    port     number of the port, from 1
    address  IP address
    qps      numbers of the queue pairs
    """

    backend: str
    group: str
    device: str
    port: int
    address: str
    qps: tuple[int, ...]


class PingedMember(NamedTuple):
    """A member that has answered.

    qp            number of its queue pair
    answers       pings that the member answered
    doubles       further answers to a ping that the member had answered
    loss          share of the pings that the member did not answer, 0 to 1
    milliseconds  round-trip times in milliseconds
    """

    address: str
    qp: int
    answers: int
    doubles: int
    loss: float
    milliseconds: Times


class OtherSource(NamedTuple):
    """A queue pair that sent messages which were no answers.

    qp  number of the queue pair
    """

    address: str
    qp: int
    messages: int


class PingResult(NamedTuple):
    """Members that answered pings, and the sources of other messages.

    message_size  bytes of a ping
    sent          number of pings
    """

    local_port: PingPort
    message_size: int
    sent: int
    seconds: float
    members: tuple[PingedMember, ...]
    others: tuple[OtherSource, ...]

    def as_dict(self) -> dict[str, object]:
        """Return the fields, with those of the port in place of `local_port`."""
        return _flat(self)


class HeardSource(NamedTuple):
    """A queue pair that messages came from.

    qp          number of the queue pair that sent
    by_qp       number of the queue pair that received
    unanswered  pings whose answer could not be sent
    messages    messages that were no pings
    smallest    size of the smallest message, in bytes
    largest     size of the largest message, in bytes
    """

    address: str
    qp: int
    by_qp: int
    pings: int
    unanswered: int
    messages: int
    smallest: int
    largest: int


class AnswerResult(NamedTuple):
    """Senders whose pings were answered, with --answer."""

    local_port: PingPort
    heard: tuple[HeardSource, ...]

    def as_dict(self) -> dict[str, object]:
        """Return the fields, with those of the port in place of `local_port`."""
        return _flat(self)


def _flat(result: PingResult | AnswerResult) -> dict[str, object]:
    fields = result._asdict()
    local_port: PingPort = fields.pop("local_port")
    return local_port._asdict() | fields


class PingQueuePairs:
    """Some queue pairs of one port in a group."""

    def __init__(
        self,
        backend: Backend,
        local_port: LocalPort,
        address: McastAddress,
        destinations: Mapping[QueuePair, Destination],
        send_only: bool,
    ) -> None:
        self.backend: Backend = backend
        self.local_port: LocalPort = local_port
        self.address: McastAddress = address
        self.send_only: bool = send_only
        self.qps: tuple[QueuePair, ...] = tuple(destinations)
        self.destinations: Mapping[QueuePair, Destination] = destinations
        self.gids: frozenset[Gid] = frozenset(local_port.port.gids.values())

    @property
    def now(self) -> float:
        """Seconds on the clock by which timeouts run."""
        return self.backend.now()

    @property
    def max_message_size(self) -> int:
        """The largest message that all these queue pairs can send, in bytes."""
        return min(qp.max_message_to(self.destinations[qp]) for qp in self.qps)

    def gid(self, qp: QueuePair) -> Gid:
        """The GID that messages of the queue pair come from."""
        return self.local_port.source(self.destinations[qp])

    def listen(self, until: float) -> Iterator[tuple[QueuePair, Message]]:
        """The messages that come until then, own messages included.

        Each is valid until the next one is asked for.
        """
        while (rest := until - self.now) > 0:
            for qp in self.qps:
                with self._received(qp, rest if len(self.qps) == 1 else min(rest, _SLICE)) as batch:
                    for message in batch:
                        yield qp, message

    def _received(self, qp: QueuePair, timeout: float) -> Batch | nullcontext[tuple[()]]:
        try:
            return qp.recv(64, timeout)
        except QpError:  # an answer could not be sent, which must not end the receiving of others
            qp.reset()
            return nullcontext(())

    def answer(self, qp: QueuePair, message: Message, echo: bytes, alone: bool) -> bool:
        """Send an answer to the group, or to the asker alone; return whether it could be sent.

        The asker chooses where an answer goes, so it may be an address that cannot be reached from here.
        """
        group = self.destinations[qp]
        try:
            qp.send_one(group.reply_to(message) if alone else group, echo, timeout=BENCH_TIMEOUT)
        except Closed:
            raise
        except McastError as error:
            if isinstance(error, QpError):
                qp.reset()
            return False
        return True


@contextmanager
def joined(
    backend: Backend,
    local_port: LocalPort,
    address: McastAddress,
    qps: int,
    space: PortSpace = PortSpace.UDP,
    send_only: bool = False,
    no_loopback: bool = False,
    settings: Settings = DEFAULTS,
) -> Iterator[PingQueuePairs]:
    """That many queue pairs on the port, all in the group.

    Raises ValueError if `no_loopback` is wanted and the device cannot do it, and what `join_all` raises.
    """
    with backend.event_channel() as channel:
        try:
            init = QpInit(block_loopback=no_loopback)
            ends = [BenchEnd(channel, local_port, init, settings, space) for _ in range(qps)]
        except (NotSupported, InvalidArgument):
            if not no_loopback:
                raise
            raise ValueError(f"{local_port.device.name} cannot keep own messages from this host") from None
        destinations = join_all(ends, address, send_only)
        qps_to = {end.qp: to for end, to in zip(ends, destinations, strict=True)}
        yield PingQueuePairs(backend, local_port, address, qps_to, send_only)


def ping_all(
    pairs: PingQueuePairs,
    count: int,
    size: int,
    interval: float,
    timeout: float,
    answered: Callable[[Peer, int, float], None] = lambda peer, seq, seconds: None,
) -> PingResult:
    """Ask `count` times; Ctrl-C ends the pings early. Return the members that answered.

    size      of each ping, in bytes
    interval  seconds from one ping to the next
    timeout   seconds to wait for answers to the last ping
    answered  is called for each answer with the member, the number of the ping, and the round trip in seconds
    """
    numbers = [qp.qp_num for qp in pairs.qps]
    pinger = Pinger(pairs.gids, numbers, SystemRandom().randrange(1 << 32), pairs.send_only)
    started = next_at = pairs.now
    with suppress(KeyboardInterrupt):
        for seq in range(1, count + 1):
            for qp in pairs.qps:
                probe = pinger.ask(seq, qp.qp_num, pairs.gid(qp), pairs.now)
                qp.send_one(pairs.destinations[qp], padded(probe, size), timeout=BENCH_TIMEOUT)
            next_at = max(next_at + interval, pairs.now)
            for _, message in pairs.listen(next_at if seq < count else pairs.now + timeout):
                source = Peer(message.source, message.src_qp)
                if answer := pinger.on_message(message.payload, source, pairs.now):
                    answered(source, *answer)
                if seq == count and pinger.answered_by_all(seq):
                    break
    return PingResult(
        _local_port(pairs),
        size,
        pinger.sent,
        pairs.now - started,
        tuple(_member(pinger, *found) for found in sorted(pinger.members.items())),
        tuple(OtherSource(*_source(peer), number) for peer, number in sorted(pinger.others.items())),
    )


def answer_all(pairs: PingQueuePairs, count: int | None) -> AnswerResult:
    """Answer pings until each queue pair has received `count` messages, or until Ctrl-C.

    None: without end.
    """
    answerers = {qp.qp_num: Answerer() for qp in pairs.qps}
    with suppress(KeyboardInterrupt):
        while count is None or any(answerer.count < count for answerer in answerers.values()):
            for qp, message in pairs.listen(pairs.now + 0.5):
                source = Peer(message.source, message.src_qp)
                answer = answerers[qp.qp_num].on_message(message.payload, source)
                if answer is not None:
                    echo, alone = answer
                    if not pairs.answer(qp, message, padded(echo, len(message.payload)), alone):
                        answerers[qp.qp_num].failed(source)
                if count is not None and all(one.count >= count for one in answerers.values()):
                    break
    heard = (
        HeardSource(
            *_source(peer), qp_num, one.pings, one.unanswered, one.messages, one.smallest, one.largest
        )
        for qp_num, answerer in answerers.items()
        for peer, one in sorted(answerer.heard.items())
    )
    return AnswerResult(_local_port(pairs), tuple(heard))


def _local_port(pairs: PingQueuePairs) -> PingPort:
    local_port = pairs.local_port
    qps = tuple(qp.qp_num for qp in pairs.qps)
    return PingPort(
        pairs.backend.name,
        str(pairs.address),
        local_port.device.name,
        local_port.port.port_num,
        str(local_port.address),
        qps,
    )


def _source(peer: Peer) -> tuple[str, int]:
    return str(peer.gid.ipv4 or peer.gid), peer.qp_num


def _member(pinger: Pinger, peer: Peer, member: AnsweringMember) -> PingedMember:
    times = Times(*(seconds * 1e3 for seconds in member.times))
    return PingedMember(*_source(peer), member.answers, member.doubles, pinger.loss(member), times)
