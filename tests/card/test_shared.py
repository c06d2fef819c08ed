"""One queue pair and one batch for all threads: each test holds in however many threads it runs at once.

`make test-free-threaded` runs each in four, on a Python without a GIL.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mcast import RECORD_DTYPE
from mcast.api import Batch, CopiedBatch, Destination, Message, MessageTooLarge
from mcast.arguments.buffers import FREE_THREADED
from mcast.backends.rdma.qp import RdmaQueuePair

from .card import Card
from .ends import BOUND, End
from .provider import CardBackend

SENT = [b"%c" % (65 + size) * size for size in range(1, 33)]
VIEWED = 200_000 if FREE_THREADED else 1000
RELEASED = 20_000 if FREE_THREADED else 10
DESTINATIONS = 80
"""More than a queue pair keeps address handles for."""


class Shared(End):
    """The end that all threads use, and where its group is. What one sends any may receive."""

    def __init__(self, backend: CardBackend) -> None:
        super().__init__(backend, max_send_wr=64, max_recv_wr=1024)
        self.backend, self.to = backend, self.join()
        self.latest: list[Batch] = [CopiedBatch()] * 8
        """Batches that the threads have received last."""

    def require_own(self, message: Message) -> None:
        assert bytes(message.payload) == SENT[len(message.payload) - 1]
        assert (message.from_self, message.src_qp, message.group) == (True, self.qp.qp_num, self.to.gid)

    def take(self, count: int) -> None:
        for _ in range(count):
            message = self.qp.recv_one(BOUND)
            assert message is not None
            self.require_own(message)


@pytest.fixture
def shared(card: Card, backend: CardBackend) -> Iterator[Shared]:
    card.ethernet(2)
    shared = Shared(backend)
    yield shared
    shared.latest.clear()  # with batches that were left
    assert shared.qp.counters.recv_free == 1024
    assert isinstance(shared.qp, RdmaQueuePair)
    handles = [one for one in card.leftovers() if one.kind == "address handle"]
    assert len(handles) == len(shared.qp._handles._serials)


@pytest.fixture
def batch(shared: Shared) -> Iterator[Batch]:
    shared.qp.send(shared.to, SENT, timeout=BOUND)
    with shared.qp.recv(len(SENT), BOUND) as batch:
        yield batch


def test_single_messages(shared: Shared) -> None:
    for payload in SENT:
        shared.qp.send_one(shared.to, payload, timeout=BOUND)
        shared.take(1)


def test_batches(shared: Shared) -> None:
    for _ in range(10):
        shared.qp.send(shared.to, SENT, timeout=BOUND)
        left = len(SENT)
        while left:
            with shared.qp.recv(left, BOUND) as batch:
                for message in batch:
                    shared.require_own(message)
                assert batch.lengths == [len(message.payload) for message in batch]
                left -= len(batch)


@pytest.fixture
def view(shared: Shared) -> Iterator[memoryview]:
    memory = bytearray(SENT[2])
    view = memoryview(memory)
    yield view
    view.release()
    memory.append(0)  # which needs that nobody has a view of it


def test_one_payload_for_all(shared: Shared, view: memoryview) -> None:
    """Of some 100,000 views that threads make of one view at once, Python forgets to count one."""
    for _ in range(50):
        shared.qp.send(shared.to, (view, view), timeout=BOUND)
        shared.take(2)
    refused = [view] * 1000 + [memoryview(bytes(1025))]  # once all are viewed
    for _ in range(VIEWED // 1000):
        with pytest.raises(MessageTooLarge):
            shared.qp.send(shared.to, refused)


def test_dropped_batch_gives_its_receives_back(shared: Shared) -> None:
    """A batch that is dropped gives its receives back."""
    for _ in range(50):
        shared.qp.send_one(shared.to, SENT[0], timeout=BOUND)
        assert len(list(shared.qp.recv(1, BOUND))) == 1


def test_one_batch_for_all(shared: Shared, batch: Batch) -> None:
    for _ in range(20):
        assert [bytes(message.payload) for message in batch] == SENT
        assert [bytes(batch[place].payload) for place in range(-len(SENT), 0)] == SENT
        assert len(batch.records) == RECORD_DTYPE["itemsize"] * len(SENT)
        assert batch.groups == [shared.to.gid] * len(SENT)
        offset = int.from_bytes(batch.records[:8], "little")
        assert bytes(batch.memory[offset : offset + 1]) == SENT[0]


def test_a_batch_that_all_release(shared: Shared) -> None:
    for turn in range(RELEASED):
        shared.qp.send(shared.to, SENT[:4], timeout=BOUND)
        left = 4
        while left:
            batch = shared.qp.recv(left, BOUND)
            left -= len(batch)
            assert all(len(message.payload) for message in batch)
            shared.latest[turn % 8] = batch
            for one in [*shared.latest]:
                one.release()


def test_address_handles(shared: Shared) -> None:
    """Each thread gives up those of others."""
    to: list[Destination] = [
        shared.to.model_copy(update={"flow_label": number}) for number in range(DESTINATIONS)
    ]
    for _ in range(20 if FREE_THREADED else 1):
        for destination in to:
            shared.qp.send_one(destination, SENT[1], timeout=BOUND)
        shared.take(DESTINATIONS)


def test_registered_memory(shared: Shared) -> None:
    for _ in range(5):
        memory = bytearray(SENT[7])
        with shared.qp.register(memory):
            shared.qp.send_one(shared.to, memory, timeout=BOUND)
        shared.take(1)


def test_what_is_refused(shared: Shared) -> None:
    for _ in range(20):
        with pytest.raises(MessageTooLarge):
            shared.qp.send_one(shared.to, bytes(1025))
        with pytest.raises(TypeError):
            shared.qp.send_one(shared.to, "text")  # type: ignore[arg-type]
        with pytest.raises(ValueError):
            shared.qp.recv(0)


def test_what_a_queue_pair_says_of_itself(shared: Shared) -> None:
    for _ in range(50):
        assert shared.qp.counters.recv_free is not None
        assert shared.qp.attachments == {shared.to.gid: shared.to.dlid}
        assert (shared.qp.max_message_size, shared.qp.port_events()) == (1024, ())


def test_ids_come_and_go(shared: Shared) -> None:
    for _ in range(5):
        end = End(shared.backend, "10.0.0.2")
        end.join("239.9.9.9")
        end.channel.close()
