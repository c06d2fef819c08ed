"""Queue pairs: states, the receive queue and its leases, and the fate of a message that arrives.

Pure: no clock, no lock. A burst is what one send call puts on the wire. Receivers queue slices of it, so a
message costs the same whether one or a thousand queue pairs get it.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from mcast.api import Destination, Leases, PortEvent, QpCounters, QpInit, QpState, QpType, WcStatus
from mcast.backends.model.port import Port
from mcast.wire.addresses import IPV4_MAPPED, Gid
from mcast.wire.partition import matching_pkeys

_S = QpState
STEPS: dict[QpState, set[QpState]] = {
    _S.RESET: {_S.INIT},
    _S.INIT: {_S.INIT, _S.RTR},
    _S.RTR: {_S.RTS},
    _S.RTS: {_S.RTS, _S.SQD},
    _S.SQD: {_S.SQD, _S.RTS},
    _S.SQE: {_S.RTS},
    _S.ERR: set(),
}
"""The UD state machine (IBA vol 1, 10.3.1); RESET and ERR are reached from every state besides."""

MAX_PORT_EVENTS = 64

RECEIVING = frozenset({_S.RTR, _S.RTS, _S.SQD, _S.SQE})


class Header(NamedTuple):
    """Header fields that all messages from a queue pair to one destination share."""

    source: Gid
    src_qp: int
    group: Gid
    dlid: int
    qkey: int
    pkey: int
    slid: int


class Burst(NamedTuple):
    """Messages of one send call; `first` numbers them, `at` is the time of their arrival, if one asks."""

    payloads: Sequence[bytes]
    longest: int
    header: Header
    imm: int | None
    first: int
    at: int | None = None

    def part(self, start: int, stop: int) -> Burst:
        """Some of the messages: a queue pair that keeps these does not keep the others."""
        return self._replace(payloads=self.payloads[start:stop], first=self.first + start)


make_burst: Callable[[tuple[object, ...]], Burst] = partial(tuple.__new__, Burst)
"""A burst of all its fields, in a third of the constructor's time."""


@dataclass(slots=True, eq=False)
class Path:
    """The way of a queue pair's sends to one destination, valid while the routes have this version.

    Each send reads all of it, which takes a tuple with names five times as long.
    """

    to: Destination
    version: int
    header: Header
    targets: Sequence[Qp]
    stamped: bool
    """True if one of the receivers wants to know when a message arrives."""


class Qp:
    """One queue pair on a port. `free` receives are posted, the others hold messages: queued, or leased."""

    __slots__ = (
        "alone",
        "attached",
        "blocks_loopback",
        "depth",
        "dropped_reset",
        "empty",
        "ended",
        "error",
        "free",
        "handles",
        "leases",
        "low_water",
        "matching_pkeys",
        "no_receive",
        "number",
        "on_readable",
        "oversized",
        "path",
        "pkey",
        "pkey_index",
        "port",
        "port_changed",
        "port_events",
        "qkey",
        "queue",
        "received",
        "removals",
        "room",
        "sent",
        "stamps",
        "state",
        "too_long",
        "type",
        "wrong_qkey",
    )

    def __init__(self, port: Port, number: int, init: QpInit, qkey: int, pkey_index: int) -> None:
        self.port: Port = port
        self.number: int = number
        self.type: QpType = init.qp_type
        self.removals: int = port.removals
        self.qkey: int = qkey
        self.pkey_index: int = pkey_index
        self.read_pkey()
        self.state: QpState = _S.RESET
        self.error: WcStatus | None = None
        self.attached: dict[Gid, int] = {}
        self.alone: tuple[Qp, ...] = (self,)  # the QPs of each group that has no other one on the port
        self.handles: set[tuple[Gid, int]] = set()  # (GID, source GID index) with an address handle
        self.depth: int = init.max_recv_wr
        self.free: int = self.depth
        self.low_water: int = self.depth
        self.leases: Leases = Leases()
        self.ended: Sized = self.leases.ended
        self.room: int = port.mtu if init.max_recv_size is None else init.max_recv_size
        self.sent: int = 0
        self.received: int = 0
        self.no_receive: int = 0
        self.too_long: int = 0
        self.wrong_qkey: int = 0
        self.oversized: int = 0
        self.empty: int = 0
        self.dropped_reset: int = 0
        self.blocks_loopback: bool = init.block_loopback
        self.stamps: bool = init.timestamps
        self.path: Path | None = None  # of the last send
        self.on_readable: Callable[[], None] | None = None
        self.port_events: tuple[PortEvent, ...] = ()
        self.port_changed: bool = False  # of the port, since a receive was empty
        self.queue: deque[tuple[Burst, int, int]] = deque()

    @property
    def device_gone(self) -> bool:
        """True if its device was removed. A device that is plugged in again is another one."""
        return self.removals != self.port.removals

    @property
    def readable(self) -> bool:
        """A recv would return at once: with messages, or with the reason of an error."""
        return bool(self.queue) or self.error is not None

    def reclaim(self) -> None:
        """Post the receives of batches that have ended."""
        self.free += self.leases.reclaim()

    @property
    def counters(self) -> QpCounters:
        return QpCounters(
            self.sent,
            self.received,
            self.no_receive,
            self.too_long,
            self.wrong_qkey,
            self.free,
            self.low_water,
            self.empty,
            dropped_mtu=self.oversized,
            dropped_reset=self.dropped_reset,
        )

    def read_pkey(self) -> None:
        """Send with the P_Key at its place in the port's table, and receive messages that match it."""
        table, index = self.port.pkeys, self.pkey_index
        self.pkey: int = table[index] if index < len(table) else 0
        self.matching_pkeys: tuple[int, ...] = matching_pkeys(self.pkey)

    def modify(self, state: QpState) -> int:
        """Take a step of the state machine; the errno."""
        if state not in STEPS[self.state] and state not in (_S.RESET, _S.ERR):
            return errno.EINVAL
        if state is _S.RESET:
            self.error = None
            self._drop_queue()
        elif state is _S.ERR and self.error is None:
            self.fail(WcStatus.WR_FLUSH_ERR)
        self.state = state
        return 0

    def _drop_queue(self) -> None:
        """Drop and count the messages that nobody has received."""
        while self.queue:
            _, start, stop = self.queue.popleft()
            self.free += stop - start
            self.dropped_reset += stop - start

    def fail(self, status: WcStatus) -> None:
        """The device puts the QP into ERR and completes the work request with `status`."""
        self.error = status
        self.state = _S.ERR
        if self.on_readable is not None:
            self.on_readable()

    def on_port_event(self, event: PortEvent) -> None:
        """The port tells of something."""
        self.port_events = (*self.port_events, event)[-MAX_PORT_EVENTS:]
        self.port_changed = True
        if self.on_readable is not None:
            self.on_readable()

    def address_handle(self, to: Destination) -> int:
        """The errno of making an address handle (K-DATA-21). A handle outlives its source GID."""
        if to.port_num != 1 or not to.is_global:
            return errno.EINVAL
        if (to.gid, to.sgid_index) not in self.handles:
            if to.sgid_index not in self.port.gids:
                return errno.ENODATA
            self.handles.add((to.gid, to.sgid_index))
        return 0

    def source_of(self, to: Destination) -> Gid | None:
        """The source GID of messages to that destination; None if the device cannot send them.

        On RoCE it is of the destination's IP version.
        """
        port = self.port
        source = port.gids.get(to.sgid_index)
        if self.device_gone or not port.up or source is None:
            return None
        same_ip = (source[:12] == IPV4_MAPPED) == (to.gid[:12] == IPV4_MAPPED)
        return source if port.is_infiniband or same_ip else None

    def deliver(self, burst: Burst, start: int, stop: int) -> None:
        """Messages start..stop of the burst arrive at the port for this QP."""
        if self.state not in RECEIVING:
            return
        longest = burst.longest
        if longest > self.port.mtu:
            burst, start, stop = self._fitting(burst, start, stop)
            longest = burst.longest
        header = burst.header
        if header.pkey not in self.matching_pkeys:
            self.port.pkey_violations += stop - start
        elif header.qkey != self.qkey:
            self.wrong_qkey += stop - start
            self.port.qkey_violations += stop - start
        elif longest > self.room:
            self._deliver_singly(burst, start, stop)
        else:
            self._accept(burst, start, stop)

    def _fitting(self, burst: Burst, start: int, stop: int) -> tuple[Burst, int, int]:
        """Count the messages that are larger than the port's MTU; return the others, as a burst of their own.

        The port drops them before anything looks at their headers (K-DATA-26).
        """
        fits = [payload for payload in burst.payloads[start:stop] if len(payload) <= self.port.mtu]
        dropped = stop - start - len(fits)
        self.oversized += dropped
        self.port.oversized += dropped
        longest = max(map(len, fits), default=0)
        return burst._replace(payloads=fits, longest=longest), 0, len(fits)

    def is_own(self, header: Header) -> bool:
        """Return True if this QP sent messages with that header."""
        return header.src_qp == self.number and header.source in self.port.gids.values()

    def repost(self, depth: int, room: int) -> int:
        """Replace all receives by `depth` receives of `room` bytes; EBUSY while one holds a message."""
        self.reclaim()
        if self.free != self.depth:
            return errno.EBUSY
        self._post_anew(depth, room)
        return 0

    def repost_default(self, depth: int, room: int) -> None:
        """Do the same at the end of receive memory: what is queued is dropped, what is leased stays there."""
        self._drop_queue()
        self._post_anew(depth, room)

    def _post_anew(self, depth: int, room: int) -> None:
        self.leases = Leases()  # what is leased now gives nothing back
        self.ended = self.leases.ended
        self.depth = self.free = self.low_water = depth
        self.room = room

    def lease(self, limit: int) -> list[tuple[Burst, int, int]]:
        """The first messages, `limit` at the most, as slices of bursts; their receives are leased."""
        taken: list[tuple[Burst, int, int]] = []
        queue = self.queue
        while queue and limit:
            burst, start, stop = first = queue.popleft()
            if stop - start > limit:
                queue.appendleft((burst, start + limit, stop))
                stop = start + limit
                first = burst, start, stop
            taken.append(first)
            limit -= stop - start
        return taken

    def pop_one(self) -> tuple[Burst, int] | None:
        """The first message, as a burst and a place in it. Its receive is posted again."""
        if not self.queue:
            return None
        burst, start, stop = self.queue[0]
        self.free += 1
        if stop - start > 1:
            self.queue[0] = (burst, start + 1, stop)
        else:
            self.queue.popleft()
        return burst, start

    def _accept(self, burst: Burst, start: int, stop: int) -> None:
        if self.ended:
            self.free += self.leases.reclaim()  # as `reclaim`
        fits = stop - start
        if fits > self.free:
            self.no_receive += fits - self.free
            fits = self.free
        if fits:
            self.received += fits
            self.free -= fits
            if self.free < self.low_water:
                self.low_water = self.free
            if not self.free:
                self.empty += 1
            if fits < stop - start:
                burst, start = burst.part(start, start + fits), 0
            self.queue.append((burst, start, start + fits))
            if self.on_readable is not None:
                self.on_readable()

    def _deliver_singly(self, burst: Burst, start: int, stop: int) -> None:
        """Deliver one message after another.

        A message without room in its receive puts the queue pair into ERR (K-DATA-7), so the rest must see
        that.
        """
        for index in range(start, stop):
            size = len(burst.payloads[index])
            if size > self.room:
                self.too_long += 1
                if self.free:
                    self.fail(WcStatus.LOC_QP_OP_ERR)
                    return
            else:
                self._accept(burst.part(index, index + 1), 0, 1)
