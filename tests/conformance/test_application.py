"""Foundations of the application layer: one sleep for messages and events, descriptors, loopback."""

from __future__ import annotations

import errno as E
import os
import select

import pytest

from mcast.api import (
    Batch,
    Closed,
    Destination,
    InvalidArgument,
    NotSupported,
    QpError,
    QpInit,
    QpState,
    QueuePair,
    Testbed,
)
from mcast.conformance.helpers import BOUND, Application, eventually, new_group, numbered


def pair(bed: Testbed, init: QpInit | None = None) -> tuple[Application, Application, Destination]:
    """A sender, a receiver, and where to send to."""
    group = new_group()
    receiver = Application(bed, 1, init or QpInit())
    receiver.join(group)
    sender = Application(bed, 0)
    return sender, receiver, sender.join(group, send_only=True)


def is_pending(peer: Application) -> bool:
    return peer.channel.pending


def is_readable(qp: QueuePair) -> bool:
    poller = select.poll()
    poller.register(qp.fileno(), select.POLLIN)
    return bool(poller.poll(0))


# --- one sleep for both ----------------------------------------------------


def test_recv_returns_empty_when_an_event_waits(bed: Testbed) -> None:
    """Recv returns early and empty when an event waits."""
    peer = Application(bed)
    peer.join(new_group())
    peer.id.join_multicast(new_group())
    start = bed.backend.now()
    with peer.qp.recv(8, BOUND, events=True) as batch:
        assert len(batch) == 0
    assert bed.backend.now() - start < BOUND
    peer.event()


def test_recv_waits_on_while_nobody_asked_for_events(bed: Testbed) -> None:
    peer = Application(bed)
    peer.join(new_group())
    peer.id.join_multicast(new_group())
    start = bed.backend.now()
    with peer.qp.recv(8, 0.05) as batch:
        assert len(batch) == 0
    assert bed.backend.now() - start > 0.049
    peer.event()


def test_recv_prefers_messages_to_events(bed: Testbed) -> None:
    """Recv gives messages before it gives way to events."""
    sender, receiver, outward = pair(bed)
    sender.send(outward, b"first")
    with receiver.qp.recv(1, BOUND) as batch:
        assert len(batch) == 1
    sender.send(outward, b"second")
    receiver.id.join_multicast(new_group())
    payloads: list[bytes] = []
    while not payloads:  # the event may be there before the message
        with receiver.qp.recv(8, BOUND, events=True) as batch:
            payloads = [bytes(message.payload) for message in batch]
    assert payloads == [b"second"]
    receiver.event()


def test_event_is_polled_without_waiting(bed: Testbed) -> None:
    """A call that asks if an event waits does not wait itself."""
    peer = Application(bed)
    assert not is_pending(peer)
    peer.id.join_multicast(new_group())
    eventually(bed, lambda: is_pending(peer))
    now = bed.backend.now()
    assert is_pending(peer)
    assert bed.backend.now() - now < 1.0
    peer.event()
    assert not is_pending(peer)
    peer.channel.close()
    with pytest.raises(Closed):
        is_pending(peer)


def test_clock_goes_on_while_a_call_waits(bed: Testbed) -> None:
    """The clock of timeouts goes on while a call waits."""
    before = bed.backend.now()
    with bed.backend.event_channel() as channel:
        assert channel.get_event(0.05) is None
    assert 0.049 < bed.backend.now() - before < BOUND


# --- a descriptor to sleep on ----------------------------------------------


def test_the_descriptor_is_armed_by_an_empty_recv(bed: Testbed) -> None:
    sender, receiver, outward = pair(bed)
    os.fstat(receiver.qp.fileno())
    for payload in numbered(3):
        with receiver.qp.recv(8, 0) as batch:
            assert len(batch) == 0
        assert not is_readable(receiver.qp)
        sender.send(outward, payload)
        eventually(bed, lambda: is_readable(receiver.qp))
        with receiver.qp.recv(8, 0) as batch:
            assert [bytes(message.payload) for message in batch] == [payload]


def test_message_before_the_arm_is_not_missed(bed: Testbed) -> None:
    """A message that arrived before the descriptor was armed wakes the loop."""
    sender, receiver, outward = pair(bed)
    sender.send(outward, *numbered(5))
    eventually(bed, lambda: receiver.qp.counters.dropped_no_receive in (0, None))
    receiver.qp.fileno()
    payloads: list[bytes] = []

    def all_here() -> bool:
        with receiver.qp.recv(2, 0) as batch:
            payloads.extend(bytes(message.payload) for message in batch)
            return not len(batch) and len(payloads) == 5

    eventually(bed, all_here)
    assert payloads == list(numbered(5))
    assert not is_readable(receiver.qp)


def test_the_descriptor_tells_a_failure(bed: Testbed) -> None:
    _, receiver, _ = pair(bed)
    receiver.qp.fileno()
    assert len(receiver.qp.recv(1, 0)) == 0
    receiver.qp.modify(QpState.ERR)
    eventually(bed, lambda: is_readable(receiver.qp))
    with pytest.raises(QpError):
        receiver.qp.recv(1, 0)


def test_a_closed_queue_pair_has_no_descriptor(bed: Testbed) -> None:
    peer = Application(bed)
    qp = peer.qp
    fd = qp.fileno()
    qp.close()
    with pytest.raises(Closed):
        qp.fileno()
    with pytest.raises(OSError) as caught:
        os.fstat(fd)
    assert caught.value.errno == E.EBADF


# --- own messages ----------------------------------------------------------


def test_own_messages_blocked_or_refused(bed: Testbed) -> None:
    """A device refuses to keep own messages back or still serves the others."""
    group = new_group()
    other = Application(bed, 1)
    other.join(group)
    peer = Application(bed, 0, None)
    try:
        peer.id.create_qp(QpInit(block_loopback=True))
    except (NotSupported, InvalidArgument):
        peer.id.create_qp(QpInit())
        own = {True}
    else:
        own = {True, False}  # some accept the flag, and return the messages all the same
    outward = peer.join(group)
    peer.send(outward, b"mine")
    assert other.receive(1) == [b"mine"]
    copies = peer.receive_until_marker(other)
    assert bool(copies) in own
    assert set(copies) <= {b"mine"}


# --- counters --------------------------------------------------------------


def test_moments_without_a_free_receive_are_counted(bed: Testbed) -> None:
    sender, receiver, outward = pair(bed, QpInit(max_recv_wr=4))
    assert receiver.qp.counters.recv_empty == 0
    sender.send(outward, *numbered(3))
    assert receiver.receive(3) == list(numbered(3))
    assert receiver.qp.counters.recv_empty == 0
    for count in (1, 2):
        sender.send(outward, *numbered(4))
        held: list[Batch] = []
        while sum(len(batch) for batch in held) < 4:
            held.append(receiver.qp.recv(4, BOUND))
        assert receiver.qp.counters.recv_empty == count
        for batch in held:
            batch.release()


def test_a_port_shows_its_own_counters(bed: Testbed) -> None:
    device = Application(bed).id.device
    assert device is not None
    counters = bed.backend.port_counters(device)
    assert counters
    assert all(name and value >= 0 for name, value in counters.items())
    assert bed.backend.port_counters("no-such-device") == {}
