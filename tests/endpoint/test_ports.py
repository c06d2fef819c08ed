"""Which ports could be used: the active ones that have an address."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mcast import McastAddress, open_endpoint
from mcast.api import AddressNotAvailable, NotSupported
from mcast.backends.sim import Fabric, open_fabric
from mcast.endpoint.blocking import Endpoint, Sender
from mcast.endpoint.ports import active, choose

GROUP = "239.1.1.1"


def test_active_ports_prefer_the_groups_family() -> None:
    """Active ports with an address of the group's family where there is one."""
    fabric = Fabric.roce(ports=3)
    with open_fabric(fabric) as backend:
        fabric.set_link(fabric.ports[0], up=False)
        fabric.set_ipv4(fabric.ports[1], None)
        four, six = McastAddress.of("239.1.1.1"), McastAddress.of("ff0e::1")
        found = {
            group: [str(place.address) for place in active(backend, group)] for group in (None, four, six)
        }
        assert found == {
            None: ["fd00::2", "10.0.0.3"],
            four: ["fd00::2", "10.0.0.3"],
            six: ["fd00::2", "fd00::3"],
        }
        assert [place.device.name for place in active(backend)] == ["roce1", "roce2"]


def test_where_there_is_none_one_sentence_says_so() -> None:
    fabric = Fabric.roce(ports=1)
    with open_fabric(fabric) as backend:
        fabric.set_link(fabric.ports[0], up=False)
        with pytest.raises(ValueError, match="has no active port with an address: see `mcast info`"):
            active(backend)


# --- a port that has only IPv6 GIDs ------------------------------------------------------------

JOINS: dict[str, Callable[[Endpoint], Sender]] = {
    "sender": lambda endpoint: endpoint.sender(GROUP),
    "join": lambda endpoint: endpoint.join(GROUP),
}


@pytest.mark.parametrize("how", JOINS)
@pytest.mark.parametrize(("bind", "device"), [(None, "roce0"), ("fd00::1", None)], ids=["device", "address"])
def test_a_roce_port_without_ipv4_is_refused(how: str, bind: str | None, device: str | None) -> None:
    """With that one cause. The stack would join, and the first send put the queue pair into ERR."""
    fabric = Fabric.roce(ports=1)
    fabric.set_ipv4(fabric.ports[0], None)
    with open_fabric(fabric) as backend, open_endpoint(backend, bind, device=device) as endpoint:
        with pytest.raises(AddressNotAvailable, match="fd00::1 cannot send to an IPv4 group") as caught:
            JOINS[how](endpoint)
        (cause,) = caught.value.causes
        assert "bound to an IPv6 address" in cause.why
        assert "the port has none: give it an IPv4 address" in str(caught.value)
        assert (endpoint.next_event(0), endpoint.groups) == (None, ())
        assert (endpoint.stats().lost, endpoint.stats().sent) == (0, 0)


def test_an_ipv6_source_on_roce_names_the_ipv4_one() -> None:
    fabric = Fabric.roce(ports=1)
    with (
        open_fabric(fabric) as backend,
        open_endpoint(backend, "fd00::1") as endpoint,
        pytest.raises(AddressNotAvailable, match=r"bind to 10\.0\.0\.1 instead"),
    ):
        endpoint.sender(GROUP)


def test_an_ipv6_source_on_infiniband_sends() -> None:
    """There the address only selects the port."""
    fabric = Fabric.infiniband(ports=2)
    with (
        open_fabric(fabric) as backend,
        open_endpoint(backend, "fd00::1") as endpoint,
        open_endpoint(backend, "10.0.0.2") as other,
    ):
        member = other.join(GROUP)
        endpoint.sender(GROUP).send(b"hello")
        message = member.recv(timeout=1)
        assert message is not None
        assert bytes(message.payload) == b"hello"


# --- devices without multicast -------------------------------------------------------------------


def test_a_device_without_multicast_is_not_chosen() -> None:
    """The only other port is, and the first error on such a device says that it has none."""
    fabric = Fabric.roce(ports=2)
    fabric.ports[0].multicast = False
    with open_fabric(fabric) as backend:
        assert choose(backend, None, None, 1).device.name == "roce1"
        assert [place.device.name for place in active(backend)] == ["roce1"]
        with pytest.raises(NotSupported, match="roce0 has no multicast, for it allows no groups"):
            open_endpoint(backend, "10.0.0.1")
        with pytest.raises(ValueError, match=r"10\.0\.0\.1 \(roce0 port 1, ACTIVE, no multicast\)"):
            open_endpoint(backend, "10.0.0.9")
