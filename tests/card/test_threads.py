"""The C core used by many threads at once, on a card that completes late. Under ThreadSanitizer, too."""

from __future__ import annotations

import gc
import select
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial

import pytest

from mcast.api import Batch, Closed, QueuePair

from ..waiting import Running, is_asleep, until
from .card import Card, Stage
from .ends import BOUND, GROUP, End
from .provider import CardBackend


@pytest.mark.parametrize("microseconds", [0, 20, 2000])
def test_many_send_and_many_receive(card: Card, backend: CardBackend, microseconds: float) -> None:
    """Each message comes to one of the receivers of its queue pair, whatever the order of completions."""
    card.ethernet(2)
    sender, receiver = End(backend), End(backend, "10.0.0.2", max_recv_wr=256)
    out, into, to = sender.qp, receiver.qp, receiver.join()
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


def receive(qp: QueuePair) -> None:
    qp.recv(8, BOUND).release()


def test_a_batch_gives_its_receives_back_once(card: Card, backend: CardBackend) -> None:
    """A second thread that releases it may come when another batch already has them."""
    card.ethernet(1)
    end = End(backend, max_recv_wr=1)
    qp, to = end.qp, end.join()
    qp.send_one(to, b"first", timeout=BOUND)
    first = qp.recv(1, BOUND)
    first._release()
    qp.send_one(to, b"second", timeout=BOUND)
    with qp.recv(1, BOUND) as second:
        first._release()
        assert qp.counters.recv_free == 0
        assert bytes(second[0].payload) == b"second"


@pytest.mark.parametrize("slot", [None, 2048])
def test_threads_share_a_batch(card: Card, backend: CardBackend, slot: int | None) -> None:
    """Each reads all of it, and ends it when it likes; then it has ended, and its receives are free."""
    card.ethernet(1)
    end = End(backend, max_recv_wr=8)
    qp = end.qp
    if slot is not None:
        qp.register(bytearray(8 * slot), recv_slot=slot)
    to, readers = end.join(), 4
    sent = [b"%d" % number * (number + 1) for number in range(8)]
    began = threading.Barrier(readers, timeout=BOUND)

    def read(batch: Batch, way: int) -> None:
        began.wait()
        with suppress(BufferError, ValueError):  # another one reads it, has ended it
            for number, message in enumerate(batch if way % 2 else map(batch.__getitem__, range(8))):
                view = message.payload
                assert len(view) == len(sent[number])
        with suppress(BufferError):
            batch.release()

    with ThreadPoolExecutor(readers) as pool:
        for _ in range(500):
            qp.send(to, sent, timeout=BOUND)
            batch = qp.recv(8, BOUND)
            assert [bytes(message.payload) for message in batch] == sent
            for job in [pool.submit(read, batch, way) for way in range(readers)]:
                job.result(BOUND)
            batch.release()
            assert qp.counters.recv_free == 8


def test_threads_read_a_batch_at_once(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    end = End(backend, max_recv_wr=64)
    qp, to, readers = end.qp, end.join(), 4
    sent = [b"%d" % number * (number + 1) for number in range(64)]
    qp.send(to, sent, timeout=BOUND)
    began = threading.Barrier(readers, timeout=BOUND)

    def read(batch: Batch) -> None:
        began.wait()
        for _ in range(50):
            assert [bytes(message.payload) for message in batch] == sent
            assert bytes(batch[-1].payload) == sent[-1]

    with qp.recv(64, BOUND) as batch, ThreadPoolExecutor(readers) as pool:
        for job in [pool.submit(read, batch) for _ in range(readers)]:
            job.result(BOUND)
    assert qp.counters.recv_free == 64


def test_collection_while_a_view_is_made_changes_none(card: Card, backend: CardBackend) -> None:
    """A garbage collection while a view is made changes none.

    It may run any code: here what looks at another message, or lets another thread do so.
    """
    card.ethernet(1)
    end = End(backend, max_recv_wr=64)
    sent = [b"%d" % number * (number + 1) for number in range(64)]
    end.qp.send(end.join(), sent, timeout=BOUND)
    seen = []

    def on_collection(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            seen.append(bytes(batch[-1].payload))

    thresholds = gc.get_threshold()
    with end.qp.recv(64, BOUND) as batch, ExitStack() as stack:
        stack.callback(gc.set_threshold, *thresholds)
        stack.callback(gc.callbacks.remove, on_collection)
        gc.callbacks.append(on_collection)
        gc.set_threshold(1)
        read = [bytes(message.payload) for message in batch]
        read_by_place = [bytes(batch[place].payload) for place in range(len(batch))]
    assert read == read_by_place == sent
    assert set(seen) == {sent[-1]}


def test_a_close_ends_what_others_do(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    card.delay(Stage.SEND, 50)
    for _ in range(10):
        end = End(backend)
        qp, to = end.qp, end.join()
        began = threading.Barrier(4, timeout=BOUND)

        calls = (
            partial(qp.send_one, to, b"x", timeout=BOUND),
            partial(receive, qp),
            partial(getattr, qp, "counters"),
        )

        def use(call: Callable[[], object], began: threading.Barrier = began) -> None:
            began.wait()
            while True:
                call()

        with ThreadPoolExecutor(3) as pool:
            jobs = [pool.submit(use, call) for call in calls]
            began.wait()
            qp.close()
            for job in jobs:
                with pytest.raises(Closed):
                    job.result(BOUND)


def armed(qp: QueuePair) -> int:
    """Its descriptor, which is not readable until a message or the close comes."""
    descriptor = qp.fileno()
    assert qp.recv_one(0) is None
    assert not select.select([descriptor], [], [], 0)[0]
    return descriptor


MUCH = [bytes(1024)] * 64
"""Payloads for whose copies a send releases the GIL, and which fit in the queue."""


@pytest.mark.parametrize("timeout", [0, BOUND])
def test_send_behind_a_close_sends_nothing(card: Card, backend: CardBackend, timeout: float) -> None:
    """A send that meets a close at the lock sends nothing.

    It has found the queue pair open, and then waits for another thread's post, which stands still.
    """
    card.ethernet(1)
    end = End(backend, max_send_wr=128)
    qp, to = end.qp, end.join()
    closing_shows, began = armed(qp), threading.Event()

    def send() -> int:
        began.set()
        return qp.send(to, MUCH, timeout=timeout)

    card.stall("ibv_post_send")
    first = Running(partial(qp.send, to, MUCH, timeout=timeout))
    until(lambda: card.stalled("ibv_post_send") == 1)
    second = Running(send)
    assert began.wait(BOUND)
    until(lambda: is_asleep(second.threads[0]))
    closing = Running(qp.close)
    until(lambda: select.select([closing_shows], [], [], 0)[0])
    card.go_on("ibv_post_send")
    assert first.results() + closing.results() == [len(MUCH), None]
    assert [type(one) for one in second.results()] == [Closed]
    assert card.count("ibv_post_send") == 1
    assert card.reports() == ()


def test_a_close_waits_for_who_holds_the_lock(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    end = End(backend, max_send_wr=128)
    qp, to = end.qp, end.join()
    closing_shows = armed(qp)
    card.stall("ibv_post_send")
    sending = Running(partial(qp.send, to, MUCH, timeout=0))
    until(lambda: card.stalled("ibv_post_send") == 1)
    closing = Running(qp.close)
    until(lambda: select.select([closing_shows], [], [], 0)[0])
    until(lambda: is_asleep(closing.threads[0]))
    assert card.count("ibv_destroy_qp") == 0
    card.go_on("ibv_post_send")
    assert sending.results() + closing.results() == [len(MUCH), None]
    assert card.reports() == ()


def test_events_come_while_others_send(card: Card, backend: CardBackend) -> None:
    """Queue pairs are made, joined and closed beside one that is in use."""
    card.ethernet(2)
    end = End(backend)
    out, to = end.qp, end.join()
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            out.send_one(to, b"x", timeout=BOUND)

    def make() -> None:
        for _ in range(20):
            one = End(backend, "10.0.0.2")
            one.join()
            one.id.leave_multicast(GROUP)
            one.channel.close()

    with ThreadPoolExecutor(3) as pool:
        sending = pool.submit(send)
        for job in [pool.submit(make) for _ in range(2)]:
            job.result(BOUND)
        stop.set()
        sending.result(BOUND)
