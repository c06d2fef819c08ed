"""Which tables of a host are read, and what is said where one cannot be: without a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from ipaddress import IPv4Address, ip_address
from pathlib import Path

import pytest

from mcast.api import DeviceInfo, GroupMember, GroupSource, GroupTable, LinkLayer, PortInfo, PortState
from mcast.backends.net import groups, hostnet, netlink
from mcast.backends.net.netlink import SnoopingEntry
from mcast.wire.addresses import Gid
from mcast.wire.mcmember import JoinState

HOST, SWITCH, SA = GroupSource.HOST, GroupSource.SWITCH, GroupSource.SA
GROUP = IPv4Address("239.1.1.1")


def device(name: str, layer: LinkLayer, state: PortState = PortState.ACTIVE) -> DeviceInfo:
    port = PortInfo(
        port_num=1,
        state=state,
        link_layer=layer,
        active_mtu=1024,
        rate=10.0,
        lid=0,
        gids={0: Gid("fe80::1")},
        addresses=(),
    )
    return DeviceInfo(
        name=name, node_guid=1, max_mcast_grp=1, max_mcast_qp_attach=1, max_qp_wr=1, ports=(port,)
    )


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A host whose mlx0 is eth0, with these IGMP lists and bridges; `veths`: interface -> bridge port."""

    def make(
        igmp: dict[str, set[IPv4Address]], mdb: list[SnoopingEntry] | Exception, veths: dict[str, str]
    ) -> None:
        def snooping_table() -> list[SnoopingEntry]:
            if isinstance(mdb, Exception):
                raise mdb
            return mdb

        monkeypatch.setattr(hostnet, "igmp_memberships", lambda: igmp)
        monkeypatch.setattr(netlink, "snooping_table", snooping_table)
        monkeypatch.setattr(hostnet, "bridge_port_of", veths.get)

    return make


ETHERNET = [device("mlx0", LinkLayer.ETHERNET)]


def group_table(devices: list[DeviceInfo]) -> GroupTable:
    return groups.group_table(devices, lambda device, port: ("eth0",))


def entry(port: str, group: str = str(GROUP)) -> SnoopingEntry:
    return SnoopingEntry("br0", port, ip_address(group))


def members(devices: list[DeviceInfo]) -> dict[str, frozenset[GroupSource]]:
    table = group_table(devices)
    assert {info.mgid for info in table.groups} <= {Gid(GROUP)}
    return {member.port: member.seen_in for info in table.groups for member in info.members}


def test_other_interfaces_are_not_ours(host: Callable[..., None]) -> None:
    host({"eth0": {GROUP}, "eth9": {IPv4Address("239.9.9.9")}}, [], {})
    assert members(ETHERNET) == {"mlx0/1": {HOST}}


def test_without_a_bridge_the_switch_is_out_of_sight(host: Callable[..., None]) -> None:
    host({}, [entry("veth7")], {})
    table = group_table(ETHERNET)
    assert table.groups == ()
    assert groups.NO_BRIDGE in table.unseen


def test_veth_peers_are_named(host: Callable[..., None]) -> None:
    """Our own end of a veth is us and others are named."""
    host({"eth0": {GROUP}}, [entry("p1"), entry("p2"), entry("p2", "ff02::1")], {"eth0": "p1"})
    assert members(ETHERNET) == {"mlx0/1": {HOST, SWITCH}, "br0/p2": {SWITCH}}
    assert groups.NO_BRIDGE not in group_table(ETHERNET).unseen


def test_behind_a_bridged_port_of_ours_are_others(host: Callable[..., None]) -> None:
    host({}, [entry("eth0")], {})
    assert members(ETHERNET) == {"br0/eth0": {SWITCH}}


def test_behind_a_bridge_that_is_our_port_are_others(host: Callable[..., None]) -> None:
    """Also if the bridge itself is in no group."""
    host({}, [SnoopingEntry("eth0", "p3", GROUP)], {})
    assert members(ETHERNET) == {"eth0/p3": {SWITCH}}


def test_a_bridge_that_cannot_be_asked_is_said(host: Callable[..., None]) -> None:
    error = PermissionError("Operation not permitted")
    host({"eth0": {GROUP}}, error, {})
    table = group_table(ETHERNET)
    assert table.groups[0].members == (GroupMember("mlx0/1", frozenset({HOST})),)
    assert f"what bridges of this host know: {error}" in table.unseen


def test_an_sa_that_names_members_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    mgid = Gid("ff12:4001:ffff::1")
    records = (
        groups.SaRecord(mgid, 0xC001, Gid("fe80::1"), JoinState.FULL),
        groups.SaRecord(mgid, 0xC001, Gid("fe80::2"), JoinState.SEND_ONLY_FULL),
    )
    monkeypatch.setattr(groups, "ask_sa", lambda device, number: records)
    table = group_table([device("mlx0", LinkLayer.INFINIBAND)])
    (info,) = table.groups
    assert (info.mgid, info.mlid) == (mgid, 0xC001)
    assert info.members == (
        GroupMember("fe80::2", frozenset({SA}), send_only=True),
        GroupMember("mlx0/1", frozenset({SA})),
    )
    assert table.unseen == ()


@pytest.mark.parametrize(
    ("record", "what"), [("", "'portgid'"), ("PortGid.....fe80::1\nMGID.....here\nMlid...0xC000", "'here'")]
)
def test_unknown_output_of_saquery_is_ignored(
    monkeypatch: pytest.MonkeyPatch, record: str, what: str
) -> None:
    """Unknown lines of saquery are ignored."""
    monkeypatch.setattr(hostnet, "run", lambda *words: f"MCMember Record dump:\n{record}")
    (unseen,) = group_table([device("mlx0", LinkLayer.INFINIBAND)]).unseen
    assert unseen.startswith("groups on InfiniBand: saquery prints records of another form: ")
    assert what in unseen


def test_missing_saquery_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without saquery it is named and a port that is down not asked."""

    def missing(device: str, number: int) -> tuple[groups.SaRecord, ...]:
        raise FileNotFoundError("saquery")

    monkeypatch.setattr(groups, "ask_sa", missing)
    up, down = (device("mlx0", LinkLayer.INFINIBAND, state) for state in (PortState.ACTIVE, PortState.DOWN))
    assert group_table([up]).unseen == (groups.NO_SAQUERY,)
    assert group_table([down]) == ((), ())


def test_the_name_of_an_interface_may_be_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes any bytes but slashes and spaces."""
    igmp, ip = tmp_path / "igmp", tmp_path / "ip"
    igmp.write_bytes(b"Idx\tDevice    : Count Querier\n2\tv\xffx       :     1      V3\n\t\t\t\t010101EF\n")
    info = b'[{"ifname": "v\xffx", "addr_info": [{"local": "10.0.0.1", "prefixlen": 24}]}]'
    ip.write_bytes(b"#!/bin/sh\necho '" + info + b"'\n")
    ip.chmod(0o755)
    monkeypatch.setattr(hostnet, "_IGMP", igmp)
    monkeypatch.setattr(hostnet, "program", lambda name: str(tmp_path / name))
    name = os.fsdecode(b"v\xffx")
    assert hostnet.igmp_memberships() == {name: {GROUP}}
    assert hostnet.igmp_versions() == {name: "V3"}
    assert list(hostnet.addresses()) == [name]
