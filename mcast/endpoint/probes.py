"""Probes: asking the members of a group to answer, and answering them; and whether the device returns own
messages.
"""

from __future__ import annotations

import errno as E
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import ClassVar, Protocol, SupportsIndex

from mcast.api import (
    Backend,
    Closed,
    Destination,
    McastError,
    Message,
    MessageTooLarge,
    Phase,
    QpError,
    Reentered,
    Refused,
    TimedOut,
    mcast_error,
)
from mcast.endpoint.membership import EndpointGroup, GroupState
from mcast.endpoint.memberships import Memberships
from mcast.endpoint.policy import LoopbackPolicy, LoopbackReport
from mcast.endpoint.recovery import Restorer
from mcast.endpoint.station import Station
from mcast.endpoint.waiting import Operation, Waiting, asked
from mcast.wire.addresses import ZERO_GID
from mcast.wire.probe import LONG_SIZES, PROBE_SIZE, SHORTFALL, Kind, Peer, Probe
from mcast.wire.units import MTU

logger: logging.Logger = logging.getLogger("mcast")

ECHOES_MAX = 16
"""How many probes of one batch are answered. An answer may go to every member, and an asker asks again."""

PEERS_MAX = 65_536
"""How many answers to one question are remembered: more than any program asks `ready` for."""


class Quest:
    """A question to a group, and the members that have answered.

    peers  member -> the size in bytes of the largest probe that has reached it
    room   the largest message in bytes that all of them take; inf before the first answer
    """

    max_peers: ClassVar[int] = PEERS_MAX

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
        self, station: Station, restorer: Restorer, drop: Callable[[EndpointGroup | None, str], None]
    ) -> None:
        self._station, self._restorer, self._drop = station, restorer, drop
        self.quests: dict[int, Quest] = {}
        self.posted: int = 0
        self.echoes_left: int = 0
        self._asked = 0

    @property
    def whose(self) -> str:
        """The name of the endpoint in the log."""
        return self._station.name

    @contextmanager
    def quest(self) -> Iterator[tuple[int, Quest]]:
        """A new question and its number. Answers are collected until the end of the `with`."""
        self._asked = number = (self._asked + 1) & 0xFFFFFFFF
        quest = self.quests[number] = Quest()
        try:
            yield number, quest
        finally:
            del self.quests[number]

    def ask(self, group: EndpointGroup, kind: Kind, number: int, size: int = PROBE_SIZE) -> None:
        """Send the question to the group, in a message of `size` bytes, if the group is joined now."""
        if group.state is GroupState.JOINED and group.destination is not None:
            gids = self._station.place.port.gids
            me = Peer(gids.get(group.destination.sgid_index, ZERO_GID), self._station.qp.qp_num)
            error = self._post(group.destination, Probe(kind, number, me), size)
            # Another probe follows, or the MTU has changed.
            if error is not None and not isinstance(error, TimedOut | Closed | MessageTooLarge):
                raise Refused(error)

    def take(self, found: Probe, message: Message) -> None:
        """Handle a received probe: note an answer, or answer a question."""
        group = self._station.roster.by_mgid.get(message.group)
        quest = self.quests.get(found.number)
        if found.kind is Kind.ECHO:
            mine = quest is not None and self._is_me(found.asker) and not message.from_self
            if quest is not None and mine:
                quest.note(Peer(message.source, message.src_qp), found)
        elif message.from_self:
            if quest is not None:
                quest.heard_self = True
        elif found.kind is not Kind.SELF and group is not None and group.destination is not None:
            self._answer(found, message, group, group.destination)

    def _answer(self, found: Probe, message: Message, group: EndpointGroup, destination: Destination) -> None:
        if self.echoes_left <= 0:
            self._drop(group, "probe: too many at once")
            return
        alone = found.kind is Kind.ASK_ALONE
        if alone and not destination.can_reply_to(message, self._station.place.address.is_loopback):
            self._drop(group, "probe: the asker's address cannot be answered")
            return
        self.echoes_left -= 1
        to = destination.reply_to(message) if alone else destination
        asker = Peer(message.source, message.src_qp)
        size, room = len(message.payload), asked(getattr, self._station, "receive_room")
        error = self._post(to, Probe(Kind.ECHO, found.number, asker, size, room))
        if error is not None:
            self._drop(group, "probe: no room for an echo")
            logger.debug("%s: no echo: %s", self.whose, error)

    def _post(self, destination: Destination, what: Probe, size: int = PROBE_SIZE) -> McastError | None:
        """Send a probe without waiting; return why it was not sent, unless the queue pair is in ERR."""
        if self._restorer.recovery is not None:
            return None
        batch = [what.pack(size)]
        try:
            self._station.qp.send(destination, batch, timeout=0)
        except QpError as error:
            self._restorer.on_qp_error(error)
            return None
        except Reentered as error:
            raise Refused(error) from None
        except McastError as error:
            return error
        self.posted += 1
        return None

    def _is_me(self, peer: Peer) -> bool:
        """Whether `peer` is this endpoint.

        Queue pair numbers alone do not tell: equal hosts often use the same ones.
        """
        station = self._station
        return peer.qp_num == station.qp.qp_num and peer.gid in station.place.port.gids.values()


def unanswered(
    group: EndpointGroup, quest: Quest, members: int, timeout: float | None, backend: Backend
) -> McastError:
    """The error of `ready` when fewer than `members` have answered: it names those that have."""
    who = ", ".join(f"{peer.gid} QP {peer.qp_num}" for peer in sorted(quest.peers)) or "nobody"
    detail = f"{len(quest.peers)} of {members} members answered within {timeout} s: {who}"
    if group.send_only:
        detail += (
            "; they answer a sender by unicast, which Soft-RoCE mostly loses within one network namespace: "
            "join as a Membership there, or use settle="
        )
    if solitude := backend.solitude():
        detail += f"; {solitude}"
    elif not quest.peers:
        detail += "".join(f"; {one}" for one in backend.suspicions())
    return mcast_error(E.ETIMEDOUT, "ready", Phase.RECV, {"group": group.address}, detail)


ASK_FIRST, ASK_MAX = 0.02, 1.0
"""Seconds between two probes of `ready`: the first pause, which is doubled up to the last."""

MIN_MTU = min(MTU.code)
"""What every port and switch carries, in bytes."""

LONG_TIMEOUT = 0.5
"""Seconds that `ready` waits for answers to long probes, and twice the time that the short ones took. Where
an MTU on the way is too small, no answer comes."""


class Filter(Protocol):
    """What keeps own messages from the user."""

    filtering: bool

    def filter_own(self, filtering: bool) -> None: ...


class Questions:
    """Asks by probes, and waits for the answers."""

    def __init__(
        self, station: Station, memberships: Memberships, waiting: Waiting, prober: Prober, sorter: Filter
    ) -> None:
        self._station, self._memberships, self._waiting = station, memberships, waiting
        self._sorter = sorter
        self.prober: Prober = prober

    def probe_loopback(self, group: EndpointGroup, timeout: float) -> Operation[bool]:
        """Whether the device returns the endpoint's own message within `timeout` seconds; ends a filter that
        is not needed."""
        return self._probe_loopback(group, self._waiting.deadline(timeout))

    def _probe_loopback(self, group: EndpointGroup, deadline: float | None) -> Operation[bool]:
        self._memberships.require_joined(group, "probe_loopback", Phase.SEND)
        with self.prober.quest() as (number, quest):
            self.prober.ask(group, Kind.SELF, number)
            yield from self._waiting.until(lambda: quest.heard_self, deadline)
        if self._station.blocking_loopback:
            self._sorter.filter_own(quest.heard_self)
        return quest.heard_self

    def ready(self, group: EndpointGroup, members: int, timeout: float | None) -> Operation[dict[Peer, int]]:
        """Ask until `members` other members have answered, and then in long messages, too.

        Return the members that have answered, and the largest payload that is known to reach each. Raises
        TimedOut, which names those that have.
        """
        if not isinstance(members, SupportsIndex):
            raise TypeError(f"members is {members!r}: give an int, how many other members shall answer")
        members = members.__index__()
        if members > PEERS_MAX:
            raise ValueError(f"members is {members}: at most {PEERS_MAX} answers are remembered")
        return self._ready(group, members, timeout, self._waiting.deadline(timeout))

    def _ready(
        self, group: EndpointGroup, members: int, timeout: float | None, deadline: float | None
    ) -> Operation[dict[Peer, int]]:
        self._memberships.require_joined(group, "ready", Phase.SEND)
        kind = Kind.ASK_ALONE if group.send_only else Kind.ASK
        pause, ask_at = ASK_FIRST, self._waiting.now()
        start = ask_at
        with self.prober.quest() as (number, quest):
            while len(quest.peers) < members:
                now = self._waiting.now()
                if self._waiting.is_over(deadline):
                    raise Refused(unanswered(group, quest, members, timeout, self._station.backend))
                if now >= ask_at:
                    self._memberships.require_joined(group, "ready", Phase.SEND)
                    self.prober.ask(group, kind, number)
                    ask_at, pause = now + pause, min(pause * 2, ASK_MAX)
                    continue
                yield from self._waiting.wait(ask_at if deadline is None else min(ask_at, deadline))
            end = self._waiting.now() + LONG_TIMEOUT + 2 * (self._waiting.now() - start)
            is_cut = deadline is not None and deadline < end
            yield from self._ask_long(group, kind, number, quest, deadline if is_cut else end)
            sizes = self._sizes(group, quest)
            if not is_cut:
                self._warn_of_small(group, quest, sizes)
            return sizes

    def _ask_long(
        self, group: EndpointGroup, kind: Kind, number: int, quest: Quest, end: float | None
    ) -> Operation[None]:
        """Ask in the longest messages that a user can send, until all that have answered answer these, too;
        and in shorter ones, while some do not.

        No message is longer than the room of a member that has answered, because a message that is too large
        for a receive can put a queue pair into ERR (K-DATA-7).
        """
        pause, ask_at, count = ASK_FIRST, self._waiting.now(), 1
        while (sizes := self._long_sizes(group, quest)) and min(quest.peers.values()) < sizes[0]:
            if self._waiting.is_over(end):
                return
            if (now := self._waiting.now()) >= ask_at:
                self._memberships.require_joined(group, "ready", Phase.SEND)
                for size in sizes[:count]:
                    self.prober.ask(group, kind, number, size)
                count, ask_at, pause = len(sizes), now + pause, min(pause * 2, ASK_MAX)
                continue
            yield from self._waiting.wait(ask_at if end is None else min(ask_at, end))

    def _most(self, group: EndpointGroup) -> int:
        """Maximum size in bytes of a user's message with its header; 0 while there is no queue pair."""
        station, to = self._station, group.destination
        if to is None or station.qp.closed:
            return 0
        return asked(station.max_message_to, station.qp, to) + station.settings.header_size

    def _long_sizes(self, group: EndpointGroup, quest: Quest) -> list[int]:
        """The sizes of the long probes that tell how large a user's messages may be, from the largest on."""
        most, to = self._most(group), group.destination
        if not most or to is None or not quest.peers:
            return []
        enough = next((size for size in LONG_SIZES if size + SHORTFALL >= most), LONG_SIZES[-1])
        limit = min(enough, quest.room, asked(self._station.qp.max_message_to, to))
        return [size for size in reversed(LONG_SIZES) if size <= limit]

    def _sizes(self, group: EndpointGroup, quest: Quest) -> dict[Peer, int]:
        """Return the largest payload that is known to reach each member that has answered.

        A probe stands for all sizes up to the MTU that it nearly fills.
        """
        room = min(quest.room, self._most(group) or inf)
        header = self._station.settings.header_size
        return {
            peer: int(min(max(size + SHORTFALL, MIN_MTU), room)) - header
            for peer, size in quest.peers.items()
        }

    def _warn_of_small(self, group: EndpointGroup, quest: Quest, sizes: dict[Peer, int]) -> None:
        """Log which members answered long probes, and not the longest, or have less room than a message may
        take.

        A member that answered none of them does not answer any more, perhaps because its own `ready` is over.
        """
        most, asked = self._most(group), self._long_sizes(group, quest)
        small = [
            f"{peer.gid} QP {peer.qp_num} takes {sizes[peer]}"
            for peer, size in sorted(quest.peers.items())
            if (asked and PROBE_SIZE < size < asked[0]) or quest.room < most
        ]
        if small:
            logger.warning(
                "%s: a message to %s may have %d bytes, and not all members get such messages: %s. Send no "
                "more than that, or give all ports and switches of the network one MTU",
                self.prober.whose,
                group.address,
                most - self._station.settings.header_size,
                ", ".join(small),
            )

    def loopback_report(self) -> LoopbackReport:
        """How the endpoint's own messages are kept away now."""
        policy = LoopbackPolicy(self._station.settings.loopback)
        return LoopbackReport(policy, self._station.blocking_loopback, self._sorter.filtering)
