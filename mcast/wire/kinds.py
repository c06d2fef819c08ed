"""The link layers of ports, and the port spaces of ids."""

from __future__ import annotations

from enum import Enum, IntEnum


class LinkLayer(Enum):
    """The link layer of a port.

    InfiniBand has an SA, MLIDs and partitions; Ethernet has none of these, but IGMP.
    """

    INFINIBAND = "InfiniBand"
    ETHERNET = "Ethernet"


class PortSpace(IntEnum):
    """rdma_port_space: what an id is for.

    UDP joins groups, as does IPOIB on InfiniBand; TCP and IB make RC and UC QPs.
    """

    IPOIB = 0x0002
    TCP = 0x0106
    UDP = 0x0111
    IB = 0x013F


RDMA_UDP_QKEY = 0x01234567
"""The Q_Key of groups in PortSpace.UDP (K-EVENT-1).

A join event has the group's Q_Key: use that one to send.
"""
