"""Pings over queue pairs of one port in a group: to ask its pairs, and to answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from random import SystemRandom
from typing import Any

from mcast.api import (
    Backend,
    Batch,
    Closed,
    InvalidArgument,
    JoinAttrEx,
    McastError,
    Message,
    NotSupported,
    PortSpace,
    QpError,
    QpInit,
    QueuePair,
)
from mcast.bench.echo import Answerer, AnsweringMember, Pinger, padded
from mcast.endpoint.ports import Place
from mcast.endpoint.probe import Peer
from mcast.endpoint.settings import DEFAULTS, Settings
from mcast.wire.addresses import ZERO_GID, Gid, McastAddress

_BOUND = 10.0
"""The longest that a join or a send may take, in seconds."""

_SLICE = 0.002
"""With several queue pairs, so long is each listened to in its turn."""


class PingQueuePairs:
    """Some queue pairs of one port in a group."""

    def __init__(
        self, backend: Backend, place: Place, address: McastAddress, qps: Sequence[QueuePair], send_only: bool
    ) -> None:
        self.backend, self.place, self.address, self.qps, self.send_only = (
            backend,
            place,
            address,
            qps,
            send_only,
        )
        self.destinations: dict[int, Any] = {}
        self.gids = frozenset(place.port.gids.values())

    @property
    def now(self) -> float:
        """Seconds on the clock that timeouts run on."""
        return self.backend.now()

    @property
    def max_message_size(self) -> int:
        """The largest message that all of them can send, in bytes."""
        return min(qp.max_message_to(self.destinations[qp.qp_num]) for qp in self.qps)

    def gid(self, qp: QueuePair) -> Gid:
        """The GID that messages of the queue pair come from."""
        index = self.destinations[qp.qp_num].sgid_index
        return self.place.port.gids.get(index, ZERO_GID)

    def listen(self, until: float) -> Iterator[tuple[QueuePair, Message]]:
        """What comes until then, own messages too; each is valid until the next is asked for."""
        while (rest := until - self.now) > 0:
            for qp in self.qps:
                with self._received(qp, rest if len(self.qps) == 1 else min(rest, _SLICE)) as batch:
                    for message in batch:
                        yield qp, message

    def _received(self, qp: QueuePair, timeout: float) -> Batch | nullcontext[tuple[()]]:
        try:
            return qp.recv(64, timeout)
        except QpError:  # an answer that could not be sent: other messages still can be received
            qp.reset()
            return nullcontext(())

    def answer(self, qp: QueuePair, message: Message, echo: bytes, alone: bool) -> bool:
        """Answer to the group, or to the asker alone; whether it could be sent.

        Whoever asks chooses where an answer goes: to where there is no way from here, for example.
        """
        group = self.destinations[qp.qp_num]
        try:
            qp.send_one(group.reply_to(message) if alone else group, echo, timeout=_BOUND)
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
    place: Place,
    address: McastAddress,
    qps: int,
    space: PortSpace = PortSpace.UDP,
    send_only: bool = False,
    no_loopback: bool = False,
    settings: Settings = DEFAULTS,
) -> Iterator[PingQueuePairs]:
    """That many queue pairs on the place, all in the group.

    Raises ValueError for a setting that the device cannot serve, TimeoutError if a join gets no answer.
    """
    join = JoinAttrEx.send_only(address) if send_only else JoinAttrEx.full_member(address)
    with ExitStack() as stack:
        channel = stack.enter_context(backend.event_channel())
        ids = [stack.enter_context(channel.create_id(space)) for _ in range(qps)]
        made = []
        for cm_id in ids:
            cm_id.bind_addr(place.address)
            try:
                made.append(cm_id.create_qp(QpInit(block_loopback=no_loopback, busy_poll=settings.busy_poll)))
            except (NotSupported, InvalidArgument):
                if not no_loopback:
                    raise
                raise ValueError(f"{place.device.name} cannot keep own messages back") from None
            cm_id.join_multicast_ex(join, made[-1])
        pairs = PingQueuePairs(backend, place, address, made, send_only)
        for _ in ids:
            event = channel.get_event(_BOUND)
            if event is None:
                raise TimeoutError(
                    f"{address} was not joined within {_BOUND:g} s: is a subnet manager running?"
                )
            ud = event.check().ud
            assert ud is not None
            to = ud.destination.marked(settings.traffic_class, settings.service_level)
            pairs.destinations[event.context.qp_num] = to
        yield pairs


def ping_all(
    pairs: PingQueuePairs,
    count: int,
    size: int,
    interval: float,
    timeout: float,
    answered: Callable[[Peer, int, float], None] = lambda peer, seq, seconds: None,
) -> dict[str, Any]:
    """Ask `count` times; Ctrl-C ends it early. What happened, as JSON shows it.

    answered  is told of each answer: whose, to which ping, and the round trip in seconds
    """
    numbers = [qp.qp_num for qp in pairs.qps]
    pinger = Pinger(pairs.gids, numbers, SystemRandom().randrange(1 << 32), pairs.send_only)
    started = next_at = pairs.now
    with suppress(KeyboardInterrupt):
        for seq in range(1, count + 1):
            for qp in pairs.qps:
                probe = pinger.ask(seq, qp.qp_num, pairs.gid(qp), pairs.now)
                qp.send_one(pairs.destinations[qp.qp_num], padded(probe, size), timeout=_BOUND)
            next_at = max(next_at + interval, pairs.now)
            for _, message in pairs.listen(next_at if seq < count else pairs.now + timeout):
                source = Peer(message.source, message.src_qp)
                if answer := pinger.hears(message.payload, source, pairs.now):
                    answered(source, *answer)
                if seq == count and pinger.answered_by_all(seq):
                    break
    return _head(pairs) | {
        "message_size": size,
        "sent": pinger.sent,
        "seconds": pairs.now - started,
        "members": [_member(pinger, *found) for found in sorted(pinger.members.items())],
        "others": [_source(peer) | {"messages": number} for peer, number in sorted(pinger.others.items())],
    }


def answer_all(pairs: PingQueuePairs, count: int | None) -> dict[str, Any]:
    """Answer until each queue pair has heard `count` messages, or Ctrl-C. What was heard, for JSON."""
    answerers = {qp.qp_num: Answerer() for qp in pairs.qps}
    with suppress(KeyboardInterrupt):
        while count is None or any(answerer.count < count for answerer in answerers.values()):
            for qp, message in pairs.listen(pairs.now + 0.5):
                source = Peer(message.source, message.src_qp)
                answer = answerers[qp.qp_num].hears(message.payload, source)
                if answer is not None:
                    echo, alone = answer
                    if not pairs.answer(qp, message, padded(echo, len(message.payload)), alone):
                        answerers[qp.qp_num].failed(source)
                if count is not None and all(one.count >= count for one in answerers.values()):
                    break
    return _head(pairs) | {
        "heard": [
            _source(peer)
            | {
                "by_qp": qp_num,
                "pings": heard.pings,
                "unanswered": heard.unanswered,
                "messages": heard.messages,
                "smallest": heard.smallest,
                "largest": heard.largest,
            }
            for qp_num, answerer in answerers.items()
            for peer, heard in sorted(answerer.heard.items())
        ]
    }


def _head(pairs: PingQueuePairs) -> dict[str, Any]:
    return {
        "backend": pairs.backend.name,
        "group": str(pairs.address),
        "device": pairs.place.device.name,
        "port": pairs.place.port.port_num,
        "address": str(pairs.place.address),
        "qps": [qp.qp_num for qp in pairs.qps],
    }


def _source(peer: Peer) -> dict[str, Any]:
    return {"address": str(peer.gid.ipv4 or peer.gid), "qp": peer.qp_num}


def _member(pinger: Pinger, peer: Peer, member: AnsweringMember) -> dict[str, Any]:
    times = {name: seconds * 1e3 for name, seconds in member.times._asdict().items()}
    return _source(peer) | {
        "answers": member.answers,
        "doubles": member.doubles,
        "loss": pinger.loss(member),
        "milliseconds": times,
    }
