"""A market data feed over multicast: receivers notice a lost message, and ask the sender to repeat it.

    python feed.py receive 127.0.0.1
    python feed.py send 127.0.0.1

Ticks are numbered from 1 on. A gap shows by a later tick, or by a heartbeat if no tick follows. A receiver
asks for the missing numbers, and the sender sends them again to all, because many may miss the same. Its
heartbeats name the oldest tick that it still has: an older one that is missing is lost for good.

Not handled: a second sender, and one that starts anew; authenticity, because anybody may send to a group.
"""

from __future__ import annotations

import argparse
import random
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice, pairwise
from typing import NamedTuple

import mcast

FEED, REPAIR = "239.7.1.1", "239.7.1.2"
"""Groups: ticks and heartbeats go to the first, requests for missing ticks to the second."""
RETRY = 0.05
"""Seconds from one request to the next one, at most."""
MAX_REPAIR = 1000
"""Maximum number of ticks that are sent for one request."""
_TICK = struct.Struct("!Q8sq")  # number, symbol, price
_HEARTBEAT = struct.Struct("!QQ")  # oldest tick that can be repaired, last tick
_GAP = struct.Struct("!QQ")  # first and last missing tick; a request is one gap or several


class Tick(NamedTuple):
    """A price, in cents."""

    number: int
    symbol: str
    price: int


class Sender:
    """The sender's end, which keeps the last `history` ticks. `repaired` counts the ticks sent again."""

    def __init__(self, endpoint: mcast.Endpoint, history: int = 100_000) -> None:
        self.repaired = 0
        self._endpoint = endpoint
        self._feed, self._requests = endpoint.sender(FEED), endpoint.join(REPAIR)
        self._history: deque[bytes] = deque(maxlen=history)
        self._last, self._is_idle = 0, True

    @property
    def _oldest(self) -> int:
        return self._last - len(self._history) + 1

    def send(self, symbol: str, price: int) -> None:
        """Send the next tick. A symbol has at most 8 letters."""
        name = symbol.encode()
        if not 1 <= len(name) <= 8:
            raise ValueError(f"symbol is {symbol!r}: give 1 to 8 ASCII letters")
        self._last, self._is_idle = self._last + 1, False
        self._history.append(_TICK.pack(self._last, name, price))
        self._feed.send(self._history[-1])

    def serve(self, seconds: float) -> None:
        """Answer requests for so many seconds. Begin with a heartbeat if no tick was sent since last time."""
        if self._is_idle:
            self._feed.send(_HEARTBEAT.pack(self._oldest, self._last))
        self._is_idle, end = True, self._endpoint.now() + seconds
        while (left := end - self._endpoint.now()) > 0 and (request := self._requests.recv(timeout=left)):
            if len(request.payload) % _GAP.size == 0:
                self._repair(_GAP.iter_unpack(request.payload))

    def _repair(self, gaps: Iterable[tuple[int, int]]) -> None:
        ranges = (range(max(first, self._oldest), min(last, self._last) + 1) for first, last in gaps)
        numbers = islice(chain.from_iterable(ranges), MAX_REPAIR)
        if ticks := [self._history[number - self._oldest] for number in numbers]:
            self._feed.send_batch(ticks)
            self.repaired += len(ticks)


class Receiver:
    """The receiver's end, which starts with the first message that it hears.

    requests  number of requests for repair
    lost      number of ticks that the sender no longer had
    """

    def __init__(self, endpoint: mcast.Endpoint) -> None:
        self.requests = self.lost = 0
        self._endpoint = endpoint
        self._feed, self._repair = endpoint.join(FEED), endpoint.sender(REPAIR)
        self._early: dict[int, Tick] = {}
        self._next = self._newest = 0
        self._postpone()

    @property
    def missing(self) -> list[range]:
        """The gaps in the numbers of the ticks that have come."""
        known = [self._next - 1, *sorted(self._early), self._newest + 1]
        return [range(one + 1, other) for one, other in pairwise(known) if one + 1 < other]

    @property
    def _is_behind(self) -> bool:
        return 0 < self._next <= self._newest

    def ticks(self, timeout: float) -> Iterator[Tick]:
        """Yield ticks in order and without a gap, until no message has come for `timeout` seconds."""
        while message := self._recv(timeout):
            before = self._next
            if len(message.payload) == _TICK.size:
                number, symbol, price = _TICK.unpack(message.payload)
                self._next, self._newest = self._next or number, max(self._newest, number)
                if number >= self._next:
                    self._early[number] = Tick(number, symbol.rstrip(b"\0").decode(errors="replace"), price)
            elif len(message.payload) == _HEARTBEAT.size:
                oldest, last = _HEARTBEAT.unpack(message.payload)
                self._next, self._newest = self._next or last + 1, max(self._newest, last)
                gone = min(oldest, *self._early, last + 1) - self._next
                if gone > 0:
                    self.lost, self._next = self.lost + gone, self._next + gone
            while tick := self._early.pop(self._next, None):
                self._next += 1
                yield tick
            if not self._is_behind or self._next != before:
                self._postpone()

    def _postpone(self) -> None:
        """Ask in a while. Its length is random: if another receiver asks first, this one need not ask."""
        self._ask_at = self._endpoint.now() + RETRY * random.uniform(0.5, 1.0)

    def _recv(self, timeout: float) -> mcast.Message | None:
        """Return the next message, and ask for what is missing meanwhile."""
        end = self._endpoint.now() + timeout
        while self._is_behind and self._ask_at < end:
            if message := self._feed.recv(timeout=max(0.0, self._ask_at - self._endpoint.now())):
                return message
            gaps = self.missing[: self._repair.max_message_size // _GAP.size]
            self._repair.send(b"".join(_GAP.pack(gap.start, gap.stop - 1) for gap in gaps))
            self.requests += 1
            self._postpone()
        return self._feed.recv(timeout=max(0.0, end - self._endpoint.now()))


def main() -> None:
    parser = argparse.ArgumentParser(description="A market data feed over multicast.")
    parser.add_argument("role", choices=("send", "receive"))
    parser.add_argument("bind", help="the local address")
    parser.add_argument("--backend", default="udp", help="a provider, such as rdma (default: udp)")
    parser.add_argument("--ticks", type=int, default=1000, help="number of ticks to send (default: 1000)")
    given = parser.parse_args()
    with mcast.open_endpoint(given.backend, given.bind) as endpoint:
        if given.role == "receive":
            receiver = Receiver(endpoint)
            print("listening", flush=True)
            for tick in receiver.ticks(timeout=10):
                print(f"{tick.number} {tick.symbol} {tick.price / 100:.2f}", flush=True)
            print(f"{receiver.requests} requests for repair, {receiver.lost} ticks lost")
            return
        sender = Sender(endpoint)
        for number in range(given.ticks):
            sender.send(("ACME", "BOLT", "CORK")[number % 3], 10_000 + number)
            sender.serve(0.01)
        for _ in range(10):  # for those that have missed the last ticks
            sender.serve(0.1)


if __name__ == "__main__":
    main()
