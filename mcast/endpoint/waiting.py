"""How an operation of an endpoint waits: what it yields, and until when."""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import inf
from typing import NamedTuple, TypeVar

from mcast.api import Batch
from mcast.arguments.seconds import seconds_of

T = TypeVar("T")

BATCH = 64
"""How many messages one receive call takes, where the user does not say."""


class Wait(NamedTuple):
    """What an operation waits for: any change, at the latest at `until` (None: never), or `max` messages."""

    until: float | None
    max: int = BATCH


Operation = Generator[Wait, Batch | None, T]


class Waiting:
    """The clock of an endpoint's operations, and the ways in which they wait.

    now    gives monotonic seconds on the clock that the driver waits by
    route  puts away the messages that were received while an operation waited for something else
    """

    def __init__(self, now: Callable[[], float], route: Callable[[Batch], None]) -> None:
        self._route = route
        self.now: Callable[[], float] = now
        self.news = False
        """Whether a call has changed what others wait for; the driver that wakes them clears it."""

    def deadline(self, timeout: float | None) -> float | None:
        """When the time is over; -inf for a timeout of 0, which needs no clock."""
        if timeout is None:
            return None
        seconds = seconds_of(timeout)
        return self.now() + seconds if seconds else -inf

    def is_over(self, deadline: float | None) -> bool:
        return deadline is not None and (deadline == -inf or self.now() >= deadline)

    def wait(self, until: float | None) -> Operation[None]:
        """Wait for a change.

        Messages that were received meanwhile are kept for the calls that ask for them.
        """
        batch = yield Wait(until)
        if batch is not None:
            self._route(batch)

    def until(
        self, condition: Callable[[], bool], deadline: float | None, at_least_once: bool = False
    ) -> Operation[None]:
        """Wait until the condition holds, or the deadline has come."""
        while not condition():
            if not at_least_once and self.is_over(deadline):
                return
            at_least_once = False
            yield from self.wait(deadline)
