"""Everything that happened on a fabric, in order, with virtual time: the same seed gives the same bytes.

A trace is a list of entries: a time in ns and an event. The events are the classes below and in
`mcast.backends.model.log`, one for each kind; `what` is a kind's name in a line of JSON, and `KINDS` the
table of all kinds. A line has `t`, `what` and the event's own fields: GIDs and addresses as text, payloads in
hex, statuses by name. `Trace.load` reads lines back.

A message has a number of its own on the fabric; `first` and `count` name a run of numbers. A membership is
named by the `id` that joined and its group.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Annotated, Literal, NamedTuple, TypeAlias, get_args

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
)

from mcast.backends.model.log_events import U16, U24, U63, LogEvent, ModelEvent
from mcast.wire.addresses import Gid
from mcast.wire.mcmember import McMemberRecord

__all__ = ["KINDS", "Entry", "TraceEvent", "Trace"]


def _record_to_json(record: McMemberRecord) -> dict[str, object]:
    gids = {name: str(Gid(getattr(record, name))) for name in ("mgid", "port_gid")}
    return {**record._asdict(), "join_state": int(record.join_state), **gids}


def _record_from_json(value: object) -> McMemberRecord:
    if isinstance(value, McMemberRecord):
        return value
    if not isinstance(value, dict):
        raise ValueError("an MCMemberRecord is an object of its fields")
    gids = {name: bytes(Gid(value[name])) for name in ("mgid", "port_gid")}
    for name, number in value.items():
        if name not in gids and not isinstance(number, int):
            raise ValueError(f"{name} is {number!r}, not a whole number")
    record = McMemberRecord(**{**value, **gids})
    record.pack()  # it says what does not fit
    return record


Payload = Annotated[
    bytes,
    BeforeValidator(lambda value: bytes.fromhex(value) if isinstance(value, str) else value),
    PlainSerializer(bytes.hex, when_used="json"),
]
TraceRecord = Annotated[
    McMemberRecord, PlainValidator(_record_from_json), PlainSerializer(_record_to_json, when_used="json")
]
"""A record that is an object of its fields in JSON."""


U4: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 4)]
U8: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 8)]
U20: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 20)]
U32: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 32)]
U64: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 64)]


class FabricMade(LogEvent):
    """The fabric; the first line."""

    what: Literal["fabric"] = "fabric"
    link_layer: str
    seed: int


class PortMade(LogEvent):
    """A port as it was made; `addresses` are those of its interfaces, `lid` is 0 on Ethernet."""

    what: Literal["port"] = "port"
    port: str
    host: U32
    switch: U32
    guid: U64
    lid: U16
    mtu: U16
    addresses: tuple[str, ...]
    gids: tuple[Gid, ...]


class SaAsked(LogEvent):
    """A port asked the SA; `tid` is the same in the answer, `mask` is the request's component mask."""

    what: Literal["sa-request"] = "sa-request"
    port: str
    lid: U16
    tid: U64
    method: str
    mask: U64
    record: TraceRecord


class SaAnswered(LogEvent):
    """The SA's answer: `status` as in SaStatus; without a status, the port has given up waiting."""

    what: Literal["sa-answer"] = "sa-answer"
    port: str
    lid: U16
    tid: U64
    method: str
    mask: U64
    status: str | None
    record: TraceRecord | None


class IgmpReport(LogEvent):
    """The port reported its first membership of the group, from the address `source`."""

    what: Literal["igmp-report"] = "igmp-report"
    port: str
    source: str
    group: Gid


class IgmpLeave(LogEvent):
    """The port's last membership of the group is given up."""

    what: Literal["igmp-leave"] = "igmp-leave"
    port: str
    source: str
    group: Gid


class Send(LogEvent):
    """The messages of one send call went on the wire, with all that their headers carry.

    `psn` is that of the first.
    """

    what: Literal["send"] = "send"
    port: str
    qp: U24
    first: U63
    psn: U24
    source: Gid
    group: Gid
    dest_qp: U24
    slid: U16
    dlid: U16
    sl: U4
    qkey: U32
    pkey: U16
    hop_limit: U8
    traffic_class: U8
    flow_label: U20
    imm: U32 | None
    payloads: tuple[Payload, ...]


class Unsent(LogEvent):
    """The messages of one send call never left the port, and why."""

    what: Literal["unsent"] = "unsent"
    port: str
    qp: U24
    group: Gid
    count: U24
    reason: str


class Deliver(LogEvent):
    """Messages are in the receive queue of a QP."""

    what: Literal["deliver"] = "deliver"
    port: str
    qp: U24
    group: Gid
    first: U63
    count: U24


class MessagesLost(LogEvent):
    """Messages that a QP attached to their group did not get, and why."""

    what: Literal["drop"] = "drop"
    port: str
    qp: U24
    group: Gid
    first: U63
    count: U24
    reason: str


class Link(LogEvent):
    """A port's link goes down or comes up."""

    what: Literal["link"] = "link"
    port: str
    up: bool


class DeviceRemoval(LogEvent):
    """A device was removed, and its memberships with it."""

    what: Literal["device-removal"] = "device-removal"
    port: str


class FaultInjected(LogEvent):
    """A fault that a user of the fabric asked for; `port` if it is one of a port, `detail` in words."""

    what: Literal["fault"] = "fault"
    name: str
    port: str | None = None
    detail: str = ""


TraceEvent: TypeAlias = (
    ModelEvent
    | FabricMade
    | PortMade
    | SaAsked
    | SaAnswered
    | IgmpReport
    | IgmpLeave
    | Send
    | Unsent
    | Deliver
    | MessagesLost
    | Link
    | DeviceRemoval
    | FaultInjected
)

KINDS: dict[str, type[LogEvent]] = {kind.model_fields["what"].default: kind for kind in get_args(TraceEvent)}
"""Name in the trace -> class."""


@cache
def _adapter() -> TypeAdapter[TraceEvent]:
    return TypeAdapter(Annotated[TraceEvent, Discriminator("what")])


class Entry(NamedTuple):
    """An event, and when it happened, in ns since the fabric was made."""

    t: int
    event: TraceEvent

    def __str__(self) -> str:
        return json.dumps({"t": self.t, **self.event.model_dump(mode="json")})


class Trace:
    """The entries of a run; `str(trace)` is its lines of JSON."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries = list(entries)

    def add(self, now: int, event: TraceEvent) -> None:
        self._entries.append(Entry(now, event))

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __str__(self) -> str:
        return "\n".join(map(str, self._entries))

    @classmethod
    def load(cls, text: str) -> Trace:
        """The trace in JSON lines. Raises ValueError with the number of the line that is none."""
        return cls(parse(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())


def parse(number: int, line: str) -> Entry:
    """The entry in a line of JSON. Raises ValueError with `number`, that of the line, for another text."""
    try:
        fields = json.loads(line)
        t = int(fields.pop("t"))
        if not 0 <= t < 1 << 63:
            raise ValueError("its time is not in 0 .. 2**63 ns")
        return Entry(t, _adapter().validate_python(fields))
    except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"line {number} is no line of a trace: {error}") from None
