"""Behaviour of the kernel with the SA, measured on the lab's InfiniBand fabric: rows of docs/facts/sa.md.

The evidence is OpenSM's: who is in which group, by saquery.
"""

from __future__ import annotations

import ctypes
import errno as E
import io
import os
import signal
import struct
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from time import monotonic

import pytest

from mcast.api import (
    CmEventType,
    InvalidArgument,
    JoinAttrEx,
    McastError,
    NotSupported,
    PortSpace,
    Refused,
    Testbed,
    TimedOut,
)
from mcast.backends.net import hostnet
from mcast.backends.rdma import PROVIDER
from mcast.backends.rdma.infiniband_bed import SM_KEY, InfinibandTestbed, pkeys_of, trusted_records
from mcast.backends.rdma.net.ipoib import interfaces_of
from mcast.conformance.helpers import Application, eventually, new_group, raw_address, readable
from mcast.wire.addresses import Gid, McastAddress, Mgid
from mcast.wire.kernel_join import kernel_join
from mcast.wire.mapping import infiniband_mgid
from mcast.wire.mcmember import JoinState, McMemberRecord, SaMethod

from ....tapped import Asked, asked_of_the_sa
from ....waiting import until

FULL, SEND_ONLY = JoinState.FULL, JoinState.SEND_ONLY_FULL


@pytest.fixture
def bed(lab_bed: Testbed) -> InfinibandTestbed:
    assert isinstance(lab_bed, InfinibandTestbed)
    return lab_bed


def states(group: Gid) -> list[JoinState]:
    """The JoinStates of the group's members, as OpenSM has them."""
    return [one.join_state for one in trusted_records() if one.mgid == group]


def record(bed: InfinibandTestbed, group: Gid) -> McMemberRecord:
    found = bed._sa.group(group)
    assert found is not None
    return found


def broadcast(bed: InfinibandTestbed, port: IPv4Address) -> Gid:
    """The group that the port's IPoIB interface has joined by itself."""
    (interface,) = interfaces_of([bed._where[port].gid])
    assert interface.broadcast is not None
    return interface.broadcast


def opensm() -> int:
    return int(subprocess.check_output(["pidof", "opensm"]))


@contextmanager
def tapped() -> Iterator[Callable[[], list[Asked]]]:
    """Inside the `with`, what hosts have asked the SA so far."""
    tap, data = os.open("/sys/kernel/debug/softib/tap", os.O_RDONLY | os.O_NONBLOCK), bytearray()
    found: list[Asked] = []

    def requests() -> list[Asked]:
        known = len(data)
        with suppress(BlockingIOError):
            while more := os.read(tap, 1 << 16):
                data.extend(more)
        if len(data) > known:
            found[:] = asked_of_the_sa(io.BytesIO(data))
        return found

    try:
        yield requests
    finally:
        os.close(tap)


@contextmanager
def silent_sm() -> Iterator[None]:
    """Inside the `with`, OpenSM answers nobody."""
    sm = opensm()
    threads = Path(f"/proc/{sm}/task")
    os.kill(sm, signal.SIGSTOP)
    try:
        until(lambda: all("\nState:\tT" in one.read_text() for one in threads.glob("*/status")))
        yield
    finally:
        os.kill(sm, signal.SIGCONT)


# --- a join -----------------------------------------------------------------


@pytest.mark.parametrize("space", [PortSpace.UDP, PortSpace.IPOIB])
@pytest.mark.parametrize("state", [FULL, SEND_ONLY])
def test_the_request_is_the_broadcast_groups_record_with_another_mgid(
    bed: InfinibandTestbed, space: PortSpace, state: JoinState
) -> None:
    """SA-PATH-2, SA-PATH-3: on the wire, with its mask, as the simulator makes it."""
    peer = Application(bed, 1, space=space)
    with tapped() as requests:
        mgid = peer.join(new_group(), send_only=state is SEND_ONLY).gid
        asked = {one[2:] for one in requests() if one.record.mgid == mgid}
    model = record(bed, broadcast(bed, peer.port))
    wanted = kernel_join(model, mgid, bed._where[peer.port].gid, space, state)
    assert asked == {(SaMethod.SET, *wanted)}


@pytest.mark.parametrize(
    ("space", "address", "mgid"),
    [
        (PortSpace.UDP, IPv4Address("239.1.1.1"), "ff12:4001:ffff::f01:101"),
        (PortSpace.UDP, IPv6Address("ff0e::1:2:3"), "ff12:6001:ffff::1:2:3"),
        (PortSpace.UDP, IPv6Address("ff15:a01b::7"), "ff15:a01b::7"),
        (PortSpace.UDP, Mgid("ff15:beef::7"), "ff15:beef::7"),
        (PortSpace.IPOIB, IPv4Address("239.1.1.1"), "ff12:401b:ffff::f01:101"),
        (PortSpace.IPOIB, IPv6Address("ff0e::1:2:3"), "ff12:601b:ffff::1:2:3"),
        (PortSpace.IPOIB, Mgid("ff15:beef::7"), "ff15:beef::7"),
    ],
)
def test_an_address_becomes_an_mgid(
    bed: InfinibandTestbed, space: PortSpace, address: IPv4Address | IPv6Address | Mgid, mgid: str
) -> None:
    """SA-MAP-2, SA-MAP-3."""
    assert Application(bed, space=space).join(McastAddress.of(address)).gid == Gid(mgid)


@pytest.mark.parametrize("zero", [IPv4Address(0), IPv6Address(0)], ids=str)
def test_the_zero_address_is_a_group_that_the_sa_names(
    bed: InfinibandTestbed, zero: IPv4Address | IPv6Address
) -> None:
    """SA-MAP-1."""
    peer = Application(bed)
    peer.id.join_multicast(raw_address(zero))
    ud = peer.event().ud
    assert ud is not None
    assert ud.destination.gid[:4] == bytes.fromhex("ff12a01b")
    assert states(ud.destination.gid) == [FULL]


def test_join_flags_are_join_states(bed: InfinibandTestbed) -> None:
    """SA-ENTRY-1, SA-ENTRY-3."""
    assert states(Application(bed).join(new_group()).gid) == [FULL]
    assert states(Application(bed).join(new_group(), send_only=True).gid) == [SEND_ONLY]


def test_without_the_broadcast_group_a_join_fails_at_once(bed: InfinibandTestbed) -> None:
    """SA-PATH-1."""
    peer, where = Application(bed, 1), bed._where[bed.ports[1]]
    hostnet.run("ip", "link", "set", where.netdev, "down")
    try:
        with pytest.raises(McastError) as caught:
            peer.id.join_multicast(new_group())
        assert caught.value.errno == E.EADDRNOTAVAIL
    finally:
        hostnet.run("ip", "link", "set", where.netdev, "up")
        hostnet.run("ip", "addr", "replace", str(where.ipv6), "dev", where.netdev, "nodad")
        eventually(bed, lambda: interfaces_of([where.gid])[0].carrier)
    peer.join(new_group())


def test_an_id_that_the_kernel_does_not_know_leaves_nothing() -> None:
    """SA-ENTRY-2, as librdmacm asks: number and sizes of the call; where the answer goes, the id."""
    leave, answer = 17, ctypes.create_string_buffer(4)
    call = struct.pack("=IHHQII", leave, 16, len(answer), ctypes.addressof(answer), 0x7FFF_FFFF, 0)
    with (
        Path("/dev/infiniband/rdma_cm").open("r+b", buffering=0) as rdma_cm,
        pytest.raises(OSError) as caught,
    ):
        rdma_cm.write(call)
    assert caught.value.errno == E.ENOENT


# --- many ids of one port ---------------------------------------------------


def test_the_ids_of_a_port_are_one_member_with_the_bits_of_all(bed: InfinibandTestbed) -> None:
    """SA-SHARE-1, SA-SHARE-2. Another port stays a member, because of SA-LEAVE-6."""
    group, first, second, silent = new_group(), Application(bed), Application(bed), Application(bed)
    where = bed._where[first.port].gid
    mgid = Application(bed, 1).join(group).gid

    def state() -> int | None:
        found = bed._sa.member(mgid, where, SM_KEY)
        return found and found.join_state

    for peer in (first, second):
        peer.join(group)
        assert state() == FULL
    silent.join(group, send_only=True)
    assert state() == FULL | SEND_ONLY
    first.id.leave_multicast(group)
    first.join(new_group())  # the leave has had its time
    assert state() == FULL | SEND_ONLY
    second.id.leave_multicast(group)
    eventually(bed, lambda: state() == SEND_ONLY)
    silent.id.leave_multicast(group)
    eventually(bed, lambda: state() is None)


def test_bits_that_the_port_holds_cost_no_request_and_others_time_out(bed: InfinibandTestbed) -> None:
    """SA-SHARE-1, SA-SHARE-2, SA-STATUS-1: OpenSM does not answer, so what succeeds has not asked."""
    group, late = new_group(), new_group()
    first, second, third = Application(bed), Application(bed), Application(bed)
    late_mgid = Gid(infiniband_mgid(late.address, PortSpace.UDP, broadcast(bed, third.port)))
    mgid = first.join(group).gid
    with silent_sm():
        second.id.join_multicast(group)
        ud = second.event().ud
        third.id.join_multicast(late)
        event = third.event(CmEventType.MULTICAST_ERROR, -E.ETIMEDOUT)
    assert ud is not None
    assert ud.destination.gid == mgid
    with pytest.raises(TimedOut):
        event.check()
    third.id.leave_multicast(late)
    eventually(bed, lambda: states(late_mgid) == [FULL])  # OpenSM does what it was asked, when it can
    held = f"{first.port} is a member of {mgid}"
    assert held in bed.observer._left()
    bed.backend.close()
    assert bed.observer.leftovers() == ()
    assert states(late_mgid) == [FULL]
    with PROVIDER.testbed() as again:
        fourth = Application(again)
        assert fourth.join(late).gid == late_mgid
        fourth.id.leave_multicast(late)
        eventually(again, lambda: states(late_mgid) == [])
        again.backend.close()


def test_what_the_port_holds_otherwise_is_einval_without_a_request(bed: InfinibandTestbed) -> None:
    """SA-SHARE-1: the Q_Keys of the two port spaces differ."""
    group, first = McastAddress.of(Mgid("ff15:beef::8")), Application(bed, 1)
    second = Application(bed, 1, space=PortSpace.IPOIB)
    mgid = first.join(group).gid
    with tapped() as requests:
        second.id.join_multicast(group)
        second.event(CmEventType.MULTICAST_ERROR, -E.EINVAL)
        assert mgid not in {one.record.mgid for one in requests()}


def test_an_unanswered_delete_is_repeated_three_times(bed: InfinibandTestbed) -> None:
    """SA-SHARE-2: each takes 3 s, the Set behind them waits for all; here each packet leaves and arrives."""
    group, peer = new_group(), Application(bed, 1)
    mgid = peer.join(group).gid

    def sent() -> Counter[tuple[bytes, SaMethod]]:
        return Counter((one.transaction, one.method) for one in requests() if one.record.mgid == mgid)

    with tapped() as requests, silent_sm():
        began = monotonic()
        peer.id.leave_multicast(group)
        eventually(bed, sent)  # a join before it is sent would cost no request, nor the leave
        peer.id.join_multicast(group)
        eventually(bed, lambda: SaMethod.SET in {method for _, method in sent()})
        assert monotonic() - began > 0.9 * 4 * 3
        *before, (_, behind) = sent()
        assert ([method for _, method in before], behind) == ([SaMethod.DELETE] * 4, SaMethod.SET)
        assert [sent()[one] for one in before] == [2 * (1 + 10)] * 4
    peer.id.leave_multicast(group)


def test_what_the_sa_refuses_is_einval(bed: InfinibandTestbed) -> None:
    """SA-STATUS-1: of signature A01B with scope 2 the SA alone makes groups (SA-MGID-1)."""
    peer = Application(bed)
    peer.id.join_multicast(McastAddress.of(Mgid("ff12:a01b::1:2")))
    event = peer.event(CmEventType.MULTICAST_ERROR, -E.EINVAL)
    with pytest.raises(InvalidArgument):
        event.check()


def test_a_request_that_the_device_does_not_send_is_eio(bed: InfinibandTestbed) -> None:
    """SA-STATUS-1. The kernel's management goes on afterwards."""
    group, peer = new_group(), Application(bed, 1)
    device, gsi = bed._where[peer.port].device, Path("/sys/kernel/debug/softib/gsi")
    gsi.write_text(f"{device} fail\n")
    try:
        peer.id.join_multicast(group)
        peer.event(CmEventType.MULTICAST_ERROR, -E.EIO)
    finally:
        gsi.write_text(f"{device} send\n")
    peer.id.leave_multicast(group)
    peer.join(group)


def test_a_leave_before_the_answer_leaves_nothing(bed: InfinibandTestbed) -> None:
    """SA-CANCEL-1, SA-CANCEL-2: the Set succeeds, a Delete follows, and no event comes."""
    group, peer, other = new_group(), Application(bed), Application(bed, 1)
    mgid = other.join(group).gid
    with ThreadPoolExecutor(1) as beside:
        with silent_sm():
            peer.id.join_multicast_ex(JoinAttrEx.full_member(group))
            leaving = beside.submit(peer.id.leave_multicast, group)
        leaving.result(60)
    peer.join(new_group())
    assert not readable(peer.channel)
    eventually(bed, lambda: bed.observer.port_memberships(peer.port).isdisjoint({mgid}))


# --- partitions -------------------------------------------------------------

PARTITIONS = Path("/etc/opensm/partitions.conf")


@contextmanager
def partition_file(bed: InfinibandTestbed, text: str, full: set[IPv4Address]) -> Iterator[None]:
    """Inside the `with`, that is OpenSM's partition file, by which these ports are full members."""

    def until_full(ports: set[IPv4Address]) -> None:
        os.kill(opensm(), signal.SIGHUP)
        tables = {port: {0xFFFF if port in ports else 0x7FFF} for port in bed.ports}
        eventually(bed, lambda: {port: pkeys_of(bed._where[port]) for port in bed.ports} == tables)

    PARTITIONS.parent.mkdir(exist_ok=True)
    PARTITIONS.write_text(text)
    try:
        until_full(full)
        yield
    finally:
        PARTITIONS.unlink()
        until_full(set(bed.ports))


def test_a_partition_file_leaves_everybody_a_limited_member(bed: InfinibandTestbed) -> None:
    """SA-PKEY-1, SA-PKEY-3, SA-PKEY-4: no membership is lost, because the P_Keys stay in their place."""
    group, late = new_group(), new_group()
    full, one, other = peers = [Application(bed, index) for index in range(3)]
    outward = [peer.join(group) for peer in peers]
    with partition_file(bed, "Default=0x7fff,ipoib:SELF=full;\n", {full.port}):
        for peer, destination in zip(peers, outward, strict=True):
            peer.send(destination, f"from {peer.port}".encode())
        assert sorted(full.receive(3)) == [f"from {peer.port}".encode() for peer in peers]
        for peer in (one, other):
            assert peer.receive(1) == [f"from {full.port}".encode()]
        assert not any(readable(peer.channel) for peer in peers)
        made = one.join(late).gid  # OpenSM lets a limited member make a group, and another join it
        other.join(late)
        assert states(made) == [FULL, FULL]
        assert record(bed, made).pkey == 0xFFFF
    assert one.receive_until_marker(by=other) == other.receive_until_marker(by=one) == []


def test_a_pkey_that_moves_ends_memberships_and_leaves_queue_pairs_behind(bed: InfinibandTestbed) -> None:
    """SA-RESET-1, SA-PKEY-4: at the queue pair's place in the table there is another partition now."""
    group, other, peer = new_group(), Application(bed, 0), Application(bed, 1)
    outward, where = other.join(group), peer.join(group)
    with bed._with_pkeys(bed._where[peer.port], (0x8001, 0xFFFF), lambda: readable(peer.channel)):
        peer.event(CmEventType.MULTICAST_ERROR, -E.ENETRESET)
        peer.id.leave_multicast(group)
        peer.qp.attach_mcast(where.gid, where.dlid)  # so that only its P_Key keeps messages from it
        other.send(outward, b"from the default partition")
        peer.send(where, b"from the other one")
        assert other.receive(1) == [b"from the default partition"]
    assert peer.receive_until_marker(by=other) == [b"from the other one"]  # its own
    assert other.receive_until_marker(by=peer) == []


# --- one MLID for two groups ------------------------------------------------


def test_groups_that_share_an_mlid_share_no_message(bed: InfinibandTestbed) -> None:
    """SA-MLID-4: the switch sends both groups' messages to both members, and the MGID tells these apart."""
    groups = [McastAddress.of(Mgid(f"ff12:601b:ffff::1:ffab:{number}")) for number in (1, 2)]
    bed.restart_sm("--consolidate_ipv6_snm_req")
    try:
        sender, *members = (Application(bed, index, space=PortSpace.IPOIB) for index in range(3))
        where = [peer.join(group) for peer, group in zip(members, groups, strict=True)]
        outward = [sender.join(group, send_only=True) for group in groups]
        assert where[0].gid != where[1].gid
        (mlid,) = {one.dlid for one in (*where, *outward)}
        assert all(bed.observer._routed(peer.port, mlid) for peer in members)
        for peer, destination in zip(members, outward, strict=True):
            sender.send(destination, f"for {peer.port}".encode())
        for peer in members:
            assert peer.receive_until_marker(by=sender) == [f"for {peer.port}".encode()]
        bed.backend.close()
    finally:
        bed.restart_sm()


def test_the_kernel_takes_a_second_mlid_of_an_mgid(bed: InfinibandTestbed) -> None:
    """SA-ATTACH-3, past guard G-MLID: each of the two pairs delivers, and is detached by itself."""
    group, other = new_group(), new_group()
    peer, keeper, sender = Application(bed, 1), Application(bed, 1, None), Application(bed, 0)
    where, elsewhere = keeper.join(group), keeper.join(other)
    outward, _ = sender.join(group), sender.join(other)
    attach, detach = peer.qp._attach_mcast, peer.qp._detach_mcast

    def arrives() -> list[bytes]:
        sender.send(outward, b"first")
        sender.send(outward.model_copy(update={"dlid": elsewhere.dlid}), b"second")
        return peer.receive_until_marker(by=sender)

    attach(where.gid, where.dlid)
    assert arrives() == [b"first"]
    for _ in range(2):
        attach(where.gid, elsewhere.dlid)
        assert arrives() == [b"first", b"second"]
    detach(where.gid, where.dlid)
    assert arrives() == [b"second"]
    with pytest.raises(Refused, match="EINVAL"):
        detach(where.gid, where.dlid)
    detach(where.gid, elsewhere.dlid)
    assert arrives() == []


@pytest.mark.parametrize("lid", [0x0001, 0xBFFF, 0xC000, 0xFFFE, 0xFFFF], ids=hex)
def test_the_kernel_attaches_by_any_lid_of_groups_and_no_other(bed: InfinibandTestbed, lid: int) -> None:
    """SA-ATTACH-2."""
    qp, mgid = Application(bed).qp, Gid("ff15:beef::9")
    if 0xC000 <= lid < 0xFFFF:
        qp._attach_mcast(mgid, lid)
        qp._detach_mcast(mgid, lid)
    else:
        with pytest.raises(Refused, match="EINVAL"):
            qp._attach_mcast(mgid, lid)


def test_a_driver_without_multicast_takes_no_queue_pair(bed: InfinibandTestbed) -> None:
    """SA-ATTACH-1: the kernel knows before it asks the driver; what is not attached is not detached."""
    with bed.without_multicast(bed.ports[bed.spare]):
        qp = Application(bed, bed.spare).qp
        with pytest.raises(NotSupported) as caught:
            qp.attach_mcast("ff0e::7", 0xC007)
        assert caught.value.errno == E.EOPNOTSUPP
        with pytest.raises(InvalidArgument):
            qp.detach_mcast("ff0e::7", 0xC007)
        bed.backend.close()


# --- what ends memberships --------------------------------------------------


def lost(peer: Application, *groups: McastAddress) -> None:
    """Each membership of the peer is reported lost, and is left."""
    for _ in groups:
        event = peer.event(CmEventType.MULTICAST_ERROR, -E.ENETRESET)
        assert event.context in groups
        peer.id.leave_multicast(event.context)


def test_a_port_that_goes_down_loses_its_memberships_and_nobody_joins_again(bed: InfinibandTestbed) -> None:
    """SA-RESET-1, SA-RESET-2."""
    groups, peer, other = (new_group(), new_group()), Application(bed, 1), Application(bed, 2)
    kept = other.join(groups[0], context=groups[0]).gid
    mgids = {peer.join(group, context=group).gid for group in groups}
    with bed.link_down(peer.port):
        pass
    assert bed.observer.port_memberships(peer.port).isdisjoint(mgids)
    lost(peer, *groups)
    assert other.channel.get_event(0) is None  # another port's
    assert bed.observer.group_ports(kept) == {other.port}
    peer.join(groups[0])
    assert bed.observer.group_ports(kept) == {peer.port, other.port}


def test_an_sm_that_restarts_knows_no_group_and_every_member_is_told(bed: InfinibandTestbed) -> None:
    """SA-RESET-1, SA-SM-2: ClientReregister."""
    group, peers = new_group(), [Application(bed, index) for index in range(3)]
    (mgid,) = {peer.join(group, context=group).gid for peer in peers}
    bed.restart_sm()  # IPoIB joins again by itself, and with it every join is possible again
    for peer in peers:
        lost(peer, group)
    assert states(mgid) == []
    for peer in peers:
        peer.join(group)
    assert bed.observer.group_ports(mgid) == set(bed.ports[:3])
