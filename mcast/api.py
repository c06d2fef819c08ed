"""The contract of mcast: the classes that every provider implements, and the rules that it keeps.

A program opens a `Backend`, which makes an `EventChannel`, which makes a `CmId`, which makes a `QueuePair`.
The program joins a group with a `JoinAttrEx`, fetches a `CmEvent`, and sends to the `Destination` in that
event. The author of a provider subclasses these four classes, implements the methods whose names begin with
an underscore, and describes the whole as a `Provider`. Where to read on:

contract.backend     Backend, EventChannel
contract.cm_id       CmId: binding, joining, leaving
contract.queue_pair  QueuePair: sending, receiving, attaching; contract.region: registered memory
contract.values      arguments and results: requests, devices, destinations, events
contract.enums       the numbers of verbs and of the connection manager; contract.groups: members of groups
contract.batch       the messages that a receive call returns
contract.provider    Provider and Status; contract.registry finds a provider by name, contract.testbed tests
                     one
errors.tree          every error, by family; errors.cause: the causes of an error

Behind a rule stands the id of its source, a row in docs/facts: JEX-3 and the like in clauses.md, K-JOIN-7 in
kernel.md, SA-MLID-1 in sa.md. The public methods enforce five guards, the same for every provider:

G-GROUP  a unicast or zero address is no group: `McastAddress` refuses such an address
G-JOIN   a second join of a group that the id has joined, by any address or port of that group:
         `AlreadyJoined`
G-MTU    a message larger than one MTU of the port, or of the group where the group's is known to be smaller:
         `MessageTooLarge`, and no message of the batch is sent
G-MLID   one MGID with a second MLID on one queue pair: `SecondMlid`
G-RECV   receive memory of the program, while messages are queued or leased: EBUSY. Its end is never refused:
         what is queued is dropped and counted, what is leased stays readable

Units: seconds for timeouts (None waits without end, 0 does not wait), bytes for sizes, Gbit/s for rates. The
objects of one event channel may be used from several threads at once.

An exception of a signal's handler may come at any moment. A call that it interrupts where the call waits is
not done. One that it interrupts in the middle of a change breaks the object: later calls raise `Broken`, and
`close` and `stats` still work.
"""

from __future__ import annotations

from mcast.arguments.rows import HeaderBodyBatch, list_rows
from mcast.contract.backend import Backend, EventChannel
from mcast.contract.batch import RECORD_DTYPE, Batch, CopiedBatch, Lease, Leases, Message, Series
from mcast.contract.client_process import ClientProcess
from mcast.contract.closing import Closeable, Handle
from mcast.contract.cm_id import CmId
from mcast.contract.enums import (
    GRH_BYTES,
    JOIN_MASK,
    MULTICAST_QPN,
    Capability,
    CmEventType,
    CompMask,
    JoinFlag,
    PortEvent,
    PortState,
    QpState,
    QpType,
    TimestampClock,
)
from mcast.contract.groups import NO_IGMP_TABLE, GroupInfo, GroupMember, GroupSource, GroupTable
from mcast.contract.poison import (
    MAX_SLEEP,
    Guard,
    ReentrantCall,
    Refused,
    SignalSafeWeakSet,
    Waiters,
    fork_safe_lock,
    is_changing,
)
from mcast.contract.provider import DeviceIdentity, Identity, Provider, Status
from mcast.contract.queue_pair import QueuePair, require_comp_vector
from mcast.contract.region import DeviceBytes, DeviceRegion, Region
from mcast.contract.registry import (
    SIMULATED,
    backend_names,
    backend_status,
    open_at,
    open_backend,
    override_provider,
    provider,
)
from mcast.contract.testbed import PORT_FEATURES, Feature, Observer, Testbed
from mcast.contract.values import (
    CmEvent,
    CqModeration,
    Destination,
    DeviceInfo,
    JoinAttrEx,
    MtuSource,
    PortInfo,
    QpCounters,
    QpInit,
    UdParam,
    UnusableDevice,
)
from mcast.errors.cause import Cause, Phase
from mcast.errors.finding import Finding, Level
from mcast.errors.tree import (
    AddressNotAvailable,
    AlreadyJoined,
    BackendError,
    BackendUnavailable,
    Broken,
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
from mcast.wire.addresses import Gid, McastAddress, Mgid
from mcast.wire.kinds import RDMA_UDP_QKEY, LinkLayer, PortSpace

__all__ = [
    "MAX_SLEEP",
    "GRH_BYTES",
    "JOIN_MASK",
    "MULTICAST_QPN",
    "PORT_FEATURES",
    "RDMA_UDP_QKEY",
    "RECORD_DTYPE",
    "SIMULATED",
    "NO_IGMP_TABLE",
    "AddressNotAvailable",
    "SignalSafeWeakSet",
    "AlreadyJoined",
    "Backend",
    "BackendError",
    "BackendUnavailable",
    "Batch",
    "Broken",
    "Capability",
    "Cause",
    "Closeable",
    "Closed",
    "CmEvent",
    "CmEventType",
    "CmId",
    "CompMask",
    "CopiedBatch",
    "CqModeration",
    "Destination",
    "DeviceBytes",
    "DeviceGone",
    "DeviceIdentity",
    "DeviceInfo",
    "DeviceRegion",
    "EventChannel",
    "Feature",
    "Finding",
    "Gid",
    "GroupInfo",
    "GroupMember",
    "GroupSource",
    "GroupTable",
    "Guard",
    "GuardError",
    "ClientProcess",
    "Handle",
    "HeaderBodyBatch",
    "Identity",
    "InvalidArgument",
    "JoinAttrEx",
    "JoinFlag",
    "Level",
    "Lease",
    "Leases",
    "LinkLayer",
    "McastAddress",
    "McastError",
    "MembershipLost",
    "Message",
    "MessageTooLarge",
    "Mgid",
    "MtuSource",
    "NotSupported",
    "Observer",
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
    "ReentrantCall",
    "Refused",
    "Region",
    "SecondMlid",
    "Series",
    "Status",
    "Testbed",
    "TimedOut",
    "TimestampClock",
    "UdParam",
    "UnavailableReason",
    "UnknownBackend",
    "Unreachable",
    "UnusableDevice",
    "Waiters",
    "WcStatus",
    "backend_names",
    "backend_status",
    "fork_safe_lock",
    "is_changing",
    "mcast_error",
    "open_at",
    "open_backend",
    "override_provider",
    "provider",
    "require_comp_vector",
    "list_rows",
]
