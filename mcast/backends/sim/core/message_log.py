"""Trace events of messages: sent, delivered, or lost and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter

from mcast.api import Destination
from mcast.backends.model.port import Port
from mcast.backends.model.qp import Burst, Qp
from mcast.backends.model.queue_pairs import QueuePairs
from mcast.backends.sim.core.log import Log
from mcast.backends.sim.core.switching import Switching
from mcast.backends.sim.core.topology import Topology
from mcast.backends.sim.trace.events import Deliver, MessagesLost, Send, Unsent

FATES: tuple[tuple[Callable[[Qp], int], str], ...] = (
    (attrgetter("received"), ""),
    (attrgetter("no_receive"), "no receive is free"),
    (attrgetter("too_long"), "a receive has too little room"),
    (attrgetter("wrong_qkey"), "the Q_Key differs"),
    (attrgetter("port.pkey_violations"), "the P_Key differs"),
    (attrgetter("oversized"), "it is larger than the port's MTU"),
)
"""The counter that moves when a queue pair is given a message -> the reason of a loss.

"" if the message was not lost.
"""


class MessageLog:
    """Notes in the trace of a fabric; asked for nothing where there is none."""

    def __init__(self, log: Log, topology: Topology, queue_pairs: QueuePairs, switching: Switching) -> None:
        self._log, self._topology = log, topology
        self._queue_pairs, self._switching = queue_pairs, switching

    def sent(self, qp: Qp, to: Destination, burst: Burst) -> None:
        """Record the burst, and which attached queue pairs it will not reach."""
        self._log.note(
            Send,
            port=qp.port.name,
            qp=qp.number,
            first=burst.first,
            psn=qp.sent & 0xFFFFFF,
            source=burst.header.source,
            group=to.gid,
            dest_qp=to.qp_num,
            slid=burst.header.slid,
            dlid=to.dlid,
            sl=to.sl,
            qkey=to.qkey,
            pkey=burst.header.pkey,
            hop_limit=to.hop_limit,
            traffic_class=to.traffic_class,
            flow_label=to.flow_label,
            imm=burst.imm,
            payloads=tuple(burst.payloads),
        )
        reached = set(self._switching.targets(qp.port, to))
        for port in self._topology.ports:
            for member in self._queue_pairs.attached(port).get(to.gid, ()):
                if member not in reached:
                    self.lost(member, burst, 0, len(burst.payloads), self._why_unreached(qp.port, member, to))

    def _why_unreached(self, source: Port, member: Qp, to: Destination) -> str:
        target, lid, dlid = member.port, member.attached[to.gid], to.dlid
        if member.device_gone:
            return "the device is gone"
        if not target.up:
            return "the link is down"
        if self._topology.are_separated(source, target):
            return "a switch is cut off"
        if target.is_infiniband and lid != dlid:
            return f"it is attached with MLID {lid:#x}, not {dlid:#x}"
        return "the fabric does not deliver the group to the port"

    def unsent(self, qp: Qp, to: Destination, payloads: Sequence[bytes], reason: str) -> None:
        """Messages that the sender's device did not put on the wire."""
        self._log.note(
            Unsent, port=qp.port.name, qp=qp.number, group=to.gid, count=len(payloads), reason=reason
        )

    def lost(self, qp: Qp, burst: Burst, index: int, count: int, reason: str) -> None:
        """Record that `count` messages of the burst do not reach the queue pair."""
        self._log.note(
            MessagesLost,
            port=qp.port.name,
            qp=qp.number,
            group=burst.header.group,
            first=burst.first + index,
            count=count,
            reason=reason,
        )

    def deliver(self, qp: Qp, burst: Burst, start: int, stop: int) -> None:
        """Give messages start..stop to the queue pair, and record their fates.

        A run of messages with the same fate is one line.
        """
        fates = []
        for index in range(start, stop):
            before = [count(qp) for count, _ in FATES]
            qp.deliver(burst.part(index, index + 1), 0, 1)
            moved = (fate for (count, fate), was in zip(FATES, before, strict=True) if count(qp) != was)
            fates.append((index, next(moved, f"the QP is in {qp.state.name}")))
        for fate, run in groupby(fates, key=itemgetter(1)):
            indices = [index for index, _ in run]
            if fate:
                self.lost(qp, burst, indices[0], len(indices), fate)
            else:
                self._log.note(
                    Deliver,
                    port=qp.port.name,
                    qp=qp.number,
                    group=burst.header.group,
                    first=burst.first + indices[0],
                    count=len(indices),
                )
