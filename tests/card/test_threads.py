"""The C core used by many threads at once, on a card that completes late. Under ThreadSanitizer, too."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mcast.api import Closed, Destination, McastError, QpInit, QueuePair

from .card import Card, Stage
from .provider import CardBackend

GROUP = "239.1.2.3"
BOUND = 30.0
"""Seconds; the longest that anything may take, never a delay."""

Ends = tuple[QueuePair, Destination]


def joined(backend: CardBackend, address: str = "10.0.0.1", **depths: int) -> Ends:
    """A queue pair that is a member of the group, and where the group is."""
    channel = backend.event_channel()
    cm_id = channel.create_id()
    cm_id.bind_addr(address)
    qp = cm_id.create_qp(QpInit(**{"max_send_wr": 16, "max_recv_wr": 256, **depths}))
    cm_id.join_multicast(GROUP)
    event = channel.get_event(BOUND)
    assert event is not None
    ud = event.check().ud
    assert ud is not None
    return qp, ud.destination


@pytest.mark.parametrize("microseconds", [0, 20, 2000])
def test_many_send_and_many_receive(card: Card, backend: CardBackend, microseconds: float) -> None:
    """Each message comes to one of the receivers of its queue pair, whatever the order of completions."""
    card.ethernet(2)
    out, to = joined(backend)
    into, _ = joined(backend, "10.0.0.2", max_recv_wr=4096)
    card.delay(Stage.SEND, microseconds)
    rounds, senders, receivers = 20, 3, 3
    left = threading.Semaphore(rounds * senders * 2)

    def send(number: int) -> None:
        for index in range(rounds):
            out.send_one(to, b"%d %d" % (number, index), timeout=BOUND)
            assert out.send(to, [b"%d %d b" % (number, index)], timeout=BOUND) == 1

    def receive() -> list[bytes]:
        found = []
        while left.acquire(blocking=False):
            message = into.recv_one(BOUND)
            assert message is not None
            found.append(bytes(message.payload))
        return found

    with ThreadPoolExecutor(senders + receivers) as pool:
        received = [pool.submit(receive) for _ in range(receivers)]
        sent = [pool.submit(send, number) for number in range(senders)]
        for job in sent:
            job.result(BOUND)
        found = [payload for job in received for payload in job.result(BOUND)]
    expected = [b"%d %d" % (n, i) for n in range(senders) for i in range(rounds)]
    assert sorted(found) == sorted([*expected, *(text + b" b" for text in expected)])


def test_a_close_ends_what_others_do(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    card.delay(Stage.SEND, 50)
    for _ in range(10):
        qp, to = joined(backend)
        began = threading.Barrier(4, timeout=BOUND)

        def use(call: str, began: threading.Barrier = began, qp: QueuePair = qp, to: Destination = to) -> None:
            began.wait()
            with pytest.raises(Closed):
                while True:
                    if call == "send":
                        qp.send_one(to, b"x", timeout=BOUND)
                    elif call == "recv":
                        qp.recv(8, BOUND).release()
                    else:
                        _ = qp.counters

        with ThreadPoolExecutor(3) as pool:
            jobs = [pool.submit(use, call) for call in ("send", "recv", "counters")]
            began.wait()
            qp.close()
            for job in jobs:
                job.result(BOUND)


def test_events_come_while_others_send(card: Card, backend: CardBackend) -> None:
    """Queue pairs are made, joined and closed beside one that is in use."""
    card.ethernet(2)
    out, to = joined(backend)
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            out.send_one(to, b"x", timeout=BOUND)

    def make() -> None:
        for _ in range(20):
            channel = backend.event_channel()
            cm_id = channel.create_id()
            cm_id.bind_addr("10.0.0.2")
            cm_id.create_qp(QpInit(max_send_wr=8, max_recv_wr=8))
            cm_id.join_multicast(GROUP)
            assert channel.get_event(BOUND) is not None
            cm_id.leave_multicast(GROUP)
            channel.close()

    with ThreadPoolExecutor(3) as pool:
        sending = pool.submit(send)
        for job in [pool.submit(make) for _ in range(2)]:
            job.result(BOUND)
        stop.set()
        sending.result(BOUND)
    try:
        out.close()
    except McastError as error:  # pragma: no cover
        raise AssertionError(error) from error
