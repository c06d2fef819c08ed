"""The sequence numbers of what an endpoint sends to a group, and of what it overhears there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from typing_extensions import Buffer

from mcast.api import McastError, Message, fork_safe_lock
from mcast.endpoint import sequence
from mcast.endpoint.policy import MessagesMissing
from mcast.wire.addresses import McastAddress

REENTRANT_CALL = (
    "send: this thread is already sending to the same group, and this call comes from a signal's "
    "handler, a finalizer or __float__: let the handler set a flag, and send where a thread looks at the flag"
)
"""The text of the RuntimeError that refuses a send there."""


class Numbering:
    """One stream of numbered messages."""

    def __init__(self, stream: int) -> None:
        self._stream, self._next = stream, 0
        self._sending: Any = fork_safe_lock()
        """The lock that is held from numbering messages to posting them, so that they go out in order."""

    def send(self, payloads: Sequence[Buffer], post: Callable[[list[bytes]], object]) -> None:
        """Let `post` send the payloads, each with a header; a number that was not used is free again.

        A send that is interrupted uses up its numbers, because nobody knows how many messages were posted.
        """
        if self._sending._is_owned():
            raise RuntimeError(REENTRANT_CALL)
        with self._sending:
            numbers = range(self._next, self._next + len(payloads))
            self._next = numbers.stop
            headers = (sequence.pack(self._stream, number) for number in numbers)
            numbered = [b"".join(pair) for pair in zip(headers, payloads, strict=True)]
            try:
                post(numbered)
            except McastError as error:
                self._next = numbers.start + error.posted
                raise


def missing(group: McastAddress, message: Message, arrival: sequence.Arrival) -> Iterator[MessagesMissing]:
    """Yield an event for each gap that the message shows."""
    for gap in arrival.missing:
        yield MessagesMissing(group, message.source, message.src_qp, arrival.stream, gap.start, gap.stop - 1)


class HeaderReader:
    """Reads sequence headers of a group's messages on an endpoint with sequence=None.

    Such an endpoint delivers messages with their headers, if they have any.
    """

    def __init__(self, group: McastAddress) -> None:
        self.group: McastAddress = group
        self.sources: sequence.Sources = sequence.Sources()

    def read(self, message: Message) -> tuple[Message, Iterator[MessagesMissing]]:
        """Return the message, and the gaps that its header shows.

        With a header the message is a copy without it, and with its number.
        """
        header = sequence.parse(message.payload)
        if isinstance(header, sequence.Refusal):
            return message, iter(())
        found = self.sources.take(message.source, message.src_qp, message.payload)
        gaps = iter(()) if isinstance(found, sequence.Refusal) else missing(self.group, message, found)
        payload = memoryview(bytes(message.payload[sequence.HEADER_SIZE :]))
        return message._replace(payload=payload, number=header.number), gaps
