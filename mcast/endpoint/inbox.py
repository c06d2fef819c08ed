"""Messages between the queue pair and the calls that ask for them: bounded queues of copies, and batches of
copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mcast.api import Batch, CopiedBatch, Message


class Inbox:
    """A bounded queue of copies of one group's messages, numbered by arrival over all groups of the
    endpoint."""

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


class ChosenBatch(CopiedBatch):
    """Some messages of a batch, at these places in it, without the first `start` bytes of each payload.

    Releasing this batch releases the whole one.
    """

    def __init__(self, batch: Batch, messages: Sequence[Message], places: Sequence[int], start: int) -> None:
        super().__init__(messages)
        self._batch, self._places, self._start = batch, places, start

    def _release(self) -> None:
        for message in self._messages:
            message.payload.release()
        try:
            self._batch.release()
        except BufferError:  # which leaves the batch to be read as before, and so is this one
            payloads = (self._batch[place].payload[self._start :] for place in self._places)
            self._messages = [
                one._replace(payload=payload) for one, payload in zip(self._messages, payloads, strict=True)
            ]
            raise
