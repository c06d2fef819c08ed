"""The numbers and enumerations of verbs and of the connection manager, with the values of the C headers."""

from __future__ import annotations

from enum import Enum, IntEnum, IntFlag

GRH_BYTES = 40
"""The size of a GRH in bytes.

A UD receive keeps so much room free for it (K-DATA-12); no payload of mcast contains it.
"""

MULTICAST_QPN = 0xFFFFFF
"""The queue pair number that every multicast message is addressed to (K-EVENT-1)."""


class QpType(IntEnum):
    """ibv_qp_type: the transport of a queue pair. Only UD may be attached to a group (AT-3)."""

    RC = 2
    UC = 3
    UD = 4


class QpState(IntEnum):
    """ibv_qp_state.

    A UD queue pair goes from RESET by INIT and RTR to RTS; RESET and ERR are reached from any state.
    """

    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6


class CompMask(IntFlag):
    """Valid fields of JoinAttrEx, as a bitwise OR (JEX-1). A join needs both."""

    ADDRESS = 1
    JOIN_FLAGS = 2


JOIN_MASK = CompMask.ADDRESS | CompMask.JOIN_FLAGS
"""The one mask that librdmacm takes; rdma_join_multicast gives it itself."""


class JoinFlag(IntEnum):
    """rdma_cm_mc_join_flags: what the member does in the group. A join has exactly one of them (JEX-2)."""

    FULLMEMBER = 0
    """Create the group if need be, send to it, receive from it (JEX-3, JEX-4, JEX-5)."""
    SENDONLY_FULLMEMBER = 1
    """Create the group if need be, and send to it (JEX-6, JEX-7, JEX-8).

    No queue pair is attached, and nothing is received.
    """


class CmEventType(IntEnum):
    """rdma_cm_event_type. A number that this version of mcast does not know becomes UNKNOWN.

    The ADDRINFO events, USER and INTERNAL exist since rdma-core 60. No call of mcast causes them.
    """

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
    ADDRINFO_RESOLVED = 16
    ADDRINFO_ERROR = 17
    USER = 18
    INTERNAL = 19
    UNKNOWN = -1

    @classmethod
    def _missing_(cls, value: object) -> CmEventType:
        return cls.UNKNOWN


class PortState(IntEnum):
    """ibv_port_state: the state of a port. Messages flow only while the port is ACTIVE.

    A number that this version of mcast does not know becomes NOP.
    """

    NOP = 0
    DOWN = 1
    INIT = 2
    ARMED = 3
    ACTIVE = 4
    ACTIVE_DEFER = 5

    @classmethod
    def _missing_(cls, value: object) -> PortState:
        return cls.NOP


class PortEvent(IntEnum):
    """ibv_event_type: the events of a port, which `QueuePair.port_events` returns.

    ERR         the link is down: nothing is sent or received. On InfiniBand the kernel ends each membership
                of the port (MULTICAST_ERROR, ENETRESET); on RoCE the memberships stay (SA-RESET-1,
                K-DEVICE-3)
    ACTIVE      the link is up again
    GID_CHANGE  the GID table has changed: `Destination.sgid_index` may stand for another GID, or for none

    The others say that the subnet manager has changed the port's LID or P_Keys, has moved, or asks the port
    to register again. If a membership ends because of that, a MULTICAST_ERROR follows.
    """

    ACTIVE = 9
    ERR = 10
    LID_CHANGE = 11
    PKEY_CHANGE = 12
    SM_CHANGE = 13
    CLIENT_REREGISTER = 17
    GID_CHANGE = 18


class TimestampClock(Enum):
    """The clock of the time stamps of received messages, in nanoseconds.

    Only stamps of one clock can be compared, and each device has a DEVICE clock of its own.
    """

    REALTIME = "realtime"
    """Since the epoch, as time.time_ns.

    The device's clock, which the driver keeps in step with the host's.
    """
    DEVICE = "device"
    """Since any moment: the device's own clock. It starts again when its counter is full, and drifts."""
    VIRTUAL = "virtual"
    """Since the making of a simulated fabric, on the clock of Backend.now."""


class Capability(Enum):
    """A capability of a backend's fabric.

    Tests ask for capabilities, never for a backend's name.
    """

    IGMP = "full members are announced by IGMP"
    SA = "a subnet administrator keeps the groups"
    MLID = "groups have MLIDs, and attach checks their range"
    IPV6_GROUP = "IPv6 groups can be joined"
    RAW_MGID = "raw MGIDs (AF_IB) can be joined"
    CONNECTED_QP = "RC and UC QPs can be created"
    GROUP_TABLE = "groups() shows the full memberships of the own ports"
