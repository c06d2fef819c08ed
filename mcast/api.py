"""The contract of mcast: what every provider does, sentence by sentence.

A sentence of the sources carries its clause id (`mcast.conformance.clauses`); a measured behaviour
names its fact sheet. Providers subclass `Backend`, `EventChannel`, `CmId` and `QueuePair` and implement
the underscored methods; the public ones enforce what is the same everywhere:

G-GROUP  a unicast or zero address is no group: refused when `McastAddress` is made
G-JOIN   a second join of a group that the id has joined, by whatever address and port: `AlreadyJoined`
G-MTU    a message larger than one MTU of the port, or of the group where that is known to be smaller:
         `MessageTooLarge`, and nothing of its batch is sent
G-MLID   one MGID with a second MLID on one QP: `SecondMlid`

Units: seconds for timeouts (None waits without end, 0 polls), bytes for sizes, Gbit/s for rates.
The objects of one event channel may be used from several threads at once. Ctrl-C ends a call where it waits;
a call that it ends is done or not done (`mcast.interrupts`).
"""

from __future__ import annotations

import errno as E
import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, IntEnum, IntFlag
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from typing_extensions import Buffer

from mcast.addresses import Gid, McastAddress, Mgid
from mcast.batch import NO_VIEW, Batch, DeviceBytes, Message
from mcast.causes import Cause, LinkLayer, Phase
from mcast.diagnosis import Finding, Level
from mcast.errors import (
    AddressNotAvailable,
    AlreadyJoined,
    BackendError,
    BackendUnavailable,
    Closed,
    DeviceGone,
    GuardError,
    InvalidArgument,
    McastError,
    MembershipLost,
    MessageTooLarge,
    NotSupported,
    OutOfResources,
    PermissionDenied,
    QpError,
    SecondMlid,
    TimedOut,
    UnavailableReason,
    UnknownBackend,
    Unreachable,
    WcStatus,
    mcast_error,
)
from mcast.interrupts import Enterable, made_or_undone, uninterrupted
from mcast.mcmember import MLID_FIRST

if TYPE_CHECKING:
    from mcast.testbed import Testbed

J = TypeVar("J")

__all__ = [
    "GRH_BYTES",
    "MULTICAST_QPN",
    "RDMA_UDP_QKEY",
    "AddressNotAvailable",
    "AlreadyJoined",
    "Backend",
    "BackendError",
    "BackendUnavailable",
    "Batch",
    "Capability",
    "Cause",
    "Closed",
    "CmEvent",
    "CmEventType",
    "CmId",
    "CompMask",
    "CqModeration",
    "Destination",
    "DeviceBytes",
    "DeviceGone",
    "DeviceInfo",
    "DeviceRegion",
    "EventChannel",
    "Finding",
    "Gid",
    "GroupInfo",
    "GroupMember",
    "GroupSource",
    "GroupTable",
    "GuardError",
    "InvalidArgument",
    "JoinAttrEx",
    "JoinFlag",
    "Level",
    "LinkLayer",
    "McastAddress",
    "McastError",
    "MembershipLost",
    "Message",
    "MessageTooLarge",
    "Mgid",
    "MtuSource",
    "NotSupported",
    "OutOfResources",
    "PermissionDenied",
    "Phase",
    "PortEvent",
    "PortInfo",
    "PortSpace",
    "PortState",
    "Provider",
    "QpCounters",
    "QpError",
    "QpInit",
    "QpState",
    "QpType",
    "QueuePair",
    "Region",
    "SecondMlid",
    "Status",
    "TimedOut",
    "TimestampClock",
    "UdParam",
    "UnavailableReason",
    "UnknownBackend",
    "Unreachable",
    "WcStatus",
    "mcast_error",
]

GRH_BYTES = 40
"""Bytes that a UD receive keeps free for the GRH (facts: kernel, data); never part of a payload here."""

MULTICAST_QPN = 0xFFFFFF
"""The QP number that every multicast message is addressed to (facts: kernel, join event)."""

RDMA_UDP_QKEY = 0x01234567
"""The Q_Key of PortSpace.UDP (facts: kernel, join event). Take a group's from its join event instead."""


class _Model(BaseModel):
    # Built when first used: that takes a third of the time to import this module.
    model_config = ConfigDict(
        frozen=True, strict=True, arbitrary_types_allowed=True, extra="forbid", defer_build=True
    )


# --- enumerations ----------------------------------------------------------


class PortSpace(IntEnum):
    """rdma_port_space. UDP joins groups, and so does IPOIB on InfiniBand; TCP and IB make RC and UC QPs."""

    IPOIB = 0x0002
    TCP = 0x0106
    UDP = 0x0111
    IB = 0x013F


class QpType(IntEnum):
    """ibv_qp_type. Only UD may be attached to a group (AT-3)."""

    RC = 2
    UC = 3
    UD = 4


class QpState(IntEnum):
    """ibv_qp_state. A UD QP goes RESET, INIT, RTR, RTS; RESET and ERR are reached from any state."""

    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6


class CompMask(IntFlag):
    """Which fields of JoinAttrEx are valid: a bitwise OR (JEX-1). Both are needed."""

    ADDRESS = 1
    JOIN_FLAGS = 2


class JoinFlag(IntEnum):
    """rdma_cm_mc_join_flags: a single one of these (JEX-2)."""

    FULLMEMBER = 0
    """Create the group, send to it, receive from it (JEX-3, JEX-4, JEX-5)."""
    SENDONLY_FULLMEMBER = 1
    """Create the group, send to it; nothing is received and no QP attached (JEX-6, JEX-7, JEX-8)."""


class CmEventType(IntEnum):
    """rdma_cm_event_type; a number that this version does not know reads as UNKNOWN."""

    ADDR_RESOLVED = 0
    ADDR_ERROR = 1
    ROUTE_RESOLVED = 2
    ROUTE_ERROR = 3
    CONNECT_REQUEST = 4
    CONNECT_RESPONSE = 5
    CONNECT_ERROR = 6
    UNREACHABLE = 7
    REJECTED = 8
    ESTABLISHED = 9
    DISCONNECTED = 10
    DEVICE_REMOVAL = 11
    MULTICAST_JOIN = 12
    MULTICAST_ERROR = 13
    ADDR_CHANGE = 14
    TIMEWAIT_EXIT = 15
    UNKNOWN = -1

    @classmethod
    def _missing_(cls, value: object) -> CmEventType:
        return cls.UNKNOWN


class PortState(IntEnum):
    """ibv_port_state."""

    NOP = 0
    DOWN = 1
    INIT = 2
    ARMED = 3
    ACTIVE = 4
    ACTIVE_DEFER = 5


class PortEvent(IntEnum):
    """ibv_event_type, those of a port: what `QueuePair.port_events` tells.

    ERR         the link is down: nothing is sent or received. On InfiniBand the kernel ends each membership
                of the port (MULTICAST_ERROR, ENETRESET); on RoCE it keeps them (facts: kernel, device events)
    ACTIVE      the link is up again
    GID_CHANGE  the GID table is another one: `Destination.sgid_index` may name another GID, or none

    By the others the subnet manager has changed something; MULTICAST_ERROR ends memberships that this costs.
    """

    ACTIVE = 9
    ERR = 10
    LID_CHANGE = 11
    PKEY_CHANGE = 12
    SM_CHANGE = 13
    CLIENT_REREGISTER = 17
    GID_CHANGE = 18


class TimestampClock(Enum):
    """What the time stamps of received messages count from, in nanoseconds.

    Stamps of one clock alone can be compared: DEVICE is another one on each device.
    """

    REALTIME = "realtime"
    """The epoch, as time.time_ns: the device's clock, which the driver holds to the host's."""
    DEVICE = "device"
    """Any moment: the device's own clock. It starts again when its counter is full, and drifts."""
    VIRTUAL = "virtual"
    """The making of a simulated fabric, as Backend.now."""


class Capability(Enum):
    """What a backend's fabric can show; tests ask these, never a backend's name."""

    IGMP = "full members are announced by IGMP"
    SA = "a subnet administrator keeps the groups"
    MLID = "groups have MLIDs, and attach checks their range"
    IPV6_GROUP = "IPv6 groups can be joined"
    RAW_MGID = "raw MGIDs (AF_IB) can be joined"
    CONNECTED_QP = "RC and UC QPs can be created"
    GROUP_TABLE = "groups() shows the full memberships of the own ports"


# --- values ----------------------------------------------------------------


class JoinAttrEx(_Model):
    """rdma_cm_join_mc_attr_ex: what `CmId.join_multicast_ex` takes.

    `full_member(addr)` and `send_only(addr)` make the two that exist. A wrong value is refused here;
    `model_construct` goes round that, and the backend answers with the errno of the real stack:
    reserved comp_mask bit EOPNOTSUPP, missing bit EINVAL, other join_flags EINVAL (JEX-1, JEX-2).
    """

    comp_mask: CompMask = CompMask.ADDRESS | CompMask.JOIN_FLAGS
    join_flags: JoinFlag = JoinFlag.FULLMEMBER
    addr: McastAddress

    @field_validator("comp_mask", mode="plain")
    @classmethod
    def _both_fields(cls, value: object) -> CompMask:
        both = CompMask.ADDRESS | CompMask.JOIN_FLAGS
        if not isinstance(value, int) or value != both:
            raise ValueError(
                f"{value!r} is not ADDRESS | JOIN_FLAGS (3): both fields are needed, no other exists"
            )
        return both

    @field_validator("join_flags", mode="plain")
    @classmethod
    def _single_flag(cls, value: object) -> JoinFlag:
        try:
            return JoinFlag(value)  # type: ignore[arg-type]
        except ValueError:
            raise ValueError(f"{value!r} is not one of FULLMEMBER (0), SENDONLY_FULLMEMBER (1)") from None

    @field_validator("addr", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> McastAddress:
        return McastAddress.of(value)

    @classmethod
    def full_member(cls, addr: McastAddress | IPv4Address | IPv6Address | Mgid | str) -> JoinAttrEx:
        """Create the group if need be, send and receive (JEX-3..5)."""
        return cls(join_flags=JoinFlag.FULLMEMBER, addr=McastAddress.of(addr))

    @classmethod
    def send_only(cls, addr: McastAddress | IPv4Address | IPv6Address | Mgid | str) -> JoinAttrEx:
        """Create the group if need be, send only (JEX-6..10)."""
        return cls(join_flags=JoinFlag.SENDONLY_FULLMEMBER, addr=McastAddress.of(addr))


class CqModeration(_Model):
    """When the device tells of messages that wait: after `count` of them, or `period` µs after the first.

    Both are 1..65535; without a period a sleeper might never hear of the last messages. Some devices allow
    less.
    """

    count: int
    period: int

    @field_validator("count", "period")
    @classmethod
    def _both(cls, value: int, info: ValidationInfo) -> int:
        if not 1 <= value <= 0xFFFF:
            what = "messages" if info.field_name == "count" else "microseconds"
            raise ValueError(
                f"{info.field_name} is {value}: give 1..65535 {what}; without a count nothing is moderated, "
                "and without a period the last messages of a burst might wake nobody"
            )
        return value


class QpInit(_Model):
    """What `CmId.create_qp` takes.

    max_recv_size   payload room of a receive in bytes, GRH room not counted; None: one MTU
    block_loopback  ask the device not to return the QP's own multicast messages to it. Many cannot, and
                    refuse; some accept and return them all the same (facts: users, 16)
    busy_poll       seconds that a call which waits looks at the completion queue before it sleeps; inf: it
                    never sleeps. Its timeout, a close, a signal and, with `events`, an event end it all the
                    same. With 0 it looks for some 50 µs, which is what sleeping and waking cost
    comp_vector     which of the device's completion vectors tells of the QP's completions; None: in turn
    moderation      tell of several received messages at once (ibv_modify_cq); None: of each
    timestamps      stamp each message as it arrives (`Message.timestamp`, `QueuePair.timestamp_clock`)

    A simulated fabric takes the last four, too, but of them only `timestamps` does anything there: nobody
    sleeps on a completion queue, and waiting takes virtual time.
    """

    qp_type: QpType = QpType.UD
    max_send_wr: int = Field(default=128, ge=1, le=1 << 20)
    max_recv_wr: int = Field(default=512, ge=1, le=1 << 20)
    max_recv_size: int | None = Field(default=None, ge=0, le=1 << 16)
    block_loopback: bool = False
    busy_poll: float = Field(default=0.0, ge=0)
    comp_vector: int | None = Field(default=None, ge=0)
    moderation: CqModeration | None = None
    timestamps: bool = False


class MtuSource(Enum):
    """Who says what a group's MTU is."""

    SA = "the SA's record of the group says so"
    IPOIB = (
        "that of the IPoIB broadcast group, below which no group's is; where /dev/infiniband/umad* may be "
        "read and written the SA is asked, and may say more"
    )


class Destination(_Model):
    """Where a UD message goes: an address handle's attributes, and the remote QP number and Q_Key.

    A join event carries its group's, ready to use; `reply_to` makes one from it for a reply. `dlid` is
    the MLID on InfiniBand and 0 on RoCE. `static_rate` is an ibv_rate: the device sends no faster than that
    to a group with slower members; 0 leaves the rate to the port. `traffic_class` stands in the GRH or IP
    header of what is sent; its upper six bits are the DSCP. `sl` is the service level, on RoCE the priority.

    `group_mtu`, in bytes, bounds the messages to an InfiniBand group (guard G-MTU): where members have links
    of different MTUs it may be less than the port's. `mtu_source` is who says so. None: nobody does, and the
    port's MTU is the bound.
    """

    gid: Gid
    qp_num: int = Field(default=MULTICAST_QPN, ge=0, le=0xFFFFFF)
    qkey: int = Field(default=RDMA_UDP_QKEY, ge=0, le=0xFFFFFFFF)
    dlid: int = Field(default=0, ge=0, le=0xFFFF)
    sl: int = Field(default=0, ge=0, le=15)
    port_num: int = Field(default=1, ge=1, le=255)
    sgid_index: int = Field(default=0, ge=0, le=0xFFFF)
    hop_limit: int = Field(default=64, ge=0, le=255)
    traffic_class: int = Field(default=0, ge=0, le=255)
    flow_label: int = Field(default=0, ge=0, le=0xFFFFF)
    is_global: bool = True
    static_rate: int = Field(default=0, ge=0, le=255)
    src_path_bits: int = Field(default=0, ge=0, le=127)
    group_mtu: int | None = Field(default=None, ge=1)
    mtu_source: MtuSource | None = None

    def marked(self, traffic_class: int | None = None, sl: int | None = None) -> Destination:
        """The same, for messages of that traffic class (`dscp << 2`) and service level; None changes nothing.

        RoCE: a join event's destination has 0 for both, also where RDMA_OPTION_ID_TOS was set: the kernel
        reads that option for connections, and not in cma_iboe_join_multicast (measured on Linux 6.1).
        InfiniBand: a join event's destination has the group's, as the SA says.
        """
        wanted = {"traffic_class": traffic_class, "sl": sl}
        changed = {name: value for name, value in wanted.items() if value is not None}
        return Destination(**{**dict(self), **changed}) if changed else self

    def can_reply_to(self, message: Message) -> bool:
        """Whether the sender of a message that came over this group is somebody who can be answered.

        The sender's address and queue pair are what the message says. A send to an address of the other IP
        version puts the own queue pair into ERR on RoCE, and a multicast address would spread the answer.
        """
        source = message.source
        if not 1 < message.src_qp < MULTICAST_QPN:
            return False
        if not any(source):  # without a GRH; on InfiniBand its LID says where it came from
            return 0 < message.src_lid < MLID_FIRST
        return (
            not source.is_multicast
            and (source.ipv4 is None) == (self.gid.ipv4 is None)
            and not (source.ipv4 is not None and _is_nobody(source.ipv4))
        )

    def reply_to(self, message: Message) -> Destination:
        """Where to answer a message that came over this group: its sender's QP alone, on the way it came.

        On InfiniBand a message without a GRH is answered by LID, within the subnet. ValueError for one that
        does not say where it came from: without a GRH on Ethernet.
        """
        has_grh = any(message.source)
        if not has_grh and not message.src_lid:
            raise ValueError("the message has neither a GRH nor a LID of its sender: it cannot be answered")
        sender: dict[str, object] = {"gid": message.source, "qp_num": message.src_qp}
        sender |= {"dlid": message.src_lid, "src_path_bits": message.path_bits, "is_global": has_grh}
        if message.sl is not None:
            sender["sl"] = message.sl
        return self.model_copy(update=sender)


def _is_nobody(address: IPv4Address) -> bool:
    return address.is_unspecified or address.is_loopback or address.is_reserved


class UdParam(NamedTuple):
    """rdma_ud_param of a join event."""

    qp_num: int
    qkey: int
    destination: Destination


class PortInfo(_Model):
    """One port of a device. `active_mtu` in bytes, `rate` in Gbit/s, `lid` 0 on Ethernet.

    `gids` is the GID table: `Destination.sgid_index` -> GID, without its empty entries.
    """

    port_num: int
    state: PortState
    link_layer: LinkLayer
    active_mtu: int
    rate: float
    lid: int
    gids: Mapping[int, Gid]
    addresses: tuple[IPv4Address | IPv6Address, ...]


class DeviceInfo(_Model):
    """One RDMA device and its limits (DT-7): groups per device, QPs per group.

    `num_comp_vectors` is how many completion vectors there are for `QpInit.comp_vector`, numbered from 0:
    each is an interrupt that the host may give to another processor.
    """

    name: str
    node_guid: int
    max_mcast_grp: int
    max_mcast_qp_attach: int
    max_qp_wr: int
    ports: tuple[PortInfo, ...]
    num_comp_vectors: int = 1


class CmEvent(NamedTuple):
    """A communication event, copied and acked in the call that read it: holding one blocks nothing.

    status   as the stack reports it: 0, or negative
    errno    why it failed, 0 if it did not; for a failed attach at retrieval, the attach's errno
    context  the object given to the join, the same one (JEX-17)
    id       the CmId it belongs to
    ud       for MULTICAST_JOIN: qp_num 0xFFFFFF, Q_Key, and the Destination to send to
    detail   what the provider knows beyond the errno, such as the SA's status; empty if that is all
    found    causes of a failure that the provider found by asking the fabric; empty where it could not
    """

    type: CmEventType
    status: int
    errno: int
    context: Any
    id: Any
    ud: UdParam | None
    detail: str = ""
    found: tuple[Cause, ...] = ()

    def check(self) -> Self:
        """Return the event; raise the `McastError` of its errno if it reports a failure."""
        failed = self.type in _FAILURES or self.errno
        if failed:
            call, phase = _EVENT_CALL.get(self.type, ("get_event", Phase.EVENT))
            about = {"event": self.type.name, "status": self.status}
            error = mcast_error(self.errno or E.EIO, call, phase, about, self.detail)
            error.found, error.link_layer = self.found, getattr(self.id, "link_layer", None)
            raise error
        return self


_FAILURES = frozenset(
    {
        CmEventType.ADDR_ERROR,
        CmEventType.ROUTE_ERROR,
        CmEventType.MULTICAST_ERROR,
        CmEventType.DEVICE_REMOVAL,
        CmEventType.UNREACHABLE,
    }
)
_EVENT_CALL = {
    CmEventType.ADDR_ERROR: ("resolve_addr", Phase.RESOLVE),
    CmEventType.MULTICAST_JOIN: ("join_multicast", Phase.JOIN),
    CmEventType.MULTICAST_ERROR: ("join_multicast", Phase.JOIN),
}


class QpCounters(NamedTuple):
    """What a QP has seen. None: the provider cannot know.

    dropped_no_receive  messages lost because no receive was free (silent in the real stack)
    dropped_too_long    messages lost because a receive had too little room
    dropped_qkey        messages lost because of a wrong Q_Key
    recv_free           receives free now
    recv_low_water      the fewest receives that were ever free
    recv_empty          how often the last free receive was seen taken
    unsent              messages that were posted, and not sent because the QP failed or was reset
    """

    sent: int
    received: int
    dropped_no_receive: int | None
    dropped_too_long: int | None
    dropped_qkey: int | None
    recv_free: int
    recv_low_water: int
    recv_empty: int = 0
    unsent: int = 0


class Status(NamedTuple):
    """Whether a backend can run here; else the reason and the one-line fix."""

    available: bool
    detail: str
    reason: UnavailableReason | None = None
    fix: str = ""


class Provider(NamedTuple):
    """A provider as the registry and the entry-point group `mcast.backends` know it.

    status   asks, without side effects, whether it can run here
    open     opens it; keyword options are its own; raises BackendUnavailable
    testbed  opens it with what the conformance suite needs (mcast.testbed)
    checks   looks at this host, changing nothing, and says of each thing the provider needs how it is;
             takes the seconds that it may listen for what only the network can tell, 0 for none
    """

    name: str
    summary: str
    status: Callable[[], Status]
    open: Callable[..., Backend]
    testbed: Callable[[], AbstractContextManager[Testbed]]
    checks: Callable[[float], Sequence[Finding]] = lambda listen: ()


class GroupSource(Enum):
    """Where a membership is written down; one that is missing in the switch's table gets no messages."""

    HOST = "the host's own list"
    SWITCH = "the switch's snooping table"
    SA = "the SA's table"


class GroupMember(NamedTuple):
    """A port that is in a group.

    port       as `device/port` if it is one of `Backend.devices`, else as the table names it
    seen_in    the tables that have it
    send_only  the table says that it does not receive
    """

    port: str
    seen_in: frozenset[GroupSource]
    send_only: bool = False


class GroupInfo(NamedTuple):
    """A group that exists, and the members of it that can be seen. `mlid` is 0 on Ethernet."""

    mgid: Gid
    members: tuple[GroupMember, ...]
    mlid: int = 0


class GroupTable(NamedTuple):
    """Groups by MGID, and in a sentence each what they leave out, and why."""

    groups: tuple[GroupInfo, ...]
    unseen: tuple[str, ...]


# --- the four nouns --------------------------------------------------------


class _Closeable(Enterable, ABC):
    """Closes once, at the latest at the end of a `with`."""

    _closed = False
    _ended_by = "close"
    _whole = uninterrupted()
    """What a change stands in where a microsecond counts; a provider may add its lock to it."""

    @property
    def closed(self) -> bool:
        """True after close or destroy; every other call then raises `Closed`."""
        return self._closed

    def _require_open(self, call: str, phase: Phase) -> None:
        """Where a tenth of a microsecond counts, callers look at `_closed` first."""
        if self._closed:
            raise Closed(type(self).__name__, call, phase)

    @abstractmethod
    def close(self) -> None: ...


class _OnPort(_Closeable):
    """Belongs to a port of a device, once it is bound to one."""

    @property
    def link_layer(self) -> LinkLayer | None:
        """What its port speaks; None where there is no port yet, or the provider does not say."""
        return None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of the block know the link layer, and with it which causes are possible.

        Where a microsecond counts, in joins and leaves, callers catch and tell it themselves.
        """
        try:
            yield
        except McastError as error:
            error.link_layer = self.link_layer
            raise


class Backend(_Closeable):
    """One provider, opened. Closing it closes its channels, leaves every group and frees everything."""

    name: str
    capabilities: frozenset[Capability]

    def now(self) -> float:
        """Seconds on the monotonic clock that timeouts run on; a simulated fabric's may be virtual."""
        return monotonic()

    def new_seed(self) -> int | None:
        """A seed for what an endpoint draws at random; None: from the system. A simulated fabric has its own,
        so that a run can be repeated."""
        return None

    @abstractmethod
    def devices(self) -> tuple[DeviceInfo, ...]:
        """The devices that are there now, with limits, MTU, link layer and GIDs."""

    def port_counters(self, device: str, port_num: int = 1) -> Mapping[str, int]:
        """The port's own counters by the device's names for them; empty where there are none."""
        return {}

    @abstractmethod
    def event_channel(self) -> EventChannel:
        """A new channel; its ids report to it."""

    def groups(self) -> GroupTable:
        """Which groups exist and who is in them now, as far as this host can see.

        A provider need not know (Capability.GROUP_TABLE); the table then says so.
        """
        self._require_open("groups", Phase.OPEN)
        return GroupTable((), (f"any group: the provider {self.name!r} does not say which there are",))


class EventChannel(_Closeable):
    """rdma_event_channel: the queue of communication events, in the order in which they happened."""

    @abstractmethod
    def fileno(self) -> int:
        """A real file descriptor: readable (poll, select, asyncio) while an event waits."""

    @property
    @abstractmethod
    def pending(self) -> bool:
        """Whether an event waits. Asking takes no time, not even a simulated fabric's."""

    def create_id(self, port_space: PortSpace = PortSpace.UDP) -> CmId:
        """rdma_create_id. A new, unbound id."""
        self._require_open("create_id", Phase.OPEN)
        return made_or_undone(partial(self._create_id, port_space), CmId.destroy)

    def get_event(self, timeout: float | None = None) -> CmEvent | None:
        """rdma_get_cm_event and rdma_ack_cm_event: the next event, or None when `timeout` s have passed.

        Retrieving a MULTICAST_JOIN of a full member attaches the id's QP (JEX-15, JM-2); if the attach
        fails the event is a MULTICAST_ERROR with status -1 and the attach's errno (facts: kernel, join).
        """
        with self._whole:
            if self._closed:
                self._require_open("get_event", Phase.EVENT)
            return self._get_event(timeout)

    @abstractmethod
    def _create_id(self, port_space: PortSpace) -> CmId: ...

    @abstractmethod
    def _get_event(self, timeout: float | None) -> CmEvent | None:
        """Waits inside `interruptible`; what was taken from the queue is returned."""


class CmId(_OnPort):
    """rdma_cm_id: bound to a device, joins and leaves groups, owns at most one QP."""

    def __init__(self) -> None:
        self._joined: dict[object, tuple[McastAddress]] = {}  # by group
        self.on_destroyed: Callable[[], None] = lambda: None
        """Called when the id has ended and its QP with it, in the thread that has ended it."""

    @property
    @abstractmethod
    def device(self) -> str | None:
        """Name of the device the id is bound to; None while it has none."""

    @property
    @abstractmethod
    def qp(self) -> QueuePair | None:
        """The QP made by create_qp; None before, and after it was destroyed."""

    def bind_addr(self, src: IPv4Address | IPv6Address | str) -> None:
        """rdma_bind_addr: take the device that has the address (JEX-12).

        0.0.0.0 and 127.0.0.1 succeed and leave the id without a device. Not local: EADDRNOTAVAIL.
        PortSpace.IPOIB on Ethernet: EINVAL. (facts: kernel, join)
        """
        source = _ip(src)
        with uninterrupted(), self._explained():
            self._require_open("bind_addr", Phase.BIND)
            self._bind_addr(source)

    def resolve_addr(
        self,
        dst: McastAddress | IPv4Address | IPv6Address | str,
        src: IPv4Address | IPv6Address | str | None = None,
        timeout: float = 2.0,
    ) -> None:
        """rdma_resolve_addr: take the device that the route to `dst`, or `src`, names (JEX-13).

        The id may join once ADDR_RESOLVED has been fetched. No route and no source: ENETUNREACH.
        """
        group, source = McastAddress.of(dst), None if src is None else _ip(src)
        with uninterrupted():
            self._require_open("resolve_addr", Phase.RESOLVE)
            self._resolve_addr(group, source, timeout)

    def create_qp(self, init: QpInit | None = None) -> QueuePair:
        """rdma_create_qp. A UD QP of a bound id is in RTS with its receives posted; RC and UC in INIT.

        A second QP on the id, RC or UC in PortSpace.UDP, UD in PortSpace.TCP, no device: EINVAL.
        block_loopback on a device that cannot: EOPNOTSUPP, or EINVAL from some drivers. A comp_vector that
        the device lacks: EINVAL. timestamps or moderation on a device that cannot: EOPNOTSUPP.
        """
        self._require_open("create_qp", Phase.CREATE_QP)
        return made_or_undone(partial(self._create_qp, init or QpInit()), lambda qp: qp.close())

    def join_multicast(
        self, addr: McastAddress | IPv4Address | IPv6Address | Mgid | str, context: object = None
    ) -> None:
        """rdma_join_multicast: as join_multicast_ex with FULLMEMBER (JM-1)."""
        address = McastAddress.of(addr)
        self._join_once(
            "join_multicast", self._group_of(address), address, self._join_multicast, address, context
        )

    def join_multicast_ex(self, attr: JoinAttrEx, context: object = None) -> None:
        """rdma_join_multicast_ex: start to join; the outcome is an event that carries `context` (JEX-17).

        Raises at once: EINVAL (id not bound, JEX-12; not UD; bad mask or flag, JEX-1, JEX-2), EOPNOTSUPP
        (reserved mask bit), 524 (IPv6 group or raw MGID on RoCEv2), EADDRNOTAVAIL (InfiniBand without the
        IPoIB broadcast group), ENXIO (device removed). `AlreadyJoined`: guard G-JOIN.
        After a MULTICAST_ERROR the membership still wants its leave (JEX-14).
        """
        address: object = attr.addr  # a model_construct may have anything
        group = self._group_of(address) if isinstance(address, McastAddress) else object()
        self._join_once("join_multicast_ex", group, attr.addr, self._join_multicast_ex, attr, context)

    def _join_once(
        self,
        call: str,
        group: object,
        address: McastAddress,
        join: Callable[[J, object], None],
        what: J,
        context: object,
    ) -> None:
        """Guard G-JOIN: the group is claimed before it is joined, so of two threads one is refused."""
        claim = (address,)

        with self._whole:
            if self._closed:
                self._require_open(call, Phase.JOIN)
            claimed = self._joined.setdefault(group, claim)
            if claimed is not claim:
                raise AlreadyJoined(call, *claimed)
            try:
                join(what, context)
            except BaseException as error:
                self._joined.pop(group, None)
                if isinstance(error, McastError):
                    error.link_layer = self.link_layer
                raise

    def leave_multicast(self, addr: McastAddress | IPv4Address | IPv6Address | Mgid | str) -> None:
        """rdma_leave_multicast: leave and detach the id's QP (LV-1); never blocks on an event.

        Before the join is complete, or its event fetched, it cancels: that event never comes (LV-2).
        What was received stays readable (LV-3). Not joined with this address and port: EADDRNOTAVAIL
        (LV-5). Device removed: ENXIO.
        """
        address = McastAddress.of(addr)
        with self._whole:
            if self._closed:
                self._require_open("leave_multicast", Phase.LEAVE)
            try:
                self._leave_multicast(address)
            except McastError as error:
                error.link_layer = self.link_layer
                raise
            self._joined.pop(self._group_of(address), None)

    def destroy(self) -> None:
        """rdma_destroy_id, after leaving all groups (LV-4) and destroying the QP. Idempotent."""
        with uninterrupted():
            if not self._closed:
                self._closed = True
                self._joined.clear()
                try:
                    self._destroy()
                finally:
                    self.on_destroyed()

    def close(self) -> None:
        """The same as destroy."""
        self.destroy()

    def _group_of(self, address: McastAddress) -> object:
        """What all addresses of one group have in common (guard G-JOIN).

        That is the address without its port, or the MGID where the provider knows it.
        """
        return address.key

    @abstractmethod
    def _bind_addr(self, src: IPv4Address | IPv6Address) -> None: ...

    @abstractmethod
    def _resolve_addr(
        self, dst: McastAddress, src: IPv4Address | IPv6Address | None, timeout: float
    ) -> None: ...

    @abstractmethod
    def _create_qp(self, init: QpInit) -> QueuePair: ...

    @abstractmethod
    def _join_multicast(self, addr: McastAddress, context: object) -> None: ...

    @abstractmethod
    def _join_multicast_ex(self, attr: JoinAttrEx, context: object) -> None: ...

    @abstractmethod
    def _leave_multicast(self, addr: McastAddress) -> None: ...

    @abstractmethod
    def _destroy(self) -> None: ...


class Region(_Closeable):
    """User memory registered with a QP (ibv_reg_mr). Close it when no call uses it any more.

    A payload that lies inside an open region is sent without a copy.
    """

    @property
    @abstractmethod
    def buffer(self) -> memoryview:
        """The registered memory, as bytes."""


class DeviceRegion(_Closeable):
    """Memory of another device, such as a GPU, registered with a QP by its DMA-BUF (ibv_reg_dmabuf_mr).

    The CPU has no view of it. What lies in it is sent by its place: `qp.send(to, [region.at(0, 512)])`; where
    a message was received into it, `Message.device` is the place. Close it when no call uses it any more; the
    descriptor may be closed at once.
    """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Its size in bytes."""

    def at(self, offset: int, nbytes: int) -> DeviceBytes:
        """A part of it, as a payload. ValueError if it is not all inside."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes from {offset} on are not inside a region of {self.nbytes}")
        return DeviceBytes(self, offset, nbytes)

    def no_view(self) -> NoReturn:
        """Raise the BufferError of who asks for its bytes."""
        raise BufferError(NO_VIEW)


class QueuePair(_OnPort):
    """ibv_qp of a CmId. Sends and receives UD messages in batches; attaches to groups."""

    @property
    @abstractmethod
    def qp_num(self) -> int:
        """24-bit QP number."""

    @property
    @abstractmethod
    def qp_type(self) -> QpType: ...

    @property
    @abstractmethod
    def state(self) -> QpState:
        """The state now, asked of the device: a QP can fall into ERR by itself."""

    @property
    @abstractmethod
    def max_message_size(self) -> int:
        """The largest payload in bytes: the MTU of the port now (guard G-MTU)."""

    def max_message_to(self, destination: Destination) -> int:
        """The largest payload in bytes for that destination: one MTU of the port, or of the group if less."""
        limit, group = self.max_message_size, destination.group_mtu
        return limit if group is None or group > limit else group

    def too_large(self, destination: Destination, size: int, limit: int, index: int) -> MessageTooLarge:
        """The error of guard G-MTU, for message `index` of a batch: it says whose MTU is in the way."""
        if self.max_message_to(destination) == self.max_message_size:
            return MessageTooLarge(size, limit, index)
        source = destination.mtu_source
        said = "" if source is None else source.value
        return MessageTooLarge(size, limit, index, destination.group_mtu, said)

    @property
    def timestamp_clock(self) -> TimestampClock | None:
        """The clock of `Message.timestamp`; None where messages have none."""
        return None

    @property
    @abstractmethod
    def attachments(self) -> Mapping[Gid, int]:
        """The (MGID, MLID) pairs the QP is attached with, by the user or by a join."""

    @property
    @abstractmethod
    def counters(self) -> QpCounters: ...

    @abstractmethod
    def close(self) -> None:
        """ibv_destroy_qp, after detaching it from every group. Idempotent."""

    @abstractmethod
    def fileno(self) -> int:
        """A real file descriptor for poll, select and asyncio: a `recv` that returned empty arms it.

        From then on it is readable once a recv would give a message or a QpError, or `port_events` something
        new, until a recv is empty again.
        """

    def port_events(self) -> tuple[PortEvent, ...]:
        """ibv_get_async_event: what the port has told of since the last call, in order, the last 64 at most.

        Each QP is told of what happens while it lives. `recv` with `events` ends for what is new, once.
        A provider whose ports tell nothing has nothing to add here.
        """
        self._require_open("port_events", Phase.EVENT)
        return ()

    def modify(self, state: QpState) -> None:
        """ibv_modify_qp. INIT posts the receives again. A step the state machine lacks: EINVAL."""
        with uninterrupted(), self._explained():
            self._require_open("modify", Phase.MODIFY)
            self._modify(state)

    def reset(self) -> None:
        """From any state back to RTS, with attachments kept and receives posted."""
        if self.state is QpState.SQD:
            self.modify(QpState.ERR)  # Soft-RoCE refuses every other step until the send queue has drained
        for state in (QpState.RESET, QpState.INIT, QpState.RTR, QpState.RTS):
            self.modify(state)

    def attach_mcast(self, gid: Gid | str, lid: int) -> None:
        """ibv_attach_mcast: deliver messages for this MGID and MLID here (AT-1); a duplicate is no-op (AT-4).

        Errors: EINVAL (not UD, AT-3; not a multicast GID; on InfiniBand MLID outside 0xC000..0xFFFE),
        ENOMEM (max_mcast_qp_attach or max_mcast_grp, DT-7), ENOSYS (no multicast, DT-8), `SecondMlid`.
        Nothing arrives unless the port is a member of the group as well (AT-5).
        """
        gid = Gid(gid)
        _check_lid(lid)
        with uninterrupted(), self._explained(), self._attaching:
            self._require_open("attach_mcast", Phase.ATTACH)
            attached = self.attachments.get(gid, lid)
            if attached != lid:
                raise SecondMlid(gid, lid, attached)
            self._attach_mcast(gid, lid)

    def detach_mcast(self, gid: Gid | str, lid: int) -> None:
        """ibv_detach_mcast, with the attributes of the attach (DT-3), in any state (DT-5).

        Acts on this device alone (DT-2), on this QP (DT-1), on this group (DT-4); once is enough (DT-9).
        EINVAL: not a multicast GID, not UD, not attached with this pair (DT-6).
        """
        gid = Gid(gid)
        _check_lid(lid)
        with uninterrupted(), self._explained(), self._attaching:
            self._require_open("detach_mcast", Phase.DETACH)
            self._detach_mcast(gid, lid)

    @property
    def _attaching(self) -> threading.RLock:
        """Held from the look to the act of guard G-MLID; made by the first who asks."""
        lock: threading.RLock = vars(self).setdefault("_attaching_lock", threading.RLock())
        return lock

    def send(
        self,
        destination: Destination,
        batch: Iterable[Buffer | DeviceBytes],
        imm: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Send each buffer of `batch` as one message, in order; return how many, which is all of them.

        Any C-contiguous buffer works, and a part of a `DeviceRegion` of this QP; all may be reused when the
        call returns. The call posts the messages
        and does not wait until the device has sent them: `flush` does. It waits, up to `timeout`, while the
        send queue is full, and until the device has read what lies in registered memory. `imm` is a 32-bit
        immediate for every message. Errors: MessageTooLarge (G-MTU), EINVAL (QP not in RTS; destination not
        of this device), ENODATA (the GID table has no such sgid_index), TimedOut, QpError (the QP is in ERR:
        this send put it there, or an earlier one, and `unsent` messages were lost). The error's `posted`
        says how many messages of this call were posted. UD gives no receipt: success says sent, not received.
        """
        self._require_open("send", Phase.SEND)
        if isinstance(batch, bytes | bytearray | memoryview | str | DeviceBytes):
            raise TypeError(f"send takes a batch of buffers, not one {type(batch).__name__}: use send_one")
        if imm is not None and not 0 <= imm <= 0xFFFFFFFF:
            raise ValueError(f"imm is {imm}: an immediate is 32 bits, 0..0xFFFFFFFF")
        payloads: list[Any] = batch if isinstance(batch, list) else list(batch)
        if set(map(type, payloads)) <= _BYTES:
            sizes = list(map(len, payloads))
        else:
            payloads = list(map(_as_payload, payloads, range(len(payloads))))
            sizes = list(map(operator.attrgetter("nbytes"), payloads))
        limit = self.max_message_to(destination)
        if sizes and max(sizes) > limit:
            index = next(i for i, size in enumerate(sizes) if size > limit)
            raise self.too_large(destination, sizes[index], limit, index)
        self._send(destination, payloads, imm, timeout)
        return len(payloads)

    def send_one(
        self,
        destination: Destination,
        payload: Buffer | DeviceBytes,
        imm: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Send one message: `send` with a batch of one."""
        plain = imm is None and not self._closed
        if plain and type(payload) is bytes and len(payload) <= self.max_message_to(destination):
            self._send(destination, [payload], None, timeout)  # `send` would refuse none of it
        else:
            self.send(destination, [payload], imm, timeout)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the device has sent all that was posted, up to `timeout`: then TimedOut.

        Raises the QpError of a message that the device could not send.
        """
        self._require_open("flush", Phase.SEND)
        self._flush(timeout)

    def send_fileno(self) -> int | None:
        """As `fileno`, for sends: a `send` or `flush` that raised TimedOut arms it.

        From then on it is readable once another try may come further. None: no send waits for a device here.
        """
        self._require_open("send_fileno", Phase.SEND)
        return None

    def recv(self, max: int = 64, timeout: float | None = None, events: bool = False) -> Batch:
        """Receive 1..max messages, in order; an empty batch when `timeout` s have passed without one.

        Returns as soon as there is one; with `events` also, empty, when an event waits on the id's channel,
        or once the port has told of something (`port_events`): one call sleeps on all three. QpError once
        the messages received before the failure are read. Closing the QP ends the wait with `Closed`.
        """
        self._require_open("recv", Phase.RECV)
        if max < 1:
            raise ValueError(f"max is {max}: recv returns 1 or more messages")
        return self._recv(max, timeout, events)

    def recv_one(self, timeout: float | None = None) -> Message | None:
        """Receive one message with a payload of its own (a copy), or None when `timeout` s have passed.

        EOPNOTSUPP where messages arrive in another device's memory: they stay there while a batch is leased.
        """
        if self._closed:
            self._require_open("recv", Phase.RECV)
        return self._recv_one(timeout)

    def register(
        self, buffer: Buffer, recv_slot: int | None = None, *, relaxed_ordering: bool = False
    ) -> Region:
        """Register a buffer: what is sent from inside it is not copied.

        With `recv_slot`, a size in bytes, the buffer becomes the QP's receive memory, one message a slot,
        and the payloads of received batches are views of it. The buffer must be writable for that, and
        no message may be queued or leased (EBUSY): do it before the QP joins. Closing the region ends it.

        `relaxed_ordering` lets the device write to it in any order, which some hosts need for the full rate
        (IBV_ACCESS_RELAXED_ORDERING). A message that was received is there as a whole all the same; who looks
        at the memory before that sees anything. What cannot do it does without: device, driver, or library.
        """
        self._require_open("register", Phase.REGISTER)
        view = _as_bytes(buffer, 0)
        if recv_slot is not None and (view.readonly or not 1 <= recv_slot <= view.nbytes):
            raise ValueError(
                f"recv_slot is {recv_slot}: it needs a writable buffer of at least one slot, "
                f"this one has {view.nbytes} bytes{' and is read-only' if view.readonly else ''}"
            )
        make = partial(self._register, view, recv_slot, relaxed_ordering)
        return made_or_undone(make, Region.close)

    def register_dmabuf(
        self,
        fd: int,
        nbytes: int,
        offset: int = 0,
        recv_slot: int | None = None,
        *,
        relaxed_ordering: bool = False,
    ) -> DeviceRegion:
        """Register `nbytes` bytes, from `offset` on, of another device's memory: `fd` is its DMA-BUF.

        What is sent from it is not copied, and never inline. `recv_slot` and `relaxed_ordering` are those of
        `register`; a received message has an empty `payload` then, and `device` says where its bytes are.
        Errors: EOPNOTSUPP (the device or its driver cannot), ENOSYS (rdma-core is older than 34), EBADF or
        EINVAL (no DMA-BUF), EBUSY as in `register`.
        """
        self._require_open("register_dmabuf", Phase.REGISTER)
        if fd < 0 or nbytes < 1 or offset < 0:
            raise ValueError(
                f"fd, nbytes, offset are {fd}, {nbytes}, {offset}: a descriptor, at least one byte, from 0 on"
            )
        if recv_slot is not None and not 1 <= recv_slot <= nbytes:
            raise ValueError(
                f"recv_slot is {recv_slot}: it needs at least one slot, the memory has {nbytes} bytes"
            )
        make = partial(self._register_dmabuf, fd, nbytes, offset, recv_slot, relaxed_ordering)
        return made_or_undone(make, DeviceRegion.close)

    @abstractmethod
    def _modify(self, state: QpState) -> None: ...

    @abstractmethod
    def _attach_mcast(self, gid: Gid, lid: int) -> None: ...

    @abstractmethod
    def _detach_mcast(self, gid: Gid, lid: int) -> None: ...

    @abstractmethod
    def _send(
        self,
        destination: Destination,
        payloads: Sequence[bytes | memoryview | DeviceBytes],
        imm: int | None,
        timeout: float | None,
    ) -> None: ...

    def _flush(self, timeout: float | None) -> None:
        """Nothing is under way where a send is complete when it returns."""

    @abstractmethod
    def _recv(self, max: int, timeout: float | None, events: bool) -> Batch: ...

    def _recv_one(self, timeout: float | None) -> Message | None:
        with self._recv(1, timeout, False) as batch:
            if not len(batch):
                return None
            message = batch[0]
            return message._replace(payload=memoryview(bytes(message.payload)))

    def _refuse_copy(self) -> NoReturn:
        """For `recv_one` of a QP that receives into another device's memory."""
        detail = "messages arrive in another device's memory, and cannot be copied out of it: use recv"
        raise mcast_error(E.EOPNOTSUPP, "recv_one", Phase.RECV, None, detail)

    @abstractmethod
    def _register(self, buffer: memoryview, recv_slot: int | None, relaxed_ordering: bool) -> Region: ...

    def _register_dmabuf(
        self, fd: int, nbytes: int, offset: int, recv_slot: int | None, relaxed_ordering: bool
    ) -> DeviceRegion:
        detail = "this provider takes no DMA-BUF: send from the host's memory"
        raise mcast_error(E.EOPNOTSUPP, "register_dmabuf", Phase.REGISTER, None, detail)


def require_comp_vector(vector: int | None, there: int, device: str) -> None:
    """Refuse a completion vector that a device with `there` of them does not have: EINVAL."""
    if vector is not None and vector >= there:
        has = f"{there} completion vectors, 0..{there - 1}" if there > 1 else "one completion vector, 0"
        detail = f"{device} has {has}: choose one of these, or None to take them in turn"
        raise mcast_error(E.EINVAL, "create_qp", Phase.CREATE_QP, {"comp_vector": vector}, detail)


_BYTES = frozenset({bytes})


def _as_bytes(buffer: Buffer, index: int) -> memoryview:
    """The buffer as a flat view of bytes; TypeError names the message that is none."""
    try:
        return memoryview(buffer).cast("B")
    except TypeError as error:
        raise TypeError(
            f"message {index} is a {type(buffer).__name__}: a payload is a C-contiguous buffer ({error})"
        ) from None


def _as_payload(payload: Buffer | DeviceBytes, index: int) -> memoryview | DeviceBytes:
    if isinstance(payload, DeviceBytes):
        payload.region._require_open("send", Phase.SEND)
        return payload
    return _as_bytes(payload, index)


def _check_lid(lid: int) -> None:
    if not 0 <= lid <= 0xFFFF:
        raise ValueError(f"lid is {lid:#x}: a LID has 16 bits; take it from the join event's destination")


def _ip(value: IPv4Address | IPv6Address | str) -> IPv4Address | IPv6Address:
    try:
        return ip_address(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a source address: give IPv4 or IPv6 text") from None
