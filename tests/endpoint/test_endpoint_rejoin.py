"""Lost memberships come back, on the simulator and on a card: by the policy, and visibly.

On the simulator alone: what befalls an SM, a switch or a partition, and what follows from virtual time.
"""

from __future__ import annotations

import errno as E
import logging
import re
from collections.abc import Callable, Iterator
from ipaddress import ip_address
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
    AlreadyJoined,
    Backend,
    Closed,
    DeviceGone,
    McastError,
    MembershipLost,
    Phase,
    QpCounters,
    QpError,
    QueuePair,
    TimedOut,
)
from mcast.backends.sim import Fabric
from mcast.backends.sim.clock import VirtualClock
from mcast.endpoint.resources import _added

from ..networks import KINDS, UDP, CardNetwork, Network, SimNetwork, UdpNetwork, network_of

GROUP, OTHER = "239.1.2.3", "239.4.5.6"


INFINIBAND_KINDS = [kind for kind in KINDS if kind.endswith("infiniband")]
BOUND = 30.0
"""Seconds; the longest that anything may take, never a delay."""


class Pair:
    """A sender on port 0, and on port 1 the receiver that a fault befalls."""

    def __init__(self, network: Network, **options: Any) -> None:
        self.network = network
        self.a_while = 0.2 if isinstance(network, CardNetwork | UdpNetwork) else 60.0
        """Seconds to wait for messages that must not arrive: in virtual time that costs nothing."""
        self.backend: Backend = network.open()
        self.sender = open_endpoint(self.backend, "10.0.0.1")
        self.receiver: Endpoint = open_endpoint(self.backend, "10.0.0.2", **{"seed": 1} | options)
        self.out = self.sender.sender(GROUP)
        self.group: Membership = self.receiver.join(GROUP)

    def fail_qp(self) -> None:
        self.network.fail_qp(self.receiver.qp_num)

    def receives(self) -> bool:
        """Return True if a message still gets through."""
        self.out.send(b"?")
        return self.group.recv(BOUND) is not None

    def events(self, count: int, within: float = BOUND) -> list[object]:
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
        assert self.network.leftovers() == ()
        self.backend.close()
        self.network.close()


class SimPair(Pair):
    """On a simulated fabric of its own."""

    def __init__(self, fabric: Fabric, **options: Any) -> None:
        super().__init__(SimNetwork(fabric), **options)
        self.fabric, self.port = fabric, fabric.ports[1]


@pytest.fixture
def pairs() -> Iterator[Callable[..., SimPair]]:
    """Makes pairs on simulated fabrics, and sees to it that nothing is left of them."""
    made: list[SimPair] = []

    def make(fabric: Fabric, **options: Any) -> SimPair:
        made.append(SimPair(fabric, **options))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.fixture(params=[*KINDS, UDP])
def paired(request: pytest.FixtureRequest) -> Iterator[Callable[..., Pair]]:
    """Makes the pair of a network of each kind; nothing may be left of it."""
    network, made = network_of(request), []

    def make(**options: Any) -> Pair:
        made.append(Pair(network, **options))
        return made[0]

    yield make
    made[0].close()


on_infiniband = pytest.mark.parametrize("paired", INFINIBAND_KINDS, indirect=True)
"""The kernel tells members of a RoCE group of nothing that could be refused."""
not_on_sockets = pytest.mark.parametrize("paired", KINDS, indirect=True)
"""A bond below a socket loses no message, and a full socket loses messages and goes on."""


# Each fault gives the events that were seen while it lasted.


def restart(pair: SimPair) -> list[object]:
    pair.fabric.restart_sm()
    return []


def fail_over(pair: SimPair) -> list[object]:
    """For two seconds no SM answers."""
    pair.fabric.restart_sm(2.0)
    return []


def cut_cable(pair: SimPair) -> list[object]:
    """The cable of the receiver's switch is cut and mended: the SM finds its ports anew."""
    pair.fabric.cut_cable(pair.port.switch)
    assert pair.receiver.next_event(1.0) is None  # the hosts see nothing
    pair.fabric.repair_cable(pair.port.switch)
    return []


def lose_pkey(pair: SimPair) -> list[object]:
    """The partition goes for a while, and with it the IPoIB broadcast group that joins are made from."""
    pair.fabric.set_pkeys(pair.port, ())
    seen = pair.events(1)
    assert pair.receiver.next_event(1.0) is None
    pair.fabric.set_pkeys(pair.port, (0xFFFF,))
    return seen


def flap(pair: Pair) -> list[object]:
    pair.network.set_link(1, up=False)
    seen = pair.events(1)
    pair.network.set_link(1, up=True)
    return seen


def end_memberships(pair: Pair) -> list[object]:
    pair.network.end_memberships(1)
    return []


def bond(pair: Pair) -> list[object]:
    pair.network.fail_over(1)
    return []


def replug(pair: Pair) -> list[object]:
    """The device is away for a while."""
    pair.network.remove_device(1)
    seen = pair.events(1)
    assert pair.receiver.next_event(pair.a_while) is None
    pair.network.restore_device(1)
    return seen


def fail_qp(pair: Pair) -> list[object]:
    pair.fail_qp()
    return []


def overrun(pair: Pair) -> list[object]:
    pair.network.overrun(pair.receiver.qp_num)
    return []


def comes_back(pair: Pair, fault: Callable[[Any], list[object]]) -> None:
    assert pair.receives()
    seen = fault(pair)
    lost, rejoined = seen + pair.events(2 - len(seen))
    assert isinstance(lost, Lost)
    assert isinstance(rejoined, Rejoined)
    assert lost.group == rejoined.group == pair.group.group
    assert rejoined.attempts >= 1
    assert rejoined.outage > 0
    assert pair.group.joined
    if isinstance(pair, SimPair):
        pair.sender.next_event(10.0)  # the sender may have lost its own membership
        pair.sender.next_event(10.0)
    assert pair.receives()
    stats = pair.receiver.stats()
    assert (stats.lost, stats.rejoins, stats.gave_up) == (1, 1, 0)
    assert pair.group.stats().rejoins == 1
    assert pair.next_event(0.0) is None


@pytest.mark.parametrize("fault", [replug, fail_qp])
def test_a_membership_comes_back_and_delivers(
    paired: Callable[..., Pair], fault: Callable[[Pair], list[object]]
) -> None:
    comes_back(paired(), fault)


@not_on_sockets
@pytest.mark.parametrize("fault", [bond, overrun])
def test_a_membership_on_another_queue_pair_delivers(
    paired: Callable[..., Pair], fault: Callable[[Pair], list[object]]
) -> None:
    comes_back(paired(), fault)


@on_infiniband
@pytest.mark.parametrize("fault", [flap, end_memberships])
def test_a_membership_that_the_kernel_ended_comes_back(
    paired: Callable[..., Pair], fault: Callable[[Pair], list[object]]
) -> None:
    comes_back(paired(), fault)


@pytest.mark.parametrize("fault", [restart, fail_over, cut_cable, lose_pkey])
def test_a_membership_that_the_fabric_lost_comes_back(
    pairs: Callable[..., SimPair], fault: Callable[[SimPair], list[object]]
) -> None:
    comes_back(pairs(Fabric.infiniband(ports=2, switches=3)), fault)


def stays_lost(pair: Pair, fault: Callable[[Any], object]) -> McastError:
    """Why a membership without a policy was lost."""
    fault(pair)
    with pytest.raises(MembershipLost) as caught:
        pair.group.recv(timeout=BOUND)
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
    assert pair.next_event(pair.a_while) is None
    assert not pair.group.joined
    return caught.value.__cause__


def test_without_a_policy_calls_raise_membership_lost(paired: Callable[..., Pair]) -> None:
    why = stays_lost(paired(rejoin=None), lambda pair: pair.network.remove_device(1))
    assert (why.call, [*why.arguments]) == ("get_event", ["event", "status"])


@not_on_sockets
def test_without_a_policy_a_bond_ends_a_membership(paired: Callable[..., Pair]) -> None:
    why = stays_lost(paired(rejoin=None), bond)
    assert (why.call, [*why.arguments]) == ("event", ["event"])


@on_infiniband
@pytest.mark.parametrize(
    "fault",
    [lambda pair: pair.network.end_memberships(1), lambda pair: pair.network.set_link(1, up=False)],
    ids=["end", "link"],
)
def test_no_policy_kernel_loss_stays(paired: Callable[..., Pair], fault: Callable[[Pair], None]) -> None:
    """Without a policy what the kernel ended stays lost."""
    stays_lost(paired(rejoin=None), fault)


@pytest.mark.parametrize(
    "fault",
    [lambda pair: pair.fabric.restart_sm(), lambda pair: pair.fabric.set_pkeys(pair.port, ())],
    ids=["restart", "pkeys"],
)
def test_no_policy_fabric_loss_stays(pairs: Callable[..., SimPair], fault: Callable[[SimPair], None]) -> None:
    """Without a policy what the fabric lost stays lost."""
    stays_lost(pairs(Fabric.infiniband(ports=2), rejoin=None), fault)


def test_no_policy_failed_qp_is_raised(paired: Callable[..., Pair]) -> None:
    """Without a policy a failed queue pair is the callers."""
    pair = paired(rejoin=None)
    pair.fail_qp()
    with pytest.raises(QpError):
        pair.group.recv(timeout=1)
    with pytest.raises(QpError):
        pair.group.send(b"")


@on_infiniband
def test_loss_is_raised_once_to_a_common_receive(
    paired: Callable[..., Pair],
) -> None:
    """A loss is raised once to who receives for all while another group lives."""
    pair = paired(rejoin=RejoinPolicy(jitter=0, give_up_after=0))
    lost, receiver = pair.group, pair.receiver
    kept, out = receiver.join(OTHER), pair.sender.sender(OTHER)
    with pair.network.fail_joins(1, 1, E.EINVAL):  # of the two at once: of the group that was joined first
        pair.network.end_memberships(1)
        kinds = [type(event) for event in pair.events(4)]
    assert sorted(kinds, key=str) == sorted([Lost, Lost, GaveUp, Rejoined], key=str)
    with pytest.raises(MembershipLost):
        receiver.recv(timeout=0)
    out.send(b"alive")
    assert receiver.recv(timeout=BOUND) is not None
    assert kept.joined
    with pytest.raises(MembershipLost):
        lost.recv(timeout=0)
    kept.leave()
    with pytest.raises(MembershipLost):  # of the last one every call tells
        receiver.recv(timeout=0)
    lost.leave()
    assert receiver.recv(timeout=0) is None


@on_infiniband
def test_a_silent_or_refusing_sa_is_asked_again(paired: Callable[..., Pair]) -> None:
    pair = paired(rejoin=RejoinPolicy(first=0.01))
    for error, times in ((E.ETIMEDOUT, 2), (E.EINVAL, 3)):
        with pair.network.fail_joins(1, times, error):
            pair.network.end_memberships(1)
            lost, rejoined = pair.events(2)
        assert isinstance(lost, Lost)
        assert isinstance(rejoined, Rejoined)
        assert rejoined.attempts == times + 1
        assert pair.receives()


def test_membership_returns_with_a_free_mlid(pairs: Callable[..., SimPair]) -> None:
    # One MLID for the IPoIB broadcast group, and one for everybody else.
    """A membership comes back once an MLID is free again."""
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
        assert rejoined.outage > 5
        assert rejoined.attempts > 3


@on_infiniband
def test_permanent_refusal_ends_the_policy(paired: Callable[..., Pair]) -> None:
    # In which a slow machine tries twice, too.
    """When the SA refuses for good the policy gives up."""
    pair = paired(rejoin=RejoinPolicy(first=0.1, factor=1, give_up_after=2.0))
    with pair.network.refusing_joins(1):
        pair.network.end_memberships(1)
        lost, given_up = pair.events(2)
        assert isinstance(lost, Lost)
        assert isinstance(given_up, GaveUp)
        assert given_up.attempts > 1
        assert given_up.error.errno == E.EINVAL
        with pytest.raises(MembershipLost, match="not restored"):
            pair.group.recv(timeout=BOUND)
        with pytest.raises(MembershipLost):
            pair.group.send(b"")
    assert pair.receiver.stats().gave_up == 1
    pair.group.leave()
    assert pair.receiver.join(GROUP).joined


@pytest.mark.parametrize("network", ["roce", "card-roce", UDP], indirect=True)
def test_named_device_returns_with_a_new_address(network: Network, backend: Backend) -> None:
    """A named device is found again though its address has changed."""
    wanted = ip_address("10.0.0.2")
    name = next(device.name for device in backend.devices() if wanted in device.ports[0].addresses)
    with open_endpoint(backend, device=name) as endpoint:
        group = endpoint.join(GROUP)
        before = endpoint.address
        network.remove_device(1)
        assert isinstance(endpoint.next_event(BOUND), Lost)
        network.move(1)
        network.restore_device(1)
        assert isinstance(endpoint.next_event(BOUND), Rejoined)
        assert endpoint.address != before
        assert endpoint.address in endpoint.port.addresses
        assert group.joined


def test_a_device_that_stays_away_is_given_up(paired: Callable[..., Pair]) -> None:
    pair = paired(rejoin=RejoinPolicy(first=0.001, give_up_after=0.05))
    pair.network.remove_device(1)
    lost, given_up = pair.events(2)
    assert isinstance(lost, Lost)
    assert isinstance(given_up, GaveUp)
    with pytest.raises(MembershipLost):
        next(iter(pair.group))
    assert pair.receiver.stats().received == 0


def refuse_resets(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: QueuePair) -> None:
        raise McastError(22, "modify", Phase.MODIFY)

    monkeypatch.setattr(type(pair.receiver._core.resources.qp), "reset", refuse)


def test_a_queue_pair_that_cannot_be_reset_is_replaced(
    paired: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = paired()
    before = pair.receiver.qp_num
    refuse_resets(pair, monkeypatch)
    pair.fail_qp()
    lost, rejoined = pair.events(2)
    assert isinstance(lost, Lost)
    assert isinstance(rejoined, Rejoined)
    assert rejoined.attempts == 2
    assert pair.receiver.qp_num != before
    assert pair.receives()


@on_infiniband
def test_a_send_waits_for_the_membership(paired: Callable[..., Pair]) -> None:
    pair = paired()
    with pair.network.fail_joins(1, 2, E.EINVAL):
        pair.network.end_memberships(1)
        assert isinstance(pair.next_event(BOUND), Lost)
        with pytest.raises(TimedOut, match="was lost, and not restored within 0") as caught:
            pair.group.send(b"at once", timeout=0)
        assert caught.value.arguments == {"group": pair.group.group}
        pair.group.send(b"in a while", timeout=BOUND)
    assert pair.group.joined
    rejoined = pair.next_event(0.0)
    assert isinstance(rejoined, Rejoined)
    assert rejoined.attempts == 3


@on_infiniband
def test_sending_to_one_group_restores_another(paired: Callable[..., Pair]) -> None:
    pair = paired(rejoin=RejoinPolicy(jitter=0))
    lost, kept = pair.group, pair.receiver.join(OTHER)
    with pair.network.fail_joins(1, 1, E.EINVAL):  # of the two at once: of the group that was joined first
        pair.network.end_memberships(1)
        assert [type(event) for event in pair.events(3)] == [Lost, Lost, Rejoined]
        assert kept.joined
        assert not lost.joined
        with pair.backend.event_channel() as idle:
            while not lost.joined:
                idle.get_event(0.01)
                kept.send(b"x")


def test_the_counters_of_two_queue_pairs_are_added_up() -> None:
    past, now = QpCounters(1, 2, 3, 4, 5, 6, 7, 8, 9, 10), QpCounters(10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
    assert _added(past, now) == QpCounters(11, 22, 33, 44, 55, 60, 7, 88, 99, 110)
    unseen = now._replace(dropped_no_receive=None, dropped_too_long=None, dropped_qkey=None)
    for both in ((past, unseen), (unseen, past)):
        assert _added(*both)[2:5] == (None, None, None)


@not_on_sockets
def test_all_groups_return_on_a_new_queue_pair(paired: Callable[..., Pair]) -> None:
    """Every group of an endpoint comes back on the new queue pair."""
    pair = paired()
    with open_endpoint(pair.backend, "10.0.0.3", seed=3) as endpoint:
        groups = [endpoint.join(f"239.1.1.{n}") for n in range(5)]
        sender = endpoint.sender("239.2.2.2")
        before = endpoint.qp_num
        endpoint.recv(timeout=0)
        pair.network.fail_over(2)
        happened = [endpoint.next_event(BOUND) for _ in range(12)]
        assert [type(event) for event in happened] == [Lost] * 6 + [Rejoined] * 6
        assert endpoint.qp_num != before
        assert all(one.joined for one in (*groups, sender))
        groups[0].send(b"to myself")
        assert groups[0].recv(timeout=BOUND) is not None
        assert endpoint.stats().sent == 1
        groups[0].send(b"again")
        pair.network.fail_over(2)
        assert isinstance(endpoint.next_event(BOUND), Lost)
        assert endpoint.stats().sent == 2  # counters of all QPs


@on_infiniband
def test_group_left_while_lost_stays_left(paired: Callable[..., Pair]) -> None:
    """A group that is left while lost does not come back."""
    pair = paired()
    with pair.network.refusing_joins(1):
        pair.network.end_memberships(1)
        assert isinstance(pair.next_event(BOUND), Lost)
        pair.group.leave()
    assert pair.next_event(pair.a_while) is None
    assert pair.receiver.groups == ()


@pytest.mark.parametrize("given_up", [False, True], ids=["lost", "given up"])
def test_lost_group_is_not_joined_twice(pairs: Callable[..., SimPair], given_up: bool) -> None:
    """A group whose membership is lost is not joined a second time.

    Though the stack would: the leave of either would end the other one.
    """
    end = 2.0 if given_up else None
    pair = pairs(Fabric.infiniband(ports=2), rejoin=RejoinPolicy(first=1.0, factor=1, give_up_after=end))
    pair.fabric.set_pkeys(pair.port, ())
    seen = pair.events(1 + given_up)
    assert [type(event) for event in seen] == [Lost, GaveUp][: len(seen)]
    assert pair.receiver.next_event(3.5) is None  # a refused attempt has left nothing in the stack
    pair.fabric.set_pkeys(pair.port, (0xFFFF,))
    for name in (GROUP, f"{GROUP}:5000"):
        with pytest.raises(AlreadyJoined):
            pair.receiver.join(name)
    assert pair.receiver.groups == (pair.group,)
    if given_up:
        pair.group.leave()
        pair.group = pair.receiver.join(GROUP)
    else:
        assert isinstance(pair.next_event(60), Rejoined)
    assert pair.receives()


@pytest.mark.parametrize("rejoin", [None, RejoinPolicy(first=0.001, give_up_after=0.05)])
def test_join_names_the_policy_for_a_lost_device(
    paired: Callable[..., Pair], rejoin: RejoinPolicy | None
) -> None:
    """A join says whether a device that is away is looked for."""
    pair = paired(rejoin=rejoin)
    pair.network.remove_device(1)
    assert isinstance(pair.events(1 if rejoin is None else 2)[-1], Lost if rejoin is None else GaveUp)
    with pytest.raises(DeviceGone, match="is away, and not looked for any more: open another endpoint"):
        pair.receiver.join(OTHER)


@on_infiniband
def test_a_join_under_way_fails_when_the_device_goes(paired: Callable[..., Pair]) -> None:
    pair = paired()
    with pair.network.removed_while_joining(1), pytest.raises(DeviceGone):
        pair.receiver.join(OTHER)
    with pytest.raises(DeviceGone, match="is away"):
        pair.receiver.join(OTHER)


@not_on_sockets
def test_a_join_whose_id_ends_first_is_none(paired: Callable[..., Pair]) -> None:
    """ADDR_CHANGE is read, and behind it the outcome of a join; the id is replaced, and all that it holds."""
    pair = paired()
    pair.network.fail_over(1)
    try:
        late = pair.receiver.join(OTHER)
    except MembershipLost:
        late = None
    assert [type(event) for event in pair.events(2)] == [Lost, Rejoined]
    assert pair.receiver.groups == ((pair.group,) if late is None else (pair.group, late))
    late = late or pair.receiver.join(OTHER)
    pair.sender.sender(OTHER).send(b"heard")
    assert late.recv(timeout=BOUND) is not None


def test_rejoin_after_its_id_is_repeated(pairs: Callable[..., SimPair]) -> None:
    """A rejoin that ends after its id did is done again."""
    pair = pairs(Fabric.infiniband(ports=2))
    session, clock = pair.receiver._core, pair.fabric.clock
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
    assert pair.receives()
    assert pair.group.stats().rejoins == 1


def test_join_on_a_failed_qp_moves_to_the_next(
    paired: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group joined while the queue pair had failed returns with another one."""
    pair = paired()
    refuse_resets(pair, monkeypatch)
    pair.fail_qp()
    assert isinstance(pair.next_event(BOUND), Lost)
    second = pair.receiver.join(OTHER)
    kinds = [type(event) for event in pair.events(3)]
    assert sorted(kinds, key=str) == [Lost, Rejoined, Rejoined]
    pair.sender.sender(OTHER).send(b"heard")
    assert second.recv(timeout=BOUND) is not None


def test_flush_without_a_device_returns(paired: Callable[..., Pair]) -> None:
    """A flush while the device is away has nothing to wait for."""
    pair = paired()
    pair.group.send(b"sent")
    pair.network.remove_device(1)
    assert isinstance(pair.next_event(BOUND), Lost)
    recovery = pair.receiver._core.rejoiner.recovery
    assert recovery is not None
    while not recovery.attempts:
        assert pair.next_event(0.05) is None
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
        pair = SimPair(Fabric.infiniband(ports=2), seed=seed)
        for _ in range(3):
            pair.fabric.change_lid(pair.port)
        events = [pair.receiver.next_event(60) for _ in range(2)]
        pair.close()
        return [event.outage for event in events if isinstance(event, Rejoined)]

    assert gaps(5) == gaps(5) != gaps(6)


def test_unread_events_are_bounded(paired: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that nobody fetches are bounded and counted."""
    monkeypatch.setattr("mcast.endpoint.events.MAX_EVENTS", 4)
    pair = paired()
    for times in range(1, 4):
        pair.fail_qp()
        while pair.receiver.stats().rejoins < times:
            assert pair.group.recv(timeout=0.01) is None
    assert pair.receiver.stats().events_dropped == 2
    assert len([event for event in pair.events(5, 0) if event is not None]) == 4


def test_events_have_clear_texts(paired: Callable[..., Pair], caplog: pytest.LogCaptureFixture) -> None:
    """Events read well and the log says whose they are."""
    caplog.set_level(logging.INFO, "mcast")
    pair = paired()
    pair.fail_qp()
    lost, rejoined = pair.events(2)
    assert str(lost).startswith(f"{GROUP}: membership lost: ")
    assert re.match(rf"{re.escape(GROUP)}: rejoined after \d+\.\d", str(rejoined))
    assert "\n" not in str(lost)
    name = f"{pair.receiver.device.name}/1, 10.0.0.2"
    assert [said for said in caplog.messages if GROUP in said] == [f"{name}: {lost}", f"{name}: {rejoined}"]


def test_loss_and_return_have_one_log_level(
    paired: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    """A program that logs warnings alone, as Python does by default, hears that a membership is back."""
    caplog.set_level(logging.WARNING, "mcast")
    pair = paired()
    pair.network.set_link(1, up=False)
    pair.network.set_link(1, up=True)
    pair.fail_qp()
    while pair.receiver.stats().rejoins < 1:
        assert pair.receiver.next_event(60) is not None
    levels = {record.levelname for record in caplog.records if record.name == "mcast"}
    assert levels == {"WARNING"}
    assert any("rejoined" in line for line in caplog.messages)
    assert any("the link is up" in line for line in caplog.messages)
