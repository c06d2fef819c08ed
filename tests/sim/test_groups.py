"""Groups as seen by a program on one host of a fabric, and by one on all hosts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mcast.api import GroupMember, GroupSource, JoinAttrEx
from mcast.backends.sim import Fabric, open_fabric

GROUP = "239.1.1.1"
HOST, SWITCH, SA = GroupSource.HOST, GroupSource.SWITCH, GroupSource.SA


def joined(fabric: Fabric) -> None:
    """The first two ports are full members, the third is send-only."""
    channel = open_fabric(fabric).event_channel()
    for number, make in enumerate((JoinAttrEx.full_member, JoinAttrEx.full_member, JoinAttrEx.send_only), 1):
        cm_id = channel.create_id()
        cm_id.bind_addr(f"10.0.0.{number}")
        cm_id.join_multicast_ex(make(GROUP))
        event = channel.get_event(5)
        assert event is not None
        event.check()


def members(fabric: Fabric, host: int | None) -> tuple[GroupMember, ...]:
    groups = {info.mgid: info for info in open_fabric(fabric, host).groups().groups}
    mgid = "::ffff:239.1.1.1" if fabric.sa is None else "ff12:4001:ffff::f01:101"
    found = next(info for name, info in groups.items() if str(name) == mgid)
    assert (found.mlid == 0) == (fabric.sa is None)
    return found.members


def test_roce_host_sees_itself_and_switches() -> None:
    """On RoCE a host sees itself and all hosts see the switches."""
    fabric = Fabric.roce(ports=4)
    joined(fabric)
    assert members(fabric, 0) == (GroupMember("roce0/1", frozenset({HOST})),)
    both = frozenset({HOST, SWITCH})
    assert members(fabric, None) == (GroupMember("roce0/1", both), GroupMember("roce1/1", both))


def test_infiniband_host_sees_groups_and_itself() -> None:
    """On InfiniBand a host sees the groups and itself and all hosts see the SA."""
    fabric = Fabric.infiniband(ports=4)
    joined(fabric)
    assert members(fabric, 2) == (GroupMember("ib2/1", frozenset({HOST}), send_only=True),)
    assert members(fabric, 3) == ()
    both = frozenset({HOST, SA})
    assert members(fabric, None) == (
        GroupMember("ib0/1", both),
        GroupMember("ib1/1", both),
        GroupMember("ib2/1", both, send_only=True),
    )


def test_a_switch_that_forgot_a_member_is_seen() -> None:
    fabric = Fabric.roce(ports=2)
    joined_on = open_fabric(fabric).event_channel().create_id()
    joined_on.bind_addr("10.0.0.1")
    joined_on.join_multicast(GROUP)
    fabric.core.igmp.snooping.clear()
    assert members(fabric, None) == (GroupMember("roce0/1", frozenset({HOST})),)


@pytest.mark.parametrize(
    ("make", "host", "words"),
    [
        (Fabric.roce, 0, ["send-only members", "members on other hosts"]),
        (Fabric.roce, None, ["send-only members"]),
        (Fabric.infiniband, 0, ["members on other hosts: the SA"]),
        (Fabric.infiniband, None, []),
    ],
)
def test_what_is_not_seen_is_said(make: Callable[..., Fabric], host: int | None, words: list[str]) -> None:
    unseen = open_fabric(make(ports=2), host).groups().unseen
    assert len(unseen) == len(words)
    assert all(sentence.startswith(word) for sentence, word in zip(unseen, words, strict=True))
