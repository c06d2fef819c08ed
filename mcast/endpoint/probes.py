"""Probes: ask the members of a group to answer, answer their probes, and test the device's loopback.

`Prober` sends and answers probes and never waits; `Probing` has the calls that wait for answers. A probe
carries a number and its sender (`mcast.wire.probe`); the answer, an echo, carries both back, so that an echo
to another endpoint, or to an earlier call, counts for nothing. Answers are noted in the `PendingProbe` of
that number for as long as its call waits. Echoes go to the group, or to the asker alone if it is a send-only
member.

Probes may be lost, so `ready` repeats them with a growing interval. Received probes are answered inside the
program's own calls, at most MAX_ECHOES for each batch, because an echo may go to every member. Not handled:
members that never call into their endpoint do not answer.
"""

from __future__ import annotations

import errno as E
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import ClassVar, Protocol, SupportsIndex

from mcast.api import (
    RECORD_DTYPE,
    Backend,
    Batch,
    Closed,
    Destination,
    McastError,
    Message,
    MessageTooLarge,
    Phase,
    QpError,
    ReentrantCall,
    Refused,
    TimedOut,
    mcast_error,
)
from mcast.endpoint.membership import EndpointGroup, GroupState
from mcast.endpoint.memberships import Memberships
from mcast.endpoint.policy import LoopbackPolicy, LoopbackReport
from mcast.endpoint.recovery import Rejoiner
from mcast.endpoint.resources import PortResources
from mcast.endpoint.waiting import Operation, Waiting, call_provider
from mcast.wire.addresses import ZERO_GID
from mcast.wire.probe import LONG_PROBE_MARGIN, LONG_SIZES, PROBE_SIZE, Kind, Peer, Probe
from mcast.wire.units import MTU

logger: logging.Logger = logging.getLogger("mcast")

MAX_ECHOES = 16
"""Maximum number of probes of one batch that are answered.

An answer may go to every member, and the asker repeats.
"""

MAX_PEERS = 65_536
"""Maximum number of answers to one probe that are remembered; `ready` accepts no more members."""

_SRC_QP, _WORDS = RECORD_DTYPE["offsets"][2] // 4, RECORD_DTYPE["itemsize"] // 4
"""Place of the source's queue pair number in a record of a batch, and the size of a record, in words."""


class PendingProbe:
    """A question to a group, and the members that have answered.

    peers  member -> the size in bytes of the largest probe that has reached it
    room   the largest message in bytes that all of them take; inf before the first answer
    """

    max_peers: ClassVar[int] = MAX_PEERS

    def __init__(self) -> None:
        self.peers: dict[Peer, int] = {}
        self.room: float = inf
        self.heard_self = False

    def note(self, peer: Peer, echo: Probe) -> None:
        """Note an answer."""
        if peer in self.peers or len(self.peers) < self.max_peers:
            self.peers[peer] = max(echo.size, self.peers.get(peer, 0))
            self.room = min(self.room, max(echo.room, PROBE_SIZE))


class Prober:
    """Sends and answers probes. `drop(group, reason)` counts each probe that is not answered."""

    def __init__(
        self, resources: PortResources, rejoiner: Rejoiner, drop: Callable[[EndpointGroup | None, str], None]
    ) -> None:
        self._resources, self._rejoiner, self._drop = resources, rejoiner, drop
        self.pending: dict[int, PendingProbe] = {}
        self.posted: int = 0
        self.echoes_left: int = 0
        self._asked = 0

    @property
    def endpoint_name(self) -> str:
        """The name of the endpoint in the log."""
        return self._resources.name

    def sent_none_of(self, batch: Batch) -> bool:
        """Return True if no message of the batch has the number of this endpoint's queue pair as its source.

        Cheaper than a test of each message.
        """
        qp = self._resources.qp
        if qp.closed:
            return False
        number = int.from_bytes(qp.qp_num.to_bytes(4, "little"), sys.byteorder)
        return number not in memoryview(batch.records).cast("I")[_SRC_QP::_WORDS].tolist()

    @contextmanager
    def collect(self) -> Iterator[tuple[int, PendingProbe]]:
        """A new question and its number. Answers are collected until the end of the `with`."""
        self._asked = number = (self._asked + 1) & 0xFFFFFFFF
        pending = self.pending[number] = PendingProbe()
        try:
            yield number, pending
        finally:
            del self.pending[number]

    def ask(self, group: EndpointGroup, kind: Kind, number: int, size: int = PROBE_SIZE) -> None:
        """Send the question to the group, in a message of `size` bytes, if the group is joined now."""
        if group.state is GroupState.JOINED and group.destination is not None:
            gids = self._resources.local_port.port.gids
            me = Peer(gids.get(group.destination.sgid_index, ZERO_GID), self._resources.qp.qp_num)
            error = self._post(group.destination, Probe(kind, number, me), size)
            # Another probe follows, or the MTU has changed.
            if error is not None and not isinstance(error, TimedOut | Closed | MessageTooLarge):
                raise Refused(error)

    def take(self, found: Probe, message: Message) -> None:
        """Handle a received probe: note an answer, or answer a question."""
        group = self._resources.group_index.by_mgid.get(message.group)
        pending = self.pending.get(found.number)
        if found.kind is Kind.REPLY:
            mine = pending is not None and self._is_me(found.requester) and not message.from_self
            if pending is not None and mine:
                pending.note(Peer(message.source, message.src_qp), found)
        elif message.from_self:
            if pending is not None:
                pending.heard_self = True
        elif found.kind is not Kind.LOOPBACK and group is not None and group.destination is not None:
            self._answer(found, message, group, group.destination)

    def _answer(self, found: Probe, message: Message, group: EndpointGroup, destination: Destination) -> None:
        if self.echoes_left <= 0:
            self._drop(group, "probe: too many at once")
            return
        alone = found.kind is Kind.UNICAST_REQUEST
        if alone and not destination.can_reply_to(message, self._resources.local_port.address.is_loopback):
            self._drop(group, "probe: the asker's address cannot be answered")
            return
        self.echoes_left -= 1
        to = destination.reply_to(message) if alone else destination
        asker = Peer(message.source, message.src_qp)
        size, room = len(message.payload), call_provider(getattr, self._resources, "max_receive_size")
        error = self._post(to, Probe(Kind.REPLY, found.number, asker, size, room))
        if error is not None:
            self._drop(group, "probe: no room for an echo")
            logger.debug("%s: no echo: %s", self.endpoint_name, error)

    def _post(self, destination: Destination, what: Probe, size: int = PROBE_SIZE) -> McastError | None:
        """Send a probe without waiting; return why it was not sent, unless the queue pair is in ERR."""
        if self._rejoiner.recovery is not None:
            return None
        batch = [what.pack(size)]
        try:
            self._resources.qp.send(destination, batch, timeout=0)
        except QpError as error:
            self._rejoiner.on_qp_error(error)
            return None
        except ReentrantCall as error:
            raise Refused(error) from None
        except McastError as error:
            return error
        self.posted += 1
        return None

    def _is_me(self, peer: Peer) -> bool:
        """Return True if `peer` is this endpoint.

        Queue pair numbers alone do not tell: equal hosts often use the same ones.
        """
        resources = self._resources
        return peer.qp_num == resources.qp.qp_num and peer.gid in resources.local_port.port.gids.values()


def unanswered(
    group: EndpointGroup, pending: PendingProbe, members: int, timeout: float | None, backend: Backend
) -> McastError:
    """The error of `ready` when fewer than `members` have answered: it names those that have."""
    who = ", ".join(f"{peer.gid} QP {peer.qp_num}" for peer in sorted(pending.peers)) or "nobody"
    detail = f"{len(pending.peers)} of {members} members answered within {timeout} s: {who}"
    if group.send_only and backend.name == "rdma":
        detail += (
            "; they answer a sender by unicast, which Soft-RoCE mostly loses within one network namespace: "
            "join as a Membership there, or use settle="
        )
    if backend.virtual_time:
        detail += (
            "; time on this fabric is virtual, and a call that waits leaves other threads none to answer in: "
            'give a fabric for threads clock="wall"'
        )
    if why_isolated := backend.why_isolated():
        detail += f"; {why_isolated}"
    error = mcast_error(E.ETIMEDOUT, "ready", Phase.RECV, {"group": group.address}, detail)
    if not pending.peers:
        error.suspected = backend.suspicions()
    return error


MIN_PROBE_INTERVAL, MAX_PROBE_INTERVAL = 0.02, 1.0
"""Seconds between two probes of `ready`: the first pause, which is doubled up to the last."""

MIN_MTU = min(MTU.code)
"""Smallest MTU in bytes, which every port and switch carries."""

LONG_PROBE_TIMEOUT = 0.5
"""Minimum seconds that `ready` waits for answers to long probes.

Twice the time that the short ones took is added. Where an MTU on the way is too small, no answer arrives.
"""


class Filter(Protocol):
    """Filter that keeps own messages from the user."""

    filtering: bool

    def filter_own(self, filtering: bool) -> None: ...


class Probing:
    """Asks by probes, and waits for the answers."""

    def __init__(
        self,
        resources: PortResources,
        memberships: Memberships,
        waiting: Waiting,
        prober: Prober,
        demux: Filter,
    ) -> None:
        self._resources, self._memberships, self._waiting = resources, memberships, waiting
        self._demux = demux
        self.prober: Prober = prober

    def probe_loopback(self, group: EndpointGroup, timeout: float) -> Operation[bool]:
        """Return True if the endpoint's own message comes back within `timeout` seconds.

        Ends a loopback filter that is not needed.
        """
        return self._probe_loopback(group, self._waiting.deadline(timeout))

    def _probe_loopback(self, group: EndpointGroup, deadline: float | None) -> Operation[bool]:
        self._memberships.require_joined(group, "probe_loopback", Phase.SEND)
        with self.prober.collect() as (number, pending):
            self.prober.ask(group, Kind.LOOPBACK, number)
            yield from self._waiting.until(lambda: pending.heard_self, deadline)
        if self._resources.blocking_loopback:
            self._demux.filter_own(pending.heard_self)
        return pending.heard_self

    def ready(self, group: EndpointGroup, members: int, timeout: float | None) -> Operation[dict[Peer, int]]:
        """Ask until `members` other members have answered, and then in long messages, too.

        Return the members that have answered, and the largest payload that is known to reach each. Raises
        TimedOut, which names those that have.
        """
        if not isinstance(members, SupportsIndex):
            raise TypeError(f"members is {members!r}: give an int, how many other members shall answer")
        members = members.__index__()
        if members > MAX_PEERS:
            raise ValueError(f"members is {members}: at most {MAX_PEERS} answers are remembered")
        return self._ready(group, members, timeout, self._waiting.deadline(timeout))

    def _ready(
        self, group: EndpointGroup, members: int, timeout: float | None, deadline: float | None
    ) -> Operation[dict[Peer, int]]:
        self._memberships.require_joined(group, "ready", Phase.SEND)
        kind = Kind.UNICAST_REQUEST if group.send_only else Kind.REQUEST
        pause, ask_at = MIN_PROBE_INTERVAL, self._waiting.now()
        start = ask_at
        with self.prober.collect() as (number, pending):
            while len(pending.peers) < members:
                now = self._waiting.now()
                if self._waiting.expired(deadline):
                    raise Refused(unanswered(group, pending, members, timeout, self._resources.backend))
                if now >= ask_at:
                    self._memberships.require_joined(group, "ready", Phase.SEND)
                    self.prober.ask(group, kind, number)
                    ask_at, pause = now + pause, min(pause * 2, MAX_PROBE_INTERVAL)
                    continue
                yield from self._waiting.wait(ask_at if deadline is None else min(ask_at, deadline))
            end = self._waiting.now() + LONG_PROBE_TIMEOUT + 2 * (self._waiting.now() - start)
            is_cut = deadline is not None and deadline < end
            yield from self._ask_long(group, kind, number, pending, deadline if is_cut else end)
            sizes = self._sizes(group, pending)
            if not is_cut:
                self._warn_of_small(group, pending, sizes)
            return sizes

    def _ask_long(
        self, group: EndpointGroup, kind: Kind, number: int, pending: PendingProbe, end: float | None
    ) -> Operation[None]:
        """Probe with the longest messages that a user can send, until all members have answered.

        And with shorter ones, while some do not answer.

        No message is longer than the room of a member that has answered, because a message that is too large
        for a receive can put a queue pair into ERR (K-DATA-7).
        """
        pause, ask_at, count = MIN_PROBE_INTERVAL, self._waiting.now(), 1
        while (sizes := self._long_sizes(group, pending)) and min(pending.peers.values()) < sizes[0]:
            if self._waiting.expired(end):
                return
            if (now := self._waiting.now()) >= ask_at:
                self._memberships.require_joined(group, "ready", Phase.SEND)
                for size in sizes[:count]:
                    self.prober.ask(group, kind, number, size)
                count, ask_at, pause = len(sizes), now + pause, min(pause * 2, MAX_PROBE_INTERVAL)
                continue
            yield from self._waiting.wait(ask_at if end is None else min(ask_at, end))

    def _max_size(self, group: EndpointGroup) -> int:
        """Maximum size in bytes of a user's message with its header; 0 while there is no queue pair."""
        resources, to = self._resources, group.destination
        if to is None or resources.qp.closed:
            return 0
        return call_provider(resources.max_message_to, resources.qp, to) + resources.settings.header_size

    def _long_sizes(self, group: EndpointGroup, pending: PendingProbe) -> list[int]:
        """The sizes of the long probes that tell how large a user's messages may be, from the largest on."""
        most, to = self._max_size(group), group.destination
        if not most or to is None or not pending.peers:
            return []
        enough = next((size for size in LONG_SIZES if size + LONG_PROBE_MARGIN >= most), LONG_SIZES[-1])
        limit = min(enough, pending.room, call_provider(self._resources.qp.max_message_to, to))
        return [size for size in reversed(LONG_SIZES) if size <= limit]

    def _sizes(self, group: EndpointGroup, pending: PendingProbe) -> dict[Peer, int]:
        """Return the largest payload that is known to reach each member that has answered.

        A probe stands for all sizes up to the MTU that it nearly fills.
        """
        room = min(pending.room, self._max_size(group) or inf)
        header = self._resources.settings.header_size
        return {
            peer: int(min(max(size + LONG_PROBE_MARGIN, MIN_MTU), room)) - header
            for peer, size in pending.peers.items()
        }

    def _warn_of_small(self, group: EndpointGroup, pending: PendingProbe, sizes: dict[Peer, int]) -> None:
        """Log which members answered shorter probes only, or have less room than a message may take.

        A member that answered none of them does not answer any more, perhaps because its own `ready` is over.
        """
        most, call_provider = self._max_size(group), self._long_sizes(group, pending)
        small = [
            f"{peer.gid} QP {peer.qp_num} takes {sizes[peer]}"
            for peer, size in sorted(pending.peers.items())
            if (call_provider and PROBE_SIZE < size < call_provider[0]) or pending.room < most
        ]
        if small:
            logger.warning(
                "%s: a message to %s may have %d bytes, and not all members get such messages: %s. Send no "
                "more than that, or give all ports and switches of the network one MTU",
                self.prober.endpoint_name,
                group.address,
                most - self._resources.settings.header_size,
                ", ".join(small),
            )

    def loopback_report(self) -> LoopbackReport:
        """Return the loopback policy, and the means that keep own messages away now."""
        policy = LoopbackPolicy(self._resources.settings.loopback)
        return LoopbackReport(policy, self._resources.blocking_loopback, self._demux.filtering)
