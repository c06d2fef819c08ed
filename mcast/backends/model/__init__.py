"""State machines of a host and its RDMA devices, for providers without real devices.

cm           the connection manager: ids, memberships, event channels
qp           a queue pair: states, receive queue, drops
queue_pairs  the queue pairs of a provider, and the attach tables of its devices
port         a device with its port, GIDs and interfaces
objects      the contract's ids and queue pairs on these
sa_client    the kernel's SA client of a port
log          the events that these parts write into a trace
times        the clock that is passed in

A provider passes in the parts that carry messages, answer SA requests and find routes (`Network` in `cm`). So
these files import no provider; a fabric of switches is in `mcast.backends.sim.core`. Other packages use the
names of this module for providers of their own, as `examples/provider` does.
"""

from mcast.backends.model.cm import CmaId, CmChannel, Network
from mcast.backends.model.log import NoLog
from mcast.backends.model.objects import ModelCmId, ModelQueuePair, check, event_of
from mcast.backends.model.port import Interface, Limits, Port
from mcast.backends.model.qp import Burst, Header, Qp
from mcast.backends.model.queue_pairs import QueuePairs
from mcast.backends.model.times import AtOnce

__all__ = [
    "AtOnce",
    "Burst",
    "CmChannel",
    "CmaId",
    "Header",
    "Interface",
    "Limits",
    "ModelCmId",
    "ModelQueuePair",
    "Network",
    "NoLog",
    "Port",
    "Qp",
    "QueuePairs",
    "check",
    "event_of",
]
