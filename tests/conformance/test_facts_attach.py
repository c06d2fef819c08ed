"""Measured facts about attaching; see `mcast.conformance.facts`. Most rows are clauses: test_detach.py."""

from __future__ import annotations

import pytest

from mcast.api import Capability, Feature, InvalidArgument, QpState, Testbed
from mcast.conformance.helpers import Application, fact, needs, new_group, numbered
from mcast.wire.addresses import Gid

LIDS = [0, 1, 0xBFFF, 0xC000, 0xFFFE, 0xFFFF]


@fact("K-ATTACH-5")
@needs(Capability.IGMP)
@pytest.mark.parametrize("lid", LIDS)
def test_ethernet_takes_any_lid_and_the_same_back(bed: Testbed, lid: int) -> None:
    group, peer, keeper, sender = (
        new_group(),
        Application(bed, 0),
        Application(bed, 0, None),
        Application(bed, 1),
    )
    where, outward = keeper.join(group), sender.join(group)
    peer.qp.attach_mcast(where.gid, lid)
    assert dict(peer.qp.attachments) == {where.gid: lid}
    sender.send(outward, b"whatever the lid")
    assert peer.receive(1) == [b"whatever the lid"]
    with pytest.raises(InvalidArgument):
        peer.qp.detach_mcast(where.gid, lid ^ 1)
    peer.qp.detach_mcast(where.gid, lid)
    sender.send(outward, b"detached")
    assert peer.receive_until_marker(by=sender) == []


@needs(Capability.MLID)
@pytest.mark.parametrize("lid", LIDS)
def test_infiniband_takes_multicast_lids_only(bed: Testbed, lid: int) -> None:
    peer, gid = Application(bed), Gid("ff0e::5")
    if 0xC000 <= lid <= 0xFFFE:
        peer.qp.attach_mcast(gid, lid)
        peer.qp.detach_mcast(gid, lid)
        return
    for call in (peer.qp.attach_mcast, peer.qp.detach_mcast):
        with pytest.raises(InvalidArgument):
            call(gid, lid)
    assert dict(peer.qp.attachments) == {}


@needs(Capability.MLID)
def test_groups_that_share_an_mlid_share_no_message(bed: Testbed) -> None:
    """One MLID may serve several MGIDs: switches go by the MLID alone, attached queue pairs by both."""
    group, member, neighbour, sender = (
        new_group(),
        Application(bed, 0),
        Application(bed, 0),
        Application(bed, 1),
    )
    where, outward = member.join(group), sender.join(group)
    neighbour.qp.attach_mcast(Gid(where.gid[:-1] + bytes([where.gid[-1] ^ 0x80])), where.dlid)
    sender.send(outward, b"for one group")
    assert member.receive(1) == [b"for one group"]
    assert neighbour.receive_until_marker(by=sender) == []


@needs(Capability.MLID, Feature.ATTACH_TABLE)
def test_a_group_arrives_by_the_mlid_that_the_queue_pair_is_attached_with(bed: Testbed) -> None:
    """SA-ATTACH-3; the tables of a card may know groups by the MGID alone."""
    group, other, peer, keeper, sender = (
        new_group(),
        new_group(),
        Application(bed, 0),
        Application(bed, 0, None),
        Application(bed, 1),
    )
    where, elsewhere = keeper.join(group), keeper.join(other)
    outward, _ = sender.join(group), sender.join(other)
    peer.qp.attach_mcast(where.gid, elsewhere.dlid)
    assert bed.observer.attached(peer.port, where.gid) == {peer.qp.qp_num}
    sender.send(outward, b"by its own MLID")
    sender.send(outward.model_copy(update={"dlid": elsewhere.dlid}), b"by the other group's")
    assert peer.receive_until_marker(by=sender) == [b"by the other group's"]
    peer.qp.detach_mcast(where.gid, elsewhere.dlid)
    peer.qp.attach_mcast(where.gid, where.dlid)
    sender.send(outward, b"by its own MLID")
    assert peer.receive_until_marker(by=sender) == [b"by its own MLID"]


@fact("K-ATTACH-1")
@needs(Feature.ATTACH_TABLE)
def test_an_attachment_survives_every_state(bed: Testbed) -> None:
    peer = Application(bed)
    where = peer.join(new_group())
    for state in (QpState.ERR, QpState.RESET, QpState.INIT, QpState.RTR, QpState.RTS):
        peer.qp.modify(state)
        assert bed.observer.attached(peer.port, where.gid) == {peer.qp.qp_num}
        assert dict(peer.qp.attachments) == {where.gid: where.dlid}


@fact("K-ATTACH-6")
@needs(Feature.ATTACH_TABLE, Feature.SECOND_PORT)
def test_a_duplicate_attach_is_one_entry_and_ends_with_one_detach(bed: Testbed) -> None:
    group, peer, sender = new_group(), Application(bed, 0), Application(bed, 1)
    where, outward = peer.join(group), sender.join(group)
    peer.qp.attach_mcast(where.gid, where.dlid)
    assert bed.observer.attached(peer.port, where.gid) == {peer.qp.qp_num}
    peer.qp.detach_mcast(where.gid, where.dlid)
    assert bed.observer.attached(peer.port, where.gid) == set()
    sender.send(outward, *numbered(10))
    assert peer.receive_until_marker(by=sender) == []
