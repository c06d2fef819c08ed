"""What this package does with the same commands as reference.c: a line in, a line of JSON out.

python ours.py SENDER_ADDRESS RECEIVER_ADDRESS...
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address
from itertools import cycle, islice
from time import monotonic as now
from time import sleep
from typing import Any

from mcast import Backend, Destination, JoinAttrEx, open_backend
from mcast.api import QpInit, QueuePair

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

    def batch(self, size: int, count: int, receivers: int = 1, ports: int = 1) -> Answer:
        with self.pair(receivers or 1, ports or 1) as (sender, destination, qps):
            payloads = payloads_of(size)
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

    def single(self, size: int, count: int) -> Answer:
        with self.pair() as (sender, destination, (receiver,)):
            payload, lost = bytes(size), 0
            start = now()
            for _ in range(count):
                sender.send_one(destination, payload)
                if receiver.recv_one(GIVE_UP) is None:
                    lost += 1
            return answer(count, now() - start, lost)

    def pingpong(self, size: int, count: int) -> Answer:
        with self.ends(*self.addresses[:2]) as (near_end, far_end):
            near_end.join(BACK)
            far_end.join(DATA)
            there, back = near_end.join(DATA, send_only=True), far_end.join(BACK, send_only=True)
            near, far = near_end.qp, far_end.qp
            wait_until_heard(near, there, [far])
            wait_until_heard(far, back, [near])
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


def wait_until_heard(sender: QueuePair, destination: Destination, receivers: list[QueuePair]) -> None:
    """Send empty messages until every receiver hears them: a switch may take a while to learn of a member."""
    for _ in range(100):
        sender.send_one(destination, b"")
        if all([receiver.recv_one(0.1) for receiver in receivers]):
            return
    raise TimeoutError("no receiver hears the sender")


def payloads_of(size: int) -> list[bytes]:
    """A chunk of messages; 0 stands for mixed sizes."""
    return [bytes(size or MIXED[place % len(MIXED)]) for place in range(CHUNK)]


def answer(count: int, seconds: float, lost: int = 0) -> Answer:
    return {"count": count, "seconds": seconds, "lost": lost}


def answer_latencies(latencies: list[float], seconds: float) -> Answer:
    latencies.sort()
    count = len(latencies)
    points = [latencies[count * percent // 100] for percent in range(100)]
    return {**answer(count, seconds), "p50": points[50], "p99": points[99], "all": points}


def tell(found: Answer) -> None:
    print(json.dumps(found), flush=True)


def on_null_verbs() -> Backend:
    """The rdma backend on null_verbs.c, where no device could be found."""
    from mcast.backends.rdma import backend, native
    from mcast.backends.rdma.pds import ProtectionDomains
    from mcast.backends.rdma.process import Process

    made = object.__new__(backend.RdmaBackend)
    made.process, made._native, made._channels = Process(), native.load(), []
    made._pds, made._lock, made._removed = ProtectionDomains(made._native), threading.Lock(), False
    return made


def main() -> None:
    (*options,) = (argument for argument in sys.argv[1:] if argument.startswith("-"))
    addresses = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    with on_null_verbs() if "--null" in options else open_backend("rdma") as backend:
        peer = Peer(backend, addresses)
        for line in sys.stdin:
            what, *numbers = line.split()
            tell(getattr(peer, what)(*map(int, numbers)))


if __name__ == "__main__":
    main()
