"""The queue pairs of a provider, and the attach tables of its devices."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from mcast.api import PortEvent, QpInit, QpState, QpType
from mcast.backends.model.log import Attach, Detach, Log, NoLog
from mcast.backends.model.port import Port
from mcast.backends.model.qp import Qp
from mcast.wire.addresses import Gid
from mcast.wire.mcmember import MLID_FIRST, MLID_LAST

_UD = QpType.UD
Attached = dict[Gid, tuple[Qp, ...]]
"""Group -> its queue pairs on a port, in order of attaching. A queue pair knows its MLID."""


class Routes(Protocol):
    """Cache of results derived from the attach tables, such as the receivers of groups."""

    def forget(self, route: int | Gid) -> None:
        """Forget what is known of the group, or on InfiniBand of the MLID."""

    def changed(self) -> None:
        """Forget what depends on no group."""


class NoRoutes:
    """A provider without such a cache."""

    def forget(self, route: int | Gid) -> None:
        """Do nothing."""

    def changed(self) -> None:
        """Do nothing."""


class QueuePairs:
    """All QPs by number; and which of them are attached to a group on a port."""

    def __init__(self, ports: Sequence[Port], routes: Routes | None = None, log: Log | None = None) -> None:
        self._routes: Routes = NoRoutes() if routes is None else routes
        self._log: Log = NoLog() if log is None else log
        self._attached: list[Attached] = [{} for _ in ports]
        self._by_number: dict[int, Qp] = {}
        self._next = 16

    def __iter__(self) -> Iterator[Qp]:
        """All of them, in order of their numbers; they may be destroyed meanwhile."""
        return iter(tuple(self._by_number.values()))

    def find(self, number: int) -> Qp | None:
        """The QP with that number."""
        return self._by_number.get(number)

    def create(self, port: Port, init: QpInit, qkey: int, pkey_index: int) -> Qp:
        """Make a queue pair with a number of its own, in RESET."""
        number = self._new_number(port)
        qp = self._by_number[number] = Qp(port, number, init, qkey, pkey_index)
        return qp

    def _new_number(self, port: Port) -> int:
        self._next += 1
        return self._next - 1

    def destroy(self, qp: Qp) -> None:
        """Detach the queue pair from everything and forget it."""
        for gid, lid in list(qp.attached.items()):
            self.detach(qp, gid, lid)
        qp.modify(QpState.RESET)
        qp.alone = ()  # it names the QP itself, and would keep it
        del self._by_number[qp.number]
        self._routes.changed()

    def clear(self) -> None:
        """Forget all queue pairs and attachments."""
        self._by_number.clear()
        for table in self._attached:
            table.clear()

    def forget(self, qp: Qp) -> None:
        """Forget a queue pair, whatever state an interrupted change has left the tables in."""
        self._by_number.pop(qp.number, None)
        for gid, members in list(self._attached[qp.port.index].items()):
            if others := tuple(member for member in members if member is not qp):
                self._attached[qp.port.index][gid] = others
            else:
                del self._attached[qp.port.index][gid]
        self._routes.changed()

    def notify_port(self, port: Port, event: PortEvent) -> None:
        """Tell every queue pair of the port about an event of the port."""
        for qp in self:
            if qp.port is port and not qp.device_gone:
                qp.on_port_event(event)

    # --- attachments ---------------------------------------------------------------------

    def attached(self, port: Port) -> Mapping[Gid, tuple[Qp, ...]]:
        """The attach table of the port's device."""
        return self._attached[port.index]

    def attach(self, qp: Qp, gid: Gid, lid: int) -> int:
        """ibv_attach_mcast in the kernel (SA-ATTACH-1, SA-ATTACH-2, K-ATTACH-9); the errno."""
        port = qp.port
        result = self._refuses(qp, gid, lid)
        if not result and gid not in qp.attached:
            table, limits = self._attached[port.index], port.limits
            members = table.get(gid, ())
            if (not members and len(table) >= limits.groups) or len(members) >= limits.qps_per_group:
                result = errno.ENOMEM
            else:
                qp.attached[gid] = (
                    lid  # first, because a send in between looks up here whatever it finds in the table
                )
                table[gid] = (*members, qp) if members else qp.alone
        self._routes.forget(lid if port.is_infiniband else gid)
        if self._log.is_enabled:
            self._log.note(Attach, port=port.name, qp=qp.number, group=gid, lid=lid, errno=result)
        return result

    def detach(self, qp: Qp, gid: Gid, lid: int) -> int:
        """ibv_detach_mcast, with the pair of the attach (DT-3); return the errno."""
        port, result = qp.port, 0
        if qp.attached.get(gid) != lid:
            result = self._refuses(qp, gid, lid) or errno.EINVAL
        else:
            table = self._attached[port.index]
            if len(members := table[gid]) > 1:
                table[gid] = tuple(member for member in members if member is not qp)
            else:
                del table[gid]
            del qp.attached[gid]
        self._routes.forget(lid if port.is_infiniband else gid)
        if self._log.is_enabled:
            self._log.note(Detach, port=port.name, qp=qp.number, group=gid, lid=lid, errno=result)
        return result

    def _refuses(self, qp: Qp, gid: Gid, lid: int) -> int:
        if not qp.port.multicast:
            return errno.ENOSYS
        if qp.type is not _UD or not gid.is_multicast:
            return errno.EINVAL
        if qp.port.is_infiniband and not MLID_FIRST <= lid <= MLID_LAST:
            return errno.EINVAL
        return 0
