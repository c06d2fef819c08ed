"""One endpoint, several threads: receivers, senders, joiners, and a close that wakes them all."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from mcast import Endpoint, Lost, Membership, Rejoined, open_backend, open_endpoint
from mcast.api import Backend, Closed, Message
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.backend import SimQueuePair
from mcast.backends.sim.faults import Drop, Requests, incidents
from mcast.backends.sim.testbed import SimObserver

from ..networks import KINDS, network_of

GROUP, OTHER = "239.1.2.3", "239.4.5.6"
BOUND = 30.0
"""Seconds; the longest that anything may take, never a delay."""


@pytest.fixture(params=[Fabric.roce, Fabric.infiniband], ids=["roce", "infiniband"])
def fabric(request: pytest.FixtureRequest) -> Iterator[Fabric]:
    made: Fabric = request.param(clock="wall")
    yield made
    assert SimObserver(made).leftovers() == ()
    made.close()


@pytest.fixture
def sim(fabric: Fabric) -> Iterator[Backend]:
    with open_fabric(fabric) as opened:
        yield opened


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Of each kind of network, simulated, and of cards made of memory."""
    network = network_of(request, clock="wall")
    with network.open() as opened:
        yield opened
    assert network.leftovers() == ()
    network.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as made:
        yield made


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition, without a fixed sleep."""
    pause = threading.Event()
    for _ in range(int(BOUND / 0.005)):
        if condition():
            return
        pause.wait(0.005)
    assert condition()


def rejoined(endpoint: Endpoint, times: int) -> bool:
    return endpoint.stats().rejoins == times


def receive(member: Membership, count: int) -> list[Message | None]:
    return [member.recv(BOUND) for _ in range(count)]


def is_receiving(endpoint: Endpoint) -> bool:
    return endpoint._claim.locked()


def test_threads_receive_send_join_and_leave(backend: Backend, pool: ThreadPoolExecutor) -> None:
    """One receives while many send and one joins and leaves."""
    senders, rounds = 4, 50
    with open_endpoint(backend, "10.0.0.1") as out, open_endpoint(backend, "10.0.0.2") as into:
        group, member = out.sender(GROUP), into.join(GROUP)

        def send(number: int) -> None:
            for index in range(rounds):
                group.send_batch([b"%d %d" % (number, index)] * 2)
                while into.stats().receive_free < 100:
                    assert member.stats().joined

        def join_and_leave() -> None:
            for index in range(rounds):
                with into.join(f"239.5.5.{index}"):
                    assert len(into.groups) == 2

        def receive() -> list[bytes]:
            found: list[bytes] = []
            while len(found) < senders * rounds * 2:
                message = member.recv(timeout=BOUND)
                assert message is not None, f"{len(found)} came"
                found.append(bytes(message.payload))
            return found

        received = pool.submit(receive)
        jobs = [pool.submit(send, number) for number in range(senders)] + [pool.submit(join_and_leave)]
        for job in jobs:
            job.result(BOUND)
        found = received.result(BOUND)
        assert Counter(found) == {b"%d %d" % (n, i): 2 for n in range(senders) for i in range(rounds)}
        for number in range(senders):  # each sender's messages are in order
            own = [payload for payload in found if payload.startswith(b"%d " % number)]
            assert own == sorted(own, key=lambda payload: int(payload.split()[1]))
        assert group.stats().sent == len(found)


def test_numbers_of_sending_threads_are_in_order(backend: Backend, pool: ThreadPoolExecutor) -> None:
    """Numbers of several sending threads go out in order."""
    with (
        open_endpoint(backend, "10.0.0.1", sequence=True) as out,
        open_endpoint(backend, "10.0.0.2", sequence=True, receive_depth=4096) as into,
    ):
        group, member = out.sender(GROUP), into.join(GROUP)
        list(pool.map(lambda _: [group.send_batch([b"x"] * 3) for _ in range(100)], range(4)))
        assert sum(len(batch) for batch in into.batches(timeout=0.05)) == 1200
        stats = member.stats()
        assert (stats.gaps, stats.late, stats.duplicates) == (0, 0, 0)


def test_numbering_waits_for_the_send_before(
    sim: Backend, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message is not numbered while another of its group is on its way."""
    with (
        open_endpoint(sim, "10.0.0.1", sequence=True) as out,
        open_endpoint(sim, "10.0.0.2", sequence=True) as into,
    ):
        group, member = out.sender(GROUP), into.join(GROUP)
        first, second, send = threading.Event(), threading.Event(), SimQueuePair.send

        def overtakable(*arguments: Any) -> int:
            if first.is_set():
                second.set()
            else:
                first.set()
                second.wait(0.1)  # the second could overtake the first here
            return send(*arguments)

        monkeypatch.setattr(SimQueuePair, "send", overtakable)
        one = pool.submit(group.send, b"1")
        assert first.wait(BOUND)
        pool.submit(group.send, b"2").result(BOUND)
        one.result(BOUND)
        texts = [member.recv(BOUND), member.recv(BOUND)]
        assert [bytes(message.payload) for message in texts if message] == [b"1", b"2"]
        assert member.stats().late == 0


def test_groups_receive_in_threads(backend: Backend, pool: ThreadPoolExecutor) -> None:
    """Members of several groups receive in threads of their own."""
    names = [f"239.6.6.{number}" for number in range(4)]
    with open_endpoint(backend, "10.0.0.1") as out, open_endpoint(backend, "10.0.0.2") as into:
        members = [into.join(name) for name in names]
        jobs = [pool.submit(receive, member, 30) for member in members]
        senders = [out.sender(name) for name in names]
        for index in range(30):
            for number, sender in enumerate(senders):
                sender.send(b"%d %d" % (number, index))
        for number, job in enumerate(jobs):
            texts = [None if message is None else bytes(message.payload) for message in job.result(BOUND)]
            assert texts == [b"%d %d" % (number, index) for index in range(30)]


def test_a_timeout_holds_while_another_thread_receives(backend: Backend, pool: ThreadPoolExecutor) -> None:
    with open_endpoint(backend, "10.0.0.1") as endpoint:
        one, two = endpoint.join(GROUP), endpoint.join(OTHER)
        leader = pool.submit(one.recv, BOUND)
        until(lambda: is_receiving(endpoint))
        assert two.recv(timeout=0.02) is None
        assert two.recv(timeout=0) is None
        assert len(endpoint.recv_batch(timeout=0.02)) == 0
        one.send(b"end")
        assert leader.result(BOUND) is not None


def test_whoever_is_left_goes_on_receiving(backend: Backend, pool: ThreadPoolExecutor) -> None:
    with open_endpoint(backend, "10.0.0.1") as endpoint:
        one, two = endpoint.join(GROUP), endpoint.join(OTHER)
        first = pool.submit(one.recv, BOUND)
        until(lambda: is_receiving(endpoint))
        second = pool.submit(two.recv, BOUND)
        one.send(b"1")
        assert first.result(BOUND) is not None
        two.send(b"2")
        message = second.result(BOUND)
        assert message is not None
        assert bytes(message.payload) == b"2"


def test_join_completes_beside_a_receive(backend: Backend, pool: ThreadPoolExecutor) -> None:
    """A join in another thread completes while one receives."""
    with open_endpoint(backend, "10.0.0.1") as endpoint:
        group = endpoint.join(GROUP)
        receiver = pool.submit(group.recv, BOUND)
        until(lambda: is_receiving(endpoint))
        other = pool.submit(endpoint.join, OTHER, timeout=BOUND).result(BOUND)
        assert other.joined
        assert not receiver.done()
        group.send(b"end")
        assert receiver.result(BOUND) is not None


def test_ready_means_that_the_others_hear(backend: Backend, pool: ThreadPoolExecutor) -> None:
    endpoints = [open_endpoint(backend, f"10.0.0.{number}") for number in (1, 2, 3)]
    groups = [endpoint.join(GROUP) for endpoint in endpoints]
    found = list(pool.map(lambda group: group.ready(members=2, timeout=BOUND), groups))
    names = {endpoint.qp_num for endpoint in endpoints}
    for endpoint, peers in zip(endpoints, found, strict=True):
        assert {peer.qp_num for peer in peers} == names - {endpoint.qp_num}
        endpoint.close()


def test_ready_waits_for_late_switches(pool: ThreadPoolExecutor) -> None:
    """Ready waits for switches that are programmed late."""
    fabric = Fabric.infiniband(clock="wall")
    with (
        open_fabric(fabric) as backend,
        open_endpoint(backend, "10.0.0.1") as out,
        open_endpoint(backend, "10.0.0.2") as into,
    ):
        fabric.program_late(3600)
        group, member = out.join(GROUP), into.join(GROUP)
        group.send(b"too early")
        receiving, asking = pool.submit(member.recv, BOUND), pool.submit(group.ready, timeout=BOUND)
        until(lambda: is_receiving(out) and is_receiving(into))
        fabric.program_late(0)
        assert asking.result(BOUND)
        assert not receiving.done()
        group.send(b"heard")
        message = receiving.result(BOUND)
        assert message is not None
        assert bytes(message.payload) == b"heard"
    fabric.close()


def test_a_sender_is_answered_by_unicast(backend: Backend, pool: ThreadPoolExecutor) -> None:
    with open_endpoint(backend, "10.0.0.1") as out, open_endpoint(backend, "10.0.0.2") as into:
        sender, member = out.sender(GROUP), into.join(GROUP)
        receiving = pool.submit(member.recv, BOUND)
        assert {peer.qp_num for peer in sender.ready(timeout=BOUND)} == {into.qp_num}
        sender.send(b"end")
        message = receiving.result(BOUND)
        assert message is not None
        assert bytes(message.payload) == b"end"


@pytest.mark.parametrize(
    "wait",
    [
        lambda endpoint: endpoint.recv(),
        lambda endpoint: endpoint.recv_batch(),
        lambda endpoint: endpoint.groups[0].recv(),
        lambda endpoint: endpoint.next_event(None),
        lambda endpoint: endpoint.groups[0].ready(timeout=None),
    ],
    ids=["recv", "recv_batch", "group.recv", "next_event", "ready"],
)
def test_close_wakes_whoever_waits(
    backend: Backend, pool: ThreadPoolExecutor, wait: Callable[[Endpoint], object]
) -> None:
    endpoint = open_endpoint(backend, "10.0.0.1")
    endpoint.join(GROUP)
    waiting: list[Future[object]] = [pool.submit(wait, endpoint) for _ in range(3)]
    until(lambda: is_receiving(endpoint))
    endpoint.close()
    for one in waiting:
        with pytest.raises(Closed):
            one.result(BOUND)


@pytest.mark.parametrize("wait", ["recv", "recv_batch", "send"])
def test_closing_the_backend_wakes_whoever_waits(fabric: Fabric, pool: ThreadPoolExecutor, wait: str) -> None:
    backend = open_fabric(fabric)
    endpoint = open_endpoint(backend, "10.0.0.1")
    group = endpoint.join(GROUP)

    def send_for_ever() -> None:
        while True:
            group.send(b"x")

    calls: dict[str, Callable[[], object]] = {
        "recv": group.recv,
        "recv_batch": endpoint.recv_batch,
        "send": send_for_ever,
    }
    waiting: list[Future[object]] = [pool.submit(calls[wait]) for _ in range(3)]
    until(lambda: is_receiving(endpoint) or group.stats().sent)
    backend.close()
    for one in waiting:
        with pytest.raises(Closed):
            one.result(BOUND)
    endpoint.close()


def test_close_ends_iterations(backend: Backend, pool: ThreadPoolExecutor) -> None:
    endpoint = open_endpoint(backend, "10.0.0.1")
    group = endpoint.join(GROUP)
    batches, messages = pool.submit(list, endpoint.batches()), pool.submit(list, group)
    until(lambda: is_receiving(endpoint))
    endpoint.close()
    assert batches.result(BOUND) == []
    assert messages.result(BOUND) == []


def test_leaving_ends_the_iteration_of_that_group(backend: Backend, pool: ThreadPoolExecutor) -> None:
    with open_endpoint(backend, "10.0.0.1") as endpoint:
        one, two = endpoint.join(GROUP), endpoint.join(OTHER)
        others = pool.submit(two.recv, BOUND)
        until(lambda: is_receiving(endpoint))
        messages = pool.submit(list, one)
        one.leave()
        assert messages.result(BOUND) == []
        two.send(b"end")
        assert others.result(BOUND) is not None


def test_leave_wakes_a_waiting_thread(fabric: Fabric, sim: Backend, pool: ThreadPoolExecutor) -> None:
    """Leaving wakes the thread that waits for the group."""
    with open_endpoint(sim, "10.0.0.1") as endpoint:
        one, two = endpoint.join(GROUP), endpoint.join(OTHER)
        messages = pool.submit(list, one)
        until(partial(is_receiving, endpoint))
        others = pool.submit(two.recv, BOUND)
        one.leave()
        assert messages.result(BOUND / 2) == []
        two.send(b"end")
        assert others.result(BOUND) is not None
        until(lambda: not endpoint._core.resources.channel.pending or endpoint.next_event())
        assert len(fabric.ports[0].ids) == 1  # what woke it is gone


def test_endless_receive_restores_the_membership(
    fabric: Fabric, sim: Backend, pool: ThreadPoolExecutor
) -> None:
    """A receiver that waits without end restores the membership."""
    with open_endpoint(sim, "10.0.0.1") as out, open_endpoint(sim, "10.0.0.2") as into:
        sender, group = out.sender(GROUP), into.join(GROUP)
        receiving = pool.submit(group.recv)
        until(lambda: is_receiving(into))
        for count, fault in enumerate((fabric.bond_failover, fabric.remove_device), 1):
            fault(fabric.ports[1])
            until(lambda count=count: not group.joined or rejoined(into, count))  # type: ignore[misc]
            fabric.restore_device(fabric.ports[1])
            until(partial(rejoined, into, count))
        sender.send(b"end")
        assert receiving.result(BOUND) is not None
        assert [type(into.next_event()) for _ in range(4)] == [Lost, Rejoined] * 2


def test_only_who_receives_reads_events(fabric: Fabric, sim: Backend, pool: ThreadPoolExecutor) -> None:
    """Had the sender read the loss, nothing would wake the receiver when it is time to rejoin."""
    with open_endpoint(sim, "10.0.0.1") as endpoint:
        group = endpoint.join(GROUP)
        receiving = pool.submit(group.recv)
        until(partial(is_receiving, endpoint))
        with fabric.clock:  # the receiver cannot be first
            incidents.bond_failover(fabric.core, fabric.ports[0])
            group.send(b"on the old queue pair", timeout=0)
        assert receiving.result(BOUND) is not None
        receiving = pool.submit(group.recv)
        until(partial(rejoined, endpoint, 1))
        group.send(b"end")
        assert receiving.result(BOUND) is not None


def test_sends_survive_a_change_of_the_queue_pair(
    fabric: Fabric, sim: Backend, pool: ThreadPoolExecutor
) -> None:
    stop = threading.Event()
    with open_endpoint(sim, "10.0.0.1") as out:
        group = out.sender(GROUP)

        def send() -> int:
            count = 0
            while not stop.is_set():
                group.send(b"x", timeout=BOUND)
                count += 1
            return count

        jobs = [pool.submit(send) for _ in range(3)]
        for number in range(1, 4):
            fabric.bond_failover(fabric.ports[0])
            until(partial(rejoined, out, number))
        stop.set()
        sent = sum(job.result(BOUND) for job in jobs)
        assert out.stats().sent == group.stats().sent == sent > 0


def test_cancelled_join_leaves_other_threads_alone(pool: ThreadPoolExecutor) -> None:
    """A cancelled join of one thread leaves the others alone."""
    fabric = Fabric.infiniband(clock="wall")
    with open_fabric(fabric) as backend, open_endpoint(backend, "10.0.0.1") as endpoint:
        group = endpoint.join(GROUP)
        receiving = pool.submit(group.recv, BOUND)
        with fabric.rules.when(Requests(group=OTHER), Drop()), pytest.raises(TimeoutError):
            endpoint.join(OTHER, timeout=0.05)
        assert endpoint.groups == (group,)
        group.send(b"end")
        assert receiving.result(BOUND) is not None
    fabric.close()


@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_fork_while_a_thread_receives(clock: str) -> None:
    """In the child, which has a fabric of its own, nobody waits for that thread."""
    with open_backend("sim-roce", clock=clock) as backend, open_endpoint(backend, "10.0.0.1") as endpoint:
        group = endpoint.join(GROUP)
        within, go_on = threading.Event(), threading.Event()

        def receive(how: object) -> None:
            within.set()
            go_on.wait(BOUND)

        endpoint._receive = receive  # type: ignore[method-assign]
        receiving = threading.Thread(target=endpoint.recv, args=(0.001,))
        receiving.start()
        assert within.wait(BOUND)
        child = os.fork()
        if not child:
            signal.alarm(int(BOUND))
            try:
                del endpoint._receive
                group.send(b"x")
                if endpoint.recv(1.0) is not None and endpoint.join(OTHER).joined:
                    os._exit(0)
            finally:
                os._exit(1)
        del endpoint._receive
        go_on.set()
        receiving.join()
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("lock", ["numbering", "counts"])
def test_fork_while_a_thread_sends(lock: str) -> None:
    """In the child nobody waits for a lock of that thread, which is not there."""
    with open_backend("sim-roce") as backend, open_endpoint(backend, "10.0.0.1", sequence=True) as endpoint:
        group = endpoint.join(GROUP)
        locks = {"numbering": group._group.numbering._sending, "counts": endpoint._core.sending._counting}
        within, go_on = threading.Event(), threading.Event()

        def send() -> None:
            with locks[lock]:
                within.set()
                go_on.wait(BOUND)

        sending = threading.Thread(target=send)
        sending.start()
        assert within.wait(BOUND)
        child = os.fork()
        if not child:
            signal.alarm(int(BOUND))
            try:
                group.send(b"x")
                if endpoint.recv(1.0) is not None:
                    os._exit(0)
            finally:
                os._exit(1)
        go_on.set()
        sending.join()
        assert os.waitpid(child, 0)[1] == 0
