"""Messages between a queue pair and its sockets.

Messages wait at the sockets until a call looks there. It moves all of them to receives, and drops those for
which none is free, as a device does the moment that they come. What decides is how many receives are free
between two calls, so a call that frees some looks at the sockets first, where none was free.
"""

from __future__ import annotations

import logging
import mmap
import socket
from collections.abc import Callable
from functools import partial
from ipaddress import IPv4Address
from time import monotonic

from mcast.api import Batch, Leases, QpInit, QpState, WcStatus
from mcast.backends.model.qp import RECEIVING, Qp
from mcast.backends.net.readiness import Readiness
from mcast.backends.udp import sockets
from mcast.backends.udp._native import Ring
from mcast.backends.udp.batch import UdpBatch
from mcast.backends.udp.host import UdpPort
from mcast.wire.addresses import Gid
from mcast.wire.packets import ROCE_UDP_PORT

logger: logging.Logger = logging.getLogger("mcast")

FATES = (
    "delivered",
    "malformed",
    "icrc_errors",
    "foreign",
    "pkey_violations",
    "qkey_violations",
    "oversized",
    "too_long",
    "own_blocked",
    "no_receive",
)
"""The names of `enum fate` in csrc/ring.h, in its order."""
OVERFLOW = "overflow"
"""The counter of datagrams that found a socket's buffer full."""
MIN_RUN_DEPTH = 64
"""Receives from which on a queue pair takes runs of messages whole. With less, a run may have more messages
than there are receives, and the kernel would count it as one drop."""
_LINE = 64
_MANY = 32
"""Number of messages at once that may be the rest of more."""


class DataPath:
    """The ring, sockets and leases of a queue pair. All is done under the guard of the backend."""

    def __init__(
        self, core: Qp, port: UdpPort, init: QpInit, own: socket.socket, address: IPv4Address
    ) -> None:
        self.core: Qp = core
        self.port: UdpPort = port
        self.own: socket.socket = own
        self.own_port: int = core.number >> 8
        self.own_sockname: tuple[Gid, int] = Gid(address), core.number
        self.ring: Ring = Ring(int(address), core.number, core.qkey, core.pkey, init.block_loopback)
        self.groups: sockets.Memberships = sockets.Memberships(
            port.interface_index, sockets.open_group, self._watch
        )
        self.readiness: Readiness = Readiness(self._has_something)
        self.is_closed: bool = False
        self.opened: float = monotonic()
        self.forget_aim: Callable[[], object] = lambda: None
        """Called when the port has changed: what C knows of a destination may be wrong."""
        self.leases: Leases = Leases()
        self._first = init.max_recv_wr, core.room
        self._overflow = self._warned = 0
        self._has_room = True
        """True if the kernel's buffer is as large as the depth of the receive queue asks for."""
        self.post_default()
        self._watch(own, is_group=False)
        sockets.send_by(own, address, port.interface_index)

    def _watch(self, one: socket.socket, is_group: bool = True) -> None:
        depth, room = self._first
        self._has_room = sockets.make_room(one, depth, room)
        if depth >= MIN_RUN_DEPTH:
            sockets.take_runs(one)
        self.ring.watch(one.fileno(), ROCE_UDP_PORT if is_group else self.own_port, is_group)
        self.readiness.watch(one.fileno())

    def _has_something(self) -> bool:
        return (
            bool(self.ring.queued) or self.core.error is not None or self.core.port_changed or self.is_closed
        )

    # --- receives ------------------------------------------------------------------------

    def post(self, memory: mmap.mmap | memoryview, depth: int, stride: int, room: int) -> None:
        """Replace all receives by others; what is leased now gives nothing back."""
        self.ring.post(memory, depth, stride, room)
        self.memory: mmap.mmap | memoryview = memory
        self.depth: int = depth
        self.leases = Leases(self.leases.on_release)

    def post_default(self) -> None:
        """Post the receives that the queue pair was made with."""
        depth, room = self._first
        stride = -(-max(room, 1) // _LINE) * _LINE
        self.post(
            mmap.mmap(-1, depth * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), depth, stride, room
        )

    def pump(self) -> None:
        """Move what has come to receives, or drop it."""
        ring = self.ring
        ring.mtu = self.port.mtu
        if ring.receive(self.core.state in RECEIVING) >= _MANY:
            self.check_overflow()
        if ring.is_failed and self.core.error is None:
            self.core.fail(WcStatus.LOC_QP_OP_ERR)

    def reclaim(self) -> None:
        """Post the receives of batches that have ended."""
        if self.leases.ended:
            if not self.ring.free:
                self.pump()
            self.leases.reclaim()

    def take(self, most: int) -> Batch | None:
        """The first messages, as a batch; None if there are none."""
        self.reclaim()
        if self.ring.queued < most:
            self.pump()
        if not self.ring.queued:
            return None
        return self.leased(*self.ring.take(most))

    def leased(self, records: bytes, slots: bytes) -> Batch:
        """Return messages of these receives as a batch, which gives them back when it ends."""
        return UdpBatch(
            records, self.memory, self.own_sockname, self.leases, partial(self.ring.give_back, slots)
        )

    def drop_queue(self) -> None:
        """Drop and count what nobody has received."""
        self.core.dropped_reset += self.ring.drop()

    def modify(self, state: QpState) -> int:
        """Take a step of the state machine; return the errno.

        Messages that arrived before are received, or dropped, in the state of before.
        """
        self.pump()
        failed = self.core.modify(state)
        if not failed and state is QpState.RESET:
            self.drop_queue()
        return failed

    # --- groups --------------------------------------------------------------------------

    def attach(self, group: IPv4Address, is_member: bool) -> None:
        """Take the group's messages, from when the port is a member."""
        if is_member:
            self.groups.join(group)
        self.ring.attach(int(group))

    def detach(self, group: IPv4Address) -> None:
        """Take them no longer; those that have come stay readable (LV-3)."""
        self.pump()
        self.groups.leave(group)
        self.ring.detach(int(group))

    # --- counters ------------------------------------------------------------------------

    def check_overflow(self) -> None:
        """Count the datagrams that found a socket's buffer full, and say once how to have more room."""
        self._overflow = self.ring.overflow()
        if self._overflow and not self._warned:
            try:
                has = sockets.max_buffer()
            except OSError:  # no descriptor is left to ask with: the next look says it
                return
            self._warned = self._overflow
            depth, room = self._first
            fix = f"it has room for {depth} messages: give a larger receive_depth"
            if not self._has_room:
                fix = (
                    f"net.core.rmem_max is {has} bytes; for room for its {depth} receives, run on the host: "
                    f"sysctl -w net.core.rmem_max={depth * (room + 1024)}, and open the endpoint again"
                )
            logger.warning(
                "queue pair %#x lost %d messages or more because the kernel's buffer of its socket was full: "
                "%s; or read faster, or send slower",
                self.core.number,
                self._overflow,
                fix,
            )

    def counts(self) -> tuple[int, int, int, int, dict[str, int]]:
        """Received, free, fewest free, how often none was; and by name what became of datagrams."""
        received, free, low, empty, fates = self.ring.counts()
        by_name = dict(zip(FATES, fates, strict=True))
        by_name[OVERFLOW] = self._overflow
        return received, free, low, empty, by_name

    def close(self) -> None:
        """Close the sockets. The memory lives as long as a batch has it. Idempotent."""
        self.is_closed = True
        self.readiness.show()
        self.ring.watch(-1, 0, False)
        self.groups.close()
        self.own.close()
        self.readiness.close()
