"""Senders and receivers of objects on a network in virtual time, with losses and partitions.

The sessions are those of programs (`SendingSession`, `ReceivingSession`), with another driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

from mcast.api import HeaderBodyBatch, list_rows
from mcast.cast.io import receiving
from mcast.cast.io.driver import SessionContext, SessionSteps
from mcast.cast.io.receiving import Missed, Received, ReceivingSession
from mcast.cast.io.sending import Object, ObjectReport, SendingSession
from mcast.cast.io.sinks import Offered, ReceiveTarget, Target
from mcast.cast.protocol.packets import number_at
from mcast.cast.protocol.strategy import Strategy
from mcast.endpoint.waiting import Step
from tests.cast.batches import batch_of

T = TypeVar("T")

MESSAGE_SIZE = 1024
LATENCY = 0.0002
TURN = 0.00005
"""Duration of a step of an end, in seconds."""
DEPTH = 4096


class World:
    """The network and its clock. Each message reaches each other end, unless it is lost or the path is cut.

    loss, doubles  share of the messages that are lost, or arrive twice
    jitter         maximum additional delay of a message, in seconds
    """

    def __init__(self, seed: int = 0, loss: float = 0.0, jitter: float = 0.0, doubles: float = 0.0) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.ends: list[End] = []
        self.cut: Callable[[End, End, float], bool] = lambda source, target, now: False
        self._loss, self._jitter, self._doubles = loss, jitter, doubles
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = 0

    def at(self, when: float, call: Callable[[], object]) -> None:
        """Schedule a call."""
        self._order += 1
        heappush(self._events, (max(when, self.now), self._order, call))

    def say(self, source: End, message: bytes) -> None:
        """Send a message from an end to all others."""
        for target in self.ends:
            if target is source or self.cut(source, target, self.now) or self.random.random() < self._loss:
                continue
            for _ in range(1 + (self.random.random() < self._doubles)):
                late = LATENCY + self.random.random() * self._jitter
                self.at(self.now + late, partial(target.on_message, message, source))

    def run(self, until: float) -> None:
        """Run the scheduled calls until that time."""
        while self._events and self._events[0][0] <= until:
            self.now, _, call = heappop(self._events)
            call()
        self.now = until


class End:
    """Driver of a session at an address."""

    def __init__(self, world: World, address: str, salt: int = 1) -> None:
        self.world, self.address = world, address
        self.context = SessionContext(
            number_at(address, salt),
            address,
            MESSAGE_SIZE,
            lambda: world.now,
            "an end",
            DEPTH,
            address=address,
        )
        self._inbox: list[tuple[bytes, str]] = []
        self._steps: SessionSteps[Any] | None = None
        self._then: Callable[[Any], object] = bool
        self._stamp = 0
        self._stopped_until = 0.0
        world.ends.append(self)

    def start(self, steps: SessionSteps[Any], then: Callable[[Any], object] = bool) -> None:
        """Run these steps, and then call `then` with their result."""
        self._steps, self._then = steps, then
        self._go(lambda: next(steps))

    def kill(self) -> None:
        """Leave the network without a word."""
        self._steps = None
        self.world.ends.remove(self)

    def stop(self, seconds: float) -> None:
        """Stop the process, as SIGSTOP does, and let it continue later."""
        self._stopped_until = max(self._stopped_until, self.world.now + seconds)

    def on_message(self, message: bytes, source: End) -> None:
        """Queue a message for the next step."""
        if len(self._inbox) < DEPTH:
            self._inbox.append((message, source.address))
        if len(self._inbox) == 1:
            self._wakes(self.world.now + TURN)

    def _wakes(self, at: float) -> None:
        self._stamp += 1
        stamp = self._stamp
        if at < inf:
            self.world.at(at, lambda: self._wake(stamp))

    def _wake(self, stamp: int) -> None:
        steps = self._steps
        if self.world.now < self._stopped_until:
            self.world.at(self._stopped_until, lambda: self._wake(stamp))
            return
        if stamp == self._stamp and steps is not None:
            heard, self._inbox = self._inbox, []
            self._go(lambda: steps.send(batch_of(*heard)))

    def _go(self, call: Callable[[], Step]) -> None:
        try:
            step = call()
        except StopIteration as done:
            self._steps = None
            self._then(done.value)
            return
        for batch in step.post:
            for row in list_rows(batch) if isinstance(batch, memoryview | HeaderBodyBatch) else batch:
                self.world.say(self, bytes(row))
        assert step.until is not None
        self._wakes(self.world.now + TURN if self._inbox else max(step.until, self.world.now + TURN))


class Job(NamedTuple):
    """Objects that a sender sends in one call, and the pause before it in seconds."""

    objects: Sequence[Object]
    strategy: Strategy
    pause: float = 0.0


class Sending(End):
    """A sender that waits for receivers, does its jobs in one session, and ends it."""

    def __init__(
        self,
        world: World,
        jobs: Sequence[Job],
        receivers: int = 1,
        peer_timeout: float = 10.0,
        rate: float = 2e6,
        key: bytes | None = None,
        salt: int = 1,
        address: str = "10.0.0.1",
    ) -> None:
        super().__init__(world, address, salt)
        self.out = SendingSession(self.context, 1 << 20, rate, peer_timeout, key)
        self.reports: list[ObjectReport] = []
        self._jobs, self._receivers = list(jobs), receivers
        self.over = False
        self.start(self.out.wait_for_receivers(receivers, None), self._next)

    def _next(self, _: object) -> None:
        if not self._jobs:
            self.start(self.out.close(""), self._ends)
            return
        job = self._jobs.pop(0)
        begin = self.world.now + job.pause
        self.world.at(begin, lambda: self.start(self.out.send_all(job.objects, job.strategy), self._reports))

    def _reports(self, reports: tuple[ObjectReport, ...]) -> None:
        self.reports += reports
        self._next(None)

    def _ends(self, _: object) -> None:
        self.over = True


class Receiving(End):
    """A receiver of any number of objects.

    begun   names of the objects that have begun
    got     name -> bytes
    missed  name -> reason
    twice   names of objects that ended twice
    """

    def __init__(
        self,
        world: World,
        address: str,
        peer_timeout: float = 10.0,
        into: Callable[[Offered], Target] | None = None,
        key: bytes | None = None,
        pause: float = 0.0,
        salt: int = 1,
    ) -> None:
        super().__init__(world, address, salt)
        self.begun: list[str] = []
        self.got: dict[str, bytes] = {}
        self.missed: dict[str, str] = {}
        self.twice: list[str] = []
        self._into, self._pause = into, pause
        target: ReceiveTarget = self._target
        self.inn = ReceivingSession(
            self.context, target, self._on_missed, 1 << 20, 1 << 20, peer_timeout, key, None
        )
        self.start(self.inn.next(None), self._takes)

    def __del__(self) -> None:
        self.inn.close()

    def _target(self, offered: Offered) -> Target:
        self.begun.append(offered.name)
        return None if self._into is None else self._into(offered)

    def _takes(self, received: Received) -> None:
        name = received.offered.name
        data = received.data if received.path is None else received.path.read_bytes()
        assert data is not None
        if name in self.got:
            self.twice.append(name)
        self.got[name] = bytes(data)
        self.world.at(self.world.now + self._pause, lambda: self.start(self.inn.next(None), self._takes))

    def _on_missed(self, missed: Missed) -> None:
        name = missed.offered.name
        if name in self.missed:
            self.twice.append(name)
        self.missed[name] = missed.reason

    def right(self, objects: dict[str, bytes]) -> None:
        """Fail unless each object has ended here at most once, with its own bytes or missed."""
        assert not self.twice
        assert len(set(self.begun)) == len(self.begun), "begun twice"
        assert not self.got.keys() & self.missed.keys()
        assert self.got.items() <= objects.items()


def between(*times: tuple[float, float]) -> Callable[[float], bool]:
    """Return a function that tells if a time is within one of these intervals."""
    return lambda now: any(first < now < last for first, last in times)


def named(*data: bytes) -> Iterator[Object]:
    """Yield objects with these bytes and different names."""
    return (Object(one, f"object {index}") for index, one in enumerate(data))


class AtOnce(ThreadPoolExecutor):
    """A disk that takes no time, because the time here is virtual."""

    def submit(self, call: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:
        done = super().submit(call, *args, **options)
        wait([done])
        return done


@contextmanager
def drawn(seed: int) -> Iterator[None]:
    """Make receivers draw their random numbers from the seed."""
    with (
        patch.object(receiving, "SystemRandom", partial(Random, seed)),
        patch("concurrent.futures.ThreadPoolExecutor", AtOnce),  # `files` imports it where it needs it
    ):
        yield
