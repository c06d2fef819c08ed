"""Typed Python for RDMA multicast.

    with mcast.open_endpoint("sim", "10.0.0.1") as endpoint:  # or "udp", "rdma": an address of this host
        with endpoint.join("239.1.2.3") as group:
            group.send(b"hello")
            message = group.recv(timeout=1.0)

Opening    open_endpoint gives an Endpoint; in mcast.aio it gives one whose calls are awaited.
           open_backend, backend_names, backend_status: the providers: "sim", "udp", "rdma" and others
Groups     Endpoint.join gives a Membership, which sends and receives; Endpoint.sender a Sender
Messages   Message, Batch, RECORD_DTYPE (a batch as columns); Destination, Peer
Addresses  McastAddress, Mgid, Gid
Policies   RejoinPolicy, LoopbackPolicy, CqModeration
Events     Lost, Rejoined, GaveUp, MessagesMissing, PortDown, PortUp, AddressChanged,
           ReceiveQueueLow
Statistics EndpointStats, GroupStats, SourceStats, LoopbackReport
Errors     McastError, an OSError whose text says what went wrong, why and what to do, and its families:
           TimedOut, Closed, Broken, MembershipLost, QpError, DeviceGone, MessageTooLarge, InvalidArgument,
           NotSupported, PermissionDenied, OutOfResources, AddressNotAvailable, Unreachable;
           BackendError for a provider that cannot be opened: UnknownBackend, BackendUnavailable;
           mcast.errors has all, also those of the contract, and their parts: Cause, Phase

Read help(mcast.open_endpoint) next. mcast.cast sends objects of any size to many receivers, and
mcast.collective the buffers of MPI and PyTorch jobs. Below the endpoints is the contract, mcast.api: event
channels, ids and queue pairs, for programs that control each step, and for authors of providers. Tests of
programs get a simulated fabric from pytest's fixture mcast_fabric (mcast.testing).

A name is imported when it is first used, so `import mcast` alone, as in the pytest plugin, costs nothing.
"""

from __future__ import annotations

import sys

from mcast.facade import lazy

TYPE_CHECKING = False  # checkers know it by its name; it is not of `typing`, which takes longest to load
if TYPE_CHECKING:
    from mcast import aio as aio
    from mcast import errors as errors
    from mcast.contract.backend import Backend as Backend
    from mcast.contract.batch import RECORD_DTYPE as RECORD_DTYPE
    from mcast.contract.batch import Batch as Batch
    from mcast.contract.batch import Message as Message
    from mcast.contract.registry import backend_names as backend_names
    from mcast.contract.registry import backend_status as backend_status
    from mcast.contract.registry import open_backend as open_backend
    from mcast.contract.values import CqModeration as CqModeration
    from mcast.contract.values import Destination as Destination
    from mcast.endpoint.blocking import Endpoint as Endpoint
    from mcast.endpoint.blocking import Membership as Membership
    from mcast.endpoint.blocking import Sender as Sender
    from mcast.endpoint.blocking import open_endpoint as open_endpoint
    from mcast.endpoint.policy import AddressChanged as AddressChanged
    from mcast.endpoint.policy import GaveUp as GaveUp
    from mcast.endpoint.policy import LoopbackPolicy as LoopbackPolicy
    from mcast.endpoint.policy import LoopbackReport as LoopbackReport
    from mcast.endpoint.policy import Lost as Lost
    from mcast.endpoint.policy import MessagesMissing as MessagesMissing
    from mcast.endpoint.policy import PortDown as PortDown
    from mcast.endpoint.policy import PortUp as PortUp
    from mcast.endpoint.policy import ReceiveQueueLow as ReceiveQueueLow
    from mcast.endpoint.policy import Rejoined as Rejoined
    from mcast.endpoint.policy import RejoinPolicy as RejoinPolicy
    from mcast.endpoint.stats import EndpointStats as EndpointStats
    from mcast.endpoint.stats import GroupStats as GroupStats
    from mcast.endpoint.stats import SourceStats as SourceStats
    from mcast.errors.tree import AddressNotAvailable as AddressNotAvailable
    from mcast.errors.tree import BackendError as BackendError
    from mcast.errors.tree import BackendUnavailable as BackendUnavailable
    from mcast.errors.tree import Broken as Broken
    from mcast.errors.tree import Closed as Closed
    from mcast.errors.tree import DeviceGone as DeviceGone
    from mcast.errors.tree import InvalidArgument as InvalidArgument
    from mcast.errors.tree import McastError as McastError
    from mcast.errors.tree import MembershipLost as MembershipLost
    from mcast.errors.tree import MessageTooLarge as MessageTooLarge
    from mcast.errors.tree import NotSupported as NotSupported
    from mcast.errors.tree import OutOfResources as OutOfResources
    from mcast.errors.tree import PermissionDenied as PermissionDenied
    from mcast.errors.tree import QpError as QpError
    from mcast.errors.tree import TimedOut as TimedOut
    from mcast.errors.tree import UnknownBackend as UnknownBackend
    from mcast.errors.tree import Unreachable as Unreachable
    from mcast.wire.addresses import Gid as Gid
    from mcast.wire.addresses import McastAddress as McastAddress
    from mcast.wire.addresses import Mgid as Mgid
    from mcast.wire.probe import Peer as Peer

    __version__: str
    """Version of the package."""

_NAMES = {
    "aio": "aio",
    "errors": "errors",
    "errors.install": "__version__",
    "contract.backend": "Backend",
    "contract.batch": "Batch Message RECORD_DTYPE",
    "contract.registry": "backend_names backend_status open_backend",
    "contract.values": "CqModeration Destination",
    "endpoint.blocking": "Endpoint Membership Sender open_endpoint",
    "endpoint.policy": "AddressChanged GaveUp LoopbackPolicy LoopbackReport Lost MessagesMissing "
    "PortDown PortUp ReceiveQueueLow Rejoined RejoinPolicy",
    "wire.probe": "Peer",
    "endpoint.stats": "EndpointStats GroupStats SourceStats",
    "errors.tree": "AddressNotAvailable BackendError BackendUnavailable Broken Closed DeviceGone "
    "InvalidArgument McastError MembershipLost MessageTooLarge NotSupported OutOfResources PermissionDenied "
    "QpError TimedOut UnknownBackend Unreachable",
    "wire.addresses": "Gid McastAddress Mgid",
}
"""A module -> its names.

Not mcast.api, which loads all that it offers. There is no `__all__`: help(mcast) would print every class in
full.
"""

if sys.platform != "linux":
    # Not an error, because pytest imports this for its plugin, also in suites that do not use mcast. The
    # first use of a name is the error.
    from warnings import warn

    from mcast.errors.install import NEEDS_LINUX

    warn(NEEDS_LINUX, RuntimeWarning, stacklevel=2)

if not TYPE_CHECKING:  # a type checker that saw this function would accept any name
    __getattr__, __dir__ = lazy(__name__, _NAMES)
