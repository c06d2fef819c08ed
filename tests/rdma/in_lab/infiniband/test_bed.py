"""The InfiniBand test bed's own questions against the field's tools."""

from __future__ import annotations

import re

import pytest

from mcast.api import Testbed
from mcast.backends.net import hostnet
from mcast.backends.rdma.infiniband_bed import SM_KEY, InfinibandTestbed, cables, trusted_records
from mcast.conformance.helpers import Application, new_group


def multicast_table(said: str) -> dict[int, frozenset[int]]:
    """MLID -> ports, of what `ibroute -M` says: a column for each port, below its number."""
    header = re.search(r"^ *Ports: (.*)$", said, re.MULTILINE)
    assert header, said
    first = header.start(1) - header.start()
    table = {}
    for line in re.findall(r"^0x[0-9a-f]{4} .*$", said, re.MULTILINE):
        marks = (mark.start() for mark in re.finditer("x", line) if mark.start() >= first)
        table[int(line[:6], 16)] = frozenset((at - first) // 2 for at in marks)
    return table


@pytest.mark.parametrize("send_only", [False, True])
def test_saquery_and_ibroute_say_the_same(lab_bed: Testbed, send_only: bool) -> None:
    assert isinstance(lab_bed, InfinibandTestbed)
    group, members = new_group(), [Application(lab_bed, index) for index in (0, 2)]
    destination, _ = (peer.join(group, send_only) for peer in members)
    shown = {one.port_gid: one for one in trusted_records() if one.mgid == destination.gid}
    switches = {cables()[where.lid][0] for where in lab_bed._where.values()}
    tables = {switch: multicast_table(hostnet.run("ibroute", "-M", str(switch))) for switch in switches}
    for port, where in lab_bed._where.items():
        ours, theirs = lab_bed._sa.member(destination.gid, where.gid, SM_KEY), shown.get(where.gid)
        assert (ours is None) == (theirs is None) == (port not in {peer.port for peer in members})
        if ours and theirs:
            assert (ours.mlid, ours.join_state) == (theirs.mlid, theirs.join_state)
            assert ours.mlid == destination.dlid
        switch, number = cables()[where.lid]
        routed = lab_bed._sa.switch_forwards(switch, number, destination.dlid)
        assert routed == (number in tables[switch].get(destination.dlid, ())) == (ours is not None)


def test_a_group_of_one_member_has_no_entry(lab_bed: Testbed) -> None:
    """SA-SM-5: while one that was made later has its entries."""
    assert isinstance(lab_bed, InfinibandTestbed)
    pair = [Application(lab_bed, index) for index in (0, 2)]
    alone = pair[0].join(new_group())
    group = new_group()
    destinations = [peer.join(group) for peer in pair]
    routed = lab_bed.observer._routed
    assert all(routed(peer.port, where.dlid) for peer, where in zip(pair, destinations, strict=True))
    assert not routed(pair[0].port, alone.dlid)
