"""A request of a port's SA client: through the rules to the SA, and the answer back, in the fabric's time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mcast.backends.sim.clock import NS
from mcast.backends.sim.faults import Delay, Drop, Refuse, SaRequest, SaVerdict
from mcast.backends.sim.sa import SaReply
from mcast.backends.sim.trace import SaAnswered, SaAsked
from mcast.mcmember import McMemberRecord, SaMethod

if TYPE_CHECKING:
    from mcast.backends.sim.fabric import Fabric
    from mcast.backends.sim.port import Port

SA_LATENCY_NS = 100_000
SA_TIMEOUT_NS = 3 * NS
"""An answer takes about 0.1 ms; without one the kernel's client gives up after 3 s (facts: SA)."""


class SaExchange:
    """One request; `answered(reply)` is called once, with None when the SA stays silent."""

    __slots__ = ("answered", "fabric", "mask", "method", "number", "port", "record", "verdict", "wait")

    def __init__(
        self,
        fabric: Fabric,
        port: Port,
        method: SaMethod,
        mask: int,
        record: McMemberRecord,
        answered: Callable[[SaReply | None], None],
    ) -> None:
        self.fabric, self.port, self.method, self.mask = fabric, port, method, mask
        self.record, self.answered = record, answered
        self.wait = SA_LATENCY_NS
        self.verdict: SaVerdict | None = None
        if fabric.rules.sa_requests:
            request = SaRequest(fabric.clock.now, port.name, method, record)
            self.verdict = fabric.rules.judge_sa_request(request)
            self.wait += self.verdict.ns if isinstance(self.verdict, Delay) else 0
        if fabric.trace is not None:
            self._note_request()
        fabric.clock.call_later(self.wait, self._serve)
        if self.wait >= SA_TIMEOUT_NS:
            fabric.clock.call_later(SA_TIMEOUT_NS, self._give_up)

    def _serve(self) -> None:
        """The request is at the SA; whoever asked may have given up before."""
        fabric, verdict = self.fabric, self.verdict
        reply = None
        if isinstance(verdict, Refuse):
            reply = SaReply(verdict.status)
        elif not isinstance(verdict, Drop) and fabric.sa_hears(self.port):
            reply = fabric.ask_sa(self.port, self.method, self.mask, self.record)
        if self.wait >= SA_TIMEOUT_NS:
            return
        if reply is None:
            fabric.clock.call_later(SA_TIMEOUT_NS - self.wait, self._give_up)
        else:
            self._answer(reply)

    def _give_up(self) -> None:
        self._answer(None)

    def _answer(self, reply: SaReply | None) -> None:
        if self.fabric.trace is not None:
            self._note_answer(reply)
        self.answered(reply)

    def _note_request(self) -> None:
        self.number = self.fabric.number_transaction()
        self.fabric.note(
            SaAsked,
            port=self.port.name,
            lid=self.port.lid,
            tid=self.number,
            method=self.method.name,
            mask=self.mask,
            record=self.record,
        )

    def _note_answer(self, reply: SaReply | None) -> None:
        self.fabric.note(
            SaAnswered,
            port=self.port.name,
            lid=self.port.lid,
            tid=self.number,
            method=self.method.name,
            mask=self.mask,
            status=None if reply is None else reply.status.name,
            record=reply.records[0] if reply is not None and reply.records else None,
        )
