"""Arguments and results of the contract's calls: requests, devices, destinations, events, counters.

All are frozen.
"""

from __future__ import annotations

import errno as E
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from ipaddress import IPv4Address, IPv6Address
from typing import Any, ClassVar, NamedTuple, ParamSpec, Self, TypeVar

from mcast.arguments.checks import as_int, check_bool, check_int, check_type, short_repr
from mcast.arguments.seconds import check_busy_poll
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

P = ParamSpec("P")
T = TypeVar("T")


class _Value:
    """Base of frozen dataclasses that check what they are made of.

    They are no models of pydantic, whose import takes half of the time in which a command starts. A model may
    have them as fields, which it reads as strictly.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"strict": True, "extra": "forbid"}

    _RANGES: ClassVar[Mapping[str, tuple[int, int | None]]] = {}
    """A field for a whole number -> minimum and maximum; None is allowed where it is the default."""

    def __post_init__(self) -> None:
        for name, (least, most) in self._RANGES.items():
            given = getattr(self, name)
            if given is None and getattr(type(self), name, 0) is None:
                continue
            if not (given.__class__ is int and least <= given and (most is None or given <= most)):
                allowed = f"give {least} or more" if most is None else f"give {least}..{most}"
                self._put(name, _checked(check_int, given, name, least, most, allowed))

    def _put(self, name: str, value: object) -> None:
        """Replace what was given for a field by the value that it stands for."""
        object.__setattr__(self, name, value)


def _checked(check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what the check returns. A value raises ValueError for a wrong type, too."""
    try:
        return check(*args, **kwargs)
    except TypeError as error:
        raise ValueError(str(error)) from None


_JOIN_FLAGS: dict[int | None, JoinFlag] = {int(one): one for one in JoinFlag}


@dataclass(frozen=True, kw_only=True)
class JoinAttrEx(_Value):
    """rdma_cm_join_mc_attr_ex: the argument of `CmId.join_multicast_ex`.

    `full_member(addr)` and `send_only(addr)` make the only two kinds. A wrong value raises ValueError.
    `model_construct` skips that check; the backend then fails with the errno of the real stack: EOPNOTSUPP
    for a reserved bit of comp_mask, EINVAL for a missing bit or other join_flags (JEX-1, JEX-2).
    """

    comp_mask: CompMask = JOIN_MASK
    join_flags: JoinFlag = JoinFlag.FULLMEMBER
    addr: McastAddress

    def __post_init__(self) -> None:
        mask, flags = self.comp_mask, as_int(self.join_flags)
        if as_int(mask) != JOIN_MASK:
            raise ValueError(
                f"comp_mask is {short_repr(mask)}: give ADDRESS | JOIN_FLAGS (3); both fields are needed, "
                "and no other exists"
            )
        if flags not in _JOIN_FLAGS:
            given = short_repr(self.join_flags)
            raise ValueError(f"join_flags is {given}: give FULLMEMBER (0), SENDONLY_FULLMEMBER (1)")
        self._put("comp_mask", JOIN_MASK)
        self._put("join_flags", _JOIN_FLAGS[flags])
        self._put("addr", McastAddress.of(self.addr))

    @classmethod
    def model_construct(cls, **fields: Any) -> JoinAttrEx:
        """Make a request without checking it."""
        made = object.__new__(cls)
        vars(made).update({"comp_mask": JOIN_MASK, "join_flags": JoinFlag.FULLMEMBER, **fields})
        return made

    @classmethod
    def full_member(cls, addr: McastAddress | IPv4Address | IPv6Address | Mgid | str) -> JoinAttrEx:
        """A request to create the group if need be, to send to it and to receive from it (JEX-3..5)."""
        return cls(join_flags=JoinFlag.FULLMEMBER, addr=McastAddress.of(addr))

    @classmethod
    def send_only(cls, addr: McastAddress | IPv4Address | IPv6Address | Mgid | str) -> JoinAttrEx:
        """A request to create the group if need be, and only to send to it (JEX-6..10)."""
        return cls(join_flags=JoinFlag.SENDONLY_FULLMEMBER, addr=McastAddress.of(addr))


@dataclass(frozen=True, kw_only=True)
class CqModeration(_Value):
    """Interrupt moderation: when the device wakes a waiting receive.

    After `count` messages, or `period` µs after the first of them.

    Both are 1..65535. Without a period the last messages of a burst might wake nobody. Some devices allow
    less.
    """

    count: int
    period: int

    def __post_init__(self) -> None:
        for name, unit in (("count", "messages"), ("period", "microseconds")):
            why = (
                f"give 1..65535 {unit}; without a count nothing is moderated, and without a period the last "
                "messages of a burst might wake nobody"
            )
            self._put(name, _checked(check_int, getattr(self, name), name, 1, 0xFFFF, why))


@dataclass(frozen=True, kw_only=True)
class QpInit(_Value):
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
    max_send_wr: int = 128
    max_recv_wr: int = 512
    max_recv_size: int | None = None
    block_loopback: bool = False
    busy_poll: float = 0.0
    comp_vector: int | None = None
    moderation: CqModeration | None = None
    timestamps: bool = False

    _RANGES: ClassVar[Mapping[str, tuple[int, int | None]]] = {
        "max_send_wr": (1, 1 << 20),
        "max_recv_wr": (1, 1 << 20),
        "max_recv_size": (0, 1 << 16),
        "comp_vector": (0, None),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        _checked(check_type, self.qp_type, QpType, "qp_type", "a QpType")
        _checked(check_bool, self.block_loopback, "block_loopback")
        _checked(check_bool, self.timestamps, "timestamps")
        if self.moderation is not None:
            _checked(check_type, self.moderation, CqModeration, "moderation", "a CqModeration, or None")
        self._put("busy_poll", _checked(check_busy_poll, self.busy_poll))


class MtuSource(Enum):
    """Source of the MTU of a group."""

    SA = "from the SA's record of the group"
    IPOIB = (
        "from the IPoIB broadcast group, below whose MTU no group of rdma_cm is; where /dev/infiniband/umad* "
        "may be read and written the SA is asked, and may allow more"
    )


@dataclass(frozen=True, kw_only=True)
class Destination(_Value):
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
    qp_num: int = MULTICAST_QPN
    qkey: int = RDMA_UDP_QKEY
    dlid: int = 0
    sl: int = 0
    port_num: int = 1
    sgid_index: int = 0
    hop_limit: int = 64
    traffic_class: int = 0
    flow_label: int = 0
    is_global: bool = True
    static_rate: int = 0
    src_path_bits: int = 0
    group_mtu: int | None = None
    mtu_source: MtuSource | None = None

    _RANGES: ClassVar[Mapping[str, tuple[int, int | None]]] = {
        "qp_num": (0, 0xFFFFFF),
        "qkey": (0, 0xFFFFFFFF),
        "dlid": (0, 0xFFFF),
        "sl": (0, 15),
        "port_num": (1, 255),
        "sgid_index": (0, 0xFFFF),
        "hop_limit": (0, 255),
        "traffic_class": (0, 255),
        "flow_label": (0, 0xFFFFF),
        "static_rate": (0, 255),
        "src_path_bits": (0, 127),
        "group_mtu": (1, None),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        given: Any = self.gid
        if not isinstance(given, Gid):
            try:
                self._put("gid", Gid(given))
            except ValueError as error:
                raise ValueError(f"gid: {error}") from None
        _checked(check_bool, self.is_global, "is_global")
        if self.mtu_source is not None:
            _checked(check_type, self.mtu_source, MtuSource, "mtu_source", "a MtuSource, or None")

    def marked(self, traffic_class: int | None = None, sl: int | None = None) -> Destination:
        """Return a copy for messages with another traffic class and service level.

        The traffic class is `dscp << 2`; None keeps the value.

        On RoCE the destination of a join event has 0 for both, even where RDMA_OPTION_ID_TOS was set, because
        the kernel uses that option for connections and not in cma_iboe_join_multicast (K-EVENT-8). On
        InfiniBand the destination has the values of the group, from the SA.
        """
        if traffic_class is None and sl is None:
            return self
        traffic_class = self.traffic_class if traffic_class is None else traffic_class
        return replace(self, traffic_class=traffic_class, sl=self.sl if sl is None else sl)

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
        return replace(
            self,
            gid=message.source,
            qp_num=message.src_qp,
            dlid=message.src_lid,
            src_path_bits=message.path_bits,
            is_global=has_grh,
            sl=self.sl if message.sl is None else message.sl,
        )


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


@dataclass(frozen=True, kw_only=True)
class PortInfo(_Value):
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


@dataclass(frozen=True, kw_only=True)
class DeviceInfo(_Value):
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
