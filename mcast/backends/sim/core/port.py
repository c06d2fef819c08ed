"""The ports of a simulated fabric, with names and addresses that follow from their numbers."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

from mcast.api import LinkLayer
from mcast.backends.model.port import Interface, Limits, Port
from mcast.wire.addresses import Gid


class FabricPort(Port):
    """A port of a host, at a switch.

    `igmp` counts the full members of each RoCE group on the port.
    """

    def __init__(
        self, index: int, host: int, link_layer: LinkLayer, switch: int, mtu: int, rate: float, limits: Limits
    ) -> None:
        is_infiniband = link_layer is LinkLayer.INFINIBAND
        super().__init__(
            index,
            f"{'ib' if is_infiniband else 'roce'}{index}",
            link_layer,
            0x0200_0000_0000_0000 | index + 1,
            index + 1 if is_infiniband else 0,
            mtu,
            rate,
            limits,
            *_addresses(index, 0),
        )
        self.host: int = host
        self.switch: int = switch
        self.igmp: dict[Gid, int] = {}

    def add_interface(self, number: int, pkey: int) -> None:
        """Add the IPoIB interface of another partition."""
        self.interfaces.append(Interface(self, pkey, *_addresses(self.index, number)))


def _addresses(index: int, number: int) -> tuple[IPv4Address, IPv6Address]:
    """Return the addresses of a port's interface of that number."""
    tail = bytes((number,)) + (index + 1).to_bytes(2)
    return IPv4Address(b"\x0a" + tail), IPv6Address(b"\xfd" + bytes(12) + tail)
