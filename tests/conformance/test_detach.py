"""ibv_detach_mcast(), clause by clause."""

from __future__ import annotations

import errno as E

import pytest

from mcast.api import (
    DeviceInfo,
    Feature,
    InvalidArgument,
    NotSupported,
    OutOfResources,
    QpInit,
    QpState,
    Testbed,
)
from mcast.conformance.helpers import (
    Application,
    clause,
    eventually,
    fact,
    needs,
    new_group,
    numbered,
    other_lid,
)
from mcast.wire.addresses import Gid, McastAddress

SMALL = QpInit(max_send_wr=1, max_recv_wr=1)

FROM_RTS: dict[QpState, tuple[QpState, ...]] = {
    QpState.RESET: (QpState.RESET,),
    QpState.INIT: (QpState.RESET, QpState.INIT),
    QpState.RTR: (QpState.RESET, QpState.INIT, QpState.RTR),
    QpState.RTS: (),
    QpState.SQD: (QpState.SQD,),
    QpState.ERR: (QpState.ERR,),
}
"""State -> the steps that lead to it from RTS."""


def device_of(peer: Application) -> DeviceInfo:
    return next(device for device in peer.bed.backend.devices() if device.name == peer.id.device)


@clause("DT-1")
def test_a_detached_qp_gets_no_copy_while_others_do(bed: Testbed) -> None:
    group, detached, other, sender = (
        new_group(),
        Application(bed, 0),
        Application(bed, 0),
        Application(bed, 1),
    )
    outward, where = sender.join(group), detached.join(group)
    other.join(group)
    detached.qp.detach_mcast(where.gid, where.dlid)
    sender.send(outward, *numbered(10))
    assert other.receive_until_marker(by=sender) == [*numbered(10)]
    assert detached.receive_until_marker(by=sender) == []


@clause("DT-2")
@needs(Feature.SECOND_PORT)
def test_detach_is_local(bed: Testbed) -> None:
    """Detach is local and the fabric delivers until a leave."""
    group, peer, other = new_group(), Application(bed, 0), Application(bed, 1)
    where = peer.join(group)
    other.join(group)
    peer.qp.detach_mcast(where.gid, where.dlid)
    other.qp.detach_mcast(where.gid, where.dlid)
    other.id.leave_multicast(group)
    eventually(bed, lambda: other.port not in bed.observer.group_ports(where.gid))
    # the leave, which came after both detaches, has had its effect; the detach has none
    assert bed.observer.group_ports(where.gid) == {peer.port}
    assert where.gid in bed.observer.port_memberships(peer.port)
    peer.id.leave_multicast(group)
    eventually(bed, lambda: not bed.observer.group_exists(where.gid))


@clause("DT-3")
@fact("K-ATTACH-8")
def test_detach_with_another_lid_is_refused_and_changes_nothing(bed: Testbed) -> None:
    group, peer, sender = new_group(), Application(bed, 0), Application(bed, 1)
    where, outward = peer.join(group), sender.join(group)
    with pytest.raises(InvalidArgument):
        peer.qp.detach_mcast(where.gid, other_lid(where.dlid))
    assert dict(peer.qp.attachments) == {where.gid: where.dlid}
    sender.send(outward, b"still attached")
    assert peer.receive(1) == [b"still attached"]


@clause("DT-4")
@fact("K-DATA-1")
def test_other_groups_of_the_qp_are_not_affected(bed: Testbed) -> None:
    gone, kept, peer, sender = new_group(), new_group(), Application(bed, 0), Application(bed, 1)
    where, _ = peer.join(gone), peer.join(kept)
    to_gone, to_kept = sender.join(gone), sender.join(kept)
    peer.qp.detach_mcast(where.gid, where.dlid)
    sender.send(to_gone, b"gone")
    sender.send(to_kept, b"kept")
    assert peer.receive_until_marker(by=sender) == [b"kept"]


@clause("DT-5")
@pytest.mark.parametrize("state", FROM_RTS, ids=lambda state: state.name)
def test_detach_works_in_any_state(bed: Testbed, state: QpState) -> None:
    group, peer, sender = new_group(), Application(bed, 0), Application(bed, 1)
    where, outward = peer.join(group), sender.join(group)
    for step in FROM_RTS[state]:
        peer.qp.modify(step)
    assert peer.qp.state is state
    peer.qp.detach_mcast(where.gid, where.dlid)
    with pytest.raises(InvalidArgument):
        peer.qp.detach_mcast(where.gid, where.dlid)
    assert peer.qp.state is state
    peer.qp.reset()
    sender.send(outward, b"detached")
    assert peer.receive_until_marker(by=sender) == []


@fact("K-ATTACH-1")
@pytest.mark.parametrize("state", FROM_RTS, ids=lambda state: state.name)
def test_attach_works_in_any_state_and_survives_the_way_back(bed: Testbed, state: QpState) -> None:
    group, peer, keeper, sender = (
        new_group(),
        Application(bed, 0),
        Application(bed, 0, None),
        Application(bed, 1),
    )
    where, outward = keeper.join(group), sender.join(group)
    for step in FROM_RTS[state]:
        peer.qp.modify(step)
    peer.qp.attach_mcast(where.gid, where.dlid)
    peer.qp.reset()
    assert peer.qp.state is QpState.RTS
    sender.send(outward, b"attached")
    assert peer.receive(1) == [b"attached"]


@clause("DT-6")
@fact("K-ATTACH-4")
@pytest.mark.parametrize("gid", ["fe80::1", "::", "::ffff:10.1.2.3"], ids=["link-local", "zero", "unicast"])
def test_a_gid_that_is_not_multicast_is_refused(bed: Testbed, gid: str) -> None:
    peer = Application(bed)
    for call in (peer.qp.attach_mcast, peer.qp.detach_mcast):
        with pytest.raises(InvalidArgument):
            call(gid, 0xC001)
    assert dict(peer.qp.attachments) == {}


@clause("DT-6")
@fact("K-ATTACH-8")
def test_detach_of_what_is_not_attached_is_refused(bed: Testbed) -> None:
    group, peer, attached = new_group(), Application(bed), Application(bed)
    where = attached.join(group)
    with pytest.raises(InvalidArgument):
        peer.qp.detach_mcast(where.gid, where.dlid)  # another QP of the device is
    assert dict(attached.qp.attachments) == {where.gid: where.dlid}
    attached.qp.detach_mcast(where.gid, where.dlid)
    with pytest.raises(InvalidArgument):
        attached.qp.detach_mcast(where.gid, where.dlid)


@clause("DT-7")
@fact("K-ATTACH-9")
def test_one_qp_more_than_a_group_takes(bed: Testbed) -> None:
    peers = [Application(bed, init=SMALL)]
    limit = device_of(peers[0]).max_mcast_qp_attach
    peers += [Application(bed, init=SMALL, channel=peers[0].channel) for _ in range(limit)]
    gid, lid = Gid("ff0e::7"), 0xC007
    for peer in peers[:limit]:
        peer.qp.attach_mcast(gid, lid)
    with pytest.raises(OutOfResources) as caught:
        peers[limit].qp.attach_mcast(gid, lid)
    assert caught.value.errno == E.ENOMEM
    peers[0].qp.attach_mcast(gid, lid)  # a duplicate takes no room
    peers[0].qp.detach_mcast(gid, lid)
    peers[limit].qp.attach_mcast(gid, lid)


IPOIB = 16
"""More groups than the kernel's IPoIB is in by itself, on the same device."""


def attach_to(peer: Application, gids: list[Gid]) -> None:
    for gid in gids:
        peer.qp.attach_mcast(gid, 0xC007)


@clause("DT-7")
@fact("K-ATTACH-9")
def test_one_group_more_than_a_device_takes(bed: Testbed) -> None:
    peer = Application(bed, init=SMALL)
    limit = device_of(peer).max_mcast_grp
    gids = [Gid(b"\xff\x0e" + number.to_bytes(14, "big")) for number in range(limit + 1)]
    with pytest.raises(OutOfResources) as caught:
        attach_to(peer, gids)
    assert caught.value.errno == E.ENOMEM
    assert limit - IPOIB <= len(peer.qp.attachments) <= limit
    peer.qp.detach_mcast(gids[0], 0xC007)
    peer.qp.attach_mcast(gids[limit], 0xC007)


@clause("DT-8")
@needs(Feature.NO_MULTICAST)
def test_a_device_without_multicast_says_so(bed: Testbed) -> None:
    with bed.without_multicast(bed.ports[bed.spare]):
        peer = Application(bed, bed.spare)
        for call in (peer.qp.attach_mcast, peer.qp.detach_mcast):
            with pytest.raises(NotSupported) as caught:
                call("ff0e::7", 0xC007)
            assert caught.value.errno == E.ENOSYS


@clause("DT-9")
@fact("K-ATTACH-6")
def test_attached_twice_one_detach_is_enough(bed: Testbed) -> None:
    group, peer, sender = new_group(), Application(bed, 0), Application(bed, 1)
    where, outward = peer.join(group), sender.join(group)
    peer.qp.attach_mcast(where.gid, where.dlid)
    sender.send(outward, b"one copy")
    assert peer.receive_until_marker(by=sender) == [b"one copy"]
    peer.qp.detach_mcast(where.gid, where.dlid)
    sender.send(outward, b"no copy")
    assert peer.receive_until_marker(by=sender) == []
    with pytest.raises(InvalidArgument):
        peer.qp.detach_mcast(where.gid, where.dlid)


@clause("DT-10")
@fact("K-ATTACH-3")
@pytest.mark.parametrize("gid", ["ff01:0:2:c985::", "ff0e::1234"], ids=["example", "other"])
def test_the_example_of_the_document(bed: Testbed, gid: str) -> None:
    peer = Application(bed)
    peer.qp.attach_mcast(gid, 0xC001)
    assert dict(peer.qp.attachments) == {Gid(gid): 0xC001}
    peer.qp.detach_mcast(gid, 0xC001)
    assert dict(peer.qp.attachments) == {}


@clause("DT-10")
@needs(Feature.ATTACH_TABLE)
def test_documented_example_of_the_attach_table(bed: Testbed) -> None:
    """The example of the document in the attach table."""
    peer, gid = Application(bed), Gid("ff01:0:2:c985::")
    peer.qp.attach_mcast(gid, 0xC001)
    assert bed.observer.attached(peer.port, gid) == {peer.qp.qp_num}
    peer.qp.detach_mcast(gid, 0xC001)
    assert bed.observer.attached(peer.port, gid) == set()


@clause("DT-2", "LV-1")
def test_leave_after_a_detach_by_the_user_succeeds(bed: Testbed) -> None:
    group: McastAddress = new_group()
    peer = Application(bed)
    where = peer.join(group)
    peer.qp.detach_mcast(where.gid, where.dlid)
    peer.id.leave_multicast(group)
    eventually(bed, lambda: not bed.observer.group_exists(where.gid))
