"""The groups of an InfiniBand fabric, as the rdma provider asks a real OpenSM for them through saquery."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcast.api import DeviceInfo, GroupInfo, LinkLayer, PortInfo, PortState
from mcast.backends.net import groups
from mcast.backends.rdma.devices import netdevs_of
from mcast.wire.addresses import Gid
from mcast.wire.mcmember import JoinState, McMask, McMemberRecord, SaMethod

from . import opensm
from .opensm import OpenSm
from .topology import Topology, generate

MGID = Gid("ff12:4001:ffff::f01:101")
PORT = PortInfo(
    port_num=1,
    state=PortState.ACTIVE,
    link_layer=LinkLayer.INFINIBAND,
    active_mtu=2048,
    rate=10.0,
    lid=3,
    gids={},
    addresses=(),
)
DEVICE = DeviceInfo(
    name="ibsim0",
    node_guid=1,
    max_mcast_grp=1,
    max_mcast_qp_attach=1,
    max_qp_wr=1,
    ports=(PORT,),
)


@pytest.fixture
def subnet(tmp_path: Path) -> Topology:
    if line := opensm.missing():
        pytest.fail(f"the oracle needs OpenSM on a simulated fabric: {line}", pytrace=False)
    return generate(1)


def test_the_groups_that_opensm_has_are_shown(
    subnet: Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OpenSm(subnet, tmp_path) as sm:
        host = subnet.hosts[1]
        record = McMemberRecord(
            mgid=MGID,
            port_gid=subnet.subnet_prefix + host.guid.to_bytes(8),
            join_state=JoinState.FULL,
            qkey=0x01234567,
            pkey=host.pkeys[0],
        )
        creation = McMask.QKEY | McMask.PKEY | McMask.SL | McMask.FLOW_LABEL | McMask.TCLASS
        mask = McMask.MGID | McMask.PORT_GID | McMask.JOIN_STATE | creation
        made = sm.ask(host.name, SaMethod.SET, mask, record).records[0]
        sm.lend(monkeypatch, subnet.hosts[3].name)
        table = groups.group_table([DEVICE], netdevs_of)
    found = {info.mgid: info for info in table.groups}
    assert found[MGID] == GroupInfo(MGID, (), made.mlid)
    assert any(mgid[2:4] == b"\x40\x1b" for mgid in found), "the IPoIB broadcast group"
    assert table.unseen == (groups.UNTRUSTED,)


def test_what_an_sa_that_trusts_us_prints_is_read() -> None:
    text = """MCMember Record dump:
		MGID....................ff12:4001:ffff::f01:101
		PortGid.................fe80::1:2
		mlid....................0xc003
		JoinState...............0x8
		ProxyJoin...............0x0
"""
    assert list(groups.read_records(text)) == [
        groups.SaRecord(MGID, 0xC003, Gid("fe80::1:2"), JoinState.SEND_ONLY_FULL)
    ]


def test_a_fabric_that_does_not_answer_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = groups.group_table([DEVICE.model_copy(update={"name": "none0"})], netdevs_of)
    assert table.groups == ()
    (sentence,) = table.unseen
    assert sentence.startswith("groups on InfiniBand: saquery -C none0 -P 1 MCMR: ")
    assert "\n" not in sentence
