"""Typed Python for RDMA multicast.

The names are imported when they are first used: `import mcast` alone, as by its pytest plugin, costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

    __version__: str

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

_HOME = {"backend_names": "registry", "backend_status": "registry", "open_backend": "registry"}
"""Name -> its module; what is not here is of the contract, `api`."""

if not TYPE_CHECKING:  # a checker shall refuse other names

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            value: object = version("mcast")
        elif name in __all__:
            value = getattr(import_module(f"mcast.{_HOME.get(name, 'api')}"), name)
        else:
            raise AttributeError(f"module 'mcast' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
