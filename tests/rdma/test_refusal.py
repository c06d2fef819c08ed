"""What the real provider asks the SA after a refusal, without an SA: tests/oracle puts it to OpenSM."""

from __future__ import annotations

import errno as E
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mcast.api import CmEvent, CmEventType, JoinAttrEx, PortSpace
from mcast.backends.rdma.channel import RdmaChannel
from mcast.backends.rdma.sa import umad
from mcast.backends.rdma.sa.refusal import find_causes, kernel_request, netdevs_with
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.trace.events import SaAsked
from mcast.errors.cause import Cause
from mcast.wire.addresses import Gid, McastAddress, Mgid
from mcast.wire.mapping import ipoib_broadcast_mgid

GROUP = McastAddress.of("239.1.1.1")
BROADCAST = Gid(ipoib_broadcast_mgid())


@pytest.mark.parametrize("space", [PortSpace.UDP, PortSpace.IPOIB])
@pytest.mark.parametrize("send_only", [False, True])
@pytest.mark.parametrize(
    "group", [GROUP, McastAddress.of("ff0e::1:2"), McastAddress.of(Mgid("ff12:abcd::7"))]
)
def test_it_is_worked_out_as_the_modelled_kernel_asks(
    space: PortSpace, send_only: bool, group: McastAddress
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
    assert (asked.mask, asked.record) == kernel_request(
        pattern, group, space, send_only, fabric.ports[0].gids[0]
    )


def test_the_interfaces_are_those_with_the_address() -> None:
    first, second = ip_address("10.0.0.1"), ip_address("fd00::2")
    known = [("ib0", first.packed), ("ib1", second.packed), ("ib1", ip_address("10.0.0.3").packed)]
    assert netdevs_with(known, first) == ("ib0",)
    assert netdevs_with(known, second) == ("ib1",)
    assert netdevs_with(known, None) == ("ib0", "ib1")


def test_where_the_sa_cannot_be_asked_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(umad, "LIBRARY", "libno-such-umad.so.3")
    umad._library.cache_clear()
    with (
        pytest.raises(umad.Silent, match="apt-get install libibumad3"),
        umad.subnet_administrator("mlx5_0", 2, 1),
    ):
        pass
    for broadcast in (BROADCAST, None):
        assert find_causes("mlx5_0", 2, GROUP, PortSpace.UDP, False, broadcast) == ()


CAUSE = Cause("why", "check", "next")


@pytest.mark.parametrize(
    ("errno", "status", "token", "found"),
    [
        (E.EINVAL, -E.EINVAL, 7, (CAUSE,)),
        (E.EINVAL, -1, 7, ()),  # an attach that failed
        (E.ETIMEDOUT, -E.ETIMEDOUT, 7, ()),
        (E.EINVAL, -E.EINVAL, 8, ()),
    ],
)
def test_a_refusal_alone_is_looked_into(
    errno: int, status: int, token: int, found: tuple[Cause, ...]
) -> None:
    cm_id = SimpleNamespace(why_refused=lambda join: (CAUSE,))
    kind = CmEventType.MULTICAST_ERROR
    booked = CmEvent(type=kind, status=status, errno=errno, context=None, id=cm_id, ud=None)
    channel = cast(Any, SimpleNamespace(joins={7: object()}))
    event = (int(kind), status, errno, 1, token, b"")
    assert RdmaChannel._explained(channel, booked, event).found == found
