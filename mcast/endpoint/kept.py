"""The messages that an endpoint has received and nobody has asked for yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mcast.api import Message
from mcast.endpoint.inbox import Inbox
from mcast.endpoint.membership import EndpointGroup
from mcast.wire.addresses import Gid, McastAddress


class Kept:
    """Copies of messages in the inboxes of their groups.

    Messages of no group, strays, have an inbox of their own.

    groups   address -> group, for the groups of the endpoint
    by_mgid  MGID -> group, for those that are joined
    """

    def __init__(
        self, groups: Mapping[McastAddress, EndpointGroup], by_mgid: Mapping[Gid, EndpointGroup], depth: int
    ) -> None:
        self._groups, self._by_mgid = groups, by_mgid
        self._strays = Inbox(depth)
        self._arrivals = self._put_backs = 0
        self.count: int = 0
        """How many messages are in the inboxes, strays included."""

    def put(self, message: Message) -> bool:
        """Keep a copy of the message; False if its inbox is full."""
        self._arrivals += 1
        kept = self._inbox_of(message).put(self._arrivals, message)
        self.count += kept
        return kept

    def put_back(self, messages: Sequence[Message]) -> None:
        """Keep messages with payloads of their own before all others, in their order."""
        for message in reversed(messages):
            self._put_backs -= 1
            self._inbox_of(message).put_back(self._put_backs, message)
        self.count += len(messages)

    def pop(self, group: EndpointGroup | None) -> Message | None:
        """The next message of the group, or of any; None if there is none."""
        if not self.count:
            return None
        if group is not None:
            inbox = group.inbox
        else:
            inbox = min(self._filled(), key=lambda one: one.next_arrival, default=self._strays)
        message = inbox.pop()
        self.count -= message is not None
        return message

    def forget(self, group: EndpointGroup) -> None:
        """Drop the messages of a group that is left."""
        self.count -= group.inbox.clear()

    def recount(self) -> None:
        """Count again, because a receive was interrupted, perhaps between taking a message from an inbox and
        counting it."""
        self.count = sum(map(len, self._inboxes()))

    def _inbox_of(self, message: Message) -> Inbox:
        group = self._by_mgid.get(message.group)
        return self._strays if group is None else group.inbox

    def _filled(self) -> Iterator[Inbox]:
        return (inbox for inbox in self._inboxes() if len(inbox))

    def _inboxes(self) -> list[Inbox]:
        return [self._strays, *(group.inbox for group in self._groups.values())]
