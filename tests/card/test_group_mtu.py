"""A group's MTU may be less than the port's: what is longer would vanish, and is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

import pytest

from mcast import open_endpoint
from mcast.api import Destination, MessageTooLarge, MtuSource
from mcast.backends.rdma.native import Native
from mcast.backends.rdma.net import ipoib
from mcast.backends.rdma.sa import group_mtu
from mcast.backends.rdma.sa.umad import SaUnreachable
from mcast.wire.addresses import Gid
from mcast.wire.mapping import ipoib_broadcast_mgid

from .card import Card, ethernet_port, infiniband_port
from .ends import BOUND, GROUP, End
from .ipoib import plant
from .provider import CardBackend

Ask = Callable[[int | None], list[Gid]]
MTU_4096, MTU_2048, MTU_1024 = 5, 4, 3
"""enum ibv_mtu."""


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Lets the SA say that every group has this MTU, or (None) be out of reach; whom it was asked about."""

    def asked(mtu: int | None) -> list[Gid]:
        about: list[Gid] = []

        def answer(mgid: Gid, device: str, port: int) -> int:
            assert (device, port) == ("card0", 1)
            about.append(mgid)
            if mtu is None:
                raise SaUnreachable("there is no umad")
            return mtu

        monkeypatch.setattr(group_mtu, "ask_sa", answer)
        return about

    return asked


@pytest.fixture
def fabric(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int, int], None]:
    """Makes a card of a port's MTU, a fabric's for groups (enum ibv_mtu), and an interface's in bytes."""

    def made(port: int, groups: int, interface: int) -> None:
        card.add(infiniband_port("10.0.0.1", 1, active_mtu=port, group_mtu=groups), name=b"card0")
        monkeypatch.setattr(ipoib, "NET", tmp_path / "net")
        gid = Gid(bytes(card.port(0).gids[0]))
        plant(tmp_path / "net", "ib0", gid=gid, broadcast=Gid(ipoib_broadcast_mgid()), mtu=interface)
        known = [("ib0", ip_address("10.0.0.1").packed)]
        monkeypatch.setattr(Native, "netdev_addresses", lambda self: known)

    return made


Fabric = Callable[[int, int, int], None]


def bound(to: Destination) -> tuple[int | None, MtuSource | None]:
    return to.group_mtu, to.mtu_source


@pytest.mark.parametrize(
    ("port", "interface", "sa", "found"),
    [
        (MTU_4096, 2044, 2048, (2048, MtuSource.SA)),
        (MTU_4096, 2044, 4096, (4096, MtuSource.SA)),
        (MTU_4096, 2044, None, (2048, MtuSource.IPOIB)),
        (MTU_4096, 1500, None, (2048, MtuSource.IPOIB)),  # set by hand: the broadcast group has more
        (MTU_4096, 65520, 1024, (1024, MtuSource.SA)),  # connected mode says nothing of the broadcast group
        (MTU_4096, 65520, None, (None, None)),
        (MTU_4096, 0, None, (None, None)),  # it went away while it was looked at
        (MTU_2048, 2044, 1024, (None, None)),  # no group has less than the broadcast group
    ],
)
def test_join_reports_a_smaller_group_mtu(
    fabric: Fabric, ask: Ask, backend: CardBackend, port: int, interface: int, sa: int | None, found: object
) -> None:
    """A join tells the group's MTU where it may be less than the port s."""
    fabric(port, port, interface)
    about = ask(sa)
    to = End(backend).join()
    assert bound(to) == found
    assert about == ([] if port == MTU_2048 else [to.gid])


def test_sa_is_asked_without_an_interface(card: Card, ask: Ask, backend: CardBackend) -> None:
    """Where the interface cannot be found the SA is asked."""
    card.infiniband(1)
    ask(1024)
    assert bound(End(backend).join()) == (1024, MtuSource.SA)


def test_on_ethernet_the_port_s_mtu_is_the_group_s(card: Card, ask: Ask, backend: CardBackend) -> None:
    card.add(ethernet_port("10.0.0.1"), name=b"card0")
    about = ask(256)
    assert bound(End(backend).join()) == (None, None)
    assert about == []


@pytest.mark.parametrize("sa", [2048, None])
def test_what_is_longer_is_refused_before_it_vanishes(
    fabric: Fabric, ask: Ask, backend: CardBackend, sa: int | None
) -> None:
    fabric(MTU_4096, MTU_2048, 2044)
    ask(sa)
    end = End(backend)
    to = end.join()
    assert (end.qp.max_message_size, end.qp.max_message_to(to)) == (4096, 2048)
    longer = bytes(2049)
    for _ in range(2):  # the second time the destination is known to the fast calls
        end.qp.send(to, [bytes(2048)])
        for send in (
            lambda: end.qp.send(to, [b"fits", longer]),
            lambda: end.qp.send_one(to, longer),
            lambda: end.qp.send_one(to, bytearray(longer)),
        ):
            with pytest.raises(MessageTooLarge) as caught:
                send()
            says = "the SA's record" if sa else "the IPoIB broadcast group"
            assert f"2049 bytes, the group's MTU of 2048 carries 2048 (from {says}" in str(caught.value)
            assert caught.value.group_mtu == 2048
            assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(MessageTooLarge, match="4097 bytes, one MTU carries 4096"):
        end.qp.send_one(to.model_copy(update={"group_mtu": None}), bytes(4097))
    with end.qp.recv(16, BOUND) as batch:
        assert batch.lengths == [2048, 2048]


def test_that_is_why_it_vanishes_in_silence(fabric: Fabric, ask: Ask, backend: CardBackend) -> None:
    fabric(MTU_4096, MTU_2048, 2044)
    ask(2048)
    end = End(backend, max_recv_size=4096)
    to = end.join()
    end.qp.send_one(to.model_copy(update={"group_mtu": None}), bytes(2049))
    end.qp.send_one(to, b"next")
    message = end.qp.recv_one(BOUND)
    assert message is not None
    assert bytes(message.payload) == b"next"


def test_an_endpoint_says_what_each_group_carries(fabric: Fabric, ask: Ask, backend: CardBackend) -> None:
    fabric(MTU_4096, MTU_1024, 2044)
    ask(1024)
    with open_endpoint(backend, "10.0.0.1", sequence=True) as endpoint:
        group = endpoint.join(GROUP)
        assert (endpoint.max_message_size, group.max_message_size) == (4096 - 24, 1024 - 24)
        group.send(bytes(1000))
        with pytest.raises(MessageTooLarge, match="1001 bytes, the group's MTU of 1024 carries 1000"):
            group.send(bytes(1001))
        message = group.recv(BOUND)
        assert message is not None
        assert len(message.payload) == 1000


def test_removed_device_leaves_the_event_unchanged(
    card: Card, fabric: Fabric, ask: Ask, backend: CardBackend
) -> None:
    """A device that goes meanwhile leaves the event as it is."""
    fabric(MTU_4096, MTU_2048, 2044)
    end = End(backend)
    end.id.join_multicast(GROUP)
    card.fail("ibv_query_port", 5)
    event = end.channel.get_event(BOUND)
    assert event is not None
    assert event.ud is not None
    assert bound(event.ud.destination) == (None, None)
