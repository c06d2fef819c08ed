"""Network below the connection manager: the host's interfaces, its IGMP, and the queue pairs of a backend."""

from __future__ import annotations

import itertools
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address
from typing import NoReturn

from mcast.api import Gid, PortEvent, QpInit
from mcast.backends.model.log import Log, NoLog
from mcast.backends.model.port import Port
from mcast.backends.model.qp import Qp
from mcast.backends.model.queue_pairs import QueuePairs
from mcast.backends.model.times import AtOnce, Scheduler
from mcast.backends.udp import _native, sockets
from mcast.backends.udp.availability import LOOPBACK_DOWN
from mcast.backends.udp.datapath import DataPath
from mcast.backends.udp.host import Change, Host, UdpPort

logger: logging.Logger = logging.getLogger("mcast")


class UdpQueuePairs(QueuePairs):
    """Queue pairs, each with a data path; its own socket gives it its number."""

    def __init__(self, is_member: Callable[[Port, Gid], bool]) -> None:
        super().__init__(())
        self._is_member = is_member
        self._number = 0
        self.paths: dict[Qp, DataPath] = {}
        self.counted: dict[str, Counter[str]] = {}
        """Name of a device -> what queue pairs have counted that are gone."""
        self.source: IPv4Address | None = None
        """The address that the next queue pair sends from."""
        self.on_new_source: Callable[[IPv4Address], None] = lambda address: None
        """Called with the address of each new queue pair."""

    def create(self, port: Port, init: QpInit, qkey: int, pkey_index: int) -> Qp:
        assert isinstance(port, UdpPort)
        assert self.source is not None
        while len(self._attached) <= port.index:
            self._attached.append({})
        self.on_new_source(self.source)
        own, self._number = sockets.open_own(self.source, self._by_number)
        try:
            qp = super().create(port, init, qkey, pkey_index)
            try:
                self.paths[qp] = DataPath(qp, port, init, own, self.source)
            except BaseException:
                self.forget(qp)
                raise
        except BaseException:
            own.close()
            raise
        return qp

    def _new_number(self, port: Port) -> int:
        return self._number

    def attach(self, qp: Qp, gid: Gid, lid: int) -> int:
        failed = super().attach(qp, gid, lid)
        if not failed and (group := gid.ipv4) is not None:
            try:
                self.paths[qp].attach(group, self._is_member(qp.port, gid))
            except OSError as error:
                super().detach(qp, gid, lid)
                return error.errno or 1
        return failed

    def detach(self, qp: Qp, gid: Gid, lid: int) -> int:
        failed = super().detach(qp, gid, lid)
        if not failed and (group := gid.ipv4) is not None:
            self.paths[qp].detach(group)
        return failed

    def destroy(self, qp: Qp) -> None:
        super().destroy(qp)
        self.paths[qp].check_overflow()
        self._end(qp)

    def forget(self, qp: Qp) -> None:
        super().forget(qp)
        self._end(qp)

    def _end(self, qp: Qp) -> None:
        path = self.paths.get(qp)
        if path is not None:
            path.close()
            counted = self.counted.setdefault(qp.port.name, Counter())
            counted.update(path.counts()[4])
            del self.paths[qp]  # last, so that a close which was interrupted goes on

    def clear(self) -> None:
        """Close all sockets, whatever state an interrupted change has left."""
        super().clear()
        for qp in list(self.paths):
            self._end(qp)


class UdpIgmp:
    """The memberships of ports: how many full members each has in a group. The kernel does IGMP."""

    def __init__(self) -> None:
        self._members: dict[int, Counter[Gid]] = {}
        self._sockets: dict[int, sockets.Memberships] = {}
        self.queue_pairs: UdpQueuePairs | None = None

    def is_member(self, port: Port, group: Gid) -> bool:
        """Return True if an id of this backend is a full member on the port."""
        members = self._members.get(port.index)
        return members is not None and bool(members[group])

    def join(self, port: Port, group: Gid) -> int:
        assert isinstance(port, UdpPort)
        address = group.ipv4
        assert address is not None
        members = self._members.setdefault(port.index, Counter())
        if not members[group] and group.is_multicast:
            try:
                self._of(port).join(address)
                for path in self._attached(port, group):
                    path.groups.join(address)
            except OSError as error:
                return error.errno or 1
        members[group] += 1
        return 0

    def leave(self, port: Port, group: Gid) -> None:
        members, address = self._members[port.index], group.ipv4
        members[group] -= 1
        if not members[group]:
            del members[group]
            if address is not None and (found := self._sockets.get(port.index)) is not None:
                for path in self._attached(port, group):
                    path.pump()
                    path.groups.leave(address)
                found.leave(address)

    def _attached(self, port: Port, group: Gid) -> Iterator[DataPath]:
        assert self.queue_pairs is not None
        paths = self.queue_pairs.paths
        return (path for path in list(paths.values()) if path.port is port and group in path.core.attached)

    def _of(self, port: UdpPort) -> sockets.Memberships:
        found = self._sockets.get(port.index)
        if found is None:
            found = sockets.Memberships(port.interface_index, sockets.open_member, lambda one: None)
            self._sockets[port.index] = found
        return found

    def close(self) -> None:
        """Leave all groups."""
        for found in self._sockets.values():
            found.close()
        self._members.clear()


class UdpNetwork:
    """`Network` of the connection manager, on the host itself."""

    refuses_block_loopback = False
    sa_capabilities = 0

    def __init__(self) -> None:
        self.clock: Scheduler = AtOnce()
        self.log: Log = NoLog()
        self.hosts: Host = Host()
        self.id_numbers: Iterator[int] = itertools.count(1)
        self.igmp: UdpIgmp = UdpIgmp()
        self.queue_pairs: UdpQueuePairs = UdpQueuePairs(self.igmp.is_member)
        self.igmp.queue_pairs = self.queue_pairs
        self.roce_sockets: dict[IPv4Address, socket.socket] = {}
        self.forward_counts: Counter[str] = Counter()
        self._warned = False

    def sa_client(self, port: Port) -> NoReturn:
        raise NotImplementedError("an Ethernet port has no SA")

    def poll_changes(self) -> None:
        """Take notice of what the kernel reports of its interfaces."""
        for change in self.hosts.poll():
            self._tell(change)

    def forward_unicast(self, roce_socket: socket.socket, address: IPv4Address) -> None:
        """Pass unicast of port 4791 on to its queue pairs' own sockets, over loopback.

        Where loopback is down the kernel drops it, and reports success all the same.
        """
        passed, lost = _native.forward(roce_socket.fileno(), int(address))
        if not self.hosts.loopback_up:
            passed, lost = 0, passed + lost
            if not self._warned:
                self._warned = True
                logger.warning("%s: ip link set lo up", LOOPBACK_DOWN)
        self.forward_counts.update(forwarded=passed, not_forwarded=lost)

    def _tell(self, change: Change) -> None:
        port, tell = change.port, self.queue_pairs.notify_port
        for path in self.queue_pairs.paths.values():
            path.forget_aim()
        if change.gone:
            for one in list(port.ids):
                one.device_removed()
        elif change.gids:
            tell(port, PortEvent.GID_CHANGE)
        for up in change.links:
            tell(port, PortEvent.ACTIVE if up else PortEvent.ERR)

    def close(self) -> None:
        """Close all sockets."""
        self.queue_pairs.clear()
        self.igmp.close()
        for roce_socket in self.roce_sockets.values():
            roce_socket.close()
        self.roce_sockets.clear()
        self.hosts.close()
