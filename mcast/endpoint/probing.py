"""Asking the members of a group to answer, and answering them. Nothing here waits."""

from __future__ import annotations

import errno as E
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf

from mcast.api import (
    Closed,
    Destination,
    McastError,
    Message,
    MessageTooLarge,
    Phase,
    QpError,
    TimedOut,
    mcast_error,
)
from mcast.endpoint.membership import EndpointGroup, GroupState
from mcast.endpoint.recovery import Restorer
from mcast.endpoint.station import Station
from mcast.wire.addresses import ZERO_GID
from mcast.wire.probe import PROBE_SIZE, Kind, Peer, Probe

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

    def __init__(self) -> None:
        self.peers: dict[Peer, int] = {}
        self.room: float = inf
        self.heard_self = False

    def note(self, peer: Peer, echo: Probe) -> None:
        """Note an answer."""
        if peer in self.peers or len(self.peers) < PEERS_MAX:
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
            with suppress(TimedOut, Closed, MessageTooLarge):  # another probe follows, or the MTU has changed
                self._post(group.destination, Probe(kind, number, me), size)

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
        if alone and not destination.can_reply_to(message):
            self._drop(group, "probe: the asker's address cannot be answered")
            return
        self.echoes_left -= 1
        to = destination.reply_to(message) if alone else destination
        asker = Peer(message.source, message.src_qp)
        try:
            size, room = len(message.payload), self._station.receive_room
            self._post(to, Probe(Kind.ECHO, found.number, asker, size, room))
        except QpError:
            raise
        except McastError as error:
            self._drop(group, "probe: no room for an echo")
            logger.debug("%s: no echo: %s", self.whose, error)

    def _post(self, destination: Destination, what: Probe, size: int = PROBE_SIZE) -> None:
        """Send a probe without waiting."""
        if self._restorer.recovery is not None:
            return
        try:
            self._station.qp.send(destination, [what.pack(size)], timeout=0)
            self.posted += 1
        except QpError as error:
            self._restorer.on_qp_error(error)

    def _is_me(self, peer: Peer) -> bool:
        """Whether `peer` is this endpoint.

        Queue pair numbers alone do not tell: equal hosts often use the same ones.
        """
        station = self._station
        return peer.qp_num == station.qp.qp_num and peer.gid in station.place.port.gids.values()


def unanswered(
    group: EndpointGroup, quest: Quest, members: int, timeout: float | None, solitude: str
) -> McastError:
    """The error of `ready` when fewer than `members` have answered: it names those that have.

    `solitude` is that of the backend.
    """
    who = ", ".join(f"{peer.gid} QP {peer.qp_num}" for peer in sorted(quest.peers)) or "nobody"
    detail = f"{len(quest.peers)} of {members} members answered within {timeout} s: {who}"
    if group.send_only:
        detail += (
            "; they answer a sender by unicast, which Soft-RoCE mostly loses within one network namespace: "
            "join as a Membership there, or use settle="
        )
    if solitude:
        detail += f"; {solitude}"
    return mcast_error(E.ETIMEDOUT, "ready", Phase.RECV, {"group": group.address}, detail)
