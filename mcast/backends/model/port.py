"""A device with one port: its interfaces, limits and GID table."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address
from typing import Protocol

from mcast.api import DeviceInfo, LinkLayer, PortInfo, PortState
from mcast.wire.addresses import Gid
from mcast.wire.mcmember import McMemberRecord
from mcast.wire.partition import DEFAULT_PKEY

PORT_COUNTERS = ("qkey_violations", "pkey_violations", "oversized")
"""The counters of a port: names of its fields.

A message counts once for each queue pair that it was for.
"""


COMP_VECTORS = 4
"""Number of completion vectors of a device. They have no effect, because there are no interrupts."""


class Limits:
    """Limits of a device; the defaults are Soft-RoCE's (K-ATTACH-9)."""

    __slots__ = ("groups", "qps_per_group", "queue_depth")

    def __init__(self, groups: int = 8192, qps_per_group: int = 56, queue_depth: int = 1 << 20) -> None:
        self.groups: int = groups
        self.qps_per_group: int = qps_per_group
        self.queue_depth: int = queue_depth


class Interface:
    """A network interface of a port; on InfiniBand an IPoIB interface of one partition.

    `broadcast` is the record of its IPoIB broadcast group; None while the interface is down.
    """

    __slots__ = ("broadcast", "ipv4", "ipv6", "pkey", "port")

    def __init__(
        self, port: Port, pkey: int, ipv4: IPv4Address | None, ipv6: IPv6Address | None = None
    ) -> None:
        self.port: Port = port
        self.pkey: int = pkey
        self.ipv4: IPv4Address | None = ipv4
        self.ipv6: IPv6Address | None = ipv6
        self.broadcast: McMemberRecord | None = None

    @property
    def addresses(self) -> tuple[IPv4Address | IPv6Address, ...]:
        return tuple(one for one in (self.ipv4, self.ipv6) if one is not None)


class PortObserver(Protocol):
    """An object that is bound to a port, and is told of the port's faults."""

    def device_removed(self) -> None: ...
    def address_changed(self) -> None: ...


class Port:
    """A port, which is a device of its own, with the default interface.

    `index` tells the ports of a provider apart; `gids` maps index to GID; `interfaces[0]` is the default.
    """

    def __init__(
        self,
        index: int,
        name: str,
        link_layer: LinkLayer,
        guid: int,
        lid: int,
        mtu: int,
        rate: float,
        limits: Limits,
        ipv4: IPv4Address | None,
        ipv6: IPv6Address | None,
        multicast: bool = True,
    ) -> None:
        self.index: int = index
        self.link_layer: LinkLayer = link_layer
        self.mtu: int = mtu
        self.rate: float = rate
        self.limits: Limits = limits
        self.multicast: bool = multicast
        self.is_infiniband: bool = link_layer is LinkLayer.INFINIBAND
        self.name: str = name
        self.guid: int = guid
        self.lid: int = lid
        self.interfaces: list[Interface] = [Interface(self, DEFAULT_PKEY, ipv4, ipv6)]
        self.pkeys: tuple[int, ...] = (DEFAULT_PKEY,)
        self.ids: dict[PortObserver, None] = {}
        link_local = Gid(b"\xfe\x80" + bytes(6) + self.guid.to_bytes(8))
        self.gids: dict[int, Gid] = {0: link_local}
        if not self.is_infiniband:
            self.gids |= {i: Gid(address) for i, address in enumerate(self.addresses, 1)}
        self.up = True
        self.removed = False
        self.removals = 0
        self.qkey_violations = 0
        self.pkey_violations = 0
        self.oversized = 0

    @property
    def addresses(self) -> tuple[IPv4Address | IPv6Address, ...]:
        return tuple(address for interface in self.interfaces for address in interface.addresses)

    def sgid_index(self, source: IPv4Address | IPv6Address) -> int:
        """The GID table index that goes with an address of this port; 0 on InfiniBand."""
        return 0 if self.is_infiniband else 1 if isinstance(source, IPv4Address) else 2

    def set_ipv4(self, address: IPv4Address | None) -> None:
        """Give the default interface that address, or none; a RoCE GID goes with it."""
        self.interfaces[0].ipv4 = address
        if not self.is_infiniband:
            self.gids.pop(1, None)
            self.gids |= {} if address is None else {1: Gid(address)}

    def info(self) -> DeviceInfo:
        port = PortInfo(
            port_num=1,
            state=PortState.ACTIVE if self.up else PortState.DOWN,
            link_layer=self.link_layer,
            active_mtu=self.mtu,
            rate=float(self.rate),
            lid=self.lid,
            gids=dict(self.gids),
            addresses=self.addresses,
        )
        return DeviceInfo(
            name=self.name,
            node_guid=self.guid,
            max_mcast_grp=self.limits.groups if self.multicast else 0,
            max_mcast_qp_attach=self.limits.qps_per_group if self.multicast else 0,
            max_qp_wr=self.limits.queue_depth,
            ports=(port,),
            num_comp_vectors=COMP_VECTORS,
        )
