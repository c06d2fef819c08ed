"""The codec of a served fabric: requests and answers as they go over the request socket of a client.

A frame is a head, a text, and a tail of bytes: the payloads of messages, one after another. The text is JSON,
after the name of the operation in a request. A request has a number, which its answer repeats; one with the
number 0 has no answer. The other sockets of a client carry no frames: a byte lies in the socket of a channel
or queue pair while there is something to ask for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from functools import cache, lru_cache
from ipaddress import IPv4Address, IPv6Address
from struct import Struct
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, PlainSerializer, TypeAdapter

from mcast.api import (
    Capability,
    Cause,
    ClientProcess,
    CmEventType,
    Destination,
    DeviceInfo,
    GroupTable,
    LinkLayer,
    Phase,
    PortEvent,
    PortSpace,
    QpCounters,
    QpInit,
    QpState,
    UdParam,
    WcStatus,
)
from mcast.backends.model.qp import Header
from mcast.wire.addresses import Gid, McastAddress, Mgid

VERSION = 4
"""Version of this protocol; the server refuses a client with another one."""

MAX_REQUEST, MAX_ANSWER = 64 << 20, 1 << 30
"""Bytes of text and tail together."""

REQUEST, ANSWER, REFUSAL = range(1, 4)
"""Kinds of frames."""

FRAME_HEADER = Struct("<BIII")
"""Before the text: the kind, the number of the request, the lengths of text and tail."""
_MAX_READ = 1 << 18
"""Bytes that are read in one go."""

Number = Annotated[int, Field(ge=0, lt=1 << 31)]
Word = Annotated[int, Field(ge=0, le=0xFFFFFFFF)]
LocalIp = IPv4Address | IPv6Address


# --- values ----------------------------------------------------------------------------------


class RawAddress(NamedTuple):
    """A `McastAddress` as it is, also one that was made past its checks (`model_construct`)."""

    kind: Literal["ip", "gid", "family", "nothing"]
    text: str
    port: int

    @classmethod
    def of(cls, address: McastAddress) -> RawAddress:
        """Return the address as it goes over the wire."""
        value: object = address.address
        if isinstance(value, IPv4Address | IPv6Address):
            return cls("ip", str(value), address.port)
        if isinstance(value, Gid):
            return cls("gid", str(value), address.port)
        return cls("family" if isinstance(value, int) else "nothing", str(value), address.port)


def _address(raw: RawAddress) -> McastAddress:
    value: object = None
    if raw.kind == "ip":
        value = IPv6Address(raw.text) if ":" in raw.text else IPv4Address(raw.text)
    elif raw.kind == "gid":
        gid = Gid(raw.text)
        value = Mgid(gid) if gid.is_multicast else gid
    elif raw.kind == "family":
        value = int(raw.text)
    return McastAddress.model_construct(value, raw.port)


Address = Annotated[RawAddress, AfterValidator(_address)]


def plain(value: object) -> object:
    """Return the value as JSON has it.

    Not by pydantic: it wraps what a signal's handler raises while it calls back into Python.
    """
    if isinstance(value, McastAddress):
        return RawAddress.of(value)
    if isinstance(value, BaseModel):
        return {name: plain(field) for name, field in value}
    if isinstance(value, IPv4Address | IPv6Address | Gid):
        return str(value)
    return value.value if isinstance(value, Enum) else value


@lru_cache(maxsize=4096)
def destination_of(text: str) -> Destination:
    """Return the destination of a request, the same object for the same text. Raises ValueError."""
    return Destination.model_validate_json(text)


@lru_cache(maxsize=1024)
def text_of(destination: Destination) -> str:
    """Return the text of a destination in a request."""
    return json.dumps(plain(destination))


class Refusal(NamedTuple):
    """Why a call failed: an errno, or the status of a queue pair in ERR."""

    errno: int
    detail: str = ""
    status: WcStatus | None = None


class Attached(NamedTuple):
    """Description of the fabric for a client; `made` is its start, in ns of the system's monotonic clock."""

    backend: str
    link_layer: LinkLayer
    capabilities: tuple[Capability, ...]
    made: int
    hosts: str


class IdBinding(NamedTuple):
    """Device and port of an id; all None while it is not bound. `pkey` is that of the interface."""

    device: str | None = None
    link_layer: LinkLayer | None = None
    pkey: int | None = None


class CreatedQp(NamedTuple):
    """A queue pair as it was made; `number` names it in requests."""

    number: int
    qp_num: int
    mtu: int
    depth: int
    stamps: bool


class FetchedEvent(NamedTuple):
    """An event, as `CmEvent`; `context` is the number that the join gave."""

    type: CmEventType
    status: int
    errno: int
    context: int | None
    id: int
    ud: UdParam | None
    detail: str
    found: tuple[Cause, ...]


class Messages(NamedTuple):
    """Messages of one send, whose payloads lie in the tail; `own`: the queue pair has sent them itself."""

    source: str
    group: str
    src_qp: int
    slid: int
    imm: int | None
    own: bool
    at: int | None
    lengths: list[int]


class Received(NamedTuple):
    """Result of a receive; `port_changed` is True if the port has unread events."""

    bursts: list[Messages]
    port_changed: bool


@lru_cache(maxsize=4096)
def header_of(source: str, group: str, src_qp: int, slid: int) -> Header:
    """Return what messages of one send have in common."""
    return Header(Gid(source), src_qp, Gid(group), 0, 0, 0, slid)


def _gids_as_text(table: GroupTable) -> tuple[object, ...]:
    """Return the table with text in place of GIDs.

    Before 2.14, pydantic writes GIDs in a NamedTuple as UTF-8.
    """
    return [(str(group.mgid), *group[1:]) for group in table.groups], table.unseen


# --- operations ------------------------------------------------------------------------------


class Operation(NamedTuple):
    """Types of the arguments and the answer of a request, and the phase of its errors."""

    phase: Phase
    arguments: Any
    answer: Any


_TABLE: dict[str, tuple[Phase, Any, Any]] = {
    "attach": (Phase.OPEN, tuple[Number, Literal["free", "all"] | Number, LocalIp | None], Attached),
    "bye": (Phase.CLOSE, tuple[()], None),
    "close": (Phase.CLOSE, tuple[Number], None),
    "devices": (Phase.OPEN, tuple[()], tuple[DeviceInfo, ...]),
    "groups": (Phase.OPEN, tuple[()], Annotated[GroupTable, PlainSerializer(_gids_as_text)]),
    "new_seed": (Phase.OPEN, tuple[()], int),
    "guests": (Phase.OPEN, tuple[()], tuple[ClientProcess, ...]),
    "port_counters": (Phase.OPEN, tuple[str, Number], dict[str, int]),
    "ctl": (Phase.OPEN, tuple[list[str]], tuple[str, ...]),
    "introduction": (Phase.OPEN, tuple[()], str),
    "tap": (Phase.OPEN, tuple[()], None),
    "untap": (Phase.OPEN, tuple[()], int),
    "event_channel": (Phase.OPEN, tuple[()], int),
    "get_event": (Phase.EVENT, tuple[Number], FetchedEvent | None),
    "create_id": (Phase.OPEN, tuple[Number, PortSpace], int),
    "bind_addr": (Phase.BIND, tuple[Number, LocalIp], IdBinding),
    "resolve_addr": (Phase.RESOLVE, tuple[Number, Address, LocalIp | None], IdBinding),
    "join": (Phase.JOIN, tuple[Number, str, Word, Word, Address | None, Number], None),
    "leave_multicast": (Phase.LEAVE, tuple[Number, Address], None),
    "create_qp": (Phase.CREATE_QP, tuple[Number, QpInit], CreatedQp),
    "query_qp": (Phase.EVENT, tuple[Number], tuple[QpState, QpCounters]),
    "attachments": (Phase.ATTACH, tuple[Number], tuple[tuple[Gid, int], ...]),
    "port_events": (Phase.EVENT, tuple[Number], tuple[PortEvent, ...]),
    "modify": (Phase.MODIFY, tuple[Number, QpState], None),
    "attach_mcast": (Phase.ATTACH, tuple[Number, Gid, Number], None),
    "detach_mcast": (Phase.DETACH, tuple[Number, Gid, Number], None),
    "send": (Phase.SEND, tuple[Number, str, list[Number], Word | None], None),
    "recv": (Phase.RECV, tuple[Number, Number, Number], Received),
    "give_back": (Phase.RECV, tuple[Number, Number], None),
    "register": (Phase.REGISTER, tuple[Number, tuple[Number, Number] | None], None),
}
OPERATIONS: dict[str, Operation] = {name: Operation(*row) for name, row in _TABLE.items()}


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the adapter that reads and writes values of that type.

    Made when first used, because each takes a millisecond.
    """
    return TypeAdapter(kind)


def encode(kind: int, number: int, text: bytes, tail: bytes = b"") -> bytes:
    """Return a frame."""
    return b"".join((FRAME_HEADER.pack(kind, number, len(text), len(tail)), text, tail))


def encode_request(name: str, number: int, arguments: tuple[Any, ...], tail: bytes = b"") -> bytes:
    """Return the frame of a request."""
    text = json.dumps([plain(one) for one in arguments])
    return encode(REQUEST, number, f"{name} {text}".encode(), tail)


def decode_request(text: bytes) -> tuple[str, tuple[Any, ...]]:
    """Return name and arguments of a request. Raises ValueError."""
    word, _, arguments = text.partition(b" ")
    name = word.decode()
    if name not in OPERATIONS:
        raise ValueError("there is no such operation")
    return name, adapter(OPERATIONS[name].arguments).validate_json(arguments)


def encode_answer(name: str, number: int, value: object, tail: bytes = b"") -> bytes:
    """Return the frame of an answer."""
    return encode(ANSWER, number, adapter(OPERATIONS[name].answer).dump_json(value), tail)


# --- reading ---------------------------------------------------------------------------------


class FrameError(ValueError):
    """The bytes that were read are no frame, or one that is too long."""


class Frame(NamedTuple):
    """A frame that was read."""

    kind: int
    number: int
    text: bytes
    tail: bytes


class FrameReader:
    """Reads frames from a stream socket that does not block: never a byte beyond the frame."""

    def __init__(self, receive: Callable[[int], bytes], max_size: int) -> None:
        self._receive, self._max_size = receive, max_size
        self._head: tuple[int, int, int, int] | None = None
        self._got = bytearray()

    def read(self) -> Frame | None:
        """Return the next frame; None until all of it is there.

        Raises EOFError at the end of the stream, and FrameError.
        """
        if self._head is None:
            if not self._fill(FRAME_HEADER.size):
                return None
            kind, _, text, tail = self._head = FRAME_HEADER.unpack(self._got)
            if not REQUEST <= kind <= REFUSAL or text + tail > self._max_size:
                raise FrameError("the bytes are no frame, or the frame is too long")
            self._got = bytearray()
        kind, number, text, tail = self._head
        if not self._fill(text + tail):
            return None
        got, self._got, self._head = self._got, bytearray(), None
        return Frame(kind, number, bytes(got[:text]), bytes(got[text:]))

    def _fill(self, size: int) -> bool:
        """Read until there are `size` bytes; return False if they are not all there yet."""
        got = self._got
        while (left := size - len(got)) > 0:
            try:
                data = self._receive(min(left, _MAX_READ))
            except BlockingIOError:
                return False
            if not data:
                raise EOFError
            got += data
        return True
