"""A fault in words, as `mcast sim ctl` takes it: `drop 1%`, `delay 5ms roce2`, `cut-cable 1 until=10s`.

The first word is the fault's name in scenarios. A word with = names a field of the fault; what field another
word is for follows from its form. Times are in seconds if they have no unit, and count from now.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from mcast.arguments.amounts import parse_int, parse_number
from mcast.arguments.seconds import parse_seconds
from mcast.backends.sim.scenario.model import FAULTS, BadScenario
from mcast.wire.addresses import McastAddress

ENDS = ("port", "source", "target")
"""The fields of faults that name a port."""
_TIMES = ("at", "until", "seconds", "outage")
_LISTS = ("nth", "pkeys")
_NUMBERS = (*_TIMES, "rate", "copies", "after", "switch")
_SHARE = re.compile("([0-9]{1,3}(?:[.][0-9]{1,9})?)%")


def parse_fault(words: Sequence[str], ports: Mapping[str, int]) -> dict[str, object]:
    """The fields of a scenario's fault that the words say. `ports`: name, or address, of a port -> its index.

    Raises BadScenario for a word that fits nothing.
    """
    name, *rest = words
    model = FAULTS.get(name)
    if model is None:
        raise BadScenario(f"unknown fault {name!r}: choose one of {', '.join(FAULTS)}")
    known = [field for field in model.model_fields if field != "kind"]
    found: dict[str, object] = {}
    for word in rest:
        field, mark, value = word.partition("=")
        if not mark:
            field, value = _field_for(word, known, ports), word
        if field not in known:
            raise BadScenario(
                f"{word!r} is no argument of the fault {name!r}: its fields are {', '.join(known)}"
            )
        if field in found:
            raise BadScenario(f"{word!r} sets {field} twice: give it once")
        found[field] = _value(field, value, ports)
    return {"kind": name, **found}


def _field_for(word: str, known: Sequence[str], ports: Mapping[str, int]) -> str:
    """The field that a word without a name is for; "" if there is none."""
    fields = next(fields for fits, fields in _FORMS if fits(word, ports))
    return next((field for field in fields if field in known), "")


def _is_group(word: str) -> bool:
    try:
        McastAddress.of(word)
    except ValueError:
        return False
    return True


_FORMS: tuple[tuple[Callable[[str, Mapping[str, int]], object], tuple[str, ...]], ...] = (
    (lambda word, ports: _SHARE.fullmatch(word), ("rate",)),
    (lambda word, ports: parse_seconds(word) is not None, ("seconds", "outage")),
    (lambda word, ports: word in ports, ("port", "target")),
    (lambda word, ports: parse_int(word) is not None, ("port", "switch", "copies", "after")),
    (lambda word, ports: _is_group(word), ("group",)),
    (lambda word, ports: word.isupper() or "_" in word, ("status", "method")),
    (lambda word, ports: True, ("port", "target")),
)
"""Form of a word -> the fields that the word may be for.

The first one that the fault has is taken. The last form is a port that does not exist.
"""


def _value(field: str, text: str, ports: Mapping[str, int]) -> object:
    if field in ENDS:
        return parse_port(text, ports)
    if field in _LISTS:
        return [_whole(field, one) for one in text.split(",")]
    if share := _SHARE.fullmatch(text):
        return float(share[1]) / 100
    if field in _TIMES and (time := parse_seconds(text)) is not None:
        return time
    return _number(field, text) if field in _NUMBERS else text


def _number(field: str, text: str) -> float:
    found = parse_number(text)
    if found is None:
        raise BadScenario(f"{field} is {text!r}: give a number, such as 3 or 0.5")
    return found


def _whole(field: str, text: str) -> int:
    found = parse_int(text, 16) if text[:2].lower() == "0x" else parse_int(text)
    if found is None:
        raise BadScenario(f"{field} has {text!r}: give whole numbers, such as 1,0x8001")
    return found


def parse_port(text: str, ports: Mapping[str, int]) -> int:
    """The index of the port with that name, address or number. Raises BadScenario."""
    if text in ports:
        return ports[text]
    count = len(set(ports.values()))
    if (number := parse_int(text)) is not None and number < count:
        return number
    names = list(ports)
    raise BadScenario(f"there is no port {text!r}: there are {names[0]} to {names[count - 1]}, or by address")
