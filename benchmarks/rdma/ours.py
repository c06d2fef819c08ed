"""This package with the commands of reference.c: a line in, a line of JSON out.

python ours.py SENDER_ADDRESS RECEIVER_ADDRESS...
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Address
from itertools import cycle, islice
from pathlib import Path
from time import monotonic as now
from time import sleep
from typing import Any

from typing_extensions import Buffer

from mcast import Backend, Destination, open_backend
from mcast.api import RECORD_DTYPE, Batch, JoinAttrEx, Message, QpInit, QueuePair

CHUNK, WINDOW, ACK_EVERY, PROCESS_WINDOW = 32, 128, 64, 256
DATA, BACK, MANY = "239.9.1.1", "239.9.1.2", IPv4Address("239.10.0.0")
GIVE_UP = 5.0
MIXED = (64, 1024, 200, 512)
DEPTHS = QpInit(max_send_wr=128, max_recv_wr=512)

Answer = dict[str, Any]


class End:
    """An id with a QP, bound to an address."""

    def __init__(self, backend: Backend, address: str) -> None:
        self.channel = backend.event_channel()
        self.id = self.channel.create_id()
        self.id.bind_addr(address)
        self.qp: QueuePair = self.id.create_qp(DEPTHS)

    def join(self, group: str, send_only: bool = False) -> Destination:
        self.id.join_multicast_ex((JoinAttrEx.send_only if send_only else JoinAttrEx.full_member)(group))
        event = self.channel.get_event(GIVE_UP)
        assert event is not None
        ud = event.check().ud
        assert ud is not None
        return ud.destination

    def close(self) -> None:
        self.channel.close()


class Peer:
    def __init__(self, backend: Backend, addresses: list[str]) -> None:
        self.backend, self.addresses = backend, addresses

    @contextmanager
    def ends(self, *addresses: str) -> Iterator[list[End]]:
        made = [End(self.backend, address) for address in addresses]
        yield made
        for end in made:
            end.close()

    @contextmanager
    def pair(
        self, count: int = 1, ports: int = 1
    ) -> Iterator[tuple[QueuePair, Destination, list[QueuePair]]]:
        """A sender on the first address, receivers on the others, all of which have heard it."""
        with self.ends(self.addresses[0], *islice(cycle(self.addresses[1 : 1 + ports]), count)) as ends:
            sender, *members = ends
            for member in members:
                member.join(DATA)
            destination = sender.join(DATA, send_only=True)
            qps = [member.qp for member in members]
            wait_until_heard(sender.qp, destination, qps)
            yield sender.qp, destination, qps

    def batch(
        self, size: int, count: int, receivers: int = 1, ports: int = 1, registered: bool = False
    ) -> Answer:
        with self.pair(receivers or 1, ports or 1) as (sender, destination, qps):
            payloads = registered_payloads(sender, size) if registered else payloads_of(size)
            sent = slowest = 0
            received = [0] * len(qps)
            start = heard = now()
            while slowest < count and now() < heard + GIVE_UP:
                if sent < count and sent - slowest + CHUNK <= WINDOW:
                    sent += sender.send(destination, payloads[: count - sent])
                for place, qp in enumerate(qps):
                    with qp.recv(CHUNK, 0) as batch:
                        if len(batch):
                            received[place] += len(batch)
                            heard = now()
                slowest = min(received)
            return answer(count, now() - start, count - slowest)

    def registered(self, size: int, count: int) -> Answer:
        """Send from registered memory, which is not copied: as C does."""
        return self.batch(size, count, registered=True)

    def arrays(self, size: int, count: int) -> Answer:
        """Payloads as numpy's view of the memory they arrived in; lengths and sources come as columns."""
        return self._arrays(size, count, own=False)

    def own_arrays(self, size: int, count: int) -> Answer:
        """The same, received into an array of the user's."""
        return self._arrays(size, count, own=True)

    def _arrays(self, size: int, count: int, own: bool) -> Answer:
        import numpy

        rows = numpy.zeros((DEPTHS.max_recv_wr, 1024), numpy.uint8)
        record = numpy.dtype(RECORD_DTYPE)
        with self.ends(*self.addresses[:2]) as (sender, receiver):
            if own:
                receiver.qp.register(rows.data, 1024)
            receiver.join(DATA)
            destination = sender.join(DATA, send_only=True)
            wait_until_heard(sender.qp, destination, [receiver.qp])
            payloads = payloads_of(size)
            sent = received = 0
            start = heard = now()
            while received < count and now() < heard + GIVE_UP:
                if sent < count and sent - received + CHUNK <= WINDOW:
                    sent += sender.qp.send(destination, payloads[: count - sent])
                with receiver.qp.recv(CHUNK, 0) as batch:
                    if len(batch):
                        columns = numpy.frombuffer(batch.records, record)
                        lengths, sources = columns["length"], columns["source"]
                        memory = rows if own else numpy.asarray(batch.memory)
                        received += len(lengths)
                        heard = now()
                        del memory  # left, it would keep the lease
            seconds = now() - start
            assert len(sources) == len(lengths)
            assert set(lengths) == {size}
            return answer(count, seconds, count - received)

    def aio_batch(self, size: int, count: int) -> Answer:
        """Two endpoints of mcast.aio in one loop."""
        return asyncio.run(self._aio_batch(size, count))

    async def _aio_batch(self, size: int, count: int) -> Answer:
        async with self.aio_end(0) as near, self.aio_end(1) as far:
            sender = await near.sender(DATA)
            member = await far.join(DATA)
            await self.aio_heard(sender, member)
            room = asyncio.Semaphore(WINDOW // CHUNK)
            payloads = payloads_of(size)

            async def send() -> None:
                for _ in range(count // CHUNK):
                    await room.acquire()
                    await sender.send_batch(payloads)

            async def receive() -> int:
                received = 0
                async for batch in far.batches(GIVE_UP, CHUNK):
                    before = received
                    received += len(batch)
                    for _ in range(received // CHUNK - before // CHUNK):
                        room.release()
                    if received >= count // CHUNK * CHUNK:
                        break
                return received

            start = now()
            _, received = await asyncio.gather(send(), receive())
            return answer(received, now() - start, count // CHUNK * CHUNK - received)

    def aio_pingpong(self, size: int, count: int) -> Answer:
        return asyncio.run(self._aio_pingpong(size, count))

    async def _aio_pingpong(self, size: int, count: int) -> Answer:
        async with self.aio_end(0) as near, self.aio_end(1) as far:
            near_in, far_in = await near.join(BACK), await far.join(DATA)
            there, back = await near.sender(DATA), await far.sender(BACK)
            await self.aio_heard(there, far_in)
            await self.aio_heard(back, near_in)
            payload, latencies = bytes(size), []

            async def echo() -> None:
                for _ in range(count):
                    await far_in.recv(GIVE_UP)
                    await back.send(payload)

            echoing = asyncio.create_task(echo())
            begin = now()
            for _ in range(count):
                start = now()
                await there.send(payload)
                await near_in.recv(GIVE_UP)
                latencies.append(now() - start)
            await echoing
            return answer_latencies(latencies, now() - begin)

    def fd_batch(self, size: int, count: int) -> Answer:
        """asyncio on the queue pairs' own descriptors."""
        return asyncio.run(self._fd_batch(size, count))

    async def _fd_batch(self, size: int, count: int) -> Answer:
        with self.pair() as (sender, destination, (qp,)):
            receiver, payloads = Awaited(qp), payloads_of(size)
            sent = received = 0
            start = now()
            while received < count:
                if sent < count and sent - received + CHUNK <= WINDOW:
                    sent += sender.send(destination, payloads[: count - sent])
                with await receiver.recv(CHUNK) as batch:
                    received += len(batch)
            receiver.close()
            return answer(count, now() - start)

    def fd_pingpong(self, size: int, count: int) -> Answer:
        return asyncio.run(self._fd_pingpong(size, count))

    async def _fd_pingpong(self, size: int, count: int) -> Answer:
        with self.both_ways() as (near, there, far, back):
            payload, latencies = bytes(size), []
            near_in, far_in = Awaited(near), Awaited(far)
            start = now()
            for _ in range(count):
                sent = now()
                near.send_one(there, payload)
                await far_in.recv_one()
                far.send_one(back, payload)
                await near_in.recv_one()
                latencies.append(now() - sent)
            near_in.close()
            far_in.close()
            return answer_latencies(latencies, now() - start)

    def aio_end(self, place: int) -> Any:
        from mcast import aio

        return aio.open_endpoint(self.backend, self.addresses[place], loopback="on", rejoin=None)

    @staticmethod
    async def aio_heard(sender: Any, member: Any) -> None:
        for _ in range(100):
            await sender.send(b"")
            if await member.recv(0.1) is not None:
                return
        raise TimeoutError("no receiver hears the sender")

    def slow(self, size: int, count: int) -> Answer:
        """A fast receiver beside one that never receives: what the fast one gets."""
        with self.pair(2, 2) as (sender, destination, (fast, _)):
            payloads = payloads_of(size)
            sent = received = 0
            start = heard = now()
            while received < count and now() < heard + GIVE_UP:
                if sent < count and sent - received + CHUNK <= WINDOW:
                    sent += sender.send(destination, payloads[: count - sent])
                with fast.recv(CHUNK, 0) as batch:
                    if len(batch):
                        received += len(batch)
                        heard = now()
            return answer(count, now() - start, count - received)

    def idle(self, size: int, count: int) -> Answer:
        """Wait `count` seconds for a message that does not come: the CPU seconds it took, and wake-ups."""
        with self.ends(self.addresses[0]) as (end,):
            end.join(DATA)
            before = resource.getrusage(resource.RUSAGE_SELF)
            start = now()
            assert end.qp.recv_one(float(count)) is None
            after = resource.getrusage(resource.RUSAGE_SELF)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            return {**answer(1, now() - start), "cpu": cpu, "switches": after.ru_nvcsw - before.ru_nvcsw}

    def memory(self, size: int, count: int) -> Answer:
        """Resident bytes of a QP with its receives, of `count` of them; and the slab's size."""

        def resident() -> int:
            return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

        with self.ends(self.addresses[0]):
            before = resident()
            with self.ends(*[self.addresses[0]] * count) as ends:
                each = (resident() - before) / count
                slab = len(ends[0].qp._slab)  # type: ignore[attr-defined]
        return {**answer(count, 1.0), "each": each, "slab": slab}

    def single(self, size: int, count: int) -> Answer:
        with self.pair() as (sender, destination, (receiver,)):
            payload, lost = bytes(size), 0
            start = now()
            for _ in range(count):
                sender.send_one(destination, payload)
                if receiver.recv_one(GIVE_UP) is None:
                    lost += 1
            return answer(count, now() - start, lost)

    def late(self, size: int, count: int, nanoseconds: int, chunk: int, waits: bool = False) -> Answer:
        """Send alone, on the card made of memory, which completes each send so many nanoseconds late.

        `waits`: for the completion of each call, as if sends were not deferred.
        """
        with self.ends(self.addresses[0]) as (end,):
            destination, qp = end.join(DATA, send_only=True), end.qp
            payloads = list(payloads_of(size)[:chunk])
            qp.send(destination, payloads)  # makes the address handle
            qp.flush(GIVE_UP)
            card_delay(nanoseconds)
            start = now()
            for _ in range(count // chunk):
                if chunk == 1:
                    qp.send_one(destination, payloads[0])
                else:
                    qp.send(destination, payloads)
                if waits:
                    qp.flush(GIVE_UP)
            seconds = now() - start
            qp.flush(GIVE_UP)
            card_delay(0)
            return answer(count // chunk * chunk, seconds)

    def late_waited(self, size: int, count: int, nanoseconds: int, chunk: int) -> Answer:
        return self.late(size, count, nanoseconds, chunk, waits=True)

    @contextmanager
    def both_ways(self) -> Iterator[tuple[QueuePair, Destination, QueuePair, Destination]]:
        """Two ports, each a member of the group that the other one sends to."""
        with self.ends(*self.addresses[:2]) as (near, far):
            near.join(BACK)
            far.join(DATA)
            there, back = near.join(DATA, send_only=True), far.join(BACK, send_only=True)
            wait_until_heard(near.qp, there, [far.qp])
            wait_until_heard(far.qp, back, [near.qp])
            yield near.qp, there, far.qp, back

    def pingpong(self, size: int, count: int) -> Answer:
        with self.both_ways() as (near, there, far, back):
            payload, latencies = bytes(size), []
            start = now()
            for _ in range(count):
                sent = now()
                near.send_one(there, payload)
                far.recv_one(GIVE_UP)
                far.send_one(back, payload)
                near.recv_one(GIVE_UP)
                latencies.append(now() - sent)
            return answer_latencies(latencies, now() - start)

    def join(self, size: int, count: int) -> Answer:
        with self.ends(self.addresses[0]) as (end,):
            start = now()
            for _ in range(count):
                end.id.join_multicast(DATA)
                event = end.channel.get_event(GIVE_UP)
                assert event is not None
                event.check()
                end.id.leave_multicast(DATA)
            return answer(count, now() - start)

    def groups(self, size: int, count: int) -> Answer:
        groups = [str(MANY + number) for number in range(count)]
        with self.ends(self.addresses[0]) as (end,):
            start = now()
            for group in groups:
                end.id.join_multicast(group)
            for _ in groups:
                event = end.channel.get_event(GIVE_UP)
                assert event is not None
                event.check()
            seconds = now() - start
            for group in groups:
                end.id.leave_multicast(group)
            return answer(count, seconds)

    def receive(self, size: int, count: int) -> Answer:
        with self.ends(self.addresses[1]) as (end,):
            end.join(DATA)
            back = end.join(BACK, send_only=True)
            tell({"ready": True})
            while end.qp.recv_one(GIVE_UP) is None:
                pass
            end.qp.send_one(back, b"", imm=0)
            received = acked = 0
            while received < count:
                with end.qp.recv(CHUNK, GIVE_UP) as batch:
                    if not len(batch):
                        break
                    received += len(batch)
                if received - acked >= ACK_EVERY or received == count:
                    end.qp.send_one(back, b"", imm=received)
                    acked = received
            return answer(count, 0.0, count - received)

    def send(self, size: int, count: int) -> Answer:
        with self.ends(self.addresses[0]) as (end,):
            end.join(BACK)
            destination = end.join(DATA, send_only=True)
            payloads = payloads_of(size)
            sleep(0.3)  # until the bridge knows both groups: the first message is the only one to be answered
            end.qp.send_one(destination, b"")
            assert end.qp.recv_one(GIVE_UP) is not None
            sent = acked = 0
            start = now()
            while acked < count:
                if sent < count and sent - acked + CHUNK <= PROCESS_WINDOW:
                    sent += end.qp.send(destination, payloads[: count - sent])
                    wait = 0.0
                else:
                    wait = GIVE_UP
                with end.qp.recv(CHUNK, wait) as batch:
                    if len(batch):
                        acked = batch[-1].imm or 0
                    elif wait:
                        break
            return answer(count, now() - start, count - acked)


class Awaited:
    """A queue pair in an asyncio loop, by its descriptor."""

    def __init__(self, qp: QueuePair) -> None:
        self.qp, self.loop = qp, asyncio.get_running_loop()
        self.change: asyncio.Future[None] | None = None
        self.loop.add_reader(qp.fileno(), self.wake)

    def wake(self) -> None:
        if self.change is not None and not self.change.done():
            self.change.set_result(None)

    async def changed(self) -> None:
        self.change = self.loop.create_future()
        await self.change

    async def recv(self, max: int) -> Batch:
        while True:
            batch = self.qp.recv(max, 0)
            if len(batch):
                return batch
            await self.changed()

    async def recv_one(self) -> Message:
        while True:
            message = self.qp.recv_one(0)
            if message is not None:
                return message
            await self.changed()

    def close(self) -> None:
        self.loop.remove_reader(self.qp.fileno())


def wait_until_heard(sender: QueuePair, destination: Destination, receivers: list[QueuePair]) -> None:
    """Send empty messages until every receiver hears them: a switch may take a while to learn of a member."""
    for _ in range(100):
        sender.send_one(destination, b"")
        heard = [receiver.recv_one(0.1) for receiver in receivers]
        if all(heard):
            return
    raise TimeoutError("no receiver hears the sender")


def payloads_of(size: int) -> Sequence[Buffer]:
    """A chunk of messages; 0 stands for mixed sizes."""
    return [bytes(size or MIXED[place % len(MIXED)]) for place in range(CHUNK)]


def registered_payloads(sender: QueuePair, size: int) -> Sequence[Buffer]:
    memory = memoryview(bytearray(size * CHUNK))
    sender.register(memory)
    return [memory[start : start + size] for start in range(0, len(memory), size)]


def answer(count: int, seconds: float, lost: int = 0) -> Answer:
    return {"count": count, "seconds": seconds, "lost": lost}


def answer_latencies(latencies: list[float], seconds: float) -> Answer:
    latencies.sort()
    count = len(latencies)
    return {**answer(count, seconds), "p50": latencies[count // 2], "p99": latencies[count * 99 // 100]}


def tell(found: Answer) -> None:
    print(json.dumps(found), flush=True)


def card_delay(nanoseconds: int) -> None:
    """From now on the card made of memory completes sends so late."""
    from tests.card.card import Card, Stage

    Card(os.environ["MCAST_LIBRDMACM"]).delay(Stage.SEND, nanoseconds / 1000)


def null_backend(addresses: list[str]) -> Backend:
    """The rdma provider on the scripted card (tests/card), which MCAST_LIBRDMACM names."""
    from tests.card.card import Card, ethernet_port
    from tests.card.provider import CardBackend

    card = Card(os.environ["MCAST_LIBRDMACM"])
    card.reset()
    card.add(ethernet_port(*addresses, any_address=1), name=b"null0", guid=1)
    return CardBackend(card)


def main() -> None:
    options = [argument for argument in sys.argv[1:] if argument.startswith("-")]
    addresses = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    with null_backend(addresses) if "--null" in options else open_backend("rdma") as backend:
        peer = Peer(backend, addresses)
        for line in sys.stdin:
            what, *numbers = line.split()
            gc.collect()  # what imports and earlier commands have made is not looked at within this one
            tell(getattr(peer, what)(*map(int, numbers)))


if __name__ == "__main__":
    main()
