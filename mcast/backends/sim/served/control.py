"""Commands to a running served fabric: start faults, end them, list them."""

from __future__ import annotations

import errno as E
from collections.abc import Callable, Sequence

from mcast.api import Phase, mcast_error
from mcast.backends.sim.fabric import Fabric
from mcast.backends.sim.scenario.fault_syntax import ENDS, parse_fault, parse_port
from mcast.backends.sim.scenario.faults import FaultScheduler, format_fault
from mcast.backends.sim.scenario.model import (
    FAULTS,
    BadScenario,
    ScenarioFault,
    ScenarioTopology,
    make_fault,
)

MAX_FAULTS = 256
"""Maximum number of active and scheduled faults, because each message is compared with each rule."""


class Control:
    """The faults of a served fabric; `say` is told in a line each what begins and what ends."""

    def __init__(self, fabric: Fabric, say: Callable[[str], None]) -> None:
        self.faults: FaultScheduler = FaultScheduler(fabric, say)
        ports = fabric.ports
        self._ports = {port.name: port.index for port in ports}
        self._ports |= {str(address): port.index for port in ports for address in port.addresses}
        self._shape = ScenarioTopology.model_construct(
            link_layer="roce" if fabric.sa is None else "infiniband",
            ports=len(ports),
            switches=fabric.switches,
        )

    def execute(self, words: Sequence[str]) -> tuple[str, ...]:
        """Do what the words say; return lines for the user. Raises McastError (EINVAL) for other words."""
        try:
            match words:
                case ["list"]:
                    return self.faults.lines() or ("no fault lasts",)
                case ["undo"]:
                    return (self._undo("all"),)
                case ["undo", what]:
                    return (self._undo(what),)
                case ["undo", *_]:
                    raise BadScenario('"undo" takes one argument: a port, a fault, or all')
                case [_, *_]:
                    return (self._begin(words),)
        except BadScenario as error:
            raise mcast_error(E.EINVAL, "ctl", Phase.OPEN, None, str(error)) from None
        detail = f"give a command: `list`, `undo`, or a fault: {', '.join(FAULTS)}"
        raise mcast_error(E.EINVAL, "ctl", Phase.OPEN, None, detail)

    def _begin(self, words: Sequence[str]) -> str:
        fields = parse_fault(words, self._ports)
        try:
            fault = make_fault(fields, self._shape)
        except BadScenario as error:
            known = ", ".join(field for field in FAULTS[words[0]].model_fields if field != "kind")
            raise BadScenario(f"{error}; the fields of {words[0]!r} are {known}") from None
        if self.faults.count >= MAX_FAULTS:
            raise BadScenario(
                f"{MAX_FAULTS} faults are active or scheduled, which is the maximum: end some by `undo`"
            )
        self.faults.plan(fault)
        return format_fault(fault)

    def _undo(self, what: str) -> str:
        """End the faults of a port, of a name, or all of them."""
        running = self.faults.running
        ended = self.faults.undo(self._fits(what))
        if not ended:
            there = "; ".join(map(format_fault, running)) or "none"
            raise BadScenario(f"no active fault matches {what!r}; active faults: {there}")
        return f"{ended} {'fault' if ended == 1 else 'faults'} ended"

    def _fits(self, what: str) -> Callable[[ScenarioFault], bool]:
        if what == "all":
            return lambda fault: True
        if what in FAULTS:
            return lambda fault: isinstance(fault, FAULTS[what])
        port = parse_port(what, self._ports)
        return lambda fault: port in (getattr(fault, end, None) for end in ENDS)
