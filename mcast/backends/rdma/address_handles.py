"""Address handles by destination, the least used given up first."""

from __future__ import annotations

import errno as E
import threading
from collections import OrderedDict

from mcast.api import Destination, Gid, McastError, Phase, mcast_error
from mcast.backends.rdma.native import Context, Native, NativeQp

_MAX_HANDLES = 64
_FIELDS = (
    "dlid",
    "sl",
    "port_num",
    "sgid_index",
    "hop_limit",
    "traffic_class",
    "flow_label",
    "is_global",
    "static_rate",
    "src_path_bits",
)
_LAST_SGID_INDEX = 255
"""ibv_global_route.sgid_index is 8 bits wide."""


class AddressHandles:
    """The address handles of one queue pair, by their serial numbers; C refuses a handle that is retired.

    `sources` are the GIDs that the queue pair has sent from, by which it knows its own messages. There is a
    lock and no flag: a handle whose serial number an exception has lost ends with the queue pair.
    """

    def __init__(self, native: Native, context: Context, qp: NativeQp, sources: set[Gid]) -> None:
        self._native, self._context, self._qp = native, context, qp
        self._lock = threading.RLock()
        self._serials: OrderedDict[Destination, int] = OrderedDict()
        self.sources: set[Gid] = sources

    def get(self, destination: Destination) -> int:
        """Raises the errno of ibv_create_ah: EINVAL, ENODATA (K-DATA-21)."""
        with self._lock:
            serial = self._serials.get(destination)
            if serial is None:
                serial = self._serials[destination] = self._create(destination)
                if len(self._serials) > _MAX_HANDLES:
                    self._native.retire_ah(self._qp, self._serials.popitem(last=False)[1])
            else:
                self._serials.move_to_end(destination)
            return serial

    def forget(self, destination: Destination, serial: int) -> None:
        """Forget a handle that was retired, as a reset of the queue pair does.

        Another thread may have made a new one.
        """
        with self._lock:
            if self._serials.get(destination) == serial:
                del self._serials[destination]

    def _create(self, destination: Destination) -> int:
        arguments = {"destination": str(destination)}
        if destination.sgid_index > _LAST_SGID_INDEX:
            raise mcast_error(E.EINVAL, "send", Phase.SEND, arguments)
        fields = {name: getattr(destination, name) for name in _FIELDS}
        serial = self._native.new_ah(self._qp, destination.gid, fields, arguments)
        port, index = destination.port_num, destination.sgid_index
        try:
            self.sources.add(Gid(self._native.query_gid(self._context, port, index)))
        except McastError:
            self._native.retire_ah(self._qp, serial)
            raise
        return serial
