"""rdma_join_multicast(3), clause by clause; JM-2 stands beside JEX-15 in test_join_ex.py."""

from __future__ import annotations

from mcast.api import JoinAttrEx, Testbed
from mcast.conformance.helpers import Application, clause, eventually, new_group, ud_of


@clause("JM-1")
def test_join_is_join_ex_of_a_full_member(bed: Testbed) -> None:
    group, plain, extended = new_group(), Application(bed), Application(bed)
    plain.id.join_multicast(group)
    first = plain.event()
    extended.id.join_multicast_ex(JoinAttrEx.full_member(group))
    assert extended.event().ud == first.ud


@clause("JM-1")
def test_join_creates_the_group_sends_and_receives(bed: Testbed) -> None:
    group, one, two = new_group(), Application(bed, 0), Application(bed, 1)
    one.id.join_multicast(group)
    outward = ud_of(one.event()).destination
    one.wait_delivery(outward.gid)
    assert bed.observer.group_exists(outward.gid)
    assert bed.observer.group_ports(outward.gid) == {one.port}
    two.id.join_multicast(group)
    back = ud_of(two.event()).destination
    two.wait_delivery(outward.gid)
    one.send(outward, b"there")
    assert two.receive(1) == [b"there"]
    two.send(back, b"and back")
    assert one.receive(2) == [b"there", b"and back"]


@clause("JM-2")
def test_join_attaches_the_qp_of_the_id_alone(bed: Testbed) -> None:
    group, member, bystander, sender = (
        new_group(),
        Application(bed, 0),
        Application(bed, 0),
        Application(bed, 1),
    )
    member.id.join_multicast(group)
    where = ud_of(member.event()).destination
    member.wait_delivery(where.gid)
    assert dict(member.qp.attachments) == {where.gid: where.dlid}
    sender.send(sender.join(group, send_only=True), b"to the member")
    assert member.receive(1) == [b"to the member"]
    assert bystander.receive_until_marker(by=sender) == []
    member.id.leave_multicast(group)
    eventually(bed, lambda: not bed.observer.group_ports(where.gid))
