"""Typed Python for RDMA multicast."""

from importlib.metadata import version

from mcast.api import (
    Backend,
    Destination,
    Gid,
    JoinAttrEx,
    McastAddress,
    McastError,
    Mgid,
    QpInit,
)
from mcast.registry import backend_names, backend_status, open_backend

__version__ = version("mcast")

__all__ = [
    "Backend",
    "Destination",
    "Gid",
    "JoinAttrEx",
    "McastAddress",
    "McastError",
    "Mgid",
    "QpInit",
    "__version__",
    "backend_names",
    "backend_status",
    "open_backend",
]
