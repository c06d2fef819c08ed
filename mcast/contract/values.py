"""What crosses the boundary: requests, devices and ports, destinations, events, counters. Each is frozen."""

from __future__ import annotations

import errno as E
from collections.abc import Mapping
from enum import Enum
from ipaddress import IPv4Address, IPv6Address
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from mcast.contract.batch import Message
from mcast.contract.enums import (
    MULTICAST_QPN,
    CmEventType,
    CompMask,
    JoinFlag,
    PortState,
    QpType,
)
from mcast.errors.cause import Cause, Phase
from mcast.errors.tree import mcast_error
from mcast.wire.addresses import Gid, McastAddress, Mgid
from mcast.wire.kinds import RDMA_UDP_QKEY, LinkLayer
from mcast.wire.mcmember import MLID_FIRST


class _Model(BaseModel):
    # Built when first used: that takes a third of the time to import this module.
    model_config = ConfigDict(
        frozen=True, strict=True, arbitrary_types_allowed=True, extra="forbid", defer_build=True
    )


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
                    refuse; some accept and return them all the same (docs/pitfalls.md, 16)
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
        reads that option for connections, and not in cma_iboe_join_multicast (K-EVENT-8).
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
