"""rdma_leave_multicast(3), clause by clause."""

from __future__ import annotations

import errno as E

import pytest

from mcast.api import AddressNotAvailable, Feature, InvalidArgument, QpInit, Testbed
from mcast.conformance.helpers import (
    Application,
    clause,
    eventually,
    fact,
    needs,
    new_group,
    numbered,
    readable,
)
from mcast.wire.addresses import McastAddress


@clause("LV-1")
def test_leave_detaches_the_qp(bed: Testbed) -> None:
    group, receiver, keeper, sender = (
        new_group(),
        Application(bed, 0),
        Application(bed, 0, None),
        Application(bed, 1),
    )
    outward, where = sender.join(group), receiver.join(group)
    keeper.join(group)  # the fabric goes on delivering to the port
    sender.send(outward, b"before")
    assert receiver.receive(1) == [b"before"]
    receiver.id.leave_multicast(group)
    assert dict(receiver.qp.attachments) == {}
    assert receiver.port in bed.observer.group_ports(where.gid)
    sender.send(outward, b"after")
    assert receiver.receive_until_marker(by=sender) == []
    with pytest.raises(InvalidArgument):
        receiver.qp.detach_mcast(where.gid, where.dlid)


@clause("LV-1")
def test_leave_ends_the_membership_of_the_port(bed: Testbed) -> None:
    group, peer = new_group(), Application(bed)
    mgid = peer.join(group).gid
    assert mgid in bed.observer.port_memberships(peer.port)
    peer.id.leave_multicast(group)
    eventually(bed, lambda: mgid not in bed.observer.port_memberships(peer.port))
    eventually(bed, lambda: not bed.observer.group_ports(mgid))


@clause("LV-1")
@pytest.mark.parametrize("send_only", [True, False], ids=["send-only", "event-unfetched"])
def test_leave_keeps_the_users_attachment(bed: Testbed, send_only: bool) -> None:
    """Leave keeps an attachment that the join did not make."""
    group, receiver, keeper, sender = (
        new_group(),
        Application(bed, 0),
        Application(bed, 0, None),
        Application(bed, 1),
    )
    outward, where = sender.join(group), keeper.join(group)
    receiver.qp.attach_mcast(where.gid, where.dlid)
    if send_only:
        receiver.join(group, send_only=True)
    else:
        receiver.id.join_multicast(group)
    receiver.id.leave_multicast(group)
    assert dict(receiver.qp.attachments) == {where.gid: where.dlid}
    sender.send(outward, b"after the leave")
    assert receiver.receive(1) == [b"after the leave"]


@clause("LV-1")
def test_leave_of_one_group_leaves_the_others(bed: Testbed) -> None:
    left, kept, receiver, sender = new_group(), new_group(), Application(bed, 0), Application(bed, 1)
    receiver.join(left)
    receiver.join(kept)
    to_left, to_kept = sender.join(left), sender.join(kept)
    receiver.id.leave_multicast(left)
    sender.send(to_left, b"left")
    sender.send(to_kept, b"kept")
    assert receiver.receive_until_marker(by=sender) == [b"kept"]


@clause("LV-2")
@fact("K-LEAVE-1")
@needs(Feature.SECOND_PORT)
@pytest.mark.parametrize("queued", [False, True], ids=["at-once", "event-queued"])
@pytest.mark.parametrize("init", [QpInit(), None], ids=["qp", "no-qp"])
def test_leave_before_the_event_is_fetched_cancels_the_join(
    bed: Testbed, queued: bool, init: QpInit | None
) -> None:
    cancelled, group, later = new_group(), new_group(), new_group()
    peer, other = Application(bed, 0, init), Application(bed, 1)
    mgid = other.join(cancelled).gid
    peer.id.join_multicast(cancelled, "cancelled")
    if queued:
        eventually(bed, lambda: readable(peer.channel))
    peer.id.leave_multicast(cancelled)
    assert not readable(peer.channel)
    # one port's requests are answered in order: what was cancelled would come before these
    for marker in (group, later):
        peer.join(marker)
    assert peer.channel.get_event(0) is None
    eventually(bed, lambda: bed.observer.group_ports(mgid) == {other.port})
    assert mgid not in bed.observer.port_memberships(peer.port)
    if init is not None:
        assert mgid not in peer.qp.attachments


@clause("LV-2")
@pytest.mark.parametrize("queued", [False, True], ids=["at-once", "event-queued"])
def test_a_cancelled_join_leaves_no_group_behind(bed: Testbed, queued: bool) -> None:
    cancelled, marker, peer = new_group(), new_group(), Application(bed)
    peer.id.join_multicast(cancelled)
    if queued:
        eventually(bed, lambda: readable(peer.channel))
    peer.id.leave_multicast(cancelled)
    peer.join(marker)
    # the group is named by joining it once more, which the cancelled join must not hinder
    mgid = peer.join(cancelled).gid
    peer.id.leave_multicast(cancelled)
    eventually(bed, lambda: not bed.observer.group_exists(mgid))
    assert mgid not in bed.observer.port_memberships(peer.port)


@clause("LV-2")
def test_a_cancel_takes_its_own_event_only(bed: Testbed) -> None:
    groups, peer = [new_group() for _ in range(3)], Application(bed)
    for group in groups:
        peer.id.join_multicast(group, group)
    peer.id.leave_multicast(groups[1])
    assert [peer.event().context for _ in range(2)] == [groups[0], groups[2]]
    assert len(peer.qp.attachments) == 2
    assert not readable(peer.channel)


@clause("LV-3")
@fact("K-LEAVE-9")
def test_messages_received_before_the_leave_are_read_after_it(bed: Testbed) -> None:
    group, receiver, witness, sender = (
        new_group(),
        Application(bed, 0),
        Application(bed, 0),
        Application(bed, 1),
    )
    outward = sender.join(group)
    receiver.join(group)
    witness.join(group)
    sender.send(outward, *numbered(10))
    assert witness.receive_until_marker(by=sender) == [*numbered(10)]  # so they have reached the port
    receiver.id.leave_multicast(group)
    sender.send(outward, *numbered(10, "late"))
    assert witness.receive(10) == [*numbered(10, "late")]
    assert receiver.receive_until_marker(by=sender) == [*numbered(10)]


@clause("LV-4")
@fact("K-LEAVE-12")
def test_destroying_the_id_leaves_all_its_groups(bed: Testbed) -> None:
    groups, peer, other = [new_group() for _ in range(3)], Application(bed), Application(bed, 0, None)
    mgids = [peer.join(group).gid for group in groups]
    other.join(groups[0])
    peer.id.destroy()
    eventually(bed, lambda: not any(map(bed.observer.group_exists, mgids[1:])))
    assert bed.observer.port_memberships(other.port).isdisjoint(mgids[1:])
    assert bed.observer.group_ports(mgids[0]) == {other.port}


@clause("LV-4")
@fact("K-LEAVE-3")
def test_destroying_the_id_cancels_joins_and_discards_events(bed: Testbed) -> None:
    channel, group, pending = bed.backend.event_channel(), new_group(), new_group()
    doomed, peer = Application(bed, channel=channel), Application(bed, channel=channel)
    doomed.id.join_multicast(group)
    eventually(bed, lambda: readable(channel))
    doomed.id.join_multicast(pending)
    doomed.id.destroy()
    mgids = [peer.join(each).gid for each in (group, pending)]  # these events are the first there are
    for each in (group, pending):
        peer.id.leave_multicast(each)
    eventually(bed, lambda: not any(map(bed.observer.group_exists, mgids)))


@clause("LV-5", "JEX-11")
@fact("K-LEAVE-4")
@pytest.mark.parametrize("case", ["never", "twice", "foreign", "unbound", "port"])
def test_leave_of_what_is_not_joined(bed: Testbed, case: str) -> None:
    peer, group, asked = Application(bed), new_group(port=5000), Application(bed)
    mgid = peer.join(group).gid
    address, id_ = group, peer.id
    match case:
        case "never":
            address = new_group()
        case "twice":
            asked.join(group)
            asked.id.leave_multicast(group)
            id_ = asked.id
        case "foreign":
            id_ = asked.id
        case "unbound":
            id_ = asked.channel.create_id()
        case "port":
            address = McastAddress.of(group, 5001)
    with pytest.raises(AddressNotAvailable) as caught:
        id_.leave_multicast(address)
    assert caught.value.errno == E.EADDRNOTAVAIL
    assert peer.port in bed.observer.group_ports(mgid)
    peer.id.leave_multicast(group)
