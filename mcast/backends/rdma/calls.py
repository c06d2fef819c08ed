"""The calls written in C with Python's own interface: a second module in the library that cffi made."""

from __future__ import annotations

import importlib
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcast.backends.rdma._calls import Calls, Lease, set_up, wait_event
else:

    def _load() -> Any:
        path = importlib.import_module("mcast.backends.rdma._native").__file__
        name = "mcast.backends.rdma._calls"
        spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    _module = _load()
    Calls, Lease = _module.Calls, _module.Lease
    set_up, wait_event = _module.set_up, _module.wait_event

__all__ = ["Calls", "Lease", "set_up", "wait_event"]
