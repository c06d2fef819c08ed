"""Faults of a running guest's fabric: what there is to break, and the lines of shell that break it.

`faults.sh` does it in the guest. This module checks names and values against the state that the guest
shows, so that every refusal names what there is.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from rdma_lab.control import About, Guest
from rdma_lab.errors import FaultError, meant

SCRIPT = Path(str(files("rdma_lab") / "faults.sh"))
KINDS = ("cable", "port", "device", "loss", "sm")
BROKEN = {"cable": "out", "port": "down", "device": "absent"}
WHOLE = {"cable": "in", "port": "up", "device": "present"}
LOGICAL_STATES = {"1": "DOWN", "2": "INIT", "3": "ARMED", "4": "ACTIVE"}
"""IBA 14.2.5.6, PortInfo:PortState, of which softib shows the number."""
NO_LOSS = ["0/1", "0"]
SM_INCIDENTS = ("stop", "restart", "failover")
MAX_DENOMINATOR = 1000
"""Loss is a fraction with at most this denominator: a port loses K of N messages, evenly spread."""


@dataclass(frozen=True, slots=True)
class PortStatus:
    """A port of the fabric, and the cable in it."""

    name: str
    cable: str
    """"in", "out", or "-" while its device is absent."""
    state: str
    """The port's logical state, or "disabled"."""
    device: str
    """"present", "absent", or "-" for a switch."""
    other_end: str = ""
    """InfiniBand: the switch's port at the other end of the cable."""


class Manager(NamedTuple):
    """An OpenSM, on its HCA."""

    hca: str
    state: str


@dataclass(frozen=True, slots=True)
class FabricStatus:
    """State of everything that can be broken, as the guest shows it."""

    ports: tuple[PortStatus, ...]
    loss: dict[str, Fraction]
    """By port, where it is not 0."""
    managers: tuple[Manager, ...] | None
    """None on RoCE, which has no subnet manager."""

    @classmethod
    def parse(cls, text: str, fabric: str) -> "FabricStatus":
        """Read the lines of `faults.sh show`."""
        ports, loss, managers = [], {}, []
        for kind, *words in (line.split() for line in text.splitlines()):
            if kind == "port":
                name, cable, state, *more = words
                ports.append(PortStatus(name, cable, LOGICAL_STATES.get(state, state), *more))
            elif kind == "loss":
                above, _, below = words[1].partition("/")
                loss[words[0]] = Fraction(above) / Fraction(below)
            elif kind == "sm":
                managers.append(Manager(*words))
        ports.sort(key=lambda port: [(len(part), part) for part in re.split(r"(?<=[a-z])|/", port.name)])
        return cls(tuple(ports), loss, tuple(managers) if fabric == "infiniband" else None)

    def names(self, kind: str) -> tuple[str, ...]:
        """Return the names that a fault of that kind takes."""
        if kind == "device":
            return tuple(port.name for port in self.ports if port.device != "-")
        here = [port for port in self.ports if port.device != "absent" or port.cable != "-"]
        return tuple(
            dict.fromkeys([port.name for port in here] + [port.other_end for port in here if port.other_end])
        )

    def faults(self) -> list[list[str]]:
        """Return what is broken now, as words that `changes` takes, in an order that can be undone.

        Of a link that is down although its cable is in, either end may be disabled; to enable one that is
        not does no harm.
        """
        found = [["device", port.name] for port in self.ports if port.device == "absent"]
        found += [["cable", port.name] for port in self.ports if port.cable == "out"]
        down = [port for port in self.ports if port.state in ("disabled", "DOWN") and port.cable == "in"]
        found += [["port", name] for port in down for name in (port.name, port.other_end) if name]
        found += [["loss", name] for name in self.loss]
        return found + ([["sm"]] if self.managers == () else [])

    def table(self) -> str:
        """Return a table of the state: a row is a NAME, a column a kind of fault."""
        rows = [("NAME", "CABLE", "PORT", "DEVICE", "LOSS")]
        for port in self.ports:
            cable = f"{port.cable} ({port.other_end})" if port.other_end else port.cable
            rows.append(
                (port.name, cable, port.state, port.device, _percent(self.loss.get(port.name, Fraction())))
            )
        shown = {port.name for port in self.ports}
        rows += [(name, "", "", "", _percent(loss)) for name, loss in self.loss.items() if name not in shown]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        if self.managers is not None:
            found = ", ".join(f"OpenSM on {one.hca} ({one.state.lower()})" for one in self.managers)
            lines.append(f"{'sm'.ljust(widths[0])}  {found or 'stopped'}")
        return "\n".join(lines)


def _percent(loss: Fraction) -> str:
    return f"{float(100 * loss):.4g}%" if loss else "0"


def script(about: About, *words: str) -> str:
    """Return the line of shell that runs faults.sh with these words in the guest."""
    return shlex.join(["/bin/sh", str(SCRIPT), about.fabric, str(about.ports), *words])


def status(guest: Guest) -> FabricStatus:
    """Return the present state of the guest's fabric. Raises LabError."""
    return FabricStatus.parse(guest.run(script(guest.about, "show")), guest.about.fabric)


def probability(text: str) -> Fraction:
    """Return the probability that `text` gives, as 0.1, 1/10 or 10%. Raises FaultError."""
    try:
        value = Fraction(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except (ValueError, ZeroDivisionError):
        value = Fraction(-1)
    exact = value.limit_denominator(MAX_DENOMINATOR)
    if not 0 < value <= 1 or not exact:
        raise FaultError(f"loss {text}: give the part of the messages to lose, 0.001 to 1, like 0.1 or 10%")
    return exact


def changes(words: Sequence[str], now: FabricStatus, *, undo: bool = False) -> list[list[str]]:
    """Return the words for faults.sh, one list each change, that break (or undo) what `words` name.

    Without words everything broken is undone. Raises FaultError.
    """
    if not words:
        return [change for fault in now.faults() for change in changes(fault, now, undo=True)]
    kind, *names = words
    if kind not in KINDS:
        raise FaultError(f"no fault {kind}: there are {', '.join(KINDS)}{meant(kind, KINDS)}")
    if kind == "sm":
        return [["sm", _incident(names, now, undo=undo)]]
    value = NO_LOSS
    there = now.names(kind)
    if kind == "loss":
        if not undo and not names:
            raise FaultError(
                "loss: give the part of the messages to lose, like 0.1 or 10%, then ports or none for all"
            )
        if names and (not undo or names[0][:1].isdigit()):  # as it was given to lose them
            part = probability(names.pop(0))
            value = value if undo else [f"{part.numerator}/{part.denominator}", f"{float(100 * part):.4f}"]
        if not names:
            names = list(now.loss) if undo else [port.name for port in now.ports if port.device == "present"]
    elif not names:
        raise FaultError(f"{kind}: which one? There are {', '.join(there)}")
    if unknown := next((name for name in names if _plain(name) not in there), None):
        hint = meant(_plain(unknown), there)
        raise FaultError(f"no {kind} {unknown} in this guest: there are {', '.join(there)}{hint}")
    if kind == "loss":  # of a port that loses nothing, nothing is undone: tc would refuse it
        return [["loss", name, *value] for name in map(_plain, names) if not undo or name in now.loss]
    absent = {port.name for port in now.ports if port.device == "absent"}
    how = (WHOLE if undo else BROKEN)[kind]
    return [
        [kind, name, how] for name in map(_plain, names) if kind != "device" or (name in absent) == undo
    ]  # an HCA that is absent is not removed once more


def opposite(change: Sequence[str]) -> list[str]:
    """Return the words for faults.sh that undo a change."""
    kind, name, *_ = change
    if kind == "sm":
        return ["sm", "start"]
    return [kind, name, *(NO_LOSS if kind == "loss" else [WHOLE[kind]])]


def _plain(name: str) -> str:
    """Return the name of a device's only port, which rdma(8) writes with its number, as the list has it."""
    return name if name.startswith("switch") else name.removesuffix("/1")


def _incident(names: Sequence[str], now: FabricStatus, *, undo: bool) -> str:
    if now.managers is None:
        raise FaultError("RoCE has no subnet manager: run a guest with --fabric infiniband")
    if (len(names) != 1 and (names or not undo)) or not {*names} <= {*SM_INCIDENTS}:
        raise FaultError(f"sm: give one of {', '.join(SM_INCIDENTS)}{meant(' '.join(names), SM_INCIDENTS)}")
    if undo:
        return "start"
    if names[0] == "failover" and len([port for port in now.ports if port.device != "-"]) < 2:
        raise FaultError("sm failover: a standby needs a second HCA: run the guest with --ports 2 or more")
    return names[0]
