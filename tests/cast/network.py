"""A seeded network for the ends of the file protocol: loses, doubles, reorders messages in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import Any

from mcast.cast.packets import OVERHEAD, WINDOW, number_at
from mcast.cast.receiver import FileReceiver
from mcast.cast.sender import Fate, FileSender, Patience

LARGEST = 64
"""Bytes of the largest message."""

DATA = Random(1).randbytes(20_000)
PIECES = -(-len(DATA) // (LARGEST - OVERHEAD))
"""The file of most tests, and how many messages take it."""

_LATENCY, _DISORDER = 0.001, 0.01
_LONG, _MANY = 120.0, 100_000


def address(end: int) -> str:
    """Where an end is (0: the sender, n: receiver n)."""
    return f"10.0.0.{end + 1}"


def number(end: int) -> int:
    """The session of the sender, or the number of a receiver; in the order of the ends."""
    return number_at(address(end), end + 1)


S = number(0)
"""The session of a network's sender."""


Lose = Callable[[int, int, bytes], bool]
"""Whether the message from one end (0: the sender, n: receiver n) to another is lost."""


class Network:
    """One sender and some receivers, each of which hears what the others say to the group.

    unicast  whether a message to one end alone arrives; `alone` counts those that did
    """

    def __init__(
        self,
        data: bytes,
        receivers: int,
        seed: int = 0,
        loss: float = 0.0,
        doubles: float = 0.0,
        disorder: float = 0.0,
        lose: Lose = lambda source, target, message: False,
        wanted: int | None = None,
        patience: Patience = Patience(),  # noqa: B008  (immutable)
        unicast: bool = True,
    ) -> None:
        self.unicast, self.alone = unicast, 0
        self.data, self.at = data, 0
        self.sender = FileSender(number(0), "sender", len(data), LARGEST, wanted or receivers, patience)
        self.receivers = [self.receiver(number) for number in range(1, receivers + 1)]
        self.copies = [bytearray() for _ in self.receivers]
        self.dead: set[int] = set()
        self.slow: set[int] = set()
        self.now = 0.0
        self._random = Random(seed)
        self._loss, self._doubles, self._disorder, self._lose = loss, doubles, disorder, lose
        self._queue: list[tuple[float, int, int, int, bytes, bool]] = []
        self._posted = 0

    def receiver(self, end: int) -> FileReceiver:
        """A receiver as that end."""
        return FileReceiver(number(end), f"receiver {end}", WINDOW, LARGEST, silence=10.0)

    def post(self, source: int, messages: list[bytes], only: int | None = None) -> None:
        """Put messages on their way to everybody else, or to one end alone."""
        for message in messages:
            for target in self.ends() if only is None else [only]:
                lost = self._random.random() < self._loss or self._lose(source, target, message)
                if target == source or lost:
                    continue
                for _ in range(1 + (self._random.random() < self._doubles)):
                    late = self._random.random() < self._disorder
                    delay = _LATENCY + (self._random.random() * _DISORDER if late else 0)
                    self._posted += 1
                    heappush(
                        self._queue,
                        (self.now + delay, self._posted, source, target, message, only is not None),
                    )

    def step(self) -> None:
        """Everybody acts; then time moves on to the next thing due."""
        sender = self.sender
        if 0 not in self.dead:
            self._feed(sender)
            self.say(0, sender)
        living = [(n, one) for n, one in enumerate(self.receivers, 1) if n not in self.dead]
        for number, receiver in living:
            while number not in self.slow and (piece := receiver.take()):
                self.copies[number - 1] += piece
            if receiver.storable:
                receiver.stored(self.now)
            self.say(number, receiver)
        dues = [one.due for _, one in living if not one.over]
        dues += [sender.due] if 0 not in self.dead else []
        dues += self.dues()
        nexts = [due for due in dues if due is not None] + [found[0] for found in self._queue[:1]]
        self.now = max(self.now, min(nexts, default=self.now))
        while self._queue and self._queue[0][0] <= self.now:
            _, _, source, target, message, alone = heappop(self._queue)
            if target not in self.dead:
                self.deliver(source, target, message, alone)

    def say(self, number: int, end: FileSender | FileReceiver) -> None:
        """Post what an end has to say, to all and to one."""
        self.post(number, end.messages(self.now))
        for only, message in end.answers():
            if self.unicast:
                self.alone += 1
                self.post(number, [message], only)

    def dues(self) -> list[float | None]:
        """When somebody else acts."""
        return []

    def ends(self) -> range:
        """Everybody."""
        return range(len(self.receivers) + 1)

    def deliver(self, source: int, target: int, message: bytes, alone: bool) -> None:
        """It arrives."""
        end = self.receivers[target - 1] if target else self.sender
        end.hears(message, address(source), self.now, source if alone or target else None)

    def _feed(self, sender: FileSender) -> None:
        if room := sender.wants:
            pieces = []
            while room and self.at < len(self.data):
                pieces.append(self.data[self.at : self.at + sender.piece])
                self.at += len(pieces[-1])
                room -= 1
            sender.offer(pieces)
            if self.at >= len(self.data):
                sender.end()

    def run(self, until: Callable[[], bool] | None = None, long: float = _LONG) -> None:
        """Until the sender and all living receivers are done, or `until` holds; fails after `long` s."""
        steps = 0
        while not until() if until else not self.over:
            assert self.now < long, "it hangs"
            assert steps < _MANY, "it spins"
            self.step()
            steps += 1

    @property
    def fates(self) -> list[Fate]:
        """How the transfer went for each receiver that the sender knows, in the order of the ends."""
        return [peer.fate for _, peer in sorted(self.sender.peers.items())]

    @property
    def over(self) -> bool:
        """Whether nobody waits for anything."""
        living = (one for number, one in enumerate(self.receivers, 1) if number not in self.dead)
        return self.sender.over and all(one.over or not one.welcome for one in living)


class Lies(Network):
    """A network with one more end, the last, which is a liar.

    `lie` says what it sends: to each message that it hears, and to None ten times in a second. It stops
    at `silent`, in seconds.
    """

    def __init__(
        self,
        lie: Callable[[bytes | None], list[bytes]],
        data: bytes,
        receivers: int = 1,
        silent: float = inf,
        **options: Any,
    ) -> None:
        super().__init__(data, receivers, wanted=options.pop("wanted", receivers + 1), **options)
        self.liar = receivers + 1
        self._lie, self._silent, self._speaks = lie, silent, 0.0

    def ends(self) -> range:
        return range(len(self.receivers) + 2)

    def dues(self) -> list[float | None]:
        return [self._speaks]

    def deliver(self, source: int, target: int, message: bytes, alone: bool) -> None:
        if target == self.liar:
            self._say(message)
        else:
            super().deliver(source, target, message, alone)

    def step(self) -> None:
        super().step()
        if self.now >= self._speaks:
            self._speaks = self.now + 0.1
            self._say(None)

    def _say(self, to: bytes | None) -> None:
        if self.now < self._silent:
            self.post(self.liar, self._lie(to))
