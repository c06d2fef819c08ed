"""Content of a timeline page: members with their states, messages, faults, and the control traffic.

Times are virtual, in ns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from errno import errorcode
from typing import Any, NamedTuple

from mcast.backends.model.log_events import Attach, Detach, EventQueued, JoinAccepted, Leave
from mcast.backends.sim.trace.events import (
    Deliver,
    DeviceRemoval,
    FabricMade,
    FaultInjected,
    IgmpLeave,
    IgmpReport,
    Link,
    MessagesLost,
    PortMade,
    SaAnswered,
    SaAsked,
    Send,
    Trace,
    TraceEvent,
    Unsent,
)
from mcast.wire.addresses import ZERO_GID, Gid


class State(Enum):
    """The states of a member, in words."""

    ASKING = "asking to join"
    JOINED = "joined, QP not attached"
    RECEIVING = "receiving"
    SEND_ONLY = "send-only"
    FAILED = "failed or lost"


class Span(NamedTuple):
    state: State
    start: int
    end: int


class Mark(NamedTuple):
    """`messages` messages at one time; `reason` says why they were lost, if they were."""

    t: int
    messages: int
    reason: str = ""


class Note(NamedTuple):
    """Another thing that happened; `kind` is good, bad, plain or fault."""

    t: int
    kind: str
    text: str
    port: str | None = None


@dataclass
class Lane:
    """One member of a group.

    An id on a port, or (`id` None) a queue pair that was attached without joining.
    """

    group: Gid
    port: str
    id: int | None
    qp: int | None
    send_only: bool = False
    spans: list[Span] = field(default_factory=list)
    sent: list[Mark] = field(default_factory=list)
    received: list[Mark] = field(default_factory=list)
    lost: list[Mark] = field(default_factory=list)
    state: State | None = None
    _since: int = 0

    def enter(self, state: State | None, t: int) -> None:
        """Note that the member is in that state from `t` on; None: it is no member."""
        if self.state is not None:
            self.spans.append(Span(self.state, self._since, t))
        self.state, self._since = state, t


@dataclass
class TimelineData:
    """Data of a timeline.

    `ports` has the addresses of each port, `names` the address by which a group was joined, `down` when the
    link of a port was down.
    """

    link_layer: str = ""
    seed: int = 0
    end: int = 0
    times: list[int] = field(default_factory=list)
    ports: dict[str, str] = field(default_factory=dict)
    names: dict[Gid, str] = field(default_factory=dict)
    lanes: list[Lane] = field(default_factory=list)
    faults: list[Note] = field(default_factory=list)
    control: list[Note] = field(default_factory=list)
    down: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


def timeline_data(trace: Trace) -> TimelineData:
    """The trace as a story."""
    builder = _TimelineBuilder()
    for t, event in trace:
        builder.add_event(t, event)
    return builder.finish()


class _TimelineBuilder:
    """Follows a trace; `_HANDLERS` has the method for each kind of event."""

    def __init__(self) -> None:
        self.data = TimelineData()
        self._by_id: dict[tuple[int, Gid], Lane] = {}
        self._by_qp: dict[tuple[int, Gid], Lane] = {}
        self._without_qp: dict[tuple[str, Gid], list[Lane]] = {}
        self._down: dict[str, int] = {}
        self._asked: dict[int, Gid] = {}

    def add_event(self, t: int, event: TraceEvent) -> None:
        if not self.data.times or self.data.times[-1] != t:
            self.data.times.append(t)
        self.data.end = t
        _HANDLERS[type(event)](self, t, event)

    def finish(self) -> TimelineData:
        for lane in self.data.lanes:
            lane.enter(None, self.data.end)
        for port, since in self._down.items():
            self.data.down.setdefault(port, []).append((since, self.data.end))
        return self.data

    def fabric(self, t: int, event: FabricMade) -> None:
        self.data.link_layer, self.data.seed = event.link_layer, event.seed

    def port(self, t: int, event: PortMade) -> None:
        self.data.ports[event.port] = ", ".join(event.addresses)

    # --- members -------------------------------------------------------------------------

    def join(self, t: int, event: JoinAccepted) -> None:
        self.data.names[event.group] = event.address
        lane = self._by_id.get((event.id, event.group))
        if lane is None:
            lane = self._by_id[event.id, event.group] = self._new(event.group, event.port, event.id, event.qp)
        lane.send_only = event.send_only
        lane.enter(State.ASKING, t)

    def _new(self, group: Gid, port: str, number: int | None, qp: int | None) -> Lane:
        lane = Lane(group, port, number, qp)
        self.data.lanes.append(lane)
        if qp is None:
            self._without_qp.setdefault((port, group), []).append(lane)
        else:
            self._by_qp[qp, group] = lane
        return lane

    def cm_event(self, t: int, event: EventQueued) -> None:
        if event.group is None:
            self._control(t, "plain", f"{event.type} for id {event.id}", event.port)
            return
        lane = self._by_id.get((event.id, event.group)) or self._assigned(event.id, event.group)
        if event.type == "MULTICAST_JOIN":
            if lane is not None and lane.state is not None:
                lane.enter(State.SEND_ONLY if lane.send_only else State.JOINED, t)
            return
        if lane is not None and lane.state is not None:
            lane.enter(State.FAILED, t)
        why = errorcode.get(event.errno, f"status {event.status}")
        self._control(
            t, "bad", f"{event.type} for id {event.id} in {self._name(event.group)}: {why}", event.port
        )

    def _assigned(self, number: int, group: Gid) -> Lane | None:
        """The lane of an id that let the SA choose the MGID, under the MGID that the SA chose."""
        lane = self._by_id.pop((number, ZERO_GID), None)
        if lane is not None:
            lane.group = group
            self._by_id[number, group] = lane
            if lane.qp is not None:
                self._by_qp[lane.qp, group] = lane
        return lane

    def leave(self, t: int, event: Leave) -> None:
        lane = self._by_id.get((event.id, event.group))
        if lane is not None:
            lane.enter(None, t)

    def attach(self, t: int, event: Attach) -> None:
        if event.errno:
            why = errorcode.get(event.errno, str(event.errno))
            self._control(
                t, "bad", f"QP {event.qp} not attached to {self._name(event.group)}: {why}", event.port
            )
        else:
            self._lane(event.port, event.qp, event.group).enter(State.RECEIVING, t)

    def detach(self, t: int, event: Detach) -> None:
        lane = self._lane(event.port, event.qp, event.group)
        if not event.errno and lane.state is State.RECEIVING:
            lane.enter(None if lane.id is None else State.JOINED, t)

    def _lane(self, port: str, qp: int, group: Gid) -> Lane:
        """The lane of a queue pair in a group.

        A member that joined without a queue pair has got this one since.
        """
        lane = self._by_qp.get((qp, group))
        if lane is None:
            if waiting := self._without_qp.get((port, group)):
                lane = self._by_qp[qp, group] = waiting.pop(0)
                lane.qp = qp
            else:
                lane = self._new(group, port, None, qp)
        return lane

    def _name(self, group: Gid) -> str:
        return self.data.names.get(group) or str(group)

    # --- messages ------------------------------------------------------------------------

    def send(self, t: int, event: Send) -> None:
        self._lane(event.port, event.qp, event.group).sent.append(Mark(t, len(event.payloads)))

    def unsent(self, t: int, event: Unsent) -> None:
        mark = Mark(t, event.count, f"never sent: {event.reason}")
        self._lane(event.port, event.qp, event.group).lost.append(mark)

    def deliver(self, t: int, event: Deliver) -> None:
        self._lane(event.port, event.qp, event.group).received.append(Mark(t, event.count))

    def lost(self, t: int, event: MessagesLost) -> None:
        self._lane(event.port, event.qp, event.group).lost.append(Mark(t, event.count, event.reason))

    # --- faults and control --------------------------------------------------------------

    def fault(self, t: int, event: FaultInjected) -> None:
        text = event.name.replace("-", " ") + (f": {event.detail}" if event.detail else "")
        self.data.faults.append(Note(t, "fault", text, event.port))

    def removal(self, t: int, event: DeviceRemoval) -> None:
        self.data.faults.append(Note(t, "fault", f"{event.port}: device removed", event.port))

    def link(self, t: int, event: Link) -> None:
        self.data.faults.append(
            Note(t, "fault", f"{event.port}: link {'up' if event.up else 'down'}", event.port)
        )
        if not event.up:
            self._down.setdefault(event.port, t)
        elif event.port in self._down:
            self.data.down.setdefault(event.port, []).append((self._down.pop(event.port), t))

    def asked(self, t: int, event: SaAsked) -> None:
        self._asked[event.tid] = Gid(event.record.mgid)

    def answered(self, t: int, event: SaAnswered) -> None:
        group = self._asked.pop(event.tid, None)
        about = "" if group is None else f" for {self._name(group)}"
        status = event.status or "no answer"
        kind = "good" if event.status == "OK" else "bad"
        self._control(t, kind, f"SA {event.method}{about}: {status}", event.port)

    def report(self, t: int, event: IgmpReport) -> None:
        self._control(t, "plain", f"IGMP report for {self._name(event.group)}", event.port)

    def igmp_leave(self, t: int, event: IgmpLeave) -> None:
        self._control(t, "plain", f"IGMP leave of {self._name(event.group)}", event.port)

    def _control(self, t: int, kind: str, text: str, port: str | None) -> None:
        self.data.control.append(Note(t, kind, text, port))


_HANDLERS: dict[type[TraceEvent], Callable[[_TimelineBuilder, int, Any], None]] = {
    FabricMade: _TimelineBuilder.fabric,
    PortMade: _TimelineBuilder.port,
    JoinAccepted: _TimelineBuilder.join,
    EventQueued: _TimelineBuilder.cm_event,
    Leave: _TimelineBuilder.leave,
    Attach: _TimelineBuilder.attach,
    Detach: _TimelineBuilder.detach,
    Send: _TimelineBuilder.send,
    Unsent: _TimelineBuilder.unsent,
    Deliver: _TimelineBuilder.deliver,
    MessagesLost: _TimelineBuilder.lost,
    Link: _TimelineBuilder.link,
    DeviceRemoval: _TimelineBuilder.removal,
    FaultInjected: _TimelineBuilder.fault,
    SaAsked: _TimelineBuilder.asked,
    SaAnswered: _TimelineBuilder.answered,
    IgmpReport: _TimelineBuilder.report,
    IgmpLeave: _TimelineBuilder.igmp_leave,
}
