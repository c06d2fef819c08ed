"""Exceptions at each line of the real provider's calls, on a scripted card.

Whatever the line, no lock stays held and nobody waits for ever, `close` closes, and the card has nothing left
after the backend's close. What was broken is an id, its queue pair or their channel: ids of other channels
work.
"""

from __future__ import annotations

import errno as E
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from mcast.api import (
    AddressNotAvailable,
    Broken,
    Closed,
    CmEventType,
    Destination,
    HeaderBodyBatch,
    McastError,
    QpInit,
    Region,
)
from mcast.backends.rdma.native import Native

from ..card.card import Card
from ..card.ends import BOUND, GROUP, OTHER
from ..card.provider import CardBackend
from .sweep import Kind, states, sweep, works

SHORT = 0.003
"""Seconds of a wait for nothing."""
INIT = QpInit(max_send_wr=16, max_recv_wr=16)
ROWS = memoryview(b"onetwo").cast("B", (2, 3))
SLOT = 1024


class World:
    """A backend on the card, with an id on its first port, which is a member of GROUP if `joined`."""

    def __init__(self, card: Card, joined: bool) -> None:
        self.card = card
        self.backend = CardBackend(card)
        self.channel = self.backend.event_channel()
        self.bare = self.channel.create_id()
        self.bare.bind_addr("10.0.0.1")
        self.id = self.channel.create_id()
        self.id.bind_addr("10.0.0.1")
        self.qp = self.id.create_qp(INIT)
        self.opened: list[CardBackend] = []
        self.regions: list[Region] = []
        if joined:
            self.to = self.join()

    def join(self) -> Destination:
        self.id.join_multicast(GROUP)
        while event := self.channel.get_event(BOUND):
            if event.check().type is CmEventType.MULTICAST_JOIN:
                assert event.ud is not None
                return event.ud.destination
        raise AssertionError("no event")

    def use(self) -> None:
        """The id and its queue pair do what they did before, and so do others of the channel."""
        while self.regions:
            self.regions.pop().close()
        self.qp.reset()
        for group in (GROUP, OTHER):
            with suppress(AddressNotAvailable):
                self.id.leave_multicast(group)
        to = self.join()
        while self.qp.recv(timeout=0):
            pass
        self.qp.send(to, [b"use"])
        message = self.qp.recv_one(BOUND)
        assert message is not None
        assert bytes(message.payload) == b"use"
        self.id.leave_multicast(GROUP)
        assert to.gid not in self.qp.attachments
        while self.channel.pending:
            self.channel.get_event(0)
        self.channel.create_id().destroy()

    def use_another(self) -> None:
        """Another id, on another channel."""
        with self.backend.event_channel() as channel, channel.create_id() as cm_id:
            cm_id.bind_addr("10.0.0.2")
            qp = cm_id.create_qp(INIT)
            cm_id.join_multicast(OTHER)
            event = channel.get_event(BOUND)
            assert event is not None
            ud = event.check().ud
            assert ud is not None
            with qp.register(bytearray(SLOT)):
                qp.send_one(ud.destination, b"another")
            cm_id.leave_multicast(OTHER)

    def close(self) -> None:
        for backend in (self.backend, *self.opened):
            backend.close()
            assert backend.closed
        gc.collect(0)
        reports, leftovers = self.card.reports(), self.card.leftovers()
        assert (reports, leftovers) == ((), ())


def check(world: World, error: BaseException | None) -> str:
    world.use_another()
    usable = works(world.use)
    world.close()
    return "usable" if usable else "broken"


def check_ended(world: World, error: BaseException | None) -> str:
    """After a close of something; the backend, which may be half closed, is closed again."""
    with suppress(Broken, Closed):
        world.use_another()
    world.close()
    return "usable"


def recv(world: World) -> None:
    with world.qp.recv(timeout=BOUND) as batch:
        list(batch)
        len(batch.memory)


def receive(world: World, call: Callable[[World], object]) -> None:
    world.qp.send(world.to, [b"one", b"two"])
    call(world)


def register(world: World, slot: int | None = None) -> None:
    world.regions.append(world.qp.register(bytearray(4 * SLOT), slot))


def close_region(world: World, slot: int | None = None) -> None:
    world.qp.register(bytearray(4 * SLOT), slot).close()


def destination(world: World) -> Destination:
    return Destination(gid=world.to.gid, dlid=world.to.dlid, hop_limit=7)


CALLS: dict[str, Callable[[World], object]] = {
    "open_backend": lambda world: world.opened.append(CardBackend(world.card)),
    "event_channel": lambda world: world.backend.event_channel(),
    "devices": lambda world: world.backend.devices(),
    "create_id": lambda world: world.channel.create_id(),
    "resolve_addr": lambda world: world.channel.create_id().resolve_addr(OTHER, "10.0.0.1"),
    "create_qp": lambda world: world.bare.create_qp(INIT),
    "join": lambda world: world.id.join_multicast(GROUP),
    "join, its event": World.join,
    "get_event that waits": lambda world: world.channel.get_event(SHORT),
    "recv that waits": lambda world: world.qp.recv(timeout=SHORT),
    "register": register,
    "register receive memory": partial(register, slot=SLOT),
    "close a region": close_region,
    "close receive memory": partial(close_region, slot=SLOT),
    "reset": lambda world: world.qp.reset(),
}
AS_MEMBER: dict[str, Callable[[World], object]] = {
    "send": lambda world: world.qp.send(world.to, [b"one", memoryview(b"two")], 7),
    "send elsewhere": lambda world: world.qp.send(destination(world), [b"one"]),
    "send_one": lambda world: world.qp.send_one(world.to, b"one"),
    "send rows": lambda world: world.qp.send(world.to, ROWS),
    "send two parts": lambda world: world.qp.send(world.to, HeaderBodyBatch(ROWS, ROWS)),
    "flush": lambda world: world.qp.flush(BOUND),
    "recv": lambda world: receive(world, recv),
    "recv_one": lambda world: receive(world, lambda world: world.qp.recv_one(BOUND)),
    "detach": lambda world: world.qp.detach_mcast(world.to.gid, world.to.dlid),
    "attach": lambda world: world.qp.attach_mcast("ff0e::1", 0),
    "leave": lambda world: world.id.leave_multicast(GROUP),
}
ENDS: dict[str, Callable[[World], object]] = {
    "close a queue pair": lambda world: world.qp.close(),
    "destroy an id": lambda world: world.id.destroy(),
    "close a channel": lambda world: world.channel.close(),
    "close a backend": lambda world: world.backend.close(),
}
_OF_QP = {"queue pair", "completion queue", "completion channel", "memory region"}
ENDED = {
    "close a queue pair": _OF_QP,
    "destroy an id": _OF_QP,
    "close a channel": {*_OF_QP, "id", "event channel"},
    "close a backend": {*_OF_QP, "id", "event channel", "protection domain"},
}
"""Objects that the card must not have after each of these."""
UNBROKEN = {"open_backend", "event_channel", "devices", "get_event that waits", "recv that waits", "send"}
UNBROKEN |= {"send elsewhere", "send_one", "send rows", "send two parts", "flush", "recv", "recv_one"}
"""Calls that change nothing that they could leave half changed."""

each_kind = pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)


@pytest.fixture(params=["ethernet", "infiniband"])
def network(request: pytest.FixtureRequest, card: Card) -> Card:
    card.network(request.param, 2)
    before = World(card, True)  # what is opened once a process stays: devices, a pipe for signals
    before.use_another()
    before.channel.get_event(SHORT)
    before.close()
    return card


@each_kind
@pytest.mark.parametrize("name", [*CALLS, *AS_MEMBER])
def test_call(network: Card, name: str, kind: Kind) -> None:
    call = (CALLS | AS_MEMBER)[name]
    outcomes = sweep(lambda: World(network, name in AS_MEMBER), call, check, kind)
    assert set(states(outcomes)) <= ({"usable"} if name in UNBROKEN else {"usable", "broken"})
    assert outcomes[-1].state == "usable"


@each_kind
@pytest.mark.parametrize("name", ENDS)
def test_close(network: Card, name: str, kind: Kind) -> None:
    sweep(lambda: World(network, True), ENDS[name], check_ended, kind)


@each_kind
@pytest.mark.parametrize("name", ENDS)
def test_interrupted_close_goes_on(network: Card, name: str, kind: Kind) -> None:
    """Called again, it frees what it would have freed."""

    def after(world: World, error: BaseException | None) -> str:
        ENDS[name](world)
        assert not {one.kind for one in network.leftovers() if not one.excused} & ENDED[name]
        world.close()
        return "closed"

    sweep(lambda: World(network, True), ENDS[name], after, kind)


@each_kind
@pytest.mark.parametrize("name", ["join", "get_event that waits", "attach", "send elsewhere", "leave"])
def test_short_call(network: Card, name: str, kind: Kind) -> None:
    """At bytecodes: there the flag and the lock meet."""
    call = (CALLS | AS_MEMBER)[name]
    sweep(lambda: World(network, name in AS_MEMBER), call, check, kind, opcodes=True)


# --- calls in the middle of another one, as from a signal's handler ---

OTHER_GID = "ff12:4001:ffff::f04:506"


@pytest.fixture
def world(network: Card) -> Iterator[World]:
    made = World(network, True)
    yield made
    made.close()


def amid(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], object]) -> None:
    """Have `act` called in the middle of the next call of that method of `Native`."""
    whole = getattr(Native, name)

    def half(self: Native, *args: Any, **kwargs: Any) -> object:
        monkeypatch.setattr(Native, name, whole)
        act()
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(Native, name, half)


def test_another_call_of_the_object_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []

    def detach() -> None:
        with pytest.raises(RuntimeError) as caught:
            world.qp.detach_mcast(world.to.gid, world.to.dlid)
        refused.append(str(caught.value))

    amid(monkeypatch, "attach", detach)
    world.qp.attach_mcast(OTHER_GID, world.to.dlid)
    assert refused[0].startswith(
        "detach_mcast: this thread is in the middle of attach_mcast of the same queue"
    )
    world.use()


def test_a_close_comes_after_the_call(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    amid(monkeypatch, "attach", world.qp.close)
    world.qp.attach_mcast(OTHER_GID, world.to.dlid)
    assert world.qp.closed
    assert "queue pair" not in {one.kind for one in world.card.leftovers()}
    world.use_another()


@pytest.mark.parametrize("what", ["id", "channel", "backend"])
def test_destroy_waits_for_a_call_of_the_queue_pair(
    world: World, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A destroy comes after a call of the queue pair.

    The id ends with the queue pair, and what is above it with the id.
    """
    one = getattr(world, what)
    others = 0 if what != "id" else 1
    amid(monkeypatch, "attach", one.close)
    world.qp.attach_mcast(OTHER_GID, world.to.dlid)
    assert one.closed
    kinds = Counter(one.kind for one in world.card.leftovers())
    assert (kinds["queue pair"], kinds["id"], kinds["event channel"]) == (0, others, others)


def test_a_close_of_the_backend_comes_after_a_join(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.card.fail("rdma_join_multicast", E.EIO, times=-1)
    amid(monkeypatch, "check_join", world.backend.close)
    with pytest.raises(McastError) as caught:
        world.id.join_multicast(OTHER)
    assert caught.value.errno == E.EIO
    assert world.id.closed
    assert [one for one in world.card.leftovers() if not one.excused] == []
