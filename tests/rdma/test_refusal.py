"""Questions of the real provider to the SA after a refusal, without an SA: tests/oracle puts it to OpenSM."""

from __future__ import annotations

import errno as E
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mcast.api import CmEvent, CmEventType, PortSpace
from mcast.backends.rdma.channel import RdmaChannel
from mcast.backends.rdma.sa import umad
from mcast.backends.rdma.sa.refusal import broadcast_causes, find_causes, netdevs_with
from mcast.errors.cause import Cause
from mcast.wire.addresses import Gid, McastAddress
from mcast.wire.mapping import ipoib_broadcast_mgid
from mcast.wire.mcmember import McMemberRecord

GROUP = McastAddress.of("239.1.1.1")
BROADCAST = Gid(ipoib_broadcast_mgid())


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
        pytest.raises(umad.SaUnreachable, match="apt-get install libibumad3"),
        umad.subnet_administrator("mlx5_0", 2, 1),
    ):
        pass
    for broadcast in (BROADCAST, None):
        assert find_causes("mlx5_0", 2, GROUP, PortSpace.UDP, False, broadcast) == ()


def test_a_question_is_repeated_each_second() -> None:
    sent: list[tuple[int, ...]] = []

    def send(port: int, agent: int, out: object, length: int, *waits: int) -> int:
        sent.append(waits)
        return 0

    library = SimpleNamespace(
        umad_size=lambda: 56,
        umad_set_addr=lambda *_: 0,
        umad_send=send,
        umad_recv=lambda *_: -E.ETIMEDOUT,
    )
    at = umad.PortAttributes(BROADCAST, (0xFFFF,), 100, 1, 0)
    for seconds in (0.25, 1, 60):
        with pytest.raises(umad.SaTimeout):
            umad.SubnetAdministrator(library, 0, 0, at, seconds).capability_mask2()
    assert sent == [(250, 0), (1000, 0), (1000, 59)]


@pytest.mark.parametrize(("error", "asked"), [(E.ETIMEDOUT, True), (E.EIO, False)])
def test_silent_and_unreachable_sa_differ(error: int, asked: bool) -> None:
    """An SA that is silent is told from one that cannot be asked."""
    library = SimpleNamespace(
        umad_size=lambda: 56,
        umad_set_addr=lambda *_: 0,
        umad_send=lambda *_: 0,
        umad_recv=lambda *_: -error,  # as poll(2) ends, or a device that has gone
    )
    at = umad.PortAttributes(BROADCAST, (0xFFFF,), 100, 1, 0)
    with pytest.raises(umad.SaUnreachable) as caught:
        umad.SubnetAdministrator(library, 0, 0, at, 0.001).capability_mask2()
    assert isinstance(caught.value, umad.SaTimeout) == asked


LARGE, FITTING = McMemberRecord(pkey=0xFFFF, mtu=5, rate=3), McMemberRecord(pkey=0xFFFF, mtu=4, rate=3)


@pytest.mark.parametrize(
    ("group", "pkey", "why"),
    [
        (FITTING, 0xFFFF, []),
        (LARGE, 0xFFFF, ["the port's MTU is 2048 bytes, the group's 4096 bytes"]),
        (None, 0xFFFF, ["the SM has no such group: its partition 0xffff is not for IPoIB"]),
        (None, 0x8001, ["P_Key is 0x8001, the port's table has 0xffff"]),
    ],
)
def test_a_broadcast_group_that_refuses_is_looked_into(
    group: McMemberRecord | None, pkey: int, why: list[str]
) -> None:
    at = umad.PortAttributes(BROADCAST, (0xFFFF,), 40, 1, 0)
    sa = cast(Any, SimpleNamespace(group=lambda mgid: group, port=at))
    causes = broadcast_causes(sa, Gid(ipoib_broadcast_mgid(pkey)), 2048)
    assert [one.why for one in causes] == why


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
    assert RdmaChannel._with_causes(channel, booked, event).found == found
