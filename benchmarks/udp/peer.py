"""The ends of benchmarks/udp/compare.py in Python: a command a line in, a line of JSON out, as reference.c.

python -m benchmarks.udp.peer ours|sockets ADDRESS CREDITS

`ours` is the provider `udp`, `sockets` are UDP multicast sockets and asyncio datagrams. In the file CREDITS
each receiver counts what it has got, and a sender is at most WINDOW messages ahead of the slowest one. All
programs keep to that in the same way, reference.c included.
"""

from __future__ import annotations

import asyncio
import gc
import json
import mmap
import socket
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from statistics import median
from time import monotonic, process_time
from typing import Any

from mcast import Destination, aio, open_backend
from mcast.api import Backend, EventChannel, JoinAttrEx, QpInit, QueuePair

BATCH, WINDOW, PLACES, LINE = 64, 1024, 16, 8
"""Those of reference.c."""
DATA, BACK, PORT = "239.7.7.7", "239.7.7.8", 4791
DEPTH = 2 * WINDOW
IDLE = 0.02
"""Seconds after which a receiver that waits looks whether the sender has ended."""
STALLED = 5.0
"""Seconds without progress after which what is under way counts as lost. On a machine that is busy a receiver
waits half a second for a processor, and a sender that takes its messages for lost overruns its window."""
MOMENT = 20e-6
"""Seconds that a sender sleeps whose window is full."""
GIVE_UP = 20.0
RECEIVE_BUFFER = 32 << 20
_SO_RCVBUFFORCE = 33

Answer = dict[str, Any]


class Credits:
    """What each receiver has got, in memory that all ends share."""

    BYTES = 8 * (PLACES * LINE + 1)

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), self.BYTES)).cast("Q")

    def clear(self) -> None:
        """Begin a run."""
        for place in range(len(self._words)):
            self._words[place] = 0

    @property
    def is_over(self) -> bool:
        """True when the sender has ended."""
        return bool(self._words[PLACES * LINE])

    def got(self, place: int, count: int) -> None:
        """Tell the sender how many messages this receiver has got."""
        self._words[place * LINE] = count

    def pace(self, receivers: int, count: int, send: Callable[[int], object]) -> Answer:
        """Send `count` messages by `send`, which is given how many; measure until all have got them."""
        words, places = self._words, range(0, receivers * LINE, LINE)
        lost = [0] * receivers
        sent = seen = 0
        start, cpu = monotonic(), process_time()
        progress = start
        while True:
            least = min([words[place] + gone for place, gone in zip(places, lost, strict=True)])
            if least >= count:
                break
            some = min(BATCH, count - sent)
            if some and sent + some <= least + WINDOW:
                send(some)
                sent += some
                continue
            now = monotonic()
            if least != seen:
                seen, progress = least, now
            elif now > progress + STALLED:
                lost = [sent - words[place] for place in places]
                progress = now
            time.sleep(MOMENT)
        cpu, seconds = process_time() - cpu, monotonic() - start
        words[PLACES * LINE] = 1
        return {"count": count, "seconds": seconds, "cpu": cpu}


class Ends(ABC):
    """What one program does with each command."""

    def __init__(self, address: str, credits: Credits) -> None:
        self.address, self.credits = address, credits

    @abstractmethod
    def sender(self, group: str, size: int, single: bool) -> Callable[[int], object]:
        """Return what sends so many messages."""

    @abstractmethod
    def receiver(self, group: str, single: bool) -> Callable[[], int]:
        """Join, and return what waits for messages for a moment, and returns how many there were."""

    @abstractmethod
    async def talker(self, to: str, own: str) -> Any:
        """Join `own`, and return an object with the coroutines `send(payload)` and `recv()`."""

    def drops(self) -> Counter[str]:
        """Return what the program knows of messages that were lost: a reason -> how many."""
        return Counter()

    @abstractmethod
    def close(self) -> None:
        """Close what the command has opened."""

    def send(self, receivers: int, size: int, count: int, single: int) -> Answer:
        return self.credits.pace(receivers, count, self.sender(DATA, size, bool(single)))

    def receive(self, place: int, size: int, count: int, single: int) -> Answer:
        receive, received, credits = self.receiver(DATA, bool(single)), 0, self.credits
        tell({"ready": True})
        before, cpu = self.drops(), process_time()
        while received < count:
            found = receive()
            if found:
                received += found
                credits.got(place, received)
            elif credits.is_over:
                break
        cpu = process_time() - cpu
        return {"count": received, "cpu": cpu, "drops": self.drops() - before}

    def ping(self, _: int, size: int, count: int, awaits: int) -> Answer:
        if awaits:
            return asyncio.run(self._ping(size, count))
        send, receive = self.sender(DATA, size, True), self.receiver(BACK, True)
        times, cpu = [], process_time()
        for _ in range(count):
            start = monotonic()
            send(1)
            while not receive():
                pass
            times.append(monotonic() - start)
        return {"count": count, "seconds": median(times), "cpu": process_time() - cpu}

    def echo(self, _: int, size: int, count: int, awaits: int) -> Answer:
        if awaits:
            return asyncio.run(self._echo(size, count))
        receive, send = self.receiver(DATA, True), self.sender(BACK, size, True)
        tell({"ready": True})
        for _ in range(count):
            while not receive():
                pass
            send(1)
        return {"count": count}

    async def _ping(self, size: int, count: int) -> Answer:
        talker, payload = await self.talker(DATA, BACK), bytes(size)
        times, cpu = [], process_time()
        for _ in range(count):
            start = monotonic()
            await talker.send(payload)
            await talker.recv()
            times.append(monotonic() - start)
        await talker.close()
        return {"count": count, "seconds": median(times), "cpu": process_time() - cpu}

    async def _echo(self, size: int, count: int) -> Answer:
        talker, payload = await self.talker(BACK, DATA), bytes(size)
        tell({"ready": True})
        for _ in range(count):
            await talker.recv()
            await talker.send(payload)
        await talker.close()
        return {"count": count}


class Ours(Ends):
    """The provider `udp`."""

    def __init__(self, address: str, credits: Credits) -> None:
        super().__init__(address, credits)
        self.backend: Backend = open_backend("udp")
        self._channels: list[EventChannel] = []

    def _joined(self, group: str, sends: bool) -> tuple[QueuePair, Destination]:
        channel = self.backend.event_channel()
        self._channels.append(channel)
        cm_id = channel.create_id()
        cm_id.bind_addr(self.address)
        qp = cm_id.create_qp(QpInit(max_recv_wr=DEPTH))
        cm_id.join_multicast_ex(JoinAttrEx.send_only(group) if sends else JoinAttrEx.full_member(group))
        event = channel.get_event(GIVE_UP)
        assert event is not None
        ud = event.check().ud
        assert ud is not None
        return qp, ud.destination

    def sender(self, group: str, size: int, single: bool) -> Callable[[int], object]:
        qp, destination = self._joined(group, True)
        payload, payloads = bytes(size), [bytes(size)] * BATCH

        def one_by_one(count: int) -> None:
            for _ in range(count):
                qp.send_one(destination, payload)

        def at_once(count: int) -> None:
            qp.send(destination, payloads if count == BATCH else payloads[:count])

        return one_by_one if single else at_once

    def receiver(self, group: str, single: bool) -> Callable[[], int]:
        qp, _ = self._joined(group, False)

        def one() -> int:
            return qp.recv_one(IDLE) is not None

        def some() -> int:
            with qp.recv(BATCH, IDLE) as batch:
                return len(batch)

        return one if single else some

    def drops(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for device in self.backend.devices():
            found.update(self.backend.port_counters(device.name))
        del found["delivered"]
        return found

    async def talker(self, to: str, own: str) -> Any:
        return await _Talker.open(self.backend, self.address, to, own)

    def join(self, _: int, __: int, count: int, ___: int) -> Answer:
        channel = self.backend.event_channel()
        self._channels.append(channel)
        cm_id = channel.create_id()
        cm_id.bind_addr(self.address)
        cm_id.create_qp(QpInit(max_recv_wr=DEPTH))
        start, cpu = monotonic(), process_time()
        for _ in range(count):
            cm_id.join_multicast(DATA)
            event = channel.get_event(GIVE_UP)
            assert event is not None
            event.check()
            cm_id.leave_multicast(DATA)
        cpu, seconds = process_time() - cpu, monotonic() - start
        return {"count": count, "seconds": seconds, "cpu": cpu}

    def close(self) -> None:
        while self._channels:
            self._channels.pop().close()


class _Talker:
    """An endpoint of mcast.aio that sends to one group and is a member of another one."""

    def __init__(self, endpoint: Any, sender: Any, group: Any) -> None:
        self._endpoint, self.send, self.recv = endpoint, sender.send, group.recv

    @classmethod
    async def open(cls, backend: Backend, address: str, to: str, own: str) -> _Talker:
        endpoint = aio.open_endpoint(backend, address)
        return cls(endpoint, await endpoint.sender(to), await endpoint.join(own))

    async def close(self) -> None:
        await self._endpoint.close()


class Sockets(Ends):
    """UDP multicast sockets of Python."""

    def __init__(self, address: str, credits: Credits) -> None:
        super().__init__(address, credits)
        self._open: list[socket.socket] = []

    def _sending(self) -> socket.socket:
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._open.append(one)
        one.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(self.address))
        return one

    def _receiving(self, group: str) -> socket.socket:
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._open.append(one)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, RECEIVE_BUFFER)
        one.bind((group, PORT))
        membership = socket.inet_aton(group) + socket.inet_aton(self.address)
        one.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
        return one

    def sender(self, group: str, size: int, single: bool) -> Callable[[int], object]:
        one, to, payload = self._sending(), (group, PORT), bytes(size)

        def one_by_one(count: int) -> None:
            for _ in range(count):
                one.sendto(payload, to)

        return one_by_one

    def receiver(self, group: str, single: bool) -> Callable[[], int]:
        one = self._receiving(group)
        # not settimeout, with which Python calls poll before each recv
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, int(IDLE * 1e6)))

        def receive() -> int:
            try:
                return bool(one.recv(2048))
            except BlockingIOError:
                return 0

        return receive

    async def talker(self, to: str, own: str) -> Any:
        receiving = self._receiving(own)
        receiving.setblocking(False)
        sending = self._sending()
        sending.setblocking(False)
        return await _Datagrams.open(receiving, sending, (to, PORT))

    def close(self) -> None:
        while self._open:
            self._open.pop().close()


class _Datagrams(asyncio.DatagramProtocol):
    """What asyncio offers for datagrams, with a queue of those that have come."""

    _receiving: asyncio.DatagramTransport
    _sending: asyncio.DatagramTransport
    _to: tuple[str, int]

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.recv: Callable[[], Coroutine[Any, Any, bytes]] = self._queue.get

    @classmethod
    async def open(cls, receiving: socket.socket, sending: socket.socket, to: tuple[str, int]) -> _Datagrams:
        loop = asyncio.get_running_loop()
        own = cls()
        own._receiving, _ = await loop.create_datagram_endpoint(lambda: own, sock=receiving)
        own._sending, _ = await loop.create_datagram_endpoint(asyncio.DatagramProtocol, sock=sending)
        own._to = to
        return own

    def datagram_received(self, data: bytes, address: Any) -> None:
        self._queue.put_nowait(data)

    async def send(self, payload: bytes) -> None:
        self._sending.sendto(payload, self._to)

    async def close(self) -> None:
        self._receiving.close()
        self._sending.close()


def tell(found: Answer) -> None:
    print(json.dumps(found), flush=True)


def main() -> None:
    which, address, path = sys.argv[1:]
    kinds: dict[str, type[Ends]] = {"ours": Ours, "sockets": Sockets}
    ends = kinds[which](address, Credits(Path(path)))
    for line in sys.stdin:
        what, *numbers = line.split()
        gc.collect()  # what imports and earlier commands have made is not looked at within this one
        answer = getattr(ends, what)(*map(int, numbers))
        ends.close()
        tell(answer)


if __name__ == "__main__":
    main()
