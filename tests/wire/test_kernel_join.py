"""The kernel's request to the SA, field by field (SA-PATH-2, SA-PATH-3), as the modelled kernel sends it."""

from __future__ import annotations

import pytest

from mcast.api import JoinAttrEx, PortSpace
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.trace.events import SaAsked
from mcast.wire.addresses import Gid, McastAddress, Mgid
from mcast.wire.kernel_join import kernel_join
from mcast.wire.mcmember import McMemberRecord

PATTERN = McMemberRecord(
    mgid=Gid("ff12:401b:ffff::ffff:ffff"),
    port_gid=Gid("fe80::1"),
    qkey=0xB1B,
    mlid=0xC000,
    mtu_selector=2,
    mtu=4,
    tclass=7,
    pkey=0xFFFF,
    rate_selector=2,
    rate=3,
    life_selector=2,
    packet_life=18,
    sl=3,
    flow_label=9,
    hop_limit=255,
    scope=2,
    join_state=1,
    proxy_join=True,
)


@pytest.mark.parametrize(
    ("space", "mask", "qkey"), [(PortSpace.UDP, 0x130C7, 0x01234567), (PortSpace.IPOIB, 0x173F7, 0xB1B)]
)
@pytest.mark.parametrize("join_state", [1, 8])
def test_other_fields_equal_the_broadcast_group(
    space: PortSpace, mask: int, qkey: int, join_state: int
) -> None:
    """All but four fields are those of the broadcast group."""
    mgid, port_gid = Gid("ff12:4001:ffff::f01:101"), Gid("fe80::2")
    own = {"mgid": mgid, "port_gid": port_gid, "qkey": qkey, "proxy_join": False}
    wanted = PATTERN._asdict() | own | {"join_state": join_state}
    assert kernel_join(PATTERN, mgid, port_gid, space, join_state) == (mask, McMemberRecord(**wanted))


@pytest.mark.parametrize("space", [PortSpace.UDP, PortSpace.IPOIB])
@pytest.mark.parametrize("send_only", [False, True])
@pytest.mark.parametrize(
    ("group", "tail"),
    [
        (McastAddress.of("239.1.1.1"), "::f01:101"),
        (McastAddress.of("ff0e::1:2"), "::1:2"),
        (McastAddress.of(Mgid("ff12:abcd::7")), ""),
    ],
)
def test_the_modelled_kernel_sends_it(
    space: PortSpace, send_only: bool, group: McastAddress, tail: str
) -> None:
    fabric = Fabric.infiniband(ports=1, trace=True)
    with open_fabric(fabric) as backend, backend.event_channel() as channel:
        cm_id = channel.create_id(space)
        cm_id.bind_addr("10.0.0.1")
        cm_id.join_multicast_ex((JoinAttrEx.send_only if send_only else JoinAttrEx.full_member)(group))
    assert fabric.trace is not None
    asked = next(one for _, one in fabric.trace if isinstance(one, SaAsked) and one.method == "SET")
    pattern = fabric.ports[0].interfaces[0].broadcast
    assert pattern is not None
    signature = f"{'6' if group.family == 10 else '4'}0{'1b' if space is PortSpace.IPOIB else '01'}"
    mgid = Gid(f"ff12:{signature}:ffff{tail}") if tail else Gid("ff12:abcd::7")
    state = 8 if send_only else 1
    assert (asked.mask, asked.record) == kernel_join(pattern, mgid, fabric.ports[0].gids[0], space, state)
