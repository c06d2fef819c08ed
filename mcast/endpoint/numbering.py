"""The sequence numbers of what an endpoint sends to a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from typing_extensions import Buffer

from mcast.api import McastError
from mcast.endpoint import sequence
from mcast.interrupts import Lock


class Numbering:
    """One stream of numbered messages."""

    def __init__(self, stream: int) -> None:
        self._stream, self._next = stream, 0
        self._sending = Lock(None)
        """The lock that is held from numbering messages to posting them, so that they go out in order."""

    def send(self, payloads: Sequence[Buffer], post: Callable[[list[bytes]], object]) -> None:
        """Let `post` send the payloads, each with a header; a number that was not used is free again."""
        with self._sending:
            count = len(payloads)
            start, self._next = self._next, self._next + count  # one line: a signal's handler may send, too
            numbers = range(start, start + count)
            headers = (sequence.pack(self._stream, number) for number in numbers)
            numbered = [b"".join(pair) for pair in zip(headers, payloads, strict=True)]
            try:
                post(numbered)
            except McastError as error:
                if self._next == numbers.stop:  # no handler of a signal has sent meanwhile
                    self._next = numbers.start + error.posted  # the others are free again
                raise
