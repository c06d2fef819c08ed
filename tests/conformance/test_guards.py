"""The guards: where the real stack does harm in silence, every provider says no first."""

from __future__ import annotations

import errno as E
import select
from collections.abc import Callable
from contextlib import nullcontext
from ipaddress import IPv4Address

import pytest
from typing_extensions import Buffer

from mcast.api import (
    AddressNotAvailable,
    AlreadyJoined,
    Capability,
    CmEventType,
    CmId,
    JoinAttrEx,
    McastError,
    MessageTooLarge,
    SecondMlid,
    Testbed,
)
from mcast.conformance.helpers import (
    BOUND,
    Application,
    clause,
    fact,
    needs,
    new_group,
    numbered,
    other_lid,
    raw_address,
    readable,
)
from mcast.wire.addresses import McastAddress, Mgid

NO_GROUPS = ["10.9.9.9", "240.0.0.1", "255.255.255.255", "0.0.0.0", "::", "fe80::1", "::ffff:10.1.2.3"]


# --- G-GROUP ---------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda id_, address: id_.join_multicast(address),
        lambda id_, address: id_.join_multicast_ex(JoinAttrEx.full_member(address)),
        lambda id_, address: id_.join_multicast_ex(JoinAttrEx.send_only(address)),
        lambda id_, address: id_.leave_multicast(address),
        lambda id_, address: id_.resolve_addr(address),
    ],
    ids=["join", "full_member", "send_only", "leave", "resolve"],
)
@pytest.mark.parametrize("address", NO_GROUPS, ids=lambda address: address.replace(":", "_"))
def test_an_address_that_is_no_group_is_refused_when_made(
    bed: Testbed, call: Callable[[CmId, str], None], address: str
) -> None:
    peer = Application(bed)
    with pytest.raises(ValueError, match=r"not a multicast group: allowed are"):
        call(peer.id, address)
    assert not readable(peer.channel)
    assert dict(peer.qp.attachments) == {}


# --- G-JOIN ----------------------------------------------------------------


@fact("K-EVENT-5")
@pytest.mark.parametrize("fetched", [True, False], ids=["joined", "joining"])
@pytest.mark.parametrize("attr", [JoinAttrEx.full_member, JoinAttrEx.send_only])
def test_a_second_join_of_an_address_is_refused(
    bed: Testbed, attr: Callable[[McastAddress], JoinAttrEx], fetched: bool
) -> None:
    group, peer, sender = new_group(), Application(bed, 0), Application(bed, 1)
    peer.id.join_multicast(group)
    if fetched:
        peer.event()
    for again in (peer.id.join_multicast, lambda g: peer.id.join_multicast_ex(attr(g))):
        for same in (group, McastAddress.of(group, 5000)):
            with pytest.raises(AlreadyJoined) as caught:
                again(same)
            assert (caught.value.errno, caught.value.address) == (E.EADDRINUSE, group)
    if not fetched:
        peer.event()
    assert not readable(peer.channel)
    outward = sender.join(group)
    peer.wait_delivery(outward.gid)
    sender.send(outward, b"one copy")
    assert peer.receive_until_marker(by=sender) == [b"one copy"]
    peer.id.leave_multicast(group)
    peer.join(group)


@needs(Capability.RAW_MGID)
@pytest.mark.parametrize("raw_first", [False, True], ids=["address-first", "mgid-first"])
def test_second_join_by_another_name_is_refused(bed: Testbed, raw_first: bool) -> None:
    """A second join by another name of the group is refused."""
    group, peer = new_group(), Application(bed)
    names = [group, McastAddress.of(Mgid(Application(bed, 1).join(group).gid))]
    first, second = reversed(names) if raw_first else names
    peer.join(first)
    with pytest.raises(AlreadyJoined) as caught:
        peer.id.join_multicast(second)
    assert caught.value.address == first
    with pytest.raises(AddressNotAvailable):
        peer.id.leave_multicast(second)
    with pytest.raises(AlreadyJoined):
        peer.id.join_multicast(second)
    peer.id.leave_multicast(first)
    peer.join(second)


def test_the_guard_is_of_one_id_and_one_address(bed: Testbed) -> None:
    group, other = new_group(), new_group()
    one, two = Application(bed), Application(bed)
    for peer in (one, two):
        peer.join(group)
        peer.join(other)


def test_a_refused_join_is_not_remembered_as_joined(bed: Testbed) -> None:
    group, channel = new_group(), bed.backend.event_channel()
    id_ = channel.create_id()
    with pytest.raises(ValueError):
        id_.join_multicast(group)
    id_.bind_addr(bed.ports[0])
    id_.join_multicast(group)


@fact("K-LEAVE-7")
@needs(Capability.IGMP)  # on InfiniBand the SA maps a unicast address to a group like any other
def test_a_join_that_failed_later_wants_its_leave(bed: Testbed) -> None:
    peer, address = Application(bed), raw_address(IPv4Address("10.9.9.9"))
    peer.id.join_multicast(address)
    peer.event(CmEventType.MULTICAST_ERROR, -1)
    with pytest.raises(AlreadyJoined):
        peer.id.join_multicast(address)
    peer.id.leave_multicast(address)
    peer.id.join_multicast(address)


# --- G-MTU -----------------------------------------------------------------


@fact("K-DATA-6")
def test_a_message_larger_than_the_mtu_takes_its_batch_with_it(bed: Testbed) -> None:
    group, sender, receiver = new_group(), Application(bed, 0), Application(bed, 1)
    outward = sender.join(group, send_only=True)
    receiver.join(group)
    limit = sender.qp.max_message_size
    fits, too_large = bytes(range(256)) * (limit // 256), b"x" * (limit + 1)
    assert len(fits) == limit
    batches: list[list[Buffer]] = [[b"first", too_large, b"last"], [b"first", bytearray(too_large)]]
    for batch in batches:
        with pytest.raises(MessageTooLarge) as caught:
            sender.qp.send(outward, batch)
        error = caught.value
        assert (error.errno, error.size, error.limit, error.index) == (E.EMSGSIZE, limit + 1, limit, 1)
    assert sender.qp.counters.sent == 0
    assert receiver.receive_until_marker(by=sender) == []
    sender.send(outward, fits)
    assert receiver.receive(1) == [fits]


def test_the_limit_is_the_mtu_of_the_port(bed: Testbed) -> None:
    peer = Application(bed)
    (device,) = (device for device in bed.backend.devices() if device.name == peer.id.device)
    assert peer.qp.max_message_size == device.ports[0].active_mtu


# --- G-MLID ----------------------------------------------------------------


@clause("AT-1")
@fact("K-ATTACH-7")
@pytest.mark.parametrize("by_user", [False, True], ids=["joined", "attached"])
def test_a_second_mlid_of_one_mgid_is_refused(bed: Testbed, by_user: bool) -> None:
    group, peer, keeper, sender = (
        new_group(),
        Application(bed, 0),
        Application(bed, 0, None),
        Application(bed, 1),
    )
    outward, where = sender.join(group), keeper.join(group)
    second = other_lid(where.dlid)
    if by_user:
        peer.qp.attach_mcast(where.gid, where.dlid)
    else:
        peer.join(group)
    with pytest.raises(SecondMlid) as caught:
        peer.qp.attach_mcast(where.gid, second)
    error = caught.value
    assert (error.errno, error.gid, error.lid) == (E.EEXIST, where.gid, second)
    assert error.attached_lid == where.dlid
    assert dict(peer.qp.attachments) == {where.gid: where.dlid}
    sender.send(outward, *numbered(3))
    assert peer.receive_until_marker(by=sender) == [*numbered(3)]
    peer.qp.detach_mcast(where.gid, where.dlid)
    peer.qp.attach_mcast(where.gid, second)
    peer.qp.detach_mcast(where.gid, second)


# --- G-RECV ----------------------------------------------------------------


def memory_of(peer: Application) -> bytearray:
    """Room for four messages."""
    return bytearray(4 * peer.qp.max_message_size)


@pytest.mark.parametrize("leased", [False, True], ids=["queued", "leased"])
def test_receive_memory_begins_while_nothing_is_there(bed: Testbed, leased: bool) -> None:
    group, sender, receiver = new_group(), Application(bed, 0), Application(bed, 1)
    outward = sender.join(group, send_only=True)
    receiver.join(group)
    sender.send(outward, b"first")
    assert select.select([receiver.qp.fileno()], [], [], BOUND)[0], "it has come"
    with receiver.qp.recv(1, BOUND) if leased else nullcontext():
        with pytest.raises(McastError) as caught:
            receiver.qp.register(memory_of(receiver), recv_slot=receiver.qp.max_message_size)
        assert caught.value.errno == E.EBUSY
    if not leased:
        assert receiver.receive(1) == [b"first"]
    receiver.qp.register(memory_of(receiver), recv_slot=receiver.qp.max_message_size).close()
    assert receiver.qp.counters.dropped_reset == 0


def test_receive_memory_ends_whatever_is_there(bed: Testbed) -> None:
    """Drop and count queued messages; leased ones stay readable, and are not written over."""
    group, sender = new_group(), Application(bed, 0)
    receiver, witness = Application(bed, 1), Application(bed, 1)
    outward = sender.join(group, send_only=True)
    own = receiver.qp.counters.recv_free
    region = receiver.qp.register(memory_of(receiver), recv_slot=receiver.qp.max_message_size)
    for peer in (receiver, witness):
        peer.join(group)
    sender.send(outward, *numbered(3))
    assert witness.receive_until_marker(by=sender) == [*numbered(3)]
    with receiver.qp.recv(1, BOUND) as batch:
        region.close()
        assert receiver.qp.counters.dropped_reset == 2
        sender.send(outward, *numbered(5, "after"))
        assert receiver.receive(5) == [*numbered(5, "after")]
        assert [bytes(message.payload) for message in batch] == [*numbered(1)]
    assert receiver.qp.counters.recv_free == own
