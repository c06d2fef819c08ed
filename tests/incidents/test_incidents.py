"""Incidents of an SM, a cable or a port, as an application sees them: the same on simulator and kernel.

Each test runs twice from one body: here on the simulator, and in the lab's guest on the kernel's own ib_sa,
rdma_cm and IPoIB with a real OpenSM (`tests/lab/test_infiniband_incidents.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from mcast import Endpoint, Lost, Membership, PortDown, PortUp, Rejoined, open_endpoint
from mcast.api import DeviceGone, InvalidArgument, MembershipLost, Message

from .sides import SOFTIB, Side, SimSide, SoftibSide

ENETRESET = 102
ENDED = (MembershipLost, {"event": "MULTICAST_ERROR", "status": -ENETRESET})
"""Event by which the kernel ends a membership, whatever the port's event was (SA-RESET-1)."""
GONE = (DeviceGone, {"event": "DEVICE_REMOVAL", "status": 0})
MLIDS = 32
GROUP, OTHER = "239.77.1.1", "239.77.1.2"
WITHIN = 60.0
"""Seconds that an event may take; never a delay."""
QUIET = 1.0
"""Seconds in which nothing must come."""


@pytest.fixture
def side() -> Iterator[Side]:
    """The lab's InfiniBand in its guest, the simulator everywhere else."""
    made = SoftibSide() if SOFTIB.exists() else SimSide()
    yield made
    made.close()


class Pair:
    """A sender, and the receiver that the incident happens to."""

    def __init__(self, side: Side) -> None:
        self.sender = open_endpoint(side.backend, side.sender, seed=1)
        self.receiver = open_endpoint(side.backend, side.receiver, seed=2)
        self.numbers = count(1)
        self.out = self.sender.sender(GROUP)
        self.group: Membership = self.receiver.join(GROUP)
        self.receives()

    def receives(self) -> None:
        """Check that a message arrives; the switches may not know the member at first (SA-SM-4)."""
        for number in self.numbers:
            self.out.send(b"%d" % number)
            while message := self.group.recv(timeout=0.2):
                if bytes(message.payload) == b"%d" % number:
                    assert message.source is not None  # known from the GRH alone
                    return
            assert number < 1000, "nothing arrives"

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


@pytest.fixture
def pair(side: Side) -> Iterator[Pair]:
    made = Pair(side)
    yield made
    made.close()


def seen(endpoint: Endpoint, expected: list[object], why: tuple[type, object] = ENDED) -> None:
    """The endpoint's next events are these, and no other follows."""
    found: list[object] = []
    for _ in expected:
        event = endpoint.next_event(WITHIN)
        found.append(type(event))
        if isinstance(event, Lost):
            assert (type(event.error), event.error.arguments) == why
    assert found == expected
    assert endpoint.next_event(QUIET) is None


def restart(side: Side, pair: Pair) -> None:
    side.restart_sm()
    for endpoint in (pair.receiver, pair.sender):
        seen(endpoint, [Lost, Rejoined])


def relabel(side: Side, pair: Pair) -> None:
    """The SM does not answer at a LID that it did not give: the group is back when that is undone."""
    side.relabel()
    seen(pair.receiver, [Lost, Rejoined])
    seen(pair.sender, [])


def renumber(side: Side, pair: Pair) -> None:
    side.renumber()
    for endpoint in (pair.receiver, pair.sender):
        seen(endpoint, [Lost, Rejoined])


def cut(side: Side, pair: Pair) -> None:
    """Hosts see no event of a cable that is not theirs, until the SM finds them anew."""
    side.cable(whole=False)
    seen(pair.receiver, [])
    assert pair.group.joined
    side.cable(whole=True)
    seen(pair.receiver, [Lost, Rejoined])
    seen(pair.sender, [])


def flap(side: Side, pair: Pair) -> None:
    side.link(up=False)
    seen(pair.receiver, [PortDown, Lost])
    side.link(up=True)
    seen(pair.receiver, [PortUp, Rejoined])
    seen(pair.sender, [])


def replug(side: Side, pair: Pair) -> None:
    """The device stays until the endpoint has let go of it, and is found again under its address."""
    side.remove()
    seen(pair.receiver, [Lost], GONE)
    side.add()
    seen(pair.receiver, [Rejoined])
    seen(pair.sender, [])


def fail_over(side: Side, pair: Pair) -> None:
    side.fail_over()
    for endpoint in (pair.receiver, pair.sender):
        seen(endpoint, [Lost, Rejoined])


@pytest.mark.parametrize(
    "incident", [restart, relabel, renumber, cut, flap, replug, fail_over], ids=lambda one: one.__name__
)
def test_a_membership_comes_back(side: Side, pair: Pair, incident: Callable[[Side, Pair], None]) -> None:
    incident(side, pair)
    pair.receives()
    stats = pair.receiver.stats()
    assert (stats.lost, stats.rejoins, stats.gave_up) == (1, 1, 0)


def test_an_answer_to_a_lid_that_has_changed_is_lost(side: Side, caplog: pytest.LogCaptureFixture) -> None:
    """The sender of a message is answered at the LID that it sent from; its next message has the new one."""
    caplog.set_level(logging.DEBUG, "mcast")
    with open_endpoint(side.backend, side.sender) as near, open_endpoint(side.backend, side.receiver) as far:
        group, out, numbers = near.join(GROUP), far.sender(GROUP), count(1)

        def question() -> Message:
            for number in numbers:
                out.send(b"%d" % number)
                while message := group.recv(timeout=0.2):
                    if bytes(message.payload) == b"%d" % number:
                        return message
                assert number < 1000, "nothing arrives"
            raise AssertionError

        early = question()
        group.reply(early, b"answer")
        assert far.recv(timeout=WITHIN) is not None
        side.renumber()
        for endpoint in (far, near):
            seen(endpoint, [Lost, Rejoined])
        assert "LID_CHANGE" in caplog.text
        group.reply(early, b"answer")
        assert far.recv(timeout=QUIET) is None
        late = question()
        assert (late.source, late.src_qp) == (early.source, early.src_qp)
        assert late.src_lid != early.src_lid
        group.reply(late, b"answer")
        assert far.recv(timeout=WITHIN) is not None


def test_no_messages_before_the_switch_is_programmed(side: Side, pair: Pair) -> None:
    """A member hears nothing before its switch is programmed.

    The SA's answer and the switches' tables are not ordered (SA-SM-4).
    """
    side.program(at_once=False)
    out, group = pair.sender.sender(OTHER), pair.receiver.join(OTHER)
    out.send(b"early")
    assert group.recv(timeout=QUIET) is None
    assert group.joined
    side.program(at_once=True)
    for _ in range(100):
        out.send(b"late")
        if message := group.recv(timeout=0.2):
            break
    assert message is not None
    assert bytes(message.payload) == b"late"
    seen(pair.receiver, [])


def test_a_group_that_finds_no_mlid_is_refused(side: Side) -> None:
    """The SA refuses, the kernel says EINVAL, and a group that ends makes room for another."""
    side.exhaust()
    with open_endpoint(side.backend, side.receiver, seed=2) as receiver:
        groups: list[Membership] = []
        refused: InvalidArgument | None = None
        while refused is None and len(groups) <= MLIDS:
            try:
                groups.append(receiver.join(f"239.78.0.{len(groups)}"))
            except InvalidArgument as error:
                refused = error
        assert refused is not None
        assert refused.errno == 22
        assert MLIDS > len(groups) > MLIDS // 3  # the others are IPoIB's own
        groups.pop().leave()
        receiver.join("239.78.1.1")
