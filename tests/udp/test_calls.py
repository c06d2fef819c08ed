"""The queue pair's calls in C do what the contract's methods in Python do, and leave the rest to these."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic
from typing import Any

import pytest

from mcast import open_backend
from mcast.api import Closed, Destination, McastError, QpState, QueuePair, TimedOut
from mcast.backends.net import hostnet
from mcast.backends.udp.backend import UdpQueuePair
from mcast.conformance.helpers import BOUND

from ..own_network import needs_namespaces
from ..waiting import Running, is_asleep, until
from .test_offloads import LOOPBACK, joined

Pair = tuple[UdpQueuePair, Destination]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A queue pair that is a member of a group, and has sent to it: C sends there from now on."""
    with open_backend("udp") as backend, backend.event_channel() as channel:
        qp, to = joined(channel, LOOPBACK, 64)
        assert isinstance(qp, UdpQueuePair)
        qp.send_one(to, b"")
        assert qp.recv_one(BOUND) is not None
        yield qp, to


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("this call is plain")


def test_plain_calls_do_not_enter_python(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    qp, to = pair
    for name in ("_send_all", "_recv", "_recv_one", "_take"):
        monkeypatch.setattr(UdpQueuePair, name, refuse)
    qp.send_one(to, b"one")
    assert qp.send(to, [b"two", b"three"]) == 2
    found = qp.recv_one(BOUND)
    assert found is not None
    assert bytes(found.payload) == b"one"
    with qp.recv(64, BOUND) as batch:
        assert [bytes(one.payload) for one in batch] == [b"two", b"three"]
    assert qp.recv_one(0) is None
    assert not qp.recv(timeout=0)


def test_c_receives_what_python_receives(pair: Pair) -> None:
    """Every field of a message, and records of a batch."""
    qp, to = pair
    ways: tuple[Callable[[], Any], ...] = (lambda: qp.recv_one(BOUND), lambda: QueuePair.recv_one(qp, BOUND))
    for payload, imm in ((b"", None), (b"x", 0), (b"x" * 4096, 0xFFFFFFFF), (b"abc", None)):
        for _ in ways:
            qp.send(to, [payload], imm)
        one, other = (receive() for receive in ways)
        assert [type(field) for field in one] == [type(field) for field in other]
        assert one == other
        assert bytes(one.payload) == payload
        assert one.imm == imm
        assert one.from_self
        assert one.payload.readonly
    seen = []
    for receive in (qp.recv, lambda most, timeout: QueuePair.recv(qp, most, timeout)):
        qp.send(to, [b"1", b"22"], 7)
        with receive(2, BOUND) as batch:
            seen.append([(bytes(one.payload), *one[1:]) for one in batch])
    assert seen[0] == seen[1]


WRONG: dict[str, Callable[[Any, Any], object]] = {
    "too long": lambda qp, to: qp.send_one(to, b"x" * 4097),
    "one too long": lambda qp, to: qp.send(to, [b"x", b"x" * 4097]),
    "no bytes": lambda qp, to: qp.send_one(to, "text"),
    "one is none": lambda qp, to: qp.send(to, [b"x", None]),
    "no destination": lambda qp, to: qp.send_one("239.1.1.1", b"x"),
    "missing": lambda qp, to: qp.send_one(to),
    "too many": lambda qp, to: qp.send_one(to, b"x", None, None, None),
    "unknown": lambda qp, to: qp.recv_one(wait=1),
    "twice": lambda qp, to: qp.recv_one(0, timeout=0),
    "not a number": lambda qp, to: qp.recv_one(float("nan")),
    "no seconds": lambda qp, to: qp.recv("soon"),
    "none at all": lambda qp, to: qp.recv(0),
    "imm": lambda qp, to: qp.send_one(to, b"x", 1 << 32),
    "no timeout": lambda qp, to: qp.send_one(to, b"x", timeout="soon"),
}


class InPython:
    """The queue pair by the contract's methods."""

    def __init__(self, qp: QueuePair) -> None:
        self._qp = qp

    def __getattr__(self, name: str) -> Callable[..., object]:
        return getattr(QueuePair, name).__get__(self._qp)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_as_in_python(pair: Pair, name: str) -> None:
    """Nothing is sent, and type and text of the error are the contract's."""
    qp, to = pair
    before, errors = qp.counters.sent, []
    for one in (qp, InPython(qp)):
        with pytest.raises((McastError, TypeError, ValueError)) as caught:
            WRONG[name](one, to)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]
    assert qp.counters.sent == before


def test_a_state_in_which_nothing_is_sent_is_respected(pair: Pair) -> None:
    qp, to = pair
    before = qp.counters.sent
    qp.modify(QpState.SQD)
    with pytest.raises(TimedOut):
        qp.send(to, [b"x"], timeout=0)
    with pytest.raises(TimedOut):
        qp.send_one(to, b"x", timeout=0)
    assert qp.counters.sent == before
    qp.close()
    for call in (lambda: qp.send_one(to, b"x"), lambda: qp.recv(), lambda: qp.recv_one(0)):
        with pytest.raises(Closed):
            call()


def test_send_in_sqd_sleeps(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks again after a change alone, and goes on when the queue pair can send."""
    qp, to = pair
    looks, post = [], UdpQueuePair._post

    def spy(*given: Any) -> tuple[int, int]:
        looks.append(given)
        return post(*given)

    monkeypatch.setattr(UdpQueuePair, "_post", spy)
    qp.modify(QpState.SQD)
    with pytest.raises(TimedOut):
        qp.send(to, [b"x"], timeout=0.1)
    assert len(looks) < 5
    running = Running(lambda: qp.send(to, [b"x"]))
    until(lambda: len(looks) > 5 or is_asleep(running.threads[0]))
    qp.modify(QpState.RTS)
    assert running.results() == [1]


@needs_namespaces
def test_a_change_of_the_port_is_looked_at(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """C forgets where it sends to when an interface changes, and Python judges the destination anew."""
    qp, to = pair
    seen, send_all = [], UdpQueuePair._send_all

    def spy(*given: Any) -> None:
        seen.append(given)
        send_all(*given)

    monkeypatch.setattr(UdpQueuePair, "_send_all", spy)
    qp.send_one(to, b"x")
    assert not seen
    hostnet.run("ip", "addr", "add", "10.0.0.1/32", "dev", "lo")
    qp._owner.channel.backend.devices()  # sees that
    qp.send_one(to, b"x")
    qp.send_one(to, b"x")
    assert len(seen) == 1


class Rung(Exception):
    pass


@pytest.mark.parametrize("call", ["recv", "recv_one"])
def test_a_signal_ends_a_wait(pair: Pair, call: str) -> None:
    """Its handler's exception comes out of the call, which is not done; the queue pair is as before."""
    qp, to = pair

    def ring(*_: object) -> None:
        raise Rung

    def wait() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        getattr(qp, call)(timeout=BOUND)

    before = signal.signal(signal.SIGALRM, ring)
    try:
        begun = monotonic()
        with pytest.raises(Rung):
            wait()
        assert monotonic() - begun < BOUND / 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    qp.send_one(to, b"after")
    found = qp.recv_one(BOUND)
    assert found is not None
    assert bytes(found.payload) == b"after"


@pytest.mark.parametrize("call", ["recv", "recv_one"])
def test_close_ends_a_wait(pair: Pair, call: str) -> None:
    qp, _ = pair
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            getattr(qp, call)(timeout=BOUND)
        except BaseException as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: qp.path.ring.queued == 0)
    qp.close()
    waiting.join(BOUND)
    assert isinstance(ended[0], Closed)


def test_calls_in_c_share_a_queue_pair_with_all_others(pair: Pair, long: bool) -> None:
    """Threads send and receive in C while another one changes state, memory and memberships.

    What is sent is received or counted, and nothing is left over.
    """
    qp, to = pair
    over, failed = threading.Event(), list[BaseException]()
    received = [0, 0]

    def again(call: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                while not over.is_set():
                    with suppress(TimedOut):
                        call()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def batch() -> None:
        with qp.recv(16, 0.001) as found:
            received[0] += len([bytes(one.payload) for one in found])

    def one() -> None:
        received[1] += qp.recv_one(0.001) is not None

    payloads = [b"x" * 100] * 20
    threads = [
        again(lambda: qp.send(to, payloads, timeout=0.001)),
        again(lambda: qp.send_one(to, b"y", timeout=0.001)),
        again(batch),
        again(one),
    ]
    try:
        left = 2000 if long else 100
        while left > 0 or not (all(received) or failed):
            left -= 1
            qp.modify(QpState.SQD)
            qp.modify(QpState.RTS)
            qp.detach_mcast(to.gid, to.dlid)
            qp.attach_mcast(to.gid, to.dlid)
            assert qp.counters.recv_free <= 64
            assert qp.port_events() == ()
    finally:
        over.set()
        for thread in threads:
            thread.join(BOUND)
    assert not failed
    while qp.recv(timeout=0):
        pass
    counters = qp.counters
    assert counters.recv_free == 64
    assert received[0]
    assert received[1]
    assert counters.sent >= counters.received >= sum(received)
