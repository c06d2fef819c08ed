"""Apply the faults for single messages (lose, delay, corrupt, duplicate), and give queue pairs their copies.

Which ports get a copy is decided by the network's switching.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from mcast.api import Destination, QpState, WcStatus
from mcast.backends.model.port import Port
from mcast.backends.model.qp import Burst, Header, Path, Qp, make_burst
from mcast.backends.model.times import Scheduler
from mcast.backends.sim.core.message_log import MessageLog
from mcast.backends.sim.core.receivers import Receivers
from mcast.backends.sim.core.reorder import HeldMessage, ReorderQueue
from mcast.backends.sim.core.switching import Switching
from mcast.backends.sim.faults.rules import (
    HOLD_NS,
    CorruptQkey,
    Delay,
    Delivery,
    Drop,
    Duplicate,
    Reorder,
    Rules,
)
from mcast.wire.probe import is_probe

_RTS = QpState.RTS


class MessageDelivery:
    """Carries the messages of queue pairs.

    `honours_block_loopback` is True if the devices implement QpInit.block_loopback, `is_traced` if each
    message is recorded in a trace.
    """

    def __init__(
        self,
        switching: Switching,
        receivers: Receivers,
        rules: Rules,
        clock: Scheduler,
        log: MessageLog,
        honours_block_loopback: bool,
        is_traced: bool,
    ) -> None:
        self._switching, self._receivers, self._rules = switching, receivers, rules
        self._clock, self._log, self._honours_block_loopback = clock, log, honours_block_loopback
        self.is_traced = is_traced
        self._held: dict[Qp, ReorderQueue] = {}
        self._sent = 0

    def clear(self) -> None:
        """Forget the messages that are held back."""
        self._held.clear()

    def send(
        self,
        qp: Qp,
        to: Destination,
        payloads: Sequence[bytes],
        imm: int | None,
        longest: int | None = None,
    ) -> int:
        """Post the messages and carry them out; return the errno of the post.

        `longest`: length of the longest, where that is known.

        A failure of the device itself puts the QP into ERR, and the post returns 0 (K-DATA-16).
        """
        path = qp.path
        known = path is not None and path.to is to and path.version == self._receivers.version
        if not known and (refused := qp.address_handle(to)):
            return refused
        if qp.state is not _RTS:
            return 0 if qp.state is QpState.ERR else errno.EINVAL
        if not known:
            path = qp.path = self._path(qp, to)
        count = len(payloads)
        if path is not None:
            if longest is None:
                longest = len(payloads[0]) if count == 1 else max(map(len, payloads), default=0)
            self._carry(qp, path, make_burst((payloads, longest, path.header, imm, self._sent, None)))
        elif qp.port.is_infiniband and not qp.device_gone:
            self._log.unsent(qp, to, payloads, "the sender's link is down")
        else:
            qp.fail(WcStatus.LOC_QP_OP_ERR)
            self._log.unsent(qp, to, payloads, WcStatus.LOC_QP_OP_ERR.name)
            return 0
        qp.sent += count
        self._sent += count
        return 0

    def _path(self, qp: Qp, to: Destination) -> Path | None:
        """The path of a message; None if the device cannot send it.

        `Receivers.version` changes with everything that the path depends on.
        """
        port, source = qp.port, qp.source_of(to)
        if source is None:
            return None
        header = Header(source, qp.number, to.gid, to.dlid, to.qkey, qp.pkey, port.lid)
        targets = self._switching.targets(port, to)
        if qp.blocks_loopback and self._honours_block_loopback and to.gid.is_multicast:
            targets = [target for target in targets if target is not qp]
        return Path(to, self._receivers.version, header, targets, any(target.stamps for target in targets))

    def _carry(self, qp: Qp, path: Path, burst: Burst) -> None:
        """Give the burst to all that the path reaches; faults judge each message for itself."""
        if self._rules.deliveries:
            if self.is_traced:
                self._log.sent(qp, path.to, burst)
            for index in range(len(burst.payloads)):
                one = burst.part(index, index + 1)
                for target in path.targets:
                    self._carry_one(qp.port, one, target)
        elif self.is_traced:
            self._log.sent(qp, path.to, burst)
            for target in path.targets:
                self._deliver(target, burst, 0, len(burst.payloads))
        elif path.stamped:
            for target in path.targets:
                self._deliver(target, burst, 0, len(burst.payloads))
        else:
            for target in path.targets:
                target.deliver(burst, 0, len(burst.payloads))

    def _carry_one(self, port: Port, burst: Burst, qp: Qp) -> None:
        """A burst of one message, which may be kept for a while."""
        probe = is_probe(burst.payloads[0])
        delivery = Delivery(
            self._clock.now,
            burst.header.group,
            port.name,
            qp.port.name,
            burst.header.src_qp,
            qp.number,
            burst.first,
            len(burst.payloads[0]),
            probe,
        )
        verdict = self._rules.judge_delivery(delivery)
        if isinstance(verdict, Drop):
            self._log.lost(qp, burst, 0, 1, "a fault rule dropped it")
        elif isinstance(verdict, Delay):
            self._clock.call_later(verdict.ns, lambda: self._deliver_late(qp, burst))
        elif isinstance(verdict, Reorder):
            held = self._held.setdefault(qp, ReorderQueue()).add(verdict.after, burst)
            self._clock.call_later(HOLD_NS, lambda: self._let_go(qp, held))
        else:
            if isinstance(verdict, CorruptQkey):
                qkey = burst.header.qkey ^ 1 if verdict.qkey is None else verdict.qkey
                burst = burst._replace(header=burst.header._replace(qkey=qkey))
            for _ in range(1 + verdict.copies if isinstance(verdict, Duplicate) else 1):
                self._deliver(qp, burst, 0, 1)
            if not probe:
                self._overtaken(qp)

    def _deliver_late(self, qp: Qp, burst: Burst) -> None:
        """Deliver a delayed message, if the queue pair is still where the message was sent to."""
        group, lid = burst.header.group, qp.attached.get(burst.header.group)
        attached = lid == burst.header.dlid or (lid is not None and not qp.port.is_infiniband)
        if not qp.port.up or qp.device_gone or (group.is_multicast and not attached):
            self._log.lost(qp, burst, 0, 1, "it arrived after the membership had ended")
        else:
            self._deliver(qp, burst, 0, 1)

    def _overtaken(self, qp: Qp) -> None:
        """Count a message that has arrived at the queue pair.

        Messages that are held back wait for that count.
        """
        if (back := self._held.get(qp)) is not None:
            for held in back.pass_one():
                self._let_go(qp, held)

    def _let_go(self, qp: Qp, held: HeldMessage) -> None:
        if held.waits:
            held.waits = False
            back = self._held[qp]
            back.waiting -= 1
            if not back.waiting:
                del self._held[qp]
            self._deliver_late(qp, held.burst)

    def _deliver(self, qp: Qp, burst: Burst, start: int, stop: int) -> None:
        """Messages start..stop arrive."""
        if qp.stamps:
            burst = burst._replace(at=self._clock.now)
        if self.is_traced:
            self._log.deliver(qp, burst, start, stop)
        else:
            qp.deliver(burst, start, stop)
