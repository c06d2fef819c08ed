"""ibv_attach_mcast(3), clause by clause."""

from __future__ import annotations

import errno as E

import pytest

from mcast.api import Capability, Feature, InvalidArgument, Phase, PortSpace, QpInit, QpType, Testbed
from mcast.conformance.helpers import Application, clause, fact, needs, new_group, numbered

connected: pytest.MarkDecorator = pytest.mark.parametrize("kind", [QpType.RC, QpType.UC])


@clause("AT-1")
def test_attached_qp_receives_that_group_only(bed: Testbed) -> None:
    """An attached QP receives that group and no other."""
    wanted, unwanted = new_group(), new_group()
    receiver, keeper, sender = Application(bed, 0), Application(bed, 0, None), Application(bed, 1)
    where, _ = keeper.join(wanted), keeper.join(unwanted)  # the port is a member of both
    to_wanted, to_unwanted = sender.join(wanted), sender.join(unwanted)
    receiver.qp.attach_mcast(where.gid, where.dlid)
    assert dict(receiver.qp.attachments) == {where.gid: where.dlid}
    sender.send(to_unwanted, b"not for you")
    sender.send(to_wanted, b"for you")
    sender.send(to_unwanted, b"nor this")
    assert receiver.receive_until_marker(by=sender) == [b"for you"]


@clause("AT-1")
@needs(Feature.ATTACH_TABLE)
def test_the_device_lists_the_attached_qp(bed: Testbed) -> None:
    peer, keeper = Application(bed), Application(bed, 0, None)
    where = keeper.join(new_group())
    assert bed.observer.attached(peer.port, where.gid) == set()
    peer.qp.attach_mcast(where.gid, where.dlid)
    assert bed.observer.attached(peer.port, where.gid) == {peer.qp.qp_num}


@clause("AT-2")
def test_failure_carries_the_errno(bed: Testbed) -> None:
    """Success is silent and failure carries the errno value."""
    peer = Application(bed)
    where = Application(bed, 0, None).join(new_group())
    peer.qp.attach_mcast(where.gid, where.dlid)
    peer.qp.detach_mcast(where.gid, where.dlid)
    with pytest.raises(InvalidArgument) as detach:
        peer.qp.detach_mcast(where.gid, where.dlid)
    with pytest.raises(InvalidArgument) as attach:
        peer.qp.attach_mcast("fe80::1", where.dlid)
    for caught, call, phase in (
        (detach, "detach_mcast", Phase.DETACH),
        (attach, "attach_mcast", Phase.ATTACH),
    ):
        assert (caught.value.errno, caught.value.call, caught.value.phase) == (E.EINVAL, call, phase)


@clause("AT-3", "DT-6")
@fact("K-ATTACH-2")
@needs(Capability.CONNECTED_QP)
@connected
def test_a_connected_qp_is_neither_attached_nor_detached(bed: Testbed, kind: QpType) -> None:
    id_ = bed.backend.event_channel().create_id(PortSpace.TCP)
    id_.bind_addr(bed.ports[0])
    qp = id_.create_qp(QpInit(qp_type=kind))
    assert qp.qp_type is kind
    where = Application(bed).join(new_group())  # a pair that a UD QP of this device is attached with
    for call in (qp.attach_mcast, qp.detach_mcast):
        with pytest.raises(InvalidArgument):
            call(where.gid, where.dlid)


@clause("AT-3")
@fact("K-DATA-22")
@pytest.mark.parametrize(
    ("space", "kind"),
    [
        (PortSpace.UDP, QpType.RC),
        (PortSpace.UDP, QpType.UC),
        pytest.param(PortSpace.TCP, QpType.UD, marks=needs(Capability.CONNECTED_QP)),
    ],
)
def test_the_qp_type_must_fit_the_port_space(bed: Testbed, space: PortSpace, kind: QpType) -> None:
    id_ = bed.backend.event_channel().create_id(space)
    id_.bind_addr(bed.ports[0])
    with pytest.raises(InvalidArgument):
        id_.create_qp(QpInit(qp_type=kind))
    assert id_.qp is None


@clause("AT-4")
@fact("K-ATTACH-6")
def test_attached_three_times_still_one_copy(bed: Testbed) -> None:
    group, receiver, sender = new_group(), Application(bed, 0), Application(bed, 1)
    outward, where = sender.join(group), receiver.join(group)
    for _ in range(3):
        receiver.qp.attach_mcast(where.gid, where.dlid)
    sender.send(outward, *numbered(10))
    assert receiver.receive_until_marker(by=sender) == [*numbered(10)]


@clause("AT-5")
@fact("K-DATA-4")
@needs(Feature.THIRD_PORT)
def test_attach_without_a_join_on_the_port_receives_nothing(bed: Testbed) -> None:
    group, member, outsider, sender = (
        new_group(),
        Application(bed, 2),
        Application(bed, 0),
        Application(bed, 1),
    )
    where = member.join(group)
    outward = sender.join(group)
    outsider.qp.attach_mcast(where.gid, where.dlid)
    assert outsider.port not in bed.observer.group_ports(where.gid)
    sender.send(outward, b"for members")
    assert member.receive(1) == [b"for members"]
    assert outsider.receive_until_marker(by=sender) == []
    outsider.join(group)
    sender.send(outward, b"for all")
    assert outsider.receive(1) == [b"for all"]
