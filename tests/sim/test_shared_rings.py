"""Messages of a served fabric in shared memory: late readers, and strangers' posts and rings."""

from __future__ import annotations

import array
import gc
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import IPv4Address
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from mcast.api import Destination, Headed, PortEvent, QpError, QpInit, QpState, TimedOut
from mcast.backends.model.qp import Qp
from mcast.backends.sim.core.delivery import Wire
from mcast.backends.sim.fabric import Fabric
from mcast.backends.sim.faults.rules import Delay, Messages
from mcast.backends.sim.shared import connection, frames, posting, posts, rings
from mcast.backends.sim.shared.client import SharedQueuePair
from mcast.backends.sim.shared.incoming import MANY
from mcast.backends.sim.shared.posting import PostPipe
from mcast.backends.sim.shared.server import FabricServer, Serving
from mcast.backends.sim.testbed import SimObserver
from mcast.wire.addresses import Gid

from ..interleave import interrupted_everywhere
from ..waiting import Running, until
from .served import End, asked, end


def core_of(server: FabricServer, made: End) -> Qp:
    return next(qp for qp in server.fabric.qps if qp.number == made.qp.qp_num)


def descriptors() -> int:
    """How many this process has open, the server's among them."""
    return len(list(Path("/proc/self/fd").iterdir()))


# --- the way of a message ---------------------------------------------------------------------------


def test_messages_go_without_a_question(sender: End, receiver: End, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a sender maps its ring; then neither side waits for the server."""
    sender.send(b"a", b"", b"ccc")
    assert receiver.take(3) == [b"a", b"", b"ccc"]
    there, here = asked(sender.backend, monkeypatch), asked(receiver.backend, monkeypatch)
    sizes = [(number * 37) % 1025 for number in range(200)]
    for start in range(0, 200, 50):
        sender.send(*(bytes([number]) * sizes[number] for number in range(start, start + 50)))
    sender.qp.send_one(sender.to, b"single", 7)
    assert receiver.take(200) == [bytes([number]) * sizes[number] for number in range(200)]
    with receiver.qp.recv(1, 30) as batch:
        assert [(bytes(one.payload), one.imm, one.src_qp) for one in batch] == [
            (b"single", 7, sender.qp.qp_num)
        ]
    assert (there, here) == ([], [])


def test_messages_keep_their_order_whatever_way_they_take(
    sender: End, receiver: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single ones go through a pipe, but while the server has frames of the socket to read."""
    ways, write, sent = list[int](), os.write, 0

    def noted(fd: int, post: bytes) -> int:
        ways.append(fd)
        return write(fd, post)

    monkeypatch.setattr(os, "write", noted)

    def one() -> None:
        nonlocal sent
        sender.qp.send_one(sender.to, b"%d" % sent)
        sent += 1

    one()
    for number in range(40):
        if number % 4 == 1:
            sender.send(*(b"%d" % (sent + place) for place in range(number)))
            sent += number
        if number % 8 == 2:
            sender.qp.send_one(sender.to, b"%d" % sent, 7)
            sent += 1
        one()
        if number % 4 == 3:
            sender.qp.flush()
        one()
        one()
    assert receiver.take(sent) == [b"%d" % number for number in range(sent)]
    assert 30 < len(ways) < 100
    assert set(ways) == {sender.client._connection.memory.posts}


@pytest.mark.parametrize("before", ["a whole ring", "a batch"])
def test_single_messages_come_back_to_the_pipe(
    sender: End, receiver: End, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """A few go by the socket, because a frame was sent there; they cost twice as much."""
    ways, write, most = list[int](), os.write, connection.MOST_BY_SOCKET
    sender.send(b"first")

    def noted(fd: int, post: bytes) -> int:
        ways.append(fd)
        return write(fd, post)

    monkeypatch.setattr(os, "write", noted)
    size, times = 1024, 2 * rings.SIZE // 1024 // 32
    if before == "a batch":
        size, times = 1, 8
        sender.send(b"one", b"other")
    for _ in range(times):
        for _ in range(32):
            sender.qp.send_one(sender.to, bytes(size))
        receiver.take(32)  # so the server has read the pipe, and the ring is what gets full
    assert ways.count(sender.client._connection.memory.posts) > 32 * times - 2 * most


def test_who_gets_ahead_of_the_server_waits_for_it_and_loses_nothing(
    server: FabricServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = PostPipe()
    pipe.close()
    count = 3 * pipe.most
    with end(path, depth=count) as receiver, end(path, sends=True) as sender:
        sender.send(b"first")
        assert receiver.take(1) == [b"first"]
        requests = asked(sender.backend, monkeypatch)

        def send() -> None:
            for number in range(count):
                sender.qp.send_one(sender.to, b"%d" % number)

        with server.fabric.clock.mutex:  # which each of the server's turns takes
            running = Running(send)
            until(lambda: requests)
        assert running.results() == [None]
        assert receiver.take(count) == [b"%d" % number for number in range(count)]
        assert set(requests) == {"make_room"}


def test_a_pipe_is_read_to_its_end_before_what_follows(
    server: FabricServer, path: Path, receiver: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a page of memory is larger, a pipe is, too."""
    monkeypatch.setattr(posting, "ROOM", 1 << 16)
    with end(path, sends=True) as sender:
        sender.send(b"first")
        with server.fabric.clock.mutex:
            for _ in range(400):
                sender.qp.send_one(sender.to, b"single")
            sender.send(b"last", b"of all")
        assert receiver.take(403)[-2:] == [b"last", b"of all"]


def test_what_could_not_be_told_in_time_is_not_overtaken(sender: End) -> None:
    """A leave, say, that came while another thread waited for a stopped server."""
    connection = sender.client._connection
    connection.tell_later(frames.AskFor(op="seed"))
    sender.qp.send_one(sender.to, b"single")
    assert not connection._untold


def test_a_send_that_ctrl_c_ends_has_its_pipe(
    server: FabricServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with end(path, sends=True) as sender:
        connection = sender.client._connection
        exchange = connection._exchange

        def interrupted(*rest: Any, **named: Any) -> object:
            found = exchange(*rest, **named)
            signal.raise_signal(signal.SIGINT)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(connection, "_exchange", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sender.send(b"first")
        assert connection.memory.posts >= 0


def test_two_threads_do_not_mix_up_their_destinations(
    server: FabricServer, sender: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sends elsewhere while the other one looks up where to."""
    other = sender.to.model_copy(update={"gid": Gid(IPv4Address("239.9.9.9"))})
    sender.send(b"first")
    sender.qp.send(other, [b"first"])
    found, send, head = list[tuple[Destination, bytes]](), Wire.send, posts.one_head

    def noted(wire: Wire, qp: Qp, to: Destination, payloads: Sequence[bytes], *rest: Any) -> int:
        found.extend((to, one) for one in payloads)
        return send(wire, qp, to, payloads, *rest)

    def meanwhile(qp: int, slot: int) -> bytes:
        monkeypatch.setattr(posts, "one_head", head)
        assert Running(lambda: sender.qp.send_one(other, b"other")).results() == [None]
        return head(qp, slot)

    monkeypatch.setattr(Wire, "send", noted)
    monkeypatch.setattr(posts, "one_head", meanwhile)
    sender.qp.send_one(sender.to, b"this")
    for _ in range(2):
        sender.qp.send_one(other, b"other")
        sender.qp.send_one(sender.to, b"this")
    sender.qp.flush()
    assert sorted(payload for _, payload in found) == [b"other"] * 3 + [b"this"] * 3
    assert {payload: to.gid for to, payload in found} == {b"other": other.gid, b"this": sender.to.gid}
    assert all((to.gid == other.gid) == (payload == b"other") for to, payload in found)


def test_the_server_does_not_read_payloads(
    server: FabricServer, sender: End, receiver: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = rings.RingPayloads._bytes

    def refused(payloads: rings.RingPayloads, index: int) -> bytes:
        raise AssertionError("a payload was read")

    monkeypatch.setattr(rings.RingPayloads, "_bytes", refused)
    sender.send(bytes(1000), bytes(10))
    assert receiver.take(2) == [bytes(1000), bytes(10)]
    monkeypatch.setattr(rings.RingPayloads, "_bytes", read)


def test_a_batch_that_no_frame_could_hold_is_one_post(
    sender: End, receiver: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = posting.Posting.take

    def counts(self: posting.Posting, frame: memoryview) -> posting.Posted:
        posted = take(self, frame)
        taken.append(len(posted.lengths))
        return posted

    sender.send(b"first")
    assert receiver.take(1) == [b"first"]
    monkeypatch.setattr(posting.Posting, "take", counts)
    payloads = [number.to_bytes(4, "little") * 250 for number in range(400)]
    assert sum(map(len, payloads)) > frames.MOST_PAYLOAD
    sender.send(*payloads)
    assert receiver.take(400) == payloads
    assert taken == [400]


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("parts", [1, 2])
def test_rows_lie_in_the_ring_as_they_were(path: Path, parts: int) -> None:
    """More of them than can be asked for, or posted, at once."""
    size = 1000
    count = rings.MOST_POSTED // size + 100
    assert count * size > frames.MOST_PAYLOAD
    rows = [number.to_bytes(4, "little") * 250 for number in range(count)]
    batch: memoryview | Headed = memoryview(b"".join(rows)).cast("B", (count, size))
    if parts == 2:
        halves = (b"".join(row[at : at + size // 2] for row in rows) for at in (0, size // 2))
        batch = Headed(*(memoryview(half).cast("B", (count, size // 2)) for half in halves))
    with end(path, depth=4096) as receiver, end(path, sends=True) as sender:
        for _ in range(2):  # the first messages are asked for, and others posted
            assert sender.qp.send(sender.to, batch) == count
            assert receiver.take(count) == rows


def test_an_overtaken_reader_gets_what_its_receives_hold(server: FabricServer, path: Path) -> None:
    """The sender goes round its ring twice meanwhile, and waits for nobody."""
    size, depth = 1024, 2 * rings.SIZE // 1024
    with end(path, depth=depth) as receiver, end(path, sends=True) as sender:
        sender.send(b"first")
        payloads = [number.to_bytes(4, "little") * (size // 4) for number in range(2 * depth)]
        for start in range(0, 2 * depth, 64):
            sender.send(*payloads[start : start + 64])
        sender.qp.flush()
        core = core_of(server, receiver)
        assert (core.received, core.no_receive) == (depth, depth + 1)
        assert receiver.take(depth) == [b"first", *payloads[: depth - 1]]
        counters = receiver.qp.counters
        assert (counters.received, counters.recv_free) == (depth, depth)


def test_a_reset_drops_what_waits_here_in_the_socket_and_there(server: FabricServer, path: Path) -> None:
    """What is leased stays, and each receive is posted again once."""
    depth = 2048
    with end(path, depth=depth) as receiver, end(path, sends=True) as sender:
        for _ in range(2):
            for number in range(1000):  # more frames than the socket has room for
                sender.send(b"%d" % number)
                sender.qp.flush()  # so that each has a frame of its own
            with receiver.qp.recv(5, 30) as batch:
                core = core_of(server, receiver)
                assert len(batch) + len(core._queue) < 1000
                assert core._queue
                receiver.qp.reset()
                assert receiver.qp.counters.recv_free == depth - len(batch)
                assert [bytes(one.payload) for one in batch] == [
                    b"%d" % number for number in range(len(batch))
                ]
            sender.send(b"after")
            assert receiver.take(1) == [b"after"]
            assert receiver.qp.counters.recv_free == depth


def test_a_reset_beside_a_close_reads_what_is_its_own(receiver: End) -> None:
    """Another thread has closed the queue pair, and the descriptor's number is a stranger's now."""
    assert isinstance(receiver.qp, SharedQueuePair)
    incoming = receiver.qp._incoming
    receiver.qp.close()
    reader, writer = os.pipe2(os.O_NONBLOCK)
    try:
        if reader != incoming._fd:
            os.dup2(reader, incoming._fd)
        os.write(writer, b"theirs")
        assert incoming.drop() == 0
        assert os.read(incoming._fd, 100) == b"theirs"
    finally:
        for fd in {reader, writer, incoming._fd}:
            os.close(fd)


def test_a_delayed_message_outlives_its_place_in_the_ring(
    server: FabricServer, sender: End, receiver: End
) -> None:
    with server.fabric.rules.when(Messages(nth=1), Delay(1 << 60)):
        sender.send(b"late" * 100)
        sender.qp.flush()
    for _ in range(2 * rings.SIZE // (64 * 1024)):
        sender.send(*[bytes(1024)] * 64)
        receiver.take(64)
    with server.fabric.clock as _:
        ((_, _, deliver),) = server.fabric.clock._due
        deliver()
        server.fabric.clock._due.clear()
    assert receiver.take(1) == [b"late" * 100]


class Kept(NamedTuple):
    """What this process has."""

    descriptors: int
    sends: int


def kept() -> Kept:
    gc.collect()  # what earlier tests have left
    return Kept(descriptors(), sum(type(one) is rings.RingPayloads for one in gc.get_objects()))


def spilled() -> int:
    """Bytes that the server has copied out of rings, and keeps."""
    gc.collect()
    there = [one._copied for one in gc.get_objects() if type(one) is rings.RingPayloads]
    return sum(len(copied) for copied in there if copied is not None)


@pytest.mark.parametrize("is_told", [False, True])
def test_of_a_send_no_more_is_kept_than_receives_hold(
    server: FabricServer, path: Path, is_told: bool
) -> None:
    """Receives are what a client's memory is bounded by; the rest of a send that was too long is gone."""
    with end(path, depth=2) as receiver, end(path, sends=True) as sender:
        sender.send(b"first")
        assert receiver.take(1) == [b"first"]
        if is_told:
            server.fabric.parts.listen(lambda *_: None)
        for _ in range(4 * rings.SIZE // (64 * 1024)):
            sender.send(*[b"x" * 1024] * 64)
        sender.qp.flush()
        assert core_of(server, receiver).free == 0
        assert 0 < spilled() <= 2 * 1024
        assert receiver.take(2) == [b"x" * 1024] * 2


def test_the_ring_of_a_sender_that_has_left_is_gone(server: FabricServer, path: Path) -> None:
    """Though a receiver has not read what lies there: else each sender would cost descriptors and memory."""
    with end(path) as receiver:
        assert receiver.qp.recv_one(0.001) is None
        with end(path, sends=True) as sender:  # what is made once is there
            sender.send(b"first")
        until(lambda: len(server.clients) == 1)
        before = descriptors()
        for number in range(4):
            with end(path, sends=True) as sender:
                sender.send(b"asked")
                sender.send(b"posted %d" % number)
            until(lambda: len(server.clients) == 1)
        until(lambda: descriptors() == before)
        wanted = [one for number in range(4) for one in (b"asked", b"posted %d" % number)]
        assert receiver.take(9) == [b"first", *wanted]


def test_receives_are_given_back_without_a_call(
    server: FabricServer, sender: End, receiver: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, here = core_of(server, receiver), asked(receiver.backend, monkeypatch)
    sender.send(*[b"x"] * 512)
    sender.qp.flush()
    assert (core.free, core.no_receive) == (0, 0)
    with receiver.qp.recv(200, 30) as batch:
        assert len(batch) == 200
        assert receiver.qp.recv_one(30) is not None
        sender.send(b"y", b"y")
        sender.qp.flush()
        assert (core.free, core.no_receive) == (0, 1)
    sender.send(b"z")
    sender.qp.flush()
    assert (core.free, core.no_receive) == (199, 1)
    assert set(here) <= {"ring"}


def test_a_batch_of_a_queue_pair_that_is_being_closed_gives_another_one_nothing(
    server: FabricServer, sender: End, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which the server has made since, while another thread releases the batch."""
    with end(path) as old, old.backend.event_channel() as channel:
        sender.send(b"leased")
        batch, ends = old.qp.recv(1, 30), SharedQueuePair.ends
        assert len(batch) == 1
        cm_id = channel.create_id()
        cm_id.bind_addr(old.backend.devices()[0].ports[0].addresses[0])

        def meanwhile(closing: SharedQueuePair) -> None:
            monkeypatch.undo()
            made = cm_id.create_qp(QpInit(max_recv_wr=4))
            made.attach_mcast(sender.to.gid, 0)
            sender.send(b"waits", b"here")
            batch.release()
            sender.send(b"too")
            sender.qp.flush()
            assert made.counters.recv_free == 1
            ends(closing)

        monkeypatch.setattr(SharedQueuePair, "ends", meanwhile)
        old.qp.close()
        assert len(batch) == 1
        assert batch.released


def test_the_descriptor_is_readable_while_messages_are_here(sender: End, receiver: End) -> None:
    poller = select.poll()
    poller.register(receiver.qp.fileno(), select.POLLIN)
    sender.send(b"a", b"b", b"c")
    for _ in range(3):
        assert poller.poll(30_000)
        assert receiver.qp.recv_one(0) is not None
    assert poller.poll(0) == []


def test_the_rest_of_a_frame_is_told_to_who_asks_for_the_descriptor_later(sender: End, receiver: End) -> None:
    sender.send(b"a", b"b", b"c")
    first = receiver.qp.recv_one(30)
    assert first is not None
    assert bytes(first.payload) == b"a"
    poller = select.poll()
    poller.register(receiver.qp.fileno(), select.POLLIN)
    assert poller.poll(0)
    assert receiver.take(2) == [b"b", b"c"]
    assert poller.poll(0) == []


def test_the_rest_of_a_frame_wakes_those_who_sleep(sender: End, receiver: End) -> None:
    """Another call has read the frame, so nothing is readable where it came from."""
    incoming = receiver.client._incoming
    sender.send(b"known", b"ring")
    assert receiver.take(2) == [b"known", b"ring"]

    def sleep(awaited: list[int]) -> None:
        poller = select.poll()
        for fd in awaited:
            poller.register(fd, select.POLLIN)
        assert poller.poll(0) == []
        sender.send(b"a", b"b", b"c")
        for left in (2, 1, 0):
            assert poller.poll(30_000 if left == 2 else 0)
            assert incoming.take_one() is not None
        assert poller.poll(0) == []

    incoming.sleep(sleep)


@pytest.mark.parametrize("count", [5, MANY + 5])
def test_messages_are_taken_one_by_one_and_together(
    sender: End, receiver: End, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Of a frame of few messages, and of one whose payloads are one piece of memory."""
    sender.send(*[b"%d" % number * number for number in range(count)])
    took: list[bytes] = []
    asks = asked(receiver.backend, monkeypatch)
    while len(took) < count:
        message = receiver.qp.recv_one(30)
        assert message is not None
        took += [bytes(message.payload), *receiver.take(min(1, count - len(took) - 1))]
    assert took == [b"%d" % number * number for number in range(count)]
    assert set(asks) <= {"ring"}
    assert receiver.qp.counters.recv_free == 512


def test_a_handler_that_receives_meanwhile_takes_no_message_twice(
    sender: End, receiver: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender.send(b"a", b"b", b"c")
    unpack, found = posts.unpack_told, list[bytes]()

    def interrupted(frame: bytes) -> tuple[int, list[posts.Told]]:
        monkeypatch.setattr(posts, "unpack_told", unpack)
        found.extend(receiver.take(1))  # as a signal's handler does
        return unpack(frame)

    monkeypatch.setattr(posts, "unpack_told", interrupted)
    assert sorted(receiver.take(2) + found) == [b"a", b"b", b"c"]
    assert receiver.qp.recv_one(0) is None
    assert receiver.qp.counters.recv_free == 512


def test_messages_go_on_after_the_port_has_told_of_something(
    server: FabricServer, sender: End, receiver: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a receiver of one at a time, too, which hears of it once."""
    port = core_of(server, receiver).port
    for text in (b"before", b"after", b"later"):
        sender.qp.send_one(sender.to, text)
        message = receiver.qp.recv_one(30)
        assert message is not None
        assert bytes(message.payload) == text
        server.fabric.set_link(port, False)
        server.fabric.set_link(port, True)
    requests = asked(receiver.backend, monkeypatch)
    assert [receiver.qp.recv_one(0) for _ in range(2)] == [None, None]
    assert requests.count("port_events") <= 1
    assert PortEvent.ACTIVE in receiver.qp.port_events()


@pytest.mark.parametrize("name", ["port_events", "flush"])
def test_what_the_port_tells_a_call_that_ctrl_c_ends_is_not_lost(
    server: FabricServer, receiver: End, name: str
) -> None:
    port, qp = core_of(server, receiver).port, receiver.qp
    found: list[PortEvent] = []

    def call() -> None:
        if name == "flush":
            qp.flush(30)
        found.extend(qp.port_events())

    def is_told() -> bool:
        found.extend(qp.port_events())
        return PortEvent.ACTIVE in found

    def check(returned: bool) -> None:
        until(is_told)
        found.clear()
        server.fabric.set_link(port, False)
        server.fabric.set_link(port, True)
        assert select.select([qp], [], [], 60)[0]

    found.append(PortEvent.ACTIVE)
    check(True)
    for part in ("client", "incoming", "connection"):
        interrupted_everywhere(call, check, f"backends/sim/shared/{part}.py", every=1)


@pytest.mark.parametrize("what", ["link", "error"])
def test_a_send_that_cannot_be_carried_out_fails_in_its_own_call(
    server: FabricServer, sender: End, receiver: End, what: str
) -> None:
    core = core_of(server, sender)
    sender.send(b"still posted")
    sender.qp.flush()
    if what == "link":
        server.fabric.set_link(core.port, False)
    else:
        server.fabric.fail_qp(core)
    with pytest.raises(QpError):
        sender.send(b"lost")


def test_a_state_that_another_thread_changes_meanwhile_is_heeded(
    sender: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not only by the sends of that thread."""
    head = posts.one_head

    def meanwhile(qp: int, slot: int) -> bytes:
        monkeypatch.setattr(posts, "one_head", head)
        sender.qp.modify(QpState.SQD)
        return head(qp, slot)

    monkeypatch.setattr(posts, "one_head", meanwhile)
    for _ in range(2):
        with pytest.raises(TimedOut):
            sender.qp.send_one(sender.to, b"too late", timeout=0)
    sender.qp.modify(QpState.RTS)
    sender.qp.send_one(sender.to, b"again")


def test_a_client_without_sealed_memory_asks_for_everything(
    server: FabricServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise OSError("no memory files here")

    with end(path) as ringed:
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", refused)
            poor = ExitStack()
            receiver = poor.enter_context(end(path))
            sender = poor.enter_context(end(path, sends=True))
        with poor:
            for number in range(3):
                sender.send(bytes([number]) * 1024, b"")
                for one in (receiver, ringed):
                    assert one.take(2) == [bytes([number]) * 1024, b""]
            assert receiver.qp.counters.recv_free == 512


def test_senders_that_come_and_go_leave_nothing_behind(server: FabricServer, path: Path) -> None:
    with end(path) as receiver:
        assert receiver.qp.recv_one(0.001) is None  # what a sleep needs is there
        counts = []
        for number in range(12):
            with end(path, sends=True) as sender:
                for text in (b"one", b"two"):
                    sender.send(text, bytes([number]))
                    assert receiver.take(2) == [text, bytes([number])]
            until(lambda: len(server.clients) == 1)
            counts.append(descriptors())
        assert counts[2:] == [counts[2]] * 10
        assert sum(map(bool, server._pump.page.words[1:])) == 1


def test_messages_go_round_and_round_and_leave_nothing(
    server: FabricServer, sender: End, receiver: End, long: bool
) -> None:
    """A million with --long, of all lengths, in sends of all sizes: many times the size of the ring."""
    sender.send(b"in the ring")
    assert receiver.take(1) == [b"in the ring"]  # and what is made once is there
    assert receiver.qp.recv_one(0.001) is None  # what a sleep needs, too
    assert receiver.qp.counters.recv_free == 512
    random, sent, before = Random(14), 0, kept()
    assert before.sends == 0
    while sent < (1_000_000 if long else 3_000):
        payloads = [random.randbytes(random.randrange(1025)) for _ in range(random.choice((1, 8, 64, 256)))]
        times = 256 // len(payloads)
        for _ in range(times):
            sender.send(*payloads)
        assert receiver.take(256) == payloads * times
        sent += 256
    sender.qp.flush()
    counters = receiver.qp.counters
    assert (counters.received, counters.recv_free, counters.dropped_no_receive) == (2 + sent, 512, 0)
    assert kept() == before


# --- rings ------------------------------------------------------------------------------------------


@pytest.fixture
def page() -> rings.Page:
    return rings.Page()


def pair(page: rings.Page) -> tuple[rings.RingWriter, rings.Outbox]:
    writer = rings.RingWriter()
    return writer, rings.Outbox(os.dup(writer.fd), page)


def test_a_ring_goes_round_and_a_late_reader_notices(page: rings.Page) -> None:
    random, (writer, outbox) = Random(14), pair(page)
    reader = rings.RingReader(writer.fd)
    kept: list[tuple[rings.RingPayloads, int, bytes]] = []
    late = 0
    for _ in range(400):
        payload = random.randbytes(random.randrange(1, rings.SIZE // 35))
        place = writer.put(payload)
        if place is None:
            writer.allow(outbox.make_room())
            place = writer.put(payload)
        assert place is not None
        kept.append((outbox.take(place, [len(payload)]), place, payload))
        if len(kept) > 100:
            taken, place, payload = kept.pop(random.randrange(50))
            assert taken[0] == payload
            copied = reader.copy(place, len(payload))
            assert copied in (None, payload)
            late += copied is None
    assert 50 < late < 300


def test_the_server_believes_no_place(page: rings.Page) -> None:
    _, outbox = pair(page)
    for place, lengths in (
        (rings.SIZE - 10, [11]),
        (rings.SIZE, [1]),
        (0, [rings.SIZE + 1]),
        (1 << 63, [1]),
        (0, [0xFFFFFFFF] * 1024),
    ):
        with pytest.raises(ValueError, match="messages at"):
            outbox.take(place, lengths)
    assert list(outbox.take(rings.SIZE - 10, [10])) == [bytes(10)]
    outbox.make_room()
    with pytest.raises(ValueError, match="kept from"):
        outbox.take(0, [1])


def test_a_client_believes_no_place_either() -> None:
    reader = rings.RingReader(rings.RingWriter().fd)
    for place, count in ((rings.SIZE - 10, 11), (0, -1), (0, rings.SIZE + 1)):
        with pytest.raises(ValueError, match="has no"):
            reader.copy(place, count)


def test_what_many_small_sends_hold_is_bounded(page: rings.Page) -> None:
    """None is forgotten that somebody waits for."""
    writer, outbox = pair(page)
    kept = []
    for number in range(2 * rings.MOST_LIVE):
        place = writer.put(bytes([number % 251]))
        assert place is not None
        kept.append(outbox.take(place, [1]))
    assert len(outbox._live) <= rings.MOST_LIVE
    assert [one[0][0] for one in kept] == [number % 251 for number in range(len(kept))]


def test_a_ring_can_be_neither_shrunk_nor_written_by_others() -> None:
    import mmap

    writer = rings.RingWriter()
    for forbidden in (
        lambda: os.ftruncate(writer.fd, 0),
        lambda: os.pwrite(writer.fd, b"x", 0),
        lambda: mmap.mmap(writer.fd, rings.HEAD),
    ):
        with pytest.raises(PermissionError):
            forbidden()


# --- strangers ----------------------------------------------------------------------------------------


class Stranger:
    """A client that has a queue pair in the group, a destination to post to, and no manners."""

    pipe = -1

    def __init__(self, path: Path, ring: int) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(30)
        self.socket.connect(str(path))
        sent_along = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [ring]))]
        attach = frames.AttachTo(host=2).model_dump_json().encode()
        self.socket.sendmsg([frames.pack(attach)], sent_along)

    def answer(self) -> bytes:
        """b"" once the server has ended the session."""
        try:
            return self.socket.recv(frames.MOST_FRAME)
        except ConnectionResetError:
            return b""

    def ready(self, destination: Destination) -> None:
        to = destination.model_dump_json().replace('"', '\\"')
        for text in (
            '{"op":"open_channel"}',
            '{"op":"create_id","channel":1,"port_space":273}',
            '{"op":"bind","id":2,"src":"10.0.0.3"}',
            '{"op":"create_qp","id":2,"init":{"max_recv_wr":64}}',
            f'{{"op":"send","qp":3,"to":"{to}","lengths":[],"imm":null}}',
        ):
            assert self.answer()
            self.socket.send(frames.pack(text.encode()))
        answer, (self.pipe,), _, _ = socket.recv_fds(self.socket, frames.MOST_FRAME, 1)
        kind, _, text_of, _ = frames.unpack(memoryview(answer))
        assert kind == frames.OK, bytes(text_of)

    def post(self, post: bytes, by_pipe: bool) -> None:
        if by_pipe:
            os.write(self.pipe, post)
        else:
            self.socket.send(post)


@contextmanager
def stranger(path: Path, ring: int) -> Iterator[Stranger]:
    made = Stranger(path, ring)
    with made.socket:
        try:
            yield made
        finally:
            if made.pipe >= 0:
                os.close(made.pipe)


def unsealed() -> int:
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, rings.HEAD + rings.SIZE)
    return fd


def short() -> int:
    return rings.make(4096)[0]


def no_memory() -> int:
    return os.open("/dev/zero", os.O_RDONLY)


@pytest.mark.parametrize("make", [unsealed, short, no_memory])
def test_what_is_no_ring_ends_its_session(server: FabricServer, path: Path, make: Callable[[], int]) -> None:
    fd = make()
    with end(path) as receiver, end(path, sends=True) as sender:
        for text in (b"asked", b"posted"):
            sender.send(text)
            assert receiver.take(1) == [text]
        assert receiver.qp.recv_one(0.001) is None  # what is made once is there
        before = descriptors()
        with stranger(path, fd) as client:
            assert client.answer() == b""
        sender.send(b"still here")
        assert receiver.take(1) == [b"still here"]
        until(lambda: descriptors() == before)
    os.close(fd)


def wild(random: Random) -> bytes:
    """A post: right, or with any of its numbers wrong, or with some bits the other way."""
    odd = random.random() < 0.5
    lengths = random.choice(([5], [1, 2], [], [1024], [0xFFFFFFFF], [0] * 1024, [0] * 1025, [rings.SIZE]))
    place = random.choice((0, 64, rings.SIZE - 1, rings.SIZE, 1 << 40, (1 << 64) - 1)) if odd else 64
    frame = posts.pack_post(
        posts.PostedFrame(
            random.choice((3, 3, 3, 0, 77, 0xFFFFFFFF)),
            random.choice((0, 0, 0, 1, 0xFFFF)) if odd else 0,
            random.choice((None, 9)),
            place,
            lengths if odd else [5],
        )
    )
    made = bytearray(frame)
    if random.random() < 0.3:
        made[random.randrange(len(made))] ^= 1 << random.randrange(8)
    if random.random() < 0.1:
        del made[random.randrange(len(made)) :]
    return bytes(made) or b"\0"


def test_posts_and_rings_of_strangers_harm_only_themselves(
    server: FabricServer, path: Path, long: bool
) -> None:
    """A million posts with --long; the words of the rings change all the while."""
    random, count, observer = Random(14), 0, SimObserver(server.fabric)
    with end(path) as receiver, end(path, sends=True) as sender:
        sender.send(b"first")
        receiver.take(1)
        before = sorted(observer.leftovers())
        while count < (1_000_000 if long else 1_500):
            writer = rings.RingWriter()
            with stranger(path, writer.fd) as client:
                writer.forget_descriptor()
                client.ready(sender.to)
                core = next(qp for qp in server.fabric.qps if str(qp.port.addresses[0]) == "10.0.0.3")
                with suppress(OSError):
                    for _ in range(200):
                        writer.words[random.randrange(8)] = random.getrandbits(64)
                        with suppress(BlockingIOError):
                            client.post(wild(random), random.random() < 0.5)
                        count += 1
                assert 0 <= core.free <= core.depth
            until(lambda: len(server.clients) == 2)
            until(lambda: receiver.qp.recv_one(0) is None and receiver.qp.counters.recv_free == 512)
            sender.send(b"still here")
            assert receiver.take(1) == [b"still here"]
        assert sorted(observer.leftovers()) == before


def test_what_is_no_post_in_a_pipe_ends_its_session(server: FabricServer, sender: End, receiver: End) -> None:
    sender.send(b"first")
    receiver.take(1)
    right = posts.pack_one(posts.one_head(3, 0), 64, 5)
    for wrong in (b"\0", right[:-1], posts.pack_one(posts.one_head(3, 9), 64, 5), right + b"\0"):
        ring = rings.RingWriter()
        with stranger(server.path, ring.fd) as client:
            ring.forget_descriptor()
            client.ready(sender.to)
            client.post(right, True)
            assert receiver.take(1) == [bytes(5)]
            client.post(wrong, True)
            assert client.answer() == b""
    sender.send(b"still here")
    assert receiver.take(1) == [b"still here"]


def test_a_session_ends_once_though_its_pipe_and_its_socket_are_ready(fabric: Fabric, path: Path) -> None:
    serving = Serving(FabricServer(fabric, path))
    with serving as server:
        with end(path, sends=True) as sender:
            to = sender.to
        until(lambda: not server.clients)
        ring = rings.RingWriter()
        with stranger(path, ring.fd) as client:
            ring.forget_descriptor()
            client.ready(to)
            server.stop()
            serving._thread.join(60)
            client.post(b"\0", True)
            client.socket.send(frames.pack(b'{"op":"seed"}'))
            ready = server._watch.wait()
            assert len(ready) == 3  # and the stop
            for call in ready:
                call()
            assert not server.clients


def test_a_count_of_given_back_receives_is_never_believed_beyond_what_is_out(
    server: FabricServer, sender: End, receiver: End
) -> None:
    core, ring = core_of(server, receiver), receiver.client._connection.memory.ring
    assert ring is not None
    sender.send(*[b"x"] * 10)
    sender.qp.flush()
    for word in (1 << 63, 3, 0, (1 << 64) - 1):
        ring.words[receiver.client._made.word] = word
        sender.send(b"y")
        sender.qp.flush()
        assert core.free <= core.depth
