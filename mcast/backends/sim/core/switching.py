"""Which queue pairs get a copy of a message.

RoCE: switches snoop IGMP, so a message goes to the ports that announced themselves (`igmp`). InfiniBand:
switches have an entry for each MLID, made from the SA's members, send-only ones included; a switch without an
entry drops (`forwarding`). On a port, every queue pair that is attached to the group gets a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from mcast.api import Destination
from mcast.backends.model.port import Port
from mcast.backends.model.qp import Qp
from mcast.backends.model.queue_pairs import QueuePairs
from mcast.backends.sim.core.receivers import Receivers
from mcast.backends.sim.core.topology import Topology
from mcast.wire.addresses import Gid

MembersOf = Callable[[Port, Gid, int], Sequence[Port]]
"""Sending port, group, MLID -> the ports that the switches send a message to."""


class Switching:
    """Finds the queue pairs for a port and a destination.

    The answer is cached in `Receivers` until something changes.
    """

    def __init__(
        self, members: MembersOf, topology: Topology, queue_pairs: QueuePairs, receivers: Receivers
    ) -> None:
        self._members, self._topology = members, topology
        self._queue_pairs, self._receivers = queue_pairs, receivers

    def targets(self, source: Port, to: Destination) -> Sequence[Qp]:
        """The QPs that get a copy of a message from that port."""
        if not to.gid.is_multicast:
            qp = self._queue_pairs.find(to.qp_num)
            if qp is None or qp.device_gone or to.gid not in qp.port.gids.values():
                return []
            if source.is_infiniband and to.dlid != qp.port.lid:  # another's, or an old one (SA-SM-8)
                return []
            return [qp] if self._topology.reaches(source, qp.port) else []
        known = self._receivers.known.setdefault(to.dlid if source.is_infiniband else to.gid, {})
        key = (source.index, to.gid)
        targets = known.get(key)
        if targets is None:
            targets = known[key] = list(self._attached(source, to.gid, to.dlid))
        return targets

    def _attached(self, source: Port, group: Gid, mlid: int) -> Iterator[Qp]:
        """The QPs that get a copy, in order of their ports and of their attaching."""
        for port in sorted(self._members(source, group, mlid), key=attrgetter("index")):
            for qp in self._queue_pairs.attached(port).get(group, ()):
                if not qp.device_gone and (not port.is_infiniband or qp.attached[group] == mlid):
                    yield qp
