"""Sending, waiting and closing on a card that takes its time, fails or goes away."""

from __future__ import annotations

import asyncio
import ctypes as c
import errno as E
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any, cast

import pytest

from mcast import aio, open_endpoint
from mcast.api import (
    Batch,
    Closed,
    CmEventType,
    Destination,
    HeaderBodyBatch,
    McastError,
    PortEvent,
    QpError,
    QpState,
    QueuePair,
    TimedOut,
)
from mcast.backends.rdma import native
from mcast.backends.rdma.address_handles import AddressHandles
from mcast.backends.rdma.pds import ProtectionDomains
from mcast.backends.rdma.qp import RdmaQueuePair

from ..interleave import interleaved
from ..waiting import Running, descriptors, is_asleep, until
from . import ends
from .card import Card, Stage
from .ends import BOUND as LONG
from .ends import GROUP
from .one_implementation import one_implementation
from .provider import CardBackend

DEPTH = 16
COPIED = bytes(400)
"""Longer than what goes inline: it is sent from the QP's own memory."""


class End(ends.End):
    """An id on the first port, its queue pair, and where to send to."""

    def __init__(self, card: Card, backend: CardBackend, send_depth: int = DEPTH) -> None:
        if not card.numbers:
            card.ethernet(1)
        super().__init__(backend, max_send_wr=send_depth, max_recv_wr=64)
        self.card, self.group = card, self.join()

    def inject(self, payload: bytes = b"x") -> None:
        assert self.card.inject(self.qp.qp_num, payload)

    @contextmanager
    def held(self, stage: Stage = Stage.SEND) -> Iterator[None]:
        """Sends do not complete inside the block."""
        self.card.hold(stage, self.qp.qp_num)
        yield
        self.card.delay(stage, 0, self.qp.qp_num)
        self.card.release(stage, self.qp.qp_num)

    def kept(self, stage: Stage = Stage.SEND) -> int:
        return self.card.qps()[0].kept[stage]


@pytest.fixture
def end(card: Card, backend: CardBackend) -> End:
    return End(card, backend)


# --- many at once --------------------------------------------------------------------------------


def test_a_series_ends_where_the_receives_begin_again(end: End) -> None:
    for burst in (40, 40):  # of 64 receives
        end.qp.send(end.group, [b"%03d" % place for place in range(burst)])
        with end.qp.recv(burst, LONG) as batch:
            found = [*batch.series()]
            assert [bytes(one) for series in found for one in series.payloads()] == [
                b"%03d" % place for place in range(burst)
            ]
            shape = [(series.messages, series.from_self) for series in found]
    assert shape == [(24, True), (16, True)]


def test_series_are_those_of_the_one_implementation(end: End, card: Card, backend: CardBackend) -> None:
    """Of other senders, of other lengths, of none, and where the receives begin again."""
    other = End(card, backend)
    random = Random(1)
    for _ in range(30):
        sent = 0
        while sent < 20:
            few, size = random.randint(1, 8), random.choice([0, 1, 40])
            random.choice([end, other]).qp.send(end.group, [bytes(size)] * few)
            sent += few
        with end.qp.recv(64, LONG) as batch:
            assert [*batch._stretches()] == [*Batch._stretches(batch)]


@pytest.mark.parametrize("size", [8, 600])
def test_rows_fill_the_send_queue_in_several_posts(end: End, size: int) -> None:
    """Rows are sent in as many posts as the send queue takes.

    By the fast call as by the one implementation.
    """
    rows = [bytes((number,)) * size for number in range(40)]
    view = memoryview(b"".join(rows)).cast("B", (40, size))
    for fast in (True, False):
        with nullcontext() if fast else one_implementation("send"):
            assert end.qp.send(end.group, view) == 40
            with end.qp.recv(64, LONG) as batch:
                assert [bytes(one.payload) for one in batch] == rows


@pytest.mark.parametrize("sges", [1, 4])
def test_two_segments_send_bodies_without_a_copy(card: Card, backend: CardBackend, sges: int) -> None:
    """A device reads bodies where they lie if a send may have two segments.

    What a program changes against its word is seen by who has not copied it; nobody waits for that.
    """
    card.ethernet(1, max_send_sge=sges)
    end = End(card, backend)
    bodies = bytearray(b"a" * 4 * 600)
    batch = HeaderBodyBatch(memoryview(b"12345678").cast("B", (4, 2)), memoryview(bodies).cast("B", (4, 600)))
    region = end.qp.register(bodies, constant=True)
    with end.held(Stage.WIRE):
        assert end.qp.send(end.group, batch, timeout=0) == 4
        assert end.kept(Stage.WIRE) == 4
        bodies[:] = b"b" * len(bodies)
    body = (b"b" if sges > 1 else b"a") * 600
    with end.qp.recv(64, LONG) as received:
        assert [bytes(one.payload) for one in received] == [
            head + body for head in (b"12", b"34", b"56", b"78")
        ]
    region.close()
    assert card.reports() == ()


def test_old_librdmacm_hides_a_refusal_of_segments(card: Card, backend: CardBackend) -> None:
    """An old librdmacm hides why a device refuses two segments.

    It says ENOMEM, whatever the device has said.
    """
    card.ethernet(1, max_inline=0)
    card.fail("ibv_create_qp", E.ENOMEM, times=4)
    end = End(card, backend)
    batch = HeaderBodyBatch(memoryview(b"1234").cast("B", (2, 2)), memoryview(b"abcdef").cast("B", (2, 3)))
    assert end.qp.send(end.group, batch) == 2
    with end.qp.recv(64, LONG) as received:
        assert [bytes(one.payload) for one in received] == [b"12abc", b"34def"]


@pytest.mark.parametrize("sges", [1, 4])
@pytest.mark.parametrize("size", [1, 253, 254, 255, 1021])
def test_short_heads_and_bodies_are_one_inline_segment(
    card: Card, backend: CardBackend, size: int, sges: int
) -> None:
    """Short messages in two parts are inline data of one segment.

    Heads of an odd length, bodies on both sides of what fits inline, and as long as the MTU lets them.
    """
    card.ethernet(1, max_send_sge=sges, max_inline=256)
    end = End(card, backend)
    heads, bodies = (bytes(range(12)) * length for length in (3, size))
    batch = HeaderBodyBatch(memoryview(heads).cast("B", (12, 3)), memoryview(bodies).cast("B", (12, size)))
    for registered in (False, True):
        with end.qp.register(bodies, constant=True) if registered else nullcontext():
            assert end.qp.send(end.group, batch) == 12
            with end.qp.recv(64, LONG) as received:
                assert [bytes(one.payload) for one in received] == [*batch]
    assert card.reports() == ()


def test_memory_stays_registered_while_read(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the device may still read stays registered.

    Else the device would find none where it reads, and the queue pair would go to ERR.
    """
    memory = bytearray(b"c" * 600)
    region = end.qp.register(memory, constant=True)
    end.card.hold(Stage.WIRE, end.qp.qp_num)
    end.qp.send_one(end.group, memory, timeout=0)
    with monkeypatch.context() as patched:
        patched.setattr("mcast.backends.rdma.qp.LINGER", 0.01)
        with pytest.raises(TimedOut):
            region.close()
    with pytest.raises(BufferError):
        memory.clear()
    end.card.delay(Stage.WIRE, 0, end.qp.qp_num)
    end.card.release(Stage.WIRE, end.qp.qp_num)
    message = end.qp.recv_one(LONG)
    assert message is not None
    assert bytes(message.payload) == memory
    monkeypatch.setattr("mcast.backends.rdma.qp.LINGER", LONG)
    region.close()
    memory.clear()
    assert end.card.count("ibv_dereg_mr") == 1
    assert end.qp.state is QpState.RTS


def test_head_and_body_keep_to_a_lower_mtu(end: End) -> None:
    """Both parts together keep to an MTU that has fallen.

    As another thread has found out between the look at the limit and the post.
    """
    batch = HeaderBodyBatch(
        memoryview(b"12").cast("B", (1, 2)), memoryview(COPIED).cast("B", (1, len(COPIED)))
    )
    end.qp.send(end.group, batch)
    qp, to = cast(RdmaQueuePair, end.qp), end.group
    serial = qp._handles.get(to)
    for limit, fits in ((len(COPIED) + 1, False), (len(COPIED) + 2, True)):
        qp._limit(limit, LONG)
        with nullcontext() if fits else pytest.raises(McastError) as caught:
            assert qp._post_header_body(serial, to.qp_num, to.qkey, batch.heads, batch.bodies, None, LONG)
        assert fits or (caught is not None and caught.value.errno == E.EMSGSIZE)
    assert end.qp.counters.sent == 2


def test_heads_and_bodies_without_room_are_not_posted(end: End) -> None:
    """Messages in two parts that find no room are not posted."""
    count = 3 * DEPTH
    heads, bodies = bytes(count * 2), bytes(count * 600)
    batch = HeaderBodyBatch(
        memoryview(heads).cast("B", (count, 2)), memoryview(bodies).cast("B", (count, 600))
    )
    with end.held():
        with pytest.raises(TimedOut) as caught:
            end.qp.send(end.group, batch, timeout=0)
        assert caught.value.posted == DEPTH
    end.qp.flush(LONG)


def test_rows_that_find_no_room_are_not_posted(end: End) -> None:
    view = memoryview(bytes(3 * DEPTH * 600)).cast("B", (3 * DEPTH, 600))
    with end.held():
        with pytest.raises(TimedOut) as caught:
            end.qp.send(end.group, view, timeout=0)
        assert caught.value.posted == DEPTH
    end.qp.flush(LONG)


# --- waiting -------------------------------------------------------------------------------------


ROUNDS, SENDERS = 45, 6
"""If half of the rounds took a second each, the last would come too late."""


def test_nobody_sleeps_while_its_message_is_there(end: End) -> None:
    """Two threads wait for one message each: whoever has got the first hands over to the other."""
    deadline = monotonic() + LONG / 2

    def receive() -> bytes | None:
        message = end.qp.recv_one(deadline - monotonic())
        return None if message is None else bytes(message.payload)

    for _ in range(ROUNDS):
        both = Running(receive, receive)
        until(lambda threads=both.threads: all(map(is_asleep, threads)))  # type: ignore[misc]
        end.inject(b"first")
        until(lambda threads=both.threads: not all(one.is_alive() for one in threads))  # type: ignore[misc]
        end.inject(b"second")
        assert sorted(both.results()) == [b"first", b"second"]


def test_nobody_sleeps_while_its_send_is_complete(end: End) -> None:
    """Threads send from registered memory, and one send after another completes: who wakes wakes the next."""
    memory = memoryview(bytearray(1024))
    deadline = monotonic() + LONG / 2

    def send() -> None:
        end.qp.send_one(end.group, memory, None, deadline - monotonic())

    def left(threads: list[threading.Thread]) -> int:
        return sum(thread.is_alive() for thread in threads)

    with end.qp.register(memory):
        for _ in range(ROUNDS):
            end.card.hold(Stage.SEND, end.qp.qp_num)
            every = Running(*[send] * SENDERS)
            threads = every.threads
            until(lambda: end.kept() == SENDERS and all(map(is_asleep, threads)))  # noqa: B023
            for most in range(SENDERS, 0, -1):
                end.card.release(Stage.SEND, end.qp.qp_num, 0)
                until(lambda: left(threads) < most)  # noqa: B023
            assert every.results() == [None] * SENDERS


def test_waiter_for_more_sends_wakes_the_other(end: End) -> None:
    """Who waits for more sends calls who waits for fewer.

    The one waits for all of a full queue and hears of each completion; the other needs room for one.
    """
    end.card.hold(Stage.SEND, end.qp.qp_num)
    for _ in range(DEPTH):
        end.qp.send_one(end.group, COPIED)
    flushing = Running(end.qp.flush)
    until(lambda: is_asleep(flushing.threads[0]))
    sending = Running(lambda: end.qp.send_one(end.group, COPIED))
    until(lambda: is_asleep(sending.threads[0]))
    end.card.release(Stage.SEND, end.qp.qp_num, 0)
    assert sending.results() == [None]
    assert flushing.threads[0].is_alive()
    end.card.delay(Stage.SEND, 0, end.qp.qp_num)
    end.card.release(Stage.SEND, end.qp.qp_num)
    assert flushing.results() == [None]


def test_a_wait_that_is_over_hands_over(end: End) -> None:
    """The thread that led has nothing to receive any more: the other gets the message."""
    first = Running(lambda: end.qp.recv_one(0.2))
    until(lambda: is_asleep(first.threads[0]))
    second = Running(end.qp.recv_one)  # one that ends by itself would find the message then
    assert first.results() == [None]
    end.inject(b"for the second")
    (message,) = second.results()
    assert bytes(message.payload) == b"for the second"


def test_a_loop_hears_of_what_a_thread_left(end: End) -> None:
    """A thread takes one of two messages; the descriptor tells of the other."""
    descriptor = end.qp.fileno()
    assert len(end.qp.recv(1, 0)) == 0
    thread = Running(lambda: end.qp.recv_one(LONG))
    until(lambda: is_asleep(thread.threads[0]))
    end.card.hold(Stage.RECV, end.qp.qp_num)
    end.qp.send(end.group, [b"one", b"two"])
    end.card.delay(Stage.RECV, 0, end.qp.qp_num)
    end.card.release(Stage.RECV, end.qp.qp_num)
    thread.results()
    assert select.select([descriptor], [], [], LONG)[0]
    assert len(end.qp.recv(2, 0)) == 1


@pytest.mark.parametrize("timeout", [0, 1e-9, 1e-5])
def test_short_empty_receive_arms_the_descriptor(end: End, timeout: float) -> None:
    """A receive that was empty arms the descriptor however short it was."""
    descriptor = end.qp.fileno()
    assert len(end.qp.recv(1, timeout)) == 0
    if select.select([descriptor], [], [], 0)[0]:
        assert len(end.qp.recv(1, 0)) == 0
    end.inject()
    assert select.select([descriptor], [], [], LONG)[0]


@pytest.mark.parametrize("timeout", [0, 1e-9])
def test_late_flush_arms_the_descriptor(end: End, timeout: float) -> None:
    """A flush that was late arms the descriptor however short it was."""
    descriptor = end.qp.send_fileno()
    assert descriptor is not None
    with end.held():
        end.qp.send_one(end.group, COPIED)
        with pytest.raises(TimedOut):
            end.qp.flush(timeout)
    assert select.select([descriptor], [], [], LONG)[0]


def test_earlier_empty_receive_arms_the_descriptor(end: End) -> None:
    """A descriptor is armed though the receive that was empty came before it."""
    assert end.qp.recv_one(0) is None
    descriptor = end.qp.fileno()
    end.inject()
    assert is_readable(descriptor)


def test_messages_before_the_arm_wake_the_descriptor(end: End) -> None:
    """A descriptor tells of all that came before it was armed.

    Two messages come between a look that finds nothing and the arm: the look after that takes one.
    """
    descriptor = end.qp.fileno()
    end.card.hold(Stage.RECV, end.qp.qp_num)
    for payload in (b"one", b"two"):
        end.inject(payload)
    end.card.release_at("ibv_req_notify_cq", Stage.RECV, end.qp.qp_num)
    assert end.qp.recv_one(0) is not None
    assert is_readable(descriptor)
    assert end.qp.recv_one(0) is not None
    assert end.qp.recv_one(0) is None
    assert not is_readable(descriptor)


def test_loop_wakes_for_room_beside_a_waiting_thread(end: End) -> None:
    """A loop hears of room while a thread waits for all sends.

    The thread takes the event, and goes on waiting.
    """
    descriptor, arms = end.qp.send_fileno(), "ibv_req_notify_cq"
    assert descriptor is not None
    with end.held():
        for _ in range(DEPTH):
            end.qp.send_one(end.group, COPIED)
        flushing = Running(end.qp.flush)
        until(lambda: is_asleep(flushing.threads[0]))
        with pytest.raises(TimedOut):
            end.qp.send_one(end.group, COPIED, None, 0)
        assert not is_readable(descriptor)
        armed = end.card.count(arms)
        end.card.release(Stage.SEND, end.qp.qp_num, 0)
        until(lambda: end.card.count(arms) > armed)
        assert is_readable(descriptor)
    assert flushing.results() == [None]


def test_loop_wakes_when_the_leader_leaves(card: Card, backend: CardBackend) -> None:
    """A loop hears of a thread that leaves while it looks.

    The loop relies on the thread that leads, and reads what the device tells; meanwhile the thread leaves,
    whose call the loop takes for an old one.
    """
    end, take, read = End(card, backend, 128), "ibv_get_cq_event", "ibv_get_async_event"
    memory, descriptor = memoryview(bytearray(1024)), end.qp.send_fileno()
    assert descriptor is not None
    long = [bytes(1024)] * 64  # for whose copies a send releases the GIL
    with end.qp.register(memory), end.held():
        leading = Running(lambda: end.qp.send_one(end.group, memory, None, LONG))
        until(lambda: is_asleep(leading.threads[0]))
        assert end.qp.send(end.group, [COPIED] * 127, None, 0) == 127
        card.stall(take)
        card.release(Stage.SEND, end.qp.qp_num, 0)
        until(lambda: card.stalled(take) == 1)
        card.port_event(0, PortEvent.GID_CHANGE)
        with select.epoll.fromfd(os.dup(descriptor)) as sources:
            sources.poll(0, 1)  # what was told first, the call, comes last now
        card.stall(read)
        looking = Running(lambda: end.qp.send(end.group, long, None, 0))
        until(lambda: card.stalled(read) == 1)
        card.go_on(take)
        assert leading.results() == [None]
        card.go_on(read)
        (late,) = looking.results()
        assert isinstance(late, TimedOut)
        assert late.posted == 1
    until(lambda: is_readable(descriptor))


@pytest.mark.parametrize("through", [(), (QpState.ERR,)], ids=["at once", "by way of ERR"])
def test_a_reset_wakes_who_waits_for_sends(end: End, through: tuple[QpState, ...]) -> None:
    """They are over, and no completion tells of them. Who waits after that sleeps."""
    arms = "ibv_req_notify_cq"
    with end.held():
        end.qp.send(end.group, [COPIED] * DEPTH)
        waiting = Running(end.qp.flush, end.qp.flush)
        until(lambda: all(map(is_asleep, waiting.threads)))
        for state in through:
            end.qp.modify(state)
        end.qp.reset()
        waiting.results()
        end.qp.send(end.group, [COPIED])
        armed = end.card.count(arms)
        waiting = Running(end.qp.flush)
        until(lambda: is_asleep(waiting.threads[0]))
        assert end.card.count(arms) - armed <= 2
    assert waiting.results() == [None]


def test_reset_wakes_followers_of_a_slow_leader(end: End) -> None:
    """A reset wakes who follows though the leader takes its time."""
    take = "ibv_get_cq_event"
    with end.held():
        end.qp.send(end.group, [COPIED] * DEPTH)
        leading = Running(end.qp.flush)
        until(lambda: is_asleep(leading.threads[0]))
        following = Running(end.qp.flush)
        until(lambda: is_asleep(following.threads[0]))
        end.card.stall(take)
        end.card.release(Stage.SEND, end.qp.qp_num, 0)
        until(lambda: end.card.stalled(take) == 1)
        end.qp.reset()
        assert following.results() == [None]
        end.card.go_on(take)
        assert leading.results() == [None]


def test_a_reset_tells_a_loop_that_there_is_room(end: End) -> None:
    descriptor = end.qp.send_fileno()
    assert descriptor is not None
    with end.held():
        end.qp.send(end.group, [COPIED] * DEPTH)
        for _ in range(2):
            with pytest.raises(TimedOut):
                end.qp.send_one(end.group, COPIED, None, 0)
        assert not is_readable(descriptor)
        end.qp.reset()
        assert is_readable(descriptor)
        end.qp.send_one(end.group, COPIED, None, 0)


# --- sends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [b"inline", COPIED])
def test_a_send_of_copies_waits_for_no_completion(end: End, payload: bytes) -> None:
    with end.held():
        end.qp.send(end.group, [payload] * 4)
        end.qp.send_one(end.group, payload)
        with pytest.raises(TimedOut):
            end.qp.flush(0)
        with pytest.raises(TimedOut):
            end.qp.flush(0.01)
    end.qp.flush(LONG)
    assert end.card.qps()[0].sent == 5


def test_registered_send_waits_until_it_is_read(end: End) -> None:
    """A send from registered memory waits until the device has read it."""
    memory = memoryview(bytearray(1024))
    with end.qp.register(memory):
        with end.held(), pytest.raises(TimedOut) as late:
            end.qp.send(end.group, [memory, memory], None, 0.01)
        assert late.value.posted == 2
        end.qp.flush(LONG)
        end.qp.send(end.group, [memory, memory], None, LONG)
    assert end.card.qps()[0].sent == 4


@pytest.mark.parametrize("count", [1, 4])
def test_messages_without_a_batch_free_their_receives(end: End, count: int) -> None:
    """Messages that no batch can hold do not keep their receives.

    The messages are lost, for there is no batch of them; their receives are posted again.
    """
    posted = end.card.qps()[0].receives
    memories = end.qp._memories  # type: ignore[attr-defined]
    end.qp.send(end.group, [b"x"] * count)
    with pytest.MonkeyPatch.context() as without:
        without.delitem(memories, 0)
        with pytest.raises(KeyError):
            end.qp.recv(count, LONG)
    assert end.card.qps()[0].receives == posted
    assert end.qp.counters.recv_free == posted
    end.qp.register(bytearray(4096), recv_slot=256)  # which it refuses while messages are leased
    assert end.qp.recv_one(0) is None


def test_failed_copy_frees_its_receive(end: End) -> None:
    """A message that cannot be copied does not keep its receive.

    It lies in memory of the user: from the slab it is copied before Python knows of it.
    """
    end.qp.register(bytearray(4096), recv_slot=256)
    posted = end.card.qps()[0].receives
    assert end.card.inject(end.qp.qp_num, b"x", grh=bytes(range(100, 140)))
    memories = end.qp._memories  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as without:
        without.delitem(memories, max(memories))
        with pytest.raises(KeyError):
            end.qp.recv_one(LONG)
    assert end.card.qps()[0].receives == posted


@pytest.mark.parametrize("timeout", [0, 0.01])
def test_a_full_queue_says_how_many_were_posted(end: End, timeout: float) -> None:
    with end.held():
        with pytest.raises(TimedOut) as late:
            end.qp.send(end.group, [COPIED] * (DEPTH + 4), None, timeout)
        assert late.value.posted == DEPTH
        with pytest.raises(TimedOut) as late:
            end.qp.send_one(end.group, COPIED, None, timeout)
        assert late.value.posted == 0
    end.qp.send(end.group, [COPIED] * 4, None, LONG)
    end.qp.flush(LONG)
    assert end.card.qps()[0].sent == DEPTH + 4


def test_a_send_larger_than_the_queue_arrives_in_order(end: End) -> None:
    sent = [number.to_bytes(2, "big") * 200 for number in range(60)]
    end.card.delay(Stage.SEND, 200)
    end.qp.send(end.group, sent, None, LONG)
    received = [bytes(message.payload) for _ in sent if (message := end.qp.recv_one(LONG)) is not None]
    assert received == sent


def test_what_failed_is_told_by_the_next_call(end: End) -> None:
    """Three messages are under way when the device fails: the next call says so, and they are counted."""
    end.card.fail("send_completion", 4)  # IBV_WC_LOC_PROT_ERR
    with end.held():
        end.qp.send(end.group, [COPIED] * 3)
    with pytest.raises(QpError) as failed:
        end.qp.send_one(end.group, b"another")
    assert failed.value.unsent >= 1
    assert failed.value.posted == 0
    assert end.qp.counters.unsent == failed.value.unsent
    with pytest.raises(QpError):
        end.qp.flush(0)
    end.qp.reset()
    assert end.qp.counters.unsent == failed.value.unsent
    end.qp.send_one(end.group, b"again")
    end.qp.flush(LONG)


def test_a_post_that_fails_half_way_raises_at_once(end: End) -> None:
    """The call waits for none of the messages that were posted."""
    arms = "ibv_req_notify_cq"
    with end.held():
        end.qp.send_one(end.group, b"under way")
        end.card.fail("ibv_post_send", E.ENOMEM, take=2)
        armed = end.card.count(arms)
        with pytest.raises(McastError) as failed:
            end.qp.send(end.group, [COPIED] * 5)
        assert end.card.count(arms) == armed
        assert (failed.value.errno, failed.value.posted) == (E.ENOMEM, 2)
        assert end.card.qps()[0].sent == 3
    end.qp.flush(LONG)


def test_handle_ended_by_a_reset_is_not_used(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle that a reset has ended is used by nobody.

    A reset comes between a send and the handle that it has looked up; then another thread sends, too.

    The card reports a post with a handle that was destroyed.
    """
    other = end.group.model_copy(update={"hop_limit": 7})
    look_up = AddressHandles.get
    meanwhile: dict[Destination, Callable[[], object]] = {
        end.group: end.qp.reset,
        other: lambda: Running(lambda: end.qp.send_one(end.group, b"of another thread")).results(),
    }

    def get(self: AddressHandles, destination: Destination) -> int:
        step = meanwhile.pop(destination, None)
        found = look_up(self, destination) if destination == end.group else None
        if step is not None:
            step()
        return look_up(self, destination) if found is None else found

    monkeypatch.setattr(AddressHandles, "get", get)
    end.qp.send_one(end.group, b"across a reset")
    end.qp.send_one(other, b"to another destination")
    end.qp.flush(LONG)
    assert not meanwhile
    assert end.card.reports() == ()


def handles(card: Card) -> int:
    """Return the number of address handles."""
    return sum(one.kind == "address handle" for one in card.leftovers())


def test_handle_remade_by_another_thread_stays(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle that another thread has made anew stays in use.

    Between a send and its handle come a reset, and a send of another thread.
    """
    look_up = AddressHandles.get
    send = end.qp.send_one
    other = partial(send, end.group, b"of another thread")
    meanwhile: list[Callable[[], object]] = [end.qp.reset, lambda: Running(other).results()]

    def get(self: AddressHandles, destination: Destination) -> int:
        found = look_up(self, destination)
        steps = meanwhile.copy()
        meanwhile.clear()
        for step in steps:
            step()
        return found

    monkeypatch.setattr(AddressHandles, "get", get)
    send(end.group, b"across a reset")
    assert handles(end.card) == 1


def test_handle_without_a_source_is_destroyed(end: End) -> None:
    """A handle whose source cannot be asked for is destroyed."""
    end.card.fail("ibv_query_gid", E.EIO, times=3)
    for _ in range(3):
        with pytest.raises(McastError):
            end.qp.send_one(end.group, b"x")
    assert handles(end.card) == 0
    end.qp.send_one(end.group, b"x")
    assert handles(end.card) == 1


def test_a_region_closes_beside_sends_from_it(end: End) -> None:
    memory = memoryview(bytearray(1024))
    over = threading.Event()

    def send() -> None:
        while not over.is_set():
            end.qp.send(end.group, [memory] * 8, None, LONG)

    threads = Running(send, send)
    for _ in range(200):
        end.qp.register(memory).close()
    over.set()
    assert threads.results() == [None, None]
    assert end.qp.state is QpState.RTS


@pytest.mark.parametrize("constant", [False, True])
def test_a_region_closes_once_the_device_has_read_it(
    end: End, monkeypatch: pytest.MonkeyPatch, constant: bool
) -> None:
    monkeypatch.setattr("mcast.backends.rdma.qp.LINGER", LONG)
    memory = memoryview(bytearray(1024))
    region = end.qp.register(memory, constant=constant)
    end.card.hold(Stage.WIRE, end.qp.qp_num)
    with nullcontext() if constant else pytest.raises(TimedOut):
        end.qp.send_one(end.group, memory, None, 0)
    closing = Running(region.close)
    until(lambda: is_asleep(closing.threads[0]))
    assert not end.card.count("ibv_dereg_mr")
    end.card.delay(Stage.WIRE, 0, end.qp.qp_num)
    end.card.release(Stage.WIRE, end.qp.qp_num)
    assert closing.results() == [None]
    assert end.card.count("ibv_dereg_mr") == 1
    assert end.qp.recv_one(LONG) is not None


def test_no_copy_is_overwritten_before_it_is_read(card: Card, backend: CardBackend) -> None:
    """No copy is written over before the device has read it.

    The places for copies are taken in turn, and none is free until its send is complete.
    """
    end = End(card, backend, send_depth=4)
    payloads = [bytes([number]) * len(COPIED) for number in range(13)]
    waiting = iter(payloads)
    card.hold(Stage.WIRE, end.qp.qp_num)
    for wanted in (3, 1, 2, 3, 1):
        end.qp.send(end.group, [next(waiting) for _ in range(wanted)], timeout=LONG)
        while end.kept(Stage.WIRE) > 1:  # one stays, so that the turn never begins anew
            card.release(Stage.WIRE, end.qp.qp_num, 0)
    end.qp.send(end.group, list(waiting), timeout=LONG)
    card.delay(Stage.WIRE, 0, end.qp.qp_num)
    card.release(Stage.WIRE, end.qp.qp_num)
    with end.qp.recv(64, LONG) as batch:
        assert [bytes(message.payload) for message in batch] == payloads
    assert card.reports() == ()


def test_a_large_batch_is_copied_without_the_gil(card: Card, backend: CardBackend) -> None:
    """Where threads take turns by themselves only, another one goes on during the sends.

    A send that found no room would wait for it, and let the other thread run whatever the copies do.
    """
    end = End(card, backend, send_depth=512)
    turns, over = [0], threading.Event()

    def count() -> None:
        while not over.is_set():
            turns[0] += 1
            os.sched_yield()

    batch = [bytes(256)] * 256  # no more than the smallest MTU, so that nobody asks for the port's
    end.qp.send(end.group, batch)  # as finding the address handle does
    before = sys.getswitchinterval()
    other = Running(count)
    until(lambda: turns[0] > 0)
    sys.setswitchinterval(1000)
    try:
        start, stop = turns[0], monotonic() + LONG / 3
        while turns[0] == start and monotonic() < stop:
            with suppress(TimedOut):
                end.qp.send(end.group, batch, timeout=0)
        gone = turns[0] - start
    finally:
        sys.setswitchinterval(before)
        over.set()
    other.results()
    assert gone > 0


# --- aio -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [True, False])
def test_aio_posts_once_and_does_not_block_the_loop(card: Card, backend: CardBackend, rows: bool) -> None:
    """Mcast.aio posts nothing twice and does not stop the loop."""
    card.ethernet(1)
    sent = [number.to_bytes(2, "big") * 200 for number in range(5 * DEPTH)]
    batch: Any = memoryview(b"".join(sent)).cast("B", (len(sent), 400)) if rows else sent

    async def run() -> None:
        opened = aio.open_endpoint(backend, "10.0.0.1", send_depth=DEPTH, receive_depth=256)
        async with opened as endpoint, endpoint.join(GROUP) as group:
            card.hold(Stage.SEND)
            assert (
                await group.send_batch(batch[:3]) == 3
            )  # so that the next batch finds room for a part of it
            sending = asyncio.create_task(group.send_batch(batch[3:]))
            while card.qps()[0].sent != DEPTH:
                await asyncio.sleep(0)
            for _ in range(100):
                await asyncio.sleep(0.001)
            assert not sending.done()
            card.release_all()
            assert await sending == len(sent) - 3
            await endpoint.flush(LONG)
            received = [await endpoint.recv(LONG) for _ in sent]
            assert [bytes(message.payload) for message in received if message] == sent
            assert await endpoint.recv(0) is None
            assert endpoint.stats().sent == len(sent)

    asyncio.run(run())


async def waits_for_the_device(
    card: Card, endpoint: aio.Endpoint, sending: asyncio.Future[Any], count: int
) -> None:
    """All of the send is posted, and it ends no sooner than the device has read that."""
    while card.qps()[0].sent < count:
        await asyncio.sleep(0)
    with pytest.raises(TimedOut):
        await endpoint.flush(0.01)
    assert not sending.done()
    card.release_all()


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("shape", [(1024,), (2, 512)])
def test_aio_posts_registered_memory_once(
    card: Card, backend: CardBackend, count: int, alone: bool, shape: tuple[int, ...]
) -> None:
    """All is posted, and the device has not read it: what waits is the end of the send, not the send.

    A payload of two dimensions is one message.
    """
    card.ethernet(1)
    memory = memoryview(bytearray(1024)).cast("B", shape)

    async def run() -> None:
        opened = aio.open_endpoint(backend, "10.0.0.1", send_depth=DEPTH)
        async with opened as endpoint, endpoint.join(GROUP) as group:
            qp = endpoint._core.resources.qp
            with qp.register(memory):
                card.hold(Stage.SEND)
                batches = (
                    [group.send(memory) for _ in range(count)]
                    if alone
                    else [group.send_batch([memory] * count)]
                )
                sending = asyncio.gather(*batches)
                await waits_for_the_device(card, endpoint, sending, count)
                assert await sending == ([None] * count if alone else [count])
                await endpoint.flush(LONG)
            assert card.qps()[0].sent == count

    asyncio.run(asyncio.wait_for(run(), LONG))


def test_endpoint_counts_heads_and_bodies(
    card: Card, backend: CardBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endpoint counts messages in two parts without a copy.

    Those too that found room where others did not.
    """
    card.ethernet(1)
    count = DEPTH + 1
    heads, bodies = memoryview(bytes(2 * count)), memoryview(bytes(600 * count))
    batch = HeaderBodyBatch(heads.cast("B", (count, 2)), bodies.cast("B", (count, 600)))
    monkeypatch.delattr(HeaderBodyBatch, "into")
    with open_endpoint(backend, "10.0.0.1", send_depth=DEPTH) as endpoint, endpoint.join(GROUP) as group:
        card.hold(Stage.SEND)
        with pytest.raises(TimedOut) as late:
            group.send_batch(batch, timeout=0)
        assert late.value.posted == DEPTH
        found = group.stats()
        assert (found.sent, found.sent_bytes) == (DEPTH, DEPTH * 602)
        card.release_all()


@pytest.mark.parametrize("count", [1, 3])
def test_aio_posts_messages_in_two_parts_once(card: Card, backend: CardBackend, count: int) -> None:
    """All are posted, and the device has not read the bodies, which may change after the send."""
    card.ethernet(1)
    heads, memory = memoryview(bytes(2 * count)), bytearray(600 * count)
    batch = HeaderBodyBatch(heads.cast("B", (count, 2)), memoryview(memory).cast("B", (count, 600)))

    async def run() -> None:
        opened = aio.open_endpoint(backend, "10.0.0.1", send_depth=DEPTH)
        async with opened as endpoint, endpoint.join(GROUP) as group:
            with endpoint._core.resources.qp.register(memory):
                card.hold(Stage.SEND)
                sending = asyncio.ensure_future(group.send_batch(batch))
                await waits_for_the_device(card, endpoint, sending, count)
                assert await sending == count
            assert card.qps()[0].sent == group.stats().sent == count

    asyncio.run(asyncio.wait_for(run(), LONG))


def test_aio_says_how_many_were_posted_in_time(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)

    async def run() -> None:
        opened = aio.open_endpoint(backend, "10.0.0.1", send_depth=DEPTH, sequence=True)
        async with opened as endpoint, endpoint.join(GROUP) as group:
            card.hold(Stage.SEND)
            await group.send_batch([COPIED] * 2)  # so that a part of the next finds room at once
            with pytest.raises(TimedOut) as late:
                await group.send_batch([COPIED] * (DEPTH + 1), timeout=0.05)
            assert late.value.posted == DEPTH - 2
            with pytest.raises(TimedOut):
                await endpoint.flush(0.01)
            card.release_all()
            await group.send_batch([COPIED] * (DEPTH + 1 - late.value.posted), timeout=LONG)
            for _ in range(DEPTH + 3):
                assert await endpoint.recv(LONG) is not None
            (counted,) = endpoint.stats().groups
            assert (counted.sent, counted.gaps) == (DEPTH + 3, 0)
            await endpoint.flush(LONG)
            card.fail("ibv_post_send", E.ENOMEM, nth=2)  # a batch is posted in parts of the queue's depth
            with pytest.raises(McastError) as failed:
                await group.send_batch([COPIED] * (DEPTH + 1), timeout=LONG)
            assert failed.value.posted == DEPTH

    asyncio.run(run())


# --- closing -------------------------------------------------------------------------------------

ENDS = (
    "ibv_destroy_ah",
    "ibv_destroy_qp",
    "ibv_dereg_mr",
    "ibv_destroy_cq",
    "ibv_destroy_comp_channel",
    "ibv_dealloc_pd",
    "ibv_detach_mcast",
    "rdma_leave_multicast",
    "rdma_destroy_id",
)


@pytest.mark.parametrize("call", ENDS)
def test_a_close_that_fails_abandons_nothing_else(card: Card, backend: CardBackend, call: str) -> None:
    """Two channels with two ids each. The first call of a kind fails; closing again ends what is left."""
    ends = [End(card, backend) for _ in range(2)]
    for end in ends:
        end.qp.register(bytearray(4096))
        end.qp.send_one(end.group, b"x")
    made = len(card.leftovers())
    card.fail(call, E.EIO)
    silent = call in (
        "ibv_detach_mcast",
        "rdma_leave_multicast",
    )  # the device may be gone, and its groups with it
    errnos = []
    try:
        backend.close()
    except McastError as failed:
        errnos.append(failed.errno)
    assert errnos == ([] if silent else [E.EIO])
    left = card.leftovers()
    assert len(left) <= 6 < made  # that one, and what it depends on
    backend.close()
    assert card.leftovers() == ()


def test_second_queue_pair_hides_no_open_one(card: Card, backend: CardBackend, end: End) -> None:
    """A second queue pair does not hide that the first is not closed."""
    card.fail("ibv_destroy_qp", E.EIO)
    with pytest.raises(McastError):
        end.qp.close()
    end.id.create_qp()
    assert len(card.qps()) == 2
    backend.close()
    assert card.leftovers() == ()


def test_attached_queue_pair_keeps_its_memory(card: Card, backend: CardBackend, end: End) -> None:
    """A queue pair that stays attached keeps what it works with.

    Nothing detaches it, so it cannot be destroyed: it still receives into its memory.
    """
    for call in ("ibv_detach_mcast", "ibv_destroy_qp"):
        card.fail(call, E.EBUSY, times=-1)
    with pytest.raises(McastError) as failed:
        end.qp.close()
    assert failed.value.errno == E.EBUSY
    assert card.inject(end.qp.qp_num, b"x")
    assert card.reports() == ()
    card.fail_no_more()
    end.qp.close()
    backend.close()
    assert card.leftovers() == ()


def test_close_destroys_no_handle_under_a_send(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    """A close that cannot wait destroys no handle under a send."""
    monkeypatch.setattr("mcast.backends.rdma.qp.LINGER", 0.001)
    end.card.hold(Stage.WIRE, end.qp.qp_num)
    end.qp.send_one(end.group, COPIED)
    end.qp.close()
    assert end.card.reports() == ()


def test_channel_opens_before_the_close_or_never(card: Card, backend: CardBackend) -> None:
    """A channel opens before its backend closes or not at all.

    The thread that opens it stands still in the library meanwhile.
    """
    card.ethernet(1)
    card.stall("rdma_create_event_channel")
    opening = Running(backend.event_channel)
    until(lambda: card.stalled("rdma_create_event_channel") == 1)
    closing = Running(backend.close)
    until(lambda: is_asleep(closing.threads[0]))
    card.go_on("rdma_create_event_channel")
    opening.results()
    closing.results()
    assert card.leftovers() == ()
    with pytest.raises(Closed):
        backend.event_channel()


def test_every_failure_of_a_close_is_told(card: Card, backend: CardBackend) -> None:
    end = End(card, backend)
    card.fail("ibv_destroy_cq", E.EIO)
    card.fail("ibv_dealloc_pd", E.ENOMEM)
    with pytest.raises(McastError) as failed:
        end.qp.close()
    assert (failed.value.errno, len(failed.value.__notes__)) == (E.EIO, 1)
    end.qp.close()
    backend.close()
    assert card.leftovers() == ()


@pytest.mark.parametrize("what", ["send", "receive", "event"])
def test_closing_in_a_signal_handler_ends_the_call(end: End, what: str) -> None:
    memory = memoryview(bytearray(1024))
    end.qp.register(memory)
    end.qp.send_one(end.group, b"from here on sends take the fast path")
    assert end.qp.recv_one(LONG) is not None
    end.card.hold(Stage.SEND, end.qp.qp_num)
    calls: dict[str, Callable[[], object]] = {
        "send": lambda: end.qp.send_one(end.group, memory),
        "receive": lambda: end.qp.recv_one(LONG),
        "event": lambda: end.channel.get_event(LONG),
    }
    main = threading.main_thread()

    def ask() -> None:
        until(lambda: is_asleep(main))
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # this thread's sleep it does not break

    before = signal.signal(signal.SIGUSR1, lambda number, frame: end.channel.close())
    try:
        asking = Running(ask)
        with pytest.raises(Closed):
            calls[what]()
        asking.results()
    finally:
        signal.signal(signal.SIGUSR1, before)


NESTED = """
import signal, sys
from pathlib import Path
from tests.card.build import build
from tests.card.ends import End
from tests.card.provider import CardBackend, loaded

with loaded(build(), Path(sys.argv[1])) as card:
    card.ethernet(1)
    with CardBackend(card) as backend:
        outer, inner, depth, came, armed = End(backend), End(backend), 0, [0], 0

        def wait(number, frame):
            global depth, armed
            came[-1] += 1
            if depth == 2:
                return
            depth += 1
            came.append(0)
            before = card.count("ibv_req_notify_cq")
            inner.qp.recv_one(0.002)
            armed = max(armed, card.count("ibv_req_notify_cq") - before - 4 * sum(came[depth:]))
            came.pop()
            depth -= 1

        signal.signal(signal.SIGALRM, wait)
        signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0005)
        while came[0] < 200:
            outer.qp.recv_one(0.001)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(armed)
"""


def test_a_signal_handler_may_wait_within_a_wait(tmp_path: Path) -> None:
    """Neither spins: each arms its queue a few times for each signal that comes."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", NESTED, str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=4 * LONG,
    )
    assert done.stderr == ""
    assert int(done.stdout) < 50


def late(number: int, seconds: int = 1) -> Any:
    """Seconds to wait; who asks for them gets the signal, which Python takes once the call looks for one."""
    sends = c.PyDLL(None)["raise"]
    sends.restype = seconds.__add__  # of 0; all of it in C, without a bytecode after which Python looks
    return type("Late", (), {"__index__": staticmethod(partial(sends, number))})()


def test_exception_before_the_sleep_ends_the_call(end: End) -> None:
    """An exception of a handler before the call sleeps ends the call."""

    class Enough(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        raise Enough

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Enough):
            end.qp.recv_one(late(signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signal_read_in_a_handler_ends_the_outer_wait(card: Card, backend: CardBackend) -> None:
    """A signal that a wait in a handler has read ends the wait outside.

    The handler of a signal waits for a message. Meanwhile a second signal comes, and the message.

    The wait in the handler ends by the message, and reads what tells of the second signal. No bytecode is run
    between the end of that wait and the sleep of the wait outside, so Python does not look for signals.
    """
    outer, inner = End(card, backend), ends.End(backend)
    arms = "ibv_req_notify_cq"
    card.inject(inner.qp.qp_num, b"x")
    assert (
        inner.qp.recv_one(0) is not None
    )  # whose addresses are known from now on: they are made in bytecode

    def wait(number: int, frame: object) -> None:
        card.stall(arms)
        [*map(inner.qp.recv_one, (LONG,))]  # a call by itself would be followed by a look for signals

    def meanwhile() -> None:
        until(lambda: bool(card.stalled(arms)))
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        assert card.inject(inner.qp.qp_num, b"x")
        card.go_on(arms)

    before = {
        signal.SIGUSR2: signal.signal(signal.SIGUSR2, wait),
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, lambda number, frame: outer.inject()),
    }
    try:
        other = Running(meanwhile)
        assert outer.qp.recv_one(late(signal.SIGUSR2, int(LONG))) is not None
        other.results()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Slot(c.Structure):
    _fields_ = (("slot", c.c_int), ("function", c.c_void_p))


class _Spec(c.Structure):
    _fields_ = (("name", c.c_char_p), ("sizes", c.c_int * 2), ("flags", c.c_uint), ("slots", c.c_void_p))


_PYTHON = c.PyDLL(None)
_FILL = c.PYFUNCTYPE(c.c_int, c.c_void_p, c.py_object, c.c_char_p, c.c_ssize_t, c.c_int, c.c_int)(
    ("PyBuffer_FillInfo", _PYTHON)
)
_BYTES = b"payload"


def _get_buffer(exporter: Any, view: int, flags: int) -> int:
    exporter.close()
    return int(_FILL(view, exporter, _BYTES, len(_BYTES), 1, flags))


_GET = c.PYFUNCTYPE(c.c_int, c.py_object, c.c_void_p, c.c_int)(_get_buffer)
_SLOTS = (_Slot * 2)(_Slot(1, c.cast(_GET, c.c_void_p)), _Slot(0, None))
_SPEC = _Spec(b"tests.Exporter", (0, 0), 1 << 10, c.addressof(_SLOTS))
Exporter: Any = c.PYFUNCTYPE(c.py_object, c.c_void_p)(("PyType_FromSpec", _PYTHON))(c.addressof(_SPEC))
"""Calls its `close` when somebody asks for its bytes, as `__buffer__` does, which Python 3.11 has not."""


class Closing(Exporter):  # type: ignore[misc]  # the type is made by a function
    """Closes what it is given when it is looked at."""

    def __init__(self, qp: QueuePair) -> None:
        self.close = qp.close

    def __float__(self) -> float:
        self.close()
        return 0.01

    def __bool__(self) -> bool:
        self.close()
        return True


def test_argument_that_closes_the_qp_ends_the_call(card: Card, backend: CardBackend) -> None:
    """An argument that closes the queue pair ends the call."""
    calls: list[Callable[[End, Any], object]] = [
        lambda end, closing: end.qp.recv_one(closing),
        lambda end, closing: end.qp.recv(4, closing),
        lambda end, closing: end.qp.send_one(end.group, b"x", None, closing),
        lambda end, closing: end.qp.send(end.group, [b"x"], None, closing),
        lambda end, closing: end.qp.flush(closing),
        lambda end, closing: end.qp.send_one(end.group, closing),
        lambda end, closing: end.qp.send(end.group, [b"x", closing]),
    ]
    for call in calls:
        end = End(card, backend)
        end.qp.send_one(end.group, b"the handle is known")
        with pytest.raises(Closed):
            call(end, Closing(end.qp))
        end.channel.close()
    assert card.reports() == ()


@pytest.mark.parametrize("call", ["rdma_leave_multicast", "ibv_destroy_qp", "rdma_destroy_id"])
def test_channel_closes_during_a_destroy_of_its_id(end: End, call: str) -> None:
    """A channel closes while its id is being destroyed.

    The thread that destroys the id stands still in the library; who closes the channel waits for it.
    """
    end.card.stall(call)
    destroying = Running(end.id.destroy)
    until(lambda: end.card.stalled(call) == 1)
    closing = Running(end.channel.close)
    until(lambda: is_asleep(closing.threads[0]))
    assert not end.card.count("rdma_destroy_event_channel")
    end.card.go_on(call)
    assert destroying.results() + closing.results() == [None, None]
    assert end.card.count("rdma_destroy_id") == 1
    assert end.card.reports() == ()
    assert end.card.leftovers() == ()


def test_channel_closes_at_each_line_of_a_destroy(card: Card, backend: CardBackend) -> None:
    """A channel closes at each line of the end of its id.

    Another thread begins to destroy the id, and stops: what it goes on with is still there.
    """
    files = {"contract/cm_id.py", "contract/closing.py", "backends/rdma/cm_id.py"}
    at, stopped = 1, True
    while stopped:
        end = End(card, backend)
        one, other, stopped = interleaved(end.id.destroy, end.channel.close, at, files.__contains__)
        assert (one, other) == (None, None), at
        assert card.reports() == (), at
        assert card.leftovers() == (), at
        at += 1
    assert at > 10


def test_a_close_waits_for_what_was_posted(card: Card, backend: CardBackend, end: End) -> None:
    """A message that was posted is not lost because its queue pair closes."""
    other = End(card, backend)
    card.delay(Stage.WIRE, 2000, end.qp.qp_num)
    end.qp.send(end.group, [COPIED] * 4)
    end.qp.close()
    assert len(other.qp.recv(4, 0)) == 4


# --- what the device tells -----------------------------------------------------------------------


def test_a_removed_device_is_told_by_its_event(end: End) -> None:
    """The completion channels say no more than POLLERR: who waits for events as well hears of the removal."""
    waiting = Running(lambda: end.qp.recv(4, None, True))
    until(lambda: is_asleep(waiting.threads[0]))
    end.card.remove(0)
    (found,) = waiting.results()
    assert isinstance(found, QpError) or len(found) == 0
    event = end.channel.get_event(LONG)
    assert event is not None
    assert event.type is CmEventType.DEVICE_REMOVAL


def test_broken_channel_hides_no_event(end: End) -> None:
    """A broken completion channel hides no event and is asked no more.

    The kernel breaks it before it tells of the removal: meanwhile who waits for events sleeps.
    """
    waiting = Running(lambda: end.qp.recv(4, None, True))
    until(lambda: is_asleep(waiting.threads[0]))
    asked = end.card.count("ibv_get_cq_event")
    end.card.break_channels(0)
    until(lambda: end.card.count("ibv_get_cq_event") > asked)
    until(lambda: is_asleep(waiting.threads[0]))
    end.card.event(CmEventType.DEVICE_REMOVAL)
    (found,) = waiting.results()
    assert len(found) == 0
    event = end.channel.get_event(LONG)
    assert event is not None
    assert event.type is CmEventType.DEVICE_REMOVAL
    assert end.card.count("ibv_get_cq_event") - asked <= 2


def test_broken_channel_ends_a_wait_without_events(end: End) -> None:
    """Who waits for no events hears of a broken completion channel."""
    waiting = Running(lambda: end.qp.recv(4))
    until(lambda: is_asleep(waiting.threads[0]))
    end.card.break_channels(0)
    (found,) = waiting.results()
    assert isinstance(found, QpError)
    assert "the device is gone" in str(found)


def test_a_descriptor_that_is_armed_is_not_armed_again(end: End) -> None:
    """A loop that has received looks twice: at once, and when the task asks for the next message."""
    descriptor, arms = end.qp.fileno(), "ibv_req_notify_cq"
    assert end.qp.recv_one(0) is None
    armed = end.card.count(arms)
    assert end.qp.recv_one(0) is None
    assert end.card.count(arms) == armed
    end.inject(b"one")
    until(lambda: is_readable(descriptor))
    assert end.qp.recv_one(0) is not None
    assert end.qp.recv_one(0) is None
    assert end.card.count(arms) == armed + 1
    assert not is_readable(descriptor)


def test_descriptor_is_armed_after_its_event(end: End) -> None:
    """A descriptor whose event was taken is armed again."""
    descriptor = end.qp.fileno()
    assert end.qp.recv_one(0) is None
    sleeping = Running(lambda: end.qp.recv_one(LONG))
    until(lambda: is_asleep(sleeping.threads[0]))
    end.inject(b"one")
    sleeping.results()
    assert end.qp.recv_one(0) is None
    assert not is_readable(descriptor)
    end.inject(b"two")
    until(lambda: is_readable(descriptor))


def test_descriptor_is_silent_after_a_wait_took_all(end: End) -> None:
    """A descriptor whose message was taken by who waits is silent after one look.

    Who waits takes a message that is there without its event.
    """
    descriptor = end.qp.fileno()
    assert end.qp.recv_one(0) is None
    end.inject(b"one")
    until(lambda: is_readable(descriptor))
    assert end.qp.recv_one(LONG) is not None
    assert end.qp.recv_one(0) is None
    assert not is_readable(descriptor)


def test_descriptor_is_silent_after_a_wait_ended(end: End) -> None:
    """A descriptor by which a wait that ended called is silent after one look."""
    descriptor = end.qp.fileno()
    assert end.qp.recv_one(0) is None
    assert end.qp.recv_one(0.001) is None
    assert is_readable(descriptor)
    assert end.qp.recv_one(0) is None
    assert not is_readable(descriptor)


def test_descriptor_is_silent_after_a_port_event(card: Card, backend: CardBackend, end: End) -> None:
    """A descriptor that told of the port is silent after one look.

    The other queue pair reads what the device tells, for both.
    """
    other, descriptor = End(card, backend), end.qp.fileno()
    assert end.qp.recv_one(0) is None
    card.port_event(0, PortEvent.ACTIVE)
    assert other.qp.port_events() == (PortEvent.ACTIVE,)
    assert is_readable(descriptor)
    assert end.qp.recv_one(0) is None
    assert not is_readable(descriptor)


def is_readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def test_broken_channel_keeps_no_loop_awake(end: End) -> None:
    """A broken completion channel keeps no loop awake.

    It is readable without end: a look that finds nothing there takes it out of what the loop polls.
    """
    descriptor = end.qp.fileno()
    assert end.qp.recv_one(0) is None
    assert not is_readable(descriptor)
    end.card.break_channels(0)
    until(lambda: is_readable(descriptor))
    assert [end.qp.recv_one(0) for _ in range(2)] == [None, None]  # the first only relies on what is armed
    assert not is_readable(descriptor)


def test_leader_passes_on_a_broken_channel(end: End) -> None:
    """Who leads and waits for events tells the others of a broken completion channel."""
    leading = Running(lambda: end.qp.recv(4, None, True))
    until(lambda: is_asleep(leading.threads[0]))
    following = Running(lambda: end.qp.recv(4))
    until(lambda: is_asleep(following.threads[0]))
    end.card.break_channels(0)
    (found,) = following.results()
    assert isinstance(found, QpError)
    leading.results()


def test_close_after_a_pulled_card_frees_the_rest(card: Card) -> None:
    """Closing after a card was pulled lets go of all it can.

    The kernel answers EIO to every command: descriptors, ids and memberships end all the same.
    """
    backend = CardBackend(card)
    End(card, backend).channel.close()
    open_before = descriptors()
    ends = [End(card, backend) for _ in range(2)]
    for end in ends:
        end.qp.send_one(end.group, b"x")
    card.remove(0, disassociated=True)
    with pytest.raises(McastError) as failed:
        backend.close()
    assert failed.value.errno == E.EIO
    assert failed.value.__notes__
    kinds = {one.kind for one in card.leftovers() if not one.excused}
    assert kinds <= {"completion channel", "context"}  # what the excused ones keep in the libraries
    assert len(descriptors() - open_before) <= 4  # the card's own ends of its completion channels
    card.reset()


def test_wake_descriptor_stays_open_for_late_events(card: Card, backend: CardBackend, end: End) -> None:
    """The descriptor that an event wakes stays open as long as one may arrive.

    Another thread reads events, and stands still in the library: it may yet tell the one that closes.
    """
    other = End(card, backend)
    card.stall("ibv_get_async_event")
    reading = Running(other.qp.port_events)
    until(lambda: card.stalled("ibv_get_async_event") == 1)
    before = descriptors()
    closing = Running(end.qp.close)

    def is_shut() -> bool:
        try:
            end.qp._flush(0)
        except Closed:
            return is_asleep(closing.threads[0])
        return False

    until(is_shut)
    assert before <= descriptors()
    card.go_on("ibv_get_async_event")
    assert closing.results() + reading.results() == [None, ()]
    assert descriptors() < before


@pytest.mark.parametrize("call", ["recv", "flush"])
def test_a_fatal_event_ends_every_wait(end: End, call: str) -> None:
    end.card.hold(Stage.SEND, end.qp.qp_num)
    end.qp.send_one(end.group, b"x")
    wait = (lambda: end.qp.recv(4)) if call == "recv" else (lambda: end.qp.flush())
    end.qp.recv(4, 0)
    waiting = Running(wait, wait)
    if call == "recv":
        end.qp.recv(4, 0.05).release()
    until(lambda: all(map(is_asleep, waiting.threads)))
    end.card.cq_event(end.qp.qp_num, receives=True)
    for found in waiting.results():
        assert isinstance(found, QpError)
        assert "CQ_ERR" in str(found)


def test_events_read_by_another_thread_wake_sleepers(card: Card, backend: CardBackend, end: End) -> None:
    """Who sleeps is told of what another thread has read.

    The first to come reads what the device tells; its descriptor tells the others nothing then.
    """
    other, over = End(card, backend), threading.Event()

    def read() -> None:
        while not over.is_set():
            other.qp.port_events()

    reading = Running(read)
    try:
        for _ in range(100):
            waiting = Running(lambda: end.qp.recv(1, None, True))
            until(lambda threads=waiting.threads: is_asleep(threads[0]))  # type: ignore[misc]
            card.port_event(0, PortEvent.GID_CHANGE)
            (found,) = waiting.results()
            assert len(found) == 0
            assert end.qp.port_events() == (PortEvent.GID_CHANGE,)
    finally:
        over.set()
    assert reading.results() == [None]


def test_who_waits_asks_the_device_nothing(end: End) -> None:
    queries = ("ibv_query_qp", "ibv_query_port")
    before = [end.card.count(name) for name in queries]
    assert end.qp.recv_one(2.5) is None
    assert [end.card.count(name) for name in queries] == before


def test_the_mtu_is_asked_for_once(end: End) -> None:
    end.qp.send_one(end.group, COPIED)
    before = end.card.count("ibv_query_port")
    stop = monotonic() + 0.5
    while monotonic() < stop:
        end.qp.send_one(end.group, COPIED)
    assert end.card.count("ibv_query_port") == before
    end.card.set_port(0, active_mtu=1)
    end.card.port_event(0, PortEvent.ACTIVE)
    until(lambda: end.qp.max_message_size == 256)


def test_an_address_that_librdmacm_cannot_look_at(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    channel = backend.event_channel()
    card.answer_resolve(CmEventType.ADDR_ERROR, -1)
    channel.create_id().resolve_addr(GROUP, "10.0.0.1")
    event = channel.get_event(LONG)
    assert event is not None
    assert event.errno == E.ENODEV


def test_slow_group_is_sent_to_at_its_rate(card: Card, backend: CardBackend) -> None:
    """A group of slower members is sent to at its rate."""
    card.infiniband(1)
    card.set_port(0, group_rate=5)
    end = End(card, backend)
    assert end.group.static_rate == 5
    end.qp.send_one(end.group, b"x")
    assert card.last_rate() == 5


def test_an_answer_goes_the_way_that_the_message_came(card: Card, backend: CardBackend) -> None:
    card.infiniband(1)
    end = End(card, backend)
    assert card.inject(end.qp.qp_num, b"question", src_qp=77, slid=9, sl=2, path_bits=3)
    message = end.qp.recv_one(LONG)
    assert message is not None
    back = end.group.reply_to(message)
    assert (back.qp_num, back.dlid, back.sl, back.src_path_bits, back.is_global) == (77, 9, 2, 3, False)
    end.qp.send_one(back, b"answer")
    with pytest.raises(ValueError, match="cannot be answered"):
        end.group.reply_to(message._replace(src_lid=0))


def test_there_are_no_lids_on_ethernet(card: Card, backend: CardBackend) -> None:
    """Whatever a driver leaves where a LID would be."""
    card.ethernet(1)
    card.set_port(0, ethernet_slid=7)
    end = End(card, backend)
    end.qp.send_one(end.group, b"x")
    message = end.qp.recv_one(LONG)
    assert message is not None
    assert message.src_lid == 0


# --- forks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "times"),
    [("5.11.22-generic", 1), ("4.18.0-553.el8_10.x86_64", 1), ("5.12.0", 0), ("6.1.0-56", 0)],
)
def test_old_kernels_keep_registered_memory_from_forks(
    card: Card, monkeypatch: pytest.MonkeyPatch, release: str, times: int
) -> None:
    names = os.uname()
    monkeypatch.setattr(os, "uname", lambda: type(names)((*names[:2], release, *names[3:])))
    before = card.count("ibv_fork_init")
    native._load()
    assert card.count("ibv_fork_init") - before == times


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork_uses_a_card_amid_an_event_read(card: Card, backend: CardBackend, end: End) -> None:
    """A fork uses a card though a thread of its parent read events.

    The thread stands still in the library as the fork comes.
    """
    card.stall("ibv_get_async_event")
    reading = Running(end.qp.port_events)
    until(lambda: card.stalled("ibv_get_async_event") == 1)
    child = os.fork()
    if not child:
        try:
            with CardBackend(card) as own:
                End(card, own)
        except BaseException:
            os._exit(1)
        os._exit(0)
    found = (0, 0)

    def has_ended() -> bool:
        nonlocal found
        found = os.waitpid(child, os.WNOHANG)
        return found[0] == child

    try:
        until(has_ended)
    finally:
        if not found[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        card.go_on("ibv_get_async_event")
    assert found[1] == 0
    reading.results()


def test_a_protection_domain_that_stays_is_freed_later(card: Card, backend: CardBackend) -> None:
    card.fail("ibv_dealloc_pd", E.EBUSY)
    end = End(card, backend)
    with pytest.raises(McastError):
        end.qp.close()
    assert isinstance(backend._pds, ProtectionDomains)
    backend.close()
    assert card.leftovers() == ()


def test_batch_after_its_queue_pair_posts_no_receive(end: End) -> None:
    """A batch that outlives its queue pair posts no receive."""
    end.qp.send(end.group, [b"x"])
    batch = end.qp.recv(1, LONG)
    posts = end.card.count("ibv_post_recv")
    end.qp.close()
    batch.release()
    assert end.card.count("ibv_post_recv") == posts
