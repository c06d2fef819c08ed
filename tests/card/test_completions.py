"""Options of completion queues that a device may offer, on a card that has it and on one that has not."""

from __future__ import annotations

import errno as E
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf
from typing import Any

import numpy
import pytest

from mcast import CqModeration, open_endpoint
from mcast.api import (
    RECORD_DTYPE,
    Closed,
    CmEventType,
    InvalidArgument,
    McastError,
    Message,
    NotSupported,
    PortEvent,
    QpError,
    QpState,
    TimedOut,
    TimestampClock,
    WcStatus,
)

from ..waiting import until
from .card import AsyncEvent, Card, Clock, Stage
from .ends import BOUND, GROUP, End
from .provider import CardBackend

ARMED = "ibv_req_notify_cq"


# --- completion vectors ----------------------------------------------------------------------------


def test_queue_pairs_take_the_vectors_in_turn(card: Card, backend: CardBackend) -> None:
    card.ethernet(1, comp_vectors=3)
    assert [device.num_comp_vectors for device in backend.devices()] == [3]
    ends = [End(backend) for _ in range(6)]
    vectors = [card.qp(end.qp.qp_num).vectors for end in ends]
    assert all(sends == receives for sends, receives in vectors)
    first = vectors[0][0]
    assert [vector for vector, _ in vectors] == [(first + turn) % 3 for turn in range(6)]


def test_a_vector_may_be_chosen(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    assert card.qp(End(backend, comp_vector=2).qp.qp_num).vectors == (2, 2)
    with open_endpoint(backend, "10.0.0.1", comp_vector=3) as endpoint:
        assert endpoint.device.num_comp_vectors == 4
        assert card.qp(endpoint.qp_num).vectors == (3, 3)


@pytest.mark.parametrize(
    ("there", "says"),
    [
        (4, "card0 has 4 completion vectors, 0..3: choose one of these"),
        (1, "card0 has one completion vector, 0: choose"),
    ],
)
def test_a_vector_that_is_not_there_is_refused(
    card: Card, backend: CardBackend, there: int, says: str
) -> None:
    card.ethernet(1, comp_vectors=there)
    with pytest.raises(InvalidArgument, match=says) as caught:
        End(backend, comp_vector=there)
    assert caught.value.arguments == {"comp_vector": there}
    assert card.qps() == ()


# --- moderation ------------------------------------------------------------------------------------


def test_moderation_is_of_receives_alone(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    end = End(backend, moderation=CqModeration(count=16, period=50))
    assert card.qp(end.qp.qp_num).moderation == ((0, 0), (16, 50))
    with open_endpoint(backend, "10.0.0.1", moderation=CqModeration(count=1, period=7)) as endpoint:
        assert card.qp(endpoint.qp_num).moderation == ((0, 0), (1, 7))


def test_a_sleeper_gets_a_message_of_a_moderated_queue(card: Card, backend: CardBackend) -> None:
    """Fewer messages than an event waits for: the period wakes the sleeper."""
    card.ethernet(1)
    end = End(backend, moderation=CqModeration(count=100, period=500))
    with ThreadPoolExecutor(1) as pool:
        for number in range(5):
            armed = card.count(ARMED)
            waiting = pool.submit(end.qp.recv_one, BOUND)
            until(lambda armed=armed: card.count(ARMED) > armed)  # type: ignore[misc]
            assert card.inject(end.qp.qp_num, b"%d" % number)
            message = waiting.result(BOUND)
            assert message is not None
            assert bytes(message.payload) == b"%d" % number


@pytest.mark.parametrize(
    ("device", "errno", "error", "says"),
    [
        ({"has_modify_cq": 0}, 0, NotSupported, "card0 cannot moderate completions: do without"),
        ({}, E.EOPNOTSUPP, NotSupported, "card0 cannot moderate completions: do without"),
        ({}, E.ENOSYS, McastError, "card0 cannot moderate completions: do without"),
        ({}, E.EINVAL, InvalidArgument, "card0 cannot moderate .* choose a smaller count or period"),
    ],
)
def test_a_device_that_does_not_moderate_says_so(
    card: Card,
    backend: CardBackend,
    device: dict[str, int],
    errno: int,
    error: type[McastError],
    says: str,
) -> None:
    card.ethernet(1, **device)
    if errno:
        card.fail("ibv_modify_cq", errno)
    with pytest.raises(error, match=says):
        End(backend, moderation=CqModeration(count=2, period=2))
    assert card.qps() == ()


# --- time stamps -----------------------------------------------------------------------------------


def clock_of(kind: TimestampClock) -> int:
    return time.time_ns() if kind is TimestampClock.REALTIME else time.monotonic_ns()


CLOCKS = [(Clock.OWN | Clock.OF_DAY, TimestampClock.REALTIME), (Clock.OWN, TimestampClock.DEVICE)]
TICK = 7
"""Nanoseconds; what a tick of the card's clock at 156.25 MHz takes, rounded up."""


@pytest.mark.parametrize(("clocks", "kind"), CLOCKS)
def test_messages_say_when_they_came(
    card: Card, backend: CardBackend, clocks: Clock, kind: TimestampClock
) -> None:
    card.ethernet(1, clocks=clocks, clock_khz=156_250)
    end = End(backend, timestamps=True)
    assert end.qp.timestamp_clock is kind
    to = end.join()
    before = clock_of(kind)
    end.qp.send(to, [b"one", b"two"], 7)
    end.qp.send(to, [b"three"])
    after = clock_of(kind)
    with end.qp.recv(2, BOUND) as batch:
        stamps = numpy.frombuffer(batch.records, RECORD_DTYPE)["timestamp"].tolist()
        assert [message.timestamp for message in batch] == stamps
        assert [message.imm for message in batch] == [7, 7]
    last = end.qp.recv_one(BOUND)
    assert last is not None
    assert last.timestamp is not None
    assert [*stamps, last.timestamp] == sorted([*stamps, last.timestamp])
    assert before - TICK <= stamps[0]
    assert last.timestamp <= after


@pytest.mark.parametrize("layer", ["roce", "infiniband"])
def test_a_stamped_message_is_otherwise_as_any(card: Card, backend: CardBackend, layer: str) -> None:
    card.network(layer, 2)
    sender, plain, stamped = End(backend), End(backend, "10.0.0.2"), End(backend, "10.0.0.2", timestamps=True)
    to = sender.join()
    plain.join()
    stamped.join()
    sender.qp.send(to, [b"with"], 0xFFFFFFFF)
    sender.qp.send(to, [b"without", b""])
    for end in (plain, stamped):
        assert card.inject(end.qp.qp_num, b"of another", src_qp=77, slid=9, sl=2, path_bits=3)
    for _ in range(4):
        expected, found = plain.qp.recv_one(BOUND), stamped.qp.recv_one(BOUND)
        assert expected is not None
        assert found is not None
        assert expected.timestamp is None
        assert found._replace(timestamp=None) == expected
    assert sender.qp.timestamp_clock is None


def test_peeked_message_keeps_its_stamp(card: Card, backend: CardBackend) -> None:
    """A message that was only looked at keeps its stamp."""
    card.ethernet(1)
    end = End(backend, timestamps=True)
    before = time.time_ns()
    card.inject(end.qp.qp_num, b"seen")
    card.inject(end.qp.qp_num, b"next")
    after = time.time_ns()
    with pytest.raises(McastError, match="queued"):
        end.qp.register(bytearray(1024), recv_slot=256)
    with end.qp.recv(2, BOUND) as batch:
        assert all(before <= message.timestamp <= after for message in batch if message.timestamp is not None)
        assert [bytes(message.payload) for message in batch] == [b"seen", b"next"]


def test_peeked_message_outlives_the_queue(card: Card, backend: CardBackend) -> None:
    """A message that was only looked at outlives the queue."""
    card.ethernet(1)
    end = End(backend)
    card.inject(end.qp.qp_num, b"seen")
    with pytest.raises(McastError, match="queued"):
        end.qp.register(bytearray(1024), recv_slot=256)
    card.fail("ibv_poll_cq", E.EIO, times=-1)
    with end.qp.recv(2, 0) as batch:
        assert [bytes(message.payload) for message in batch] == [b"seen"]
    with pytest.raises(McastError):
        end.qp.recv(2, 0)
    card.fail_no_more()


def test_a_stamped_queue_tells_of_failures(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    end = End(backend, timestamps=True)
    card.fail("recv_completion", WcStatus.LOC_PROT_ERR)
    card.inject(end.qp.qp_num, b"lost")
    with pytest.raises(QpError):
        end.qp.recv(4, BOUND)
    end.qp.reset()
    card.inject(end.qp.qp_num, b"well")
    message = end.qp.recv_one(BOUND)
    assert message is not None
    assert message.timestamp
    card.fail("ibv_poll_cq", E.EIO, times=-1)
    with pytest.raises(McastError):
        end.qp.recv(4, 0)
    card.fail_no_more()


def test_a_stamped_queue_is_slept_on(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    with open_endpoint(backend, "10.0.0.1", timestamps=True) as endpoint, ThreadPoolExecutor(1) as pool:
        assert endpoint.timestamp_clock is TimestampClock.REALTIME
        waiting = pool.submit(endpoint.recv, BOUND)
        until(lambda: card.count(ARMED) > 0)
        card.inject(endpoint.qp_num, b"x")
        message = waiting.result(BOUND)
        assert message is not None
        assert message.timestamp is not None


@pytest.mark.parametrize(
    ("device", "failing"), [({"clocks": 0}, 0), ({"has_cq_ex": 0}, 0), ({}, E.EOPNOTSUPP)]
)
def test_a_device_without_time_stamps_says_so(
    card: Card, backend: CardBackend, device: dict[str, int], failing: int
) -> None:
    card.ethernet(1, **device)
    if failing:
        card.fail("ibv_create_cq_ex", failing, times=2)
    with pytest.raises(NotSupported, match="card0 cannot stamp completions with the time: do without"):
        End(backend, timestamps=True)
    assert card.qps() == ()


# --- busy polling ----------------------------------------------------------------------------------


LOOKS = 5000
"""More than anybody can look in the 50 µs after which the usual wait falls asleep."""


LONG = 2 * BOUND
"""Seconds until calls end by themselves that should have ended before."""


class Spinning:
    """A call in a thread that looks at the completion queue, and does not sleep."""

    def __init__(self, card: Card, call: Callable[..., Any], *given: object, looks: int = LOOKS) -> None:
        self._pool = ThreadPoolExecutor(1)
        enough = card.count("ibv_poll_cq") + looks
        self._future: Future[Any] = self._pool.submit(call, *given)
        until(lambda: card.count("ibv_poll_cq") > enough or self._future.done())

    def result(self) -> Any:
        self._pool.shutdown(wait=False)
        return self._future.result(BOUND)


def test_who_spins_does_not_arm_the_queue(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    end = End(backend, busy_poll=inf)
    to = end.join()
    spinning = Spinning(card, end.qp.recv_one, LONG)
    end.qp.send_one(to, b"found")
    message: Message = spinning.result()
    assert bytes(message.payload) == b"found"
    assert card.count(ARMED) == 0


def test_who_spins_for_a_while_sleeps_afterwards(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    end = End(backend, busy_poll=0.01)
    spinning = Spinning(card, end.qp.recv_one, BOUND, looks=1)
    until(lambda: card.count(ARMED) > 0)
    card.inject(end.qp.qp_num, b"woken")
    assert bytes(spinning.result().payload) == b"woken"


def test_a_flush_spins_as_well(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    end = End(backend, busy_poll=inf)
    to = end.join()
    card.hold(Stage.SEND, end.qp.qp_num)
    end.qp.send_one(to, b"late")
    spinning = Spinning(card, end.qp.flush, LONG)
    card.release(Stage.SEND, end.qp.qp_num)
    assert spinning.result() is None
    assert card.count(ARMED) == 0


def test_a_timeout_ends_it(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    end = End(backend, busy_poll=inf)
    to = end.join()
    assert end.qp.recv_one(0) is None
    assert end.qp.recv_one(0.001) is None
    assert len(end.qp.recv(4, 0.001)) == 0
    card.hold(Stage.SEND, end.qp.qp_num)
    end.qp.send_one(to, b"late")
    with pytest.raises(TimedOut):
        end.qp.flush(0.001)
    card.release(Stage.SEND, end.qp.qp_num)


def test_a_close_ends_it(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    end = End(backend, busy_poll=inf)
    spinning = Spinning(card, end.qp.recv, 4, LONG)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(end.qp.close).result(BOUND)
    with pytest.raises(Closed):
        spinning.result()


def test_an_event_ends_it(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    end = End(backend, busy_poll=inf)
    spinning = Spinning(card, end.qp.recv, 4, LONG, True)
    assert card.event(CmEventType.ADDR_CHANGE) == 1
    assert len(spinning.result()) == 0
    assert end.channel.pending


def test_what_the_port_tells_ends_it(card: Card, backend: CardBackend) -> None:
    (device,) = card.ethernet(1)
    end = End(backend, busy_poll=inf)
    spinning = Spinning(card, end.qp.recv, 4, LONG, True)
    card.port_event(device, PortEvent.ERR)
    assert len(spinning.result()) == 0
    assert end.qp.port_events() == (PortEvent.ERR,)


@pytest.mark.parametrize("by_user", [False, True])
def test_the_state_err_ends_it(card: Card, backend: CardBackend, by_user: bool) -> None:
    card.ethernet(1)
    end = End(backend, busy_poll=inf)
    spinning = Spinning(card, end.qp.recv, 4, LONG)
    if by_user:
        end.qp.modify(QpState.ERR)
    else:
        card.qp_event(end.qp.qp_num, AsyncEvent.QP_FATAL)
    with pytest.raises(QpError):
        spinning.result()


@pytest.mark.parametrize("by_event", [True, False], ids=["by an event", "by its descriptors alone"])
def test_a_device_that_goes_ends_it(card: Card, by_event: bool) -> None:
    (device,) = card.ethernet(1)
    backend = CardBackend(card)
    end = End(backend, busy_poll=inf)
    spinning = Spinning(card, end.qp.recv, 4, LONG)
    if not by_event:
        card.fail("ibv_get_async_event", E.EIO, times=-1)
    card.remove(device, disassociated=True)
    with pytest.raises(QpError):
        spinning.result()
    with pytest.raises(McastError):
        backend.close()  # the kernel answers EIO to every command
    card.reset()


def test_a_signal_ends_it(card: Card, backend: CardBackend) -> None:
    """Its handler runs, and may raise; if it does not, the call goes on."""
    card.ethernet(1)
    end = End(backend, busy_poll=inf)
    ran: list[int] = []

    class Enough(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        ran.append(number)
        if len(ran) == 3:
            raise Enough

    def send_signals() -> None:
        while len(ran) < 3:
            done, enough = len(ran), card.count("ibv_poll_cq") + LOOKS
            until(lambda enough=enough: card.count("ibv_poll_cq") > enough)  # type: ignore[misc]
            os.kill(os.getpid(), signal.SIGUSR1)
            until(lambda done=done: len(ran) > done)  # type: ignore[misc]

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send_signals)
            with pytest.raises(Enough):
                end.qp.recv(4, BOUND)
            sent.result(BOUND)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(ran) == 3


def test_sleeper_misses_nothing_beside_a_spinner(card: Card, backend: CardBackend) -> None:
    """Who sleeps misses nothing beside one who spins.

    One thread sleeps, its time to spin is over; another one begins to spin: each gets a message.
    """
    card.ethernet(1)
    end = End(backend, busy_poll=0.02)
    deadline = time.monotonic() + BOUND / 2
    for _ in range(20):
        armed = card.count(ARMED)
        with ThreadPoolExecutor(1) as pool:
            sleeping = pool.submit(end.qp.recv_one, deadline - time.monotonic())
            until(lambda armed=armed: card.count(ARMED) > armed)  # type: ignore[misc]
            spinning = Spinning(card, end.qp.recv_one, deadline - time.monotonic(), looks=1)
            card.inject(end.qp.qp_num, b"first")
            card.inject(end.qp.qp_num, b"second")
            found = [sleeping.result(BOUND), spinning.result()]
        assert all(message is not None for message in found)
        assert sorted(bytes(message.payload) for message in found) == [b"first", b"second"]


def test_many_spin_and_none_is_starved(card: Card, backend: CardBackend) -> None:
    """Threads that look without end share the queue pair with one that sends on it."""
    card.ethernet(1)
    end = End(backend, busy_poll=inf, max_recv_wr=256)
    to, count = end.join(), 50
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(end.qp.recv_one, BOUND) for _ in range(2 * count)]
        for number in range(2 * count):
            end.qp.send_one(to, b"%d" % number, None, BOUND)
        found = [job.result(BOUND) for job in waiting]
    assert sorted(int(bytes(message.payload)) for message in found if message) == list(range(2 * count))


def test_an_endpoint_spins_for_messages_and_events(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    with open_endpoint(backend, "10.0.0.1", busy_poll=inf) as endpoint, ThreadPoolExecutor(1) as pool:
        with endpoint.join(GROUP) as group:
            waiting = pool.submit(group.recv, BOUND)
            group.send(b"to myself")
            message = waiting.result(BOUND)
            assert message is not None
            assert bytes(message.payload) == b"to myself"
            waiting = pool.submit(group.recv, BOUND)
            until(waiting.running)
        with pytest.raises(Closed):
            waiting.result(BOUND)
        assert card.count(ARMED) == 0
