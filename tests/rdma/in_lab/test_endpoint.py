"""The endpoint on real devices, with nothing but the backend's name changed."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from ipaddress import IPv4Address

import pytest

from mcast import Endpoint, Lost, Rejoined, RejoinPolicy, aio, open_endpoint
from mcast.api import Closed, McastError, Testbed, TimedOut
from mcast.backends.net import hostnet
from mcast.backends.rdma.testbed import RdmaTestbed

BOUND = 100.0
"""Seconds; the longest that anything may take, never a delay."""


DSCP, ROCE_PORT = 26, 4791
_ALL_PACKETS = 3
"""ETH_P_ALL."""


def test_traffic_class_is_in_the_ip_header(lab_bed: Testbed) -> None:
    """The traffic class stands in the ip header on the wire."""
    assert isinstance(lab_bed, RdmaTestbed)
    ours, theirs, *_ = lab_bed.ports
    group = "239.77.4.9"
    with (
        socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ALL_PACKETS)) as wire,
        open_endpoint(lab_bed.backend, theirs) as receiver,
        open_endpoint(lab_bed.backend, ours, traffic_class=DSCP << 2) as sender,
    ):
        wire.bind((lab_bed._ports[ours].bridge_port, _ALL_PACKETS))
        wire.settimeout(BOUND)
        member, out = receiver.join(group), sender.sender(group)
        assert member.destination.traffic_class == 0
        out.send(b"of that class")
        while True:
            packet = wire.recv(4096)
            if packet[16:20] == IPv4Address(group).packed and b"of that class" in packet:
                break
        assert int.from_bytes(packet[22:24]) == ROCE_PORT
        assert packet[1] == DSCP << 2


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


@contextmanager
def returning(bed: Testbed, port: IPv4Address) -> Iterator[Callable[[], None]]:
    """Remove the port's device; calling the value gives it back once the kernel has let go of it."""
    assert isinstance(bed, RdmaTestbed)
    where = bed._ports[port]
    removal = subprocess.Popen([hostnet.program("rdma"), "link", "delete", where.device])

    def give_back() -> None:
        assert removal.wait(BOUND) == 0
        hostnet.run("rdma", "link", "add", where.device, "type", "rxe", "netdev", where.netdev)

    try:
        yield give_back
    finally:
        removal.wait(BOUND)


def until(condition: Callable[[], object]) -> None:
    pause = threading.Event()
    for _ in range(int(BOUND / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    assert condition()


def is_receiving(endpoint: Endpoint) -> bool:
    return endpoint._claim.locked()


def test_members_hear_each_other(lab_bed: Testbed, pool: ThreadPoolExecutor) -> None:
    names = [f"239.70.1.{number}" for number in range(3)]
    endpoints = [open_endpoint(lab_bed.backend, str(port)) for port in lab_bed.ports[:3]]
    groups = [endpoint.join(names[0]) for endpoint in endpoints]
    ready = list(pool.map(lambda group: group.ready(members=2, timeout=BOUND), groups))
    assert all(len(peers) == 2 for peers in ready)
    groups[0].send_batch([b"%d" % number for number in range(100)])
    for endpoint in endpoints:
        found: list[bytes] = []
        while len(found) < 100:
            with endpoint.recv_batch(timeout=BOUND) as batch:
                assert len(batch)
                found += [bytes(message.payload) for message in batch]
        assert found == [b"%d" % number for number in range(100)]
    stats = endpoints[1].stats()
    assert stats.received_bytes == sum(len(b"%d" % number) for number in range(100))
    assert stats.port_counters
    for endpoint in endpoints:
        endpoint.close()


def test_unanswered_sender_gets_suspicions(lab_bed: Testbed) -> None:
    """A sender that nobody answers is told why that may be."""
    with open_endpoint(lab_bed.backend, str(lab_bed.ports[0])) as endpoint:
        with pytest.raises(TimedOut, match="unicast") as caught:
            endpoint.sender("239.70.2.1").ready(timeout=0.1)
        assert "Membership" in str(caught.value)


def test_own_messages_are_filtered_in_software(lab_bed: Testbed) -> None:
    """Own messages are filtered where the device cannot keep them back."""
    port, there = map(str, lab_bed.ports[:2])
    with (
        open_endpoint(lab_bed.backend, port, loopback="off") as endpoint,
        open_endpoint(lab_bed.backend, there) as other,
    ):
        assert endpoint.loopback[1:] == (False, True)
        group, member = endpoint.join("239.70.3.1"), other.join("239.70.3.1")
        assert group.probe_loopback(timeout=BOUND) is True
        # The bridge follows a join with a delay.
        until(lambda: set(lab_bed.ports[:2]) <= lab_bed.observer.group_ports(group.mgid))
        group.send(b"mine")
        heard = member.recv(BOUND)
        assert heard is not None
        member.send(b"yours")
        message = group.recv(BOUND)
        assert message is not None
        assert bytes(message.payload) == b"yours"
        assert dict(group.stats().dropped) == {"own message": 1}


def test_one_sleep_serves_messages_and_a_join(lab_bed: Testbed, pool: ThreadPoolExecutor) -> None:
    """One sleep serves messages and a join of another thread."""
    with open_endpoint(lab_bed.backend, str(lab_bed.ports[0])) as endpoint:
        group = endpoint.join("239.70.4.1")
        receiving = pool.submit(group.recv, BOUND)
        until(partial(is_receiving, endpoint))
        assert pool.submit(endpoint.join, "239.70.4.2").result(BOUND).joined
        assert not receiving.done()
        group.send(b"end")
        assert receiving.result(BOUND) is not None


def test_close_wakes_who_waits(lab_bed: Testbed, pool: ThreadPoolExecutor) -> None:
    endpoint = open_endpoint(lab_bed.backend, str(lab_bed.ports[0]))
    group = endpoint.join("239.70.5.1")
    waiting = [pool.submit(group.recv), pool.submit(endpoint.recv)]
    until(partial(is_receiving, endpoint))
    endpoint.close()
    for one in waiting:
        with pytest.raises(Closed):
            one.result(BOUND)


def test_leave_wakes_a_waiting_thread(lab_bed: Testbed, pool: ThreadPoolExecutor) -> None:
    """Leaving wakes the thread that waits for the group."""
    with open_endpoint(lab_bed.backend, str(lab_bed.ports[0])) as endpoint:
        group = endpoint.join("239.70.11.1")
        messages = pool.submit(list, group)
        until(partial(is_receiving, endpoint))
        group.leave()
        assert messages.result(BOUND) == []


def test_fork_is_refused_and_harms_no_parent(lab_bed: Testbed) -> None:
    """A fork is told to open its own and does the parent no harm."""
    with open_endpoint(lab_bed.backend, str(lab_bed.ports[0])) as endpoint:
        group = endpoint.join("239.70.9.1")
        child = os.fork()
        if not child:
            code = 1
            try:
                group.recv(timeout=0)
            except McastError as error:
                code = 0 if "spawn" in str(error) else 2
                endpoint.close()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        group.send(b"still here")
        assert group.recv(BOUND) is not None


def test_lost_device_is_used_again(lab_bed: Testbed, pool: ThreadPoolExecutor) -> None:
    """A lost device is used again as soon as it is back."""
    here, there = lab_bed.ports[:2]
    with (
        open_endpoint(lab_bed.backend, str(there)) as sender,
        open_endpoint(lab_bed.backend, str(here), rejoin=RejoinPolicy(maximum=0.2)) as receiver,
    ):
        out, group = sender.join("239.70.6.1"), receiver.join("239.70.6.1")
        receiving = pool.submit(group.recv)
        until(partial(is_receiving, receiver))
        with returning(lab_bed, here) as give_back:
            until(lambda: not group.joined)
            give_back()
            until(lambda: group.joined)
        assert receiver.stats().rejoins == 1
        hearing = pool.submit(out.ready, timeout=BOUND)  # the bridge follows a join with a delay
        assert hearing.result(BOUND)
        out.send(b"heard")
        message = receiving.result(BOUND)
        assert message is not None
        assert bytes(message.payload) == b"heard"
        lost, rejoined = receiver.next_event(), receiver.next_event()
        assert isinstance(lost, Lost)
        assert isinstance(rejoined, Rejoined)
        assert rejoined.outage > 0


def test_asyncio_sleeps_on_the_devices_descriptors(lab_bed: Testbed) -> None:
    here, there = map(str, lab_bed.ports[:2])
    threads = threading.active_count()

    async def main() -> None:
        async with (
            aio.open_endpoint(lab_bed.backend, here, send_depth=4) as one,
            aio.open_endpoint(lab_bed.backend, there) as other,
            one.join("239.70.7.1") as out,
            other.join("239.70.7.1") as group,
        ):
            found: list[bytes] = []

            async def hear() -> None:
                async for message in group:
                    found.append(bytes(message.payload))
                    if len(found) == 50:
                        return

            hearing = asyncio.create_task(hear())
            assert await out.ready(timeout=BOUND)
            for number in range(50):
                await out.send(b"%d" % number)
                if number % 10 == 0:
                    await asyncio.sleep(0.01)
            await asyncio.wait_for(hearing, BOUND)
            hearing = asyncio.create_task(hear())
            found.clear()
            assert await out.send_batch([b"%d" % number for number in range(50)]) == 50
            await asyncio.wait_for(hearing, BOUND)
            assert found == [b"%d" % number for number in range(50)]
            assert threading.active_count() == threads
            waiting = asyncio.create_task(group.recv())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(main())


def test_aio_restores_a_lost_device(lab_bed: Testbed) -> None:
    """Asyncio restores a lost device in the background."""
    here = lab_bed.ports[0]

    async def main() -> None:
        policy = RejoinPolicy(maximum=0.2)
        async with aio.open_endpoint(lab_bed.backend, str(here), rejoin=policy) as endpoint:
            group = await endpoint.join("239.70.8.1")
            waiting = asyncio.create_task(group.recv())
            with returning(lab_bed, here) as give_back:
                assert isinstance(await endpoint.next_event(BOUND), Lost)
                await asyncio.to_thread(give_back)
                assert isinstance(await endpoint.next_event(BOUND), Rejoined)
            await group.send(b"to myself")
            message = await asyncio.wait_for(waiting, BOUND)
            assert message is not None
            assert bytes(message.payload) == b"to myself"

    asyncio.run(main())
