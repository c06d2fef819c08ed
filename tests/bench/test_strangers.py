"""`mcast bench` while a stranger sends in its group: no loss is hidden, and the stranger is counted."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from mcast.api import Backend, CopiedBatch, Destination, McastAddress, QpInit, QueuePair
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.backend import SimQueuePair
from mcast.backends.sim.faults import Drop, Messages
from mcast.bench import mpi
from mcast.bench.end import BenchEnd
from mcast.bench.measure import BenchResult, measure
from mcast.bench.receiver import CHUNK, HELLO_INTERVAL, RECEIVE_TIMEOUT, WINDOW, Receiver
from mcast.endpoint.ports import active
from mcast.wire.addresses import Gid

from ..card.card import Card
from ..card.provider import CardBackend
from ..commands import Run
from ..waiting import BOUND, until

GROUP = McastAddress.of("239.1.1.1")
BACK = McastAddress.of("239.1.1.2")
SIZE = 64


class Stranger:
    """Sends to a group from the port at 10.0.0.`number`."""

    def __init__(self, backend: Backend, number: int = 3, group: McastAddress = GROUP) -> None:
        self.channel = backend.event_channel()
        self.end = BenchEnd(self.channel, active(backend)[number - 1], QpInit())
        self.to = self.end.join(group, send_only=True)
        self.sent = 0

    def send(self, payload: bytes) -> None:
        self.sent += 1
        self.end.qp.send_one(self.to, payload)


class Preceded:
    """A queue pair; `first` is called with a payload of each send before that."""

    def __init__(self, qp: QueuePair, first: Callable[[bytes], None]) -> None:
        self._qp, self._first = qp, first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._qp, name)

    def send(self, to: Destination, payloads: list[bytes], timeout: float | None = None) -> int:
        self._first(payloads[0])
        return self._qp.send(to, payloads, timeout=timeout)

    def send_one(self, to: Destination, payload: bytes, timeout: float | None = None) -> None:
        self._first(payload)
        self._qp.send_one(to, payload, timeout=timeout)


@pytest.fixture
def precede(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[bytes], None]], None]:
    """From then on, what is given is called before each send of a measurement."""

    def precede(first: Callable[[bytes], None]) -> None:
        class Loud(BenchEnd):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                self.qp: Any = Preceded(self.qp, first)

        for module in ("measure", "mpi"):
            monkeypatch.setattr(f"mcast.bench.{module}.BenchEnd", Loud)

    return precede


# --- in one process ---


@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_strangers_replace_no_lost_message(
    make: Callable[..., Fabric], precede: Callable[[Callable[[bytes], None]], None]
) -> None:
    """A strangers message stands in for none that is lost."""
    fabric = make(ports=3)
    name = fabric.ports[1].name
    dropped = Messages(source=fabric.ports[0].name, target=name, nth=(40, 41, 200))
    with open_fabric(fabric) as backend, fabric.rules.when(dropped, Drop()):
        stranger = Stranger(backend)
        precede(stranger.send)
        found = measure(backend, GROUP, SIZE, 1, 0.02)
    assert found.messages > 200
    assert found.lost == 3
    assert found.strangers == stranger.sent > 0


@pytest.mark.parametrize("layer", ["roce", "infiniband"])
@pytest.mark.parametrize("number", [1, 3], ids=["the sender's port", "another port"])
def test_on_a_card_strangers_count_for_nothing_else(
    card: Card, layer: str, number: int, precede: Callable[[Callable[[bytes], None]], None]
) -> None:
    card.network(layer, 3)
    with CardBackend(card) as backend:
        stranger = Stranger(backend, number)
        precede(stranger.send)
        found = measure(backend, GROUP, SIZE, 1, 0.02)
    assert found.lost == 0
    assert found.strangers == stranger.sent > 0


def test_a_strangers_knock_opens_nothing(precede: Callable[[Callable[[bytes], None]], None]) -> None:
    fabric = Fabric.roce(ports=3)
    unheard = Messages(source="roce0", target="roce1")
    with open_fabric(fabric) as backend, fabric.rules.when(unheard, Drop()):
        precede(Stranger(backend).send)
        with pytest.raises(TimeoutError, match=r"10\.0\.0\.2 joined, but receives nothing from 10\.0\.0\.1"):
            measure(backend, GROUP, SIZE, 1, 0.02)


def test_messages_of_strangers_are_shown(
    here: Run, monkeypatch: pytest.MonkeyPatch, precede: Callable[[Callable[[bytes], None]], None]
) -> None:
    """Messages of strangers are shown where there are any."""
    assert "others" not in here("bench", "--backend", "sim", "--seconds", "0.01").stdout

    def opened(name: str, **options: Any) -> Backend:
        backend = open_fabric(Fabric.roce(ports=3))
        precede(Stranger(backend).send)
        return backend

    monkeypatch.setattr("mcast.cli.bench.open_backend", opened)
    shown = here("bench", "--backend", "sim", "--seconds", "0.01").stdout
    assert "\nothers   " in shown
    assert max(map(len, shown.splitlines())) <= 80


# --- one receiver ---


class Hearing:
    """A receiver that hears its sender and a stranger, in virtual time."""

    def __init__(self, backend: Backend, fabric: Fabric) -> None:
        self.fabric, self.backend = fabric, backend
        channel = backend.event_channel()
        sender, end = (
            BenchEnd(channel, place, QpInit(max_recv_wr=2 * WINDOW)) for place in active(backend)[:2]
        )
        self.to = sender.join(GROUP, send_only=True)
        end.join(GROUP)
        self.sender = sender.qp
        self.receiver = Receiver(end, [sender.sends_as(self.to)], backend.now)
        self.stranger = Stranger(backend)

    def send_at(self, ns: int, qp: QueuePair, payload: bytes) -> None:
        """Send in `ns` ns, amid whatever call the fabric is in then, as a device does."""
        assert isinstance(qp, SimQueuePair)
        core = qp.core

        def send() -> None:
            assert not self.fabric.core.wire.send(core, self.to, [payload], None)

        self.fabric.clock.call_later(ns, send)

    def flood(self, seconds: float) -> None:
        """The stranger sends every millisecond, so long."""
        for millisecond in range(1, round(seconds * 1000)):
            self.send_at(millisecond * 1_000_000, self.stranger.end.qp, b"x")


@pytest.fixture
def hearing() -> Iterator[Hearing]:
    fabric = Fabric.roce(ports=3)
    with open_fabric(fabric) as backend:
        yield Hearing(backend, fabric)


WAITS: dict[str, tuple[Callable[[Receiver], object], object, float]] = {
    "take": (lambda receiver: receiver.take(3), 3, RECEIVE_TIMEOUT),
    "take_one": (lambda receiver: receiver.take_one(), None, RECEIVE_TIMEOUT),
    "take_one of a payload": (lambda receiver: receiver.take_one(b"x"), None, RECEIVE_TIMEOUT),
    "hears": (lambda receiver: receiver.receives_one(), False, HELLO_INTERVAL),
}


@pytest.mark.parametrize("call", WAITS)
def test_a_flood_makes_no_wait_endless(hearing: Hearing, call: str) -> None:
    wait, answer, seconds = WAITS[call]
    hearing.flood(5.0)
    began = hearing.backend.now()
    assert wait(hearing.receiver) == answer
    assert seconds <= hearing.backend.now() - began < 2 * seconds
    assert hearing.receiver.strangers > seconds * 900


def test_messages_between_strangers_are_waited_for(hearing: Hearing) -> None:
    """Each comes within GRACE seconds of the one before, all together take longer."""
    hearing.flood(5.0)
    for number in range(1, 5):
        hearing.send_at(round(number * RECEIVE_TIMEOUT * 0.9e9), hearing.sender, b"own")
    assert hearing.receiver.take(4) == 0


def test_messages_wait_while_others_are_dropped(hearing: Hearing) -> None:
    """Messages that come while others are dropped wait."""
    receiver, calls = hearing.receiver, 0

    def recv(most: int, timeout: float) -> object:
        nonlocal calls
        calls += 1
        for _ in range(CHUNK if calls < 100 else 0):
            hearing.stranger.send(b"x")
        return qp.recv(most, timeout)

    qp = receiver.qp
    receiver.qp = SimpleNamespace(recv=recv)  # type: ignore[assignment]
    receiver.drain()
    assert receiver.strangers == hearing.stranger.sent == 2 * WINDOW


def test_an_answer_is_of_a_sender_and_equals_its_ping(hearing: Hearing) -> None:
    hearing.stranger.send(b"ping 2")
    for answer in (b"ping 1", b"ping 2", b"ping 3"):
        hearing.sender.send_one(hearing.to, answer)
    message = hearing.receiver.take_one(b"ping 2")
    assert message is not None
    assert message.source == hearing.fabric.ports[0].gids[hearing.to.sgid_index]
    assert bytes(message.payload) == b"ping 2"
    assert hearing.receiver.strangers == 1
    message = hearing.receiver.take_one()
    assert message is not None
    assert bytes(message.payload) == b"ping 3"


# --- over MPI ---


class Job:
    """MPI among threads: what `mcast.bench.mpi` uses of a communicator."""

    def __init__(self, size: int) -> None:
        self.size, self.meeting = size, threading.Barrier(size, timeout=BOUND)
        self.values: list[Any] = [None] * size
        self.arrived: set[int] = set()


class Rank:
    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank = job, rank

    def __getattr__(self, name: str) -> Any:
        """MPI's names begin with a capital."""
        return object.__getattribute__(self, f"_{name.lower()}")

    def _get_rank(self) -> int:
        return self._rank

    def _get_size(self) -> int:
        return self._job.size

    def _split_type(self, kind: int) -> Rank:
        return self

    def _barrier(self) -> None:
        self._job.meeting.wait()

    def allgather(self, value: Any) -> list[Any]:
        self._job.values[self._rank] = value
        self._barrier()
        found = list(self._job.values)
        self._barrier()
        return found

    def bcast(self, value: Any) -> Any:
        return self.allgather(value)[0]

    def reduce(self, value: int) -> int | None:
        total = sum(self.allgather(value))
        return None if self._rank else total

    def _ibarrier(self) -> Rank:
        self._job.arrived.add(self._rank)
        return self

    def _test(self) -> bool:
        return len(self._job.arrived) == self._job.size

    def _wait(self) -> None:
        until(self._test)


@contextmanager
def no_mpi4py() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        fake = SimpleNamespace(MPI=SimpleNamespace(COMM_TYPE_SHARED=0))
        patched.setitem(sys.modules, "mpi4py", fake)
        yield


def over_ranks(backend: Backend, ranks: int) -> BenchResult:
    job = Job(ranks)

    def run(rank: int) -> BenchResult | None:
        try:
            return mpi.measure(Rank(job, rank), backend, GROUP, SIZE, 0.03)  # type: ignore[arg-type]
        except BaseException:
            job.meeting.abort()
            raise

    with no_mpi4py(), ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(run, range(ranks)))
    assert found[1:] == [None] * (ranks - 1)
    assert found[0] is not None
    return found[0]


@pytest.mark.parametrize("payload", [bytes(4), b"\xff" * 4, bytes(SIZE)], ids=["zeros", "end", "size"])
def test_stranger_ends_no_rank(payload: bytes, precede: Callable[[Callable[[bytes], None]], None]) -> None:
    """Over ranks a stranger ends nothing and answers nothing."""
    with open_fabric(Fabric.roce(ports=4, clock="wall")) as backend:
        strangers = [Stranger(backend, 4, group) for group in (GROUP, BACK)]
        lock = threading.Lock()

        def first(_: bytes) -> None:
            with lock:
                for stranger in strangers:
                    stranger.send(payload)

        precede(first)
        found = over_ranks(backend, 3)
    assert found.lost == 0
    assert (found.receivers, found.processes) == (2, 3)
    assert found.strangers > strangers[0].sent, "two ranks got each of them"
    assert found.latency_us is not None


def test_late_message_ends_no_pings(hearing: Hearing) -> None:
    """A late message of the batches ends no ranks pings."""
    hearing.sender.send_one(hearing.to, b"")
    for millisecond, payload in ((1, bytes(SIZE)), (2, b"\xff" * 4)):
        hearing.send_at(millisecond * 1_000_000, hearing.sender, payload)
    assert mpi._receive(Rank(Job(1), 0), hearing.receiver, hearing.to, 1) == 0  # type: ignore[arg-type]
    assert hearing.backend.now() == 0.002


def test_who_answers_goes_round() -> None:
    assert [mpi._asked(number, 3) for number in range(1, 6)] == [1, 2, 3, 1, 2]


# --- whom a batch is from ---


def test_a_batch_counts_the_messages_of_one_queue_pair(hearing: Hearing) -> None:
    hearing.sender.send(hearing.to, [b"1", b"2"])
    qp = hearing.receiver.qp
    with qp.recv(2, 0) as batch:
        message = batch[0]
        near = message.source
    others = Gid(b"\1" + near[1:]), Gid(near[:-1] + b"\xff")
    senders = (near, 5), (near, 6), *((gid, 5) for gid in others)
    kinds = [message._replace(payload=memoryview(b""), source=gid, src_qp=number) for gid, number in senders]
    for chosen in ((), (0,), (0, 0), (1, 0), (0, 1), (2, 0, 0), (0, 2), (3, 0), (0, 3), (1, 2, 3), (0, 1, 0)):
        batch = CopiedBatch([kinds[one] for one in chosen])
        for index, one in enumerate(kinds):
            assert batch.count_from(one.source, one.src_qp) == chosen.count(index)
