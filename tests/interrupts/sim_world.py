"""A simulated fabric to interrupt calls on, those calls, and what is checked afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from mcast import open_backend
from mcast.api import (
    AddressNotAvailable,
    Backend,
    CmEventType,
    CmId,
    Destination,
    InvalidArgument,
    QpState,
    Region,
)
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.backend import SimQueuePair
from mcast.backends.sim.testbed import SimObserver

from .sweep import works

GROUP, OTHER = "239.1.2.3", "239.9.9.9"
SOON = 30.0
"""Seconds, against hangs."""
SHORT = 0.003
"""Seconds of a wait for nothing."""


class World:
    """A fabric with an id on its first port, which is a member of GROUP if `joined`."""

    def __init__(self, make: Callable[..., Fabric], clock: str, joined: bool = False) -> None:
        self.fabric = make(ports=2, clock=clock)
        self.begin(open_fabric(self.fabric), joined)

    def begin(self, backend: Backend, joined: bool) -> None:
        self.backend = backend
        self.channel = self.backend.event_channel()
        self.bare = self.channel.create_id()
        self.id = self.channel.create_id()
        self.id.bind_addr("10.0.0.1")
        self.qp = self.id.create_qp()
        self.opened: list[Backend] = []
        self.regions: list[Region] = []
        if joined:
            self.to = self.join()

    @property
    def is_broken(self) -> bool:
        return self.fabric.clock.guard.broken

    @property
    def depth(self) -> int:
        """Number of receives of the queue pair."""
        assert isinstance(self.qp, SimQueuePair)
        return self.qp.core.depth

    def open_another(self) -> Backend:
        return open_backend("sim-roce" if self.fabric.sa is None else "sim-ib", clock="wall")

    def join(self) -> Destination:
        self.id.join_multicast(GROUP)
        return self.destination()

    def destination(self) -> Destination:
        while event := self.channel.get_event(SOON):
            if event.check().type is CmEventType.MULTICAST_JOIN:
                assert event.ud is not None
                return event.ud.destination
        raise AssertionError("no event")

    def use(self) -> None:
        """The id and its queue pair do what they did before, and so does another id."""
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
        message = self.qp.recv_one(SOON)
        assert message is not None
        assert bytes(message.payload) == b"use"
        self.id.leave_multicast(GROUP)
        assert to.gid not in self.qp.attachments
        assert not self.channel.pending
        gc.collect(0)

    def use_another(self) -> None:
        """Another id of the fabric, on another channel."""
        with self.backend.event_channel() as channel, channel.create_id() as cm_id:
            cm_id.bind_addr("10.0.0.2")
            cm_id.create_qp()
            cm_id.join_multicast(OTHER)
            event = channel.get_event(SOON)
            assert event is not None
            event.check()
            cm_id.leave_multicast(OTHER)

    def close(self) -> None:
        for backend in (self.backend, *self.opened):
            backend.close()
            assert backend.closed
        if not self.fabric.clock.guard.broken:
            assert SimObserver(self.fabric).leftovers() == ()
        self.fabric.close()
        assert self.fabric.qps == ()
        parts = self.fabric.core
        for port in self.fabric.ports:
            assert not port.ids
            assert not port.igmp
            assert not parts.queue_pairs.attached(port)


def give_port(cm_id: CmId) -> None:
    with suppress(InvalidArgument):  # it has one
        cm_id.bind_addr("10.0.0.1")


def read(world: World) -> None:
    with world.qp.recv(timeout=SOON) as batch:
        list(batch)
        len(batch.memory)


def receive_nothing(world: World) -> None:
    assert not world.qp.recv(timeout=SHORT)


def register(world: World) -> None:
    world.regions.append(world.qp.register(bytearray(4096), recv_slot=256))


W = TypeVar("W", bound=World)
Call = Callable[[World], object]
CALLS: dict[str, Call] = {
    "open": lambda w: w.opened.append(w.open_another()),
    "devices": lambda w: w.backend.devices(),
    "create_id": lambda w: w.channel.create_id(),
    "bind": lambda w: w.bare.bind_addr("10.0.0.1"),
    "resolve": lambda w: w.bare.resolve_addr(GROUP, "10.0.0.1"),
    "create_qp": lambda w: w.bare.create_qp(),
    "join": lambda w: w.id.join_multicast(GROUP),
    "get_event": lambda w: w.channel.get_event(SOON),
    "get_no_event": lambda w: w.channel.get_event(SHORT),
    "join_and_get_event": lambda w: w.join(),
    "fileno": lambda w: (w.channel.fileno(), w.qp.fileno()),
}
AS_MEMBER: dict[str, Call] = {
    "attach": lambda w: w.qp.attach_mcast("ff0e::1", 0xC0DE),
    "detach": lambda w: w.qp.detach_mcast(w.to.gid, w.to.dlid),
    "send": lambda w: w.qp.send(w.to, [b"1", b"2"]),
    "send_one": lambda w: w.qp.send_one(w.to, b"1"),
    "recv": read,
    "recv_one": lambda w: w.qp.recv_one(SOON),
    "recv_nothing": receive_nothing,
    "flush": lambda w: w.qp.flush(),
    "modify": lambda w: w.qp.modify(QpState.RESET),
    "register": register,
    "leave": lambda w: w.id.leave_multicast(GROUP),
    "counters": lambda w: w.qp.counters,
}
ENDS: dict[str, Call] = {
    "destroy": lambda w: w.id.destroy(),
    "close_qp": lambda w: w.qp.close(),
    "close_channel": lambda w: w.channel.close(),
    "close": lambda w: w.backend.close(),
    "block": lambda w: w.use_another(),
}
SHORT_CALLS = ("send", "recv", "recv_one", "get_event", "join", "leave", "destroy", "close")


def made(name: str, make: Callable[..., Fabric], clock: str) -> Callable[[], World]:
    return prepared(name, lambda joined: World(make, clock, joined))


def prepared(name: str, new: Callable[[bool], W]) -> Callable[[], W]:
    """Return what makes a world in which the call has something to do."""

    def world() -> W:
        made = new(name in AS_MEMBER or name in ENDS)
        if name in ("recv", "recv_one"):
            made.qp.send(made.to, [b"1", b"2", b"3"])
        if name == "get_event":
            made.id.join_multicast(GROUP)
        if name == "create_qp":
            made.bare.bind_addr("10.0.0.1")
        return made

    return world


def check(world: World, error: BaseException | None) -> str:
    """Use the fabric from another thread than that of the call; close everything."""
    broken = world.is_broken
    assert works(world.use_another) is not broken
    assert works(world.use) is not broken
    if error is not None:
        error.__traceback__ = error.__context__ = None  # it may hold a batch
    gc.collect(0)
    # All are posted: where a finished register lost its region, that of the region
    assert broken or world.qp.counters.recv_free == world.depth
    world.close()
    return "broken" if broken else "usable"


def check_ended(world: World, error: BaseException | None) -> str:
    """Check the world where the id, its queue pair or its channel was to end."""
    broken = world.is_broken
    if not world.backend.closed:
        assert works(world.use_another) is not broken
    world.close()
    return "broken" if broken else "usable"
