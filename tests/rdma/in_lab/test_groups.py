"""The groups of a real host: members that are sockets, or behind a bridge; MAC addresses of groups."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address
from time import monotonic, sleep

from mcast.api import GroupMember, GroupSource, Testbed
from mcast.backends.net import hostnet
from mcast.backends.net.netlink import delete_entries, rdma_objects, snooping_table
from mcast.wire.addresses import Gid
from mcast.wire.mapping import group_mac, roce_v1_mgid

BOUND = 100.0


@contextmanager
def member_socket(group: IPv4Address, address: IPv4Address) -> Iterator[None]:
    """A UDP socket that is a member of the group on the interface with that address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        found.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group.packed + address.packed)
        yield


@contextmanager
def host_behind_the_bridge(bridge: str, address: IPv4Address) -> Iterator[str]:
    """An interface without an RDMA device, on a new port of the bridge; the name of that port."""
    hostnet.run("ip", "link", "add", "other0", "type", "veth", "peer", "name", "other0p")
    try:
        hostnet.run("ip", "link", "set", "other0p", "master", bridge, "up")
        hostnet.run("ip", "addr", "add", f"{address}/32", "dev", "other0")
        hostnet.run("ip", "link", "set", "other0", "up")
        yield "other0p"
    finally:
        hostnet.run("ip", "link", "del", "other0")


def members(bed: Testbed, group: IPv4Address) -> tuple[GroupMember, ...]:
    found = (info.members for info in bed.backend.groups().groups if info.mgid == Gid(group))
    return next(found, ())


def until_members(bed: Testbed, group: IPv4Address, wanted: set[GroupMember]) -> None:
    end = monotonic() + BOUND
    while set(members(bed, group)) != wanted:
        assert monotonic() < end, members(bed, group)
        sleep(0.05)


def test_a_socket_counts_as_the_table_says(lab_bed: Testbed) -> None:
    group = IPv4Address("239.78.1.1")
    assert any("RDMA ids and sockets" in sentence for sentence in lab_bed.backend.groups().unseen)
    with member_socket(group, lab_bed.ports[1]):
        until_members(
            lab_bed, group, {GroupMember("rxe2/1", frozenset({GroupSource.HOST, GroupSource.SWITCH}))}
        )
    until_members(lab_bed, group, set())


def test_member_behind_a_bridge_has_its_port(lab_bed: Testbed) -> None:
    """A member behind the bridge is named by the bridges port."""
    group, address = IPv4Address("239.78.1.2"), IPv4Address("10.77.0.99")
    (bridge,) = {entry.bridge for entry in snooping_table()}
    with host_behind_the_bridge(bridge, address) as port, member_socket(group, address):
        until_members(lab_bed, group, {GroupMember(f"{bridge}/{port}", frozenset({GroupSource.SWITCH}))})
    until_members(lab_bed, group, set())


def test_tables_equal_the_output_of_tools(lab_bed: Testbed) -> None:
    """The kernels tables are read as its tools show them."""
    group = IPv4Address("239.78.1.3")
    with member_socket(group, lab_bed.ports[1]):
        until_members(
            lab_bed, group, {GroupMember("rxe2/1", frozenset({GroupSource.HOST, GroupSource.SWITCH}))}
        )
        shown = [entry for table in hostnet.ask("bridge", "-j", "mdb", "show") for entry in table["mdb"]]
        read = [(one.bridge, one.port, str(one.group)) for one in snooping_table()]
    assert sorted(read) == sorted((entry["dev"], entry["port"], entry["grp"]) for entry in shown)
    assert ("br0", "p2", str(group)) in read
    devices = hostnet.ask("rdma", "-j", "resource", "show")
    counts = {
        (one["ifname"], kind): one[kind] for one in devices for kind in one.keys() - {"ifindex", "ifname"}
    }
    assert rdma_objects() == counts
    assert counts["rxe1", "pd"] > 0, "the kernel's own, for management"


def test_forgotten_member_leaves_the_bridge(lab_bed: Testbed) -> None:
    """A member that is forgotten leaves the bridge's table."""
    group, end = IPv4Address("239.78.1.4"), monotonic() + BOUND
    with member_socket(group, lab_bed.ports[1]):
        until_members(
            lab_bed, group, {GroupMember("rxe2/1", frozenset({GroupSource.HOST, GroupSource.SWITCH}))}
        )
        while entries := [one for one in snooping_table() if one.group == group]:
            assert monotonic() < end, entries
            delete_entries(entries)


def test_kernel_filters_by_our_mac_addresses(lab_bed: Testbed) -> None:
    """The kernel filters by the mac addresses that we compute."""
    group = IPv4Address("239.129.1.1")
    channel = lab_bed.backend.event_channel()
    cm_id = channel.create_id()
    cm_id.bind_addr(lab_bed.ports[0])
    cm_id.create_qp()
    cm_id.join_multicast(group)
    event = channel.get_event(BOUND)
    assert event is not None
    event.check()
    lines = hostnet.run("ip", "maddr", "show", "dev", "e1").splitlines()
    filters = {line.split()[1] for line in lines if line.split()[0] == "link"}
    # IGMP asks for the first; Soft-RoCE, which takes the last 32 bits of any MGID, for the second.
    assert {group_mac(Gid(group)).hex(":"), group_mac(roce_v1_mgid(group)).hex(":")} <= filters
