"""The data model of scenarios, and reading them from TOML or YAML.

Times are in seconds from the start; ports are counted from 0. The file is not trusted: every field, the size
and depth of the file, and the work of a run have bounds.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)

from mcast.api import McastAddress, WcStatus
from mcast.errors import install
from mcast.errors.validation import describe_validation_error
from mcast.wire.mcmember import MLID_LAST, SaMethod, SaStatus

READY_MADE = files("mcast.backends.sim.scenario") / "ready_made"

MAX_FABRIC_PORTS, MAX_LEAVES = 65_000, 4_095
MAX_FILE_BYTES = 1 << 16
"""Of a file."""
MAX_DEPTH = 16
"""YAML: a scenario needs 5 levels."""
MAX_DOTS = 1_000
"""The most dots in one line of TOML, because tomllib takes quadratic time for the dots of a key."""
MAX_STEPS = 1_000_000
"""Of a run (`steps_of`): minutes, and some gigabytes of trace."""
MIN_INTERVAL = 1e-6
"""Between two sends of a member, or two reads, in seconds."""
RETRY_SECONDS = 0.1
"""Seconds until a member with `rejoin` tries again after a refusal."""

Seconds = Annotated[float, Field(ge=0, le=1e6)]
Interval = Annotated[float, Field(ge=MIN_INTERVAL, le=1e6)]
PortNumber = Annotated[int, Field(ge=0, lt=MAX_FABRIC_PORTS)]
Positive = Annotated[int, Field(ge=1, le=1 << 63)]


class _Model(BaseModel):
    """Each value has the type of its field, where a list is one in the file: `strict=False` takes that."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)


def _group(value: object) -> str:
    return str(McastAddress.of(value))  # type: ignore[arg-type]  # it says what is wrong


GroupText = Annotated[str, BeforeValidator(_group)]


def _zero_or_interval(value: float) -> float:
    if 0 < value < MIN_INTERVAL:
        raise ValueError(f"{value:g} is less than {MIN_INTERVAL:g} and not 0")
    return value


_NUMBER = {"type": "integer", "minimum": 1}
_NUMBERS = {"anyOf": [_NUMBER, {"type": "array", "items": _NUMBER, "maxItems": 10_000}]}

Numbers = Annotated[
    tuple[Positive, ...],
    Field(max_length=10_000, strict=False),
    BeforeValidator(lambda value: (value,) if isinstance(value, int) else value),
    WithJsonSchema(_NUMBERS, mode="validation"),
]
"""Numbers from 1; a single one needs no list."""


def _by_name(enum: type[SaStatus] | type[SaMethod] | type[WcStatus], value: object) -> object:
    """An enum member by its name, with the names there are when it is none."""
    if isinstance(value, enum):
        return value
    if not isinstance(value, str) or value not in enum.__members__:
        raise ValueError(f"{value!r} is not one of {', '.join(enum.__members__)}")
    return enum[value]


def _check_order(first: str, start: float, last: str, end: float | None) -> None:
    if end is not None and end <= start:
        raise ValueError(f"{last} = {end:g} is not after {first} = {start:g}")


# --- the model -------------------------------------------------------------------------------

SaStatusName = Annotated[
    SaStatus,
    BeforeValidator(partial(_by_name, SaStatus)),
    PlainSerializer(lambda status: status.name, when_used="json"),
    WithJsonSchema({"type": "string", "enum": [*SaStatus.__members__]}),
]
SaMethodName = Annotated[
    SaMethod,
    BeforeValidator(partial(_by_name, SaMethod)),
    PlainSerializer(lambda method: method.name, when_used="json"),
    WithJsonSchema({"type": "string", "enum": [*SaMethod.__members__]}),
]
WcStatusName = Annotated[
    WcStatus,
    BeforeValidator(partial(_by_name, WcStatus)),
    PlainSerializer(lambda status: status.name, when_used="json"),
    WithJsonSchema({"type": "string", "enum": [*WcStatus.__members__]}),
]

Mtu = Literal[256, 512, 1024, 2048, 4096]


def _one_or_several(value: object, check: Callable[[object], object]) -> object:
    """Refuse a wrong MTU in one sentence: pydantic has one for each kind of value that would be right."""
    try:
        return check(value)
    except ValidationError:
        raise ValueError(
            f"{value!r} is neither 256, 512, 1024, 2048 or 4096, nor a list of these with one for each port"
        ) from None


class ScenarioTopology(_Model):
    """The fabric: link layer, ports, leaf switches, and sizes as in `Fabric`."""

    link_layer: Literal["roce", "infiniband"] = "roce"
    """RoCE, or InfiniBand with a subnet manager."""
    ports: int = Field(default=4, ge=1, le=MAX_FABRIC_PORTS)
    """Number of ports."""
    switches: int = Field(default=1, ge=1, le=MAX_LEAVES)
    """Number of switches: 1, or a root and leaves, to which the ports are connected in turn."""
    mtu: Annotated[Mtu | Annotated[tuple[Mtu, ...], Field(strict=False)], WrapValidator(_one_or_several)] = (
        1024
    )
    """MTU in bytes: of every port, or a list with one for each."""
    max_mlid: int = Field(default=MLID_LAST, ge=0xC000, le=MLID_LAST)
    """Last MLID that the SM may give to a group."""

    @model_validator(mode="after")
    def _each_port_has_an_mtu(self) -> Self:
        if isinstance(self.mtu, tuple) and len(self.mtu) != self.ports:
            raise ValueError(
                f"mtu has {len(self.mtu)} numbers for {self.ports} ports: give one for each port, or one "
                "number for all"
            )
        return self

    def mtu_of(self, port: int) -> int:
        """Return the MTU of that port, in bytes."""
        return self.mtu[port] if isinstance(self.mtu, tuple) else self.mtu


class Members(_Model):
    """Members of one group, one on each of `ports`."""

    group: GroupText
    """The group."""
    ports: tuple[PortNumber, ...] = Field(min_length=1, max_length=MAX_FABRIC_PORTS, strict=False)
    """Ports with a member each."""
    join: Seconds = 0.0
    """Time at which they join."""
    leave: Seconds | None = None
    """Time at which they leave; without it, at the end."""
    send_only: bool = False
    """True: they cannot receive."""
    rejoin: bool = False
    """True: a member leaves and joins again when its join failed or its membership was lost."""
    receives: int = Field(default=512, ge=1, le=1 << 20)
    """Length of the receive queue, in messages."""
    read_every: Annotated[Seconds, AfterValidator(_zero_or_interval)] = 0.0
    """Seconds between two reads, a microsecond or more; 0: each message is read as it comes."""
    max_read: int = Field(default=0, ge=0, le=1 << 20)
    """Maximum number of messages that one read takes; 0: all there are."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        _check_order("join", self.join, "leave", self.leave)
        return self


class Traffic(_Model):
    """Messages that the member of a group on a port sends."""

    group: GroupText
    """The group."""
    port: PortNumber
    """Port of the sender."""
    start: Seconds = 0.0
    """Time at which it begins."""
    stop: Seconds | None = None
    """Time at which it ends; without it, at the end."""
    every: Interval = 0.01
    """Seconds between two sends."""
    burst: int = Field(default=1, ge=1, le=10_000)
    """Number of messages at once."""
    size: int = Field(default=64, ge=8, le=4096)
    """Bytes of a message."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        _check_order("start", self.start, "stop", self.stop)
        return self


class _Fault(_Model):
    at: Seconds = 0.0
    """Time at which the fault begins."""


class Lasting(_Fault):
    """From `at` until `until`, by default to the end."""

    until: Seconds | None = None
    """Time at which the fault ends; without it, it lasts to the end."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        _check_order("at", self.at, "until", self.until)
        return self


class OnMessages(Lasting):
    group: GroupText | None = None
    """Only messages of this group."""
    source: PortNumber | None = None
    """Only messages that this port sends."""
    target: PortNumber | None = None
    """Only the copies for this port."""
    nth: Numbers | None = None
    """Only these messages, counted from 1 among those that fit."""
    rate: float = Field(default=1.0, gt=0, le=1)
    """Share of them, drawn by the seed."""


class DropMessages(OnMessages):
    """Messages are lost."""

    kind: Literal["drop"]


class DelayMessages(OnMessages):
    """Messages come `seconds` late."""

    kind: Literal["delay"]
    seconds: Seconds
    """Delay in seconds."""


class DuplicateMessages(OnMessages):
    """Messages come `copies` times more."""

    kind: Literal["duplicate"]
    copies: int = Field(default=1, ge=1, le=1000)
    """Number of further copies."""


class ReorderMessages(OnMessages):
    """Messages come `after` later ones."""

    kind: Literal["reorder"]
    after: int = Field(default=1, ge=1, le=1 << 20)
    """Number of later messages."""


class CorruptQkeys(OnMessages):
    """Messages arrive with another Q_Key."""

    kind: Literal["corrupt-qkey"]


class OnRequests(Lasting):
    port: PortNumber | None = None
    """Only requests of this port."""
    group: GroupText | None = None
    """Only requests of this group."""
    method: SaMethodName | None = None
    """Only requests of this kind."""
    nth: Numbers | None = None
    """Only these requests, counted from 1 among those that fit."""
    rate: float = Field(default=1.0, gt=0, le=1)
    """Share of them, drawn by the seed."""


class SaSilent(OnRequests):
    """The SA does not answer."""

    kind: Literal["sa-silent"]


class SaSlow(OnRequests):
    """The SA answers `seconds` late."""

    kind: Literal["sa-slow"]
    seconds: Seconds
    """Delay in seconds."""


class SaRefuses(OnRequests):
    """The SA refuses with `status`, a name of SaStatus."""

    kind: Literal["sa-refuses"]
    status: SaStatusName = SaStatus.REQ_INVALID
    """Status that is answered, or reported."""


class RestartSm(_Fault):
    """The SM restarts or fails over; there is none for `outage` seconds."""

    kind: Literal["restart-sm"]
    outage: Seconds = 0.0
    """Time without an SM."""


class LinkDown(Lasting):
    """A port's link is down."""

    kind: Literal["link-down"]
    port: PortNumber
    """Number of the port."""


class CutCable(Lasting):
    """A leaf switch loses its link to the root; its hosts see no event."""

    kind: Literal["cut-cable"]
    switch: int = Field(ge=0, le=MAX_LEAVES)
    """Number of the leaf switch, from 1 (0 is the root)."""


class LidChange(_Fault):
    """A port gets another LID."""

    kind: Literal["change-lid"]
    port: PortNumber
    """Number of the port."""


class PkeyChange(Lasting):
    """A port has this P_Key table."""

    kind: Literal["set-pkeys"]
    port: PortNumber
    """Number of the port."""
    pkeys: tuple[Annotated[int, Field(ge=0, le=0xFFFF)], ...] = Field(
        default=(), max_length=0xFFFF, strict=False
    )
    """P_Keys of the port."""


class LateSwitches(Lasting):
    """Switches learn of changes `seconds` late."""

    kind: Literal["program-late"]
    seconds: Seconds
    """Delay in seconds."""


class NoQuerier(Lasting):
    """There is no IGMP querier."""

    kind: Literal["stop-querier"]


class RemoveDevice(Lasting):
    """A port's device is removed, and comes back at `until`."""

    kind: Literal["remove-device"]
    port: PortNumber
    """Number of the port."""


class BondFailover(_Fault):
    """The bond below a port fails over."""

    kind: Literal["bond-failover"]
    port: PortNumber
    """Number of the port."""


class Starve(Lasting):
    """The QPs of a port have no receive."""

    kind: Literal["starve"]
    port: PortNumber
    """Number of the port."""


class OverrunCq(_Fault):
    """The receive CQs of a port overflow."""

    kind: Literal["overrun-cq"]
    port: PortNumber
    """Number of the port."""


class FailQp(_Fault):
    """The QPs of a port fall into ERR with `status`."""

    kind: Literal["fail-qp"]
    port: PortNumber
    """Number of the port."""
    status: WcStatusName = WcStatus.LOC_QP_OP_ERR
    """Status that is answered, or reported."""


ScenarioFault = Annotated[
    DropMessages
    | DelayMessages
    | DuplicateMessages
    | ReorderMessages
    | CorruptQkeys
    | SaSilent
    | SaSlow
    | SaRefuses
    | RestartSm
    | LinkDown
    | CutCable
    | LidChange
    | PkeyChange
    | LateSwitches
    | NoQuerier
    | RemoveDevice
    | BondFailover
    | Starve
    | OverrunCq
    | FailQp,
    Field(discriminator="kind"),
]

FAULTS: dict[str, type[_Fault]] = {
    get_args(kind.model_fields["kind"].annotation)[0]: kind for kind in get_args(get_args(ScenarioFault)[0])
}
"""Name of a fault -> its model."""

_PORTS = ("port", "source", "target")
"""The fields of faults that name a port."""
MAX_LIDS = 0xBFFF - 1
_NEEDS_SA = (SaSilent, SaSlow, SaRefuses, RestartSm, LidChange, PkeyChange, LateSwitches)


class Scenario(_Model):
    """A run with faults: the fabric, its members, the traffic, and the faults by time."""

    name: str = Field(min_length=1, max_length=200)
    """Name of the run."""
    summary: str = Field(default="", max_length=10_000)
    """A sentence about it."""
    seconds: float = Field(gt=0, le=1e6)
    """Length of the run, in virtual time."""
    seed: int = Field(default=0, ge=0, lt=1 << 64)
    """Seed of all that is left to chance."""
    fabric: ScenarioTopology = ScenarioTopology()
    """The table `[fabric]`."""
    members: tuple[Members, ...] = Field(min_length=1, max_length=MAX_FABRIC_PORTS, strict=False)
    """The tables `[[members]]`."""
    traffic: tuple[Traffic, ...] = Field(default=(), max_length=10_000, strict=False)
    """The tables `[[traffic]]`."""
    faults: tuple[ScenarioFault, ...] = Field(default=(), max_length=10_000, strict=False)
    """The tables `[[faults]]`."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        places = [(member.group, port) for member in self.members for port in member.ports]
        for place, count in Counter(places).items():
            if count > 1:
                raise ValueError(f"port {place[1]} is a member of {place[0]} twice")
        for traffic in self.traffic:
            if (traffic.group, traffic.port) not in places:
                raise ValueError(f"port {traffic.port} sends to {traffic.group} but is no member of it")
        for _, port in places:
            _check_port(port, self.fabric.ports)
        for traffic in self.traffic:
            if traffic.size > (mtu := self.fabric.mtu_of(traffic.port)):
                raise ValueError(f"size {traffic.size} is larger than the MTU, {mtu} bytes")
        for fault in self.faults:
            check_fault(fault, self.fabric)
        if (steps := steps_of(self)) > MAX_STEPS:
            raise ValueError(
                f"a run would take some {steps:,.0f} steps, but at most {MAX_STEPS:,} are allowed: "
                "make it shorter, or give it fewer members, messages or faults"
            )
        return self


def steps_of(scenario: Scenario) -> float:
    """Return an upper bound of the steps of a run.

    Steps are copies of messages, reads, joins, and changes of ports by faults."""
    seconds, faults = scenario.seconds, scenario.faults
    receivers: Counter[str] = Counter()
    readers, actions = 0, float(len(faults))
    for member in scenario.members:
        receivers[member.group] += len(member.ports)
        readers += 0 if member.read_every else len(member.ports)
        actions += len(member.ports) * _times(member.join, seconds, member.read_every or seconds)
        actions += len(member.ports) * seconds / RETRY_SECONDS if member.rejoin else 0
    rules = sum(isinstance(fault, OnMessages | OnRequests) for fault in faults)
    max_copies = 1 + max(
        (fault.copies for fault in faults if isinstance(fault, DuplicateMessages)), default=0
    )
    copies = 0.0
    for traffic in scenario.traffic:
        sends = _times(traffic.start, seconds if traffic.stop is None else traffic.stop, traffic.every)
        copies += sends * traffic.burst * receivers[traffic.group] * (max_copies + rules / 10)
        actions += sends
    polls = actions * readers / 100  # whether there is something to read
    return copies + actions + polls + len(faults) * scenario.fabric.ports / 10


def _times(start: float, stop: float, every: float) -> float:
    return max(0.0, stop - start) / every + 1


_FAULT: TypeAdapter[ScenarioFault] = TypeAdapter(ScenarioFault)


def make_fault(fields: Mapping[str, object], fabric: ScenarioTopology) -> ScenarioFault:
    """The fault with these fields, as a scenario has them. Raises BadScenario."""
    _require_fields(fields, fabric.ports)
    try:
        fault = _FAULT.validate_python(fields)
        check_fault(fault, fabric)
    except ValidationError as error:
        raise BadScenario(_sentence(error)) from None
    except ValueError as error:
        raise BadScenario(str(error)) from None
    return fault


def _require_fields(fields: Mapping[str, object], ports: int) -> None:
    """Raise BadScenario for a field that the fault does not have, and for a port that is not a number.

    The sentence lists what there is, because the author of a test's mark does not have the model at hand.
    """
    kind = fields.get("kind")
    model = FAULTS.get(kind) if isinstance(kind, str) else None
    if model is None:
        return  # which the model refuses
    known = [name for name in model.model_fields if name != "kind"]
    for name, value in fields.items():
        if name not in ("kind", *known):
            raise BadScenario(f"there is no field {name} of {kind}: its fields are {', '.join(known)}")
        if name in _PORTS and isinstance(value, str):
            raise BadScenario(f"{name} of {kind} is {value!r}: give the port's number, from 0 to {ports - 1}")


def check_fault(fault: ScenarioFault, fabric: ScenarioTopology) -> None:
    """Raise ValueError if the fault names something that the fabric does not have."""
    for name in _PORTS:
        if (port := getattr(fault, name, None)) is not None:
            _check_port(port, fabric.ports)
    if isinstance(fault, CutCable) and (switch := fault.switch) not in range(1, fabric.switches):
        if fabric.switches < 2:
            raise ValueError(f"switch {switch}: this fabric has one switch, and no leaf to cut off")
        raise ValueError(f"switch {switch}: the leaves are 1..{fabric.switches - 1}")
    infiniband = fabric.link_layer == "infiniband"
    if isinstance(fault, LidChange) and fabric.ports > MAX_LIDS:
        raise ValueError(f"{fault.kind!r} needs a free LID: the fabric may have at most {MAX_LIDS:,} ports")
    if isinstance(fault, _NEEDS_SA) and not infiniband:
        raise ValueError(f'{fault.kind!r} needs an SM: the fabric must be "infiniband"')
    if isinstance(fault, NoQuerier) and infiniband:
        raise ValueError(f'{fault.kind!r} needs IGMP: the fabric must be "roce"')


def _check_port(port: int, ports: int) -> None:
    if port >= ports:
        raise ValueError(f"port {port}: this fabric has ports 0..{ports - 1}")


# --- reading one -----------------------------------------------------------------------------


class BadScenario(ValueError):
    """A scenario that cannot be read; the text is one sentence."""


def ready_made() -> tuple[str, ...]:
    """Names of the scenarios that come with the package."""
    names = (file.name for file in READY_MADE.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def load_fabric(path: Path) -> ScenarioTopology:
    """The fabric that a TOML or YAML file describes: a scenario's, or the fields of one alone.

    Raises BadScenario.
    """
    data = _table(str(path), _text_of(path), _is_yaml(path))
    try:
        return ScenarioTopology.model_validate(data.get("fabric", data))
    except ValidationError as error:
        raise BadScenario(f"{path}: {_sentence(error)}") from None


def load(source: str | Path) -> Scenario:
    """The scenario of a ready-made name, or in a TOML or YAML file. Raises BadScenario."""
    if isinstance(source, str) and source in ready_made():
        return _parse(source, (READY_MADE / f"{source}.toml").read_text(encoding="utf-8"))
    path = Path(source)
    if path.suffix not in (".toml", ".yaml", ".yml") and not os.path.lexists(path):
        known = ", ".join(ready_made())
        raise BadScenario(f"{source} is neither a file nor a ready-made scenario: choose one of {known}")
    return _parse(str(path), _text_of(path), _is_yaml(path))


def _is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise BadScenario(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise BadScenario(f"{path} is no scenario: it is larger than {MAX_FILE_BYTES:,} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise BadScenario(f"{path} is not text: a scenario is TOML or YAML in UTF-8") from None


def _parse(name: str, text: str, yaml: bool = False) -> Scenario:
    data = _table(name, text, yaml)
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        raise BadScenario(f"{name}: {_sentence(error)}") from None


def _table(name: str, text: str, yaml: bool) -> dict[str, object]:
    try:
        data = (_from_yaml if yaml else _from_toml)(text)
    except ImportError:
        raise BadScenario(f"{name}: YAML needs PyYAML: {install.line('yaml')}, or write TOML") from None
    except RecursionError:
        raise BadScenario(f"{name} is no scenario: it is nested too deeply") from None
    except (ValueError, OverflowError) as error:  # syntax, or a number or a date that is none
        raise BadScenario(f"{name} is not {'YAML' if yaml else 'TOML'}: {_short(str(error))}") from None
    if not isinstance(data, dict):
        raise BadScenario(f"{name} is no scenario: that is a table of name, seconds, members and more")
    return data


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{_short(describe_validation_error(first))}{more}"


def _short(text: str) -> str:
    """Return the text on one line, shortened to its beginning and end if it is long.

    It may quote the file.
    """
    line = " ".join(text.split())
    return line if len(line) <= 400 else f"{line[:200]} ... {line[-200:]}"


def _from_toml(text: str) -> object:
    if any(line.count(".") > MAX_DOTS for line in text.splitlines()):
        raise ValueError(f"a line has more than {MAX_DOTS:,} dots")
    return tomllib.loads(text)


_EXPONENT = re.compile("[+-]?[0-9]+(?:[.][0-9]*)?[eE][+-]?[0-9]+")
"""1e-3 is a number, as in TOML and YAML 1.2; PyYAML makes a text of it."""


def _from_yaml(text: str) -> object:
    """Read YAML without aliases and without tags.

    By aliases a short text can stand for a huge one, and tags make values that no field takes.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """With numbers of its own."""

    depth = 0
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            line = 1 + (event.start_mark.line if event.start_mark else 0)
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"line {line} has the alias *{event.anchor}: write out its value")
            if (tag := getattr(event, "tag", None)) is not None:
                raise ValueError(f"line {line} has the tag {tag}: write the value alone")
            if depth > MAX_DEPTH:
                raise ValueError(f"line {line} is nested more than {MAX_DEPTH} deep")
        Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("+-0123456789"))
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
