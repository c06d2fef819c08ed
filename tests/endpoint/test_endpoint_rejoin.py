"""Lost memberships come back: with each fault that the simulator has, by the policy, and visibly.

What befalls an SA, a switch or a cable needs a fabric, and so does virtual time, in which a policy's seconds
pass at once; what can befall a card itself is tried in `tests/card/test_endpoint.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from random import Random
from typing import Any

import pytest

from mcast import (
    Endpoint,
    GaveUp,
    Lost,
    Membership,
    PortDown,
    PortUp,
    Rejoined,
    RejoinPolicy,
    open_endpoint,
)
from mcast.api import (
    Backend,
    Closed,
    DeviceGone,
    McastError,
    MembershipLost,
    Phase,
    QpError,
    TimedOut,
    WcStatus,
)
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.backend import SimQueuePair
from mcast.backends.sim.clock import VirtualClock
from mcast.backends.sim.core.qp import Qp
from mcast.backends.sim.faults import Drop, Refuse, Requests
from mcast.backends.sim.testbed import SimObserver
from mcast.wire.mcmember import SaMethod, SaStatus

GROUP, OTHER = "239.1.2.3", "239.4.5.6"


class Pair:
    """A sender on port 0, and on port 1 the receiver that a fault befalls."""

    def __init__(self, fabric: Fabric, **options: Any) -> None:
        self.fabric, self.port = fabric, fabric.ports[1]
        self.backend: Backend = open_fabric(fabric)
        self.sender = open_endpoint(self.backend, "10.0.0.1")
        self.receiver: Endpoint = open_endpoint(self.backend, "10.0.0.2", **{"seed": 1} | options)
        self.out = self.sender.sender(GROUP)
        self.group: Membership = self.receiver.join(GROUP)

    @property
    def qp(self) -> Qp:
        """The receiver's QP, as the fabric has it."""
        qp = self.receiver._session.station.qp
        assert isinstance(qp, SimQueuePair)
        return qp.core

    def hears(self) -> bool:
        """Whether a message still gets through."""
        self.out.send(b"?")
        return self.group.recv(timeout=0.1) is not None

    def events(self, count: int, within: float = 60.0) -> list[object]:
        """The next events of the receiver, None where one does not come."""
        return [self.next_event(within) for _ in range(count)]

    def next_event(self, within: float) -> object:
        """The next event of the receiver that is not of its port."""
        while isinstance(event := self.receiver.next_event(within), PortDown | PortUp):
            pass
        return event

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()
        assert SimObserver(self.fabric).leftovers() == ()
        self.backend.close()


@pytest.fixture
def pairs() -> Iterator[Callable[..., Pair]]:
    """Makes pairs, and sees to it that nothing is left of them."""
    made: list[Pair] = []

    def make(fabric: Fabric, **options: Any) -> Pair:
        made.append(Pair(fabric, **options))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


# Each fault gives the events that were seen while it lasted.


def restart(pair: Pair) -> list[object]:
    pair.fabric.restart_sm()
    return []


def fail_over(pair: Pair) -> list[object]:
    """For two seconds no SM answers."""
    pair.fabric.restart_sm(2.0)
    return []


def flap(pair: Pair) -> list[object]:
    pair.fabric.set_link(pair.port, up=False)
    seen = pair.events(1)
    pair.fabric.set_link(pair.port, up=True)
    return seen


def change_lid(pair: Pair) -> list[object]:
    pair.fabric.change_lid(pair.port)
    return []


def cut_cable(pair: Pair) -> list[object]:
    """The cable of the receiver's switch is cut and mended: the SM finds its ports anew."""
    pair.fabric.cut_cable(pair.port.switch)
    assert pair.receiver.next_event(1.0) is None  # the hosts see nothing
    pair.fabric.repair_cable(pair.port.switch)
    return []


def lose_pkey(pair: Pair) -> list[object]:
    """The partition goes for a while, and with it the IPoIB broadcast group that joins are made from."""
    pair.fabric.set_pkeys(pair.port, ())
    seen = pair.events(1)
    assert pair.receiver.next_event(1.0) is None
    pair.fabric.set_pkeys(pair.port, (0xFFFF,))
    return seen


def bond(pair: Pair) -> list[object]:
    pair.fabric.bond_failover(pair.port)
    return []


def replug(pair: Pair) -> list[object]:
    """The device is away for three seconds."""
    pair.fabric.remove_device(pair.port)
    seen = pair.events(1)
    assert pair.receiver.next_event(3.0) is None
    pair.fabric.restore_device(pair.port)
    return seen


def fail_qp(pair: Pair) -> list[object]:
    pair.fabric.fail_qp(pair.qp, WcStatus.LOC_QP_OP_ERR)
    return []


def overrun(pair: Pair) -> list[object]:
    pair.fabric.overrun_cq(pair.qp)
    return []


ROCE = (bond, replug, fail_qp, overrun)
INFINIBAND = (restart, fail_over, flap, change_lid, cut_cable, lose_pkey, *ROCE)
FAULTS = [pytest.param(Fabric.roce, fault, id=f"roce-{fault.__name__}") for fault in ROCE] + [
    pytest.param(Fabric.infiniband, fault, id=f"infiniband-{fault.__name__}") for fault in INFINIBAND
]


@pytest.mark.parametrize(("make", "fault"), FAULTS)
def test_a_membership_comes_back_and_delivers(
    make: Callable[..., Fabric], fault: Callable[[Pair], list[object]], pairs: Callable[..., Pair]
) -> None:
    pair = pairs(make(ports=2, switches=3))
    assert pair.hears()
    seen = fault(pair)
    lost, rejoined = seen + pair.events(2 - len(seen))
    assert isinstance(lost, Lost)
    assert isinstance(rejoined, Rejoined)
    assert lost.group == rejoined.group == pair.group.group
    assert rejoined.attempts >= 1
    assert rejoined.gap > 0
    assert pair.group.joined
    pair.sender.next_event(10.0)  # the sender may have lost its own membership
    pair.sender.next_event(10.0)
    assert pair.hears()
    stats = pair.receiver.stats()
    assert (stats.lost, stats.rejoins, stats.gave_up) == (1, 1, 0)
    assert pair.group.stats().rejoins == 1
    assert pair.next_event(0.0) is None


BEGINNINGS: list[tuple[Callable[..., Fabric], Callable[[Pair], None]]] = [
    (Fabric.infiniband, lambda pair: pair.fabric.restart_sm()),
    (Fabric.infiniband, lambda pair: pair.fabric.set_link(pair.port, up=False)),
    (Fabric.infiniband, lambda pair: pair.fabric.change_lid(pair.port)),
    (Fabric.infiniband, lambda pair: pair.fabric.set_pkeys(pair.port, ())),
    *((make, lambda pair: pair.fabric.bond_failover(pair.port)) for make in (Fabric.roce, Fabric.infiniband)),
    *((make, lambda pair: pair.fabric.remove_device(pair.port)) for make in (Fabric.roce, Fabric.infiniband)),
]


@pytest.mark.parametrize(("make", "fault"), BEGINNINGS)
def test_without_a_policy_calls_raise_membership_lost(
    make: Callable[..., Fabric], fault: Callable[[Pair], None], pairs: Callable[..., Pair]
) -> None:
    pair = pairs(make(ports=2), rejoin=None)
    fault(pair)
    with pytest.raises(MembershipLost) as caught:
        pair.group.recv(timeout=60)
    assert isinstance(caught.value, ConnectionResetError)
    assert isinstance(caught.value.__cause__, McastError)
    for call in (
        lambda: pair.group.send(b""),
        lambda: pair.receiver.recv_batch(timeout=0),
        lambda: pair.group.ready(timeout=1),
    ):
        with pytest.raises(MembershipLost):
            call()
    assert isinstance(pair.next_event(0.0), Lost)
    assert pair.next_event(10) is None
    assert not pair.group.joined


@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_without_a_policy_a_failed_queue_pair_is_the_callers(
    make: Callable[..., Fabric], pairs: Callable[..., Pair]
) -> None:
    pair = pairs(make(ports=2), rejoin=None)
    fail_qp(pair)
    with pytest.raises(QpError):
        pair.group.recv(timeout=1)
    with pytest.raises(QpError):
        pair.group.send(b"")


def test_a_loss_is_raised_once_to_who_receives_for_all_while_another_group_lives() -> None:
    fabric = Fabric.infiniband(ports=2)
    policy = RejoinPolicy(give_up_after=0)
    with (
        open_fabric(fabric) as backend,
        open_endpoint(backend, "10.0.0.1") as sender,
        open_endpoint(backend, "10.0.0.2", rejoin=policy) as receiver,
    ):
        lost, kept = receiver.join(GROUP), receiver.join(OTHER)
        out = sender.sender(OTHER)
        with fabric.rules.when(Requests(method=SaMethod.SET, group=GROUP), Refuse(SaStatus.NO_RESOURCES)):
            fabric.change_lid(fabric.ports[1])
            kinds = [type(receiver.next_event(10)) for _ in range(4)]
        assert sorted(kinds, key=str) == sorted([Lost, Lost, GaveUp, Rejoined], key=str)
        with pytest.raises(MembershipLost):
            receiver.recv(timeout=0)
        out.send(b"alive")
        assert receiver.recv(timeout=1) is not None
        assert kept.joined
        with pytest.raises(MembershipLost):
            lost.recv(timeout=0)
        kept.leave()
        with pytest.raises(MembershipLost):  # of the last one every call tells
            receiver.recv(timeout=0)
        lost.leave()
        assert receiver.recv(timeout=0) is None


def test_a_silent_or_refusing_sa_is_asked_again(pairs: Callable[..., Pair]) -> None:
    pair = pairs(Fabric.infiniband(ports=2))
    for verdict, nth in ((Drop(), (1, 2)), (Refuse(SaStatus.NO_RESOURCES), (1, 2, 3))):
        with pair.fabric.rules.when(Requests(method=SaMethod.SET, port="ib1", nth=nth), verdict):
            pair.fabric.change_lid(pair.port)
            lost, rejoined = pair.events(2)
        assert isinstance(lost, Lost)
        assert isinstance(rejoined, Rejoined)
        assert rejoined.attempts == len(nth) + 1
        assert pair.hears()


def test_a_membership_comes_back_once_an_mlid_is_free_again(pairs: Callable[..., Pair]) -> None:
    # One MLID for the IPoIB broadcast group, and one for everybody else.
    pair = pairs(Fabric.infiniband(ports=3, max_mlid=0xC001))
    with open_endpoint(pair.backend, "10.0.0.3") as thief:
        pair.fabric.restart_sm()
        taken = thief.join(OTHER)
        assert isinstance(pair.receiver.next_event(1), Lost)
        assert pair.receiver.next_event(5) is None
        assert not pair.group.joined
        taken.leave()
        rejoined = pair.receiver.next_event(10)
        assert isinstance(rejoined, Rejoined)
        assert rejoined.gap > 5
        assert rejoined.attempts > 3


def test_when_the_sa_refuses_for_good_the_policy_gives_up(pairs: Callable[..., Pair]) -> None:
    pair = pairs(Fabric.infiniband(ports=2), rejoin=RejoinPolicy(give_up_after=5.0))
    with pair.fabric.rules.when(Requests(method=SaMethod.SET, port="ib1"), Refuse(SaStatus.NO_RESOURCES)):
        pair.fabric.change_lid(pair.port)
        lost, given_up = pair.events(2)
        assert isinstance(lost, Lost)
        assert isinstance(given_up, GaveUp)
        assert given_up.attempts > 3
        assert given_up.error.errno == 22
        with pytest.raises(MembershipLost, match="not restored"):
            pair.group.recv(timeout=60)
        with pytest.raises(MembershipLost):
            pair.group.send(b"")
    assert pair.receiver.stats().gave_up == 1
    pair.group.leave()
    assert pair.receiver.join(GROUP).joined


def test_a_named_device_is_found_again_though_its_address_has_changed() -> None:
    fabric = Fabric.roce(ports=2)
    port = fabric.ports[1]
    with open_fabric(fabric) as backend, open_endpoint(backend, device=port.name) as endpoint:
        group = endpoint.join(GROUP)
        before = endpoint.address
        fabric.remove_device(port)
        assert isinstance(endpoint.next_event(1), Lost)
        fabric.set_ipv4(port, None)
        fabric.restore_device(port)
        assert isinstance(endpoint.next_event(30), Rejoined)
        assert endpoint.address != before
        assert endpoint.address in port.addresses
        assert endpoint.port.addresses == port.addresses
        assert group.joined


def test_a_device_that_stays_away_is_given_up(pairs: Callable[..., Pair]) -> None:
    pair = pairs(Fabric.roce(ports=2), rejoin=RejoinPolicy(give_up_after=5.0))
    pair.fabric.remove_device(pair.port)
    lost, given_up = pair.events(2)
    assert isinstance(lost, Lost)
    assert isinstance(given_up, GaveUp)
    with pytest.raises(MembershipLost):
        next(iter(pair.group))
    assert pair.receiver.stats().received == 0


def test_a_queue_pair_that_cannot_be_reset_is_replaced(
    pairs: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pairs(Fabric.roce(ports=2))
    before = pair.receiver.qp_num

    def refuse(self: SimQueuePair) -> None:
        raise McastError(22, "modify", Phase.MODIFY)

    monkeypatch.setattr(SimQueuePair, "reset", refuse)
    pair.fabric.fail_qp(pair.qp)
    lost, rejoined = pair.events(2)
    assert isinstance(lost, Lost)
    assert isinstance(rejoined, Rejoined)
    assert rejoined.attempts == 2
    assert pair.receiver.qp_num != before
    assert pair.hears()


def test_a_send_waits_for_the_membership(pairs: Callable[..., Pair]) -> None:
    pair = pairs(Fabric.infiniband(ports=2))
    pair.fabric.restart_sm(2.0)
    start = pair.backend.now()
    pair.backend.event_channel().get_event(2.1)
    with pytest.raises(TimedOut, match="was lost, and not restored within 0"):
        pair.group.send(b"at once", timeout=0)
    pair.group.send(b"in a while", timeout=10)
    assert pair.group.joined
    assert 2.0 < pair.backend.now() - start < 5.0


def test_sending_to_one_group_restores_another() -> None:
    fabric = Fabric.infiniband(ports=2)
    with open_fabric(fabric) as backend, open_endpoint(backend, "10.0.0.2") as endpoint:
        lost, kept = endpoint.join(GROUP), endpoint.join(OTHER)
        with fabric.rules.when(Requests(method=SaMethod.SET, group=GROUP), Refuse(SaStatus.NO_RESOURCES)):
            fabric.change_lid(fabric.ports[1])
            assert [type(endpoint.next_event(1)) for _ in range(3)] == [Lost, Lost, Rejoined]
        for _ in range(2):  # the attempt, and its outcome
            backend.event_channel().get_event(10.0)
            assert kept.joined
            assert not lost.joined
            kept.send(b"x")
        assert lost.joined


def test_every_group_of_an_endpoint_comes_back_on_the_new_queue_pair() -> None:
    fabric = Fabric.roce(ports=2)
    with open_fabric(fabric) as backend, open_endpoint(backend, "10.0.0.2", seed=3) as endpoint:
        groups = [endpoint.join(f"239.1.1.{n}") for n in range(5)]
        sender = endpoint.sender("239.2.2.2")
        before = endpoint.qp_num
        endpoint.recv(timeout=0)
        fabric.bond_failover(fabric.ports[1])
        happened = [endpoint.next_event(60.0) for _ in range(12)]
        assert [type(event) for event in happened] == [Lost] * 6 + [Rejoined] * 6
        assert endpoint.qp_num != before
        assert all(one.joined for one in (*groups, sender))
        groups[0].send(b"to myself")
        assert groups[0].recv(timeout=1) is not None
        assert endpoint.stats().sent == 1
        groups[0].send(b"again")
        fabric.bond_failover(fabric.ports[1])
        assert isinstance(endpoint.next_event(1), Lost)
        assert endpoint.stats().sent == 2  # counters of all QPs


def test_a_group_that_is_left_while_lost_does_not_come_back(pairs: Callable[..., Pair]) -> None:
    pair = pairs(Fabric.infiniband(ports=2))
    with pair.fabric.rules.when(Requests(method=SaMethod.SET), Drop()):
        pair.fabric.change_lid(pair.port)
        assert isinstance(pair.receiver.next_event(1), Lost)
        pair.group.leave()
    assert pair.receiver.next_event(60) is None
    assert pair.receiver.groups == ()


def test_a_join_under_way_fails_when_the_device_goes(pairs: Callable[..., Pair]) -> None:
    pair = pairs(Fabric.infiniband(ports=2))
    pair.fabric.clock.call_later(1_000_000, lambda: pair.fabric.remove_device(pair.port))
    with pair.fabric.rules.when(Requests(method=SaMethod.SET), Drop()), pytest.raises(DeviceGone):
        pair.receiver.join(OTHER)
    with pytest.raises(DeviceGone, match="is away"):
        pair.receiver.join(OTHER)


@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_a_join_whose_id_ends_first_is_none(make: Callable[..., Fabric], pairs: Callable[..., Pair]) -> None:
    """ADDR_CHANGE is read, and behind it the outcome of a join; the id is replaced, and all that it holds."""
    pair = pairs(make(ports=2))
    pair.fabric.bond_failover(pair.port)
    try:
        late = pair.receiver.join(OTHER)
    except MembershipLost:
        late = None
    assert [type(event) for event in pair.events(2)] == [Lost, Rejoined]
    assert pair.receiver.groups == ((pair.group,) if late is None else (pair.group, late))
    late = late or pair.receiver.join(OTHER)
    pair.sender.sender(OTHER).send(b"heard")
    assert late.recv(timeout=1) is not None


def test_a_rejoin_that_ends_after_its_id_did_is_done_again(pairs: Callable[..., Pair]) -> None:
    pair = pairs(Fabric.infiniband(ports=2))
    session, clock = pair.receiver._session, pair.fabric.clock
    assert isinstance(clock, VirtualClock)
    pair.fabric.change_lid(pair.port)
    assert isinstance(pair.next_event(1), Lost)
    recovery = pair.group._group.recovery
    assert recovery is not None
    while recovery.due < inf:  # until the SA is asked, and has not answered yet
        clock.advance(0.001)
        session.step()
    pair.fabric.bond_failover(pair.port)
    clock.advance(1)  # both events are there, ADDR_CHANGE first
    assert isinstance(pair.next_event(60), Rejoined)
    assert pair.hears()
    assert pair.group.stats().rejoins == 1


@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_what_was_joined_while_the_queue_pair_had_failed_comes_back_with_another(
    make: Callable[..., Fabric], pairs: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pairs(make(ports=2))

    def refuse(self: SimQueuePair) -> None:
        raise McastError(22, "modify", Phase.MODIFY)

    monkeypatch.setattr(SimQueuePair, "reset", refuse)
    pair.fabric.fail_qp(pair.qp)
    assert isinstance(pair.next_event(1), Lost)
    second = pair.receiver.join(OTHER)
    kinds = [type(event) for event in pair.events(3)]
    assert sorted(kinds, key=str) == [Lost, Rejoined, Rejoined]
    pair.sender.sender(OTHER).send(b"heard")
    assert second.recv(timeout=1) is not None


@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_a_flush_while_the_device_is_away_has_nothing_to_wait_for(
    make: Callable[..., Fabric], pairs: Callable[..., Pair]
) -> None:
    pair = pairs(make(ports=2))
    pair.group.send(b"sent")
    pair.fabric.remove_device(pair.port)
    assert isinstance(pair.next_event(1), Lost)
    assert pair.receiver.next_event(1) is None  # an attempt was made, without the device
    pair.receiver.flush(timeout=0)
    pair.receiver.close()
    with pytest.raises(Closed):
        pair.receiver.flush(timeout=0)


def test_back_off_grows_to_its_maximum_and_is_spread() -> None:
    policy = RejoinPolicy(first=0.1, factor=3.0, maximum=2.0, jitter=0.0)
    assert [policy.delay(n, Random(0)) for n in (1, 2, 3, 4, 1_000_000)] == pytest.approx(
        [0.1, 0.3, 0.9, 2.0, 2.0]
    )
    assert RejoinPolicy(factor=1e6, jitter=0).delay(1_000, Random(0)) == 5.0
    spread = [RejoinPolicy(jitter=0.5).delay(1, Random(seed)) for seed in range(100)]
    assert 0.025 <= min(spread) < 0.035 < 0.065 < max(spread) <= 0.075
    for wrong in ({"first": 0}, {"factor": 0.5}, {"jitter": 2}, {"give_up_after": -1}, {"retries": 3}):
        with pytest.raises(ValueError):
            RejoinPolicy(**wrong)


def test_the_same_seed_gives_the_same_attempts() -> None:
    def gaps(seed: int) -> list[float]:
        pair = Pair(Fabric.infiniband(ports=2), seed=seed)
        for _ in range(3):
            pair.fabric.change_lid(pair.port)
        events = [pair.receiver.next_event(60) for _ in range(2)]
        pair.close()
        return [event.gap for event in events if isinstance(event, Rejoined)]

    assert gaps(5) == gaps(5) != gaps(6)


def test_events_that_nobody_fetches_are_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcast.endpoint.event_queue.EVENTS_KEPT", 4)
    pair = Pair(Fabric.roce(ports=2))
    pair.receiver._session.events.queued = type(pair.receiver._session.events.queued)(maxlen=4)
    for _ in range(4):
        pair.fabric.bond_failover(pair.port)
        pair.group.recv(timeout=1)
    assert pair.receiver.stats().events_dropped == 4
    assert len([event for event in pair.events(5, 0) if event is not None]) == 4
    pair.close()


def test_events_read_well() -> None:
    pair = Pair(Fabric.roce(ports=2))
    pair.fabric.bond_failover(pair.port)
    lost, rejoined = pair.events(2)
    assert str(lost).startswith(f"{GROUP}: the membership was lost: ")
    assert str(rejoined).startswith(f"{GROUP}: joined again after 0.0")
    assert "\n" not in str(lost)
    pair.close()
