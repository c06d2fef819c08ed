"""Measured facts about devices, links and the switch; see `mcast.conformance.facts`."""

from __future__ import annotations

import errno as E

import pytest

from mcast.api import Capability, CmEventType, Feature, McastError, PortEvent, Testbed
from mcast.conformance.helpers import (
    BOUND,
    Application,
    eventually,
    fact,
    needs,
    new_group,
    numbered,
    readable,
)

roce: pytest.MarkDecorator = needs(Capability.IGMP)


@fact("K-DEVICE-1")
@needs(Feature.DEVICE_REMOVAL, Feature.SECOND_PORT)
def test_removing_a_device_is_an_event_of_its_ids_and_ends_memberships(bed: Testbed) -> None:
    ids = [Application(bed, bed.spare), Application(bed, bed.spare, None)]
    other = Application(bed, bed.spare + 1)
    mgid = ids[0].join(new_group()).gid
    bed.remove_device(bed.ports[bed.spare])
    for peer in ids:
        event = peer.event(CmEventType.DEVICE_REMOVAL)
        assert (event.context, event.errno) == (None, E.ENODEV)
    eventually(bed, lambda: not bed.observer.group_ports(mgid))
    assert len(ids[0].qp.recv(1, 0)) == 0  # a flush would raise QpError
    assert not readable(other.channel)
    assert ids[1].id.device not in {device.name for device in bed.backend.devices()}


@fact("K-DEVICE-2", "K-DEVICE-3")
@roce
@needs(Feature.LINK, Feature.SECOND_PORT)
def test_a_link_that_comes_back_carries_the_group_again(bed: Testbed) -> None:
    group, receiver, sender, witness = (
        new_group(),
        Application(bed, 1),
        Application(bed, 0),
        Application(bed, 2),
    )
    outward = sender.join(group, send_only=True)
    receiver.join(group)
    mgid = witness.join(group).gid
    with bed.link_down(receiver.port):
        assert mgid in bed.observer.port_memberships(receiver.port)
        sender.send(outward, b"while it was down")
        assert witness.receive(1) == [b"while it was down"]
    events: list[PortEvent] = []

    def is_reported() -> bool:
        events.extend(receiver.qp.port_events())
        return PortEvent.ACTIVE in events

    eventually(bed, is_reported)
    assert [event for event in events if event is not PortEvent.GID_CHANGE][:2] == [
        PortEvent.ERR,
        PortEvent.ACTIVE,
    ]
    assert mgid in bed.observer.port_memberships(receiver.port)
    receiver.wait_delivery(mgid)
    assert receiver.receive_until_marker(by=sender) == []
    sender.send(outward, *numbered(5))
    assert receiver.receive(5) == [*numbered(5)]
    assert not readable(receiver.channel)


@fact("K-DEVICE-4")
@roce
@needs(Feature.ADDRESS_REMOVAL)
def test_losing_an_address_is_no_event(bed: Testbed) -> None:
    peer = Application(bed)
    peer.join(new_group())
    with bed.without_address(peer.port):
        assert peer.channel.get_event(0) is None
    assert peer.channel.get_event(0) is None
    other = Application(bed, 1, None, channel=peer.channel)
    other.join(new_group())  # its event is the next one there


@fact("K-DEVICE-8")
@roce
@needs(Feature.SWITCH_TABLE, Feature.THIRD_PORT)
def test_the_switch_learns_full_members_and_nothing_else(bed: Testbed) -> None:
    group, full, silent, outsider = (
        new_group(),
        Application(bed, 1),
        Application(bed, 2),
        Application(bed, 3 % len(bed.ports)),
    )
    silent.join(group, send_only=True)
    mgid = full.join(group).gid
    silent.join(new_group())  # announced by the same port, later
    assert bed.observer.group_ports(mgid) == {full.port}
    for peer in (silent, outsider):  # attached, so that only the switch keeps messages from them
        peer.qp.attach_mcast(mgid, 0)
    sender = Application(bed, 0)
    sender.send(sender.join(group, send_only=True), b"through the switch")
    assert full.receive(1) == [b"through the switch"]
    assert silent.receive_until_marker(by=sender) == []
    if outsider.port != sender.port:
        assert outsider.receive_until_marker(by=sender) == []
    full.id.leave_multicast(group)
    eventually(bed, lambda: not bed.observer.group_ports(mgid))


@needs(Capability.SA, Feature.PARTITION, Feature.SECOND_PORT)
def test_a_port_out_of_its_partition_loses_its_groups_and_joins_none(bed: Testbed) -> None:
    """SA-RESET-1, SA-PATH-1: with the P_Key goes the IPoIB broadcast group, and both come back."""
    group, other, peer = new_group(), Application(bed, 0), Application(bed, 1)
    outward, where = other.join(group), peer.join(group)
    with bed.without_partition(peer.port):
        peer.event(CmEventType.MULTICAST_ERROR, -E.ENETRESET)
        peer.id.leave_multicast(group)
        with pytest.raises(McastError) as caught:
            peer.id.join_multicast(group)
        assert caught.value.errno == E.EADDRNOTAVAIL
        peer.qp.attach_mcast(where.gid, where.dlid)  # so that only its P_Key keeps messages from it
        other.send(outward, b"inside")
        assert other.receive(1) == [b"inside"]
        peer.qp.detach_mcast(where.gid, where.dlid)
        assert not readable(other.channel)
    peer.join(group)
    assert peer.receive_until_marker(by=other) == []
    other.send(outward, b"for both")
    assert peer.receive(1) == [b"for both"]


@needs(Capability.SA, Feature.PARTITION, Feature.SECOND_PORT)
def test_no_queue_pair_is_made_outside_of_a_partition(bed: Testbed) -> None:
    """SA-PKEY-4."""
    peer = Application(bed, 1, None)
    with bed.without_partition(peer.port):
        with pytest.raises(McastError) as caught:
            peer.id.create_qp()
        assert caught.value.errno == E.ENOENT
    peer.id.create_qp()


@needs(Capability.SA, Feature.PARTITION, Feature.THIRD_PORT)
def test_limited_members_hear_full_ones_alone(bed: Testbed) -> None:
    """SA-PKEY-4: to a group as to one queue pair; nobody loses a membership, and joins go on."""
    group, peers = new_group(), [Application(bed, index) for index in range(3)]
    full, one, other = peers
    ways = {peer: [peer.join(group)] for peer in peers}
    for sender in peers:
        sender.send(ways[sender][0], b"here")
        for peer in peers:
            message = peer.qp.recv_one(BOUND)
            assert message is not None
            if peer is not sender:
                ways[peer].append(ways[peer][0].reply_to(message))
    with bed.limited_member(one.port), bed.limited_member(other.port):
        late = Application(bed, 1)
        late.join(group)
        for number, sender in enumerate(peers):
            for way in ways[sender]:
                sender.send(way, b"from %d" % number)
        assert sorted(full.receive(5)) == [b"from 0", *(b"from 1",) * 2, *(b"from 2",) * 2]
        for peer in (one, other):
            assert peer.receive(2) == [b"from 0", b"from 0"]
            peer.join(new_group())
            assert not readable(peer.channel)
        assert late.receive(1) == [b"from 0"]
    for peer, sender in ((one, other), (other, one), (late, one), (full, one)):
        assert peer.receive_until_marker(by=sender) == []
