"""Arguments and results of the contract's calls: requests, devices, destinations, events, counters.

All are frozen.
"""

from __future__ import annotations

import errno as E
from collections.abc import Mapping
from enum import Enum
from ipaddress import IPv4Address, IPv6Address
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from mcast.arguments.checks import as_int, short_repr
from mcast.contract.batch import Message
from mcast.contract.enums import (
    JOIN_MASK,
    MULTICAST_QPN,
    CmEventType,
    CompMask,
    JoinFlag,
    PortState,
    QpType,
)
from mcast.errors.cause import Cause, Phase
from mcast.errors.tree import McastError, UnavailableReason, mcast_error
from mcast.wire.addresses import Gid, McastAddress, Mgid
from mcast.wire.kinds import RDMA_UDP_QKEY, LinkLayer
from mcast.wire.mcmember import MLID_FIRST


class _Model(BaseModel):
    # pydantic builds each model when it is first used, because building takes a third of the import's time.
    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, strict=True, arbitrary_types_allowed=True, extra="forbid", defer_build=True
    )


def _plainly(value: object) -> object:
    """The value; as an int if it is a whole number of another class, which no IntEnum is."""
    number = None if isinstance(value, int) else as_int(value)
    return value if number is None else number


IntField = Annotated[int, BeforeValidator(_plainly)]
"""A field for a whole number, by `mcast.arguments.checks.as_int`."""


class JoinAttrEx(_Model):
    """rdma_cm_join_mc_attr_ex: the argument of `CmId.join_multicast_ex`.

    `full_member(addr)` and `send_only(addr)` make the only two kinds. A wrong value raises ValueError.
    `model_construct` skips that check; the backend then fails with the errno of the real stack: EOPNOTSUPP
    for a reserved bit of comp_mask, EINVAL for a missing bit or other join_flags (JEX-1, JEX-2).
    """

    comp_mask: CompMask = JOIN_MASK
    join_flags: JoinFlag = JoinFlag.FULLMEMBER
    addr: McastAddress

    @field_validator("comp_mask", mode="plain")
    @classmethod
    def _both_fields(cls, value: object) -> CompMask:
        if as_int(value) == JOIN_MASK:
            return JOIN_MASK
        raise ValueError(
            f"{short_repr(value)} is not ADDRESS | JOIN_FLAGS (3): both fields are needed, no other exists"
        )

    @field_validator("join_flags", mode="plain")
    @classmethod
    def _single_flag(cls, value: object) -> JoinFlag:
        for one in JoinFlag:
            if as_int(value) == one:
                return one
        raise ValueError(f"{short_repr(value)} is not one of FULLMEMBER (0), SENDONLY_FULLMEMBER (1)")

    @field_validator("addr", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> McastAddress:
        return McastAddress.of(value)

    @classmethod
    def full_member(cls, addr: McastAddress | IPv4Address | IPv6Address | Mgid | str) -> JoinAttrEx:
        """A request to create the group if need be, to send to it and to receive from it (JEX-3..5)."""
        return cls(join_flags=JoinFlag.FULLMEMBER, addr=McastAddress.of(addr))

    @classmethod
    def send_only(cls, addr: McastAddress | IPv4Address | IPv6Address | Mgid | str) -> JoinAttrEx:
        """A request to create the group if need be, and only to send to it (JEX-6..10)."""
        return cls(join_flags=JoinFlag.SENDONLY_FULLMEMBER, addr=McastAddress.of(addr))


class CqModeration(_Model):
    """Interrupt moderation: when the device wakes a waiting receive.

    After `count` messages, or `period` µs after the first of them.

    Both are 1..65535. Without a period the last messages of a burst might wake nobody. Some devices allow
    less.
    """

    count: IntField
    period: IntField

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
    """The argument of `CmId.create_qp`.

    qp_type         only UD can be in a group
    max_send_wr     the length of the send queue, in messages
    max_recv_wr     the length of the receive queue, in messages
    max_recv_size   the payload room of each receive in bytes, without the 40 bytes of a GRH; None: one MTU
    block_loopback  ask the device not to return the queue pair's own multicast messages to it. Many devices
                    cannot, and refuse; some accept and return them all the same (docs/pitfalls.md, 16)
    busy_poll       how many seconds a waiting call polls the completion queue before it sleeps; inf: it never
                    sleeps. The call's timeout, a close, a signal and, with `events`, an event end the
                    polling. With 0 a call polls for some 50 µs, about as long as falling asleep and waking
                    take
    comp_vector     the device's completion vector that reports the queue pair's completions; None: each queue
                    pair gets the next one
    moderation      wake a waiting receive for several messages at once (ibv_modify_cq); None: for each
                    message
    timestamps      stamp each message when it arrives (`Message.timestamp`, `QueuePair.timestamp_clock`)

    A simulated fabric accepts busy_poll, comp_vector and moderation, and they change nothing there, because
    no call sleeps on a completion queue and waiting takes virtual time.
    """

    qp_type: QpType = QpType.UD
    max_send_wr: IntField = Field(default=128, ge=1, le=1 << 20)
    max_recv_wr: IntField = Field(default=512, ge=1, le=1 << 20)
    max_recv_size: IntField | None = Field(default=None, ge=0, le=1 << 16)
    block_loopback: bool = False
    busy_poll: float = Field(default=0.0, ge=0)
    comp_vector: IntField | None = Field(default=None, ge=0)
    moderation: CqModeration | None = None
    timestamps: bool = False

    @field_validator("busy_poll", mode="before")
    @classmethod
    def _seconds(cls, value: Any) -> Any:
        if isinstance(value, float | int | str) or not hasattr(type(value), "__float__"):
            return value  # what is wrong there the field says itself
        return float(value)


class MtuSource(Enum):
    """Source of the MTU of a group."""

    SA = "from the SA's record of the group"
    IPOIB = (
        "from the IPoIB broadcast group, below whose MTU no group of rdma_cm is; where /dev/infiniband/umad* "
        "may be read and written the SA is asked, and may allow more"
    )


class Destination(_Model):
    """Destination of a UD message.

    The attributes of an address handle, and the receiver's queue pair number and Q_Key.

    A join event has the destination of its group, ready to use; `reply_to` makes one for an answer to a
    message.

    gid            the group's MGID, or the GID of a port
    qp_num         the receiver's queue pair number, 0xFFFFFF for a group
    qkey           the Q_Key; the receiver drops messages with another one
    dlid           the MLID or LID on InfiniBand, 0 on RoCE
    sl             the service level, on RoCE the priority
    port_num       the port of the sending device, from 1
    sgid_index     the sender's own GID, by its place in the port's GID table
    hop_limit, traffic_class, flow_label  stand in the GRH or IP header; the upper six bits of traffic_class
                                          are the DSCP
    is_global      True: the message has a GRH, as every message to a group
    static_rate    an ibv_rate: the device sends no faster than that, for groups with slower members; 0: as
                   fast as the port
    src_path_bits  the low bits of the sender's LID on InfiniBand
    group_mtu      the MTU of an InfiniBand group in bytes (guard G-MTU), which may be less than the port's
                   where members have links of different MTUs; None: not known, the port's MTU is the limit
    mtu_source     where `group_mtu` is known from
    """

    gid: Gid
    qp_num: IntField = Field(default=MULTICAST_QPN, ge=0, le=0xFFFFFF)
    qkey: IntField = Field(default=RDMA_UDP_QKEY, ge=0, le=0xFFFFFFFF)
    dlid: IntField = Field(default=0, ge=0, le=0xFFFF)
    sl: IntField = Field(default=0, ge=0, le=15)
    port_num: IntField = Field(default=1, ge=1, le=255)
    sgid_index: IntField = Field(default=0, ge=0, le=0xFFFF)
    hop_limit: IntField = Field(default=64, ge=0, le=255)
    traffic_class: IntField = Field(default=0, ge=0, le=255)
    flow_label: IntField = Field(default=0, ge=0, le=0xFFFFF)
    is_global: bool = True
    static_rate: IntField = Field(default=0, ge=0, le=255)
    src_path_bits: IntField = Field(default=0, ge=0, le=127)
    group_mtu: IntField | None = Field(default=None, ge=1)
    mtu_source: MtuSource | None = None

    def marked(self, traffic_class: int | None = None, sl: int | None = None) -> Destination:
        """Return a copy for messages with another traffic class and service level.

        The traffic class is `dscp << 2`; None keeps the value.

        On RoCE the destination of a join event has 0 for both, even where RDMA_OPTION_ID_TOS was set, because
        the kernel uses that option for connections and not in cma_iboe_join_multicast (K-EVENT-8). On
        InfiniBand the destination has the values of the group, from the SA.
        """
        wanted = {"traffic_class": traffic_class, "sl": sl}
        changed = {name: value for name, value in wanted.items() if value is not None}
        return Destination(**{**dict(self), **changed}) if changed else self

    def can_reply_to(self, message: Message, on_loopback: bool = False) -> bool:
        """Return True if the sender of a message of this group has an address that can be answered.

        `on_loopback`: the own port is a loopback interface, where every sender has such an address.

        The address is part of the message, so it may be forged. An address of the other IP version
        would put the own queue pair into ERR on RoCE, and an answer to a multicast address would reach
        everybody.
        """
        source = message.source
        if not 1 < message.src_qp < MULTICAST_QPN:
            return False
        if not any(source):  # no GRH: on InfiniBand the sender's LID is enough
            return 0 < message.src_lid < MLID_FIRST
        return (
            not source.is_multicast
            and (source.ipv4 is None) == (self.gid.ipv4 is None)
            and not (source.ipv4 is not None and _is_nobody(source.ipv4, on_loopback))
        )

    def reply_to(self, message: Message) -> Destination:
        """Return the destination of an answer to a message of this group.

        Its sender's queue pair alone, by the same path.

        On InfiniBand a message without a GRH is answered by LID, within the subnet. ValueError if the message
        has neither a GRH nor a LID, because then its sender is unknown.
        """
        has_grh = any(message.source)
        if not has_grh and not message.src_lid:
            raise ValueError("the message has neither a GRH nor a LID of its sender: it cannot be answered")
        sender: dict[str, object] = {"gid": message.source, "qp_num": message.src_qp}
        sender |= {"dlid": message.src_lid, "src_path_bits": message.path_bits, "is_global": has_grh}
        if message.sl is not None:
            sender["sl"] = message.sl
        return self.model_copy(update=sender)


def _is_nobody(address: IPv4Address, on_loopback: bool) -> bool:
    return address.is_unspecified or address.is_loopback is not on_loopback or address.is_reserved


class UdParam(NamedTuple):
    """rdma_ud_param of a join event.

    qp_num       the group's queue pair number, 0xFFFFFF
    qkey         the group's Q_Key
    destination  where to send to
    """

    qp_num: int
    qkey: int
    destination: Destination


class PortInfo(_Model):
    """One port of a device.

    port_num    the number of the port, from 1
    state       messages flow while it is ACTIVE
    link_layer  InfiniBand or Ethernet
    active_mtu  the largest message in bytes
    rate        in Gbit/s
    lid         on InfiniBand; 0 on Ethernet
    gids        the GID table without its empty entries, index -> GID; `Destination.sgid_index` is such an
                index
    addresses   the IP addresses that a `CmId` can be bound to on this port
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
    """One RDMA device and its limits (DT-7).

    name                 the kernel's name of the device, such as mlx5_0
    node_guid            its 64-bit identifier
    max_mcast_grp        groups that the device's queue pairs can be attached to
    max_mcast_qp_attach  queue pairs that can be attached to one group
    max_qp_wr            messages that a send or receive queue can hold
    ports                its ports, in order
    num_comp_vectors     completion vectors for `QpInit.comp_vector`, numbered from 0; each is an interrupt,
                         which the host may give to a processor of its own
    driver               its provider in libibverbs, such as mlx5; "" if it is not known
    no_multicast         reason why its driver has no multicast; "" if it has, as far as is known
    """

    name: str
    node_guid: int
    max_mcast_grp: int
    max_mcast_qp_attach: int
    max_qp_wr: int
    ports: tuple[PortInfo, ...]
    num_comp_vectors: int = 1
    driver: str = ""
    no_multicast: str = ""

    @property
    def why_no_multicast(self) -> str:
        """Reason why no queue pair of the device can be in a group; "" if one can, as far as is known."""
        if self.no_multicast or (self.max_mcast_grp and self.max_mcast_qp_attach):
            return self.no_multicast
        of = f"its driver {self.driver}" if self.driver else "it"
        return f"{of} allows no groups (max_mcast_grp {self.max_mcast_grp})"


class UnusableDevice(NamedTuple):
    """A device that the provider leaves out, and why; the other devices work.

    name       the kernel's name of the device, such as mlx5_0
    reason     what is wrong with it
    detail     what was found, without the device's name
    fix        one command or step that repairs this
    errno      the errno of binding to the device
    addresses  the IP addresses of its ports, as far as they are known
    """

    name: str
    reason: UnavailableReason
    detail: str
    fix: str
    errno: int
    addresses: tuple[IPv4Address | IPv6Address, ...] = ()

    def error(self, call: str, arguments: Mapping[str, object]) -> McastError:
        """The error of binding to the device."""
        detail = f"{self.name} is left out: {self.detail}"
        error = mcast_error(self.errno, call, Phase.BIND, arguments, detail)
        error.found = (Cause(self.detail, "mcast doctor", self.fix),)
        return error


class CmEvent(NamedTuple):
    """Event of the connection manager.

    Copied and acknowledged by the call that read it, so keeping it blocks nothing.

    type     what happened
    status   as the stack reports it: 0, or negative
    errno    why the step failed, 0 if it did not; for an attach that failed when the event was fetched, the
             attach's errno
    context  the very object that was given to the join (JEX-17)
    id       the CmId that the event is for
    ud       for MULTICAST_JOIN: queue pair number 0xFFFFFF, Q_Key, and the Destination to send to
    detail   what the provider knows beyond the errno, such as the SA's status; "" if nothing
    found    causes of a failure that the provider found by asking the fabric; () if it could not ask
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
        """Return the event; if it reports a failure, raise the `McastError` of its errno instead."""
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
        CmEventType.ADDRINFO_ERROR,
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
    """Counters of a queue pair. None: the provider cannot know.

    sent                messages posted; the device may not have sent all of them yet
    received            messages that arrived in a receive
    dropped_no_receive  messages lost because no receive was free; the real stack reports them nowhere
                        else
    dropped_too_long    messages lost because a receive had too little room
    dropped_qkey        messages lost because of a wrong Q_Key
    recv_free           receives free now
    recv_low_water      minimum of free receives
    recv_empty          times that the last free receive was found taken
    unsent              messages that were posted, and not sent because the queue pair failed or was reset
    dropped_mtu         messages lost because they are larger than the port's MTU. Unknown (None) on the real
                        stack, where they end at a switch or at the port's interface (`ip -s link`)
    dropped_reset       messages that had arrived and were dropped before they were received, because the
                        queue pair was reset or its receive memory was closed (guard G-RECV)
    dropped_invalid     messages lost because the driver reported an impossible completion: a length that no
                        message has, or a receive that was not posted
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
    dropped_mtu: int | None = None
    dropped_reset: int = 0
    dropped_invalid: int = 0
