"""The request that the kernel sends to the SA when a program joins a group on InfiniBand.

Source: `cma_join_ib_multicast` in drivers/infiniband/core/cma.c of Linux (SA-PATH-2, SA-PATH-3). The request
is made from the record of the broadcast group of the IPoIB interface that the id is bound to.
"""

from __future__ import annotations

from mcast.wire.addresses import Gid
from mcast.wire.kinds import RDMA_UDP_QKEY, PortSpace
from mcast.wire.mcmember import JOIN_STATES, McMask, McMemberRecord, make_record

_MASK = int(McMask.CREATE)  # every request can create the group, because the first one has to
_IPOIB_MASK = _MASK | int(
    McMask.RATE | McMask.RATE_SELECTOR | McMask.MTU | McMask.MTU_SELECTOR | McMask.HOP_LIMIT
)


def kernel_join(
    broadcast: McMemberRecord, mgid: Gid, port_gid: Gid, port_space: PortSpace, join_state: int
) -> tuple[int, McMemberRecord]:
    """Component mask and record of the Set request.

    `broadcast` is the record of the IPoIB broadcast group.
    """
    is_ipoib = port_space is PortSpace.IPOIB
    qkey = broadcast.qkey if is_ipoib else RDMA_UDP_QKEY
    record = make_record((mgid, port_gid, qkey, *broadcast[3:16], JOIN_STATES[join_state], False))
    return _IPOIB_MASK if is_ipoib else _MASK, record
