"""Transport of SA requests: from a port's SA client through the fault rules to the SA, and the reply back.

A request arrives after SA_LATENCY_NS and any delay of a rule; the reply takes no time of its own. `answered`
is called exactly once: with the reply, or with None, SA_TIMEOUT_NS after the request, if the SA stays silent
or the request arrives later than that. A late request still takes effect at the SA.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

from mcast.backends.model.port import Port
from mcast.backends.model.times import NS, Scheduler
from mcast.backends.sim.core.log import Log
from mcast.backends.sim.core.sa import SaReply
from mcast.backends.sim.faults.rules import Delay, Drop, Refuse, Rules, SaRequest, SaVerdict
from mcast.backends.sim.trace.events import SaAnswered, SaAsked
from mcast.wire.mcmember import McMemberRecord, SaMethod

SA_LATENCY_NS = 100_000
SA_TIMEOUT_NS = 3 * NS
"""An answer takes about 0.1 ms (SA-REQUEST-6); without one the kernel gives up after 3 s (SA-SHARE-2)."""

Answered = Callable[[SaReply | None], None]
Serve = Callable[[Port, SaMethod, int, McMemberRecord], SaReply | None]
"""Function that handles a request of a port at the SA; it returns None if the SA cannot be reached."""


class SaExchange:
    """Carries requests to `serve`, which is called when a request has arrived there."""

    __slots__ = ("_clock", "_log", "_rules", "_serve", "_transactions")

    def __init__(self, serve: Serve, rules: Rules, clock: Scheduler, log: Log) -> None:
        self._serve, self._rules, self._clock, self._log = serve, rules, clock, log
        self._transactions = count(1)

    def ask(
        self, port: Port, method: SaMethod, mask: int, record: McMemberRecord, answered: Answered
    ) -> None:
        """Send a request; `answered(reply)` is called once, with None when the SA stays silent."""
        wait, verdict = SA_LATENCY_NS, None
        if self._rules.sa_requests:
            verdict = self._rules.judge_sa_request(SaRequest(self._clock.now, port.name, method, record))
            wait += verdict.ns if isinstance(verdict, Delay) else 0
        if self._log.is_enabled:
            answered = self._noted(port, method, mask, record, answered)
        arrive = partial(self._arrive, port, method, mask, record, answered, wait, verdict)
        self._clock.call_later(wait, arrive)
        if wait >= SA_TIMEOUT_NS:
            self._clock.call_later(SA_TIMEOUT_NS, partial(answered, None))

    def _arrive(
        self,
        port: Port,
        method: SaMethod,
        mask: int,
        record: McMemberRecord,
        answered: Answered,
        wait: int,
        verdict: SaVerdict | None,
    ) -> None:
        """The request is at the SA. The port that asked may have given up before."""
        if verdict is not None and isinstance(verdict, Refuse | Drop):
            reply = SaReply(verdict.status) if isinstance(verdict, Refuse) else None
        else:
            reply = self._serve(port, method, mask, record)
        if wait >= SA_TIMEOUT_NS:
            return
        if reply is None:
            self._clock.call_later(SA_TIMEOUT_NS - wait, partial(answered, None))
        else:
            answered(reply)

    def _noted(
        self, port: Port, method: SaMethod, mask: int, record: McMemberRecord, answered: Answered
    ) -> Answered:
        """Record the request in the trace; return a function that records the answer as well."""
        name, tid, what, note = port.name, next(self._transactions), method.name, self._log.note
        note(SaAsked, port=name, lid=port.lid, tid=tid, method=what, mask=mask, record=record)

        def noted(reply: SaReply | None) -> None:
            note(
                SaAnswered,
                port=name,
                lid=port.lid,
                tid=tid,
                method=what,
                mask=mask,
                status=None if reply is None else reply.status.name,
                record=reply.records[0] if reply is not None and reply.records else None,
            )
            answered(reply)

        return noted
