"""rdma_join_multicast_ex(3), clause by clause."""

from __future__ import annotations

import errno as E
from collections.abc import Callable
from ipaddress import IPv4Network

import pytest

from mcast.api import (
    Capability,
    CmEventType,
    CmId,
    Feature,
    InvalidArgument,
    JoinAttrEx,
    McastError,
    Phase,
    PortSpace,
    QpInit,
    QpState,
    Testbed,
    Unreachable,
)
from mcast.conformance.helpers import (
    BOUND,
    Application,
    clause,
    eventually,
    fact,
    needs,
    new_group,
    numbered,
    other_lid,
    port_at,
    raw_address,
    raw_join,
    readable,
    ud_of,
)
from mcast.wire.addresses import McastAddress

Join = Callable[[CmId, McastAddress, object], None]


def by_join(id_: CmId, group: McastAddress, context: object = None) -> None:
    id_.join_multicast(group, context)


def by_join_ex(id_: CmId, group: McastAddress, context: object = None) -> None:
    id_.join_multicast_ex(JoinAttrEx.full_member(group), context)


both_joins: pytest.MarkDecorator = pytest.mark.parametrize("join", [by_join, by_join_ex])


@clause("JEX-1", "JEX-11")
@fact("K-JOIN-1", "K-JOIN-2")
@pytest.mark.parametrize(
    ("mask", "errno"),
    [
        *((mask, E.EINVAL) for mask in (0, 1, 2)),
        *((mask, E.EOPNOTSUPP) for mask in (4, 7, 8, 0xB, 0x80000003)),
    ],
)
def test_comp_mask_must_hold_both_fields_and_no_reserved_bit(bed: Testbed, mask: int, errno: int) -> None:
    peer, group = Application(bed), new_group()
    with pytest.raises(McastError) as caught:
        peer.id.join_multicast_ex(raw_join(group, mask=mask))
    assert caught.value.errno == errno
    peer.join(group)


@clause("JEX-1")
@fact("K-JOIN-2")
def test_a_reserved_mask_bit_is_noticed_before_a_missing_one_and_a_bad_flag(bed: Testbed) -> None:
    with pytest.raises(McastError) as caught:
        Application(bed).id.join_multicast_ex(raw_join(new_group(), mask=4, flags=2))
    assert caught.value.errno == E.EOPNOTSUPP


@clause("JEX-2")
@fact("K-JOIN-3")
def test_both_join_flags_are_accepted_with_the_same_parameters(bed: Testbed) -> None:
    group, full, send_only = new_group(), Application(bed), Application(bed)
    full.id.join_multicast_ex(raw_join(group, flags=0))
    first = full.event()
    send_only.id.join_multicast_ex(raw_join(group, flags=1))
    assert send_only.event().ud == first.ud


@clause("JEX-2", "JEX-11")
@fact("K-JOIN-4")
@pytest.mark.parametrize("flags", [2, 3, 0xFFFF, 0x10000])
def test_other_join_flags_are_refused(bed: Testbed, flags: int) -> None:
    peer, group = Application(bed), new_group()
    with pytest.raises(InvalidArgument):
        peer.id.join_multicast_ex(raw_join(group, flags=flags))
    peer.join(group)


@clause("JEX-3")
def test_full_member_creates_the_group(bed: Testbed) -> None:
    group, known = new_group(), Application(bed, 1)
    other = known.join(new_group())
    peer = Application(bed)
    mgid = peer.join(group).gid
    assert mgid != other.gid
    eventually(bed, lambda: bed.observer.group_exists(mgid))
    assert bed.observer.group_ports(mgid) == {peer.port}
    peer.id.leave_multicast(group)
    eventually(bed, lambda: not bed.observer.group_exists(mgid))


@clause("JEX-4", "JEX-5")
def test_full_members_send_and_receive(bed: Testbed) -> None:
    """Full members send to and receive from the group."""
    group, one, two = new_group(), Application(bed, 0), Application(bed, 1)
    from_one, from_two = one.join(group), two.join(group)
    one.send(from_one, b"from one")
    assert two.receive(1) == [b"from one"]
    assert one.receive(1) == [b"from one"]
    two.send(from_two, b"from two")
    assert one.receive(1) == [b"from two"]


@clause("JEX-6")
@needs(Capability.SA)
def test_send_only_member_creates_the_group(bed: Testbed) -> None:
    group, peer = new_group(), Application(bed)
    mgid = peer.join(group, send_only=True).gid
    assert bed.observer.group_exists(mgid)
    assert mgid in bed.observer.port_memberships(peer.port)
    peer.id.leave_multicast(group)
    eventually(bed, lambda: not bed.observer.group_exists(mgid))


@clause("JEX-6")
@fact("K-SENDONLY-3")
def test_send_only_member_may_send(bed: Testbed) -> None:
    group, sender, receiver = new_group(), Application(bed, 0), Application(bed, 1)
    outward = sender.join(group, send_only=True)
    receiver.join(group)
    sender.send(outward, *numbered(10))
    assert receiver.receive(10) == [*numbered(10)]


@clause("JEX-7")
@fact("K-SENDONLY-3")
def test_send_only_member_does_not_receive(bed: Testbed) -> None:
    group, silent, keeper, sender = (
        new_group(),
        Application(bed, 0),
        Application(bed, 0, None),
        Application(bed, 1),
    )
    silent.join(group, send_only=True)
    keeper.join(group)  # now the fabric delivers to the port: only the attach is missing
    sender.send(sender.join(group), *numbered(10))
    assert silent.receive_until_marker(by=sender) == []


@clause("JEX-8")
def test_send_only_qp_is_not_attached(bed: Testbed) -> None:
    peer = Application(bed)
    group = peer.join(new_group(), send_only=True)
    assert dict(peer.qp.attachments) == {}
    with pytest.raises(InvalidArgument):
        peer.qp.detach_mcast(group.gid, group.dlid)


@clause("JEX-8")
@needs(Feature.ATTACH_TABLE)
def test_send_only_qp_is_not_in_the_attach_table(bed: Testbed) -> None:
    group, silent, full = new_group(), Application(bed), Application(bed)
    silent.join(group, send_only=True)
    mgid = full.join(group).gid
    assert bed.observer.attached(full.port, mgid) == {full.qp.qp_num}


def join_refused_by_the_sm(peer: Application, group: McastAddress) -> None:
    """Old kernels refuse in the call; later ones let the SM refuse, which is an event and wants a leave."""
    peer.id.join_multicast_ex(JoinAttrEx.send_only(group))
    event = peer.channel.get_event(BOUND)
    assert event is not None
    assert event.type is CmEventType.MULTICAST_ERROR
    peer.id.leave_multicast(group)
    event.check()


@clause("JEX-9")
@needs(Capability.SA, Feature.SM_WITHOUT_SEND_ONLY, Feature.SECOND_PORT)
def test_send_only_fails_when_the_sm_does_not_support_it(bed: Testbed) -> None:
    group, peer, other = new_group(), Application(bed, 0), Application(bed, 1)
    with bed.sm_without_send_only():
        with pytest.raises(McastError) as caught:
            join_refused_by_the_sm(peer, group)
        assert caught.value.errno in {E.EINVAL, E.EOPNOTSUPP}
        assert "send-only" in str(caught.value)
        mgid = other.join(group).gid
        assert bed.observer.group_ports(mgid) == {other.port}
        assert mgid not in bed.observer.port_memberships(peer.port)
    peer.join(group, send_only=True)


@clause("JEX-10")
@fact("K-SENDONLY-1")
@needs(Capability.IGMP)
def test_send_only_stays_out_of_the_igmp_list_and_the_snooping_table(bed: Testbed) -> None:
    silent, full = Application(bed, 0, None), Application(bed, 0, None)
    unseen = silent.join(new_group(), send_only=True).gid
    seen = full.join(new_group()).gid  # announced later by the same port, and there
    assert bed.observer.group_ports(seen) == {full.port}
    assert not bed.observer.group_ports(unseen)
    memberships = bed.observer.port_memberships(full.port)
    assert seen in memberships
    assert unseen not in memberships


@clause("JEX-10")
@fact("K-SENDONLY-2")
@needs(Capability.IGMP, Feature.IGMP_ON_WIRE)
def test_send_only_sends_no_igmp_report(bed: Testbed) -> None:
    silent, full = Application(bed, 0, None), Application(bed, 0, None)
    unseen = silent.join(new_group(), send_only=True).gid
    seen = full.join(new_group()).gid
    eventually(bed, lambda: bed.observer.igmp_reports(seen) > 0)
    assert bed.observer.igmp_reports(unseen) == 0


@clause("JEX-10")
@needs(Capability.SA, Feature.SWITCH_TABLE, Feature.SECOND_PORT)
def test_the_sa_is_told_of_send_only_and_full_members(bed: Testbed) -> None:
    """The SA does for InfiniBand what IGMP does for RoCE, and knows which member receives (SA-ENTRY-1)."""
    group, silent, full = new_group(), Application(bed, 0, None), Application(bed, 1, None)
    mgid = silent.join(group, send_only=True).gid
    assert bed.observer.group_exists(mgid)
    assert mgid in bed.observer.port_memberships(silent.port)
    assert not bed.observer.group_ports(mgid)
    full.join(group)
    assert bed.observer.group_ports(mgid) == {full.port}
    assert bed.observer.forwards_from(silent.port, mgid)


@clause("JEX-11")
@pytest.mark.parametrize(
    ("call", "phase", "errno"),
    [
        pytest.param(lambda p: p.channel.create_id().bind_addr("192.0.2.1"), Phase.BIND, E.EADDRNOTAVAIL),
        pytest.param(lambda p: p.channel.create_id().create_qp(), Phase.CREATE_QP, E.EINVAL),
        pytest.param(lambda p: p.id.create_qp(), Phase.CREATE_QP, E.EINVAL),
        pytest.param(lambda p: p.id.join_multicast(raw_address(None)), Phase.JOIN, E.EINVAL),
        pytest.param(lambda p: p.id.join_multicast_ex(raw_join(None)), Phase.JOIN, E.EINVAL),
        pytest.param(lambda p: p.id.leave_multicast("239.0.0.1"), Phase.LEAVE, E.EADDRNOTAVAIL),
        pytest.param(lambda p: p.qp.attach_mcast("fe80::1", 0xC001), Phase.ATTACH, E.EINVAL),
        pytest.param(lambda p: p.qp.detach_mcast("ff0e::1", 0xC001), Phase.DETACH, E.EINVAL),
        pytest.param(lambda p: p.qp.modify(QpState.RTR), Phase.MODIFY, E.EINVAL),
    ],
    ids=["bind", "qp-unbound", "qp-second", "join", "join-ex", "leave", "attach", "detach", "modify"],
)
def test_a_failing_call_carries_its_errno(
    bed: Testbed, call: Callable[[Application], None], phase: Phase, errno: int
) -> None:
    with pytest.raises(McastError) as caught:
        call(Application(bed))
    error = caught.value
    assert (error.errno, error.phase) == (errno, phase)
    assert isinstance(error, OSError)
    assert str(error).startswith(f"{error.call}(")
    assert f": {E.errorcode[errno]}: " in str(error)


@clause("JEX-12")
@fact("K-JOIN-13")
@both_joins
@pytest.mark.parametrize("address", [None, "0.0.0.0", "127.0.0.1"])
def test_join_needs_a_bound_id(bed: Testbed, join: Join, address: str | None) -> None:
    channel, group = bed.backend.event_channel(), new_group()
    id_ = channel.create_id()
    if address:
        id_.bind_addr(address)
    assert id_.device is None
    with pytest.raises(InvalidArgument):
        join(id_, group, "nowhere")
    bound = Application(bed, channel=channel)
    mgid = bound.join(group, context="bound").gid  # the first event there is
    bound.id.leave_multicast(group)
    eventually(bed, lambda: not bed.observer.group_exists(mgid))


@clause("JEX-13")
@fact("K-JOIN-17")
@needs(Feature.ROUTES)
def test_resolve_without_source_takes_the_device_of_the_route(bed: Testbed) -> None:
    channel, group = bed.backend.event_channel(), new_group()
    id_ = channel.create_id()
    with pytest.raises(Unreachable) as caught:
        id_.resolve_addr(group)
    assert caught.value.errno == E.ENETUNREACH
    assert id_.device is None
    with bed.route(IPv4Network("239.0.0.0/8"), port_at(bed, 1)):
        id_ = channel.create_id()
        id_.resolve_addr(group)
        event = channel.get_event(BOUND)
    assert event is not None
    assert (event.type, event.status, event.id) == (CmEventType.ADDR_RESOLVED, 0, id_)
    assert id_.device == Application(bed, 1, None).id.device


@clause("JEX-13")
@fact("K-JOIN-16")
def test_resolve_with_a_source_needs_no_route(bed: Testbed) -> None:
    channel, group = bed.backend.event_channel(), new_group()
    id_ = channel.create_id()
    id_.resolve_addr(group, port_at(bed, 1))
    with pytest.raises(InvalidArgument):
        id_.join_multicast(group)  # not resolved until the event is fetched
    resolved = channel.get_event(BOUND)
    assert resolved is not None
    assert (resolved.type, resolved.status) == (CmEventType.ADDR_RESOLVED, 0)
    assert id_.device == Application(bed, 1, None).id.device
    id_.join_multicast(group)
    joined = channel.get_event(BOUND)
    assert joined is not None
    assert (joined.type, joined.status) == (CmEventType.MULTICAST_JOIN, 0)


@clause("JEX-14")
@needs(Feature.SECOND_PORT)
def test_leave_releases_membership_and_attachment(bed: Testbed) -> None:
    """Leave releases membership attachment and group."""
    group, first, last = new_group(), Application(bed, 0), Application(bed, 1)
    where, mgid = first.join(group), last.join(group).gid
    first.id.leave_multicast(group)
    eventually(bed, lambda: bed.observer.group_ports(mgid) == {last.port})
    assert mgid not in bed.observer.port_memberships(first.port)
    assert bed.observer.group_exists(mgid)
    with pytest.raises(InvalidArgument):
        first.qp.detach_mcast(mgid, where.dlid)
    last.id.leave_multicast(group)
    eventually(bed, lambda: not bed.observer.group_exists(mgid))
    assert not bed.observer.group_ports(mgid)


@clause("JEX-15", "JM-2")
@fact("K-EVENT-3")
@both_joins
def test_the_qp_is_attached_when_the_event_is_retrieved(bed: Testbed, join: Join) -> None:
    group, receiver, sender = new_group(), Application(bed, 0), Application(bed, 1)
    outward = sender.join(group)
    join(receiver.id, group, None)
    eventually(bed, lambda: readable(receiver.channel))
    receiver.wait_delivery(outward.gid)
    assert outward.gid not in receiver.qp.attachments
    sender.send(outward, *numbered(10, "early"))
    assert receiver.receive_until_marker(by=sender) == []
    event = ud_of(receiver.event()).destination
    assert dict(receiver.qp.attachments) == {event.gid: event.dlid}
    sender.send(outward, *numbered(10, "late"))
    assert receiver.receive(10) == [*numbered(10, "late")]


@clause("JEX-15")
@needs(Feature.ATTACH_TABLE)
def test_the_attach_table_gains_the_qp_at_retrieval(bed: Testbed) -> None:
    group, other, peer = new_group(), Application(bed), Application(bed)
    mgid = other.join(group).gid
    peer.id.join_multicast(group)
    eventually(bed, lambda: readable(peer.channel))
    assert bed.observer.attached(peer.port, mgid) == {other.qp.qp_num}
    peer.event()
    assert bed.observer.attached(peer.port, mgid) == {other.qp.qp_num, peer.qp.qp_num}


@clause("JEX-16")
@fact("K-EVENT-4")
@pytest.mark.parametrize("qp_first", [False, True], ids=["qp-after-event", "qp-before-event"])
def test_without_a_qp_the_user_attaches(bed: Testbed, qp_first: bool) -> None:
    group, receiver, sender = new_group(), Application(bed, 0, None), Application(bed, 1)
    outward = sender.join(group)
    where = receiver.join(group)
    assert (where.gid, where.dlid, where.qkey) == (outward.gid, outward.dlid, outward.qkey)
    # the QP that is attached may be of any id of the device
    qp_owner = Application(bed, 0) if qp_first else receiver
    if not qp_first:
        receiver.id.create_qp()
    sender.send(outward, b"too early")
    assert qp_owner.receive_until_marker(by=sender) == []
    qp_owner.qp.attach_mcast(where.gid, where.dlid)
    sender.send(outward, b"in time")
    assert qp_owner.receive(1) == [b"in time"]


@clause("JEX-17")
@both_joins
def test_the_context_comes_back_as_the_same_object(bed: Testbed, join: Join) -> None:
    peer = Application(bed)
    contexts: list[object] = [[], [], "text", None, 7, object()]
    for context in contexts:
        join(peer.id, new_group(), context)
    for context in contexts:
        assert peer.event().context is context


@clause("JEX-17")
def test_context_of_each_join_comes_back(bed: Testbed) -> None:
    """The context of a send only or failed join comes back too."""
    peer, context, other = Application(bed), object(), object()
    peer.id.join_multicast_ex(JoinAttrEx.send_only(new_group()), context)
    assert peer.event().context is context
    peer.id.join_multicast_ex(raw_join(raw_address(peer.port)), other)
    event = peer.channel.get_event(BOUND)
    assert event is not None
    assert event.context is other


@clause("JEX-12")
@fact("K-JOIN-13")
@needs(Capability.CONNECTED_QP)
def test_join_needs_a_datagram_port_space(bed: Testbed) -> None:
    id_ = bed.backend.event_channel().create_id(PortSpace.TCP)
    id_.bind_addr(bed.ports[0])
    assert id_.device is not None
    with pytest.raises(InvalidArgument):
        id_.join_multicast(new_group())


@clause("JEX-5", "JEX-7")
def test_full_and_send_only_member_of_a_port_differ(bed: Testbed) -> None:
    """A full and a send only member of one port differ."""
    group, full, silent = new_group(), Application(bed, init=QpInit(max_recv_wr=8)), Application(bed)
    full.join(group)
    silent.send(silent.join(group, send_only=True), b"hello")
    assert full.receive(1) == [b"hello"]
    assert silent.receive_until_marker(by=silent) == []


@clause("JEX-8")
def test_send_only_qp_may_be_attached_by_the_user(bed: Testbed) -> None:
    """A send only QP may be attached by the user and detached as attached."""
    peer = Application(bed)
    group = peer.join(new_group(), send_only=True)
    peer.qp.attach_mcast(group.gid, group.dlid)
    with pytest.raises(InvalidArgument):
        peer.qp.detach_mcast(group.gid, other_lid(group.dlid))
    peer.qp.detach_mcast(group.gid, group.dlid)
