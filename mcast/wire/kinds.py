"""What a port speaks, and what kind of communication an id is for."""

from __future__ import annotations

from enum import Enum, IntEnum


class LinkLayer(Enum):
    """What a port speaks: InfiniBand has an SA, MLIDs and partitions; Ethernet has IGMP and none of these."""

    INFINIBAND = "InfiniBand"
    ETHERNET = "Ethernet"


class PortSpace(IntEnum):
    """rdma_port_space. UDP joins groups, and so does IPOIB on InfiniBand; TCP and IB make RC and UC QPs."""

    IPOIB = 0x0002
    TCP = 0x0106
    UDP = 0x0111
    IB = 0x013F


RDMA_UDP_QKEY = 0x01234567
"""The Q_Key of PortSpace.UDP (K-EVENT-1). Take a group's from its join event instead."""
