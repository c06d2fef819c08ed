"""Each fault, and what an application sees of it: events, errnos, counters."""

from __future__ import annotations

import errno
import select
import threading
import time
from collections.abc import Callable, Collection
from ipaddress import IPv4Address, IPv4Network
from typing import Any

import pytest

from mcast import open_endpoint
from mcast.api import (
    CmEvent,
    CmEventType,
    CmId,
    Destination,
    JoinAttrEx,
    McastError,
    MembershipLost,
    QpError,
    QpInit,
    QpState,
    QueuePair,
    TimedOut,
    WcStatus,
)
from mcast.backends.model.qp import Qp
from mcast.backends.sim import Fabric, Quirks, open_fabric
from mcast.backends.sim.backend import SimQueuePair
from mcast.backends.sim.clock import VirtualClock
from mcast.backends.sim.faults import (
    HOLD_NS,
    CorruptQkey,
    Delay,
    Drop,
    Duplicate,
    Messages,
    Pass,
    Refuse,
    Reorder,
    Requests,
)
from mcast.backends.sim.trace.events import SaAnswered
from mcast.wire.addresses import Gid
from mcast.wire.mcmember import SaMethod, SaStatus
from mcast.wire.probe import LONG_SIZES, PROBE_SIZE, Kind, Peer, Probe

GROUP, OTHER = "239.1.1.1", "239.2.2.2"
MAKE = [Fabric.roce, Fabric.infiniband]
NS = 1_000_000_000


class Node:
    """An application on one port: an id with a QP, and a channel of its own."""

    def __init__(self, fabric: Fabric, number: int, init: QpInit | None = None, network: int = 0) -> None:
        self.fabric, self.port = fabric, fabric.ports[number]
        self.channel = open_fabric(fabric).event_channel()
        self.id: CmId = self.channel.create_id()
        self.id.bind_addr(f"10.{network}.0.{number + 1}")
        self.qp: QueuePair = self.id.create_qp(init)

    @property
    def core(self) -> Qp:
        assert isinstance(self.qp, SimQueuePair)
        return self.qp.core

    def event(self, within: float = 60.0) -> CmEvent:
        event = self.channel.get_event(within)
        assert event is not None
        return event

    def next_event(self) -> tuple[CmEventType, int, int] | None:
        """Type, status and errno of the next event; None if none comes within a minute."""
        event = self.channel.get_event(60.0)
        return None if event is None else (event.type, event.status, event.errno)

    def join(self, group: str = GROUP, send_only: bool = False) -> Destination:
        make = JoinAttrEx.send_only if send_only else JoinAttrEx.full_member
        self.id.join_multicast_ex(make(group), group)
        event = self.event().check()
        assert event.ud is not None
        return event.ud.destination

    def rejoin(self, group: str = GROUP) -> Destination:
        self.id.leave_multicast(group)
        return self.join(group)

    def received(self) -> list[bytes]:
        with self.qp.recv(10_000, timeout=0.01) as batch:
            return [bytes(message.payload) for message in batch]


def joined(fabric: Fabric, count: int) -> tuple[list[Node], Destination]:
    """`count` members of GROUP on the first ports, and where to send."""
    nodes = [Node(fabric, number) for number in range(count)]
    return nodes, [node.join() for node in nodes][-1]


LOST = (CmEventType.MULTICAST_ERROR, -errno.ENETRESET, errno.ENETRESET)


def pass_time(fabric: Fabric, seconds: float) -> None:
    assert isinstance(fabric.clock, VirtualClock)
    fabric.clock.advance(seconds)


def numbered(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


# --- rules on messages -----------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKE)
def test_drop_exactly_this_message(make: Callable[..., Fabric]) -> None:
    """UD gives no receipt: the sender sees nothing of it (docs/pitfalls.md, 23)."""
    fabric = make(ports=3)
    (sender, one, two), to = joined(fabric, 3)
    sender.qp.send(to, numbered(0))
    with fabric.rules.when(Messages(source=sender.port.name, target=two.port.name, nth=3), Drop()):
        sender.qp.send(to, numbered(1, 2))
        one.qp.send(to, [b"another sender"])
        sender.qp.send(to, numbered(3, 4))
    sender.qp.send(to, numbered(5))
    everything = [*numbered(0, 1, 2), b"another sender", *numbered(3, 4, 5)]
    assert one.received() == everything
    assert two.received() == [payload for payload in everything if payload != b"3"]
    assert sender.qp.counters.sent == 6


@pytest.mark.parametrize(
    ("which", "lost"),
    [
        (Messages(), [0, 1, 2, 3]),
        (Messages(group=GROUP), [0, 1]),
        (Messages(group=OTHER), [2, 3]),
        (Messages(group="ff12:4001:ffff::f02:202"), [2, 3]),
        (Messages(group="239.3.3.3"), []),
        (Messages(source="ib0"), [0, 2]),
        (Messages(source=("ib0", "ib1")), [0, 1, 2, 3]),
        (Messages(target="ib0"), []),
        (Messages(target="ib2"), [0, 1, 2, 3]),
        (Messages(since=1 * NS), [2, 3]),
        (Messages(until=1 * NS), [0, 1]),
        (Messages(nth=2), [1]),
        (Messages(nth=(1, 4)), [0, 3]),
        (Messages(source="ib1", nth=2), [3]),
    ],
    ids=str,
)
def test_what_a_rule_matches(which: Messages, lost: list[int]) -> None:
    fabric = Fabric.infiniband(ports=3)
    one, two, receiver = (Node(fabric, number) for number in range(3))
    to = {group: [node.join(group) for node in (one, two, receiver)][-1] for group in (GROUP, OTHER)}
    with fabric.rules.when(which, Drop()):
        one.qp.send(to[GROUP], numbered(0))
        two.qp.send(to[GROUP], numbered(1))
        pass_time(fabric, 1.0)
        one.qp.send(to[OTHER], numbered(2))
        two.qp.send(to[OTHER], numbered(3))
    assert receiver.received() == [payload for payload in numbered(0, 1, 2, 3) if int(payload) not in lost]


def test_rates_are_drawn_from_the_fabrics_seed() -> None:
    def lost(seed: int) -> set[int]:
        fabric = Fabric.roce(ports=2, seed=seed)
        (sender, receiver), to = joined(fabric, 2)
        with fabric.rules.when(Messages(target="roce1", rate=0.1), Drop()):
            sender.qp.send(to, numbered(*range(500)))
        return set(range(500)) - set(map(int, receiver.received()))

    assert 25 < len(lost(1)) < 80
    assert lost(1) == lost(1)
    assert lost(1) != lost(2)


def test_first_rule_decides() -> None:
    """The first rule decides and pass shields from later ones."""
    fabric = Fabric.roce(ports=2)
    (sender, receiver), to = joined(fabric, 2)
    with fabric.rules.when(Messages(nth=1), Pass()), fabric.rules.when(Messages(), Drop()):
        sender.qp.send(to, numbered(0, 1))
    sender.qp.send(to, numbered(2))
    assert receiver.received() == numbered(0, 2)


def test_a_rule_holds_at_once_and_until_it_is_removed() -> None:
    fabric = Fabric.roce(ports=2)
    (sender, receiver), to = joined(fabric, 2)
    rule = fabric.rules.when(Messages(), Drop())
    sender.qp.send(to, numbered(0))
    rule.remove()
    sender.qp.send(to, numbered(1))
    with rule:  # which is over, and stays so
        sender.qp.send(to, numbered(2))
    rule.remove()
    assert receiver.received() == numbered(1, 2)
    assert fabric.rules.deliveries == []


def test_a_verdict_that_does_not_fit_is_refused() -> None:
    rules = Fabric.roce().rules
    with pytest.raises(TypeError, match="Messages cannot have the verdict Refuse"):
        rules.when(Messages(), Refuse(SaStatus.REQ_INVALID))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="Requests cannot have the verdict Duplicate"):
        rules.when(Requests(), Duplicate())  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="str cannot have the verdict 2"):
        rules.when("drop", 2)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("which", "why"),
    [
        (Messages(source="10.0.0.1"), "source is '10.0.0.1': name a port of this fabric, ib0 to ib3"),
        (Messages(target=["ib1", "roce1"]), "target is 'roce1': name a port of this fabric, ib0 to ib3"),
        (Requests(port="ib4"), "port is 'ib4': name a port of this fabric, ib0 to ib3"),
        (Messages(group="10.1.1.1"), "10.1.1.1 is a unicast address"),
        (Messages(nth=0), "nth is 0: give numbers from 1"),
        (Messages(nth=[]), r"nth is \[\]: give numbers from 1"),
        (Requests(nth=[2, -1]), r"nth is \[2, -1\]: give numbers from 1"),
        (Messages(rate=5), "rate is 5: give a share from 0 to 1"),
    ],
)
def test_a_rule_that_fits_nothing_is_refused(which: Any, why: str) -> None:
    """A test whose fault never happens would pass, and prove nothing."""
    rules = Fabric.infiniband(ports=4).rules
    with pytest.raises(ValueError, match=why):
        rules.when(which, Drop())
    assert not rules.deliveries
    assert not rules.sa_requests


def test_a_duplicated_message_comes_again() -> None:
    """IBA vol 1, 9.8.3: unreliable datagram; a fabric may deliver a packet more than once."""
    fabric = Fabric.roce(ports=2)
    (sender, receiver), to = joined(fabric, 2)
    with fabric.rules.when(Messages(target="roce1", nth=2), Duplicate(copies=2)):
        sender.qp.send(to, numbered(0, 1, 2))
    assert receiver.received() == numbered(0, 1, 1, 1, 2)
    assert receiver.qp.counters.received == 5


def test_reordered_message_arrives_last() -> None:
    """A reordered message is overtaken and comes at last."""
    fabric = Fabric.roce(ports=2)
    (sender, receiver), to = joined(fabric, 2)
    with fabric.rules.when(Messages(target="roce1", nth=(1, 5)), Reorder(after=2)):
        sender.qp.send(to, numbered(0, 1, 2, 3, 4))
    assert receiver.received() == numbered(1, 2, 0, 3)
    pass_time(fabric, HOLD_NS / NS)
    assert receiver.received() == numbered(4)


@pytest.mark.parametrize(
    ("which", "verdict"),
    [
        (Messages(target="roce1", nth=(2, 5)), Drop()),
        (Messages(target="roce1", rate=0.5), Drop()),
        (Messages(target="roce1", nth=3), Reorder(after=2)),
    ],
    ids=["nth", "rate", "reorder"],
)
@pytest.mark.parametrize("size", [PROBE_SIZE, *LONG_SIZES])
def test_probes_move_no_fault(which: Messages, verdict: Drop | Reorder, size: int) -> None:
    """A rule picks the same messages of a program, however many probes are between them."""

    def heard(probes: int) -> list[bytes]:
        fabric = Fabric.roce(ports=2, mtu=4096)
        (sender, receiver), to = joined(fabric, 2)
        probe = Probe(Kind.LOOPBACK, 1, Peer(Gid(bytes(16)), 1)).pack(size)
        with fabric.rules.when(which, verdict):
            for message in numbered(*range(20)):
                sender.qp.send(to, [probe] * probes + [message])
        return [message for message in receiver.received() if message != probe]

    assert heard(3) == heard(0) != numbered(*range(20))


def test_probes_are_lost_as_messages_are() -> None:
    """A rule without numbers is for probes, too, and says which messages are probes."""
    fabric = Fabric.roce(ports=2)
    (sender, receiver), to = joined(fabric, 2)
    probe = Probe(Kind.LOOPBACK, 1, Peer(Gid(bytes(16)), 1)).pack()
    with fabric.rules.when(Messages(target="roce1", rate=0.5), Drop()):
        sender.qp.send(to, [probe] * 40)
    assert 0 < len(receiver.received()) < 40
    with fabric.rules.on_delivery(lambda delivery: Drop() if delivery.is_probe else None):
        sender.qp.send(to, [probe, b"message", bytes(PROBE_SIZE)])
    assert receiver.received() == [b"message", bytes(PROBE_SIZE)]


def test_ready_moves_no_fault() -> None:
    """A `ready` before the messages does not change which are lost."""

    def heard(asks: bool) -> list[bytes]:
        fabric = Fabric.roce(ports=2)
        with (
            open_fabric(fabric) as backend,
            open_endpoint(backend, "10.0.0.1") as one,
            open_endpoint(backend, "10.0.0.2") as other,
            fabric.rules.when(Messages(nth=(2, 4)), Drop()),
        ):
            out, group = one.sender(GROUP), other.join(GROUP)
            if asks:
                with pytest.raises(TimedOut):  # nobody answers while this thread asks
                    out.ready(timeout=0.1)
            out.send_batch(numbered(0, 1, 2, 3, 4))
            heard: list[bytes] = []
            while (message := group.recv(timeout=0.01)) is not None:
                heard.append(bytes(message.payload))
            return heard

    assert heard(asks=True) == heard(asks=False) == numbered(0, 2, 4)


@pytest.mark.parametrize("make", MAKE)
def test_delayed_message_is_lost_after_the_leave(make: Callable[..., Fabric]) -> None:
    """A delayed message is not delivered after the leave.

    LV-1: after leaving nothing new arrives, late messages included.
    """
    fabric = make(ports=2)
    (sender, receiver), to = joined(fabric, 2)
    with fabric.rules.when(Messages(), Delay(1_000_000)):
        sender.qp.send(to, [b"late"])
        receiver.id.leave_multicast(GROUP)
    assert receiver.received() == []
    assert sender.received() == [b"late"]


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("qkey", [None, 0x80000001])
def test_corrupt_qkey_is_counted(make: Callable[..., Fabric], qkey: int | None) -> None:
    """A corrupt Q_Key is a silent drop that counters show.

    K-DATA-5: the send succeeds, nothing is received, qkey_viol_cntr +1 per message.
    """
    fabric = make(ports=2)
    (sender, receiver), to = joined(fabric, 2)
    with fabric.rules.when(Messages(target=receiver.port.name), CorruptQkey(qkey)):
        sender.qp.send(to, numbered(0, 1))
    sender.qp.send(to, numbered(2))
    assert receiver.received() == numbered(2)
    assert receiver.qp.counters.dropped_qkey == receiver.port.qkey_violations == 2
    assert sender.port.qkey_violations == 0


# --- the SA ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (SaStatus.NO_RESOURCES, "NO_RESOURCES (0x0100): no MLID is left"),
        (SaStatus.REQ_INVALID, "REQ_INVALID (0x0200)"),
        (SaStatus.INSUF_COMPS, "INSUF_COMPS (0x0600)"),
    ],
)
def test_a_refusal_is_einval_and_keeps_its_cause(status: SaStatus, words: str) -> None:
    """SA-STATUS-1: any SA status is -EINVAL, so ten causes look alike; the detail tells them."""
    fabric = Fabric.infiniband()
    node = Node(fabric, 0)
    with fabric.rules.when(Requests(method=SaMethod.SET), Refuse(status)):
        node.id.join_multicast(GROUP)
        event = node.event()
    assert (event.type, event.status) == (CmEventType.MULTICAST_ERROR, -errno.EINVAL)
    assert words in event.detail
    with pytest.raises(McastError) as raised:
        event.check()
    assert raised.value.errno == errno.EINVAL
    assert words in str(raised.value)
    node.rejoin()


def test_a_silent_sa_is_etimedout_after_3_s() -> None:
    """SA-SHARE-2: a Set is waited for 3000 ms, no answer is -ETIMEDOUT (SA-STATUS-1)."""
    fabric = Fabric.infiniband()
    node = Node(fabric, 0)
    with fabric.rules.when(Requests(port="ib0"), Drop()):
        node.id.join_multicast(GROUP)
        assert node.next_event() == (CmEventType.MULTICAST_ERROR, -errno.ETIMEDOUT, errno.ETIMEDOUT)
    assert fabric.clock.now == 3 * NS


def test_a_slow_sa_is_waited_for() -> None:
    """SA-SHARE-2: 3000 ms."""
    fabric = Fabric.infiniband()
    with fabric.rules.when(Requests(), Delay(2 * NS)):
        Node(fabric, 0).join()
    assert 2 * NS < fabric.clock.now < 2.01 * NS


def test_slow_sa_joins_a_port_that_gave_up() -> None:
    """An SA slower than the timeout has joined a port that gave up.

    SA-SHARE-2: the kernel gives up after 3000 ms, which the SA cannot know; SA-JOIN-3.
    """
    fabric = Fabric.infiniband()
    assert fabric.sa is not None
    node = Node(fabric, 0)
    with fabric.rules.when(Requests(nth=1), Delay(5 * NS)):
        node.id.join_multicast(GROUP)
        assert node.next_event() == (CmEventType.MULTICAST_ERROR, -errno.ETIMEDOUT, errno.ETIMEDOUT)
        assert fabric.clock.now == 3 * NS
        assert node.next_event() is None
        (group,) = (group for group in fabric.sa.groups if not group.well_known)
        assert list(group.ports) == [node.port.guid]
        node.rejoin()


def test_late_loss_of_a_request_is_not_reported() -> None:
    """A port that gave up is not told again when its request is lost late.

    SA-SHARE-1: one request, one outcome.
    """
    fabric = Fabric.infiniband(trace=True)
    node = Node(fabric, 0)
    with fabric.rules.when(Requests(nth=1), Delay(5 * NS)):
        node.id.join_multicast(GROUP)
        assert node.next_event() == (CmEventType.MULTICAST_ERROR, -errno.ETIMEDOUT, errno.ETIMEDOUT)
        node.id.leave_multicast(GROUP)
        fabric.set_link(node.port, up=False)
        fabric.clock.run_until_idle()
    assert sum(isinstance(event, SaAnswered) for _, event in fabric.trace or ()) == 1


def test_missed_port_returns_with_new_pkeys() -> None:
    """A port that the SM had missed comes back with its new P_Keys.

    The SM reads the P_Key table of every port that it finds (IBA vol 1, 14.4).
    """
    fabric = Fabric.infiniband(ports=2, partitions={0x8001: [0]})
    kept, gone = (Node(fabric, 0, network=network) for network in (0, 1))
    fabric.set_link(fabric.ports[0], up=False)
    fabric.clock.run_until_idle()
    fabric.set_pkeys(fabric.ports[0], [0xFFFF])
    fabric.set_link(fabric.ports[0], up=True)
    kept.join()
    with pytest.raises(McastError, match="IPoIB broadcast group"):
        gone.join()


def test_no_mlid_for_a_broadcast_group() -> None:
    """An interface stays without its broadcast group when OpenSM has no MLID for it.

    SA-SM-6, SA-MLID-3, SA-PATH-1: a group of another has taken the MLID while the partition was empty.
    """
    fabric = Fabric.infiniband(ports=2, partitions={0x8001: [1]}, quirks=Quirks.OPENSM_3_3, max_mlid=0xC001)
    fabric.set_link(fabric.ports[1], up=False)
    fabric.clock.run_until_idle()
    Node(fabric, 0).join()
    fabric.set_link(fabric.ports[1], up=True)
    with pytest.raises(McastError, match="IPoIB broadcast group"):
        Node(fabric, 1, network=1).join()
    with pytest.raises(McastError, match="NO_RESOURCES"):
        Node(fabric, 1).join(OTHER)


def test_default_partition_keeps_its_group() -> None:
    """OpenSM keeps the group of the default partition whatever ports do.

    SA-PKEY-3, SA-SM-6: the SM's own port is in it.
    """
    fabric = Fabric.infiniband(ports=2, quirks=Quirks.OPENSM_3_3)
    for port in fabric.ports:
        fabric.set_pkeys(port, ())
        fabric.set_link(port, up=False)
    fabric.clock.run_until_idle()
    fabric.set_link(fabric.ports[0], up=True)
    assert fabric.sa is not None
    assert [group.well_known for group in fabric.sa.groups] == [True]


def test_a_lost_delete_is_repeated_three_times() -> None:
    """SA-SHARE-2: a Delete is repeated up to 3 times, its result is never reported."""
    fabric = Fabric.infiniband()
    assert fabric.sa is not None
    node = Node(fabric, 0)
    node.join()
    with fabric.rules.when(Requests(method=SaMethod.DELETE, nth=(1, 2, 3)), Drop()):
        node.id.leave_multicast(GROUP)
        assert node.next_event() is None
    assert [group.well_known for group in fabric.sa.groups] == [True]


def test_mlids_run_out_for_new_groups_only() -> None:
    """SA-MLID-3: out of MLIDs is 0x0100, joins of existing groups work."""
    fabric = Fabric.infiniband(ports=2, max_mlid=0xC01F)
    one, two = Node(fabric, 0), Node(fabric, 1)
    groups = [f"239.0.0.{number}" for number in range(1, 32)]
    assert {one.join(group).dlid for group in groups} == set(range(0xC001, 0xC020))
    two.id.join_multicast(GROUP)
    refused = two.event()
    assert (refused.status, refused.type) == (-errno.EINVAL, CmEventType.MULTICAST_ERROR)
    assert "no MLID is left" in refused.detail
    two.join(groups[0])
    one.id.leave_multicast(groups[7])
    assert two.rejoin().dlid == 0xC008


# --- the SM ----------------------------------------------------------------------------------


@pytest.mark.parametrize("outage", [0.0, 5.0])
def test_sm_restart_resets_every_active_membership(outage: float) -> None:
    """SA-SM-2, SA-RESET-1: groups lost, MLIDs start again, ClientReregister to every host,
    so -ENETRESET to every active member of the port; no automatic rejoin.
    """
    fabric = Fabric.infiniband(ports=3)
    assert fabric.sa is not None
    (first, second, third), to = joined(fabric, 3)
    third.join(OTHER)
    second.id.leave_multicast(GROUP)
    fabric.restart_sm(outage)
    first.qp.send(to, [b"during"] if outage else [])
    assert third.received() == ([b"during"] if outage else [])  # the switches keep their tables
    event = first.event()
    assert event.context == GROUP
    with pytest.raises(MembershipLost, match="CLIENT_REREGISTER: the SM restarted, or another took over"):
        event.check()
    assert first.next_event() is None
    assert [third.next_event(), third.next_event()] == [LOST, LOST]
    assert second.next_event() is None
    assert [group.well_known for group in fabric.sa.groups] == [True]
    first.qp.send(to, [b"to nobody"])
    assert third.received() == []
    assert third.rejoin(OTHER).dlid == 0xC001  # MLIDs start again
    first.rejoin()
    third.rejoin()
    first.qp.send(first.rejoin(), [b"again"])
    assert third.received() == [b"again"]


def test_join_without_an_sm_times_out() -> None:
    """A join without an SM times out and works with the next.

    SA-STATUS-1: no answer is -ETIMEDOUT.
    """
    fabric = Fabric.infiniband()
    node = Node(fabric, 0)
    fabric.restart_sm(outage=4.0)
    node.id.join_multicast(GROUP)
    assert node.next_event() == (CmEventType.MULTICAST_ERROR, -errno.ETIMEDOUT, errno.ETIMEDOUT)
    assert node.next_event() is None  # it was no active member when the SM came back
    node.rejoin()


@pytest.mark.parametrize(("second", "starts"), [(0.0, 1.0), (0.5, 1.5), (5.0, 6.0)])
def test_overlapping_outages_end_with_the_last(second: float, starts: float) -> None:
    """Of outages that overlap the last says when they end."""
    fabric = Fabric.infiniband()
    node = Node(fabric, 0)
    node.join()
    begun = fabric.clock.now
    fabric.restart_sm(outage=2.0)
    assert node.channel.get_event(1.0) is None
    fabric.restart_sm(second)
    assert node.next_event() == LOST
    assert fabric.clock.now - begun == round(starts * NS)
    node.rejoin()
    assert node.next_event() is None  # the first outage ends nothing any more


def test_ids_that_share_a_membership_all_lose_it() -> None:
    """SA-SHARE-1, SA-RESET-1: counted per port, and every active member gets -ENETRESET."""
    fabric = Fabric.infiniband()
    nodes = [Node(fabric, 0) for _ in range(3)]
    for node, send_only in zip(nodes, (False, False, True), strict=True):
        node.join(send_only=send_only)
    fabric.restart_sm()
    assert [node.next_event() for node in nodes] == [LOST] * 3
    for node in nodes:
        node.id.leave_multicast(GROUP)
    nodes[0].join()


def test_membership_lost_during_another_join() -> None:
    """A membership lost while another of the port is being joined.

    SA-SHARE-1: counted per JoinState bit; what was lost holds nothing afterwards.
    """
    fabric = Fabric.infiniband()
    assert fabric.sa is not None
    full, send_only = Node(fabric, 0), Node(fabric, 0)
    full.join()
    send_only.id.join_multicast_ex(JoinAttrEx.send_only(GROUP))
    fabric.restart_sm()
    assert full.next_event() == LOST
    send_only.event().check()
    full.rejoin()
    for node in (full, send_only):
        node.id.leave_multicast(GROUP)
    fabric.clock.run_until_idle()
    assert [group.well_known for group in fabric.sa.groups] == [True]


def test_leave_after_loss_keeps_another_ids_join() -> None:
    """Leaving what was lost leaves the new membership of another id alone.

    Every restart tells whoever is a member then, however the memberships before it ended.
    """
    fabric = Fabric.infiniband()
    assert fabric.sa is not None
    first, second = Node(fabric, 0), Node(fabric, 0)
    for node in (first, second):
        node.join()
    for _ in range(2):
        fabric.restart_sm()
        assert [node.next_event() for node in (first, second)] == [LOST] * 2
        first.rejoin()
        second.rejoin()
    second.id.leave_multicast(GROUP)
    fabric.clock.run_until_idle()
    assert [group.well_known for group in fabric.sa.groups] == [True, False]


def test_leave_after_refusal_keeps_another_ids_join() -> None:
    """Leaving what was refused leaves the membership of another id alone."""
    fabric = Fabric.infiniband()
    first, second = Node(fabric, 0), Node(fabric, 0)
    with fabric.rules.when(Requests(nth=1), Refuse(SaStatus.NO_RESOURCES)):
        first.id.join_multicast(GROUP)
        assert first.event().type is CmEventType.MULTICAST_ERROR
        second.join()
    first.id.leave_multicast(GROUP)
    fabric.restart_sm()
    assert second.next_event() == LOST


def test_leave_takes_back_unread_events() -> None:
    """Leaving takes back both unread events of a lost membership.

    SA-CANCEL-2: undelivered events of that join are purged.
    """
    fabric = Fabric.infiniband()
    node = Node(fabric, 0)
    node.id.join_multicast(GROUP)
    fabric.clock.run_until_idle()
    fabric.restart_sm()
    assert node.event().type is CmEventType.MULTICAST_JOIN
    node.id.leave_multicast(GROUP)
    assert node.next_event() is None


def test_lost_membership_is_joined_with_a_set() -> None:
    """A lost membership is left without a delete and joined anew with a set.

    SA-RESET-2: no Delete, no automatic rejoin: leave and join again is the user's job.
    """
    fabric = Fabric.infiniband()
    node = Node(fabric, 0)
    node.join()
    asked: list[SaMethod] = []
    with fabric.rules.on_sa_request(lambda request: asked.append(request.method)):
        fabric.restart_sm()
        assert node.next_event() == LOST
        assert asked == []
        node.id.leave_multicast(GROUP)
        assert node.next_event() is None
        assert asked == []
        node.join()
        assert asked == [SaMethod.SET]
        node.id.leave_multicast(GROUP)
        assert asked == [SaMethod.SET, SaMethod.DELETE]


def test_lid_change_keeps_the_sa_membership() -> None:
    """A LID change resets and the SA keeps the membership.

    SA-RESET-1: LID_CHANGE is -ENETRESET to every active member; SA-RESET-2: no Delete.
    """
    fabric = Fabric.infiniband(ports=2)
    (node, _), to = joined(fabric, 2)
    fabric.change_lid(node.port, 77)
    assert node.next_event() == LOST
    assert open_fabric(fabric).devices()[0].ports[0].lid == 77
    assert node.rejoin() == to
    with pytest.raises(ValueError, match=r"lid is 2: give one in 1\.\.0xBFFF that no port has"):
        fabric.change_lid(node.port, 2)


@pytest.mark.parametrize(
    ("pkeys", "lost"),
    [
        ((0xFFFF, 0x8001, 0x8002), []),  # another one is added
        ((0xFFFF, 0x0001), []),  # still found at its place, as a limited member
        ((0x8001, 0xFFFF), [0, 1]),  # both moved
        ((0xFFFF,), [1]),
        ((0xFFFF, 0x8002), [1]),
    ],
)
def test_a_pkey_change_resets_what_moved_or_vanished(pkeys: Collection[int], lost: list[int]) -> None:
    """SA-RESET-1: PKEY_CHANGE is -ENETRESET only if the P_Key moved or vanished."""
    fabric = Fabric.infiniband(ports=2, partitions={0x8001: [0, 1]})
    nodes = [Node(fabric, 0, network=network) for network in (0, 1)]
    for node in nodes:
        node.join()
    fabric.set_pkeys(fabric.ports[0], pkeys)
    assert [node.next_event() for node in nodes] == [LOST if network in lost else None for network in (0, 1)]


def test_removed_partition_blocks_until_it_returns() -> None:
    """A vanished partition is closed until it returns.

    SA-PATH-1: no broadcast group is EADDRNOTAVAIL; IBA vol 1, 10.9.3: the P_Key check.
    """
    fabric = Fabric.infiniband(ports=2, partitions={0x8001: [0, 1]})
    node, peer = Node(fabric, 0, network=1), Node(fabric, 1, network=1)
    node.join()
    to = peer.join()
    fabric.set_pkeys(node.port, [0xFFFF])
    assert node.next_event() == LOST
    peer.qp.send(to, [b"x"])
    assert (node.received(), node.port.pkey_violations) == ([], 1)
    node.id.leave_multicast(GROUP)
    with pytest.raises(McastError) as raised:
        node.join()
    assert raised.value.errno == errno.EADDRNOTAVAIL
    fabric.set_pkeys(node.port, [0xFFFF, 0x8001])
    node.join()
    peer.qp.send(to, [b"y"])
    assert node.received() == [b"y"]


def test_qp_has_the_pkey_of_its_index() -> None:
    """A queue pair has the P_Key at its place in the table.

    SA-PKEY-4, SA-RESET-1: whatever the SM writes there, be it another partition's.
    """
    fabric = Fabric.infiniband(ports=2, partitions={0x8001: [0, 1]})
    moved, default, foreign = Node(fabric, 0), Node(fabric, 1), Node(fabric, 1, network=1)
    moved.join()
    Node(fabric, 0, network=1).join()
    ways = {peer: peer.join() for peer in (default, foreign)}
    fabric.set_pkeys(moved.port, [0x8001, 0xFFFF])
    assert moved.next_event() == LOST
    for peer, way in ways.items():
        if way.gid not in moved.qp.attachments:
            moved.qp.attach_mcast(way.gid, way.dlid)
        peer.qp.send(way, [b"to it"])
        moved.qp.send(way, [b"from it"])
    assert default.received() == [b"to it"]
    assert foreign.received() == [b"to it", b"from it"]
    assert moved.received() == [b"from it", b"to it", b"from it"]


def test_late_switches_lose_the_first_messages() -> None:
    """SA-SM-4: reply and Set(MFT) are unordered; docs/pitfalls.md, 3: data before the switches
    are programmed is lost.
    """
    fabric = Fabric.infiniband(ports=3, switches=4)
    (sender, early), to = joined(fabric, 2)
    fabric.program_late(0.5)
    late = Node(fabric, 2)
    late.join()
    sender.qp.send(to, [b"first"])
    assert late.received() == []
    pass_time(fabric, 0.5)
    sender.qp.send(to, [b"second"])
    assert late.received() == [b"second"]
    assert early.received() == [b"first", b"second"]
    fabric.program_late(0)
    late.id.leave_multicast(GROUP)
    fabric.clock.run_until_idle()
    sender.qp.send(to, [b"third"])
    assert early.received() == [b"third"]


@pytest.mark.parametrize("rate", [2.5, 10, 25, 50, 100, 200, 400, 800, 1200])
@pytest.mark.parametrize("make", MAKE)
def test_a_fabric_has_any_rate_that_the_field_has(make: Callable[..., Fabric], rate: float) -> None:
    fabric = make(ports=2, rate=rate)
    (sender, receiver), to = joined(fabric, 2)
    sender.qp.send(to, [b"fast"])
    assert receiver.received() == [b"fast"]
    assert {port.rate for device in open_fabric(fabric).devices() for port in device.ports} == {rate}
    with pytest.raises(ValueError, match=r"rate is 7: allowed are 2\.5, 5, 10, 14, 20"):
        make(rate=7)


# --- links, cables, devices ------------------------------------------------------------------


def test_flapping_port_loses_memberships() -> None:
    """A flapping InfiniBand port loses its memberships.

    SA-RESET-1: PORT_ERR is -ENETRESET to every active member; SA-SM-1: members gone ~50 ms
    after the trap, relink restores nothing.
    """
    fabric = Fabric.infiniband(ports=3)
    assert fabric.sa is not None
    (sender, flapping, other), to = joined(fabric, 3)
    mgid = to.gid
    fabric.set_link(flapping.port, up=False)
    with pytest.raises(MembershipLost, match="PORT_ERR"):
        flapping.event().check()
    assert flapping.next_event() is None
    group = fabric.sa.group(mgid)
    assert group is not None
    assert flapping.port.guid not in group.ports
    flapping.id.leave_multicast(GROUP)
    with pytest.raises(McastError) as raised:
        flapping.join()
    assert raised.value.errno == errno.EADDRNOTAVAIL
    fabric.set_link(flapping.port, up=True)
    assert flapping.next_event() is None
    sender.qp.send(to, [b"1"])
    assert flapping.join() == to
    sender.qp.send(to, [b"2"])
    assert (flapping.received(), other.received()) == ([b"2"], [b"1", b"2"])


def test_the_sa_forgets_a_port_50_ms_after_its_link() -> None:
    """SA-SM-1: members gone ~50 ms after the trap. The SA does not notice a shorter flap."""
    fabric = Fabric.infiniband(ports=2)
    assert fabric.sa is not None
    (node, _), to = joined(fabric, 2)

    def is_member() -> bool:
        group = fabric.sa and fabric.sa.group(to.gid)
        return group is not None and node.port.guid in group.ports

    for down, remains in ((0.04, True), (0.06, False)):
        fabric.set_link(node.port, up=False)
        pass_time(fabric, down)
        fabric.set_link(node.port, up=True)
        assert node.next_event() == LOST
        assert is_member() is remains
        node.rejoin()


def test_a_flapping_roce_port_keeps_its_memberships() -> None:
    """K-DEVICE-2: link down and up is no CM event; membership kept, traffic resumes."""
    fabric = Fabric.roce(ports=3)
    (sender, flapping, _), to = joined(fabric, 3)
    fabric.set_link(flapping.port, up=False)
    sender.qp.send(to, [b"1"])
    fabric.set_link(flapping.port, up=True)
    sender.qp.send(to, [b"2"])
    assert flapping.received() == [b"2"]
    assert flapping.next_event() is None


@pytest.mark.parametrize("make", MAKE)
def test_cut_cable_splits_the_group_silently(make: Callable[..., Fabric]) -> None:
    """A cut cable parts the group and no host is told.

    The hosts' own links stay up, so no PORT_ERR. When the SM finds the ports again they are told to
    register anew: -ENETRESET (SA-RESET-1, SA-SM-1); RoCE: traffic resumes.
    """
    fabric = make(ports=5, switches=3)  # ports 0, 2 and 4 are on leaf 1, ports 1 and 3 on leaf 2
    (near, far, neighbour), to = joined(fabric, 3)
    fabric.cut_cable(1)
    near.qp.send(to, [b"cut"])
    assert (far.received(), neighbour.received()) == ([], [b"cut"])
    assert [near.next_event(), far.next_event()] == [None, None]
    near.qp.send(to, [b"still"])
    assert neighbour.received() == [b"still"]
    far.qp.send(to, [b"the other side"])
    assert (far.received(), near.received()) == ([b"the other side"], [b"cut", b"still"])
    fabric.repair_cable(1)
    if fabric.sa is not None:
        assert (near.next_event(), neighbour.next_event(), far.next_event()) == (LOST, LOST, None)
        near.rejoin()
        neighbour.rejoin()
    near.qp.send(to, [b"mended"])
    assert (far.received(), neighbour.received()) == ([b"mended"], [b"mended"])
    newcomer = Node(fabric, 4)
    newcomer.join()
    near.qp.send(to, [b"welcome"])
    assert newcomer.received() == [b"welcome"]


def test_a_join_behind_a_cut_times_out() -> None:
    """SA-STATUS-1: no answer is -ETIMEDOUT."""
    fabric = Fabric.infiniband(ports=2, switches=3)
    node = Node(fabric, 0)
    fabric.cut_cable(1)
    node.id.join_multicast(GROUP)
    assert node.next_event() == (CmEventType.MULTICAST_ERROR, -errno.ETIMEDOUT, errno.ETIMEDOUT)
    with pytest.raises(ValueError, match=r"switch is 3: the leaves of this fabric are 1\.\.2"):
        fabric.cut_cable(3)


@pytest.mark.parametrize("make", MAKE)
def test_a_removed_device_ends_everything_on_it(make: Callable[..., Fabric]) -> None:
    """K-DEVICE-1: DEVICE_REMOVAL, IGMP gone; K-JOIN-20, K-LEAVE-8: ENXIO."""
    fabric = make(ports=2)
    (node, other), to = joined(fabric, 2)
    fabric.remove_device(node.port)
    event = node.event()
    assert event.type is CmEventType.DEVICE_REMOVAL
    for call in (node.id.leave_multicast, node.id.join_multicast):
        with pytest.raises(McastError) as raised:
            call(GROUP if call == node.id.leave_multicast else OTHER)
        assert raised.value.errno == errno.ENXIO
    fabric.remove_device(node.port)
    assert node.next_event() is None
    other.qp.send(to, [b"x"])
    assert (node.received(), other.received()) == ([], [b"x"])
    node.id.destroy()
    assert not node.port.ids


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("restored", [False, True])
def test_a_qp_of_a_removed_device_is_dead_and_stays_so(make: Callable[..., Fabric], restored: bool) -> None:
    fabric = make(ports=2)
    (node, other), to = joined(fabric, 2)
    node.qp.send(to, [b"before"])
    message = other.qp.recv_one(0)
    assert message is not None
    fabric.remove_device(node.port)
    with pytest.raises(McastError) as raised:
        node.id.create_qp()
    assert raised.value.errno == errno.ENODEV
    if restored:
        fabric.restore_device(node.port)
        again = Node(fabric, 0)
        again.join()
    before = node.received()
    other.qp.send(to, [b"to the group"])
    other.qp.send(to.reply_to(message), [b"to the QP"])
    assert (before, node.received()) == ([b"before"], [])
    with pytest.raises(QpError):
        node.qp.send(to, [b"from the dead"])
    assert node.qp.state is QpState.ERR
    assert other.received() == [b"to the group"]
    if restored:
        again.qp.send(to, [b"from the new device"])
        assert again.received() == [b"to the group", b"from the new device"]
        assert other.received() == [b"from the new device"]


@pytest.mark.parametrize("make", MAKE)
def test_an_id_is_told_of_one_removal_only(make: Callable[..., Fabric]) -> None:
    fabric = make(ports=1)
    node = Node(fabric, 0)
    node.join()
    for _ in range(2):
        fabric.remove_device(node.port)
        fabric.restore_device(node.port)
    fabric.bond_failover(node.port)
    assert [node.event().type, node.next_event()] == [CmEventType.DEVICE_REMOVAL, None]
    again = Node(fabric, 0)
    again.join()
    node.id.destroy()
    assert again.port.ids


def test_no_route_leads_to_a_removed_device() -> None:
    fabric = Fabric.roce(ports=1)
    (interface,) = fabric.ports[0].interfaces
    fabric.add_route(0, IPv4Network("239.0.0.0/8"), interface)
    fabric.remove_device(fabric.ports[0])
    with pytest.raises(McastError) as raised:
        open_fabric(fabric).event_channel().create_id().resolve_addr(GROUP)
    assert raised.value.errno == errno.ENETUNREACH


@pytest.mark.parametrize("make", MAKE)
def test_bond_failover_is_addr_change_only(make: Callable[..., Fabric]) -> None:
    """A bond failover is addr change and nothing else.

    K-DEVICE-5: ADDR_CHANGE only on bond failover.
    """
    fabric = make(ports=2)
    (node, other), to = joined(fabric, 2)
    fabric.bond_failover(node.port)
    assert node.next_event() == (CmEventType.ADDR_CHANGE, 0, 0)
    assert other.next_event() is None
    other.qp.send(to, [b"x"])
    assert node.received() == [b"x"]


# --- IGMP ------------------------------------------------------------------------------------


def test_without_a_querier_memberships_age_out_in_silence() -> None:
    """docs/pitfalls.md, 22: no IGMP querier with snooping, traffic stops. RFC 3376, 8.4: 260 s."""
    fabric = Fabric.roce(ports=3)
    (sender, early), to = joined(fabric, 2)
    fabric.stop_querier()
    late = Node(fabric, 2)
    assert late.channel.get_event(100.0) is None
    late.join()
    assert early.channel.get_event(159.0) is None  # 259 s
    sender.qp.send(to, [b"259 s"])
    assert early.channel.get_event(2.0) is None  # 261 s, and 161 s after the late join
    sender.qp.send(to, [b"261 s"])
    assert (early.received(), late.received()) == ([b"259 s"], [b"259 s", b"261 s"])
    assert early.port.igmp == {to.gid: 1}  # it is a member and knows nothing of it
    assert late.channel.get_event(100.0) is None
    sender.qp.send(to, [b"361 s"])
    assert late.received() == []
    fabric.start_querier()
    sender.qp.send(to, [b"asked"])
    assert (early.received(), late.received()) == ([b"asked"], [b"asked"])
    assert early.channel.get_event(1_000.0) is None
    sender.qp.send(to, [b"for good"])
    assert early.received() == [b"for good"]


def test_intermittent_querier_renews_memberships() -> None:
    """A querier that comes and goes renews what it hears.

    RFC 3376, 8.4: the interval counts from the last report; a member that left has none to lose.
    """
    fabric = Fabric.roce(ports=3, trace=True)
    (sender, receiver, leaver), to = joined(fabric, 3)
    for act, seconds in ((fabric.stop_querier, 100), (fabric.start_querier, 100), (fabric.stop_querier, 100)):
        act()
        pass_time(fabric, seconds)
    leaver.id.leave_multicast(GROUP)
    sender.qp.send(to, [b"300 s"])
    pass_time(fabric, 200)
    sender.qp.send(to, [b"500 s"])
    assert receiver.received() == [b"300 s"]
    aged = [entry for entry in fabric.trace or () if "igmp-aged-out" in str(entry)]
    assert len(aged) == 2


# --- queue pairs -----------------------------------------------------------------------------


def test_a_starved_receive_queue_loses_in_silence() -> None:
    """K-DATA-8: empty receive queue is a silent drop, later messages arrive."""
    fabric = Fabric.roce(ports=2)
    (sender, receiver), to = joined(fabric, 2)
    with fabric.starved(receiver.core):
        sender.qp.send(to, numbered(0, 1))
    sender.qp.send(to, numbered(2))
    assert receiver.received() == numbered(2)
    counters = receiver.qp.counters
    assert (counters.dropped_no_receive, counters.recv_low_water) == (2, 0)
    assert counters.recv_free == 512


def test_a_receiver_that_does_not_read_starves_itself() -> None:
    """K-DATA-8; docs/pitfalls.md, 15."""
    fabric = Fabric.roce(ports=2)
    sender, slow = Node(fabric, 0), Node(fabric, 1, QpInit(max_recv_wr=4))
    sender.join()
    sender.qp.send(slow.join(), numbered(*range(10)))
    assert slow.received() == numbered(0, 1, 2, 3)
    assert slow.qp.counters.dropped_no_receive == 6


@pytest.mark.parametrize(
    ("status", "strike"),
    [
        (WcStatus.WR_FLUSH_ERR, lambda fabric, qp: fabric.overrun_cq(qp)),
        (WcStatus.LOC_QP_OP_ERR, lambda fabric, qp: fabric.fail_qp(qp)),
        (WcStatus.LOC_PROT_ERR, lambda fabric, qp: fabric.fail_qp(qp, WcStatus.LOC_PROT_ERR)),
    ],
    ids=["CQ overrun", "QP error", "protection error"],
)
@pytest.mark.parametrize("make", MAKE)
def test_qp_in_err_works_again_after_reset(
    make: Callable[..., Fabric], status: WcStatus, strike: Callable[[Fabric, Qp], None]
) -> None:
    """A QP in ERR says so after its messages and reset mends it.

    K-DATA-19: CQ overrun is CQ_ERR and the QP goes to ERR; it stays there.
    """
    fabric = make(ports=2)
    (sender, receiver), to = joined(fabric, 2)
    sender.qp.send(to, numbered(0))
    strike(fabric, receiver.core)
    sender.qp.send(to, numbered(1))
    assert receiver.qp.state is QpState.ERR
    assert receiver.received() == numbered(0)
    for call in (receiver.received, lambda: receiver.qp.send(to, numbered(9))):
        with pytest.raises(QpError) as raised:
            call()
        assert raised.value.status is status
    receiver.qp.reset()
    sender.qp.send(to, numbered(2))
    assert receiver.received() == numbered(2)  # the attachment has outlived it


# --- the wrong link layer --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (Fabric.roce, lambda fabric: fabric.restart_sm()),
        (Fabric.roce, lambda fabric: fabric.change_lid(fabric.ports[0])),
        (Fabric.roce, lambda fabric: fabric.set_pkeys(fabric.ports[0], [0xFFFF])),
        (Fabric.roce, lambda fabric: fabric.program_late(1)),
        (Fabric.infiniband, lambda fabric: fabric.stop_querier()),
    ],
)
def test_a_fault_of_the_other_link_layer_is_refused(
    make: Callable[..., Fabric], call: Callable[[Fabric], None]
) -> None:
    with pytest.raises(ValueError, match=r"make (one|the fabric) with Fabric\.(infiniband|roce)"):
        call(make())


# --- who waits is woken ------------------------------------------------------------------------


def test_fault_wakes_a_thread_that_waits() -> None:
    """A fault wakes a thread that waits for an event."""
    fabric = Fabric.infiniband(clock="wall")
    try:
        node = Node(fabric, 0)
        node.join()
        found: list[object] = []
        waiting = threading.Thread(target=lambda: found.append(node.next_event()))
        waiting.start()
        time.sleep(0.05)  # so that it does wait
        fabric.restart_sm()
        waiting.join(100)
        assert found == [LOST]
    finally:
        fabric.close()


def test_a_fault_makes_the_descriptor_readable() -> None:
    fabric = Fabric.infiniband()
    node = Node(fabric, 0)
    readable = select.poll()
    readable.register(node.channel.fileno(), select.POLLIN)
    node.join()
    assert readable.poll(0) == []
    fabric.set_link(node.port, up=False)
    assert readable.poll(0) != []
    assert node.next_event() == LOST
    assert readable.poll(0) == []


# --- what a fabric is asked for ----------------------------------------------------------------


WRONG: dict[str, list[Any]] = {
    "ports": [0, 2.0, True, "4", None, []],
    "mtu": [1000, "1024", []],
    "clock": ["sundial", [], None],
    "seed": [[], "x", 1.5],
}
WRONG_PARTITIONS: list[dict[Any, list[int]]] = [
    *({pkey: [0]} for pkey in (0x18001, -1, 0x8000, 0, "x", 1.0)),
    {0x8001: [4]},
    {pkey: [0] for pkey in range(1, 300)},
]


@pytest.mark.parametrize(
    ("make", "option", "value"),
    [
        *((make, option, value) for make in MAKE for option, values in WRONG.items() for value in values),
        *((Fabric.infiniband, "partitions", value) for value in WRONG_PARTITIONS),
    ],
)
def test_a_wrong_option_is_refused(make: Callable[..., Fabric], option: str, value: object) -> None:
    with pytest.raises(ValueError, match=r" is .*: allowed are "):
        make(**{option: value})


@pytest.mark.parametrize("pkey", [1 << 16, -1, "x"])
def test_a_p_key_has_16_bits(pkey: Any) -> None:
    fabric = Fabric.infiniband(ports=1)
    with pytest.raises(ValueError, match=r"P_Key is .*: give numbers of 16 bits"):
        fabric.set_pkeys(fabric.ports[0], [0xFFFF, pkey])
    assert fabric.ports[0].pkeys == (0xFFFF,)


@pytest.mark.parametrize("make", MAKE)
def test_a_port_with_a_new_address_can_be_bound_to(make: Callable[..., Fabric]) -> None:
    fabric = make(ports=2)
    port, new = fabric.ports[0], IPv4Address("10.9.9.9")
    fabric.set_ipv4(port, new)
    assert fabric.port_of(new) is port
    cm_id = open_fabric(fabric).event_channel().create_id()
    with pytest.raises(McastError):
        cm_id.bind_addr("10.0.0.1")
    cm_id.bind_addr(str(new))
    assert cm_id.device == port.name
    with pytest.raises(ValueError, match=r"address is 10\.9\.9\.9: .*0 has it"):
        fabric.set_ipv4(fabric.ports[1], new)
    fabric.set_ipv4(port, None)
    fabric.set_ipv4(fabric.ports[1], new)
    assert fabric.port_of(new) is fabric.ports[1]


def test_regions_close_in_any_order() -> None:
    """Regions give way to the qps own memory in any order."""
    for order in ((0, 1), (1, 0)):
        node = Node(Fabric.roce(ports=1), 0)
        regions = [node.qp.register(bytearray(slots * 1024), 1024) for slots in (4, 8)]
        assert node.qp.counters.recv_free == 8
        for place in order:
            regions[place].close()
            assert node.qp.counters.recv_free == (8 if (order, place) == ((0, 1), 0) else 512)


def test_a_region_outlives_its_qp() -> None:
    node = Node(Fabric.roce(ports=1), 0)
    region = node.qp.register(bytearray(4 * 1024), 1024)
    to = node.join()
    node.qp.send(to, [b"unread"])
    node.qp.close()
    region.close()
    assert region.closed
