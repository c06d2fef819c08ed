"""The faults that a scenario or a test's mark names (`scenario_model.Fault`), done to a fabric."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from enum import Enum
from functools import partial
from itertools import count
from typing import Any

from mcast.api import Phase
from mcast.backends.model.qp import Qp
from mcast.backends.model.times import NS
from mcast.backends.sim.fabric import Fabric
from mcast.backends.sim.faults import rules as faults
from mcast.backends.sim.faults.rules import Installed, Messages, Requests
from mcast.backends.sim.scenario import model
from mcast.backends.sim.trace.events import FaultInjected

Undo = Callable[[], None] | None


def begin(fabric: Fabric, fault: model.ScenarioFault) -> Undo:
    """Begin the fault; return the function that undoes it, None if nothing can."""
    return _BEGIN[type(fault)](fabric, fault)


class FaultScheduler:
    """The faults that users ask of a fabric while time runs, and those of them that last.

    `say` is told in a line each what begins and what ends. May be used from several threads.
    """

    def __init__(self, fabric: Fabric, say: Callable[[str], None] = lambda line: None) -> None:
        self._fabric, self._say = fabric, say
        self._numbers = count()
        self._running: dict[int, tuple[model.ScenarioFault, Callable[[], None]]] = {}
        """Faults that last; the call that takes an entry out undoes the fault."""
        self._due: set[int] = set()
        """Steps that the clock will do."""
        self._closed = False

    @property
    def count(self) -> int:
        """Number of faults that are active or scheduled, including scheduled ends of faults."""
        return len(self._running) + len(self._due)

    @property
    def running(self) -> tuple[model.ScenarioFault, ...]:
        """The faults that have begun and last, in the order in which they began."""
        return tuple(fault for fault, _ in list(self._running.values()))

    def lines(self) -> tuple[str, ...]:
        """Return a line for each fault that lasts; a rule that picks nothing any more is marked."""
        found = [
            (format_fault(fault), isinstance(undo, _EndOfRule) and undo.rule.is_spent)
            for fault, undo in list(self._running.values())
        ]
        return tuple(f"{words} (spent)" if is_spent else words for words, is_spent in found)

    def plan(self, fault: model.ScenarioFault) -> None:
        """The fault happens `at` s from now, and is undone at `until`."""
        if fault.at:
            self._later(fault.at, partial(self._start, fault))
        else:
            self._start(fault)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        """Have it done then as a call of its own, and not within the call that lets the time pass."""
        number = next(self._numbers)

        def due() -> None:
            self._due.discard(number)
            self._fabric.clock.defer(action)

        self._due.add(number)
        clock = self._fabric.clock
        clock.guard.run("plan", Phase.EVENT, clock.call_later, round(seconds * NS), due)

    def _start(self, fault: model.ScenarioFault) -> None:
        if self._closed:
            return
        undo = begin(self._fabric, fault)
        self._say(f"fault: {format_fault(fault)}")
        if undo is None:
            return
        number = next(self._numbers)
        self._running[number] = fault, undo
        if (until := getattr(fault, "until", None)) is not None:
            self._later(until - fault.at, partial(self._end, number))

    def _end(self, number: int) -> None:
        fault, undone = self._running.pop(number, (None, None))
        if fault is not None and undone is not None:
            undone()
            self._say(f"ended: {format_fault(fault)}")

    def undo(self, fits: Callable[[model.ScenarioFault], bool] = lambda fault: True) -> int:
        """End these of the faults that last, the latest first; how many there were."""
        found = [number for number, (fault, _) in list(self._running.items()) if fits(fault)]
        for number in reversed(found):
            self._end(number)
        return len(found)

    def close(self) -> None:
        """End all faults; none begins any more."""
        self._closed = True
        self.undo()


def format_fault(fault: model.ScenarioFault) -> str:
    """The fault in the words that `mcast sim ctl` takes."""
    fields = fault.model_dump(exclude={"kind"}, exclude_defaults=True)
    return " ".join([fault.kind, *(f"{name}={_word(value)}" for name, value in fields.items())])


def _word(value: object) -> str:
    if isinstance(value, Enum):
        return value.name
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@contextmanager
def scheduled_faults(fabric: Fabric, planned: Iterable[model.ScenarioFault]) -> Iterator[None]:
    """Each fault happens `at` s from now and is undone at `until`, at the latest when this ends."""
    with closing(FaultScheduler(fabric)) as faults:
        for fault in planned:
            faults.plan(fault)
        yield


def _note(fabric: Fabric, fault: Any, detail: str) -> None:
    """Record in the trace a fault that has no other line there."""
    port = getattr(fault, "port", None)
    fabric.core.log.note(FaultInjected, name=fault.kind, port=_name(fabric, port), detail=detail)


def _name(fabric: Fabric, port: int | None) -> str | None:
    return None if port is None else fabric.ports[port].name


def _qps(fabric: Fabric, port: int) -> list[Qp]:
    return [qp for qp in fabric.qps if qp.port.index == port]


def _on_messages(make: Callable[[Any], faults.DeliveryVerdict]) -> Callable[[Fabric, Any], Undo]:
    def install(fabric: Fabric, fault: model.OnMessages) -> Undo:
        source, target = _name(fabric, fault.source), _name(fabric, fault.target)
        which = Messages(fault.group, source, target, nth=fault.nth, rate=fault.rate)
        return _install(fabric, fault, fabric.rules.when(which, make(fault)))

    return install


def _on_requests(make: Callable[[Any], faults.SaVerdict]) -> Callable[[Fabric, Any], Undo]:
    def install(fabric: Fabric, fault: model.OnRequests) -> Undo:
        port = _name(fabric, fault.port)
        which = Requests(fault.method, port, fault.group, nth=fault.nth, rate=fault.rate)
        return _install(fabric, fault, fabric.rules.when(which, make(fault)))

    return install


def _install(fabric: Fabric, fault: Any, rule: Installed[Any]) -> Undo:
    _note(fabric, fault, "begins")
    return _EndOfRule(fabric, fault, rule)


class _EndOfRule:
    """Undoes a fault of messages or requests."""

    def __init__(self, fabric: Fabric, fault: Any, rule: Installed[Any]) -> None:
        self.fabric, self.fault, self.rule = fabric, fault, rule

    def __call__(self) -> None:
        self.rule.remove()
        _note(self.fabric, self.fault, "ends")


def _link_down(fabric: Fabric, fault: model.LinkDown) -> Undo:
    port = fabric.ports[fault.port]
    fabric.set_link(port, up=False)
    return lambda: fabric.set_link(port, up=True)


def _remove_device(fabric: Fabric, fault: model.RemoveDevice) -> Undo:
    port = fabric.ports[fault.port]
    fabric.remove_device(port)
    return lambda: fabric.restore_device(port)


def _cut_cable(fabric: Fabric, fault: model.CutCable) -> Undo:
    fabric.cut_cable(fault.switch)
    return lambda: fabric.repair_cable(fault.switch)


def _pkey_change(fabric: Fabric, fault: model.PkeyChange) -> Undo:
    port = fabric.ports[fault.port]
    before = port.pkeys
    fabric.set_pkeys(port, fault.pkeys)
    return lambda: fabric.set_pkeys(port, before)


def _late_switches(fabric: Fabric, fault: model.LateSwitches) -> Undo:
    fabric.program_late(fault.seconds)
    return lambda: fabric.program_late(0)


def _no_querier(fabric: Fabric, fault: model.NoQuerier) -> Undo:
    fabric.stop_querier()
    return fabric.start_querier


def _starve(fabric: Fabric, fault: model.Starve) -> Undo:
    stack = ExitStack()
    for qp in _qps(fabric, fault.port):
        stack.enter_context(fabric.starved(qp))
    return stack.close


def _overrun_cq(fabric: Fabric, fault: model.OverrunCq) -> Undo:
    for qp in _qps(fabric, fault.port):
        fabric.overrun_cq(qp)
    return None


def _fail_qp(fabric: Fabric, fault: model.FailQp) -> Undo:
    for qp in _qps(fabric, fault.port):
        fabric.fail_qp(qp, fault.status)
    return None


_BEGIN: dict[type, Callable[[Fabric, Any], Undo]] = {
    model.DropMessages: _on_messages(lambda fault: faults.Drop()),
    model.DelayMessages: _on_messages(lambda fault: faults.Delay(round(fault.seconds * NS))),
    model.DuplicateMessages: _on_messages(lambda fault: faults.Duplicate(fault.copies)),
    model.ReorderMessages: _on_messages(lambda fault: faults.Reorder(fault.after)),
    model.CorruptQkeys: _on_messages(lambda fault: faults.CorruptQkey()),
    model.SaSilent: _on_requests(lambda fault: faults.Drop()),
    model.SaSlow: _on_requests(lambda fault: faults.Delay(round(fault.seconds * NS))),
    model.SaRefuses: _on_requests(lambda fault: faults.Refuse(fault.status)),
    model.RestartSm: lambda fabric, fault: fabric.restart_sm(fault.outage),
    model.LinkDown: _link_down,
    model.CutCable: _cut_cable,
    model.LidChange: lambda fabric, fault: fabric.change_lid(fabric.ports[fault.port]),
    model.PkeyChange: _pkey_change,
    model.LateSwitches: _late_switches,
    model.NoQuerier: _no_querier,
    model.RemoveDevice: _remove_device,
    model.BondFailover: lambda fabric, fault: fabric.bond_failover(fabric.ports[fault.port]),
    model.Starve: _starve,
    model.OverrunCq: _overrun_cq,
    model.FailQp: _fail_qp,
}
"""Kind of a fault -> the function that begins it, and returns how to undo it."""
