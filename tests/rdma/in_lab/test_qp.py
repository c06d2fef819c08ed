"""Behaviour of this provider beyond the contract: chains, back-pressure, waking, forks, signals."""

from __future__ import annotations

import errno as E
import os
import signal
import threading
from collections.abc import Callable
from ipaddress import IPv4Address
from math import inf

import pytest

from mcast.api import (
    Closed,
    CqModeration,
    Destination,
    EventChannel,
    McastError,
    NotSupported,
    Phase,
    QpInit,
    QpState,
    QueuePair,
    Testbed,
)

BOUND = 100.0


def member(bed: Testbed, port: IPv4Address, init: QpInit | None = None) -> tuple[QueuePair, Destination]:
    channel = bed.backend.event_channel()
    cm_id = channel.create_id()
    cm_id.bind_addr(port)
    qp = cm_id.create_qp(init)
    cm_id.join_multicast("239.77.3.1")
    event = channel.get_event(BOUND)
    assert event is not None
    ud = event.check().ud
    assert ud is not None
    return qp, ud.destination


def drain(qp: QueuePair, count: int, at_once: int = 64) -> list[bytes]:
    got: list[bytes] = []
    while len(got) < count:
        with qp.recv(at_once, BOUND) as batch:
            assert len(batch), f"only {len(got)} of {count} came"
            got += [bytes(message.payload) for message in batch]
    return got


@pytest.mark.parametrize("depth", [1, 2, 3, 8, 128])
def test_large_batch_is_sent_in_order(lab_bed: Testbed, depth: int) -> None:
    """A batch larger than the queue goes out whole and in order."""
    qp, group = member(lab_bed, lab_bed.ports[0], QpInit(max_send_wr=depth))
    messages = [bytes([i]) * (i * 4 + 1) for i in range(200)]
    assert qp.send(group, messages) == 200
    assert drain(qp, 200) == messages
    assert qp.counters.sent == 200


def test_soft_roce_registers_without_what_it_cannot_do(lab_bed: Testbed) -> None:
    qp, group = member(lab_bed, lab_bed.ports[0])
    memory = bytearray(b"written in any order")
    with qp.register(memory, relaxed_ordering=True):
        qp.send(group, [memory])
        assert drain(qp, 1) == [bytes(memory)]
    fd = os.memfd_create("no DMA-BUF")
    os.truncate(fd, 4096)
    with pytest.raises(McastError) as caught:
        qp.register_dmabuf(fd, 4096)
    os.close(fd)
    assert caught.value.phase is Phase.REGISTER
    assert caught.value.errno in (E.EOPNOTSUPP, E.EINVAL)


@pytest.mark.parametrize(
    ("init", "says"),
    [
        (QpInit(timestamps=True), "cannot stamp completions with the time: do without timestamps"),
        (QpInit(moderation=CqModeration(count=8, period=100)), "cannot moderate completions: do without"),
    ],
)
def test_soft_roce_refuses_what_it_has_not(lab_bed: Testbed, init: QpInit, says: str) -> None:
    channel = lab_bed.backend.event_channel()
    cm_id = channel.create_id()
    cm_id.bind_addr(lab_bed.ports[0])
    with pytest.raises(NotSupported, match=f"{cm_id.device} {says}"):
        cm_id.create_qp(init)
    assert cm_id.create_qp().timestamp_clock is None


def test_who_spins_is_ended_by_a_signal(lab_bed: Testbed) -> None:
    qp, group = member(lab_bed, lab_bed.ports[0], QpInit(busy_poll=inf))
    ran: list[int] = []

    def send(number: int, frame: object) -> None:
        ran.append(number)
        qp.send_one(group, b"of the handler")

    before = signal.signal(signal.SIGALRM, send)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        assert drain(qp, 1) == [b"of the handler"]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ran == [signal.SIGALRM]


def test_receives_are_posted_again_in_chains(lab_bed: Testbed) -> None:
    qp, group = member(lab_bed, lab_bed.ports[0], QpInit(max_recv_wr=100))
    for round in range(5):
        messages = [bytes([round, i]) for i in range(100)]
        qp.send(group, messages)
        assert drain(qp, 100, 70) == messages
        assert qp.counters.recv_free == 100
    assert 0 <= qp.counters.recv_low_water < 100


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 1024])
def test_registered_and_other_memory_go_out_alike(lab_bed: Testbed, size: int) -> None:
    qp, group = member(lab_bed, lab_bed.ports[0])
    memory = bytearray(os.urandom(4096))
    with qp.register(memory) as region:
        inside = region.buffer[100 : 100 + size]
        qp.send(group, [inside, bytes(inside), region.buffer[4096 - size :]])
        expected = [bytes(inside), bytes(inside), bytes(memory[4096 - size :])]
    assert drain(qp, 3) == expected


def test_user_memory_receives_and_gives_way_again(lab_bed: Testbed) -> None:
    qp, group = member(lab_bed, lab_bed.ports[0])
    memory = bytearray(8 * 1024)
    region = qp.register(memory, recv_slot=1024)
    assert qp.counters.recv_free == 8
    qp.send(group, [b"into user memory"])
    assert drain(qp, 1) == [b"into user memory"]
    assert memory[:16] == b"into user memory"
    region.close()
    memory += b"resizable again"
    qp.send(group, [b"into the slab"])
    assert drain(qp, 1) == [b"into the slab"]
    assert memory[:16] == b"into user memory"


def after(seconds: float, action: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.start()
    return timer


def test_close_wakes_a_receiver(lab_bed: Testbed) -> None:
    qp, _ = member(lab_bed, lab_bed.ports[0])
    timer = after(0.5, qp.close)
    with pytest.raises(Closed):
        qp.recv(1)
    timer.join()


def test_close_wakes_who_waits_for_an_event(lab_bed: Testbed) -> None:
    channel: EventChannel = lab_bed.backend.event_channel()
    timer = after(0.5, channel.close)
    with pytest.raises(Closed):
        channel.get_event()
    timer.join()


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("what", ["recv", "get_event"])
def test_a_signal_ends_a_wait(lab_bed: Testbed, what: str) -> None:
    qp, _ = member(lab_bed, lab_bed.ports[0])
    channel = lab_bed.backend.event_channel()
    waits: dict[str, Callable[[], object]] = {"recv": lambda: qp.recv(1), "get_event": channel.get_event}

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        timer = after(0.5, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        with pytest.raises(Interrupted):
            waits[what]()
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_other_threads_run_while_one_waits(lab_bed: Testbed) -> None:
    qp, group = member(lab_bed, lab_bed.ports[0])
    timer = after(0.5, lambda: qp.send(group, [b"from another thread"]))
    message = qp.recv_one(BOUND)
    timer.join()
    assert message is not None
    assert bytes(message.payload) == b"from another thread"
    assert message.from_self


def test_a_fork_is_refused_and_harms_nothing(lab_bed: Testbed) -> None:
    qp, group = member(lab_bed, lab_bed.ports[0])
    child = os.fork()
    if not child:
        try:
            qp.send(group, [b"from the fork"])
        except McastError as error:
            lab_bed.backend.close()
            os._exit(0 if "spawn" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    qp.send(group, [b"still works"])
    assert drain(qp, 1) == [b"still works"]


def test_qp_without_receives_notices_its_error(lab_bed: Testbed) -> None:
    """A QP with every receive leased still notices its error."""
    qp, group = member(lab_bed, lab_bed.ports[0], QpInit(max_recv_wr=1))
    qp.send(group, [b"the only one"])
    with qp.recv(1, BOUND) as batch:
        assert len(batch) == 1
        timer = after(0.5, lambda: qp.modify(QpState.ERR))
        with pytest.raises(McastError, match="ERR"):
            qp.recv(1, BOUND)
        timer.join()
    qp.reset()
    qp.send(group, [b"again"])
    assert drain(qp, 1) == [b"again"]
