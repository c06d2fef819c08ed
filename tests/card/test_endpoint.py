"""Endpoints on a card to which things happen: they lose their memberships, and take them up again."""

from __future__ import annotations

import errno as E
import signal
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import cast

import pytest

from mcast import Endpoint, Lost, Membership, Rejoined, RejoinPolicy, open_endpoint
from mcast.api import CmEventType, McastError
from mcast.backends.rdma.qp import RdmaQueuePair

from .card import AsyncEvent, Card, Stage
from .ends import BOUND, GROUP
from .provider import CardBackend

SECOND = 1
"""The receiver's device."""


class Pair:
    """A sender on the first device, a receiver on the second."""

    def __init__(self, card: Card, backend: CardBackend) -> None:
        policy = RejoinPolicy(first=0.01, maximum=0.02)
        self.card = card
        self.sender: Endpoint = open_endpoint(backend, "10.0.0.1", rejoin=policy)
        self.receiver: Endpoint = open_endpoint(backend, "10.0.0.2", rejoin=policy)
        self.out, self.group = self.sender.sender(GROUP), self.receiver.join(GROUP)

    def receives(self) -> bool:
        """Return True if a message gets through."""
        self.out.send(b"?")
        return self.group.recv(BOUND) is not None


@pytest.fixture(params=["roce", "infiniband"])
def pair(request: pytest.FixtureRequest, card: Card, backend: CardBackend) -> Pair:
    card.network(request.param, ports=2)
    return Pair(card, backend)


def change_address(pair: Pair) -> None:
    assert pair.card.event(CmEventType.ADDR_CHANGE, 0, "10.0.0.2") == 1


def end_membership(pair: Pair) -> None:
    assert pair.card.event(CmEventType.MULTICAST_ERROR, -102, "10.0.0.2", GROUP) == 1


def fail_queue_pair(pair: Pair) -> None:
    pair.card.qp_event(pair.receiver.qp_num, AsyncEvent.QP_FATAL)


def remove_device(pair: Pair) -> None:
    pair.card.remove(SECOND)
    pair.card.restore(SECOND)


def disassociate_device(pair: Pair) -> None:
    pair.card.remove(SECOND, disassociated=True)
    pair.card.restore(SECOND)


def comes_back(pair: Pair, fault: Callable[[Pair], None]) -> None:
    assert pair.receives()
    fault(pair)
    found = [pair.receiver.next_event(BOUND) for _ in range(2)]
    assert [type(one) for one in found] == [Lost, Rejoined]
    assert pair.receives()


@pytest.mark.parametrize("fault", [change_address, end_membership, fail_queue_pair, remove_device])
def test_a_lost_membership_comes_back(pair: Pair, fault: Callable[[Pair], None]) -> None:
    comes_back(pair, fault)


def test_id_on_a_removed_device_is_destroyed_once(pair: Pair) -> None:
    """The id on a device that is away is destroyed once."""
    pair.card.remove(SECOND)
    assert isinstance(pair.receiver.next_event(BOUND), Lost)
    looks, ends = (pair.card.count(call) for call in ("ibv_get_device_list", "rdma_get_devices"))
    while pair.card.count("ibv_get_device_list") < looks + 5:
        pair.receiver.next_event(0.01)
    assert pair.card.count("rdma_get_devices") <= ends + 1
    pair.card.restore(SECOND)
    assert isinstance(pair.receiver.next_event(BOUND), Rejoined)


@pytest.mark.parametrize("call", ["rdma_destroy_id", "ibv_destroy_cq", "ibv_destroy_comp_channel"])
def test_held_device_is_destroyed_before_the_rejoin(pair: Pair, call: str) -> None:
    """An id that a removed device holds for a while is destroyed before the rejoin.

    The kernel keeps a device for as long as an id holds it.
    """
    before = Counter(one.kind for one in pair.card.leftovers())
    pair.card.fail(call, E.EIO, 1)
    pair.card.remove(SECOND)
    assert isinstance(pair.receiver.next_event(BOUND), Lost)
    looks = pair.card.count("ibv_get_device_list")
    while pair.card.count("ibv_get_device_list") < looks + 5:
        pair.receiver.next_event(0.01)
    pair.card.restore(SECOND)
    assert isinstance(pair.receiver.next_event(BOUND), Rejoined)
    assert Counter(one.kind for one in pair.card.leftovers()) == before


@pytest.mark.parametrize("layer", ["roce", "infiniband"])
def test_membership_returns_with_its_card(card: Card, layer: str) -> None:
    """A membership comes back with its card and closing says what the old one kept."""
    card.network(layer, ports=2)
    with pytest.raises(McastError) as failed, CardBackend(card) as backend:
        comes_back(Pair(card, backend), disassociate_device)
    assert failed.value.errno == E.EIO


def test_refused_join_does_not_fail_the_next(card: Card, backend: CardBackend) -> None:
    """A refused join is an error and the next is none."""
    card.infiniband(1)
    with open_endpoint(backend, "10.0.0.1") as endpoint:
        card.answer_join(CmEventType.MULTICAST_ERROR, -22)
        with pytest.raises(OSError):
            endpoint.join(GROUP)
        assert endpoint.groups == ()
        member: Membership = endpoint.join(GROUP)
        assert member.joined


GRH_BYTES, DSCP, LEVEL = 40, 26, 3
CLASS_AT = {"roce": 21 * 8, "infiniband": 4}
"""Where the traffic class begins in the 320 bits of the GRH: an IPv4 header in its end, or an IPv6 one."""


@pytest.mark.parametrize("layer", ["roce", "infiniband"])
@pytest.mark.parametrize("asked", [False, True])
def test_the_card_is_told_the_class_of_what_is_sent(
    card: Card, backend: CardBackend, layer: str, asked: bool
) -> None:
    card.network(layer, ports=2)
    traffic_class, level = (DSCP << 2, LEVEL) if asked else (None, None)
    with (
        open_endpoint(backend, "10.0.0.1", traffic_class=traffic_class, service_level=level) as sender,
        open_endpoint(backend, "10.0.0.2") as receiver,
    ):
        group = receiver.join(GROUP)
        sender.sender(GROUP).send(b"of that class")
        message = group.recv(BOUND)
        assert message is not None
        assert message.sl == (level or 0)
        slab = cast(RdmaQueuePair, receiver._core.resources.qp)._slab
        at = slab.find(b"of that class")
        grh = int.from_bytes(slab[at - GRH_BYTES : at])
        found = grh >> (GRH_BYTES * 8 - CLASS_AT[layer] - 8) & 0xFF
        assert found == (traffic_class or 0)


def test_handler_cannot_send_within_a_numbered_send(card: Card, backend: CardBackend) -> None:
    """On the same group it is refused, and does not wait for its own thread."""
    card.network("roce", ports=1)
    said: list[BaseException] = []
    within: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        assert not within, "an earlier call of the handler hangs"
        within.append(number)
        try:
            group.send(b"of the handler", timeout=0)
        except RuntimeError as error:
            said.append(error)
            card.release_all()
        within.clear()

    with open_endpoint(backend, "10.0.0.1", sequence=True, send_depth=2) as endpoint:
        group = endpoint.join(GROUP)
        card.hold(Stage.WIRE, endpoint.qp_num)
        before = signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.05, BOUND)
        try:
            assert group.send_batch([b"x"] * 5) == 5
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert ["already sending to the same group" in str(error) for error in said] == [True]


@pytest.mark.parametrize("number", [16, 17, 18, 19, 20])
def test_events_of_no_membership_change_nothing(pair: Pair, number: int) -> None:
    """The events that rdma-core 60 added, and one that no version has yet."""
    assert pair.receives()
    assert pair.card.event(number, -E.EIO, "10.0.0.2") == 1
    assert pair.receives()
    assert pair.receiver.next_event(0) is None
