"""`udp` and the kernel's own RoCE stack are members of the same groups, in both directions.

Soft-RoCE binds UDP port 4791 in its network namespace. So `udp` has a namespace of its own here, which is
connected to the lab's bridge, as another host is.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from ipaddress import IPv4Address
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import NamedTuple, ParamSpec, TypeVar

import pytest

from mcast import Endpoint, Membership, cast, open_endpoint
from mcast.api import Backend, JoinFlag, QpInit, Testbed, open_backend
from mcast.backends.net import hostnet
from mcast.backends.net.netlink import snooping_table
from mcast.backends.udp import doctor

from .test_mckey import COUNT, SIZE, joined, mckey, mckey_sending
from .test_mckey import GROUP as MCKEY_GROUP

P = ParamSpec("P")
T = TypeVar("T")

NAMESPACE, INTERFACE, BRIDGE_PORT = "udp", "eth0", "pudp"
ADDRESS = IPv4Address("10.77.0.20")
GROUP = "239.77.5.1"
BOUND = 60.0
"""Seconds; the longest that anything may take, never a delay."""
UDP_TO_RDMA, RDMA_TO_UDP = ("udp", "rdma"), ("rdma", "udp")
DIRECTIONS = pytest.mark.parametrize("direction", [UDP_TO_RDMA, RDMA_TO_UDP], ids="-to-".join)
ARP_IGNORE = Path("/proc/sys/net/ipv4/conf/all/arp_ignore")
JUMBO = 4200
"""The MTU of an interface, in bytes, whose RoCE MTU is 4096."""
CLONE_NEWNET = 0x40000000


class Link(NamedTuple):
    """An interface, the command that changes it, and the port of the bridge at its other end."""

    name: str
    ip: tuple[str, ...]
    bridge_port: str


class Side:
    """A provider, its interface, and threads in its network namespace, which do what is asked of it."""

    def __init__(self, backend: Backend, address: IPv4Address, link: Link, pool: ThreadPoolExecutor) -> None:
        self.backend, self.address, self.link, self._pool = backend, address, link, pool

    def start(self, call: Callable[P, T], *args: P.args, **named: P.kwargs) -> Future[T]:
        return self._pool.submit(call, *args, **named)

    def do(self, call: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        return self.start(call, *args, **named).result(BOUND)

    @contextmanager
    def endpoint(self, max_message: int | None = None) -> Iterator[Endpoint]:
        endpoint = self.do(open_endpoint, self.backend, self.address, loopback="off", max_message=max_message)
        try:
            yield endpoint
        finally:
            self.do(endpoint.close)

    def receive(self, endpoint: Endpoint, count: int) -> list[tuple[bytes, int | None, IPv4Address | None]]:
        """Return payload, immediate and source of the next messages."""
        return self.do(_receive, endpoint, count)


def _receive(endpoint: Endpoint, count: int) -> list[tuple[bytes, int | None, IPv4Address | None]]:
    found: list[tuple[bytes, int | None, IPv4Address | None]] = []
    while len(found) < count:
        with endpoint.recv_batch(timeout=BOUND) as batch:
            assert len(batch), f"only {len(found)} of {count} messages came"
            found += [(bytes(one.payload), one.imm, one.source.ipv4) for one in batch]
    return found


def enter_namespace() -> None:
    """Move this thread into the namespace of `udp`."""
    namespace = os.open(f"/run/netns/{NAMESPACE}", os.O_RDONLY)
    failed = ctypes.CDLL(None).setns(namespace, CLONE_NEWNET)
    os.close(namespace)
    assert not failed


@pytest.fixture(scope="module")
def udp() -> Iterator[Side]:
    """The provider `udp` in a network namespace, whose eth0 is connected to the lab's bridge."""
    hostnet.run("ip", "netns", "add", NAMESPACE)
    try:
        there = ("ip", "-n", NAMESPACE)
        peer = ("peer", "name", INTERFACE, "netns", NAMESPACE)
        hostnet.run("ip", "link", "add", BRIDGE_PORT, "type", "veth", *peer)
        hostnet.run("ip", "link", "set", BRIDGE_PORT, "master", "br0", "up")
        hostnet.run(*there, "addr", "add", f"{ADDRESS}/24", "dev", INTERFACE)
        for name in (INTERFACE, "lo"):
            hostnet.run(*there, "link", "set", name, "up")
        with ThreadPoolExecutor(4, initializer=enter_namespace) as pool:
            backend = pool.submit(open_backend, "udp").result(BOUND)
            try:
                yield Side(backend, ADDRESS, Link(INTERFACE, there, BRIDGE_PORT), pool)
            finally:
                pool.submit(backend.close).result(BOUND)
    finally:
        hostnet.run("ip", "netns", "del", NAMESPACE)


@pytest.fixture
def sides(lab_bed: Testbed, udp: Side) -> Iterator[dict[str, Side]]:
    """Both providers, by name.

    All of the lab's interfaces are in one namespace, and each would answer ARP for all of their addresses.
    """
    ARP_IGNORE.write_text("1")
    with ThreadPoolExecutor(4) as pool:
        yield {"udp": udp, "rdma": Side(lab_bed.backend, lab_bed.ports[0], Link("e1", ("ip",), "p1"), pool)}
    ARP_IGNORE.write_text("0")


@pytest.fixture
def both(sides: dict[str, Side], direction: tuple[str, str]) -> tuple[Side, Side]:
    """The side that sends, and the one that receives."""
    return sides[direction[0]], sides[direction[1]]


def wait_for_members(group: str | IPv4Address, *sides: Side) -> None:
    """Until the bridge delivers the group to these."""
    wanted, end = {side.link.bridge_port for side in sides}, monotonic() + BOUND
    while not wanted <= {one.port for one in snooping_table() if one.group == IPv4Address(group)}:
        assert monotonic() < end, f"{wanted} do not join {group}"
        sleep(0.01)


@contextmanager
def two_members(
    one: Side, other: Side, max_message: int | None = None
) -> Iterator[tuple[tuple[Endpoint, Membership], tuple[Endpoint, Membership]]]:
    with one.endpoint(max_message) as first, other.endpoint(max_message) as second:
        memberships = one.do(first.join, GROUP), other.do(second.join, GROUP)
        wait_for_members(GROUP, one, other)
        yield (first, memberships[0]), (second, memberships[1])


BATCHES = {
    "of one size": [bytes([number]) * 1024 for number in range(200)],
    "of one size, and a rest": [*(bytes([number]) * 1000 for number in range(100)), b"rest!"],
    "of every size": [bytes([number % 251]) * number for number in range(1, 1025, 7)],
}


@DIRECTIONS
@pytest.mark.parametrize("imm", [None, pytest.param(0, marks=pytest.mark.long), 0xFEDCBA98], ids=str)
def test_messages_pass(both: tuple[Side, Side], imm: int | None) -> None:
    """Single ones and batches, with and without an immediate, from a sender that has not joined."""
    sender, receiver = both
    with sender.endpoint() as sending, receiver.endpoint() as receiving:
        receiver.do(receiving.join, GROUP)
        out = sender.do(sending.sender, GROUP)
        wait_for_members(GROUP, receiver)
        for size in (1, 2, 3, 4, 1023, 1024):
            sender.do(out.send, bytes(range(256)) * 4 if size == 1024 else b"x" * size, imm)
        found = receiver.receive(receiving, 6)
        assert [len(payload) for payload, *_ in found] == [1, 2, 3, 4, 1023, 1024]
        assert found[-1] == (bytes(range(256)) * 4, imm, sender.address)
        for batch in BATCHES.values():
            sender.do(out.send_batch, batch, imm)
            assert receiver.receive(receiving, len(batch)) == [(one, imm, sender.address) for one in batch]


@DIRECTIONS
def test_replies_reach_who_asked(both: tuple[Side, Side]) -> None:
    """By unicast, and the reply to a reply, too; of two endpoints of a host the one that asked has it."""
    asks, answers = both
    with (
        two_members(asks, answers) as ((asking, question), (answering, answer)),
        asks.endpoint() as bystander,
    ):
        other = asks.do(bystander.sender, GROUP)
        for number in range(3):
            asks.do(question.send, b"question %d" % number)
            asked = answers.do(answer.recv, BOUND)
            assert asked is not None
            answers.do(answer.reply, asked, b"answer %d" % number, 7)
            found = asks.do(asking.recv, BOUND)
            assert found is not None
            assert (bytes(found.payload), found.imm) == (b"answer %d" % number, 7)
            assert found.source.ipv4 == answers.address
            asks.do(question.reply, found, b"thanks")
            thanks = answers.do(answering.recv, BOUND)
            assert thanks is not None
            assert (bytes(thanks.payload), thanks.src_qp) == (b"thanks", asked.src_qp)
        assert asks.do(bystander.recv, 0) is None
        asks.do(other.leave)


@DIRECTIONS
def test_ready_finds_the_other(both: tuple[Side, Side]) -> None:
    asks, answers = both
    with two_members(asks, answers) as ((_, group), (endpoint, _)):
        listening = answers.start(endpoint.recv, BOUND)
        (peer,) = asks.do(group.ready, members=1, timeout=BOUND)
        assert peer.gid.ipv4 == answers.address
        asks.do(group.send, b"end")
        assert listening.result(BOUND) is not None


def test_full_buffer_is_reported_in_a_namespace(udp: Side, caplog: pytest.LogCaptureFixture) -> None:
    """Linux 6.1 shows net.core.rmem_max in the first namespace alone, and so in no container."""
    caplog.set_level("WARNING", "mcast")
    channel = udp.do(udp.backend.event_channel)
    ids = [udp.do(channel.create_id) for _ in range(2)]
    for one in ids:
        udp.do(one.bind_addr, udp.address)
    receiver = udp.do(ids[0].create_qp, QpInit(max_recv_wr=1, max_recv_size=64))
    sender = udp.do(ids[1].create_qp)
    udp.do(ids[0].join_multicast, GROUP)
    event = udp.do(channel.get_event, BOUND)
    assert event is not None
    assert event.ud is not None
    for _ in range(64):
        udp.do(sender.send, event.ud.destination, [b"x"] * 64)
    assert udp.do(lambda: receiver.counters.dropped_no_receive) == 64 * 64 - 1
    udp.do(channel.close)
    (warning,) = [one.getMessage() for one in caplog.records if "was full" in one.message]
    assert "give a larger receive_depth" in warning  # root gets the buffer that it asks for
    (buffers,) = [one for one in udp.do(doctor.examine) if one.check == "buffers"]
    (room,) = re.findall(r"a socket may have (\d+) bytes", buffers.seen)
    assert int(room) == int(Path("/proc/sys/net/core/rmem_max").read_text())


@contextmanager
def loss(*sides: Side) -> Iterator[None]:
    """Lose 1 % of what goes to these hosts, message by message.

    What a host sends in one large datagram (GSO) is cut before the bridge, which would lose it whole.
    """
    for side in sides:
        hostnet.run(*side.link.ip, "link", "set", side.link.name, "gso_max_segs", "1")
        netem = ("netem", "limit", "100000", "loss", "1%")
        hostnet.run("tc", "qdisc", "add", "dev", side.link.bridge_port, "root", *netem)
    try:
        yield
    finally:
        for side in sides:
            hostnet.run("tc", "qdisc", "del", "dev", side.link.bridge_port, "root")
            hostnet.run(*side.link.ip, "link", "set", side.link.name, "gso_max_segs", "65535")


def receive_object(group: Membership) -> bytes:
    found = next(cast.receive(group, timeout=BOUND))
    assert isinstance(found.data, bytes | bytearray | memoryview)
    return bytes(found.data)


def cast_object(
    size: int, sender: Side, out: Membership, receiver: Side, there: Membership
) -> cast.ObjectReport:
    """Pass an object, and return the sender's report."""
    data = Random(1).randbytes(size)
    received = receiver.start(receive_object, there)
    report = sender.do(cast.send, out, data, receivers=1)
    assert received.result(BOUND) == data
    return report


@pytest.mark.parametrize(
    "direction",
    # without loss objects pass both ways in test_mtus_may_differ
    [pytest.param(UDP_TO_RDMA, marks=pytest.mark.long), RDMA_TO_UDP],
    ids="-to-".join,
)
def test_an_object_passes_despite_loss(both: tuple[Side, Side], long: bool) -> None:
    """While the bridge loses 1 % of what goes to either host."""
    sender, receiver = both
    with two_members(sender, receiver) as ((_, out), (_, there)), loss(sender, receiver):
        report = cast_object(8_000_000 if long else 1_000_000, sender, out, receiver, there)
    assert report.repairs > 0


@contextmanager
def jumbo(side: Side, *others: Side) -> Iterator[None]:
    """Let the side send 4,096 bytes, and the bridge carry them to all; the others take what they took."""
    _set_mtu(JUMBO, side, *others)
    try:
        yield
    finally:
        _set_mtu(1500, side, *others)


def _set_mtu(mtu: int, side: Side, *others: Side) -> None:
    for port in (side.link.bridge_port, *(other.link.bridge_port for other in others)):
        hostnet.run("ip", "link", "set", port, "mtu", str(mtu))
    hostnet.run(*side.link.ip, "link", "set", side.link.name, "mtu", str(mtu))
    end = monotonic() + BOUND
    while roce_mtu(side) != (4096 if mtu == JUMBO else 1024):
        assert monotonic() < end, "the device does not follow its interface's MTU"
        sleep(0.01)


def roce_mtu(side: Side) -> int:
    ports = (port for device in side.do(side.backend.devices) for port in device.ports)
    return next(port.active_mtu for port in ports if side.address in port.addresses)


@DIRECTIONS
def test_mtus_may_differ(both: tuple[Side, Side]) -> None:
    """Messages that fit both pass both ways, `ready` reports that size, and larger ones are lost."""
    large, small = both
    with jumbo(large, small), two_members(large, small) as ((big, out), (little, back)):
        assert (out.max_message_size, back.max_message_size) == (4096, 1024)
        listening = small.start(little.recv, BOUND)
        assert list(large.do(out.ready, members=1, timeout=BOUND).values()) == [1024]
        large.do(out.send_batch, [b"before", bytes(4096), bytes(1024)])
        assert listening.result(BOUND) is not None
        assert [len(payload) for payload, *_ in small.receive(little, 1)] == [1024]
        small.do(back.send_batch, [bytes(1024)] * 64)
        assert large.receive(big, 64) == [(bytes(1024), None, small.address)] * 64
        cast_object(200_000, small, back, large, out)
    with jumbo(large, small), two_members(large, small, max_message=1024) as ((_, out), (_, there)):
        cast_object(200_000, large, out, small, there)


SEND_ONLY = pytest.param(
    JoinFlag.SENDONLY_FULLMEMBER, marks=pytest.mark.long
)  # a send-only endpoint sends above


@pytest.mark.parametrize("flag", [JoinFlag.FULLMEMBER, SEND_ONLY], ids=lambda flag: flag.name)
def test_mckey_receives_from_udp(sides: dict[str, Side], lab_bed: Testbed, flag: JoinFlag) -> None:
    udp = sides["udp"]
    channel, _, qp, group = udp.do(joined, udp.backend, udp.address, flag)
    with mckey(lab_bed.ports[0]) as process:
        wait_for_members(MCKEY_GROUP, sides["rdma"])
        # it attaches a moment after its IGMP report: offer more than it wants until it has enough
        end = monotonic() + BOUND
        while process.poll() is None and monotonic() < end:
            udp.do(qp.send, group, [bytes(SIZE)] * 10)
            sleep(0.05)
        said = process.communicate(timeout=BOUND)[0]
    udp.do(channel.close)
    assert process.returncode == 0, said
    assert "data transfers complete" in said


@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("-o",), marks=pytest.mark.long)],  # which is mckey's own, and the same on the wire
    ids=["full member", "send-only"],
)
def test_mckey_sends_to_udp(sides: dict[str, Side], lab_bed: Testbed, options: tuple[str, ...]) -> None:
    udp = sides["udp"]
    channel, _, qp, _ = udp.do(joined, udp.backend, udp.address, JoinFlag.FULLMEMBER)
    wait_for_members(MCKEY_GROUP, udp)
    got = 0
    with mckey_sending(lab_bed.ports[0], *options):
        while got < COUNT:
            with udp.do(qp.recv, COUNT, BOUND) as batch:
                assert len(batch), "no message came"
                assert set(batch.lengths) == {SIZE}
                assert {message.source.ipv4 for message in batch} == {lab_bed.ports[0]}
                assert all(message.imm == message.src_qp for message in batch)
                got += len(batch)
    udp.do(channel.close)
