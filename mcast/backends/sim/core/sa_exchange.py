"""A request of a port's SA client: through the rules to the SA, and the answer back, in the fabric's time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mcast.backends.sim.clock import NS
from mcast.backends.sim.core.sa import SaReply
from mcast.backends.sim.faults.rules import Delay, Drop, Refuse, SaRequest, SaVerdict
from mcast.backends.sim.trace.events import SaAnswered, SaAsked
from mcast.wire.mcmember import McMemberRecord, SaMethod

if TYPE_CHECKING:
    from mcast.backends.sim.core.fabric import Fabric
    from mcast.backends.sim.core.port import Port

SA_LATENCY_NS = 100_000
SA_TIMEOUT_NS = 3 * NS
"""An answer takes about 0.1 ms (SA-REQUEST-6); without one the kernel gives up after 3 s (SA-SHARE-2)."""

Answered = Callable[[SaReply | None], None]


def ask_sa(
    fabric: Fabric, port: Port, method: SaMethod, mask: int, record: McMemberRecord, answered: Answered
) -> None:
    """Send a request; `answered(reply)` is called once, with None when the SA stays silent."""
    wait, verdict = SA_LATENCY_NS, None
    if fabric.rules.sa_requests:
        verdict = fabric.rules.judge_sa_request(SaRequest(fabric.clock.now, port.name, method, record))
        wait += verdict.ns if isinstance(verdict, Delay) else 0
    if fabric.trace is not None:
        answered = _noted(fabric, port, method, mask, record, answered)
    serve = partial(_serve, fabric, port, method, mask, record, answered, wait, verdict)
    fabric.clock.call_later(wait, serve)
    if wait >= SA_TIMEOUT_NS:
        fabric.clock.call_later(SA_TIMEOUT_NS, partial(answered, None))


def _serve(
    fabric: Fabric,
    port: Port,
    method: SaMethod,
    mask: int,
    record: McMemberRecord,
    answered: Answered,
    wait: int,
    verdict: SaVerdict | None,
) -> None:
    """The request is at the SA; whoever asked may have given up before."""
    reply = None
    if verdict is not None and isinstance(verdict, Refuse | Drop):
        reply = SaReply(verdict.status) if isinstance(verdict, Refuse) else None
    elif fabric.sa is not None and fabric.sa_hears(port):
        reply = fabric.sa.handle(port.guid, method, mask, record)
        fabric.tables_changed()
    if wait >= SA_TIMEOUT_NS:
        return
    if reply is None:
        fabric.clock.call_later(SA_TIMEOUT_NS - wait, partial(answered, None))
    else:
        answered(reply)


def _noted(
    fabric: Fabric, port: Port, method: SaMethod, mask: int, record: McMemberRecord, answered: Answered
) -> Answered:
    """Record the request in the trace; what is returned records the answer as well."""
    name, tid, what = port.name, fabric.number_transaction(), method.name
    fabric.note(SaAsked, port=name, lid=port.lid, tid=tid, method=what, mask=mask, record=record)

    def noted(reply: SaReply | None) -> None:
        fabric.note(
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
