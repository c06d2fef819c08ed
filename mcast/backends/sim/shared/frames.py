"""What goes over the socket between a client and the server of a fabric: requests, answers, their bounds.

A frame is a packet of a SOCK_SEQPACKET socket: the length of a JSON text, the text, and what is no text
(the payloads of messages). A request is one of the models here; each field has bounds, for a client is a
stranger.
"""

from __future__ import annotations

from functools import cache, lru_cache
from ipaddress import IPv4Address, IPv6Address
from struct import Struct
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, TypeAdapter

from mcast.api import (
    Capability,
    Cause,
    CmEventType,
    Destination,
    DeviceInfo,
    GroupTable,
    Guest,
    LinkLayer,
    PortEvent,
    PortSpace,
    QpCounters,
    QpInit,
    QpState,
    UdParam,
    WcStatus,
)
from mcast.wire.addresses import Gid, McastAddress, Mgid

VERSION = 2
"""The version of the frames in this file; a client or server with another one is refused."""

MOST_PAYLOAD = 96 << 10
"""The most bytes of payloads in one frame; a larger batch goes in several frames."""
MOST_MESSAGES = 1024
"""Messages in one frame."""
MOST_FRAME = 128 << 10
"""Bytes of a frame. An answer that is longer comes in a memory file of its own."""

OK, REFUSED, IN_FILE = 0, 1, 2
"""What an answer is: what was asked for, a `RefusedCall`, or the size of what lies in the file beside it."""

PREFIX = Struct("<IBxH")
"""Before the JSON text: its length, of an answer what it is, and the number of the request."""

Number = Annotated[int, Field(ge=0, lt=1 << 31)]
Lid = Annotated[int, Field(ge=0, le=0xFFFF)]
Word = Annotated[int, Field(ge=0, le=0xFFFFFFFF)]
LocalIp = IPv4Address | IPv6Address


class _Model(BaseModel):
    # pydantic builds each model when it is first used: a client needs few of them.
    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, strict=True, extra="forbid", defer_build=True
    )


class RawAddress(_Model):
    """A `McastAddress` as it is, also one made past its refusals (`model_construct`)."""

    kind: Literal["ipv4", "ipv6", "gid", "family", "nothing"]
    text: str = Field(default="", max_length=64)
    family: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] = 0
    port: int = Field(default=0, ge=0, le=0xFFFF)

    @classmethod
    def of(cls, address: McastAddress) -> RawAddress:
        """The value on the wire."""
        value: object = address.address
        match value:
            case IPv4Address():
                return cls(kind="ipv4", text=str(value), port=address.port)
            case IPv6Address():
                return cls(kind="ipv6", text=str(value), port=address.port)
            case Gid():
                return cls(kind="gid", text=str(value), port=address.port)
            case int():
                return cls(kind="family", family=value, port=address.port)
            case _:
                return cls(kind="nothing", port=address.port)

    def value(self) -> McastAddress:
        """The address again. Raises ValueError for a text that is none."""
        return _address(self)


@lru_cache(maxsize=4096)
def _address(raw: RawAddress) -> McastAddress:
    value: object = None
    match raw.kind:
        case "ipv4":
            value = IPv4Address(raw.text)
        case "ipv6":
            value = IPv6Address(raw.text)
        case "gid":
            gid = Gid(raw.text)
            value = Mgid(gid) if gid.is_multicast else gid
        case "family":
            value = raw.family
    return McastAddress.model_construct(value, raw.port)


# --- requests --------------------------------------------------------------------------------


class AttachTo(_Model):
    """The first one: which host to be. `bind`: the one that has the address."""

    op: Literal["attach"] = "attach"
    version: Number = VERSION
    host: Literal["free", "all"] | Number = "free"
    bind: LocalIp | None = None


class AskFor(_Model):
    """What needs no argument."""

    op: Literal[
        "devices", "groups", "seed", "open_channel", "guests", "introduction", "tap", "untap", "make_room"
    ]


class Command(_Model):
    """Do something to the fabric, in the words of `mcast sim ctl`."""

    op: Literal["ctl"] = "ctl"
    words: Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=32)]


class PortCounters(_Model):
    op: Literal["port_counters"] = "port_counters"
    device: str = Field(max_length=64)
    port_num: Number


class OnChannel(_Model):
    op: Literal["close_channel", "get_event"]
    channel: Number


class CreateId(_Model):
    op: Literal["create_id"] = "create_id"
    channel: Number
    port_space: PortSpace


class OnId(_Model):
    op: Literal["destroy", "place"]
    id: Number


class BindId(_Model):
    op: Literal["bind"] = "bind"
    id: Number
    src: LocalIp


class Resolve(_Model):
    op: Literal["resolve"] = "resolve"
    id: Number
    dst: RawAddress
    src: LocalIp | None


class CreateQp(_Model):
    op: Literal["create_qp"] = "create_qp"
    id: Number
    init: QpInit


class JoinGroup(_Model):
    """`addr` None stands for what is no address at all."""

    op: Literal["join"] = "join"
    id: Number
    call: Literal["join_multicast", "join_multicast_ex"]
    mask: Word
    flags: Word
    addr: RawAddress | None
    context: Annotated[int, Field(ge=0, lt=1 << 62)]


class LeaveGroup(_Model):
    op: Literal["leave"] = "leave"
    id: Number
    addr: RawAddress


class OnQp(_Model):
    op: Literal["look", "attachments", "close_qp", "port_events"]
    qp: Number


class ModifyQp(_Model):
    op: Literal["modify"] = "modify"
    qp: Number
    state: QpState


class AttachQp(_Model):
    op: Literal["attach_mcast", "detach_mcast"]
    qp: Number
    gid: Gid
    lid: Lid


class SendBurst(_Model):
    """`to` is the JSON text of a `Destination`; the payloads follow the frame's text, one after the other."""

    op: Literal["send"] = "send"
    qp: Number
    to: str = Field(max_length=2048)
    lengths: Annotated[list[Annotated[int, Field(ge=0, le=MOST_PAYLOAD)]], Field(max_length=MOST_MESSAGES)]
    imm: Word | None = None


class WantRing(_Model):
    """The descriptor of a ring that holds messages for the queue pair."""

    op: Literal["ring"] = "ring"
    qp: Number
    ring: Annotated[int, Field(ge=1, lt=1 << 62)]


class WantPayloads(_Model):
    """Messages that the queue pair was told of and that lie in no ring any more, by their number."""

    op: Literal["payloads"] = "payloads"
    qp: Number
    first: Annotated[int, Field(ge=0, lt=1 << 62)]
    count: Annotated[int, Field(ge=1, le=MOST_MESSAGES)]


class GiveBack(_Model):
    """Receives are free again. Nothing is answered."""

    op: Literal["give_back"] = "give_back"
    qp: Number
    count: Number


class Repost(_Model):
    """Replace all receives by `depth` ones of `room` bytes; None: by those that the QP was made with."""

    op: Literal["repost"] = "repost"
    qp: Number
    receives: tuple[Annotated[int, Field(ge=1, le=1 << 24)], Annotated[int, Field(ge=0, le=1 << 30)]] | None


AnyRequest = Annotated[
    AttachTo
    | AskFor
    | Command
    | PortCounters
    | OnChannel
    | CreateId
    | OnId
    | BindId
    | Resolve
    | CreateQp
    | JoinGroup
    | LeaveGroup
    | OnQp
    | ModifyQp
    | AttachQp
    | SendBurst
    | WantRing
    | WantPayloads
    | GiveBack
    | Repost,
    Field(discriminator="op"),
]

REQUEST: TypeAdapter[Any] = TypeAdapter(AnyRequest, config=ConfigDict(defer_build=True))


@lru_cache(maxsize=4096)
def destination_of(text: str) -> Destination:
    """The destination that a request names, the same object for the same text. Raises ValueError."""
    return Destination.model_validate_json(text)


# --- answers ---------------------------------------------------------------------------------


class RefusedCall(NamedTuple):
    """Why a call failed: an errno, or the status of a QP in ERR."""

    errno: int
    detail: str = ""
    status: WcStatus | None = None


class AttachedTo(NamedTuple):
    """What the client has to know of the fabric. `made` is when, in ns of the system's monotonic clock."""

    backend: str
    link_layer: LinkLayer
    capabilities: tuple[Capability, ...]
    made: int
    hosts: str
    ports: int


class IdPlace(NamedTuple):
    """What an id is bound to: all None where that is nothing yet. `pkey` is that of the interface."""

    device: str | None = None
    link_layer: LinkLayer | None = None
    pkey: int | None = None


class MadeQp(NamedTuple):
    """A queue pair as it was made. `number` names it in requests."""

    number: int
    qp_num: int
    mtu: int
    depth: int
    room: int
    stamps: bool
    word: int
    """Where the client's ring counts the receives that it gives back; 0: nowhere, it says so."""


class HeardEvent(NamedTuple):
    """An event, as `CmEvent`; `context` is the number that the join gave."""

    type: CmEventType
    status: int
    errno: int
    context: int | None
    id: int
    ud: UdParam | None
    detail: str
    found: tuple[Cause, ...]


class QpLook(NamedTuple):
    """A queue pair as it is now."""

    state: QpState
    counters: QpCounters


class QpNews(NamedTuple):
    """What the port has told, and the status of a QP in ERR."""

    events: tuple[PortEvent, ...]
    failed: WcStatus | None


class Sent(NamedTuple):
    """A send was carried out; and may be posted next time, to this number, while the page says `change`."""

    slot: int | None
    change: int


def _spelt(table: GroupTable) -> tuple[object, ...]:
    """The table with text in place of GIDs: before 2.14, pydantic writes those in a NamedTuple as UTF-8."""
    return [(str(group.mgid), *group[1:]) for group in table.groups], table.unseen


ANSWERS: dict[str, Any] = {
    "refused": RefusedCall,
    "attach": AttachedTo,
    "devices": tuple[DeviceInfo, ...],
    "groups": Annotated[GroupTable, PlainSerializer(_spelt)],
    "guests": tuple[Guest, ...],
    "ctl": tuple[str, ...],
    "introduction": str,
    "untap": int,
    "seed": int,
    "open_channel": int,
    "port_counters": dict[str, int],
    "get_event": HeardEvent | None,
    "create_id": int,
    "place": IdPlace,
    "bind": IdPlace,
    "resolve": IdPlace,
    "create_qp": MadeQp,
    "look": QpLook,
    "attachments": tuple[tuple[Gid, int], ...],
    "port_events": QpNews,
    "send": Sent,
    "make_room": int,
}
"""What each request is answered with; None for those that are not here."""


@cache
def answer(op: str) -> TypeAdapter[Any]:
    """What reads and writes the answer to that request."""
    kind: Any = ANSWERS.get(op)
    return TypeAdapter(kind)


TEXT: TypeAdapter[str] = TypeAdapter(str)

_HEADER = Struct("<16s16sIHxx")


@lru_cache(maxsize=4096)
def pack_header(source: bytes, group: bytes, src_qp: int, slid: int) -> bytes:
    """What receivers are told of a message's headers, in 40 bytes."""
    return _HEADER.pack(source, group, src_qp, slid)


@lru_cache(maxsize=4096)
def unpack_header(text: bytes) -> tuple[Gid, Gid, int, int]:
    """Source, group, QP number and LID of the sender."""
    source, group, src_qp, slid = _HEADER.unpack(text)
    return Gid(source), Gid(group), src_qp, slid


def pack(text: bytes, tail: bytes = b"", kind: int = OK, number: int = 0) -> bytes:
    """A frame; a request has any number, and its answer the same."""
    return PREFIX.pack(len(text), kind, number) + text + tail


def unpack(frame: memoryview) -> tuple[int, int, memoryview, memoryview]:
    """What an answer is, the number of the request, the text of the frame, and what follows it.

    Raises ValueError for what is no frame.
    """
    if len(frame) < PREFIX.size:
        raise ValueError(f"a frame of {len(frame)} bytes is cut short")
    length, kind, number = PREFIX.unpack_from(frame)
    end = PREFIX.size + length
    if end > len(frame):
        raise ValueError(f"a frame of {len(frame)} bytes has no text of {length}")
    return kind, number, frame[PREFIX.size : end], frame[end:]
