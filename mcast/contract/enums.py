"""The numbers and enumerations of verbs and of the connection manager, as the C headers have them."""

from __future__ import annotations

from enum import Enum, IntEnum, IntFlag

GRH_BYTES = 40
"""Bytes that a UD receive keeps free for the GRH (K-DATA-12); never part of a payload here."""

MULTICAST_QPN = 0xFFFFFF
"""The QP number that every multicast message is addressed to (K-EVENT-1)."""


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
                of the port (MULTICAST_ERROR, ENETRESET); on RoCE it keeps them (SA-RESET-1, K-DEVICE-3)
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
