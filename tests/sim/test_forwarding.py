"""Who gets a copy: switches, MLIDs, partitions, loopback, sizes (SA-SM-5, K-DATA-6)."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address

import pytest

from mcast.api import (
    RDMA_UDP_QKEY,
    CmEventType,
    CmId,
    Destination,
    McastError,
    MessageTooLarge,
    MtuSource,
    PortSpace,
    QpError,
    QpInit,
    QpState,
    QueuePair,
)
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults import Delay, Delivery, Drop, Refuse, SaRequest
from mcast.wire.mapping import infiniband_mgid
from mcast.wire.mcmember import JoinState, McMask, SaMethod, SaStatus
from mcast.wire.units import MTU, Selector

GROUP = "239.1.1.1"


class Node:
    """An id with a QP on one port of a fabric."""

    def __init__(self, fabric: Fabric, address: str, init: QpInit | None = None) -> None:
        self.backend = open_fabric(fabric)
        self.channel = self.backend.event_channel()
        self.id: CmId = self.channel.create_id()
        self.id.bind_addr(address)
        self.qp: QueuePair = self.id.create_qp(init)

    def join(self, group: str = GROUP) -> Destination:
        self.id.join_multicast(group)
        event = self.channel.get_event(10)
        assert event is not None
        assert event.check().ud is not None
        return event.ud.destination  # type: ignore[union-attr]

    def received(self) -> list[bytes]:
        with self.qp.recv(1_000, timeout=0.01) as batch:
            return [bytes(message.payload) for message in batch]


def join_all(*members: Node) -> Destination:
    """Every node joins; where all of them send."""
    return [node.join() for node in members][-1]


def nodes(fabric: Fabric, count: int) -> list[Node]:
    return [Node(fabric, f"10.0.0.{number + 1}") for number in range(count)]


def test_infiniband_switch_without_an_entry_drops() -> None:
    """A sender that is no member reaches the group only where its own switch has an entry for the MLID."""
    fabric = Fabric.infiniband(ports=6, switches=4)  # a root and three leaves: ports 0 and 3 share a leaf
    member, other, stranger, neighbour = (Node(fabric, f"10.0.0.{n}") for n in (1, 2, 3, 4))
    destination = member.join()
    neighbour.qp.send_one(destination, b"one member, no entry anywhere")
    assert member.received() == []
    other.join()
    neighbour.qp.send_one(destination, b"same leaf")
    stranger.qp.send_one(destination, b"leaf without entry")
    assert member.received() == [b"same leaf"]
    assert other.received() == [b"same leaf"]


@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_a_cut_behind_a_switch_parts_the_group(make: Callable[..., Fabric]) -> None:
    fabric = make(ports=4, switches=3)
    near, far, same_leaf = (Node(fabric, f"10.0.0.{n}") for n in (1, 2, 3))
    destination = join_all(near, far, same_leaf)
    fabric.core.topology.cut.add(1)
    fabric.core.topology_changed()
    near.qp.send_one(destination, b"cut")
    fabric.core.topology.cut.clear()
    fabric.core.topology_changed()
    near.qp.send_one(destination, b"mended")
    assert far.received() == [b"mended"]
    assert same_leaf.received() == [b"cut", b"mended"]


@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_a_message_is_lost_on_a_port_that_is_down(make: Callable[..., Fabric]) -> None:
    fabric = make(ports=3)
    sender, up, down = nodes(fabric, 3)
    destination = join_all(sender, up, down)
    fabric.set_link(fabric.ports[2], up=False)
    sender.qp.send_one(destination, b"1")
    fabric.set_link(fabric.ports[2], up=True)
    sender.qp.send_one(destination, b"2")
    assert (up.received(), down.received()) == ([b"1", b"2"], [b"2"])


def test_roce_sender_whose_link_is_down_falls_into_err() -> None:
    fabric = Fabric.roce()
    (node,) = nodes(fabric, 1)
    destination = node.join()
    fabric.set_link(fabric.ports[0], up=False)
    with pytest.raises(QpError, match="LOC_QP_OP_ERR"):
        node.qp.send_one(destination, b"x")
    fabric.set_link(fabric.ports[0], up=True)
    assert node.qp.state is QpState.ERR
    node.qp.reset()
    node.qp.send_one(destination, b"again")
    assert node.received() == [b"again"]


def test_limited_members_receive_from_full_ones() -> None:
    """Partitions are apart and limited members hear full ones only.

    An IPoIB interface in each partition; limited members do not hear one another (IBA vol 1, 10.9.3).
    """
    fabric = Fabric.infiniband(ports=4, partitions={0x8001: [0, 1], 0x0001: [2, 3]})
    default = nodes(fabric, 4)
    full, full2, limited, limited2 = (Node(fabric, f"10.1.0.{n}") for n in (1, 2, 3, 4))
    plain = join_all(*default)
    inner = [node.join() for node in (full, full2, limited, limited2)]
    assert str(plain.gid) == "ff12:4001:ffff::f01:101"
    assert {str(d.gid) for d in inner} == {"ff12:4001:8001::f01:101"}
    default[0].qp.send_one(plain, b"default")
    full.qp.send_one(inner[0], b"from full")
    limited.qp.send_one(inner[2], b"from limited")
    assert default[1].received() == [b"default"]
    assert full2.received() == [b"from full", b"from limited"]
    assert limited2.received() == [b"from full"]
    assert fabric.ports[3].pkey_violations == 1


def make_group(fabric: Fabric, group: str, mtu: int) -> None:
    """Act as a host with a slower link: it makes the group with the MTU that its link has, in bytes."""
    port, pattern = fabric.ports[0], fabric.ports[0].interfaces[0].broadcast
    assert pattern is not None
    assert fabric.sa is not None
    record = pattern._replace(
        mgid=infiniband_mgid(IPv4Address(group), PortSpace.UDP, pattern.mgid),
        port_gid=port.gids[0],
        mtu_selector=Selector.EXACTLY,
        mtu=MTU.code[mtu],
        qkey=RDMA_UDP_QKEY,
        join_state=JoinState.FULL,
    )
    mask = McMask.CREATE | McMask.MTU | McMask.MTU_SELECTOR
    reply = fabric.sa.handle(port.guid, SaMethod.SET, mask, record)
    assert reply is not None
    assert reply.status is SaStatus.OK


def test_message_above_the_group_mtu_is_refused() -> None:
    """Messages larger than the MTU of the group are refused."""
    fabric = Fabric.infiniband(ports=2, mtu=2048)
    make_group(fabric, GROUP, 1024)
    one, two = nodes(fabric, 2)
    small, usual = join_all(one, two), one.join("239.1.1.2")
    assert (small.group_mtu, small.mtu_source) == (1024, MtuSource.SA)
    assert [one.qp.max_message_to(to) for to in (small, usual)] == [1024, 2048]
    with pytest.raises(
        MessageTooLarge, match=r"1025 bytes, the group's MTU of 1024 carries 1024 .from the SA's record"
    ):
        one.qp.send(small, [b"fits", bytes(1025)])
    with pytest.raises(MessageTooLarge, match="the group's MTU of 1024"):
        one.qp.send_one(small, bytes(1025))
    with pytest.raises(MessageTooLarge, match="2049 bytes, one MTU carries 2048"):
        one.qp.send_one(usual, bytes(2049))
    one.qp.send_one(small, bytes(1024))
    assert [len(payload) for payload in two.received()] == [1024]


def test_order_is_kept_per_sender() -> None:
    """Order is kept per sender through batches and partial reads."""
    fabric = Fabric.roce(ports=3)
    one, two, receiver = nodes(fabric, 3)
    destination = join_all(one, two, receiver)
    for start in range(0, 60, 20):
        one.qp.send(destination, [b"1-%02d" % n for n in range(start, start + 20)])
        two.qp.send(destination, [b"2-%02d" % n for n in range(start, start + 20)])
    got: list[bytes] = []
    for limit in (1, 7, 13, 1_000):
        with receiver.qp.recv(limit) as batch:
            got += [bytes(message.payload) for message in batch]
    for sender in (b"1", b"2"):
        assert [p for p in got if p.startswith(sender)] == [b"%s-%02d" % (sender, n) for n in range(60)]


def test_unicast_reply_reaches_the_sender_alone() -> None:
    fabric = Fabric.roce(ports=3)
    asker, answerer, bystander = nodes(fabric, 3)
    destination = join_all(asker, answerer, bystander)
    asker.qp.send_one(destination, b"who?")
    question = answerer.qp.recv_one(1)
    assert question is not None
    back = destination.model_copy(update={"gid": question.source, "qp_num": question.src_qp})
    answerer.qp.send_one(back, b"me")
    assert asker.received() == [b"who?", b"me"]
    assert bystander.received() == [b"who?"]


# --- the seam for faults ----------------------------------------------------


def test_rule_drops_one_message_for_one_receiver() -> None:
    """A rule drops exactly one message for one receiver."""
    fabric = Fabric.roce(ports=3)
    sender, one, two = nodes(fabric, 3)
    destination = join_all(sender, one, two)

    def drop_the_second_for_roce2(delivery: Delivery) -> Drop | None:
        return Drop() if (delivery.number, delivery.target) == (1, "roce2") else None

    with fabric.rules.on_delivery(drop_the_second_for_roce2):
        sender.qp.send(destination, [b"0", b"1", b"2"])
    assert (one.received(), two.received()) == ([b"0", b"1", b"2"], [b"0", b"2"])
    assert fabric.rules.deliveries == []


def test_first_verdict_counts() -> None:
    """The first verdict counts and a delayed message comes later."""
    fabric = Fabric.roce(ports=2)
    sender, receiver = nodes(fabric, 2)
    destination = join_all(sender, receiver)

    def delay_the_first(delivery: Delivery) -> Delay | None:
        return Delay(1_000) if delivery.number == 0 else None

    with fabric.rules.on_delivery(delay_the_first), fabric.rules.on_delivery(lambda d: Delay(9_000)):
        sender.qp.send(destination, [b"0", b"1"])
    assert receiver.received() == [b"0"]
    assert receiver.received() == [b"1"]


@contextmanager
def joining(fabric: Fabric) -> Iterator[Node]:
    (node,) = nodes(fabric, 1)
    with node.backend:
        node.id.join_multicast(GROUP)
        yield node


@pytest.mark.parametrize(
    ("verdict", "errno_", "within"),
    [
        (Drop(), errno.ETIMEDOUT, (3.0, 3.1)),
        (Refuse(SaStatus.NO_RESOURCES), errno.EINVAL, (0, 0.001)),
        (Refuse(SaStatus.REQ_INVALID), errno.EINVAL, (0, 0.001)),
        (Delay(500_000_000), 0, (0.5, 0.6)),
    ],
)
def test_the_sa_silent_refusing_or_slow(
    verdict: Drop | Delay | Refuse, errno_: int, within: tuple[float, float]
) -> None:
    """No answer is -ETIMEDOUT after 3 s, any refusal -EINVAL (SA-STATUS-1)."""
    fabric = Fabric.infiniband()

    def rule(request: SaRequest) -> Drop | Delay | Refuse | None:
        return verdict if request.method is SaMethod.SET else None

    with fabric.rules.on_sa_request(rule), joining(fabric) as node:
        event = node.channel.get_event(10)
        assert event is not None
        assert within[0] <= fabric.clock.now / 1e9 <= within[1]
        assert (event.status, event.errno) == (-errno_, errno_)
        failed = CmEventType.MULTICAST_ERROR if errno_ else CmEventType.MULTICAST_JOIN
        assert event.type is failed
        if errno_:
            with pytest.raises(McastError) as raised:
                event.check()
            assert raised.value.errno == errno_
            assert isinstance(raised.value, TimeoutError) == (errno_ == errno.ETIMEDOUT)
        node.id.leave_multicast(GROUP)


def test_leave_during_a_join_is_undone_at_the_sa() -> None:
    """A join left while its request is in flight is undone at the SA."""
    fabric = Fabric.infiniband(trace=True)
    with joining(fabric) as node:
        node.id.leave_multicast(GROUP)
        assert node.channel.get_event(1) is None
    assert [
        line.split('"method": "')[1][:3] for line in str(fabric.trace).splitlines() if "sa-request" in line
    ] == [
        "SET",
        "DEL",
    ]
    assert fabric.sa is not None
    assert [group.mlid for group in fabric.sa.groups] == [0xC000]


# --- bad options ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ports": 0}, r"ports is 0: allowed are 1\.\.65000"),
        ({"mtu": 1500}, "mtu is 1500: allowed are 256, 512, 1024, 2048, 4096"),
        ({"rate": 33}, "rate is 33: allowed are"),
        ({"clock": "sundial"}, "clock is 'sundial': allowed are virtual, wall"),
        ({"hosts": 9}, r"hosts is 9: allowed are 1\.\.4"),
    ],
)
def test_a_bad_option_says_what_is_allowed(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fabric.roce(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["x", 0xBFFF, 0xFFFF, 49152.0, None])
def test_a_last_mlid_that_is_none_says_what_is_allowed(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"max_mlid is .*: allowed are 49152\.\.65534"):
        Fabric.infiniband(max_mlid=wrong)  # type: ignore[arg-type]


def test_hosts_see_their_own_devices() -> None:
    """Programs on different hosts see their own devices."""
    fabric = Fabric.roce(ports=4, hosts=2)
    assert [d.name for d in open_fabric(fabric, host=1).devices()] == ["roce1", "roce3"]
    with pytest.raises(McastError) as raised, open_fabric(fabric, host=0) as backend:
        backend.event_channel().create_id().bind_addr(IPv4Address("10.0.0.2"))
    assert raised.value.errno == errno.EADDRNOTAVAIL
    with pytest.raises(ValueError, match=r"host is 7: this fabric has hosts 0\.\.1"):
        open_fabric(fabric, host=7)
