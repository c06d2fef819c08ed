"""Messages between the queue pair and the calls that ask for them.

Bounded queues of copies, and batches of copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from mcast.api import Batch, CopiedBatch, Message
from mcast.wire.addresses import Gid, McastAddress


class GroupQueue:
    """A bounded queue of copies of one group's messages.

    They are numbered by arrival over all groups of the endpoint.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._queue: deque[tuple[int, Message]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def is_full(self) -> bool:
        return len(self._queue) >= self._depth

    def put(self, arrival: int, message: Message) -> bool:
        """Keep a copy of the message; return False if there is no room."""
        if self.is_full:
            return False
        self._queue.append((arrival, copied(message)))
        return True

    def put_back(self, arrival: int, message: Message) -> None:
        """Put a message that has a payload of its own in front of the others.

        `arrival` must be less than theirs.
        """
        self._queue.appendleft((arrival, message))

    @property
    def next_arrival(self) -> int:
        """The arrival number of the first message. The inbox must not be empty."""
        return self._queue[0][0]

    def pop(self) -> Message | None:
        """Take the first message; None when there is none."""
        return self._queue.popleft()[1] if self._queue else None

    def clear(self) -> int:
        """Drop all messages; return how many there were."""
        count = len(self._queue)
        self._queue.clear()
        return count


def copied(message: Message) -> Message:
    """The message with a payload of its own."""
    return Message(memoryview(bytes(message.payload)), *message[1:])  # _replace takes three times as long


class FilteredBatch(CopiedBatch):
    """Some messages of a batch, at these places in it, without the first `start` bytes of each payload.

    Releasing this batch releases the whole one.
    """

    def __init__(self, batch: Batch, messages: Sequence[Message], indices: Sequence[int], start: int) -> None:
        super().__init__(messages)
        self._batch, self._indices, self._start = batch, indices, start

    def _release(self) -> None:
        for message in self._messages:
            message.payload.release()
        try:
            self._batch.release()
        except BufferError:  # which leaves the batch to be read as before, and so is this one
            payloads = (self._batch[index].payload[self._start :] for index in self._indices)
            self._messages = [
                one._replace(payload=payload) for one, payload in zip(self._messages, payloads, strict=True)
            ]
            raise


class HasQueue(Protocol):
    """A group, as far as its messages are concerned."""

    queue: GroupQueue


class ReceiveBuffer:
    """Copies of messages in the inboxes of their groups.

    Messages of no group, strays, have an inbox of their own.

    groups   address -> group, for the groups of the endpoint
    by_mgid  MGID -> group, for those that are joined
    """

    def __init__(
        self, groups: Mapping[McastAddress, HasQueue], by_mgid: Mapping[Gid, HasQueue], depth: int
    ) -> None:
        self._groups, self._by_mgid = groups, by_mgid
        self._strays = GroupQueue(depth)
        self._arrivals = self._put_backs = 0
        self.count: int = 0
        """Number of messages in all queues, strays included."""

    def put(self, message: Message) -> bool:
        """Keep a copy of the message; False if its inbox is full."""
        self._arrivals += 1
        stored = self._queue_of(message).put(self._arrivals, message)
        self.count += stored
        return stored

    def put_back(self, messages: Sequence[Message]) -> None:
        """Keep messages with payloads of their own before all others, in their order."""
        for message in reversed(messages):
            self._put_backs -= 1
            self._queue_of(message).put_back(self._put_backs, message)
        self.count += len(messages)

    def pop(self, group: HasQueue | None) -> Message | None:
        """The next message of the group, or of any; None if there is none."""
        if not self.count:
            return None
        if group is not None:
            queue = group.queue
        else:
            queue = min(self._filled(), key=lambda one: one.next_arrival, default=self._strays)
        message = queue.pop()
        self.count -= message is not None
        return message

    def forget(self, group: HasQueue) -> None:
        """Drop the messages of a group that is left."""
        self.count -= group.queue.clear()

    def _queue_of(self, message: Message) -> GroupQueue:
        group = self._by_mgid.get(message.group)
        return self._strays if group is None else group.queue

    def _filled(self) -> Iterator[GroupQueue]:
        return (queue for queue in self._queues() if len(queue))

    def _queues(self) -> list[GroupQueue]:
        return [self._strays, *(group.queue for group in self._groups.values())]
