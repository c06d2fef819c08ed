"""Address handles by destination, the least used given up first."""

from __future__ import annotations

import errno as E
from collections import OrderedDict

from mcast.api import Destination, Gid, Phase, mcast_error
from mcast.backends.rdma.native import Ah, Context, Native, Pd

_KEPT = 64
_FIELDS = (
    "dlid",
    "sl",
    "port_num",
    "sgid_index",
    "hop_limit",
    "traffic_class",
    "flow_label",
    "is_global",
)
_LAST_SGID_INDEX = 255
"""ibv_global_route.sgid_index is 8 bits wide."""


class AddressHandles:
    """The handles of one QP. `sources` are the GIDs it has sent from: they tell its own messages apart."""

    def __init__(self, native: Native, context: Context, pd: Pd) -> None:
        self._native, self._context, self._pd = native, context, pd
        self._handles: OrderedDict[Destination, Ah] = OrderedDict()
        self.sources: set[Gid] = set()

    def get(self, destination: Destination) -> Ah:
        """Raises the errno of ibv_create_ah: EINVAL, ENODATA (facts: kernel, data)."""
        handle = self._handles.get(destination)
        if handle is None:
            handle = self._create(destination)
            self._handles[destination] = handle
            if len(self._handles) > _KEPT:
                self._native.destroy_ah(self._handles.popitem(last=False)[1])
        else:
            self._handles.move_to_end(destination)
        return handle

    def clear(self) -> None:
        while self._handles:
            self._native.destroy_ah(self._handles.popitem()[1])

    def _create(self, destination: Destination) -> Ah:
        arguments = {"destination": str(destination)}
        if destination.sgid_index > _LAST_SGID_INDEX:
            raise mcast_error(E.EINVAL, "send", Phase.SEND, arguments)
        fields = {name: getattr(destination, name) for name in _FIELDS}
        handle = self._native.create_ah(self._pd, destination.gid, fields, arguments)
        port, index = destination.port_num, destination.sgid_index
        self.sources.add(Gid(self._native.query_gid(self._context, port, index)))
        return handle
