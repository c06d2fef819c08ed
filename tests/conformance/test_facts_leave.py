"""Measured facts about leaving and destroying; see `mcast.conformance.facts`."""

from __future__ import annotations

import errno as E
from collections.abc import Callable

import pytest

from mcast.api import Capability, CmEventType, DeviceGone, Feature, InvalidArgument, Testbed
from mcast.conformance.helpers import Application, eventually, fact, needs, new_group, raw_address, readable
from mcast.wire.addresses import AF_UNIX, Gid, McastAddress


@fact("K-LEAVE-2")
def test_holding_an_event_blocks_neither_leave_nor_destroy(bed: Testbed) -> None:
    groups, peer, held = [new_group(), new_group()], Application(bed), []
    for group in groups:
        peer.id.join_multicast(group)
        held.append(peer.event())
    peer.id.leave_multicast(groups[0])
    peer.id.destroy()
    peer.channel.close()
    assert all(event.ud is not None for event in held)


@fact("K-LEAVE-3")
@pytest.mark.parametrize(
    "ask",
    [lambda peer: peer.id.join_multicast(new_group()), lambda peer: peer.id.resolve_addr(new_group())],
    ids=["join", "resolve"],
)
def test_an_event_that_nobody_fetched_dies_with_its_id(
    bed: Testbed, ask: Callable[[Application], None]
) -> None:
    peer = Application(bed)
    ask(peer)
    eventually(bed, lambda: readable(peer.channel))
    peer.id.destroy()
    assert not readable(peer.channel)
    assert peer.channel.get_event(0) is None


@fact("K-LEAVE-6")
@pytest.mark.parametrize("family", [None, AF_UNIX], ids=["AF_UNSPEC", "AF_UNIX"])
@pytest.mark.parametrize("joined", [False, True])
def test_leave_of_an_address_of_no_family_is_refused(bed: Testbed, family: object, joined: bool) -> None:
    peer, address = Application(bed), raw_address(family)
    if joined:
        peer.join(new_group())
    with pytest.raises(InvalidArgument):
        peer.id.leave_multicast(address)


@fact("K-LEAVE-8")
@needs(Feature.DEVICE_REMOVAL)
def test_leave_after_the_device_was_removed(bed: Testbed) -> None:
    peer, group = Application(bed, bed.spare), new_group()
    mgid = peer.join(group).gid
    bed.remove_device(peer.port)
    peer.event(CmEventType.DEVICE_REMOVAL)
    eventually(bed, lambda: not bed.observer.group_ports(mgid))
    with pytest.raises(DeviceGone) as caught:
        peer.id.leave_multicast(group)
    assert caught.value.errno == E.ENXIO
    peer.qp.close()
    peer.id.destroy()
    peer.channel.close()


@fact("K-LEAVE-10", "K-LEAVE-11")
@needs(Feature.ATTACH_TABLE)
@pytest.mark.parametrize("joined", [True, False], ids=["joined", "attached"])
def test_closing_a_qp_detaches_it_first(bed: Testbed, joined: bool) -> None:
    group, peer, keeper = new_group(), Application(bed), Application(bed)
    where = keeper.join(group)
    if joined:
        peer.join(group)
    else:
        peer.qp.attach_mcast(where.gid, where.dlid)
    assert peer.qp.qp_num in bed.observer.attached(peer.port, where.gid)
    peer.qp.close()
    assert peer.id.qp is None
    assert bed.observer.attached(peer.port, where.gid) == {keeper.qp.qp_num}
    if joined:
        peer.id.leave_multicast(group)
    keeper.id.leave_multicast(group)
    eventually(bed, lambda: where.gid not in bed.observer.port_memberships(peer.port))


@fact("K-LEAVE-12")
@needs(Feature.ATTACH_TABLE)
def test_destroying_an_id_frees_the_attachments_of_its_qp(bed: Testbed) -> None:
    peer, by_hand = Application(bed), Gid("ff0e::77")
    joined = peer.join(new_group()).gid
    peer.qp.attach_mcast(by_hand, 0xC077)
    peer.id.destroy()
    for group in (joined, by_hand):
        assert bed.observer.attached(peer.port, group) == set()
    eventually(bed, lambda: joined not in bed.observer.port_memberships(peer.port))


@fact("K-LEAVE-14")
def test_the_right_order_to_end_leaves_nothing(bed: Testbed) -> None:
    peer, group = Application(bed), new_group()
    mgid = peer.join(group).gid
    qp = peer.qp
    peer.id.leave_multicast(group)
    assert dict(qp.attachments) == {}
    qp.close()
    peer.id.destroy()
    peer.channel.close()
    eventually(bed, lambda: mgid not in bed.observer.port_memberships(peer.port))
    eventually(bed, lambda: not bed.observer.group_exists(mgid))


@fact("K-LEAVE-1")
@needs(Capability.IGMP)
@pytest.mark.parametrize("queued", [False, True], ids=["at-once", "event-queued"])
def test_an_early_leave_ends_the_igmp_membership(bed: Testbed, queued: bool) -> None:
    peer, group = Application(bed), new_group()
    mgid = mgid_of(group)
    peer.id.join_multicast(group)
    assert mgid in bed.observer.port_memberships(peer.port)
    if queued:
        eventually(bed, lambda: readable(peer.channel))
    peer.id.leave_multicast(group)
    assert not readable(peer.channel)
    eventually(bed, lambda: mgid not in bed.observer.port_memberships(peer.port))
    eventually(bed, lambda: not bed.observer.group_exists(mgid))


def mgid_of(group: McastAddress) -> Gid:
    """The MGID of an IPv4 group on RoCEv2."""
    assert not isinstance(group.address, Gid)
    return Gid(group.address)
