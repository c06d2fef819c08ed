"""Measured facts about joins and their events, on a RoCE fabric; see `mcast.conformance.facts`.

Rows that a clause, a guard or the contract covers are marked there.
"""

from __future__ import annotations

import errno as E
import resource
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv6Address

import pytest

from mcast.api import (
    Capability,
    CmEventType,
    DeviceGone,
    Feature,
    InvalidArgument,
    JoinAttrEx,
    McastError,
    NotSupported,
    OutOfResources,
    PortSpace,
    QpInit,
    QpState,
    Testbed,
)
from mcast.conformance.helpers import (
    Application,
    eventually,
    fact,
    needs,
    new_group,
    numbered,
    port_info,
    raw_address,
    raw_join,
    readable,
    ud_of,
)
from mcast.wire.addresses import AF_UNIX, Gid, McastAddress, Mgid

roce: pytest.MarkDecorator = needs(Capability.IGMP)

NO_GROUPS = [IPv4Address(address) for address in ("10.9.9.9", "240.0.0.1", "255.255.255.255")]
OWN_ADDRESS = None
"""Stands for the address of the port under test."""


@fact("K-JOIN-5")
@pytest.mark.parametrize(
    "address",
    [None, raw_address(None), raw_address(AF_UNIX)],
    ids=["null", "AF_UNSPEC", "AF_UNIX"],
)
def test_an_address_of_no_family_is_refused(bed: Testbed, address: McastAddress | None) -> None:
    peer = Application(bed)
    with pytest.raises(InvalidArgument):
        peer.id.join_multicast_ex(raw_join(address))
    if address is not None:
        with pytest.raises(InvalidArgument):
            peer.id.join_multicast(address)
    peer.join(new_group())


@fact("K-JOIN-6")
@roce
@pytest.mark.parametrize("address", [IPv4Address(0), IPv6Address(0)], ids=["v4", "v6"])
def test_a_zero_address_is_refused(bed: Testbed, address: object) -> None:
    peer = Application(bed)
    with pytest.raises(InvalidArgument):
        peer.id.join_multicast(raw_address(address))
    assert bed.observer.port_memberships(peer.port).isdisjoint({Gid(bytes(12) + bytes(4)), Gid("::ffff:0:0")})


@fact("K-JOIN-7", "K-LEAVE-7")
@roce
@pytest.mark.parametrize("address", [*NO_GROUPS, OWN_ADDRESS], ids=str)
def test_a_unicast_join_with_a_qp_fails_at_the_attach(bed: Testbed, address: IPv4Address | None) -> None:
    peer = Application(bed)
    address = address or peer.port
    peer.id.join_multicast(raw_address(address))
    event = peer.event(CmEventType.MULTICAST_ERROR, status=-1)
    assert event.errno == E.EINVAL
    assert dict(peer.qp.attachments) == {}
    assert Gid(address) in bed.observer.port_memberships(peer.port)
    peer.id.leave_multicast(raw_address(address))
    eventually(bed, lambda: Gid(address) not in bed.observer.port_memberships(peer.port))


@fact("K-JOIN-8")
@roce
@pytest.mark.parametrize("address", [*NO_GROUPS, OWN_ADDRESS], ids=str)
def test_a_unicast_join_without_a_qp_succeeds(bed: Testbed, address: IPv4Address | None) -> None:
    peer = Application(bed, init=None)
    address = address or peer.port
    peer.id.join_multicast(raw_address(address))
    assert ud_of(peer.event()).destination.gid == Gid(address)
    peer.id.leave_multicast(raw_address(address))


@fact("K-JOIN-9")
@roce
@pytest.mark.parametrize("address", ["224.0.0.1", "224.0.0.251", "232.1.1.1", "239.255.255.255"])
def test_groups_from_all_of_the_ipv4_range_are_joined(bed: Testbed, address: str) -> None:
    peer = Application(bed)
    peer.id.join_multicast(address)
    assert ud_of(peer.event()).destination.gid == Gid(IPv4Address(address))


@fact("K-JOIN-10")
@needs(Feature.SECOND_PORT)
def test_the_port_is_part_of_what_leave_compares(bed: Testbed) -> None:
    peer = Application(bed)
    group = new_group(port=5000)
    plain = McastAddress(address=group.address)
    mgid = peer.join(group).gid
    assert mgid == Application(bed, 1).join(plain).gid  # on the wire it is no part
    with pytest.raises(McastError) as caught:
        peer.id.leave_multicast(plain)
    assert caught.value.errno == E.EADDRNOTAVAIL
    assert peer.port in bed.observer.group_ports(mgid)
    peer.id.leave_multicast(group)
    eventually(bed, lambda: peer.port not in bed.observer.group_ports(mgid))


@fact("K-JOIN-11")
@roce
@pytest.mark.parametrize(
    "address",
    ["ff0e::1", "ff02::1", Mgid("ff12:401b:ffff::1"), Mgid("::ffff:239.1.1.1")],
    ids=["v6", "v6-link-local", "mgid", "mgid-of-v4"],
)
def test_ipv6_groups_and_raw_mgids_are_not_supported(bed: Testbed, address: str | Mgid) -> None:
    for init in (QpInit(), None):
        peer = Application(bed, init=init)
        with pytest.raises(NotSupported) as caught:
            peer.id.join_multicast(address)
        assert caught.value.errno == 524


@needs(Capability.IPV6_GROUP)
def test_ipv6_groups_work_where_they_are_supported(bed: Testbed) -> None:
    group, one, two = McastAddress.of("ff0e::1:2"), Application(bed, 0), Application(bed, 1)
    outward = one.join(group)
    two.join(group)
    one.send(outward, b"over IPv6")
    assert two.receive(1) == [b"over IPv6"]


@needs(Capability.RAW_MGID)
def test_raw_mgids_work_where_they_are_supported(bed: Testbed) -> None:
    mgid = Mgid("ff15:beef::1:2")
    group, one, two = McastAddress.of(mgid), Application(bed, 0), Application(bed, 1)
    outward = one.join(group)
    assert outward.gid == two.join(group).gid == mgid
    one.send(outward, b"by MGID")
    assert two.receive(1) == [b"by MGID"]


@fact("K-JOIN-12", "K-DATA-15")
@roce
@needs(Feature.IPV6_SOURCE)
def test_an_ipv4_group_on_an_ipv6_id_joins_and_sending_kills_the_qp(bed: Testbed) -> None:
    port = bed.ports[0]
    peer = Application(bed, bed.ipv6_of(port))
    group = new_group()
    peer.id.join_multicast(group)
    destination = ud_of(peer.event()).destination
    assert port_info(bed, port).gids[destination.sgid_index] == Gid(bed.ipv6_of(port))
    fails_and_stays_in_err(peer, lambda: peer.send(destination, b"IPv4 over IPv6"))


def fails_and_stays_in_err(peer: Application, send: Callable[[], object]) -> None:
    """The send is reported as failed, the QP is in ERR and stays there until it is reset."""
    for _ in range(2):
        with pytest.raises(McastError) as caught:
            send()
        assert caught.value.errno == E.EIO
        assert peer.qp.state == QpState.ERR
    peer.qp.reset()
    assert peer.qp.state == QpState.RTS


@fact("K-JOIN-14")
def test_an_address_that_is_not_local_binds_to_nothing(bed: Testbed) -> None:
    id_ = bed.backend.event_channel().create_id()
    with pytest.raises(McastError) as caught:
        id_.bind_addr("192.0.2.1")
    assert caught.value.errno == E.EADDRNOTAVAIL
    assert id_.device is None
    id_.bind_addr(bed.ports[0])


@fact("K-JOIN-15")
@roce
def test_the_ipoib_port_space_does_not_bind_on_ethernet(bed: Testbed) -> None:
    id_ = bed.backend.event_channel().create_id(PortSpace.IPOIB)
    with pytest.raises(InvalidArgument):
        id_.bind_addr(bed.ports[0])
    assert id_.device is None


@fact("K-JOIN-15")
@roce
def test_the_ib_port_space_binds_and_joins_nothing(bed: Testbed) -> None:
    peer, id_ = Application(bed), bed.backend.event_channel().create_id(PortSpace.IB)
    id_.bind_addr(bed.ports[0])
    assert id_.device == peer.id.device
    for join in (id_.join_multicast, lambda group: id_.join_multicast_ex(JoinAttrEx.full_member(group))):
        with pytest.raises(InvalidArgument):
            join(new_group())


@fact("K-JOIN-18")
@roce
@needs(Feature.LINK)
def test_a_join_succeeds_while_the_link_is_down(bed: Testbed) -> None:
    peer, group = Application(bed), new_group()
    with bed.link_down(peer.port):
        peer.id.join_multicast(group)
        peer.event()
    peer.id.leave_multicast(group)


@fact("K-JOIN-19")
@roce
@needs(Feature.ADDRESS_REMOVAL)
def test_a_join_fails_without_a_status_when_the_address_is_gone(bed: Testbed) -> None:
    peer, group = Application(bed), new_group()
    with bed.without_address(peer.port):
        peer.id.join_multicast(group)
        event = peer.event(CmEventType.MULTICAST_ERROR, status=0)
        assert event.ud is None
        with pytest.raises(McastError):
            event.check()
        assert dict(peer.qp.attachments) == {}
        peer.id.leave_multicast(group)


@fact("K-JOIN-20")
@needs(Feature.DEVICE_REMOVAL)
def test_no_join_after_the_device_was_removed(bed: Testbed) -> None:
    peer = Application(bed, bed.spare)
    mgid = peer.join(new_group()).gid
    bed.remove_device(peer.port)
    peer.event(CmEventType.DEVICE_REMOVAL)
    eventually(bed, lambda: not bed.observer.group_ports(mgid))
    for join in (
        peer.id.join_multicast,
        lambda group: peer.id.join_multicast_ex(JoinAttrEx.send_only(group)),
    ):
        with pytest.raises(DeviceGone) as caught:
            join(new_group())
        assert caught.value.errno == E.ENXIO


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """This process may open as many files as it is ever allowed to: a card takes hundreds of queue pairs."""
    limits = _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@fact("K-JOIN-21")
@pytest.mark.usefixtures("many_descriptors")
def test_a_join_past_the_attach_limit_fails_at_the_attach(bed: Testbed) -> None:
    small, group = QpInit(max_send_wr=1, max_recv_wr=1), new_group()
    peer, keeper = Application(bed, init=small), Application(bed, init=None)
    where = keeper.join(group)
    (limit,) = (d.max_mcast_qp_attach for d in bed.backend.devices() if d.name == peer.id.device)
    others = [Application(bed, init=small, channel=keeper.channel) for _ in range(limit)]
    for other in others:
        other.qp.attach_mcast(where.gid, where.dlid)
    peer.id.join_multicast(group)
    event = peer.event(CmEventType.MULTICAST_ERROR, status=-1)
    assert event.errno == E.ENOMEM
    with pytest.raises(OutOfResources):
        event.check()
    assert dict(peer.qp.attachments) == {}
    peer.id.leave_multicast(group)
    others[0].qp.detach_mcast(where.gid, where.dlid)
    peer.join(group)
    assert dict(peer.qp.attachments) == {where.gid: where.dlid}


@fact("K-JOIN-22")
def test_a_join_succeeds_while_the_qp_is_in_err(bed: Testbed) -> None:
    peer, sender, group = Application(bed, 0), Application(bed, 1), new_group()
    peer.qp.modify(QpState.ERR)
    peer.join(group)
    assert peer.qp.state is QpState.ERR
    peer.qp.reset()
    sender.send(sender.join(group), b"attached all the same")
    assert peer.receive(1) == [b"attached all the same"]


@fact("K-EVENT-1")
@roce
@pytest.mark.parametrize("attr", [JoinAttrEx.full_member, JoinAttrEx.send_only])
def test_the_parameters_of_a_join_event(bed: Testbed, attr: Callable[[McastAddress], JoinAttrEx]) -> None:
    peer, group, context = Application(bed), new_group(), object()
    peer.id.join_multicast_ex(attr(group), context)
    event = peer.event()
    ud = ud_of(event)
    assert (event.errno, event.context) == (0, context)
    assert (ud.qp_num, ud.qkey) == (0xFFFFFF, 0x01234567)
    to = ud.destination
    assert isinstance(group.address, IPv4Address)
    assert (to.gid, to.hop_limit) == (Gid(group.address), 64)
    assert (to.dlid, to.sl, to.is_global, to.port_num) == (0, 0, True, 1)
    assert port_info(bed, peer.port).gids[to.sgid_index] == Gid(peer.port)


@fact("K-EVENT-2")
@roce
def test_igmp_happens_in_the_join_call(bed: Testbed) -> None:
    peer, group = Application(bed), new_group()
    assert isinstance(group.address, IPv4Address)
    mgid = Gid(group.address)
    assert mgid not in bed.observer.port_memberships(peer.port)
    peer.id.join_multicast(group)
    assert mgid in bed.observer.port_memberships(peer.port)
    eventually(bed, lambda: bed.observer.group_ports(mgid) == {peer.port})
    assert mgid not in peer.qp.attachments


@fact("K-EVENT-4")
def test_a_qp_that_the_user_attached_is_detached_by_leave(bed: Testbed) -> None:
    group, peer, keeper, sender = (
        new_group(),
        Application(bed, 0, None),
        Application(bed, 0, None),
        Application(bed, 1),
    )
    outward, where = sender.join(group), peer.join(group)
    keeper.join(group)
    peer.id.create_qp()
    assert dict(peer.qp.attachments) == {}
    peer.qp.attach_mcast(where.gid, where.dlid)
    sender.send(outward, b"attached")
    assert peer.receive(1) == [b"attached"]
    peer.id.leave_multicast(group)
    sender.send(outward, b"left")
    assert peer.receive_until_marker(by=sender) == []
    with pytest.raises(InvalidArgument):
        peer.qp.detach_mcast(where.gid, where.dlid)


@fact("K-EVENT-6")
@needs(Feature.SECOND_PORT)
@pytest.mark.parametrize("first", [0, 1])
def test_ids_of_one_device_are_counted(bed: Testbed, first: int) -> None:
    group, pair, sender = new_group(), [Application(bed, 0), Application(bed, 0)], Application(bed, 1)
    for peer in pair:
        where = peer.join(group)
    outward = sender.join(group, send_only=True)
    gone, kept = pair[first], pair[1 - first]
    gone.id.leave_multicast(group)
    marker = gone.join(new_group())  # the leave has had its time
    assert bed.observer.group_ports(marker.gid) == {gone.port}
    assert kept.port in bed.observer.group_ports(where.gid)
    assert where.gid in bed.observer.port_memberships(kept.port)
    sender.send(outward, b"still here")
    assert kept.receive(1) == [b"still here"]
    assert gone.receive_until_marker(by=sender) == []
    kept.id.leave_multicast(group)
    eventually(bed, lambda: where.gid not in bed.observer.port_memberships(kept.port))


@fact("K-EVENT-7", "K-DEVICE-6")
@roce
@pytest.mark.parametrize("count", [100, 1000])
def test_many_groups_on_one_id_report_in_call_order(bed: Testbed, count: int) -> None:
    peer, groups = Application(bed), [new_group() for _ in range(count)]
    for group in groups:
        peer.id.join_multicast(group, group)
    assert [peer.event().context for _ in groups] == groups
    assert len(peer.qp.attachments) == count
    assert not readable(peer.channel)


@fact("K-SENDONLY-1")
@roce
def test_send_only_changes_neither_igmp_list_nor_snooping_table(bed: Testbed) -> None:
    peer, member, group = Application(bed, 0), Application(bed, 1), new_group()
    mgid = member.join(group).gid
    eventually(bed, lambda: bed.observer.group_ports(mgid) == {member.port})
    before = bed.observer.port_memberships(peer.port)
    peer.join(group, send_only=True)
    assert bed.observer.port_memberships(peer.port) == before
    peer.join(new_group())  # what send-only had announced would be there by now
    assert bed.observer.group_ports(mgid) == {member.port}


@fact("K-SENDONLY-4")
def test_a_qp_that_never_joined_can_send(bed: Testbed) -> None:
    group, stranger, guide = new_group(), Application(bed, 0), Application(bed, 0, None)
    # Two, because an SM writes no forwarding tables for a group with one port alone.
    members = [Application(bed, port) for port in (1, 2)]
    outward = guide.join(group, send_only=True)
    for member in members:
        member.join(group)
    guide.id.leave_multicast(group)
    stranger.send(outward, *numbered(10))
    for member in members:
        assert member.receive(10) == [*numbered(10)]


@fact("K-SENDONLY-5")
def test_a_send_to_an_empty_group_succeeds(bed: Testbed) -> None:
    peer, group = Application(bed), new_group()
    outward = peer.join(group, send_only=True)
    peer.send(outward, *numbered(10))
    peer.id.leave_multicast(group)
    peer.send(outward, *numbered(10))
    assert peer.qp.counters.sent == 20
    assert peer.qp.state is QpState.RTS
