"""The real provider's questions to the SA, put to a real OpenSM: what a refusal hides is found and named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mcast
from mcast.api import PortSpace
from mcast.wire.addresses import Gid, McastAddress
from mcast.wire.kernel_join import kernel_join
from mcast.wire.mad import SEND_ONLY_FULL_MEMBER
from mcast.wire.mapping import infiniband_mgid, ipoib_broadcast_mgid
from mcast.wire.mcmember import JoinState, McMask, McMemberRecord, SaMethod, SaStatus

from . import opensm
from .opensm import OpenSm
from .topology import Host, generate

GROUP = McastAddress.of("239.1.1.1")
BROADCAST = Gid(ipoib_broadcast_mgid())
CREATOR, ASKER, THIRD = "H1", "H2", "H3"
PROGRAM = """
import json, sys
from mcast.wire.addresses import Gid, McastAddress
from mcast.api import PortSpace
from mcast.backends.rdma.sa.refusal import compare
from mcast.backends.rdma.sa.umad import subnet_administrator

send_only, broadcast = json.loads(sys.argv[1])
with subnet_administrator(None, 0, 10) as sa:
    found = compare(sa, McastAddress.of("239.1.1.1"), PortSpace.UDP, send_only, Gid(broadcast))
    absent = sa.group(Gid("ff12:4001:ffff::77"))
    print(json.dumps([[one.why for one in found], str(sa.port.gid), sa.port.pkeys, sa.port.rate,
                      sa.capability_mask2(), absent]))
"""

Ask = Callable[..., list[Any]]


class Subnet(OpenSm):
    """The host that asks is left to the program under test."""

    def _start_client(self, name: str) -> None:
        if name != ASKER:
            super()._start_client(name)

    def program(self, send_only: bool = False, broadcast: Gid = BROADCAST) -> list[Any]:
        process = self._spawn(
            *(sys.executable, "-c", PROGRAM, json.dumps([send_only, str(broadcast)])),
            host=ASKER,
            stdout=subprocess.PIPE,
        )
        out, _ = process.communicate(timeout=500)
        assert process.returncode == 0, self._complaint()
        answer: list[Any] = json.loads(out)
        return answer


@pytest.fixture(scope="module")
def subnet(tmp_path_factory: pytest.TempPathFactory, monkeypatch_module: None) -> Iterator[Subnet]:
    if line := opensm.missing():
        pytest.fail(f"the oracle needs OpenSM on a simulated fabric: {line}", pytrace=False)
    plain = generate(0)
    hosts = tuple(
        Host(name, 0x100001 + 0x10 * at, 0, 3, 1, (0xFFFF,))
        for at, name in enumerate(("HSM", CREATOR, ASKER, THIRD))
    )
    topology = replace(plain, hosts=hosts, switches=1, mlids=64, ipoib=plain.ipoib[:1], others=())
    subnet = Subnet(topology, tmp_path_factory.mktemp("subnet"))
    with subnet:
        yield subnet


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(mcast.__file__).parents[1]))
        yield


def request(subnet: Subnet, host: str, **wrong: Any) -> tuple[int, McMemberRecord]:
    """Return the request that the kernel of that host would send to join GROUP, but for `wrong` fields."""
    pattern = subnet.ask(CREATOR, SaMethod.GET, McMask.MGID, McMemberRecord(mgid=BROADCAST)).records[0]
    guid = next(one.guid for one in subnet.topology.hosts if one.name == host)
    gid = Gid(subnet.topology.subnet_prefix + guid.to_bytes(8))
    mgid = infiniband_mgid(GROUP.address, PortSpace.UDP, BROADCAST)
    mask, record = kernel_join(pattern, mgid, gid, PortSpace.UDP, JoinState.FULL)
    return mask, record._replace(**wrong)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"qkey": 0x12345678}, "Q_Key is 0x1234567, the group's is 0x12345678"),
        ({"sl": 3}, "SL is 0, the group's is 3"),
        ({"tclass": 7}, "traffic class is 0, the group's is 7"),
    ],
)
def test_the_field_that_a_real_sa_objects_to_is_named(
    subnet: Subnet, wrong: dict[str, int], why: str
) -> None:
    mask, record = request(subnet, CREATOR, **wrong)
    assert subnet.ask(CREATOR, SaMethod.SET, mask, record).status == SaStatus.OK
    try:
        # a port sends what its kernel would: the SA refuses, and says no more than this
        refused = subnet.ask(THIRD, SaMethod.SET, *request(subnet, THIRD))
        assert refused.status == SaStatus.REQ_INVALID
        found, *_ = subnet.program()
        assert found == [why]
    finally:
        leave = subnet.ask(CREATOR, SaMethod.DELETE, McMask.JOIN, record)
        assert leave.status == SaStatus.OK


def test_matching_or_missing_group_gives_no_cause(subnet: Subnet) -> None:
    """A group that fits or is not there gives no cause."""
    found, gid, pkeys, rate, capabilities, absent = subnet.program()
    asker = subnet.topology.hosts[2]
    assert (found, absent) == ([], None)
    assert Gid(gid) == Gid(subnet.topology.subnet_prefix + asker.guid.to_bytes(8))
    assert pkeys == [0xFFFF]
    assert rate > 0
    assert capabilities & SEND_ONLY_FULL_MEMBER
    mask, record = request(subnet, CREATOR)
    assert subnet.ask(CREATOR, SaMethod.SET, mask, record).status == SaStatus.OK
    assert subnet.program(send_only=True)[0] == []


def test_nothing_to_compare_without_a_broadcast_group(subnet: Subnet) -> None:
    """Without the broadcast group nothing can be compared."""
    assert subnet.program(broadcast=Gid(ipoib_broadcast_mgid(0x8001)))[0] == []
