"""Answers that the InfiniBand test bed reads from OpenSM and switches; no device is needed."""

from __future__ import annotations

from ipaddress import IPv4Address, ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mcast.api import Gid
from mcast.backends.net.groups import SaRecord, read_records
from mcast.backends.net.hostnet import InterfaceAddress
from mcast.backends.rdma import infiniband_bed
from mcast.backends.rdma.host_bed import of_one_network
from mcast.backends.rdma.infiniband_bed import (
    InfinibandObserver,
    InfinibandPort,
    InfinibandTestbed,
    with_more_ids,
)
from mcast.backends.rdma.roce_bed import RocePort
from mcast.backends.rdma.sa.umad import SaUnreachable
from mcast.wire import mad
from mcast.wire.mcmember import JoinState, McMemberRecord

SAQUERY = """MCMember Record dump:
\t\tMGID....................ff12:4001:ffff::f01:109
\t\tPortGid.................fe80::5254:0:1:11
\t\tqkey....................0x1234567
\t\tmlid....................0xc00d
\t\tmtu.....................0x84
\t\tJoinState...............0x1
\t\tProxyJoin...............0x0
MCMember Record dump:
\t\tMGID....................ff12:401b:ffff::1
\t\tPortGid.................::
\t\tmlid....................0xc003
\t\tJoinState...............0x8
"""


def test_each_dump_of_saquery_is_one_port_in_one_group() -> None:
    one, other = Gid("ff12:4001:ffff::f01:109"), Gid("ff12:401b:ffff::1")
    assert list(read_records(SAQUERY)) == [
        SaRecord(one, 0xC00D, Gid("fe80::5254:0:1:11"), JoinState.FULL),
        SaRecord(other, 0xC003, None, JoinState.SEND_ONLY_FULL),
    ]
    assert list(read_records("")) == []


@pytest.mark.parametrize(
    ("port", "mlid", "modifier"),
    [(1, 0xC000, 0), (15, 0xC01F, 0), (16, 0xC020, 1 << 28 | 1), (35, 0xC3FF, 2 << 28 | 31)],
)
def test_switch_is_asked_for_port_and_mlid(port: int, mlid: int, modifier: int) -> None:
    """A switch is asked for the block of the port and the MLID."""
    request = mad.get_mft_block(7, port, mlid)
    assert len(request) == mad.MAD_BYTES
    assert request[:4] == bytes((1, 1, 1, 1))  # a Get of class 1, the LID-routed one
    assert int.from_bytes(request[16:18]) == 0x1B
    assert int.from_bytes(request[20:24]) == modifier


def test_a_bit_of_a_block_is_a_port_of_an_mlid() -> None:
    block = bytearray(64)
    block[2 * 5 : 2 * 5 + 2] = (1 << 3).to_bytes(2)  # the sixth MLID, the fourth port
    said = {
        (port, mlid)
        for port in range(16, 32)
        for mlid in range(0xC020, 0xC040)
        if mad.mft_block_forwards(bytes(block), port, mlid)
    }
    assert said == {(19, 0xC025)}


def test_bed_uses_the_largest_network() -> None:
    """The ports of a fabric are those of the largest network."""

    def port(text: str) -> RocePort:
        return RocePort(f"of {text}", 1, "eth0", InterfaceAddress(ip_address(text), 24), None)

    ports = {IPv4Address(text): port(text) for text in ("10.0.0.1", "10.0.1.1", "10.0.1.2")}
    assert set(of_one_network(ports)) == {IPv4Address("10.0.1.1"), IPv4Address("10.0.1.2")}
    assert of_one_network({}) == {}


IDS, OTHERS = ("softib1", "cm_id"), ("softib2", "cm_id")


@pytest.mark.parametrize(
    ("before", "now", "devices"),
    [
        ({}, {}, set()),
        ({}, {IDS: 1}, {"softib1"}),
        ({IDS: 2, OTHERS: 1}, {IDS: 3, OTHERS: 1}, {"softib1"}),
        ({IDS: 2}, {IDS: 2, ("softib1", "qp"): 9}, set()),
        ({IDS: 2, OTHERS: 1}, {IDS: 1, OTHERS: 2}, {"softib2"}),
    ],
)
def test_only_an_id_that_is_left_can_hold_a_membership(
    before: dict[tuple[str, str], int], now: dict[tuple[str, str], int], devices: set[str]
) -> None:
    assert with_more_ids(before, now) == devices


def test_stale_sm_membership_is_no_leftover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A membership that the SM kept is not left behind and one of an id is."""
    nothing: Any = None
    objects: dict[tuple[str, str], int] = {IDS: 1}
    ipoib, joined = Gid("ff12:401b:ffff::1"), Gid("ff12:4001:ffff::f40:1ac")
    gids = [Gid("fe80::11"), Gid("fe80::12")]
    known = [SaRecord(ipoib, 0xC000, gid, JoinState.FULL) for gid in gids]
    monkeypatch.setattr(infiniband_bed, "SETTLE_TIMEOUT", 0.0)
    monkeypatch.setattr(infiniband_bed, "rdma_objects", lambda: dict(objects))
    monkeypatch.setattr(infiniband_bed, "trusted_records", lambda: list(known))
    ports = {
        IPv4Address(f"10.77.0.{n}"): InfinibandPort(f"softib{n}", 1, n, gid, f"ib{n}", nothing, None)
        for n, gid in enumerate(gids, 1)
    }
    observer = InfinibandObserver(nothing, ports, nothing)
    known += [SaRecord(joined, 0xC001, gid, JoinState.FULL) for gid in gids]
    assert observer.leftovers() == ()
    objects[OTHERS] = 1
    assert observer.leftovers() == ("1 cm_id on softib2", f"10.77.0.2 is a member of {joined}")


def test_port_is_out_by_the_sa_and_back_by_its_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A port is out when the SA says so and back when its host is.

    An SA that does not answer has said nothing.
    """
    known, nothing, port = McMemberRecord(), cast(Any, None), IPv4Address("10.77.0.2")
    says: list[SaUnreachable | McMemberRecord | None] = [
        SaUnreachable(),
        known,
        None,
        SaUnreachable(),
        None,
        known,
        known,
    ]
    attached = [False, True]

    def member(*_: object) -> McMemberRecord | None:
        answer = says.pop(0)
        if isinstance(answer, SaUnreachable):
            raise answer
        return answer

    monkeypatch.setattr(infiniband_bed, "_LINKS", tmp_path / "links")
    monkeypatch.setattr(infiniband_bed, "_broadcast", lambda where: Gid("ff12:401b:ffff::ffff:ffff"))
    monkeypatch.setattr(infiniband_bed, "_attached", lambda *_: attached.pop(0))
    bed = object.__new__(InfinibandTestbed)
    bed._where = {port: InfinibandPort("softib2", 1, 2, Gid("fe80::12"), "ib2", nothing, None)}
    bed._sa = cast(Any, SimpleNamespace(member=member))
    with bed.link_down(port):
        assert (tmp_path / "links").read_text() == "softib2 out\n"
        assert len(says) == 4
    assert (says, attached) == ([], [])
