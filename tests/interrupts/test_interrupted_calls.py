"""Ctrl-C at every line of each call that may wait: the call is done or not done, and all goes on working."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from ipaddress import IPv4Address
from pathlib import Path
from typing import Protocol

import pytest

from mcast import Endpoint, Lost, Membership, Rejoined, open_backend, open_endpoint
from mcast.api import (
    AlreadyJoined,
    Backend,
    CmEventType,
    CmId,
    Destination,
    DeviceRegion,
    EventChannel,
    InvalidArgument,
    McastError,
    Message,
    PortEvent,
    QpError,
    QpState,
    QueuePair,
    Region,
    Testbed,
    TimedOut,
    open_at,
)
from mcast.backends.sim import INFINIBAND, ROCE
from mcast.backends.sim.backend import SimBackend
from mcast.backends.sim.testbed import SimTestbed
from mcast.endpoint.blocking import LOOK_EVERY
from mcast.wire.addresses import Gid

from ..card.card import Card
from ..card.provider import CardBackend
from ..interleave import BOUND, EVERY, interrupted_everywhere, nothing_left
from ..networks import SimNetwork
from ..waiting import until

GROUP = "239.1.2.3"
SOON = 60.0
"""Seconds of the fabric's clock, which is virtual; where it is not, against hangs alone."""
DEPTH, SLOTS, SLOT = 512, 16, 256
"""How many receives a queue pair has; and of how many, and how large, those in a program's own memory are."""
_SIMULATED = {provider.name: provider for provider in (ROCE, INFINIBAND)}


@pytest.fixture(params=[ROCE, INFINIBAND], ids=lambda provider: provider.name)
def site(request: pytest.FixtureRequest) -> Iterator[Testbed]:
    gc.collect()
    with request.param.testbed() as made, nothing_left():
        yield made
        made.backend.close()
        assert made.observer.leftovers() == ()


class Place(Protocol):
    """Of a test bed what these tests use."""

    backend: Backend
    ports: tuple[IPv4Address, ...]

    @property
    def observer(self) -> Leavings: ...


class Leavings(Protocol):
    def leftovers(self) -> tuple[str, ...]: ...
    def port_memberships(self, port: IPv4Address) -> frozenset[Gid]: ...


class CardPlace:
    """Devices on the card, with the provider that is meant for real ones."""

    def __init__(self, card: Card, layer: str) -> None:
        card.network(layer, ports=1)
        self._card = card
        self.backend: Backend = CardBackend(card)
        self.ports: tuple[IPv4Address, ...] = (IPv4Address("10.0.0.1"),)
        self.observer = self

    def leftovers(self) -> tuple[str, ...]:
        return tuple(f"{one.kind} {one.number}" for one in self._card.leftovers())

    def port_memberships(self, port: IPv4Address) -> frozenset[Gid]:
        return frozenset(Gid(bytes(16)) for one in self._card.leftovers() if one.kind == "membership")


@pytest.fixture(params=["sim-roce", "sim-ib", "card-roce", "card-infiniband"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """For the contract's own calls: each provider but the served fabric, whose calls are not atomic."""
    gc.collect()
    if request.param in _SIMULATED:
        with _SIMULATED[request.param].testbed() as made, nothing_left():
            yield made
            made.backend.close()
            assert made.observer.leftovers() == ()
        return
    on_card = CardPlace(request.getfixturevalue("card"), request.param.removeprefix("card-"))
    yield on_card
    on_card.backend.close()
    assert on_card.leftovers() == ()


def memberships(site: Place) -> frozenset[Gid]:
    """Of the first port, once what is on its way has come."""
    with site.backend.event_channel() as idle:
        idle.get_event(0.01)
    return site.observer.port_memberships(site.ports[0])


class Pair:
    """Two endpoints; `here` is interrupted."""

    def __init__(self, site: Testbed) -> None:
        self.site = site
        self.here = open_endpoint(site.backend, site.ports[0])
        self.there = open_endpoint(site.backend, site.ports[1])
        self.to_here = self.from_here = self.there.join(GROUP)

    def memberships(self) -> int:
        return len(memberships(self.site))

    def check_usable(self, member: Membership) -> None:
        """Messages go both ways, from another thread too: no lock is held. Nothing is leased."""

        def use() -> None:
            try:
                member.send(b"there")
                found.append(last(self.from_here))
                self.to_here.send(b"back")
                found.append(last(member))
                while self.here.recv(0.001):
                    pass
            except BaseException as error:
                found.append(error)

        def last(group: Membership) -> bytes:
            payload = b""
            while message := group.recv(0.001):
                payload = bytes(message.payload)
            return payload

        found: list[object] = []
        thread = threading.Thread(target=use, daemon=True)
        thread.start()
        thread.join(BOUND)
        assert found == [b"there", b"back"]
        gc.collect(0)
        stats = self.here.stats()
        assert stats.receive_free == stats.receive_depth
        assert not self.here._session.questions.prober.quests


@pytest.fixture
def pair(site: Testbed) -> Iterator[Pair]:
    made = Pair(site)
    yield made
    made.here.close()
    made.there.close()


@pytest.fixture
def member(pair: Pair) -> Membership:
    return pair.here.join(GROUP)


# --- endpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["join", "sender"])
def test_a_join_is_done_or_leaves_nothing(pair: Pair, way: str) -> None:
    join = getattr(pair.here, way)

    def check(returned: bool) -> None:
        groups = pair.here.groups
        assert len(groups) == pair.memberships() <= 1 or way == "sender"
        assert groups or not returned
        for group in groups:
            group.leave()
        assert pair.memberships() == 0
        with pair.here.join(GROUP, timeout=SOON) as group:
            pair.check_usable(group)

    assert interrupted_everywhere(lambda: join(GROUP, timeout=SOON), check) > 100


def test_a_leave_is_done_or_can_be_done_again(pair: Pair) -> None:

    def check(returned: bool) -> None:
        for group in pair.here.groups:
            assert not returned
            group.leave()
        assert pair.memberships() == 0
        pair.check_usable(pair.here.join(GROUP, timeout=SOON))

    check(False)
    interrupted_everywhere(lambda: pair.here.groups[0].leave(), check)


def test_a_block_with_a_membership_leaves_none(pair: Pair) -> None:

    def block() -> None:
        with pair.here.join(GROUP, timeout=SOON) as group:
            group.send(b"x")

    def check(returned: bool) -> None:
        assert pair.here.groups == ()
        assert pair.memberships() == 0

    interrupted_everywhere(block, check)
    pair.check_usable(pair.here.join(GROUP))


Call = Callable[[Pair, Membership], object]
BATCH = [b"1", b"2", b"3"]


def recv_later(pair: Pair, member: Membership) -> object:
    return pair.here.recv(SOON)


def batches(pair: Pair, member: Membership) -> object:
    return [len(batch) for batch in pair.here.batches(timeout=0.001)]


def ready(pair: Pair, member: Membership) -> object:
    with suppress(TimedOut):
        return member.ready(timeout=0.03)
    return None


def reply(pair: Pair, member: Membership) -> object:
    there, at = pair.there, member.destination.sgid_index
    heard = Message(
        memoryview(b""), there.port.gids[at], there.qp_num, member.mgid, None, False, there.port.lid
    )
    member.reply(heard, b"x", timeout=SOON)
    return None


CALLS: dict[str, Call] = {
    "reply": reply,
    "send": lambda pair, member: member.send(b"x", timeout=SOON),
    "send_batch": lambda pair, member: member.send_batch(BATCH, timeout=SOON),
    "recv": lambda pair, member: pair.here.recv(SOON),
    "recv_batch": lambda pair, member: pair.here.recv_batch(timeout=SOON).release(),
    "batches": batches,
    "recv_of_a_group": lambda pair, member: member.recv(SOON),
    "recv_batch_of_a_group": lambda pair, member: member.recv_batch(timeout=SOON).release(),
    "ready": ready,
    "probe_loopback": lambda pair, member: member.probe_loopback(0.01),
    "next_event": lambda pair, member: pair.here.next_event(0.001),
    "stats": lambda pair, member: pair.here.stats(),
}


@pytest.mark.parametrize("waiting", [True, False], ids=["with_messages", "without"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_an_endpoint(pair: Pair, member: Membership, name: str, waiting: bool) -> None:
    def call() -> object:
        return CALLS[name](pair, member)

    def check(returned: bool) -> None:
        pair.check_usable(member)
        if waiting:
            pair.to_here.send_batch(BATCH)

    check(False)
    interrupted_everywhere(call, check)


def test_a_message_is_received_once_or_is_still_there(pair: Pair, member: Membership) -> None:
    found: list[bytes] = []

    def call() -> None:
        message = pair.here.recv(SOON)
        assert message is not None
        found.append(bytes(message.payload))

    def check(returned: bool) -> None:
        while (message := pair.here.recv(0.001)) is not None:
            assert not returned
            found.append(bytes(message.payload))
        assert len(found) <= 1  # taken by a receive that was interrupted: as with a socket, it is lost
        found.clear()
        pair.to_here.send(b"x")

    check(False)
    interrupted_everywhere(call, check)


def test_close_is_done_or_can_be_done_again(site: Testbed) -> None:
    opened: list[Endpoint] = []

    def check(returned: bool) -> None:
        for endpoint in opened:
            assert endpoint.closed or not returned
            assert endpoint.closed == (not endpoint.groups) == (site.observer.leftovers() == ())
            endpoint.close()
        assert site.observer.leftovers() == ()
        endpoint = open_endpoint(site.backend, site.ports[0])
        endpoint.join(GROUP)
        opened[:] = [endpoint]

    check(False)
    with nothing_left():
        interrupted_everywhere(lambda: opened[0].close(), check)
        interrupted_everywhere(lambda: opened[0].close(), check, "endpoint/", every=1)
    opened[0].close()


def test_an_endpoint_is_opened_or_leaves_nothing(site: Testbed) -> None:
    opened: list[Endpoint] = []

    def call() -> None:
        opened.append(open_endpoint(site.backend, site.ports[0]))

    def check(returned: bool) -> None:
        assert len(site.observer.leftovers()) == len(opened)
        while opened:
            opened.pop().close()

    interrupted_everywhere(call, check)


def test_an_endpoint_with_a_backend_of_its_own_leaves_nothing() -> None:
    def call() -> None:
        with open_endpoint("sim", "10.0.0.1", options={"clock": "wall"}) as endpoint, endpoint.join(GROUP):
            pass

    def check(returned: bool) -> None:
        assert threading.active_count() == before

    before = threading.active_count()
    with nothing_left():
        interrupted_everywhere(call, check)


# --- the contract --------------------------------------------------------------------------------


class Port:
    """A channel, and an id with a QP on the site's first port."""

    def __init__(self, site: Place) -> None:
        self.site, self.channel = site, site.backend.event_channel()
        self.id = self.new_id()
        self.qp = self.id.create_qp()

    def new_id(self) -> CmId:
        cm_id = self.channel.create_id()
        cm_id.bind_addr(self.site.ports[0])
        return cm_id

    def join(self) -> Destination:
        self.id.join_multicast(GROUP)
        event = self.channel.get_event(SOON)
        assert event is not None
        assert event.check().ud is not None
        return event.ud.destination  # type: ignore[union-attr]

    def leave(self) -> None:
        with suppress(McastError):
            self.id.leave_multicast(GROUP)

    def check_usable(self) -> None:
        """Joined anew, messages come back, nothing is leased; left, nothing remains."""
        self.leave()
        to = self.join()
        while self.qp.recv(timeout=0):
            pass
        self.qp.send(to, [b"use"])
        message = self.qp.recv_one(SOON)
        assert message is not None
        assert bytes(message.payload) == b"use"
        self.leave()
        until(lambda: not memberships(self.site))
        assert dict(self.qp.attachments) == {}
        gc.collect(0)
        assert self.qp.counters.recv_free == DEPTH
        assert not self.channel.pending


CHANGES = "backends/"
"""Where a provider has a change made, and notes that: each of these lines is tried in a short run, too."""


def interrupted_in_changes(call: Callable[[], object], check: Callable[[bool], None]) -> None:
    interrupted_everywhere(call, check)
    interrupted_everywhere(call, check, CHANGES, every=1)


@pytest.fixture
def port(place: Place) -> Iterator[Port]:
    made = Port(place)
    yield made
    made.channel.close()


def test_a_join_of_an_id_is_done_or_not_done(port: Port) -> None:
    def check(returned: bool) -> None:
        with pytest.raises(AlreadyJoined) if returned else suppress(AlreadyJoined):
            port.id.join_multicast(GROUP)
        event = port.channel.get_event(SOON)
        assert event is not None
        event.check()
        port.check_usable()

    interrupted_in_changes(lambda: port.id.join_multicast(GROUP), check)


def test_a_leave_of_an_id_is_done_or_not_done(port: Port) -> None:
    def check(returned: bool) -> None:
        if returned:
            until(lambda: not memberships(port.site))
        port.check_usable()
        port.join()

    port.join()
    interrupted_in_changes(lambda: port.id.leave_multicast(GROUP), check)


@pytest.mark.parametrize("way", ["bind_addr", "resolve_addr"])
def test_an_id_is_given_its_port_or_not(port: Port, way: str) -> None:
    def give(cm_id: CmId) -> None:
        if way == "bind_addr":
            cm_id.bind_addr(port.site.ports[0])
        else:
            cm_id.resolve_addr(GROUP, port.site.ports[0])

    def check(returned: bool) -> None:
        cm_id = made.pop()
        with suppress(InvalidArgument):  # the port was given
            give(cm_id)
        if way == "resolve_addr":
            event = port.channel.get_event(SOON)
            assert event is not None
            assert (event.type, event.id) == (CmEventType.ADDR_RESOLVED, cm_id)
        assert cm_id.device is not None
        cm_id.destroy()
        made.append(port.channel.create_id())

    made = [port.channel.create_id()]
    interrupted_in_changes(lambda: give(made[0]), check)
    port.check_usable()


def test_a_state_is_changed_or_not(port: Port) -> None:
    to = port.join()

    def check(returned: bool) -> None:
        sends = port.qp.state is QpState.RTS
        assert not (sends and returned)
        with nullcontext() if sends else pytest.raises(InvalidArgument):
            port.qp.send(to, [b"x"])
        port.qp.reset()
        port.qp.send(to, [b"x"])

    port.leave()  # nothing comes back
    port.qp.send(to, [b"x"])
    interrupted_in_changes(lambda: port.qp.modify(QpState.RESET), check)
    port.check_usable()


def test_reading_an_event_attaches_or_not(port: Port) -> None:
    def check(returned: bool) -> None:
        assert port.qp.attachments or not returned
        if not port.qp.attachments:
            assert port.channel.get_event(SOON) is not None, "it was taken, and nobody has it"
        port.check_usable()
        port.id.join_multicast(GROUP)

    port.id.join_multicast(GROUP)
    interrupted_everywhere(lambda: port.channel.get_event(SOON), check)


def test_an_event_of_an_endpoint_is_fetched_or_is_still_there(pair: Pair) -> None:
    port = pair.site.ports[0]
    assert isinstance(pair.site, SimTestbed)
    fabric = pair.site.fabric
    found: list[object] = []

    def check(returned: bool) -> None:
        rest = pair.here.next_event(0)
        # Ctrl-C may come between the return and this test's note of it.
        assert bool(found) >= returned
        assert (rest is None) == bool(found)
        found.clear()
        with fabric.clock:
            fabric.parts.queue_pairs.tell(fabric.port_of(port), PortEvent.GID_CHANGE)

    found.append(None)
    check(True)
    interrupted_everywhere(lambda: found.append(pair.here.next_event(SOON)), check)


LOSSES: dict[str, Callable[[SimNetwork, Endpoint], None]] = {
    "an event": lambda network, endpoint: network.fail_over(0),
    "an error of the queue pair": lambda network, endpoint: network.fail_qp(endpoint.qp_num),
}


@pytest.mark.parametrize("name", ["send", "recv"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_a_call_meets_is_told_once_and_mended(
    pair: Pair, member: Membership, loss: str, name: str
) -> None:
    """More of the endpoint's lines are tried than else: there a loss may be known in part."""
    assert isinstance(pair.site, SimTestbed)
    network, here = SimNetwork(pair.site.fabric), pair.here

    def call() -> None:
        here._unlooked = LOOK_EVERY  # so that a call that finds a message asks for events, too
        with suppress(QpError):
            CALLS[name](pair, member)

    def check(returned: bool) -> None:
        told = [here.next_event(SOON) for _ in range(3)]
        assert [type(event) for event in told] == [Lost, Rejoined, type(None)]
        pair.check_usable(member)
        pair.to_here.send_batch(BATCH)
        LOSSES[loss](network, here)

    pair.check_usable(member)
    LOSSES[loss](network, here)
    interrupted_everywhere(call, check, "endpoint/", every=min(EVERY, 3))


def test_waiting_for_an_event_in_vain(port: Port) -> None:
    interrupted_everywhere(lambda: port.channel.get_event(0.01), lambda returned: port.check_usable())


@pytest.mark.parametrize("name", ["send", "send_one", "recv", "recv_one", "reset", "counters"])
def test_a_call_of_a_queue_pair(port: Port, name: str) -> None:
    to = port.join()
    calls: dict[str, Callable[[], object]] = {
        "send": lambda: port.qp.send(to, BATCH, timeout=SOON),
        "send_one": lambda: port.qp.send_one(to, b"x", timeout=SOON),
        "recv": lambda: port.qp.recv(timeout=SOON).release(),
        "recv_one": lambda: port.qp.recv_one(timeout=SOON),
        "reset": lambda: port.qp.reset(),
        "counters": lambda: port.qp.counters,
    }

    def check(returned: bool) -> None:
        if name == "reset":
            port.qp.reset()
        port.check_usable()
        if name.startswith("recv"):
            port.qp.send(port.join(), BATCH)

    check(False)
    interrupted_everywhere(calls[name], check)


def test_what_is_read_of_a_batch_ends_with_its_block(site: Testbed) -> None:
    """No traceback refers to what keeps the lease, so that the block ends in Ctrl-C and in nothing else."""
    port = Port(site)

    def call() -> None:
        with port.qp.recv(timeout=SOON) as batch:
            list(batch)
            batch[0]
            len(batch.memory)

    def check(returned: bool) -> None:
        port.check_usable()
        port.qp.send(port.join(), [b"x"])

    check(False)
    for part in ("contract/batch.py", "backends/sim/lease.py"):
        assert interrupted_everywhere(call, check, part, every=1) > 10
    port.channel.close()


def test_attaching_is_done_or_not_done(port: Port) -> None:
    to = port.join()

    def check(returned: bool) -> None:
        attached = bool(port.qp.attachments)
        assert attached == attaching or not returned
        with nullcontext() if attached else pytest.raises(InvalidArgument):  # the device knows the same
            port.qp.detach_mcast(to.gid, to.dlid)
        if not attaching:
            port.qp.attach_mcast(to.gid, to.dlid)
        dict(port.qp.attachments)  # known here, where a provider keeps what it was told

    attaching = False
    interrupted_in_changes(lambda: port.qp.detach_mcast(to.gid, to.dlid), check)
    port.qp.detach_mcast(to.gid, to.dlid)
    attaching = True
    interrupted_in_changes(lambda: port.qp.attach_mcast(to.gid, to.dlid), check)
    port.check_usable()


@pytest.mark.parametrize("of_a_device", [False, True], ids=["memory", "device memory"])
def test_memory_to_receive_into_is_used_or_not(port: Port, of_a_device: bool) -> None:
    """From when it is registered until it is closed."""
    opened: list[Region | DeviceRegion] = []

    def register() -> None:
        if of_a_device:
            opened.append(port.qp.register_dmabuf(memory, SLOTS * SLOT, recv_slot=SLOT))
        else:
            opened.append(port.qp.register(bytearray(SLOTS * SLOT), recv_slot=SLOT))

    def check_registered(returned: bool) -> None:
        assert opened or not returned
        assert port.qp.counters.recv_free == (SLOTS if opened else DEPTH)
        while opened:
            opened.pop().close()

    def check_closed(returned: bool) -> None:
        (region,) = opened
        assert region.closed or not returned
        assert port.qp.counters.recv_free == (DEPTH if region.closed else SLOTS)
        opened.pop().close()
        register()

    memory = os.memfd_create("device")
    try:
        os.ftruncate(memory, SLOTS * SLOT)
        interrupted_in_changes(register, check_registered)
        register()
        interrupted_in_changes(lambda: opened[0].close(), check_closed)
        opened[0].close()
        port.check_usable()
    finally:
        os.close(memory)


def test_ids_and_queue_pairs_are_made_or_not_and_destroyed(place: Place) -> None:
    channels: list[EventChannel] = []
    queue_pairs: list[QueuePair] = []
    regions: list[Region] = []

    def call() -> None:
        with place.backend.event_channel() as channel:
            channels.append(channel)
            with channel.create_id() as cm_id:
                cm_id.resolve_addr(GROUP, place.ports[0])
                event = channel.get_event(SOON)
                assert event is not None
                assert event.type is CmEventType.ADDR_RESOLVED
                with cm_id.create_qp() as qp:
                    queue_pairs.append(qp)
                    qp.fileno()
                    channel.fileno()
                    cm_id.join_multicast(GROUP)
                    qp.recv(timeout=0)
                    with qp.register(bytearray(4096)) as region:
                        regions.append(region)

    def check(returned: bool) -> None:
        assert all(channel.closed for channel in channels)
        assert all(qp.closed for qp in queue_pairs)
        assert all(region.closed for region in regions)
        assert place.observer.leftovers() == ()
        channels.clear()
        queue_pairs.clear()
        regions.clear()

    call()  # what is made once, whoever asks or waits, is there
    memberships(place)
    with nothing_left():
        interrupted_everywhere(call, check)


Closeable = Backend | EventChannel | CmId | QueuePair | Region


@pytest.mark.parametrize("what", ["backend", "channel", "id", "queue pair", "region"])
@pytest.mark.parametrize("layer", ["roce", "infiniband"])
def test_what_is_closed_is_closed_or_can_be_closed_again(card: Card, layer: str, what: str) -> None:
    card.network(layer, ports=1)
    opened: list[dict[str, Closeable]] = []

    def open_another() -> None:
        backend: Backend = CardBackend(card)
        channel = backend.event_channel()
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        qp = cm_id.create_qp()
        region = qp.register(bytearray(4096))
        cm_id.join_multicast(GROUP)
        opened.append(
            {"backend": backend, "channel": channel, "id": cm_id, "queue pair": qp, "region": region}
        )

    def check(returned: bool) -> None:
        made = opened.pop()
        closed, left = made[what].closed, card.leftovers()
        assert closed or not returned
        made[what].close()
        assert not closed or card.leftovers() == left
        made["backend"].close()
        assert card.leftovers() == ()
        open_another()

    open_another()
    interrupted_everywhere(lambda: opened[0][what].close(), check)
    opened[0]["backend"].close()


@pytest.mark.parametrize("bound", [False, True], ids=["", "at an address"])
def test_a_backend_is_opened_or_leaves_nothing(bound: bool) -> None:
    opened: list[Backend] = []

    def call() -> None:
        if bound:
            opened.append(open_at("sim", None, {"clock": "wall"}))
        else:
            opened.append(open_backend("sim", clock="wall"))

    def close_all() -> None:
        while opened:
            opened.pop().close()

    def check(returned: bool) -> None:
        close_all()
        until(lambda: open_now() == before)

    def open_now() -> tuple[int, int]:
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    call()
    close_all()
    before = open_now()  # with what is made once
    interrupted_everywhere(call, check)


def test_a_backend_that_is_closed_has_ended_its_fabric() -> None:
    opened: list[SimBackend] = []

    def check(returned: bool) -> None:
        for backend in opened:
            assert backend.closed or not returned
            assert backend.closed == backend.fabric.clock._stopped.is_set()  # type: ignore[attr-defined]
            backend.close()
        made = open_backend("sim", clock="wall")
        assert isinstance(made, SimBackend)
        opened[:] = [made]

    check(False)
    interrupted_everywhere(lambda: opened[0].close(), check, "backends/sim/", every=1)
    opened[0].close()


def test_the_look_at_the_devices_leaves_nothing_open(card: Card) -> None:
    card.ethernet(2)
    with CardBackend(card) as backend:

        def check(returned: bool) -> None:
            assert card.leftovers() == ()

        assert interrupted_everywhere(backend.devices, check) > 10
