"""Guard G-RECV: how receive memory begins and ends, the same on every provider."""

from __future__ import annotations

import errno as E
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mcast.api import Backend, Batch, Destination, McastError, QpState, Region

from ..card.ends import BOUND, End
from ..networks import KINDS, SHARED
from ..waiting import until

pytestmark = pytest.mark.parametrize("network", [*KINDS, *SHARED], indirect=True)

SLOT, DEPTH = 256, 16
WAYS: list[list[QpState]] = [
    [QpState.RESET],
    [QpState.RESET, QpState.INIT],
    [],
    [QpState.ERR],
]


class Receiver(End):
    """A queue pair that receives what it sends, and another one that shows what has arrived by now."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.witness = End(backend)
        self.to: Destination = self.join()
        self.witness.join()
        self.memory = bytearray(4 * SLOT)

    def register(self) -> Region:
        return self.qp.register(self.memory, recv_slot=SLOT)

    def send(self, *payloads: bytes) -> None:
        """Return when they have arrived."""
        self.qp.send(self.to, payloads)
        for payload in payloads:
            message = self.witness.qp.recv_one(BOUND)
            assert message is not None
            assert bytes(message.payload) == payload

    def receives(self, *payloads: bytes) -> bool:
        self.send(*payloads)
        return [self.received() for _ in payloads] == [*payloads]

    def received(self) -> bytes | None:
        message = self.qp.recv_one(BOUND)
        return None if message is None else bytes(message.payload)

    @contextmanager
    def leased(self, count: int) -> Iterator[Batch]:
        """A batch with that many messages."""
        with self.qp.recv(count, BOUND) as batch:
            assert len(batch) == count
            yield batch

    def has_nothing(self) -> bool:
        with self.qp.recv(1, 0) as batch:
            return not batch


@pytest.fixture
def end(backend: Backend) -> Receiver:
    return Receiver(backend)


@pytest.mark.parametrize("leased", [True, False])
def test_receive_memory_needs_an_idle_queue_pair(end: Receiver, leased: bool) -> None:
    """It begins only while nothing is queued or leased."""
    end.send(b"first")
    batch = end.qp.recv(1, BOUND) if leased else None
    with pytest.raises(McastError) as caught:
        end.register()
    assert (caught.value.errno, caught.value.call) == (E.EBUSY, "register")
    if batch is None:
        assert end.received() == b"first"
    else:
        assert bytes(batch[0].payload) == b"first"
        batch.release()
    end.register().close()
    assert end.qp.counters.dropped_reset == 0


def test_closing_drops_and_counts_what_is_queued(end: Receiver) -> None:
    with end.register():
        end.send(b"one", b"two", b"three")
    counters = end.qp.counters
    assert (counters.dropped_reset, counters.received, counters.recv_free) == (3, 3, DEPTH)
    assert end.has_nothing()
    for turn in range(3 * DEPTH):
        assert end.receives(b"%d" % turn)
    assert end.qp.counters.dropped_reset == 3


def test_leased_messages_outlive_it(end: Receiver) -> None:
    """They stay readable, nothing is written over them, and their release posts no receive twice."""
    region = end.register()
    end.send(b"one", b"two", b"three")
    with end.leased(2) as batch:
        region.close()
        assert end.qp.counters.dropped_reset == 1
        assert end.has_nothing()
        for turn in range(2 * DEPTH):
            assert end.receives(b"%d" % turn)
        assert [bytes(one.payload) for one in batch] == [b"one", b"two"]
    assert end.qp.counters.recv_free == DEPTH
    assert end.receives(*[b"%d" % turn for turn in range(DEPTH)])


def test_memory_may_change_beside_an_old_lease(end: Receiver) -> None:
    """Other memory may follow while a batch of the old is leased."""
    old = end.register()
    end.send(b"one")
    with end.leased(1) as batch:
        old.close()
        with end.qp.register(bytearray(8 * SLOT), recv_slot=SLOT):
            assert end.receives(b"two", b"three")
            assert bytes(batch[0].payload) == b"one"
            batch.release()
            assert end.qp.counters.recv_free == 8
            assert end.receives(*[b"%d" % turn for turn in range(8)])
    assert end.qp.counters.recv_free == DEPTH


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[-1].name if way else "RTS")
def test_it_ends_in_any_state(end: Receiver, way: list[QpState]) -> None:
    """Each message is counted once, whichever step dropped it."""
    region = end.register()
    end.send(b"one", b"two")
    for state in way:
        end.qp.modify(state)
    region.close()
    end.qp.reset()
    assert end.has_nothing()
    assert end.qp.counters.dropped_reset == 2
    assert end.receives(b"in its own memory")


def test_a_reset_counts_what_it_drops(end: Receiver) -> None:
    end.send(b"one", b"two")
    end.qp.reset()
    assert (end.qp.counters.dropped_reset, end.qp.counters.recv_free) == (2, DEPTH)
    assert end.receives(b"three")


def test_descriptor_is_silent_after_a_drop(end: Receiver) -> None:
    """A descriptor is silent once the messages are dropped."""
    region = end.register()
    end.qp.fileno()
    end.send(b"one")
    region.close()
    until(end.has_nothing)
    assert end.receives(b"two")
