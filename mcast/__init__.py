"""Typed Python for RDMA multicast.

The names are imported when they are first used: `import mcast` alone, as by its pytest plugin, costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcast import aio as aio
    from mcast.api import (
        Backend,
        CqModeration,
        Destination,
        Gid,
        JoinAttrEx,
        McastAddress,
        McastError,
        Mgid,
        QpInit,
    )
    from mcast.contract.registry import backend_names, backend_status, open_backend
    from mcast.endpoint.blocking import Endpoint, Membership, Sender, open_endpoint
    from mcast.endpoint.policy import (
        AddressChanged,
        GaveUp,
        LoopbackPolicy,
        LoopbackReport,
        Lost,
        PortDown,
        PortUp,
        ReceiveQueueLow,
        Rejoined,
        RejoinPolicy,
    )
    from mcast.endpoint.probe import Peer
    from mcast.endpoint.stats import EndpointStats, GroupStats, SourceStats

    __version__: str

__all__ = [
    "AddressChanged",
    "Backend",
    "CqModeration",
    "Destination",
    "Endpoint",
    "EndpointStats",
    "GaveUp",
    "Gid",
    "GroupStats",
    "JoinAttrEx",
    "LoopbackPolicy",
    "LoopbackReport",
    "Lost",
    "McastAddress",
    "McastError",
    "Membership",
    "Mgid",
    "Peer",
    "PortDown",
    "PortUp",
    "QpInit",
    "ReceiveQueueLow",
    "RejoinPolicy",
    "Rejoined",
    "Sender",
    "SourceStats",
    "__version__",
    "backend_names",
    "backend_status",
    "open_backend",
    "open_endpoint",
]

_NAMES = {
    "endpoint.blocking": ("Endpoint", "Membership", "Sender", "open_endpoint"),
    "endpoint.policy": (
        "AddressChanged",
        "GaveUp",
        "LoopbackPolicy",
        "LoopbackReport",
        "Lost",
        "PortDown",
        "PortUp",
        "ReceiveQueueLow",
        "RejoinPolicy",
        "Rejoined",
    ),
    "endpoint.probe": ("Peer",),
    "contract.registry": ("backend_names", "backend_status", "open_backend"),
    "endpoint.stats": ("EndpointStats", "GroupStats", "SourceStats"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
"""Name -> its module; what is not here is of the contract, `api`."""

if not TYPE_CHECKING:  # a checker shall refuse other names

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            value: object = version("mcast")
        elif name == "aio":
            value = import_module("mcast.aio")
        elif name in __all__:
            value = getattr(import_module(f"mcast.{_HOME.get(name, 'api')}"), name)
        else:
            raise AttributeError(f"module 'mcast' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
