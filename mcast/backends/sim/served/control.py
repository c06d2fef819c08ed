"""What a user may do to a served fabric while it runs: begin faults, end them, ask which there are."""

from __future__ import annotations

import errno as E
from collections.abc import Callable, Sequence

from mcast.api import Phase, mcast_error
from mcast.backends.sim.fabric import Fabric
from mcast.backends.sim.scenario.faults import Planted, words_of
from mcast.backends.sim.scenario.model import (
    FAULTS,
    BadScenario,
    ScenarioFault,
    ScenarioTopology,
    fault_of,
)
from mcast.backends.sim.scenario.words import ENDS, fields_of, port_in

MOST_FAULTS = 256
"""How many may last or wait for their time, because each message is compared with each rule."""


class Control:
    """The faults of a served fabric; `say` is told in a line each what begins and what ends."""

    def __init__(self, fabric: Fabric, say: Callable[[str], None]) -> None:
        self.faults: Planted = Planted(fabric, say)
        ports = fabric.ports
        self._ports = {port.name: port.index for port in ports}
        self._ports |= {str(address): port.index for port in ports for address in port.addresses}
        self._shape = ScenarioTopology.model_construct(
            link_layer="roce" if fabric.sa is None else "infiniband",
            ports=len(ports),
            switches=fabric.switches,
        )

    def obey(self, words: Sequence[str]) -> tuple[str, ...]:
        """Do what the words say; return lines for the user. Raises McastError (EINVAL) for other words."""
        try:
            match words:
                case ["list"]:
                    return tuple(map(words_of, self.faults.running)) or ("no fault lasts",)
                case ["mend"]:
                    return (self._undo("all"),)
                case ["mend", what]:
                    return (self._undo(what),)
                case ["mend", *_]:
                    raise BadScenario('"mend" takes one word: a port, a fault, or all')
                case [_, *_]:
                    return (self._begin(words),)
        except BadScenario as error:
            raise mcast_error(E.EINVAL, "ctl", Phase.OPEN, None, str(error)) from None
        detail = f"say what shall happen: list, `mend`, or a fault: {', '.join(FAULTS)}"
        raise mcast_error(E.EINVAL, "ctl", Phase.OPEN, None, detail)

    def _begin(self, words: Sequence[str]) -> str:
        fields = fields_of(words, self._ports)
        try:
            fault = fault_of(fields, self._shape)
        except BadScenario as error:
            known = ", ".join(field for field in FAULTS[words[0]].model_fields if field != "kind")
            raise BadScenario(f"{error}; the fields of {words[0]!r} are {known}") from None
        if self.faults.count >= MOST_FAULTS:
            raise BadScenario(f"{MOST_FAULTS} faults last or wait for their time already: end some by `mend`")
        self.faults.plan(fault)
        return words_of(fault)

    def _undo(self, what: str) -> str:
        """End the faults of a port, of a name, or all of them."""
        running = self.faults.running
        ended = self.faults.undo(self._fits(what))
        if not ended:
            there = "; ".join(map(words_of, running)) or "none"
            raise BadScenario(f"nothing ends by {what!r}; the faults that last: {there}")
        return f"{ended} {'fault' if ended == 1 else 'faults'} ended"

    def _fits(self, what: str) -> Callable[[ScenarioFault], bool]:
        if what == "all":
            return lambda fault: True
        if what in FAULTS:
            return lambda fault: isinstance(fault, FAULTS[what])
        port = port_in(what, self._ports)
        return lambda fault: port in (getattr(fault, end, None) for end in ENDS)
