"""`Backend.groups`: a provider that has Capability.GROUP_TABLE shows the memberships of its ports."""

from __future__ import annotations

import pytest

from mcast.api import Backend, Capability, Closed, Feature, GroupMember, GroupSource, GroupTable, Testbed
from mcast.conformance.helpers import Application, eventually, needs, new_group

pytestmark: pytest.MarkDecorator = needs(Capability.GROUP_TABLE)


def members(bed: Testbed, group: object) -> dict[str, GroupMember]:
    """The members of the group that the backend shows, by port."""
    found = [info for info in bed.backend.groups().groups if info.mgid == group]
    assert len(found) <= 1
    return {member.port: member for info in found for member in info.members}


def port_of(peer: Application) -> str:
    (info,) = (
        f"{device.name}/{port.port_num}"
        for device in peer.bed.backend.devices()
        for port in device.ports
        if peer.port in port.addresses
    )
    return info


def test_a_full_member_is_shown_from_join_to_leave(bed: Testbed) -> None:
    first, second = Application(bed, 0), Application(bed, 1)
    group = new_group()
    destination = first.join(group)
    assert second.join(group) is not None
    shown = members(bed, destination.gid)
    assert set(shown) == {port_of(first), port_of(second)}
    for member in shown.values():
        assert GroupSource.HOST in member.seen_in
        assert not member.send_only
    (info,) = (info for info in bed.backend.groups().groups if info.mgid == destination.gid)
    assert info.mlid == destination.dlid
    first.id.leave_multicast(group)
    eventually(bed, lambda: set(members(bed, destination.gid)) == {port_of(second)})
    second.id.leave_multicast(group)
    eventually(bed, lambda: not members(bed, destination.gid))


@needs(Feature.SWITCH_TABLE)
def test_the_table_that_delivers_is_shown_too(bed: Testbed) -> None:
    peer = Application(bed)
    destination = peer.join(new_group())
    delivering = {GroupSource.SWITCH, GroupSource.SA}
    eventually(bed, lambda: members(bed, destination.gid)[port_of(peer)].seen_in & delivering)


def test_send_only_member_is_shown_or_declared_unseen(bed: Testbed) -> None:
    """A send only member is shown as such or declared unseen."""
    peer = Application(bed)
    destination = peer.join(new_group(), send_only=True)
    shown = members(bed, destination.gid)
    table = bed.backend.groups()
    if shown:
        assert shown[port_of(peer)].send_only
    else:
        assert any("send-only" in sentence for sentence in table.unseen)


def test_groups_are_in_order_and_never_empty_words(bed: Testbed) -> None:
    peer = Application(bed)
    for _ in range(3):
        peer.join(new_group())
    table = bed.backend.groups()
    mgids = [info.mgid for info in table.groups]
    assert mgids == sorted(set(mgids))
    assert all(mgid.is_multicast for mgid in mgids)
    assert all(sentence.strip() for sentence in table.unseen)


def test_a_provider_that_cannot_know_says_so(bed: Testbed) -> None:
    table = Backend.groups(bed.backend)
    assert table == GroupTable((), table.unseen)
    assert bed.backend.name in table.unseen[0]


def test_a_closed_backend_shows_nothing(bed: Testbed) -> None:
    bed.backend.close()
    with pytest.raises(Closed):
        bed.backend.groups()
