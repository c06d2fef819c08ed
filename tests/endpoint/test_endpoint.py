"""The endpoint, simulated and on a card: joins, sends, receives, loopback, limits, statistics, leaves."""

from __future__ import annotations

import errno as E
import itertools
import logging
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import FrozenInstanceError
from math import nan
from mmap import mmap
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

import mcast
from mcast import Endpoint, LoopbackPolicy, Lost, Membership, ReceiveQueueLow, Rejoined, open_endpoint
from mcast.api import (
    AlreadyJoined,
    Batch,
    Closed,
    HeaderBodyBatch,
    LinkLayer,
    McastError,
    Message,
    MessageTooLarge,
    NotSupported,
    OutOfResources,
    QpError,
    QpState,
    TimedOut,
    UnknownBackend,
)
from mcast.backends.sim import Fabric, Limits, open_fabric
from mcast.backends.sim.faults import Drop, Messages, Refuse, Requests
from mcast.backends.sim.testbed import SimObserver
from mcast.backends.sim.trace.pcapng import packets_of
from mcast.endpoint.blocking import POLL_INTERVAL_CALLS
from mcast.endpoint.receive_buffer import ReceiveBuffer
from mcast.endpoint.stats import EndpointStats
from mcast.endpoint.waiting import DEFAULT_BATCH
from mcast.pcapng.dissect import SkipPacket, datagram
from mcast.pcapng.reader import Frame
from mcast.wire.addresses import Gid
from mcast.wire.mcmember import SaMethod, SaStatus
from mcast.wire.probe import PROBE_SIZE

from ..card.card import Blocking
from ..networks import KINDS, Network, SimNetwork, network_of

GROUP, OTHER = "239.1.2.3", "239.4.5.6"
BOUND = 30.0
"""Seconds; the longest that anything may take, never a delay."""
Make = Callable[..., Fabric]


@pytest.fixture(params=[Fabric.roce, Fabric.infiniband], ids=["roce", "infiniband"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes a fabric of each kind."""
    found: Make = request.param
    return found


class Net:
    """A network, and endpoints on its ports; nothing may be left of them at the end."""

    def __init__(self, network: Network) -> None:
        self.network, self.backend = network, network.open()
        self.opened: list[Endpoint] = []

    def open(self, number: int, **options: Any) -> Endpoint:
        endpoint = open_endpoint(self.backend, f"10.0.0.{number + 1}", **options)
        self.opened.append(endpoint)
        return endpoint

    def leftovers(self) -> tuple[str, ...]:
        return self.network.leftovers()

    def close(self) -> None:
        for endpoint in self.opened:
            endpoint.close()
        assert self.leftovers() == ()
        self.backend.close()
        self.network.close()


class SimNet(Net):
    """For what a card cannot show: tables of switches, an SA that refuses, lost messages, virtual time."""

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(SimNetwork(fabric))
        self.fabric = fabric


@pytest.fixture
def sim(make: Make) -> Iterator[SimNet]:
    net = SimNet(make())
    yield net
    net.close()


@pytest.fixture(params=KINDS)
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    """A network of each kind, simulated, and of cards made of memory."""
    net = Net(network_of(request))
    yield net
    net.close()


@pytest.fixture(params=KINDS)
def nets(request: pytest.FixtureRequest) -> Callable[..., Net]:
    """Makes a network of each kind: options of a fabric, and `fields` of a card's devices."""
    return lambda fields, **options: Net(network_of(request, fields, **options))


def payloads(batch: Batch) -> list[bytes]:
    return [bytes(message.payload) for message in batch]


def texts(member: Membership, count: int) -> list[bytes]:
    """The payloads of the next messages of a group."""
    messages = [member.recv(timeout=1) for _ in range(count)]
    return [bytes(message.payload) for message in messages if message is not None]


def drain(endpoint: Endpoint) -> list[bytes]:
    """All that has come."""
    return [payload for batch in endpoint.batches(timeout=0.01) for payload in payloads(batch)]


# --- the everyday path ---------------------------------------------------------------------------


def test_a_message_goes_to_every_member(net: Net) -> None:
    sender, *receivers = (net.open(number) for number in range(3))
    groups = [receiver.join(GROUP) for receiver in receivers]
    with sender.sender(GROUP) as group:
        group.send(b"hello", imm=7)
        for member in groups:
            message = member.recv(timeout=1)
            assert message is not None
            assert (bytes(message.payload), message.imm, message.from_self) == (b"hello", 7, False)
            assert message.group == group.mgid
            assert message.src_qp == sender.qp_num


def test_join_returns_joined_and_attached(sim: SimNet) -> None:
    endpoint = sim.open(1)
    group = endpoint.join(GROUP)
    assert group.joined
    assert sim.fabric.core.queue_pairs.attached(sim.fabric.ports[1])[group.mgid]
    assert sim.backend.devices()[1].ports[0].addresses[0] in SimObserver(sim.fabric).group_ports(group.mgid)
    assert endpoint.groups == (group,)
    assert str(group.group) == GROUP
    assert group.mlid == group.destination.dlid
    assert bool(group.mlid) is (sim.fabric.sa is not None)


def test_a_sender_cannot_receive_and_hears_nothing(net: Net) -> None:
    sender = net.open(0).sender(GROUP)
    assert not hasattr(sender, "recv")
    assert not hasattr(sender, "__iter__")
    member = net.open(1).join(GROUP)
    member.send(b"not for senders")
    assert net.opened[0].recv(timeout=0.01) is None


def test_several_groups_on_one_endpoint_say_which(net: Net) -> None:
    sender, receiver = net.open(0), net.open(1)
    one, two = receiver.join(GROUP), receiver.join(OTHER)
    to_one, to_two = sender.sender(GROUP), sender.sender(OTHER)
    for index in range(3):
        to_one.send(b"one %d" % index)
        to_two.send(b"two %d" % index)
    with receiver.recv_batch(timeout=1) as batch:
        groups = [message.group for message in batch]
        assert list(batch.groups) == groups
    assert groups == [one.mgid, two.mgid] * 3
    to_one.send(b"last")
    with receiver.recv_batch(timeout=1) as batch:
        assert len(batch) == 1
    counted = [(group.stats().received, group.stats().received_bytes) for group in (one, two)]
    assert counted == [(4, 19), (3, 15)]
    assert repr(receiver).endswith(f": {one.group}, {two.group}>")


def test_a_failed_open_has_a_repr() -> None:
    """pytest shows the arguments of each frame of a traceback, `self` of the failed `__init__` too."""
    with pytest.raises(ValueError, match="no port has") as caught:
        mcast.open_endpoint("sim", "10.0.9.9")
    frames = [entry.frame.f_locals.get("self") for entry in caught.traceback]
    assert "<Endpoint: not open>" in [repr(one) for one in frames if isinstance(one, mcast.Endpoint)]


def test_membership_keeps_messages_for_others(net: Net) -> None:
    """A membership receives its own and keeps the rest for the others."""
    sender, receiver = net.open(0), net.open(1)
    one, two = receiver.join(GROUP), receiver.join(OTHER)
    to_one, to_two = sender.sender(GROUP), sender.sender(OTHER)
    to_two.send_batch([b"a", b"b"])
    to_one.send(b"c")
    message = one.recv(timeout=1)
    assert message is not None
    assert bytes(message.payload) == b"c"
    assert one.recv(timeout=0.01) is None
    assert two.stats().queued == 2
    to_two.send(b"d")
    assert texts(two, 3) == [b"a", b"b", b"d"]


def test_a_batch_of_a_group_has_no_message_of_another(net: Net) -> None:
    sender, receiver = net.open(0), net.open(1)
    one, two = receiver.join(GROUP), receiver.join(OTHER)
    to_one, to_two = sender.sender(GROUP), sender.sender(OTHER)
    for to, text in ((to_two, b"a"), (to_one, b"b"), (to_two, b"c"), (to_one, b"d"), (to_one, b"e")):
        to.send(text)
    found: list[bytes] = []
    while len(found) < 3:
        with one.recv_batch(2, timeout=1) as batch:
            assert 1 <= len(batch) <= 2
            found += [bytes(message.payload) for message in batch]
    assert found == [b"b", b"d", b"e"]
    with one.recv_batch(timeout=0.01) as batch:
        assert not len(batch)
    assert texts(two, 2) == [b"a", b"c"]
    two.leave()
    to_one.send_batch([b"f", b"g"])
    with one.recv_batch(timeout=1) as batch:
        assert [bytes(message.payload) for message in batch] == [b"f", b"g"]
        first = batch[0].payload
    with pytest.raises(ValueError, match="released"):
        first[0]
    with pytest.raises(ValueError, match="1 or more"):
        one.recv_batch(0)
    one.leave()
    with pytest.raises(Closed):
        one.recv_batch(timeout=1)


def test_kept_messages_are_in_order_of_arrival(net: Net) -> None:
    """Kept messages are delivered in order of arrival to calls for all groups."""
    sender, receiver = net.open(0), net.open(1)
    first, *_ = receiver.join(GROUP), receiver.join(OTHER)
    to_one, to_two = sender.sender(GROUP), sender.sender(OTHER)
    for to, text in ((to_one, b"0"), (to_two, b"1"), (to_one, b"2"), (to_two, b"3")):
        to.send(text)
    assert first.recv(timeout=1) is not None  # the other three are read with it
    message = receiver.recv(timeout=1)
    assert message is not None
    assert bytes(message.payload) == b"1"
    to_one.send(b"4")
    assert drain(receiver) == [b"2", b"3", b"4"]


def test_messages_put_back_are_first() -> None:
    """Messages that are put back are delivered first, and counted with the rest."""
    kept = ReceiveBuffer({}, {}, 8)
    first, second = (
        Message(memoryview(payload), Gid("fe80::1"), 17, Gid("ff0e::1"), None, False)
        for payload in (b"1", b"2")
    )
    kept.put(second)
    kept.put_back([first])
    assert kept.count == 2
    assert [bytes(found.payload) for _ in range(2) if (found := kept.pop(None))] == [b"1", b"2"]
    assert kept.count == 0


def test_group_queues_are_bounded(net: Net) -> None:
    """Queues of a group are bounded and the drops counted."""
    sender, receiver = net.open(0), net.open(1, receive_depth=8)
    kept, read = receiver.join(GROUP), receiver.join(OTHER)
    to_kept, to_read = sender.sender(GROUP), sender.sender(OTHER)
    for index in range(5):
        to_kept.send_batch([b"kept"] * 3)
        to_read.send(b"%d" % index)
        assert read.recv(timeout=1) is not None
    stats = kept.stats()
    assert (stats.queued, stats.received) == (8, 15)
    assert dict(stats.dropped) == {"queue full: not received in time": 7}
    assert receiver.stats().dropped["queue full: not received in time"] == 7


def test_single_messages_are_in_order(net: Net) -> None:
    """Messages one by one are in order whatever their length.

    One as long as a probe is looked at, and takes another way.
    """
    sender, receiver = net.open(0), net.open(1)
    member, group = receiver.join(GROUP), sender.sender(GROUP)
    sent = [b"0", bytes(PROBE_SIZE), b"2", bytes(PROBE_SIZE), bytes(PROBE_SIZE), b"5"]
    for payload in sent:
        group.send(payload)
    assert texts(member, 3) == sent[:3]
    assert [bytes(message.payload) for message in iter(lambda: receiver.recv(timeout=0), None)] == sent[3:]
    stats = receiver.stats()
    assert (stats.received, stats.groups[0].received) == (6, 6)
    assert stats.received_bytes == stats.groups[0].received_bytes == sum(map(len, sent))
    assert (stats.received_batches, stats.receive_free) == (6, 512)


def test_membership_receives_its_own_after_leaves(net: Net) -> None:
    """A membership of several and then of one receives its own."""
    sender, receiver = net.open(0), net.open(1)
    one, two = receiver.join(GROUP), receiver.join(OTHER)
    to_one, to_two = sender.sender(GROUP), sender.sender(OTHER)
    to_two.send(b"first")
    to_one.send(b"kept")
    assert texts(two, 1) == [b"first"]
    to_two.send(b"left behind")
    two.leave()
    to_one.send(b"received")
    assert texts(one, 2) == [b"kept", b"received"]
    message = receiver.recv(timeout=0)
    assert message is not None  # of a group that was left after it had come
    assert bytes(message.payload) == b"left behind"


@pytest.mark.parametrize("call", ["recv", "recv_batch"])
def test_events_are_read_beside_steady_messages(net: Net, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Events are asked for though there always is a message."""
    sender, receiver = net.open(0), net.open(1)
    receiver.join(GROUP)
    group = sender.sender(GROUP)
    polls, poll = 0, receiver._poll

    def counted() -> bool:
        nonlocal polls
        polls += 1
        return poll()

    monkeypatch.setattr(receiver, "_poll", counted)
    for _ in range(3 * POLL_INTERVAL_CALLS):
        group.send_batch([b"x", b"y"])
        assert getattr(receiver, call)(timeout=1) is not None
    assert polls == 2


def test_batches_end_when_the_next_is_taken(net: Net) -> None:
    """Batches are released when the next is asked for."""
    sender, receiver = net.open(0), net.open(1)
    receiver.join(GROUP)
    group = sender.sender(GROUP)
    group.send_batch([b"one"] * DEFAULT_BATCH + [b"two"])
    batches = receiver.batches(timeout=0.01)
    held = next(batches)
    view = held[0].payload
    assert (
        receiver.stats().receive_free <= 512 - DEFAULT_BATCH
    )  # a card does not count what nobody has looked at
    assert payloads(next(batches)) == [b"two"]
    assert held.released
    with pytest.raises(ValueError):
        bytes(view)
    assert next(batches, None) is None
    assert receiver.stats().receive_free == 512


def test_with_one_group_a_batch_is_the_queue_pairs_own(net: Net) -> None:
    sender, receiver = net.open(0), net.open(1)
    receiver.join(GROUP)
    sender.sender(GROUP).send_batch([b"x"] * 3)
    with receiver.recv_batch(timeout=1) as batch:
        assert type(batch).__module__.startswith("mcast.backends.")
        assert receiver.stats().receive_free == 512 - 3
    assert receiver.stats().groups[0].received == 3


@pytest.mark.parametrize("sequence", [False, True])
def test_refused_release_keeps_a_batch_readable(net: Net, sequence: bool) -> None:
    """A part of a batch whose release was refused is read as before.

    The other messages of it are not the user's.
    """
    sender, receiver = (net.open(number, loopback="filter", sequence=sequence) for number in range(2))
    member, group = receiver.join(GROUP), sender.sender(GROUP)
    group.send(b"one")
    member.send(b"mine")
    group.send_batch([b"two", b"three"])
    batch = receiver.recv_batch(timeout=1)
    assert payloads(batch) == [b"one", b"two", b"three"]
    kept = batch[1].payload[1:]
    for _ in range(2):
        with pytest.raises(BufferError, match="still in use"):
            batch.release()
        assert (payloads(batch), batch.lengths) == ([b"one", b"two", b"three"], [3, 3, 5])
    assert bytes(kept) == b"wo"
    kept.release()
    batch.release()
    assert receiver.stats().receive_free == 512


def test_any_buffer_is_a_payload(net: Net) -> None:
    sender, receiver = net.open(0), net.open(1)
    member, group = receiver.join(GROUP), sender.sender(GROUP)
    array: Any = np.arange(6, dtype=np.uint16)
    others: list[Any] = [bytearray(b"ab"), memoryview(b"cd")]
    group.send(array)
    assert group.send_batch(iter(others)) == 2
    assert texts(member, 3) == [array.tobytes(), b"ab", b"cd"]
    assert group.stats().sent_bytes == 16


def test_a_call_that_fails_keeps_no_payload(net: Net) -> None:
    """The endpoint knows why the membership is lost, and not from which frames."""
    endpoint, payload = net.open(0), bytearray(b"payload")
    group = endpoint.join(GROUP)
    endpoint._core.resources.qp.modify(QpState.ERR)
    with suppress(QpError):
        group.send(memoryview(payload))
    payload.clear()
    assert isinstance(endpoint.next_event(0), Lost)


ROWS = memoryview(b"abcdef").cast("B", (3, 2))
HEADED = HeaderBodyBatch(memoryview(b"ace").cast("B", (3, 1)), memoryview(b"bdf").cast("B", (3, 1)))


@pytest.mark.parametrize("rows", [ROWS, HEADED], ids=["rows", "two parts"])
@pytest.mark.parametrize("limit", [{}, {"sequence": True}, {"max_message": 2}], ids=str)
def test_rows_are_payloads(net: Net, rows: memoryview | HeaderBodyBatch, limit: dict[str, Any]) -> None:
    sender, receiver = net.open(0, **limit), net.open(1, **limit)
    member, group = receiver.join(GROUP), sender.sender(GROUP)
    assert group.send_batch(rows) == 3
    assert texts(member, 3) == [b"ab", b"cd", b"ef"]
    found = group.stats()
    assert (found.sent, found.sent_bytes, found.sent_batches) == (3, 6, 1)


@pytest.mark.parametrize(
    "payloads",
    [b"abc", bytearray(b"abc"), "abc", memoryview(b"abc"), array("B", b"abc"), mmap(-1, 3)],
    ids=lambda payloads: type(payloads).__name__,
)
def test_one_payload_is_no_batch(net: Net, payloads: Any) -> None:
    group = net.open(0).sender(GROUP)
    with pytest.raises(TypeError, match="use send"):
        group.send_batch(payloads)
    with pytest.raises(TypeError):
        group.send("text")  # type: ignore[arg-type]
    assert group.stats().sent == 0


def test_timeouts_end_without_a_message(net: Net) -> None:
    endpoint = net.open(0)
    group = endpoint.join(GROUP)
    start = net.backend.now()
    assert group.recv(timeout=0.05) is None
    assert net.backend.now() - start >= 0.05
    assert endpoint.recv(timeout=0) is None
    assert len(endpoint.recv_batch(timeout=0)) == 0
    assert list(endpoint.batches(timeout=0)) == []
    assert endpoint.next_event() is None
    with pytest.raises(ValueError, match="max is 0"):
        endpoint.recv_batch(max=0)


def test_a_poll_finds_what_is_there(net: Net) -> None:
    sender, receiver = net.open(0), net.open(1)
    member = receiver.join(GROUP)
    sender.sender(GROUP).send_batch([b"one", b"two"])
    message = member.recv(timeout=0)
    assert message is not None
    assert bytes(message.payload) == b"one"
    assert payloads(receiver.recv_batch(timeout=0)) == [b"two"]


def test_a_timeout_that_is_no_number_is_refused(net: Net) -> None:
    """Refused even if the call would not have waited; nothing is sent, received or joined."""
    endpoint = net.open(0)
    group = endpoint.join(GROUP)
    net.open(1).sender(GROUP).send(b"x")
    at = group.destination.sgid_index
    heard = Message(memoryview(b""), endpoint.port.gids[at], 2, group.mgid, None, False, endpoint.port.lid)
    calls: dict[str, Callable[[Any], object]] = {
        "join": lambda timeout: endpoint.join(OTHER, timeout=timeout),
        "settle": lambda timeout: endpoint.join(OTHER, settle=timeout),
        "recv": endpoint.recv,
        "recv_of_group": group.recv,
        "recv_batch": lambda timeout: endpoint.recv_batch(timeout=timeout),
        "batches": lambda timeout: list(endpoint.batches(timeout)),
        "next_event": endpoint.next_event,
        "ready": lambda timeout: group.ready(timeout=timeout),
        "probe_loopback": group.probe_loopback,
        "send": lambda timeout: group.send(b"x", timeout=timeout),
        "send_batch": lambda timeout: group.send_batch([b"x"], timeout=timeout),
        "reply": lambda timeout: group.reply(heard, b"x", timeout=timeout),
        "flush": endpoint.flush,
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match="is nan: give a number of seconds"):
            call(nan)
        with pytest.raises(TypeError, match="is 'soon': give a number of seconds"):
            call("soon")
        assert endpoint.groups == (group,), name
        assert endpoint.stats().sent == 0, name
    message = endpoint.recv(BOUND)
    assert message is not None
    assert bytes(message.payload) == b"x"


@pytest.mark.parametrize("receiving", [False, True], ids=["alone", "beside another thread"])
def test_a_count_that_is_none_is_refused(net: Net, receiving: bool) -> None:
    endpoint = net.open(0)
    group = endpoint.join(GROUP)
    if receiving:
        assert endpoint._claim.acquire(False)
    for call in (endpoint.recv_batch, group.recv_batch):
        for wrong in (2.5, nan, "2", None):
            with pytest.raises(TypeError, match="give an int, how many messages"):
                call(wrong, timeout=0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="max is 0: a batch has 1 or more messages"):
            call(0, timeout=0)
    for wrong in (nan, "2", None):
        with pytest.raises(TypeError, match="give an int, how many other members"):
            group.ready(wrong, timeout=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at most 65536 answers are remembered"):
        group.ready(1 << 70, timeout=0)
    if receiving:
        endpoint._claim.release()


# --- where ---------------------------------------------------------------------------------------


def test_a_backend_by_name_is_closed_with_the_endpoint() -> None:
    with open_endpoint("sim", "10.0.0.2", options={"ports": 2}) as endpoint:
        assert endpoint.device.name == "roce1"
        assert str(endpoint.address) == "10.0.0.2"
    assert endpoint.backend.closed
    endpoint.close()


def test_a_backend_that_was_given_stays_open(net: Net) -> None:
    net.open(0).close()
    assert not net.backend.closed


def test_a_device_may_be_named(net: Net) -> None:
    name = net.backend.devices()[2].name
    with open_endpoint(net.backend, device=name) as endpoint:
        assert str(endpoint.address) == "10.0.0.3"
        assert endpoint.port.port_num == 1


def test_the_only_active_port_is_taken_and_logged(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mcast")
    fabric = make(ports=2)
    fabric.set_link(fabric.ports[1], up=False)
    with open_fabric(fabric) as backend, open_endpoint(backend) as endpoint:
        assert endpoint.port in endpoint.device.ports
        assert str(endpoint.address) == "10.0.0.1"
    assert f"{endpoint.device.name} port 1, 10.0.0.1" in caplog.text


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ({}, "give bind=ADDRESS; there is 10.0.0.1 ("),
        ({"bind": "10.9.9.9"}, "no port has the address 10.9.9.9; there is 10.0.0.1 ("),
        ({"device": "nobody"}, "'nobody' is not there, or has no address; there is 10.0.0.1 ("),
        ({"bind": "10.0.0.1", "device": "x"}, "not both"),
        ({"bind": "somewhere"}, "'somewhere' does not appear to be an IPv4 or IPv6 address"),
        ({"bind": "10.0.0.1", "loopback": "maybe"}, "loopback is 'maybe': allowed are on, off, filter"),
        ({"bind": "10.0.0.1", "receive_depth": 99}, "receive_depth is 99: allowed are 1..64 (max_qp_wr of"),
        ({"bind": "10.0.0.1", "send_depth": 0}, "send_depth is 0: allowed are 1..64 (max_qp_wr of"),
        ({"bind": "10.0.0.1", "max_message": 4096}, "max_message is 4096: allowed are 1.."),
        (
            {"bind": "10.0.0.1", "traffic_class": 256},
            "traffic_class is 256: allowed are 0..255 (a DSCP is its",
        ),
        ({"bind": "10.0.0.1", "service_level": -1}, "service_level is -1: allowed are 0.."),
        ({"bind": "10.0.0.1", "service_level": 16}, "service_level is 16: allowed are 0.."),
        ({"bind": "10.0.0.1", "comp_vector": 4}, "comp_vector is 4: allowed are 0..3 (num_comp_vectors of"),
        ({"bind": "10.0.0.1", "busy_poll": -1.0}, "busy_poll"),
        ({"bind": "10.0.0.1", "busy_poll": nan}, "busy_poll"),
        ({"bind": "10.0.0.1", "comp_vector": -1}, "comp_vector is -1: allowed are 0.."),
        ({"bind": "10.0.0.1 "}, "IPv4 or IPv6 address; there is 10.0.0.1 ("),
        ({"bind": "10.0.0.1", "receive_depth": None}, "receive_depth is None: allowed are 1..64"),
        ({"bind": "10.0.0.1", "rejoin": False}, "rejoin is False: give a RejoinPolicy, or None"),
        ({"bind": "10.0.0.1", "sequence": "no"}, "sequence is 'no': allowed are True, False and None"),
        ({"bind": "10.0.0.1", "options": {"ports": 2}}, "options are {'ports': 2}, and the backend is open"),
    ],
)
def test_what_cannot_be_opened_says_what_can(make: Make, where: dict[str, Any], says: str) -> None:
    fabric = make(limits=Limits(queue_depth=64))
    options = {"receive_depth": 64, "send_depth": 64} | where
    with open_fabric(fabric) as backend:
        with pytest.raises(ValueError) as caught:
            open_endpoint(backend, **options)
        assert says in str(caught.value)
    assert SimObserver(fabric).leftovers() == ()


def test_what_is_no_backend_is_refused() -> None:
    for wrong in (None, Fabric.roce()):
        with pytest.raises(TypeError, match="give the name of a provider, or what open_backend returned"):
            open_endpoint(wrong, "10.0.0.1")  # type: ignore[arg-type]


def test_an_unknown_backend_says_which_there_are() -> None:
    with pytest.raises(UnknownBackend, match="sim-ib"):
        open_endpoint("simm")


# --- joins that fail leave nothing -----------------------------------------------------------------


def test_a_refused_join_names_phase_causes_and_next_step_and_leaves_nothing() -> None:
    net = SimNet(Fabric.infiniband())
    endpoint = net.open(0)
    with (
        net.fabric.rules.when(Requests(method=SaMethod.SET), Refuse(SaStatus.NO_RESOURCES)),
        pytest.raises(McastError) as caught,
    ):
        endpoint.join(GROUP)
    assert (caught.value.errno, caught.value.phase.value) == (E.EINVAL, "join")
    assert caught.value.causes
    assert endpoint.groups == ()
    assert net.leftovers() == ("QP 16 on ib0",)
    assert endpoint.join(GROUP).joined
    net.close()


def test_silent_sa_is_a_timeout() -> None:
    """A silent SA is a timeout and the same group can be joined later."""
    net = SimNet(Fabric.infiniband())
    endpoint = net.open(0)
    with net.fabric.rules.when(Requests(method=SaMethod.SET), Drop()):
        for group, timeout, seconds, gave_up in (
            (GROUP, 0.5, 0.5, "join"),
            (OTHER, 10.0, 3.0, "join_multicast"),
        ):
            start = net.backend.now()
            with pytest.raises(TimedOut) as caught:
                endpoint.join(group, timeout=timeout)
            assert isinstance(caught.value, TimeoutError)
            assert net.backend.now() - start == pytest.approx(seconds, rel=0.01)
            assert caught.value.call == gave_up
            assert endpoint.groups == ()
    assert endpoint.join(GROUP).joined
    net.close()


def test_ctrl_c_during_a_join_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    net = SimNet(Fabric.infiniband())
    endpoint = net.open(0)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(endpoint._core.resources.qp), "recv", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        endpoint.join(GROUP)
    monkeypatch.undo()
    assert endpoint.groups == ()
    assert endpoint._core.resources.group_index.groups == {}
    assert caught.traceback  # what the call held is held still, and not what cleaned up
    assert net.leftovers() == ("QP 16 on ib0",)
    assert endpoint.join(GROUP).joined
    net.close()


def test_failed_attach_is_a_failed_join(make: Make) -> None:
    """An attach that fails at retrieval is a failed join."""
    net = SimNet(make(limits=Limits(qps_per_group=1), hosts=1))
    with open_endpoint(net.backend, "10.0.0.1") as first, open_endpoint(net.backend, "10.0.0.1") as second:
        first.join(GROUP)
        with pytest.raises(OutOfResources):
            second.join(GROUP)
        assert second.groups == ()
        first.groups[0].leave()
        assert second.join(GROUP).joined
    net.close()


def test_limits_are_asked_before_the_join(nets: Callable[..., Net]) -> None:
    net = nets({"max_mcast_grp": 2}, limits=Limits(groups=2))
    endpoint = net.open(0)
    endpoint.join(GROUP)
    endpoint.join(OTHER)
    with pytest.raises(OutOfResources, match="allows 2 groups"):
        endpoint.join("239.9.9.9")
    net.close()


def test_a_device_without_multicast_is_told_in_plain_words(nets: Callable[..., Net]) -> None:
    net = nets({"max_mcast_grp": 0}, limits=Limits(groups=0))
    with pytest.raises(NotSupported, match="has no multicast"):
        net.open(0).join(GROUP)
    net.close()


def test_what_is_no_group_is_refused(net: Net) -> None:
    endpoint = net.open(0)
    for name in ("10.0.0.1", "0.0.0.0", "nonsense", "239.1.1.1:70000"):
        with pytest.raises(ValueError):
            endpoint.join(name)
    endpoint.join(GROUP)
    with pytest.raises(AlreadyJoined):
        endpoint.sender(GROUP)
    with pytest.raises(AlreadyJoined):
        endpoint.join(f"{GROUP}:5000")
    assert len(endpoint.groups) == 1


def test_join_refused_at_once_leaves_no_group(net: Net) -> None:
    """A join that is refused at once is no group of the endpoint."""
    endpoint = net.open(0)
    member = endpoint.join(GROUP)
    with pytest.raises(AlreadyJoined):
        endpoint.join(GROUP)
    assert [(group.group, group.joined) for group in endpoint.stats().groups] == [(GROUP, True)]
    assert endpoint.groups == (member,)
    member.send(b"to itself")
    assert texts(member, 1) == [b"to itself"]


def test_second_address_of_an_mgid_is_refused() -> None:
    """Two addresses of one MGID are refused and the first lives on."""
    net = SimNet(Fabric.infiniband())
    sender, receiver = net.open(0), net.open(1)
    member = receiver.join("239.1.2.3")
    alias = mcast.Mgid(bytes(member.mgid))
    with pytest.raises(McastError) as caught:
        receiver.join(alias)
    assert caught.value.errno == E.EADDRINUSE
    sender.sender(GROUP).send(b"still here")
    assert member.recv(timeout=1) is not None
    net.close()


def test_a_settled_join_takes_its_time(net: Net) -> None:
    start = net.backend.now()
    net.open(0).join(GROUP, settle=0.05)
    assert net.backend.now() - start >= 0.05


# --- leaving and closing -----------------------------------------------------------------------------


def test_leave_is_idempotent_and_ends_delivery(net: Net) -> None:
    sender, receiver = net.open(0), net.open(1)
    group = sender.sender(GROUP)
    with receiver.join(GROUP) as member:
        group.send(b"heard")
        assert member.recv(timeout=1) is not None
    member.leave()
    member.leave()
    assert not member.joined
    assert receiver.groups == ()
    group.send(b"unheard")
    assert receiver.recv(timeout=0.01) is None
    for call in (lambda: member.recv(0), lambda: member.send(b""), lambda: member.ready(timeout=0)):
        with pytest.raises(Closed):
            call()
    assert list(member) == []
    assert receiver.join(GROUP).joined


def test_second_leave_changes_no_later_join(net: Net) -> None:
    """Leaving again does nothing to what was joined since."""
    endpoint = net.open(0)
    with endpoint.join(GROUP) as before:
        before.leave()
        member = endpoint.join(GROUP)
    before.leave()
    assert endpoint.groups == (member,)
    assert member.joined


def test_closing_twice_and_leaving_after_is_fine(net: Net) -> None:
    endpoint = net.open(0)
    group, sender = endpoint.join(GROUP), endpoint.sender(OTHER)
    endpoint.close()
    endpoint.close()
    group.leave()
    sender.leave()
    assert endpoint.closed
    assert endpoint.groups == ()
    for call in (lambda: endpoint.join(GROUP), lambda: endpoint.recv(0), lambda: sender.send(b"")):
        with pytest.raises(Closed, match="the Endpoint is closed"):
            call()
    assert list(endpoint.batches()) == []
    assert endpoint.stats().sent == 0


def test_a_join_that_a_close_comes_in_shows_no_group(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """A close by a signal's handler is put off, and comes once the join lets the lock go."""
    endpoint = net.open(0)
    members = endpoint._core.memberships
    original = members.require_joined

    def joined(*given: Any) -> None:
        original(*given)
        endpoint.close()

    monkeypatch.setattr(members, "require_joined", joined)
    with suppress(Closed):
        assert not endpoint.join(GROUP).joined
    assert endpoint.closed
    assert endpoint.groups == ()


def test_what_an_endpoint_has_counted_never_goes_back(net: Net) -> None:
    """Another thread may look between two lines of what destroys a queue pair."""
    endpoint = net.open(0)
    endpoint.join(GROUP).send(b"counted")
    resources, seen = endpoint._core.resources, list[int]()

    def poll(frame: FrameType, event: str, _: object) -> Any:
        if Path(frame.f_code.co_filename).name not in ("resources.py", "cm_id.py"):
            return None
        seen.append(endpoint.stats().sent)
        return poll

    before = sys.gettrace()
    sys.settrace(poll)
    try:
        resources.replace_id()
        net.backend.close()
    finally:
        sys.settrace(before)
    assert len(seen) > 20
    assert set(seen) == {1}


def test_closing_the_backend_first_is_fine(net: Net) -> None:
    endpoint = net.open(0)
    group = endpoint.join(GROUP)
    group.send(b"to itself")
    before = endpoint.stats()
    closed = [endpoint.closed]
    net.backend.close()
    after = endpoint.stats()
    assert (after.sent, after.received, after.receive_free) == (1, before.received, before.receive_free)
    assert (endpoint.groups, group.joined) == ((), False)
    closed.append(endpoint.closed)
    group.leave()
    endpoint.close()
    assert [*closed, endpoint.closed] == [False, True, True]


def test_a_batch_outlives_its_endpoint_or_ends_with_it(net: Net) -> None:
    endpoint = net.open(0)
    endpoint.join(GROUP).send(b"mine")
    batch = endpoint.recv_batch(timeout=1)
    endpoint.close()
    batch.release()


# --- the class of service ----------------------------------------------------------------------------

DSCP, LEVEL = 26, 3
LINKS = {LinkLayer.ETHERNET: (1, 0), LinkLayer.INFINIBAND: (247, LEVEL)}
"""The LINKTYPE_ number of their packets, and the service level in them: none without a VLAN tag."""


def test_messages_have_the_traffic_class_asked_for(make: Make) -> None:
    """Messages are sent in the class that was asked for."""
    net = SimNet(make(trace=True))
    plain, marked = net.open(0), net.open(1, traffic_class=DSCP << 2, service_level=LEVEL)
    usual, chosen = plain.join(GROUP), marked.join(GROUP)
    assert chosen.destination == usual.destination.marked(DSCP << 2, LEVEL)
    for number, member in enumerate((usual, chosen)):
        member.send(bytes([number]))
    assert net.fabric.trace is not None
    link_type, level = LINKS[net.fabric.link_layer]
    on_the_wire = {}
    for packet in packets_of(net.fabric.trace):
        with suppress(SkipPacket):
            found = datagram(Frame(0, link_type, packet.data, len(packet.data), 0))
            on_the_wire[found.payload[:1]] = found.traffic_class, found.sl
    assert on_the_wire == {b"\0": (0, 0), b"\1": (DSCP << 2, level)}
    net.close()


def test_a_rejoined_group_keeps_its_class(sim: SimNet) -> None:
    endpoint = sim.open(0, traffic_class=DSCP << 2, service_level=LEVEL)
    group = endpoint.join(GROUP)
    sim.fabric.remove_device(sim.fabric.ports[0])
    sim.fabric.restore_device(sim.fabric.ports[0])
    while not isinstance(endpoint.next_event(5), Rejoined):
        pass
    assert (group.destination.traffic_class, group.destination.sl) == (DSCP << 2, LEVEL)


# --- sizes -------------------------------------------------------------------------------------------


def test_the_largest_message_is_told_and_kept(net: Net) -> None:
    plain, numbered, small = net.open(0), net.open(1, sequence=True), net.open(2, max_message=100)
    mtu = plain.port.active_mtu
    assert [one.max_message_size for one in (plain, numbered, small)] == [mtu, mtu - 24, 100]
    with pytest.raises(ValueError, match=f"max_message is {mtu}: allowed are 1..{mtu - 24} "):
        net.open(0, sequence=True, max_message=mtu)
    for endpoint in (plain, numbered, small):
        limit = endpoint.max_message_size
        group = endpoint.join(GROUP)
        group.send(bytes(limit))
        with pytest.raises(MessageTooLarge) as caught:
            group.send_batch([b"fits", bytes(limit + 1)])
        assert (caught.value.size, caught.value.limit, caught.value.index) == (limit + 1, limit, 1)
        group.leave()


def test_a_small_endpoint_still_takes_probes(net: Net) -> None:
    small, other = net.open(0, max_message=1), net.open(1)
    small.join(GROUP)
    other.join(GROUP).send(bytes(PROBE_SIZE))  # as long as a probe, and none
    message = small.recv(timeout=1)
    assert message is not None
    assert len(message.payload) == PROBE_SIZE


# --- own messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "device", "heard", "report"),
    [
        ("on", "honoured", True, (False, False)),
        ("filter", "honoured", False, (False, True)),
        ("off", "honoured", False, (True, True)),
        ("off", "refused", False, (False, True)),
        ("off", "ignored", False, (True, True)),
    ],
)
def test_own_messages(
    nets: Callable[..., Net], policy: str, device: str, heard: bool, report: tuple[bool, bool]
) -> None:
    net = nets({"block_loopback": Blocking[device.upper()]}, block_loopback=device)
    endpoint, other = net.open(0, loopback=policy), net.open(1)
    assert endpoint.loopback[1:] == report
    assert endpoint.loopback.policy is LoopbackPolicy(policy)
    group, there = endpoint.join(GROUP), other.join(GROUP)
    group.send(b"mine")
    there.send(b"yours")
    expected = [b"mine", b"yours"] if heard else [b"yours"]
    assert drain(endpoint) == expected
    assert drain(other) == [b"mine", b"yours"]
    filtered = {"own message": 1} if not heard and device != "honoured" else {}
    if policy == "filter":
        filtered = {"own message": 1}
    assert dict(group.stats().dropped) == filtered
    net.close()


def test_own_messages_are_filtered(net: Net) -> None:
    """Own messages are kept away alone and among others."""
    endpoint, other = net.open(0, loopback="filter"), net.open(1)
    one, two = endpoint.join(GROUP), endpoint.join(OTHER)
    there = other.sender(GROUP)
    one.send_batch([b"mine"] * 3)
    two.send(b"mine")
    assert drain(endpoint) == []
    there.send(b"a")
    one.send(b"mine")
    there.send_batch([b"b", b"c"])
    assert drain(endpoint) == [b"a", b"b", b"c"]
    there.send_batch([b"d", b"e"])
    two.send(b"mine")
    with endpoint.recv_batch(timeout=1) as batch:
        assert [bytes(message.payload) for message in batch][:1] == [b"d"]
    drain(endpoint)
    assert [dict(group.stats().dropped) for group in (one, two)] == [{"own message": 4}, {"own message": 2}]
    assert one.stats().received == 5


@pytest.mark.parametrize(("device", "returned"), [("honoured", False), ("refused", True), ("ignored", True)])
def test_a_probe_says_what_the_device_really_does(
    nets: Callable[..., Net], device: str, returned: bool
) -> None:
    net = nets({"block_loopback": Blocking[device.upper()]}, block_loopback=device)
    endpoint, other = net.open(0, loopback="off"), net.open(1)
    group = endpoint.join(GROUP)
    other.join(GROUP)
    assert group.probe_loopback(BOUND if returned else 0.01) is returned
    assert endpoint.loopback.filtered is returned
    group.send(b"mine")
    assert drain(endpoint) == []
    assert drain(other) == [b"mine"]
    assert not hasattr(endpoint.sender(OTHER), "probe_loopback")
    net.close()


@pytest.mark.parametrize(("policy", "filtered"), [("on", False), ("filter", True)])
def test_probe_keeps_an_explicit_loopback_setting(
    nets: Callable[..., Net], policy: str, filtered: bool
) -> None:
    """A probe changes nothing that was not left to the device."""
    net = nets({"block_loopback": Blocking.HONOURED}, block_loopback="honoured")
    endpoint = net.open(0, loopback=policy)
    assert endpoint.join(GROUP).probe_loopback(BOUND) is True
    assert endpoint.loopback.filtered is filtered
    net.close()


# --- ready, without another thread -------------------------------------------------------------------


def test_nobody_there_is_told(net: Net) -> None:
    group = net.open(0).join(GROUP)
    start = net.backend.now()
    with pytest.raises(TimedOut, match=r"0 of 2 members answered within 0\.05 s: nobody"):
        group.ready(members=2, timeout=0.05)
    assert net.backend.now() - start >= 0.05
    assert group.ready(members=0) == {}
    assert net.opened[0]._core.probing.prober.pending == {}


@pytest.mark.parametrize(("clock", "named"), [("virtual", True), ("wall", False)])
def test_ready_names_virtual_time(clock: str, named: bool) -> None:
    """Where time is virtual, a thread that could answer gets no time to."""
    with (
        mcast.open_backend("sim", clock=clock) as backend,
        mcast.open_endpoint(backend, "10.0.0.1") as one,
        pytest.raises(TimedOut) as caught,
    ):
        one.sender(GROUP).ready(timeout=0.05)
    assert ('clock="wall"' in str(caught.value)) is named
    assert "Soft-RoCE" not in str(caught.value)


def test_probes_are_answered_and_not_delivered(net: Net) -> None:
    """Probes are answered by whoever receives and never delivered."""
    asker, answerer = net.open(0), net.open(1)
    group, there = asker.join(GROUP), answerer.join(GROUP)
    for receive in (
        lambda: there.recv(0.01),
        lambda: answerer.recv(0.01),
        lambda: list(answerer.batches(0.01)),
        lambda: answerer.next_event(0.01),
    ):
        before = answerer.stats().probes
        with pytest.raises(TimedOut):
            group.ready(timeout=0.01)
        while answerer.stats().probes == before:  # a card delivers when it has the time
            receive()
    assert asker.recv(timeout=0.01) is None
    assert answerer.stats().received_bytes == 0


# --- statistics ----------------------------------------------------------------------------------------


def test_statistics_are_a_frozen_snapshot(sim: SimNet) -> None:
    sender, receiver = sim.open(0), sim.open(1, receive_depth=8)
    group, member = sender.sender(GROUP), receiver.join(GROUP)
    group.send_batch([b"abc"] * 10)
    assert len(drain(receiver)) == 8
    stats = receiver.stats()
    assert isinstance(stats, EndpointStats)
    with pytest.raises((ValidationError, FrozenInstanceError)):
        stats.received = 1
    assert (stats.backend, stats.device) == (sim.backend.name, receiver.device.name)
    assert (stats.port_num, stats.qp_num) == (1, receiver.qp_num)
    assert (stats.received, stats.received_bytes, stats.received_batches) == (8, 24, 1)
    assert (stats.receive_low_water, stats.receive_empty, stats.receive_free) == (0, 1, 8)
    assert stats.dropped["no receive was free"] == 2
    assert (stats.joins, stats.lost, stats.rejoins, stats.gave_up) == (1, 0, 0, 0)
    assert stats.port_counters["qkey_violations"] == 0
    sent = sender.stats()
    assert (sent.sent, sent.sent_bytes, sent.sent_batches) == (10, 30, 1)
    member.leave()
    group.leave()
    assert (sender.stats().sent_bytes, receiver.stats().received_bytes) == (30, 24)
    assert receiver.stats().joins == 1


def test_a_receive_queue_that_runs_low_is_an_event(net: Net) -> None:
    sender, receiver = net.open(0), net.open(1, receive_depth=64)
    receiver.join(GROUP)
    group = sender.sender(GROUP)
    group.send_batch([b"x"] * 40)
    drain(receiver)
    assert receiver.next_event() is None
    for count, free in ((57, 7), (62, 2), (64, 0)):
        group.send_batch([b"x"] * count)
        drain(receiver)
        event = receiver.next_event()
        assert event == ReceiveQueueLow(free, 64)
        assert f"{free} of 64" in str(event)
    group.send_batch([b"x"] * 64)
    drain(receiver)
    assert receiver.next_event() is None


def test_receive_queue_is_sampled_per_quarter(sim: SimNet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receive queue is looked at once in a quarter of its depth.

    On a served fabric a look is a question to the server.
    """
    sender, receiver = sim.open(0), sim.open(1, receive_depth=64)
    receiver.join(GROUP)
    group = sender.sender(GROUP)
    polls = itertools.count()
    kind: Any = type(receiver._core.resources.qp)
    read = kind.counters.fget
    monkeypatch.setattr(kind, "counters", property(lambda qp: (next(polls), read(qp))[1]))
    for _ in range(32):
        group.send_batch([b"x"] * 8)
        assert len(drain(receiver)) == 8
    assert next(polls) == 32 * 8 // 16
    group.send_batch([b"x"] * 64)
    drain(receiver)
    assert receiver.next_event() == ReceiveQueueLow(0, 64)
    before = next(polls)
    for _ in range(32):
        group.send_batch([b"x"] * 8)
        drain(receiver)
    assert next(polls) == before + 1, "nothing could be reported any more"


def test_low_receive_queue_is_seen_by_single_receives(sim: SimNet) -> None:
    """A receive queue that ran low is seen by who receives one by one."""
    sender, receiver = sim.open(0), sim.open(1, receive_depth=64)
    member, group = receiver.join(GROUP), sender.sender(GROUP)
    group.send_batch([b"x"] * 60)
    assert receiver.next_event() is None
    texts(member, 60)
    assert receiver.next_event() == ReceiveQueueLow(4, 64)
    group.send_batch([b"x"] * 60)
    texts(member, 60)
    assert receiver.next_event() is None


def test_a_lost_message_is_nobodys_fault_but_the_fabrics(sim: SimNet) -> None:
    sender, receiver = sim.open(0), sim.open(1)
    member, group = receiver.join(GROUP), sender.sender(GROUP)
    with sim.fabric.rules.when(Messages(nth=2), Drop()):
        group.send_batch([b"1", b"2", b"3"])
    assert texts(member, 2) == [b"1", b"3"]
    assert group.stats().sent == 3


# --- replies ---------------------------------------------------------------------------------------


def test_a_reply_reaches_who_asked_and_nobody_else(net: Net) -> None:
    asking, answering, other = (net.open(number) for number in range(3))
    question = asking.join(GROUP)
    group, others = answering.join(GROUP), other.join(GROUP)
    question.send(b"who?")
    heard = group.recv(BOUND)
    assert heard is not None
    group.reply(heard, b"me", imm=7)
    question.send(b"done")  # comes after the reply, had that gone to the group
    assert texts(others, 2) == [b"who?", b"done"]
    answer = asking.recv(BOUND)
    while answer is not None and answer.from_self:
        answer = asking.recv(BOUND)
    assert answer is not None
    assert (bytes(answer.payload), answer.imm, answer.src_qp) == (b"me", 7, answering.qp_num)
    assert answer.group != question.mgid
    assert group.stats().sent == 1


def test_a_reply_that_cannot_be_is_refused(net: Net) -> None:
    endpoint, numbered = net.open(0, max_message=100), net.open(1, sequence=True)
    group, counted = endpoint.join(GROUP), numbered.join(OTHER)
    group.send(b"x")
    message = group.recv(BOUND)
    assert message is not None
    with pytest.raises(ValueError, match="cannot be answered"):
        group.reply(message._replace(source=group.mgid), b"x")
    with pytest.raises(MessageTooLarge):
        group.reply(message, bytes(group.max_message_size + 1))
    with pytest.raises(ValueError, match="reply from another endpoint"):
        counted.reply(message, b"x")
    with pytest.raises(TypeError, match="the message is None, as recv returns when its time is over"):
        group.reply(group.recv(0), b"x")  # type: ignore[arg-type]
    assert group.stats().sent == 1
