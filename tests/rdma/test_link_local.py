"""Addresses that name a port only together with its interface: fe80::/10, and no other."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest

from mcast.backends.net import hostnet
from mcast.backends.rdma import devices
from mcast.wire.addresses import needs_interface


class Host:
    """Return the interfaces of a host, from the C core."""

    def netdev_addresses(self) -> list[tuple[str, bytes]]:
        return [("e1", ip_address(one).packed) for one in ("169.254.7.7", "fe80::1", "fd77::1")]


def test_link_local_ipv4_is_an_address_to_bind_to() -> None:
    """Two hosts on a cable without DHCP have no other (RFC 3927). fe80::/10 needs the interface's name."""
    found = devices._Netdevs(Host()).addresses  # type: ignore[arg-type]
    assert found == {"e1": [IPv4Address("169.254.7.7"), IPv6Address("fd77::1")]}
    assert [needs_interface(ip_address(one)) for one in ("169.254.7.7", "fe80::1", "febf::1", "fec0::1")] == [
        False,
        True,
        True,
        False,
    ]


def test_the_test_bed_sees_the_same_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    info = [{"local": one, "prefixlen": 16} for one in ("169.254.7.7", "fe80::1")]
    monkeypatch.setattr(hostnet, "ask", lambda *command: [{"ifname": "e1", "addr_info": info}])
    assert hostnet.addresses() == {"e1": [(IPv4Address("169.254.7.7"), 16)]}
