"""Two threads and one object: wherever a call meets another, both end as if one had come after the other."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mcast
from mcast.api import Batch, CmEventType, Destination, McastError, QpInit, QpState
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.backend import SimBackend, SimQueuePair
from mcast.conformance.helpers import BOUND

from ..interleave import EVERY
from ..waiting import descriptors, until

GROUP = "239.1.1.1"
OURS = str(Path(mcast.__file__).parent)


class WatchedLock(type(threading.RLock())):  # type: ignore[misc]  # the lock is made by a function
    """Tells `on_blocked` when a thread has to wait for it."""

    on_blocked: Callable[[], None] = staticmethod(lambda: None)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if super().acquire(False):
            return True
        self.on_blocked()
        return bool(super().acquire(blocking, timeout))

    __enter__ = acquire


class World:
    """A fabric with a member that has a message in hand, one to read, and an id without a QP."""

    def __init__(self, make: Callable[..., Fabric]) -> None:
        self.fabric = make(ports=2)
        clock = self.fabric.clock
        clock.guard.lock = self.mutex = WatchedLock()
        backend = open_fabric(self.fabric)
        assert isinstance(backend, SimBackend)
        self.backend = backend
        self.channel = self.backend.event_channel()
        self.id, self.bare = self.channel.create_id(), self.channel.create_id()
        for one in (self.id, self.bare):
            one.bind_addr("10.0.0.1")
        self.qp = self.id.create_qp(QpInit(max_recv_wr=8))
        self.id.join_multicast(GROUP)
        self.to = self.joined()
        self.region = self.qp.register(bytearray(8 * 2048), 2048)
        self.qp.send(self.to, [b"in hand", b"to read"])
        self.batch: Batch = self.qp.recv(1, 0)

    def joined(self) -> Destination:
        event = self.channel.get_event(BOUND)
        assert event is not None
        assert event.type is CmEventType.MULTICAST_JOIN
        assert event.ud is not None
        return event.ud.destination

    def leftovers(self) -> list[object]:
        """Return the objects left when the backend is closed."""
        self.batch.release()
        self.backend.close()
        self.fabric.clock.run_until_idle()
        found: list[object] = [qp.number for qp in self.fabric.qps]
        for port in self.fabric.ports:
            found += [*port.ids, *self.fabric.core.queue_pairs.attached(port), *port.igmp]
        if (subnet := self.fabric.core.subnet) is not None:
            found += [group for client in subnet.clients.values() for group in client.memberships]
        assert isinstance(self.qp, SimQueuePair)
        core = self.qp.core
        if core.free + sum(stop - start for _, start, stop in core.lease(8)) > core.depth:
            found.append("more receives than were posted")
        return found


CALLS: dict[str, Callable[[World], object]] = {
    "devices": lambda w: w.backend.devices(),
    "port_counters": lambda w: w.backend.port_counters(w.fabric.ports[0].name),
    "groups": lambda w: w.backend.groups(),
    "event_channel": lambda w: w.backend.event_channel(),
    "backend.close": lambda w: w.backend.close(),
    "create_id": lambda w: w.channel.create_id(),
    "get_event": lambda w: w.channel.get_event(0),
    "channel.fileno": lambda w: w.channel.fileno(),
    "channel.close": lambda w: w.channel.close(),
    "bind_addr": lambda w: w.bare.bind_addr("10.0.0.1"),
    "create_qp": lambda w: w.bare.create_qp(),
    "join": lambda w: w.bare.join_multicast(GROUP),
    "leave": lambda w: w.id.leave_multicast(GROUP),
    "bare.destroy": lambda w: w.bare.destroy(),
    "destroy": lambda w: w.id.destroy(),
    "send": lambda w: w.qp.send(w.to, [b"message"]),
    "send_one": lambda w: w.qp.send_one(w.to, b"message"),
    "recv": lambda w: w.qp.recv(1, 0),
    "recv_one": lambda w: w.qp.recv_one(0),
    "qp.fileno": lambda w: w.qp.fileno(),
    "attach": lambda w: w.qp.attach_mcast("ff0e::1", 0xC0DE),
    "detach": lambda w: w.qp.detach_mcast(w.to.gid, w.to.dlid),
    "modify": lambda w: w.qp.modify(QpState.RESET),
    "register": lambda w: w.qp.register(bytearray(2048), 2048),
    "region.close": lambda w: w.region.close(),
    "release": lambda w: w.batch.release(),
    "qp.close": lambda w: w.qp.close(),
}
CHANGES = [
    "create_qp",
    "release",
    "region.close",
    "qp.close",
    "destroy",
    "bare.destroy",
    "channel.close",
    "backend.close",
]
"""Calls of one thread while the other is inside of a call."""


def outcome(world: World, name: str) -> str:
    """Return the kind of the call's answer, or its error."""
    try:
        answer: Any = CALLS[name](world)
    except McastError as error:
        return f"{type(error).__name__} {error.errno}"
    if isinstance(answer, Batch):
        answer.release()
    return type(answer).__name__


def in_the_midst(world: World, name: str, other: str, place: int) -> tuple[str, str] | None:
    """Both outcomes, where another thread makes its call at a line of the first; None: it has not so many."""
    there, moved = [""], threading.Event()
    world.mutex.on_blocked = moved.set

    def act() -> None:
        there[0] = outcome(world, other)
        moved.set()

    thread, lines = threading.Thread(target=act), 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        lines += event == "line"
        if event == "line" and lines == place:
            thread.start()
            moved.wait(1.0)  # it is done, or waits for a lock that this thread has
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        here = outcome(world, name)
    finally:
        sys.settrace(before)
    if lines < place:
        return None
    thread.join(BOUND)
    assert not thread.is_alive()
    return here, there[0]


def in_turn(make: Callable[..., Fabric], first: str, second: str) -> tuple[str, str]:
    world = World(make)
    outcomes = outcome(world, first), outcome(world, second)
    assert not world.leftovers()
    return outcomes


@pytest.mark.parametrize("other", CHANGES)
@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_concurrent_calls_are_serializable(make: Callable[..., Fabric], other: str) -> None:
    """Calls that meet end as if one came after the other."""
    before, wrong = descriptors(), []
    for name in CALLS:
        allowed = {in_turn(make, name, other), in_turn(make, other, name)[::-1]}
        for place in itertools.count(1, EVERY):
            world = World(make)
            met = in_the_midst(world, name, other, place)
            left = world.leftovers()
            if met is None:
                break
            if met not in allowed or left:
                wrong.append((name, place, met, left))
    assert not wrong
    until(lambda: descriptors() <= before)


def test_release_needs_no_lock_of_the_fabric() -> None:
    """A handler may release a batch amid a call; the queue pair's next call posts the receives."""
    world = World(Fabric.roce)
    batch = world.qp.recv(1, BOUND)
    releasing = threading.Thread(target=batch.release)
    with world.mutex:
        releasing.start()
        releasing.join(BOUND)
        assert not releasing.is_alive()
    with pytest.raises(ValueError, match="released"):
        bytes(batch.memory)
    assert world.qp.counters.recv_free == 7
    assert world.leftovers() == []
