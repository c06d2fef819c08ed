"""Scenarios: a run with faults that is written down as a file, and its result.

`load("slow-receiver")`, or `load(Path("my.toml"))`, gives a `Scenario`; `run(scenario)` plays it on a fabric
with virtual time and returns a `ScenarioResult`. The same scenario gives the same result, trace included.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from html import escape
from typing import Any, NamedTuple

from mcast.api import (
    CmEvent,
    CmEventType,
    Destination,
    EventChannel,
    JoinAttrEx,
    McastError,
    QpCounters,
    QpError,
    QpInit,
)
from mcast.backends.model.times import NS
from mcast.backends.sim.backend import SimBackend, SimCmId, SimQueuePair
from mcast.backends.sim.core.port import FabricPort
from mcast.backends.sim.fabric import Fabric
from mcast.backends.sim.scenario import model
from mcast.backends.sim.scenario.faults import begin
from mcast.backends.sim.scenario.model import BadScenario, Scenario, load, ready_made
from mcast.backends.sim.trace.events import MessagesLost, Send, Trace
from mcast.backends.sim.trace.timeline import Count, RunCounts, page
from mcast.errors.causes import errno_name

__all__ = [
    "BadScenario",
    "MemberResult",
    "Scenario",
    "ScenarioResult",
    "ObservedEvent",
    "load",
    "ready_made",
    "run",
]

RETRY_NS = round(model.RETRY_SECONDS * NS)
DRAIN_NS = 1 * NS
"""Time in ns, 1 s, in which messages that are in flight at the end may still arrive."""
_NUMBER_BYTES = 8
"""The size of a message's number in the run, which begins its payload."""
_UNDERWAY = "still on its way"


class ObservedEvent(NamedTuple):
    """An event that an application received, or an error of its queue pair.

    at     virtual time in seconds
    what   name of the event
    errno  name of the errno; "" without one
    """

    at: float
    device: str
    group: str
    what: str
    errno: str
    detail: str


class MemberResult(NamedTuple):
    """A member at the end of the run. Each message counts once, however many copies of it came.

    qp            number of its queue pair
    joined        when it joined first, in seconds; None if it never did
    sent          messages that it sent
    held_back     messages that it could not send because it was no member
    expected      messages sent to the group while it wanted to receive them, its own included
    lost          expected messages that never arrived
    duplicates    further copies of messages
    out_of_order  messages that arrived after a later one of the same sender
    causes        reason -> messages lost for that reason
    counters      counters of its queue pair at the end
    """

    device: str
    qp: int
    group: str
    send_only: bool
    joined: float | None
    joins: int
    sent: int
    held_back: int
    expected: int
    received: int
    lost: int
    duplicates: int
    out_of_order: int
    causes: dict[str, int]
    counters: QpCounters


_TABLE: tuple[tuple[str, Callable[[MemberResult], object]], ...] = (
    ("port", lambda member: member.device),
    ("group", lambda member: member.group),
    ("joins", lambda member: str(member.joins)),
    ("sent", lambda member: member.sent),
    ("expected", lambda member: member.expected),
    ("received", lambda member: "send-only" if member.send_only else member.received),
    ("lost", lambda member: member.lost),
    ("twice", lambda member: member.duplicates),
    ("late", lambda member: member.out_of_order),
)
"""The columns that the terminal and the page show of a member."""


class ScenarioResult(NamedTuple):
    """The result of a scenario; `trace` is everything that happened on the fabric."""

    scenario: Scenario
    members: tuple[MemberResult, ...]
    seen: tuple[ObservedEvent, ...]
    trace: Trace

    def table(self) -> list[list[str]]:
        """A row of names, and a row for each member, as text."""
        rows = [[cell(member) for _, cell in _TABLE] for member in self.members]
        return [
            [name for name, _ in _TABLE],
            *([f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows),
        ]

    def page(self) -> str:
        """The run as one HTML page, with the numbers of `table` and the reasons of each member's losses."""
        by_qp = {m.qp: Count(m.sent, m.received, Counter(m.causes), m.expected) for m in self.members}
        counted = RunCounts(self.scenario.seconds, by_qp, self.table())
        return page(self.trace, self.scenario.name, counted)

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own, which a notebook shows as the value of a cell."""
        style = "width:100%;height:40rem;border:0;color-scheme:light dark"
        fit = "this.style.height = this.contentDocument.documentElement.scrollHeight + 'px'"
        frame = f'<iframe title="timeline" style="{style}" onload="{fit}"'
        return f'{frame} srcdoc="{escape(self.page())}"></iframe>'

    def as_json(self) -> dict[str, Any]:
        """The result without its trace, as values for JSON."""
        return {
            "scenario": self.scenario.model_dump(mode="json"),
            "members": [{**m._asdict(), "counters": m.counters._asdict()} for m in self.members],
            "seen": [seen._asdict() for seen in self.seen],
        }


def run(scenario: Scenario) -> ScenarioResult:
    """Play the scenario to its end."""
    return _Runner(scenario).run()


def fabric_of(about: model.ScenarioTopology, **options: Any) -> Fabric:
    """The fabric that a scenario describes; `options` are those of `Fabric` besides."""
    sizes: dict[str, Any] = {"ports": about.ports, "switches": about.switches, "mtu": about.mtu}
    if about.link_layer == "roce":
        return Fabric.roce(**sizes, **options)
    return Fabric.infiniband(**sizes, **options, max_mlid=about.max_mlid)


class _Member:
    """An application on one port that wants to be in a group: `joined`, or `why_out` says why not."""

    def __init__(self, plan: model.Members, port: FabricPort, channel: EventChannel) -> None:
        self.plan, self.port = plan, port
        cm_id = channel.create_id()
        assert isinstance(cm_id, SimCmId)
        self.id = cm_id
        self.id.bind_addr(port.addresses[0])
        qp = self.id.create_qp(QpInit(max_recv_wr=plan.receives))
        assert isinstance(qp, SimQueuePair)
        self.qp = qp
        self.number = qp.qp_num
        self.wants = False
        self.why_out = ""
        self.destination: Destination | None = None
        self.joined: list[int] = []
        self.sent = self.held_back = 0
        self.expected: dict[int, str] = {}  # message -> why it cannot come, "" if it can
        self.copies: Counter[int] = Counter()
        self.out_of_order = 0
        self._last: dict[int, int] = {}  # sender's QP -> its latest message here

    def read(self, most: int) -> None:
        """Take messages that are there. Raises QpError."""
        with self.qp.recv(most or 1 << 20, timeout=0) as batch:
            for message in batch:
                number = int.from_bytes(message.payload[:_NUMBER_BYTES])
                self.copies[number] += 1
                self.out_of_order += number < self._last.get(message.src_qp, 0)
                self._last[message.src_qp] = max(number, self._last.get(message.src_qp, 0))

    def result(self, reasons: dict[tuple[int, int], str], counters: QpCounters) -> MemberResult:
        lost = [(number, why) for number, why in self.expected.items() if number not in self.copies]
        causes = Counter(why or reasons.get((self.number, number), _UNDERWAY) for number, why in lost)
        return MemberResult(
            device=self.port.name,
            qp=self.number,
            group=self.plan.group,
            send_only=self.plan.send_only,
            joined=self.joined[0] / NS if self.joined else None,
            joins=len(self.joined),
            sent=self.sent,
            held_back=self.held_back,
            expected=len(self.expected),
            received=len(self.copies),
            lost=len(lost),
            duplicates=self.copies.total() - len(self.copies),
            out_of_order=self.out_of_order,
            causes=dict(causes.most_common()),
            counters=counters,
        )


class _Runner:
    """One run: an agenda of actions by time; between two actions the clock moves and events are read."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        about = scenario.fabric
        self.fabric = fabric_of(about, seed=scenario.seed, trace=True)
        self.backend = SimBackend(self.fabric, about.link_layer, owns_fabric=True)
        self.channel = self.backend.event_channel()
        self.end = round(scenario.seconds * NS)
        self.seen: list[ObservedEvent] = []
        self.members = [
            _Member(plan, self.fabric.ports[port], self.channel)
            for plan in scenario.members
            for port in plan.ports
        ]
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._scheduled = itertools.count()
        self._numbers = itertools.count(1)

    def at(self, when: int, action: Callable[[], None]) -> None:
        if when <= self.end:
            heapq.heappush(self._agenda, (when, next(self._scheduled), action))

    def run(self) -> ScenarioResult:
        for fault in self.scenario.faults:
            self._plan_fault(fault)
        for member in self.members:
            self._plan_member(member)
        for traffic in self.scenario.traffic:
            self._plan_traffic(traffic)
        while self._agenda:
            when, _, action = self._agenda[0]
            if not self._wait_until(when):
                heapq.heappop(self._agenda)
                action()
                self._read_the_eager()
        drained = max(self.end, self.fabric.clock.now) + DRAIN_NS
        while self._wait_until(drained):
            pass
        for member in self.members:
            self._read(member, 0)
        return self._conclude()

    def _wait_until(self, when: int) -> bool:
        """Let time pass; True if an event came first."""
        wait = when - self.fabric.clock.now
        event = self.channel.get_event(wait / NS) if wait > 0 else None
        if event is not None:
            self._on_event(event)
        return event is not None

    def _conclude(self) -> ScenarioResult:
        assert self.fabric.trace is not None
        counters = [member.qp.counters for member in self.members]
        self.backend.close()
        reasons = dict(_reasons(self.fabric.trace))
        results = map(_Member.result, self.members, itertools.repeat(reasons), counters)
        return ScenarioResult(self.scenario, tuple(results), tuple(self.seen), self.fabric.trace)

    def _see(self, member: _Member, what: str, errno: int = 0, detail: str = "") -> None:
        name = errno_name(errno) if errno else ""
        at = self.fabric.clock.now / NS
        self.seen.append(ObservedEvent(at, member.port.name, member.plan.group, what, name, detail))

    # --- members -------------------------------------------------------------------------

    def _plan_member(self, member: _Member) -> None:
        plan = member.plan
        self.at(round(plan.join * NS), lambda: self._want(member))
        if plan.leave is not None:
            self.at(round(plan.leave * NS), lambda: self._stop_wanting(member))
        if plan.read_every:
            self._every(plan.join, plan.read_every, lambda: self._read(member, plan.max_read))

    def _every(
        self, start: float, every: float, action: Callable[[], None], stop: float | None = None
    ) -> None:
        """`action` at start, start + every, …, until `stop`."""
        last = self.end if stop is None else round(stop * NS)

        def act(count: int) -> None:
            action()
            plan(count + 1)

        def plan(count: int) -> None:
            when = round((start + count * every) * NS)
            if when < last:
                self.at(when, lambda: act(count))

        plan(0)

    def _want(self, member: _Member) -> None:
        member.wants = True
        self._join(member)

    def _stop_wanting(self, member: _Member) -> None:
        member.wants = False
        self._leave(member)

    def _join(self, member: _Member) -> None:
        make = JoinAttrEx.send_only if member.plan.send_only else JoinAttrEx.full_member
        member.why_out = "the join was not complete"
        try:
            member.id.join_multicast_ex(make(member.plan.group), member)
        except McastError as error:
            self._see(member, "join refused", error.errno or 0, error.detail)
            self._out(member, "the join was refused", RETRY_NS)

    def _leave(self, member: _Member) -> None:
        member.destination = None
        try:
            member.id.leave_multicast(member.plan.group)
        except McastError:
            pass  # nothing is left to leave, because the join was refused or the device is gone

    def _out(self, member: _Member, why: str, wait: int) -> None:
        """No member (any more): leave, and join again if the plan says so."""
        member.why_out, member.destination = why, None
        if member.plan.rejoin and not member.port.removed:
            self._leave(member)
            self.at(self.fabric.clock.now + wait, lambda: self._join(member) if member.wants else None)

    def _on_event(self, event: CmEvent) -> None:
        concerned = [m for m in self.members if m.id is event.id and event.context in (None, m)]
        for member in concerned:
            self._see(member, event.type.name, event.errno, event.detail)
            if event.type is CmEventType.MULTICAST_JOIN and event.ud is not None:
                member.why_out, member.destination = "", event.ud.destination
                member.joined.append(self.fabric.clock.now)
            elif event.type is CmEventType.MULTICAST_ERROR:
                lost = bool(member.joined) and not member.why_out
                why = "the membership was lost" if lost else "the join failed"
                self._out(member, why, 0 if lost else RETRY_NS)
            elif event.type is CmEventType.DEVICE_REMOVAL:
                self._out(member, "the device is gone", 0)

    def _read(self, member: _Member, most: int) -> None:
        if member.qp.core.readable:
            try:
                member.read(most)
            except QpError as error:
                self._reset(member, error)

    def _read_the_eager(self) -> None:
        for member in self.members:
            if not member.plan.read_every:
                self._read(member, 0)

    def _reset(self, member: _Member, error: QpError) -> None:
        self._see(member, "QP in ERR, reset", error.errno or 0, error.status.name)
        member.qp.reset()

    # --- traffic -------------------------------------------------------------------------

    def _plan_traffic(self, traffic: model.Traffic) -> None:
        sender = next(
            m for m in self.members if (m.plan.group, m.port.index) == (traffic.group, traffic.port)
        )
        self._every(traffic.start, traffic.every, lambda: self._send(sender, traffic), traffic.stop)

    def _send(self, sender: _Member, traffic: model.Traffic) -> None:
        if sender.destination is None:
            sender.held_back += traffic.burst
            return
        numbers = list(itertools.islice(self._numbers, traffic.burst))
        unsent = "" if sender.port.up else "the sender's link was down"
        for member in self.members:
            if member.wants and not member.plan.send_only and member.plan.group == traffic.group:
                member.expected |= dict.fromkeys(numbers, member.why_out or unsent)
        try:
            payloads = [number.to_bytes(_NUMBER_BYTES).ljust(traffic.size, b"\0") for number in numbers]
            sender.sent += sender.qp.send(sender.destination, payloads)
        except QpError as error:
            for member in self.members:
                for number in numbers:
                    member.expected.pop(number, None)
            self._reset(sender, error)

    # --- faults --------------------------------------------------------------------------

    def _plan_fault(self, fault: model.ScenarioFault) -> None:
        def start() -> None:
            undo = begin(self.fabric, fault)
            until = getattr(fault, "until", None)
            if undo is not None:
                self.at(self.end if until is None else round(until * NS), undo)

        self.at(round(fault.at * NS), start)


def _reasons(trace: Iterable[Any]) -> Iterator[tuple[tuple[int, int], str]]:
    """(Queue pair, number of a message in the run) -> why the message was lost there, from the trace."""
    numbers: dict[int, int] = {}
    for _, event in trace:
        if isinstance(event, Send):
            for place, payload in enumerate(event.payloads, event.first):
                numbers[place] = int.from_bytes(payload[:_NUMBER_BYTES])
        elif isinstance(event, MessagesLost):
            for place in range(event.first, event.first + event.count):
                yield (event.qp, numbers[place]), event.reason
