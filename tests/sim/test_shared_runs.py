"""Messages that are posted one by one to a served fabric, and carried out together: as if each went alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mcast.api import Destination
from mcast.backends.model.qp import Qp
from mcast.backends.sim.core.delivery import Wire
from mcast.backends.sim.fabric import Fabric
from mcast.backends.sim.faults.rules import Drop, Messages
from mcast.backends.sim.shared import frames, posts, rings
from mcast.backends.sim.shared.posting import BURST, PostRun
from mcast.backends.sim.shared.server import FabricServer
from mcast.backends.sim.trace.events import Send, TraceEvent

from ..waiting import until
from .served import End
from .test_shared_rings import Stranger, core_of, stranger

COUNT = 20


@pytest.fixture
def depth() -> int:
    """Of the receiver: less than a run is long."""
    return 16


@pytest.fixture
def sends(server: FabricServer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many messages each send of the core is, from now on."""
    found, send = list[int](), Wire.send

    def noted(
        wire: Wire,
        qp: Qp,
        to: Destination,
        payloads: list[bytes],
        imm: int | None,
        longest: int | None = None,
    ) -> int:
        found.append(len(payloads))
        return send(wire, qp, to, payloads, imm, longest)

    monkeypatch.setattr(Wire, "send", noted)
    return found


@contextmanager
def held_up(fabric: Fabric) -> Iterator[None]:
    """The server carries out nothing meanwhile: it reads one frame at the most."""
    with fabric.clock:
        yield


def one_by_one(sender: End, first: int, count: int) -> list[bytes]:
    payloads = [bytes([number]) * (number % 7) for number in range(first, first + count)]
    for payload in payloads:
        sender.qp.send_one(sender.to, payload)
    return payloads


def test_they_are_one_send_of_the_core(
    server: FabricServer, sender: End, receiver: End, sends: list[int]
) -> None:
    """And a send with an immediate value, or of several messages, is another one."""
    with held_up(server.fabric):
        wanted = one_by_one(sender, 0, 6)
        sender.qp.send_one(sender.to, b"imm", 5)
        sender.send(b"of", b"two")
        wanted += [b"imm", b"of", b"two", *one_by_one(sender, 6, 6)]
    sender.qp.flush()
    assert sum(sends) == len(wanted)
    assert len(sends) <= 5
    with receiver.qp.recv(64, 30) as batch:
        assert [bytes(one.payload) for one in batch] == wanted
        assert [one.imm for one in batch] == [None] * 6 + [5] + [None] * 8


def test_each_one_is_counted_and_judged_by_itself(server: FabricServer, sender: End, receiver: End) -> None:
    """One is dropped by a rule, and receives run out."""
    core, source = core_of(server, receiver), core_of(server, sender)
    sent, received = source.sent, core.received
    with server.fabric.rules.when(Messages(nth=3), Drop()):
        with held_up(server.fabric):
            wanted = one_by_one(sender, 0, COUNT)
        sender.qp.flush()
    del wanted[2]
    assert source.sent == sent + COUNT
    assert (core.received - received, core.no_receive, core.free, core.empty) == (16, 3, 0, 1)
    assert receiver.take(16) == wanted[:16]
    more = one_by_one(sender, 50, 5)
    assert receiver.take(5) == more
    assert receiver.qp.counters.recv_free == 16


def test_a_trace_has_each_send(server: FabricServer, sender: End, receiver: End) -> None:
    found: list[Send] = []

    def note(at: int, event: TraceEvent) -> None:
        if isinstance(event, Send):
            found.append(event)

    server.fabric.parts.listen(note)
    with held_up(server.fabric):
        wanted = one_by_one(sender, 0, 10)
    sender.qp.flush()
    assert [one.payloads for one in found] == [(payload,) for payload in wanted]
    assert [one.first for one in found] == list(range(found[0].first, found[0].first + 10))
    assert receiver.take(10) == wanted


def post(place: int, length: int) -> bytes:
    return posts.pack_post(posts.PostedFrame(3, 0, None, place, [length]))


def asked(client: Stranger) -> None:
    client.socket.send(frames.pack(b'{"op":"look","qp":3}'))
    _, _, text, _ = frames.unpack(memoryview(client.answer()))
    assert frames.answer("look").validate_json(bytes(text)).counters.sent == 2


def left(client: Stranger) -> None:
    client.socket.close()


def beyond_the_mtu(client: Stranger) -> None:
    client.socket.send(post(74, 60_000))
    assert client.answer() == b""


def beyond_the_ring(client: Stranger) -> None:
    client.socket.send(post(74, 0xFFFFFFFF))
    assert client.answer() == b""


def elsewhere(client: Stranger) -> None:
    client.socket.send(post(1 << 50, 5))
    assert client.answer() == b""


@pytest.mark.parametrize("then", [asked, left, beyond_the_mtu, beyond_the_ring, elsewhere])
def test_what_was_posted_comes_before_what_follows(
    server: FabricServer, path: Path, receiver: End, sender: End, then: Callable[[Stranger], None]
) -> None:
    """A request is answered with the posts carried out; a client that leaves, or talks nonsense, has sent."""
    writer = rings.RingWriter()
    assert writer.put(b"-" * 64 + b"first" + b"other") == 0
    with stranger(path, writer.fd) as client:
        writer.forget_descriptor()
        client.ready(sender.to)
        with held_up(server.fabric):
            client.socket.send(post(64, 5))
            client.socket.send(post(69, 5))
        then(client)
        assert receiver.take(2) == [b"first", b"other"]
    until(lambda: len(server.clients) == 2)


def test_a_run_ends_where_its_ring_does(server: FabricServer, path: Path, receiver: End, sender: End) -> None:
    """Messages that would go on past the end of the ring are refused; those before it have come."""
    writer = rings.RingWriter()
    with stranger(path, writer.fd) as client:
        writer.forget_descriptor()
        client.ready(sender.to)
        with held_up(server.fabric):
            client.socket.send(post(rings.SIZE - 8, 5))
            client.socket.send(post(rings.SIZE - 3, 5))
        assert client.answer() == b""
        assert receiver.take(1) == [bytes(5)]


def test_what_is_posted_to_a_closed_queue_pair_is_nobody_s(
    server: FabricServer, path: Path, receiver: End, sender: End
) -> None:
    """Another thread of the client has closed the queue pair meanwhile: its session goes on."""
    writer = rings.RingWriter()
    with stranger(path, writer.fd) as client:
        writer.forget_descriptor()
        client.ready(sender.to)
        client.socket.send(post(0, 5))
        assert receiver.take(1) == [bytes(5)]
        for frame in (frames.pack(b'{"op":"close_qp","qp":3}'), post(5, 5), post(10, 5)):
            client.socket.send(frame)
        assert client.answer()
        client.socket.send(frames.pack(b'{"op":"seed"}'))
        assert client.answer()
        assert receiver.qp.recv_one(0) is None


def test_of_a_busy_client_others_have_their_turn(
    server: FabricServer, sender: End, receiver: End, sends: list[int]
) -> None:
    """However much a client has posted, a send is of no more messages than are read in one turn."""
    run = PostRun(b"", 0, sender.to, 0, 1, 1000, 1)
    assert run.take((b"", place, 1) for place in range(1, BURST + 1)) == (b"", BURST, 1)
    with held_up(server.fabric):
        one_by_one(sender, 0, 2 * BURST + 2)
    sender.qp.flush()
    assert sum(sends) == 2 * BURST + 2
    assert max(sends) <= BURST
