"""Which drivers have multicast: a table of the providers of rdma-core.

librdmacm attaches the queue pair of a full member by ibv_attach_mcast. Where a provider does not implement
`attach_mcast`, libibverbs itself answers EOPNOTSUPP (`libibverbs/dummy_ops.c`), whatever the device can do.

Read in rdma-core 65.0, commit 691953d8d50 of 2026-08-20: each `verbs_context_ops` of `providers/*/`. To renew
the table, run `git grep -l attach_mcast -- providers` there. A driver that the table lacks is tried, and each
driver of a newer libibverbs.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

RDMA_CORE = "65.0"
"""The version of rdma-core that the table was read in."""


class Driver(NamedTuple):
    """A provider of libibverbs.

    name      its folder in `providers/` of rdma-core
    attaches  True if it implements `attach_mcast`
    """

    name: str
    attaches: bool

    @property
    def no_multicast(self) -> str:
        """Reason why its queue pairs cannot be attached to a group; "" if they can."""
        if self.attaches:
            return ""
        return f"its driver {self.name} does not implement ibv_attach_mcast, as of rdma-core {RDMA_CORE}"


def multicast_doubt(name: str) -> str:
    """Reason why that driver may have no multicast; "" if none is known."""
    return next((one.no_multicast for one in DRIVERS.values() if one.name == name), "")


def is_newer(library: str) -> bool:
    """Return True if that libibverbs is newer than the table, by its file's name: libibverbs.so.1.14.65.0."""
    found = re.search(r"libibverbs\.so\.1\.\d+\.(\d+)\.(\d+)", os.path.realpath(library))
    return found is not None and (int(found[1]), int(found[2])) > tuple(map(int, RDMA_CORE.split(".")))


DRIVERS = {
    1: Driver("mlx5", True),
    2: Driver("mlx4", True),
    4: Driver("cxgb4", True),
    5: Driver("mthca", True),
    6: Driver("bnxt_re", False),
    7: Driver("ocrdma", True),
    9: Driver("irdma", True),
    10: Driver("vmw_pvrdma", False),
    11: Driver("qedr", False),
    12: Driver("hns", False),
    14: Driver("rxe", True),
    15: Driver("hfi1verbs", True),
    16: Driver("ipathverbs", True),
    17: Driver("efa", False),
    18: Driver("siw", False),
    19: Driver("erdma", False),
    20: Driver("mana", False),
    21: Driver("ionic", False),
}
"""`enum rdma_driver_id` (<rdma/ib_user_ioctl_verbs.h>), which netlink reports -> the provider."""
